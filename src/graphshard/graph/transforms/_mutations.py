# SPDX-License-Identifier: Apache-2.0
"""Graphs with nodes or edges added or taken away.

Each function returns a new graph; the methods of `Graph` of the same names put its structure into
the graph that they are called on. Features of what stays come along. New rows get what the caller
gives, else what the feature's initializer makes, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...errors import GraphTypeError, GraphValueError
from ...ops import Adjacency
from .._graph import Graph
from ..message_passing import frames_of
from ..structure import EID, NID, check_ids, id_tensor, kept_counts
from ._transforms import check_plain, node_counts


def add_nodes(
    g: Graph, num: int, data: Mapping[str, Tensor] | None = None, ntype: str | None = None
) -> Graph:
    """The graph with more nodes of a type, behind those that it has. Batch numbers are dropped.

    Args:
        g: Graph.
        num: How many.
        data: Feature -> ``[num, ...]`` values of the new nodes.
        ntype: The node type, where there are several.

    Raises:
        ValueError: ``num`` is negative, the type is unknown, or values do not fit their feature.
        TypeError: ``num`` is no integer.

    Example:
        >>> from graphshard.graph import graph
        >>> add_nodes(graph(([0], [1])), 2).num_nodes()
        4
    """
    check_plain(g, "add_nodes")
    if isinstance(num, bool) or not hasattr(num, "__index__"):
        raise GraphTypeError(f"num must be a number of nodes (got {num!r})")
    if int(num) < 0:
        raise GraphValueError(f"num must not be negative (got {num})")
    place = g.get_ntype_id(ntype)
    new = _grown(g, {g.ntypes[place]: (int(num), dict(data or {}))}, {})
    new._batch_nodes = new._batch_edges = None
    return new


def add_edges(
    g: Graph, u: Any, v: Any, data: Mapping[str, Tensor] | None = None, etype: Any = None
) -> Graph:
    """The graph with more edges of a relation, behind those that it has.

    Nodes whose ids are past the last one are added. Batch numbers are dropped.

    Args:
        g: Graph.
        u: Source ids; one, or as many as ``v``.
        v: Destination ids; one, or as many as ``u``.
        data: Feature -> ``[number of new edges, ...]``.
        etype: The relation, where there are several.

    Raises:
        ValueError: lengths differ, an id is negative, the relation is unknown, or values do not
            fit their feature.
        TypeError: ids are not integers.

    Example:
        >>> from graphshard.graph import graph
        >>> add_edges(graph(([0], [1])), [1, 1], [0, 3]).edges()
        (tensor([0, 1, 1]), tensor([1, 0, 3]))
    """
    check_plain(g, "add_edges")
    chosen = g.to_canonical_etype(etype)
    src = id_tensor(u, "u", g.idtype, g.device)
    dst = id_tensor(v, "v", g.idtype, g.device)
    if src.shape != dst.shape:
        if 1 not in (src.shape[0], dst.shape[0]):
            raise GraphValueError(
                f"u and v must have equal lengths, or one of them length 1 (got {src.shape[0]} and "
                f"{dst.shape[0]})"
            )
        size = src.shape[0] if dst.shape[0] == 1 else dst.shape[0]
        src, dst = src.expand(size), dst.expand(size)
    least = dict.fromkeys(g.ntypes, 0)
    for name, ids, ntype in (("u", src, chosen[0]), ("v", dst, chosen[2])):
        if ids.numel() == 0:
            continue
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0:
            raise GraphValueError(f"ids in {name} must not be negative (got {low})")
        least[ntype] = max(least[ntype], high + 1)
    more: dict[str, tuple[int, Mapping[str, Tensor]]] = {
        ntype: (max(count - g.num_nodes(ntype), 0), {}) for ntype, count in least.items()
    }
    new = _grown(g, more, {chosen: (src, dst, dict(data or {}))})
    new._batch_nodes = new._batch_edges = None
    return new


def remove_edges(g: Graph, eids: Any, etype: Any = None, store_ids: bool = False) -> Graph:
    """The graph without some edges; the others keep their order. Batch numbers follow.

    Args:
        g: Graph.
        eids: Edge ids, in any order, repeated or not; or relation -> edge ids.
        etype: The relation, where there are several and ``eids`` is no dictionary.
        store_ids: Whether to store ids in ``g`` as ``edata[EID]``.

    Raises:
        ValueError: an id out of range, or an unknown relation.
        TypeError: ids are not integers.

    Example:
        >>> from graphshard.graph import graph
        >>> remove_edges(graph(([0, 1, 2], [1, 2, 0])), [0, 2]).edges()
        (tensor([1]), tensor([2]))
    """
    check_plain(g, "remove_edges")
    if not isinstance(eids, Mapping):
        eids = {g.to_canonical_etype(etype): eids}
    kept = {}
    for name, ids in eids.items():
        chosen = g.to_canonical_etype(name)
        ids = id_tensor(ids, "edge ids", g.idtype, g.device)
        check_ids(ids, g.num_edges(chosen), "an edge id", f"edges of {chosen}")
        stays = torch.ones(g.num_edges(chosen), dtype=torch.bool, device=g.device)
        stays[ids.long()] = False
        kept[chosen] = stays
    return _shrunk(g, {}, kept, store_ids)


def remove_nodes(g: Graph, nids: Any, ntype: str | None = None, store_ids: bool = False) -> Graph:
    """The graph without some nodes and their edges; what stays keeps its order.

    Nodes and edges are numbered anew. Batch numbers follow.

    Args:
        g: Graph.
        nids: Node ids, in any order, repeated or not; or node type -> ids.
        ntype: The node type, where there are several and ``nids`` is no dictionary.
        store_ids: Whether to store ids in ``g`` as ``ndata[NID]`` and ``edata[EID]``.

    Raises:
        ValueError: an id out of range, or an unknown type.
        TypeError: ids are not integers.

    Example:
        >>> from graphshard.graph import graph
        >>> remove_nodes(graph(([0, 1, 2], [1, 2, 0])), [0]).edges()
        (tensor([0]), tensor([1]))
    """
    check_plain(g, "remove_nodes")
    if not isinstance(nids, Mapping):
        nids = {g.ntypes[g.get_ntype_id(ntype)]: nids}
    kept_nodes = {}
    for name, ids in nids.items():
        count = g.num_nodes(name)
        ids = id_tensor(ids, "node ids", g.idtype, g.device)
        check_ids(ids, count, "a node id", f"nodes of type {name!r}")
        stays = torch.ones(count, dtype=torch.bool, device=g.device)
        stays[ids.long()] = False
        kept_nodes[name] = stays
    kept_edges = {}
    for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
        ends = [
            kept_nodes[name].index_select(0, end)
            for name, end in zip((etype[0], etype[2]), adj.coo(), strict=True)
            if name in kept_nodes
        ]
        if ends:
            kept_edges[etype] = ends[0] & ends[-1]
    return _shrunk(g, kept_nodes, kept_edges, store_ids)


def _grown(
    g: Graph,
    nodes: Mapping[str, tuple[int, Mapping[str, Tensor]]],
    edges: Mapping[CanonicalEType, tuple[Tensor, Tensor, Mapping[str, Tensor]]],
) -> Graph:
    """The graph with more rows: node type -> (number, features), relation -> (u, v, features)."""
    counts = {name: count + nodes.get(name, (0, {}))[0] for name, count in node_counts(g).items()}
    relations = {}
    for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
        src, dst = adj.coo()
        if etype in edges:
            u, v, _ = edges[etype]
            src, dst = torch.cat([src, u]), torch.cat([dst, v])
        sizes = counts[etype[0]], counts[etype[2]]
        same = etype not in edges and sizes == (adj.num_src, adj.num_dst)
        relations[etype] = adj if same else Adjacency(src, dst, *sizes, check=False)
    new = Graph(counts, relations)
    for (ntype, side, index), frame in _node_frames(g).items():
        num, data = nodes.get(ntype, (0, {}))
        frames_of(new)[side][index] = frame.extended(num, data)
    for index, etype in enumerate(g.canonical_etypes):
        u, _, data = edges.get(etype, (torch.empty(0), None, {}))
        frames_of(new)[2][index] = frames_of(g)[2][index].extended(int(u.shape[0]), data)
    return new


def _shrunk(
    g: Graph,
    nodes: Mapping[str, Tensor],
    edges: Mapping[CanonicalEType, Tensor],
    store_ids: bool,
) -> Graph:
    """The graph of the rows whose masks are true; types that have no mask stay whole."""
    counts = node_counts(g)
    numbers = {}
    for ntype, stays in nodes.items():
        counts[ntype] = int(stays.sum())
        numbers[ntype] = (stays.long().cumsum(0) - 1).to(g.idtype)
    relations = {}
    rows = {etype: mask.nonzero().squeeze(1).to(g.idtype) for etype, mask in edges.items()}
    for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
        if etype not in rows and etype[0] not in nodes and etype[2] not in nodes:
            relations[etype] = adj
            continue
        ends = []
        for ntype, end in zip((etype[0], etype[2]), adj.coo(), strict=True):
            end = end.index_select(0, rows[etype]) if etype in rows else end
            ends.append(numbers[ntype].index_select(0, end) if ntype in numbers else end)
        sizes = counts[etype[0]], counts[etype[2]]
        relations[etype] = Adjacency(ends[0], ends[1], *sizes, check=False)
    new = Graph(counts, relations)
    for (ntype, side, index), frame in _node_frames(g).items():
        kept = nodes[ntype].nonzero().squeeze(1).to(g.idtype) if ntype in nodes else None
        made = frame.scope() if kept is None else frame.selected(kept)
        if store_ids and nodes:
            made[NID] = g.nodes(ntype) if kept is None else kept
        frames_of(new)[side][index] = made
    for index, etype in enumerate(g.canonical_etypes):
        frame = frames_of(g)[2][index]
        chosen = rows.get(etype)
        made = frame.scope() if chosen is None else frame.selected(chosen)
        if store_ids:
            made[EID] = g.edges("eid", etype=etype) if chosen is None else chosen
        frames_of(new)[2][index] = made
    if g._batch_nodes is not None and g._batch_edges is not None:
        new._batch_nodes = {
            ntype: kept_counts(each, nodes[ntype]) if ntype in nodes else each
            for ntype, each in g._batch_nodes.items()
        }
        new._batch_edges = {
            etype: kept_counts(each, edges[etype]) if etype in edges else each
            for etype, each in g._batch_edges.items()
        }
    return new


def _node_frames(g: Graph) -> dict[tuple[str, int, int], Any]:
    """(node type, 0 for sources or 1 for destinations, place) -> frame, each frame once."""
    sources, destinations, _ = frames_of(g)
    found = {(name, 0, i): sources[i] for i, name in enumerate(g.srctypes)}
    if destinations is not sources:
        found |= {(name, 1, i): destinations[i] for i, name in enumerate(g.dsttypes)}
    return found
