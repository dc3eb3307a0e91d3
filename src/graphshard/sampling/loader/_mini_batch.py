# SPDX-License-Identifier: Apache-2.0
"""MiniBatch: the blocks of one step and how much they weigh; the stages that make one.

`global_mean` is the loss of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm import trace
from ...graph import Block
from ...graph.message_passing import frames_of
from ..feature_store import CachedFeatureStore, FeaturePlan, FeatureStore
from ..graph_store import GraphStore
from ..sampler import DrawSeed, IdTables, NeighborSampler
from ._batch_order import SeedOrder
from ._pipeline import Run, Stage

SAMPLING, FEATURES, DEVICE = "sampling", "features", "device"

FetchedRows = list[dict[str, Tensor]]


class MiniBatch(list[Block]):
    """The blocks of one step: ``batch[0]`` takes the inputs, ``batch[-1]`` ends at the seeds.

    Args:
        blocks: In that order.
        epoch: Which epoch it belongs to.
        step: Which step of the epoch.
        num_seeds: Seeds on this rank, of all types; 0 where this rank has run out of them.
        num_global_seeds: Seeds on all ranks together.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        epoch: int = 0,
        step: int = 0,
        num_seeds: int = 0,
        num_global_seeds: int = 0,
    ) -> None:
        super().__init__(blocks)
        self.epoch, self.step = epoch, step
        self.num_seeds, self.num_global_seeds = num_seeds, num_global_seeds

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MiniBatch:
        """The same batch with its blocks, and what is attached to them, on a device."""
        return MiniBatch((block.to(device, non_blocking) for block in self), **vars(self))


def global_mean(values: Tensor, batch: MiniBatch | int, *, averaged_over: int = 1) -> Tensor:
    """This rank's share of the mean of ``values`` over the seeds of all ranks.

    The shares of all ranks add up to the mean, and so do their gradients: after
    `graphshard.gather_grads`, which adds them up, every rank has the gradient of what one process
    would compute from the union of the seeds. Nothing is communicated, because every rank knows in
    advance how many seeds the others have at each step. An empty batch weighs nothing.

    Args:
        values: ``[num_seeds, ...]``, a loss per seed of this rank (``reduction="none"``).
            Where a seed has several, their mean is taken.
        batch: What the loader gave; or the number of seeds on all ranks, for losses over some of
            them only.
        averaged_over: Number of ranks over which gradients will be averaged rather than added up:
            under DistributedDataParallel, ``torch.distributed.get_world_size()``.

    Returns:
        A scalar; 0 where there are no values.

    Raises:
        ValueError: Not one value per seed.

    Example:
        >>> import graphshard as sar
        >>> from graphshard.data import load_dataset
        >>> from graphshard.sampling import DataLoader, DistNeighborSampler
        >>> cora = load_dataset("cora")
        >>> sampler = DistNeighborSampler(
        ...     [5],
        ...     input_node_features={"feat": cora.graph.ndata["feat"]},
        ...     output_node_features={"label": cora.graph.ndata["label"]},
        ... )
        >>> model = sar.nn.SAGEConv(1433, 7, "mean")
        >>> for batch in DataLoader(cora.graph, cora.node_ids("train"), sampler, 70):
        ...     logits = model(batch[0], batch[0].srcdata["feat"])
        ...     labels = batch[-1].dstdata["label"]
        ...     losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        ...     global_mean(losses, batch).backward()
        ...     sar.gather_grads(model)
    """
    if isinstance(batch, MiniBatch):
        if values.dim() == 0 or values.shape[0] != batch.num_seeds:
            raise ValueError(
                f"values must hold one row for each of the {batch.num_seeds} seeds of this rank "
                f"(got shape {tuple(values.shape)}); compute the loss with reduction='none', or "
                "pass the number of seeds that count, on all ranks together, in place of the batch"
            )
        total = batch.num_global_seeds
    else:
        total = batch
    num_values = total * math.prod(values.shape[1:])
    return values.sum() / (max(1, num_values) / averaged_over)


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


class BatchPosition(NamedTuple):
    """Where a batch is in a run.

    Args:
        epoch: Which epoch.
        order: Of the epoch's seeds, from `SeedOrder.of_epoch`.
        step: Which step of the epoch.
    """

    epoch: int
    order: Tensor | None
    step: int


class BatchStages:
    """What a `DataLoader` does for a batch: draw blocks, fetch features, move both to a device.

    Args:
        store: Where neighbours come from, for the thread that samples.
        sampler: How they are drawn.
        seeds: This rank's batches of seeds.
        seed: Of the draws.
        with_eids: Whether edge ids are wanted.
        plan: Which features.
        features: Where they come from, for the thread that fetches; None if there are none.
    """

    def __init__(
        self,
        store: GraphStore,
        sampler: NeighborSampler,
        seeds: SeedOrder,
        seed: int,
        with_eids: bool,
        plan: FeaturePlan,
        features: FeatureStore | None,
    ) -> None:
        self._store, self._sampler, self._seeds, self._seed = store, sampler, seeds, seed
        self._with_eids, self._plan, self._features = with_eids, plan, features
        self._tables = IdTables(store)
        wanted = sampler.output_device
        self._device = torch.empty(0, device=store.device if wanted is None else wanted).device
        self.stats = LoaderStats()

    def as_pipeline(self) -> list[Stage]:
        """The stages, each for a thread of its own."""
        stages = [Stage(SAMPLING, self.sample)]
        if self._device != self._store.device:
            if self._features is None:
                return [*stages, Stage(DEVICE, self._moved)]
            return [*stages, Stage(FEATURES, self.fetch), Stage(DEVICE, self.finish)]
        if self._features is not None:  # attaching is not worth a thread
            stages.append(Stage(FEATURES, lambda batch: self.finish(self.fetch(batch))))
        return stages

    def sample(self, position: BatchPosition) -> MiniBatch:
        """Draw the blocks of a batch, and count what was drawn."""
        batch, stats = self._drawn(position), self.stats
        stats.num_edges += sum(adj.num_edges for block in batch for adj in block.relations)
        stats.num_input_nodes += sum(frame.num_rows for frame in frames_of(batch[0])[0])
        return batch

    def _drawn(self, position: BatchPosition) -> MiniBatch:
        epoch, order, step = position
        seeds = self._seeds.batch(order, step)
        with trace(only_this_thread=True) as sent:
            blocks = self._sampler.draw(
                self._store,
                seeds,
                DrawSeed(self._seed, epoch, step),
                tables=self._tables,
                with_eids=self._with_eids,
            )
        self.stats.sampling_bytes += sent.total_bytes
        return MiniBatch(
            blocks,
            epoch=epoch,
            step=step,
            num_seeds=sum(ids.numel() for ids in seeds.values()),
            num_global_seeds=self._seeds.num_global(step),
        )

    def fetch(self, batch: MiniBatch) -> tuple[MiniBatch, FetchedRows]:
        """Fetch the features of a batch."""
        assert self._features is not None
        with trace(only_this_thread=True) as sent:
            rows = self._features.fetch(self._plan.requests(batch))
        self.stats.feature_bytes += sent.total_bytes
        return batch, rows

    def finish(self, fetched: tuple[MiniBatch, FetchedRows]) -> MiniBatch:
        """Move a batch to its device and attach the features."""
        batch = self._moved(fetched[0])
        self._plan.attach(batch, fetched[1])
        return batch

    def _moved(self, batch: MiniBatch) -> MiniBatch:
        return batch if self._device == self._store.device else batch.to(self._device)

    @property
    def cache_hit_rate(self) -> float:
        """Part of the accesses to remote rows that the cache answered, since it was filled."""
        features = self._features
        return features.hit_rate if isinstance(features, CachedFeatureStore) else 0.0

    def fill_cache(self, positions: Sequence[BatchPosition]) -> None:
        """If there is a cache, draw a pass to count how often it reads each row; collective."""
        if not isinstance(self._features, CachedFeatureStore):
            return
        with torch.no_grad():
            drawn = (self._plan.requests(self._drawn(position)) for position in positions)
            counts = self._features.count(drawn)
            with trace(only_this_thread=True) as sent:
                self._features.prepare(counts)
        self.stats.feature_bytes += sent.total_bytes


def deliver(
    run: Run[MiniBatch], stages: BatchStages, stats: LoaderStats, num_steps: int, loader: object
) -> Iterator[MiniBatch]:
    """Give the batches of a pass to the training loop, and count.

    Args:
        run: The pass.
        stages: Which make its batches.
        stats: Of the pass.
        num_steps: Batches in a whole pass.
        loader: Kept alive as long as the loop.

    Raises:
        RuntimeError: The pass was ended by something else than the loop.
    """
    try:
        for batch in run:
            stats.num_steps, stats.wait_seconds = run.num_delivered, run.seconds_waited
            stats.cache_hit_rate = stages.cache_hit_rate
            yield batch
            del batch
        if run.num_delivered < num_steps:
            raise RuntimeError(
                "another pass over this DataLoader has begun, or it was closed, which ended "
                "this pass; make a loader for each"
            )
    except GeneratorExit:
        # The caller has left the loop. Close here, and not when `run` is dropped: this may hold
        # the last reference to the loader, whose end would cut short what the threads have
        # permission to finish.
        run.close()
        raise
