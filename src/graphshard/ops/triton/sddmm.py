# SPDX-License-Identifier: Apache-2.0
"""A value per edge from its ends and itself, and the softmax of such values over a destination."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._adjacency import Adjacency
from .._broadcast import dot_loop
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
from ._tune import Configuration, run_tuned
from .spmm import message, spmm


@triton.jit
def _rows_of(TARGET: tl.constexpr, edge, src, dst, there):
    """Which row of an operand an edge reads."""
    if TARGET == "u":
        row = tl.load(src + edge, mask=there, other=0).to(tl.int64)
    elif TARGET == "v":
        row = tl.load(dst + edge, mask=there, other=0).to(tl.int64)
    else:
        row = edge
    return row


@triton.jit
def _per_edge(
    out, src, dst, lhs, rhs, lhs_columns, rhs_columns, num_edges, width, lhs_width, rhs_width,
    OP: tl.constexpr, LHS: tl.constexpr, RHS: tl.constexpr, LHS_TABLE: tl.constexpr,
    RHS_TABLE: tl.constexpr, SUM: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    edge = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = edge < num_edges
    inside = column < width
    left_column = column
    right_column = column
    if LHS_TABLE:
        left_column = tl.load(lhs_columns + column, mask=inside, other=0)
    if RHS_TABLE:
        right_column = tl.load(rhs_columns + column, mask=inside, other=0)
    both = there[:, None] & inside[None, :]
    left_row = _rows_of(LHS, edge, src, dst, there) * lhs_width
    right_row = _rows_of(RHS, edge, src, dst, there) * rhs_width
    left = tl.load(lhs + left_row[:, None] + left_column[None, :], mask=both, other=0).to(SUM)
    right = tl.load(rhs + right_row[:, None] + right_column[None, :], mask=both, other=0).to(SUM)
    right = tl.where(both, right, 1.0)
    tl.store(out + edge[:, None] * width + column[None, :], message(OP, left, right), mask=both)


@triton.jit
def _dot(
    out, src, dst, lhs, rhs, lhs_offsets, rhs_offsets, num_edges, outer, inner, lhs_width,
    rhs_width, LHS: tl.constexpr, RHS: tl.constexpr, SUM: tl.constexpr,
    EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    edge = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    number = tl.program_id(1)
    there = edge < num_edges
    left_row = _rows_of(LHS, edge, src, dst, there) * lhs_width + tl.load(lhs_offsets + number)
    right_row = _rows_of(RHS, edge, src, dst, there) * rhs_width + tl.load(rhs_offsets + number)
    total = tl.zeros([EDGES, BLOCK], SUM)
    for first in range(0, inner, BLOCK):
        column = first + tl.arange(0, BLOCK)
        both = there[:, None] & (column < inner)[None, :]
        left = tl.load(lhs + left_row[:, None] + column[None, :], mask=both, other=0).to(SUM)
        right = tl.load(rhs + right_row[:, None] + column[None, :], mask=both, other=0).to(SUM)
        total += left * right
    tl.store(out + edge * outer + number, tl.sum(total, 1), mask=there)


@lru_cache(maxsize=512)
def configurations(width: int) -> tuple[Configuration, ...]:
    """How many edges a program may take: nothing is added up, so any."""
    size = block(width, 128)
    return tuple(
        {"BLOCK": size, "EDGES": max(1, numbers // size), "num_warps": num_warps}
        for numbers, num_warps in ((1024, 4), (2048, 4), (4096, 8))
    )


@on_its_device
def sddmm(
    adj: Adjacency, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str, rhs_target: str
) -> Tensor:
    """``op`` of two operands per edge ``[num_edges, ...]``."""
    lhs, rhs = dense(lhs), dense(rhs)
    rows = tuple(lhs.shape[1:]), tuple(rhs.shape[1:])
    src, dst = adj.coo()
    sizes = math.prod(rows[0]), math.prod(rows[1])
    options = {"LHS": lhs_target, "RHS": rhs_target, "SUM": sum_type(lhs.dtype)}
    if op == "dot":
        loop = dot_loop(*rows)
        out = lhs.new_empty((adj.num_edges, *loop.shape))
        if out.numel() == 0 or loop.inner == 0:
            return out.zero_()
        size = block(loop.inner, 128)
        edges = max(1, 1024 // size)
        offsets = (side.to(lhs.device) for side in (loop.lhs_offsets, loop.rhs_offsets))
        outer = math.prod(loop.shape)
        _dot[(num_blocks(adj.num_edges, edges), outer)](
            out, src, dst, lhs, rhs, *offsets, adj.num_edges, outer, loop.inner, *sizes,
            EDGES=edges, BLOCK=size, num_warps=warps(size * edges), **options, **EXACT,
        )  # fmt: skip
        return out
    places = row_places_of(*rows, lhs.device)
    out = lhs.new_empty((adj.num_edges, *places.shape))
    width = math.prod(places.shape)
    if out.numel() == 0:
        return out

    def run(configuration: Configuration) -> None:
        grid = tuple(
            num_blocks(size, configuration[name])
            for name, size in (("EDGES", adj.num_edges), ("BLOCK", width))
        )
        _per_edge[grid](
            out, src, dst, lhs, rhs,
            src if places.lhs is None else places.lhs, src if places.rhs is None else places.rhs,
            adj.num_edges, width, *sizes,
            OP=op, LHS_TABLE=places.lhs is not None, RHS_TABLE=places.rhs is not None,
            **configuration, **options, **EXACT,
        )  # fmt: skip

    key = (
        *("sddmm", op, lhs_target, rhs_target, places.lhs is None, places.rhs is None),
        *(adj.idtype, width_class(width), lhs.dtype, lhs.device),
    )
    some = configurations(width)
    run_tuned(key, some[:1] if INTERPRETED else some, run, [out], adj.num_edges * width)
    return out


@on_its_device
def edge_softmax(adj: Adjacency, logits: Tensor) -> Tensor:
    """Softmax over the in-edges of each destination ``[num_edges, ...]``."""
    if logits.numel() == 0:
        return logits.clone()
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak, _ = spmm(adj, "copy_rhs", "max", None, values)
    weights = sddmm(adj, "sub", values, peak, "e", "v").exp_()
    total, _ = spmm(adj, "copy_rhs", "sum", None, weights)
    return sddmm(adj, "div", weights, total, "e", "v").to(logits.dtype)


@on_its_device
def edge_softmax_backward(adj: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
    """``out * (grad - sum of out * grad over the destination)``: ``[num_edges, ...]``."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    product = out.to(dtype) * grad.to(dtype)
    total, _ = spmm(adj, "copy_rhs", "sum", None, product)
    return (product - sddmm(adj, "mul", out.to(dtype), total, "e", "v")).to(out.dtype)
