# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention: one pass by source, one by destination; weights are computed again.

With ``a`` the weight of an edge, ``m c`` what mask and factor make of it and ``g`` the gradient of
the result, ``d score = a (m c <g, values> - delta)``. Nothing per edge is stored but gradients of
operands that have a row per edge. A program takes a piece of a row and some heads, as `attention`
does, and reads once what belongs to its own row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._adjacency import Adjacency
from .._attention_rule import Attention, wide
from .._check import dense
from ._launch import EXACT, block, num_blocks, on_its_device, sum_type, warps
from ._tasks import AT_ONCE, RowTasks, row_tasks, task_of
from ._tune import Configuration, run_tuned
from .attention import kind_of, multipliers, operand_arguments, operand_options, stages, tile_of


@triton.jit
def _gradient(
    values_out, key_out, vector_out, edge_out, factor_out, values_parts, key_parts,
    peak, total, delta, grad, grad_stride,
    indptr, rows, begins, ends, slots, others, eids,
    values, src, dst, edges, vector, factor, keys,
    threshold, edge_seed, head_seed, heads: tl.constexpr, dim: tl.constexpr,
    score_dim: tl.constexpr, factor_columns,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KEPT: tl.constexpr, SCORE: tl.constexpr,
    HAS_EIDS: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_FACTOR: tl.constexpr, SPLIT: tl.constexpr, SUM: tl.constexpr,
    BY_SOURCE: tl.constexpr, WANT_VALUES: tl.constexpr, WANT_KEY: tl.constexpr,
    WANT_VECTOR: tl.constexpr, WANT_EDGE: tl.constexpr, WANT_FACTOR: tl.constexpr,
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
    weight = tl.zeros([HEADS, SCORE_DIM], SUM)
    if SCORE == "joint":
        weight = tl.load(vector + score_place, mask=score_inside, other=0).to(SUM)
    # What belongs to the own row: of a source its values and key, of a destination the rest.
    at = row * heads + head
    own_place = row * heads * score_dim + score_place
    if BY_SOURCE:
        own = tl.load(values + row * heads * dim + place, mask=inside, other=0).to(SUM)
        if SCORE == "additive":
            own_score = tl.load(src + at, mask=is_head, other=0).to(SUM)
        elif SCORE == "dot":
            own_score = tl.load(src + own_place, mask=score_inside, other=0).to(SUM)
    else:
        own = tl.load(grad + row * grad_stride + place, mask=inside, other=0).to(SUM)
        own_peak = tl.load(peak + at, mask=is_head, other=0)
        own_total = tl.load(total + at, mask=is_head, other=1)
        own_delta = tl.load(delta + at, mask=is_head, other=0)
        if SCORE == "additive":
            own_score = tl.load(dst + at, mask=is_head, other=0).to(SUM)
        else:
            own_score = tl.load(dst + own_place, mask=score_inside, other=0).to(SUM)
    values_sum = tl.zeros([HEADS, DIM], SUM)
    vector_sum = tl.zeros([HEADS, SCORE_DIM], SUM)
    if SCORE == "additive":
        key_sum = tl.zeros([HEADS], SUM)
    else:
        key_sum = tl.zeros([HEADS, SCORE_DIM], SUM)
    for first in tl.range(begin, end, EDGES, num_stages=STAGES):
        position = first + tl.arange(0, EDGES)
        there = position < end
        other = tl.load(others + position, mask=there, other=0).to(tl.int64)
        edge = position
        if HAS_EIDS:
            edge = tl.load(eids + position, mask=there, other=0).to(tl.int64)
        at_edge = (edge * heads)[:, None] + head[None, :]
        of_edge = (edge * heads * dim)[:, None, None] + place[None, :, :]
        at_other = (other * heads)[:, None] + head[None, :]
        of_other = (other * heads * score_dim)[:, None, None] + score_place[None, :, :]
        on_head = there[:, None] & is_head[None, :]
        both = there[:, None, None] & inside[None, :, :]
        of_scores = there[:, None, None] & score_inside[None, :, :]
        if BY_SOURCE:
            value = own[None, :, :]
            of_grad = grad + (other * grad_stride)[:, None, None] + place[None, :, :]
            g = tl.load(of_grad, mask=both, other=0).to(SUM)
            highest = tl.load(peak + at_other, mask=on_head, other=0)
            mass = tl.load(total + at_other, mask=on_head, other=1)
            shift = tl.load(delta + at_other, mask=on_head, other=0)
        else:
            of_node = values + (other * heads * dim)[:, None, None] + place[None, :, :]
            value = tl.load(of_node, mask=both, other=0).to(SUM)
            g = own[None, :, :]
            highest = own_peak[None, :]
            mass = own_total[None, :]
            shift = own_delta[None, :]
        slopes = tl.zeros([1], SUM)
        joined = value
        read = value
        if SCORE == "additive":
            if BY_SOURCE:
                scores = tl.load(dst + at_other, mask=on_head, other=0).to(SUM)
            else:
                scores = tl.load(src + at_other, mask=on_head, other=0).to(SUM)
            scores += own_score[None, :]
            if HAS_EDGE:
                scores += tl.load(edges + at_edge, mask=on_head, other=0).to(SUM)
            slopes = tl.where(scores > 0, tl.full([EDGES, HEADS], 1.0, SUM), SLOPE)
            scores = scores * slopes
        elif SCORE == "joint":
            if BY_SOURCE:
                joined = tl.load(dst + of_other, mask=of_scores, other=0).to(SUM) + value
            else:
                joined = value + own_score[None, :, :]
            if HAS_EDGE:
                joined += tl.load(edges + of_edge, mask=both, other=0).to(SUM)
            slopes = tl.where(joined > 0, tl.full([EDGES, HEADS, DIM], 1.0, SUM), SLOPE)
            scores = tl.sum(joined * slopes * weight[None, :, :], 2)
        else:
            if BY_SOURCE:
                read = tl.load(dst + of_other, mask=of_scores, other=0).to(SUM)
            else:
                read = tl.load(src + of_other, mask=of_scores, other=0).to(SUM)
            scores = tl.sum(read * own_score[None, :, :], 2) * SCALE
            if HAS_EDGE:
                scores += tl.load(edges + at_edge, mask=on_head, other=0).to(SUM)
        share = tl.where(on_head, tl.exp(scores - highest) / mass, 0.0)
        mask, scale = multipliers(
            edge, there, head, is_head, keys, factor, factor_columns,
            threshold, edge_seed, head_seed,
            KEPT, HAS_MASK, HAS_KEYS, HAS_FACTOR, SUM, EDGES, HEADS,
        )  # fmt: skip
        product = tl.where(on_head, tl.sum(g * value, 2) * mask, 0.0)
        change = share * (product * scale - shift)
        if WANT_VALUES:
            values_sum += tl.sum((share * mask * scale)[:, :, None] * g, 0)
        if SCORE == "additive":
            change = change * slopes
            if WANT_KEY:
                key_sum += tl.sum(change, 0)
            if WANT_EDGE:
                tl.store(edge_out + at_edge, change, mask=on_head)
        elif SCORE == "joint":
            by_column = change[:, :, None] * slopes * weight[None, :, :]
            if WANT_KEY:
                key_sum += tl.sum(by_column, 0)
            if WANT_EDGE:
                tl.store(edge_out + of_edge, by_column, mask=both)
            if WANT_VECTOR:
                vector_sum += tl.sum(change[:, :, None] * joined * slopes, 0)
        else:
            if WANT_KEY:
                key_sum += tl.sum((change * SCALE)[:, :, None] * read, 0)
            if WANT_EDGE:
                tl.store(edge_out + at_edge, change, mask=on_head)
        if WANT_FACTOR:
            tl.store(factor_out + at_edge, share * product, mask=on_head)
    values_to = values_out + row * heads * dim
    key_to = key_out + row * heads * score_dim
    if slot >= 0:
        values_to = values_parts + slot * heads * dim
        key_to = key_parts + slot * heads * score_dim
    if WANT_VALUES:
        tl.store(values_to + place, values_sum, mask=inside)
    if WANT_KEY:
        if SCORE == "additive":
            tl.store(key_to + head, key_sum, mask=is_head)
        else:
            tl.store(key_to + score_place, key_sum, mask=score_inside)
    if WANT_VECTOR:
        of_piece = vector_out + tl.program_id(0).to(tl.int64) * heads * score_dim
        tl.store(of_piece + score_place, vector_sum, mask=score_inside)


@on_its_device
def gradients(
    adj: Adjacency,
    a: Attention,
    statistics: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the operands, in the type of sums; see `..attention.compute.gradients`."""
    want_values, want_src, want_dst, want_edge, want_vector, want_factor = wanted
    joint = a.score == "joint"
    dtype = wide(a.dtype)
    grads: list[Tensor | None] = [
        torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)
        if w and t is not None
        else None
        for t, w in zip(a.operands, wanted, strict=True)
    ]
    if adj.num_edges == 0 or grad.numel() == 0:
        return [None if t is None else t.zero_() for t in grads]
    peak, total, delta = (part.contiguous() for part in statistics)
    if grad.is_neg() or grad.stride()[1:] != (a.dim, 1):
        grad = dense(grad)
    common = (peak, total, delta, grad, grad.stride(0))
    if want_values or want_src:
        # Of joint scores the values are what scores read of a source.
        key = torch.empty_like(grads[0]) if joint and grads[0] is not None else grads[1]
        _run(adj, a, common, grads[0], key, None, None, None, True)
        if joint:
            assert grads[0] is not None
            assert key is not None
            grads[0] += key
    if want_dst or want_edge or want_vector or want_factor:
        factor = grads[5]
        if factor is not None and factor.shape[1] != a.heads:
            factor = factor.new_empty((adj.num_edges, a.heads))
        vectors = _run(adj, a, common, None, grads[2], grads[4], grads[3], factor, False)
        if vectors is not None:
            grads[4] = vectors.sum(0)
        if factor is not grads[5] and factor is not None:
            grads[5] = factor.sum(1, keepdim=True)
    return grads


def _run(
    adj: Adjacency,
    a: Attention,
    common: tuple[Tensor, Tensor, Tensor, Tensor, int],
    values: Tensor | None,
    key: Tensor | None,
    vector: Tensor | None,
    edge: Tensor | None,
    factor: Tensor | None,
    by_source: bool,
) -> Tensor | None:
    """One pass; gradients that are given are written. Returns those of the vector, by piece."""
    indptr, others, eids = adj.csr() if by_source else adj.csc()
    tasks = row_tasks(indptr, adj.longest_row("csr" if by_source else "csc"))
    grad = common[3]
    dtype = wide(a.dtype)
    score_dim = max(a.score_dim, 1)
    values_parts = grad.new_empty((tasks.num_slots, a.heads, a.dim), dtype=dtype)
    key_parts = grad.new_empty((tasks.num_slots, a.heads, score_dim), dtype=dtype)
    vectors = None
    if vector is not None:
        vectors = grad.new_empty((tasks.count, a.heads, a.score_dim), dtype=dtype)
    arguments, tile = list(operand_arguments(a)), tile_of(a)
    if a.score == "additive":
        arguments[-2] = 1  # columns of a term

    def run(configuration: Configuration) -> None:
        _gradient[(tasks.count, num_blocks(a.heads, tile["HEADS"]))](
            *(values_parts if t is None else t for t in (values, key, vectors, edge, factor)),
            values_parts, key_parts, *common,
            *tasks.arguments(indptr), others, others if eids is None else eids, *arguments,
            HAS_EIDS=eids is not None, SPLIT=tasks.is_split, BY_SOURCE=by_source,
            WANT_VALUES=values is not None, WANT_KEY=key is not None,
            WANT_VECTOR=vector is not None, WANT_EDGE=edge is not None,
            WANT_FACTOR=factor is not None,
            **tile, **operand_options(a), **configuration, **EXACT,
        )  # fmt: skip

    written = [t for t in (values, key, vectors, edge, factor) if t is not None]
    wanted = tuple(t is not None for t in (values, key, vector, edge, factor))
    work = others.shape[0] * a.heads * a.dim
    if written:
        key_of_time = ("attend backward", by_source, *wanted, others.dtype, *kind_of(a))
        run_tuned(key_of_time, stages(), run, written, work)
    for out, parts in ((values, values_parts), (key, key_parts)):
        if out is not None and tasks.is_split:
            _add_parts(out, parts, tasks, a)
    return vectors


@triton.jit
def _sum_parts(
    out, parts, long_rows, first_slots, width,
    SUM: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], SUM)
    end = tl.load(first_slots + number + 1)
    for first in range(tl.load(first_slots + number), end, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            slot = first + step
            there = inside & (slot + column * 0 < end)
            total += tl.load(parts + slot * width + column, mask=there, other=0)
    tl.store(out + tl.load(long_rows + number) * width + column, total, mask=inside)


def _add_parts(out: Tensor, parts: Tensor, tasks: RowTasks, a: Attention) -> None:
    width = parts.shape[1] * parts.shape[2]
    size = block(width, 256)
    assert tasks.long_rows is not None
    _sum_parts[(tasks.long_rows.shape[0], num_blocks(width, size))](
        out, parts, tasks.long_rows, tasks.first_slots, width,
        SUM=sum_type(a.dtype), BLOCK=size, AT_ONCE=AT_ONCE, num_warps=warps(size), **EXACT,
    )  # fmt: skip
