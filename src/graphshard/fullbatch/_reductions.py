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
attention      one walk over the shard's edges               by a kernel, see `_attention`
=============  ============================================  ====================================

The softmax sum is in `_softmax`. Those whose messages can be cut (`_cuts`) take remote shards block
by block: merge and partial then see a block of the messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..ops import empty_like, gspmm
from ._cuts import Cut, find_cut
from ._expressions import Evaluation, Leaf, LeafKey
from ._messages import Adjoint, CopySource, Message, distinct_leaves

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
    #: Whether blocks of the messages are enough for blocks of the result.
    can_be_cut = True

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

    @property
    def main_message(self) -> Message:
        """The message whose sums are the result."""
        return self.messages[0]

    @cached_property
    def cut(self) -> Cut | None:
        """How a shard may be merged block by block, once the own shard is in; None for whole."""
        return find_cut(self.main_message) if self.can_be_cut else None

    def block_of(self, evaluation: Evaluation, whole: Tensor) -> Tensor:
        """The evaluation's block of the whole result, or of what broadcasts with it, as a view."""
        axis = None if self.cut is None else self.cut.axis
        is_broadcast = axis is None or whole.dim() - 1 < axis or whole.shape[-axis] == 1
        return evaluation.block.of(whole, None if is_broadcast else axis)

    @abstractmethod
    def merge(self, evaluation: Evaluation) -> None:
        """Take in what a shard contributes, to the evaluation's block alone."""

    @abstractmethod
    def finish(self) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def partial(self, evaluation: Evaluation) -> tuple[Tensor, ...]: ...

    def shard_gradients(self, evaluation: Evaluation, grads: Sequence[Tensor]) -> list[Tensor]:
        """The part of the outputs' gradients that concerns this shard and block."""
        return [self.block_of(evaluation, grad) for grad in grads]

    def adjoints(self, evaluation: Evaluation, grads: Sequence[Tensor]) -> list[Adjoint]:
        """How to find the gradients of `partial`, given those of its results."""
        return [Adjoint(*pair) for pair in zip(self.partial(evaluation), grads, strict=True)]

    def begin_backward(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Called once, before any shard, with the gradients of the whole outputs.

        Returns:
            What `shard_gradients` takes its part of.
        """
        return list(grads)

    def direct_gradients(
        self, evaluation: Evaluation, grads: Sequence[Tensor], wanted: Sequence[Leaf]
    ) -> dict[LeafKey, Tensor | None] | None:
        """Gradients of leaves, found without autograd; None where `adjoints` says how to.

        Each is a new tensor.
        """
        if self.needs_sources:
            return None
        return {leaf.key: self.source_gradient(evaluation, grads) for leaf in wanted}

    def source_gradient(self, evaluation: Evaluation, grads: Sequence[Tensor]) -> Tensor:
        """Gradient of the only leaf, a source leaf; for reductions without `needs_sources`."""
        raise AssertionError(f"{type(self).__name__} has no direct source gradient")


class Sum(Reduction):
    """Sum of messages at each destination, or what it is divided by a number for each.

    Args:
        message: What is summed.
        divisor: ``[num_dst]`` for means: the number of messages, at least 1.
    """

    def __init__(self, message: Message, divisor: Tensor | None = None) -> None:
        self.message, self.messages, self._divisor = message, [message], divisor
        self.needs_sources = not isinstance(message, CopySource)
        self._sum: Tensor | None = None
        self._dtype = torch.float32

    def merge(self, evaluation: Evaluation) -> None:
        if self._sum is not None:
            self.message.add_sum(evaluation, self.block_of(evaluation, self._sum))
            return
        part = self.message.reduce_sum(evaluation)
        self._dtype = part.dtype
        self._sum = part.to(accumulation_dtype(part.dtype))

    def finish(self) -> tuple[Tensor, ...]:
        assert self._sum is not None
        whole, self._sum = self._sum, None
        if self._divisor is not None:
            whole.div_(self._per_row(whole))
        return (whole.to(self._dtype),)

    def _per_row(self, like: Tensor) -> Tensor:
        assert self._divisor is not None
        return self._divisor.to(like.dtype).view(-1, *[1] * (like.dim() - 1))

    def begin_backward(self, grads: Sequence[Tensor]) -> list[Tensor]:
        if self._divisor is None:
            return list(grads)
        return [torch.div(g, self._per_row(g), out=empty_like(g)) for g in grads]

    def partial(self, evaluation: Evaluation) -> tuple[Tensor, ...]:
        return (self.message.reduce_sum(evaluation),)

    def adjoints(self, evaluation: Evaluation, grads: Sequence[Tensor]) -> list[Adjoint]:
        return [self.message.sum_adjoint(evaluation, grads[0])]

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

    def merge(self, evaluation: Evaluation) -> None:
        value, position = self.message.reduce_arg(evaluation, self.reduce)
        eids = evaluation.shard.edge_ids()
        present = position >= 0
        edge = torch.full_like(position, -1, dtype=eids.dtype)
        edge[present] = eids[position[present].to(torch.int64)]
        del position
        if self._best is None or self._edge is None:
            self._best, self._edge = value, edge
            return
        best, before = (self.block_of(evaluation, whole) for whole in (self._best, self._edge))
        takes = value > best if self.reduce == "max" else value < best
        takes |= (value == best) & (edge < before)
        takes |= before < 0
        takes &= present
        best.copy_(torch.where(takes, value, best))
        before.copy_(torch.where(takes, edge, before))

    def finish(self) -> tuple[Tensor, ...]:
        assert self._best is not None and self._edge is not None
        best, self._best = self._best, None
        return (torch.where(self._edge >= 0, best, torch.zeros_like(best)),)

    def _positions(self, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        """Where this shard's edges won: the shard's edge positions (0 elsewhere), and a mask."""
        assert self._edge is not None
        eids, edge = evaluation.shard.edge_ids(), self.block_of(evaluation, self._edge)
        if eids.numel() == 0:
            none = torch.zeros_like(edge, dtype=torch.int64)
            return none, none.to(torch.bool)
        position = torch.searchsorted(eids, edge.contiguous()).clamp_(max=eids.numel() - 1)
        won = eids[position] == edge
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

    can_be_cut = False

    def __init__(self, messages: Sequence[Message], num_edges: int) -> None:
        self.messages, self.num_edges = list(messages), num_edges
        self._rows: list[Tensor] | None = None

    def merge(self, evaluation: Evaluation) -> None:
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
