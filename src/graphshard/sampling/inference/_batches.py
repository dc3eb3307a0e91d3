# SPDX-License-Identifier: Apache-2.0
"""Cuts of a graph's destinations into batches, each with all of its in-edges.

A batch is what message passing over a bounded number of destinations needs: the edges into them,
and a way to get the source rows that those edges read. On a graph that is whole in this process
the source rows are there already; on a sharded one the batch's remote rows are fetched, so every
rank must go through the batches of a relation in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...comm import ExchangePlan, all_reduce, fetch_halo
from ...fullbatch.topology import ShardStructure, narrow
from ...ops import Adjacency


@dataclass(frozen=True, eq=False)
class Batch:
    """Some destinations of one relation, and the edges into them.

    Args:
        etype: The relation.
        index: Which batch.
        start: First destination row.
        stop: One past the last.
        indptr: ``[num_dst + 1]`` where the edges of each destination begin.
        src: ``[num_edges]`` place of each edge's source among the rows that ``source_rows`` gives.
        num_src: Number of those rows.
        eids: Ids of the edges in the graph, ``[num_edges]``; or the range that they are.
        source_rows: From a column of the source frame to the rows that the batch reads.
    """

    etype: CanonicalEType
    index: int
    start: int
    stop: int
    indptr: Tensor
    src: Tensor
    num_src: int
    eids: Tensor | slice
    source_rows: Callable[[Tensor], Tensor]

    def adjacency(self) -> Adjacency:
        """The edges by place, made anew: batches are kept, and formats that are derived are not."""
        num_dst = self.stop - self.start
        return Adjacency.from_csc(self.indptr, self.src, None, self.num_src, num_dst, check=False)

    def edge_rows(self, values: Tensor) -> Tensor:
        """The rows of a column of the edge frame that belong to the batch's edges."""
        if isinstance(self.eids, slice):
            return values[self.eids]
        return values.index_select(0, self.eids)

    def edge_ids(self) -> Tensor:
        """Ids of the edges in the graph."""
        if isinstance(self.eids, Tensor):
            return self.eids
        src = self.src
        return torch.arange(self.eids.start, self.eids.stop, dtype=src.dtype, device=src.device)


class LocalCut:
    """Cuts a graph that is whole in this process.

    Args:
        relations: Its edges.
        batch_size: Destinations in a batch.
    """

    def __init__(self, relations: Mapping[CanonicalEType, Adjacency], batch_size: int) -> None:
        self._relations, self._batch_size = dict(relations), batch_size

    def num_batches(self, etype: CanonicalEType) -> int:
        """At least 1, and the same for all relations into one node type."""
        return max(1, -(-self._relations[etype].num_dst // self._batch_size))

    def batch(self, etype: CanonicalEType, index: int) -> Batch:
        adj = self._relations[etype]
        start = index * self._batch_size
        stop = min(start + self._batch_size, adj.num_dst)
        indptr, src, order = adj.csc()
        pointer, eids = _edges_into(indptr, order, start, stop)
        first, last = int(indptr[start]), int(indptr[stop])
        return Batch(
            etype, index, start, stop, pointer, src[first:last], adj.num_src, eids, _as_it_is
        )


class ShardCut:
    """Cuts this rank's destinations of a sharded graph; making one is collective.

    Which rows a batch reads of other ranks is planned once, when the batch is first used.

    Args:
        structure: Rows and edges of this rank.
        batch_size: Destinations in a batch.
    """

    def __init__(self, structure: ShardStructure, batch_size: int) -> None:
        self._structure, self._batch_size = structure, batch_size
        self._by_destination: dict[CanonicalEType, tuple[Tensor, Tensor | None]] = {}
        self._kept: dict[tuple[CanonicalEType, int], Batch] = {}
        counts = [max(1, -(-count // batch_size)) for count in structure.num_dst.values()]
        most = all_reduce(torch.tensor(counts, dtype=torch.int64), "max", group=structure.group)
        self._counts = dict(zip(structure.num_dst, most.tolist(), strict=True))

    def num_batches(self, etype: CanonicalEType) -> int:
        """At least 1, and the same on all ranks and for all relations into one node type."""
        return int(self._counts[etype[2]])

    def batch(self, etype: CanonicalEType, index: int) -> Batch:
        """One batch of a relation; collective the first time."""
        if (etype, index) not in self._kept:
            self._kept[etype, index] = self._make(etype, index)
        return self._kept[etype, index]

    def _make(self, etype: CanonicalEType, index: int) -> Batch:
        structure, edges = self._structure, self._structure.edges[etype]
        if etype not in self._by_destination:
            ends = Adjacency(torch.zeros_like(edges.dst), edges.dst, 1, edges.num_dst, check=False)
            indptr, _, order = ends.csc()
            self._by_destination[etype] = indptr, None if order is None else order.to(torch.int64)
        start = min(index * self._batch_size, edges.num_dst)
        stop = min(start + self._batch_size, edges.num_dst)
        pointer, eids = _edges_into(*self._by_destination[etype], start, stop)
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
        source_rows = partial(_own_and_remote, own, plan)
        return Batch(
            etype, index, start, stop, pointer.to(src.dtype), src, total, eids, source_rows
        )


Cut: TypeAlias = LocalCut | ShardCut


def _edges_into(
    indptr: Tensor, order: Tensor | None, start: int, stop: int
) -> tuple[Tensor, Tensor | slice]:
    """Where the edges of each of some destinations begin among theirs, and ids of the edges.

    ``indptr`` and ``order`` are those of `Adjacency.csc`, of all destinations.
    """
    first, last = int(indptr[start]), int(indptr[stop])
    eids = slice(first, last) if order is None else order[first:last]
    return indptr[start : stop + 1] - first, eids


def _as_it_is(column: Tensor) -> Tensor:
    return column


def _own_and_remote(own: Tensor, plan: ExchangePlan, column: Tensor) -> Tensor:
    """The own rows of a column that a batch reads, then the remote ones; collective."""
    return torch.cat([column.index_select(0, own), *fetch_halo([(plan, column)])])
