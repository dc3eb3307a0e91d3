# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention: one pass by source, one by destination; weights are computed again.

With ``a`` the weight of an edge, ``m c`` what mask and factor make of it and ``g`` the gradient of
the result, ``d score = a (m c <g, values> - delta)``. Nothing per edge is stored but gradients of
operands that have a row per edge.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._adjacency import Adjacency
from .._attention_rule import Attention, wide
from ._launch import block, sum_type, warps
from ._tasks import RowTasks, row_tasks, task_of
from .attention import EDGES, multipliers, operand_arguments, operand_options


@triton.jit
def _gradient(
    values_out, key_out, vector_out, edge_out, factor_out, values_parts, key_parts,
    peak, total, delta, grad, grad_stride,
    indptr, rows, begins, ends, slots, others, eids,
    values, src, dst, edges, vector, factor, keys,
    threshold, edge_seed, head_seed, heads, dim, score_dim, factor_columns,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KEPT: tl.constexpr, SCORE: tl.constexpr,
    HAS_EIDS: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_FACTOR: tl.constexpr, SPLIT: tl.constexpr, SUM: tl.constexpr,
    BY_SOURCE: tl.constexpr, WANT_VALUES: tl.constexpr, WANT_KEY: tl.constexpr,
    WANT_VECTOR: tl.constexpr, WANT_EDGE: tl.constexpr, WANT_FACTOR: tl.constexpr,
    EDGES: tl.constexpr, DIM: tl.constexpr, SCORE_DIM: tl.constexpr,
):  # fmt: skip
    row, begin, end, slot = task_of(tl.program_id(0), indptr, rows, begins, ends, slots, SPLIT)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, DIM)
    inside = column < dim
    score_column = tl.arange(0, SCORE_DIM)
    score_inside = score_column < score_dim
    weight = tl.zeros([SCORE_DIM], SUM)
    if SCORE == "joint":
        of_head = vector + head * score_dim + score_column
        weight = tl.load(of_head, mask=score_inside, other=0).to(SUM)
    values_sum = tl.zeros([DIM], SUM)
    vector_sum = tl.zeros([SCORE_DIM], SUM)
    if SCORE == "additive":
        key_sum = tl.zeros([1], SUM)
    else:
        key_sum = tl.zeros([SCORE_DIM], SUM)
    for first in range(begin, end, EDGES):
        position = first + tl.arange(0, EDGES)
        there = position < end
        other = tl.load(others + position, mask=there, other=0).to(tl.int64)
        own = tl.zeros([EDGES], tl.int64) + row
        edge = position
        if HAS_EIDS:
            edge = tl.load(eids + position, mask=there, other=0).to(tl.int64)
        if BY_SOURCE:
            source = own
            target = other
        else:
            source = other
            target = own
        u = source * heads + head
        v = target * heads + head
        both = there[:, None] & inside[None, :]
        of_scores = there[:, None] & score_inside[None, :]
        value = tl.load(values + u[:, None] * dim + column[None, :], mask=both, other=0).to(SUM)
        place = grad + target[:, None] * grad_stride + head * dim + column[None, :]
        g = tl.load(place, mask=both, other=0).to(SUM)
        slopes = tl.zeros([1], SUM)
        joined = value
        read = value
        if SCORE == "additive":
            scores = tl.load(src + u, mask=there, other=0).to(SUM)
            scores += tl.load(dst + v, mask=there, other=0).to(SUM)
            if HAS_EDGE:
                scores += tl.load(edges + edge * heads + head, mask=there, other=0).to(SUM)
            slopes = tl.where(scores > 0, tl.full(scores.shape, 1.0, SUM), SLOPE)
            scores = scores * slopes
        elif SCORE == "joint":
            place = v[:, None] * score_dim + score_column[None, :]
            joined = value + tl.load(dst + place, mask=of_scores, other=0).to(SUM)
            if HAS_EDGE:
                place = (edge * heads + head)[:, None] * dim + column[None, :]
                joined += tl.load(edges + place, mask=both, other=0).to(SUM)
            slopes = tl.where(joined > 0, tl.full(joined.shape, 1.0, SUM), SLOPE)
            scores = tl.sum(joined * slopes * weight[None, :], 1)
        else:
            place = u[:, None] * score_dim + score_column[None, :]
            key = tl.load(src + place, mask=of_scores, other=0).to(SUM)
            place = v[:, None] * score_dim + score_column[None, :]
            query = tl.load(dst + place, mask=of_scores, other=0).to(SUM)
            scores = tl.sum(key * query, 1) * SCALE
            if HAS_EDGE:
                scores += tl.load(edges + edge * heads + head, mask=there, other=0).to(SUM)
            if BY_SOURCE:
                read = query
            else:
                read = key
        share = tl.exp(scores - tl.load(peak + v, mask=there, other=0))
        share = share / tl.load(total + v, mask=there, other=1)
        share = tl.where(there, share, 0.0)
        mask, scale = multipliers(
            edge, there, head, keys, factor, factor_columns, threshold, edge_seed, head_seed,
            KEPT, HAS_MASK, HAS_KEYS, HAS_FACTOR, SUM,
        )  # fmt: skip
        product = tl.sum(g * value, 1) * mask
        change = share * (product * scale - tl.load(delta + v, mask=there, other=0))
        if WANT_VALUES:
            values_sum += tl.sum((share * mask * scale)[:, None] * g, 0)
        if SCORE == "additive":
            change = change * slopes
            if WANT_KEY:
                key_sum += tl.sum(change, 0)
            if WANT_EDGE:
                tl.store(edge_out + edge * heads + head, change, mask=there)
        elif SCORE == "joint":
            by_column = change[:, None] * slopes * weight[None, :]
            if WANT_KEY:
                key_sum += tl.sum(by_column, 0)
            if WANT_EDGE:
                place = (edge * heads + head)[:, None] * dim + column[None, :]
                tl.store(edge_out + place, by_column, mask=both)
            if WANT_VECTOR:
                vector_sum += tl.sum(change[:, None] * joined * slopes, 0)
        else:
            if WANT_KEY:
                key_sum += tl.sum((change * SCALE)[:, None] * read, 0)
            if WANT_EDGE:
                tl.store(edge_out + edge * heads + head, change, mask=there)
        if WANT_FACTOR:
            tl.store(factor_out + edge * heads + head, share * product, mask=there)
    at = row * heads + head
    values_to = values_out + at * dim
    key_to = key_out + at * score_dim
    if slot >= 0:
        values_to = values_parts + (slot * heads + head) * dim
        key_to = key_parts + (slot * heads + head) * score_dim
    if WANT_VALUES:
        tl.store(values_to + column, values_sum, mask=inside)
    if WANT_KEY:
        if SCORE == "additive":
            tl.store(key_to + tl.arange(0, 1), key_sum)
        else:
            tl.store(key_to + score_column, key_sum, mask=score_inside)
    if WANT_VECTOR:
        place = vector_out + (tl.program_id(0).to(tl.int64) * heads + head) * score_dim
        tl.store(place + score_column, vector_sum, mask=score_inside)


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
    found: list[Tensor | None] = [
        torch.zeros_like(t, dtype=dtype, memory_format=torch.contiguous_format)
        if w and t is not None
        else None
        for t, w in zip(a.operands, wanted, strict=True)
    ]
    if adj.num_edges == 0 or grad.numel() == 0:
        return found
    peak, total, delta = (part.contiguous() for part in statistics)
    if grad.stride()[1:] != (a.dim, 1):
        grad = grad.contiguous()
    common = (peak, total, delta, grad, grad.stride(0))
    if want_values or want_src:
        # Of joint scores the values are what scores read of a source.
        key = torch.zeros_like(found[0]) if joint and found[0] is not None else found[1]
        _run(adj.csr(), a, common, found[0], key, None, None, None, True)
        if joint:
            assert found[0] is not None
            assert key is not None
            found[0] += key
    if want_dst or want_edge or want_vector or want_factor:
        factor = found[5]
        if factor is not None and factor.shape[1] != a.heads:
            factor = factor.new_empty((adj.num_edges, a.heads))
        vectors = _run(adj.csc(), a, common, None, found[2], found[4], found[3], factor, False)
        if vectors is not None:
            found[4] = vectors.sum(0)
        if factor is not found[5] and factor is not None:
            found[5] = factor.sum(1, keepdim=True)
    return found


def _run(
    edges: tuple[Tensor, Tensor, Tensor | None],
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
    indptr, others, eids = edges
    tasks = row_tasks(indptr)
    grad = common[3]
    dtype = wide(a.dtype)
    score_dim = max(a.score_dim, 1)
    values_parts = grad.new_empty((tasks.num_slots, a.heads, a.dim), dtype=dtype)
    key_parts = grad.new_empty((tasks.num_slots, a.heads, score_dim), dtype=dtype)
    vectors = None
    if vector is not None:
        vectors = grad.new_empty((tasks.count, a.heads, a.score_dim), dtype=dtype)
    size = block(a.dim, 1 << 16)
    arguments = list(operand_arguments(a))
    if a.score == "additive":
        arguments[-2] = 1  # columns of a term
    _gradient[(tasks.count, a.heads)](
        *(grad if t is None else t for t in (values, key, vectors, edge, factor)),
        values_parts, key_parts, *common,
        *tasks.arguments(indptr), others, others if eids is None else eids, *arguments,
        HAS_EIDS=eids is not None, SPLIT=tasks.is_split, BY_SOURCE=by_source,
        WANT_VALUES=values is not None, WANT_KEY=key is not None, WANT_VECTOR=vector is not None,
        WANT_EDGE=edge is not None, WANT_FACTOR=factor is not None, EDGES=EDGES, DIM=size,
        num_warps=warps(size * EDGES), **operand_options(a),
    )  # fmt: skip
    for out, parts in ((values, values_parts), (key, key_parts)):
        if out is not None and tasks.is_split:
            _add_parts(out, parts, tasks, a)
    return vectors


@triton.jit
def _sum_parts(out, parts, long_rows, first_slots, width, SUM: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], SUM)
    for slot in range(tl.load(first_slots + number), tl.load(first_slots + number + 1)):
        total += tl.load(parts + slot * width + column, mask=inside, other=0)
    tl.store(out + tl.load(long_rows + number) * width + column, total, mask=inside)


def _add_parts(out: Tensor, parts: Tensor, tasks: RowTasks, a: Attention) -> None:
    width = parts.shape[1] * parts.shape[2]
    size = block(width, 256)
    assert tasks.long_rows is not None
    _sum_parts[(tasks.long_rows.shape[0], triton.cdiv(width, size))](
        out, parts, tasks.long_rows, tasks.first_slots, width,
        SUM=sum_type(a.dtype), BLOCK=size, num_warps=warps(size),
    )  # fmt: skip
