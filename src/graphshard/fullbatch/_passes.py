# SPDX-License-Identifier: Apache-2.0
"""Sequential aggregation and rematerialization.

Source: H. Mostafa, "Sequential Aggregation and Rematerialization: Distributed Full-batch Training
of Graph Neural Networks on Large Graphs", MLSys 2022, https://arxiv.org/abs/2111.06483.

A *pass* takes the shards of one or more relations in a fixed order. Per shard it receives the
owner's rows, merges what they contribute, and frees them; the rows of the next shard are already
under way. The backward makes the same pass: it receives the rows again (unless the reduction is
linear in them, or they were kept), computes the shard's partial result with gradients, and sends
the gradients of the rows home.

Memory: the local rows, the result, and the rows of two shards, or a quarter of them where messages
can be cut ([Note: column blocks]). A shard has no more rows than a part, so the memory of a worker
falls as 1/P whatever the graph.
Communication: the halo once forward; backward the halo again, plus its gradients.

Left undone: the pass waits for each shard in turn even when a later one has already arrived; the
fixed order is what makes runs repeatable to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._typing import CanonicalEType
from ..comm import Pending, start_fetch
from ..errors import RankError
from ._columns import WHOLE, ColumnBlock, column_blocks
from ._cuts import Cut
from ._expressions import Evaluation, Leaf, LeafKey
from ._gradients import GradientSums, ShardGradients
from ._reductions import Reduction
from ._replay import RandomState, Replay, autocast_state
from ._topology import Halo, Shard

SourceRows: TypeAlias = dict[LeafKey, Tensor]
"""What a visit has of each source leaf."""


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
        self.blocks, self._axes = [WHOLE], dict[LeafKey, int | None]()
        if self.sources and halo.num_steps > 1:
            self._cut_into_blocks()
        self._kept: dict[tuple[int, ColumnBlock], SourceRows] = {}
        self._random: list[RandomState] = []
        self._autocast = autocast_state(device)

    @property
    def _needs_sources(self) -> bool:
        return any(reduction.needs_sources for _, reduction in self.reductions)

    def _cut_into_blocks(self) -> None:
        """Take remote shards block by block, if all reductions can and agree on how."""
        cuts = [reduction.cut for _, reduction in self.reductions]
        agreed = _agreed_axes(cuts)
        if agreed is None:
            return
        most = min(cut.most for cut in cuts if cut is not None)
        sources = [leaf.tensor for leaf in self.sources]
        self.blocks = column_blocks(self.halo.longest_message, sources, most)
        self._axes = agreed

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
        keep_rows = self.keep_rows and self._needs_sources and torch.is_grad_enabled()
        with torch.no_grad():
            tensors = {leaf.key: leaf.tensor.detach() for leaf in self.leaves}
            for step, block, rows in self._fetched(tensors):
                if keep_rows and step:
                    self._kept[step, block] = rows
                if is_random:
                    self._random.append(RandomState.capture(self.device))
                for etype, reduction in self.reductions:
                    shard = self.halo.shards(etype)[step]
                    reduction.merge(self._evaluation(reduction, shard, block, rows, tensors))
                del rows
            return [reduction.finish() for _, reduction in self.reductions]

    def _visits(self) -> list[tuple[int, ColumnBlock]]:
        """What the walk goes through: the own shard, then the others, block by block."""
        remote = range(1, self.halo.num_steps) if self.sources else ()
        local = [(step, WHOLE) for step in range(self.halo.num_steps) if step not in remote]
        return local + [(step, block) for step in remote for block in self.blocks]

    def _fetched(
        self, tensors: Mapping[LeafKey, Tensor]
    ) -> Iterator[tuple[int, ColumnBlock, SourceRows]]:
        """Each visit with its source rows; those of the next visit are under way meanwhile."""
        whole = {leaf.key: tensors[leaf.key] for leaf in self.sources}
        rows, arriving = dict(whole), list[LeafKey]()
        visits = self._visits()
        pending: Pending | None = None
        try:
            for number, (step, block) in enumerate(visits):
                if pending is not None:
                    rows |= zip(arriving, pending.wait(), strict=True)
                pending, arriving = None, []
                if whole and number + 1 < len(visits):
                    next_step, next_block = visits[number + 1]
                    arriving = self._fetched_with(next_block)
                    parts = [next_block.of(whole[key], self._axes.get(key)) for key in arriving]
                    pending = start_fetch(self.halo.plan, next_step, parts)
                yield step, block, rows
                # Before the next ones are waited for. What is not cut came with the first block
                # of its shard, and stays for the others.
                rows = {key: t for key, t in rows.items() if key not in arriving}
        finally:
            # After an error in the middle: no message of this pass may meet those of a later one.
            if pending is not None:
                with contextlib.suppress(RankError):
                    pending.wait()

    def _fetched_with(self, block: ColumnBlock) -> list[LeafKey]:
        """Source leaves that travel with a block: all with the first one, then those cut."""
        keys = [leaf.key for leaf in self.sources]
        return [key for key in keys if block.is_first or self._axes.get(key) is not None]

    def _evaluation(
        self,
        reduction: Reduction,
        shard: Shard,
        block: ColumnBlock,
        rows: SourceRows,
        tensors: Mapping[LeafKey, Tensor],
    ) -> Evaluation:
        """What one shard sees of each leaf of a reduction."""
        values = {}
        for leaf in reduction.leaves():
            key = leaf.key
            if leaf.target == "u":
                values[key] = rows[key]
                continue
            values[key] = block.of(tensors[key], self._axes.get(key))
            if leaf.target == "e":
                values[key] = shard.edge_rows(values[key])
        cut = reduction.cut if block.count > 1 else None
        return Evaluation(shard, values, block, {} if cut is None else cut.nodes)

    def backward(
        self, grads: Sequence[Tensor], inputs: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of ``inputs`` (leaves, then parameters), computed shard by shard."""
        count = len(self.leaves)
        tensors = {leaf.key: t.detach() for leaf, t in zip(self.leaves, inputs, strict=False)}
        wanted = [leaf for leaf, need in zip(self.leaves, needed, strict=False) if need]
        sums = GradientSums(self.halo, wanted, tensors, self._axes)
        parameters = [p for p, need in zip(inputs[count:], needed[count:], strict=True) if need]
        parameter_grads = [torch.zeros_like(p) for p in parameters]
        grouped = _split(list(grads), self._output_counts)
        pairs = zip(self.reductions, grouped, strict=True)
        grouped = [reduction.begin_backward(outer) for (_, reduction), outer in pairs]
        for step, block, rows in self._sources_again(tensors):
            with self._as_in_forward(step):
                for (etype, reduction), outer in zip(self.reductions, grouped, strict=True):
                    shard = self.halo.shards(etype)[step]
                    evaluation = self._evaluation(reduction, shard, block, rows, tensors)
                    found = _shard_backward(reduction, evaluation, outer, wanted, parameters)
                    del evaluation
                    sums.add(shard, found, block)
                    for total, grad in zip(parameter_grads, found.parameters, strict=True):
                        if grad is not None:
                            total += grad
                    del found
            del rows
            sums.send_home(step, block)
        sums.finish()
        found_grads = iter([*(sums.result(leaf) for leaf in wanted), *parameter_grads])
        return [next(found_grads) if need else None for need in needed]

    def remember_outputs(self, counts: Sequence[int]) -> None:
        self._output_counts = list(counts)

    def _sources_again(
        self, tensors: Mapping[LeafKey, Tensor]
    ) -> Iterator[tuple[int, ColumnBlock, SourceRows]]:
        """Source rows of each visit: kept, fetched again, or stand-ins where no value is read."""
        if self._needs_sources and not self.keep_rows:
            yield from self._fetched(tensors)
            return
        for step, block in self._visits():
            if step == 0 or not self.sources:
                yield step, block, {leaf.key: tensors[leaf.key] for leaf in self.sources}
            elif (step, block) in self._kept:
                yield step, block, self._kept[step, block]
            else:
                stand_ins = {leaf.key: self._stand_in(leaf, step, block) for leaf in self.sources}
                yield step, block, stand_ins

    def _stand_in(self, leaf: Leaf, step: int, block: ColumnBlock) -> Tensor:
        empty = block.of(leaf.tensor.detach()[:0], self._axes.get(leaf.key))
        return empty.new_zeros(()).expand(self.halo.num_rows(step), *empty.shape[1:])

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
    direct = reduction.direct_gradients(evaluation, grads, mine)
    if direct is not None:
        return ShardGradients(direct, [None] * len(parameters), is_fresh=True)
    values = dict(evaluation.values)
    for leaf in mine:
        values[leaf.key] = values[leaf.key].detach().requires_grad_()
    with torch.enable_grad():
        adjoints = reduction.adjoints(replace(evaluation, values=values, memo={}), grads)
    targets = [*(values[leaf.key] for leaf in mine), *parameters]
    found: list[Tensor | None] = [None] * len(targets)
    pairs = [(a.output, a.cotangent.to(a.output.dtype)) for a in adjoints if a.output.requires_grad]
    if pairs and targets:
        outputs, cotangents = zip(*pairs, strict=True)
        found = list(torch.autograd.grad(outputs, targets, cotangents, allow_unused=True))
    by_leaf = {leaf.key: grad for leaf, grad in zip(mine, found, strict=False)}
    for adjoint in adjoints:
        for key in by_leaf.keys() & adjoint.known.keys():
            before, known = by_leaf[key], adjoint.known[key]
            by_leaf[key] = known if before is None else before + known
    return ShardGradients(by_leaf, found[len(mine) :], is_fresh=False)


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
        inputs = ctx.saved_tensors  # raises if an earlier backward has freed them
        found = ctx.walk.backward(grads, inputs, ctx.needs_input_grad[3:])
        if not _is_graph_kept():
            ctx.walk = None  # it holds the inputs, too; this node lives as long as the loss does
        return (None, None, None, *found)


def _is_graph_kept() -> bool:
    """Whether the backward that is running was called with ``retain_graph``."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def _agreed_axes(cuts: Sequence[Cut | None]) -> dict[LeafKey, int | None] | None:
    """How all cuts take each leaf; None if one is missing or two take a leaf differently."""
    agreed: dict[LeafKey, int | None] = {}
    for cut in cuts:
        if cut is None or any(agreed.setdefault(k, a) != a for k, a in cut.leaves.items()):
            return None
    return agreed


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
