# SPDX-License-Identifier: Apache-2.0
"""How partial results of shards become one: sum, online softmax, maximum, or rows side by side.

Each reduction knows two things. Forward, how to merge a shard into what it has (without
gradients). Backward, how to differentiate one shard: most often by a *partial* result whose sum
over the shards has the gradient of the whole:

=============  ============================================  ====================================
reduction      merge                                         backward
=============  ============================================  ====================================
sum, mean      add; a mean divides at the end                the shard's sum
softmax sum    rescale by exp(old peak - new peak), add      the shard's sum, at the final peak
max, min       keep the better; ties: smaller edge id        by the edges of the argmax
rows           write at the shard's edge ids                 the shard's rows
attention      one walk over the shard's edges               by a kernel, see `_attention`
=============  ============================================  ====================================

The softmax sum is in `_softmax`. Those whose messages can be cut (`_cuts`) take remote shards block
by block: merge and partial then see a block of the messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...ops import add_rows, empty, empty_like, merge_best
from ..lazy import Adjoint, CopySource, Leaf, LeafKey, Message, ShardEvaluation, distinct
from ._cuts import ColumnCut, find_cut

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of 16-bit numbers are kept in float32 until the last shard is in."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def is_graph_kept() -> bool:
    """Whether the backward that is running was called with ``retain_graph``."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


class Reduction(ABC):
    """One relation's part of a pass over the shards."""

    #: Whether the backward looks at the values of source rows, so that they must be fetched again.
    needs_sources = True
    #: The messages that this reduction is made of.
    messages: list[Message]
    #: Whether blocks of the messages are enough for blocks of the result.
    can_be_cut = True
    #: Names the call site, where what is found about it once may be used again; set by the planner.
    site: Hashable | None = None
    #: Shards that will be merged; set by the pass.
    num_shards = 1
    #: Whether 16-bit sums are kept in float32 until the last shard is in; set by the pass.
    widens = True

    @property
    def has_lost_result(self) -> bool:
        """Whether the backward reads the result, and the caller has changed it in place."""
        return False

    @property
    def is_random(self) -> bool:
        """Whether evaluating again needs the random state of the first time."""
        return any(message.is_random for message in self.messages)

    def leaves(self) -> list[Leaf]:
        """The distinct tensors that the messages are made from."""
        return distinct([leaf for message in self.messages for leaf in message.leaves()])

    def parameters(self) -> list[Tensor]:
        """Leaf tensors that the messages use without being told, known after the merges."""
        return [p for message in self.messages for p in message.parameters()]

    @property
    def message(self) -> Message:
        """The message whose sums are the result: the last one."""
        return self.messages[-1]

    @cached_property
    def cut(self) -> ColumnCut | None:
        """How a shard may be merged block by block, once the own shard is in; None for whole."""
        return find_cut(self.message) if self.can_be_cut else None

    def block_of(self, evaluation: ShardEvaluation, whole: Tensor) -> Tensor:
        """The evaluation's block of the whole result, or of what broadcasts with it, as a view."""
        if evaluation.block.count == 1:
            return whole
        axis = None if self.cut is None else self.cut.axis
        is_broadcast = axis is None or whole.dim() - 1 < axis or whole.shape[-axis] == 1
        return evaluation.block.of(whole, None if is_broadcast else axis)

    @abstractmethod
    def merge(self, evaluation: ShardEvaluation) -> None:
        """Take in what a shard contributes, to the evaluation's block alone."""

    @abstractmethod
    def finish(self) -> tuple[Tensor, ...]: ...

    def partial(self, evaluation: ShardEvaluation) -> tuple[Tensor, ...]:
        """The shard's partial results, differentiable; where `adjoints` starts from them."""
        raise AssertionError(f"{type(self).__name__} has no partial result")

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        """The outputs by autograd alone, from all local edges at once; after the pass."""
        return self.partial(evaluation)

    def shard_gradients(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Tensor]:
        """The part of the outputs' gradients that concerns this shard and block."""
        return [self.block_of(evaluation, grad) for grad in grads]

    def _kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which sums of ``dtype`` wait for the next shard."""
        return accumulation_dtype(dtype) if self.widens else dtype

    def adjoints(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Adjoint]:
        """How to find the gradients of `partial`, given those of its results."""
        return [Adjoint(*pair) for pair in zip(self.partial(evaluation), grads, strict=True)]

    def tie(self, outputs: Sequence[Tensor]) -> None:
        """See the outputs once autograd knows where they are from."""
        return

    def begin_backward(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """See the gradients of the whole outputs, once; returns those that the shards get."""
        return grads

    def release(self) -> None:
        """Free what the backward does not need, once the forward is over."""
        if not self.needs_sources:
            self.messages = [message.released() for message in self.messages]

    def direct_gradients(
        self, evaluation: ShardEvaluation, grads: Sequence[Tensor], wanted: Sequence[Leaf]
    ) -> dict[LeafKey, Tensor | None] | None:
        """Gradients of leaves, found without autograd; None where `adjoints` says how to."""
        if self.needs_sources:
            return None
        return {leaf.key: self.source_gradient(evaluation, grads) for leaf in wanted}

    def source_gradient(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> Tensor:
        """Gradient of the only leaf, a source leaf; for reductions without `needs_sources`."""
        raise AssertionError(f"{type(self).__name__} has no direct source gradient")


class Sum(Reduction):
    """Sum of messages at each destination, or their mean.

    Args:
        message: What to add up.
        counts: ``[num_dst]`` messages at each destination over all shards, at least 1, to divide
            by; None for the sum.
    """

    def __init__(self, message: Message, counts: Tensor | None = None) -> None:
        self.messages, self.counts = [message], counts
        self.needs_sources = not message.is_linear
        self._sum: Tensor | None = None
        self._dtype = torch.float32

    @property
    def _divides_at_once(self) -> bool:
        """Whether the kernel can divide, because it sees all messages."""
        return self.counts is not None and self.num_shards == 1

    def merge(self, evaluation: ShardEvaluation) -> None:
        if self._sum is None:
            part = self.message.reduce_sum(evaluation, mean=self._divides_at_once)
            self._dtype = part.dtype
            self._sum = part.to(self._kept_dtype(part.dtype))
            return
        total = self.block_of(evaluation, self._sum)
        if self.message.add_sum(evaluation, total):
            return
        reached = evaluation.shard.reached
        if reached is None:
            total.add_(self.message.reduce_sum(evaluation))
        else:
            rows, adjacency = reached
            part = self.message.reduce_sum(evaluation, adjacency)
            add_rows(total, rows, part)

    def finish(self) -> tuple[Tensor, ...]:
        assert self._sum is not None
        total, self._sum = self._sum, None
        if self.counts is not None and not self._divides_at_once:
            total.div_(_as_column(self.counts, total))
        return (total.to(self._dtype),)

    def begin_backward(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.counts is None:
            return grads
        return [_divided(grad, _as_column(self.counts, grad)) for grad in grads]

    def partial(self, evaluation: ShardEvaluation) -> tuple[Tensor, ...]:
        return (self.message.reduce_sum(evaluation),)

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        total = self.message.reduce_sum(evaluation)
        return (total if self.counts is None else _divided(total, _as_column(self.counts, total)),)

    def adjoints(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Adjoint]:
        return [self.message.sum_adjoint(evaluation, grads[0])]

    def source_gradient(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> Tensor:
        return self.message.source_gradient(evaluation, grads[0])


def _as_column(counts: Tensor, like: Tensor) -> Tensor:
    """To divide ``like`` by; wide, because 16-bit numbers do not count far."""
    return counts.to(accumulation_dtype(like.dtype)).view(-1, *[1] * (like.dim() - 1))


def _divided(rows: Tensor, divisor: Tensor) -> Tensor:
    if rows.dtype == divisor.dtype and not torch.is_grad_enabled():
        return torch.div(rows, divisor, out=empty_like(rows))
    return (rows / divisor).to(rows.dtype)


class Extremum(Reduction):
    """Largest or smallest message at each destination, entry by entry.

    A tie goes to the smallest local edge id. The in-edges of one node keep their original order
    when a graph is partitioned, so the argmax is the same however many parts there are.
    """

    def __init__(self, message: Message, reduce: str, num_edges: int) -> None:
        self.messages, self.reduce = [message], reduce
        self.needs_sources = not isinstance(message, CopySource)
        self._num_edges = num_edges
        self._best: Tensor | None = None
        self._edge: Tensor | None = None  # local edge ids; num_edges where there is none

    def merge(self, evaluation: ShardEvaluation) -> None:
        value, position = self.message.reduce_arg(evaluation, self.reduce)
        eids = evaluation.shard.eids
        if self._best is None or self._edge is None:
            dtype = position.dtype if eids is None else eids.dtype
            self._best = empty_like(value).zero_()
            self._edge = empty(value.shape, dtype, value.device).fill_(self._num_edges)
        best, edge = (self.block_of(evaluation, whole) for whole in (self._best, self._edge))
        merge_best(best, edge, value, position, eids, self._num_edges, self.reduce)

    def finish(self) -> tuple[Tensor, ...]:
        assert self._best is not None
        best, self._best = self._best, None
        return (best,)

    def _positions(self, evaluation: ShardEvaluation) -> Tensor:
        """Which of the shard's edges is the argmax, -1 where none is."""
        assert self._edge is not None
        edge, shard = self.block_of(evaluation, self._edge), evaluation.shard
        places = torch.full((self._num_edges + 1,), -1, dtype=shard.adjacency.idtype)
        places = places.to(edge.device)
        count = shard.adjacency.num_edges
        ids = slice(count) if shard.eids is None else shard.eids.to(torch.int64)
        places[ids] = torch.arange(count, dtype=places.dtype, device=places.device)
        return places.index_select(0, edge.reshape(-1)).view(edge.shape)

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        """Each entry by the edge that it is from; source rows are not gathered to all edges."""
        assert self._edge is not None
        adjacency, edge = evaluation.shard.adjacency, self._edge
        index = edge.clamp(max=self._num_edges - 1).long()
        if isinstance(self.message, CopySource):
            rows = evaluation.leaf(self.message.source)
            index = adjacency.coo()[0].long()[index] if self._num_edges else index
        else:
            rows = self.message.rows(evaluation)
        if self._num_edges == 0:
            return (rows.sum() * 0 + rows.new_zeros(edge.shape),)
        return (torch.where(edge < self._num_edges, rows.gather(0, index), 0.0),)

    def adjoints(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Adjoint]:
        return [self.message.best_adjoint(evaluation, grads[0], self._positions(evaluation))]

    def source_gradient(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> Tensor:
        return self.message.best_gradient(evaluation, grads[0], self._positions(evaluation))


class EdgeValues(Reduction):
    """The value of every edge, written side by side: `DeferredEdges.materialize`."""

    can_be_cut = False

    def __init__(self, messages: Sequence[Message], num_edges: int) -> None:
        self.messages, self.num_edges = list(messages), num_edges
        self._rows: list[Tensor] | None = None

    def merge(self, evaluation: ShardEvaluation) -> None:
        parts = [message.rows(evaluation) for message in self.messages]
        if self._rows is None:
            self._rows = [p.new_zeros((self.num_edges, *p.shape[1:])) for p in parts]
        for whole, part in zip(self._rows, parts, strict=True):
            whole.index_copy_(0, evaluation.shard.edge_ids().to(torch.int64), part)

    def finish(self) -> tuple[Tensor, ...]:
        assert self._rows is not None
        rows, self._rows = self._rows, None
        return tuple(rows)

    def partial(self, evaluation: ShardEvaluation) -> tuple[Tensor, ...]:
        return tuple(message.rows(evaluation) for message in self.messages)

    def shard_gradients(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Tensor]:
        return [evaluation.shard.edge_rows(grad) for grad in grads]


class CompanionRows(Reduction):
    """Source rows that travel with a pass for later calls; there is no result.

    Args:
        tensors: Whole source rows.
    """

    can_be_cut = False
    needs_sources = False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.messages = []
        self._leaves = [Leaf("u", tensor) for tensor in tensors]

    def leaves(self) -> list[Leaf]:
        return self._leaves

    def merge(self, evaluation: ShardEvaluation) -> None:
        return

    def finish(self) -> tuple[Tensor, ...]:
        return ()

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        return ()

    def release(self) -> None:
        self._leaves = [leaf.released() for leaf in self._leaves]

    def direct_gradients(
        self, evaluation: ShardEvaluation, grads: Sequence[Tensor], wanted: Sequence[Leaf]
    ) -> dict[LeafKey, Tensor | None]:
        return {}
