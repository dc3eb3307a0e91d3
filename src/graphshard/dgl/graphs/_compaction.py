# SPDX-License-Identifier: Apache-2.0
"""Graphs with fewer nodes or edges: `compact_graphs`, `to_simple_graph`, `neighbor_matching`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import GraphTypeError, GraphValueError
from ...graph import NID, Graph, to_simple
from ...graph.structure import by_first_occurrence, check_ids, id_tensor, places_of
from ...graph.transforms import check_plain, node_counts, select_fields
from ...ops import Adjacency

__all__ = ["compact_graphs", "to_simple_graph"]


def compact_graphs(
    graphs: Any, always_preserve: Any = None, copy_ndata: bool = True, copy_edata: bool = True
) -> Any:
    """Graphs without the nodes that no edge of any of them touches.

    Node types that several graphs have are one set of nodes; they are numbered anew in the same
    way in all graphs, and must have equal counts. ``ndata[NID]`` has the ids that nodes had; edges
    keep theirs.

    Args:
        always_preserve: Nodes to keep in any case: ids, where there is one node type; or node type
            -> ids.

    Raises:
        TypeError: ids for one of several node types without its name.
        ValueError: graphs whose numbers of nodes of a type differ; or an id out of range.
    """
    is_single = not isinstance(graphs, Sequence)
    given: list[Graph] = [graphs] if is_single else list(graphs)
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
    like = given[0]
    touched: dict[str, list[Tensor]] = {
        ntype: [torch.empty(0, dtype=like.idtype, device=like.device)] for ntype in totals
    }
    for ntype, ids in always_preserve.items():
        what = f"nodes of type {ntype!r} to preserve"
        checked = id_tensor(ids, what, like.idtype, like.device)
        check_ids(checked, totals.get(ntype, 0), f"an id of {what}", f"nodes of type {ntype!r}")
        touched[ntype].append(checked)
    for g in given:
        for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
            for ntype, end in zip((etype[0], etype[2]), adj.coo(), strict=True):
                touched[ntype].append(end)
    node_ids = {ntype: by_first_occurrence(torch.cat(parts)) for ntype, parts in touched.items()}
    new_ids = {ntype: places_of(ids, totals[ntype]) for ntype, ids in node_ids.items()}
    compacted = [_compacted(g, node_ids, new_ids, copy_ndata, copy_edata) for g in given]
    return compacted[0] if is_single else compacted


def _compacted(
    g: Graph,
    node_ids: dict[str, Tensor],
    new_ids: dict[str, Tensor],
    copy_ndata: bool,
    copy_edata: bool,
) -> Graph:
    counts = {ntype: int(node_ids[ntype].shape[0]) for ntype in g.ntypes}
    relations = {}
    for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
        src, dst = adj.coo()
        ends = new_ids[etype[0]].index_select(0, src), new_ids[etype[2]].index_select(0, dst)
        relations[etype] = Adjacency(*ends, counts[etype[0]], counts[etype[2]], check=False)
    new = Graph(counts, relations)
    for ntype in g.ntypes:
        if copy_ndata:
            select_fields(g.nodes[ntype].data, new.nodes[ntype].data, node_ids[ntype])
        new.nodes[ntype].data[NID] = node_ids[ntype]
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
    order = torch.randperm(graph.num_edges())
    if e_weights is not None:
        order = order[e_weights.detach().cpu().reshape(-1)[order].argsort(descending=True)]
    neighbors: list[list[int]] = [[] for _ in range(graph.num_nodes())]
    ends = torch.stack(graph.edges(order="eid")).cpu()[:, order]
    for node, other in zip(*ends.tolist(), strict=True):
        neighbors[node].append(other)
    pair = [-1] * graph.num_nodes()
    for node in torch.randperm(graph.num_nodes()).tolist():
        if pair[node] >= 0:
            continue
        free = (other for other in neighbors[node] if pair[other] < 0 and other != node)
        other = next(free, node)
        pair[node] = pair[other] = min(node, other)
    pairs = torch.tensor(pair, dtype=graph.idtype, device=graph.device)
    return torch.unique(pairs, return_inverse=True)[1].to(graph.idtype) if relabel_idx else pairs


def to_simple_graph(g: Graph) -> Graph:
    """`to_simple` with its defaults, under an older name of DGL's."""
    return to_simple(g)
