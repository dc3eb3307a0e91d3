# SPDX-License-Identifier: Apache-2.0
"""KeptColumns: pieces of columns that wait to be encoded, in memory or, if there is much, on disk.

What is on disk is mapped into memory when it is asked for. The system may drop such pages whenever
it needs memory, so that what a table takes is what has been made of it, and not its cells.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

MOST_IN_MEMORY = 1 << 28
"""Bytes of columns that are kept in memory; more go to the folder of temporary files ($TMPDIR)."""

_ALIGNMENT = 64


class _Place(NamedTuple):
    """Where an array is in the file."""

    start: int
    size: int


class KeptColumns:
    """Arrays of Arrow that are put away one by one, and come back as columns.

    Args:
        most_in_memory: Bytes; what comes after so many goes into a file.
    """

    def __init__(self, most_in_memory: int | None = None) -> None:
        self._most = MOST_IN_MEMORY if most_in_memory is None else most_in_memory
        self._bytes = 0
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
            self._folder = tempfile.TemporaryDirectory(prefix="graphshard-")
            self._file = open(os.path.join(self._folder.name, "columns.arrow"), "wb")  # noqa: SIM115
        start = self._file.tell()
        batch = pyarrow.record_batch([array], names=["values"])
        with ipc.new_stream(self._file, batch.schema) as writer:
            writer.write_batch(batch)
        size = self._file.tell() - start
        self._file.write(bytes(-size % _ALIGNMENT))
        return _Place(start, size)

    def column(self, pieces: Sequence[Any], kind: Any) -> Any:
        """A pyarrow ``ChunkedArray`` of a type, of arrays that were put away."""
        import pyarrow
        from pyarrow import ipc

        chunks = []
        mapped: Any = None
        for piece in pieces:
            if not isinstance(piece, _Place):
                chunks.append(piece)
                continue
            if mapped is None:
                assert self._file is not None
                self._file.flush()
                mapped = pyarrow.memory_map(self._file.name).read_buffer()
            stored = mapped.slice(piece.start, piece.size)
            chunks.append(ipc.open_stream(stored).read_next_batch().column(0))
        return pyarrow.chunked_array(chunks, kind)

    def close(self) -> None:
        """Remove the file; columns that are there stay."""
        if self._file is not None and self._folder is not None:
            self._file.close()
            self._folder.cleanup()
        self._file = self._folder = None
