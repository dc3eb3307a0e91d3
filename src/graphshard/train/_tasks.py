# SPDX-License-Identifier: Apache-2.0
"""Tasks: what the numbers that come out of a network mean, their loss and their metrics.

A row is a node or an edge that is scored. A task says how wide the scores of a row are, what the
loss of some rows is, and how their metrics come about: from numbers that are summed over the ranks
(accuracy, macro F1, MAE, RMSE), or from the scores of all ranks together (AUROC, average
precision), which torchmetrics then reads. Either way they are those of one process, to rounding.

Losses and metrics are computed in float32 at least.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import all_gather, gather_int
from ..comm.group import group_state, is_initialized
from ..data.task import TASK_KINDS

NODE_CLASSIFICATION, NODE_REGRESSION, EDGE_CLASSIFICATION, EDGE_REGRESSION, LINK_PREDICTION = (
    TASK_KINDS
)

ACCURACY = "accuracy"
LOWER_IS_BETTER = frozenset({"mae", "rmse"})
"""Metrics whose least value is the best; of all others it is the greatest."""


class Task(Protocol):
    """A kind of task on one graph; the same on all ranks."""

    @property
    def width(self) -> int:
        """Columns of the scores ``[num_rows, width]``."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is computed in an evaluation; the model is chosen by the first."""

    def loss(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Summed over the rows; weights are of the classes, where there are any."""

    def summands(self, scores: Tensor, labels: Tensor) -> list[float]:
        """Numbers whose sums over all ranks make metrics; as many for any number of rows."""

    def of_sums(self, sums: Sequence[float], num_rows: int) -> dict[str, float]:
        """Metrics from the sums of `summands`, over ``num_rows`` rows."""

    def of_all(self, scores: Tensor, labels: Tensor) -> dict[str, float]:
        """Metrics from the scores of all ranks, where `needs_all` is true."""

    def predictions(self, scores: Tensor) -> Tensor:
        """Probabilities of the classes, or values."""


def needs_all(task: Task) -> bool:
    """Whether a metric of the task cannot be put together from sums."""
    return any(name in _OF_ALL for name in task.metrics)


_OF_ALL = ("auroc", "average_precision")


def gather_rows(rows: Tensor) -> Tensor:
    """The rows ``[n, ...]`` of all ranks, one rank after another, on every rank. Collective."""
    if not is_initialized():
        return rows
    sizes = gather_int(rows.shape[0])
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = all_gather(group_state(), padded, "gather_rows")
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def widened(scores: Tensor) -> Tensor:
    """In float32 at least."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


@dataclass(frozen=True)
class Classes:
    """One class of several for each row: cross entropy."""

    width: int
    metrics: tuple[str, ...] = (ACCURACY,)

    CHOICES: ClassVar = (ACCURACY, "macro_f1", "auroc", "average_precision")

    def loss(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        wide = widened(scores)
        if weights is not None:
            weights = weights.to(wide.device, wide.dtype)
        return F.cross_entropy(wide, labels, weights, reduction="sum")

    def summands(self, scores: Tensor, labels: Tensor) -> list[float]:
        """The rows that are right; for macro F1 also, by class, right, predicted and labelled."""
        predicted = scores.argmax(dim=1)
        right = predicted == labels
        numbers = [float(right.sum())]
        if "macro_f1" in self.metrics:
            for classes in (labels[right], predicted, labels):
                numbers += torch.bincount(classes, minlength=self.width).tolist()
        return numbers

    def of_sums(self, sums: Sequence[float], num_rows: int) -> dict[str, float]:
        values = {ACCURACY: sums[0] / num_rows}
        if "macro_f1" in self.metrics:
            values["macro_f1"] = macro_f1(torch.tensor(sums[1:], dtype=torch.float64).view(3, -1))
        return {name: value for name, value in values.items() if name in self.metrics}

    def of_all(self, scores: Tensor, labels: Tensor) -> dict[str, float]:
        from torchmetrics.functional import classification as metrics

        shares, width = scores.double().softmax(dim=1), self.width
        if width <= 2:  # of the second class, as everywhere, or of the only one
            is_last = (labels == width - 1).long()
            of: Any = metrics.binary_auroc, metrics.binary_average_precision
            return called(self.metrics, of, (shares[:, -1], is_last), is_last.view(-1, 1))
        of = metrics.multiclass_auroc, metrics.multiclass_average_precision
        return called(self.metrics, of, (shares, labels, width, None), F.one_hot(labels, width))

    def predictions(self, scores: Tensor) -> Tensor:
        return widened(scores).softmax(dim=1)


@dataclass(frozen=True)
class SeveralLabels:
    """Any number of ``width`` labels for each row: binary cross entropy with logits.

    The loss of a row is the mean over its labels. A label is predicted where its probability is
    above one half; accuracy is the share of all rows' labels that are right.
    """

    width: int
    metrics: tuple[str, ...] = ("auroc", "average_precision", "macro_f1", ACCURACY)

    CHOICES: ClassVar = (ACCURACY, "macro_f1", "auroc", "average_precision")

    def loss(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        wide = widened(scores)
        entries = F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="sum")
        return entries / self.width

    def summands(self, scores: Tensor, labels: Tensor) -> list[float]:
        predicted, labelled = scores > 0, labels > 0
        right = predicted == labelled
        by_label = torch.stack([(predicted & labelled).sum(0), predicted.sum(0), labelled.sum(0)])
        return [float(right.sum()), *by_label.double().flatten().tolist()]

    def of_sums(self, sums: Sequence[float], num_rows: int) -> dict[str, float]:
        by_label = torch.tensor(sums[1:], dtype=torch.float64).view(3, -1)
        values = {ACCURACY: sums[0] / (num_rows * self.width), "macro_f1": macro_f1(by_label)}
        return {name: value for name, value in values.items() if name in self.metrics}

    def of_all(self, scores: Tensor, labels: Tensor) -> dict[str, float]:
        from torchmetrics.functional import classification as metrics

        of = metrics.multilabel_auroc, metrics.multilabel_average_precision
        arguments = scores.double().sigmoid(), labels, self.width, None
        return called(self.metrics, of, arguments, labels)

    def predictions(self, scores: Tensor) -> Tensor:
        return widened(scores).sigmoid()


@dataclass(frozen=True)
class Values:
    """``width`` real numbers for each row: mean squared or absolute error.

    The network predicts how far a value is from the mean, in standard deviations, both of the
    training rows, so that it learns values of any size alike. The loss is of these numbers; MAE and
    RMSE are in the values' own units.

    Args:
        mean: Of each column.
        deviation: Of each column; 1 of one that is constant.
    """

    width: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    error: str = "mse"
    metrics: tuple[str, ...] = ("rmse", "mae")

    CHOICES: ClassVar = ("rmse", "mae")

    def loss(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        wide = widened(scores)
        mean, deviation = self._scale(labels)
        standardized = ((labels - mean) / deviation).to(wide.dtype)
        of = F.l1_loss if self.error == "l1" else F.mse_loss
        return of(wide, standardized, reduction="sum") / self.width

    def summands(self, scores: Tensor, labels: Tensor) -> list[float]:
        """Absolute and squared differences, in float64."""
        difference = self.predictions(scores).double() - labels.double()
        return [float(difference.abs().sum()), float(difference.square().sum())]

    def of_sums(self, sums: Sequence[float], num_rows: int) -> dict[str, float]:
        count = num_rows * self.width
        values = {"mae": sums[0] / count, "rmse": math.sqrt(sums[1] / count)}
        return {name: values[name] for name in self.metrics}

    def of_all(self, scores: Tensor, labels: Tensor) -> dict[str, float]:
        return {}

    def predictions(self, scores: Tensor) -> Tensor:
        wide = widened(scores)
        mean, deviation = self._scale(wide)
        return wide * deviation + mean

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return like.new_tensor(self.mean), like.new_tensor(self.deviation)


HITS = (1, 3, 10)
"""The ranks up to which an answer is a hit."""


@dataclass(frozen=True)
class Links:
    """Edges that are told from pairs that are none; see `graphshard.train._links`.

    MRR is the mean of 1 / rank, hits@k the share of ranks up to k, over all edges of a split and,
    in `by_relation`, over those of a relation.
    """

    num_relations: int
    kind: str = "softmax"  # of the loss
    metrics: tuple[str, ...] = ("mrr", *(f"hits@{k}" for k in HITS))
    width: int = 0

    CHOICES: ClassVar = ("mrr", *(f"hits@{k}" for k in HITS))

    def loss(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        raise NotImplementedError("the loss of links is of pairs, not of rows; see `link_loss`")

    def summands(self, scores: Tensor, labels: Tensor) -> list[float]:
        raise NotImplementedError("links are ranked; see `LinkScorer.numbers`")

    def of_sums(self, sums: Sequence[float], num_rows: int) -> dict[str, float]:
        return self._of(torch.tensor(sums, dtype=torch.float64).view(self.num_relations, -1).sum(0))

    def by_relation(self, sums: Sequence[float]) -> dict[int, dict[str, float]]:
        """Relation number to metrics, of those that have edges."""
        by_number = torch.tensor(sums, dtype=torch.float64).view(self.num_relations, -1)
        return {r: self._of(row) for r, row in enumerate(by_number) if row[0] > 0}

    def _of(self, sums: Tensor) -> dict[str, float]:
        values = dict(zip(self.CHOICES, (sums[1:] / sums[0]).tolist(), strict=True))
        return {name: values[name] for name in self.metrics}

    def of_all(self, scores: Tensor, labels: Tensor) -> dict[str, float]:
        return {}

    def predictions(self, scores: Tensor) -> Tensor:
        return widened(scores)


def macro_f1(counts: Tensor) -> float:
    """Mean of F1 over the classes that are there or predicted, which is scikit-learn's.

    Args:
        counts: ``[3, num_classes]``: right, predicted and labelled rows of each class.
    """
    right, predicted, labelled = counts
    occurs = predicted + labelled > 0
    return float((2 * right / (predicted + labelled))[occurs].mean())


def called(
    names: Sequence[str],
    functions: Sequence[Callable[..., Tensor]],
    arguments: tuple[Any, ...],
    labelled: Tensor,
) -> dict[str, float]:
    """AUROC and average precision, where asked for: the mean over the classes that have one.

    Args:
        functions: Of torchmetrics, which give a value for each class, whatever it is worth.
        labelled: ``[num_rows, num_classes]``, 1 where a row is of the class: AUROC needs rows that
            are and rows that are not, average precision those that are.
    """
    count = labelled.sum(0)
    counts = (count > 0) & (count < labelled.shape[0]), count > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the classes without
        return {
            name: float(function(*arguments).double().view(-1)[is_there].mean())
            for name, function, is_there in zip(_OF_ALL, functions, counts, strict=True)
            if name in names
        }


def chosen_metrics(asked: str | None, choices: Sequence[str], default: Sequence[str]) -> Any:
    """The metrics of a task: those of a setting, names between commas, or the usual ones."""
    names = tuple(default) if asked is None else tuple(asked.split(","))
    for name in names:
        if name not in choices:
            raise ValueError(
                f"metrics must be of {', '.join(choices)} for this task (got {name!r}); leave it "
                "out for the usual ones"
            )
    return tuple(dict.fromkeys(names))
