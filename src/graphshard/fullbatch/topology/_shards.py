# SPDX-License-Identifier: Apache-2.0
"""The structure of one rank's part: whose rows it reads, and the edges that read them.

[Note: extended rows]
    The sources of a relation are numbered on each rank as *extended rows*: first the
    ``num_owned`` rows of the rank's own source frame, then the ``num_halo`` rows that it reads
    from other ranks, grouped by owner in rank order and de-duplicated. One-shot aggregation
    works on extended rows as they are, or on own and halo rows one after the other; sequential
    aggregation takes them one owner at a time.

Row numbers are kept as int32 wherever they fit: structure, not features, then costs half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...comm import ExchangePlan
from ...ops import Adjacency

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


class Halo:
    """Rows of one source type that this rank reads from others, for some relations.

    Building one is collective: every rank must build it for the same relations.

    Args:
        num_owned: Rows of this rank's own source frame.
        edges: Relation to its local edges; all with the same source type.
        plan: Who sends which rows to whom, in source-frame rows.
        longest_message: Most rows that any rank sends to any other; the same on all ranks.
    """

    def __init__(
        self,
        num_owned: int,
        edges: Mapping[CanonicalEType, LocalEdges],
        plan: ExchangePlan,
        longest_message: int,
    ) -> None:
        self.num_owned = num_owned
        self.plan = plan
        self.longest_message = longest_message
        self._edges = dict(edges)
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
        return needed_rows(list(self._edges.values()), self.plan.rank, self.plan.world_size)

    def extended_src(self, etype: CanonicalEType) -> Tensor:
        """``[num_edges]`` extended row of each local edge's source."""
        if etype not in self._extended:
            edges = self._edges[etype]
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
            edges = self._edges[etype]
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
            known = self._shards.get(etype)
            own = known[0] if known is not None else self._make_shard(etype, 0, [rank])
            self._halves[etype] = own, self._make_shard(etype, 1, owners)
            self._forget_needed()
        return self._halves[etype]

    def _forget_needed(self) -> None:
        """Once all relations have what they are used in; found again where it is needed again."""
        if len(self._edges) in (len(self._shards), len(self._halves)):
            self.__dict__.pop("_needed", None)

    def _make_shard(self, etype: CanonicalEType, step: int, owners: Sequence[int]) -> Shard:
        if self.plan.world_size == 1:
            return Shard(0, self.adjacency(etype), None)
        edges, rank = self._edges[etype], self.plan.rank

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
    needed = []
    for part in range(world_size):
        rows = [e.src[e.src_part == part] for e in edges] if part != rank else []
        device = edges[0].src.device if edges else None
        empty = torch.empty(0, dtype=torch.int64, device=device)
        needed.append(torch.unique(torch.cat([empty, *rows])) if rows else empty)
    return needed


def narrow(rows: Tensor, bound: int) -> Tensor:
    """``rows``, all below ``bound``, as int32 if that can hold them."""
    return rows.to(torch.int32) if bound <= _INT32_MAX else rows
