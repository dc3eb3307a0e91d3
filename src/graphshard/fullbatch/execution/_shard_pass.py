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

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ..lazy import Leaf, LeafKey, ShardEvaluation
from ..reductions import ColumnCut, Reduction, is_graph_kept
from ..topology import WHOLE, ColumnBlock, Shard, column_blocks
from ._gradients import GradientSums, ShardGradients
from ._prefetch import Arrival, Arrivals, SourceRows
from ._random_state import RandomState, Replay, autocast_state
from ._transports import RowTransport

Again = Callable[[Mapping[LeafKey, Tensor]], Sequence[Tensor]]
"""From the tensors of a pass to its results, and then to those of its remote rows that anybody may
use, by autograd alone."""


class ShardPass:
    """One walk over the shards of a halo, for one or more relations that share it.

    Args:
        transport: The source rows, and how they come; every relation's sources are among them.
        reductions: What to compute for which relation, in an order equal on all ranks.
        keep_rows: Keep what was fetched for the backward, instead of fetching it again.
        prefetch: Shards that are under way while another is computed.
        device: Where rows are computed.
        known: Remote rows of the only remote shard that are here already, by source leaf.
        again: For gradients of gradients, which a pass cannot take; None refuses them. With it
            the remote rows that need a gradient are results, too: see `take_remote`.

    """

    def __init__(
        self,
        transport: RowTransport,
        reductions: Sequence[tuple[CanonicalEType, Reduction]],
        keep_rows: bool,
        prefetch: int,
        device: torch.device,
        known: Mapping[LeafKey, Tensor] | None = None,
        again: Again | None = None,
    ) -> None:
        self.transport = transport
        self.reductions = list(reductions)
        self.keep_rows = keep_rows
        self.prefetch = prefetch
        self.device = device
        self.again = again
        self._remote: SourceRows = {}
        self.unread: set[int] = set()  # leaves whose values the backward does not read
        self.leaves = _distinct([leaf for _, r in reductions for leaf in r.leaves()])
        self.sources = [leaf for leaf in self.leaves if leaf.target == "u"]
        self.blocks, self._axes = [WHOLE], dict[LeafKey, int | None]()
        for _, reduction in self.reductions:
            reduction.num_shards = transport.num_steps
            # With the whole halo at once a row is added to once: there is nothing to keep wide.
            reduction.widens = transport.by_columns
        if self.sources and transport.num_steps > 1 and transport.by_columns:
            self._cut_into_blocks()
        self._known = dict(known or {})
        self._kept: dict[tuple[int, ColumnBlock], SourceRows] = {}
        self._random: list[RandomState] = []
        self._grouped: list[Sequence[Tensor]] = []
        self._outer_grads: list[Tensor | None] = []
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
        self.blocks = column_blocks(self.transport.halo.longest_message, sources, most)
        self._axes = agreed

    def run(self) -> list[tuple[Tensor, ...]]:
        """Outputs of each reduction, differentiable in every leaf and discovered parameter."""
        outputs = self._forward()
        parameters = _unique([p for _, r in self.reductions for p in r.parameters()])
        inputs = [*(leaf.tensor for leaf in self.leaves), *parameters]
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
            return outputs
        keys = [leaf.key for leaf in self.sources if leaf.tensor.requires_grad]
        self._outer = [key for key in keys if key in self._remote]
        # Other objects than those that the backward keeps, which would hold on to its node.
        groups = [*outputs, tuple(self._remote[key].detach() for key in self._outer)]
        self._output_counts = [len(group) for group in groups]
        self._release()
        function = _Rematerialize if self.again is None else _Overlapped
        flat = function.apply(self, [t for group in groups for t in group], *inputs)
        *results, remote = [tuple(part) for part in _split(list(flat), self._output_counts)]
        self._remote |= zip(self._outer, remote, strict=True)
        for (_, reduction), result in zip(self.reductions, results, strict=True):
            reduction.tie(result)
        return results

    def take_remote(self) -> SourceRows:
        """What came of each source leaf in `run`, for others to use; once, and with ``again``."""
        found, self._remote = self._remote, {}
        return found

    def _forward(self) -> list[tuple[Tensor, ...]]:
        is_random = any(r.is_random for _, r in self.reductions)
        keep_rows = self.keep_rows and self._needs_sources and torch.is_grad_enabled()
        needs_grad = self._sources_need_grad()
        with torch.no_grad():
            tensors = {leaf.key: leaf.tensor.detach() for leaf in self.leaves}
            with closing(self._fetched(tensors, needs_grad)) as visits:
                for step, block, rows in visits:
                    if keep_rows and step:
                        self._kept[step, block] = rows
                    if self.again is not None and step:
                        self._remote = dict(rows)
                    if is_random:
                        self._random.append(RandomState.capture(self.device))
                    for etype, reduction in self.reductions:
                        shard = self.transport.shards(etype)[step]
                        reduction.merge(self._evaluation(reduction, shard, block, rows, tensors))
                    del rows
            return [reduction.finish() for _, reduction in self.reductions]

    def _release(self) -> None:
        """Keep no values for the backward that it will not read, and none besides autograd."""
        if not self._needs_sources:
            self.unread = {i for i, leaf in enumerate(self.leaves) if leaf.target == "u"}
            self._known = {}
        self.leaves = [leaf.released() for leaf in self.leaves]
        self.sources = [leaf for leaf in self.leaves if leaf.target == "u"]
        for _, reduction in self.reductions:
            reduction.release()

    def _sources_need_grad(self) -> list[bool]:
        is_on = torch.is_grad_enabled()
        return [is_on and leaf.tensor.requires_grad for leaf in self.sources]

    def _visits(self) -> list[tuple[int, ColumnBlock]]:
        """What the walk goes through: the own shard, then the others, block by block."""
        remote = range(1, self.transport.num_steps) if self.sources else ()
        steps = range(self.transport.num_steps)
        local = [(step, WHOLE) for step in steps if step not in remote]
        return local + [(step, block) for step in remote for block in self.blocks]

    def _fetched(
        self, tensors: Mapping[LeafKey, Tensor], needs_grad: Sequence[bool]
    ) -> Generator[Arrival, None, None]:
        """Each visit with its source rows; those of the next visits are under way meanwhile."""
        whole = {leaf.key: tensors[leaf.key] for leaf in self.sources}
        gradients = dict(zip(whole, needs_grad, strict=True))
        arrivals = Arrivals(self.transport, whole, self._axes, gradients, self._known)
        return arrivals.walk(self._visits(), self.prefetch)

    def _evaluation(
        self,
        reduction: Reduction,
        shard: Shard,
        block: ColumnBlock,
        rows: SourceRows,
        tensors: Mapping[LeafKey, Tensor],
    ) -> ShardEvaluation:
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
        return ShardEvaluation(shard, values, block)

    def begin_backward(self, grads: Sequence[Tensor | None]) -> None:
        """Take in the gradients of the outputs; what only they need is let go after it.

        Before the inputs are asked for, which may have to be computed again.
        """
        *given, self._outer_grads = _split(list(grads), self._output_counts)
        pairs = zip(self.reductions, given, strict=True)
        self._grouped = [reduction.begin_backward(group) for (_, reduction), group in pairs]

    def backward(self, inputs: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of ``inputs`` (leaves, then parameters), computed shard by shard."""
        count = len(self.leaves)
        tensors = {leaf.key: t.detach() for leaf, t in zip(self.leaves, inputs, strict=False)}
        wanted = [leaf for leaf, need in zip(self.leaves, needed, strict=False) if need]
        sums = GradientSums(
            self.transport, wanted, tensors, self._axes, self.prefetch, self.transport.by_columns
        )
        parameters = [p for p, need in zip(inputs[count:], needed[count:], strict=True) if need]
        parameter_grads = [torch.zeros_like(p) for p in parameters]
        grouped, self._grouped = self._grouped, []
        outer_grads, self._outer_grads = self._outer_grads, []
        try:
            with closing(self._sources_again(tensors)) as visits:
                for step, block, rows in visits:
                    with self._as_in_forward(step):
                        for (etype, reduction), outer in zip(self.reductions, grouped, strict=True):
                            shard = self.transport.shards(etype)[step]
                            evaluation = self._evaluation(reduction, shard, block, rows, tensors)
                            found = _shard_backward(
                                reduction, evaluation, outer, wanted, parameters
                            )
                            del evaluation
                            sums.add(shard, found, block)
                            _add_up(parameter_grads, found.parameters)
                            del found
                    del rows
                    if step:
                        self._add_outer_gradients(sums, outer_grads)
                    sums.send_home(step, block)
            sums.finish()
        except BaseException:
            sums.abandon()
            raise
        found_grads = iter([*(sums.result(leaf) for leaf in wanted), *parameter_grads])
        return [next(found_grads) if need else None for need in needed]

    def _add_outer_gradients(self, sums: GradientSums, grads: Sequence[Tensor | None]) -> None:
        """Gradients of remote rows that somebody else has used as well."""
        wanted = {leaf.key for leaf in sums.sources}
        for key, grad in zip(self._outer, grads, strict=True):
            if grad is not None and key in wanted:
                sums.add_to_rows(key, grad)

    def _sources_again(self, tensors: Mapping[LeafKey, Tensor]) -> Generator[Arrival, None, None]:
        """Source rows of each visit: kept, fetched again, or stand-ins where no value is read."""
        if self._needs_sources and not self.keep_rows:
            yield from self._fetched(tensors, [False] * len(self.sources))
            return
        visits = self._visits()
        if len(visits) == 2 and self.sources:
            visits.reverse()  # gradients of remote rows travel while those of own rows are found
        for step, block in visits:
            if step == 0 or not self.sources:
                yield step, block, {leaf.key: tensors[leaf.key] for leaf in self.sources}
            elif (step, block) in self._kept:
                yield step, block, self._kept[step, block]
            else:
                stand_ins = {leaf.key: self._stand_in(leaf, step, block) for leaf in self.sources}
                yield step, block, stand_ins

    def _stand_in(self, leaf: Leaf, step: int, block: ColumnBlock) -> Tensor:
        empty = block.of(leaf.tensor.detach()[:0], self._axes.get(leaf.key))
        return empty.new_zeros(()).expand(self.transport.num_rows(step), *empty.shape[1:])

    def _as_in_forward(self, step: int) -> AbstractContextManager[Any]:
        random = self._random[step] if self._random else None
        return Replay(random, self._autocast, self.device)

    def differentiated(
        self, grads: Sequence[Tensor | None], inputs: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """`backward`, differentiable itself: everything is computed again, by autograd."""
        assert self.again is not None
        # Views: a tensor may be read at two ends of an edge, and has a gradient at each.
        places = [
            t.view_as(t) if t.requires_grad or not need else t.detach().requires_grad_()
            for t, need in zip(inputs, needed, strict=True)
        ]
        with self._as_in_forward(0):
            by_key = {leaf.key: t for leaf, t in zip(self.leaves, places, strict=True)}
            outputs = self.again(by_key)
        pairs = [
            (out, grad)
            for out, grad in zip(outputs, grads, strict=False)
            if grad is not None and out.requires_grad
        ]
        targets = [t for t, need in zip(places, needed, strict=True) if need]
        outs, cotangents = zip(*pairs, strict=True)
        found = iter(
            torch.autograd.grad(outs, targets, cotangents, create_graph=True, allow_unused=True)
        )
        return [next(found) if need else None for need in needed]

    def restored(self, saved: Sequence[Tensor | None]) -> list[Tensor]:
        """Inputs, with stand-ins for those whose values were let go."""
        count = len(self.leaves)
        stand_ins = [*(leaf.tensor for leaf in self.leaves), *saved[count:]]
        pairs = zip(saved, stand_ins, strict=True)
        return [other if t is None else t for t, other in pairs]  # type: ignore[misc]


def _shard_backward(
    reduction: Reduction,
    evaluation: ShardEvaluation,
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
        return ShardGradients(direct, [None] * len(parameters), are_new=True)
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
    return ShardGradients(by_leaf, found[len(mine) :])


class _Rematerialize(torch.autograd.Function):
    """Ties the outputs of a pass, already computed, to the tensors they were computed from."""

    @staticmethod
    def forward(
        ctx: Any, walk: ShardPass, outputs: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        return _tie(ctx, walk, outputs, inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_gradients(ctx, grads))


class _Overlapped(torch.autograd.Function):
    """The same for a pass that knows another way to its outputs, and returns remote rows, too."""

    @staticmethod
    def forward(
        ctx: Any, walk: ShardPass, outputs: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        flat = _tie(ctx, walk, outputs, inputs)
        ctx.set_materialize_grads(False)  # remote rows are hardly ever used by somebody else
        num_results = sum(walk._output_counts[:-1])
        ctx.likes = [(out.shape, out.dtype, out.device) for out in flat[:num_results]]
        return flat

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        full = list(grads)
        for place, (shape, dtype, device) in enumerate(ctx.likes):
            if full[place] is None:
                full[place] = torch.zeros(shape, dtype=dtype, device=device)
        if torch.is_grad_enabled():  # somebody will differentiate the gradient
            inputs = ctx.walk.restored(ctx.saved_tensors)
            return (None, None, *ctx.walk.differentiated(full, inputs, ctx.needs_input_grad[2:]))
        return (None, None, *_gradients(ctx, full))


def _tie(
    ctx: Any, walk: ShardPass, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    ctx.walk = walk
    ctx.save_for_backward(*(None if i in walk.unread else t for i, t in enumerate(inputs)))
    return tuple(outputs)


def _gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    walk: ShardPass | None = ctx.walk
    if walk is not None:
        walk.begin_backward(grads)
    saved = ctx.saved_tensors  # raises if an earlier backward has freed them
    assert walk is not None
    num_others = len(ctx.needs_input_grad) - len(saved)
    found = walk.backward(walk.restored(saved), ctx.needs_input_grad[num_others:])
    if not is_graph_kept():
        ctx.walk = None  # it holds the inputs, too; this node lives as long as the loss does
    return found


def _add_up(totals: Sequence[Tensor], parts: Sequence[Tensor | None]) -> None:
    for total, part in zip(totals, parts, strict=True):
        if part is not None:
            total += part


def _agreed_axes(cuts: Sequence[ColumnCut | None]) -> dict[LeafKey, int | None] | None:
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
