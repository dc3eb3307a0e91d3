# SPDX-License-Identifier: Apache-2.0
"""Edges on disk, sorted by one of their ends, and read back row after row in bounded memory.

An external distribution sort (csrc/partition/edge_buckets.h): batches of edges are distributed to
buckets of consecutive rows, what a batch has for each bucket is appended to one file, and a bucket
at a time is read back and sorted by counting. Edges of one row keep the order in which they came,
so the files depend on the edges alone, not on batches, threads or memory.

::

    degrees.u32    [num_rows] edges of each row
    firsts.u32     [num_rows] how many of those came before `EdgeSorter.split`; or no such file
    cols.u32       [num_edges] the other end of each edge, row after row; .i64 from 2^32 nodes on
    values.i64     [num_edges] id of each edge, or values.u32 its weight; or no such file
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .._base.files import writing
from .._base.kernels import kernels_for
from . import _numpy_kernels
from .checked_files import save_array

NodeArray = npt.NDArray[np.unsignedinteger[Any] | np.signedinteger[Any]]
Degrees = npt.NDArray[np.uint32]
EdgeCounts = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Item = TypeVar("Item")
Given = TypeVar("Given")

BATCH_EDGES = 1 << 21
"""Edges that are distributed to buckets, or read back, at a time."""

_ADDED_EDGES = 1 << 20  # distributed while those before are written
_BUCKET_EDGES = 1 << 19  # sorted by counting next to the core
_MOST_BUCKETS = 512  # of whose memory each has a page at hand while edges are distributed
_ROWS_AT_ONCE = 1 << 20
_COMBINED_BYTES = 1 << 23
_LEAST_WRITTEN_APART = 1 << 18  # edges; by a thread of its own, while the next ones are distributed
_MOST_FILES = 4  # of a spill file: batches are written to each by a thread of its own


def kernels() -> ModuleType:
    """The compiled kernels; or those of NumPy, which are all but those of the multilevel method."""
    return kernels_for(torch.device("cpu")) or _numpy_kernels


def node_dtype(num_nodes: int) -> np.dtype[Any]:
    """The dtype of numbers of nodes: 32 bits as long as they suffice."""
    return np.dtype(np.uint32 if num_nodes <= 2**32 else np.int64)


def read_ahead(items: Iterator[Item], *, is_worth_it: bool) -> Iterator[Item]:
    """``items``, of which another thread reads the next while one is used."""
    if not is_worth_it:
        yield from items
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


def map_ahead(
    function: Callable[[Given], Item], items: Iterable[Given], num_threads: int
) -> Iterator[Item]:
    """What a function makes of each item, in their order; threads make some while one is used."""
    if num_threads == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        coming: deque[Future[Item]] = deque()
        for item in items:
            coming.append(pool.submit(function, item))
            if len(coming) > num_threads:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class SpillFile:
    """Records of several buckets, appended a batch at a time and read back by bucket.

    Args:
        path: A new file.
        num_buckets: In a batch records come by bucket.
        record_bytes: Of one record.
        num_files: The batches go to so many files in turn, the others beside the first: a file
            system lets one thread at a time append to a file.
    """

    def __init__(
        self, path: Path, num_buckets: int, record_bytes: int, *, num_files: int = 1
    ) -> None:
        self.paths = [path, *(path.with_name(f"{path.name}-{i}") for i in range(1, num_files))]
        self.record_bytes = record_bytes
        self._counts: list[EdgeCounts] = []
        self._num_buckets = num_buckets
        #: Records of each file so far; and before each bucket of each batch in its file.
        self._num_records = [0] * num_files
        self._starts: list[EdgeCounts] = []
        self._descriptors: list[int] = []
        for path in self.paths:
            with writing(path):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptors.append(os.open(path, flags))

    @classmethod
    def reopen(cls, path: Path, record_bytes: int) -> SpillFile:
        """A file that `save` has been called of, to be read."""
        counts = np.load(path.with_suffix(".npy"), allow_pickle=False)
        file = cls.__new__(cls)
        file.paths, file.record_bytes = [path], record_bytes
        file._counts, file._num_buckets = [], counts.shape[1]
        file._num_records, file._starts = [0], []
        for of_buckets in counts:
            file._reserve(of_buckets)
        file._descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC)]
        return file

    def save(self) -> None:
        """Close the one file, and write beside it what `reopen` needs."""
        (path,) = self.paths
        save_array(path.with_suffix(".npy"), np.stack([self.totals() * 0, *self._counts]))
        self.close()

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors:
            os.close(descriptor)

    def append(self, records: Bytes, counts: EdgeCounts) -> None:
        """Append a batch: so many records of each bucket, those of the first first."""
        self.reserve(counts)(records)

    def reserve(self, counts: EdgeCounts) -> Callable[[Bytes], None]:
        """As `append`, but what is returned writes the records; it may in another thread."""
        file, start = self._reserve(counts.copy())
        size = int(counts.sum()) * self.record_bytes

        def write(records: Bytes) -> None:
            with writing(self.paths[file]):
                _write_at(self._descriptors[file], records[:size].data, start * self.record_bytes)

        return write

    def _reserve(self, counts: EdgeCounts) -> tuple[int, int]:
        """Take up a batch: its file, and the records before it there."""
        file = len(self._counts) % len(self.paths)
        start = self._num_records[file]
        self._counts.append(counts)
        self._starts.append(np.cumsum(counts) - counts + start)
        self._num_records[file] += int(counts.sum())
        return file, start

    def totals(self) -> EdgeCounts:
        """Records of each bucket so far."""
        return sum(self._counts, np.zeros(self._num_buckets, dtype=np.int64))

    def count(self, bucket: int, num_batches: int | None = None) -> int:
        """Records of one bucket, in all batches or in the first ones."""
        return sum(int(counts[bucket]) for counts in self._counts[:num_batches])

    @property
    def num_batches(self) -> int:
        """How often `append` was called."""
        return len(self._counts)

    def segments(self, bucket: int, most: int) -> Iterator[Bytes]:
        """The records of a bucket, at most ``most`` at a time, in the order in which they came."""
        for batch, (starts, counts) in enumerate(zip(self._starts, self._counts, strict=True)):
            file = batch % len(self.paths)
            first, left = int(starts[bucket]), int(counts[bucket])
            while left:
                count = min(left, most)
                records = np.empty(count * self.record_bytes, dtype=np.uint8)
                start = first * self.record_bytes
                _read_at(self._descriptors[file], records.data, start, self.paths[file])
                yield records
                first, left = first + count, left - count

    def read(self, bucket: int) -> Bytes:
        """All records of a bucket."""
        count = self.count(bucket)
        records = np.empty(count * self.record_bytes, dtype=np.uint8)
        done = 0
        for segment in self.segments(bucket, BATCH_EDGES):
            records[done : done + len(segment)] = segment
            done += len(segment)
        return records

    def remove(self) -> None:
        """Close and delete the files."""
        self.close()
        for path in self.paths:
            path.unlink()


def combined(
    batches: Iterable[tuple[Bytes, EdgeCounts]], record_bytes: int
) -> Iterator[tuple[Bytes, EdgeCounts]]:
    """Small batches of a `SpillFile` as large ones: a bucket is then read in a few pieces."""
    records: list[Bytes] = []
    counts: list[EdgeCounts] = []
    size = 0
    for some, of_buckets in batches:
        records.append(some[: int(of_buckets.sum()) * record_bytes])
        counts.append(of_buckets)
        size += len(records[-1])
        if size > _COMBINED_BYTES or len(counts) * len(counts[0]) > 1 << 20:
            yield _joined(records, counts, record_bytes)
            records, counts, size = [], [], 0
    if records:
        yield _joined(records, counts, record_bytes)


def _joined(
    records: list[Bytes], counts: list[EdgeCounts], record_bytes: int
) -> tuple[Bytes, EdgeCounts]:
    """Batches as one, by bucket."""
    if len(records) == 1:
        return records[0], counts[0]
    table = np.stack(counts)
    buckets = np.repeat(np.tile(np.arange(table.shape[1]), len(table)), table.reshape(-1))
    order = np.argsort(buckets.astype(np.uint16), kind="stable")
    joined = np.concatenate(records).view(f"V{record_bytes}")[order]
    return joined.view(np.uint8), table.sum(axis=0)


@dataclass(frozen=True)
class EdgeBlock:
    """Consecutive rows of sorted edges.

    Args:
        first_row: The first of them.
        first_edge: Number of their first edge among all.
        degrees: uint32 ``[num_rows]``.
        cols: ``[num_edges]``.
        values: ``[num_edges]``, or None where edges have none.
        firsts: uint32 ``[num_rows]``, or None; see `EdgeSorter.split`.
    """

    first_row: int
    first_edge: int
    degrees: Degrees
    cols: NodeArray
    values: NodeArray | None
    firsts: Degrees | None


@dataclass(frozen=True)
class BlockSpan:
    """Where a block is, and the ends of batches within it, counted from its first row."""

    first_row: int
    num_rows: int
    first_edge: int
    num_edges: int
    ends: EdgeCounts


@dataclass(frozen=True)
class SortedEdges:
    """Edges on disk, row after row; see the module.

    All but the folder can be held by JSON.

    Args:
        folder: Holds the three files.
        col_dtype: Name of a dtype.
        value_dtype: Likewise; None where edges have no values.
        starts: Number of the first edge of every ``2**shift`` rows; and of all edges, at the end.
        is_split: Whether `EdgeSorter.split` was called.
    """

    folder: Path
    num_rows: int
    col_dtype: str
    value_dtype: str | None
    shift: int
    starts: Sequence[int]
    is_split: bool = False

    @property
    def num_edges(self) -> int:
        return self.starts[-1]

    def degrees(self, first: int, last: int) -> Degrees:
        """Edges of each row in ``[first, last)``."""
        return _read_items(self.folder / "degrees.u32", "uint32", first, last - first)

    def first_edge(self, row: int) -> int:
        """Number of the first edge of a row, or of all edges for ``num_rows``."""
        bucket = min(row >> self.shift, len(self.starts) - 1)
        return self.starts[bucket] + int(
            self.degrees(bucket << self.shift, row).sum(dtype=np.int64)
        )

    def cols(self, first: int, count: int) -> NodeArray:
        """The other ends of edges, by number."""
        return _read_items(self.folder / _COLS[self.col_dtype], self.col_dtype, first, count)

    def values(self, first: int, count: int) -> NodeArray:
        """The values of edges, by number."""
        assert self.value_dtype is not None
        return _read_items(self.folder / _VALUES[self.value_dtype], self.value_dtype, first, count)

    def blocks(
        self,
        first: int = 0,
        last: int | None = None,
        *,
        most_edges: int = BATCH_EDGES,
        batches: Callable[[Degrees], EdgeCounts] | None = None,
        with_values: bool = True,
        num_threads: int = 1,
    ) -> Iterator[tuple[EdgeBlock, EdgeCounts]]:
        """Rows in ``[first, last)`` in blocks of at most ``most_edges`` edges, or one batch.

        Args:
            batches: Ends of the batches that some rows are cut into, which a block never cuts; by
                default every row is one.
            num_threads: From 2 on, blocks are read while those before are used.

        Returns:
            Blocks, and the ends of batches within each, counted from its first row.
        """
        spans = self.spans(first, last, most_edges=most_edges, batches=batches)
        return self.read(spans, with_values=with_values, num_threads=num_threads)

    def read(
        self, spans: Iterable[BlockSpan], *, with_values: bool = True, num_threads: int = 1
    ) -> Iterator[tuple[EdgeBlock, EdgeCounts]]:
        """Blocks whose places are known, as `blocks` has them."""
        read = partial(self.block, with_values=with_values)
        is_worth_it = num_threads > 1 and self.num_edges > BATCH_EDGES
        return read_ahead(map(read, spans), is_worth_it=is_worth_it)

    def block(self, span: BlockSpan, *, with_values: bool = True) -> tuple[EdgeBlock, EdgeCounts]:
        """A block, and the ends of batches within it."""
        firsts, values = None, None
        if self.is_split:
            path = self.folder / "firsts.u32"
            firsts = _read_items(path, "uint32", span.first_row, span.num_rows)
        if with_values and self.value_dtype is not None:
            values = self.values(span.first_edge, span.num_edges)
        degrees = self.degrees(span.first_row, span.first_row + span.num_rows)
        cols = self.cols(span.first_edge, span.num_edges)
        block = EdgeBlock(span.first_row, span.first_edge, degrees, cols, values, firsts)
        return block, span.ends

    def spans(
        self,
        first: int = 0,
        last: int | None = None,
        *,
        most_edges: int = BATCH_EDGES,
        batches: Callable[[Degrees], EdgeCounts] | None = None,
    ) -> Iterator[BlockSpan]:
        """Where blocks are; arguments are those of `blocks`."""
        last = self.num_rows if last is None else last
        edge = self.first_edge(first)
        for some in range(first, last, _ROWS_AT_ONCE):
            degrees = self.degrees(some, min(some + _ROWS_AT_ONCE, last))
            ends = np.arange(1, len(degrees) + 1) if batches is None else batches(degrees)
            # Edges up to the end of each batch.
            totals = np.cumsum(degrees, dtype=np.int64)
            if batches is not None:
                totals = totals[ends - 1]
            batch, done = 0, 0
            while batch < len(ends):
                stop = int(np.searchsorted(totals, done + most_edges, side="right"))
                stop = max(stop, batch + 1)
                row = 0 if batch == 0 else int(ends[batch - 1])
                count = int(totals[stop - 1]) - done
                inside = np.ascontiguousarray(ends[batch:stop] - row)
                yield BlockSpan(some + row, int(ends[stop - 1]) - row, edge, count, inside)
                batch, done, edge = stop, int(totals[stop - 1]), edge + count


#: Writes numbers to a file of `SortedEdges`, from a place on.
_Write = Callable[[str, npt.NDArray[Any], int], None]


class EdgeSorter:
    """Takes edges a batch at a time, in any number of batches; then sorts them.

    Args:
        folder: An empty folder, for the sorted edges and what comes before.
        num_rows: Rows that edges are sorted by; columns are below it, too.
        num_edges: About how many will come.
        value_dtype: uint32 or int64: of what goes with an edge; None for nothing.
        memory: Bytes that sorting may take, in all threads together.
        num_threads: That distribute a batch, and that sort buckets.
    """

    def __init__(
        self,
        folder: Path,
        num_rows: int,
        num_edges: int,
        *,
        value_dtype: npt.DTypeLike | None,
        memory: int,
        num_threads: int,
    ) -> None:
        self.folder = folder
        self.num_rows = num_rows
        self.col_dtype = node_dtype(num_rows)
        self.value_dtype = None if value_dtype is None else np.dtype(value_dtype)
        self._value_bytes = 0 if self.value_dtype is None else self.value_dtype.itemsize
        self._record_bytes = 4 + self.col_dtype.itemsize + self._value_bytes
        self._memory, self._num_threads = memory, num_threads
        # A bucket is in memory twice, once as records.
        of_memory = -(-num_edges * 2 * self._record_bytes * num_threads // max(memory, 1))
        wished = min(max(-(-num_edges // _BUCKET_EDGES), of_memory, 1), _MOST_BUCKETS)
        rows_of_bucket = max(-(-num_rows // wished), 1)
        self.shift = min(max((rows_of_bucket - 1).bit_length(), 0), 32)
        self.num_buckets = max((num_rows + (1 << self.shift) - 1) >> self.shift, 1)
        num_files = min(num_threads, _MOST_FILES)
        self._spill = SpillFile(
            folder / "records", self.num_buckets, self._record_bytes, num_files=num_files
        )
        #: Room for records, of batches that are written.
        self._free: list[Bytes] = []
        self._split: int | None = None
        self._writers: ThreadPoolExecutor | None = None
        self._coming: deque[tuple[Future[None], Bytes]] = deque()

    def split(self) -> None:
        """Keep apart how many edges of each row have come so far."""
        self._split = self._spill.num_batches

    def add(
        self,
        rows: npt.NDArray[Any],
        cols: npt.NDArray[Any],
        *,
        numbers: NodeArray | None = None,
        first_row: int = 0,
        num_ids: int | None = None,
        first_col: int = 0,
        num_col_ids: int | None = None,
        values: Degrees | None = None,
        first_value: int = 0,
        drops_loops: bool = False,
    ) -> None:
        """Distribute some edges.

        Args:
            rows: The ends to sort by, the row of id ``i`` being ``first_row + i``.
            cols: The other ends, likewise.
            numbers: What to call node ``first_row + i``, and ``first_col + i``, instead.
            num_ids: Ids in ``rows`` are below it; by default all that there are.
            num_col_ids: Ids in ``cols`` are below it.
            values: uint32, one for each edge; by default they are numbered from ``first_value`` on.
            drops_loops: Leave out edges whose two ends are one.

        Raises:
            IndexError: An id is out of range.
        """
        for some in range(0, len(rows), _ADDED_EDGES):
            stop = min(some + _ADDED_EDGES, len(rows))
            self._wait(len(self._spill.paths))
            records = self._free.pop() if self._free else np.empty(0, dtype=np.uint8)
            if len(records) < (stop - some) * self._record_bytes:
                records = np.empty((stop - some) * self._record_bytes, dtype=np.uint8)
            counts = np.empty(self.num_buckets, dtype=np.int64)
            kernels().bucket_edges(
                rows[some:stop],
                cols[some:stop],
                numbers,
                self.num_rows,
                first_row,
                self.num_rows - first_row if num_ids is None else num_ids,
                first_col,
                self.num_rows - first_col if num_col_ids is None else num_col_ids,
                None if values is None else values[some:stop],
                first_value + some,
                self._value_bytes,
                self.col_dtype.itemsize,
                drops_loops,
                self.shift,
                records,
                counts,
                self._num_threads,
            )
            write = self._spill.reserve(counts)
            if self._num_threads == 1 or stop - some < _LEAST_WRITTEN_APART:
                write(records)
                self._free.append(records)
                continue
            if self._writers is None:
                self._writers = ThreadPoolExecutor(max_workers=len(self._spill.paths))
            self._coming.append((self._writers.submit(write, records), records))

    def _wait(self, most: int = 0) -> None:
        """Until at most so many batches are being written."""
        while len(self._coming) > most:
            coming, records = self._coming.popleft()
            coming.result()
            self._free.append(records)

    def finish(self, *, merges: bool = False) -> SortedEdges:
        """Sort what has come.

        Args:
            merges: Make edges with the same two ends one, whose weight is the sum; rows are then
                ascending. Values must be weights.
        """
        self._wait()
        if self._writers is not None:
            self._writers.shutdown()
        self._free.clear()
        paths = {"degrees": self.folder / "degrees.u32"}
        if self._split is not None:
            assert not merges
            paths["firsts"] = self.folder / "firsts.u32"
        value_dtype = None if self.value_dtype is None else self.value_dtype.name
        paths["cols"] = self.folder / _COLS[self.col_dtype.name]
        if value_dtype is not None:
            paths["values"] = self.folder / _VALUES[value_dtype]
        descriptors: dict[str, int] = {}

        def write(name: str, items: npt.NDArray[Any], place: int) -> None:
            with writing(paths[name]):
                data = items.view(np.uint8).data
                _write_at(descriptors[name], data, place * items.itemsize)

        try:
            for name, path in paths.items():
                with writing(path):
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    descriptors[name] = os.open(path, flags)
            with ThreadPoolExecutor(max_workers=self._num_threads) as pool:
                if merges:
                    starts = self._finish_merged(pool, write)
                else:
                    starts = [0, *np.cumsum(self._spill.totals()).tolist()]
                    buckets = range(self.num_buckets)
                    list(pool.map(lambda i: self._sort(i, starts[i], write), buckets))
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        self._spill.remove()
        return SortedEdges(
            *(self.folder, self.num_rows, self.col_dtype.name, value_dtype, self.shift, starts),
            is_split=self._split is not None,
        )

    def _finish_merged(self, pool: ThreadPoolExecutor, write: _Write) -> list[int]:
        """Merge some buckets at a time: where one goes is known when those before are merged."""
        starts = [0]
        coming: deque[Future[tuple[Degrees, NodeArray, NodeArray]]] = deque()
        # One more than there are threads: none is without work while one that is ready is written.
        ahead = self._num_threads + (self._num_threads > 1)
        for bucket in range(self.num_buckets + ahead):
            if bucket < self.num_buckets:
                coming.append(pool.submit(self._merged, bucket))
            if bucket < ahead:
                continue
            degrees, cols, values = coming.popleft().result()
            write("degrees", degrees, (len(starts) - 1) << self.shift)
            write("cols", cols, starts[-1])
            write("values", values, starts[-1])
            starts.append(starts[-1] + len(cols))
        return starts

    def _merged(self, bucket: int) -> tuple[Degrees, NodeArray, NodeArray]:
        """Degrees of a bucket's rows, its columns and weights."""
        records = self._spill.read(bucket)
        degrees = self._no_degrees(bucket)
        kernels().count_rows(records, self._record_bytes, degrees)
        count = self._spill.count(bucket)
        cols, values = np.empty(count, self.col_dtype), np.empty(count, self.value_dtype)
        places = np.cumsum(degrees, dtype=np.int64) - degrees
        kernels().place_rows(records, places, 0, cols, values)
        count = kernels().merge_repeated(degrees, cols, values)
        return degrees, cols[:count], values[:count]

    def _no_degrees(self, bucket: int) -> Degrees:
        left = self.num_rows - (bucket << self.shift)
        return np.zeros(max(min(1 << self.shift, left), 0), dtype=np.uint32)

    def _sort(self, bucket: int, start: int, write: _Write) -> None:
        """Sort a bucket whose first edge has the number ``start``."""
        degrees, firsts = self._no_degrees(bucket), self._no_degrees(bucket)
        count = self._spill.count(bucket)
        most = max(self._memory // self._num_threads // (2 * self._record_bytes), 1 << 16)
        is_whole = count <= most
        whole = [self._spill.read(bucket)] if is_whole else []

        def segments() -> Iterable[Bytes]:
            return whole if is_whole else self._spill.segments(bucket, most)

        left = self._spill.count(bucket, self._split) * self._record_bytes
        for records in segments():
            kernels().count_rows(records[:left], self._record_bytes, firsts)
            kernels().count_rows(records[left:], self._record_bytes, degrees)
            left = max(left - len(records), 0)
        degrees += firsts
        ends = np.cumsum(degrees, dtype=np.int64)
        window = count if is_whole else most
        for begin in range(0, count, max(window, 1)):
            size = min(window, count - begin)
            cols = np.empty(size, dtype=self.col_dtype)
            values = None if self.value_dtype is None else np.empty(size, dtype=self.value_dtype)
            places = ends - degrees
            for records in segments():
                kernels().place_rows(records, places, begin, cols, values)
            whole.clear()
            write("cols", cols, start + begin)
            if values is not None:
                write("values", values, start + begin)
        write("degrees", degrees, bucket << self.shift)
        if self._split is not None:
            write("firsts", firsts, bucket << self.shift)


def batch_ends(degrees: Degrees, most_rows: int, most_edges: int) -> EdgeCounts:
    """Cut rows into batches of at most so many rows, and edges unless it is a single row.

    The cut depends on the degrees alone; every ``most_rows`` rows a batch ends.
    """
    num_rows = len(degrees)
    ends = np.append(np.arange(most_rows, num_rows, most_rows), num_rows)[: None if num_rows else 0]
    totals = np.concatenate([[0], np.cumsum(degrees, dtype=np.int64)])
    starts = np.concatenate([[0], ends])[:-1]
    heavy = np.flatnonzero(totals[ends] - totals[starts] > most_edges)
    if not len(heavy):
        return ends.astype(np.int64)
    more = [ends]
    for i in heavy.tolist():
        row, end = int(starts[i]), int(ends[i])
        while row < end:
            stop = int(np.searchsorted(totals, totals[row] + most_edges, side="right")) - 1
            row = min(max(stop, row + 1), end)
            more.append(np.array([row]))
    return np.unique(np.concatenate(more)).astype(np.int64)


_COLS = {"uint32": "cols.u32", "int64": "cols.i64"}
_VALUES = {"uint32": "values.u32", "int64": "values.i64"}


def _read_items(path: Path, dtype: str, first: int, count: int) -> npt.NDArray[Any]:
    """Some numbers of a file of ours."""
    items: npt.NDArray[Any] = np.empty(count, dtype=dtype)
    if count:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _read_at(descriptor, items.view(np.uint8).data, first * items.itemsize, path)
        finally:
            os.close(descriptor)
    return items


def _read_at(descriptor: int, data: memoryview, start: int, path: Path) -> None:
    done = 0
    while done < len(data):
        received = os.preadv(descriptor, [data[done:]], start + done)
        if received == 0:
            raise OSError(f"{path} ends at byte {start + done}, before what was written to it")
        done += received


def _write_at(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)


def concatenated(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Arrays behind each other; an empty one of that dtype for none."""
    return np.concatenate([np.zeros(0, dtype=dtype), *arrays])
