# SPDX-License-Identifier: Apache-2.0
"""train_sampled: training of a node classifier on sampled blocks, on one rank of many.

Every rank calls it with the same configuration. In each step a rank draws blocks for a batch of its
own training nodes; the loss of the step is the mean over the batches of all ranks together, and so
are its gradients, however many nodes each of them had. Evaluation is exact, on the whole graph. A
run depends on its configuration and the partition alone: samples are keyed by epoch and step, and
dropout by epoch and rank, so that a resumed run ends where an undisturbed one would.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm import anchor, rank, world_size
from ..sampling import DataLoader, LaborSampler, MiniBatch, NeighborSampler
from ._config import ResolvedSampledConfig, SampledConfig
from ._counts import reduced, summed
from ._even_seeds import shared_evenly
from ._learner import dropout_seed, summed_loss
from ._result import SamplingReport, TrainResult
from ._run import Progress, TrainingRun
from ._sampled_inputs import LABELS, SampledInputs
from ._shard import TrainingShard

_REPORT_SECONDS = 0.5


class SampledRun(TrainingRun):
    """A sampled run that has been set up and not yet started; see `TrainingRun`. Collective.

    Args:
        config: The run; the same on every rank.
        shard: A part that `load_shard` has read before, to save reading it again.
        progress: Called after every epoch, and now and then during a long one, on every rank.
    """

    config: ResolvedSampledConfig

    def __init__(
        self,
        config: SampledConfig,
        *,
        shard: TrainingShard | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(config.resolved(), shard, progress)

    def _set_up(self) -> None:
        shard, config = self._shard, self.config
        self._inputs = SampledInputs(shard, self._learner, config.model)
        for module in self._learner.model.modules():
            allow = getattr(module, "set_allow_zero_in_degree", None)
            if callable(allow):  # the graph was looked at; that nothing was drawn is no mistake
                allow(True)
        first = shard.data.node_map(shard.target).starts[shard.data.rank]
        seeds = shared_evenly(shard.rows["train"] + first)
        most = reduced([seeds.numel()], "max")[0]
        self._loader = DataLoader(
            self._inputs.graph,
            {shard.target: seeds},
            self._sampler(),
            config.batch_size or most,
            shuffle=True,
            seed=config.seed,
            prefetch=config.prefetch,
            transport=config.transport,  # type: ignore[arg-type]
            map_features=config.map_features,
            cache_bytes=config.cache_bytes,
        )
        self._seconds_waiting: list[float] = []
        self._seconds = 0.0
        self._num_edges = 0

    def _sampler(self) -> NeighborSampler:
        config, inputs = self.config, self._inputs
        features: dict[str, Any] = {
            "prefetch_node_feats": inputs.node_features,
            "prefetch_labels": inputs.labels,
            "prefetch_edge_feats": inputs.edge_features,
        }
        if config.sampler == "labor":
            return LaborSampler(config.fanouts, **features)
        return NeighborSampler(config.fanouts, replace=config.replace, **features)

    def _train_epoch(self, epoch: int) -> float:
        torch.manual_seed(dropout_seed(self.config.seed, rank(), epoch))
        start = last_report = time.perf_counter()
        self._loader.set_epoch(epoch)
        self._seconds_waiting.append(0.0)
        total, num_nodes = 0.0, 0
        for step, blocks in enumerate(self._batches()):
            self._num_edges += sum(block.num_edges() for block in blocks)
            loss, count = self._step(blocks)
            total, num_nodes = total + loss, num_nodes + count
            if time.perf_counter() - last_report > _REPORT_SECONDS and step + 1 < len(self._loader):
                last_report = time.perf_counter()
                mean = total / num_nodes if num_nodes else None
                self._report(step=step + 1, steps=len(self._loader), loss=mean)
        self._seconds += time.perf_counter() - start
        return total / self._shard.num_nodes["train"]

    def _batches(self) -> Iterator[MiniBatch]:
        """The batches of an epoch; the time that each takes to come is noted."""
        batches = iter(self._loader)
        while True:
            start = time.perf_counter()
            blocks = next(batches, None)
            self._seconds_waiting[-1] += time.perf_counter() - start
            if blocks is None:
                return
            yield blocks

    def _step(self, blocks: MiniBatch) -> tuple[float, int]:
        """One step; returns this rank's summed loss before it, and over how many nodes."""
        learner = self._learner
        learner.model.train()
        batch = self._inputs(blocks)
        scores: Tensor = learner.model(batch.graphs, batch.features)
        labels = blocks[-1].dstnodes[self._shard.target].data[LABELS]
        num_seeds = max(1, blocks.num_global_seeds)
        loss = anchor(summed_loss(scores, labels) / num_seeds, *batch.learnt)
        return learner.descend(loss) * num_seeds, blocks.num_seeds

    def _sampling(self) -> SamplingReport:
        num_epochs = max(1, len(self._seconds_waiting))
        waiting, seconds = summed([sum(self._seconds_waiting) / num_epochs, self._seconds], "max")
        num_edges = reduced([self._num_edges])[0]
        return SamplingReport(
            steps_per_epoch=len(self._loader),
            seconds_waiting=waiting,
            edges_per_second=num_edges / seconds if seconds else 0.0,
            cache_hit_rate=self._cache_hit_rate(),
        )

    def _cache_hit_rate(self) -> float | None:
        if not self.config.cache_bytes:
            return None
        return summed([self._loader.cache_hit_rate])[0] / world_size()

    def _close(self) -> None:
        self._loader.close()


def train_sampled(
    config: SampledConfig,
    *,
    shard: TrainingShard | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train a node classifier on sampled blocks; every rank calls this with the same configuration.

    Rank ``r`` reads part ``r`` of ``config.data`` and trains on the training nodes that it owns.
    With a partition of one part no process group is needed. The caller's random number generator
    is left as it was.

    Args:
        config: The run.
        shard: This rank's part, if `load_shard` has read it before.
        progress: Called after every epoch, and now and then during a long one, on every rank.

    Raises:
        ValueError: Configuration and graph do not fit each other; raised on every rank.
        PartitionFormatError: The partition is missing or damaged; raised on every rank.
        CheckpointError: The checkpoint to resume from belongs to another run; on every rank.
        RankError: Another rank failed, or did not answer in time.

    Example:
        >>> config = SampledConfig(data="cora/cora.json", model="sage", fanouts=(10, 10))
        >>> train_sampled(config).best.accuracy["test"]  # doctest: +SKIP
        0.814
    """
    with torch.random.fork_rng(devices=[]):
        return SampledRun(config, shard=shard, progress=progress).train()
