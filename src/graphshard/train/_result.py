# SPDX-License-Identifier: Apache-2.0
"""What a training run reports: an EpochReport on the way, a TrainResult at the end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

SPLITS = ("train", "val", "test")


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
        epochs: Number of epochs of the run.
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
        last: Evaluation of the last model.
        losses: Training loss of every epoch, resumed ones included.
        num_nodes: Split to its number of labelled nodes.
        num_parameters: Parameters that all ranks hold alike.
        num_embedding_parameters: Parameters of node embeddings, on all ranks together.
        aggregation: ``"sequential"`` or ``"oneshot"``.
        world_size: Number of ranks.
        seconds_per_epoch: Of training in an epoch: the mean over those of this run, resumed ones
            excluded, on the slowest rank.
        seconds_per_evaluation: Likewise of an evaluation.
        bytes_per_epoch: For each rank, bytes sent for the training in the last epoch.
        peak_memory: For each rank, bytes above what it held before it read its part.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainResult:
        best, last = Evaluation(**values["best"]), Evaluation(**values["last"])
        sampling = values.get("sampling")
        sampling = None if sampling is None else SamplingReport(**sampling)
        return cls(**{**values, "best": best, "last": last, "sampling": sampling})
