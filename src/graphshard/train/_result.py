# SPDX-License-Identifier: Apache-2.0
"""What a training run reports, and its history: which evaluation was best, when to stop."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .._base.files import writing
from ..data.dataset import SPLITS
from ._tasks import ACCURACY, LOWER_IS_BETTER


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The whole graph's results at one epoch; the same on every rank.

    Args:
        epoch: Number of epochs trained when it was made.
        accuracy: Split to the fraction of its labelled nodes that are classified right; a split
            without nodes is absent, and all are where a task has no accuracy.
        val_loss: Mean loss over the validation nodes; None if there are none.
        metrics: Name of any other metric, such as ``"auroc"``, to split to its value.
        main: The metric by which a model is chosen.
        by_relation: Of links with relation numbers: the number to such metrics. Workers that were
            launched send them with the result alone, and those of more than 1000 relations not.
    """

    epoch: int
    accuracy: dict[str, float]
    val_loss: float | None
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    main: str = ACCURACY
    by_relation: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def values(self) -> dict[str, dict[str, float]]:
        """All metrics, the main one first: name to split to value."""
        named = {ACCURACY: self.accuracy} if self.accuracy else {}
        named |= self.metrics
        return {self.main: named[self.main], **named} if self.main in named else named

    def val_score(self) -> float:
        """The main metric on the validation nodes, negated where the least value is the best."""
        value = self.values()[self.main]["val"]
        if math.isnan(value):  # of a class that no row has
            return -math.inf
        return -value if self.main in LOWER_IS_BETTER else value

    def is_better_than(self, other: Evaluation | None) -> bool:
        """Whether to keep this model rather than ``other``: by validation score, then loss.

        Without validation nodes the later model is the better one.
        """
        if other is None or self.val_loss is None or other.val_loss is None:
            return True
        return (self.val_score(), -self.val_loss) > (other.val_score(), -other.val_loss)


@dataclass(frozen=True, kw_only=True)
class EpochReport:
    """One epoch; the same on every rank.

    Args:
        epoch: Number of epochs trained so far.
        loss: Mean loss over all training nodes, before the step.
        evaluation: Results after the step, where the epoch was evaluated.
        note: Something the user should know once, such as where the run resumed.
        is_warning: Whether the note is of something that went wrong.
        step: In the middle of an epoch, the number of steps it has made; then ``loss`` is that of
            those steps, on this rank.
        steps: Number of steps of the epoch, where it has several.
    """

    epoch: int
    epochs: int
    loss: float | None = None
    evaluation: Evaluation | None = None
    note: str | None = None
    step: int | None = None
    steps: int | None = None
    is_warning: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplingReport:
    """How sampling went in the epochs of a run; the same on every rank.

    Args:
        steps_per_epoch: Steps, the same on all ranks.
        seconds_waiting: Of an epoch, spent waiting for data: the mean, on the slowest rank.
        edges_per_second: Edges drawn by all ranks together per second of training.
        cache_hit_rate: Fraction of the rows that would have come from other ranks (from other
            hosts, where features are mapped) that the cache had in the last epoch, mean over the
            ranks; None without a cache.
    """

    steps_per_epoch: int
    seconds_waiting: float
    edges_per_second: float
    cache_hit_rate: float | None


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run; the same on every rank.

    Args:
        best: Evaluation of the model that was chosen: best on the validation nodes, or the last.
        losses: Training loss of every epoch, resumed ones included.
        num_nodes: Split to its number of labelled nodes, or edges.
        num_parameters: Parameters that all ranks hold alike.
        num_embedding_parameters: Parameters of node embeddings, on all ranks together.
        aggregation: ``"sequential"`` or ``"oneshot"``.
        seconds_per_epoch: Of training in an epoch: the mean over those of this run, resumed ones
            excluded, on the slowest rank.
        seconds_per_evaluation: Likewise of an evaluation.
        bytes_per_epoch: For each rank, bytes sent for the training in the last epoch.
        peak_memory: For each rank, bytes above what it held before it read its part.
        peak_device_memory: For each rank, the most bytes of tensors on its GPU at once, 0 for a
            rank on the CPU; None if all are.
        resumed_from: Epoch of the checkpoint that the run started from, or None.
        stopped_early: Whether patience ended the run.
        sampling: How sampling went; None of a full-batch run.
        rows: What was learnt of: "nodes" or "edges".
    """

    best: Evaluation
    last: Evaluation
    losses: list[float]
    num_nodes: dict[str, int]
    num_parameters: int
    num_embedding_parameters: int
    aggregation: str
    world_size: int
    seconds_per_epoch: float
    seconds_per_evaluation: float
    bytes_per_epoch: list[int]
    peak_memory: list[int]
    resumed_from: int | None
    stopped_early: bool
    sampling: SamplingReport | None = None
    peak_device_memory: list[int] | None = None
    rows: str = "nodes"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainResult:
        best, last = Evaluation(**values["best"]), Evaluation(**values["last"])
        sampling = SamplingReport(**values["sampling"]) if values.get("sampling") else None
        return cls(**{**values, "best": best, "last": last, "sampling": sampling})


_EVALUATION_FIELDS = {"epoch", "accuracy", "val_loss"}
_NEWER_FIELDS = {"metrics", "main", "by_relation"}  # which checkpoints of former versions lack


@dataclass
class History:
    """What has happened so far; the same on every rank.

    Args:
        best: Evaluation of the model to keep.
        top_score: Best `Evaluation.val_score`, for patience.
        low_loss: Lowest validation loss, for patience.
        waited: Evaluations since either got better.
        stopped: Whether patience ran out.
    """

    epoch: int = 0
    losses: list[float] = field(default_factory=list)
    best: Evaluation | None = None
    last: Evaluation | None = None
    top_score: float = -math.inf
    low_loss: float = float("inf")
    waited: int = 0
    stopped: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: such numbers are their names there.

        Those of a task with accuracy alone are what former versions wrote.
        """
        values = dataclasses.asdict(self)
        values[_TOP] = values.pop("top_score")
        for evaluation in (values["best"], values["last"]):
            if evaluation is not None and not evaluation["metrics"]:
                for name in _NEWER_FIELDS:
                    del evaluation[name]
        return json.loads(json.dumps(values), parse_constant=_NAMES.get)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> History:
        """The history that `as_dict` gave the values of.

        Raises:
            ValueError: A value is missing, is of another kind, or does not fit the others.
        """
        fields = {item.name for item in dataclasses.fields(cls)} - {"top_score"} | {_TOP}
        if set(values) != fields:
            raise ValueError(f"a history must have {sorted(fields)} (got {sorted(values)!r:.200})")
        values = {k if k != _TOP else "top_score": _with_numbers(v) for k, v in values.items()}
        for name in ("epoch", "waited"):
            _check(name, values[name], type(values[name]) is int and values[name] >= 0)
        for name in ("top_score", "low_loss"):
            _check(name, values[name], type(values[name]) is float)
        _check("stopped", values["stopped"], type(values["stopped"]) is bool)
        losses = values["losses"]
        _check("losses", losses, isinstance(losses, list) and all(type(x) is float for x in losses))
        if len(losses) != values["epoch"]:
            raise ValueError(
                f"losses must be one of each of {values['epoch']} epochs (got {len(losses)})"
            )
        evaluations = {name: _evaluation(name, values[name]) for name in ("best", "last")}
        for name, evaluation in evaluations.items():
            if evaluation is not None and evaluation.epoch > values["epoch"]:
                raise ValueError(
                    f"{name} must be of an epoch up to {values['epoch']} (got {evaluation.epoch})"
                )
        return cls(**{**values, "losses": list(losses), **evaluations})

    def note_evaluation(self, evaluation: Evaluation, patience: int) -> bool:
        """Take an evaluation in; returns whether it is the best so far."""
        self.last = evaluation
        loss = evaluation.val_loss
        if loss is not None:
            score = evaluation.val_score()
            improved = score >= self.top_score or loss <= self.low_loss
            self.waited = 0 if improved else self.waited + 1
            self.top_score = max(self.top_score, score)
            self.low_loss = min(self.low_loss, loss)
            self.stopped = 0 < patience <= self.waited
        if not evaluation.is_better_than(self.best):
            return False
        self.best = evaluation
        return True


class HistoryFile:
    """``history.jsonl`` in the folder of a run: a line for each evaluation, written by rank 0.

    A line is a JSON object: ``epoch``; ``loss``, of the training of that epoch, and
    ``learning_rate``, of its last step; ``losses`` and ``metrics`` of the evaluation, by split;
    ``seconds`` per epoch since the last line, and of the evaluation; ``bytes`` that each rank sent
    for the training in the epoch; ``memory``, bytes at the most so far of each rank, and
    ``device_memory`` on its GPU. What is not a number is null.

    A run that is resumed goes on with the file: lines of epochs after the one that it resumes from
    are those of what was lost, and are left out. Not collective.
    """

    NAME: ClassVar = "history.jsonl"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / self.NAME

    def start(self, epoch: int) -> None:
        """Begin the file, or keep its lines of up to an epoch, 0 for a run from the beginning."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line in self._lines() if _epoch_of(line) <= epoch] if epoch else []
        partial = self.path.with_name(f".{self.NAME}.{os.getpid()}")
        try:
            with writing(self.path):
                partial.write_text("".join(lines), encoding="utf-8")
            os.replace(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add a line, unless there is one of its epoch."""
        lines = self._lines()
        if lines and _epoch_of(lines[-1]) >= values["epoch"]:
            return
        text = json.dumps(json.loads(json.dumps(values), parse_constant=lambda _: None))
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def _lines(self) -> list[str]:
        """Whole lines; what a killed run left of a line is none."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [line for line in lines if _epoch_of(line) > 0 and line.endswith("\n")]


def _epoch_of(line: str) -> int:
    """The epoch of a line of the history; 0 of what is none."""
    try:
        epoch = json.loads(line)["epoch"]
    except (ValueError, KeyError, TypeError):
        return 0
    return epoch if type(epoch) is int else 0


_TOP = "top_accuracy"  # what files call `History.top_score`
_NAMES = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
_NUMBERS = {name: float(name) for name in _NAMES.values()}


def _with_numbers(value: Any) -> Any:
    """The same with numbers in place of their names, however nested."""
    if isinstance(value, Mapping):
        return {key: _with_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_numbers(inner) for inner in value]
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def _evaluation(name: str, value: Any) -> Evaluation | None:
    if value is None:
        return None
    is_right = isinstance(value, dict) and set(value) >= _EVALUATION_FIELDS
    _check(name, value, is_right and set(value) <= _EVALUATION_FIELDS | _NEWER_FIELDS)
    epoch, accuracy, val_loss = value["epoch"], value["accuracy"], value["val_loss"]
    metrics, main = value.get("metrics", {}), value.get("main", ACCURACY)
    _check(f"{name}.epoch", epoch, type(epoch) is int and epoch >= 0)
    _check(f"{name}.accuracy", accuracy, _is_by_split(accuracy))
    by_relation = value.get("by_relation", {})
    for what, of_all in (("metrics", {"": metrics}), ("by_relation", by_relation)):
        is_right = isinstance(of_all, dict) and all(
            isinstance(named, dict) and all(map(_is_by_split, named.values()))
            for named in of_all.values()
        )
        _check(f"{name}.{what}", of_all, is_right)
    _check(f"{name}.val_loss", val_loss, val_loss is None or type(val_loss) is float)
    of_main = accuracy if main == ACCURACY else metrics.get(main) if type(main) is str else None
    is_right = of_main is not None and (val_loss is None or "val" in of_main)
    _check(f"{name}.main", main, is_right)
    return Evaluation(
        epoch=epoch,
        accuracy=dict(accuracy),
        val_loss=val_loss,
        metrics=dict(metrics),
        main=main,
        by_relation=dict(by_relation),
    )


def _is_by_split(value: Any) -> bool:
    """Whether it is numbers by split."""
    is_right = isinstance(value, dict) and set(value) <= set(SPLITS)
    return is_right and all(type(number) is float for number in value.values())


def _check(name: str, value: Any, is_right: bool) -> None:
    if not is_right:
        raise ValueError(f"the history's {name} is not what a run writes (got {value!r:.80})")
