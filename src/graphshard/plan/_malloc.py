# SPDX-License-Identifier: Apache-2.0
"""What the C library takes from the system for tensors of torch: glibc's rules, without addresses.

[Note: blocks of malloc]
    A block of at least the threshold is mapped by itself and goes back when it is freed; a smaller
    one is cut from the heap. The threshold begins low, and rises to the size of each block below
    `MALLOC_KEEPS` that was mapped and is freed. torch asks for addresses that are multiples of a
    page where a process has large pages: malloc cuts such a block out of a larger one, and gives
    the ends back. Two things follow that decide what is resident, and both were seen in traces of
    all blocks (benchmarks/results/plan_memory_cpu_2026-11-27.md):

    * a block asks for more than what the threshold has risen to when one of its own size was freed.
      So the largest blocks of a network, if smaller than `MALLOC_KEEPS`, are mapped, and exact, for
      good, unless something larger was freed while the part was read; all smaller ones are on the
      heap;
    * what is small (the tensor itself, a node of autograd) takes a few bytes of the ends, and what
      is left is too small for the next block of that size, and parts it from free blocks beside it.
      So while an epoch lasts a free block takes smaller ones alone.

    That the ends are free again with the next epoch is this model; in traces some stay for two or
    three.
"""

from __future__ import annotations

MALLOC_KEEPS = 32 << 20
"""Blocks above this size are always mapped, and no threshold rises above it."""

_LARGE_PAGES_FROM, _PAGE, _LINE = 2 << 20, 4096, 64
_HEADER, _LEAST_CHUNK, _TOP_PAD = 16, 32, 128 << 10
_SMALL = 1 << 16
"""Blocks below this size are counted as they are, and lie between others."""


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
        self._used: dict[int, tuple[int, int]] = {}  # number of the block to its chunk
        self._mapped: dict[int, int] = {}
        self._ends: list[int] = []  # of chunks that were freed in this epoch
        self._exact = 0
        self._sizes: dict[int, int] = {}  # of small ones

    @property
    def taken(self) -> int:
        """Bytes that the system has given."""
        return self._end + self._exact

    def take(self, size: float) -> int:
        """Take a block; its number."""
        self._number += 1
        count = int(size)
        if count < _SMALL:
            self._sizes[self._number] = count
            self._exact += count
            return self._number
        padding = (_PAGE if count >= _LARGE_PAGES_FROM else _LINE) + _LEAST_CHUNK
        wanted = (count + _HEADER + 15 & ~15) + padding
        chunk = self._from_heap(wanted)
        if chunk is None:
            mapped = wanted + 8 + _PAGE - 1 & ~(_PAGE - 1)
            self._mapped[self._number] = mapped
            self._exact += mapped
        else:
            self._used[self._number] = chunk
        return self._number

    def give_back(self, number: int) -> None:
        """Free a block."""
        if number in self._sizes:
            self._exact -= self._sizes.pop(number)
        elif number in self._mapped:
            size = self._mapped.pop(number)
            self._exact -= size
            # What lies before an aligned address is no longer of the chunk.
            rest = size - (_PAGE if size >= _LARGE_PAGES_FROM else _LINE) + _HEADER
            if rest <= MALLOC_KEEPS:
                self._threshold = max(self._threshold, rest)
        else:
            begin, size = self._used.pop(number)
            self._ends.append(begin)
            self._add(begin + _LINE, size - _LINE)

    def end_epoch(self) -> None:
        """What is small and was made in it goes."""
        ends, self._ends = self._ends, []
        for begin in ends:
            self._add(begin, _LINE)

    def _from_heap(self, wanted: int) -> tuple[int, int] | None:
        """The smallest free chunk that is large enough, cut, or one at the end; None: mapped."""
        fitting = [(size, begin) for begin, size in self._free.items() if size >= wanted]
        if fitting:
            size, begin = min(fitting)
            del self._free[begin], self._begin_of[begin + size]
            if size - wanted < _LEAST_CHUNK:
                return begin, size
            self._free[begin + wanted] = size - wanted
            self._begin_of[begin + size] = begin + wanted
            return begin, wanted
        if self._end - self._top < wanted + _LEAST_CHUNK:
            if wanted >= self._threshold:
                return None
            self._end = self._top + wanted + _TOP_PAD
        begin, self._top = self._top, self._top + wanted
        return begin, wanted

    def _add(self, begin: int, size: int) -> None:
        """Make a chunk free, with those beside it; what is free at the end may go back."""
        if begin in self._begin_of:
            before = self._begin_of.pop(begin)
            size += self._free.pop(before)
            begin = before
        if begin + size in self._free:
            after = self._free.pop(begin + size)
            del self._begin_of[begin + size + after]
            size += after
        if begin + size == self._top:
            self._top = begin
            if self._end - self._top >= 2 * self._threshold:
                self._end = self._top + _TOP_PAD
            return
        self._free[begin] = size
        self._begin_of[begin + size] = begin
