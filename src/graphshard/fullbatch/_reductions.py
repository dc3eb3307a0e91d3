# SPDX-License-Identifier: Apache-2.0
"""How partial results of shards become one: sum, online softmax, maximum, or rows side by side.

Each reduction knows two things. Forward, how to merge a shard into what it has (without
gradients). Backward, a differentiable *partial* of one shard whose sum over the shards has the
gradient of the whole:

=============  ============================================  ====================================
reduction      merge                                         partial
=============  ============================================  ====================================
sum            add                                           the shard's sum
softmax sum    rescale by exp(old peak - new peak), add      the shard's sum, at the final peak
max, min       keep the better; ties: smaller edge id        the entries that won overall
rows           write at the shard's edge ids                 the shard's rows
=============  ============================================  ====================================

Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
https://arxiv.org/abs/1805.02867. The softmax does not depend on the peak that it is shifted by,
so the backward may hold the peak constant and still be exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops import gspmm, gspmm_arg
from ._columns import WHOLE, ColumnBlock
from ._expressions import (
    Apply,
    Dropout,
    Evaluation,
    Expression,
    Leaf,
    Reshape,
    Softmax,
    substitute,
    walk,
)
from ._messages import CopySource, Message, PerEdge, Weighted, distinct_leaves

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of 16-bit numbers are kept in float32 until the last shard is in."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


class Reduction(ABC):
    """One relation's part of a pass over the shards."""

    #: Whether the backward looks at the values of source rows, so that they must be fetched again.
    needs_sources = True
    #: The messages that this reduction is made of.
    messages: list[Message]

    @property
    def is_random(self) -> bool:
        """Whether evaluating again needs the random state of the first time."""
        return any(message.is_random for message in self.messages)

    def leaves(self) -> list[Leaf]:
        """The distinct tensors that the messages are made from."""
        return distinct_leaves(self.messages)

    def parameters(self) -> list[Tensor]:
        """Leaf tensors that the messages use without being told, known after the merges."""
        return [p for message in self.messages for p in message.parameters()]

    #: Whether a shard may be merged some columns at a time, once the own shard is in.
    by_columns = False

    @abstractmethod
    def merge(self, evaluation: Evaluation, block: ColumnBlock = WHOLE) -> None:
        """Take in what a shard contributes; with ``block``, to those columns alone."""

    @abstractmethod
    def finish(self) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def partial(self, evaluation: Evaluation) -> tuple[Tensor, ...]: ...

    def shard_gradients(self, evaluation: Evaluation, grads: Sequence[Tensor]) -> list[Tensor]:
        """The part of the outputs' gradients that concerns this shard."""
        return list(grads)

    def source_gradient(self, evaluation: Evaluation, grads: Sequence[Tensor]) -> Tensor:
        """Gradient of the only leaf, a source leaf; for reductions without `needs_sources`."""
        raise AssertionError(f"{type(self).__name__} has no direct source gradient")


class Sum(Reduction):
    """Sum of messages at each destination."""

    def __init__(self, message: Message) -> None:
        self.message, self.messages = message, [message]
        self.needs_sources = not isinstance(message, CopySource)
        self.by_columns = isinstance(message, CopySource) and message.source.tensor.dim() == 2
        self._sum: Tensor | None = None
        self._dtype = torch.float32

    def merge(self, evaluation: Evaluation, block: ColumnBlock = WHOLE) -> None:
        part = self.message.reduce_sum(evaluation)
        self._dtype = part.dtype
        if self._sum is None:
            self._sum = part.to(accumulation_dtype(part.dtype))
        else:
            total = block.of(self._sum)
            total += part

    def finish(self) -> tuple[Tensor, ...]:
        assert self._sum is not None
        result, self._sum = self._sum.to(self._dtype), None
        return (result,)

    def partial(self, evaluation: Evaluation) -> tuple[Tensor, ...]:
        return (self.message.reduce_sum(evaluation),)

    def source_gradient(self, evaluation: Evaluation, grads: Sequence[Tensor]) -> Tensor:
        return gspmm(evaluation.shard.adjacency.reverse(), "copy_lhs", "sum", grads[0], None)


class Extremum(Reduction):
    """Largest or smallest message at each destination, entry by entry.

    A tie goes to the smallest local edge id. The in-edges of one node keep their original order
    when a graph is partitioned, so the winner is the same however many parts there are.
    """

    def __init__(self, message: Message, reduce: str) -> None:
        self.message, self.messages, self.reduce = message, [message], reduce
        self.needs_sources = not isinstance(message, CopySource)
        self._best: Tensor | None = None
        self._edge: Tensor | None = None

    def merge(self, evaluation: Evaluation, block: ColumnBlock = WHOLE) -> None:
        value, position = self.message.reduce_arg(evaluation, self.reduce)
        eids = evaluation.shard.edge_ids().to(torch.int64)
        edge = torch.full_like(position, -1, dtype=torch.int64)
        present = position >= 0
        edge[present] = eids[position[present].to(torch.int64)]
        if self._best is None or self._edge is None:
            self._best, self._edge = value.clone(), edge
            return
        ahead = value > self._best if self.reduce == "max" else value < self._best
        tie = (value == self._best) & (edge < self._edge)
        takes = present & ((self._edge < 0) | ahead | tie)
        self._best = torch.where(takes, value, self._best)
        self._edge = torch.where(takes, edge, self._edge)

    def finish(self) -> tuple[Tensor, ...]:
        assert self._best is not None and self._edge is not None
        best, self._best = self._best, None
        return (torch.where(self._edge >= 0, best, torch.zeros_like(best)),)

    def _positions(self, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        """Where this shard's edges won: the shard's edge positions (0 elsewhere), and a mask."""
        assert self._edge is not None
        eids = evaluation.shard.edge_ids().to(torch.int64)
        if eids.numel() == 0:
            return torch.zeros_like(self._edge), torch.zeros_like(self._edge, dtype=torch.bool)
        position = torch.searchsorted(eids, self._edge).clamp_(max=eids.numel() - 1)
        won = eids[position] == self._edge
        return position.masked_fill_(~won, 0), won

    def partial(self, evaluation: Evaluation) -> tuple[Tensor, ...]:
        position, won = self._positions(evaluation)
        if evaluation.shard.adjacency.num_edges == 0:
            rows = self.message.rows(evaluation)
            return (rows.sum() * 0 + torch.zeros(won.shape, dtype=rows.dtype, device=won.device),)
        return (self.message.winners(evaluation, position) * won,)

    def source_gradient(self, evaluation: Evaluation, grads: Sequence[Tensor]) -> Tensor:
        position, won = self._positions(evaluation)
        adjacency, grad = evaluation.shard.adjacency, grads[0]
        result = grad.new_zeros((adjacency.num_src, *grad.shape[1:]))
        if adjacency.num_edges == 0:
            return result
        src = adjacency.coo()[0].to(torch.int64)[position]
        return result.scatter_add_(0, src, grad * won)


class Rows(Reduction):
    """The value of every edge, written side by side: `DeferredEdges.materialize`."""

    def __init__(self, messages: Sequence[Message], num_edges: int) -> None:
        self.messages, self.num_edges = list(messages), num_edges
        self._rows: list[Tensor] | None = None

    def merge(self, evaluation: Evaluation, block: ColumnBlock = WHOLE) -> None:
        parts = [message.rows(evaluation) for message in self.messages]
        if self._rows is None:
            self._rows = [p.new_zeros((self.num_edges, *p.shape[1:])) for p in parts]
        for whole, part in zip(self._rows, parts, strict=True):
            whole.index_copy_(0, evaluation.shard.edge_ids().to(torch.int64), part)

    def finish(self) -> tuple[Tensor, ...]:
        assert self._rows is not None
        rows, self._rows = self._rows, None
        return tuple(rows)

    def partial(self, evaluation: Evaluation) -> tuple[Tensor, ...]:
        return tuple(message.rows(evaluation) for message in self.messages)

    def shard_gradients(self, evaluation: Evaluation, grads: Sequence[Tensor]) -> list[Tensor]:
        return [evaluation.shard.edge_rows(grad) for grad in grads]


class _Shifted(Expression):
    """exp(score - peak of its destination): a softmax before it is divided by its total."""

    def __init__(self, softmax: Softmax) -> None:
        self.scores = softmax.scores
        self.like(softmax)
        self.peak: Tensor | None = None

    def children(self) -> Sequence[Expression]:
        return (self.scores,)

    def compute(self, evaluation: Evaluation) -> Tensor:
        assert self.peak is not None
        _, dst = evaluation.shard.adjacency.coo()
        return (self.scores.evaluate(evaluation) - self.peak.index_select(0, dst)).exp()


class SoftmaxSum(Reduction):
    """Sum of messages weighted by a softmax over all in-edges, in one pass over the shards.

    Outputs ``(weighted sum at the peak, total)``; `normalize` divides the one by the other.

    Args:
        softmax: The softmax inside the message.
        message: Rebuilds the message around a stand-in for the softmax; None: only the total.
        reshapes: Shapes that the weights take between the softmax and the message, in order.
    """

    def __init__(
        self, softmax: Softmax, message: Message | None = None, reshapes: Sequence[Reshape] = ()
    ) -> None:
        self.shifted = _Shifted(softmax)
        self.message = _around(message, softmax, self.shifted)
        self.reshapes = list(reshapes)
        self._total_message = PerEdge(self.shifted)
        self.messages = [self._total_message] + ([self.message] if self.message else [])
        self._peak: Tensor | None = None
        self._sums: list[Tensor] = []
        self._dtypes: list[torch.dtype] = []

    def merge(self, evaluation: Evaluation, block: ColumnBlock = WHOLE) -> None:
        scores = self.shifted.scores.evaluate(evaluation)
        peak, winner = gspmm_arg(evaluation.shard.adjacency, "copy_rhs", "max", None, scores)
        peak = peak.masked_fill(winner < 0, float("-inf"))
        if self._peak is not None:
            peak = torch.maximum(peak, self._peak)
        self.shifted.peak = peak.masked_fill(peak == float("-inf"), 0.0)
        parts = self.partial(evaluation)
        if self._peak is None:
            self._dtypes = [part.dtype for part in parts]
            self._sums = [part.to(accumulation_dtype(part.dtype)) for part in parts]
        else:
            scale = (self._peak - self.shifted.peak).exp()
            factors = [scale] if self.message is None else [self._aligned(scale, parts[0]), scale]
            for index, (part, factor) in enumerate(zip(parts, factors, strict=True)):
                self._sums[index] = self._sums[index] * factor + part
        self._peak = peak

    def finish(self) -> tuple[Tensor, ...]:
        sums, self._sums, self._peak = self._sums, [], None
        return tuple(s.to(d) for s, d in zip(sums, self._dtypes, strict=True))

    def partial(self, evaluation: Evaluation) -> tuple[Tensor, ...]:
        total = self._total_message.reduce_sum(evaluation)
        return (total,) if self.message is None else (self.message.reduce_sum(evaluation), total)

    def normalize(self, weighted: Tensor, total: Tensor) -> Tensor:
        """The weighted mean; rows without in-edges stay 0."""
        return weighted / self._aligned(total.masked_fill(total == 0, 1.0), weighted)

    def _aligned(self, rows: Tensor, like: Tensor) -> Tensor:
        """``rows``, one per destination and softmax column, shaped to broadcast with ``like``."""
        for reshape in self.reshapes:
            before = reshape.child.shape[1:]
            rows = _pad(rows, len(before)).expand(rows.shape[0], *before)
            rows = reshape.reshape_rows(rows)
        return _pad(rows, like.dim() - 1)


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


def proportional_softmax(root: Expression) -> tuple[Softmax, list[Reshape]] | None:
    """The one softmax that ``root`` is proportional to, and the reshapes after it, in order.

    Dropout, reshaping, negation, and products or quotients with values that hold no softmax keep
    proportionality; dividing by the total may then wait until all shards are in.
    """
    reshapes: list[Reshape] = []
    node = root
    while not isinstance(node, Softmax):
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
    if holds_softmax(node.scores):
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
    return any(isinstance(node, Softmax) for node in walk(root))
