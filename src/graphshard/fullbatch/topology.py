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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm import ExchangePlan, all_reduce, fetch_halo, return_halo
from ..comm.collectives import verify
from ..comm.group import group_state
from ..ops import Adjacency, Attention, edge_keys

# -- edges by the owner of their source ------------------------------------------------------------

_INT32_MAX = 2**31 - 1
_NEARLY_ALL = 0.9


@dataclass(frozen=True)
class LocalEdges:
    """In-edges of this rank's destination rows under one relation, by local edge id.

    Args:
        src_part: ``[num_edges]`` integers, owner of each source.
        src: ``[num_edges]`` integers, the source's row in its owner's source frame.
        dst: ``[num_edges]`` integers, destination row on this rank.
        num_dst: Destination rows on this rank.
    """

    src_part: Tensor
    src: Tensor
    dst: Tensor
    num_dst: int

    @property
    def num_edges(self) -> int:
        return self.src.numel()


@dataclass(frozen=True)
class Shard:
    """The edges whose sources one rank owns, or all ranks but this one.

    Args:
        step: 0 for this rank's own rows, else the step of a pass that brings them: the pairwise
            one, where the owner is ``(rank - step) % world_size``; or 1 for all remote rows.
        adjacency: From the sources' rows, as they arrive, to this rank's destinations.
        find_eids: Finds `eids`; None where the shard has all local edges in order.
    """

    step: int
    adjacency: Adjacency
    find_eids: Callable[[], Tensor] | None

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
        """The rows of ``values``, one per local edge, that belong to this shard."""
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
        self._shards: dict[CanonicalEType, tuple[Shard, ...]] = {}
        self._halves: dict[CanonicalEType, tuple[Shard, ...]] = {}

    @property
    def num_halo(self) -> int:
        return self.plan.num_halo

    @property
    def num_extended(self) -> int:
        return self.num_owned + self.plan.num_halo

    @cached_property
    def _needed(self) -> list[Tensor]:
        return needed_rows(list(self.edges.values()), self.plan.rank, self.plan.world_size)

    def extended_src(self, etype: CanonicalEType) -> Tensor:
        """``[num_edges]`` extended row of each local edge's source."""
        if etype not in self._extended:
            edges = self.edges[etype]
            rows = edges.src.clone() if self.num_extended <= _INT32_MAX else edges.src.long()
            for part, needed in enumerate(self._needed):
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
            own = self._halves[etype][:1] if etype in self._halves else ()
            rank, world_size = self.plan.rank, self.plan.world_size
            self._shards[etype] = own + tuple(
                self._make_shard(etype, step, [(rank - step) % world_size])
                for step in range(len(own), world_size)
            )
            self._forget_needed()
        return self._shards[etype]

    def halves(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """The own shard, and one of all remote rows in halo order where there are other ranks."""
        if self.plan.world_size <= 2:
            return self.shards(etype)
        if etype not in self._halves:
            rank, world_size = self.plan.rank, self.plan.world_size
            owners = [owner for owner in range(world_size) if owner != rank]
            shards = self._shards.get(etype)
            own = shards[0] if shards is not None else self._make_shard(etype, 0, [rank])
            self._halves[etype] = own, self._make_shard(etype, 1, owners)
            self._forget_needed()
        return self._halves[etype]

    def _forget_needed(self) -> None:
        """Drop `_needed` once all relations have their shards; it can be computed again."""
        if len(self.edges) in (len(self._shards), len(self._halves)):
            self.__dict__.pop("_needed", None)

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
        src = edges.src[eids]
        num_src = self.num_owned
        if step:
            src, part = src.to(torch.int64), edges.src_part[eids]
            first = num_src = 0
            for owner in owners:
                needed, of_owner = self._needed[owner], part == owner
                position = torch.searchsorted(needed, src[of_owner].to(needed.dtype))
                src[of_owner] = position + first
                first = num_src = first + needed.numel()
        src = narrow(src, max(num_src, edges.num_dst))
        dst = edges.dst[eids].to(src.dtype)
        return Shard(step, _by_destination(src, dst, num_src, edges.num_dst), find_eids)


def _by_destination(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Adjacency:
    """These edges, without ``dst`` where it ascends and a pointer into ``src`` says as much."""
    adjacency = Adjacency(src, dst, num_src, num_dst)
    indptr, indices, eids = adjacency.csc()
    if eids is not None:
        return adjacency
    return Adjacency.from_csc(indptr, indices, None, num_src, num_dst, check=False)


def needed_rows(edges: Sequence[LocalEdges], rank: int, world_size: int) -> list[Tensor]:
    """Per owner, the distinct rows, ascending, that these edges read; none of ``rank``'s own."""
    empty = torch.empty(0, dtype=torch.int64, device=edges[0].src.device if edges else None)
    needed = []
    for part in range(world_size):
        rows = [e.src[e.src_part == part] for e in edges] if part != rank else []
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
        edges = self.edges[etype]
        count = partial(torch.bincount, edges.dst, minlength=edges.num_dst)
        return self._once("in", etype, count)

    def mean_counts(self, etype: CanonicalEType) -> Tensor:
        """What a sum is divided by for the mean: in-degrees, at least 1."""
        return self._once("mean", etype, lambda: self.in_degrees(etype).clamp(min=1))

    def out_degrees(self, etype: CanonicalEType) -> Tensor:
        """``[num_src]`` int64, counted on all ranks; collective on first use."""

        def count() -> Tensor:
            halo = self.halo([etype])
            counts = torch.bincount(halo.extended_src(etype), minlength=halo.num_extended)
            own, remote = counts[: halo.num_owned], counts[halo.num_owned :]
            return own + return_halo([(halo.plan, remote)], "sum")[0]

        return self._once("out", etype, count)

    def extended_out_degrees(self, etype: CanonicalEType) -> Tensor:
        """Likewise of the extended rows of the relation's source type."""

        def fetch() -> Tensor:
            own, halo = self.out_degrees(etype), self.union_halo(etype[0])
            assert halo is not None
            return torch.cat([own, fetch_halo([(halo.plan, own)])[0]])

        return self._once("extended", etype, fetch)

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
            longest = torch.tensor([max(plan.send_splits, default=0)])
            longest = all_reduce(longest, "max", group=self.group)
            self._halos[key] = Halo(num_owned, chosen, plan, int(longest))
        return self._halos[key]

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
