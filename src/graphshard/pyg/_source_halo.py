# SPDX-License-Identifier: Apache-2.0
"""SourceHalo: how the edges of one relation reach the source rows of other ranks.

Sources are numbered as extended rows (see [Note: extended rows] in `graphshard.fullbatch`): a
rank's own nodes first, the halo after them. Destinations are own nodes. So in a relation within one
node type row ``v`` is the same node on both ends, and self loops, in-degrees and whatever else a
layer finds from local numbers are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm import all_reduce, fetch_halo, ragged_all_to_all, return_halo
from ..fullbatch import AggregationMode
from ..fullbatch.execution import HaloRowCache, PairwiseTransport
from ..fullbatch.topology import WHOLE, LocalEdges, ShardStructure
from ..graph.frame import version_of
from ..ops import Adjacency
from ._numbering import EdgeEnd, NodeNumbering

_KEPT_EDGE_SETS, _KEPT_TIMES_EDGES = 256, 4
_edge_set_numbers = itertools.count()


class SourceHalo:
    """The source rows of one relation, own and remote, and the rank's edges between them.

    Args:
        structure: Rows, edges and halos of this rank.
        etype: The relation.
        mode: How remote rows are fetched; ``"auto"`` is resolved already.
        cache: Halo rows of tensors that never change, shared by the relations of a graph.
        sources: The nodes where edges begin.
        destinations: The nodes where they end.
        extended_ids: Numbers of the extended rows, where another relation has fetched them.
    """

    def __init__(
        self,
        structure: ShardStructure,
        etype: CanonicalEType,
        mode: AggregationMode,
        cache: HaloRowCache,
        sources: NodeNumbering,
        destinations: NodeNumbering,
        extended_ids: Tensor | None = None,
    ) -> None:
        halo = structure.union_halo(etype[0])
        assert halo is not None
        self.structure, self.etype, self.mode, self.halo = structure, etype, mode, halo
        self._cache = cache
        edges = structure.edges[etype]
        self.num_dst = edges.num_dst
        self.edge_index = torch.stack([halo.extended_src(etype).long(), edges.dst.long()])
        if extended_ids is None:
            extended_ids = sources.extended_ids(halo)
        self.sources, self.destinations = self._ends(sources, destinations, extended_ids)
        #: This rank's rows of a tensor with a row for each edge of a whole graph, where calls
        #: bring such tensors (`graphshard.pyg.parallelize`).
        self.own_edges: Callable[[Tensor], Tensor] | None = None
        #: Whether these are the edges of another relation, turned round.
        self.is_turned = False
        self._reversed: SourceHalo | None = None
        self._with_loops: dict[int, SourceHalo] = {}
        self._fetched: list[tuple[Tensor, int, bool, Tensor]] = []
        self._edge_sets: list[EdgeSet] = []

    def _ends(
        self, sources: NodeNumbering, destinations: NodeNumbering, extended_ids: Tensor | None
    ) -> tuple[EdgeEnd, EdgeEnd]:
        """What the numbers at both ends mean; collective."""
        ids = extended_ids, destinations.ids
        largest = torch.full((2,), -1, dtype=torch.int64)
        for end, (known, rows) in enumerate(zip(ids, self.edge_index, strict=True)):
            if known is not None and rows.numel():
                largest[end] = known[rows].max()
        first, second = all_reduce(largest, "max", group=self.structure.group).tolist()
        return (
            EdgeEnd(self, sources, True, ids[0], first),
            EdgeEnd(self, destinations, False, ids[1], second),
        )

    @property
    def is_square(self) -> bool:
        """Whether sources and destinations are the same nodes."""
        return self.sources.numbering is self.destinations.numbering

    @property
    def own_ids(self) -> Tensor | None:
        """``[num_owned]`` the numbers of this rank's sources in the whole graph, if known."""
        return self.sources.numbering.ids

    @property
    def num_owned(self) -> int:
        """Source rows of this rank."""
        return self.halo.num_owned

    @property
    def num_extended(self) -> int:
        """Source rows of this rank and the rows of others that its edges read."""
        return self.halo.num_extended

    @property
    def world_size(self) -> int:
        return self.structure.world_size

    @property
    def keeps_halo(self) -> bool:
        """Whether fetched rows are kept for the backward, instead of fetched again."""
        return self.mode.mode == "oneshot" or not self.mode.rematerializes

    # ------------------------------------------------------------------ rows

    def own_rows(self, rows: Any) -> Any:
        """This rank's rows of what has a row for each source of the whole graph; else itself.

        Such is a learned row per node, which every rank has whole.
        """
        num_whole = self.sources.numbering.num_whole
        fits = isinstance(rows, Tensor) and rows.dim() > 1 and rows.shape[0] == num_whole
        if not fits or self.own_ids is None or num_whole == self.num_owned:
            return rows
        return rows.index_select(0, self.own_ids)

    def extended(self, *rows: Tensor) -> list[Tensor]:
        """Own and then halo rows of each tensor; collective, one exchange for all of them.

        What one layer asks for twice is fetched once; see `forget`.

        Args:
            rows: Each ``[num_owned, ...]``.
        """
        for own in rows:
            if own.layout != torch.strided:
                raise NotImplementedError(
                    f"rows of a sparse tensor cannot be read at the sources of edges (got shape "
                    f"{tuple(own.shape)}, {own.layout}); pass x.to_dense(), or have a Linear first"
                )
        if self.world_size == 1:
            return list(rows)
        found = [self._find(own) for own in rows]
        missing = [i for i, tensor in enumerate(found) if tensor is None]
        if missing:
            requests = [(self.halo, rows[i]) for i in missing]
            for i, tensor in zip(missing, self._cache.extended(requests), strict=True):
                found[i] = tensor
                self._fetched.append(
                    (rows[i], version_of(rows[i]), torch.is_grad_enabled(), tensor)
                )
        return [tensor for tensor in found if tensor is not None]

    def _find(self, own: Tensor) -> Tensor | None:
        for tensor, version, with_grad, extended in self._fetched:
            serves = with_grad or not (own.requires_grad and torch.is_grad_enabled())
            if tensor is own and version == version_of(own) and serves:
                return extended
        return None

    @property
    def fetched(self) -> list[Tensor]:
        """The extended rows that `extended` has given since `forget`."""
        return [extended for halo in self._family() for _, _, _, extended in halo._fetched]

    def forget(self) -> None:
        """Drop the rows that were fetched; a layer that is done calls it."""
        for halo in self._family():
            halo._fetched.clear()

    def _family(self) -> Iterator[SourceHalo]:
        """This relation, and what a layer has made of it: turned round, with self loops."""
        yield self
        for halo in self._with_loops.values():
            yield from halo._family()
        if self._reversed is not None:
            yield self._reversed
            for halo in self._reversed._with_loops.values():
                yield from halo._family()

    def fetched_again(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """As `extended`, of detached rows, and nothing is kept; collective.

        Rows come from one rank after the other, as many ahead as the mode's ``prefetch`` says, so
        that they are in memory once.
        """
        detached = [own.detach() for own in rows]
        if self.world_size == 1:
            return detached
        whole = [own.new_empty((self.num_extended, *own.shape[1:])) for own in detached]
        for own, extended in zip(detached, whole, strict=True):
            extended[: self.num_owned] = own
        transport = PairwiseTransport(self.halo, self.mode.halo_dtype)
        key = {("u", place): own for place, own in enumerate(detached)}
        fixed = dict.fromkeys(key, False)
        visits = [(step, WHOLE) for step in range(transport.num_steps)]
        depth = self.mode.fetched_ahead
        with closing(transport.prefetched(visits, depth, key, {}, fixed, {})) as arriving:
            for step, _, found in arriving:
                if step:
                    owner = (self.halo.plan.rank - step) % self.world_size
                    start, stop = (self.num_owned + end for end in self.halo.plan.halo_range(owner))
                    for extended, part in zip(whole, found.values(), strict=True):
                        extended[start:stop] = part
                del found
        return whole

    def returned(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Sum of the gradients of extended rows, per own row; collective.

        Args:
            grads: Each ``[num_extended, ...]``.
        """
        own = [grad[: self.num_owned] for grad in grads]
        if self.world_size == 1:
            return own
        remote = [(self.halo.plan, grad[self.num_owned :].contiguous()) for grad in grads]
        return [a + b for a, b in zip(own, return_halo(remote), strict=True)]

    def summed_at_sources(self, extended: Tensor) -> Tensor:
        """Sum, per own row, of what all ranks have for it; differentiable, collective.

        Args:
            extended: ``[num_extended, ...]``.
        """
        if self.world_size == 1:
            return extended
        own, remote = extended[: self.num_owned], extended[self.num_owned :]
        total: Tensor = own + _SumAtSources.apply(remote, self)
        return total

    # ------------------------------------------------------------------ edges

    def edge_set(self, edge_index: Tensor) -> EdgeSet:
        """The sorted formats of these edges, made once for edges that come again and again.

        A layer that adds self loops makes the same new tensor at every step. To compare it with
        the ones that are known costs a look at each id, to sort it costs many.

        Args:
            edge_index: ``[2, num_edges]`` extended source rows and destination rows.
        """
        for number, known in enumerate(self._edge_sets):
            if known.holds(edge_index):
                self._edge_sets.insert(0, self._edge_sets.pop(number))
                return known
        made = EdgeSet(edge_index, self.num_extended, self.num_dst)
        # As RGCNConv has one for each relation: many sets, but few times all edges.
        room = _KEPT_TIMES_EDGES * max(self.edge_index.shape[1], edge_index.shape[1])
        kept = [made]
        for known in self._edge_sets[: _KEPT_EDGE_SETS - 1]:
            room -= known.edge_index.shape[1]
            if room < 0:
                break
            kept.append(known)
        self._edge_sets = kept
        return made

    def largest_in_degree(self, edges: EdgeSet) -> int:
        """In-edges of the destination of all ranks that has the most; collective."""
        indptr, _, _ = edges.adjacency.csc()
        largest = indptr.diff().max() if self.num_dst else indptr.new_zeros(())
        largest = largest.to(torch.int64)
        return int(all_reduce(largest, "max", group=self.structure.group))

    def reversed(self) -> SourceHalo:
        """The same relation with its edges turned round; collective the first time.

        Edges live with their destination, so those that now end on another rank move to it.
        """
        if self._reversed is None:
            edges, plan = self.structure.edges[self.etype], self.halo.plan
            group = self.structure.group
            ends_of_edges = torch.stack([edges.src.long(), edges.dst.long()], 1)
            pairs, _, (_, incoming) = _to_ranks(
                ends_of_edges, edges.src_part.long(), plan.world_size, group
            )
            ranks = torch.arange(plan.world_size, device=pairs.device)
            part = torch.repeat_interleave(ranks, incoming)
            order = torch.argsort(pairs[:, 0], stable=True)
            turned = LocalEdges(part[order], pairs[order, 1], pairs[order, 0], self.num_owned)
            source, relation, target = self.etype
            etype = (target, f"rev_{relation}", source)
            structure = ShardStructure(
                {etype: turned},
                {target: self.num_dst},
                {source: self.num_owned},
                self.structure.device,
                group,
                self.structure.constants,
            )
            cache = HaloRowCache(structure, self.mode.halo_dtype)
            ends = self.destinations.numbering, self.sources.numbering
            self._reversed = SourceHalo(structure, etype, self.mode, cache, *ends)
            self._reversed._reversed = self
            self._reversed.is_turned = True
        return self._reversed

    def with_self_loops(self, limit: int) -> SourceHalo:
        """The relation, and after its edges one from source to destination of each number.

        Of a relation between two types: what its loops read may be on other ranks, and in no halo.
        Collective the first time.

        Args:
            limit: End of the numbers, which nodes of both types have.
        """
        if limit not in self._with_loops:
            numbers = self.destinations.own_ids
            dst = (numbers < limit).nonzero().view(-1)
            part, src = self._find_sources(numbers[dst], limit)
            edges = self.structure.edges[self.etype]
            joined = LocalEdges(
                torch.cat([edges.src_part.long(), part]),
                torch.cat([edges.src.long(), src]),
                torch.cat([edges.dst.long(), dst]),
                edges.num_dst,
            )
            source, _, target = self.etype
            structure = ShardStructure(
                {self.etype: joined},
                {source: self.num_owned},
                {target: self.num_dst},
                self.structure.device,
                self.structure.group,
            )
            cache = HaloRowCache(structure, self.mode.halo_dtype)
            ends = self.sources.numbering, self.destinations.numbering
            self._with_loops[limit] = SourceHalo(structure, self.etype, self.mode, cache, *ends)
        return self._with_loops[limit]

    def _find_sources(self, numbers: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """The rank and the row there of the sources with some numbers; collective.

        No rank knows all of them: number ``n`` is written down at rank ``n % world_size`` by its
        owner, and asked for there.
        """
        own, size, group = self.sources.own_ids, self.world_size, self.structure.group
        device = own.device
        rows = (own < limit).nonzero().view(-1)
        written = torch.stack([own[rows], torch.full_like(rows, self.halo.plan.rank), rows], 1)
        notes, _, _ = _to_ranks(written, own[rows] % size, size, group)
        asked, order, counts = _to_ranks(numbers.view(-1, 1), numbers % size, size, group)
        book = torch.full((limit // size + 1, 2), -1, dtype=torch.int64, device=device)
        book[notes[:, 0] // size] = notes[:, 1:]
        answers = book[asked.view(-1) // size]
        if size > 1:
            sent, received = counts
            answers = ragged_all_to_all(answers, received.tolist(), sent.tolist(), group)
        found = torch.empty_like(answers)
        found[order] = answers
        return found[:, 0], found[:, 1]


def _to_ranks(
    rows: Tensor, ranks: Tensor, world_size: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Rows sent to a rank each: what came, the order of those sent, and how many went and came."""
    order = torch.argsort(ranks, stable=True)
    counts = torch.bincount(ranks, minlength=world_size)
    if world_size == 1:
        return rows[order], order, (counts, counts)
    ones = [1] * world_size
    incoming = ragged_all_to_all(counts, ones, ones, group)
    arrived = ragged_all_to_all(rows[order], counts.tolist(), incoming.tolist(), group)
    return arrived, order, (counts, incoming)


class _SumAtSources(torch.autograd.Function):
    """Halo rows, summed at their owners: the adjoint of a fetch."""

    @staticmethod
    def forward(ctx, remote: Tensor, halo: SourceHalo) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.halo = halo
        return return_halo([(halo.halo.plan, remote.contiguous())])[0].detach()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return fetch_halo([(ctx.halo.halo.plan, grad.contiguous())])[0], None


class EdgeSet:
    """Edges of a relation, perhaps with self loops added or some left out, and their order.

    Args:
        edge_index: int64 ``[2, num_edges]``.
        num_src: Extended source rows.
        num_dst: Destination rows.
    """

    def __init__(self, edge_index: Tensor, num_src: int, num_dst: int) -> None:
        self.edge_index = edge_index
        small = max(num_src, num_dst, edge_index.shape[1]) < 2**31
        src, dst = edge_index.to(torch.int32) if small else edge_index
        self.adjacency = Adjacency(src, dst, num_src, num_dst, check=False)
        self.pieces: Any = None  # made by what computes in pieces
        self.transport: Any = None  # made by what computes shard by shard
        self.number = next(_edge_set_numbers)  # of no other edge set in this process

    @cached_property
    def counts(self) -> Tensor:
        """``[num_dst]`` in-edges of each destination, 1 at least: what a mean divides by."""
        indptr, _, _ = self.adjacency.csc()
        return indptr.diff().clamp(min=1)

    def holds(self, edge_index: Tensor) -> bool:
        """Whether these are its edges, in its order."""
        mine = self.edge_index
        if mine is edge_index:
            return True
        return mine.shape == edge_index.shape and torch.equal(mine, edge_index)
