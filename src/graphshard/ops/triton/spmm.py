# SPDX-License-Identifier: Apache-2.0
"""Messages reduced at their destinations: a program for some pieces of rows and block of columns.

Edges of a piece are taken in the order of their ids, one after the other, so that neither the block
sizes nor the number of warps changes a bit of the result, and `run_tuned` is free to choose them.
Where rows are narrow a warp takes several of them, and is as busy as its longest.

The gradient of a maximum is such a sum, too, by source: of the destinations whose maximum came from
the edge. Each number of it is added by one program in the order of edges, with no atomics.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._adjacency import Adjacency
from .._attention_rule import wide
from .._check import dense
from ._launch import (
    EXACT,
    INTERPRETED,
    block,
    num_blocks,
    on_its_device,
    sum_type,
    warps,
    width_class,
)
from ._places import row_places_of
from ._tasks import AT_ONCE, row_tasks, task_of
from ._tune import Configuration, run_tuned


@triton.jit
def message(OP: tl.constexpr, left, right):
    """One message from both of its numbers; a copy has one of them alone."""
    if OP == "copy_lhs":
        value = left
    elif OP == "copy_rhs":
        value = right
    elif OP == "add":
        value = left + right
    elif OP == "sub":
        value = left - right
    elif OP == "mul":
        value = left * right
    else:
        value = left / right
    return value


@triton.jit
def is_better(value, best, NONE, arg, SMALLEST: tl.constexpr):
    """Whether a later value takes the place of the best; a NaN is better than any number."""
    if SMALLEST:
        beats = value < best
    else:
        beats = value > best
    return (arg == NONE) | beats | ((value != value) & (best == best))


@triton.jit
def _reduce(
    out, arg, parts, part_args, count, indptr, rows, begins, ends, slots, indices, eids, lhs, rhs,
    only, lhs_columns, rhs_columns, width, lhs_width, rhs_width,
    OP: tl.constexpr, REDUCE: tl.constexpr, HAS_EIDS: tl.constexpr, HAS_ONLY: tl.constexpr,
    LHS_TABLE: tl.constexpr, RHS_TABLE: tl.constexpr, RHS_ONE: tl.constexpr,
    SPLIT: tl.constexpr, SUM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_task = number < count
    number = tl.minimum(number, count - 1)
    row, begin, end, slot = task_of(number, indptr, rows, begins, ends, slots, SPLIT)
    end = tl.where(is_task, end, begin)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width)[None, :]
    left_column = column
    right_column = column
    if LHS_TABLE:
        left_column = tl.load(lhs_columns + column, mask=column < width, other=0)
    if RHS_TABLE:
        right_column = tl.load(rhs_columns + column, mask=column < width, other=0)
    READS_LHS: tl.constexpr = OP != "copy_rhs"
    READS_RHS: tl.constexpr = OP != "copy_lhs"
    IS_SUM: tl.constexpr = (REDUCE == "sum") | (REDUCE == "mean")
    best = tl.zeros([ROWS, BLOCK], SUM)
    best_edge = tl.zeros([ROWS, BLOCK], tl.int64) - 1
    for first in range(0, tl.max(end - begin), UNROLL):
        for step in tl.static_range(UNROLL):
            position = begin + first + step
            is_edge = position < end
            there = is_edge[:, None] & inside
            left = best
            right = best
            edge = position
            if HAS_EIDS:
                edge = tl.load(eids + position, mask=is_edge, other=0).to(tl.int64)
            if READS_LHS:
                node = tl.load(indices + position, mask=is_edge, other=0).to(tl.int64)
                if HAS_ONLY:
                    takers = only + (node * width)[:, None] + column[None, :]
                    taker = tl.load(takers, mask=there, other=-1).to(tl.int64)
                    there = there & (taker == edge[:, None])
                of_node = lhs + (node * lhs_width)[:, None] + left_column[None, :]
                left = tl.load(of_node, mask=there, other=0).to(SUM)
            if READS_RHS:
                if RHS_ONE:  # a number of the edge for all columns: one load, not one for each
                    right = tl.load(rhs + edge, mask=is_edge, other=0).to(SUM)[:, None]
                else:
                    of_edge = rhs + (edge * rhs_width)[:, None] + right_column[None, :]
                    right = tl.load(of_edge, mask=there, other=0).to(SUM)
                right = tl.where(there, right, 1.0)
            value = message(OP, left, right)
            if IS_SUM:
                best += tl.where(there, value, 0)
            else:
                taken = there & is_better(value, best, -1, best_edge, REDUCE == "min")
                best = tl.where(taken, value, best)
                best_edge = tl.where(taken, edge[:, None], best_edge)
    is_row = is_task
    if SPLIT:
        is_row = is_task & (slot < 0)
        of_part = (slot * width)[:, None] + column[None, :]
        is_part = (is_task & (slot >= 0))[:, None] & inside
        tl.store(parts + of_part, best, mask=is_part)
        if not IS_SUM:
            tl.store(part_args + of_part, best_edge, mask=is_part)
    if REDUCE == "mean":
        best = best / tl.maximum(end - begin, 1).to(SUM)[:, None]
    to = (row * width)[:, None] + column[None, :]
    tl.store(out + to, best, mask=is_row[:, None] & inside)
    if not IS_SUM:
        tl.store(arg + to, best_edge, mask=is_row[:, None] & inside)


@triton.jit
def _merge(
    out, arg, parts, part_args, long_rows, first_slots, indptr, width,
    REDUCE: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(long_rows + number)
    end = tl.load(first_slots + number + 1)
    IS_SUM: tl.constexpr = (REDUCE == "sum") | (REDUCE == "mean")
    best = tl.zeros([BLOCK], SUM)
    best_edge = tl.zeros([BLOCK], tl.int64) - 1
    for first in range(tl.load(first_slots + number), end, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            slot = first + step
            there = inside & (slot + column * 0 < end)
            value = tl.load(parts + slot * width + column, mask=there, other=0)
            if IS_SUM:
                best += value
            else:
                edge = tl.load(part_args + slot * width + column, mask=there, other=0)
                taken = there & is_better(value, best, -1, best_edge, REDUCE == "min")
                best = tl.where(taken, value, best)
                best_edge = tl.where(taken, edge, best_edge)
    if REDUCE == "mean":
        degree = tl.load(indptr + row + 1) - tl.load(indptr + row)
        best = best / degree.to(SUM)
    tl.store(out + row * width + column, best, mask=inside)
    if not IS_SUM:
        tl.store(arg + row * width + column, best_edge, mask=inside)


NUMBERS = 128
"""Of a warp: loads of 16 bytes a lane, of float32."""


@lru_cache(maxsize=512)
def configurations(width: int) -> tuple[Configuration, ...]:
    """How programs take rows of so many columns: narrow ones several at a time."""
    tried = {}
    for most, unroll, numbers in (
        (128, 4, NUMBERS), (128, 8, NUMBERS), (128, 4, 4 * NUMBERS),
        (256, 4, NUMBERS), (64, 4, NUMBERS), (128, 4, 1),
    ):  # fmt: skip
        size = block(width, most)
        rows = max(1, numbers // size)
        tried[size, rows, unroll] = max(1, size * rows // NUMBERS)
    return tuple(
        {"BLOCK": size, "ROWS": rows, "UNROLL": unroll, "num_warps": num_warps}
        for (size, rows, unroll), num_warps in tried.items()
    )


@on_its_device
def spmm(
    adj: Adjacency,
    op: str,
    reduce: str,
    lhs: Tensor | None,
    rhs: Tensor | None,
    only: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Reduced messages ``[num_dst, ...]``; for max and min also the ids of their edges.

    Args:
        only: ``[num_src, ...]``, like rows of ``lhs`` and of the result, an edge for each number:
            in a sum only the message along that edge counts. None for all.
    """
    lhs = None if op == "copy_rhs" else lhs
    rhs = None if op == "copy_lhs" else rhs
    like = lhs if lhs is not None else rhs
    assert like is not None
    shapes = (None if side is None else tuple(side.shape[1:]) for side in (lhs, rhs))
    places = row_places_of(*shapes, like.device)
    out = like.new_empty((adj.num_dst, *places.shape))
    is_sum = reduce in ("sum", "mean")
    arg = None if is_sum else torch.empty_like(out, dtype=adj.idtype)
    if out.numel() == 0 or adj.num_edges == 0:
        return out.zero_(), None if arg is None else arg.fill_(-1)
    indptr, indices, eids = adj.csc(ids=rhs is not None or only is not None or not is_sum)
    width = math.prod(places.shape)
    left, right = (like if side is None else dense(side) for side in (lhs, rhs))
    tasks = row_tasks(indptr, adj.longest_row("csc"))
    parts = out.new_empty((tasks.num_slots, width), dtype=wide(like.dtype))
    one = _width(rhs) == 1
    part_args = out.new_empty((0 if is_sum else tasks.num_slots, width), dtype=torch.int64)

    def run(configuration: Configuration) -> None:
        sizes = (("ROWS", tasks.count), ("BLOCK", width))
        grid = tuple(num_blocks(size, configuration[name]) for name, size in sizes)
        _reduce[grid](
            out, out if arg is None else arg, parts, part_args,
            tasks.count, *tasks.arguments(indptr), indices, indices if eids is None else eids,
            left, right, indices if only is None else dense(only),
            indptr if places.lhs is None else places.lhs,
            indptr if places.rhs is None else places.rhs,
            width, _width(lhs), _width(rhs),
            OP=op, REDUCE=reduce, HAS_EIDS=eids is not None, HAS_ONLY=only is not None,
            LHS_TABLE=places.lhs is not None, RHS_TABLE=places.rhs is not None and not one,
            RHS_ONE=one, SPLIT=tasks.is_split, SUM=sum_type(like.dtype), **configuration, **EXACT,
        )  # fmt: skip

    key = (
        *("spmm", op, reduce, only is None, places.lhs is None, places.rhs is None),
        *(adj.idtype, width_class(width), like.dtype, like.device),
    )
    interpreted = {"BLOCK": block(width, 256), "ROWS": 16, "UNROLL": 1}
    some = (interpreted,) if INTERPRETED else configurations(width)
    run_tuned(key, some, run, [out] if arg is None else [out, arg], adj.num_edges * width)
    if tasks.is_split:
        assert tasks.long_rows is not None
        size = block(width, 256)
        _merge[(tasks.long_rows.shape[0], num_blocks(width, size))](
            out, out if arg is None else arg, parts, part_args, tasks.long_rows,
            tasks.first_slots, indptr, width,
            REDUCE=reduce, SUM=sum_type(like.dtype), BLOCK=size, AT_ONCE=AT_ONCE,
            num_warps=warps(size * 4), **EXACT,
        )  # fmt: skip
    return out, arg


def _width(rows: Tensor | None) -> int:
    return 0 if rows is None else math.prod(rows.shape[1:])
