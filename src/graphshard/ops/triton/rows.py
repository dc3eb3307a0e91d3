# SPDX-License-Identifier: Apache-2.0
"""Rows added to some rows of a table: what halos send back.

Places are distinct, so each number has one writer, and no atomics are needed for results that
repeat bit for bit; rows of 16 bits are widened in registers.

[Note: rows on a GPU]
    Gathering rows is torch's: ``index_select`` moves as many bytes a second as memory gives, and
    writes into a given table (``out=``). So is the sum of what several ranks return for one row
    (`graphshard.comm.halo`): ``embedding_bag`` has one thread for each number, which adds in the
    order of a list that was sorted once. A sum at places that repeat, such as the gradient of a
    gather along edges, is ``gspmm`` with ``copy_rhs``, whose order is that of edges. None of them
    uses atomics on floating-point numbers; ``index_add_`` and the backward of ``index_select`` do.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._check import dense
from ._launch import EXACT, block, num_blocks, on_its_device, sum_type, warps

ROWS = 16  # of a program, where they are narrow


@triton.jit
def _add_rows(
    out, places, rows, count, width, out_stride,
    SUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = number < count
    both = there[:, None] & (column < width)[None, :]
    place = tl.load(places + number, mask=there, other=0).to(tl.int64) * out_stride
    to = out + place[:, None] + column[None, :]
    added = tl.load(rows + number[:, None] * width + column[None, :], mask=both, other=0).to(SUM)
    tl.store(to, tl.load(to, mask=both, other=0).to(SUM) + added, mask=both)


@on_its_device
def add_rows(out: Tensor, places: Tensor, rows: Tensor) -> None:
    """``out[places] += rows`` for distinct places in range; rows of ``out`` have no gaps inside."""
    width = math.prod(out.shape[1:])
    size = block(width, 256)
    some = max(1, min(ROWS, 1024 // size))
    added_as = sum_type(torch.promote_types(out.dtype, rows.dtype))
    _add_rows[(num_blocks(rows.shape[0], some), num_blocks(width, size))](
        out, dense(places), dense(rows), rows.shape[0], width, out.stride(0),
        SUM=added_as, ROWS=some, BLOCK=size, num_warps=warps(size * some), **EXACT,
    )  # fmt: skip
