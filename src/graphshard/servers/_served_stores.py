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
from typing import TypeAlias

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..errors import MessageError
from ..graph.structure import row_positions
from ..ops import group_by_range, ungroup
from ..sampling import DrawOptions, FeatureRequest, NeighborRequest, SampledNeighbors
from ..sampling.graph_store import EdgeDir, EdgeLists, checked_weights, ends
from ._cluster import Cluster, RowsRequest
from ._dist_tensor import DistTensor
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
    source_table,
)
from ._message_stream import WireMessage

Draw: TypeAlias = tuple[NeighborRequest, str | None, Tensor | None, list[Tensor]]
"""A request, its table of weights, where its nodes stood by host, and their rows on each host."""


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
        weight_table: Where their weights are, if draws are weighted.
        weights: ``[num_edges]``, if draws are weighted.
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
    weight_table: str | None = None
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


class ServedGraphStore:
    """Neighbours of a graph that hosts have in parts. A `graphshard.sampling.GraphStore`.

    Methods raise IndexError for an id out of range, ValueError for weights that are missing or none
    and for out-edges that the parts do not know, and ServerError if a server is gone.

    Args:
        features: Of one kind of rows by name, from its policy.
    """

    idtype, device, group = torch.int64, torch.device("cpu"), None

    def __init__(
        self, cluster: Cluster, ids: GraphIds, features: Callable[[str], Mapping[str, DistTensor]]
    ) -> None:
        self._cluster, self._ids, self._features = cluster, ids, features
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
            self._check_nodes(request.etype, request.nodes, options.edge_dir)
        absent = {t: e.to("cpu", torch.int64) for t, e in (excluded or {}).items() if e.numel()}
        in_place = all(w is None or self._cluster.info(w).dtype in DRAWN_BY for w in weights)
        if are_on_hosts(options) and in_place:
            return self._drawn_by_hosts(requests, options, absent, weights)
        nodes = [(r.etype, r.nodes.cpu() if r.fanout else NO_IDS) for r in requests]
        gathered = self._gathered(nodes, options, weights)
        drawn = []
        for request, edges in zip(requests, gathered, strict=True):
            if request.fanout == 0:
                none = torch.zeros(request.nodes.numel(), dtype=torch.int64)
                drawn.append(SampledNeighbors(none, NO_IDS, NO_IDS if options.with_eids else None))
                continue
            of_request = edges.draw(request, options, absent.get(request.etype))
            drawn.append(SampledNeighbors(*of_request))
        return drawn

    def gather(
        self, requests: Sequence[tuple[CanonicalEType, Tensor]], options: DrawOptions
    ) -> list[GatheredEdges]:
        """All edges at some nodes, for what no single request can ask."""
        weights = self.check_draws([etype for etype, _ in requests], options)
        for etype, nodes in requests:
            self._check_nodes(etype, nodes, options.edge_dir)
        return self._gathered(requests, options, weights)

    def find_edges(self, etype: CanonicalEType, eids: Tensor) -> tuple[Tensor, Tensor]:
        """Sources and destinations of edges."""
        starts = self._ids.starts(edge_policy(etype))
        check_range(eids, starts[-1], f"edges of {etype}")
        host = self._ids.hosts_of(edge_policy(etype), eids)
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
        tables: list[str | None] = []
        for etype in etypes:
            features = self._features(edge_policy(etype))
            if name not in features:
                names = self._ids.feature_names(edge_policy(etype))
                raise ValueError(
                    f"sampling by {name!r} needs an edge feature of that name on relation {etype} "
                    f"(it has {names}); partition the graph with it, or set "
                    f"g.edges[etype].data[{name!r}] to a DistTensor"
                )
            tables.append(features[name].name)
        return tables

    def _check_nodes(self, etype: CanonicalEType, nodes: Tensor, edge_dir: EdgeDir) -> None:
        near = ends(etype, edge_dir)[0]
        check_range(nodes, self.num_nodes(near), f"nodes of type {near!r}")

    def _drawn_by_hosts(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
        weights: Sequence[str | None],
    ) -> list[SampledNeighbors]:
        """Draw each node's neighbours where its in-edges are."""
        etypes = [request.etype for request in requests]
        draws = [(r, w, *_by_host(self._ids, r)) for r, w in zip(requests, weights, strict=True)]
        asked = {
            host: answering.begin(self._message(host, draws, options, excluded))
            for host, answering in enumerate(self._cluster.hosts)
            if not self._is_here(host, etypes) and any(rows[host].numel() for *_, rows in draws)
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
            for (request, weight, _, rows), by_host in zip(draws, drawn, strict=True):
                of_host = [NO_IDS] * width
                if rows[host].numel():
                    absent = excluded.get(request.etype)
                    of_host = self._local.draw(request, rows[host], options, absent, weight)
                by_host.append(of_host)
        orders = [order for _, _, order, _ in draws]
        return [self._joined(*of_request) for of_request in zip(orders, drawn, strict=True)]

    def _is_here(self, host: int, etypes: Sequence[CanonicalEType]) -> bool:
        """Whether this process can read a host's in-edges itself."""
        if host != self._cluster.here:
            return False
        return all(self._local.edge_lists(etype) is not None for etype in etypes)

    def _message(
        self,
        host: int,
        draws: Sequence[Draw],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
    ) -> WireMessage:
        tensors, listed = [], []
        for request, weight, _, rows in draws:
            absent = excluded.get(request.etype, NO_IDS)
            if absent.numel():
                start, stop = self._ids.range_of(edge_policy(request.etype), host)
                absent = absent[(absent >= start) & (absent < stop)]
            tensors += [rows[host], absent]
            listed.append([list(request.etype), int(request.fanout), request.key, weight])
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

    # ------------------------------------------------------------------ all edges at some nodes

    def _gathered(
        self,
        requests: Sequence[tuple[CanonicalEType, Tensor]],
        options: DrawOptions,
        weights: Sequence[str | None],
    ) -> list[GatheredEdges]:
        """All edges at some nodes.

        Args:
            requests: Relation, and ids of nodes that are in range.
            weights: For each request the table of weights, where draws are weighted.
        """
        edge_dir = options.edge_dir
        gathered = self._where_edges_begin(requests, edge_dir)
        for edges, table in zip(gathered, weights, strict=True):
            edges.weight_table = table
        if edge_dir == "in":
            self._read_in_edges(gathered)
        else:
            self._find_out_edges(gathered)
            self._read_out_edges(gathered)
        for edges in gathered:
            if edges.weights is not None:
                edges.weights = checked_weights(edges.weights, options, edges.etype, edges.eids)
        if options.labor:
            far = [
                RowsRequest([id_table(node_policy(ends(g.etype, edge_dir)[1]))], g.neighbors)
                for g in gathered
            ]
            for edges, original in zip(gathered, self._cluster.read(far), strict=True):
                edges.labor_ids = original
        return gathered

    def _where_edges_begin(
        self, requests: Sequence[tuple[CanonicalEType, Tensor]], edge_dir: EdgeDir
    ) -> list[GatheredEdges]:
        """For each request its nodes and how many edges they have; ``eids`` are positions there.

        A position counts the edges of a host from 0: those whose destination, or source, it has.
        """
        reads, nodes = [], []
        for etype, given in requests:
            near = node_policy(ends(etype, edge_dir)[0])
            distinct, rows = torch.unique(given.to(torch.int64), return_inverse=True)
            nodes.append((distinct, rows))
            at = distinct + self._ids.hosts_of(near, distinct)  # a row more on each host
            table = [pointer_table(etype, edge_dir)]
            reads += [RowsRequest(table, at), RowsRequest(table, at + 1)]
            reads.append(RowsRequest([id_table(near)], distinct))
        answers = iter(self._cluster.read(reads))
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

    def _hosts_of_edges(self, edges: GatheredEdges) -> Tensor:
        """The host of each edge: that of the node it was found at."""
        near = node_policy(ends(edges.etype, edges.edge_dir)[0])
        return self._ids.hosts_of(near, edges.nodes).repeat_interleave(edges.indptr.diff())

    def _find_out_edges(self, gathered: Sequence[GatheredEdges]) -> None:
        """Turn positions of out-edges into edge ids."""
        reads: list[RowsRequest] = []
        places: list[tuple[GatheredEdges, Tensor]] = []
        for edges in gathered:
            host = self._hosts_of_edges(edges)
            for number in range(self._cluster.num_hosts):
                at = (host == number).nonzero().view(-1)
                if at.numel():
                    places.append((edges, at))
                    table = out_edge_table(edges.etype, number)
                    reads.append(RowsRequest([table], edges.eids[at]))
        for (edges, at), eids in zip(places, self._cluster.read(reads), strict=True):
            edges.eids[at] = eids.to(torch.int64)

    def _read_in_edges(self, gathered: Sequence[GatheredEdges]) -> None:
        """Turn positions of in-edges into edge ids, and find their neighbours and weights."""
        names = set(self._cluster.names())
        for edges in gathered:
            first = torch.tensor(self._ids.starts(edge_policy(edges.etype)))
            edges.eids = edges.eids + first[self._hosts_of_edges(edges)]
        unsorted = [edges for edges in gathered if in_edge_table(edges.etype) in names]
        reads = [RowsRequest([in_edge_table(edges.etype)], edges.eids) for edges in unsorted]
        for edges, eids in zip(unsorted, self._cluster.read(reads) if reads else [], strict=True):
            edges.eids = eids.to(torch.int64)
        tables = [source_table(edges.etype) for edges in gathered]
        for edges, sources in self._with_columns(gathered, tables):
            edges.neighbors = sources.to(torch.int64)

    def _read_out_edges(self, gathered: Sequence[GatheredEdges]) -> None:
        """Put out-edges into their order, and find their neighbours and weights."""
        tables = [id_table(edge_policy(edges.etype)) for edges in gathered]
        for edges, original in self._with_columns(gathered, tables):
            order = torch.argsort(original)
            order = order[torch.argsort(edges.row_of_edge[order], stable=True)]
            edges.eids = edges.eids[order]
            edges.neighbors = self.find_edges(edges.etype, edges.eids)[1]
            if edges.weights is not None:
                edges.weights = edges.weights[order]

    def _with_columns(
        self, gathered: Sequence[GatheredEdges], tables: Sequence[str]
    ) -> Iterator[tuple[GatheredEdges, Tensor]]:
        """Edges with their rows of a table of each; weights come in the same messages."""
        reads = []
        for edges, table in zip(gathered, tables, strict=True):
            names = [table] if edges.weight_table is None else [table, edges.weight_table]
            reads.append(RowsRequest(names, edges.eids))
        answers = iter(self._cluster.read(reads))
        for edges in gathered:
            rows = next(answers)
            edges.weights = None if edges.weight_table is None else next(answers)
            yield edges, rows


NO_IDS = torch.empty(0, dtype=torch.int64)


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
    """Feature rows of a `DistGraph`. A `graphshard.sampling.FeatureStore`.

    Args:
        features: As for `ServedGraphStore`.
    """

    def __init__(
        self, cluster: Cluster, features: Callable[[str], Mapping[str, DistTensor]]
    ) -> None:
        self._cluster, self._features = cluster, features

    def feature_names(self, kind: str | CanonicalEType) -> Collection[str]:
        """Features of nodes of a type, or of edges of a relation."""
        return list(self._features(_policy(kind)))

    def fetch(self, requests: Sequence[FeatureRequest]) -> list[dict[str, Tensor]]:
        """The rows of each request; see `FeatureStore.fetch`."""
        reads = []
        for request in requests:
            features = self._features(_policy(request.kind))
            names = [features[name].name for name in request.names]
            reads.append(RowsRequest(names, request.ids.cpu()))
        rows = iter(self._cluster.read(reads))
        return [{name: next(rows) for name in request.names} for request in requests]

    def on(self, group: object) -> ServedFeatureStore:
        return self

    def close(self) -> None:
        """Nothing: the cluster stays."""


def _policy(kind: str | CanonicalEType) -> str:
    return node_policy(kind) if isinstance(kind, str) else edge_policy(kind)
