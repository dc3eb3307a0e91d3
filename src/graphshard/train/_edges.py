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
        index: int64 ``[n]``, which of the edges into this rank's nodes they are, as the part has
            them.
        src: int64 ``[n]``, global ids of the sources, of any rank.
        dst: int64 ``[n]``, global ids of the destinations, of this rank.
        feat: ``[n, width]``, features of the edges; None without.
        etype: int64 ``[n]``, relation numbers of the edges; 0 without.
    """

    relation: CanonicalEType
    index: Tensor
    src: Tensor
    dst: Tensor
    feat: Tensor | None
    etype: Tensor

    def __len__(self) -> int:
        return self.src.numel()

    @property
    def ends(self) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
        """Node type and ids, of the sources and of the destinations."""
        return (self.relation[0], self.src), (self.relation[2], self.dst)

    def at(self, rows: Tensor) -> TargetEdges:
        """Some of them."""
        return self._of_each(lambda values: values[rows])

    def to(self, device: torch.device) -> TargetEdges:
        return self._of_each(lambda values: values.to(device))

    def _of_each(self, function: Callable[[Tensor], Tensor]) -> TargetEdges:
        return TargetEdges(
            relation=self.relation,
            index=function(self.index),
            src=function(self.src),
            dst=function(self.dst),
            feat=None if self.feat is None else function(self.feat),
            etype=function(self.etype),
        )


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
    takes its own edges; one that has run out takes none.

    Args:
        wrong: Called on all ranks with an epoch and the number of steps, for further seeds.
    """

    def __init__(
        self,
        edges: TargetEdges,
        batch_size: int,
        seed: int,
        wrong: Callable[[int, int], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._edges, self._seed, self._wrong = edges, seed, wrong
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


def distinct_ends(edges: TargetEdges) -> dict[str, Tensor]:
    """Node type to the distinct ends of edges, ascending."""
    ids: dict[str, list[Tensor]] = {}
    for ntype, of_type in edges.ends:
        ids.setdefault(ntype, []).append(of_type)
    return {ntype: torch.unique(torch.cat(parts)) for ntype, parts in ids.items()}


def rows_in_block(
    block: MessagePassingGraph, rows: Mapping[str, Tensor], ntype: str, ids: Tensor
) -> Tensor:
    """Rows of some nodes, from those of the destinations of a block, whose ids ascend."""
    places = torch.searchsorted(block.dstnodes[ntype].data[NID].long(), ids)
    return rows[ntype].index_select(0, places)


def _seed_of(seed: int, *places: int) -> int:
    name = "/".join(map(str, ("edges", seed, *places)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
