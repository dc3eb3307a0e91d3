# SPDX-License-Identifier: Apache-2.0
"""ColumnBlock: sources go through a shard some columns, or heads, at a time.

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
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

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
