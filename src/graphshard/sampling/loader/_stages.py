# SPDX-License-Identifier: Apache-2.0
"""The stages of `DataLoader`: seeds to blocks, blocks to features, and both to a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm import trace
from ..feature_store import FeaturePlan, RowSource
from ..graph_store import Structure
from ..sampler import DrawSeed, IdTables, NeighborSampler
from ._mini_batch import MiniBatch
from ._seeds import SeedOrder

SAMPLING, FEATURES, DEVICE = "sampling", "features", "device"


@dataclass
class LoaderStats:
    """What a pass over a `DataLoader` has done so far, on this rank.

    Args:
        num_steps: Batches given to the training loop.
        wait_seconds: How long the training loop has waited for them.
        num_edges: Edges drawn, also for batches that are still to come.
        num_input_nodes: Nodes whose input features were wanted, summed over batches.
        cache_hit_rate: Part of the accesses to remote rows that the cache answered.
        sampling_bytes: Bytes sent to other ranks to draw neighbours, for a cache included.
        feature_bytes: Bytes sent to other ranks to fetch features, for a cache included.
    """

    num_steps: int = 0
    wait_seconds: float = 0.0
    num_edges: int = 0
    num_input_nodes: int = 0
    cache_hit_rate: float = 0.0
    sampling_bytes: int = 0
    feature_bytes: int = 0


class Place(NamedTuple):
    """Where a batch is in a run, and what it is drawn for."""

    epoch: int
    order: Tensor | None
    step: int


class Fetched(NamedTuple):
    """A batch, and the rows that belong to it."""

    batch: MiniBatch
    rows: list[dict[str, Tensor]]


@dataclass
class Sampling:
    """The first stage: draws the blocks of a place.

    Args:
        structure: Where neighbours come from.
        sampler: How they are drawn.
        seeds: This rank's batches of seeds.
        seed: Of the draws.
        with_eids: Whether edge ids are wanted.
    """

    structure: Structure
    sampler: NeighborSampler
    seeds: SeedOrder
    seed: int
    with_eids: bool
    stats: LoaderStats = field(default_factory=LoaderStats)

    def __post_init__(self) -> None:
        self._tables = IdTables(self.structure)

    def __call__(self, place: Place) -> MiniBatch:
        batch, stats = self.draw(place), self.stats
        stats.num_edges += sum(adj.num_edges for block in batch for adj in block.relations)
        stats.num_input_nodes += sum(batch[0].num_src_nodes(t) for t in batch[0].srctypes)
        return batch

    def draw(self, place: Place) -> MiniBatch:
        """The blocks; collective where the graph spans ranks."""
        seeds: Mapping[str, Tensor] = self.seeds.batch(place.order, place.step)
        with trace(only_this_thread=True) as sent:
            blocks = self.sampler.draw(
                self.structure,
                seeds,
                DrawSeed(self.seed, place.epoch, place.step),
                tables=self._tables,
                with_eids=self.with_eids,
            )
        self.stats.sampling_bytes += sent.total_bytes
        return MiniBatch(
            blocks,
            epoch=place.epoch,
            step=place.step,
            num_seeds=sum(ids.numel() for ids in seeds.values()),
            num_global_seeds=self.seeds.num_global(place.step),
        )


@dataclass
class Fetching:
    """The second stage: fetches the features of a batch."""

    source: RowSource
    plan: FeaturePlan
    stats: LoaderStats = field(default_factory=LoaderStats)

    def __call__(self, batch: MiniBatch) -> Fetched:
        with trace(only_this_thread=True) as sent:
            rows = self.source.fetch(self.plan.requests(batch))
        self.stats.feature_bytes += sent.total_bytes
        return Fetched(batch, rows)


@dataclass
class Finishing:
    """The last stage: moves a batch to its device and attaches the features."""

    plan: FeaturePlan
    device: torch.device

    def __call__(self, fetched: MiniBatch | Fetched) -> MiniBatch:
        batch, rows = fetched if isinstance(fetched, Fetched) else (fetched, [])
        batch = batch.to(self.device)
        self.plan.attach(batch, rows)
        return batch
