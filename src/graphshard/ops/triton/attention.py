# SPDX-License-Identifier: Apache-2.0
"""Attention over in-edges in one pass, by an online softmax: a program for each piece and head.

The same description as in `graphshard.ops.Attention`; the state of destinations is that of
`AttentionState`. Pieces of a long row have states of their own, merged in order.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
https://arxiv.org/abs/1805.02867.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._adjacency import Adjacency
from .._attention_rule import Attention, wide
from ._launch import block, sum_type, warps
from ._tasks import row_tasks, task_of

EDGES = 16  # of a destination that a program takes at a time


@triton.jit
def _mixed(word):
    """The bijection of 32-bit words of `EdgeMask`."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def multipliers(
    edge, there, head, keys, factor, factor_columns, threshold, edge_seed, head_seed,
    KEPT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_FACTOR: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """(what the mask, what the factor makes of a weight 1) on some edges."""
    mask = tl.full(edge.shape, 1.0, SUM)
    scale = tl.full(edge.shape, 1.0, SUM)
    if HAS_MASK:
        if HAS_KEYS:
            key = tl.load(keys + edge, mask=there, other=0).to(tl.uint32, bitcast=True)
        else:
            key = edge.to(tl.uint32) ^ _mixed((edge >> 32).to(tl.uint32))
        # Arguments are of 64 bits; the sums wrap in 32.
        word = _mixed((key.to(tl.int64) + edge_seed).to(tl.uint32))
        of_head = (tl.full(edge.shape, 0x9E3779B9, tl.int64) * head + head_seed).to(tl.uint32)
        hashed = _mixed(word ^ _mixed(of_head))
        mask = tl.where(hashed.to(tl.int64) >= threshold, tl.full(edge.shape, KEPT, SUM), 0.0)
    if HAS_FACTOR:
        column = tl.where(factor_columns == 1, 0, head)
        scale = tl.load(factor + edge * factor_columns + column, mask=there, other=0).to(SUM)
    return mask, scale


@triton.jit
def _attend(
    peak, total, sums, sums_stride, part_peak, part_total, part_sums,
    indptr, rows, begins, ends, slots, indices, eids,
    values, src, dst, edges, vector, factor, keys,
    threshold, edge_seed, head_seed, heads, dim, score_dim, factor_columns,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KEPT: tl.constexpr, SCORE: tl.constexpr,
    HAS_EIDS: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_FACTOR: tl.constexpr, SPLIT: tl.constexpr, SUM: tl.constexpr,
    EDGES: tl.constexpr, DIM: tl.constexpr, SCORE_DIM: tl.constexpr,
):  # fmt: skip
    row, begin, end, slot = task_of(tl.program_id(0), indptr, rows, begins, ends, slots, SPLIT)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, DIM)
    inside = column < dim
    at = row * heads + head
    score_column = tl.arange(0, SCORE_DIM)
    score_inside = score_column < score_dim
    if SCORE == "additive":
        own = tl.load(dst + at).to(SUM)
    else:
        own = tl.load(dst + at * score_dim + score_column, mask=score_inside, other=0).to(SUM)
    weight = own
    if SCORE == "joint":
        of_head = vector + head * score_dim + score_column
        weight = tl.load(of_head, mask=score_inside, other=0).to(SUM)
    highest = tl.full([1], float("-inf"), SUM)
    mass = tl.zeros([1], SUM)
    result = tl.zeros([DIM], SUM)
    if slot < 0:
        highest = tl.load(peak + at + tl.arange(0, 1))
        mass = tl.load(total + at + tl.arange(0, 1))
        result = tl.load(sums + row * sums_stride + head * dim + column, mask=inside, other=0)
    for first in range(begin, end, EDGES):
        position = first + tl.arange(0, EDGES)
        there = position < end
        node = tl.load(indices + position, mask=there, other=0).to(tl.int64) * heads + head
        edge = position
        if HAS_EIDS:
            edge = tl.load(eids + position, mask=there, other=0).to(tl.int64)
        both = there[:, None] & inside[None, :]
        found = tl.load(values + node[:, None] * dim + column[None, :], mask=both, other=0).to(SUM)
        if SCORE == "additive":
            scores = tl.load(src + node, mask=there, other=0).to(SUM) + own
            if HAS_EDGE:
                scores += tl.load(edges + edge * heads + head, mask=there, other=0).to(SUM)
            scores = tl.where(scores > 0, scores, scores * SLOPE)
        elif SCORE == "joint":
            joined = found + own[None, :]
            if HAS_EDGE:
                place = (edge * heads + head)[:, None] * dim + column[None, :]
                joined += tl.load(edges + place, mask=both, other=0).to(SUM)
            joined = tl.where(joined > 0, joined, joined * SLOPE)
            scores = tl.sum(joined * weight[None, :], 1)
        else:
            of_keys = there[:, None] & score_inside[None, :]
            place = node[:, None] * score_dim + score_column[None, :]
            key = tl.load(src + place, mask=of_keys, other=0).to(SUM)
            scores = tl.sum(key * own[None, :], 1) * SCALE
            if HAS_EDGE:
                scores += tl.load(edges + edge * heads + head, mask=there, other=0).to(SUM)
        scores = tl.where(there, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp(scores - shift)
        shrink = tl.exp(highest - shift)
        mass = mass * shrink + tl.sum(shares, 0)
        mask, factors = multipliers(
            edge, there, head, keys, factor, factor_columns, threshold, edge_seed, head_seed,
            KEPT, HAS_MASK, HAS_KEYS, HAS_FACTOR, SUM,
        )  # fmt: skip
        weights = tl.where(there, shares * mask * factors, 0.0)
        result = result * shrink + tl.sum(weights[:, None] * found, 0)
        highest = higher
    if slot < 0:
        tl.store(peak + at + tl.arange(0, 1), highest)
        tl.store(total + at + tl.arange(0, 1), mass)
        tl.store(sums + row * sums_stride + head * dim + column, result, mask=inside)
    if slot >= 0:
        there_slot = slot * heads + head
        tl.store(part_peak + there_slot + tl.arange(0, 1), highest)
        tl.store(part_total + there_slot + tl.arange(0, 1), mass)
        tl.store(part_sums + there_slot * dim + column, result, mask=inside)


@triton.jit
def _merge_states(
    peak, total, sums, sums_stride, part_peak, part_total, part_sums, long_rows, first_slots,
    heads, dim, SUM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.load(long_rows + number)
    column = tl.arange(0, DIM)
    inside = column < dim
    at = row * heads + head
    one = tl.arange(0, 1)
    highest = tl.load(peak + at + one)
    mass = tl.load(total + at + one)
    result = tl.load(sums + row * sums_stride + head * dim + column, mask=inside, other=0)
    for slot in range(tl.load(first_slots + number), tl.load(first_slots + number + 1)):
        place = slot * heads + head
        other = tl.load(part_peak + place + one)
        higher = tl.maximum(highest, other)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        mine = tl.exp(highest - shift)
        its = tl.exp(other - shift)
        mass = mass * mine + tl.load(part_total + place + one) * its
        added = tl.load(part_sums + place * dim + column, mask=inside, other=0)
        result = result * mine + added * its
        highest = higher
    tl.store(peak + at + one, highest)
    tl.store(total + at + one, mass)
    tl.store(sums + row * sums_stride + head * dim + column, result, mask=inside)


def take(adj: Adjacency, a: Attention, peak: Tensor, total: Tensor, sums: Tensor) -> None:
    """Take the edges into the state of their destinations, in place."""
    if adj.num_edges == 0 or peak.numel() == 0:
        return
    state = [part if part.is_contiguous() else part.contiguous() for part in (peak, total)]
    rows = sums if sums.stride()[1:] == (a.dim, 1) else sums.contiguous()
    indptr, indices, eids = adj.csc()
    tasks = row_tasks(indptr)
    dtype = wide(a.dtype)
    part_peak = peak.new_empty((tasks.num_slots, a.heads), dtype=dtype)
    part_total = torch.empty_like(part_peak)
    part_sums = peak.new_empty((tasks.num_slots, a.heads, a.dim), dtype=dtype)
    size = block(a.dim, 1 << 16)
    _attend[(tasks.count, a.heads)](
        *state, rows, rows.stride(0), part_peak, part_total, part_sums,
        *tasks.arguments(indptr), indices, indices if eids is None else eids,
        *operand_arguments(a),
        HAS_EIDS=eids is not None, SPLIT=tasks.is_split, EDGES=EDGES, DIM=size,
        num_warps=warps(size * EDGES), **operand_options(a),
    )  # fmt: skip
    if tasks.is_split:
        assert tasks.long_rows is not None
        _merge_states[(tasks.long_rows.shape[0], a.heads)](
            *state, rows, rows.stride(0), part_peak, part_total, part_sums,
            tasks.long_rows, tasks.first_slots, a.heads, a.dim,
            SUM=sum_type(a.dtype), DIM=size, num_warps=warps(size),
        )  # fmt: skip
    for given, used in zip((peak, total, sums), (*state, rows), strict=True):
        if given is not used:
            given.copy_(used)


def operand_arguments(a: Attention) -> tuple[Any, ...]:
    """What both passes read of an attention; what is not there stands for itself nowhere."""
    numbers = wide(a.dtype)
    by_columns = a.dtype if a.score != "additive" else numbers
    nothing = a.values
    mask = a.mask

    def rows(tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        return nothing if tensor is None else tensor.detach().to(dtype).contiguous()

    has_keys = mask is not None and mask.keys is not None
    return (
        rows(a.values, a.dtype),
        rows(a.src, by_columns),
        rows(a.dst, by_columns),
        rows(a.edge, a.dtype if a.score == "joint" else numbers),
        rows(a.vector, numbers),
        rows(a.factor, numbers),
        mask.keys.contiguous() if has_keys else nothing,  # type: ignore[union-attr]
        0 if mask is None else mask.threshold,
        0 if mask is None else mask.edge_seed,
        0 if mask is None else mask.head_seed,
        a.heads,
        a.dim,
        a.score_dim,
        1 if a.factor is None else a.factor.shape[1],
    )


def operand_options(a: Attention) -> dict[str, Any]:
    """What kernels are compiled for."""
    return {
        "SLOPE": a.slope,
        "SCALE": a.scale,
        "KEPT": 1.0 if a.mask is None else a.mask.kept,
        "SCORE": a.score,
        "HAS_EDGE": a.edge is not None,
        "HAS_MASK": a.mask is not None,
        "HAS_KEYS": a.mask is not None and a.mask.keys is not None,
        "HAS_FACTOR": a.factor is not None,
        "SUM": sum_type(a.dtype),
        "SCORE_DIM": block(a.score_dim, 1 << 16),
    }
