# SPDX-License-Identifier: Apache-2.0
"""Graphs made from graphs: most functions are methods of `Graph`, too.

Each function returns a new graph. Features that it carries over are the same tensors, not copies,
wherever no row has to move. The methods of `Graph` that add or remove nodes and edges put the new
structure into the graph that they are called on.

Subgraphs have the node types and relations of their graph. They take ids, or a bool mask with one
entry per node or edge; on a typed graph a dict of them, where what is not named counts as empty.
Unless ``store_ids`` is false, the original ids are stored as ``edata[EID]`` and, if nodes are
renumbered, as ``ndata[NID]``. ``output_device`` is where the subgraph is to be, by default where
its graph is. New rows of a graph that grows get what the caller gives, else what the feature's
initializer makes, else 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from .._base.typing import CanonicalEType, Device, EdgeIds, EType, Ids, NodeIds
from ..errors import GraphTypeError, GraphValueError
from ..ops import Adjacency, gspmm
from .message_passing import frames_of
from .structure import (
    EID,
    ETYPE,
    NID,
    NTYPE,
    by_first_occurrence,
    check_ids,
    id_tensor,
    kept_counts,
    paired,
    places_of,
)

if TYPE_CHECKING:
    from ._graph import Graph

_REDUCES = ("sum", "mean", "max", "min")
_AGGREGATORS = ("arbitrary", "sum", "mean")
_Numbering = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Per node type: the nodes that are kept, in order; and for every node its place there, or -1."""


# ------------------------------------------------------------------ edges, on the same nodes


def add_self_loop(
    g: Graph,
    edge_feat_names: Sequence[str] | None = None,
    fill_data: float | str = 1.0,
    etype: EType | None = None,
) -> Graph:
    """Give every node one more self loop in a relation, behind the edges that exist.

    Loops that are already there stay; call `remove_self_loop` first for exactly one per node.

    Args:
        g: Graph; all features are carried over. Of a sharded graph its own method is called.
        edge_feat_names: Edge features that ``fill_data`` is for; None means all. On the new edges
            the others are 0.
        fill_data: A number; or ``'sum'``, ``'mean'``, ``'max'`` or ``'min'`` of the feature over
            the in-edges of the node, 0 where it has none.

    Raises:
        ValueError: The relation joins two node types, or ``fill_data`` is an unknown reduction.
        KeyError: There is no such edge feature.
        TypeError: ``fill_data`` is neither a number nor a string, or reduces features of integers.

    Example:
        >>> from graphshard.graph import graph
        >>> add_self_loop(graph(([0, 0], [1, 2]))).edges()
        (tensor([0, 0, 0, 1, 2]), tensor([1, 2, 0, 1, 2]))
    """
    if not hasattr(g, "adjacency"):  # a sharded graph
        return g.add_self_loop(edge_feat_names, fill_data, etype)
    chosen = _loop_relation(g, etype, "add_self_loop")
    adj, fields = g.adjacency(chosen), g.edges[chosen].data
    added = loop_values(chosen, fields, edge_feat_names, fill_data, adj.num_src, lambda: adj)
    src, dst = adj.coo()
    loops = torch.arange(adj.num_src, dtype=adj.idtype, device=adj.device)
    new = Adjacency(
        torch.cat([src, loops]), torch.cat([dst, loops]), adj.num_src, adj.num_dst, check=False
    )
    values = {name: torch.cat([old, added[name]]) for name, old in fields.items()}
    return _with_relation(g, chosen, new, values)


def loop_values(
    etype: CanonicalEType,
    fields: Mapping[str, Tensor],
    names: Sequence[str] | None,
    fill_data: float | str,
    num_nodes: int,
    adjacency: Callable[[], Adjacency],
    numbered: str | None = None,
) -> dict[str, Tensor]:
    """Values of new self loops, one per node; see `add_self_loop`.

    Args:
        adjacency: The edges that the features are of; called where they are reduced.
        numbered: A feature that is not reduced.
    """
    if isinstance(fill_data, str) and fill_data not in _REDUCES:
        raise GraphValueError(
            f"fill_data must be a number or one of {_REDUCES} (got {fill_data!r})"
        )
    if not isinstance(fill_data, int | float | str):
        raise GraphTypeError(
            f"fill_data must be a number or one of {_REDUCES} (got {type(fill_data)})"
        )
    filled = set(fields) if names is None else set(names)
    for name in sorted(filled - set(fields)):
        raise KeyError(f"no edge feature {name!r} on {etype}; there are {sorted(fields)}")
    values = {}
    for name, old in fields.items():
        values[name] = old.new_zeros((num_nodes, *old.shape[1:]))
        if name not in filled:
            continue
        if not isinstance(fill_data, str):
            values[name].fill_(fill_data)
        elif name != numbered:
            if not old.dtype.is_floating_point:
                raise GraphTypeError(
                    f"fill_data={fill_data!r} reduces features of floating point numbers (got "
                    f"edge feature {name!r} of {old.dtype}); convert it with .float(), give a "
                    "number, or leave it out with edge_feat_names"
                )
            values[name] = gspmm(adjacency(), "copy_rhs", fill_data, None, old)
    return values


def remove_self_loop(g: Graph, etype: EType | None = None) -> Graph:
    """Drop every edge of a relation from a node to itself; the other edges keep their order.

    Features are carried over. Of a batched graph, the numbers of nodes and edges per graph follow.
    Of a sharded graph its own method is called.

    Raises:
        ValueError: The relation joins two node types.

    Example:
        >>> from graphshard.graph import graph
        >>> remove_self_loop(graph(([0, 0, 1], [0, 1, 1]))).edges()
        (tensor([0]), tensor([1]))
    """
    if not hasattr(g, "adjacency"):
        return g.remove_self_loop(etype)
    chosen = _loop_relation(g, etype, "remove_self_loop")
    adj = g.adjacency(chosen)
    src, dst = adj.coo()
    edge_ids = (src != dst).nonzero().squeeze(1)
    new = Adjacency(src[edge_ids], dst[edge_ids], adj.num_src, adj.num_dst, check=False)
    values = {name: old.index_select(0, edge_ids) for name, old in g.edges[chosen].data.items()}
    without_loops = _with_relation(g, chosen, new, values)
    _carry_batch(g, without_loops, {}, {chosen: src != dst})
    return without_loops


def to_bidirected(g: Graph, copy_ndata: bool = False, readonly: bool | None = None) -> Graph:
    """The simple graph that has both directions of every edge.

    Parallel edges become one; a self loop stays one edge. Edges come by source, then destination.

    Args:
        copy_ndata: Whether to carry node features over. Edge features are always dropped.
        readonly: Accepted so that calls written for DGL run; has no effect.

    Raises:
        ValueError: A relation joins two node types.

    Example:
        >>> from graphshard.graph import graph
        >>> to_bidirected(graph(([0, 0, 1], [1, 1, 2]))).edges()
        (tensor([0, 1, 1, 2]), tensor([1, 0, 2, 1]))
    """
    check_plain(g, "to_bidirected")
    relations = {}
    for etype in g.canonical_etypes:
        _check_one_type(etype, "to_bidirected")
        adj = g.adjacency(etype)
        src, dst = (end.long() for end in adj.coo())
        size = max(adj.num_src, 1)
        keys = torch.unique(torch.cat([src * size + dst, dst * size + src]))
        ends = (keys // size).to(adj.idtype), (keys % size).to(adj.idtype)
        relations[etype] = Adjacency(*ends, adj.num_src, adj.num_dst, check=False)
    return _with_relations(g, relations, copy_ndata)


def add_reverse_edges(
    g: Graph,
    readonly: bool | None = None,
    copy_ndata: bool = True,
    copy_edata: bool = False,
    ignore_bipartite: bool = False,
    exclude_self: bool = True,
) -> Graph:
    """Give every edge its reverse, behind the edges that exist; edges may then be parallel.

    Args:
        readonly: Accepted so that calls written for DGL run; has no effect.
        copy_edata: Whether to carry edge features over; a reverse has those of its edge, whose id
            is stored as ``edata[EID]``.
        ignore_bipartite: Leave relations between two node types as they are, rather than refuse.
        exclude_self: Whether self loops get no reverse.

    Raises:
        ValueError: A relation joins two node types and ``ignore_bipartite`` is not set.

    Example:
        >>> from graphshard.graph import graph
        >>> add_reverse_edges(graph(([0, 0], [0, 1]))).edges()
        (tensor([0, 0, 1]), tensor([0, 1, 0]))
    """
    check_plain(g, "add_reverse_edges")
    relations, origins = {}, {}
    for etype in g.canonical_etypes:
        adj = g.adjacency(etype)
        src, dst = adj.coo()
        origin = torch.arange(adj.num_edges, dtype=adj.idtype, device=adj.device)
        if etype[0] == etype[2]:
            turned = origin[src != dst] if exclude_self else origin
            ends = torch.cat([src, dst[turned]]), torch.cat([dst, src[turned]])
            adj = Adjacency(*ends, adj.num_src, adj.num_dst, check=False)
            origin = torch.cat([origin, turned])
        elif not ignore_bipartite:
            _check_one_type(etype, "add_reverse_edges", "; or pass ignore_bipartite=True")
        relations[etype], origins[etype] = adj, origin
    new = _with_relations(g, relations, copy_ndata)
    for etype, origin in origins.items() if copy_edata else ():
        select_fields(g.edges[etype].data, new.edges[etype].data, origin)
        new.edges[etype].data[EID] = origin
    return new


def reverse(
    g: Graph,
    copy_ndata: bool = True,
    copy_edata: bool = False,
    *,
    share_ndata: bool | None = None,
    share_edata: bool | None = None,
) -> Graph:
    """Turn every edge around: relation ``(U, E, V)`` becomes ``(V, E, U)``, with the same edge ids.

    Nothing is copied: the new graph reads the sparse formats of the old one the other way round.

    Args:
        share_ndata: Older name of ``copy_ndata``, which it overrides.
        share_edata: Older name of ``copy_edata``, which it overrides.

    Example:
        >>> from graphshard.graph import graph
        >>> reverse(graph(([0, 0], [1, 2]))).edges()
        (tensor([1, 2]), tensor([0, 0]))
    """
    check_plain(g, "reverse")
    copy_ndata = copy_ndata if share_ndata is None else share_ndata
    copy_edata = copy_edata if share_edata is None else share_edata
    turned = {etype: (etype[2], etype[1], etype[0]) for etype in g.canonical_etypes}
    relations = {new: g.adjacency(old).reverse() for old, new in turned.items()}
    new_graph = _with_relations(g, relations, copy_ndata)
    for old, new in turned.items() if copy_edata else ():
        new_graph.edges[new].data.update(g.edges[old].data)
    return new_graph


def _with_relation(
    g: Graph, changed: CanonicalEType, adj: Adjacency, values: dict[str, Tensor]
) -> Graph:
    """``g`` with one relation replaced and all other things shared."""
    relations = dict(zip(g.canonical_etypes, g.relations, strict=True)) | {changed: adj}
    new = _with_relations(g, relations, copy_ndata=True)
    for etype in g.canonical_etypes:
        fields = new.edges[etype].data
        fields.update(values if etype == changed else g.edges[etype].data)
    return new


def _loop_relation(g: Graph, etype: EType | None, name: str) -> CanonicalEType:
    check_plain(g, name)
    chosen = g.to_canonical_etype(etype)
    _check_one_type(chosen, name)
    return chosen


def _check_one_type(etype: CanonicalEType, name: str, cure: str = "") -> None:
    if etype[0] != etype[2]:
        raise GraphValueError(
            f"{name} takes relations from a node type to itself (got {etype}); reverse() gives the "
            f"other direction as a relation of its own{cure}"
        )


# ------------------------------------------------------------------ parallel edges


def to_simple(
    g: Graph,
    return_counts: str | None = "count",
    writeback_mapping: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = False,
    aggregator: str = "arbitrary",
) -> Any:
    """The graph with one edge for all parallel ones; edges come by source, then destination.

    Args:
        return_counts: Edge feature that gets the number of edges joined; None for none.
        writeback_mapping: Whether to return as well which new edge each edge became.
        aggregator: Of parallel edges' features: ``"arbitrary"`` (that of the edge of lowest id,
            which ``edata[EID]`` then names), ``"sum"`` or ``"mean"``.

    Returns:
        The graph; with ``writeback_mapping`` a pair of it and, per old edge, the new edge's id: a
        tensor where there is one relation, else relation -> tensor.

    Raises:
        ValueError: the graph is a block, or the aggregator is unknown.

    Example:
        >>> from graphshard.graph import graph
        >>> to_simple(graph(([0, 0, 1], [1, 1, 0]))).edata["count"]
        tensor([2, 1])
    """
    check_plain(g, "to_simple")
    if aggregator not in _AGGREGATORS:
        raise GraphValueError(f"aggregator must be one of {_AGGREGATORS} (got {aggregator!r})")
    relations, maps, counts = {}, {}, {}
    for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
        src, dst = (end.long() for end in adj.coo())
        width = max(adj.num_dst, 1)
        keys, new_edge_of, count = torch.unique(
            src * width + dst, return_inverse=True, return_counts=True
        )
        ends = (keys // width).to(g.idtype), (keys % width).to(g.idtype)
        relations[etype] = Adjacency(*ends, adj.num_src, adj.num_dst, check=False)
        maps[etype], counts[etype] = new_edge_of, count.to(g.idtype)
    new = _with_relations(g, relations, copy_ndata)
    for etype in g.canonical_etypes:
        fields = new.edges[etype].data
        if copy_edata:
            old = dict(g.edges[etype].data)
            if aggregator == "arbitrary":
                old[EID] = g.edges("eid", etype=etype)
            for name, value in old.items():
                fields[name] = _joined_rows(value, maps[etype], counts[etype], aggregator)
        if return_counts is not None:
            fields[return_counts] = counts[etype]
    if not writeback_mapping:
        return new
    mapping = {etype: new_edge_of.to(g.idtype) for etype, new_edge_of in maps.items()}
    return new, mapping if len(mapping) > 1 else mapping[g.canonical_etypes[0]]


def _joined_rows(value: Tensor, new_rows: Tensor, counts: Tensor, aggregator: str) -> Tensor:
    """What rows become, of which ``counts[i]`` get the new row number i."""
    size = counts.shape[0]
    if aggregator == "arbitrary":
        return value.index_select(0, places_of(new_rows, size))
    total = value.new_zeros((size, *value.shape[1:])).index_add(0, new_rows, value)
    if aggregator == "sum":
        return total
    divisor = counts.view(-1, *[1] * (value.dim() - 1))
    return (total / divisor).to(value.dtype)


# ------------------------------------------------------------------ parts


def in_subgraph(
    graph: Graph,
    nodes: NodeIds,
    *,
    relabel_nodes: bool = False,
    store_ids: bool = True,
    output_device: Device | None = None,
) -> Graph:
    """The graph of all edges that enter some nodes.

    Edges come node by node in the order given, each node's by ascending edge id.

    Args:
        nodes: Ids or mask, per type on a graph with several node types. A node that is given twice
            has its in-edges twice.
        relabel_nodes: Whether to keep only the end points of these edges, numbered as they first
            occur (per relation, sources before destinations); by default all nodes stay.

    Raises:
        ValueError: An unknown type, an id out of range, or a mask of another length.
        TypeError: Ids are not integers, or types are not named.

    Example:
        >>> from graphshard.graph import graph
        >>> sub = in_subgraph(graph(([0, 1, 2], [1, 2, 1])), [1])
        >>> sub.edges(), sub.edata[EID]
        ((tensor([0, 2]), tensor([1, 1])), tensor([0, 2]))
    """
    chosen = _chosen_nodes(graph, nodes, "in_subgraph")
    eids = {
        etype: graph.in_edges(chosen[etype[2]], "eid", etype)
        for etype in graph.canonical_etypes
        if etype[2] in chosen
    }
    return _from_edges(graph, eids, relabel_nodes, store_ids).to(output_device)


def out_subgraph(
    graph: Graph,
    nodes: NodeIds,
    *,
    relabel_nodes: bool = False,
    store_ids: bool = True,
    output_device: Device | None = None,
) -> Graph:
    """The graph of all edges that leave some nodes; see `in_subgraph`, which is its counterpart."""
    chosen = _chosen_nodes(graph, nodes, "out_subgraph")
    eids = {
        etype: graph.out_edges(chosen[etype[0]], "eid", etype)
        for etype in graph.canonical_etypes
        if etype[0] in chosen
    }
    return _from_edges(graph, eids, relabel_nodes, store_ids).to(output_device)


def edge_subgraph(
    graph: Graph,
    edges: EdgeIds,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Device | None = None,
) -> Graph:
    """The graph of some edges, in the order given.

    Args:
        edges: Ids or mask, per relation on a graph with several.
        relabel_nodes: Whether to keep only the end points of these edges, numbered as they first
            occur (per relation, sources before destinations); if not, all nodes stay.

    Raises:
        ValueError: An unknown relation, an id out of range, or a mask of another length.
        TypeError: Ids are not integers, or relations are not named.

    Example:
        >>> from graphshard.graph import graph
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
    eids = {}
    for name, ids in edges.items():
        etype = graph.to_canonical_etype(name)
        count = graph.num_edges(etype)
        eids[etype] = _ids_of(graph, ids, count, "an edge id", f"edges of {etype}")
    return _from_edges(graph, eids, relabel_nodes, store_ids).to(output_device)


def node_subgraph(
    graph: Graph,
    nodes: NodeIds,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Device | None = None,
) -> Graph:
    """The graph of some nodes and of all edges between them.

    Edges come source by source in the order given, each source's by ascending edge id.

    Args:
        nodes: Ids or mask, per type on a graph with several node types. A node that is given
            several times is there several times, each time with its out-edges; edges into it end
            at the first. Repeats come last: where a new node follows one, DGL 1.1.3 has edges end
            at other nodes than those that they entered.
        relabel_nodes: Whether to keep only these nodes, numbered in the order given; if not, all
            nodes stay and only edges are left out.

    Raises:
        ValueError: An unknown type, an id out of range, a mask of another length, or, where nodes
            get new numbers, one that follows a repeated one.
        TypeError: Ids are not integers, or types are not named.

    Example:
        >>> from graphshard.graph import graph
        >>> sub = node_subgraph(graph(([0, 1, 2], [1, 2, 0])), [2, 0])
        >>> sub.edges(), sub.edata[EID]
        ((tensor([0]), tensor([1])), tensor([2]))
    """
    given = _chosen_nodes(graph, nodes, "node_subgraph")
    chosen = {ntype: given.get(ntype, _no_ids(graph)) for ntype in graph.ntypes}
    new_ids = {ntype: places_of(ids, graph.num_nodes(ntype)) for ntype, ids in chosen.items()}
    if relabel_nodes:
        for ntype, ids in chosen.items():
            _check_repeats_come_last(ntype, ids, new_ids[ntype])
    eids, sources = {}, {}
    for etype in graph.canonical_etypes:
        leaving = chosen[etype[0]]
        candidates = graph.out_edges(leaving, "eid", etype)
        ends = graph.adjacency(etype).coo()[1].index_select(0, candidates)
        is_within = new_ids[etype[2]].index_select(0, ends) >= 0
        eids[etype] = candidates[is_within]
        rows = torch.arange(leaving.shape[0], dtype=graph.idtype, device=graph.device)
        counts = graph.out_degrees(leaving, etype).long()
        sources[etype] = rows.repeat_interleave(counts)[is_within]
    numbering = (chosen, new_ids) if relabel_nodes else None
    return _build(graph, eids, numbering, store_ids, sources).to(output_device)


def _check_repeats_come_last(ntype: str, ids: Tensor, first_places: Tensor) -> None:
    is_new = first_places[ids.long()] == torch.arange(ids.shape[0], device=ids.device)
    num_new = int(is_new.sum())
    if not bool(is_new[:num_new].all()):
        repeat = int(is_new.long().argmin())
        follower = repeat + int(is_new[repeat:].long().argmax())
        raise GraphValueError(
            f"nodes of type {ntype!r} that are given again must follow all others (got "
            f"{int(ids[repeat])} again at place {repeat}, before {int(ids[follower])}): give each "
            "node once, or repeats at the end"
        )


def _from_edges(
    g: Graph, edge_ids: Mapping[CanonicalEType, Tensor], relabel_nodes: bool, store_ids: bool
) -> Graph:
    """The graph of some edges: none of the relations that are not named."""
    eids = {etype: edge_ids.get(etype, _no_ids(g)) for etype in g.canonical_etypes}
    if not relabel_nodes:
        return _build(g, eids, None, store_ids)
    ends: dict[str, list[Tensor]] = {ntype: [] for ntype in g.ntypes}
    for etype, ids in eids.items():
        for ntype, side in zip((etype[0], etype[2]), g.adjacency(etype).coo(), strict=True):
            ends[ntype].append(side.index_select(0, ids))
    node_ids = {
        ntype: by_first_occurrence(torch.cat(sides) if sides else _no_ids(g))
        for ntype, sides in ends.items()
    }
    new_ids = {ntype: places_of(ids, g.num_nodes(ntype)) for ntype, ids in node_ids.items()}
    return _build(g, eids, (node_ids, new_ids), store_ids)


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
            new_ids = numbering[1][etype[0]]
            src = new_ids.index_select(0, src) if sources is None else sources[etype]
            dst = numbering[1][etype[2]].index_select(0, dst)
        relations[etype] = Adjacency(src, dst, counts[etype[0]], counts[etype[2]], check=False)
    new = _made(counts, relations)
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


def _chosen_nodes(g: Graph, nodes: NodeIds, name: str) -> dict[str, Tensor]:
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


def _ids_of(g: Graph, ids: Ids, count: int, what: str, of: str) -> Tensor:
    """Ids of a user's ids or mask, in the graph's idtype; see `check_ids`."""
    if isinstance(ids, Tensor) and ids.dtype == torch.bool:
        if ids.dim() != 1 or ids.shape[0] < count or bool(ids[count:].any()):
            raise GraphValueError(
                f"a mask of {of} must have {count} entries (got shape {tuple(ids.shape)})"
            )
        return ids.nonzero().squeeze(1).to(device=g.device, dtype=g.idtype)
    checked = id_tensor(ids, of, g.idtype, g.device)
    check_ids(checked, count, what, of)
    return checked


def _no_ids(g: Graph) -> Tensor:
    return torch.empty(0, dtype=g.idtype, device=g.device)


# ------------------------------------------------------------------ added and taken away


def add_nodes(
    g: Graph, num: int, data: Mapping[str, Tensor] | None = None, ntype: str | None = None
) -> Graph:
    """The graph with more nodes of a type, behind those that it has. Batch numbers are dropped.

    Args:
        data: Feature -> ``[num, ...]`` values of the new nodes.

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
    type_id = g.get_ntype_id(ntype)
    return _grown(g, {g.ntypes[type_id]: (int(num), dict(data or {}))}, {})


def add_edges(
    g: Graph, u: Ids, v: Ids, data: Mapping[str, Tensor] | None = None, etype: EType | None = None
) -> Graph:
    """The graph with more edges of a relation, behind those that it has.

    Nodes whose ids are past the last one are added. Batch numbers are dropped.

    Args:
        u: Source ids; one, or as many as ``v``.
        v: Destination ids; one, or as many as ``u``.
        data: Feature -> ``[number of new edges, ...]``.

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
    ends = id_tensor(u, "u", g.idtype, g.device), id_tensor(v, "v", g.idtype, g.device)
    src, dst = paired(*ends)
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
    return _grown(g, more, {chosen: (src, dst, dict(data or {}))})


def remove_edges(
    g: Graph, eids: EdgeIds, etype: EType | None = None, store_ids: bool = False
) -> Graph:
    """The graph without some edges; the others keep their order. Batch numbers follow.

    Args:
        eids: Edge ids, in any order, repeated or not; or relation -> edge ids.
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
    by_relation: Mapping[Any, Ids] = eids if isinstance(eids, Mapping) else {etype: eids}
    masks = {}
    for name, ids in by_relation.items():
        chosen = g.to_canonical_etype(name)
        ids = id_tensor(ids, "edge ids", g.idtype, g.device)
        check_ids(ids, g.num_edges(chosen), "an edge id", f"edges of {chosen}")
        mask = torch.ones(g.num_edges(chosen), dtype=torch.bool, device=g.device)
        mask[ids.long()] = False
        masks[chosen] = mask
    left = {
        etype: masks[etype].nonzero().squeeze(1).to(g.idtype)
        if etype in masks
        else g.edges("eid", etype=etype)
        for etype in g.canonical_etypes
    }
    new = _build(g, left, None, store_ids)
    _carry_initializers(g, new)
    _carry_batch(g, new, {}, masks)
    return new


def remove_nodes(
    g: Graph, nids: NodeIds, ntype: str | None = None, store_ids: bool = False
) -> Graph:
    """The graph without some nodes and their edges; the other nodes keep their order.

    What stays is numbered anew, edges source by source as in `node_subgraph`. Batch numbers follow.
    Without ids nothing changes.

    Args:
        nids: Node ids, in any order, repeated or not; or node type -> ids.
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
    node_masks = {
        name: torch.ones(count, dtype=torch.bool, device=g.device)
        for name, count in node_counts(g).items()
    }
    for name, ids in nids.items():
        ids = id_tensor(ids, "node ids", g.idtype, g.device)
        check_ids(ids, g.num_nodes(name), "a node id", f"nodes of type {name!r}")
        node_masks[name][ids.long()] = False
    if all(bool(mask.all()) for mask in node_masks.values()):
        return g.local_var()
    new = node_subgraph(g, node_masks, store_ids=store_ids)
    edge_masks = {}
    for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
        src, dst = (end.long() for end in adj.coo())
        edge_masks[etype] = node_masks[etype[0]][src] & node_masks[etype[2]][dst]
    _carry_initializers(g, new)
    _carry_batch(g, new, node_masks, edge_masks)
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
    new = _made(counts, relations)
    # One side stands for both where they are the same nodes.
    for side, ntypes in enumerate([g.srctypes, *([g.dsttypes] if g.is_unibipartite else [])]):
        for index, ntype in enumerate(ntypes):
            added_nodes = nodes.get(ntype, (0, {}))
            frames_of(new)[side][index] = frames_of(g)[side][index].extended(*added_nodes)
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


# ------------------------------------------------------------------ types as numbers


@overload
def to_homogeneous(
    g: Graph,
    ndata: Sequence[str] | None = ...,
    edata: Sequence[str] | None = ...,
    store_type: bool = ...,
    return_count: Literal[False] = ...,
) -> Graph: ...


@overload
def to_homogeneous(
    g: Graph,
    ndata: Sequence[str] | None = ...,
    edata: Sequence[str] | None = ...,
    store_type: bool = ...,
    *,
    return_count: Literal[True],
) -> tuple[Graph, list[int], list[int]]: ...


def to_homogeneous(
    g: Graph,
    ndata: Sequence[str] | None = None,
    edata: Sequence[str] | None = None,
    store_type: bool = True,
    return_count: bool = False,
) -> Graph | tuple[Graph, list[int], list[int]]:
    """Forget the types: one graph whose nodes and edges are numbered type after type.

    The types come in the order of ``ntypes`` and ``canonical_etypes``. ``ndata[NID]`` and
    ``edata[EID]`` hold each node's and edge's id within its type.

    Args:
        ndata: Node features to concatenate over all types that have nodes, which must all have them
            in one row shape and dtype; None carries none over.
        edata: The same for edge features and relations.
        store_type: Whether to store type numbers (int64) as ``ndata[NTYPE]`` and ``edata[ETYPE]``.
        return_count: Whether to return the number of nodes and edges of each type as well.

    Returns:
        The graph; with ``return_count`` a triple of graph, node counts and edge counts.

    Raises:
        ValueError: A type lacks a feature that was asked for, or has it in another form.

    Example:
        >>> from graphshard.graph import heterograph
        >>> g = heterograph({('u', 'r', 'v'): ([0, 1], [0, 0])})
        >>> to_homogeneous(g).edges()
        (tensor([0, 1]), tensor([2, 2]))
    """
    check_plain(g, "to_homogeneous")
    counts = node_counts(g)
    offsets = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    sources, destinations = [], []
    for (source, _, destination), adj in zip(g.canonical_etypes, g.relations, strict=True):
        src, dst = adj.coo()
        sources.append(src + offsets[source])
        destinations.append(dst + offsets[destination])
    num_edges = [adj.num_edges for adj in g.relations]
    from ._graph import graph

    new = graph((torch.cat(sources), torch.cat(destinations)), num_nodes=sum(counts.values()))
    for name in ndata or ():
        columns = {f"nodes of type {t!r}": g.nodes[t].data.get(name) for t in g.ntypes}
        new.ndata[name] = _joined(name, columns, list(counts.values()))
    for name in edata or ():
        columns = {f"edges of {e}": g.edges[e].data.get(name) for e in g.canonical_etypes}
        new.edata[name] = _joined(name, columns, num_edges)
    new.ndata[NID], ntype_ids = _numbers(g, list(counts.values()))
    new.edata[EID], etype_ids = _numbers(g, num_edges)
    if store_type:
        new.ndata[NTYPE], new.edata[ETYPE] = ntype_ids, etype_ids
    return (new, list(counts.values()), num_edges) if return_count else new


def _joined(name: str, columns: dict[str, Tensor | None], counts: Sequence[int]) -> Tensor:
    """The columns of types that have rows; where none has, those that there are."""
    filled = {what for what, count in zip(columns, counts, strict=True) if count}
    filled = filled or {what for what, column in columns.items() if column is not None}
    columns = {what: column for what, column in columns.items() if what in filled}
    forms = {
        what: None if column is None else (tuple(column.shape[1:]), column.dtype)
        for what, column in columns.items()
    }
    if len(set(forms.values())) != 1 or None in forms.values():
        raise GraphValueError(
            f"feature {name!r} must be on every type that has any nodes or edges, with one row "
            f"shape and dtype, to be joined (got {forms})"
        )
    return torch.cat([column for column in columns.values() if column is not None])


def _numbers(g: Graph, counts: list[int]) -> tuple[Tensor, Tensor]:
    """(id within its type, type) of every node or edge, type after type."""
    total = sum(counts)
    types = torch.arange(len(counts), device=g.device).repeat_interleave(
        torch.tensor(counts, dtype=torch.int64, device=g.device), output_size=total
    )
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int64, device=g.device)
    ids = torch.arange(total, device=g.device) - starts[types]
    return ids.to(g.idtype), types


def to_heterogeneous(
    g: Graph,
    ntypes: Sequence[str],
    etypes: Sequence[str],
    ntype_field: str = NTYPE,
    etype_field: str = ETYPE,
    metagraph: Iterable[CanonicalEType] | Any = None,
) -> Graph:
    """Split a graph by the type numbers that its nodes and edges carry; undoes `to_homogeneous`.

    Edges with one type number are still told apart by the types of their ends: ``etypes[i]`` may
    become several relations. Nodes and edges of a type keep their order. ``ndata[NID]`` and
    ``edata[EID]`` of the result hold their ids in ``g``.

    Args:
        g: Graph with one node type and one relation; all features are carried over, except the type
            numbers and ids.
        ntypes: Name of each node type number.
        etypes: Name of each edge type number; a name may occur several times.
        ntype_field: Node feature that holds type numbers.
        etype_field: Edge feature that holds type numbers.
        metagraph: The relations that the result is to have, as triples, or as a NetworkX
            ``MultiDiGraph`` whose edge keys are names; None takes those that occur. Only with it
            can a relation without edges come back.

    Returns:
        The typed graph, types and relations in sorted order.

    Raises:
        KeyError: There are no type numbers.
        ValueError: The graph is typed already, a number has no name, an edge belongs to no relation
            of ``metagraph``, or there are no edges and no ``metagraph``.

    Example:
        >>> from graphshard.graph import heterograph
        >>> g = heterograph({('u', 'r', 'v'): ([0, 1], [0, 0])})
        >>> to_heterogeneous(to_homogeneous(g), g.ntypes, g.etypes).canonical_etypes
        [('u', 'r', 'v')]
    """
    if g.is_block or not g.is_homogeneous:
        raise GraphValueError(
            "to_heterogeneous takes a graph with one node type and one relation "
            f"(got {g.canonical_etypes})"
        )
    if len(set(ntypes)) < len(ntypes):
        raise GraphValueError(f"ntypes must name every node type differently (got {list(ntypes)})")
    ntype_ids = _type_numbers(g.ndata[ntype_field], ntypes, "ntypes", "nodes")
    etype_ids = _type_numbers(g.edata[etype_field], etypes, "etypes", "edges")
    same_name = torch.tensor([list(etypes).index(name) for name in etypes], dtype=torch.int64)
    etype_ids = same_name.to(g.device)[etype_ids]
    groups = {name: (ntype_ids == i).nonzero().squeeze(1) for i, name in enumerate(ntypes)}
    local = torch.empty_like(ntype_ids)
    for ids in groups.values():
        local[ids] = torch.arange(ids.shape[0], device=g.device)

    src, dst = (end.long() for end in g.edges(order="eid"))
    # one number per (source type, edge type, destination type)
    keys = (ntype_ids[src] * len(etypes) + etype_ids) * len(ntypes) + ntype_ids[dst]
    key_of = _relations(keys, ntypes, etypes, metagraph)
    members = {etype: (keys == key).nonzero().squeeze(1) for etype, key in key_of.items()}
    if sum(ids.shape[0] for ids in members.values()) < keys.shape[0]:
        left = ~torch.isin(keys, torch.tensor(list(key_of.values()), device=g.device))
        stray = _triple(int(keys[left][0]), ntypes, etypes)
        raise GraphValueError(
            f"metagraph must hold the relation of every edge (there is none for {stray})"
        )
    counts = {name: int(ids.shape[0]) for name, ids in groups.items()}
    pairs = {etype: (local[src[ids]], local[dst[ids]]) for etype, ids in members.items()}
    from ._graph import heterograph

    new = heterograph(pairs, num_nodes_dict=counts, idtype=g.idtype, device=g.device)

    nodes = {name: value for name, value in g.ndata.items() if name not in (ntype_field, NID)}
    for ntype, ids in groups.items():
        select_fields(nodes, new.nodes[ntype].data, ids)
        new.nodes[ntype].data[NID] = ids.to(g.idtype)
    edges = {name: value for name, value in g.edata.items() if name not in (etype_field, EID)}
    for etype, ids in members.items():
        select_fields(edges, new.edges[etype].data, ids)
        new.edges[etype].data[EID] = ids.to(g.idtype)
    return new


def _type_numbers(numbers: Tensor, names: Sequence[str], argument: str, what: str) -> Tensor:
    numbers = numbers.long()
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(names):
        raise GraphValueError(
            f"{argument} must name every type number of the {what} (got {len(names)} names for "
            f"numbers {int(numbers.min())} to {int(numbers.max())})"
        )
    return numbers


def _relations(
    keys: Tensor, ntypes: Sequence[str], etypes: Sequence[str], metagraph: Any
) -> dict[CanonicalEType, int]:
    """The key of each relation that the result has."""
    if metagraph is None:
        present = torch.unique(keys).tolist()
        if not present:
            raise GraphValueError(
                "a graph without edges does not say which relations it has; give metagraph"
            )
        return {_triple(key, ntypes, etypes): key for key in present}
    if hasattr(metagraph, "edges"):
        metagraph = [(s, name, d) for s, d, name in metagraph.edges(keys=True)]
    out = {}
    for source, name, destination in metagraph:
        unknown = {source, destination} - set(ntypes) | ({name} - set(etypes))
        if unknown:
            raise GraphValueError(
                f"metagraph must use the names in ntypes and etypes (got {unknown})"
            )
        middle = list(ntypes).index(source) * len(etypes) + list(etypes).index(name)
        key = middle * len(ntypes) + list(ntypes).index(destination)
        out[(source, name, destination)] = key
    return out


def _triple(key: int, ntypes: Sequence[str], etypes: Sequence[str]) -> CanonicalEType:
    middle, destination = divmod(key, len(ntypes))
    source, name = divmod(middle, len(etypes))
    return ntypes[source], etypes[name], ntypes[destination]


# ------------------------------------------------------------------ shared


def _made(counts: Mapping[str, int], relations: Mapping[CanonicalEType, Adjacency]) -> Graph:
    """A new graph; its class, which has functions of this file as methods, is imported late."""
    from ._graph import Graph

    return Graph(counts, relations)


def _with_relations(
    g: Graph, relations: Mapping[CanonicalEType, Adjacency], copy_ndata: bool
) -> Graph:
    """A new graph of the same nodes, with their features or without."""
    new = _made(node_counts(g), relations)
    if copy_ndata:
        share_nodes(g, new)
    return new


def check_plain(g: Graph, name: str) -> None:
    """Raise unless every node type of the graph is one set of nodes."""
    if g.is_block or len(set(g.ntypes)) < len(g.ntypes):
        kind = "a block" if g.is_block else f"a slice whose node types are {g.ntypes}"
        raise GraphValueError(
            f"{name} takes a graph in which every node type is one set of nodes (got {kind})"
        )


def node_counts(g: Graph) -> dict[str, int]:
    """Number of nodes of each type, in the graph's order of types."""
    return {ntype: g.num_nodes(ntype) for ntype in g.ntypes}


def share_nodes(g: Graph, new: Graph) -> None:
    """Give ``new`` the node features of ``g``."""
    for ntype in g.ntypes:
        new.nodes[ntype].data.update(g.nodes[ntype].data)


def select_fields(old: Any, new: Any, rows: Tensor) -> None:
    """Give ``new`` the chosen rows of every feature of ``old``."""
    for name, value in old.items():
        new[name] = value.index_select(0, rows)
