# SPDX-License-Identifier: Apache-2.0
"""ShardStructure: who reads which rows, by shards and halos.

[Note: extended rows]
    The sources of a relation are numbered on each rank as *extended rows*: first the
    ``num_owned`` rows of the rank's own source frame, then the ``num_halo`` rows that it reads
    from other ranks, grouped by owner in rank order and de-duplicated. One-shot aggregation
    works on extended rows as they are, or on own and halo rows one after the other; sequential
    aggregation takes them one owner at a time.

Row numbers are kept as int32 wherever they fit: structure, not features, then costs half.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm import ExchangePlan, fetch_halo, return_halo
from ..comm.collectives import all_reduce_alike, verify
from ..comm.group import group_state
from ..ops import Adjacency, Attention, edge_keys
from .constant_cache import ConstantCache

T = TypeVar("T")

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
        self._made: dict[Callable[[Halo], object], object] = {}

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
            self._forget_needed_after_shards()
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
            self._forget_needed_after_shards()
        return self._halves[etype]

    def forget_needed(self) -> None:
        """Free `needed`, which is computed again when it is read."""
        self.__dict__.pop("needed", None)

    def _forget_needed_after_shards(self) -> None:
        if len(self.edges) in (len(self._shards), len(self._halves)):
            self.forget_needed()

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
            src, num_src = remote_sources(edges, eids, owners, self.needed)
        src = narrow(src, max(num_src, edges.num_dst))
        dst = edges.dst[eids].to(src.dtype)
        return Shard(step, sorted_adjacency(src, dst, num_src, edges.num_dst), find_eids)

    def made_once(self, find: Callable[[Halo], T]) -> T:
        """What ``find`` makes of this halo, which is kept; collective the first time if it is."""
        if find not in self._made:
            self._made[find] = find(self)
        return cast(T, self._made[find])


def sorted_adjacency(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Adjacency:
    """These edges, without ``dst`` where it ascends and a pointer into ``src`` says as much."""
    adjacency = Adjacency(src, dst, num_src, num_dst)
    indptr, indices, eids = adjacency.csc()
    if eids is not None:
        return adjacency
    return Adjacency.from_csc(indptr, indices, None, num_src, num_dst, check=False)


def remote_sources(
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
        totals = all_reduce_alike(counts, group=group)
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
            counts = all_reduce_alike(torch.tensor(num_rows), group=self.group)
            starts = counts.cumsum(0) - counts
            return all_reduce_alike(
                hashed_without_reverses(edges, starts, self.rank), group=self.group
            )

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
            longest = all_reduce_alike(longest, "max", group=self.group)
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
