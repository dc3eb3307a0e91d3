# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of sorting edges and numbering nodes, in NumPy; of one name and signature.

What is written of each is in ``_kernels.pyi`` and csrc/partition. These serve where there are no
compiled kernels, and say in tests what those must do. ``num_threads`` changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def _check_ids(ids: Array, num_ids: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_ids:
        raise IndexError("the id of a node must be below the number of nodes")


def _record_dtype(col_bytes: int, value_bytes: int) -> np.dtype[Any]:
    fields = [("row", "<u4"), ("col", "<u4" if col_bytes == 4 else "<i8")]
    if value_bytes:
        fields.append(("value", "<u4" if value_bytes == 4 else "<i8"))
    return np.dtype(fields)


def bucket_edges(
    rows: Array,
    cols: Array,
    numbers: Array | None,
    num_nodes: int,
    first_row: int,
    num_rows: int,
    first_col: int,
    num_cols: int,
    values: Array | None,
    first_value: int,
    value_bytes: int,
    col_bytes: int,
    drops_loops: bool,
    shift: int,
    records: Array,
    counts: Array,
    num_threads: int,
) -> None:
    _check_ids(rows, num_rows)
    _check_ids(cols, num_cols)
    new_rows, new_cols = rows.astype(np.int64) + first_row, cols.astype(np.int64) + first_col
    kept = np.flatnonzero(new_rows != new_cols) if drops_loops else np.arange(len(rows))
    if numbers is not None:
        new_rows, new_cols = (numbers[ids].astype(np.int64) for ids in (new_rows, new_cols))
    buckets = new_rows[kept] >> shift
    if len(buckets) and int(buckets.max()) >= len(counts):
        raise IndexError("every row must belong to a bucket")
    order = kept[np.argsort(buckets.astype(np.uint16), kind="stable")]
    made = np.empty(len(order), dtype=_record_dtype(col_bytes, value_bytes))
    made["row"] = new_rows[order] & ((1 << shift) - 1)
    made["col"] = new_cols[order]
    if value_bytes:
        made["value"] = order + first_value if values is None else values[order]
    records[: made.nbytes] = made.view(np.uint8)
    counts[:] = np.bincount(buckets, minlength=len(counts))


def count_rows(records: Array, record_bytes: int, degrees: Array) -> None:
    rows = records.reshape(-1, record_bytes)[:, :4].copy().view(np.uint32)[:, 0]
    _check_ids(rows, len(degrees))
    degrees += np.bincount(rows, minlength=len(degrees)).astype(degrees.dtype)


def place_rows(
    records: Array, places: Array, begin: int, cols: Array, values: Array | None
) -> None:
    dtype = _record_dtype(cols.itemsize, 0 if values is None else values.itemsize)
    items = records.view(dtype)
    order = np.argsort(items["row"], kind="stable")
    counts = np.bincount(items["row"], minlength=len(places))
    steps = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    to = np.repeat(places, counts) + steps - begin
    places += counts
    is_inside = (to >= 0) & (to < len(cols))
    to, items = to[is_inside], items[order[is_inside]]
    cols[to] = items["col"]
    if values is not None:
        values[to] = items["value"]


def merge_repeated(degrees: Array, cols: Array, weights: Array) -> int:
    rows = np.repeat(np.arange(len(degrees)), degrees)
    order = np.lexsort((cols, rows))
    rows, sorted_cols = rows[order], cols[order]
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (sorted_cols[1:] != sorted_cols[:-1])
    starts = np.flatnonzero(is_first)
    sums = np.add.reduceat(weights[order].astype(np.uint64), starts) if len(starts) else starts
    cols[: len(starts)] = sorted_cols[starts]
    weights[: len(starts)] = np.minimum(sums, 2**32 - 1)
    degrees[:] = np.bincount(rows[starts], minlength=len(degrees))
    return len(starts)


def _mixed(numbers: Array) -> Array:
    """The end of MurmurHash3 (A. Appleby, 2011)."""
    shift = np.uint64(33)
    numbers = (numbers ^ (numbers >> shift)) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> shift)) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ (numbers >> shift)


def hash_edges(
    rows: Array, cols: Array, first_row: int, first_col: int, first: int, num_threads: int
) -> tuple[int, int]:
    factor = np.uint64(0x9E3779B97F4A7C15)
    row = (rows.astype(np.int64) + first_row).view(np.uint64)
    col = (cols.astype(np.int64) + first_col).view(np.uint64)
    there, back = _mixed(row * factor + col), _mixed(col * factor + row)
    places = np.arange(first, first + len(rows), dtype=np.uint64)
    in_order = there * (places * np.uint64(2) + np.uint64(1))
    return int(in_order.sum(dtype=np.uint64)), int((there - back).sum(dtype=np.uint64))


def count_ids(ids: Array, first: int, num_ids: int, degrees: Array, num_threads: int) -> None:
    _check_ids(ids, num_ids)
    degrees[first : first + num_ids] += np.bincount(ids, minlength=num_ids).astype(degrees.dtype)


def order_by_key(
    keys: Array, num_keys: int, order: Array | None, ordered: Array, num_threads: int
) -> None:
    if len(keys) and int(keys.max()) >= num_keys:
        raise IndexError("keys must be below num_keys")
    before = np.arange(len(keys)) if order is None else order
    if len(keys) and np.bincount(before, minlength=len(keys)).max() > 1:
        raise IndexError("an order must name every node once")
    ordered[:] = before[np.argsort(keys[before], kind="stable")]


def _cut_edges(
    src: Array, dst: Array, parts: Array, ranges: tuple[int, int, int, int]
) -> tuple[Array, Array, Array]:
    """Source, owner and reader of each edge between two parts."""
    first_src, num_src, first_dst, num_dst = ranges
    _check_ids(src, num_src)
    _check_ids(dst, num_dst)
    sources = src.astype(np.int64) + first_src
    owners, readers = parts[sources], parts[dst.astype(np.int64) + first_dst]
    is_cut = owners != readers
    return sources[is_cut], owners[is_cut].astype(np.int64), readers[is_cut].astype(np.int64)


def count_cut(
    src: Array,
    dst: Array,
    parts: Array,
    first_src: int,
    num_src: int,
    first_dst: int,
    num_dst: int,
    pairs: Array,
    num_threads: int,
) -> None:
    _, owners, readers = _cut_edges(src, dst, parts, (first_src, num_src, first_dst, num_dst))
    counts = np.bincount(owners * len(pairs) + readers, minlength=pairs.size)
    pairs += counts.reshape(pairs.shape)


def mark_readers(
    src: Array,
    dst: Array,
    parts: Array,
    first_src: int,
    num_src: int,
    first_dst: int,
    num_dst: int,
    digits: Array,
    masks: Array,
    num_threads: int,
) -> None:
    sources, owners, readers = _cut_edges(src, dst, parts, (first_src, num_src, first_dst, num_dst))
    digit = digits[owners, readers]
    for number in range(8):
        masks[sources[digit == number]] |= np.uint8(0x80 >> number)


def mark_outside(ids: Array, first: int, last: int, bits: Array) -> int:
    outside = ids[(ids < first) | (ids >= last)].astype(np.int64)
    _check_ids(outside, 64 * len(bits))
    marks = np.unpackbits(bits.view(np.uint8), bitorder="little")
    marks[outside] = 1
    bits[:] = np.packbits(marks, bitorder="little").view(np.uint64)
    return len(outside)


def rank_words(bits: Array, ranks: Array) -> int:
    counts = np.unpackbits(bits.view(np.uint8)).reshape(-1, 64).sum(axis=1, dtype=np.int64)
    ranks[:] = np.cumsum(counts) - counts
    return int(counts.sum())


def list_marked(bits: Array, first_word: int, last_word: int, ids: Array) -> int:
    marks = np.unpackbits(bits[first_word:last_word].view(np.uint8), bitorder="little")
    listed = np.flatnonzero(marks) + 64 * first_word
    ids[: len(listed)] = listed
    return len(listed)


def find_local_ids(
    ids: Array, first: int, last: int, bits: Array, ranks: Array, local_ids: Any
) -> None:
    marks = np.unpackbits(bits.view(np.uint8), bitorder="little")
    wide = ids.astype(np.int64)
    is_inner = (wide >= first) & (wide < last)
    _check_ids(wide[~is_inner], len(marks))
    if not marks[wide[~is_inner]].all():
        raise IndexError("an id outside of the part must be marked")
    places = np.cumsum(marks, dtype=np.int64) - 1 + (last - first)
    local = np.where(is_inner, wide - first, 0)
    local[~is_inner] = places[wide[~is_inner]]
    np.asarray(local_ids)[:] = local


def find_cut_edges(
    degrees: Array,
    cols: Array,
    first_row: int,
    first_edge: int,
    ends: Array,
    part: int,
    records: Array,
    counts: Array,
) -> None:
    owners = np.searchsorted(ends, cols.astype(np.int64), side="right")
    _check_ids(owners, len(ends))
    cut = np.flatnonzero(owners != part)
    cut = cut[np.argsort(owners[cut].astype(np.uint16), kind="stable")]
    rows = np.repeat(np.arange(len(degrees)), degrees) + first_row
    made = np.empty(len(cut), dtype=[("src", cols.dtype), ("dst", cols.dtype), ("edge", "<i8")])
    made["src"], made["dst"], made["edge"] = cols[cut], rows[cut], cut + first_edge
    records[: made.nbytes] = made.view(np.uint8)
    counts[:] = np.bincount(owners[cut], minlength=len(ends))
