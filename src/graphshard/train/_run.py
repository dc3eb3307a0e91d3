# SPDX-License-Identifier: Apache-2.0
"""TrainingRun: epochs, evaluations and checkpoints, whatever an epoch is; every rank makes one.

`FullBatchRun` and `SampledRun` say what an epoch is. A `Learner` is what the run changes: model,
embeddings, optimizer, random numbers. An evaluation is always of the whole graph, exact.

[Note: sampled runs]
    In each step a rank draws blocks for a batch of its own training nodes; the loss of the step is
    the mean over the batches of all ranks together, and so are its gradients, however many nodes
    each of them had. A run depends on its configuration and the partition alone: samples are keyed
    by epoch and step, and dropout by epoch and rank, so that a resumed run ends where an
    undisturbed one would.

    Features, labels and relation numbers come with the blocks; they are drawn and gathered on the
    CPU, also for a model on a GPU, to which the loader moves them. Rows of embeddings, which are
    learnt and belong to the ranks that own the nodes, are fetched by a collective of the training
    loop.

[Note: degrees of samples]
    A graph convolution divides a message by the roots of two degrees, and on a block it knows only
    those in the block. There, an edge from ``j`` to ``i`` gets the weight that makes its message,
    times ``d_i / k_i`` for ``k_i`` neighbours drawn of ``d_i``, what it is on the whole graph. So
    the sum that a node receives is right on average, and with all neighbours drawn it is exact.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._base.memory import PeakDeviceMemory, PeakMemory
from .._base.ranges import RangeMap
from ..comm import (
    ExchangePlan,
    anchor,
    fetch_halo,
    gather_grads,
    is_initialized,
    ragged_all_to_all,
    rank,
    sync_params,
    trace,
    world_size,
)
from ..comm.collectives import (
    gather_int,
    raise_everywhere,
    reduce_floats,
    reduce_ints,
    shared_errors,
)
from ..data.dataset import SPLITS
from ..errors import CheckpointError
from ..fullbatch import GraphShardManager, PartitionData
from ..graph import NID, Block, MessagePassingGraph
from ..ops import Adjacency
from ..sampling import DataLoader, LaborSampler, MiniBatch, NeighborSampler
from ._categories import CategoryTables
from ._checkpoint import Checkpoint, CheckpointFolder, tensors_under
from ._config import (
    NEED_IN_EDGES,
    FullBatchConfig,
    ResolvedConfig,
    ResolvedSampledConfig,
    RunConfig,
    SampledConfig,
    generators_of,
)
from ._defaults import defaults_of
from ._edges import EdgeNetwork, EdgeOrder, NodeRows, PairPredictor, TargetEdges, rows_in_block
from ._embeddings import NODE, PAIR, NodeEmbeddings, OneHotRelGraphConv, Table, pair_data
from ._export import export_run
from ._links import LinkPredictor, LinkScorer
from ._models import (
    GAT,
    GCN,
    HGT,
    RGCN,
    SAGE,
    GATv2,
    InputDropout,
    ModelFeatures,
    NodeClassifier,
    TypedNetwork,
    TypedRGCN,
)
from ._optimizer import Descent
from ._own_model import ModelSchema, build_own_model
from ._reports import PICTURE, TensorBoard, draw_history, read_history
from ._result import EpochReport, Evaluation, History, HistoryFile, SamplingReport, TrainResult
from ._run_folder import open_run_folder
from ._tasks import ACCURACY, Classes, Links, gather_rows, needs_all, widened
from ._training_shard import TrainingShard, all_finite, load_shard, relation_norm

# Tables of an R-GCN whose nodes have no features.
ROWS, SELF_ROWS = "one-hot rows", "one-hot rows of self loops"

GPU_RANDOM = "random on the GPU"
"""Name, in a rank's state, of the generator of its GPU."""


_REPORT_SECONDS = 0.5
_EPOCHS_TO_LEARN = 10  # after which a loss should have moved
_LEARNT = 0.98  # of the loss without knowledge

FEATURES, LABELS, CATEGORIES = "feat", "label", "categories"
"""Names of features, labels and categories on blocks."""

NUM_NEGATIVES = 256

IN_DEGREE, OUT_DEGREE = "in_degree", "out_degree"

Progress = Callable[[EpochReport], None]


class TrainingRun:
    """A training run that has been set up and not yet started; collective.

    Making one reads this rank's part, builds the model and finds the checkpoint to resume from, so
    that everything the caller may have got wrong shows here, on every rank. A GPU that it runs on
    becomes the current one of this process.

    Args:
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
        self._progress = progress
        self._memory = PeakMemory()
        self._shard = load_shard(config.resolved()) if shard is None else shard
        self.config: ResolvedConfig = config.resolved(self._shard.facts)
        if self._shard.device.type == "cuda":
            torch.cuda.set_device(self._shard.device)
        self._device_memory = PeakDeviceMemory(self._shard.device)
        self._learner = Learner(self._shard, self.config)
        graph = self._learner.graph
        is_plain = not self._shard.is_typed
        if config.model in NEED_IN_EDGES and is_plain and graph.any_zero_in_degree():
            raise ValueError(
                f"{config.model} needs every node to have an in-edge, and some have none; leave "
                "out self_loops=False (--no-self-loops)"
            )
        self._splits = [s for s in SPLITS if self._shard.num_nodes[s]]
        if self._learner.links is not None and "train" in self._splits:
            self._splits.remove("train")  # ranks of what was learnt take longest, and say least
        if rank() == 0:
            for text in _settings_without_effect(config, self.config, self._shard):
                warnings.warn(text, stacklevel=2)
        self._history = History()
        folder = self.config.run
        self._history_file = None if folder is None else HistoryFile(folder)
        self._split_losses: dict[str, float] = {}
        self._tensorboard: TensorBoard | None = None
        self._set_up()
        open_run_folder(self.config)
        self._checkpoints = self._open_checkpoints()
        self._resumed_from: int | None = None
        for note in self._shard.notes:
            self._report(note=note)
        self._tell_defaults(config)
        self._tell_of_rounding()
        if self._checkpoints is not None and config.resume:
            try:
                self._resume(self._checkpoints)
            except BaseException:
                self._checkpoints.close()
                raise

    def _tell_defaults(self, given: RunConfig) -> None:
        """One line of what was chosen for settings that were left open, and why."""
        values, why = defaults_of(self.config.model, self._shard.facts)
        shown = [
            f"{name} {getattr(self.config, name)}"
            for name in ("hidden", "layers", "dropout", "lr", "weight_decay", "epochs", "patience")
            if name in values and getattr(given, name) is None
        ]
        if shown:
            self._report(note=f"by default ({why}): {', '.join(shown)}")

    def _tell_if_nothing_was_learnt(self) -> None:
        """A loss that stays where it is without any knowledge of the features."""
        facts, losses = self._shard.facts, self._history.losses
        if facts is None or facts.entropy is None or len(losses) < _EPOCHS_TO_LEARN:
            return
        if self.config.class_weights is not None or losses[-1] < _LEARNT * facts.entropy:
            return
        cures = ["lr 0.001" if self.config.lr > 0.001 else "lr 0.01"]
        if self.config.weight_decay:
            cures.insert(0, "weight_decay 0")
        if self.config.layers > 2:
            cures.append("layers 2")
        if self.config.model in ("gcn", "sage", "gat", "gatv2") and not self.config.norm:
            cures.append("norm and residual")
        self._report(
            note=f"did not learn: the training loss is {losses[-1]:.4f}, and that of guessing by "
            f"the shares of the classes {facts.entropy:.4f}; try {', '.join(cures)}"
        )

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
        """Train epoch ``epoch``, from 0; this rank's share of the mean loss over training nodes."""
        raise NotImplementedError

    def _steps_per_epoch(self) -> int:
        """Number of steps in each epoch, the same on all ranks."""
        return 1

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
        if self._shard.num_added_edges:
            identity["added_edges"] = self._shard.num_added_edges
        rows = self._learner.embeddings
        ids = [getattr(rows, f"ids_{table}") for table in range(len(rows.names))]
        folder = CheckpointFolder(self.config.checkpoint_dir, identity, ids)
        folder.prepare(resume=self.config.resume, write=self.config.save_every > 0)
        return folder

    def _resume(self, checkpoints: CheckpointFolder) -> None:
        newest = checkpoints.newest()
        if newest is None:
            self._report(note="no checkpoint yet: starting from the beginning")
            return
        error: Exception | None = None
        try:
            self._learner.load(newest.shared, newest.local)
            if (self._learner.best is None) != (newest.history.best is None):
                raise ValueError("it must have the best model if one was evaluated")
            self._history = newest.history
        except ValueError as caught:
            error = CheckpointError(
                f"the checkpoint of epoch {newest.history.epoch} in {checkpoints.path} does not "
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
            result = self._train()
            if self.config.run is not None:
                export_run(self._learner, self.config.run, self._history)
            self._draw()
            return result
        finally:
            self._close()
            if self._tensorboard is not None:
                self._tensorboard.close()
            if self._checkpoints is not None:
                self._checkpoints.close()

    def _train(self) -> TrainResult:
        history, config = self._history, self.config
        epoch_seconds: list[float] = []
        evaluation_seconds: list[float] = []
        bytes_sent = num_written = 0
        with shared_errors():
            if rank() == 0 and self._history_file is not None:
                self._history_file.start(history.epoch)
            if rank() == 0 and config.tensorboard is not None:
                self._tensorboard = TensorBoard(config.tensorboard, history.epoch)
        self._learner.descent.start_at(history.epoch, self._steps_per_epoch())
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
            if evaluation is not None:
                if history.note_evaluation(evaluation, config.patience):
                    self._learner.keep()
                seconds = evaluation_seconds[-1]
                self._write_history(loss, epoch_seconds[num_written:], seconds, bytes_sent)
                num_written = len(epoch_seconds)
            self._report(loss=loss, evaluation=evaluation)
            self._save()
        if history.last is None or history.last.epoch != history.epoch:
            start = time.perf_counter()
            _, evaluation = self._evaluate(0.0)  # resumed past the end, at an epoch without one
            if history.note_evaluation(evaluation, config.patience):
                self._learner.keep()
            last_loss = history.losses[-1] if history.losses else None
            self._write_history(last_loss, [], time.perf_counter() - start, 0)
        self._tell_if_nothing_was_learnt()
        return self._result(epoch_seconds, evaluation_seconds, bytes_sent)

    def _evaluate(self, share: float) -> tuple[float, Evaluation]:
        """Loss of the epoch, and the model's results.

        One collective beside the model's own, and for metrics that need all scores, two a split.
        """
        splits, task = self._splits, self._shard.task
        scores = self._learner.evaluation_scores()
        mine = {split: self._learner.numbers(scores, split) for split in splits}
        loss, *totals = reduce_floats([share, *itertools.chain(*mine.values())])
        width = len(totals) // max(1, len(splits))
        sums = {split: totals[i * width : (i + 1) * width] for i, split in enumerate(splits)}
        losses = {split: numbers[-1] for split, numbers in sums.items()}
        for split, total in losses.items():
            if not math.isfinite(total):
                what = f"the loss of the {split} nodes after epoch {self._history.epoch}"
                self._learner.raise_not_finite(what, mine[split][-1])
        metrics: dict[str, dict[str, float]] = {name: {} for name in task.metrics}
        for split in splits:
            values = task.of_sums(sums[split][:-1], self._shard.num_nodes[split])
            if needs_all(task):
                values |= task.of_all(*self._learner.gathered(scores, split))
            for name, value in values.items():
                metrics[name][split] = value
        by_relation: dict[str, dict[str, dict[str, float]]] = {}
        if isinstance(task, Links) and task.num_relations > 1:
            for split in splits:
                for number, values in task.by_relation(sums[split][:-1]).items():
                    of_relation = by_relation.setdefault(number, {})
                    for name, value in values.items():
                        of_relation.setdefault(name, {})[split] = value
        evaluation = Evaluation(
            epoch=self._history.epoch,
            accuracy=metrics.pop(ACCURACY, {}),
            val_loss=losses.get("val"),
            metrics=metrics,
            main=task.metrics[0],
            by_relation=by_relation,
        )
        self._split_losses = losses
        return loss, evaluation

    def _write_history(
        self, loss: float | None, epoch_seconds: list[float], seconds: float, bytes_sent: int
    ) -> None:
        """A line of the evaluation just made, where someone reads it; collective."""
        if self._history_file is None and self.config.tensorboard is None:
            return
        evaluation = self._history.last
        assert evaluation is not None
        slowest = reduce_floats([_mean(epoch_seconds), seconds], "max")
        device_memory = gather_int(self._device_memory.peak())
        line = {
            "epoch": evaluation.epoch,
            "loss": loss,
            "losses": self._split_losses,
            "metrics": evaluation.values(),
            **({"by_relation": evaluation.by_relation} if evaluation.by_relation else {}),
            "seconds": dict(zip(("epoch", "evaluation"), slowest, strict=True)),
            "bytes": gather_int(bytes_sent),
            "memory": gather_int(self._memory.above_start()),
            **({"device_memory": device_memory} if any(device_memory) else {}),
        }
        with shared_errors():
            for reader in (self._history_file, self._tensorboard):
                if rank() == 0 and reader is not None:
                    reader.add(line)

    def _draw(self) -> None:
        """Draw the history of the run, if that was asked for; collective."""
        with shared_errors():
            if self._history_file is not None and self.config.plot and rank() == 0:
                title = f"{self.config.model}, {self._shard.data.graph_name}"
                path = self._history_file.path
                draw_history(read_history(path), path.with_name(PICTURE), title)

    def _result(
        self, epoch_seconds: list[float], evaluation_seconds: list[float], bytes_sent: int
    ) -> TrainResult:
        learner, best, last = self._learner, self._history.best, self._history.last
        assert best is not None and last is not None, "the last epoch is always evaluated"
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
    config: FullBatchConfig | SampledConfig, resolved: ResolvedConfig, shard: TrainingShard
) -> Iterator[str]:
    """A line for each setting that was given and changes nothing on this graph."""
    if resolved.layers == 1 and config.heads is not None:
        yield f"heads={config.heads} has no effect: it is of hidden layers, and layers=1 has none"
    needs_width = shard.is_typed or len(shard.feature_widths) < len(shard.data.node_type_names)
    if resolved.layers == 1 and config.hidden is not None and not needs_width:
        yield f"hidden={config.hidden} has no effect: with layers=1 there are no hidden layers"
    if config.patience and not shard.num_nodes["val"]:
        yield f"patience={config.patience} has no effect: val_mask has no labelled node"
    elif config.patience and config.patience >= (
        count := math.ceil(resolved.epochs / resolved.eval_every)
    ):
        yield (
            f"patience={config.patience} has no effect: with epochs={resolved.epochs} and "
            f"eval_every={resolved.eval_every} there are {count} evaluations; give less patience, "
            "or more epochs"
        )
    if isinstance(config, SampledConfig) and 0 in (config.fanouts or ()):
        numbers = ",".join(map(str, config.fanouts or ()))
        yield (
            f"fanouts={numbers} has no effect where it is 0: no neighbours are drawn, and nodes "
            "have themselves alone; give -1 for all neighbours"
        )
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
    """

    def _train_epoch(self, epoch: int) -> float:
        learner = self._learner
        learner.model.train()
        return learner.descend(learner.training_loss(epoch), f"epoch {epoch + 1}")


def train_full_batch(
    config: FullBatchConfig,
    *,
    shard: TrainingShard | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train in full batch; every rank calls this with the same configuration.

    Rank ``r`` reads part ``r`` of ``config.data``. With a partition of one part no process group
    is needed. The caller's random number generator is left as it was.

    Args:
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


class SampledRun(TrainingRun):
    """A sampled run that has been set up and not yet started; see `TrainingRun`. Collective."""

    config: ResolvedSampledConfig

    def _set_up(self) -> None:
        shard, config = self._shard, self.config
        self._inputs = SampledInputs(shard, self._learner, config.model)
        for module in self._learner.model.modules():
            allow = getattr(module, "set_allow_zero_in_degree", None)
            if callable(allow):  # the graph was looked at; that nothing was drawn is no mistake
                allow(True)
        self._order: EdgeOrder | None = None
        self._wrong_ids: list[Tensor] = []
        most = 1
        if shard.edges is None:
            first = shard.data.node_map(shard.target).starts[shard.data.rank]
            seeds = shared_evenly(shard.rows["train"] + first)
            most = reduce_ints([seeds.numel()], "max")[0]
        else:
            seeds = shard.rows["train"][:0]
            training = shard.edges.at(shard.rows["train"])
            wrong = None if self._learner.links is None else self._wrong
            self._order = EdgeOrder(training, config.batch_size, config.seed, wrong)
        self._loader = DataLoader(
            self._inputs.graph,
            {shard.target: seeds},
            self._sampler(),
            config.batch_size or most,
            shuffle=True,
            order=self._order,
            seed=config.seed,
            prefetch=config.prefetch,
            transport=config.transport,
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
            "prefetch_labels": {} if self._order else {self._shard.target: (LABELS,)},
            "prefetch_edge_feats": inputs.edge_features,
            "output_device": self._learner.device,
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
            loss, count = self._step(blocks, f"epoch {epoch + 1}, step {step + 1}")
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

    def _step(self, blocks: MiniBatch, when: str) -> tuple[float, int]:
        """One step; returns this rank's summed loss before it, and over how many nodes."""
        learner = self._learner
        learner.model.train()
        graphs, features, learnt = self._inputs(blocks)
        scores = learner.apply(graphs, features)
        num_rows = blocks.num_seeds
        if self._order is None:
            labels = blocks[-1].dstnodes[self._shard.target].data[LABELS]
        else:
            edges, labels = self._edges_of(blocks)
            num_rows = len(edges)
            sources, destinations = (
                rows_in_block(blocks[-1], scores, ntype, ids) for ntype, ids in edges.ends
            )
            learnt = [*learnt, *scores.values()]
            if learner.links is not None:
                drawn = self._drawn(blocks, scores)
                total = learner.links.loss_of(sources, destinations, edges, drawn)
            else:
                scores = learner.score(sources, destinations, edges)
        num_seeds = max(1, blocks.num_global_seeds)
        if learner.links is None:
            total = self._shard.task.loss(scores, labels, learner.class_weights)
        loss = total / num_seeds
        loss = anchor(loss, *learnt)
        return learner.descend(loss, when) * num_seeds, num_rows

    def _wrong(self, epoch: int, num_steps: int) -> dict[str, Tensor]:
        """Ids that are drawn as wrong ends, by type; collective."""
        links = self._learner.links
        assert links is not None
        self._wrong_ids = links.wrong(epoch, num_steps)
        by_type: dict[str, Tensor] = {}
        for ntype, ids in zip(links.sides, self._wrong_ids, strict=True):
            by_type[ntype] = torch.cat([by_type[ntype], ids], 1) if ntype in by_type else ids
        return by_type

    def _drawn(self, blocks: MiniBatch, rows: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Rows and ids of what is drawn for each side of a step's edges."""
        links = self._learner.links
        assert links is not None
        drawn = []
        for ntype, of_steps in zip(links.sides, self._wrong_ids, strict=True):
            ids = of_steps[blocks.step].to(self._learner.device)
            drawn.append((rows_in_block(blocks[-1], rows, ntype, ids), ids))
        return drawn

    def _edges_of(self, blocks: MiniBatch) -> tuple[TargetEdges, Tensor]:
        """The edges of a step, and their labels."""
        assert self._order is not None
        assert self._shard.edges is not None
        chosen = self._order.edges(self._order.of_epoch(blocks.epoch), blocks.step)
        rows = self._shard.rows["train"][chosen]
        device = self._learner.device
        return self._shard.edges.at(rows).to(device), self._shard.label[rows].to(device)

    def _steps_per_epoch(self) -> int:
        return len(self._loader)

    def _sampling(self) -> SamplingReport:
        num_epochs = max(1, len(self._seconds_waiting))
        waiting, seconds = reduce_floats(
            [sum(self._seconds_waiting) / num_epochs, self._seconds], "max"
        )
        num_edges = reduce_ints([self._num_edges])[0]
        hit_rate = None
        if self.config.cache_bytes:
            hit_rate = reduce_floats([self._loader.cache_hit_rate])[0] / world_size()
        return SamplingReport(
            steps_per_epoch=len(self._loader),
            seconds_waiting=waiting,
            edges_per_second=num_edges / seconds if seconds else 0.0,
            cache_hit_rate=hit_rate,
        )

    def _close(self) -> None:
        self._loader.close()


def train_sampled(
    config: SampledConfig,
    *,
    shard: TrainingShard | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train on sampled blocks; every rank calls this with the same configuration.

    Rank ``r`` reads part ``r`` of ``config.data`` and trains on the training nodes that it owns.
    All else is as with `train_full_batch`; ``progress`` is also called during a long epoch.

    Example:
        >>> config = SampledConfig(data="cora/cora.json", model="sage", fanouts=(10, 10))
        >>> train_sampled(config).best.accuracy["test"]  # doctest: +SKIP
        0.814
    """
    with torch.random.fork_rng(devices=generators_of(config.device)):
        return SampledRun(config, shard=shard, progress=progress).train()


def train(
    config: FullBatchConfig | SampledConfig,
    *,
    shard: TrainingShard | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train what the partition is for; every rank calls this with the same configuration.

    It is `train_full_batch` or `train_sampled`, by the kind of configuration.

    Example:
        >>> train(SampledConfig(data="parts/films.json", model="sage"))  # doctest: +SKIP
    """
    if isinstance(config, SampledConfig):
        return train_sampled(config, shard=shard, progress=progress)
    return train_full_batch(config, shard=shard, progress=progress)


def shared_evenly(ids: Tensor) -> Tensor:
    """Global ids of this rank's share of all ids; every rank must call.

    Labelled nodes are rarely spread evenly over parts. If each rank trained on its own, those with
    few would be idle in the last steps of an epoch, and how many steps there are would depend on
    the partition. A rank may train on any node, so ids move from ranks with many to the others.

    Args:
        ids: int64 ``[n]``, of any length on each rank.

    Returns:
        ``[m]``, this rank's own ids ahead; m differs by at most 1 between ranks.
    """
    sizes = gather_int(ids.numel())
    if len(sizes) == 1:
        return ids
    fewest, num_larger = divmod(sum(sizes), len(sizes))
    # Those that have most get the larger shares, so that fewest ids move.
    by_size = sorted(range(len(sizes)), key=lambda r: -sizes[r])
    shares = [fewest] * len(sizes)
    for r in by_size[:num_larger]:
        shares[r] += 1
    moves = _moves([n - share for n, share in zip(sizes, shares, strict=True)])
    me = rank()
    own = ids[: min(sizes[me], shares[me])]
    send = [moves.get((me, r), 0) for r in range(world_size())]
    recv = [moves.get((r, me), 0) for r in range(world_size())]
    return torch.cat([own, ragged_all_to_all(ids[own.numel() :], send, recv)])


def _moves(surplus: list[int]) -> dict[tuple[int, int], int]:
    """Rank that sends and rank that receives to the number, from each rank's surplus or lack."""
    moves = {}
    takers = [(r, -n) for r, n in enumerate(surplus) if n < 0]
    for giver, number in enumerate(surplus):
        while number > 0:
            taker, lacking = takers.pop()
            moved = min(number, lacking)
            moves[giver, taker] = moved
            number -= moved
            if lacking > moved:
                takers.append((taker, lacking - moved))
    return moves


class SampledInputs:
    """Makes the input of the learner's model of blocks. Every call is collective, as is making one.

    ``model`` is the model's name.
    """

    def __init__(self, shard: TrainingShard, learner: Learner, model: str) -> None:
        self._shard, self._learner = shard, learner
        data = shard.data
        self._ranges = {t: data.node_map(t) for t in data.node_type_names}
        # Rows of other types reach no loss, and get no gradient.
        self._matters = {ROWS, SELF_ROWS, *_types_before(shard, len(learner.graphs))}
        #: The graph to sample, with what a loader shall attach to blocks.
        self.graph = learner.host_graph().local_var()
        for ntype, rows in shard.features.items():
            self.graph.nodes[ntype].data[FEATURES] = rows
        if shard.edges is None:
            self.graph.nodes[shard.target].data[LABELS] = shard.label
        self._reads_degrees = model == "gcn" and not shard.is_typed
        if self._reads_degrees:
            self.graph.ndata[IN_DEGREE] = self.graph.in_degrees().to(torch.int32)
            self.graph.ndata[OUT_DEGREE] = self.graph.out_degrees().to(torch.int32)
        for ntype, numbers in shard.categories.items():
            self.graph.nodes[ntype].data[CATEGORIES] = numbers
        #: Relation to the names of what blocks shall have on edges.
        self.edge_features: dict[Any, tuple[str, ...]] = {
            etype: tuple(name for name in rows if name != "norm")
            for etype, rows in shard.edge_rows(model).items()
        }
        self._reads_relations = model == "rgcn" and shard.relation is not None
        if learner.pairs is not None:
            self._pair_ranges = learner.pairs.node_map(PAIR)
            self.graph.edata[PAIR] = _pair_ids(learner.pairs)
            (etype,) = shard.data.canonical_etypes
            self.edge_features[etype] = (*self.edge_features.get(etype, ()), PAIR)

    @property
    def node_features(self) -> dict[str, tuple[str, ...]]:
        """Node type to the features that the first block needs."""
        names: dict[str, tuple[str, ...]] = dict.fromkeys(self._shard.features, (FEATURES,))
        for ntype in self._shard.categories:
            names[ntype] = (*names.get(ntype, ()), CATEGORIES)
        if self._reads_degrees:
            target = self._shard.target
            names[target] = (*names.get(target, ()), IN_DEGREE, OUT_DEGREE)
        return names

    def __call__(self, blocks: Sequence[Block]) -> tuple[list[Block], ModelFeatures, list[Tensor]]:
        """A graph for each layer, the features, and the fetched rows that need a gradient.

        Every rank's loss must be made to depend on those.
        """
        graphs = list(blocks)
        if self._reads_relations:
            assert self._shard.relation is not None
            for block in graphs:
                # Of the edges that were drawn, so that a sum is a mean over them.
                dst = block.adjacency().coo()[1].long()
                norm = relation_norm(dst, block.edata["etype"], self._shard.num_relations)
                block.edata["norm"] = norm.to(self._shard.relation[1].dtype)
        if self._reads_degrees:
            self._set_weights(graphs)
        pairs = None
        if self._learner.pairs is not None:
            pairs, graphs[0] = _block_of_pairs(graphs[0])
        rows, learnt = self._embeddings(graphs[0], pairs)
        sources = blocks[0].srcnodes
        features = {ntype: sources[ntype].data[FEATURES] for ntype in self._shard.features}
        numbers = {ntype: sources[ntype].data[CATEGORIES] for ntype in self._shard.categories}
        rows |= self._learner.input_rows(features, numbers)
        return graphs, model_features(self._shard, rows), learnt

    def _set_weights(self, graphs: list[Block]) -> None:
        """Put ``weight`` on edges. See [Note: degrees of samples]."""
        dtype = next(self._learner.model.parameters()).dtype
        dtype = torch.promote_types(dtype, torch.float32)
        for block in graphs:
            # The sources of a later block are the first ones of the first.
            degrees = {
                name: graphs[0].srcdata[name][: block.num_src_nodes()].to(dtype)
                for name in (IN_DEGREE, OUT_DEGREE)
            }
            drawn = block.in_degrees().clamp(min=1).to(dtype)
            into = degrees[IN_DEGREE][: block.num_dst_nodes()] / drawn
            out_of = block.out_degrees().to(dtype) / degrees[OUT_DEGREE].clamp(min=1)
            src, dst = block.adjacency().coo()
            weight = (into.index_select(0, dst) * out_of.index_select(0, src)).sqrt()
            weight = weight.to(next(self._learner.model.parameters()).dtype)
            if "weight" in block.edata:
                weight = weight * block.edata["weight"]
            block.edata["weight"] = weight

    def _embeddings(
        self, first: Block, pairs: Tensor | None
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Rows of each table that the first layer reads."""
        tables: Mapping[str, Tensor] = self._learner.embeddings()
        requests = {
            name: self._request(name, table, first, pairs)
            for name, table in tables.items()
            if name in self._matters
        }
        fetched = fetch_owned_rows(list(requests.values())) if requests else []
        rows = dict(zip(requests, fetched, strict=True))
        for name, table in tables.items():
            if name not in self._matters:
                rows[name] = table.new_zeros((first.num_src_nodes(name), table.shape[1]))
        return rows, fetched

    def _request(self, name: str, table: Tensor, first: Block, pairs: Tensor | None) -> OwnedRows:
        target = self._shard.target
        if name == SELF_ROWS:
            return OwnedRows(table, self._ranges[target], first.dstdata[NID])
        if name == ROWS and pairs is not None:
            return OwnedRows(table, self._pair_ranges, pairs)
        ntype = target if name == ROWS else name
        return OwnedRows(table, self._ranges[ntype], first.srcnodes[ntype].data[NID])


def _types_before(shard: TrainingShard, num_layers: int) -> set[str]:
    """Node types whose rows may reach the target type in so many layers."""
    reached = {shard.targets} if isinstance(shard.targets, str) else {*shard.targets}
    for _ in range(num_layers):
        reached |= {src for src, _, dst in shard.data.canonical_etypes if dst in reached}
    return reached


def _pair_ids(pairs: PartitionData) -> Tensor:
    """``[num_edges]`` global id of the pair that each edge reads."""
    (edges,) = pairs.edges.values()
    ranges: RangeMap = pairs.node_map(PAIR)
    starts = torch.tensor(ranges.starts[:-1], dtype=torch.int64)
    return starts[edges.src_part.long()] + edges.src


def _block_of_pairs(block: Block) -> tuple[Tensor, Block]:
    """Distinct pairs, and the block with them as sources; see [Note: pairs] in `_embeddings`."""
    pairs, sources = torch.unique(block.edata[PAIR], return_inverse=True)
    dst = block.adjacency().coo()[1]
    num_dst = block.num_dst_nodes()
    adjacency = Adjacency(sources.to(dst.dtype), dst, pairs.numel(), num_dst, check=False)
    changed = Block({PAIR: pairs.numel()}, {NODE: num_dst}, {(PAIR, "read_by", NODE): adjacency})
    for name in ("etype", "norm"):
        changed.edata[name] = block.edata[name]
    changed.dstdata[NID] = block.dstdata[NID]
    return pairs, changed


class OwnedRows(NamedTuple):
    """Rows that are wanted."""

    table: Tensor  # [num_owned, width], the rows that this rank owns
    ranges: RangeMap  # ids that each rank owns
    ids: Tensor  # [n], which rows; of any rank, in any order


def fetch_owned_rows(requests: Sequence[OwnedRows]) -> list[Tensor]:
    """The rows of each request, ``[n, width]``; every rank must call, with as many requests.

    One exchange brings the rows of all requests, and one returns the gradients, where those of a
    row are summed. A rank whose loss may not depend on them must `graphshard.comm.anchor` it.
    """
    if world_size() == 1:
        return [rows.table.index_select(0, rows.ids.long()) for rows in requests]
    plans, orders, owned = [], [], []
    for table, ranges, ids in requests:
        owner = ranges.part_of(ids)
        rows = ranges.local_of(ids, owner)
        needed = [rows[owner == part] for part in range(world_size())]
        owned.append(needed[rank()].long())
        needed[rank()] = rows[:0]
        plans.append(ExchangePlan.build(needed, table.shape[0], device=table.device))
        owner = owner.masked_fill(owner == rank(), -1)  # own rows go first
        orders.append(torch.argsort(owner, stable=True))
    tables = [request.table for request in requests]
    fetched = fetch_halo(list(zip(plans, tables, strict=True)))
    by_request = []
    for table, own, halo, order in zip(tables, owned, fetched, orders, strict=True):
        position = torch.empty_like(order)
        position[order] = torch.arange(order.numel(), device=order.device)
        rows = torch.cat([table.index_select(0, own), halo])
        by_request.append(rows.index_select(0, position))
    return by_request


class Learner:
    """A model with its embeddings and its optimizer, for this rank's part of a graph.

    Some of it every rank holds alike (the model and its Adam moments), some each rank holds for
    itself (embeddings of its nodes, their Adam moments, its dropout generator). Both come out as
    flat dictionaries of tensors, and go back in from them, bit for bit.

    Weights and embeddings are drawn on the CPU, the same for every device, and then moved.
    """

    def __init__(self, shard: TrainingShard, config: ResolvedConfig) -> None:
        self._host, self._shard, self._config = shard, shard.on_device(), config
        self.device = shard.device
        torch.manual_seed(config.seed)
        #: What gives rows to nodes: the model, or the part of it before a predictor.
        self.network = build_model(shard, config)
        if shard.category_counts:
            self.network.category_tables = CategoryTables(shard.category_counts)
        self._category_tables: CategoryTables | None = getattr(
            self.network, "category_tables", None
        )
        self.model: nn.Module = self.network
        if shard.edges is not None:
            self.model = edge_network(self.network, shard, config)
        self.model.to(config.torch_dtype)
        for module in self.model.modules():
            if isinstance(module, InputDropout) and shard.target in self._shard.features:
                module.mark_constant(self._shard.features[shard.target])
        width = self.exchanged_width()
        self.graph = self._shard.graph(config, width)
        self.graphs: list[GraphShardManager] = [self.graph] * config.layers
        tables = {
            t: Table(shard.original_ids[t], shard.num_all[t], self.table_width)
            for t in shard.data.node_type_names
            if t not in shard.feature_widths
        }
        first = self.network.one_hot if isinstance(self.network, RGCN) else None
        #: The graph of the first layer, where its sources are pairs of a node and a relation.
        self.pairs: PartitionData | None = None
        if first is not None:
            tables, self.pairs = one_hot_tables(shard, first)
            if self.pairs is not None:
                pairs = self.pairs.to(self.device, feature_device="cpu")
                self.graphs[0] = self._shard.graph(config, width, pairs)
        self.embeddings = NodeEmbeddings(tables, config.seed, config.torch_dtype)
        self.model.to(self.device)
        self.embeddings.to(self.device)
        if is_initialized():
            sync_params(self.model)
        self._named = {
            **{f"model/{name}": p for name, p in self.model.named_parameters()},
            **{f"embeddings/{name}": p for name, p in self.embeddings.named_parameters()},
        }
        chosen = {id(p) for p in [*self._penalized_parameters(), *self.embeddings.rows]}
        penalized = [p for p in self._named.values() if id(p) in chosen]
        others = [p for p in self._named.values() if id(p) not in chosen]
        self.descent = Descent(config, penalized, others, owned=self.embeddings.rows)
        self.optimizer = self.descent.optimizer
        self._sources: dict[str | None, NodeRows] = {}
        #: Losses and ranks of link prediction; None of other tasks.
        self.links: LinkScorer | None = None
        if self._shard.links is not None:
            self.links = link_scorer(self._shard, self.model, config)
        #: Factor of the loss of each class, or None.
        self.class_weights = class_weights(shard, config)
        #: The best model and embeddings so far, of which `keep` makes copies.
        self.best: tuple[dict[str, Tensor], ...] | None = None
        torch.manual_seed(dropout_seed(config.seed, rank()))

    @property
    def table_width(self) -> int:
        """Width of rows that are learnt for nodes without features."""
        return int(getattr(self.network, "table_width", self._config.hidden))

    def exchanged_width(self) -> int:
        """A bound on the columns of the rows that ranks exchange; of an own model, a guess."""
        own = getattr(self.network, "exchanged_width", None)
        if own is not None:
            return int(own())
        return max(self._config.hidden, *self._shard.feature_widths.values(), 1)

    def _penalized_parameters(self) -> list[nn.Parameter]:
        own = getattr(self.network, "penalized_parameters", None)
        return list(self.network.parameters() if own is None else own())

    def host_graph(self) -> GraphShardManager:
        """The graph on the CPU, as samplers want it; collective."""
        if self.device.type == "cpu":
            return self.graph
        return self._host.graph(self._config, self.exchanged_width())

    def scores(self) -> Tensor:
        """Scores of this rank's rows, nodes of the target type or edges; collective."""
        rows = self.node_rows()
        return rows if self._shard.edges is None else self._edge_scores(rows, None)

    def node_rows(self) -> Any:
        """The model's output for this rank's nodes, of several types by type; collective."""
        rows = self.input_rows(self._shard.features, self._shard.categories)
        rows |= self.embeddings()
        return self.apply(self.graphs, model_features(self._shard, rows))

    def input_rows(
        self, features: Mapping[str, Tensor], categories: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What a network is given of nodes that have features or categories, by node type."""
        tables = self._category_tables
        return dict(features) if tables is None else tables(features, categories)

    def _edge_scores(self, rows: Mapping[str, Tensor], split: str | None) -> Tensor:
        """Scores of this rank's edges, or of a split's; collective."""
        edges = self._shard.edges
        assert edges is not None
        if split is not None:
            edges = edges.at(self._shard.rows[split])
        sources, destinations = edges.ends
        if split not in self._sources:
            ranges = self._shard.data.node_map(sources[0])
            self._sources[split] = NodeRows(sources[1], ranges)
        own = destinations[1] - self._shard.data.node_map(destinations[0]).starts[rank()]
        of_sources = self._sources[split](rows[sources[0]])
        return self.score(of_sources, rows[destinations[0]].index_select(0, own), edges)

    def score(self, sources: Tensor, destinations: Tensor, edges: TargetEdges) -> Tensor:
        """Scores of edges from the rows of their ends, in the precision that is configured."""
        with self._autocast():
            assert isinstance(self.model, EdgeNetwork)
            scores: Tensor = self.model.predictor(sources, destinations, edges.feat)
        return scores

    def _autocast(self) -> torch.autocast:
        is_enabled = self._config.autocast
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_enabled)

    def apply(self, graphs: Sequence[MessagePassingGraph], features: ModelFeatures) -> Any:
        """The model's output, in the precision that is configured; collective."""
        with self._autocast():
            return self.model(graphs, features)

    def training_loss(self, epoch: int) -> Tensor:
        """This rank's share of the mean loss over the training rows of all ranks; collective."""
        rows = self.node_rows()
        if self.links is not None:
            return self.links.loss(rows, "train", epoch) / self._shard.num_nodes["train"]
        if self._shard.edges is None:
            return self.loss(rows, "train")
        scores = self._edge_scores(rows, "train")
        labels = self._shard.label[self._shard.rows["train"]]
        total = self._shard.task.loss(scores, labels, self.class_weights)
        return anchor(total / self._shard.num_nodes["train"], scores)

    def loss(self, scores: Tensor, split: str) -> Tensor:
        """This rank's share of the mean loss over a split's rows on all ranks.

        Class weights are for training.
        """
        rows = self._shard.rows[split]
        weights = self.class_weights if self.model.training else None
        total = self._shard.task.loss(scores[rows], self._shard.label[rows], weights)
        return total / self._shard.num_nodes[split]

    def descend(self, loss: Tensor, when: str) -> float:
        """Step down the sum of all ranks' losses; returns this rank's. Collective.

        ``when`` names the step in errors: "epoch 3".

        Raises:
            FloatingPointError: On every rank, before the step, if the loss or a gradient of any
                rank is not finite; says which rank's, and what of it.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        value = float(loss.detach())
        gradients = {n: p.grad for n, p in self._named.items() if p.grad is not None}
        is_finite = math.isfinite(value) and all_finite(gradients.values())
        if reduce_ints([not is_finite], "max")[0]:
            self.raise_not_finite(f"the training loss of {when}", value, gradients)
        if is_initialized():
            gather_grads(self.model)
        for parameter in self._named.values():
            # Weight decay falls alike on what has no gradient, and on what has one of zeros because
            # other ranks asked for rows.
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.descent.step()
        return value

    def raise_not_finite(
        self, what: str, value: float, gradients: Mapping[str, Tensor] | None = None
    ) -> None:
        """Stop all ranks, because a number of one is not finite: the origin is told. Collective.

        What one rank has in its rows reaches others with the messages, so the rank that speaks is
        one at which the error can have begun: features come before embeddings, these before what
        all ranks hold alike, and that before what follows from it.
        """
        text, order = describe_not_finite(
            {
                "features": self._shard.features,
                "embeddings": tensors_under(self._named, "embeddings/"),
                "parameters": tensors_under(self._named, "model/"),
                "gradients": gradients or {},
            }
        )
        if order == 0 and math.isfinite(value):
            order = -1  # another rank's number
        error = None
        if order == reduce_ints([order], "max")[0]:
            cure = f"lower lr (got {self._config.lr:g})"
            if self._config.dtype == "bfloat16":
                cure += ", or compute in float32"
            error = FloatingPointError(
                f"{what} is not finite (got {value:g} for part {self._shard.data.rank}): {text}; "
                + ("mend them and partition again" if text.startswith("features '") else cure)
            )
        raise_everywhere(error)

    @torch.no_grad()
    def evaluation_scores(self) -> Any:
        """The scores of all rows without dropout, or for links rows of nodes; collective."""
        self.model.eval()
        return self.node_rows() if self.links is not None else self.scores()

    @torch.no_grad()
    def numbers(self, scores: Any, split: str) -> list[float]:
        """Of a split, what its metrics are summed from, and this rank's share of the loss.

        Collective for links.
        """
        if self.links is not None:
            share = self.links.loss(scores, split, -1) / self._shard.num_nodes[split]
            return [*self.links.numbers(scores, split), float(share)]
        rows = self._shard.rows[split]
        sums = self._shard.task.summands(scores[rows], self._shard.label[rows])
        return [*sums, float(self.loss(scores, split))]

    def gathered(self, scores: Tensor, split: str) -> tuple[Tensor, Tensor]:
        """Scores and labels of a split's rows of all ranks, on the CPU; collective."""
        rows = self._shard.rows[split]
        return (
            gather_rows(widened(scores[rows]).detach().cpu()),
            gather_rows(self._shard.label[rows].cpu()),
        )

    def keep(self) -> None:
        """Remember a copy of the model and the embeddings, on the CPU, as the best so far."""
        self.best = tuple(
            {k: v.detach().to("cpu", copy=True) for k, v in module.state_dict().items()}
            for module in (self.model, self.embeddings)
        )

    def shared_state(self) -> dict[str, Tensor]:
        """What all ranks hold alike: ``model/...``, ``optimizer/model/...``, ``best/...``."""
        return self._state_of(0, self.model, "model/")

    def local_state(self) -> dict[str, Tensor]:
        """What this rank alone holds: embeddings, their moments, the random number generators."""
        state = self._state_of(1, self.embeddings, "embeddings/")
        state["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state[GPU_RANDOM] = torch.cuda.get_rng_state(self.device)
        return state

    def _state_of(self, place: int, module: nn.Module, prefix: str) -> dict[str, Tensor]:
        best = {} if self.best is None else self.best[place]
        moments = {
            f"optimizer/{name}/{key}": value
            for name, parameter in self._named.items()
            if name.startswith(prefix)
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        state = {
            **{f"{prefix}{k}": v for k, v in module.state_dict().items()},
            **moments,
            **{f"best/{k}": v for k, v in best.items()},
        }
        return {name: value.cpu() for name, value in state.items()}

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """Take back what `shared_state` and `local_state` gave; nothing changes on an error.

        It may have been on another device. Where there is no state of a GPU's generator, that of
        this rank is seeded from the CPU's.

        Raises:
            ValueError: A tensor is missing, is unknown, or has another shape or dtype.
        """
        is_evaluated = any(name.startswith("best/") for name in shared)
        on_gpu = self.device.type == "cuda"
        for loaded, module, prefix in (
            (shared, self.model, "model/"),
            (local, self.embeddings, "embeddings/"),
        ):
            state = module.state_dict()
            like = {f"{prefix}{k}": v for k, v in state.items()}
            if module is self.embeddings:
                like["random"] = torch.get_rng_state()
                if GPU_RANDOM in loaded:
                    like[GPU_RANDOM] = loaded[GPU_RANDOM]
                    if on_gpu:
                        like[GPU_RANDOM] = torch.cuda.get_rng_state(self.device)
            if is_evaluated:
                like |= {f"best/{k}": v for k, v in state.items()}
            _check_tensors(loaded, {**like, **self._optimizer_shapes(loaded, prefix)})
        self.model.load_state_dict(tensors_under(shared, "model/"))
        self.embeddings.load_state_dict(tensors_under(local, "embeddings/"))
        self.optimizer.state.clear()
        for name, value in tensors_under({**shared, **local}, "optimizer/").items():
            of_parameter, _, key = name.rpartition("/")
            parameter = self._named[of_parameter]
            # Adam counts its steps on the CPU, wherever the parameters are.
            device = torch.device("cpu") if key == "step" else parameter.device
            self.optimizer.state[parameter][key] = value.to(device, copy=True)
        torch.set_rng_state(local["random"].clone())
        if on_gpu and GPU_RANDOM in local:
            torch.cuda.set_rng_state(local[GPU_RANDOM].clone(), self.device)
        elif on_gpu:
            torch.cuda.manual_seed(_drawn_seed(local["random"]))
        self.best = None
        if is_evaluated:
            bests = (tensors_under(tensors, "best/") for tensors in (shared, local))
            self.best = tuple({k: v.clone() for k, v in best.items()} for best in bests)

    def _optimizer_shapes(self, loaded: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Tensors like the moments there must be for those parameters that have any."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            keys = [f"optimizer/{name}/{key}" for key in ("step", "exp_avg", "exp_avg_sq")]
            if name.startswith(prefix) and any(key in loaded for key in keys):
                moments |= dict(zip(keys, (torch.empty(()), parameter, parameter), strict=True))
        return moments


def _drawn_seed(state: Tensor) -> int:
    """A seed that a generator of the CPU in this state would draw."""
    generator = torch.Generator()
    generator.set_state(state.clone())
    return int(torch.randint(2**63 - 1, (), generator=generator))


def _check_tensors(loaded: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    for name in dict.fromkeys([*like, *loaded]):
        if name not in loaded:
            raise ValueError(f"tensor '{name}' is missing")
        if name not in like:
            raise ValueError(f"the model has no '{name}'")
        mine, theirs = like[name], loaded[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise ValueError(
                f"'{name}' must be {mine.dtype} {list(mine.shape)} (got {theirs.dtype} "
                f"{list(theirs.shape)})"
            )


def model_features(shard: TrainingShard, rows: Mapping[str, Tensor]) -> ModelFeatures:
    """What a model takes as features, from the rows of each node type or table."""
    if shard.is_typed:
        return rows
    return (rows[ROWS], rows[SELF_ROWS]) if SELF_ROWS in rows else rows[shard.target]


def class_weights(shard: TrainingShard, config: ResolvedConfig) -> Tensor | None:
    """Weight of each class, in the mean 1 over training nodes: float64, on all ranks. Collective.

    Sums of weighted losses over the number of nodes are then torch's weighted means. Balanced, a
    class weighs 1 over its number of training nodes.

    Raises:
        ValueError: Weights were given that are not of the classes.
    """
    given = config.class_weights
    if given is None:
        return None
    if not isinstance(shard.task, Classes):
        raise ValueError(
            f"class_weights are for one class of several (got {shard.task_info.kind}); leave them "
            "out"
        )
    labels = shard.label[shard.rows["train"]].cpu()
    counts = reduce_ints(torch.bincount(labels, minlength=shard.num_classes).tolist())
    numbers = torch.tensor(counts, dtype=torch.float64)
    if isinstance(given, str):
        weights = torch.where(numbers > 0, numbers.clamp(min=1).reciprocal(), 0.0)
    else:
        names = shard.class_names or tuple(map(str, range(shard.num_classes)))
        different = sorted({*given} ^ {*names})
        if different:
            few = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise ValueError(
                f"class_weights must have a weight for each class, {few} ("
                + (
                    f"got {different[0]!r}, which is none)"
                    if different[0] in given
                    else f"got none for {different[0]!r})"
                )
            )
        weights = torch.tensor([float(given[name]) for name in names], dtype=torch.float64)
    total = float((weights * numbers).sum())
    if total == 0:
        raise ValueError("class_weights must not be 0 for all classes of training nodes")
    return weights * (numbers.sum() / total)


def build_model(shard: TrainingShard, config: ResolvedConfig) -> nn.Module:
    """The configured model for a graph, with weights from torch's default generator."""
    hidden, layers, heads = config.hidden, config.layers, config.heads
    classes, dropout, name = shard.out_width(config), config.dropout, config.model
    widths = shard.feature_widths
    edge_feats = {etype: rows.shape[1] for etype, rows in shard.edge_features.items()}
    if ":" in name:
        arguments = {"hidden": hidden, "layers": layers, "dropout": dropout, "out": classes}
        return build_own_model(
            name, model_schema(shard, name, hidden), arguments | dict(config.model_args or {})
        )
    types = shard.data.canonical_etypes, shard.data.node_type_names, shard.targets
    if name == "hgt":
        return HGT(widths, *types, hidden, classes, layers, heads, dropout)
    if shard.is_typed and name == "rgcn":
        return TypedRGCN(widths, *types, hidden, classes, layers, config.num_bases, dropout)
    if shard.is_typed:
        how = config.aggregator
        return TypedNetwork(
            name, widths, *types, hidden, classes, layers, heads, dropout, how, edge_feats
        )
    in_feats = widths.get(shard.target)
    if name == "rgcn":
        relations = shard.num_relations
        return RGCN(in_feats, hidden, classes, relations, layers, config.num_bases, dropout)
    width = hidden if in_feats is None else in_feats
    model: NodeClassifier
    if name in ("gat", "gatv2"):
        kind = GAT if name == "gat" else GATv2
        of_edges = next(iter(edge_feats.values()), 0)
        model = kind(width, hidden, classes, layers, heads, dropout, of_edges)
    elif name == "gcn":
        model = GCN(width, hidden, classes, layers, dropout)
    else:
        model = SAGE(width, hidden, classes, layers, dropout, config.aggregator)
    model.add_own_rows_and_norms(config.residual, config.norm)
    return model


def model_schema(shard: TrainingShard, name: str, hidden: int) -> ModelSchema:
    """What a model of the user's own is told about a graph."""
    names = shard.data.node_type_names
    return ModelSchema(
        node_types=names,
        canonical_etypes=shard.data.canonical_etypes,
        target=shard.targets,
        node_widths={ntype: shard.feature_widths.get(ntype, hidden) for ntype in names},
        edge_widths={
            etype: {
                name: 1 if column.dim() == 1 else column.shape[1] for name, column in rows.items()
            }
            for etype, rows in shard.edge_rows(name).items()
        },
        num_relations=shard.num_relations,
    )


def edge_network(network: nn.Module, shard: TrainingShard, config: ResolvedConfig) -> EdgeNetwork:
    """A network with what scores edges, with weights from torch's default generator."""
    assert shard.edges is not None
    feat, width = shard.edges.feat, shard.out_width(config)
    ntypes = shard.edges.relation[::2]
    if isinstance(shard.task, Links):
        has_factors = config.predictor == "distmult" or (
            config.predictor is None and shard.relation is not None
        )
        factors = LinkPredictor(width, shard.task.num_relations if has_factors else None)
        return EdgeNetwork(network, factors, ntypes)
    edge_width = 0 if feat is None else feat.shape[1]
    predictor = PairPredictor(width, edge_width, shard.task.width, config.dropout)
    return EdgeNetwork(network, predictor, ntypes)


def link_scorer(shard: TrainingShard, model: nn.Module, config: ResolvedConfig) -> LinkScorer:
    """What losses and ranks of links are computed by; collective."""
    assert isinstance(model, EdgeNetwork)
    assert isinstance(model.predictor, LinkPredictor)
    assert isinstance(shard.task, Links)
    assert shard.edges is not None
    assert shard.links is not None
    return LinkScorer(
        shard.task,
        model.predictor,
        shard.edges,
        shard.rows,
        shard.links,
        shard.data,
        shard.original_ids,
        config.negatives or NUM_NEGATIVES,
        config.seed,
    )


def one_hot_tables(
    shard: TrainingShard, layer: OneHotRelGraphConv
) -> tuple[dict[str, Table], PartitionData | None]:
    """The rows that a first layer for one-hot input takes, and its graph of pairs; collective."""
    ids, height = shard.original_ids[shard.target], shard.num_all[shard.target]
    own = Table(ids, height, layer.out_feat)
    if layer.num_bases:
        return {ROWS: Table(ids, height, layer.in_width), SELF_ROWS: own}, None
    assert shard.relation is not None
    count = shard.num_relations
    data, pairs = pair_data(shard.data, shard.relation[0], count)
    pair_ids = ids[pairs // count] * count + pairs % count
    return {ROWS: Table(pair_ids, height, layer.in_width), SELF_ROWS: own}, data


def dropout_seed(seed: int, *places: int) -> int:
    """A seed for one generator, such as a rank's, unrelated to those of others."""
    name = "/".join(map(str, ("dropout", seed, *places)))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def describe_not_finite(groups: Mapping[str, Mapping[str, Tensor]]) -> tuple[str, int]:
    """What is to be said of the first group that has such a number, and how early that group is.

    Args:
        groups: What the tensors are, "parameters", to the tensors by name; causes first.

    Returns:
        The sentence, and the number of groups from this one on: 0 where all are finite.
    """
    for order, (kind, tensors) in enumerate(groups.items()):
        for name, tensor in tensors.items():
            count = int((~tensor.detach().isfinite()).sum())
            if count:
                return (
                    f"{kind} '{name}' hold {count} of {tensor.numel()} values that are not finite",
                    len(groups) - order,
                )
    largest = max(
        (float(t.detach().abs().max()) for t in groups["parameters"].values() if t.numel()),
        default=0.0,
    )
    return (
        f"features and parameters are finite (the largest parameter is {largest:.3g}), and what "
        "the network makes of them is not",
        0,
    )
