# SPDX-License-Identifier: Apache-2.0
"""SoftmaxSum: messages weighted by a softmax over all in-edges, in one pass over the shards.

Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
https://arxiv.org/abs/1805.02867. The softmax does not depend on the peak that it is shifted by,
so the backward may hold the peak constant and still be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops import gspmm_arg
from ..lazy import (
    Adjoint,
    Apply,
    Dropout,
    Expression,
    LazySoftmax,
    Message,
    PerEdge,
    Reshape,
    ShardEvaluation,
    ShiftedSoftmax,
    Weighted,
    substitute,
    walk,
)
from ._reduction import Reduction, accumulation_dtype


class SoftmaxSum(Reduction):
    """Sum of messages weighted by a softmax over all in-edges, in one pass over the shards.

    Outputs ``(weighted sum at the peak, total)``; `normalize` divides the one by the other.

    Args:
        softmax: The softmax inside the message.
        message: The message, rebuilt around the shifted scores; None: only the total.
        reshapes: Shapes that the weights take between the softmax and the message, in order.
    """

    def __init__(
        self, softmax: LazySoftmax, message: Message | None = None, reshapes: Sequence[Reshape] = ()
    ) -> None:
        self.shifted = ShiftedSoftmax(softmax)
        self._weighted = _around(message, softmax, self.shifted)
        self.reshapes = list(reshapes)
        self._total_message = PerEdge(self.shifted)
        self.messages = [self._total_message] + ([self._weighted] if self._weighted else [])
        self._peak: Tensor | None = None  # -inf where no edge came yet
        self._scale = torch.empty(0)
        self._sums: list[Tensor] = []
        self._dtypes: list[torch.dtype] = []

    def merge(self, evaluation: ShardEvaluation) -> None:
        if evaluation.block.is_first:  # scores are whole in every block, and counted once
            self._raise_peak(evaluation)
        parts = self.partial(evaluation)
        if not self._sums:
            self._dtypes = [part.dtype for part in parts]
            self._sums = [part.to(accumulation_dtype(part.dtype)) for part in parts]
            return
        sums = self._seen(evaluation, self._sums)
        factors = self._seen(evaluation, self._factors())
        for total, part, factor in zip(sums, parts, factors, strict=True):
            total.mul_(factor).add_(part)

    def _raise_peak(self, evaluation: ShardEvaluation) -> None:
        """Take a shard's scores into the peak; what is summed up so far shrinks by ``_scale``."""
        scores = self.shifted.child.evaluate(evaluation)
        peak, argmax = gspmm_arg(evaluation.shard.adjacency, "copy_rhs", "max", None, scores)
        peak = peak.masked_fill(argmax < 0, float("-inf"))
        if self._peak is None or self.shifted.peak is None:
            self._peak, self._scale = peak, torch.ones_like(peak)
            self.shifted.peak = _finite(peak)
            return
        peak = torch.maximum(peak, self._peak)
        finite = _finite(peak)
        self._scale = (self._peak - finite).exp()
        self._peak, self.shifted.peak = peak, finite

    def _factors(self) -> list[Tensor]:
        """By what each of the sums shrinks, to be broadcast."""
        scale = self._scale
        return [scale] if self._weighted is None else [self._aligned(scale, self._sums[0]), scale]

    def _seen(self, evaluation: ShardEvaluation, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The part of whole outputs, or of what broadcasts with them, that a block contributes."""
        parts = [] if self._weighted is None else [self.block_of(evaluation, wholes[0])]
        return [*parts, wholes[-1]] if evaluation.block.is_first else parts

    def finish(self) -> tuple[Tensor, ...]:
        sums, self._sums, self._peak = self._sums, [], None
        self._scale = torch.empty(0)
        return tuple(s.to(d) for s, d in zip(sums, self._dtypes, strict=True))

    def _summed(self, evaluation: ShardEvaluation) -> list[Message]:
        """The messages whose sums a block contributes to."""
        messages = [] if self._weighted is None else [self._weighted]
        return [*messages, self._total_message] if evaluation.block.is_first else messages

    def partial(self, evaluation: ShardEvaluation) -> tuple[Tensor, ...]:
        return tuple(message.reduce_sum(evaluation) for message in self._summed(evaluation))

    def adjoints(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Adjoint]:
        pairs = zip(self._summed(evaluation), grads, strict=True)
        return [message.sum_adjoint(evaluation, grad) for message, grad in pairs]

    def shard_gradients(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Tensor]:
        return self._seen(evaluation, grads)

    def normalize(self, weighted: Tensor, total: Tensor) -> Tensor:
        """The weighted mean; rows without in-edges stay 0."""
        divisor = self._aligned(total.masked_fill(total == 0, 1.0), weighted)
        quotient: Tensor = _Quotient.apply(weighted, divisor)
        return quotient

    def _aligned(self, rows: Tensor, like: Tensor) -> Tensor:
        """``rows``, one per destination and softmax column, shaped to broadcast with ``like``."""
        for reshape in self.reshapes:
            before = reshape.child.shape[1:]
            rows = _pad(rows, len(before)).expand(rows.shape[0], *before)
            rows = rows.reshape(rows.shape[0], *reshape.shape[1:])
        return _pad(rows, like.dim() - 1)


class _Quotient(torch.autograd.Function):
    """``dividend / divisor``, which broadcasts; keeps the result for the backward, and not both.

    What is returned is a copy on write of what is kept: the caller may change it in place.
    """

    @staticmethod
    def forward(ctx: Any, dividend: Tensor, divisor: Tensor) -> Tensor:
        quotient = dividend / divisor
        ctx.save_for_backward(quotient, divisor)
        return quotient._lazy_clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        quotient, divisor = ctx.saved_tensors
        grad = grad / divisor
        if not ctx.needs_input_grad[1]:
            return grad, None
        return grad, (quotient * grad).sum_to_size(divisor.shape).neg_()


def _finite(peak: Tensor) -> Tensor:
    return peak.masked_fill(peak == float("-inf"), 0.0)


def _pad(rows: Tensor, trailing: int) -> Tensor:
    """Insert dimensions of size 1 after the first, up to ``trailing`` of them in all."""
    missing = trailing - (rows.dim() - 1)
    return rows.reshape(rows.shape[0], *[1] * max(missing, 0), *rows.shape[1:])


def _around(message: Message | None, old: Expression, new: Expression) -> Message | None:
    if isinstance(message, Weighted):
        return Weighted(
            message.op, message.source.tensor, substitute(message.value, {id(old): new})
        )
    if isinstance(message, PerEdge):
        return PerEdge(substitute(message.value, {id(old): new}))
    assert message is None
    return None


def proportional_softmax(root: Expression) -> tuple[LazySoftmax, list[Reshape]] | None:
    """The one softmax that ``root`` is proportional to, and the reshapes after it, in order.

    Dropout, reshaping, negation, and products or quotients with values that hold no softmax keep
    proportionality; dividing by the total may then wait until all shards are in.
    """
    reshapes: list[Reshape] = []
    node = root
    while not isinstance(node, LazySoftmax):
        if isinstance(node, Reshape):
            reshapes.append(node)
            node = node.child
        elif isinstance(node, Dropout):
            node = node.child
        elif isinstance(node, Apply):
            following = _proportional_operand(node)
            if following is None:
                return None
            node = following
        else:
            return None
    if holds_softmax(node.child):
        return None
    return node, reshapes[::-1]


_PRODUCTS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
_QUOTIENTS = frozenset({"div", "divide", "true_divide", "__truediv__", "__div__"})
_NEGATIONS = frozenset({"neg", "negative", "__neg__"})


def _proportional_operand(node: Apply) -> Expression | None:
    name = getattr(node.function, "__name__", "")
    holding = [a for a in node.args if isinstance(a, Expression) and holds_softmax(a)]
    if len(holding) != 1:
        return None
    if name in _PRODUCTS or name in _NEGATIONS:
        return holding[0]
    return holding[0] if name in _QUOTIENTS and node.args[0] is holding[0] else None


def holds_softmax(root: Expression) -> bool:
    return any(isinstance(node, LazySoftmax) for node in walk(root))
