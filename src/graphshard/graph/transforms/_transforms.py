# SPDX-License-Identifier: Apache-2.0
"""Graphs with edges added, removed or turned around; node sets stay as they are.

A transform returns a new graph. Features that it carries over are the same tensors, not copies,
wherever no row has to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphTypeError, GraphValueError
from ...ops import Adjacency, gspmm
from .._graph import Graph
from ..structure import EID, kept_counts

_REDUCES = ("sum", "mean", "max", "min")


def add_self_loop(
    g: Graph,
    edge_feat_names: Sequence[str] | None = None,
    fill_data: float | str = 1.0,
    etype: Any = None,
) -> Graph:
    """Give every node one more self loop, behind the edges that exist.

    Loops that are already there stay; call `remove_self_loop` first for exactly one per node.

    Args:
        g: Graph; all features are carried over.
        edge_feat_names: Edge features that ``fill_data`` is for; None means all. On the new edges
            the others are 0.
        fill_data: A number; or ``'sum'``, ``'mean'``, ``'max'`` or ``'min'`` of the feature over
            the in-edges of the node, 0 where it has none.
        etype: The relation, where there are several; from a node type to itself.

    Returns:
        The graph with ``num_nodes`` more edges in that relation.

    Raises:
        ValueError: The relation joins two node types, or ``fill_data`` is an unknown reduction.
        KeyError: There is no such edge feature.
        TypeError: ``fill_data`` is neither a number nor a string.

    Example:
        >>> add_self_loop(graph(([0, 0], [1, 2]))).edges()
        (tensor([0, 0, 0, 1, 2]), tensor([1, 2, 0, 1, 2]))
    """
    if isinstance(fill_data, str) and fill_data not in _REDUCES:
        raise GraphValueError(
            f"fill_data must be a number or one of {_REDUCES} (got {fill_data!r})"
        )
    if not isinstance(fill_data, int | float | str):
        raise GraphTypeError(
            f"fill_data must be a number or one of {_REDUCES} (got {type(fill_data)})"
        )
    chosen = _loop_relation(g, etype, "add_self_loop")
    adj = g.adjacency(chosen)
    fields = g.edges[chosen].data
    filled = set(fields) if edge_feat_names is None else set(edge_feat_names)
    for name in filled - set(fields):
        raise KeyError(f"no edge feature {name!r} on {chosen}; there are {sorted(fields)}")

    src, dst = adj.coo()
    loops = torch.arange(adj.num_src, dtype=adj.idtype, device=adj.device)
    new = Adjacency(
        torch.cat([src, loops]), torch.cat([dst, loops]), adj.num_src, adj.num_dst, check=False
    )
    values = {}
    for name, old in fields.items():
        added = old.new_zeros((adj.num_src, *old.shape[1:]))
        if name in filled:
            if isinstance(fill_data, str):
                added = gspmm(adj, "copy_rhs", fill_data, None, old)
            else:
                added = torch.full_like(added, fill_data)
        values[name] = torch.cat([old, added])
    return _with_relation(g, chosen, new, values)


def remove_self_loop(g: Graph, etype: Any = None) -> Graph:
    """Drop every edge from a node to itself; the other edges keep their order.

    Of a batched graph, the numbers of nodes and edges per graph follow.

    Args:
        g: Graph; all features are carried over.
        etype: The relation, where there are several; from a node type to itself.

    Returns:
        The graph without self loops in that relation.

    Raises:
        ValueError: The relation joins two node types.

    Example:
        >>> remove_self_loop(graph(([0, 0, 1], [0, 1, 1]))).edges()
        (tensor([0]), tensor([1]))
    """
    chosen = _loop_relation(g, etype, "remove_self_loop")
    adj = g.adjacency(chosen)
    src, dst = adj.coo()
    kept = (src != dst).nonzero().squeeze(1)
    new = Adjacency(src[kept], dst[kept], adj.num_src, adj.num_dst, check=False)
    values = {name: old.index_select(0, kept) for name, old in g.edges[chosen].data.items()}
    made = _with_relation(g, chosen, new, values)
    if g._batch_nodes is not None and g._batch_edges is not None:
        counts = kept_counts(g._batch_edges[chosen], src != dst)
        made._batch_nodes = dict(g._batch_nodes)
        made._batch_edges = {**g._batch_edges, chosen: counts}
    return made


def to_bidirected(g: Graph, copy_ndata: bool = False, readonly: bool | None = None) -> Graph:
    """The simple graph that has both directions of every edge.

    Parallel edges become one; a self loop stays one edge. Edges come by source, then destination.

    Args:
        g: Graph whose relations each go from a node type to itself.
        copy_ndata: Whether to carry node features over. Edge features are always dropped.
        readonly: Accepted so that calls written for DGL run; has no effect.

    Returns:
        The graph.

    Raises:
        ValueError: A relation joins two node types.

    Example:
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
    new = Graph(node_counts(g), relations)
    if copy_ndata:
        share_nodes(g, new)
    return new


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
        g: Graph.
        readonly: Accepted so that calls written for DGL run; has no effect.
        copy_ndata: Whether to carry node features over.
        copy_edata: Whether to carry edge features over; a reverse has those of its edge, whose id
            is stored as ``edata[EID]``.
        ignore_bipartite: Leave relations between two node types as they are, rather than refuse.
        exclude_self: Whether self loops get no reverse.

    Returns:
        The graph.

    Raises:
        ValueError: A relation joins two node types and ``ignore_bipartite`` is not set.

    Example:
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
    new = Graph(node_counts(g), relations)
    if copy_ndata:
        share_nodes(g, new)
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
        g: Graph.
        copy_ndata: Whether to carry node features over.
        copy_edata: Whether to carry edge features over.
        share_ndata: Older name of ``copy_ndata``, which it overrides.
        share_edata: Older name of ``copy_edata``, which it overrides.

    Returns:
        The graph.

    Example:
        >>> reverse(graph(([0, 0], [1, 2]))).edges()
        (tensor([1, 2]), tensor([0, 0]))
    """
    check_plain(g, "reverse")
    copy_ndata = copy_ndata if share_ndata is None else share_ndata
    copy_edata = copy_edata if share_edata is None else share_edata
    turned = {etype: (etype[2], etype[1], etype[0]) for etype in g.canonical_etypes}
    relations = {new: g.adjacency(old).reverse() for old, new in turned.items()}
    new_graph = Graph(node_counts(g), relations)
    if copy_ndata:
        share_nodes(g, new_graph)
    for old, new in turned.items() if copy_edata else ():
        new_graph.edges[new].data.update(g.edges[old].data)
    return new_graph


# ---------------------------------------------------------------- shared with the other transforms


def check_plain(g: Graph, name: str) -> None:
    """Raise unless every node type of the graph is one set of nodes.

    Raises:
        ValueError: ``g`` is a block, or a slice that merges node types.
    """
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
        fields = new.nodes[ntype].data
        fields.update(g.nodes[ntype].data)


def select_fields(old: Any, new: Any, rows: Tensor) -> None:
    """Give ``new`` the chosen rows of every feature of ``old``."""
    for name, value in old.items():
        new[name] = value.index_select(0, rows)


def _with_relation(
    g: Graph, changed: CanonicalEType, adj: Adjacency, values: dict[str, Tensor]
) -> Graph:
    """``g`` with one relation replaced and all other things shared."""
    relations = {etype: g.adjacency(etype) for etype in g.canonical_etypes}
    relations[changed] = adj
    new = Graph(node_counts(g), relations)
    share_nodes(g, new)
    for etype in g.canonical_etypes:
        fields = new.edges[etype].data
        fields.update(values if etype == changed else g.edges[etype].data)
    return new


def _loop_relation(g: Graph, etype: Any, name: str) -> CanonicalEType:
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
