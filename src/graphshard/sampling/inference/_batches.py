# SPDX-License-Identifier: Apache-2.0
"""Cuts of a graph's destinations into batches, each with all of its in-edges.

A batch is what message passing over a bounded number of destinations needs: the edges into them,
and a way to get the source rows that those edges read. On a graph that is whole in this process
the source rows are there already; on a sharded one the batch's remote rows are fetched, so every
rank must go through the batches of a relation in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm import ExchangePlan, all_reduce, fetch_halo
from ...fullbatch.topology import LocalEdges, ShardStructure, narrow
from ...ops import Adjacency


@dataclass(frozen=True, eq=False)
class Batch:
    """Some destinations of one relation, and the edges into them.

    Args:
        etype: The relation.
        index: Which batch.
        start: First destination row.
        stop: One past the last.
        adjacency: From the rows that ``source_rows`` gives to destinations from 0; an edge's id
            is its place among the batch's edges.
        eids: Ids of the edges in the graph, ``[num_batch_edges]``; or the range that they are.
        source_rows: From a column of the source frame to the rows that the batch reads.
    """

    etype: CanonicalEType
    index: int
    start: int
    stop: int
    adjacency: Adjacency
    eids: Tensor | slice
    source_rows: Callable[[Tensor], Tensor]

    def edge_rows(self, values: Tensor) -> Tensor:
        """The rows of a column of the edge frame that belong to the batch's edges."""
        if isinstance(self.eids, slice):
            return values[self.eids]
        return values.index_select(0, self.eids)

    def edge_ids(self) -> Tensor:
        """Ids of the edges in the graph."""
        if isinstance(self.eids, Tensor):
            return self.eids
        adj = self.adjacency
        return torch.arange(self.eids.start, self.eids.stop, dtype=adj.idtype, device=adj.device)


class Cut(Protocol):
    """A way to cut a graph into batches."""

    def num_batches(self, etype: CanonicalEType) -> int:
        """At least 1, and the same on all ranks and for all relations into one node type."""

    def batch(self, etype: CanonicalEType, index: int) -> Batch:
        """One batch of a relation; on a sharded graph collective the first time."""


def batches(cut: Cut, etype: CanonicalEType) -> Iterator[Batch]:
    """All batches of a relation, in order."""
    return (cut.batch(etype, index) for index in range(cut.num_batches(etype)))


class LocalCut:
    """Cuts a graph that is whole in this process.

    Args:
        relations: Its edges.
        batch_size: Destinations in a batch.
    """

    def __init__(self, relations: Mapping[CanonicalEType, Adjacency], batch_size: int) -> None:
        self._relations = dict(relations)
        self.batch_size = batch_size

    def num_batches(self, etype: CanonicalEType) -> int:
        return max(1, -(-self._relations[etype].num_dst // self.batch_size))

    def batch(self, etype: CanonicalEType, index: int) -> Batch:
        adj = self._relations[etype]
        start = index * self.batch_size
        stop = min(start + self.batch_size, adj.num_dst)
        indptr, src, eids = adj.csc()
        first, last = int(indptr[start]), int(indptr[stop])
        pointer = indptr[start : stop + 1] - first
        part = Adjacency.from_csc(
            pointer, src[first:last], None, adj.num_src, stop - start, check=False
        )
        ids = slice(first, last) if eids is None else eids[first:last]
        return Batch(etype, index, start, stop, part, ids, _as_it_is)


def _as_it_is(column: Tensor) -> Tensor:
    return column


@dataclass(frozen=True, eq=False)
class _ShardBatch:
    """What is kept of a batch of a sharded graph.

    Args:
        pointer: ``[num_dst + 1]`` where the edges of each destination begin.
        src: ``[num_edges]`` place of each edge's source among own and remote rows.
        own: Own source rows that the batch reads, ascending.
        plan: The remote ones, by owner.
    """

    pointer: Tensor
    src: Tensor
    own: Tensor
    plan: ExchangePlan

    @property
    def num_src(self) -> int:
        return self.own.numel() + self.plan.num_halo

    def source_rows(self, column: Tensor) -> Tensor:
        """Own rows, then remote ones; collective."""
        return torch.cat([column.index_select(0, self.own), *fetch_halo([(self.plan, column)])])


class ShardCut:
    """Cuts this rank's destinations of a sharded graph; making one is collective.

    Which rows a batch reads of other ranks is planned once, when the batch is first used.

    Args:
        structure: Rows and edges of this rank.
        batch_size: Destinations in a batch.
    """

    def __init__(self, structure: ShardStructure, batch_size: int) -> None:
        self._structure = structure
        self.batch_size = batch_size
        self._order: dict[CanonicalEType, tuple[Tensor, Tensor | None]] = {}
        self._kept: dict[tuple[CanonicalEType, int], _ShardBatch] = {}
        counts = [max(1, -(-count // batch_size)) for count in structure.num_dst.values()]
        most = all_reduce(torch.tensor(counts, dtype=torch.int64), "max", group=structure.group)
        self._counts = dict(zip(structure.num_dst, most.tolist(), strict=True))

    def num_batches(self, etype: CanonicalEType) -> int:
        return int(self._counts[etype[2]])

    def batch(self, etype: CanonicalEType, index: int) -> Batch:
        num_dst = self._structure.num_dst[etype[2]]
        start = min(index * self.batch_size, num_dst)
        stop = min(start + self.batch_size, num_dst)
        indptr, order = self._by_destination(etype)
        first, last = int(indptr[start]), int(indptr[stop])
        eids = slice(first, last) if order is None else order[first:last]
        kept = self._kept.get((etype, index))
        if kept is None:
            pointer = indptr[start : stop + 1] - first
            kept = self._make(self._structure.edges[etype], eids, pointer, etype)
            self._kept[etype, index] = kept
        part = Adjacency.from_csc(
            kept.pointer, kept.src, None, kept.num_src, stop - start, check=False
        )
        return Batch(etype, index, start, stop, part, eids, kept.source_rows)

    def _by_destination(self, etype: CanonicalEType) -> tuple[Tensor, Tensor | None]:
        """Where the edges of each destination begin, and edge ids by destination (None: as is)."""
        if etype not in self._order:
            dst = self._structure.edges[etype].dst
            order = None
            if bool((dst[1:] < dst[:-1]).any()):
                order = torch.sort(dst, stable=True).indices
            indptr = torch.zeros(
                self._structure.num_dst[etype[2]] + 1, dtype=torch.int64, device=dst.device
            )
            torch.cumsum(self._structure.in_degrees(etype), 0, out=indptr[1:])
            self._order[etype] = indptr, order
        return self._order[etype]

    def _make(
        self, edges: LocalEdges, eids: Tensor | slice, pointer: Tensor, etype: CanonicalEType
    ) -> _ShardBatch:
        structure = self._structure
        owner, rows = edges.src_part[eids], edges.src[eids]
        none = torch.empty(0, dtype=torch.int64, device=structure.device)
        places = torch.empty_like(rows, dtype=torch.int64)
        wanted = [none] * structure.world_size
        others = [part for part in range(structure.world_size) if part != structure.rank]
        total = 0
        for part in (structure.rank, *others):
            of_part = owner == part
            distinct, place = torch.unique(rows[of_part], return_inverse=True)
            places[of_part] = place + total
            wanted[part] = distinct.to(torch.int64)
            total += distinct.numel()
        own, wanted[structure.rank] = wanted[structure.rank], none
        plan = ExchangePlan.build(
            wanted, structure.num_src[etype[0]], group=structure.group, device=structure.device
        )
        src = narrow(places, total)
        return _ShardBatch(pointer.to(src.dtype), src, own, plan)
