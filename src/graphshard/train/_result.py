# SPDX-License-Identifier: Apache-2.0
"""What a training run reports, and its history: which evaluation was best, when to stop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..data.dataset import SPLITS


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The whole graph's results at one epoch; the same on every rank.

    Args:
        epoch: Number of epochs trained when it was made.
        accuracy: Split to the fraction of its labelled nodes that are classified right; a split
            without nodes is absent.
        val_loss: Mean cross entropy over the validation nodes; None if there are none.
    """

    epoch: int
    accuracy: dict[str, float]
    val_loss: float | None

    def is_better_than(self, other: Evaluation | None) -> bool:
        """Whether to keep this model rather than ``other``: by validation accuracy, then loss.

        Without validation nodes the later model is the better one.
        """
        if other is None or self.val_loss is None or other.val_loss is None:
            return True
        mine = (self.accuracy["val"], -self.val_loss)
        return mine > (other.accuracy["val"], -other.val_loss)


@dataclass(frozen=True, kw_only=True)
class EpochReport:
    """One epoch; the same on every rank.

    Args:
        epoch: Number of epochs trained so far.
        loss: Mean cross entropy over all training nodes, before the step.
        evaluation: Results after the step, where the epoch was evaluated.
        note: Something the user should know once, such as where the run resumed.
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
        num_nodes: Split to its number of labelled nodes.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainResult:
        best, last = Evaluation(**values["best"]), Evaluation(**values["last"])
        sampling = SamplingReport(**values["sampling"]) if values.get("sampling") else None
        return cls(**{**values, "best": best, "last": last, "sampling": sampling})


_EVALUATION_FIELDS = {"epoch", "accuracy", "val_loss"}


@dataclass
class History:
    """What has happened so far; the same on every rank.

    Args:
        best: Evaluation of the model to keep.
        top_accuracy: Best validation accuracy, for patience.
        low_loss: Lowest validation loss, for patience.
        waited: Evaluations since either got better.
        stopped: Whether patience ran out.
    """

    epoch: int = 0
    losses: list[float] = field(default_factory=list)
    best: Evaluation | None = None
    last: Evaluation | None = None
    top_accuracy: float = -1.0
    low_loss: float = float("inf")
    waited: int = 0
    stopped: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: such numbers are their names there."""
        text = json.dumps(dataclasses.asdict(self))
        return json.loads(text, parse_constant=_NAMES.get)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> History:
        """The history that `as_dict` gave the values of.

        Raises:
            ValueError: A value is missing, is of another kind, or does not fit the others.
        """
        fields = {item.name for item in dataclasses.fields(cls)}
        if set(values) != fields:
            raise ValueError(f"a history must have {sorted(fields)} (got {sorted(values)!r:.200})")
        values = _with_numbers(values)
        for name in ("epoch", "waited"):
            _check(name, values[name], type(values[name]) is int and values[name] >= 0)
        for name in ("top_accuracy", "low_loss"):
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
            accuracy = evaluation.accuracy["val"]
            improved = accuracy >= self.top_accuracy or loss <= self.low_loss
            self.waited = 0 if improved else self.waited + 1
            self.top_accuracy = max(self.top_accuracy, accuracy)
            self.low_loss = min(self.low_loss, loss)
            self.stopped = 0 < patience <= self.waited
        if not evaluation.is_better_than(self.best):
            return False
        self.best = evaluation
        return True


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
    _check(name, value, isinstance(value, dict) and set(value) == _EVALUATION_FIELDS)
    epoch, accuracy, val_loss = value["epoch"], value["accuracy"], value["val_loss"]
    _check(f"{name}.epoch", epoch, type(epoch) is int and epoch >= 0)
    is_right = isinstance(accuracy, dict) and set(accuracy) <= set(SPLITS)
    is_right = is_right and all(type(fraction) is float for fraction in accuracy.values())
    _check(f"{name}.accuracy", accuracy, is_right)
    _check(f"{name}.val_loss", val_loss, val_loss is None or type(val_loss) is float)
    return Evaluation(epoch=epoch, accuracy=dict(accuracy), val_loss=val_loss)


def _check(name: str, value: Any, is_right: bool) -> None:
    if not is_right:
        raise ValueError(f"the history's {name} is not what a run writes (got {value!r:.80})")
