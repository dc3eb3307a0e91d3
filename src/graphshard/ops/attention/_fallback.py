# SPDX-License-Identifier: Apache-2.0
"""Attention in plain torch where the compiled kernels are absent, or values are on a GPU.

Edges are taken some at a time, so that what has a row per edge takes a bounded amount of memory.
Forward it is the online softmax of csrc/attention/attention.h. Backward each chunk's share of the
gradient comes from autograd: with the gradient of the result and its statistics held constant, it
is that of ``sum over edges and heads of a (m c <grad, values> - delta)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._adjacency import Adjacency, expand_rows
from .._attention_rule import OPERANDS, Attention, wide
from ..spmm import fallback as spmm_fallback


def take(adj: Adjacency, a: Attention, peak: Tensor, total: Tensor, sums: Tensor) -> None:
    """Take the edges into the state of their destinations, in place."""
    indptr, indices, eids = adj.csc()
    for first, last in spmm_fallback.row_slices(adj, _row_elements(a)):
        begin, end = int(indptr[first]), int(indptr[last])
        if begin == end:
            continue
        row = expand_rows(indptr[first : last + 1] - begin, end - begin).long()
        u = indices[begin:end]
        e = torch.arange(begin, end, device=adj.device) if eids is None else eids[begin:end]
        scores = a.scores_of(u, row + first, e)
        columns = row.view(-1, 1).expand_as(scores)
        old = peak[first:last].clone()
        new = old.scatter_reduce(0, columns, scores, "amax")
        shift = new.masked_fill(new == -torch.inf, 0.0)  # rows without an edge so far
        weights = (scores - shift.index_select(0, row)).exp()
        scale = (old - shift).exp()
        total[first:last].mul_(scale).index_add_(0, row, weights)
        multipliers = a.multipliers_of(e)
        weights = weights if multipliers is None else weights * multipliers
        messages = weights.unsqueeze(-1) * a.values.index_select(0, u)
        sums[first:last].mul_(scale.unsqueeze(-1)).index_add_(0, row, messages)
        peak[first:last] = new


def gradients(
    adj: Adjacency,
    a: Attention,
    statistics: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the operands, in the type of sums; see `_attention_compute.gradients`."""
    peak, total, delta = statistics
    indptr, indices, eids = adj.csc()
    step = max(1, spmm_fallback.MESSAGE_ELEMENTS // max(1, _row_elements(a)))
    sums = [
        torch.zeros_like(t, dtype=wide(a.dtype)) if w and t is not None else None
        for t, w in zip(a.operands, wanted, strict=True)
    ]
    rows = expand_rows(indptr, adj.num_edges)
    for begin in range(0, adj.num_edges, step):
        u, v = indices[begin : begin + step], rows[begin : begin + step]
        e = torch.arange(begin, begin + u.shape[0], device=adj.device, dtype=adj.idtype)
        e = e if eids is None else eids[begin : begin + step]
        with torch.enable_grad():
            leaves = [
                t if t is None or not w else t.detach().requires_grad_()
                for t, w in zip(a.operands, wanted, strict=True)
            ]
            part = a.with_operands(leaves)
            shifted = part.scores_of(u, v, e) - peak.index_select(0, v)
            weights = shifted.exp() / total.index_select(0, v)
            values = part.values.index_select(0, u).to(peak.dtype)
            g = (values * grad.index_select(0, v).to(peak.dtype)).sum(-1)
            multipliers = part.multipliers_of(e)
            g = g if multipliers is None else g * multipliers
            surrogate = (weights * (g - delta.index_select(0, v))).sum()
        inputs = [t for t, w in zip(leaves, wanted, strict=True) if t is not None and w]
        found = torch.autograd.grad(surrogate, inputs, allow_unused=True)
        kept = [s for s in sums if s is not None]
        for one, share in zip(kept, found, strict=True):
            if share is not None:
                one += share
    assert len(sums) == len(OPERANDS)
    return sums


def _row_elements(a: Attention) -> int:
    return a.heads * max(a.dim, a.score_dim, 1)
