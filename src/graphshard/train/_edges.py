# SPDX-License-Identifier: Apache-2.0
"""Tasks on edges: which edges count, a network with a predictor on two ends, batches of edges.

A rank scores the edges into its own nodes. It has the rows of their destinations; those of sources
come from the ranks that own them, in one exchange, which `NodeRows` plans once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..comm import ExchangePlan, fetch_halo, rank, world_size
from ..comm.collectives import gather_int
from ..graph import NID, MessagePassingGraph


@dataclass(frozen=True)
class TargetEdges:
    """This rank's edges that are in a split and have a label; the rows of the task.

    Args:
        relations: Those that the task is on.
        number: int64 ``[n]``, which of these each edge is of.
        index: int64 ``[n]``, which of its relation's edges into this rank's nodes it is, as the
            part has them.
        src: int64 ``[n]``, global ids of the sources, of any rank.
        dst: int64 ``[n]``, global ids of the destinations, of this rank.
        feat: ``[n, width]``, features of the edges, those of several relations side by side, with
            zeros in the columns of others; None without.
        categories: int64 ``[n, k]``, likewise.
        etype: int64 ``[n]``, relation numbers of the edges: ``number``, if the task is on several
            relations; else what the edges of a plain graph carry; 0 without.
    """

    relations: tuple[CanonicalEType, ...]
    number: Tensor
    index: Tensor
    src: Tensor
    dst: Tensor
    feat: Tensor | None
    categories: Tensor | None
    etype: Tensor

    def __len__(self) -> int:
        return self.src.numel()

    @property
    def node_types(self) -> tuple[str, ...]:
        """Of all ends, each once."""
        return tuple(dict.fromkeys(t for s, _, d in self.relations for t in (s, d)))

    def by_relation(self) -> list[tuple[CanonicalEType, Tensor]]:
        """Each relation with the edges that are of it."""
        return [
            (etype, (self.number == number).nonzero().view(-1))
            for number, etype in enumerate(self.relations)
        ]

    def by_type(self, side: int) -> list[tuple[str, Tensor | slice]]:
        """Each node type of sources (side 0) or destinations (1) with the edges of such an end."""
        ntypes = [etype[2 * side] for etype in self.relations]
        if len({*ntypes}) == 1:
            return [(ntypes[0], slice(None))]
        kinds = {t: [n for n, other in enumerate(ntypes) if other == t] for t in ntypes}
        return [
            (t, torch.isin(self.number, self.number.new_tensor(numbers)).nonzero().view(-1))
            for t, numbers in kinds.items()
        ]

    def ends(self, side: int) -> Tensor:
        """Global ids of the sources (side 0) or destinations (1)."""
        return self.dst if side else self.src

    def at(self, rows: Tensor) -> TargetEdges:
        """Some of them."""
        return self.of_each(lambda values: values[rows])

    def to(self, device: torch.device) -> TargetEdges:
        return self.of_each(lambda values: values.to(device))

    def of_each(self, function: Callable[[Tensor], Tensor]) -> TargetEdges:
        """With each column changed alike."""
        return TargetEdges(
            relations=self.relations,
            number=function(self.number),
            index=function(self.index),
            src=function(self.src),
            dst=function(self.dst),
            feat=None if self.feat is None else function(self.feat),
            categories=None if self.categories is None else function(self.categories),
            etype=function(self.etype),
        )


def in_order(parts: Sequence[Tensor], places: Sequence[Tensor | slice]) -> Tensor:
    """Rows that stand in parts, each put in its place."""
    if len(parts) == 1:
        return parts[0]
    order = torch.cat([p for p in places if isinstance(p, Tensor)])
    return torch.cat(list(parts)).index_select(0, torch.argsort(order))


class NodeRows:
    """Rows of nodes of any rank, in any order; making it and calling it is collective.

    Args:
        ids: int64 ``[n]``, global ids; an id may be there several times.
        ranges: Ids that each rank owns.
    """

    def __init__(self, ids: Tensor, ranges: RangeMap) -> None:
        distinct, self._places = torch.unique(ids, return_inverse=True)
        owner = ranges.part_of(distinct)
        rows = ranges.local_of(distinct, owner)
        if world_size() == 1:
            self._own, self._plan = rows, None
            return
        # Distinct ids ascend, and so do their owners: halo rows come in the same order.
        needed = [rows[owner == part] for part in range(world_size())]
        self._own = needed[rank()]
        first = int((owner < rank()).sum())
        needed[rank()] = rows[:0]
        self._num_before = first
        self._plan = ExchangePlan.build(needed, ranges.size(rank()), device=ids.device)

    def __call__(self, rows: Tensor) -> Tensor:
        """``[n, width]`` from this rank's ``[num_owned, width]``."""
        distinct = rows.index_select(0, self._own)
        if self._plan is not None:
            (halo,) = fetch_halo([(self._plan, rows)])
            distinct = torch.cat([halo[: self._num_before], distinct, halo[self._num_before :]])
        return distinct.index_select(0, self._places)


class EndRows:
    """Rows of both ends of some edges; making it and calling it is collective.

    Args:
        edges: Into this rank's nodes.
        ranges: Node type to the global ids that each rank owns.
    """

    def __init__(self, edges: TargetEdges, ranges: Mapping[str, RangeMap]) -> None:
        self._sources = [
            (ntype, places, NodeRows(edges.src[places], ranges[ntype]))
            for ntype, places in edges.by_type(0)
        ]
        self._destinations = [
            (ntype, places, edges.dst[places] - ranges[ntype].starts[rank()])
            for ntype, places in edges.by_type(1)
        ]

    def __call__(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """``[n, width]`` of the sources and of the destinations, from this rank's rows by type."""
        sources = [fetch(rows[ntype]) for ntype, _, fetch in self._sources]
        own = [rows[ntype].index_select(0, ids) for ntype, _, ids in self._destinations]
        return (
            in_order(sources, [places for _, places, _ in self._sources]),
            in_order(own, [places for _, places, _ in self._destinations]),
        )


class PairPredictor(nn.Module):
    """Two layers on the rows of both ends side by side, and the features of the edge."""

    def __init__(self, width: int, edge_width: int, out: int, dropout: float) -> None:
        super().__init__()
        self.hidden = nn.Linear(2 * width + edge_width, width)
        self.out = nn.Linear(width, out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src: Tensor, dst: Tensor, feat: Tensor | None) -> Tensor:
        """Scores ``[n, out]``."""
        both = [src, dst] if feat is None else [src, dst, feat]
        scores: Tensor = self.out(self.dropout(self.hidden(torch.cat(both, dim=1)).relu()))
        return scores


class EdgeNetwork(nn.Module):
    """A network that gives rows to nodes, with a predictor that scores edges by them.

    ``model(graphs, features)`` is node type to rows, which the predictor takes.
    """

    def __init__(self, network: nn.Module, predictor: nn.Module, ntypes: Sequence[str]) -> None:
        super().__init__()
        self.network, self.predictor = network, predictor
        self._ntypes = tuple(ntypes)

    def forward(self, graphs: Sequence[MessagePassingGraph], features: Any) -> Mapping[str, Tensor]:
        rows = self.network(graphs, features)
        return rows if isinstance(rows, Mapping) else {self._ntypes[0]: rows}


class EpochOfEdges(NamedTuple):
    """The order of an epoch."""

    epoch: int
    order: Tensor  # of this rank's edges
    wrong: Mapping[str, Tensor]  # node type to ids ``[num_steps, n]`` that are drawn besides


class EdgeOrder:
    """Which edges, and so which seeds, a step of sampled training takes.

    It is for the ``order`` of `graphshard.sampling.DataLoader`. Making it is collective. Each rank
    takes its own share of the edges; one that has run out takes none.

    Args:
        hidden: Edges that carry no messages in the step that takes an edge; None: all carry some.
        wrong: Called on all ranks with an epoch and the number of steps, for further seeds.
    """

    def __init__(
        self,
        edges: TargetEdges,
        batch_size: int,
        seed: int,
        hidden: Mapping[CanonicalEType, RaggedIds] | None = None,
        wrong: Callable[[int, int], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._edges, self._seed, self._hidden, self._wrong = edges, seed, hidden, wrong
        self._sizes = gather_int(len(edges))
        self._batch_size = batch_size or max(1, *self._sizes)
        self.num_steps = -(-max(self._sizes) // self._batch_size)
        self._latest = EpochOfEdges(-1, torch.empty(0), {})

    def of_epoch(self, epoch: int) -> EpochOfEdges:
        """The order of an epoch; collective when it is first asked for."""
        if self._latest.epoch != epoch:
            generator = torch.Generator().manual_seed(_seed_of(self._seed, rank(), epoch))
            order = torch.randperm(len(self._edges), generator=generator)
            wrong = {} if self._wrong is None else self._wrong(epoch, self.num_steps)
            self._latest = EpochOfEdges(epoch, order, wrong)
        return self._latest

    def num_global(self, step: int) -> int:
        """Edges of all ranks together at a step."""
        first = step * self._batch_size
        return sum(max(0, min(self._batch_size, size - first)) for size in self._sizes)

    def edges(self, order: EpochOfEdges, step: int) -> Tensor:
        """Which of this rank's edges a step takes."""
        return order.order[step * self._batch_size : (step + 1) * self._batch_size]

    def batch(self, order: EpochOfEdges, step: int) -> dict[str, Tensor]:
        """Node type to the ends of a step's edges and what is drawn besides, ascending."""
        ends = distinct_ends(self._edges.at(self.edges(order, step)))
        for ntype, ids in order.wrong.items():
            ends[ntype] = torch.unique(torch.cat([ends[ntype], ids[step]]))
        return ends

    def excluded(self, order: EpochOfEdges, step: int) -> dict[CanonicalEType, Tensor] | None:
        """Relation to global ids of edges that carry no messages in a step."""
        if self._hidden is None:
            return None
        chosen = self.edges(order, step)
        return {etype: ids.of_rows(chosen) for etype, ids in self._hidden.items()}


def distinct_ends(edges: TargetEdges) -> dict[str, Tensor]:
    """Node type to the distinct ends of edges, ascending."""
    ids: dict[str, list[Tensor]] = {}
    for side in (0, 1):
        for ntype, places in edges.by_type(side):
            ids.setdefault(ntype, []).append(edges.ends(side)[places])
    return {ntype: torch.unique(torch.cat(parts)) for ntype, parts in ids.items()}


def rows_in_block(
    block: MessagePassingGraph, rows: Mapping[str, Tensor], ntype: str, ids: Tensor
) -> Tensor:
    """Rows of some nodes, from those of the destinations of a block, whose ids ascend."""
    places = torch.searchsorted(block.dstnodes[ntype].data[NID].long(), ids)
    return rows[ntype].index_select(0, places)


def ends_in_block(
    block: MessagePassingGraph, rows: Mapping[str, Tensor], edges: TargetEdges
) -> tuple[Tensor, Tensor]:
    """Rows of the sources and of the destinations of edges, likewise."""
    sides = []
    for side in (0, 1):
        kinds = edges.by_type(side)
        ids = edges.ends(side)
        parts = [rows_in_block(block, rows, ntype, ids[places]) for ntype, places in kinds]
        sides.append(in_order(parts, [places for _, places in kinds]))
    return sides[0], sides[1]


class RaggedIds(NamedTuple):
    """For each of some rows any number of ids."""

    counts: Tensor  # int64 [n]
    ids: Tensor  # int64 [sum of counts]

    @classmethod
    def of_pairs(cls, rows: Tensor, ids: Tensor, num_rows: int) -> RaggedIds:
        """From the row of each id."""
        order = torch.argsort(rows, stable=True)
        return cls(torch.bincount(rows, minlength=num_rows), ids[order])

    def of_rows(self, rows: Tensor) -> Tensor:
        """The ids of some rows, one row after another."""
        counts = self.counts[rows]
        starts = (self.counts.cumsum(0) - self.counts)[rows] - (counts.cumsum(0) - counts)
        first = torch.repeat_interleave(starts, counts)
        return self.ids[first + torch.arange(first.numel())]


def _seed_of(seed: int, *places: int) -> int:
    name = "/".join(map(str, ("edges", seed, *places)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
