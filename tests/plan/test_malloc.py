# SPDX-License-Identifier: Apache-2.0
"""Blocks of malloc on paper beside glibc's own count of those that it has mapped."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys

import pytest

from graphshard.plan._malloc import MALLOC_KEEPS, Malloc

OF_GLIBC = """
import ctypes, json, sys
libc = ctypes.CDLL(None)
libc.aligned_alloc.restype = ctypes.c_void_p
libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
class Info(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena ordblks smblks hblks hblkhd a b c d e".split()]
libc.mallinfo2.restype = Info
blocks, before, found = {}, libc.mallinfo2().hblks, []
for name, size in json.loads(sys.argv[1]):
    if size:
        blocks[name] = libc.aligned_alloc(4096, size)
    else:
        libc.free(blocks.pop(name))
    found.append(libc.mallinfo2().hblks - before)
print(json.dumps(found))
"""


def mapped_by_glibc(events: list[tuple[str, int]]) -> list[int]:
    """How many blocks are mapped after each event."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library has no mallinfo2, as glibc has since 2.33")
    own = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUN", "LD_"))}
    done = subprocess.run(
        [sys.executable, "-c", OF_GLIBC, json.dumps(events)],
        capture_output=True, text=True, timeout=120, check=True, env=own,
    )  # fmt: skip
    return [int(number) for number in json.loads(done.stdout)]


def mapped_on_paper(events: list[tuple[str, int]]) -> list[int]:
    malloc, numbers, found = Malloc(128 << 10), {}, []
    for name, size in events:
        if size:
            numbers[name] = malloc.take(size)
        else:
            malloc.give_back(numbers.pop(name))
        found.append(len(malloc._mapped))
    return found


def test_largest_blocks_stay_mapped_and_smaller_ones_come_from_the_heap() -> None:
    large, small = 60_000 * 64 * 4, 60_000 * 40 * 4
    events: list[tuple[str, int]] = []
    for step in range(3):  # as the rows of two layers
        events += [(f"{step}a", large), (f"{step}b", small), (f"{step}a", 0), (f"{step}b", 0)]
    events += [("c", large + (8 << 20)), ("c", 0)]  # something larger goes, and theirs stay
    events += [("d", large), ("e", MALLOC_KEEPS + 4096), ("d", 0), ("e", 0), ("f", MALLOC_KEEPS)]
    paper = mapped_on_paper(events)
    assert paper == mapped_by_glibc(events)
    assert paper[4] == paper[8] == 1  # the larger of two, and not what is freed again
    assert paper[-5] == 0


@pytest.mark.parametrize("seed", range(4))
def test_which_blocks_are_mapped_is_as_glibc_has_it(seed: int) -> None:
    """Each size once: what malloc finds on the heap then does not depend on what is small."""
    draw = random.Random(seed)
    sizes = [draw.randrange(2 << 20, 40 << 20) for _ in range(40)]
    events = [event for n, size in enumerate(sizes) for event in ((str(n), size), (str(n), 0))]
    assert mapped_on_paper(events) == mapped_by_glibc(events)


def test_what_is_small_and_stays_parts_the_block_beside_it() -> None:
    malloc, size = Malloc(MALLOC_KEEPS), 10 << 20
    first = malloc.take(size)
    small = malloc.take(272, is_tensor=False)  # in an end of it
    malloc.take(1 << 20)  # what is above it
    before = malloc.taken
    malloc.give_back(first)
    second = malloc.take(size)
    assert malloc.taken > before + size
    malloc.give_back(small)  # it waits for the next of its size
    malloc.give_back(second)
    assert malloc.take(272, is_tensor=False)
    before = malloc.taken
    malloc.give_back(malloc.take(size))
    malloc.give_back(malloc.take(size - 8192))
    assert malloc.taken == before


def test_ends_of_a_block_join_it_when_nothing_is_in_them() -> None:
    malloc, size = Malloc(MALLOC_KEEPS), 10 << 20
    first = malloc.take(size)
    malloc.take(1 << 20)
    before = malloc.taken
    for _ in range(3):
        malloc.give_back(first)
        first = malloc.take(size)
    assert malloc.taken == before


def test_all_is_given_back() -> None:
    malloc = Malloc(0)
    numbers = [malloc.take(size) for size in (0, 100, 1 << 16, 3 << 20, 50 << 20)]
    numbers += [malloc.take(100, is_tensor=False) for _ in range(20)]
    assert malloc.taken >= 53 << 20
    for number in numbers:
        malloc.give_back(number)
    assert malloc.taken <= 2 * MALLOC_KEEPS
    assert not malloc._used
    assert malloc._of_mapped == 0
