# SPDX-License-Identifier: Apache-2.0
"""AttentionSum: fused attention that takes its in-edges one shard after the other.

The state of a destination is (peak, total, sum) per head, which a kernel continues with the edges
of each shard in place; nothing has a row per edge and head. Backward the kernel computes the
weights of a shard again from the final peak and total. See csrc/attention/attention.h.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ..._base.kernels import empty, empty_like
from ...graph.frame import version_of
from ...ops import Attention, attend
from ...ops.attention import begin_backward, compute, finish, finish_
from ..lazy import Leaf, LeafKey, ShardEvaluation, distinct
from ..topology import ColumnBlock, most_blocks
from ._cuts import ColumnCut
from ._reduction import Reduction, is_graph_kept

_HEADS, _COLUMNS = 2, 1  # dimensions of values and result, counted from the right
_TARGETS = ("u", "u", "v", "e", "c", "e")  # of values, src, dst, edge, vector, factor


class AttentionSum(Reduction):
    """One relation's attention; its only output is the result, divided by the totals already.

    Args:
        attention: Operands of this rank's rows and edges; a mask has keys.
    """

    def __init__(self, attention: Attention) -> None:
        self.messages = []
        self._leaves = [
            None if tensor is None else Leaf(target, tensor)
            for target, tensor in zip(_TARGETS, attention.operands, strict=True)
        ]
        self._bias = None if attention.bias is None else Leaf("c", attention.bias)
        self._rule = attention.with_operands([None] * len(_TARGETS)).finished(None, attention.relu)
        rows = [None if t is None else (t.shape[1:], t.dtype) for t in attention.operands]
        self.site = ("attention", attention.score, attention.heads, *rows, attention.bias is None)
        self._dtype, self._heads, self._dim = attention.dtype, attention.heads, attention.dim
        self._states: list[compute.AttentionState] = []  # of each block, once there are blocks
        self._out, self._version = torch.empty(0), 0
        self._statistics = compute.AttentionState(self._out, self._out, self._out)
        self._delta = self._out
        self._has_begun = False  # the backward, before the pass
        self._awaits_relu = False  # in the backward, for a result that must be computed again

    def leaves(self) -> list[Leaf]:
        return distinct([leaf for leaf in (*self._leaves, self._bias) if leaf is not None])

    @cached_property
    def cut(self) -> ColumnCut | None:
        """Between heads; or between columns of the values, where scores do not read them."""
        cuts = [self._cut_of(_HEADS), self._cut_of(_COLUMNS)]
        return max((c for c in cuts if c is not None), key=lambda cut: cut.most, default=None)

    def _cut_of(self, axis: int) -> ColumnCut | None:
        values = self._leaves[0]
        assert values is not None
        leaves = self.leaves()
        axes: dict[LeafKey, int | None] = {leaf.key: None for leaf in leaves}
        if axis == _HEADS:
            for leaf in leaves:
                row = leaf.tensor.shape if leaf.target == "c" else leaf.tensor.shape[1:]
                if row[0] == self._heads:  # not one factor for all
                    axes[leaf.key] = len(row)
        elif self._rule.score == "joint" or self._leaves[1] is None or self._reads_values:
            return None
        else:
            axes[values.key] = _COLUMNS
        columns = [leaf.tensor.shape[1:].numel() for leaf in leaves if leaf.target == "u"]
        columns = columns if axis == _HEADS else [values.tensor.shape[1:].numel()]
        most = most_blocks(values.tensor.shape[-axis], sum(columns))
        return ColumnCut(axis, axes, most) if most > 1 else None

    @property
    def _reads_values(self) -> bool:
        values, src, *_ = self._leaves
        return src is None or values is None or src.key == values.key

    @property
    def _is_cut_by_heads(self) -> bool:
        return self.cut is not None and self.cut.axis == _HEADS

    def _seen(self, evaluation: ShardEvaluation) -> Attention:
        """The attention as one shard and block has it."""
        mask = self._rule.mask
        if mask is not None:
            assert mask.keys is not None
            first = evaluation.block.bounds(self._heads)[0] if self._is_cut_by_heads else 0
            mask = replace(mask, keys=evaluation.shard.edge_rows(mask.keys), first_head=first)
        operands = [None if leaf is None else evaluation.leaf(leaf) for leaf in self._leaves]
        return replace(self._rule, mask=mask).with_operands(operands)

    def merge(self, evaluation: ShardEvaluation) -> None:
        seen, block = self._seen(evaluation), evaluation.block
        if not self._states:
            self._states = [compute.start(evaluation.shard.adjacency, seen)]
            return
        if self._is_cut_by_heads:  # a part of the state, in its place
            whole = self._states[0]
            peak, total = block.of(whole.peak, 1), block.of(whole.total, 1)
            state = compute.AttentionState(peak, total, block.of(whole.sums, _HEADS))
        else:
            if len(self._states) != block.count:
                self._states = self._split(self._states[0], block.count)
            state = self._states[block.index]
        compute.take(evaluation.shard.adjacency, seen, state)

    def _split(self, state: compute.AttentionState, count: int) -> list[compute.AttentionState]:
        """The state of each block of columns in memory of its own; all have the same peaks."""
        states = []
        for index in range(count):
            part = ColumnBlock(index, count).of(state.sums, _COLUMNS)
            sums = empty_like(part).copy_(part)
            states.append(compute.AttentionState(state.peak.clone(), state.total.clone(), sums))
        return states

    def _of_heads(self, block: ColumnBlock, state: compute.AttentionState) -> tuple[Tensor, Tensor]:
        """Peak and total of a block, in memory of their own."""
        axis = 1 if self._is_cut_by_heads else None
        return block.of(state.peak, axis).clone(), block.of(state.total, axis).clone()

    def finish(self) -> tuple[Tensor, ...]:
        first = self._states[0]
        self._statistics = compute.AttentionState(first.peak, first.total, self._out)
        del first
        bias = None if self._bias is None else self._bias.tensor
        if len(self._states) == 1:
            result = finish(self._states.pop(), self._dtype, bias, self._rule.relu)
        else:
            count = len(self._states)
            like = self._states[0].sums
            shape = [like.shape[0], self._heads, self._dim]
            result = empty(shape, self._dtype, like.device)
            del like
            for index in range(count):
                part = finish(self._states.pop(0), self._dtype)
                ColumnBlock(index, count).of(result, _COLUMNS).copy_(part)
            finish_(result, bias, self._rule.relu)
        self._out, self._version = result.detach(), version_of(result)
        return (result,)

    def tie(self, outputs: Sequence[Tensor]) -> None:
        """Take gradients through the ReLU before the backward begins.

        The gradient of the result would live as long as the backward, beside what the ReLU makes
        of it: two tensors as large as the result. A hook hands on the second alone.
        """
        (result,) = outputs
        node, place = result.grad_fn, result.output_nr
        if node is None or not self._rule.relu:
            return
        this = weakref.ref(self)  # gone once there is nothing left to differentiate

        def activate(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            reduction, found, grad = this(), list(grads), grads[place]
            if reduction is not None and grad is not None:
                found[place] = reduction._activated(grad)
            return tuple(found)

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
        if self._has_begun:
            self._has_begun = False
            return grads
        found = self._begin(grads[0], self._awaits_relu)
        self._awaits_relu = False
        self._has_begun = False
        return [found]

    def release(self) -> None:
        self._leaves = [None if leaf is None else leaf.released() for leaf in self._leaves]

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        bias = None if self._bias is None else evaluation.leaf(self._bias)
        attention = self._seen(evaluation).finished(bias, self._rule.relu)
        return (attend(evaluation.shard.adjacency, attention),)

    def direct_gradients(
        self, evaluation: ShardEvaluation, grads: Sequence[Tensor], wanted: Sequence[Leaf]
    ) -> dict[LeafKey, Tensor | None]:
        keys, block = {leaf.key for leaf in wanted}, evaluation.block
        (grad,) = grads
        found = compute.gradients(
            evaluation.shard.adjacency,
            self._seen(evaluation),
            (*self._of_heads(block, self._statistics), self._delta_of(block)),
            grad,
            [leaf is not None and leaf.key in keys for leaf in self._leaves],
        )
        sums: dict[LeafKey, Tensor | None] = {}
        for leaf, share in zip(self._leaves, found, strict=True):
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
