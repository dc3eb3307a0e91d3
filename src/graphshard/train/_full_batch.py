# SPDX-License-Identifier: Apache-2.0
"""train_full_batch: exact full-batch training of a node classifier, on one rank of many.

Every rank calls it with the same configuration. An epoch is one pass over the whole graph: forward
and backward exchange rows, `gather_grads` sums the gradients of the weights, and every rank makes
the same step. Without dropout the losses are those of one process, whatever the number of ranks.
"""

from __future__ import annotations

import torch

from ._config import FullBatchConfig
from ._result import TrainResult
from ._run import Progress, TrainingRun
from ._shard import TrainingShard


class FullBatchRun(TrainingRun):
    """A full-batch run that has been set up and not yet started; see `TrainingRun`. Collective.

    Args:
        config: The run; the same on every rank.
        shard: A part that `load_shard` has read before, to save reading it again.
        progress: Called after every epoch, on every rank.
    """

    def __init__(
        self,
        config: FullBatchConfig,
        *,
        shard: TrainingShard | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(config.resolved(), shard, progress)

    def _train_epoch(self, epoch: int) -> float:
        return self._learner.step()


def train_full_batch(
    config: FullBatchConfig,
    *,
    shard: TrainingShard | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train a node classifier in full batch; every rank calls this with the same configuration.

    Rank ``r`` reads part ``r`` of ``config.data``. With a partition of one part no process group
    is needed. The caller's random number generator is left as it was.

    Args:
        config: The run.
        shard: This rank's part, if `load_shard` has read it before.
        progress: Called after every epoch, on every rank.

    Raises:
        ValueError: Configuration and graph do not fit each other; raised on every rank.
        PartitionFormatError: The partition is missing or damaged; raised on every rank.
        CheckpointError: The checkpoint to resume from belongs to another run; on every rank.
        RankError: Another rank failed, or did not answer in time.

    Example:
        >>> config = FullBatchConfig(data="cora/cora.json", model="gcn")
        >>> train_full_batch(config).best.accuracy["test"]  # doctest: +SKIP
        0.815
    """
    with torch.random.fork_rng(devices=[]):
        return FullBatchRun(config, shard=shard, progress=progress).train()
