# SPDX-License-Identifier: Apache-2.0
"""Softmax over edges whose sources arrive shard by shard: as a sum, in attention, and by itself.

`SoftmaxSum` is an online softmax: Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018, https://arxiv.org/abs/1805.02867. The softmax does not depend on the peak that it is
shifted by, so the backward may hold the peak constant and still be exact.

`AttentionSum` is fused attention that takes its in-edges one shard after the other. The state of a
destination is (peak, total, sum) per head, which a kernel continues with the edges of each shard in
place; nothing has a row per edge and head. Backward the kernel computes the weights of a shard
again from the final peak and total. See csrc/attention/attention.h.

[Note: states of destinations]
    A rank may make, of its own rows, the state of a destination of another rank, and send that in
    place of the rows ([Note: fewest rows]): normalised values, and the logarithm of the sum of the
    exponentials of the scores, which is peak and total in one number. To the state of the owner it
    is one more edge, whose score is that logarithm, so the kernel merges it. Forward, what scores
    read of the destinations goes to the ranks that make states, before the rows; they make them
    first, and send them behind the rows, while own edges are computed. Backward, the gradients of
    the destinations go there, with the logarithm over all in-edges and delta; what comes back is
    the gradient of what scores read of the destinations. States come in the order of ranks.
    Dropout goes by the keys of edges, which are sent once, and the seed of the rank that makes a
    state; where a gradient is differentiated the ranks tell each other their seeds.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._base.kernels import empty, empty_like
from .._base.typing import CanonicalEType
from ..comm import Pending, fetch_halo, return_halo, start_fetch_all, start_return_all
from ..comm.collectives import Wire, all_gather, row_bytes, wire_row_bytes
from ..errors import RankError
from ..graph.frame import version_of
from ..ops import Adjacency, Attention, EdgeMask, add_rows, attend, edge_softmax, gspmm, gspmm_arg
from ..ops.attention import begin_backward, compute, finish, finish_
from .column_blocks import ColumnBlock, most_blocks
from .fewest_rows import RowsAndStates
from .reductions import (
    COLUMNS,
    HEADS,
    Adjoint,
    Apply,
    ColumnCut,
    Dropout,
    Expression,
    LazySoftmax,
    Leaf,
    LeafKey,
    Message,
    PerEdge,
    Reduction,
    Reshape,
    ShardEvaluation,
    ShiftedSoftmax,
    Weighted,
    accumulation_dtype,
    distinct,
    is_graph_kept,
    substitute,
    walk,
)
from .topology import Halo, ShardStructure

# -- a sum with a softmax inside -------------------------------------------------------------------


class SoftmaxSum(Reduction):
    """Sum of messages weighted by a softmax over all in-edges, in one pass over the shards.

    Outputs ``(weighted sum at the peak, total)``; `normalize` divides the one by the other.

    Args:
        message: The message, rebuilt around the shifted scores; None: only the total.
        reshapes: Shapes that the weights take between the softmax and the message, in order.
    """

    def __init__(
        self,
        softmax: LazySoftmax,
        message: Weighted | PerEdge | None = None,
        reshapes: Sequence[Reshape] = (),
    ) -> None:
        self.shifted = ShiftedSoftmax(softmax)
        self._weighted: Message | None = None
        if message is not None:
            value = substitute(message.value, {id(softmax): self.shifted})
            self._weighted = message.with_value(value)
        self.reshapes = list(reshapes)
        self._total_message = PerEdge(self.shifted)
        super().__init__([self._total_message] + ([self._weighted] if self._weighted else []))
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
        scales = [self._scale]  # by what each sum shrinks, to be broadcast
        if self._weighted is not None:
            scales.insert(0, self._aligned(self._scale, self._sums[0]))
        sums, factors = self._seen(evaluation, self._sums), self._seen(evaluation, scales)
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
        return _Quotient.apply(weighted, divisor)

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
    """Whether a softmax that is not resolved is in an expression."""
    return any(isinstance(node, LazySoftmax) for node in walk(root))


# -- fused attention -------------------------------------------------------------------------------

_TARGETS = ("u", "u", "v", "e", "c", "e")  # of values, src, dst, edge, vector, factor


class PartialStates:
    """States of other ranks' destinations in one attention. See [Note: states of destinations].

    What is started must be waited for, by the step that follows or by `abandon`.

    Args:
        split: Which states.
        wire: In which dtype wider values and their gradients travel; None is their own. What scores
            and weights are computed from travels as it is.
        partial_edges: As of ``split``; ids of those edges as the pass has them.
    """

    def __init__(self, split: RowsAndStates, wire: Wire, partial_edges: Tensor) -> None:
        self._split, self._plan, self._wire = split, split.states, wire
        self._partial_edges = partial_edges
        self._mask: EdgeMask | None = None  # of the edges that states are made of
        self._pending: Pending | None = None
        self._dst = torch.empty(0)  # what scores read of the destinations

    def _wait(self) -> list[Tensor]:
        pending, self._pending = self._pending, None
        assert pending is not None
        return pending.wait()

    def abandon(self) -> None:
        """After an error: no message of this pass may meet those of a later one."""
        if self._pending is not None:
            with suppress(RankError):
                self._wait()

    def begin(self, dst: Tensor, mask: EdgeMask | None) -> None:
        """Start to fetch what scores read of the destinations, given that of the own ones.

        Args:
            mask: Of local edges.
        """
        if mask is not None:
            assert mask.keys is not None
            keys = self._split.keys_of_edges(mask.keys, self._partial_edges)
            self._mask = replace(mask, keys=keys)
        self._pending = start_fetch_all([(self._plan, dst)])

    def make(self, attention: Attention) -> None:
        """Make the states, and start to return them; of the attention as the own shard has it."""
        (self._dst,) = self._wait()
        values, peak, total = compute.whole(self._split.edges, self._served(attention))
        sums = peak + total.log()
        self._pending = start_return_all(
            [(self._plan, values), (self._plan, _as_words(sums))], self._wire
        )

    def merge(self, state: compute.AttentionState) -> None:
        """Wait for the states of own destinations, and take them in."""
        values, words = self._wait()
        merging = Attention.additive(
            values, words.view(state.peak.dtype), torch.zeros_like(state.peak), slope=1.0
        )
        compute.take(self._split.received, merging, state)

    def begin_backward(self, grad: Tensor, sums: Tensor, delta: Tensor) -> None:
        """Start to fetch the gradients of the destinations, given those of the own ones.

        Args:
            sums: The logarithm of the sum of exponentials, ``[num_dst, heads]``; likewise delta.
        """
        numbers = _as_words(torch.stack([sums, delta], 1))
        self._pending = start_fetch_all([(self._plan, grad), (self._plan, numbers)], self._wire)

    def gradients(self, attention: Attention, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of the operands through the states; starts to return those of destinations.

        Of values and sources those of the rows `RowsAndStates.sources`, of destinations None.
        """
        grad, words = self._wait()
        sums, delta = words.view(accumulation_dtype(attention.dtype)).unbind(1)
        statistics = sums.contiguous(), torch.ones_like(sums), delta.contiguous()
        shares = compute.gradients(
            self._split.edges, self._served(attention), statistics, grad, wanted
        )
        if (of_dst := shares[2]) is not None:
            self._pending = start_return_all([(self._plan, of_dst)])
            shares[2] = None
        return shares

    def add_to(self, shares: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
        """Add to the gradients of own edges what `gradients` gave, and what is returned."""
        sources = self._split.sources
        for number, (share, other) in enumerate(zip(shares, others, strict=True)):
            if share is None:
                continue
            if other is not None and _TARGETS[number] == "u":
                add_rows(share, sources, other)
            elif other is not None:
                share += other
            elif _TARGETS[number] == "v":
                self._plan.add_returned(share, *self._wait())

    def _served(self, attention: Attention) -> Attention:
        """The attention as the edges of the states have it."""
        a, sources = attention, self._split.sources
        values = a.values.index_select(0, sources)
        src = a.src
        if src is not None:
            src = values if src is a.values else src.index_select(0, sources)
        return replace(a, values=values, src=src, dst=self._dst, mask=self._mask)

    def multipliers(self, mask: EdgeMask, num_edges: int, heads: int) -> Tensor:
        """What dropout makes of the weights of all local edges, by whose seed it may be.

        Collective. Args are as for `EdgeMask.multipliers`, for the mask of this rank.
        """
        seeds = all_gather(self._plan.state, torch.tensor([mask.seed]), "seeds of attention")
        edges = self._partial_edges
        result = mask.multipliers(torch.arange(num_edges, device=edges.device), heads)
        splits, _ = self._split.partial_splits
        for seed, ids in zip(seeds, edges.split(splits), strict=True):
            result[ids] = replace(mask, seed=int(seed)).multipliers(ids, heads)
        return result


def _as_words(numbers: Tensor) -> Tensor:
    """The same bits as integers, which are not rounded on their way."""
    return numbers.view(torch.int64 if numbers.dtype == torch.float64 else torch.int32)


class AttentionSum(Reduction):
    """One relation's attention; its only output is the result, divided by the totals already.

    Args:
        attention: Operands of this rank's rows and edges; a mask has keys.
    """

    can_lose_result = True

    def __init__(self, attention: Attention) -> None:
        self._leaves = [
            None if tensor is None else Leaf(target, tensor)
            for target, tensor in zip(_TARGETS, attention.operands, strict=True)
        ]
        self._bias = None if attention.bias is None else Leaf("c", attention.bias)
        leaves = distinct([leaf for leaf in (*self._leaves, self._bias) if leaf is not None])
        super().__init__([], leaves)
        self._rule = attention.with_operands([None] * len(_TARGETS)).finished(None, attention.relu)
        rows = [None if t is None else (t.shape[1:], t.dtype) for t in attention.operands]
        self.site = ("attention", attention.score, attention.heads, *rows, attention.bias is None)
        self._dtype, self._heads, self._dim = attention.dtype, attention.heads, attention.dim
        self._states: list[compute.AttentionState] = []  # of each block, once there are blocks
        self._out, self._version = torch.empty(0), 0
        self._statistics = compute.AttentionState(self._out, self._out, self._out)
        self._delta = self._out
        #: States that are made of own rows; set by the pass.
        self.states: PartialStates | None = None
        self._has_begun = False  # the backward, before the pass
        self._awaits_relu = False  # in the backward, for a result that must be computed again

    @cached_property
    def cut(self) -> ColumnCut | None:
        """Between heads; or between columns of the values, where scores do not read them."""
        cuts = [self._cut_of(HEADS), self._cut_of(COLUMNS)]
        return max((c for c in cuts if c is not None), key=lambda cut: cut.most, default=None)

    def _cut_of(self, axis: int) -> ColumnCut | None:
        values, src, *_ = self._leaves
        assert values is not None
        leaves = self.leaves
        axes: dict[LeafKey, int | None] = {leaf.key: None for leaf in leaves}
        if axis == HEADS:
            for leaf in leaves:
                row = leaf.tensor.shape if leaf.target == "c" else leaf.tensor.shape[1:]
                if row[0] == self._heads:  # not one factor for all
                    axes[leaf.key] = len(row)
        elif self._rule.score == "joint" or src is None or src.key == values.key:
            return None
        else:
            axes[values.key] = COLUMNS
        columns = [leaf.tensor.shape[1:].numel() for leaf in leaves if leaf.target == "u"]
        columns = columns if axis == HEADS else [values.tensor.shape[1:].numel()]
        most = most_blocks(values.tensor.shape[-axis], sum(columns))
        return ColumnCut(axis, axes, most) if most > 1 else None

    @property
    def _is_cut_by_heads(self) -> bool:
        return self.cut is not None and self.cut.axis == HEADS

    def _seen(self, evaluation: ShardEvaluation) -> Attention:
        """The attention as one shard and block has it."""
        mask = self._rule.mask
        if mask is not None:
            assert mask.keys is not None
            first = evaluation.block.bounds(self._heads)[0] if self._is_cut_by_heads else 0
            mask = replace(mask, keys=evaluation.shard.edge_rows(mask.keys), first_head=first)
        operands = [None if leaf is None else evaluation.leaf(leaf) for leaf in self._leaves]
        return replace(self._rule, mask=mask).with_operands(operands)

    @property
    def reads_edges(self) -> bool:
        """Whether tensors with rows of edges are read; a mask has none."""
        return any(leaf.target == "e" for leaf in self.leaves)

    def bytes_each(self, wire: Wire) -> tuple[int, int]:
        """What a row of another rank costs, and a state of a destination, there and back."""
        values, src, dst, *_ = self._leaves
        assert values is not None
        assert dst is not None
        sources = distinct([leaf for leaf in (values, src) if leaf is not None])
        needs = [leaf.tensor.requires_grad for leaf in self.leaves]
        ways = 2 if torch.is_grad_enabled() and True in needs else 1
        of_row = ways * sum(wire_row_bytes(leaf.tensor, wire) for leaf in sources)
        of_result = wire_row_bytes(values.tensor[:0].to(self._dtype), wire)
        wide = accumulation_dtype(self._dtype).itemsize
        of_state = ways * of_result + row_bytes(dst.tensor) + self._heads * wide
        if ways == 2:
            of_state += 2 * self._heads * wide + dst.tensor.shape[1:].numel() * wide
        return of_row, of_state

    def begin(self, tensors: Mapping[LeafKey, Tensor]) -> None:
        if self.states is not None:
            (dst,) = [leaf for leaf in self._leaves[2:3] if leaf is not None]
            self.states.begin(tensors[dst.key], self._rule.mask)

    def abandon(self) -> None:
        if self.states is not None:
            self.states.abandon()

    def merge(self, evaluation: ShardEvaluation) -> None:
        seen, block = self._seen(evaluation), evaluation.block
        if not self._states:
            if self.states is not None:
                self.states.make(seen)
            self._states = [compute.start(evaluation.shard.adjacency, seen)]
            return
        if self._is_cut_by_heads:  # a part of the state, in its place
            whole = self._states[0]
            peak, total = block.of(whole.peak, 1), block.of(whole.total, 1)
            state = compute.AttentionState(peak, total, block.of(whole.sums, HEADS))
        else:
            if len(self._states) != block.count:
                self._states = self._split(self._states[0], block.count)
            state = self._states[block.index]
        compute.take(evaluation.shard.adjacency, seen, state)

    def _split(self, state: compute.AttentionState, count: int) -> list[compute.AttentionState]:
        """The state of each block of columns in memory of its own; all have the same peaks."""
        states = []
        for index in range(count):
            part = ColumnBlock(index, count).of(state.sums, COLUMNS)
            sums = empty_like(part).copy_(part)
            states.append(compute.AttentionState(state.peak.clone(), state.total.clone(), sums))
        return states

    def finish(self) -> tuple[Tensor, ...]:
        first, count = self._states[0], len(self._states)
        if self.states is not None:
            self.states.merge(first)
        self._statistics = compute.AttentionState(first.peak, first.total, self._out)
        shape, device = [first.sums.shape[0], self._heads, self._dim], first.sums.device
        del first
        bias = None if self._bias is None else self._bias.tensor
        if count == 1:
            result = finish(self._states.pop(), self._dtype, bias, self._rule.relu)
        else:
            result = empty(shape, self._dtype, device)
            for index in range(count):
                part = finish(self._states.pop(0), self._dtype)
                ColumnBlock(index, count).of(result, COLUMNS).copy_(part)
            finish_(result, bias, self._rule.relu)
        self._out, self._version = result.detach(), version_of(result)
        return (result,)

    def tie(self, outputs: Sequence[Tensor]) -> None:
        """Take gradients through the ReLU before the backward begins.

        The gradient of the result would live as long as the backward, beside what the ReLU makes
        of it: two tensors as large as the result. A hook hands on the second alone.
        """
        (result,) = outputs
        node, number = result.grad_fn, result.output_nr
        if node is None or not self._rule.relu:
            return
        this = weakref.ref(self)  # gone once there is nothing left to differentiate

        def activate(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            reduction, changed, grad = this(), list(grads), grads[number]
            if reduction is not None and grad is not None:
                changed[number] = reduction._activated(grad)
            return tuple(changed)

        node.register_prehook(activate)

    def _activated(self, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # the gradient will be differentiated
            if self.has_lost_result:
                raise RuntimeError(
                    "the result of an attention layer with a ReLU was changed in place, and the "
                    "gradient of its gradient needs it; use an operation that makes a new tensor"
                )
            return grad * (self._out > 0)
        if self.has_lost_result:
            self._awaits_relu = True
            return grad
        return self._begin(grad, self._rule.relu)

    @property
    def has_lost_result(self) -> bool:
        return version_of(self._out) != self._version

    def _begin(self, grad: Tensor, relu: bool) -> Tensor:
        """Gradient of the attention itself; finds delta, after which the result may go."""
        bias = None if self._bias is None else self._bias.tensor
        grad, self._delta = begin_backward(grad, self._out, bias, relu)
        self._has_begun = True
        if not is_graph_kept():  # it is as large as the result, and not needed any more
            self._out, self._version = torch.empty(0), 0
        return grad

    def begin_backward(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self._has_begun:
            grads = [self._begin(grads[0], self._awaits_relu)]
        self._has_begun = self._awaits_relu = False
        if self.states is not None:
            sums = self._statistics.peak + self._statistics.total.log()
            self.states.begin_backward(grads[0], sums, self._delta)
        return grads

    def release(self, released: Mapping[LeafKey, Leaf]) -> None:
        self.leaves = [released[leaf.key] for leaf in self.leaves]
        self._leaves = [None if leaf is None else released[leaf.key] for leaf in self._leaves]

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        bias = None if self._bias is None else evaluation.leaf(self._bias)
        attention = self._seen(evaluation).finished(bias, self._rule.relu)
        if self.states is not None and attention.mask is not None:
            num_edges = evaluation.shard.adjacency.num_edges
            factor = self.states.multipliers(attention.mask, num_edges, self._heads)
            factor = factor.to(accumulation_dtype(self._dtype))
            attention = replace(attention, mask=None, factor=factor)
        return (attend(evaluation.shard.adjacency, attention),)

    def direct_gradients(
        self, evaluation: ShardEvaluation, grads: Sequence[Tensor], keys: Sequence[LeafKey]
    ) -> dict[LeafKey, Tensor | None]:
        block, axis = evaluation.block, 1 if self._is_cut_by_heads else None
        (grad,) = grads
        peak = block.of(self._statistics.peak, axis).clone()
        total = block.of(self._statistics.total, axis).clone()
        seen, wanted = self._seen(evaluation), []
        for leaf in self._leaves:
            wanted.append(leaf is not None and leaf.key in keys)
        states = self.states if evaluation.shard.step == 0 else None
        others = [] if states is None else states.gradients(seen, wanted)
        statistics = peak, total, self._delta_of(block)
        shares = compute.gradients(evaluation.shard.adjacency, seen, statistics, grad, wanted)
        if states is not None:
            states.add_to(shares, others)
        sums: dict[LeafKey, Tensor | None] = {}
        for leaf, share in zip(self._leaves, shares, strict=True):
            if leaf is not None and share is not None:
                before = sums.get(leaf.key)
                sums[leaf.key] = share if before is None else before + share
        if self._bias is not None and self._bias.key in keys and evaluation.shard.step == 0:
            sums[self._bias.key] = grad.sum(0)  # the own shard comes whole
        return sums

    def _delta_of(self, block: ColumnBlock) -> Tensor:
        """Delta of some heads; gradients are linear in it, so one block of columns has it all."""
        if self._is_cut_by_heads:
            return block.of(self._delta, 1).contiguous()
        return self._delta if block.is_first else torch.zeros_like(self._delta)


# -- of values that are whole ----------------------------------------------------------------------


def softmax_over_in_edges(
    structure: ShardStructure, etypes: Sequence[CanonicalEType], logits: Sequence[Tensor]
) -> list[Tensor]:
    """Softmax over the in-edges of each destination, all of which are on its own rank.

    Args:
        etypes: Relations into one node type.
        logits: ``[num_edges, ...]`` for each.

    Returns:
        Weights like ``logits``; those of one destination add up to 1 over all relations.
    """
    if len(etypes) == 1:
        adjacency = structure.halo(etypes).adjacency(etypes[0])
        return [edge_softmax(adjacency, logits[0], "dst")]
    edges = [structure.edges[etype] for etype in etypes]
    dst = torch.cat([e.dst for e in edges])
    joint = Adjacency(torch.zeros_like(dst), dst, 1, edges[0].num_dst, check=False)
    weights = edge_softmax(joint, torch.cat(list(logits)), "dst")
    return list(weights.split([e.num_edges for e in edges]))


def softmax_over_out_edges(
    structure: ShardStructure, etypes: Sequence[CanonicalEType], logits: Sequence[Tensor]
) -> list[Tensor]:
    """Softmax over the out-edges of each source, which are spread over the ranks.

    The peak and the total of each source are put together at its owner and fetched back. Relations
    are out of one node type; all else is as for `softmax_over_in_edges`.
    """
    halo = structure.halo(etypes)
    outgoing = [halo.adjacency(etype).reverse() for etype in etypes]
    sources = [halo.extended_src(etype) for etype in etypes]
    with torch.no_grad():
        peak = _peak(outgoing, logits)
        own, remote = peak[: halo.num_owned], peak[halo.num_owned :]
        own = torch.maximum(own, return_halo([(halo.plan, remote)], "max")[0])
        peak = torch.cat([own, fetch_halo([(halo.plan, own)])[0]])
        peak = peak.masked_fill(peak == float("-inf"), 0.0)
    weights = [
        (rows - peak.index_select(0, src)).exp() for rows, src in zip(logits, sources, strict=True)
    ]
    totals = [
        gspmm(adjacency, "copy_rhs", "sum", None, rows)
        for adjacency, rows in zip(outgoing, weights, strict=True)
    ]
    total = torch.stack(totals).sum(0) if len(totals) > 1 else totals[0]
    own_total = total[: halo.num_owned] + _ReturnSum.apply(total[halo.num_owned :], halo)
    total = torch.cat([own_total, fetch_halo([(halo.plan, own_total)])[0]])
    return [rows / total.index_select(0, src) for rows, src in zip(weights, sources, strict=True)]


def _peak(adjacencies: Sequence[Adjacency], logits: Sequence[Tensor]) -> Tensor:
    """Largest value at each end over all relations; -inf where there is no edge."""
    peaks = []
    for adjacency, rows in zip(adjacencies, logits, strict=True):
        peak, argmax = gspmm_arg(adjacency, "copy_rhs", "max", None, rows)
        peaks.append(peak.masked_fill(argmax < 0, float("-inf")))
    return torch.stack(peaks).amax(0)


class _ReturnSum(torch.autograd.Function):
    """Halo rows added up at their owners; the gradient is fetched back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return return_halo([(halo.plan, rows)], "sum")[0].detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return fetch_halo([(ctx.halo.plan, grad.contiguous())])[0], None
