# SPDX-License-Identifier: Apache-2.0
"""Sequential aggregation and rematerialization.

Source: H. Mostafa, "Sequential Aggregation and Rematerialization: Distributed Full-batch Training
of Graph Neural Networks on Large Graphs", MLSys 2022, https://arxiv.org/abs/2111.06483.

A *pass* takes the shards of one or more relations in a fixed order. Per shard it receives the
owner's rows, merges what they contribute, and frees them; the rows of the next shard are already
under way. The backward makes the same pass: it receives the rows again (unless the reduction is
linear in them, or they were kept), computes the shard's partial result with gradients, and sends
the gradients of the rows home.

Memory: the local rows, the result, and the rows of two shards. With random parts a shard has
1/P-th of the rows of a part at most, so the memory of a worker falls as 1/P whatever the graph.
Communication: the halo once forward; backward the halo again, plus its gradients.

Left undone: the pass waits for each shard in turn even when a later one has already arrived; the
fixed order is what makes runs repeatable to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .._typing import CanonicalEType
from ..comm import Pending, start_fetch
from ..errors import RankError
from ._columns import WHOLE, ColumnBlock, column_blocks
from ._expressions import Evaluation, Leaf, LeafKey
from ._gradients import GradientSums, ShardGradients
from ._reductions import Reduction
from ._replay import RandomState, Replay, autocast_state
from ._topology import Halo, Shard


class ShardPass:
    """One walk over the shards of a halo, for one or more relations that share it.

    Args:
        halo: The source rows; every relation's sources are among them.
        reductions: What to compute for which relation, in an order equal on all ranks.
        keep_rows: Keep what was fetched for the backward, instead of fetching it again.
        device: Where rows are computed.
    """

    def __init__(
        self,
        halo: Halo,
        reductions: Sequence[tuple[CanonicalEType, Reduction]],
        keep_rows: bool,
        device: torch.device,
    ) -> None:
        self.halo = halo
        self.reductions = list(reductions)
        self.keep_rows = keep_rows
        self.device = device
        self.leaves = _distinct([leaf for _, r in reductions for leaf in r.leaves()])
        self.sources = [leaf for leaf in self.leaves if leaf.target == "u"]
        by_columns = bool(self.sources) and all(r.by_columns for _, r in reductions)
        sources = [leaf.tensor for leaf in self.sources]
        self.blocks = column_blocks(halo.longest_message, sources) if by_columns else [WHOLE]
        self._kept: dict[tuple[int, ColumnBlock], list[Tensor]] = {}
        self._random: list[RandomState] = []
        self._autocast = autocast_state(device)

    def run(self) -> list[tuple[Tensor, ...]]:
        """Outputs of each reduction, differentiable in every leaf and discovered parameter."""
        outputs = self._forward()
        parameters = _unique([p for _, r in self.reductions for p in r.parameters()])
        inputs = [*(leaf.tensor for leaf in self.leaves), *parameters]
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
            flat = _Rematerialize.apply(self, outputs, len(parameters), *inputs)
        else:
            flat = tuple(t for group in outputs for t in group)
        sizes = [len(group) for group in outputs]
        return [tuple(part) for part in _split(list(flat), sizes)]

    def _forward(self) -> list[tuple[Tensor, ...]]:
        is_random = any(r.is_random for _, r in self.reductions)
        with torch.no_grad():
            tensors = {leaf.key: leaf.tensor.detach() for leaf in self.leaves}
            for step, block, rows in self._fetched(tensors):
                if self.keep_rows and step:
                    self._kept[step, block] = rows
                if is_random:
                    self._random.append(RandomState.capture(self.device))
                for etype, reduction in self.reductions:
                    shard = self.halo.shards(etype)[step]
                    values = self._values(reduction, shard, rows, tensors)
                    reduction.merge(Evaluation(shard, values), block)
            return [reduction.finish() for _, reduction in self.reductions]

    def _visits(self) -> list[tuple[int, ColumnBlock]]:
        """What the walk goes through: the own shard, then the others, block by block."""
        remote = range(1, self.halo.num_steps) if self.sources else ()
        local = [(step, WHOLE) for step in range(self.halo.num_steps) if step not in remote]
        return local + [(step, block) for step in remote for block in self.blocks]

    def _fetched(
        self, tensors: Mapping[LeafKey, Tensor]
    ) -> Iterator[tuple[int, ColumnBlock, list[Tensor]]]:
        """Each visit with its source rows; those of the next visit are under way meanwhile."""
        whole = [tensors[leaf.key] for leaf in self.sources]
        visits = self._visits()
        pending: Pending | None = None
        try:
            for number, (step, block) in enumerate(visits):
                rows = whole if pending is None else pending.wait()
                pending = None
                if whole and number + 1 < len(visits):
                    next_step, next_block = visits[number + 1]
                    parts = [next_block.of(t) for t in whole]
                    pending = start_fetch(self.halo.plan, next_step, parts)
                yield step, block, rows
                del rows  # before the next ones are waited for
        finally:
            # After an error in the middle: no message of this pass may meet those of a later one.
            if pending is not None:
                with contextlib.suppress(RankError):
                    pending.wait()

    def _values(
        self,
        reduction: Reduction,
        shard: Shard,
        rows: Sequence[Tensor],
        tensors: Mapping[LeafKey, Tensor],
    ) -> dict[LeafKey, Tensor]:
        """What one shard sees of each leaf of a reduction."""
        values = dict(zip((leaf.key for leaf in self.sources), rows, strict=True))
        for leaf in reduction.leaves():
            if leaf.target == "e":
                values[leaf.key] = shard.edge_rows(tensors[leaf.key])
            elif leaf.target != "u":
                values[leaf.key] = tensors[leaf.key]
        return values

    def backward(
        self, grads: Sequence[Tensor], inputs: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of ``inputs`` (leaves, then parameters), computed shard by shard."""
        count = len(self.leaves)
        tensors = {leaf.key: t.detach() for leaf, t in zip(self.leaves, inputs, strict=False)}
        wanted = [leaf for leaf, need in zip(self.leaves, needed, strict=False) if need]
        sums = GradientSums(self.halo, wanted, tensors)
        parameters = [p for p, need in zip(inputs[count:], needed[count:], strict=True) if need]
        parameter_grads = [torch.zeros_like(p) for p in parameters]
        grouped = _split(list(grads), self._output_counts)
        for step, block, rows in self._sources_again(tensors):
            shard_grads: dict[LeafKey, Tensor | None] = {leaf.key: None for leaf in wanted}
            with self._as_in_forward(step):
                for (etype, reduction), outer in zip(self.reductions, grouped, strict=True):
                    shard = self.halo.shards(etype)[step]
                    values = self._values(reduction, shard, rows, tensors)
                    part = [block.of(grad) for grad in outer]
                    found = _shard_backward(
                        reduction, Evaluation(shard, values), part, wanted, parameters
                    )
                    sums.add(shard, found, shard_grads)
                    for total, grad in zip(parameter_grads, found.parameters, strict=True):
                        if grad is not None:
                            total += grad
            sums.send_home(step, shard_grads, block)
            del rows, values, found, shard_grads
        sums.finish()
        found_grads = iter([*(sums.result(leaf) for leaf in wanted), *parameter_grads])
        return [next(found_grads) if need else None for need in needed]

    def remember_outputs(self, counts: Sequence[int]) -> None:
        self._output_counts = list(counts)

    def _sources_again(
        self, tensors: Mapping[LeafKey, Tensor]
    ) -> Iterator[tuple[int, ColumnBlock, list[Tensor]]]:
        """Source rows of each visit: kept, fetched again, or stand-ins where no value is read."""
        if any(r.needs_sources for _, r in self.reductions) and not self.keep_rows:
            yield from self._fetched(tensors)
            return
        for step, block in self._visits():
            if step == 0 or not self.sources:
                yield step, block, [tensors[leaf.key] for leaf in self.sources]
            elif (step, block) in self._kept:
                yield step, block, self._kept[step, block]
            else:
                num_rows = self.halo.num_rows(step)
                empty = [block.of(tensors[leaf.key][:0]) for leaf in self.sources]
                zeros = [t.new_zeros(()).expand(num_rows, *t.shape[1:]) for t in empty]
                yield step, block, zeros

    def _as_in_forward(self, step: int) -> AbstractContextManager[Any]:
        random = self._random[step] if self._random else None
        return Replay(random, self._autocast, self.device)


def _shard_backward(
    reduction: Reduction,
    evaluation: Evaluation,
    grads: Sequence[Tensor],
    wanted: Sequence[Leaf],
    parameters: Sequence[Tensor],
) -> ShardGradients:
    """Gradients of one reduction on one shard, with respect to what that shard saw."""
    own = {leaf.key for leaf in reduction.leaves()}
    mine = [leaf for leaf in wanted if leaf.key in own]
    grads = reduction.shard_gradients(evaluation, grads)
    if not reduction.needs_sources:
        direct: dict[LeafKey, Tensor | None] = {
            leaf.key: reduction.source_gradient(evaluation, grads) for leaf in mine
        }
        return ShardGradients(direct, [None] * len(parameters))
    values = dict(evaluation.values)
    for leaf in mine:
        values[leaf.key] = values[leaf.key].detach().requires_grad_()
    with torch.enable_grad():
        outputs = reduction.partial(Evaluation(evaluation.shard, values))
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    targets = [*(values[leaf.key] for leaf in mine), *parameters]
    if not pairs or not targets:
        return ShardGradients({}, [None] * len(parameters))
    found_grads = torch.autograd.grad(
        [o for o, _ in pairs], targets, [g.to(o.dtype) for o, g in pairs], allow_unused=True
    )
    by_leaf: dict[LeafKey, Tensor | None] = {
        leaf.key: g for leaf, g in zip(mine, found_grads, strict=False)
    }
    return ShardGradients(by_leaf, list(found_grads[len(mine) :]))


class _Rematerialize(torch.autograd.Function):
    """Ties the outputs of a pass, already computed, to the tensors they were computed from."""

    @staticmethod
    def forward(
        ctx: Any,
        walk: ShardPass,
        outputs: list[tuple[Tensor, ...]],
        num_parameters: int,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.walk = walk
        walk.remember_outputs([len(group) for group in outputs])
        ctx.save_for_backward(*inputs)
        return tuple(t for group in outputs for t in group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.walk.backward(grads, ctx.saved_tensors, ctx.needs_input_grad[3:])
        return (None, None, None, *found)


def _distinct(leaves: Sequence[Leaf]) -> list[Leaf]:
    found: dict[LeafKey, Leaf] = {}
    for leaf in leaves:
        found.setdefault(leaf.key, leaf)
    return list(found.values())


def _unique(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _split(items: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    groups, start = [], 0
    for size in sizes:
        groups.append(items[start : start + size])
        start += size
    return groups
