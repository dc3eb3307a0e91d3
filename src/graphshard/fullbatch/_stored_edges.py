# SPDX-License-Identifier: Apache-2.0
"""StoredEdges: edges of a part that stay in its file, and what is computed of them in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..ops.sampling import SourcePiece
from .topology import LocalEdges, RelationEdges

_PIECE = 1 << 20


@dataclass(frozen=True, eq=False)
class SourceColumn:
    """Where a file has the sources of all edges of a part.

    Args:
        digest: That the file carries.
        dtype: Of the sources there.
    """

    path: Path
    digest: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class LocalNodes:
    """Who the nodes are that edges of a part name by local numbers: its own first.

    Args:
        owner: int16 or int32 ``[num_local]``, the part that owns each.
        row: int32 or int64 ``[num_local]``, its row there, among those of its type.
        num_inner: How many are the part's own.
        halo_ids: int32 or int64, global ids, in their types, of the others.
        column: The file that edges are in.
    """

    owner: Tensor
    row: Tensor
    num_inner: int
    halo_ids: Tensor
    column: SourceColumn


class StoredEdges(LocalEdges):
    """In-edges of a rank's nodes under one relation, as the file of its part has them.

    The columns of `LocalEdges` are made when they are first asked for, and kept. What a sampled run
    asks for takes no memory per edge: sources are read where they are mapped.

    Args:
        indptr: ``[num_dst + 1]`` int32 or int64, where the in-edges of each row begin.
        sources: ``[num_edges]`` int32 or int64, local numbers, mapped: not to be written to.
        nodes: What these numbers mean.
        first: The number of the first own row of the source type.
        first_edge: How many edges of other relations the file has before these.
    """

    def __init__(
        self, indptr: Tensor, sources: Tensor, nodes: LocalNodes, first: int, first_edge: int
    ) -> None:
        self.indptr, self.sources, self.nodes = indptr, sources, nodes
        self.first, self.first_edge = first, first_edge
        self.num_dst = indptr.numel() - 1
        self._columns: dict[str, Tensor] = {}

    @property
    def num_edges(self) -> int:
        return self.sources.numel()

    @property
    def device(self) -> torch.device:
        return self.sources.device

    @property
    def by_destination(self) -> bool:
        return True

    def _column(self, name: str) -> Tensor:
        if name not in self._columns:
            self._columns[name] = self.made_column(name)
        return self._columns[name]

    def made_column(self, name: str) -> Tensor:
        """A column of `LocalEdges`, which is not kept."""
        table = self.nodes.owner if name == "src_part" else self.nodes.row
        if name != "dst":
            return table.index_select(0, self.sources)
        rows = torch.arange(self.num_dst, dtype=table.dtype)
        return rows.repeat_interleave(self.indptr.diff(), output_size=self.num_edges)

    @property
    def src_part(self) -> Tensor:
        return self._column("src_part")

    @property
    def src(self) -> Tensor:
        return self._column("src")

    @property
    def dst(self) -> Tensor:
        return self._column("dst")

    def numbers(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some edges after others: which, the local numbers of their sources, int64 rows."""
        for start in range(0, self.num_edges, _PIECE):
            stop = min(start + _PIECE, self.num_edges)
            # The rows whose edges are here, the first and the last perhaps in part.
            ends = torch.tensor([start, stop - 1], dtype=self.indptr.dtype)
            low, high = (torch.searchsorted(self.indptr, ends, right=True) - 1).tolist()
            bounds = self.indptr[low : high + 2].clamp(start, stop).to(torch.int64)
            rows = torch.arange(low, high + 1).repeat_interleave(
                bounds.diff(), output_size=stop - start
            )
            yield slice(start, stop), self.sources[start:stop], rows

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        for some, numbers, rows in self.numbers():
            owner, row = self.nodes.owner, self.nodes.row
            yield some, owner.index_select(0, numbers), row.index_select(0, numbers), rows

    def in_degrees(self) -> Tensor:
        return self.indptr.diff().to(torch.int64)

    def num_cut(self, rank: int) -> int:
        inner = self.nodes.num_inner
        return sum(int((numbers >= inner).sum()) for _, numbers, _ in self.numbers())

    @cached_property
    def _reads(self) -> Tensor:
        """bool, of each node of others, whether an edge begins there."""
        is_read = torch.zeros(self.nodes.row.numel(), dtype=torch.bool)
        for start in range(0, self.num_edges, _PIECE):
            is_read[self.sources[start : start + _PIECE].to(torch.int64)] = True
        return is_read[self.nodes.num_inner :]

    def rows_read(self, part: int) -> Tensor:
        halo = slice(self.nodes.num_inner, None)
        return self.nodes.row[halo][self._reads & (self.nodes.owner[halo] == part)]

    def sum_by_source(
        self, values: Tensor, num_src: int, num_parts: int, rank: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        total = values.new_zeros(self.nodes.row.numel())
        for _, numbers, rows in self.numbers():
            total.index_add_(0, numbers, values.index_select(0, rows))
        inner = self.nodes.num_inner
        others: list[tuple[Tensor, Tensor]] = []
        for part in range(num_parts):
            chosen = (self._reads & (self.nodes.owner[inner:] == part)).nonzero().view(-1) + inner
            rows, order = torch.sort(self.nodes.row[chosen].to(torch.int64))
            others.append((rows, total[chosen[order]]))
        return total[self.first : self.first + num_src], others

    def piece(self, first_id: int) -> SourcePiece:
        """The sources, and what gives global ids of them.

        Args:
            first_id: That of the first own row of the source type.
        """
        nodes = self.nodes
        return SourcePiece(self.sources, nodes.num_inner, first_id - self.first, nodes.halo_ids)


class ExtendedEdges(StoredEdges):
    """Edges that stay in a file, and further ones behind them that are in memory.

    Args:
        base: Those in a file.
        added: Into the same rows.
    """

    def __init__(self, base: StoredEdges, added: RelationEdges) -> None:
        self.base, self.added = base, added
        super().__init__(base.indptr, base.sources, base.nodes, base.first, base.first_edge)

    @property
    def num_edges(self) -> int:
        return self.base.num_edges + self.added.num_edges

    @property
    def by_destination(self) -> bool:
        return not self.added.num_edges

    def made_column(self, name: str) -> Tensor:
        column = self.base.made_column(name)
        return torch.cat([column, getattr(self.added, name).to(column.dtype)])

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        yield from self.base.pieces()
        for some, *columns in self.added.pieces():
            first = self.base.num_edges
            yield slice(first + some.start, first + some.stop), columns[0], columns[1], columns[2]

    def in_degrees(self) -> Tensor:
        return self.base.in_degrees() + torch.bincount(self.added.dst, minlength=self.num_dst)

    def num_cut(self, rank: int) -> int:
        return self.base.num_cut(rank) + self.added.num_cut(rank)

    def rows_read(self, part: int) -> Tensor:
        rows = self.base.rows_read(part)
        return torch.cat([rows, self.added.rows_read(part).to(rows.dtype)])

    def sum_by_source(
        self, values: Tensor, num_src: int, num_parts: int, rank: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        given = values, num_src, num_parts, rank
        (own, others), (more, further) = (e.sum_by_source(*given) for e in (self.base, self.added))
        both = []
        for (rows, sums), (rows_added, sums_added) in zip(others, further, strict=True):
            distinct, at = torch.unique(torch.cat([rows, rows_added]), return_inverse=True)
            total = sums.new_zeros(distinct.numel())
            both.append((distinct, total.index_add_(0, at, torch.cat([sums, sums_added]))))
        return own + more, both

    def lists(self, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All of them grouped by destination, ids ascending: pointers, ids of sources, edge ids.

        Args:
            starts: First global id of the source type of each part, of the dtype that all have.
        """
        base, added, dtype = self.base, self.added, starts.dtype
        order = torch.argsort(added.dst, stable=True)
        before = torch.zeros(self.num_dst + 1, dtype=dtype)
        counts = torch.bincount(added.dst, minlength=self.num_dst)
        torch.cumsum(counts, 0, dtype=dtype, out=before[1:])
        sources, eids = (torch.empty(self.num_edges, dtype=dtype) for _ in range(2))
        places = base.indptr[added.dst[order].long() + 1].long() + torch.arange(added.num_edges)
        ids = starts[added.src_part.long()] + added.src
        sources[places], eids[places] = ids.to(dtype)[order], (order + base.num_edges).to(dtype)
        for some, src_part, src, rows in base.pieces():
            own = torch.arange(some.start, some.stop)
            places = own + before[rows]
            sources[places] = (starts[src_part.long()] + src).to(dtype)
            eids[places] = own.to(dtype)
        return base.indptr.to(dtype) + before, sources, eids
