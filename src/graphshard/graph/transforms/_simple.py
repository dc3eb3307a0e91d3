# SPDX-License-Identifier: Apache-2.0
"""Graphs with fewer rows and the same meaning: parallel edges joined, unused nodes left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import GraphTypeError, GraphValueError
from ...ops import Adjacency
from .._graph import Graph
from ..structure import EID, NID, by_first_occurrence, check_ids, id_tensor, places_of
from ._transforms import check_plain, node_counts, select_fields, share_nodes

_AGGREGATORS = ("arbitrary", "sum", "mean")


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
        g: Graph.
        return_counts: Edge feature that gets the number of edges joined; None for none.
        writeback_mapping: Whether to return as well which new edge each edge became.
        copy_ndata: Whether to carry node features over.
        copy_edata: Whether to carry edge features over.
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
        keys, place, count = torch.unique(
            src * width + dst, return_inverse=True, return_counts=True
        )
        ends = (keys // width).to(g.idtype), (keys % width).to(g.idtype)
        relations[etype] = Adjacency(*ends, adj.num_src, adj.num_dst, check=False)
        maps[etype], counts[etype] = place, count.to(g.idtype)
    new = Graph(node_counts(g), relations)
    if copy_ndata:
        share_nodes(g, new)
    for etype in g.canonical_etypes:
        fields = new.edges[etype].data
        if copy_edata:
            size = relations[etype].num_edges
            for name, value in g.edges[etype].data.items():
                fields[name] = _joined_rows(value, maps[etype], size, counts[etype], aggregator)
            if aggregator == "arbitrary":
                old = g.edges("eid", etype=etype)
                fields[EID] = _joined_rows(old, maps[etype], size, counts[etype], aggregator)
        if return_counts is not None:
            fields[return_counts] = counts[etype]
    if not writeback_mapping:
        return new
    mapping = {etype: place.to(g.idtype) for etype, place in maps.items()}
    return new, mapping if len(mapping) > 1 else mapping[g.canonical_etypes[0]]


def to_simple_graph(g: Graph) -> Graph:
    """`to_simple` with its defaults, under an older name of DGL's."""
    simple: Graph = to_simple(g)
    return simple


def _joined_rows(
    value: Tensor, place: Tensor, size: int, counts: Tensor, aggregator: str
) -> Tensor:
    """``[size, ...]``: what the rows that go to one place become."""
    if aggregator == "arbitrary":
        first = torch.full((size,), place.shape[0], dtype=torch.int64, device=place.device)
        position = torch.arange(place.shape[0], device=place.device)
        first.scatter_reduce_(0, place, position, "amin")
        return value.index_select(0, first)
    total = value.new_zeros((size, *value.shape[1:])).index_add(0, place, value)
    if aggregator == "sum":
        return total
    divisor = counts.view(-1, *[1] * (value.dim() - 1))
    return (total / divisor).to(value.dtype)


def compact_graphs(
    graphs: Any, always_preserve: Any = None, copy_ndata: bool = True, copy_edata: bool = True
) -> Any:
    """Graphs without the nodes that no edge of any of them touches.

    Node types that several graphs have are one set of nodes; they are numbered anew in the same
    way in all graphs, and must have equal counts. ``ndata[NID]`` has the ids that nodes had; edges
    keep theirs.

    Args:
        graphs: A graph or a list of graphs.
        always_preserve: Nodes to keep in any case: ids, where there is one node type; or node type
            -> ids.
        copy_ndata: Whether to carry node features over.
        copy_edata: Whether to carry edge features over.

    Returns:
        The graph, or the list of graphs.

    Raises:
        TypeError: ids for one of several node types without its name.
        ValueError: graphs whose numbers of nodes of a type differ; or an id out of range.
    """
    one = not isinstance(graphs, Sequence)
    given: list[Graph] = [graphs] if one else list(graphs)
    if not given:
        return []
    totals: dict[str, int] = {}
    for g in given:
        check_plain(g, "compact_graphs")
        for ntype, count in node_counts(g).items():
            if totals.setdefault(ntype, count) != count:
                raise GraphValueError(
                    f"graphs to compact together must have as many nodes of each type as the others"
                    f" (got {totals[ntype]} and {count} of type {ntype!r})"
                )
    if always_preserve is None:
        always_preserve = {}
    elif not isinstance(always_preserve, Mapping):
        if len(totals) > 1:
            raise GraphTypeError(
                f"always_preserve must be a dictionary from node type to ids because the graphs "
                f"have the types {sorted(totals)}"
            )
        always_preserve = {next(iter(totals)): always_preserve}
    some = given[0]
    touched: dict[str, list[Tensor]] = {
        ntype: [torch.empty(0, dtype=some.idtype, device=some.device)] for ntype in totals
    }
    for ntype, ids in always_preserve.items():
        what = f"nodes of type {ntype!r} to preserve"
        checked = id_tensor(ids, what, some.idtype, some.device)
        check_ids(checked, totals.get(ntype, 0), f"an id of {what}", f"nodes of type {ntype!r}")
        touched[ntype].append(checked)
    for g in given:
        for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
            for ntype, end in zip((etype[0], etype[2]), adj.coo(), strict=True):
                touched[ntype].append(end)
    kept = {ntype: by_first_occurrence(torch.cat(parts)) for ntype, parts in touched.items()}
    places = {ntype: places_of(ids, totals[ntype]) for ntype, ids in kept.items()}
    made = [_compacted(g, kept, places, copy_ndata, copy_edata) for g in given]
    return made[0] if one else made


def _compacted(
    g: Graph, kept: dict[str, Tensor], places: dict[str, Tensor], copy_ndata: bool, copy_edata: bool
) -> Graph:
    counts = {ntype: int(kept[ntype].shape[0]) for ntype in g.ntypes}
    relations = {}
    for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
        src, dst = adj.coo()
        ends = places[etype[0]].index_select(0, src), places[etype[2]].index_select(0, dst)
        relations[etype] = Adjacency(*ends, counts[etype[0]], counts[etype[2]], check=False)
    new = Graph(counts, relations)
    for ntype in g.ntypes:
        if copy_ndata:
            select_fields(g.nodes[ntype].data, new.nodes[ntype].data, kept[ntype])
        new.nodes[ntype].data[NID] = kept[ntype]
    for etype in g.canonical_etypes:
        if copy_edata:
            new.edges[etype].data.update(g.edges[etype].data)
    return new


def neighbor_matching(
    graph: Graph, e_weights: Tensor | None = None, relabel_idx: bool = True
) -> Tensor:
    """Join nodes in pairs of neighbours, greedily: the step that coarsens a graph.

    Nodes are visited in random order; one that is still alone is joined to a neighbour that is
    still alone, the one over the heaviest edge, or any where there are no weights.

    Args:
        graph: Graph with one node type and one relation that has both directions of every edge.
        e_weights: ``[num_edges]`` weights of at least 0.
        relabel_idx: Whether pairs are numbered 0, 1, ... in the order of their nodes; if not, a
            pair has the number of its lower node.

    Returns:
        ``[num_nodes]`` the pair of each node, of the graph's idtype.

    Raises:
        ValueError: the graph is typed.
    """
    if not graph.is_homogeneous:
        raise GraphValueError("neighbor_matching takes a graph with one node type and one relation")
    src, dst = graph.edges(order="eid")
    order = torch.randperm(graph.num_edges())
    if e_weights is not None:
        order = order[e_weights.detach().cpu().reshape(-1)[order].argsort(descending=True)]
    neighbors: list[list[int]] = [[] for _ in range(graph.num_nodes())]
    ends = torch.stack([src, dst]).cpu()[:, order]
    for node, other in zip(*ends.tolist(), strict=True):
        neighbors[node].append(other)
    pair = [-1] * graph.num_nodes()
    for node in torch.randperm(graph.num_nodes()).tolist():
        if pair[node] >= 0:
            continue
        free = (other for other in neighbors[node] if pair[other] < 0 and other != node)
        other = next(free, node)
        pair[node] = pair[other] = min(node, other)
    made = torch.tensor(pair, dtype=graph.idtype, device=graph.device)
    return torch.unique(made, return_inverse=True)[1].to(graph.idtype) if relabel_idx else made
