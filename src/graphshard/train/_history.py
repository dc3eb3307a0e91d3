# SPDX-License-Identifier: Apache-2.0
"""History: how a training run went so far, and which of its models is the one to keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ._result import Evaluation


@dataclass
class History:
    """What has happened so far; the same on every rank.

    Args:
        epoch: Epochs trained.
        losses: Training loss of each.
        best: Evaluation of the model to keep.
        last: Newest evaluation.
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
        values = dict(self.__dict__)
        for name in ("best", "last"):
            values[name] = None if values[name] is None else dict(values[name].__dict__)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> History:
        values = dict(values)
        for name in ("best", "last"):
            values[name] = None if values[name] is None else Evaluation(**values[name])
        return cls(**values)

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
