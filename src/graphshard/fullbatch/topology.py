# SPDX-License-Identifier: Apache-2.0
"""Who reads which rows: shards, halos, and what stays the same while a graph lives.

[Note: extended rows]
    The sources of a relation are numbered on each rank as *extended rows*: first the
    ``num_owned`` rows of the rank's own source frame, then the ``num_halo`` rows that it reads
    from other ranks, grouped by owner in rank order and de-duplicated. One-shot aggregation
    works on extended rows as they are, or on own and halo rows one after the other; sequential
    aggregation takes them one owner at a time.

Row numbers are kept as int32 wherever they fit: structure, not features, then costs half.

[Note: what is kept between calls]
    A rank cannot see that a tensor was written to where torch does not count it: through ``.data``,
    through NumPy, by a user's own kernel. So of a tensor of the user nothing is kept between calls
    unless a ``local_scope`` bounds it. These are all the rows that are kept:

    ==================  =======================  ===========================  =====================
    what                of which tensors         key                          until
    ==================  =======================  ===========================  =====================
    halo rows, sums     all of them marked as    halo or call, and the        a tensor goes, or the
    and other results   constant: features of    tensors: identity and        graph does
    (`ConstantCache`)   the `PartitionData`,     version
                        and `mark_constant`
    halo rows           any source field         halo, and the tensor:        the innermost
    (`HaloRowCache`)                             identity and version         ``local_scope`` ends,
                                                                              or the backward went
                                                                              through the exchange
    halo rows of one    what one layer of PyG    the tensor: identity and     the layer returns
    layer of PyG        reads                    version
    ==================  =======================  ===========================  =====================

    What is marked must not be written to, except in ways that torch counts (``x.mul_(2)``). The
    last row but one goes with its autograd graph, which serves one backward. A kept result that
    comes back from ``update_all`` is a copy on write, so that the caller may write into it.

    The input features of the first layer are the same tensor in every epoch and need no gradient.
    What is computed from them alone - their halo rows, or their aggregate - is computed once per
    run. Every rank runs the same program on tensors of its own, so the ranks agree on what is
    cached and none waits for an exchange that another one skips.

[Note: fewest rows]
    An edge from a node ``u`` of rank ``p`` to a node ``v`` of rank ``q`` can be served in two ways
    where messages are summed: ``p`` sends the row of ``u``, which serves all edges from ``u`` to
    ``q``; or ``p`` adds up what ``v`` gets from ``p``, and sends the partial sum, which serves all
    edges from ``p`` to ``v``. A smallest set of rows and sums that serves all edges of the pair is
    a minimum vertex cover of the bipartite graph of its edges. So what travels is a sparse matrix
    (`FewestRows`) times own rows; with rows alone it is a selection. Backward it is transposed: a
    row's gradient comes back as the sum over the edges that it served, and that of a partial sum is
    the gradient of ``v``. Receivers find the cover and tell owners once, what each sum is made of
    is in the order of local edges, and so are runs repeatable. Weights that are fixed go to where
    they are multiplied before each pass, or once where they are constant.

    Some layers send gradients of their results instead, see `nn.symmetric_sums`.

    For attention the cover is the same, and what travels beside rows is the state of ``v``, see
    [Note: states of destinations] in `softmax`; in one-shot mode, where it is fewer bytes.

    Rows travel, in place of that, where they are fetched once (constant features), where other
    calls or kinds of messages read them, too (max, min, functions of the user), and where 5 % of
    them at most would be saved.

[Note: column blocks]
    While a shard is worked on, its rows, those of the next shard, what is being sent to other
    ranks, the gradients that travel back and the shard's partial result are all alive: five or
    six times the rows of a part, which a single process does not need. A sum of copied rows
    treats every column alike, and attention every head alike, so they can go through a shard
    block by block; what is alive then is a quarter of that. More messages of fewer bytes are
    sent, the same number of bytes in all. `reductions` finds out what can be cut, and where. With
    blocks the peak of P workers is 1.02 to 1.06 times 1/P of one for SAGE, 1.18 to 1.21 for GAT
    (benchmarks/results/memory_*_sequential_cpu_2026-11-21.md).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm import ExchangePlan, all_reduce, fetch_halo, ragged_all_to_all, return_halo
from ..comm.collectives import verify
from ..comm.group import group_state
from ..ops import Adjacency, Attention, add_rows, edge_keys, gspmm
from ..partition.vertex_cover import minimum_vertex_cover

# -- edges by the owner of their source ------------------------------------------------------------

_INT32_MAX = 2**31 - 1
_NEARLY_ALL = 0.9
_HASHED = 1 << 18
"""Edges that are hashed at a time: in pieces that stay in the caches."""


class RelationEdges:
    """The in-edges of one rank's nodes under one relation, by edge id.

    In parts that `partition_graph` wrote that is by destination, in DGL's it need not be. Row
    numbers are int32 wherever they fit: of a large graph the structure is what fills memory.

    Args:
        src_part: int16 or int32 ``[num_edges]``, the rank that owns each edge's source.
        src: int32 or int64 ``[num_edges]``, the source's row on that rank.
        dst: int32 or int64 ``[num_edges]``, the destination's row on this rank.
    """

    def __init__(self, src_part: Tensor, src: Tensor, dst: Tensor) -> None:
        self._ends = src_part, src, dst

    @property
    def src_part(self) -> Tensor:
        return self._ends[0]

    @property
    def src(self) -> Tensor:
        return self._ends[1]

    @property
    def dst(self) -> Tensor:
        return self._ends[2]

    @property
    def num_edges(self) -> int:
        return self.src.numel()

    @property
    def device(self) -> torch.device:
        return self.src.device

    @property
    def by_destination(self) -> bool:
        """Whether edges come by destination."""
        return not bool((self.dst[1:] < self.dst[:-1]).any())

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Some edges after others: which, and the columns of these."""
        yield slice(0, self.num_edges), self.src_part, self.src, self.dst

    def num_cut(self, rank: int) -> int:
        """Edges from rows of other ranks than ``rank``, which is this one."""
        return int((self.src_part != rank).sum())

    def rows_read(self, part: int) -> Tensor:
        """Rows of another part at which edges begin; one may come several times."""
        return self.src[self.src_part == part]

    def sum_by_source(
        self, values: Tensor, num_src: int, num_parts: int, rank: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The sum over the edges from each source, of what their destinations have.

        Args:
            values: ``[num_dst]``.

        Returns:
            ``[num_src]`` of the own rows; and of each part the rows that are read of it,
            ascending, and their sums.
        """
        total, others = values.new_zeros(num_src), []
        for part in range(num_parts):
            is_of = self.src_part == part
            src, of_dst = self.src[is_of], values.index_select(0, self.dst[is_of])
            if part == rank:
                total.index_add_(0, src, of_dst)
                src, of_dst = src[:0], of_dst[:0]
            rows, at = torch.unique(src.to(torch.int64), return_inverse=True)
            others.append((rows, of_dst.new_zeros(rows.numel()).index_add_(0, at, of_dst)))
        return total, others


class LocalEdges(RelationEdges):
    """Edges into some destination rows of this rank.

    Args:
        num_dst: Destination rows on this rank.
    """

    def __init__(self, src_part: Tensor, src: Tensor, dst: Tensor, num_dst: int) -> None:
        super().__init__(src_part, src, dst)
        self.num_dst = num_dst

    @classmethod
    def of(cls, edges: RelationEdges, num_dst: int) -> LocalEdges:
        """The edges, into so many rows."""
        if isinstance(edges, LocalEdges):
            return edges
        return cls(edges.src_part, edges.src, edges.dst, num_dst)

    def in_degrees(self) -> Tensor:
        """``[num_dst]`` int64."""
        return torch.bincount(self.dst, minlength=self.num_dst)


@dataclass(frozen=True)
class Shard:
    """The edges whose sources one rank owns, or all ranks but this one.

    Args:
        step: 0 for this rank's own rows, else the step of a pass that brings them: the pairwise
            one, where the owner is ``(rank - step) % world_size``; or 1 for all remote rows.
        adjacency: From the sources' rows, as they arrive, to this rank's destinations.
        find_eids: Finds `eids`; None where the shard has all local edges in order.
        num_partial_sums: Edges after those of `eids`, each from a partial sum that was made where
            its sources are.
    """

    step: int
    adjacency: Adjacency
    find_eids: Callable[[], Tensor] | None
    num_partial_sums: int = 0

    @cached_property
    def eids(self) -> Tensor | None:
        """``[num_shard_edges]`` local edge ids, ascending; None for all of them in order.

        Found on first use: messages that read no edge values never need them.
        """
        return None if self.find_eids is None else self.find_eids()

    @cached_property
    def reached(self) -> tuple[Tensor, Adjacency] | None:
        """The destinations that have an edge here, and the same edges into these alone.

        Few of a rank's rows have remote in-edges, so a sum over those need not be as tall as the
        result that it is added to. Found on first use; shares the arrays of `adjacency`.

        Returns:
            ``[num_reached]`` rows, ascending, of the adjacency's id type, and their adjacency; None
            where nearly all destinations have one.
        """
        indptr, indices, eids = self.adjacency.csc()
        rows = indptr.diff().nonzero().view(-1)
        if rows.numel() > _NEARLY_ALL * self.adjacency.num_dst:
            return None
        ends = torch.cat([indptr[:1], indptr[rows + 1]])
        sizes = self.adjacency.num_src, rows.numel()
        return rows.to(indptr.dtype), Adjacency.from_csc(ends, indices, eids, *sizes, check=False)

    def edge_rows(self, values: Tensor) -> Tensor:
        """The rows of ``values``, one per local edge, that belong to this shard; 1 for sums."""
        if self.num_partial_sums and self.eids is not None:
            ones = values.new_ones((self.num_partial_sums, *values.shape[1:]))
            return torch.cat([values.index_select(0, self.eids), ones])
        return values if self.eids is None else values.index_select(0, self.eids)

    def edge_ids(self) -> Tensor:
        """Local edge ids of this shard, ascending."""
        if self.eids is not None:
            return self.eids
        return torch.arange(self.adjacency.num_edges, device=self.adjacency.device)


@dataclass(eq=False)
class Halo:
    """Rows of one source type that this rank reads from others, for some relations.

    Building one is collective: every rank must build it for the same relations.

    Args:
        edges: Relation to its local edges; all with the same source type.
        plan: Who sends which rows to whom, in source-frame rows.
        longest_message: Most rows that any rank sends to any other; the same on all ranks.
    """

    num_owned: int
    edges: Mapping[CanonicalEType, LocalEdges]
    plan: ExchangePlan
    longest_message: int

    def __post_init__(self) -> None:
        self._extended: dict[CanonicalEType, Tensor] = {}
        self._adjacency: dict[CanonicalEType, Adjacency] = {}
        self._own: dict[CanonicalEType, Shard] = {}
        self._shards: dict[CanonicalEType, tuple[Shard, ...]] = {}
        self._halves: dict[CanonicalEType, tuple[Shard, ...]] = {}

    @property
    def num_halo(self) -> int:
        return self.plan.num_halo

    @property
    def num_extended(self) -> int:
        return self.num_owned + self.plan.num_halo

    @cached_property
    def needed(self) -> list[Tensor]:
        """Of each rank the rows that are read, ascending."""
        return needed_rows(list(self.edges.values()), self.plan.rank, self.plan.world_size)

    def extended_src(self, etype: CanonicalEType) -> Tensor:
        """``[num_edges]`` extended row of each local edge's source."""
        if etype not in self._extended:
            edges = self.edges[etype]
            rows = edges.src.clone() if self.num_extended <= _INT32_MAX else edges.src.long()
            for part, needed in enumerate(self.needed):
                of_part = edges.src_part == part
                if part != self.plan.rank and bool(of_part.any()):
                    start, _ = self.plan.halo_range(part)
                    position = torch.searchsorted(needed, edges.src[of_part].to(needed.dtype))
                    rows[of_part] = (position + (self.num_owned + start)).to(rows.dtype)
            self._extended[etype] = narrow(rows, self.num_extended)
        return self._extended[etype]

    def adjacency(self, etype: CanonicalEType) -> Adjacency:
        """From extended rows to destinations, all local edges in id order."""
        if etype not in self._adjacency:
            edges = self.edges[etype]
            src = self.extended_src(etype)
            self._adjacency[etype] = Adjacency(
                src, edges.dst.to(src.dtype), self.num_extended, edges.num_dst
            )
        return self._adjacency[etype]

    def shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """One shard per rank, in the order in which sequential aggregation merges them."""
        if etype not in self._shards:
            rank, world_size = self.plan.rank, self.plan.world_size
            self._shards[etype] = (
                self.own_shard(etype),
                *(
                    self._make_shard(etype, step, [(rank - step) % world_size])
                    for step in range(1, world_size)
                ),
            )
            self._forget_needed()
        return self._shards[etype]

    def own_shard(self, etype: CanonicalEType) -> Shard:
        """The edges of a relation between rows of this rank."""
        if etype not in self._own:
            self._own[etype] = self._make_shard(etype, 0, [self.plan.rank])
        return self._own[etype]

    def halves(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """The own shard, and one of all remote rows in halo order where there are other ranks."""
        if self.plan.world_size <= 2:
            return self.shards(etype)
        if etype not in self._halves:
            rank, world_size = self.plan.rank, self.plan.world_size
            owners = [owner for owner in range(world_size) if owner != rank]
            self._halves[etype] = self.own_shard(etype), self._make_shard(etype, 1, owners)
            self._forget_needed()
        return self._halves[etype]

    def _forget_needed(self) -> None:
        """Drop `needed` once all relations have their shards; it can be computed again."""
        if len(self.edges) in (len(self._shards), len(self._halves)):
            self.__dict__.pop("needed", None)

    def _make_shard(self, etype: CanonicalEType, step: int, owners: Sequence[int]) -> Shard:
        if self.plan.world_size == 1:
            return Shard(0, self.adjacency(etype), None)
        edges, rank = self.edges[etype], self.plan.rank

        def find_eids() -> Tensor:
            is_here = edges.src_part == owners[0]
            if len(owners) > 1:  # all but this rank
                is_here = edges.src_part != rank
            return narrow(is_here.nonzero().view(-1), edges.num_edges)

        eids = find_eids()
        src, num_src = edges.src[eids], self.num_owned
        if step:
            src, num_src = _remote_sources(edges, eids, owners, self.needed)
        src = narrow(src, max(num_src, edges.num_dst))
        dst = edges.dst[eids].to(src.dtype)
        return Shard(step, _by_destination(src, dst, num_src, edges.num_dst), find_eids)

    @cached_property
    def fewest(self) -> FewestRows | None:
        """What travels where sums alone are wanted; None for `plan`. Collective the first time."""
        return find_fewest_rows(self)

    @cached_property
    def fewest_of_attention(self) -> RowsAndStates | None:
        """Likewise for an attention over the only relation."""
        return find_rows_and_states(self)


def _by_destination(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Adjacency:
    """These edges, without ``dst`` where it ascends and a pointer into ``src`` says as much."""
    adjacency = Adjacency(src, dst, num_src, num_dst)
    indptr, indices, eids = adjacency.csc()
    if eids is not None:
        return adjacency
    return Adjacency.from_csc(indptr, indices, None, num_src, num_dst, check=False)


def _remote_sources(
    edges: LocalEdges, eids: Tensor, owners: Sequence[int], needed: Sequence[Tensor]
) -> tuple[Tensor, int]:
    """int64 sources of some edges among the needed rows of their owners; how many these are."""
    src, part = edges.src[eids].to(torch.int64), edges.src_part[eids]
    first = 0
    for owner in owners:
        of_owner = part == owner
        position = torch.searchsorted(needed[owner], src[of_owner].to(needed[owner].dtype))
        src[of_owner] = position + first
        first += needed[owner].numel()
    return src, first


def needed_rows(edges: Sequence[LocalEdges], rank: int, world_size: int) -> list[Tensor]:
    """Per owner, the distinct rows, ascending, that these edges read; none of ``rank``'s own."""
    empty = torch.empty(0, dtype=torch.int64, device=edges[0].device if edges else None)
    needed = []
    for part in range(world_size):
        rows = [e.rows_read(part) for e in edges] if part != rank else []
        needed.append(torch.unique(torch.cat([empty, *rows])))
    return needed


def narrow(rows: Tensor, bound: int) -> Tensor:
    """``rows``, all below ``bound``, as int32 if that can hold them."""
    return rows.to(torch.int32) if bound <= _INT32_MAX else rows


# -- fewest rows for sums --------------------------------------------------------------------------

_WORTHWHILE = 0.95
"""The most rows, of those that are read, that partial sums are made for."""


class FewestRows:
    """What travels of a halo where all its relations are summed: rows, and partial sums.

    See [Note: fewest rows].

    Args:
        plan: Of what is sent, which its sender makes.
        longest_message: Most rows that any rank sends to any other; the same on all ranks.
        sent: From own rows to what is sent, in the order of the plan.
        is_partial: bool, of each edge of ``sent``: whether it goes into a partial sum.
        partial_edges: Local ids of the edges that other ranks sum, in the order of their ``sent``;
            None for several relations.
        partial_splits: How many of those each rank sums; and how many this one sums for each.
        received: The edges of each relation from what is received.
        saved: Rows fewer than are read, and edges that are summed where their sources are, of all
            ranks together.
    """

    def __init__(
        self,
        halo: Halo,
        plan: ExchangePlan,
        longest_message: int,
        sent: Adjacency,
        is_partial: Tensor,
        partial_edges: Tensor | None,
        partial_splits: tuple[list[int], list[int]],
        received: Mapping[CanonicalEType, _Received],
        saved: tuple[int, int],
    ) -> None:
        self.halo, self.plan, self.longest_message = halo, plan, longest_message
        self.is_partial, self.partial_edges = is_partial, partial_edges
        self.partial_splits, self.saved = partial_splits, saved
        self._received = received
        #: For each reader, first and last, after all of them: own rows to what is sent.
        self._sent: dict[int | None, Adjacency] = {None: sent}
        self._returned: dict[int | None, tuple[Tensor, Adjacency] | None] = {}
        self._shards: dict[CanonicalEType, tuple[Shard, ...]] = {}
        self._halves: dict[CanonicalEType, tuple[Shard, ...]] = {}

    def _sent_to(self, reader: int | None) -> Adjacency:
        if reader not in self._sent:
            first, last = self._bounds(reader)
            indptr, indices, _ = self._sent[None].csc()
            start, stop = int(indptr[first]), int(indptr[last])
            ends, sources = indptr[first : last + 1] - start, indices[start:stop]
            sizes = self.halo.num_owned, last - first
            self._sent[reader] = Adjacency.from_csc(ends, sources, None, *sizes, check=False)
        return self._sent[reader]

    def _bounds(self, reader: int | None) -> tuple[int, int]:
        splits = self.plan.send_splits
        if reader is None:
            return 0, sum(splits)
        return sum(splits[:reader]), sum(splits[: reader + 1])

    def _weights_for(self, reader: int | None, weights: Tensor | None) -> Tensor | None:
        if weights is None or reader is None:
            return weights
        first, last = self._bounds(reader)
        indptr, _, _ = self._sent[None].csc()
        return weights[int(indptr[first]) : int(indptr[last])]

    def made(self, own: Tensor, reader: int | None = None, weights: Tensor | None = None) -> Tensor:
        """What is sent to a rank, or to all, of own rows; ``weights`` as `sent_weights` gives."""
        weights = self._weights_for(reader, weights)
        op = "copy_lhs" if weights is None else "mul"
        return gspmm(self._sent_to(reader), op, "sum", own, weights).to(own.dtype)

    def add_returned(
        self,
        total: Tensor,
        arrived: Tensor,
        reader: int | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Add the gradients of own rows, in place, given those of what was sent: its adjoint."""
        if reader not in self._returned:
            shard = Shard(0, self._sent_to(reader).reverse(), None)
            self._returned[reader] = shard.reached
        weights = self._weights_for(reader, weights)
        op = "copy_lhs" if weights is None else "mul"
        reached = self._returned[reader]
        dtype = torch.float32 if total.dtype.itemsize == 2 else total.dtype
        arrived = arrived.to(dtype)
        if reached is None:
            total += gspmm(self._sent_to(reader).reverse(), op, "sum", arrived, weights)
            return
        rows, adjacency = reached
        sums = gspmm(adjacency, op, "sum", arrived, weights)
        if total.dtype == dtype:
            add_rows(total, rows, sums)
        else:  # rounded once
            total[rows.long()] = sums.add_(total[rows.long()]).to(total.dtype)

    def sent_weights(self, weights: Tensor, partial_edges: Tensor) -> Tensor:
        """The weight of each edge of what is sent, from those of local edges; collective.

        Args:
            weights: ``[num_edges, ...]`` of the only relation.
            partial_edges: Ids of those that other ranks sum, in the order of `partial_edges`.
        """
        theirs, mine = self.partial_splits
        given = weights.detach().index_select(0, partial_edges)
        arrived = ragged_all_to_all(given, theirs, mine, self.plan.group)
        full = arrived.new_ones((self.is_partial.numel(), *arrived.shape[1:]))
        full[self.is_partial] = arrived
        return full

    def shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """As `Halo.shards`, of what is received instead of halo rows."""
        if etype not in self._shards:
            rank, world_size = self.plan.rank, self.plan.world_size
            remote = [
                self._make_shard(etype, step, *self.plan.halo_range((rank - step) % world_size))
                for step in range(1, world_size)
            ]
            self._shards[etype] = self.halo.own_shard(etype), *remote
            for reader in range(world_size):  # here, and not on the stream of a copy
                self._sent_to(reader)
        return self._shards[etype]

    def halves(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """As `Halo.halves`."""
        if etype not in self._halves:
            remote = self._make_shard(etype, 1, 0, self.plan.num_halo)
            self._halves[etype] = self.halo.own_shard(etype), remote
        return self._halves[etype]

    def _make_shard(self, etype: CanonicalEType, step: int, start: int, stop: int) -> Shard:
        edges, num_dst = self._received[etype], self.halo.edges[etype].num_dst

        def of_shard(rows: Tensor) -> Tensor:
            return ((rows >= start) & (rows < stop)).nonzero().view(-1)

        rows, sums = of_shard(edges.rows), of_shard(edges.sums)
        src = torch.cat([edges.rows[rows].long(), edges.sums[sums].long()]) - start
        dst = torch.cat([edges.dst_of_rows[rows].long(), edges.dst_of_sums[sums].long()])
        bound = max(stop - start, num_dst)
        adjacency = _by_destination(narrow(src, bound), narrow(dst, bound), stop - start, num_dst)
        eids = edges.eids
        return Shard(step, adjacency, lambda: eids[of_shard(edges.rows)], sums.numel())


@dataclass(frozen=True)
class _Received:
    """Edges of one relation from what is received: those of rows, and one from each partial sum.

    Args:
        eids: Local ids of the edges of rows, ascending.
        rows: Of each of them its place in what is received; likewise ``sums``.
    """

    eids: Tensor
    rows: Tensor
    dst_of_rows: Tensor
    sums: Tensor
    dst_of_sums: Tensor

    def to(self, device: torch.device) -> _Received:
        """The same on a device, in int32 where that holds them."""
        parts = [getattr(self, name.name) for name in fields(self)]
        bounds = [int(part.max()) + 1 if part.numel() else 0 for part in parts]
        return _Received(*[narrow(p, n).to(device) for p, n in zip(parts, bounds, strict=True)])


@dataclass(frozen=True)
class _Cover:
    """The rows and partial sums that serve the cut edges of all relations of a halo.

    A partial sum is of one owner of sources, relation and destination; they are in this order.

    Args:
        rows: The halo row of each cut edge, relation after relation; ``sums`` its partial sum.
        owner_of_row: Of each halo row; likewise ``owner_of_sum``.
        ends_of_sums: The destination of each sum, those of all relations counted on.
        sends_row: Of each halo row whether it is sent; likewise ``sends_sum``.
    """

    rows: Tensor
    sums: Tensor
    owner_of_row: Tensor
    owner_of_sum: Tensor
    ends_of_sums: Tensor
    sends_row: Tensor
    sends_sum: Tensor

    @cached_property
    def summed(self) -> Tensor:
        """The cut edges that are served by partial sums, ascending."""
        return (~self.sends_row[self.rows]).nonzero().view(-1)

    @cached_property
    def owners(self) -> Tensor:
        """Who sends each row and then each sum that is sent."""
        return torch.cat([self.owner_of_row[self.sends_row], self.owner_of_sum[self.sends_sum]])

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Of each halo row, and each sum, its place in what is received; -1 if it is not sent.

        By owner, rows before sums.
        """
        num_rows = int(self.sends_row.sum())
        kinds = 2 * self.owners
        kinds[num_rows:] += 1
        places = torch.empty_like(kinds)
        places[torch.argsort(kinds, stable=True)] = torch.arange(kinds.numel())
        of_rows = torch.full(self.sends_row.shape, -1)
        of_rows[self.sends_row] = places[:num_rows]
        of_sums = torch.full(self.sends_sum.shape, -1)
        of_sums[self.sends_sum] = places[num_rows:]
        return of_rows, of_sums


def _find_cover(
    edges: Sequence[LocalEdges], needed: Sequence[Tensor], rank: int
) -> tuple[_Cover, list[tuple[Tensor, Tensor, Tensor]]]:
    """A minimum vertex cover for each pair of ranks; rows alone where that saves little.

    Args:
        edges: Those of each relation.
        needed: `needed_rows` of them.

    Returns:
        Also the edges between ranks of each relation: local ids, halo rows and destinations.
    """
    owners = [owner for owner in range(len(needed)) if owner != rank]
    cut, ends, start = [], [], 0
    for of_relation in edges:
        eids = (of_relation.src_part != rank).nonzero().view(-1)
        halo_rows, _ = _remote_sources(of_relation, eids, owners, needed)
        dst = of_relation.dst[eids].to("cpu", torch.int64)
        cut.append((eids.cpu(), halo_rows.cpu(), dst))
        ends.append(dst + start)
        start += of_relation.num_dst
    rows = torch.cat([halo_rows for _, halo_rows, _ in cut])
    splits = torch.tensor([0 if r == rank else part.numel() for r, part in enumerate(needed)])
    owner_of_row = torch.repeat_interleave(torch.arange(splits.numel()), splits)
    num_ends = max(start, 1)
    keys, sums = torch.unique(torch.cat(ends) + owner_of_row[rows] * num_ends, return_inverse=True)
    owner_of_sum = keys // num_ends
    sizes = owner_of_row.numel(), keys.numel()
    sends_row, sends_sum = minimum_vertex_cover(rows, sums, *sizes)
    counts = torch.bincount(owner_of_row[sends_row], minlength=splits.numel())
    counts += torch.bincount(owner_of_sum[sends_sum], minlength=splits.numel())
    saves = counts <= _WORTHWHILE * splits
    sends_row |= ~saves[owner_of_row]
    sends_sum &= saves[owner_of_sum]
    keys %= num_ends
    return _Cover(rows, sums, owner_of_row, owner_of_sum, keys, sends_row, sends_sum), cut


def count_fewest_rows(edges: Sequence[LocalEdges], rank: int, world_size: int) -> Tensor:
    """Remote rows that a rank reads, and rows and partial sums that serve it where it sums.

    Args:
        edges: Of the relations that are summed together, all of one source type.

    Returns:
        ``[7, world_size]``: the number from each owner of remote rows, of rows and partial sums,
        of partial sums alone, and of those of 2, 3, 4 and more rows.
    """
    needed = needed_rows(edges, rank, world_size)
    cover, _ = _find_cover(edges, needed, rank)
    lengths = torch.bincount(cover.sums[cover.summed], minlength=cover.owner_of_sum.numel())
    sums = [cover.sends_sum]
    sums += [cover.sends_sum & (lengths.clamp(max=5) == length) for length in range(2, 6)]
    kinds = cover.owner_of_row, cover.owners, *(cover.owner_of_sum[chosen] for chosen in sums)
    return torch.stack([torch.bincount(owners, minlength=world_size) for owners in kinds])


def saves_rows(num_read: int, num_sent: int) -> bool:
    """Whether partial sums are made: ``num_sent`` rows and sums in place of ``num_read`` rows."""
    return num_read > 0 and num_sent <= _WORTHWHILE * num_read


def find_fewest_rows(halo: Halo) -> FewestRows | None:
    """What serves the cut edges of each pair of ranks with fewest rows. Collective.

    Returns:
        None on all ranks if hardly any rows are saved. See [Note: fewest rows].
    """
    plan, group, device = halo.plan, halo.plan.group, halo.plan.send_index.device
    cover, cut = _find_cover(list(halo.edges.values()), halo.needed, plan.rank)
    starts = [0, *accumulate(edges.num_dst for edges in halo.edges.values())]
    totals = torch.tensor([halo.num_halo, cover.owners.numel(), cover.summed.numel()])
    num_read, num_sent, num_summed = all_reduce(totals, group=group).tolist()
    if not saves_rows(num_read, num_sent):
        return None
    received, first = {}, 0
    for etype, edges, ends in zip(halo.edges, cut, pairwise(starts), strict=True):
        last = first + edges[0].numel()
        received[etype] = _received(cover, edges, slice(first, last), ends).to(device)
        first = last
    # What each owner makes of its rows, and of how many edges: rows first, then sums.
    place_of_row, place_of_sum = cover.places
    chosen = cover.sends_row.nonzero().view(-1)
    places = torch.cat([place_of_row[chosen], place_of_sum[cover.sums[cover.summed]]])
    order = torch.argsort(places, stable=True)
    row_at_owner = torch.cat(halo.needed).cpu()
    halo.__dict__.pop("needed", None)
    sources = torch.cat([chosen, cover.rows[cover.summed]])[order]
    is_partial = order >= chosen.numel()
    entries = torch.stack([row_at_owner[sources], is_partial.long()], 1)
    lengths = torch.bincount(places, minlength=cover.owners.numel())
    count = partial(torch.bincount, minlength=plan.world_size)
    recv, owners = count(cover.owners), cover.owner_of_row[sources]
    sizes = torch.stack([recv, count(owners), count(owners[is_partial])], 1)
    ones = [1] * plan.world_size
    asked = ragged_all_to_all(sizes, ones, ones, group)
    splits = list(zip(sizes.t().tolist(), asked.t().tolist(), strict=True))
    lengths = ragged_all_to_all(lengths, *splits[0], group)
    entries = ragged_all_to_all(entries, *splits[1], group)
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    sizes_here = halo.num_owned, lengths.numel()
    bound = max(*sizes_here, len(entries))
    indptr, indices = narrow(indptr, bound), narrow(entries[:, 0], bound)
    sent = Adjacency.from_csc(indptr, indices, None, *sizes_here, check=False).to(device)
    send = splits[0][1]
    most = torch.tensor([cover.owners.numel(), max(send)])
    most_rows, longest = all_reduce(most, "max", group=group).tolist()
    partial_edges = None
    if len(cut) == 1:
        eids, _, _ = cut[0]
        partial_edges = eids[cover.summed[order[is_partial] - chosen.numel()]].to(device)
    return FewestRows(
        halo,
        ExchangePlan.of_made_rows(send, splits[0][0], most_rows, group),
        longest,
        sent,
        entries[:, 1].bool().to(device),
        partial_edges,
        splits[2],
        received,
        (num_read - num_sent, num_summed),
    )


def _received(
    cover: _Cover, edges: Sequence[Tensor], edges_in_cover: slice, ends: tuple[int, int]
) -> _Received:
    """The edges of a relation from what is received.

    Args:
        edges: Those between ranks: local ids, halo rows and destinations.
        edges_in_cover: Which of those of the cover they are.
        ends: The bounds of its destinations among those of the cover.
    """
    eids, halo_rows, dst = edges
    place_of_row, place_of_sum = cover.places
    by_row = cover.sends_row[cover.rows[edges_in_cover]]
    start, stop = ends
    is_here = (cover.ends_of_sums >= start) & (cover.ends_of_sums < stop) & cover.sends_sum
    return _Received(
        eids[by_row],
        place_of_row[halo_rows[by_row]],
        dst[by_row],
        place_of_sum[is_here],
        cover.ends_of_sums[is_here] - start,
    )


# -- fewest rows for attention ---------------------------------------------------------------------


@dataclass(eq=False)
class RowsAndStates:
    """What travels of a halo of one relation for attention: rows, and states of destinations.

    See [Note: fewest rows].

    Args:
        halo: All rows that the relation reads.
        rows: Who sends which rows to whom.
        states: Whose destinations each rank makes states of: it fetches what scores read of them,
            and returns the states.
        sources: Own rows that states are made of, ascending.
        edges: From these to the destinations of ``states``.
        partial_edges: Local ids of the edges that other ranks make states of, by rank; and how many
            each makes states of, and this one for each. `edges` come in the order of theirs.
        eids: Local ids of the edges that rows serve, ascending; with the places of the rows in what
            is received, and destinations.
        totals: Rows that are read, rows that are sent, and states, of all ranks together.
    """

    halo: Halo
    rows: ExchangePlan
    states: ExchangePlan
    sources: Tensor
    edges: Adjacency
    partial_edges: Tensor
    partial_splits: tuple[list[int], list[int]]
    eids: Tensor
    places: Tensor
    dst: Tensor
    totals: tuple[int, int, int]
    _keys: tuple[Tensor, Tensor] | None = None

    def keys_of_edges(self, keys: Tensor, partial_edges: Tensor) -> Tensor:
        """The keys of `edges`, of those of local edges; collective where these are new.

        Args:
            partial_edges: Where the keys of `partial_edges` are.
        """
        if self._keys is None or self._keys[0] is not keys:
            group = self.states.group
            given = keys.index_select(0, partial_edges)
            self._keys = keys, ragged_all_to_all(given, *self.partial_splits, group)
        return self._keys[1]

    @cached_property
    def halves(self) -> tuple[Shard, ...]:
        """The own shard, and the edges that rows of other ranks serve."""
        ((etype, edges),) = self.halo.edges.items()
        num_rows = self.rows.num_halo
        bound = max(num_rows, edges.num_dst)
        ends = narrow(self.places, bound), narrow(self.dst, bound)
        adjacency = _by_destination(*ends, num_rows, edges.num_dst)
        return self.halo.own_shard(etype), Shard(1, adjacency, lambda: self.eids)

    @cached_property
    def received(self) -> Adjacency:
        """From the states that come, in their order, to the destinations that they are of."""
        rows = self.states.send_index
        bound = max(rows.numel(), self.states.num_rows)
        numbers = torch.arange(rows.numel(), device=rows.device)
        ends = narrow(numbers, bound), narrow(rows, bound)
        return Adjacency(*ends, rows.numel(), self.states.num_rows, check=False)


def find_rows_and_states(halo: Halo) -> RowsAndStates | None:
    """What serves the cut edges of each pair of ranks with fewest rows and states. Collective.

    Returns:
        None on all ranks if that are hardly fewer than rows alone. See [Note: fewest rows].
    """
    plan, group, device = halo.plan, halo.plan.group, halo.plan.send_index.device
    ((_, edges),) = halo.edges.items()
    cover, ((eids, halo_rows, dst),) = _find_cover([edges], halo.needed, plan.rank)
    counts = halo.num_halo, int(cover.sends_row.sum()), int(cover.sends_sum.sum())
    num_read, num_rows, num_states = all_reduce(torch.tensor(counts), group=group).tolist()
    if not saves_rows(num_read, num_rows + num_states):
        return None
    needed = torch.cat(halo.needed).cpu()
    halo.__dict__.pop("needed", None)
    sent = cover.sends_row.split(plan.recv_splits)
    asked = [rows[s] for rows, s in zip(needed.split(plan.recv_splits), sent, strict=True)]
    rows_plan = ExchangePlan.build(asked, halo.num_owned, group=group, device=device)
    by_row = cover.sends_row[halo_rows]
    place_of_row = cover.sends_row.cumsum(0) - 1
    # The other edges go to the owners of their sources, in local order.
    summed = cover.summed
    owners = cover.owner_of_row[halo_rows[summed]]
    summed = summed[torch.argsort(owners, stable=True)]
    entries = torch.stack([needed[halo_rows[summed]], dst[summed]], 1)
    splits = torch.bincount(owners, minlength=plan.world_size).tolist()
    ones = [1] * plan.world_size
    splits_here = ragged_all_to_all(torch.tensor(splits), ones, ones, group).tolist()
    entries = ragged_all_to_all(entries, splits, splits_here, group)
    read, ends, first = [], [], 0
    for part in entries[:, 1].split(splits_here):
        rows, at = torch.unique(part, return_inverse=True)
        read.append(rows)
        ends.append(at + first)
        first += rows.numel()
    states_plan = ExchangePlan.build(read, edges.num_dst, group=group, device=device)
    sources, src = torch.unique(entries[:, 0], return_inverse=True)
    bound = max(sources.numel(), first, len(entries))
    served = narrow(src, bound), narrow(torch.cat(ends), bound)
    return RowsAndStates(
        halo,
        rows_plan,
        states_plan,
        narrow(sources, halo.num_owned).to(device),
        _by_destination(*served, sources.numel(), first).to(device),
        eids[summed].to(device),
        (splits, splits_here),
        narrow(eids[by_row], edges.num_edges).to(device),
        narrow(place_of_row[halo_rows[by_row]], rows_plan.num_halo).to(device),
        narrow(dst[by_row], edges.num_dst).to(device),
        (num_read, num_rows, num_states),
    )


# -- everything about one rank's part --------------------------------------------------------------


class ShardStructure:
    """Rows and edges of one rank, and the halos that its relations read.

    Creating one is collective: the ranks add up, once, how many edges each relation has and
    whether some node has none.

    Args:
        edges: Relation to this rank's in-edges under it, in schema order.
        num_src: Source node type to rows of this rank's source frame.
        num_dst: Destination node type to rows of this rank's destination frame.
        constants: Of a structure with the same rows: what is constant there is constant here.
    """

    def __init__(
        self,
        edges: Mapping[CanonicalEType, LocalEdges],
        num_src: Mapping[str, int],
        num_dst: Mapping[str, int],
        device: torch.device,
        group: dist.ProcessGroup | None,
        constants: ConstantCache | None = None,
    ) -> None:
        self.edges = dict(edges)
        self.num_src, self.num_dst = dict(num_src), dict(num_dst)
        self.device = device
        self._group = None if group is None else weakref.ref(group)
        self.constants = ConstantCache(constants)
        #: Structures with other self loops: what was done to which relation.
        self.changed: dict[tuple[str, CanonicalEType], ShardStructure] = {}
        self._halos: dict[frozenset[CanonicalEType], Halo] = {}
        self._numbers: dict[str, Tensor] = {}
        self._degrees: dict[tuple[str, CanonicalEType], Tensor] = {}
        counts = torch.tensor(
            [[e.num_edges, int((self.in_degrees(t) == 0).any())] for t, e in self.edges.items()],
            dtype=torch.int64,
        ).view(-1, 2)
        totals = all_reduce(counts, group=group)
        self._global_edges = dict(zip(self.edges, totals[:, 0].tolist(), strict=True))
        self._zero_in_degree = dict(zip(self.edges, (totals[:, 1] > 0).tolist(), strict=True))
        if len(self.edges) == 1:  # which relations of several are read together is known in use
            self.halo(self.edges)

    @property
    def canonical_etypes(self) -> list[CanonicalEType]:
        return list(self.edges)

    def global_num_edges(self, etype: CanonicalEType) -> int:
        """Edges of a relation on all ranks."""
        return self._global_edges[etype]

    def any_zero_in_degree(self, etype: CanonicalEType) -> bool:
        """Whether some destination, on any rank, has no in-edge."""
        return self._zero_in_degree[etype]

    def in_degrees(self, etype: CanonicalEType) -> Tensor:
        """``[num_dst]`` int64; all in-edges of a row are on its own rank."""
        return self._once("in", etype, self.edges[etype].in_degrees)

    def mean_counts(self, etype: CanonicalEType) -> Tensor:
        """What a sum is divided by for the mean: in-degrees, at least 1."""
        return self._once("mean", etype, lambda: self.in_degrees(etype).clamp(min=1))

    def out_degrees(self, etype: CanonicalEType) -> Tensor:
        """``[num_src]`` int64, counted on all ranks; collective on first use."""

        def count() -> Tensor:
            halo, edges = self.halo([etype]), self.edges[etype]
            ones = torch.ones(edges.num_dst, dtype=torch.int64, device=self.device)
            how = halo.num_owned, self.world_size, self.rank
            own, others = edges.sum_by_source(ones, *how)
            remote = torch.cat([sums for _, sums in others])
            return own + return_halo([(halo.plan, remote)], "sum")[0]

        return self._once("out", etype, count)

    def extended_out_degrees(self, etype: CanonicalEType, halo: Halo | None) -> Tensor:
        """Likewise of own rows and those of a halo of the relation's source type, if there is one.

        None: of all relations from it.
        """
        halo = self.union_halo(etype[0]) if halo is None else halo
        assert halo is not None
        plan = halo.plan

        def fetch() -> Tensor:
            own = self.out_degrees(etype)
            return torch.cat([own, fetch_halo([(plan, own)])[0]])

        return self._once(f"extended {plan.serial}", etype, fetch)

    def is_symmetric(self, etype: CanonicalEType) -> bool:
        """Whether every edge has its reverse, as many times; collective on first use."""

        def find() -> Tensor:
            edges, num_rows = self.edges[etype], [0] * self.world_size
            num_rows[self.rank] = edges.num_dst
            counts = all_reduce(torch.tensor(num_rows), group=self.group)
            starts = counts.cumsum(0) - counts
            return all_reduce(hashed_without_reverses(edges, starts, self.rank), group=self.group)

        return etype[0] == etype[2] and not bool(self._once("symmetric", etype, find))

    def _once(self, what: str, etype: CanonicalEType, find: Callable[[], Tensor]) -> Tensor:
        key = what, etype
        if key not in self._degrees:
            self._degrees[key] = find()
        return self._degrees[key]

    def halo(self, etypes: Iterable[CanonicalEType]) -> Halo:
        """The remote rows that some relations read; all of one source type.

        Collective the first time it is asked for some set of relations.
        """
        key = frozenset(etypes)
        if key not in self._halos:
            chosen = {etype: self.edges[etype] for etype in self.edges if etype in key}
            (source_type,) = {source for source, _, _ in chosen}
            num_owned = self.num_src[source_type]
            needed = needed_rows(list(chosen.values()), self.rank, self.world_size)
            plan = ExchangePlan.build(needed, num_owned, group=self.group, device=self.device)
            if source_type in self._numbers:
                plan.number_rows(self._numbers[source_type])
            longest = torch.tensor([max(plan.send_splits, default=0)])
            longest = all_reduce(longest, "max", group=self.group)
            self._halos[key] = Halo(num_owned, chosen, plan, int(longest))
        return self._halos[key]

    def number_rows(self, numbers: Mapping[str, Tensor]) -> None:
        """Say by what source rows are rounded at random, see `ExchangePlan.number_rows`.

        Collective the first time.

        Args:
            numbers: Of the own rows of each type, in the whole graph.
        """
        if self._numbers:
            return
        self._numbers.update(numbers)
        for key, halo in self._halos.items():
            (source_type,) = {source for source, _, _ in key}
            if source_type in numbers:
                halo.plan.number_rows(numbers[source_type])

    def union_halo(self, source_type: str) -> Halo | None:
        """The remote rows that any relation reads of one source type."""
        etypes = [etype for etype in self.edges if etype[0] == source_type]
        return self.halo(etypes) if etypes else None

    def local_adjacency(self, etype: CanonicalEType) -> Adjacency:
        """From the extended rows of the relation's source type to own rows."""
        halo = self.union_halo(etype[0])
        assert halo is not None
        return halo.adjacency(etype)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the graph; None for the default group. Not kept past its end."""
        return None if self._group is None else self._group()

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    @cached_property
    def world_size(self) -> int:
        return dist.get_world_size(self.group) if dist.is_initialized() else 1


def hashed_without_reverses(edges: RelationEdges, starts: Tensor, rank: int) -> Tensor:
    """Hashes of a rank's in-edges, added up, less those of their reverses; int64 ``[1]``.

    Where the sum over all ranks is 0, every edge has its reverse, as many times.

    Args:
        starts: ``[world_size]``, the number of each rank's first node.
    """
    total = torch.zeros(1, dtype=torch.int64)
    for _, *ends in edges.pieces():
        for some in zip(*(column.cpu().split(_HASHED) for column in ends), strict=True):
            part, src, dst = (column.to(torch.int64) for column in some)
            first, second = starts[part] + src, starts[rank] + dst
            total += (_hashed(first, second) - _hashed(second, first)).sum()
    return total


def _hashed(first: Tensor, second: Tensor) -> Tensor:
    """int64 of each pair; its sums over different pairs hardly ever agree (SplitMix64's mix)."""
    word = first * -0x61C8864680B583EB + second * 0x2545F4914F6CDD1D
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        word = (word ^ (word >> shift)) * factor
    return word ^ (word >> 31)


def agree_on_build(
    build: str | None, error: Exception | None, group: dist.ProcessGroup | None
) -> None:
    """Check that all ranks have parts of one partition, in the round in which an error is shared.

    Args:
        build: Digest that names the partition of this rank's part; None if nothing says.
        error: What this rank has found wrong, if anything.

    Raises:
        ValueError: On every rank, if parts of different builds came together; or the error.
    """
    verify(
        group_state(group),
        "no build" if build is None else build,
        "the partition that parts are from, as its build names it,",
        error,
        "copy one partition's folder to every host and load it everywhere",
    )


@dataclass(frozen=True)
class OriginalIds:
    """What this rank's nodes and edges were called before the graph was partitioned.

    Args:
        nodes: Node type to int64 ``[num_src_nodes]``, one per row of the source frame.
        edges: Relation to int64 ``[num_edges]``, one per row of the edge frame.
    """

    nodes: Mapping[str, Tensor]
    edges: Mapping[CanonicalEType, Tensor]
    _keys: dict[CanonicalEType, Tensor] = field(default_factory=dict, init=False, repr=False)

    def keyed(self, etype: CanonicalEType, attention: Attention) -> Attention:
        """The attention, its dropout mask going by original edge ids.

        So the mask of an edge does not depend on the partition, if all ranks have one seed.
        """
        if attention.mask is None or attention.mask.keys is not None:
            return attention
        if etype not in self._keys:
            self._keys[etype] = edge_keys(self.edges[etype])
        return replace(attention, mask=replace(attention.mask, keys=self._keys[etype]))


# -- what is kept between calls --------------------------------------------------------------------


class _Entry:
    def __init__(self, tensors: Sequence[Tensor], result: Tensor) -> None:
        self.references = [weakref.ref(t) for t in tensors]
        self.versions = [t._version for t in tensors]
        self.result = result

    def holds_for(self, tensors: Sequence[Tensor]) -> bool:
        same = all(r() is t for r, t in zip(self.references, tensors, strict=True))
        return same and [t._version for t in tensors] == self.versions


class ConstantCache:
    """Maps (what was computed, from which marked tensors) to the result.

    See [Note: what is kept between calls].

    Args:
        like: A cache whose marked tensors are marked here as well, now and later.
    """

    def __init__(self, like: ConstantCache | None = None) -> None:
        self._marked: dict[int, weakref.ref[Tensor]] = {} if like is None else like._marked
        self._entries: dict[tuple[Hashable, tuple[int, ...]], _Entry] = {}

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors for constant, which change only in ways that torch counts."""
        for key in [key for key, marked in self._marked.items() if marked() is None]:
            del self._marked[key]
        self._marked.update({id(t): weakref.ref(t) for t in tensors})

    def is_constant(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a result of these tensors may be kept: all are marked, none needs a gradient."""
        return all(
            (ref := self._marked.get(id(t))) is not None
            and ref() is t
            and not t.requires_grad
            and not t.is_inference()
            for t in tensors
        )

    def get(self, what: Hashable, tensors: Sequence[Tensor]) -> Tensor | None:
        """The kept result, or None; ``tensors`` must be constant."""
        entry = self._entries.get((what, tuple(id(t) for t in tensors)))
        return entry.result if entry is not None and entry.holds_for(tensors) else None

    def put(self, what: Hashable, tensors: Sequence[Tensor], result: Tensor) -> None:
        """Keep ``result``, to which no other code may write, for as long as ``tensors`` live."""
        if result.requires_grad or result.is_inference():
            return
        key = (what, tuple(id(t) for t in tensors))
        self._entries[key] = _Entry(tensors, result)
        entries = weakref.ref(self)

        def forget(_: Any) -> None:
            cache = entries()
            if cache is not None:
                cache._entries.pop(key, None)

        for tensor in tensors:
            weakref.finalize(tensor, forget, None).atexit = False

    def get_copy(self, what: Hashable, tensors: Sequence[Tensor]) -> Tensor | None:
        """As `get`, for callers who may write into what they get: a copy, made on the write."""
        result = self.get(what, tensors)
        return None if result is None else result._lazy_clone()

    def put_copy(self, what: Hashable, tensors: Sequence[Tensor], result: Tensor) -> None:
        """As `put`, of a result that others have as well."""
        # Not in a block of `graphshard.ops`, from which torch makes no copies on write.
        if not result.requires_grad:
            self.put(what, tensors, result.clone())

    def __len__(self) -> int:
        return len(self._entries)


# -- columns and heads -----------------------------------------------------------------------------

MAX_BLOCKS = 4
_SMALLEST_BLOCK = 1 << 20  # bytes of one message
_FEWEST_COLUMNS = 16


@dataclass(frozen=True)
class ColumnBlock:
    """One of ``count`` nearly equal runs of columns.

    Args:
        count: Of how many; 1 means all columns, whatever their shape.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def bounds(self, extent: int) -> tuple[int, int]:
        """(start, stop) of the block among ``extent`` columns."""
        return self.index * extent // self.count, (self.index + 1) * extent // self.count

    def of(self, tensor: Tensor, axis: int | None = 1) -> Tensor:
        """The block of a tensor, as a view.

        Args:
            axis: Which dimension holds the columns, counted from the right, 1 for the last; None
                for a tensor that is whole in every block.
        """
        if self.count == 1 or axis is None:
            return tensor
        start, stop = self.bounds(tensor.shape[-axis])
        return tensor.narrow(-axis, start, stop - start)


WHOLE = ColumnBlock()


def most_blocks(extent: int, row_numel: int) -> int:
    """Into how many blocks a row of ``row_numel`` numbers may be cut along ``extent`` columns."""
    return max(1, min(MAX_BLOCKS, extent, row_numel // _FEWEST_COLUMNS))


def column_blocks(longest_message: int, sources: Sequence[Tensor], most: int) -> list[ColumnBlock]:
    """How remote shards are taken whose sources are fetched together; the same on every rank."""
    row_bytes = sum(math.prod(t.shape[1:]) * t.element_size() for t in sources)
    count = min(most, longest_message * row_bytes // _SMALLEST_BLOCK + 1)
    return [ColumnBlock(index, count) for index in range(count)]
