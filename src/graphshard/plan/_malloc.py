# SPDX-License-Identifier: Apache-2.0
"""What the C library takes from the system for tensors of torch: glibc's rules.

[Note: blocks of malloc]
    A block of at least the threshold is mapped by itself and goes back when it is freed; a smaller
    one is cut from the heap. The threshold begins low, and rises to the size of each block below
    `MALLOC_KEEPS` that was mapped and is freed. torch asks for addresses that are multiples of a
    page where a process has large pages: malloc cuts such a block out of a larger one, and frees
    what is left at both ends. Two things follow that decide what is resident, and both were seen in
    traces of all blocks (benchmarks/results/plan_memory_cpu_2026-11-27.md):

    * a block asks for more than what the threshold has risen to when one of its own size was freed.
      So the largest blocks of a network, if smaller than `MALLOC_KEEPS`, are mapped, and exact, for
      good, unless something larger was freed while the part was read; all smaller ones are on the
      heap;
    * what is small (the tensor itself, a node of autograd, the gradient of a bias) is put where it
      leaves least, and that is one of these ends. While it stays there, what the block leaves is
      too small for the next one of that size. Tensors go with their block, nodes with the step, and
      gradients when the next ones are to come: so every epoch finds other blocks parted than the
      one before, and takes some anew, until there are enough for all. Up to seven freed chunks of
      each small size wait for the next of that size, and part blocks, too.

    Ends of a small size would wait as well, but for all that is small and not on the tape, which
    takes them: they count as free. Where blocks lie is chance: runs of one case differ by 5 %.
"""

from __future__ import annotations

import bisect

MALLOC_KEEPS = 32 << 20
"""Blocks above this size are always mapped, and no threshold rises above it."""

_LARGE_PAGES_FROM, _PAGE, _LINE = 2 << 20, 4096, 64
_HEADER, _LEAST_CHUNK, _TOP_PAD = 16, 32, 128 << 10
_MOST_WAITING, _LARGEST_WAITING = 7, 1040
_SMALL = 1 << 16
"""The heap does not grow for what is below: of a process that has started there is room."""


class Malloc:
    """Blocks of one process, and what they take.

    Args:
        threshold: Size of blocks from which they are mapped, so far; above `MALLOC_KEEPS` where
            malloc was told so.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = int(threshold)
        self._number = 0
        #: Of the heap: first byte that was never in use, or is free up to the end, and the end.
        self._top = self._end = 0
        self._free: dict[int, int] = {}  # begin to size
        self._begin_of: dict[int, int] = {}  # end of a free chunk to its begin
        self._by_size: list[tuple[int, int]] = []  # size and begin of each, ascending
        self._waiting: dict[int, list[int]] = {}  # size to begins
        self._used: dict[int, tuple[int, int]] = {}  # number of the block to its chunk
        self._mapped: dict[int, tuple[int, int]] = {}  # takes, and counts when it is freed
        self._of_mapped = 0
        self._elsewhere: dict[int, int] = {}  # number of a small one to its size
        self._of_small = 0

    @property
    def taken(self) -> int:
        """Bytes that the system has given."""
        return self._end + self._of_mapped + self._of_small

    def take(self, size: float, *, is_tensor: bool = True) -> int:
        """Take a block; its number.

        Args:
            is_tensor: Whether it is the numbers of a tensor, whose address torch has aligned.
        """
        self._number += 1
        count = int(size)
        needed = max(_LEAST_CHUNK, count + 8 + 15 & ~15)
        alignment = _PAGE if count >= _LARGE_PAGES_FROM else _LINE
        if not is_tensor and self._waiting.get(needed):
            self._used[self._number] = self._waiting[needed].pop(), needed
            return self._number
        wanted = needed + alignment + _LEAST_CHUNK if is_tensor else needed
        if count < _SMALL and not self._fits(wanted):
            self._elsewhere[self._number] = count if is_tensor else 0
            self._of_small += self._elsewhere[self._number]
            return self._number
        chunk = self._cut(wanted)
        if chunk is None:
            mapped = wanted + 8 + _PAGE - 1 & ~(_PAGE - 1)
            # What lies before an aligned address is no longer of the chunk.
            self._mapped[self._number] = mapped, mapped - alignment + _HEADER
            self._of_mapped += mapped
        elif is_tensor:
            self._used[self._number] = self._aligned(*chunk, needed, alignment)
        else:
            self._used[self._number] = chunk
        return self._number

    def give_back(self, number: int) -> None:
        """Free a block."""
        if number in self._mapped:
            mapped, counts = self._mapped.pop(number)
            self._of_mapped -= mapped
            if counts <= MALLOC_KEEPS:
                self._threshold = max(self._threshold, counts)
        elif number in self._elsewhere:
            self._of_small -= self._elsewhere.pop(number)
        else:
            self._release(*self._used.pop(number))

    def _fits(self, wanted: int) -> bool:
        return bool(self._by_size) and self._by_size[-1][0] >= wanted

    def _cut(self, wanted: int) -> tuple[int, int] | None:
        """The smallest free chunk that is large enough, cut, or one at the end; None: mapped."""
        place = bisect.bisect_left(self._by_size, (wanted, -1))
        if place < len(self._by_size):
            size, begin = self._by_size[place]
            self._remove(begin)
            if size - wanted < _LEAST_CHUNK:
                return begin, size
            self._insert(begin + wanted, size - wanted)
            return begin, wanted
        if self._end - self._top < wanted + _LEAST_CHUNK:
            if wanted >= self._threshold:
                return None
            self._end = self._top + wanted + _TOP_PAD
        begin, self._top = self._top, self._top + wanted
        return begin, wanted

    def _aligned(self, begin: int, size: int, needed: int, alignment: int) -> tuple[int, int]:
        """The part of a chunk whose bytes begin at a multiple; both ends are free again."""
        first = -(-(begin + _HEADER) // alignment) * alignment - _HEADER
        if 0 < first - begin < _LEAST_CHUNK:
            first += alignment
        if first > begin:
            self._add(begin, first - begin)
        rest = begin + size - first
        if rest - needed < _LEAST_CHUNK:
            return first, rest
        self._add(first + needed, rest - needed)
        return first, needed

    def _insert(self, begin: int, size: int) -> None:
        self._free[begin] = size
        self._begin_of[begin + size] = begin
        bisect.insort(self._by_size, (size, begin))

    def _remove(self, begin: int) -> int:
        size = self._free.pop(begin)
        del self._begin_of[begin + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, begin))]
        return size

    def _release(self, begin: int, size: int) -> None:
        """Free a chunk of what was in use, or let it wait for the next of its size."""
        waiting = self._waiting.setdefault(size, []) if size <= _LARGEST_WAITING else None
        if waiting is None or len(waiting) == _MOST_WAITING:
            self._add(begin, size)
        else:
            waiting.append(begin)

    def _add(self, begin: int, size: int) -> None:
        """Make a chunk free, with those beside it; what is free at the end may go back."""
        if begin in self._begin_of:
            before = self._begin_of[begin]
            size += self._remove(before)
            begin = before
        if begin + size in self._free:
            size += self._remove(begin + size)
        if begin + size == self._top:
            self._top = begin
            if self._end - self._top >= 2 * self._threshold:
                self._end = self._top + _TOP_PAD
            return
        self._insert(begin, size)
