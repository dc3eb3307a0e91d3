# SPDX-License-Identifier: Apache-2.0
"""Categories of nodes and edges, and sparse features: learnt rows beside the other features."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import Adjacency, gspmm

_WIDEST = 50
_SPARSE_WIDTH = 64


def table_width(count: int) -> int:
    """Columns of the rows that stand for one of ``count`` values, 0 (unknown) among them."""
    return min(_WIDEST, 1 + count // 2)


class SparseFeatures(NamedTuple):
    """Non-zeros of rows of features, side by side.

    Args:
        columns: ``[n, most]`` int32, counted from 1, and 0 behind a row's last.
        values: ``[n, most]``.
    """

    columns: Tensor
    values: Tensor

    def to(self, device: torch.device) -> SparseFeatures:
        """The same on a device."""
        return SparseFeatures(self.columns.to(device), self.values.to(device))


class _Entries:
    """Sparse features as edges from columns to rows; kept while the features stay the same.

    Finding them takes 8 bytes for each. A sum of the mask takes as many for each stored one, and
    indexing with it 16: malloc would keep smaller blocks on its heap from then on, with holes.
    """

    def __init__(self) -> None:
        self._of: list[weakref.ref[Tensor]] = []
        self._state: list[int] = []
        self._kept: tuple[Adjacency, Tensor] | None = None

    def __call__(self, rows: SparseFeatures, count: int) -> tuple[Adjacency, Tensor]:
        """Edges of all non-zeros in columns below ``count``, and their values ``[edges, 1]``."""
        columns, values = rows
        versions = [-1 if x.is_inference() else x._version for x in rows]
        state = [count, *versions]
        is_same = -1 not in versions and self._state == state
        is_same = is_same and all(of() is x for of, x in zip(self._of, rows, strict=True))
        if self._kept is None or not is_same:
            num_rows, most = columns.shape
            is_entry = (columns > 0) & (columns < count)
            (places,) = is_entry.flatten().nonzero(as_tuple=True)
            is_small = columns.numel() < 2**31
            begins = torch.arange(num_rows + 1, device=columns.device) * most
            indptr = torch.searchsorted(places, begins, out_int32=is_small)
            indices = columns.flatten()[places].to(indptr.dtype)
            edges = Adjacency.from_csc(indptr, indices, None, count, num_rows, check=False)
            self._kept = edges, values.flatten()[places].unsqueeze(1)
            self._of, self._state = [weakref.ref(x) for x in rows], state
        return self._kept


class CategoryTables(nn.Module):
    """A table for each column of categories, and one for sparse features; replicated like weights.

    A row of sparse features becomes what it is times a matrix, of which no other row is read.

    Args:
        counts: Node type, or name of a relation, to the number of values of each of its columns, 0
            (unknown) among them.
        sparse_counts: Node type to the number of columns of its sparse features, plus 1.
    """

    def __init__(
        self, counts: Mapping[str, Sequence[int]], sparse_counts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        sparse_counts = sparse_counts or {}
        self._types = tuple(counts)
        # Lists, because node types may have names that an attribute cannot have.
        self.tables = nn.ModuleList(
            nn.ModuleList(nn.Embedding(count, table_width(count)) for count in of_type)
            for of_type in counts.values()
        )
        for table in self.modules():
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=1 / math.sqrt(table.embedding_dim))
        self._sparse_types = tuple(sparse_counts)
        self.matrices = nn.ModuleList(
            nn.Embedding(count, _SPARSE_WIDTH) for count in sparse_counts.values()
        )
        self._entries = [_Entries() for _ in self._sparse_types]
        for matrix in self.matrices:
            assert isinstance(matrix, nn.Embedding)
            # Small, as of a wide layer: columns that no training row reaches then say little.
            nn.init.xavier_uniform_(matrix.weight)

    @staticmethod
    def widths(
        counts: Mapping[str, Sequence[int]], sparse_counts: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Node type to the columns that its tables add."""
        widths = {ntype: sum(map(table_width, of_type)) for ntype, of_type in counts.items()}
        for ntype in sparse_counts or ():
            widths[ntype] = widths.get(ntype, 0) + _SPARSE_WIDTH
        return widths

    def forward(
        self,
        features: Mapping[str, Tensor],
        categories: Mapping[str, Tensor],
        sparse: Mapping[str, SparseFeatures] | None = None,
    ) -> dict[str, Tensor]:
        """Features with the rows of the categories beside them.

        A number that is above those seen when the tables were made counts as unknown.

        Args:
            features: Node type to ``[n, width]``; may lack types.
            categories: Node type to ``[n, k]`` int64, for each type that has tables.
            sparse: Node type to its sparse features, for each type that has them.
        """
        joined = dict(features)
        for name in self._types:
            rows = [features[name]] if name in features else []
            joined[name] = torch.cat([*rows, self.rows_of(name, categories[name])], dim=1)
        of_types = zip(self._sparse_types, self.matrices, self._entries, strict=True)
        for ntype, matrix, entries in of_types:
            assert isinstance(matrix, nn.Embedding)
            assert sparse is not None
            edges, values = entries(sparse[ntype], matrix.num_embeddings)
            product = gspmm(edges, "mul", "sum", matrix.weight, values)
            joined[ntype] = torch.cat([joined[ntype], product], 1) if ntype in joined else product
        return joined

    def rows_of(self, name: str, numbers: Tensor) -> Tensor:
        """``[n, width]``: of one type the learnt rows of all columns ``[n, k]``, side by side."""
        tables = self.tables[self._types.index(name)].children()
        rows = []
        for column, table in zip(numbers.unbind(1), tables, strict=True):
            assert isinstance(table, nn.Embedding)
            known = (column > 0) & (column < table.num_embeddings)
            rows.append(table(torch.where(known, column, 0)))
        return torch.cat(rows, dim=1)
