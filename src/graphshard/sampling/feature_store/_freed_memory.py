# SPDX-License-Identifier: Apache-2.0
"""keep_freed_memory: the C library does not give large tensors back to the system step by step.

[Note: freed memory]
    glibc asks the system for every block above some size (32 MB at most) and gives it back as soon
    as it is freed. The activations of a sampled step are larger and are freed with the step, so
    each step pays for mapping and clearing all its memory again. Since all steps of sampled
    training are alike, what one of them frees fits the next, and it is kept. 16 steps of GraphSAGE
    (hidden 256, fanouts 15, 10, 5, batches of 1000, one thread) take 5.1 s of processor time so and
    6.9 s otherwise, of which 1.6 s are the system's. Full-batch training, which is careful about
    its peak, does not ask for this.
"""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_BLOCK = 1 << 30
_MOST_KEPT = (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep freed blocks of up to 1 GiB, for good, up to 2 GiB of them.

    Nothing happens where the C library is not glibc, where GRAPHSHARD_KEEP_MEMORY is 0, or where
    the environment tells malloc itself what to do.

    Returns:
        Whether it does.
    """
    told = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if told or os.environ.get("GRAPHSHARD_KEEP_MEMORY", "1") == "0":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    both = [
        mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) != 0,
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT) != 0,
    ]
    return all(both)
