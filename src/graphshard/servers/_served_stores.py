# SPDX-License-Identifier: Apache-2.0
"""ServedGraphStore and ServedFeatureStore: neighbours and rows of a `DistGraph`, for loaders.

Neither is collective: a trainer asks the hosts that have what it wants, all of them at the same
time, and reads what its own host has from memory that it shares with the server. Hosts draw for
their nodes where they can (`are_on_hosts`). Where they cannot, `GatheredEdges` are all edges at
some nodes, read from the hosts that have them, to draw from here.

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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..errors import MessageError
from ..ops import group_by_range, ungroup
from ..sampling import DrawOptions, FeatureRequest, NeighborRequest, SampledNeighbors
from ..sampling.graph_store import EdgeDir, EdgeLists, checked_weights, ends
from ._cluster import Cluster, RowsRequest
from ._host_graph import (
    DRAWN_BY,
    GraphIds,
    HostGraph,
    are_on_hosts,
    edge_policy,
    id_table,
    in_edge_table,
    node_policy,
    out_edge_table,
    pointer_table,
    row_positions,
    source_table,
)
from ._message_stream import WireMessage

FindEnds = Callable[[CanonicalEType, Tensor], tuple[Tensor, Tensor]]


@dataclass
class GatheredEdges:
    """The edges at the nodes of one request.

    Args:
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
        find_ends: From a relation and edge ids to sources and destinations.
        requests: Relation, and ids of nodes that are in range.
        weights: For each request the table of weights, where draws are weighted.
    """
    edge_dir = options.edge_dir
    gathered = _where_edges_begin(cluster, ids, requests, edge_dir)
    if edge_dir == "in":
        _read_in_edges(cluster, ids, gathered, weights)
    else:
        _find_out_edges(cluster, ids, gathered)
        _read_out_edges(cluster, gathered, find_ends, weights)
    for edges in gathered:
        if edges.weights is not None:
            edges.weights = checked_weights(edges.weights, options, edges.etype, edges.eids)
    if options.labor:
        far = [
            RowsRequest([id_table(node_policy(ends(g.etype, edge_dir)[1]))], g.neighbors)
            for g in gathered
        ]
        for edges, original in zip(gathered, cluster.read(far), strict=True):
            edges.labor_ids = original
    return gathered


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
        reads.append(RowsRequest([id_table(node_policy(near))], distinct))
    answers = iter(cluster.read(reads))
    gathered = []
    for (etype, _), (distinct, rows) in zip(requests, nodes, strict=True):
        begin, end, original = (next(answers).to(torch.int64) for _ in range(3))
        indptr = torch.zeros(len(distinct) + 1, dtype=torch.int64)
        torch.cumsum(end - begin, 0, out=indptr[1:])
        positions = row_positions(begin, end - begin)
        gathered.append(
            GatheredEdges(etype, edge_dir, distinct, rows, original, indptr, positions, NO_IDS)
        )
    return gathered


def _hosts_of(ids: GraphIds, policy: str, rows: Tensor) -> Tensor:
    return torch.searchsorted(torch.tensor(ids.starts(policy)[1:]), rows, right=True)


def _find_out_edges(cluster: Cluster, ids: GraphIds, gathered: Sequence[GatheredEdges]) -> None:
    """Turn positions of out-edges into edge ids."""
    reads: list[RowsRequest] = []
    chosen: list[list[Tensor]] = []
    for edges in gathered:
        host = _hosts_of_edges(ids, edges)
        places = [(host == number).nonzero().view(-1) for number in range(cluster.num_hosts)]
        chosen.append(places)
        for number, at in enumerate(places):
            if at.numel():
                reads.append(RowsRequest([out_edge_table(edges.etype, number)], edges.eids[at]))
    answers = iter(cluster.read(reads))
    for edges, places in zip(gathered, chosen, strict=True):
        eids = torch.empty_like(edges.eids)
        for at in places:
            if at.numel():
                eids[at] = next(answers).to(torch.int64)
        edges.eids = eids


def _hosts_of_edges(ids: GraphIds, edges: GatheredEdges) -> Tensor:
    """The host of each edge: that of the node it was found at."""
    near = node_policy(ends(edges.etype, edges.edge_dir)[0])
    return _hosts_of(ids, near, edges.nodes).repeat_interleave(edges.indptr.diff())


def _read_in_edges(
    cluster: Cluster,
    ids: GraphIds,
    gathered: Sequence[GatheredEdges],
    weights: Sequence[str | None],
) -> None:
    """Turn positions of in-edges into edge ids, and find their neighbours and weights."""
    names = set(cluster.names())
    for edges in gathered:
        first = torch.tensor(ids.starts(edge_policy(edges.etype)))
        edges.eids = edges.eids + first[_hosts_of_edges(ids, edges)]
    unsorted = [edges for edges in gathered if in_edge_table(edges.etype) in names]
    reads = [RowsRequest([in_edge_table(edges.etype)], edges.eids) for edges in unsorted]
    for edges, eids in zip(unsorted, cluster.read(reads) if reads else [], strict=True):
        edges.eids = eids.to(torch.int64)
    tables = [source_table(edges.etype) for edges in gathered]
    for edges, sources in _with_columns(cluster, gathered, tables, weights):
        edges.neighbors = sources.to(torch.int64)


def _read_out_edges(
    cluster: Cluster,
    gathered: Sequence[GatheredEdges],
    find_ends: FindEnds,
    weights: Sequence[str | None],
) -> None:
    """Put out-edges into their order, and find their neighbours and weights."""
    tables = [id_table(edge_policy(edges.etype)) for edges in gathered]
    for edges, original in _with_columns(cluster, gathered, tables, weights):
        order = torch.argsort(original)
        order = order[torch.argsort(edges.row_of_edge[order], stable=True)]
        edges.eids = edges.eids[order]
        edges.neighbors = find_ends(edges.etype, edges.eids)[1]
        if edges.weights is not None:
            edges.weights = edges.weights[order]


def _with_columns(
    cluster: Cluster,
    gathered: Sequence[GatheredEdges],
    tables: Sequence[str],
    weights: Sequence[str | None],
) -> Iterator[tuple[GatheredEdges, Tensor]]:
    """Edges with their rows of a table of each; weights come in the same messages."""
    reads = []
    for edges, table, weight in zip(gathered, tables, weights, strict=True):
        names = [table] if weight is None else [table, weight]
        reads.append(RowsRequest(names, edges.eids))
    answers = iter(cluster.read(reads))
    for edges, weight in zip(gathered, weights, strict=True):
        rows = next(answers)
        edges.weights = None if weight is None else next(answers)
        yield edges, rows


# ---------------------------------------------------------------------------- stores


class ServedGraphStore:
    """Neighbours of a graph that hosts have in parts. A `graphshard.sampling.GraphStore`.

    Methods raise IndexError for an id out of range, ValueError for weights that are missing or none
    and for out-edges that the parts do not know, and ServerError if a server is gone.

    Args:
        edge_table: From a relation and the name of a feature to its table; None if there is none.
    """

    idtype, device, group = torch.int64, torch.device("cpu"), None

    def __init__(
        self,
        cluster: Cluster,
        ids: GraphIds,
        edge_table: Callable[[CanonicalEType, str], str | None],
    ) -> None:
        self._cluster, self._ids, self._edge_table = cluster, ids, edge_table
        self.ntypes, self.canonical_etypes = ids.book.ntypes, ids.book.canonical_etypes
        self._local = HostGraph(ids, cluster.here, rows_of_host(cluster))

    def num_nodes(self, ntype: str) -> int:
        return self._ids.parts[node_policy(ntype)].num_ids

    def num_edges(self, etype: CanonicalEType) -> int:
        return self._ids.parts[edge_policy(etype)].num_ids

    def on(self, group: object) -> ServedGraphStore:
        return self

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        """Draw for each request; see `GraphStore.sample_neighbors`."""
        weights = self.check_draws([request.etype for request in requests], options)
        for request in requests:
            self._check_nodes(request, options.edge_dir)
        in_place = all(w is None or self._cluster.info(w).dtype in DRAWN_BY for w in weights)
        if are_on_hosts(options) and in_place:
            return self._drawn_by_hosts(requests, options, excluded or {}, weights)
        nodes = [(r.etype, r.nodes.cpu() if r.fanout else NO_IDS) for r in requests]
        gathered = gather_edges(self._cluster, self._ids, self.find_edges, nodes, options, weights)
        drawn = []
        for request, edges in zip(requests, gathered, strict=True):
            if request.fanout == 0:
                none = torch.zeros(request.nodes.numel(), dtype=torch.int64)
                drawn.append(SampledNeighbors(none, NO_IDS, NO_IDS if options.with_eids else None))
                continue
            absent = _some((excluded or {}).get(request.etype))
            drawn.append(SampledNeighbors(*edges.draw(request, options, absent)))
        return drawn

    def gather(
        self, requests: Sequence[tuple[CanonicalEType, Tensor]], options: DrawOptions
    ) -> list[GatheredEdges]:
        """All edges at some nodes, for what no single request can ask."""
        weights = self.check_draws([etype for etype, _ in requests], options)
        for etype, nodes in requests:
            self._check_nodes(NeighborRequest(etype, nodes, 0, 0), options.edge_dir)
        return gather_edges(self._cluster, self._ids, self.find_edges, requests, options, weights)

    def find_edges(self, etype: CanonicalEType, eids: Tensor) -> tuple[Tensor, Tensor]:
        """Sources and destinations of edges."""
        starts = self._ids.starts(edge_policy(etype))
        check_range(eids, starts[-1], f"edges of {etype}")
        host = torch.searchsorted(torch.tensor(starts[1:]), eids, right=True)
        src, dst = torch.empty_like(eids), torch.empty_like(eids)
        asked = []
        for number in range(self._cluster.num_hosts):
            at = (host == number).nonzero().view(-1)
            if at.numel():
                asked.append((number, at, eids[at] - starts[number]))
        remote = [each for each in asked if not self._is_here(each[0], [etype])]
        requests = [
            (n, WireMessage("ends", {"etype": list(etype)}, [rows])) for n, _, rows in remote
        ]
        pairs = zip(requests, self._cluster.ask(requests), strict=True)
        answers = {number: answer.tensors for (number, _), answer in pairs}
        for number, at, rows in asked:
            sides = answers[number] if number in answers else self._local.ends_of(etype, rows)
            src[at], dst[at] = (side.to(torch.int64) for side in sides)
        return src, dst

    def has_edges_between(self, etype: CanonicalEType, src: Tensor, dst: Tensor) -> Tensor:
        """Bool ``[n]``: whether there is an edge from each source to its destination."""
        (edges,) = self.gather([(etype, dst)], DrawOptions())
        num_src = self.num_nodes(etype[0])
        check_range(src, num_src, f"nodes of type {etype[0]!r}")
        # A pair as one number below the number of pairs of a source and one of these destinations.
        there = edges.row_of_edge * num_src + edges.neighbors
        return torch.isin(edges.rows * num_src + src, there)

    def reverse_edges(self, etype: CanonicalEType, back: CanonicalEType, eids: Tensor) -> Tensor:
        """What `DistGraph.reverse_edges` says, for ids that are in range."""
        src, dst = self.find_edges(etype, eids)
        (edges,) = self.gather([(back, src)], DrawOptions())
        original, candidates = self._cluster.read(
            [
                RowsRequest([id_table(edge_policy(etype))], eids),
                RowsRequest([id_table(edge_policy(back))], edges.eids),
            ]
        )
        ascending, order = torch.sort(candidates)
        slots = torch.searchsorted(ascending, original).clamp_(max=max(len(order) - 1, 0))
        is_there = torch.zeros_like(original, dtype=torch.bool)
        if len(order):
            at = order[slots]
            is_there = (candidates[at] == original) & (edges.neighbors[at] == dst)
            is_there &= edges.nodes[edges.row_of_edge[at]] == src
        if not bool(is_there.all()):
            missing = int(eids[~is_there][0])
            raise ValueError(
                f"edge {missing} of {etype} has no reverse in {back}: under the id that it had "
                "before partitioning there is no edge from its destination to its source; pass "
                "exclude='reverse_id' with reverse_eids, or correct reverse_etypes"
            )
        return edges.eids[order[slots]] if len(eids) else eids

    def check_out_edges(self) -> None:
        """Raise ValueError unless the parts know the edges that leave them."""
        tables = set(self._cluster.names())
        if not all(pointer_table(etype, "out") in tables for etype in self.canonical_etypes):
            raise ValueError(
                "out-edges need a partition with num_hops of at least 1; partition again"
            )

    def check_draws(
        self, etypes: Sequence[CanonicalEType], options: DrawOptions
    ) -> list[str | None]:
        """For each relation the table of the weights that are drawn by; None where none are.

        Raises:
            ValueError: There is none, or the parts do not know the edges that leave them.
        """
        if options.edge_dir == "out":
            self.check_out_edges()
        name = options.weights
        if name is None:
            return [None] * len(etypes)
        tables = [self._edge_table(etype, name) for etype in etypes]
        for etype, table in zip(etypes, tables, strict=True):
            if table is None:
                names = self._ids.feature_names(edge_policy(etype))
                raise ValueError(
                    f"sampling by {name!r} needs an edge feature of that name on relation {etype} "
                    f"(it has {names}); partition the graph with it, or set "
                    f"g.edges[etype].data[{name!r}] to a DistTensor"
                )
        return tables

    def _check_nodes(self, request: NeighborRequest, edge_dir: EdgeDir) -> None:
        near = ends(request.etype, edge_dir)[0]
        check_range(request.nodes, self.num_nodes(near), f"nodes of type {near!r}")

    def _drawn_by_hosts(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
        weights: Sequence[str | None],
    ) -> list[SampledNeighbors]:
        """Draw each node's neighbours where its in-edges are."""
        etypes = [request.etype for request in requests]
        grouped = [_by_host(self._ids, request) for request in requests]
        asked = {
            host: self._cluster.hosts[host].begin(
                self._message(
                    requests, [rows[host] for _, rows in grouped], options, excluded, weights, host
                )
            )
            for host in range(self._cluster.num_hosts)
            if not self._is_here(host, etypes) and any(r[host].numel() for _, r in grouped)
        }
        drawn: list[list[Sequence[Tensor]]] = [[] for _ in requests]  # by request, by host
        width = 3 if options.with_eids else 2
        for host in range(self._cluster.num_hosts):
            if host in asked:
                columns = list(asked[host].result().tensors)
                if len(columns) != width * len(requests):
                    raise MessageError("a server answered with other draws than were asked for")
                for number, by_host in enumerate(drawn):
                    by_host.append(columns[number * width : (number + 1) * width])
                continue
            for number, (request, (_, rows)) in enumerate(zip(requests, grouped, strict=True)):
                of_host = [NO_IDS] * width
                if rows[host].numel():
                    absent = _some(excluded.get(request.etype))
                    of_host = self._local.draw(
                        request, rows[host], options, absent, weights[number]
                    )
                drawn[number].append(of_host)
        return [
            self._joined(order, by_host) for (order, _), by_host in zip(grouped, drawn, strict=True)
        ]

    def _is_here(self, host: int, etypes: Sequence[CanonicalEType]) -> bool:
        """Whether this process can read a host's in-edges itself."""
        if host != self._cluster.here:
            return False
        return all(self._local.edge_lists(etype) is not None for etype in etypes)

    def _message(
        self,
        requests: Sequence[NeighborRequest],
        rows: Sequence[Tensor],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
        weights: Sequence[str | None],
        host: int,
    ) -> WireMessage:
        tensors = []
        for request, nodes in zip(requests, rows, strict=True):
            absent = _some(excluded.get(request.etype))
            if absent is None:
                absent = NO_IDS
            else:
                starts = self._ids.starts(edge_policy(request.etype))
                absent = absent[(absent >= starts[host]) & (absent < starts[host + 1])]
            tensors += [nodes, absent]
        listed = [
            [list(r.etype), int(r.fanout), r.key, weight]
            for r, weight in zip(requests, weights, strict=True)
        ]
        return WireMessage("draw", {"requests": listed, "options": asdict(options)}, tensors)

    def _joined(
        self, order: Tensor | None, by_host: Sequence[Sequence[Tensor]]
    ) -> SampledNeighbors:
        """What hosts have drawn, in the order of the nodes."""
        columns = [
            torch.cat([c.to(torch.int64) for c in column]) for column in zip(*by_host, strict=True)
        ]
        counts, lists = columns[0], columns[1:]
        if order is not None:
            arranged = [ungroup(order, counts, column, torch.int64) for column in lists]
            counts, lists = arranged[0][0], [column for _, column in arranged]
        return SampledNeighbors(counts, *lists)


NO_IDS = torch.empty(0, dtype=torch.int64)


def _some(ids: Tensor | None) -> Tensor | None:
    return None if ids is None or ids.numel() == 0 else ids.to("cpu", torch.int64)


def rows_of_host(cluster: Cluster) -> Callable[[str], Tensor | None]:
    """This process's host's rows of a table, by name; None where it cannot read them."""
    here = cluster.hosts[cluster.here]
    return lambda name: here.rows(name) if name in cluster.names() else None


def check_range(ids: Tensor, count: int, what: str) -> None:
    """Raise IndexError unless all ids are in ``[0, count)``."""
    if ids.numel() and not (0 <= int(ids.min()) <= int(ids.max()) < count):
        bad = ids[(ids < 0) | (ids >= count)]
        raise IndexError(f"{what} must be in [0, {count}) (got {int(bad[0])})")


def _by_host(ids: GraphIds, request: NeighborRequest) -> tuple[Tensor | None, list[Tensor]]:
    """Where the nodes stood that are grouped by host, and their rows there."""
    nodes = request.nodes.cpu()
    starts = ids.starts(node_policy(request.etype[2]))
    if len(starts) == 2:
        return None, [nodes.to(torch.int64)]
    order, rows, sizes = group_by_range(nodes, starts, len(starts) - 2, torch.int64)
    return order, list(rows.split(sizes))


class ServedFeatureStore:
    """Feature rows of a `DistGraph`. A `graphshard.sampling.FeatureStore`."""

    def __init__(self, cluster: Cluster, ids: GraphIds) -> None:
        self._cluster, self._ids = cluster, ids

    def feature_names(self, kind: str | CanonicalEType) -> Collection[str]:
        """Features of nodes of a type, or of edges of a relation."""
        return self._ids.feature_names(_policy(kind))

    def fetch(self, requests: Sequence[FeatureRequest]) -> list[dict[str, Tensor]]:
        """The rows of each request; see `FeatureStore.fetch`."""
        reads = []
        for request in requests:
            names = [f"{_policy(request.kind)}~{name}" for name in request.names]
            reads.append(RowsRequest(names, request.ids.cpu()))
        rows = iter(self._cluster.read(reads))
        return [{name: next(rows) for name in request.names} for request in requests]

    def on(self, group: object) -> ServedFeatureStore:
        return self

    def close(self) -> None:
        """Nothing: the cluster stays."""


def _policy(kind: str | CanonicalEType) -> str:
    return node_policy(kind) if isinstance(kind, str) else edge_policy(kind)
