# SPDX-License-Identifier: Apache-2.0
"""Attention over in-edges in one pass, by an online softmax: a program for a piece and some heads.

The same description as in `graphshard.ops.Attention`; the state of destinations is that of
`AttentionState`. Pieces of a long row have states of their own, merged in order. A program takes as
many heads as have 128 columns together, so that all threads have work where heads are narrow.

Sums over the edges of a step and over the columns of a head are trees, whose shape comes with the
tile and the number of warps. Both follow from the shape of the operands alone (`tile_of`); what
`run_tuned` may choose is how many steps are loaded ahead.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
https://arxiv.org/abs/1805.02867.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.torch_version import TorchVersion

from .._adjacency import Adjacency
from .._attention_rule import Attention, wide
from .._check import dense
from ._launch import (
    EXACT,
    INTERPRETED,
    block,
    next_power_of_2,
    num_blocks,
    on_its_device,
    sum_type,
    warps,
    width_class,
)
from ._tasks import AT_ONCE, row_tasks, task_of
from ._tune import Configuration, run_tuned

MOST_EDGES = 8  # of a destination that a program takes in a step
MOST_COLUMNS = 128  # of some heads, unless one has more
MOST_NUMBERS = 4096  # of a step

# Before Triton 3.3 the compiler ends the process where rows of several heads are loaded ahead.
_STAGES = (1,) if TorchVersion(triton.__version__) < "3.3" else (2, 1, 3)
AHEAD: list[Configuration] = [{"STAGES": stages} for stages in _STAGES]
"""Steps that are on their way at a time."""


@triton.jit
def _mixed(word):
    """The bijection of 32-bit words of `EdgeMask`."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def multipliers(
    edge, there, head, is_head, keys, factor, factor_columns, threshold, edge_seed, head_seed,
    KEPT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_FACTOR: tl.constexpr,
    SUM: tl.constexpr, EDGES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """(what the mask, what the factor makes of a weight 1) on some edges and heads."""
    mask = tl.full([EDGES, HEADS], 1.0, SUM)
    scale = tl.full([EDGES, HEADS], 1.0, SUM)
    if HAS_MASK:
        if HAS_KEYS:
            key = tl.load(keys + edge, mask=there, other=0).to(tl.uint32, bitcast=True)
        else:
            key = edge.to(tl.uint32) ^ _mixed((edge >> 32).to(tl.uint32))
        # Arguments are of 64 bits; the sums wrap in 32.
        word = _mixed((key.to(tl.int64) + edge_seed).to(tl.uint32))
        of_head = (tl.full([HEADS], 0x9E3779B9, tl.int64) * head + head_seed).to(tl.uint32)
        hashed = _mixed(word[:, None] ^ _mixed(of_head)[None, :])
        mask = tl.where(hashed.to(tl.int64) >= threshold, tl.full([EDGES, HEADS], KEPT, SUM), 0.0)
    if HAS_FACTOR:
        column = tl.where(factor_columns == 1, 0, head)
        place = factor + (edge * factor_columns)[:, None] + column[None, :]
        scale = tl.load(place, mask=there[:, None] & is_head[None, :], other=0).to(SUM)
    return mask, scale


@triton.jit
def _attend(
    peak, total, sums, sums_stride, part_peak, part_total, part_sums,
    indptr, rows, begins, ends, slots, indices, eids,
    values, src, dst, edges, vector, factor, keys,
    threshold, edge_seed, head_seed, heads: tl.constexpr, dim: tl.constexpr,
    score_dim: tl.constexpr, factor_columns,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KEPT: tl.constexpr, SCORE: tl.constexpr,
    HAS_EIDS: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_FACTOR: tl.constexpr, SPLIT: tl.constexpr, SUM: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SCORE_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row, begin, end, slot = task_of(tl.program_id(0), indptr, rows, begins, ends, slots, SPLIT)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    is_head = head < heads
    column = tl.arange(0, DIM)
    place = head[:, None] * dim + column[None, :]  # in a row of values
    inside = is_head[:, None] & (column < dim)[None, :]
    score_column = tl.arange(0, SCORE_DIM)
    score_place = head[:, None] * score_dim + score_column[None, :]
    score_inside = is_head[:, None] & (score_column < score_dim)[None, :]
    at = row * heads + head
    if SCORE == "additive":
        own = tl.load(dst + at, mask=is_head, other=0).to(SUM)
    else:
        own_place = row * heads * score_dim + score_place
        own = tl.load(dst + own_place, mask=score_inside, other=0).to(SUM)
    weight = own
    if SCORE == "joint":
        weight = tl.load(vector + score_place, mask=score_inside, other=0).to(SUM)
    highest = tl.full([HEADS], float("-inf"), SUM)
    mass = tl.zeros([HEADS], SUM)
    result = tl.zeros([HEADS, DIM], SUM)
    if slot < 0:
        highest = tl.load(peak + at, mask=is_head, other=float("-inf"))
        mass = tl.load(total + at, mask=is_head, other=0)
        result = tl.load(sums + row * sums_stride + place, mask=inside, other=0)
    for first in tl.range(begin, end, EDGES, num_stages=STAGES):
        position = first + tl.arange(0, EDGES)
        there = position < end
        node = tl.load(indices + position, mask=there, other=0).to(tl.int64) * heads
        edge = position
        if HAS_EIDS:
            edge = tl.load(eids + position, mask=there, other=0).to(tl.int64)
        at_edge = (edge * heads)[:, None] + head[None, :]
        on_head = there[:, None] & is_head[None, :]
        both = there[:, None, None] & inside[None, :, :]
        of_node = values + (node * dim)[:, None, None] + place[None, :, :]
        value = tl.load(of_node, mask=both, other=0).to(SUM)
        if SCORE == "additive":
            scores = tl.load(src + node[:, None] + head[None, :], mask=on_head, other=0).to(SUM)
            scores += own[None, :]
            if HAS_EDGE:
                scores += tl.load(edges + at_edge, mask=on_head, other=0).to(SUM)
            scores = tl.where(scores > 0, scores, scores * SLOPE)
        elif SCORE == "joint":
            joined = value + own[None, :, :]
            if HAS_EDGE:
                of_edge = edges + (edge * heads * dim)[:, None, None] + place[None, :, :]
                joined += tl.load(of_edge, mask=both, other=0).to(SUM)
            joined = tl.where(joined > 0, joined, joined * SLOPE)
            scores = tl.sum(joined * weight[None, :, :], 2)
        else:
            of_keys = there[:, None, None] & score_inside[None, :, :]
            of_key = src + (node * score_dim)[:, None, None] + score_place[None, :, :]
            key = tl.load(of_key, mask=of_keys, other=0).to(SUM)
            scores = tl.sum(key * own[None, :, :], 2) * SCALE
            if HAS_EDGE:
                scores += tl.load(edges + at_edge, mask=on_head, other=0).to(SUM)
        scores = tl.where(on_head, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp(scores - shift[None, :])
        shrink = tl.exp(highest - shift)
        mass = mass * shrink + tl.sum(shares, 0)
        mask, factors = multipliers(
            edge, there, head, is_head, keys, factor, factor_columns,
            threshold, edge_seed, head_seed,
            KEPT, HAS_MASK, HAS_KEYS, HAS_FACTOR, SUM, EDGES, HEADS,
        )  # fmt: skip
        weights = tl.where(on_head, shares * mask * factors, 0.0)
        result = result * shrink[:, None] + tl.sum(weights[:, :, None] * value, 0)
        highest = higher
    if slot < 0:
        tl.store(peak + at, highest, mask=is_head)
        tl.store(total + at, mass, mask=is_head)
        tl.store(sums + row * sums_stride + place, result, mask=inside)
    if slot >= 0:
        there_slot = slot * heads + head
        tl.store(part_peak + there_slot, highest, mask=is_head)
        tl.store(part_total + there_slot, mass, mask=is_head)
        tl.store(part_sums + slot * heads * dim + place, result, mask=inside)


@triton.jit
def _merge_states(
    peak, total, sums, sums_stride, part_peak, part_total, part_sums, long_rows, first_slots,
    heads, dim, SUM: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr,
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
    end = tl.load(first_slots + number + 1)
    for first in range(tl.load(first_slots + number), end, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            slot = first + step
            place = slot * heads + head
            is_slot = slot + one < end  # of numbers: the interpreter takes no truth for a mask
            there = inside & (slot + column * 0 < end)
            other = tl.load(part_peak + place + one, mask=is_slot, other=float("-inf"))
            other_mass = tl.load(part_total + place + one, mask=is_slot, other=0)
            added = tl.load(part_sums + place * dim + column, mask=there, other=0)
            higher = tl.maximum(highest, other)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            mine = tl.exp(highest - shift)
            its = tl.exp(other - shift)
            mass = mass * mine + other_mass * its
            result = result * mine + added * its
            highest = higher
    tl.store(peak + at + one, highest)
    tl.store(total + at + one, mass)
    tl.store(sums + row * sums_stride + head * dim + column, result, mask=inside)


@on_its_device
def take(adj: Adjacency, a: Attention, peak: Tensor, total: Tensor, sums: Tensor) -> None:
    """Take the edges into the state of their destinations, in place."""
    if adj.num_edges == 0 or peak.numel() == 0:
        return
    state = [part if part.is_contiguous() else part.contiguous() for part in (peak, total)]
    rows = sums if sums.stride()[1:] == (a.dim, 1) else sums.contiguous()
    indptr, indices, eids = adj.csc()
    tasks = row_tasks(indptr, adj.longest_row("csc"))
    dtype = wide(a.dtype)
    part_peak = peak.new_empty((tasks.num_slots, a.heads), dtype=dtype)
    part_total = torch.empty_like(part_peak)
    part_sums = peak.new_empty((tasks.num_slots, a.heads, a.dim), dtype=dtype)
    arguments, tile = operand_arguments(a), tile_of(a)

    def run(configuration: Configuration) -> None:
        _attend[(tasks.count, num_blocks(a.heads, tile["HEADS"]))](
            *state, rows, rows.stride(0), part_peak, part_total, part_sums,
            *tasks.arguments(indptr), indices, indices if eids is None else eids, *arguments,
            HAS_EIDS=eids is not None, SPLIT=tasks.is_split,
            **tile, **operand_options(a), **configuration, **EXACT,
        )  # fmt: skip

    key = ("attend", adj.idtype, eids is None, *kind_of(a))
    work = adj.num_edges * a.heads * a.dim
    run_tuned(key, stages(), run, [*state, rows], work, updated=True)
    size = block(a.dim, 1 << 16)
    if tasks.is_split:
        assert tasks.long_rows is not None
        _merge_states[(tasks.long_rows.shape[0], a.heads)](
            *state, rows, rows.stride(0), part_peak, part_total, part_sums,
            tasks.long_rows, tasks.first_slots, a.heads, a.dim,
            SUM=sum_type(a.dtype), DIM=size, AT_ONCE=AT_ONCE, num_warps=warps(size), **EXACT,
        )  # fmt: skip
    for given, used in zip((peak, total, sums), (*state, rows), strict=True):
        if given is not used:
            given.copy_(used)


def stages() -> list[Configuration]:
    """How many steps may be on their way at a time."""
    return [{"STAGES": 1}] if INTERPRETED else AHEAD


def tile_of(a: Attention) -> dict[str, int]:
    """What a program works on in a step: it follows from the shape of rows, and fixes all sums."""
    dim = block(a.dim, 1 << 16)
    score_dim = block(a.score_dim, 1 << 16)
    columns = max(dim, score_dim)
    heads = min(next_power_of_2(a.heads), max(1, MOST_COLUMNS // columns))
    edges = min(MOST_EDGES, max(1, MOST_NUMBERS // (heads * columns)))
    numbers = heads * columns * edges
    return {
        "EDGES": edges,
        "HEADS": heads,
        "DIM": dim,
        "SCORE_DIM": score_dim,
        "num_warps": min(8, max(1, numbers // 1024)),
    }


def kind_of(a: Attention) -> tuple[Hashable, ...]:
    """What the time of its kernels depends on."""
    there = (operand is not None for operand in a.operands)
    of_rows = (a.heads, width_class(a.dim), width_class(a.score_dim))
    return a.score, *there, a.mask is not None, *of_rows, a.dtype, a.values.device


def operand_arguments(a: Attention) -> tuple[Any, ...]:
    """What both passes read of an attention; what is not there stands for itself nowhere."""
    numbers = wide(a.dtype)
    by_columns = a.dtype if a.score != "additive" else numbers
    nothing = a.values
    mask = a.mask

    def rows(tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        return nothing if tensor is None else dense(tensor.detach().to(dtype))

    return (
        rows(a.values, a.dtype),
        rows(a.src, by_columns),
        rows(a.dst, by_columns),
        rows(a.edge, a.dtype if a.score == "joint" else numbers),
        rows(a.vector, numbers),
        rows(a.factor, numbers),
        nothing if mask is None or mask.keys is None else dense(mask.keys),
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
    }
