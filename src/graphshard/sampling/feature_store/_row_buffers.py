# SPDX-License-Identifier: Apache-2.0
"""RowBuffers: memory for fetched rows that is used again once the tensors over it are gone.

[Note: page faults]
    The rows of a batch are tens of megabytes, so a C library gives their memory back to the
    system with each batch and asks for it anew with the next. Touching new memory costs several
    times what copying the rows costs. Memory that has been touched is kept here instead, and
    where the system has large pages, it is asked for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL_BYTES = 1 << 18
_SLAB_BYTES = 1 << 21
_MAX_WASTE = 2
_NUM_KEPT = 8


class RowBuffers:
    """Gives tensors; takes their memory back when the last tensor over it has gone.

    Any thread may ask, and any may let go of a tensor.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=_NUM_KEPT)  # beyond, the oldest goes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the CPU, with anything in it."""
        num_bytes = dtype.itemsize
        for extent in shape:
            num_bytes *= extent
        if num_bytes < _SMALL_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        slab = self._slab(num_bytes)
        # torch keeps the view, and the view the slab. When torch drops it, the slab comes back.
        view = (ctypes.c_char * len(slab)).from_buffer(slab)
        weakref.finalize(view, self._free.append, slab).atexit = False
        flat = torch.frombuffer(view, dtype=torch.uint8)
        return flat[:num_bytes].view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Give unused memory back to the system."""
        self._free.clear()

    def _slab(self, num_bytes: int) -> mmap.mmap:
        with contextlib.suppress(IndexError):  # another thread took the last one
            for _ in range(len(self._free)):
                slab = self._free.popleft()
                if num_bytes <= len(slab) <= _MAX_WASTE * max(num_bytes, _SLAB_BYTES):
                    return slab
                self._free.append(slab)
        # Batches differ a little; room for an eighth more serves most of them.
        num_slabs = -(-(num_bytes + num_bytes // 8) // _SLAB_BYTES)
        slab = mmap.mmap(-1, num_slabs * _SLAB_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # not every system has large pages
            slab.madvise(mmap.MADV_HUGEPAGE)
        return slab
