# SPDX-License-Identifier: Apache-2.0
"""Categories of nodes and edges: tables of learnt rows, beside their features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

_WIDEST = 50


def table_width(count: int) -> int:
    """Columns of the rows that stand for one of ``count`` values, 0 (unknown) among them."""
    return min(_WIDEST, 1 + count // 2)


class CategoryTables(nn.Module):
    """A table for each column of categories, replicated like all weights.

    Args:
        counts: Node type, or name of a relation, to the number of values of each of its columns, 0
            (unknown) among them.
    """

    def __init__(self, counts: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._types = tuple(counts)
        # Lists, because node types may have names that an attribute cannot have.
        self.tables = nn.ModuleList(
            nn.ModuleList(nn.Embedding(count, table_width(count)) for count in of_type)
            for of_type in counts.values()
        )
        for table in self.modules():
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=1 / math.sqrt(table.embedding_dim))

    @staticmethod
    def widths(counts: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Node type to the columns that its tables add."""
        return {ntype: sum(map(table_width, of_type)) for ntype, of_type in counts.items()}

    def forward(
        self, features: Mapping[str, Tensor], categories: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Features with the rows of the categories beside them.

        A number that is above those seen when the tables were made counts as unknown.

        Args:
            features: Node type to ``[n, width]``; may lack types.
            categories: Node type to ``[n, k]`` int64, for each type that has tables.
        """
        joined = dict(features)
        for name in self._types:
            rows = [features[name]] if name in features else []
            joined[name] = torch.cat([*rows, self.rows_of(name, categories[name])], dim=1)
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
