# SPDX-License-Identifier: Apache-2.0
"""ShardPass: sequential aggregation and rematerialization.

Source: H. Mostafa, "Sequential Aggregation and Rematerialization: Distributed Full-batch Training
of Graph Neural Networks on Large Graphs", MLSys 2022, https://arxiv.org/abs/2111.06483.

A *pass* takes the shards of one or more relations in a fixed order. Per shard it receives the
owner's rows, merges what they contribute, and frees them; the rows of the next shard are fetched
meanwhile. The backward makes the same pass: it fetches the rows again (unless the reduction is
linear in them, or they were kept), computes the shard's partial result with gradients, and sends
the gradients of the rows to their owners. One-shot aggregation is the same pass over two shards:
own rows, and all remote rows; only the transport differs.

Memory: the local rows, the result, and the rows of two shards, or a quarter of them where messages
can be cut ([Note: column blocks]). A shard has no more rows than a part, so the memory of a worker
falls as 1/P whatever the graph.
Communication: the halo once forward; backward the halo again, plus its gradients.

Left undone: the pass waits for each shard in turn even when a later one has already arrived; the
fixed order is what makes runs repeatable to the bit.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._base.typing import CanonicalEType
from ..lazy import Leaf, LeafKey, ShardEvaluation
from ..reductions import Reduction, find_chunks, is_graph_kept
from ..topology import WHOLE, ColumnBlock, Shard
from ._gradients import GradientSums, ShardGradients
from ._source_rows import RowTransport, SourceRows, Visit


class ShardPass:
    """One walk over the shards of a halo, for one or more relations that share it.

    Args:
        transport: The source rows, and how they come; every relation's sources are among them.
        reductions: What to compute for which relation, in an order equal on all ranks.
        prefetch: Shards that are fetched ahead while another is computed.
        device: Where rows are computed.
        known: Remote rows of the only remote shard that are here already, by source leaf.
    """

    def __init__(
        self,
        transport: RowTransport,
        reductions: Sequence[tuple[CanonicalEType, Reduction]],
        prefetch: int,
        device: torch.device,
        known: SourceRows | None = None,
    ) -> None:
        self.transport, self.reductions = transport, list(reductions)
        self.prefetch, self.device = prefetch, device
        self._remote: SourceRows = {}
        self.unread: set[int] = set()  # leaves whose values the backward does not read
        places: dict[LeafKey, int] = {}
        self.leaves: list[Leaf] = []
        for _, reduction in self.reductions:
            reduction.num_shards = transport.num_steps
            # With the whole halo at once a row is added to once: there is nothing to keep wide.
            reduction.widens = transport.by_columns
            for leaf in reduction.leaves():
                if places.setdefault(leaf.key, len(places)) == len(self.leaves):
                    self.leaves.append(leaf)
        self.sources = [leaf for leaf in self.leaves if leaf.target == "u"]
        self._needs_sources = any(r.needs_sources for _, r in self.reductions)
        self.blocks, self._axes = [WHOLE], dict[LeafKey, int | None]()
        if self.sources and transport.num_steps > 1 and transport.by_columns:
            self._cut_into_blocks(places)
        self._known = dict(known or {})
        self._kept: dict[tuple[int, ColumnBlock], SourceRows] = {}
        self._random: list[RandomState] = []
        self._grouped: list[Sequence[Tensor]] = []
        self._outer_grads: list[Tensor | None] = []
        kind = device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _cut_into_blocks(self, places: Mapping[LeafKey, int]) -> None:
        """Take remote shards block by block, if all reductions can and agree on how."""
        sites = tuple(reduction.site for _, reduction in self.reductions)
        order = tuple(places[leaf.key] for _, r in self.reductions for leaf in r.leaves())
        found = self.transport.chunks.get((sites, order))
        if found is None:
            reductions = [reduction for _, reduction in self.reductions]
            found = find_chunks(reductions, self.leaves, self.transport.halo.longest_message)
            if None not in sites:
                self.transport.chunks[sites, order] = found
        self.blocks, axes = found
        self._axes = dict(zip(places, axes, strict=True))

    def run(self) -> list[tuple[Tensor, ...]]:
        """Outputs of each reduction, differentiable in every leaf and discovered parameter."""
        outputs = self._forward()
        parameters = {id(p): p for _, r in self.reductions for p in r.parameters()}
        inputs = [*(leaf.tensor for leaf in self.leaves), *parameters.values()]
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
            return outputs
        keys = [leaf.key for leaf in self.sources if leaf.tensor.requires_grad]
        self._outer = [key for key in keys if key in self._remote]
        # Other objects than those that the backward keeps, which would hold on to its node.
        groups = [*outputs, tuple(self._remote[key].detach() for key in self._outer)]
        self._output_counts = [len(group) for group in groups]
        self._release()
        flat = _PassFunction.apply(self, [t for group in groups for t in group], *inputs)
        *results, remote = [tuple(part) for part in _split(list(flat), self._output_counts)]
        self._remote |= zip(self._outer, remote, strict=True)
        for (_, reduction), result in zip(self.reductions, results, strict=True):
            reduction.tie(result)
        return results

    def take_remote(self) -> SourceRows:
        """What `run` fetched of each source leaf, for others to use; once."""
        found, self._remote = self._remote, {}
        return found

    def _forward(self) -> list[tuple[Tensor, ...]]:
        is_random = any(r.is_random for _, r in self.reductions)
        records = torch.is_grad_enabled()
        keep_rows = self.transport.keeps_rows and self._needs_sources and records
        needs_grad = {leaf.key: records and leaf.tensor.requires_grad for leaf in self.sources}
        with torch.no_grad():
            tensors = {leaf.key: leaf.tensor.detach() for leaf in self.leaves}
            with closing(self._fetched(tensors, needs_grad)) as visits:
                for step, block, rows in visits:
                    if keep_rows and step:
                        self._kept[step, block] = rows
                    if self.transport.returns_rows and step:
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

    def _visits(self) -> list[Visit]:
        """What the walk goes through: the own shard, then the others, block by block."""
        remote = range(1, self.transport.num_steps) if self.sources else ()
        steps = range(self.transport.num_steps)
        local = [(step, WHOLE) for step in steps if step not in remote]
        return local + [(step, block) for step in remote for block in self.blocks]

    def _fetched(
        self, tensors: Mapping[LeafKey, Tensor], needs_grad: Mapping[LeafKey, bool]
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Each visit with its source rows."""
        whole = {leaf.key: tensors[leaf.key] for leaf in self.sources}
        return self.transport.prefetched(
            self._visits(), self.prefetch, whole, self._axes, needs_grad, self._known
        )

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

    # ------------------------------------------------------------------ backward

    def begin_backward(self, grads: Sequence[Tensor | None]) -> None:
        """Take in the gradients of the outputs; what only they need is freed after it.

        Before the inputs are asked for, which may have to be computed again.
        """
        *given, self._outer_grads = _split(list(grads), self._output_counts)
        pairs = zip(self.reductions, given, strict=True)
        self._grouped = [reduction.begin_backward(group) for (_, reduction), group in pairs]

    @property
    def lost_results(self) -> list[tuple[CanonicalEType, Reduction]]:
        """Reductions whose results must be computed again before the backward."""
        return [(etype, r) for etype, r in self.reductions if r.has_lost_result]

    def merge_again(self, inputs: Sequence[Tensor]) -> None:
        """Compute results again that the caller has changed in place; collective if rows travel.

        Every rank runs the same program, so all have lost the same results. See
        [Note: results that are changed in place] in `graphshard.ops`.
        """
        lost = self.lost_results
        tensors = {leaf.key: t.detach() for leaf, t in zip(self.leaves, inputs, strict=False)}
        with torch.no_grad(), closing(self._rows_again(tensors)) as visits:
            for step, block, rows in visits:
                with self._as_in_forward(step):
                    for etype, reduction in lost:
                        shard = self.transport.shards(etype)[step]
                        reduction.merge(self._evaluation(reduction, shard, block, rows, tensors))
                del rows
        for _, reduction in lost:
            reduction.finish()

    def _rows_again(
        self, tensors: Mapping[LeafKey, Tensor]
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Each visit with its source rows, in the order of the forward."""
        if not self.transport.keeps_rows:
            yield from self._fetched(tensors, {leaf.key: False for leaf in self.sources})
            return
        own = {leaf.key: tensors[leaf.key] for leaf in self.sources}
        for step, block in self._visits():
            yield step, block, self._kept[step, block] if step else own

    def backward(self, inputs: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of ``inputs`` (leaves, then parameters), computed shard by shard."""
        count = len(self.leaves)
        tensors = {leaf.key: t.detach() for leaf, t in zip(self.leaves, inputs, strict=False)}
        wanted = [leaf for leaf, need in zip(self.leaves, needed, strict=False) if need]
        sums = GradientSums(self.transport, wanted, tensors, self._axes, self.prefetch)
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
                            for total, part in zip(parameter_grads, found.parameters, strict=True):
                                if part is not None:
                                    total += part
                            del found
                    del rows
                    if step:  # gradients of remote rows that other calls have read as well
                        for key, grad in zip(self._outer, outer_grads, strict=True):
                            sums.add_to_rows(key, grad)
                    sums.send(step, block)
            sums.finish()
        except BaseException:
            sums.abandon()
            raise
        found_grads = iter([*(sums.result(leaf) for leaf in wanted), *parameter_grads])
        return [next(found_grads) if need else None for need in needed]

    def _sources_again(
        self, tensors: Mapping[LeafKey, Tensor]
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Source rows of each visit: kept, fetched again, or empty where no value is read."""
        if self._needs_sources and not self.transport.keeps_rows:
            yield from self._fetched(tensors, {leaf.key: False for leaf in self.sources})
            return
        visits = self._visits()
        if self.transport.returns_rows and self.sources:
            # Gradients of remote rows travel while those of own rows are found. One remote rank at
            # a time they come last: the memory of a message is not held beside that of own rows.
            visits.reverse()
        for step, block in visits:
            if step == 0 or not self.sources:
                yield step, block, {leaf.key: tensors[leaf.key] for leaf in self.sources}
            elif (step, block) in self._kept:
                yield step, block, self._kept[step, block]
            else:
                yield (
                    step,
                    block,
                    {leaf.key: self._empty(leaf, step, block) for leaf in self.sources},
                )

    def _empty(self, leaf: Leaf, step: int, block: ColumnBlock) -> Tensor:
        """Rows without values: their shape alone is read."""
        like = block.of(leaf.tensor.detach()[:0], self._axes.get(leaf.key))
        return like.new_zeros(()).expand(self.transport.num_rows(step), *like.shape[1:])

    def _as_in_forward(self, step: int) -> AbstractContextManager[Any]:
        random = self._random[step] if self._random else None
        return _replayed(random, self._autocast, self.device)

    def differentiated(
        self, grads: Sequence[Tensor | None], inputs: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """`backward`, differentiable itself: everything is computed again, by autograd.

        All in-edges are one shard, whose sources are own and remote rows.
        """
        # Views: a tensor may be read at two ends of an edge, and has a gradient at each.
        places = [
            t.view_as(t) if t.requires_grad or not need else t.detach().requires_grad_()
            for t, need in zip(inputs, needed, strict=True)
        ]
        halo = self.transport.halo
        with self._as_in_forward(0):
            values = {leaf.key: t for leaf, t in zip(self.leaves, places, strict=True)}
            own = {leaf.key: values[leaf.key] for leaf in self.sources}
            remote = dict(zip(own, self.transport.fetch(list(own.values())), strict=True))
            values |= {key: torch.cat([own[key], rows]) for key, rows in remote.items()}
            outputs: list[Tensor] = []
            for etype, reduction in self.reductions:
                shard = Shard(0, halo.adjacency(etype), None)
                outputs += reduction.recompute(ShardEvaluation(shard, values))
            outputs += [remote[key] for key in self._outer]
        pairs = [
            (out, grad)
            for out, grad in zip(outputs, grads, strict=True)
            if grad is not None and out.requires_grad
        ]
        targets = [t for t, need in zip(places, needed, strict=True) if need]
        outs, cotangents = zip(*pairs, strict=True)
        found = iter(
            torch.autograd.grad(outs, targets, cotangents, create_graph=True, allow_unused=True)
        )
        return [next(found) if need else None for need in needed]

    def restored(self, saved: Sequence[Tensor | None]) -> list[Tensor]:
        """Inputs; those whose values were freed without values."""
        count = len(self.leaves)
        empty = [*(leaf.tensor for leaf in self.leaves), *saved[count:]]
        pairs = zip(saved, empty, strict=True)
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


class _PassFunction(torch.autograd.Function):
    """Ties the outputs of a pass, already computed, to the tensors they were computed from."""

    @staticmethod
    def forward(
        ctx: Any, walk: ShardPass, outputs: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.walk = walk
        ctx.save_for_backward(*(None if i in walk.unread else t for i, t in enumerate(inputs)))
        ctx.set_materialize_grads(False)  # remote rows are hardly ever read by other calls
        num_results = sum(walk._output_counts[:-1])
        ctx.likes = [(out.shape, out.dtype, out.device) for out in outputs[:num_results]]
        return tuple(out.detach() for out in outputs)  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        full = list(grads)
        for place, (shape, dtype, device) in enumerate(ctx.likes):
            if full[place] is None:
                full[place] = torch.zeros(shape, dtype=dtype, device=device)
        walk: ShardPass | None = ctx.walk
        if torch.is_grad_enabled() and walk is not None and walk.transport.returns_rows:
            inputs = walk.restored(ctx.saved_tensors)
            return (None, None, *walk.differentiated(full, inputs, ctx.needs_input_grad[2:]))
        found: tuple[Tensor | None, ...] = _gradients(ctx, *full)
        return found


@once_differentiable
def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    walk: ShardPass | None = ctx.walk
    saved = None
    if walk is not None:
        if walk.lost_results:
            saved = ctx.saved_tensors
            walk.merge_again(walk.restored(saved))
        walk.begin_backward(grads)
    # What raises if an earlier backward has freed them.
    saved = ctx.saved_tensors if saved is None else saved
    assert walk is not None
    found = walk.backward(walk.restored(saved), ctx.needs_input_grad[2:])
    if not is_graph_kept():
        ctx.walk = None  # it holds the inputs, too; this node lives as long as the loss does
    return None, None, *found


@dataclass
class RandomState:
    """The generators' states at one point, to compute a shard again with the same draws."""

    cpu: Tensor
    device: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        on_gpu = device.type == "cuda"
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@contextmanager
def _replayed(
    random: RandomState | None, autocast: tuple[bool, torch.dtype], device: torch.device
) -> Iterator[None]:
    """Random state and autocast as they were in the forward; both put back on the way out.

    Args:
        random: The generators' states then; None where nothing was drawn.
        autocast: Whether it was enabled, and its dtype.
        device: Where it is computed.
    """
    outside = None if random is None else RandomState.capture(device)
    enabled, dtype = autocast
    try:
        if random is not None:
            random.restore(device)
        with torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
            yield
    finally:
        if outside is not None:
            outside.restore(device)


def _split(items: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    groups, start = [], 0
    for size in sizes:
        groups.append(items[start : start + size])
        start += size
    return groups
