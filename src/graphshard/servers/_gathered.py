# SPDX-License-Identifier: Apache-2.0
"""GatheredEdges: all edges at some nodes, read from the hosts that have them, to draw from here.

The host of a node has its in-edges in their order, and their weights. It has not what other hosts
know: the weights of out-edges and the original ids that they are ordered by, which belong to their
destinations, and what neighbours were called before partitioning, by which LABOR draws. A trainer
reads these, as rows of tables like any others, and draws as the host would: the same edges come
out, for [Note: keyed draws] holds wherever the draw is made. All edges of the nodes travel, not
only those that are drawn; in exchange nothing is kept beside the tables that could grow old.

A batch takes as many rounds of messages as one thing must be known before the next: where edges
begin, their ids, what is at them, and, for LABOR along out-edges, what is at their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..sampling import DrawOptions, NeighborRequest
from ..sampling.graph_store import EdgeDir, EdgeLists, checked_weights, ends
from ._cluster import Cluster, RowsRequest
from ._host_graph import (
    GraphIds,
    edge_policy,
    in_edge_table,
    node_policy,
    out_edge_table,
    pointer_table,
    row_positions,
    source_table,
)

FindEnds = Callable[[CanonicalEType, Tensor], tuple[Tensor, Tensor]]


@dataclass
class GatheredEdges:
    """The edges at the nodes of one request.

    Args:
        etype: The relation.
        edge_dir: Which edges.
        nodes: ``[m]``, distinct nodes.
        rows: ``[n]``, the place of each node that was asked for among them.
        original_ids: ``[m]``, what the nodes were called before partitioning.
        indptr: ``[m + 1]``, where the edges of each begin.
        eids: ``[num_edges]``, global ids, in the order that draws speak of.
        neighbors: ``[num_edges]``, the node at the far end of each.
        weights: ``[num_edges]``, where draws are weighted.
        labor_ids: ``[num_edges]``, original ids of the neighbours, where LABOR draws.
    """

    etype: CanonicalEType
    edge_dir: EdgeDir
    nodes: Tensor
    rows: Tensor
    original_ids: Tensor
    indptr: Tensor
    eids: Tensor
    neighbors: Tensor
    weights: Tensor | None = None
    labor_ids: Tensor | None = None

    def draw(
        self, request: NeighborRequest, options: DrawOptions, excluded: Tensor | None
    ) -> list[Tensor]:
        """Counts, neighbours and, if wanted, edge ids."""
        lists = EdgeLists(self.indptr, self.neighbors, self.eids)
        counts, positions, neighbors = lists.draw(
            request,
            self.rows,
            self.original_ids.index_select(0, self.rows),
            options,
            weights=self.weights,
            labor_ids=self.labor_ids,
            excluded=excluded,
        )
        drawn = [counts, neighbors]
        return [*drawn, lists.eids_at(positions)] if options.with_eids else drawn

    @property
    def row_of_edge(self) -> Tensor:
        """``[num_edges]``: the row that each edge is in."""
        return torch.arange(len(self.nodes)).repeat_interleave(self.indptr.diff())


def gather_edges(
    cluster: Cluster,
    ids: GraphIds,
    find_ends: FindEnds,
    requests: Sequence[tuple[CanonicalEType, Tensor]],
    options: DrawOptions,
    weights: Sequence[str | None],
) -> list[GatheredEdges]:
    """All edges at some nodes.

    Args:
        cluster: The hosts.
        ids: Of the graph.
        find_ends: From a relation and edge ids to sources and destinations.
        requests: Relation, and ids of nodes that are in range.
        options: How will be drawn.
        weights: For each request the table of weights, where draws are weighted.

    Raises:
        ServerError: A server is gone.
        ValueError: The weights of some edge are no weights.
    """
    edge_dir = options.edge_dir
    found = _where_edges_begin(cluster, ids, requests, edge_dir)
    if edge_dir == "in":
        columns = _read_in_edges(cluster, ids, found, weights)
    else:
        _find_out_edges(cluster, ids, found)
        columns = _read_edges_by_id(cluster, found, find_ends, weights)
    for one, weight in zip(found, columns, strict=True):
        if weight is not None:
            one.weights = checked_weights(weight, options, one.etype, one.eids)
    if options.labor:
        far = [
            RowsRequest([_original_nodes(ends(g.etype, edge_dir)[1])], g.neighbors) for g in found
        ]
        for one, original in zip(found, cluster.read(far), strict=True):
            one.labor_ids = original
    return found


def _original_nodes(ntype: str) -> str:
    return f"{node_policy(ntype)}~orig_id"


def _where_edges_begin(
    cluster: Cluster,
    ids: GraphIds,
    requests: Sequence[tuple[CanonicalEType, Tensor]],
    edge_dir: EdgeDir,
) -> list[GatheredEdges]:
    """For each request its nodes and how many edges they have; ``eids`` are positions there.

    A position counts the edges of a host from 0: those whose destination, or source, it has.
    """
    reads, nodes = [], []
    for etype, given in requests:
        near = ends(etype, edge_dir)[0]
        distinct, rows = torch.unique(given.to(torch.int64), return_inverse=True)
        nodes.append((distinct, rows))
        at = distinct + _hosts_of(ids, node_policy(near), distinct)  # a row more on each host
        table = [pointer_table(etype, edge_dir)]
        reads += [RowsRequest(table, at), RowsRequest(table, at + 1)]
        reads.append(RowsRequest([_original_nodes(near)], distinct))
    answers = iter(cluster.read(reads))
    found = []
    for (etype, _), (distinct, rows) in zip(requests, nodes, strict=True):
        begin, end, original = (next(answers).to(torch.int64) for _ in range(3))
        indptr = torch.zeros(len(distinct) + 1, dtype=torch.int64)
        torch.cumsum(end - begin, 0, out=indptr[1:])
        positions = row_positions(begin, end - begin)
        none = torch.empty(0, dtype=torch.int64)
        found.append(
            GatheredEdges(etype, edge_dir, distinct, rows, original, indptr, positions, none)
        )
    return found


def _hosts_of(ids: GraphIds, policy: str, rows: Tensor) -> Tensor:
    return torch.searchsorted(torch.tensor(ids.starts(policy)[1:]), rows, right=True)


def _find_out_edges(cluster: Cluster, ids: GraphIds, found: Sequence[GatheredEdges]) -> None:
    """Turn positions of out-edges into edge ids."""
    reads: list[RowsRequest] = []
    chosen: list[list[Tensor]] = []
    for one in found:
        host = _hosts_of_edges(ids, one)
        places = [(host == number).nonzero().view(-1) for number in range(cluster.num_hosts)]
        chosen.append(places)
        for number, at in enumerate(places):
            if at.numel():
                reads.append(RowsRequest([out_edge_table(one.etype, number)], one.eids[at]))
    answers = iter(cluster.read(reads))
    for one, places in zip(found, chosen, strict=True):
        eids = torch.empty_like(one.eids)
        for at in places:
            if at.numel():
                eids[at] = next(answers).to(torch.int64)
        one.eids = eids


def _hosts_of_edges(ids: GraphIds, one: GatheredEdges) -> Tensor:
    """The host of each edge: that of the node it was found at."""
    near = node_policy(ends(one.etype, one.edge_dir)[0])
    return _hosts_of(ids, near, one.nodes).repeat_interleave(one.indptr.diff())


def _read_in_edges(
    cluster: Cluster,
    ids: GraphIds,
    found: Sequence[GatheredEdges],
    weights: Sequence[str | None],
) -> list[Tensor | None]:
    """Turn positions of in-edges into edge ids, and find their neighbours; returns weights."""
    known = set(cluster.names())
    for one in found:
        first = torch.tensor(ids.starts(edge_policy(one.etype)))
        one.eids = one.eids + first[_hosts_of_edges(ids, one)]
    unsorted = [one for one in found if in_edge_table(one.etype) in known]
    asked = [RowsRequest([in_edge_table(one.etype)], one.eids) for one in unsorted]
    for one, eids in zip(unsorted, cluster.read(asked) if asked else [], strict=True):
        one.eids = eids.to(torch.int64)
    reads = []
    for one, weight in zip(found, weights, strict=True):
        names = [source_table(one.etype)] + ([] if weight is None else [weight])
        reads.append(RowsRequest(names, one.eids))
    answers = iter(cluster.read(reads))
    columns: list[Tensor | None] = []
    for one, weight in zip(found, weights, strict=True):
        one.neighbors = next(answers).to(torch.int64)
        columns.append(None if weight is None else next(answers))
    return columns


def _read_edges_by_id(
    cluster: Cluster,
    found: Sequence[GatheredEdges],
    find_ends: FindEnds,
    weights: Sequence[str | None],
) -> list[Tensor | None]:
    """Put out-edges into their order, and find their neighbours; returns weights."""
    reads = []
    for one, weight in zip(found, weights, strict=True):
        names = [f"{edge_policy(one.etype)}~orig_id"] + ([] if weight is None else [weight])
        reads.append(RowsRequest(names, one.eids))
    answers = iter(cluster.read(reads))
    columns: list[Tensor | None] = []
    for one, weight in zip(found, weights, strict=True):
        order = torch.argsort(next(answers))
        order = order[torch.argsort(one.row_of_edge[order], stable=True)]
        columns.append(None if weight is None else next(answers)[order])
        one.eids = one.eids[order]
        one.neighbors = find_ends(one.etype, one.eids)[1]
    return columns
