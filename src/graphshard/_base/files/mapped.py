# SPDX-License-Identifier: Apache-2.0
"""MappedFile: a file that several processes map, in large pages where Linux makes them.

[Note: large pages]
    Edges are drawn, and rows read, at random places of tables of gigabytes. With pages of 4 KiB
    nearly each place costs a walk through the page tables besides its own way from memory; with
    pages of 2 MiB those tables fit the caches. Private memory gets such pages where it is asked for
    before it is written (``MADV_HUGEPAGE``). For shared memory most systems leave that off, but
    from Linux 6.1 on what is there already can be moved into large pages (``MADV_COLLAPSE``), if
    addresses and offsets agree modulo their size. So a place is chosen here, which Python's
    ``mmap`` cannot do. Draws and reads then take 0.7 to 0.8 of their time, and the move takes one
    to three seconds for each GiB, once: benchmarks/large_pages.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import weakref
from typing import Any

_LARGE_PAGE = 1 << 21
_AT_ONCE = 1 << 28  # bytes; signals are handled in between
_PROT_NONE, _MAP_FIXED = 0, 0x10
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25


class MappedFile:
    """Bytes of a file, from its beginning, that this process reads and writes in place.

    Args:
        descriptor: The open file; it may be closed afterwards.
        num_bytes: 1 or more.

    Attributes:
        buffer: The bytes, for `torch.frombuffer`; they stay mapped as long as it is there.

    Raises:
        OSError: The system refuses.
        ValueError: The file is shorter: bytes behind its end would end the process.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        length = os.fstat(descriptor).st_size
        if length < num_bytes:
            raise ValueError(f"a file of {length} bytes cannot be mapped as one of {num_bytes}")
        self.buffer: Any
        self._num_bytes = num_bytes
        self._address = 0
        libc = _libc()
        if libc is None:
            self.buffer = mmap.mmap(descriptor, num_bytes)
            return
        # A place is reserved, and the file is mapped at its first address that is a multiple.
        reserved = num_bytes + _LARGE_PAGE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _mapped(libc, None, reserved, _PROT_NONE, private, -1)
        address = -(-start // _LARGE_PAGE) * _LARGE_PAGE
        try:
            _mapped(
                libc,
                address,
                num_bytes,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_SHARED | _MAP_FIXED,
                descriptor,
            )
        except OSError:
            libc.munmap(start, reserved)
            raise
        self._address = address
        self.buffer = (ctypes.c_char * num_bytes).from_address(address)
        unmap = weakref.finalize(self.buffer, libc.munmap, start, reserved)
        unmap.atexit = False  # threads may use it to the end

    def populate(self, num_bytes: int, writes: bool = False) -> None:
        """Have the system map pages now, and clear those of a new file, many at a time.

        Else each is mapped as it is first touched, which takes several times as long. Linux has it
        from 5.14 on; elsewhere nothing happens.

        Args:
            num_bytes: Of the first so many bytes.
            writes: Whether they are to be written to first.
        """
        advice = _MADV_POPULATE_WRITE if writes else _MADV_POPULATE_READ
        self._advise(advice, 0, min(num_bytes, self._num_bytes))

    def use_large_pages(self, num_bytes: int, start: int = 0) -> bool:
        """Move what the file has in memory into large pages. See [Note: large pages].

        Other processes see the same bytes at all times, and find large pages the next time they
        touch them.

        Args:
            num_bytes: Of so many bytes.
            start: The first of them. Large pages that they do not fill stay as they are.

        Returns:
            Whether all of it was moved; where there is no room, or no such pages, what is left is
            as it was.
        """
        stop = min(start + num_bytes, self._num_bytes) & -_LARGE_PAGE
        return self._advise(_MADV_COLLAPSE, -(-start // _LARGE_PAGE) * _LARGE_PAGE, stop)

    def _advise(self, advice: int, start: int, stop: int) -> bool:
        libc = _libc()
        return libc is not None and all(
            libc.madvise(self._address + begin, min(_AT_ONCE, stop - begin), advice) == 0
            for begin in range(start, stop, _AT_ONCE)
        )


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """The C library, where it is known how to call it: on Linux of 64 bits."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
        libc.mmap.restype = pointer
        libc.munmap.argtypes = [pointer, size]
        libc.madvise.argtypes = [pointer, size, number]
        return libc
    return None


def _mapped(
    libc: ctypes.CDLL, address: int | None, size: int, protection: int, flags: int, descriptor: int
) -> int:
    found: int = libc.mmap(address, size, protection, flags, descriptor, 0) or 0
    if found in (0, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return found
