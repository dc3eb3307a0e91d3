# SPDX-License-Identifier: Apache-2.0
"""Categories of nodes: tables of learnt rows, beside the features in front of the first layer."""

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
        counts: Node type to the number of values of each of its columns, 0 (unknown) among them.
    """

    def __init__(self, counts: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._node_types = tuple(counts)
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
        for ntype, tables in zip(self._node_types, self.tables, strict=True):
            assert isinstance(tables, nn.ModuleList)
            numbers = categories[ntype]
            rows = [features[ntype]] if ntype in features else []
            for column, table in enumerate(tables):
                assert isinstance(table, nn.Embedding)
                of_column = numbers[:, column]
                known = (of_column > 0) & (of_column < table.num_embeddings)
                rows.append(table(torch.where(known, of_column, 0)))
            joined[ntype] = torch.cat(rows, dim=1)
        return joined
