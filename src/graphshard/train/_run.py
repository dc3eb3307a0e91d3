# SPDX-License-Identifier: Apache-2.0
"""TrainingRun: epochs, evaluations and checkpoints, whatever an epoch is.

Every rank makes one with the same configuration. An evaluation is always of the whole graph, exact.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._base.memory import PeakDeviceMemory, PeakMemory
from ..comm import rank, trace, world_size
from ..comm.collectives import gather_int, raise_everywhere, reduce_floats, reduce_ints
from ..data.dataset import SPLITS
from ..errors import CheckpointError
from ._checkpoint import Checkpoint, CheckpointFolder
from ._config import FullBatchConfig, ResolvedConfig, SampledConfig, generators_of
from ._learner import Learner
from ._result import EpochReport, Evaluation, History, SamplingReport, TrainResult
from ._shard import TrainingShard, load_shard

Progress = Callable[[EpochReport], None]


class TrainingRun:
    """A training run that has been set up and not yet started; collective.

    Making one reads this rank's part, builds the model and finds the checkpoint to resume from, so
    that everything the caller may have got wrong shows here, on every rank. A GPU that it runs on
    becomes the current one of this process.

    Args:
        config: The run; the same on every rank.
        shard: A part that `load_shard` has read before, to save reading it again.
        progress: Called after every epoch, and in longer ones during it, on every rank.

    Raises:
        ValueError: Configuration and graph do not fit each other.
        PartitionFormatError: The partition is missing or damaged.
        CheckpointError: The checkpoint to resume from belongs to another run, or another run is
            writing to ``checkpoint_dir``.
    """

    def __init__(
        self,
        config: FullBatchConfig | SampledConfig,
        shard: TrainingShard | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config: ResolvedConfig = config.resolved()
        self._progress = progress
        self._memory = PeakMemory()
        self._shard = load_shard(self.config) if shard is None else shard
        if self._shard.device.type == "cuda":
            torch.cuda.set_device(self._shard.device)
        self._device_memory = PeakDeviceMemory(self._shard.device)
        self._learner = Learner(self._shard, self.config)
        graph = self._learner.graph
        if config.model in ("gcn", "gat") and graph.any_zero_in_degree():
            raise ValueError(
                f"{config.model} needs every node to have an in-edge, and some have none; "
                "partition the graph again with self loops (graphshard partition --self-loops)"
            )
        self._splits = [s for s in SPLITS if self._shard.num_nodes[s]]
        if rank() == 0:
            for text in _settings_without_effect(config, self._shard):
                warnings.warn(text, stacklevel=2)
        self._history = History()
        self._set_up()
        self._checkpoints = self._open_checkpoints()
        self._resumed_from: int | None = None
        self._tell_of_rounding()
        if self._checkpoints is not None and config.resume:
            try:
                self._resume(self._checkpoints)
            except BaseException:
                self._checkpoints.close()
                raise

    def _tell_of_rounding(self) -> None:
        """Data sets keep the digits that they have; a run computes in its own dtype."""
        columns = self._shard.data.node_features
        wide = [t for t in self._shard.features if columns[f"{t}/feat"].dtype == torch.float64]
        if wide and self.config.dtype != "float64":
            self._report(
                note=f"features of {', '.join(wide)} are float64 and are taken as "
                f"{self.config.dtype}; dtype float64 keeps their digits"
            )

    # ------------------------------------------------------------------ left to subclasses

    def _set_up(self) -> None:
        """Make what epochs need, before anything is resumed."""

    def _train_epoch(self, epoch: int) -> float:
        """Train; returns this rank's share of the mean loss over all training nodes.

        Args:
            epoch: How many epochs have been trained before.
        """
        raise NotImplementedError

    def _sampling(self) -> SamplingReport | None:
        """What there is to say about sampling at the end; collective."""
        return None

    def _close(self) -> None:
        """Give back what `_set_up` made."""

    # ------------------------------------------------------------------ checkpoints

    def _open_checkpoints(self) -> CheckpointFolder | None:
        if self.config.checkpoint_dir is None:
            return None
        identity = {
            **self.config.fixed_fields(),
            "aggregation": self._learner.graph.mode,
            "graph": self._shard.data.graph_name,
            "build": self._shard.data.build,
            "parts": self._shard.data.num_parts,
            "rows": [self._shard.num_all[t] for t in self._shard.data.node_type_names],
        }
        rows = self._learner.embeddings
        ids = [getattr(rows, f"ids_{place}") for place in range(len(rows.names))]
        folder = CheckpointFolder(self.config.checkpoint_dir, identity, ids)
        folder.prepare(resume=self.config.resume, write=self.config.save_every > 0)
        return folder

    def _resume(self, checkpoints: CheckpointFolder) -> None:
        found = checkpoints.newest()
        if found is None:
            self._report(note="no checkpoint yet: starting from the beginning")
            return
        error: Exception | None = None
        try:
            self._learner.load(found.shared, found.local)
            if (self._learner.best is None) != (found.history.best is None):
                raise ValueError("it must have the best model if one was evaluated")
            self._history = found.history
        except ValueError as caught:
            error = CheckpointError(
                f"the checkpoint of epoch {found.history.epoch} in {checkpoints.path} does not "
                f"fit this run ({caught}); resume with the same graph and model"
            )
        raise_everywhere(error)
        self._resumed_from = self._history.epoch
        self._history.stopped = 0 < self.config.patience <= self._history.waited
        note = f"resumed from epoch {self._history.epoch}"
        if self._history.stopped:
            note += f", where patience={self.config.patience} had ended the run: nothing to train"
        elif self._history.epoch >= self.config.epochs:
            note += f" of epochs={self.config.epochs}: nothing to train; raise epochs for more"
        self._report(note=note)

    def _save(self) -> None:
        every, history = self.config.save_every, self._history
        if self._checkpoints is None or not every:
            return
        is_last = history.stopped or history.epoch == self.config.epochs
        if history.epoch % every and not is_last:
            return
        shared, local = self._learner.shared_state(), self._learner.local_state()
        self._checkpoints.save(Checkpoint(shared=shared, local=local, history=history))

    # ------------------------------------------------------------------ epochs

    def _report(self, **values: Any) -> None:
        if self._progress is not None:
            epoch, epochs = self._history.epoch, self.config.epochs
            self._progress(EpochReport(epoch=epoch, epochs=epochs, **values))

    def train(self) -> TrainResult:
        """Run the epochs; collective."""
        try:
            return self._train()
        finally:
            self._close()
            if self._checkpoints is not None:
                self._checkpoints.close()

    def _train(self) -> TrainResult:
        history, config = self._history, self.config
        epoch_seconds: list[float] = []
        evaluation_seconds: list[float] = []
        bytes_sent = 0
        while history.epoch < config.epochs and not history.stopped:
            start = time.perf_counter()
            with trace() as sent:
                share = self._train_epoch(history.epoch)
            epoch_seconds.append(time.perf_counter() - start)
            bytes_sent = sent.total_bytes
            history.epoch += 1
            evaluation = None
            if history.epoch % config.eval_every == 0 or history.epoch == config.epochs:
                start = time.perf_counter()
                loss, evaluation = self._evaluate(share)
                evaluation_seconds.append(time.perf_counter() - start)
            else:
                (loss,) = reduce_floats([share])
            history.losses.append(loss)
            if evaluation is not None and history.note_evaluation(evaluation, config.patience):
                self._learner.keep()
            self._report(loss=loss, evaluation=evaluation)
            self._save()
        if history.last is None or history.last.epoch != history.epoch:
            _, evaluation = self._evaluate(0.0)  # resumed past the end, at an epoch without one
            history.note_evaluation(evaluation, config.patience)
        return self._result(epoch_seconds, evaluation_seconds, bytes_sent)

    def _evaluate(self, share: float) -> tuple[float, Evaluation]:
        """Loss of the epoch, and the model's results; one collective beside the model's own."""
        numbers = self._learner.evaluate(self._splits)
        loss, *totals = reduce_floats([share, *numbers])
        right, losses = totals[::2], totals[1::2]
        counts = [self._shard.num_nodes[s] for s in self._splits]
        accuracy = {s: r / n for s, r, n in zip(self._splits, right, counts, strict=True)}
        for split, mine, total in zip(self._splits, numbers[1::2], losses, strict=True):
            if not math.isfinite(total):
                what = f"the loss of the {split} nodes after epoch {self._history.epoch}"
                self._learner.raise_not_finite(what, mine)
        val_loss = dict(zip(self._splits, losses, strict=True)).get("val")
        return loss, Evaluation(epoch=self._history.epoch, accuracy=accuracy, val_loss=val_loss)

    def _result(
        self, epoch_seconds: list[float], evaluation_seconds: list[float], bytes_sent: int
    ) -> TrainResult:
        learner, best, last = self._learner, self._history.best, self._history.last
        assert best is not None, "the last epoch is always evaluated"
        assert last is not None, "the last epoch is always evaluated"
        epoch, evaluation = reduce_floats([_mean(epoch_seconds), _mean(evaluation_seconds)], "max")
        device_memory = gather_int(self._device_memory.peak())
        return TrainResult(
            best=best,
            last=last,
            losses=list(self._history.losses),
            num_nodes=dict(self._shard.num_nodes),
            num_parameters=_num_elements(learner.model),
            num_embedding_parameters=reduce_ints([_num_elements(learner.embeddings)])[0],
            aggregation=learner.graph.mode,
            world_size=world_size(),
            seconds_per_epoch=epoch,
            seconds_per_evaluation=evaluation,
            bytes_per_epoch=gather_int(bytes_sent),
            peak_memory=gather_int(self._memory.above_start()),
            peak_device_memory=device_memory if any(device_memory) else None,
            resumed_from=self._resumed_from,
            stopped_early=self._history.stopped,
            sampling=self._sampling(),
        )


def _settings_without_effect(
    config: FullBatchConfig | SampledConfig, shard: TrainingShard
) -> Iterator[str]:
    """A line for each setting that was given and changes nothing on this graph."""
    resolved: ResolvedConfig = config.resolved()
    if resolved.layers == 1 and config.heads is not None:
        yield f"heads={config.heads} has no effect: it is of hidden layers, and layers=1 has none"
    needs_width = shard.is_typed or len(shard.features) < len(shard.data.node_type_names)
    if resolved.layers == 1 and config.hidden is not None and not needs_width:
        yield f"hidden={config.hidden} has no effect: with layers=1 there are no hidden layers"
    if config.patience and not shard.num_nodes["val"]:
        yield f"patience={config.patience} has no effect: val_mask has no labelled node"
    if world_size() == 1:
        for name in ("halo_dtype", "transport", "map_features", "cache_bytes"):
            value = getattr(config, name, None)
            if value != getattr(type(config), name, None):
                yield f"{name}={value} has no effect: it is about other workers, and there is one"
        return
    on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size())
    is_mapped = isinstance(config, SampledConfig) and config.map_features and on_one_host
    if is_mapped and (size := getattr(config, "cache_bytes", 0)):
        yield (
            f"cache_bytes={size} has no effect: all workers are on one host and share its "
            "features; map_features=False has them cached"
        )


def _num_elements(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class FullBatchRun(TrainingRun):
    """A full-batch run that has been set up and not yet started; see `TrainingRun`. Collective.

    An epoch is one pass over the whole graph: forward and backward exchange rows, `gather_grads`
    sums the gradients of the weights, and every rank makes the same step. Without dropout the
    losses are those of one process, whatever the number of ranks.

    Args:
        config: The run; the same on every rank.
        shard: A part that `load_shard` has read before, to save reading it again.
        progress: Called after every epoch, on every rank.
    """

    def _train_epoch(self, epoch: int) -> float:
        learner = self._learner
        learner.model.train()
        loss = learner.loss(learner.scores(), "train")
        return learner.descend(loss, f"epoch {epoch + 1}")


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
    with torch.random.fork_rng(devices=generators_of(config.device)):
        return FullBatchRun(config, shard=shard, progress=progress).train()
