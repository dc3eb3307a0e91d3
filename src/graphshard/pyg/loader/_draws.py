# SPDX-License-Identifier: Apache-2.0
"""The subgraph around some seeds, drawn hop by hop as PyG's samplers do.

Each node draws once, at the hop after the one that found it; DGL's blocks draw for all nodes again
in every layer. So nodes come in the order in which they were found, seeds first, and edges by the
hop that drew them, which is what ``trim_to_layer`` needs. Draws are keyed, see [Note: keyed draws]
in `graphshard.sampling`: by the seed, the epoch, the step, the hop, the relation and the node.

[Note: times]
    Neighbours may have to be not later than the seed of their subgraph (`TimeLimit`). A store knows
    no times, so it gives all in-edges of the nodes that draw; the times of their sources, or of the
    edges, are fetched, and the draw is made here. It costs the edges that the nodes have.

[Note: budgets]
    The sampling of Hu, Dong, Wang and Sun, "Heterogeneous Graph Transformer" (WWW 2020),
    https://arxiv.org/abs/2003.01332, algorithm 1. A node that is not in the subgraph yet has a
    budget: for each node of the subgraph that it has an edge to, one over the number of edges that
    were looked at there. A hop takes a given number of nodes of each type, in proportion to the
    squares of their budgets, without replacement. At the end all edges between the nodes are taken.
    As in the authors' program and in PyG's, at most 50 edges of a node and a relation are looked
    at, drawn alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...graph.structure import places_of
from ...ops import IdTable, draw_neighbors
from ...ops.counter_random import key_state, states, unit, word
from ...sampling import DrawOptions, DrawSeed, NeighborRequest, SampledNeighbors
from ...sampling.sampler import IdTables
from ._sources import ORIGINAL, Kind, SamplingSource

_INDUCED = 1 << 20
"""Stands in the key of a draw where hops have their number."""

_HASHED = 2**24 + 1
"""From this number of ids on an `IdTable` takes memory for what is in it, and not for all ids."""

_MOST_EDGES = 50
_DOMAIN = 0x1F83D9ABFB41BD6B
_TAKEN = 1 << 21
"""Stands in the key of a draw of nodes, besides the hop."""

Edges: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Sources, destinations (both as rows) and ids of edges; or counts, neighbours and ids of edges."""

Pair: TypeAlias = tuple[Tensor, Tensor]


class TimedEdges(NamedTuple):
    """What one relation draws under a limit; ``until`` is ``[n]``, the latest time of each node."""

    request: NeighborRequest
    options: DrawOptions
    until: Tensor


@dataclass(frozen=True)
class TimeLimit:
    """Neighbours must be there in time.

    Args:
        name: What PyG calls the column of times.
        of_edges: Whether edges have times, and not nodes.
        strategy: ``"uniform"``: any of those in time; ``"last"``: the latest of them.
    """

    name: str
    of_edges: bool
    strategy: Literal["uniform", "last"]

    def holds_for(self, source: SamplingSource, etype: CanonicalEType) -> bool:
        """Whether a relation has times; all neighbours of one that has none are in time."""
        return self.name in source.names.get(self._kind(etype), {})

    def _kind(self, etype: CanonicalEType) -> Kind:
        return etype if self.of_edges else etype[0]

    def of_seeds(
        self,
        source: SamplingSource,
        seeds: Mapping[str, Tensor],
        given: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """The time of each seed, type by type; collective where the source is, unless given."""
        if given is not None:
            return torch.cat([given[ntype].view(-1) for ntype in seeds])
        for ntype in seeds:
            if self.of_edges or self.name not in source.names.get(ntype, {}):
                raise ValueError(
                    f"the seeds need a time, and nodes of type {ntype!r} have no {self.name!r}; "
                    "pass input_time, or edge_label_time to a loader of links"
                )
        requests = [(ntype, [self.name], ids) for ntype, ids in seeds.items()]
        return torch.cat([rows[0].cpu().view(-1) for rows in source.fetch(requests)])

    def chosen(
        self,
        source: SamplingSource,
        timed: Sequence[TimedEdges],
        in_edges: Mapping[CanonicalEType, Edges],
    ) -> dict[CanonicalEType, Edges]:
        """Counts, neighbours and edge ids of those that are drawn of all in-edges of the nodes.

        Collective where the source is.
        """
        requests: list[tuple[Kind, list[str], Tensor]] = []
        for request, options, _ in timed:
            _, neighbors, eids = in_edges[request.etype]
            kind = self._kind(request.etype)
            requests.append((kind, [self.name], eids if self.of_edges else neighbors))
            if options.weights is not None:
                names = source.names[request.etype]
                called = next(name for name in names if names[name] == options.weights)
                requests.append((request.etype, [called], eids))
            if not source.is_whole:
                requests.append((request.etype[2], [ORIGINAL], request.nodes))
        rows = (columns[0].cpu() for columns in source.fetch(requests))
        result = {}
        for request, options, until in timed:
            counts, neighbors, eids = in_edges[request.etype]
            times = next(rows).view(-1)
            weights = None if options.weights is None else next(rows).view(-1)
            ids = request.nodes if source.is_whole else next(rows)
            late = times > until.repeat_interleave(counts)
            pointer = torch.zeros(counts.numel() + 1, dtype=torch.int64)
            torch.cumsum(counts, 0, out=pointer[1:])
            if self.strategy == "last":
                picked, positions = _last(counts, times, ~late, request.fanout)
            else:
                if weights is not None and weights.dtype != torch.float64:
                    weights = weights.to(torch.float32)
                picked, positions, _ = draw_neighbors(
                    pointer,
                    torch.arange(counts.numel()),
                    request.fanout,
                    request.key,
                    ids,
                    indices=neighbors,
                    replace=options.replace,
                    prob=weights,
                    excluded=late,
                )
            result[request.etype] = picked, neighbors[positions], eids[positions]
        return result


def _last(counts: Tensor, times: Tensor, in_time: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    """The latest edges of each row, of equal ones the later in the row: counts and positions."""
    row = torch.arange(counts.numel()).repeat_interleave(counts)
    positions = in_time.nonzero().view(-1)
    positions = positions[torch.argsort(times[positions], stable=True)]
    positions = positions[torch.argsort(row[positions], stable=True)]
    left = torch.bincount(row[positions], minlength=counts.numel())
    if fanout >= 0:
        from_end = left.cumsum(0)[row[positions]] - torch.arange(positions.numel())
        positions = positions[from_end <= fanout]
        left = left.clamp(max=fanout)
    return left, positions


@dataclass(frozen=True)
class HopPlan:
    """How a subgraph is drawn.

    Args:
        num_neighbors: Relation to neighbours per node for each hop; -1 is all of them.
        weight: Name of the edge feature that draws are in proportion to, in relations that have it.
        disjoint: Every seed has a subgraph of its own.
        induced: Take all edges between the nodes of the subgraph.
    """

    num_neighbors: Mapping[CanonicalEType, Sequence[int]]
    replace: bool = False
    weight: str | None = None
    disjoint: bool = False
    induced: bool = False
    time: TimeLimit | None = None

    @property
    def num_hops(self) -> int:
        return max((len(each) for each in self.num_neighbors.values()), default=0)

    @property
    def is_disjoint(self) -> bool:
        return self.disjoint or self.time is not None

    def options(self, source: SamplingSource, etype: CanonicalEType, fanout: int) -> DrawOptions:
        """How one relation is drawn from."""
        weight = None
        if self.weight is not None and self.weight in source.names.get(etype, {}):
            weight = source.names[etype][self.weight]
        return DrawOptions(replace=self.replace and fanout > 0, weights=weight)


@dataclass
class HopSample:
    """A subgraph; ids are those of the source.

    Args:
        nodes: Node type to ids, seeds first.
        src: Relation to rows of ``nodes``, the source of each edge.
        dst: The same of destinations.
        seed_of: Node type to the seed whose subgraph each node is in, if those are disjoint.
        num_nodes: Node type to the seeds and the nodes that each hop found.
        num_edges: Relation to the edges that each hop drew; None where all edges between the nodes
            were taken.
    """

    nodes: dict[str, Tensor]
    src: dict[CanonicalEType, Tensor]
    dst: dict[CanonicalEType, Tensor]
    eids: dict[CanonicalEType, Tensor]
    seed_of: dict[str, Tensor] | None = None
    num_nodes: dict[str, list[int]] | None = None
    num_edges: dict[CanonicalEType, list[int]] | None = None


def relation_key(draw_seed: DrawSeed, hop: int, etype: CanonicalEType) -> int:
    """The key of a hop's draws: by the relation's name, as its number differs between stores."""
    return draw_seed.key(hop, zlib.crc32(":".join(etype).encode(errors="surrogatepass")))


class SubgraphNodes:
    """The nodes of one type that a subgraph has, each with its row; a seed may have several.

    Args:
        tables: Scratch space for ids of the source.
        count: Nodes of the type in the whole graph.
        seed_of: int64 ``[n]``: the subgraph of each seed, where those are disjoint.
    """

    def __init__(
        self,
        tables: IdTables,
        ntype: str,
        count: int,
        seeds: Tensor,
        seed_of: Tensor | None = None,
        num_subgraphs: int = 0,
    ) -> None:
        self._count = count
        self._renumber: Callable[[Tensor, Tensor], Pair] = partial(tables.renumber, ntype)
        if seed_of is not None:
            self._renumber = IdTable(max(_HASHED, count * num_subgraphs)).renumber
        self.ids, self.seed_of = seeds, seed_of
        codes = self._codes(seeds, seed_of)
        self._distinct, numbers = self._renumber(codes[:0], codes)
        self._num_seeds, self._num_distinct = seeds.numel(), self._distinct.numel()
        self._first: Tensor | None = None
        if self._num_distinct < self._num_seeds:
            self._first = places_of(numbers, self._num_distinct)

    def __len__(self) -> int:
        return self.ids.numel()

    def add(self, ids: Tensor, seed_of: Tensor | None) -> Tensor:
        """Rows of nodes, which get one if they have none."""
        before = self._distinct.numel()
        self._distinct, numbers = self._renumber(self._distinct, self._codes(ids, seed_of))
        new = self._distinct[before:]
        if new.numel():
            if seed_of is not None and self.seed_of is not None:
                self.seed_of = torch.cat([self.seed_of, new // max(1, self._count)])
                new = new % max(1, self._count)
            self.ids = torch.cat([self.ids, new])
        return self._rows(numbers)

    def find(self, ids: Tensor) -> Tensor:
        """Rows of nodes; -1 for those that are not there."""
        _, numbers = self._renumber(self._distinct, ids)
        return self._rows(numbers).masked_fill(numbers >= self._distinct.numel(), -1)

    def _codes(self, ids: Tensor, seed_of: Tensor | None) -> Tensor:
        return ids if seed_of is None else seed_of * self._count + ids

    def _rows(self, distinct: Tensor) -> Tensor:
        """From numbers of distinct nodes to rows, of which a seed that is repeated has several."""
        if self._first is None:
            return distinct
        later = distinct + (self._num_seeds - self._num_distinct)
        if self._num_distinct == 0:
            return later
        of_seed = self._first[distinct.clamp(max=self._num_distinct - 1)]
        return torch.where(distinct < self._num_distinct, of_seed, later)


def sample_hops(
    source: SamplingSource,
    plan: HopPlan,
    seeds: Mapping[str, Tensor],
    draw_seed: DrawSeed,
    seed_times: Mapping[str, Tensor] | None = None,
) -> HopSample:
    """Draw the subgraph around some seeds; collective where the source is.

    A seed that is there several times has as many rows, each with the same neighbours. In disjoint
    subgraphs a node that several of them find at the same hop draws the same neighbours in each.

    Args:
        seeds: Node type to int64 ids of the source; the subgraphs of disjoint ones are numbered in
            this order, type by type.
        seed_times: Node type to the time of each seed, where the plan limits times.
    """
    nodes = _seed_nodes(source, seeds, plan.is_disjoint)
    times = None
    if plan.time is not None:
        times = plan.time.of_seeds(source, seeds, seed_times)
    edges: dict[CanonicalEType, list[Edges]] = {etype: [] for etype in source.etypes}
    begin = dict.fromkeys(source.ntypes, 0)
    num_nodes = {ntype: [len(rows)] for ntype, rows in nodes.items()}
    for hop in range(plan.num_hops):
        drawn = _drawn(source, plan, hop, nodes, begin, draw_seed, times)
        stop = {ntype: len(rows) for ntype, rows in nodes.items()}
        for etype, (counts, neighbors, eids) in drawn.items():
            near, far = nodes[etype[2]], nodes[etype[0]]
            dst = torch.arange(begin[etype[2]], stop[etype[2]]).repeat_interleave(counts)
            of = None if near.seed_of is None else near.seed_of[dst]
            edges[etype].append((far.add(neighbors, of), dst, eids))
        begin = stop
        for ntype, rows in nodes.items():
            num_nodes[ntype].append(len(rows) - begin[ntype])
    if plan.induced:
        return _hop_sample(nodes, _induced(source, nodes, draw_seed))
    num_edges = {etype: [dst.numel() for _, dst, _ in hops] for etype, hops in edges.items()}
    return replace(_hop_sample(nodes, edges), num_nodes=num_nodes, num_edges=num_edges)


def _hop_sample(
    nodes: Mapping[str, SubgraphNodes], edges: Mapping[CanonicalEType, Sequence[Edges]]
) -> HopSample:
    """Nodes and edges, the edges joined from those of each hop."""
    none = torch.empty(0, dtype=torch.int64)
    joined = {
        etype: [torch.cat(parts) for parts in zip((none, none, none), *hops, strict=True)]
        for etype, hops in edges.items()
    }
    src, dst, eids = ({etype: parts[i] for etype, parts in joined.items()} for i in range(3))
    seed_of = {t: rows.seed_of for t, rows in nodes.items() if rows.seed_of is not None}
    return HopSample({t: rows.ids for t, rows in nodes.items()}, src, dst, eids, seed_of or None)


def _induced(
    source: SamplingSource, nodes: Mapping[str, SubgraphNodes], draw_seed: DrawSeed
) -> dict[CanonicalEType, list[Edges]]:
    """All edges between some nodes."""
    requests = [
        NeighborRequest(t, nodes[t[2]].ids, -1, relation_key(draw_seed, _INDUCED, t))
        for t in source.etypes
    ]
    drawn = source.graph.sample_neighbors(requests, DrawOptions())
    induced: dict[CanonicalEType, list[Edges]] = {}
    for request, edges in zip(requests, drawn, strict=True):
        src = nodes[request.etype[0]].find(edges.neighbors.to(torch.int64))
        dst = torch.arange(request.nodes.numel()).repeat_interleave(edges.counts)
        inside = src >= 0
        induced[request.etype] = [(src[inside], dst[inside], eids_of(edges)[inside])]
    return induced


def _seed_nodes(
    source: SamplingSource, seeds: Mapping[str, Tensor], disjoint: bool = False
) -> dict[str, SubgraphNodes]:
    tables, none = IdTables.of(source.graph), torch.empty(0, dtype=torch.int64)
    sizes = [ids.numel() for ids in seeds.values()]
    seed_of = dict(zip(seeds, torch.arange(sum(sizes)).split(sizes), strict=True))
    return {
        ntype: SubgraphNodes(
            tables,
            ntype,
            source.count(ntype),
            seeds.get(ntype, none),
            seed_of.get(ntype, none) if disjoint else None,
            sum(sizes),
        )
        for ntype in source.ntypes
    }


def _drawn(
    source: SamplingSource,
    plan: HopPlan,
    hop: int,
    nodes: Mapping[str, SubgraphNodes],
    begin: Mapping[str, int],
    draw_seed: DrawSeed,
    times: Tensor | None,
) -> dict[CanonicalEType, Edges]:
    """What the nodes that the last hop found have drawn: counts, neighbours and edge ids."""
    requests: dict[DrawOptions, list[NeighborRequest]] = {}
    timed: list[TimedEdges] = []
    for etype in source.etypes:
        fanout = plan.num_neighbors[etype][hop]
        near, first = nodes[etype[2]], begin[etype[2]]
        request = NeighborRequest(
            etype, near.ids[first:], fanout, relation_key(draw_seed, hop, etype)
        )
        options = plan.options(source, etype, fanout)
        limit = plan.time
        if limit is not None and limit.holds_for(source, etype) and fanout != 0:
            assert times is not None and near.seed_of is not None
            timed.append(TimedEdges(request, options, times[near.seed_of[first:]]))
            request, options = NeighborRequest(etype, request.nodes, -1, request.key), DrawOptions()
        requests.setdefault(options, []).append(request)
    drawn = {}
    for options, of_options in requests.items():
        answers = source.graph.sample_neighbors(of_options, options)
        for request, edges in zip(of_options, answers, strict=True):
            neighbors = edges.neighbors.to(torch.int64)
            drawn[request.etype] = edges.counts, neighbors, eids_of(edges)
    if timed:
        assert plan.time is not None
        drawn.update(plan.time.chosen(source, timed, drawn))
    return {etype: drawn[etype] for etype in source.etypes}


def eids_of(edges: SampledNeighbors) -> Tensor:
    """Edge ids of what a store answered, int64, also where they are gathered when read."""
    eids = edges.eids
    assert eids is not None
    return (eids if isinstance(eids, Tensor) else eids.gather()).to(torch.int64)


def sample_budget(
    source: SamplingSource,
    num_samples: Mapping[str, Sequence[int]],
    seeds: Mapping[str, Tensor],
    draw_seed: DrawSeed,
) -> HopSample:
    """Draw a subgraph around some seeds, by the budgets above; collective where the source is.

    ``num_samples`` is node type to the nodes that each hop takes.
    """
    nodes = _seed_nodes(source, seeds)
    budgets = {ntype: _Budget() for ntype in source.ntypes}
    begin = dict.fromkeys(source.ntypes, 0)
    for hop in range(max((len(each) for each in num_samples.values()), default=0)):
        requests = [
            NeighborRequest(
                etype,
                nodes[etype[2]].ids[begin[etype[2]] :],
                _MOST_EDGES,
                relation_key(draw_seed, hop, etype),
            )
            for etype in source.etypes
        ]
        drawn = source.graph.sample_neighbors(requests, DrawOptions(with_eids=False))
        for request, edges in zip(requests, drawn, strict=True):
            share = (1.0 / edges.counts.clamp(min=1).double()).repeat_interleave(edges.counts)
            budgets[request.etype[0]].add(edges.neighbors.to(torch.int64), share)
        begin = {ntype: len(rows) for ntype, rows in nodes.items()}
        candidates = {t: budget.left(nodes[t]) for t, budget in budgets.items()}
        originals = source.original({t: ids for t, (ids, _) in candidates.items()})
        for ntype, (ids, budget) in candidates.items():
            count = num_samples[ntype][hop] if hop < len(num_samples.get(ntype, ())) else 0
            key = relation_key(draw_seed, _TAKEN + hop, (ntype, "", ntype))
            nodes[ntype].add(ids[_taken(budget, originals[ntype], count, key)], None)
    return _hop_sample(nodes, _induced(source, nodes, draw_seed))


class _Budget:
    """The nodes of one type that have an edge to the subgraph, and their budgets."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64)
        self._sums = torch.empty(0, dtype=torch.float64)

    def add(self, ids: Tensor, share: Tensor) -> None:
        self._ids, numbers = torch.unique(torch.cat([self._ids, ids]), return_inverse=True)
        sums = torch.zeros(self._ids.numel(), dtype=torch.float64)
        self._sums = sums.index_add(0, numbers, torch.cat([self._sums, share]))

    def left(self, nodes: SubgraphNodes) -> tuple[Tensor, Tensor]:
        """Nodes that are not in the subgraph, and their budgets."""
        outside = nodes.find(self._ids) < 0
        self._ids, self._sums = self._ids[outside], self._sums[outside]
        return self._ids, self._sums


def _taken(budget: Tensor, original_ids: Tensor, count: int, key: int) -> Tensor:
    """Positions of those that are drawn one after another, in proportion to squared budgets.

    Those with the largest ``u^(1/w)`` are such a draw (Efraimidis and Spirakis, Weighted random
    sampling with a reservoir, 2006); u is uniform in (0, 1], here a function of the key and the
    original id.
    """
    count = min(count, budget.numel())
    uniform = 1.0 - unit(word(states(key_state(key, _DOMAIN), original_ids), 0))
    order = torch.argsort(original_ids)  # of equal numbers the same ones, however the graph is cut
    ranks = (uniform.log() / budget.square())[order]
    return order[torch.argsort(ranks, descending=True, stable=True)[:count]]
