# SPDX-License-Identifier: Apache-2.0
"""RowsInFiles: a table of numbers that stays in files; rows of it are read when they are asked for.

[Note: rows of files]
    Rows are read, not mapped. A page that is mapped counts as memory of the process as long as the
    system leaves it there, and a disk that fails, or a file that became shorter, ends the process;
    a read that fails is an error. What the system keeps of a file it takes back before it refuses
    memory to anybody. Rows of a batch are read in the order of the file, while some megabytes of
    what follows are on their way from the disk, see csrc/runtime/file_rows.h. 20,000 pages of a
    gigabyte took 0.29 s so on the disk this was written on, and one after the other 1.04 s; with
    gaps of up to 16 pages read as well it was 0.39 s, and by 32 threads that wait 0.33 s.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..errors import PartitionFormatError
from .files import open_regular
from .kernels import kernels_for

_CPU = torch.device("cpu")
BLOCK_BYTES = 1 << 24
"""Of the rows that are read at once where all are, in their order."""


class RowsFile:
    """A file that is open for reads at random places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        if hasattr(os, "posix_fadvise"):  # else each row brings what lies behind it
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def fail(self, error: int) -> None:
        """Raise what came of a read."""
        why = "it ends before its last row" if error == errno.EIO else os.strerror(error)
        raise PartitionFormatError(
            f"rows of file {self.path} cannot be read ({why}); copy the part again, or partition "
            "the graph again"
        )


@dataclass(frozen=True, eq=False)
class FilePiece:
    """Rows that lie back to back in a file."""

    file: RowsFile
    offset: int
    num_rows: int


@dataclass(frozen=True, eq=False)
class RowsInFiles:
    """A table ``[num_rows, *row_shape]`` in files.

    Args:
        pieces: One after another they are the table.
        stored_dtype: Of the numbers in the files.
        row_shape: Of a row.
        dtype: What rows are converted to when they are read.
    """

    pieces: tuple[FilePiece, ...]
    stored_dtype: torch.dtype
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    device = _CPU

    @classmethod
    def joined(cls, tables: Sequence[RowsInFiles]) -> RowsInFiles:
        """One table of several, of one kind of rows, in their order."""
        pieces = tuple(itertools.chain.from_iterable(table.pieces for table in tables))
        return replace(tables[0], pieces=pieces)

    def as_dtype(self, dtype: torch.dtype) -> RowsInFiles:
        """The same rows, converted when they are read."""
        return replace(self, dtype=dtype)

    @cached_property
    def _starts(self) -> Tensor:
        counts = [piece.num_rows for piece in self.pieces]
        return torch.tensor([0, *itertools.accumulate(counts)])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(piece.num_rows for piece in self.pieces), *self.row_shape))

    def some(self, first: int, count: int) -> RowsInFiles:
        """Rows of a table in one file that follow one another."""
        (piece,) = self.pieces
        size = math.prod(self.row_shape) * self.stored_dtype.itemsize
        part = FilePiece(piece.file, piece.offset + first * size, count)
        return replace(self, pieces=(part,))

    def element_size(self) -> int:
        """Bytes of a number as it is given."""
        return self.dtype.itemsize

    def read(self, out: Tensor, places: Tensor | None, rows: Tensor) -> None:
        """``out[places] = self[rows]``; arguments as those of `graphshard.ops.copy_rows`.

        ``out`` is contiguous and on the CPU.

        Raises:
            IndexError: A row or a place does not exist.
            PartitionFormatError: A file cannot be read.
        """
        rows = rows.to(_CPU).contiguous()
        if out.dtype != self.stored_dtype:
            stored = torch.empty((rows.numel(), *self.row_shape), dtype=self.stored_dtype)
            self._read(stored, None, rows)
            if places is None:
                out[: rows.numel()] = stored.to(out.dtype)
            else:
                out.index_copy_(0, places.long(), stored.to(out.dtype))
            return
        self._read(out, None if places is None else places.contiguous(), rows)

    def _read(self, out: Tensor, places: Tensor | None, rows: Tensor) -> None:
        if len(self.pieces) == 1:
            self._read_piece(self.pieces[0], out, places, rows)
            return
        piece_of = torch.bucketize(rows, self._starts[1:], right=True)
        for number, piece in enumerate(self.pieces):
            chosen = (piece_of == number).nonzero().view(-1)
            if chosen.numel():
                here = rows.index_select(0, chosen) - self._starts[number]
                there = chosen if places is None else places.index_select(0, chosen)
                self._read_piece(piece, out, there, here)
        if bool((piece_of >= len(self.pieces)).any()):
            raise IndexError("a row number is outside its table")

    def _read_piece(
        self, piece: FilePiece, out: Tensor, places: Tensor | None, rows: Tensor
    ) -> None:
        if not rows.numel() or not out.numel():
            return
        data = out.view(-1).view(torch.uint8).view(out.shape[0], -1)
        place = piece.file.descriptor, piece.offset
        kernels = kernels_for(_CPU)
        if kernels is not None:
            error = kernels.read_rows(*place, piece.num_rows, rows, places, data)
        else:
            error = _read_one_by_one(*place, piece.num_rows, rows, places, data)
        if error:
            piece.file.fail(error)

    def blocks(self) -> Iterator[Tensor]:
        """All rows in their order, some megabytes at a time."""
        size = max(1, math.prod(self.row_shape) * self.stored_dtype.itemsize)
        count = max(1, BLOCK_BYTES // size)
        for start in range(0, self.shape[0], count):
            rows = torch.arange(start, min(start + count, self.shape[0]))
            block = torch.empty((rows.numel(), *self.row_shape), dtype=self.dtype)
            self.read(block, None, rows)
            yield block

    def mapped(self, is_private: bool) -> Tensor:
        """The table as a tensor, mapped from its only file, as it is stored.

        Args:
            is_private: The tensor can be written to, which changes this process's copy alone. Else
                it must not be: that ends the process. Memory that may be written to counts against
                limits of it, however little is.
        """
        (piece,) = self.pieces
        shape = piece.num_rows, *self.row_shape
        num_bytes = math.prod(shape) * self.stored_dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=self.stored_dtype)
        skipped = piece.offset % mmap.ALLOCATIONGRANULARITY
        flags, prot = mmap.MAP_SHARED, mmap.PROT_READ
        if is_private:
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            prot |= mmap.PROT_WRITE
        place = piece.offset - skipped
        try:
            data = mmap.mmap(piece.file.descriptor, skipped + num_bytes, flags, prot, offset=place)
        except (OSError, ValueError) as error:
            raise PartitionFormatError(
                f"file {piece.file.path} cannot be mapped ({error}); copy the part again, or "
                "partition the graph again"
            ) from None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(data, dtype=torch.uint8, offset=skipped, count=num_bytes)
        return flat.view(self.stored_dtype).view(shape)


def _read_one_by_one(
    descriptor: int,
    offset: int,
    num_rows: int,
    rows: Tensor,
    places: Tensor | None,
    out: Tensor,
) -> int:
    """``read_rows`` of the compiled kernels."""
    places = torch.arange(rows.numel()) if places is None else places
    if bool(((rows < 0) | (rows >= num_rows)).any()):
        raise IndexError("a row number is outside its table")
    into, size = out.numpy(), out.shape[1]
    order = rows.argsort()
    for row, place in zip(rows[order].tolist(), places[order].tolist(), strict=True):
        if os.preadv(descriptor, [into[place]], offset + row * size) != size:
            return errno.EIO
    return 0
