# SPDX-License-Identifier: Apache-2.0
"""A pass over shards: sequential aggregation and rematerialization.

Source: H. Mostafa, "Sequential Aggregation and Rematerialization: Distributed Full-batch Training
of Graph Neural Networks on Large Graphs", MLSys 2022, https://arxiv.org/abs/2111.06483.

A *pass* takes the shards of one or more relations in a fixed order. Per shard it receives the
owner's rows, merges what they contribute, and frees them; the rows of the next shard are fetched
meanwhile. The backward makes the same pass: it fetches the rows again (unless the reduction is
linear in them, or they were kept), computes the shard's partial result with gradients, and sends
the gradients of the rows to their owners. One-shot aggregation is the same pass over two shards:
own rows, and all remote rows; only the transport differs, see `row_transport`.

Memory: the local rows, the result, and the rows of two shards, or a quarter of them where messages
can be cut ([Note: column blocks]). A shard has no more rows than a part, so the memory of a worker
falls as 1/P whatever the graph.
Communication: the halo once forward; backward the halo again, plus its gradients.

What several calls read is fetched once: a `HaloRowCache` keeps the rows of constant tensors, and
those of source fields in a ``local_scope``. [Note: what is kept between calls] says for how long.

Left undone: the pass waits for each shard in turn even when a later one has already arrived; the
fixed order is what makes runs repeatable to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._base.typing import CanonicalEType
from ..comm import Pending, fetch_halo
from ..errors import RankError
from ..ops import empty
from .column_blocks import WHOLE, ColumnBlock
from .reductions import (
    Leaf,
    LeafKey,
    Reduction,
    ShardEvaluation,
    accumulation_dtype,
    find_chunks,
    is_graph_kept,
)
from .row_transport import RowTransport, SourceRows, Visit
from .topology import Shard

# -- gradients of whole tensors out of those of their rows -----------------------------------------


@dataclass
class ShardGradients:
    """Gradients of one reduction with respect to what one shard saw; None where unused.

    Args:
        parameters: In the order of the pass.
        are_new: Whether the tensors are not shared, so that they may be written to.
    """

    leaves: dict[LeafKey, Tensor | None]
    parameters: list[Tensor | None]
    are_new: bool = False


class GradientSums:
    """Gradients of whole leaves, added up shard by shard; remote rows' are sent to their owners.

    Args:
        leaves: Those whose gradients are asked for.
        tensors: All leaves, whole; without values where no gradient needs them.
        axes: Dimension of each leaf that blocks are cut along; None or absent where every block
            sees the whole leaf.
        depth: Most shards whose gradients travel at once.
    """

    def __init__(
        self,
        transport: RowTransport,
        leaves: Sequence[Leaf],
        tensors: Mapping[LeafKey, Tensor],
        axes: Mapping[LeafKey, int | None],
        depth: int,
    ) -> None:
        self._transport, self._axes, self._depth = transport, axes, depth
        self.leaves: dict[LeafKey, Tensor] = {}
        self._source_keys: list[LeafKey] = []
        self._dtypes: dict[LeafKey, torch.dtype] = {}  # in which the sums are kept
        for leaf in leaves:
            dtype = tensors[leaf.key].dtype
            is_source = leaf.target == "u"
            # With the whole halo at once a source row is added to once.
            widens = transport.by_columns or not is_source
            self._dtypes[leaf.key] = accumulation_dtype(dtype) if widens else dtype
            self.leaves[leaf.key] = tensors[leaf.key]
            if is_source:
                self._source_keys.append(leaf.key)
        self._sums: dict[LeafKey, Tensor] = {}
        self._from_shard: dict[LeafKey, Tensor] = {}
        self._new_rows: set[LeafKey] = set()
        self._pending: deque[tuple[int, ColumnBlock, list[LeafKey], Pending]] = deque()

    def add(self, shard: Shard, grads: ShardGradients, block: ColumnBlock) -> None:
        """Take in the gradients of one reduction on one block of a shard."""
        for key, grad in grads.leaves.items():
            if grad is None:
                continue
            if key[0] == "u":
                self.add_to_rows(key, grad, grads.are_new)
            elif key[0] == "e" and shard.eids is not None:
                total = block.of(self._sum(key), self._axes.get(key))
                total.index_add_(0, shard.eids.to(torch.int64), grad.to(total.dtype))
            else:
                self._add_whole(key, grad, block, grads.are_new)

    def add_to_rows(self, key: LeafKey, grad: Tensor | None, is_new: bool = False) -> None:
        """Take in a gradient of the source rows of the present shard, if it is asked for."""
        if grad is None or key not in self.leaves:
            return
        before = self._from_shard.get(key)
        self._from_shard[key] = grad if before is None else before + grad
        if is_new or before is not None:
            self._new_rows.add(key)

    def send(self, step: int, block: ColumnBlock) -> None:
        """Add the own shard's source gradients, or start those of a remote shard on their way.

        Those of a leaf that is cut go block by block, the others with the last block.
        """
        if not self._source_keys:
            return
        if step == 0:
            while self._from_shard:
                key, grad = self._from_shard.popitem()
                self._add_whole(key, grad, block, key in self._new_rows)
            self._new_rows.clear()
            return
        self._new_rows.clear()
        keys, outgoing = [], []
        for key in self._source_keys:
            axis = self._axes.get(key)
            if block.count > 1 and axis is None and not block.is_last:
                continue
            rows = self._from_shard.pop(key, None)
            if rows is None:
                none = block.of(self.leaves[key][:0], axis)
                rows = none.new_zeros((self._transport.num_rows[step], *none.shape[1:]))
            keys.append(key)
            outgoing.append(rows.to(self.leaves[key].dtype))
            del rows
        while self._pending and len(self._pending) >= self._depth:
            self._receive()
        pending = self._transport.start_return(step, outgoing)
        self._pending.append((step, block, keys, pending))
        if self._depth == 0:
            pending.wait()  # and added when it would be otherwise: the same sums to the bit

    def finish(self) -> list[Tensor]:
        """Receive all gradients that other ranks computed; returns the sums, leaf by leaf."""
        while self._pending:
            self._receive()
        return self.so_far()

    def finish_sources(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Likewise of the source leaves alone, added to these gradients in place."""
        self._sums.update(zip(self._source_keys, grads, strict=True))
        while self._pending:
            self._receive()
        return grads

    def so_far(self) -> list[Tensor]:
        """The sums, leaf by leaf, without what is on its way."""
        return [self._sum(key).to(tensor.dtype) for key, tensor in self.leaves.items()]

    def abandon(self) -> None:
        """After an error: no message of this pass may meet those of a later one."""
        while self._pending:
            with suppress(RankError):
                self._pending.popleft()[-1].wait()

    def _receive(self) -> None:
        step, block, keys, pending = self._pending.popleft()
        for key, grad in zip(keys, pending.wait(), strict=True):
            total = self._sum(key)
            if block.count > 1:
                total = block.of(total, self._axes.get(key))
            self._transport.add_returned(step, total, grad)

    def _sum(self, key: LeafKey) -> Tensor:
        if key not in self._sums:
            tensor = self.leaves[key]
            self._sums[key] = empty(tensor.shape, self._dtypes[key], tensor.device).zero_()
        return self._sums[key]

    def _add_whole(self, key: LeafKey, grad: Tensor, block: ColumnBlock, is_new: bool) -> None:
        """Add to all rows of a leaf."""
        if key in self._sums or block.count > 1:
            total = block.of(self._sum(key), self._axes.get(key))
            total += grad
            return
        # A copy, unless it is new: autograd may have given the same tensor to two leaves.
        dtype = self._dtypes[key]
        if is_new and grad.dtype == dtype and grad.is_contiguous():
            self._sums[key] = grad
        else:
            self._sums[key] = empty(grad.shape, dtype, grad.device).copy_(grad)


# -- the pass --------------------------------------------------------------------------------------


class PassPart(NamedTuple):
    """One relation's reduction in a pass."""

    etype: CanonicalEType
    reduction: Reduction
    keys: list[LeafKey]  # of its leaves
    shards: Sequence[Shard]  # by step


class ShardPass:
    """One walk over the shards of a halo, for one or more relations that share it.

    Args:
        transport: The source rows, and how they come; every relation's sources are among them.
        reductions: What to compute for which relation, in an order equal on all ranks.
        prefetch: Shards that are fetched ahead while another is computed.
        fetched_before: Rows of the only remote shard that are here already, by source leaf.
    """

    def __init__(
        self,
        transport: RowTransport,
        reductions: Sequence[tuple[CanonicalEType, Reduction]],
        prefetch: int,
        device: torch.device,
        fetched_before: SourceRows | None = None,
    ) -> None:
        self.transport, self.prefetch, self.device = transport, prefetch, device
        self.unread: set[int] = set()  # leaves whose values the backward does not read
        self._needs_sources = self._is_random = self.can_lose_result = False
        self.parts: list[PassPart] = []
        self.leaves: list[Leaf] = []
        self.sources: list[Leaf] = []
        numbers: dict[LeafKey, int] = {}
        for etype, reduction in reductions:
            reduction.num_shards = transport.num_steps
            # With the whole halo at once a row is added to once: there is nothing to keep wide.
            reduction.widens = transport.by_columns
            transport.bind(reduction)
            self._needs_sources |= reduction.needs_sources
            self._is_random |= reduction.is_random
            self.can_lose_result |= reduction.can_lose_result
            keys = []
            for leaf in reduction.leaves:
                leaf.check()
                keys.append(leaf.key)
                if leaf.key not in numbers:
                    numbers[leaf.key] = len(numbers)
                    self.leaves.append(leaf)
                    if leaf.target == "u":
                        self.sources.append(leaf)
            self.parts.append(PassPart(etype, reduction, keys, transport.shards(etype)))
        blocks, self._axes = [WHOLE], dict[LeafKey, int | None]()
        if self.sources and transport.num_steps > 1 and transport.by_columns:
            blocks = self._cut_into_blocks(numbers)
        # The own shard, then the others, block by block.
        self._visits: list[Visit] = [(0, WHOLE)]
        for step in range(1, transport.num_steps):
            for block in blocks:
                self._visits.append((step, block))
        self._fetched_before = fetched_before or {}
        self._remote: SourceRows = {}  # what came last
        self._kept: dict[Visit, SourceRows] = {}
        self._random: list[RandomState] = []
        #: Where the last gradients are added; None adds them before the backward of the pass ends.
        self.returned: ReturnedGradients | None = None
        kind = device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _cut_into_blocks(self, numbers: Mapping[LeafKey, int]) -> list[ColumnBlock]:
        """Take remote shards block by block, if all reductions can and agree on how."""
        reductions = [part.reduction for part in self.parts]
        sites = tuple([reduction.site for reduction in reductions])
        order = tuple([numbers[key] for part in self.parts for key in part.keys])
        cut = self.transport.chunks.get((sites, order))
        if cut is None:
            cut = find_chunks(reductions, self.leaves, self.transport.longest_message)
            if None not in sites:
                self.transport.chunks[sites, order] = cut
        blocks, axes = cut
        self._axes = dict(zip(numbers, axes, strict=True))
        return blocks

    def run(self, meanwhile: Callable[[], None] | None = None) -> list[tuple[Tensor, ...]]:
        """Outputs of each reduction, differentiable in every leaf and discovered parameter.

        Args:
            meanwhile: Work that needs no remote rows: done once the own shard is, before the first
                rows are waited for. See [Note: gradients of a pass].
        """
        inputs = [leaf.tensor for leaf in self.leaves]
        if self.transport.by_collective and torch.is_grad_enabled():
            inputs = self._begun(inputs)
        outputs = self._forward(meanwhile)
        if self._is_random:
            parameters = {id(p): p for part in self.parts for p in part.reduction.parameters()}
            inputs += parameters.values()
        if not torch.is_grad_enabled() or True not in [t.requires_grad for t in inputs]:
            return outputs
        # Remote rows that came along are outputs, too. Other objects than those that the backward
        # keeps, which would hold on to its node.
        self._outer = [leaf.key for leaf in self.sources if leaf.tensor.requires_grad]
        self._outer = [key for key in self._outer if key in self._remote]
        flat = [output for group in outputs for output in group]
        self.num_results = len(flat)
        flat += [self._remote[key].detach() for key in self._outer]
        self._release()
        results = iter(_PassFunction.apply(self, flat, *inputs))
        outputs = [tuple(islice(results, len(group))) for group in outputs]
        self._remote |= zip(self._outer, results, strict=True)
        self._output_counts = [len(group) for group in outputs]
        for part, group in zip(self.parts, outputs, strict=True):
            part.reduction.tie(group)
        return outputs

    def _begun(self, inputs: list[Tensor]) -> list[Tensor]:
        """The inputs, sources being outputs of `_BeginPass`."""
        chosen = [
            i
            for i, leaf in enumerate(self.leaves)
            if leaf.target == "u" and leaf.tensor.requires_grad
        ]
        if not chosen or self.transport.num_steps == 1:
            return inputs
        self.returned = ReturnedGradients()
        rows = _BeginPass.apply(self.returned, *(inputs[i] for i in chosen))
        for i, part in zip(chosen, rows, strict=True):
            inputs[i] = part
        return inputs

    def take_remote(self) -> SourceRows:
        """What `run` fetched of each source leaf, for others to use; once."""
        remote, self._remote = self._remote, {}
        return remote

    def _forward(self, meanwhile: Callable[[], None] | None) -> list[tuple[Tensor, ...]]:
        records = torch.is_grad_enabled()
        keep_rows = self.transport.keeps_rows and self._needs_sources and records
        tensors: dict[LeafKey, Tensor] = {}
        needs_grad: dict[LeafKey, bool] = {}
        for leaf in self.leaves:
            tensors[leaf.key] = leaf.tensor.detach()
            needs_grad[leaf.key] = records and leaf.tensor.requires_grad
        with (
            torch.no_grad(),
            self._beginning(tensors, self.parts),
            closing(self._fetched(tensors, needs_grad)) as visits,
        ):
            for step, block, rows in visits:
                if keep_rows and step:
                    self._kept[step, block] = rows
                if self.transport.returns_rows and step:
                    self._remote = dict(rows)
                if self._is_random:
                    self._random.append(RandomState.capture(self.device))
                for part in self.parts:
                    part.reduction.merge(self._evaluation(part, step, block, rows, tensors))
                del rows
                if step == 0 and meanwhile is not None:
                    with torch.set_grad_enabled(records):
                        meanwhile()
            return [part.reduction.finish() for part in self.parts]

    @contextmanager
    def _beginning(
        self, tensors: Mapping[LeafKey, Tensor], parts: Sequence[PassPart]
    ) -> Iterator[None]:
        """Start what reductions send besides rows; after an error it is waited for."""
        try:
            for part in parts:
                part.reduction.begin(tensors)
            yield
        except BaseException:
            for part in parts:
                part.reduction.abandon()
            raise

    def _release(self) -> None:
        """Keep no values for the backward that it will not read, and none besides autograd."""
        released = {}
        for i, leaf in enumerate(self.leaves):
            if leaf.target == "u" and not self._needs_sources:
                self.unread.add(i)
            released[leaf.key] = leaf.released()
        if self.unread:
            self._fetched_before = {}
        self.leaves = list(released.values())
        self.sources = [leaf for leaf in self.leaves if leaf.target == "u"]
        for part in self.parts:
            part.reduction.release(released)

    def _fetched(
        self, tensors: Mapping[LeafKey, Tensor], needs_grad: Mapping[LeafKey, bool]
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Each visit with its source rows."""
        whole = {leaf.key: tensors[leaf.key] for leaf in self.sources}
        return self.transport.prefetched(
            self._visits, self.prefetch, whole, self._axes, needs_grad, self._fetched_before
        )

    def _evaluation(
        self,
        part: PassPart,
        step: int,
        block: ColumnBlock,
        rows: SourceRows,
        tensors: Mapping[LeafKey, Tensor],
    ) -> ShardEvaluation:
        """What one shard sees of each leaf of a reduction."""
        shard, values = part.shards[step], {}
        for key in part.keys:
            if key[0] == "u":
                values[key] = rows[key]
                continue
            values[key] = block.of(tensors[key], self._axes.get(key))
            if key[0] == "e":
                values[key] = shard.edge_rows(values[key])
        return ShardEvaluation(shard, values, block)

    # ------------------------------------------------------------------ backward

    def begin_backward(
        self, grads: Sequence[Tensor | None]
    ) -> tuple[list[Sequence[Tensor]], list[Tensor | None]]:
        """Take in the gradients of the outputs; what only they need is freed after it.

        Before the inputs are asked for, which may have to be computed again.

        Returns:
            For each reduction what its shards get; and the gradients of remote rows that other
            calls have read as well.
        """
        given, part_grads = iter(grads), []
        for part, count in zip(self.parts, self._output_counts, strict=True):
            of_part: list[Any] = list(islice(given, count))  # none is None: see `_PassFunction`
            part_grads.append(part.reduction.begin_backward(of_part))
        return part_grads, list(given)

    def merge_again(self, saved: Sequence[Tensor | None]) -> None:
        """Compute results again that the caller has changed in place; collective if rows travel.

        Every rank runs the same program, so all have lost the same results. See
        [Note: results that are changed in place] in `graphshard.ops`.
        """
        lost = [part for part in self.parts if part.reduction.has_lost_result]
        tensors = self._tensors(saved)
        with (
            torch.no_grad(),
            self._beginning(tensors, lost),
            closing(self._sources_again(tensors, self._visits)) as visits,
        ):
            for step, block, rows in visits:
                with self._as_in_forward(step):
                    for part in lost:
                        part.reduction.merge(self._evaluation(part, step, block, rows, tensors))
                del rows
            for part in lost:
                part.reduction.finish()

    def _tensors(self, saved: Sequence[Tensor | None]) -> dict[LeafKey, Tensor]:
        """Each leaf, from what was saved of the inputs; without values where they were freed."""
        tensors = {}
        for leaf, tensor in zip(self.leaves, saved, strict=False):  # parameters come last
            tensors[leaf.key] = leaf.tensor if tensor is None else tensor.detach()
        return tensors

    def backward(
        self,
        saved: Sequence[Tensor | None],
        needed: Sequence[bool],
        part_grads: Sequence[Sequence[Tensor]],
        outer_grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Gradients of the inputs (leaves, then parameters), computed shard by shard.

        Args:
            saved: The inputs; None for leaves whose values were freed.
            needed: Whether the gradient of each is asked for.
        """
        count, tensors = len(self.leaves), self._tensors(saved)
        leaves = [leaf for leaf, need in zip(self.leaves, needed, strict=False) if need]
        sums = GradientSums(self.transport, leaves, tensors, self._axes, self.prefetch)
        others = zip(saved[count:], needed[count:], strict=True)
        parameters = [p for p, need in others if need and p is not None]
        parameter_grads = [torch.zeros_like(p) for p in parameters]
        work = []
        for part, grads in zip(self.parts, part_grads, strict=True):
            work.append((part, [key for key in part.keys if key in sums.leaves], grads))
        visits = self._visits
        if self.transport.by_collective and self.sources:
            # Gradients of remote rows travel while those of own rows are found. One remote rank at
            # a time they come last: the memory of a message is not held beside that of own rows.
            visits = visits[::-1]
        try:
            with closing(self._sources_again(tensors, visits)) as visited:
                for step, block, rows in visited:
                    with self._as_in_forward(step):
                        for part, keys, grads in work:
                            evaluation = self._evaluation(part, step, block, rows, tensors)
                            shares = _shard_backward(
                                part.reduction, evaluation, grads, keys, parameters
                            )
                            del evaluation
                            sums.add(part.shards[step], shares, block)
                            for total, share in zip(
                                parameter_grads, shares.parameters, strict=True
                            ):
                                if share is not None:
                                    total += share
                            del shares
                    del rows
                    if step:
                        for key, grad in zip(self._outer, outer_grads, strict=True):
                            sums.add_to_rows(key, grad)
                    sums.send(step, block)
            totals = sums.finish() if self.returned is None else self.returned.later(sums)
            results = iter([*totals, *parameter_grads])
        except BaseException:
            sums.abandon()
            for part in self.parts:
                part.reduction.abandon()
            raise
        return [next(results) if need else None for need in needed]

    def _sources_again(
        self, tensors: Mapping[LeafKey, Tensor], visits: Sequence[Visit]
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Source rows of each visit: kept, fetched again, or empty where no value is read."""
        if self._needs_sources and not self.transport.keeps_rows:
            yield from self._fetched(tensors, {leaf.key: False for leaf in self.sources})
            return
        own = {leaf.key: tensors[leaf.key] for leaf in self.sources}
        for step, block in visits:
            if step == 0 or not self.sources:
                yield step, block, own
            elif (step, block) in self._kept:
                yield step, block, self._kept[step, block]
            else:
                yield step, block, self._rows_without_values(step, block)

    def _rows_without_values(self, step: int, block: ColumnBlock) -> SourceRows:
        """Source rows whose shape alone is read."""
        rows = {}
        for leaf in self.sources:
            like = leaf.tensor.detach()[:0]
            if block.count > 1:
                like = block.of(like, self._axes.get(leaf.key))
            num_rows = self.transport.num_rows[step]
            rows[leaf.key] = like.new_zeros(()).expand(num_rows, *like.shape[1:])
        return rows

    @contextmanager
    def _as_in_forward(self, step: int) -> Iterator[None]:
        """Random state and autocast as they were in the forward; both put back on the way out."""
        device, (enabled, dtype) = self.device, self._autocast
        outside = RandomState.capture(device) if self._random else None
        try:
            if self._random:
                self._random[step].restore(device)
            with torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
                yield
        finally:
            if outside is not None:
                outside.restore(device)

    def differentiated(
        self, grads: Sequence[Tensor | None], saved: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """`backward`, differentiable itself: everything is computed again, by autograd.

        All in-edges are one shard, whose sources are own and remote rows.
        """
        inputs = [self.leaves[i].tensor if t is None else t for i, t in enumerate(saved)]
        # Views: a tensor may be read at two ends of an edge, and has a gradient at each.
        views = [
            t.view_as(t) if t.requires_grad or not need else t.detach().requires_grad_()
            for t, need in zip(inputs, needed, strict=True)
        ]
        halo = self.transport.halo
        with self._as_in_forward(0):
            values = {leaf.key: t for leaf, t in zip(self.leaves, views, strict=True)}
            own = {leaf.key: values[leaf.key] for leaf in self.sources}
            rows = fetch_halo([(halo.plan, tensor) for tensor in own.values()], self.transport.wire)
            remote = dict(zip(own, rows, strict=True))
            values |= {key: torch.cat([own[key], part]) for key, part in remote.items()}
            outputs: list[Tensor] = []
            for part in self.parts:
                shard = Shard(0, self.transport.whole_adjacency(part.etype), None)
                outputs += part.reduction.recompute(ShardEvaluation(shard, values))
            outputs += [remote[key] for key in self._outer]
        pairs = [
            (out, grad)
            for out, grad in zip(outputs, grads, strict=True)
            if grad is not None and out.requires_grad
        ]
        targets = [t for t, need in zip(views, needed, strict=True) if need]
        outs, cotangents = zip(*pairs, strict=True)
        results = iter(
            torch.autograd.grad(outs, targets, cotangents, create_graph=True, allow_unused=True)
        )
        return [next(results) if need else None for need in needed]


def _shard_backward(
    reduction: Reduction,
    evaluation: ShardEvaluation,
    grads: Sequence[Tensor],
    keys: Sequence[LeafKey],
    parameters: Sequence[Tensor],
) -> ShardGradients:
    """Gradients of one reduction on one shard, with respect to what that shard saw of ``keys``."""
    grads = reduction.shard_gradients(evaluation, grads)
    direct = reduction.direct_gradients(evaluation, grads, keys)
    if direct is not None:
        return ShardGradients(direct, [None] * len(parameters), are_new=True)
    values = dict(evaluation.values)
    for key in keys:
        values[key] = values[key].detach().requires_grad_()
    with torch.enable_grad():
        adjoints = reduction.adjoints(replace(evaluation, values=values, memo={}), grads)
    targets = [*(values[key] for key in keys), *parameters]
    shares: list[Tensor | None] = [None] * len(targets)
    pairs = [(a.output, a.cotangent.to(a.output.dtype)) for a in adjoints if a.output.requires_grad]
    if pairs and targets:
        outputs, cotangents = zip(*pairs, strict=True)
        shares = list(torch.autograd.grad(outputs, targets, cotangents, allow_unused=True))
    by_leaf = dict(zip(keys, shares, strict=False))
    for adjoint in adjoints:
        for key in by_leaf.keys() & adjoint.leaf_grads.keys():
            before, added = by_leaf[key], adjoint.leaf_grads[key]
            by_leaf[key] = added if before is None else before + added
    return ShardGradients(by_leaf, shares[len(keys) :])


class ReturnedGradients:
    """Gradients of own rows that other ranks found, from their start to their sum.

    [Note: gradients of a pass]
        In one-shot mode a pass is two nodes of the autograd graph: `_BeginPass` takes own rows and
        gives them on, `_PassFunction` makes the results. Autograd runs the newest node that is
        ready. So in the backward gradients of remote rows are sent by `_PassFunction`, which finds
        those of own rows next; then comes what was made between the two, while rows travelled in
        the forward; and last `_BeginPass` waits for what the other ranks return, and adds it.
    """

    def __init__(self) -> None:
        self._sums: GradientSums | None = None

    def later(self, sums: GradientSums) -> list[Tensor]:
        """The sums without what is on its way, which `added_to` adds for source rows."""
        self._sums = sums
        # Where the gradients of own rows are not asked for, `_BeginPass` is not run.
        torch.autograd.Variable._execution_engine.queue_callback(self._abandon)
        return sums.so_far()

    def added_to(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients of source rows, with what is on its way, if anything is; in place.

        They are the sums, and more where a pass is differentiated twice.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return grads
        try:
            return sums.finish_sources(grads)
        except BaseException:
            sums.abandon()
            raise

    def _abandon(self) -> None:
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.abandon()


class _BeginPass(torch.autograd.Function):
    """Forward: own rows as they are. Backward: their gradients, with those from other ranks."""

    @staticmethod
    def forward(ctx: Any, returned: ReturnedGradients, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.returned = returned
        return tuple([part.detach() for part in rows])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.returned.added_to(grads)


class _PassFunction(torch.autograd.Function):
    """Ties the outputs of a pass, already computed, to the tensors they were computed from."""

    @staticmethod
    def forward(
        ctx: Any, shard_pass: ShardPass, outputs: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shard_pass = shard_pass
        unread = shard_pass.unread
        ctx.save_for_backward(*[None if i in unread else t for i, t in enumerate(inputs)])
        ctx.set_materialize_grads(False)  # remote rows are hardly ever read by other calls
        results = outputs[: shard_pass.num_results]
        ctx.likes = [(out.shape, out.dtype, out.device) for out in results]
        return tuple([out.detach() for out in outputs])  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        full = list(grads)
        for i, (shape, dtype, device) in enumerate(ctx.likes):
            if full[i] is None:
                full[i] = torch.zeros(shape, dtype=dtype, device=device)
        shard_pass: ShardPass | None = ctx.shard_pass
        if (
            torch.is_grad_enabled()
            and shard_pass is not None
            and shard_pass.transport.by_collective
        ):
            needed = ctx.needs_input_grad[2:]
            return (None, None, *shard_pass.differentiated(full, ctx.saved_tensors, needed))
        return _gradients(ctx, *full)


@once_differentiable
def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    shard_pass: ShardPass | None = ctx.shard_pass
    if shard_pass is None:
        raise AssertionError(ctx.saved_tensors)  # which raises: an earlier backward has freed them
    saved = None
    if shard_pass.can_lose_result and any(p.reduction.has_lost_result for p in shard_pass.parts):
        saved = ctx.saved_tensors
        shard_pass.merge_again(saved)
    output_grads = shard_pass.begin_backward(grads)
    saved = ctx.saved_tensors if saved is None else saved
    results = shard_pass.backward(saved, ctx.needs_input_grad[2:], *output_grads)
    if not is_graph_kept():
        ctx.shard_pass = None  # it holds the inputs, too; this node lives as long as the loss does
    return None, None, *results


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
