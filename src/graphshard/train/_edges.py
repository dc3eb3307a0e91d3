# SPDX-License-Identifier: Apache-2.0
"""Tasks on edges: which edges count, a network with a predictor on two ends, batches of edges.

A rank scores the edges into its own nodes. It has the rows of their destinations; those of sources
come from the ranks that own them, in one exchange, which `NodeRows` plans once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        src: int64 ``[n]``, global ids of the sources, of any rank.
        dst: int64 ``[n]``, global ids of the destinations, of this rank.
        feat: ``[n, width]``, features of the edges; None without.
    """

    relation: CanonicalEType
    src: Tensor
    dst: Tensor
    feat: Tensor | None

    def __len__(self) -> int:
        return self.src.numel()

    @property
    def ends(self) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
        """Node type and ids, of the sources and of the destinations."""
        return (self.relation[0], self.src), (self.relation[2], self.dst)

    def at(self, rows: Tensor) -> TargetEdges:
        """Some of them."""
        feat = None if self.feat is None else self.feat[rows]
        return replace(self, src=self.src[rows], dst=self.dst[rows], feat=feat)

    def to(self, device: torch.device) -> TargetEdges:
        feat = None if self.feat is None else self.feat.to(device)
        return replace(self, src=self.src.to(device), dst=self.dst.to(device), feat=feat)


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


class EdgePredictor(nn.Module):
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

    ``model(graphs, features)`` is node type to rows; `score` is for edges.
    """

    predictor: EdgePredictor

    def __init__(self, network: nn.Module, predictor: EdgePredictor, ntypes: Sequence[str]) -> None:
        super().__init__()
        self.network, self.predictor = network, predictor
        self._ntypes = tuple(ntypes)

    def forward(self, graphs: Sequence[MessagePassingGraph], features: Any) -> Mapping[str, Tensor]:
        rows = self.network(graphs, features)
        return rows if isinstance(rows, Mapping) else {self._ntypes[0]: rows}

    @property
    def table_width(self) -> int:
        return int(self.network.table_width)  # type: ignore[arg-type]

    def exchanged_width(self) -> int:
        """Of the network; rows of sources are exchanged apart."""
        return int(self.network.exchanged_width())  # type: ignore[operator]

    def penalized_parameters(self) -> list[nn.Parameter]:
        """Those of the network."""
        return list(self.network.penalized_parameters())  # type: ignore[operator]


class EdgeOrder:
    """Which edges, and so which seeds, a step of sampled training takes; see `BatchOrder`.

    Making it is collective. Each rank takes its own edges; one that has run out takes none.
    """

    def __init__(self, edges: TargetEdges, batch_size: int, seed: int) -> None:
        self._edges, self._seed = edges, seed
        sizes = gather_int(len(edges))
        self._batch_size = batch_size or max(1, *sizes)
        self._sizes = sizes
        self.num_steps = -(-max(sizes) // self._batch_size)

    def of_epoch(self, epoch: int) -> Tensor:
        """The order of this rank's edges in an epoch."""
        generator = torch.Generator().manual_seed(_seed_of(self._seed, rank(), epoch))
        return torch.randperm(len(self._edges), generator=generator)

    def num_global(self, step: int) -> int:
        """Edges of all ranks together at a step."""
        first = step * self._batch_size
        return sum(max(0, min(self._batch_size, size - first)) for size in self._sizes)

    def edges(self, order: Tensor, step: int) -> Tensor:
        """Which of this rank's edges a step takes."""
        return order[step * self._batch_size : (step + 1) * self._batch_size]

    def batch(self, order: Tensor, step: int) -> dict[str, Tensor]:
        """Node type to the ends of a step's edges, ascending."""
        return distinct_ends(self._edges.at(self.edges(order, step)))


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
