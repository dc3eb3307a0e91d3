# SPDX-License-Identifier: Apache-2.0
"""Parts of a graph, chosen by nodes or by edges.

All four take ids, or a bool mask with one entry per node or edge; on a typed graph a dict of them,
where what is not named counts as empty. Features of the nodes and edges that are kept come along.
The original ids are stored as ``edata[EID]`` and, if nodes are renumbered, as ``ndata[NID]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphTypeError, GraphValueError
from ...ops import Adjacency
from .._graph import Graph
from ..structure import EID, NID, by_first_occurrence, check_ids, id_tensor, places_of
from ._transforms import check_plain, node_counts, select_fields, share_nodes


def in_subgraph(
    graph: Graph,
    nodes: Any,
    *,
    relabel_nodes: bool = False,
    store_ids: bool = True,
    output_device: Any = None,
) -> Graph:
    """The graph of all edges that enter some nodes.

    Edges come node by node in the order given, each node's by ascending edge id.

    Args:
        graph: Graph.
        nodes: Ids or mask, per type on a graph with several node types. A node that is given twice
            has its in-edges twice.
        relabel_nodes: Whether to keep only the end points of these edges, numbered as they first
            occur (per relation, sources before destinations); by default all nodes stay.
        store_ids: Whether to store original ids.
        output_device: Where the subgraph is to be; by default where ``graph`` is.

    Returns:
        The subgraph, with the same node types and relations.

    Raises:
        ValueError: An unknown type, an id out of range, or a mask of another length.
        TypeError: Ids are not integers, or types are not named.

    Example:
        >>> sub = in_subgraph(graph(([0, 1, 2], [1, 2, 1])), [1])
        >>> sub.edges(), sub.edata[EID]
        ((tensor([0, 2]), tensor([1, 1])), tensor([0, 2]))
    """
    chosen = _chosen_nodes(graph, nodes, "in_subgraph")
    eids = {
        etype: graph.in_edges(chosen[etype[2]], "eid", etype)
        if etype[2] in chosen
        else _no_ids(graph)
        for etype in graph.canonical_etypes
    }
    return _from_edges(graph, eids, relabel_nodes, store_ids).to(output_device)


def out_subgraph(
    graph: Graph,
    nodes: Any,
    *,
    relabel_nodes: bool = False,
    store_ids: bool = True,
    output_device: Any = None,
) -> Graph:
    """The graph of all edges that leave some nodes; see `in_subgraph`, which is its counterpart."""
    chosen = _chosen_nodes(graph, nodes, "out_subgraph")
    eids = {
        etype: graph.out_edges(chosen[etype[0]], "eid", etype)
        if etype[0] in chosen
        else _no_ids(graph)
        for etype in graph.canonical_etypes
    }
    return _from_edges(graph, eids, relabel_nodes, store_ids).to(output_device)


def edge_subgraph(
    graph: Graph,
    edges: Any,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Any = None,
) -> Graph:
    """The graph of some edges, in the order given.

    Args:
        graph: Graph.
        edges: Ids or mask, per relation on a graph with several.
        relabel_nodes: Whether to keep only the end points of these edges, numbered as they first
            occur (per relation, sources before destinations); if not, all nodes stay.
        store_ids: Whether to store original ids.
        output_device: Where the subgraph is to be; by default where ``graph`` is.

    Returns:
        The subgraph, with the same node types and relations.

    Raises:
        ValueError: An unknown relation, an id out of range, or a mask of another length.
        TypeError: Ids are not integers, or relations are not named.

    Example:
        >>> sub = edge_subgraph(graph(([0, 1, 2], [1, 2, 3])), [2])
        >>> sub.edges(), sub.ndata[NID]
        ((tensor([0]), tensor([1])), tensor([2, 3]))
    """
    check_plain(graph, "edge_subgraph")
    if not isinstance(edges, Mapping):
        if len(graph.canonical_etypes) > 1:
            raise GraphTypeError(
                f"edges must be a dict of relations, since the graph has {graph.canonical_etypes}"
            )
        edges = {graph.canonical_etypes[0]: edges}
    named = {graph.to_canonical_etype(etype): ids for etype, ids in edges.items()}
    eids = {
        etype: _ids_of(
            graph, named[etype], graph.num_edges(etype), "an edge id", f"edges of {etype}"
        )
        if etype in named
        else _no_ids(graph)
        for etype in graph.canonical_etypes
    }
    return _from_edges(graph, eids, relabel_nodes, store_ids).to(output_device)


def node_subgraph(
    graph: Graph,
    nodes: Any,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Any = None,
) -> Graph:
    """The graph of some nodes and of all edges between them.

    Edges come source by source in the order given, each source's by ascending edge id.

    Args:
        graph: Graph.
        nodes: Ids or mask, per type on a graph with several node types. A node that is given
            several times is there several times, each time with its out-edges; edges into it end
            at the first. (DGL 1.1.3 gives the same, but where a node follows that was not given
            before a repeated one: it counts places without repeats there, and edges end at other
            nodes.)
        relabel_nodes: Whether to keep only these nodes, numbered in the order given; if not, all
            nodes stay and only edges are left out.
        store_ids: Whether to store original ids.
        output_device: Where the subgraph is to be; by default where ``graph`` is.

    Returns:
        The subgraph, with the same node types and relations.

    Raises:
        ValueError: An unknown type, an id out of range, or a mask of another length.
        TypeError: Ids are not integers, or types are not named.

    Example:
        >>> sub = node_subgraph(graph(([0, 1, 2], [1, 2, 0])), [2, 0])
        >>> sub.edges(), sub.edata[EID]
        ((tensor([0]), tensor([1])), tensor([2]))
    """
    given = _chosen_nodes(graph, nodes, "node_subgraph")
    chosen = {ntype: given.get(ntype, _no_ids(graph)) for ntype in graph.ntypes}
    place = {ntype: places_of(ids, graph.num_nodes(ntype)) for ntype, ids in chosen.items()}
    eids, sources = {}, {}
    for etype in graph.canonical_etypes:
        leaving = chosen[etype[0]]
        candidates = graph.out_edges(leaving, "eid", etype)
        ends = graph.adjacency(etype).coo()[1].index_select(0, candidates)
        is_within = place[etype[2]].index_select(0, ends) >= 0
        eids[etype] = candidates[is_within]
        rows = torch.arange(leaving.shape[0], dtype=graph.idtype, device=graph.device)
        counts = graph.out_degrees(leaving, etype).long()
        sources[etype] = rows.repeat_interleave(counts)[is_within]
    kept = (chosen, place) if relabel_nodes else None
    return _build(graph, eids, kept, store_ids, sources).to(output_device)


_Numbering = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Per node type: the nodes that are kept, in order; and for every node its place there, or -1."""


def _from_edges(
    g: Graph, eids: dict[CanonicalEType, Tensor], relabel_nodes: bool, store_ids: bool
) -> Graph:
    if not relabel_nodes:
        return _build(g, eids, None, store_ids)
    ends: dict[str, list[Tensor]] = {ntype: [] for ntype in g.ntypes}
    for etype, ids in eids.items():
        for ntype, side in zip((etype[0], etype[2]), g.adjacency(etype).coo(), strict=True):
            ends[ntype].append(side.index_select(0, ids))
    kept = {
        ntype: by_first_occurrence(torch.cat(sides) if sides else _no_ids(g))
        for ntype, sides in ends.items()
    }
    place = {ntype: places_of(ids, g.num_nodes(ntype)) for ntype, ids in kept.items()}
    return _build(g, eids, (kept, place), store_ids)


def _build(
    g: Graph,
    eids: dict[CanonicalEType, Tensor],
    numbering: _Numbering | None,
    store_ids: bool,
    sources: Mapping[CanonicalEType, Tensor] | None = None,
) -> Graph:
    """A graph of some edges; ``sources`` are their new ones, where a node may be kept twice."""
    counts = node_counts(g)
    if numbering is not None:
        counts = {ntype: ids.shape[0] for ntype, ids in numbering[0].items()}
    relations = {}
    for etype, ids in eids.items():
        src, dst = (side.index_select(0, ids) for side in g.adjacency(etype).coo())
        if numbering is not None:
            place = numbering[1][etype[0]]
            src = place.index_select(0, src) if sources is None else sources[etype]
            dst = numbering[1][etype[2]].index_select(0, dst)
        relations[etype] = Adjacency(src, dst, counts[etype[0]], counts[etype[2]], check=False)
    new = Graph(counts, relations)
    for etype, ids in eids.items():
        select_fields(g.edges[etype].data, new.edges[etype].data, ids)
        if store_ids:
            new.edges[etype].data[EID] = ids
    if numbering is None:
        share_nodes(g, new)
        return new
    for ntype, ids in numbering[0].items():
        select_fields(g.nodes[ntype].data, new.nodes[ntype].data, ids)
        if store_ids:
            new.nodes[ntype].data[NID] = ids
    return new


def _chosen_nodes(g: Graph, nodes: Any, name: str) -> dict[str, Tensor]:
    check_plain(g, name)
    if not isinstance(nodes, Mapping):
        if len(g.ntypes) > 1:
            raise GraphTypeError(
                f"nodes must be a dict of node types, since the graph has {g.ntypes}"
            )
        nodes = {g.ntypes[0]: nodes}
    return {
        ntype: _ids_of(g, ids, g.num_nodes(ntype), "a node id", f"nodes of type {ntype!r}")
        for ntype, ids in nodes.items()
    }


def _ids_of(g: Graph, ids: Any, count: int, one: str, many: str) -> Tensor:
    """Ids of a user's ids or mask, in the graph's idtype."""
    if isinstance(ids, Tensor) and ids.dtype == torch.bool:
        if ids.dim() != 1 or ids.shape[0] < count or bool(ids[count:].any()):
            raise GraphValueError(
                f"a mask of {many} must have {count} entries (got shape {tuple(ids.shape)})"
            )
        return ids.nonzero().squeeze(1).to(device=g.device, dtype=g.idtype)
    checked = id_tensor(ids, many, g.idtype, g.device)
    check_ids(checked, count, one, many)
    return checked


def _no_ids(g: Graph) -> Tensor:
    return torch.empty(0, dtype=g.idtype, device=g.device)
