# SPDX-License-Identifier: Apache-2.0
"""KeptColumns: pieces of columns that wait to be encoded, in memory or, if there is much, on disk.

What is on disk is mapped into memory when it is asked for. The system may drop such pages whenever
it needs memory, and who passes over a column gives them back (`KeptColumns.passing`): so what a
table takes is what has been made of it, and not its cells.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MOST_IN_MEMORY = 1 << 28
"""Bytes of columns that are kept in memory; more go to the folder of temporary files ($TMPDIR)."""

_MOST_BESIDE_FILES = 1 << 26
_ALIGNMENT = 64
_RELEASED_EVERY = 1 << 25  # bytes that are put away


class _Place(NamedTuple):
    """Where an array is in the file."""

    start: int
    size: int


class KeptColumns:
    """Arrays of Arrow that are put away one by one, and come back as columns.

    Args:
        most_in_memory: Bytes; what comes after so many goes into a file.
        parent: Folder for that file, where little is to be in memory; None: that of temporary
            files.
    """

    def __init__(self, most_in_memory: int | None = None, parent: Path | None = None) -> None:
        self._most = MOST_IN_MEMORY if most_in_memory is None else most_in_memory
        if parent is not None:
            self._most = min(self._most, _MOST_BESIDE_FILES)
        self._bytes = 0
        self._parent = parent
        self._maps: list[mmap.mmap] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._file: BinaryIO | None = None

    def put(self, array: Any) -> Any:
        """Put an array away; what is returned is for `column`.

        Raises:
            OSError: The disk is full.
        """
        import pyarrow
        from pyarrow import ipc

        self._bytes += array.nbytes
        if self._bytes <= self._most:
            return array
        if self._file is None:
            self._folder = tempfile.TemporaryDirectory(prefix="graphshard-", dir=self._parent)
            self._file = open(os.path.join(self._folder.name, "columns.arrow"), "wb")  # noqa: SIM115
        start = self._file.tell()
        batch = pyarrow.record_batch([array], names=["values"])
        with ipc.new_stream(self._file, batch.schema) as writer:
            writer.write_batch(batch)
        size = self._file.tell() - start
        if start // _RELEASED_EVERY < (start + size) // _RELEASED_EVERY:
            self.release()  # of the columns that this one was made of
        self._file.write(bytes(-size % _ALIGNMENT))
        return _Place(start, size)

    def column(self, pieces: Sequence[Any], kind: Any) -> Any:
        """A pyarrow ``ChunkedArray`` of a type, of arrays that were put away."""
        import pyarrow
        from pyarrow import ipc

        chunks = []
        mapped: Any = None  # all of the file so far, as it will grow
        for piece in pieces:
            if not isinstance(piece, _Place):
                chunks.append(piece)
                continue
            if mapped is None:
                assert self._file is not None
                self._file.flush()
                with open(self._file.name, "rb") as file:
                    self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                mapped = pyarrow.py_buffer(self._maps[-1])
            stored = mapped.slice(piece.start, piece.size)
            chunks.append(ipc.open_stream(stored).read_next_batch().column(0))
        return pyarrow.chunked_array(chunks, kind)

    def release(self) -> None:
        """Give back the pages of columns; what they hold stays."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def passing(self, pieces: Iterable[Any]) -> Iterator[Any]:
        """Pieces of columns one by one, behind each of which pages are given back."""
        for piece in pieces:
            yield piece
            self.release()

    def close(self) -> None:
        """Remove the file; columns that are there stay."""
        if self._file is not None and self._folder is not None:
            self._file.close()
            self._folder.cleanup()
        self._file = self._folder = None
