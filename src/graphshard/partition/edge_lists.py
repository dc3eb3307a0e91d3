# SPDX-License-Identifier: Apache-2.0
"""What is asked of all edges of a relation at once, in bounded memory: repeated ones, and more.

Edges come a batch at a time, as often as they are asked for. They are sorted on disk, as the stages
of partitioning do it, and pass by once more; what is said of each edge goes into an array that the
caller gives, which may be a mapped file.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._base.kernels import num_threads
from ._edge_files import EdgeBlock, EdgeSorter, kernels
from ._graph_source import IdArray

_MEMORY = 1 << 27  # of sorting
_BLOCK_EDGES = 1 << 20


@dataclass(frozen=True)
class EdgeList:
    """The edges of a relation.

    Args:
        batches: Makes (source, destination) of some edges, int32 or int64, from the first edge on,
            whenever it is called.
    """

    num_src: int
    num_dst: int
    num_edges: int
    batches: Callable[[], Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]]


def release_pages(array: npt.NDArray[Any]) -> None:
    """Give back the pages of an array that is mapped from a file; what it holds stays."""
    mapped = getattr(array, "_mmap", None)
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)


def count_repeated(edges: EdgeList, folder: Path) -> int:
    """How many edges have both ends of an earlier one.

    Args:
        folder: Where sorted edges may go meanwhile.

    Raises:
        OSError: The disk is full.
    """
    num_repeated, num_cols = 0, max(edges.num_src, edges.num_dst)
    for block in _sorted(edges, folder, _as_they_are, has_values=False):
        rows = np.repeat(np.arange(len(block.degrees)), block.degrees)
        num_repeated += kernels().count_repeated(
            rows, block.cols.astype(np.int64), len(block.degrees), num_cols, num_threads()
        )
    return num_repeated


def find_first_edges(
    edges: EdgeList, folder: Path, out: npt.NDArray[Any], *, is_ordered: bool = True
) -> None:
    """The first edge that has the ends of each edge.

    Args:
        folder: As for `count_repeated`.
        out: Integers ``[num_edges]``, which are written.
        is_ordered: Whether an edge and its reverse have different ends.
    """
    for block in _sorted(edges, folder, _as_they_are if is_ordered else _lower_end_first):
        order, starts, _, _ = _groups(block)
        assert block.values is not None
        numbers = block.values[order]
        sizes = np.diff(np.append(starts, len(order)))
        out[numbers] = np.repeat(np.minimum.reduceat(numbers, starts), sizes)
        release_pages(out)


def count_alike(edges: EdgeList, folder: Path, out: npt.NDArray[np.int64]) -> None:
    """How many edges have the ends of each edge.

    Args:
        folder: As for `count_repeated`.
        out: ``[num_edges]``, which is written.
    """
    for block in _sorted(edges, folder, _as_they_are):
        order, starts, _, _ = _groups(block)
        assert block.values is not None
        sizes = np.diff(np.append(starts, len(order)))
        out[block.values[order]] = np.repeat(sizes, sizes)
        release_pages(out)


def find_lone_edges(edges: EdgeList, folder: Path, out: npt.NDArray[np.bool_]) -> None:
    """The edges between two nodes that no edge has the reverse of.

    Args:
        folder: As for `count_repeated`.
        out: ``[num_edges]`` of a relation between nodes of one type, which is written.
    """
    for block in _sorted(edges, folder, _with_direction, num_cols=2 * edges.num_src):
        order, starts, rows, cols = _groups(block, shift=1)
        assert block.values is not None
        is_turned = block.cols[order] & block.cols.dtype.type(1) != 0
        sizes = np.diff(np.append(starts, len(order)))
        is_both = np.logical_or.reduceat(is_turned, starts) & np.logical_or.reduceat(
            ~is_turned, starts
        )
        out[block.values[order].astype(np.int64)] = ~np.repeat(is_both, sizes) & (rows != cols)
        release_pages(out)


def in_both_directions(
    edges: EdgeList, folder: Path
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Each edge and its reverse once, by source and then by destination, a batch at a time.

    Args:
        edges: Between nodes of one type.
        folder: As for `count_repeated`.
    """
    for block in _sorted(edges, folder, _as_they_are, merges=True):
        last = block.first_row + len(block.degrees)
        yield np.repeat(np.arange(block.first_row, last), block.degrees), block.cols


_BatchEnds: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def _as_they_are(src: npt.NDArray[Any], dst: npt.NDArray[Any]) -> _BatchEnds:
    return src, dst


def _lower_end_first(src: npt.NDArray[Any], dst: npt.NDArray[Any]) -> _BatchEnds:
    return np.minimum(src, dst), np.maximum(src, dst)


def _with_direction(src: npt.NDArray[Any], dst: npt.NDArray[Any]) -> _BatchEnds:
    """The lower end; and twice the other one, plus one where that is the source."""
    other = np.maximum(src, dst).astype(np.int64)
    return np.minimum(src, dst).astype(np.int64), 2 * other + (src > dst)


def _sorted(
    edges: EdgeList,
    folder: Path,
    prepared: Callable[[npt.NDArray[Any], npt.NDArray[Any]], _BatchEnds],
    *,
    num_cols: int = 0,
    has_values: bool = True,
    merges: bool = False,
) -> Iterator[EdgeBlock]:
    """Edges by their first end, with their numbers.

    Args:
        prepared: Makes the two ends by which edges are sorted.
        num_cols: Second ends are below it, if that is above the numbers of nodes.
        merges: Also sort reverses, and by second ends, too, leaving out what is repeated.
    """
    inside = folder / "sorted-edges"
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    try:
        value_dtype = np.uint32 if merges or edges.num_edges < 2**32 else np.int64
        sorter = EdgeSorter(
            inside,
            max(edges.num_src, edges.num_dst, num_cols),
            (1 + merges) * edges.num_edges,
            value_dtype=value_dtype if has_values else None,
            memory=_MEMORY,
            num_threads=num_threads(),
        )
        done = 0
        for src, dst in edges.batches():
            rows, cols = prepared(src, dst)
            if merges:
                weights = np.ones(len(rows), np.uint32)
                sorter.add(rows, cols, values=weights)
                sorter.add(cols, rows, values=weights)
            else:
                sorter.add(rows, cols, first_value=done)
            done += len(src)
        by_row = sorter.finish(merges=merges)
        blocks = by_row.blocks(most_edges=_BLOCK_EDGES, with_values=has_values and not merges)
        for block, _ in blocks:
            yield block
    finally:
        shutil.rmtree(inside, ignore_errors=True)


def _groups(block: EdgeBlock, shift: int = 0) -> tuple[IdArray, IdArray, IdArray, npt.NDArray[Any]]:
    """Edges of a block by both of their ends.

    Args:
        shift: Bits of second ends that do not count.

    Returns:
        Their order; where edges with other ends begin in it; and both ends in it.
    """
    rows = np.repeat(np.arange(len(block.degrees), dtype=np.int64), block.degrees)
    cols = block.cols.astype(np.int64) >> shift
    num_cols = int(cols.max(initial=0)) + 1
    keys = rows * num_cols + cols  # a block has at most 2^20 rows
    order = np.argsort(keys)
    keys = keys[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    rows, cols = np.divmod(keys, num_cols)
    return order, starts, rows + block.first_row, cols
