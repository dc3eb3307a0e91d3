# SPDX-License-Identifier: Apache-2.0
"""ColumnBlock: taking wide rows a few columns at a time.

[Note: column blocks]
    While a shard is worked on, its rows, those of the next shard, what is being sent to other
    ranks and the shard's partial result are all alive: four or five times the rows of a part,
    which a single process does not need. A sum of copied rows treats every column alike, so
    it can go through a shard block by block; what is alive then is a quarter of that. More
    messages of fewer bytes are sent, the same number of bytes in all.
"""

from __future__ import annotations

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
        index: Which one.
        count: Of how many; 1 means all columns, whatever their shape.
    """

    index: int = 0
    count: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        """The block of a tensor, as a view."""
        if self.count == 1:
            return tensor
        width = tensor.shape[1]
        return tensor[:, self.index * width // self.count : (self.index + 1) * width // self.count]


WHOLE = ColumnBlock()


def column_blocks(longest_message: int, sources: Sequence[Tensor]) -> list[ColumnBlock]:
    """How remote shards are taken; the same on every rank.

    Args:
        longest_message: Most rows that any rank sends to any other.
        sources: Whole source tensors, all fetched together, at least one.
    """
    row_bytes = sum(t.shape[1] * t.element_size() for t in sources)
    narrowest = min(t.shape[1] for t in sources)
    count = longest_message * row_bytes // _SMALLEST_BLOCK + 1
    count = max(1, min(MAX_BLOCKS, count, narrowest // _FEWEST_COLUMNS))
    return [ColumnBlock(index, count) for index in range(count)]
