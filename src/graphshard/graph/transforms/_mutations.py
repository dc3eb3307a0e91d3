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

from ..._base.typing import CanonicalEType
from ...errors import GraphTypeError, GraphValueError
from ...ops import Adjacency
from .._graph import Graph
from ..message_passing import frames_of
from ..structure import EID, NID, check_ids, id_tensor, kept_counts
from ._subgraph import edge_subgraph, node_subgraph
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
    eids = {
        etype: kept[etype].nonzero().squeeze(1).to(g.idtype)
        if etype in kept
        else g.edges("eid", etype=etype)
        for etype in g.canonical_etypes
    }
    new = edge_subgraph(g, eids, relabel_nodes=False, store_ids=store_ids)
    _carry_initializers(g, new)
    _carry_batch(g, new, {}, kept)
    return new


def remove_nodes(g: Graph, nids: Any, ntype: str | None = None, store_ids: bool = False) -> Graph:
    """The graph without some nodes and their edges; the other nodes keep their order.

    What stays is numbered anew, edges source by source as in `node_subgraph`. Batch numbers follow.
    Without ids nothing changes.

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
    stays = {
        name: torch.ones(count, dtype=torch.bool, device=g.device)
        for name, count in node_counts(g).items()
    }
    for name, ids in nids.items():
        ids = id_tensor(ids, "node ids", g.idtype, g.device)
        check_ids(ids, g.num_nodes(name), "a node id", f"nodes of type {name!r}")
        stays[name][ids.long()] = False
    if all(bool(mask.all()) for mask in stays.values()):
        return g.local_var()
    new = node_subgraph(g, stays)
    kept = {}
    for etype in g.canonical_etypes:
        fields, old = new.edges[etype].data, g.edges[etype].data.get(EID)
        eids = fields[EID] if store_ids else fields.pop(EID)
        kept[etype] = torch.zeros(g.num_edges(etype), dtype=torch.bool, device=g.device)
        kept[etype][eids.long()] = True
        if not store_ids and old is not None:
            fields[EID] = old.index_select(0, eids)
    for name in g.ntypes if not store_ids else ():
        fields, old = new.nodes[name].data, g.nodes[name].data.get(NID)
        rows = fields.pop(NID)
        if old is not None:
            fields[NID] = old.index_select(0, rows)
    _carry_initializers(g, new)
    _carry_batch(g, new, stays, kept)
    return new


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


def _carry_initializers(g: Graph, new: Graph) -> None:
    for old_frames, frames in zip(frames_of(g), frames_of(new), strict=True):
        for old, frame in zip(old_frames, frames, strict=True):
            frame.initializers = old.initializers


def _carry_batch(
    g: Graph,
    new: Graph,
    nodes: Mapping[str, Tensor],
    edges: Mapping[CanonicalEType, Tensor],
) -> None:
    """Give ``new`` the numbers per graph of ``g``, less the rows whose masks are false."""
    if g._batch_nodes is None or g._batch_edges is None:
        return
    new._batch_nodes = {
        ntype: kept_counts(each, nodes[ntype]) if ntype in nodes else each
        for ntype, each in g._batch_nodes.items()
    }
    new._batch_edges = {
        etype: kept_counts(each, edges[etype]) if etype in edges else each
        for etype, each in g._batch_edges.items()
    }


def _node_frames(g: Graph) -> dict[tuple[str, int, int], Any]:
    """(node type, 0 for sources or 1 for destinations, place) -> frame, each frame once."""
    sources, destinations, _ = frames_of(g)
    found = {(name, 0, i): sources[i] for i, name in enumerate(g.srctypes)}
    if destinations is not sources:
        found |= {(name, 1, i): destinations[i] for i, name in enumerate(g.dsttypes)}
    return found
