# SPDX-License-Identifier: Apache-2.0
"""RowTasks: the edges of rows in pieces of bounded size, for kernels with a program per row.

Degrees are skewed: one program for a node of a million edges would run long after all others. So a
long row is cut into pieces. Each writes its own partial result, and a second kernel adds these up
in the order of edges; there are no atomics, and the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

MOST_EDGES = 256
"""Of one piece. A program waits for some rows at a time, one after the other: with 2048, those of a
hub ran longer than all other programs of a graph of 4 million edges together."""

AT_ONCE = 8
"""Of the partial results of a row, how many are loaded before the first is added."""


@dataclass(frozen=True)
class RowTasks:
    """Pieces of all rows, in order.

    Args:
        rows: int64 ``[count]`` the row of each; None where every row is one piece.
        begins: int64 ``[count]`` its first edge, by position.
        ends: int64 ``[count]`` its last, plus 1.
        slots: int64 ``[count]`` where its partial result goes; -1 for a whole row.
        first_slots: int64 ``[n + 1]`` of their pieces.
    """

    count: int
    rows: Tensor | None = None
    begins: Tensor | None = None
    ends: Tensor | None = None
    slots: Tensor | None = None
    long_rows: Tensor | None = None
    first_slots: Tensor | None = None
    num_slots: int = 0

    @property
    def is_split(self) -> bool:
        return self.rows is not None

    def arguments(self, indptr: Tensor) -> tuple[Tensor, ...]:
        """What `task_of` reads."""
        if self.rows is None:
            return indptr, indptr, indptr, indptr, indptr
        assert self.begins is not None and self.ends is not None and self.slots is not None
        return indptr, self.rows, self.begins, self.ends, self.slots


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


def row_tasks(indptr: Tensor, longest: int | None = None) -> RowTasks:
    """The pieces of the rows of a compressed format; made once for each.

    Args:
        longest: The most edges of a row; None to ask the device, which the host then waits for.
    """
    tasks: RowTasks | None = _made.get(indptr)
    if tasks is None:
        tasks = _made[indptr] = _cut(indptr, longest)
    return tasks


def _cut(indptr: Tensor, longest: int | None) -> RowTasks:
    num_rows = indptr.shape[0] - 1
    if num_rows == 0 or (int(indptr.diff().max()) if longest is None else longest) <= MOST_EDGES:
        return RowTasks(num_rows)
    indptr = indptr.long()
    device = indptr.device
    pieces = ((indptr.diff() + MOST_EDGES - 1) // MOST_EDGES).clamp(min=1)
    rows = torch.repeat_interleave(torch.arange(num_rows, device=device), pieces)
    first = pieces.cumsum(0) - pieces
    number = torch.arange(rows.shape[0], device=device) - first[rows]  # of a piece, in its row
    begins = indptr[rows] + number * MOST_EDGES
    ends = torch.minimum(begins + MOST_EDGES, indptr[rows + 1])
    is_part = pieces[rows] > 1
    slots = torch.where(is_part, is_part.cumsum(0) - 1, -1)
    long_rows = (pieces > 1).nonzero().view(-1)
    counts = pieces[long_rows]
    first_slots = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    num_slots = int(first_slots[-1])
    return RowTasks(rows.shape[0], rows, begins, ends, slots, long_rows, first_slots, num_slots)


@triton.jit
def task_of(number, indptr, rows, begins, ends, slots, SPLIT: tl.constexpr):
    """(row, first position, last position plus 1, slot or -1) of a piece."""
    if SPLIT:
        row = tl.load(rows + number)
        begin = tl.load(begins + number)
        end = tl.load(ends + number)
        slot = tl.load(slots + number)
    else:
        row = number.to(tl.int64)
        begin = tl.load(indptr + row).to(tl.int64)
        end = tl.load(indptr + row + 1).to(tl.int64)
        slot = row * 0 - 1
    return row, begin, end, slot
