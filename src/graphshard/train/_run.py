# SPDX-License-Identifier: Apache-2.0
"""TrainingRun: epochs, evaluations and checkpoints, whatever an epoch is; every rank makes one.

`FullBatchRun` and `SampledRun` say what an epoch is. A `Learner` is what the run changes. An
evaluation is always of the whole graph, exact.

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
"""

from __future__ import annotations

import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .._base.memory import PeakDeviceMemory, PeakMemory
from ..comm import anchor, rank, trace, world_size
from ..comm.collectives import (
    gather_int,
    raise_everywhere,
    reduce_floats,
    reduce_ints,
    shared_errors,
)
from ..comm.transport import ragged_all_to_all_alike
from ..data.dataset import SPLITS
from ..errors import CheckpointError
from ..sampling import DataLoader, LaborSampler, MiniBatch, NeighborSampler
from ..sampling.feature_store import CachedFeatureStore, LocalFeatureStore
from ..sampling.file_store import with_cache
from ._checkpoint import Checkpoint, CheckpointFolder
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
from ._edges import EdgeOrder, RaggedIds, TargetEdges, ends_in_block, rows_in_block
from ._export import export_run
from ._layerwise import LayerwiseRows
from ._learner import Learner, dropout_seed
from ._links import KindOfEnd
from ._own_model import LayeredNetwork
from ._planned import PlannedRun, RunPlanner, room_beside
from ._reports import PICTURE, TensorBoard, draw_history, read_history
from ._result import EpochReport, Evaluation, History, HistoryFile, SamplingReport, TrainResult
from ._run_folder import open_run_folder
from ._sampled_inputs import LABELS, SampledInputs
from ._tasks import ACCURACY, Links, needs_all
from ._training_shard import TrainingShard, hidden_edges, load_shard

_REPORT_SECONDS = 0.5
_EPOCHS_TO_LEARN = 10  # after which a loss should have moved
_LEARNT = 0.98  # of the loss without knowledge

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
        # With the first optimizer torch imports what takes 150 MB, and more where it has CUDA.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
        self._memory.imported()
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
        self._cache_bytes, self._evaluated = 0, 1
        self._planner = RunPlanner(self._learner, self._shard, self.config, self._memory)
        self._planned: PlannedRun | None = None  # where setting up has asked for it
        self._set_up()
        open_run_folder(self.config)
        self._checkpoints = self._open_checkpoints()
        self._resumed_from: int | None = None
        for note in self._shard.notes:
            self._report(note=note)
        self._tell_defaults(config)
        self._tell_of_rounding()
        if self._planned is None:
            self._planned = self._planner.run(
                self._cache_bytes, self._evaluated, lambda note: self._report(note=note)
            )
        if self._planned is not None:
            self._report(note=self._planned.at_start())
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
        shown += [
            name
            for name in ("encoder", "residual", "norm")
            if getattr(self.config, name) and getattr(given, name) is None
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
            f"the shares of the classes {facts.entropy:.4f}; try {', '.join(cures)}",
            is_warning=True,
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
        result = self._result(epoch_seconds, evaluation_seconds, bytes_sent)
        if self._planned is not None:
            self._report(note=self._planned.at_end(result))
        self._tell_if_nothing_was_learnt()
        return result

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
                of = _rows_of(self._shard)
                what = f"the loss of the {split} {of} after epoch {self._history.epoch}"
                self._learner.raise_not_finite(what, mine[split][-1])
        metrics: dict[str, dict[str, float]] = {name: {} for name in task.metrics}
        for split in splits:
            values = task.of_sums(sums[split][:-1], self._shard.num_nodes[split])
            if needs_all(task):
                values |= task.of_all(*self._learner.gathered(scores, split))
            for name, value in values.items():
                metrics[name][split] = value
        by_relation: dict[str, dict[str, dict[str, float]]] = {}
        names = self._shard.relation_names
        if isinstance(task, Links) and task.num_relations > 1:
            for split in splits:
                for number, values in task.by_relation(sums[split][:-1]).items():
                    of_relation = by_relation.setdefault(names[number], {})
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
            "learning_rate": self._learner.descent.rate,
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
            rows=_rows_of(self._shard),
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
    if config.residual is not None and shard.is_typed:
        yield (
            f"residual={config.residual} has no effect: layers of typed graphs see a node's own row"
        )
    if config.patience and not shard.num_nodes["val"]:
        yield (
            f"patience={config.patience} has no effect: no {_rows_of(shard)[:-1]} of val_mask "
            "has a label"
        )
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


def _rows_of(shard: TrainingShard) -> str:
    """What there are scores of."""
    return "nodes" if shard.edges is None else "edges"


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

    def _set_up(self) -> None:
        budget = self.config.memory_bytes
        if budget is not None:
            self._planned = self._planner.run()
            with shared_errors():
                room_beside(self._planned, budget, "mode sample, ")

    def _train_epoch(self, epoch: int) -> float:
        learner = self._learner
        learner.model.train()
        return learner.descend(learner.training_loss(epoch), f"epoch {epoch + 1}")


def train_full_batch(
    config: FullBatchConfig, *, shard: TrainingShard | None = None, progress: Progress | None = None
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
        self._store: LocalFeatureStore | None = None
        if config.memory_bytes is not None:
            self._store = self._store_in_files()
            if isinstance(self._learner.network, LayeredNetwork):
                self._learner.evaluates = LayerwiseRows(
                    shard, self._learner, self._inputs, config, self._store, self._evaluated
                )
        for module in self._learner.model.modules():
            allow = getattr(module, "set_allow_zero_in_degree", None)
            if callable(allow):  # the graph was looked at; that nothing was drawn is no mistake
                allow(True)
        self._order: EdgeOrder | None = None
        self._wrong_ids: Mapping[KindOfEnd, Tensor] = {}
        most = 1
        if shard.edges is None:
            first = shard.data.node_map(shard.target).starts[shard.data.rank]
            seeds = shared_evenly(shard.rows["train"] + first)
            most = reduce_ints([seeds.numel()], "max")[0]
        else:
            seeds = shard.rows["train"][:0]
            self._order = self._order_of_edges(shard.edges.at(shard.rows["train"]))
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
            feature_store=self._store,
        )
        self._seconds_waiting: list[float] = []
        self._seconds = 0.0
        self._num_edges = 0

    def _store_in_files(self) -> LocalFeatureStore:
        """Where features come from that stay in files, and all else that blocks have."""
        config, inputs = self.config, self._inputs
        memory = config.memory_bytes
        assert memory is not None
        planned, self._evaluated = self._planner.evaluations()
        with shared_errors():
            self._cache_bytes = room_beside(planned, memory, "a smaller batch_size, ")
        return with_cache(inputs.store_in_files(config), inputs.graph, self._cache_bytes)

    def _order_of_edges(self, edges: TargetEdges) -> EdgeOrder:
        """Batches of this rank's share of all training edges, which `_edges` and `_labels` hold."""
        shard, config = self._shard, self.config
        share, hides = EvenShare(len(edges)), config.exclude_targets
        hidden = None
        if hides or (hides is None and self._learner.links is not None):
            found = hidden_edges(shard, edges)
            hidden = {etype: share.of_lists(ids) for etype, ids in found.items()}
        self._edges = edges.of_each(share)
        self._labels = share(shard.label[shard.rows["train"]])
        wrong = None if self._learner.links is None else self._wrong
        return EdgeOrder(self._edges, config.batch_size, config.seed, hidden, wrong)

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
            sources, destinations = ends_in_block(blocks[-1], scores, edges)
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
        for (_, ntype), ids in self._wrong_ids.items():
            by_type[ntype] = torch.cat([by_type[ntype], ids], 1) if ntype in by_type else ids
        return by_type

    def _drawn(
        self, blocks: MiniBatch, rows: Mapping[str, Tensor]
    ) -> dict[KindOfEnd, tuple[Tensor, Tensor]]:
        """Rows and ids of what is drawn for each kind of ends of a step's edges."""
        drawn = {}
        for end, of_steps in self._wrong_ids.items():
            ids = of_steps[blocks.step].to(self._learner.device)
            drawn[end] = rows_in_block(blocks[-1], rows, end[1], ids), ids
        return drawn

    def _edges_of(self, blocks: MiniBatch) -> tuple[TargetEdges, Tensor]:
        """The edges of a step, and their labels."""
        assert self._order is not None
        chosen = self._order.edges(self._order.of_epoch(blocks.epoch), blocks.step)
        device = self._learner.device
        return self._edges.at(chosen).to(device), self._labels[chosen].to(device)

    def _steps_per_epoch(self) -> int:
        return len(self._loader)

    def _sampling(self) -> SamplingReport:
        num_epochs = max(1, len(self._seconds_waiting))
        waiting, seconds = reduce_floats(
            [sum(self._seconds_waiting) / num_epochs, self._seconds], "max"
        )
        num_edges = reduce_ints([self._num_edges])[0]
        hit_rate = None
        if self.config.cache_bytes or isinstance(self._store, CachedFeatureStore):
            hit_rate = reduce_floats([self._loader.cache_hit_rate])[0] / world_size()
        return SamplingReport(
            steps_per_epoch=len(self._loader),
            seconds_waiting=waiting,
            edges_per_second=num_edges / seconds if seconds else 0.0,
            cache_hit_rate=hit_rate,
        )

    def _close(self) -> None:
        self._loader.close()
        if self._store is not None:
            self._store.close()


def train_sampled(
    config: SampledConfig, *, shard: TrainingShard | None = None, progress: Progress | None = None
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
    return EvenShare(ids.numel())(ids)


class EvenShare:
    """How rows move between ranks so that all have as many; making it and calling it is collective.

    Args:
        count: This rank's rows.
    """

    def __init__(self, count: int) -> None:
        sizes = gather_int(count)
        self._kept, self._send, self._recv = count, [], []
        if len(sizes) == 1:
            return
        fewest, num_larger = divmod(sum(sizes), len(sizes))
        # Those that have most get the larger shares, so that fewest rows move.
        by_size = sorted(range(len(sizes)), key=lambda r: -sizes[r])
        shares = [fewest] * len(sizes)
        for r in by_size[:num_larger]:
            shares[r] += 1
        moves = _moves([n - share for n, share in zip(sizes, shares, strict=True)])
        me = rank()
        self._kept = min(sizes[me], shares[me])
        self._send = [moves.get((me, r), 0) for r in range(world_size())]
        self._recv = [moves.get((r, me), 0) for r in range(world_size())]

    def __call__(self, rows: Tensor) -> Tensor:
        """``[m, ...]`` of ``[n, ...]``, this rank's own rows ahead."""
        if not self._send:
            return rows
        others = ragged_all_to_all_alike(rows[self._kept :].contiguous(), self._send, self._recv)
        return torch.cat([rows[: self._kept], others])

    def of_lists(self, lists: RaggedIds) -> RaggedIds:
        """The same of rows that each have some ids."""
        counts = self(lists.counts)
        if not self._send:
            return lists
        kept = int(lists.counts[: self._kept].sum())
        send = [int(part.sum()) for part in lists.counts[self._kept :].split(self._send)]
        recv = [int(part.sum()) for part in counts[self._kept :].split(self._recv)]
        return RaggedIds(
            counts,
            torch.cat([lists.ids[:kept], ragged_all_to_all_alike(lists.ids[kept:], send, recv)]),
        )


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
