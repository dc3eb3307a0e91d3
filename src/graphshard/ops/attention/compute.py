# SPDX-License-Identifier: Apache-2.0
"""Runs attention without autograd: in the compiled kernels where they can, else in plain torch.

A result can come in one go (`whole`), or from a state that takes the edges of one shard after
another (`AttentionState`). Either way the gradient needs three numbers per destination and head:
peak, total, and delta.

What follows an attention in a layer, a bias and a ReLU, is done in the memory of its result, by
`finish` and `finish_`. Backward, the finished result is all that is kept of it. With
``out = relu(a + bias)`` and the gradient ``g`` of ``a``, which is 0 where ``out`` is,
``<g, a> = <g, out - bias>``: no ``a`` needed. Each is one pass over the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..._base.kernels import empty, kernels_for, num_threads
from .. import reference
from .._adjacency import Adjacency
from .._attention_rule import Attention, wide
from .._check import Operand
from .._dispatch import triton_for
from ..spmm import flat_rows


@dataclass
class AttentionState:
    """What destinations know of their in-edges so far, in the type of sums.

    Args:
        peak: ``[num_dst, heads]`` the highest score, -inf before the first.
        total: ``[num_dst, heads]`` sum of ``exp(score - peak)``.
        sums: ``[num_dst, heads, dim]`` sum of weighted values at that peak.
    """

    peak: Tensor
    total: Tensor
    sums: Tensor


def whole(adj: Adjacency, a: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """(result ``[num_dst, heads, dim]``, peak, total), all edges being those of ``adj``."""
    a = _detached(a)
    kernels = kernels_for(a.values.device, a.dtype)
    shape = (adj.num_dst, a.heads, a.dim)
    if kernels is None or 0 in (*shape, adj.num_edges):
        state = begin(adj, a)
        take(adj, a, state)
        state.sums.div_(state.total.masked_fill(state.total == 0, 1.0).unsqueeze(-1))
        return state.sums.to(a.dtype), state.peak, state.total
    out = empty(shape, a.dtype)
    peak = torch.empty(shape[:2], dtype=wide(a.dtype))
    total = torch.empty_like(peak)
    _KernelOperands(kernels, adj, a).forward(adj, peak, total, None, out, True)
    return out, peak, total


def begin(adj: Adjacency, a: Attention) -> AttentionState:
    """The state before the first edge."""
    dtype, device = wide(a.dtype), a.values.device
    peak = torch.full((adj.num_dst, a.heads), -torch.inf, dtype=dtype, device=device)
    sums = empty((adj.num_dst, a.heads, a.dim), dtype, device).zero_()
    return AttentionState(peak, torch.zeros_like(peak), sums)


def start(adj: Adjacency, a: Attention) -> AttentionState:
    """`begin` and `take` in one: the kernel writes the first state instead of adding to zeros."""
    a = _detached(a)
    kernels = kernels_for(a.values.device, a.dtype)
    shape = (adj.num_dst, a.heads, a.dim)
    if kernels is None or 0 in (*shape, adj.num_edges):
        state = begin(adj, a)
        take(adj, a, state)
        return state
    dtype = wide(a.dtype)
    peak = torch.empty(shape[:2], dtype=dtype)
    state = AttentionState(peak, torch.empty_like(peak), empty(shape, dtype))
    _KernelOperands(kernels, adj, a).forward(adj, peak, state.total, state.sums, None, True)
    return state


def take(adj: Adjacency, a: Attention, state: AttentionState) -> None:
    """Take the edges of ``adj`` into the state of their destinations, in place.

    The state may be that of some heads of more: the numbers of each row are side by side.
    """
    a = _detached(a)
    if 0 in (adj.num_edges, adj.num_dst, a.heads):
        return
    kernels = kernels_for(a.values.device, a.dtype)
    if kernels is None or a.dim == 0:
        _without_extension(a).take(adj, a, state.peak, state.total, state.sums)
        return
    operands = _KernelOperands(kernels, adj, a)
    operands.forward(adj, state.peak, state.total, state.sums, None, False)


def gradients(
    adj: Adjacency,
    a: Attention,
    statistics: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    wanted: Sequence[bool],
    sums: tuple[Operand, Operand] = (None, None),
) -> list[Operand]:
    """Gradients of the operands, of those edges that ``adj`` has.

    Args:
        a: The attention, with what ``adj`` sees of its operands.
        statistics: Peak, total and delta of each destination and head, over all edges.
        grad: ``[num_dst, heads, dim]`` gradient of the result, of the dtype of ``a``. It may be
            that of some heads of more.
        wanted: Which gradients to compute, in the order of `OPERANDS`.
        sums: Where to add the gradients of ``dst`` and of ``vector``, in the type of sums, with
            the shape of the operand; new zeros by default.

    Returns:
        A gradient, in the operand's shape, for each operand that is wanted. Of the dtype of ``a``
        for what has a row of columns per source or edge, else in the type of sums.
    """
    a = _detached(a)
    _, _, want_dst, _, want_vector, _ = wanted
    dtype = wide(a.dtype)
    dst_sum, vector_sum = sums
    if want_dst and dst_sum is None:
        dst_sum = torch.zeros(a.dst.shape, dtype=dtype, device=a.dst.device)
    if want_vector and vector_sum is None:
        assert a.vector is not None
        vector_sum = torch.zeros(a.vector.shape, dtype=dtype, device=a.vector.device)
    kernels = kernels_for(a.values.device, a.dtype)
    if 0 in (adj.num_edges, adj.num_dst, a.heads):
        grads: list[Operand] = [
            torch.zeros_like(t) if w and t is not None else None
            for t, w in zip(a.operands, wanted, strict=True)
        ]
    elif kernels is None or 0 in (a.dim, a.score_dim if a.score != "additive" else 1):
        grads = _without_extension(a).gradients(adj, a, statistics, grad.detach(), wanted)
        for total, share in ((dst_sum, grads[2]), (vector_sum, grads[4])):
            if total is not None and share is not None:
                total += share
    else:
        operands = _KernelOperands(kernels, adj, a)
        grads = operands.gradients(
            adj, statistics, _spread_rows(grad.detach()), wanted, dst_sum, vector_sum
        )
    grads[2] = dst_sum if want_dst else None
    grads[4] = vector_sum if want_vector else None
    return grads


def _without_extension(a: Attention) -> Any:
    """Triton's kernels or plain torch; the former know no heads without columns."""
    has_columns = a.dim > 0 and (a.score == "additive" or a.score_dim > 0)
    return (triton_for(a.values.device, a.dtype) if has_columns else None) or reference


def _detached(a: Attention) -> Attention:
    return a.with_operands([None if t is None else t.detach() for t in a.operands])


class _KernelOperands:
    """The operands as the kernels want them: contiguous rows in one type, numbers in the wide one.

    Rows that are gathered, and what is added to them, keep the dtype of the attention; numbers per
    head are as wide as sums are.
    """

    def __init__(self, kernels: ModuleType, adj: Adjacency, a: Attention) -> None:
        self.kernels, self.a = kernels, a
        self.dtype, self.wide = a.dtype, wide(a.dtype)
        values = _flat_as(a.values, self.dtype)
        additive, by_columns, mask = a.score == "additive", a.score == "joint", a.mask
        self._reads_edges = mask is not None or a.edge is not None or a.factor is not None
        src = values if a.src is None or a.src is a.values else _flat_as(a.src, self.dtype)
        self.bound: Any = kernels.attention(
            a.score,
            adj.num_src,
            adj.num_dst,
            a.heads,
            a.dim,
            a.score_dim,
            a.slope,
            a.scale,
            values,
            None if additive else src,
            None if additive else _flat_as(a.dst, self.dtype),
            _flat_as(a.edge, self.dtype) if by_columns else None,
            _flat_as(a.src, self.wide) if additive else None,
            _flat_as(a.dst, self.wide) if additive else None,
            None if by_columns else _flat_as(a.edge, self.wide),
            None if a.vector is None else a.vector.to(self.wide).contiguous().view(-1),
            _flat_as(a.factor, self.wide),
            0 if mask is None else mask.threshold,
            0 if mask is None else mask.edge_seed,
            0 if mask is None else mask.head_seed,
            1.0 if mask is None else mask.kept,
            None if mask is None or mask.keys is None else mask.keys.contiguous(),
        )

    def forward(
        self, adj: Adjacency, peak: Tensor, total: Tensor, sums: Operand, out: Operand, begin: bool
    ) -> None:
        threads = torch.get_num_threads()
        if sums is not None:
            sums = _spread_rows(sums)
        self.bound.forward(
            *adj.csc(ids=self._reads_edges), peak, total, sums, flat_rows(out), begin, threads
        )

    def gradients(
        self,
        adj: Adjacency,
        statistics: tuple[Tensor, Tensor, Tensor],
        grad: Tensor,
        wanted: Sequence[bool],
        dst_sum: Operand,
        vector_sum: Operand,
    ) -> list[Operand]:
        a, threads = self.a, torch.get_num_threads()
        additive = a.score == "additive"
        values, src, _, edge, _, factor = wanted
        edge_dtype = self.dtype if a.score == "joint" else self.wide
        grads: list[Operand] = [
            empty(a.values.shape, self.dtype) if values else None,
            _result(a.src, self.wide if additive else self.dtype, src),
            None,
            _result(a.edge, edge_dtype, edge),
            None,
            _result(a.factor, self.wide, factor),
        ]
        common = (*statistics, grad)
        out_edges = adj.csr(ids=self._reads_edges)
        if additive:
            written = map(flat_rows, (grads[0], None, grads[1], dst_sum, grads[3], grads[5]))
            self.bound.sources(*out_edges, *common, *written, threads)
            return grads
        if values or src:
            outputs = (flat_rows(grads[0]), flat_rows(grads[1]))
            self.bound.sources(*out_edges, *common, *outputs, None, None, None, None, threads)
        if any(wanted[2:]):
            edge_rows = flat_rows(grads[3])
            by_columns, numbers = (edge_rows, None) if a.score == "joint" else (None, edge_rows)
            vector = None if vector_sum is None else vector_sum.view(1, -1)
            sums = flat_rows(dst_sum), vector, by_columns, numbers, flat_rows(grads[5])
            self.bound.destinations(*adj.csc(ids=self._reads_edges), *common, *sums, threads)
        return grads


def _flat_as(rows: Operand, dtype: torch.dtype) -> Operand:
    return None if rows is None else flat_rows(rows.to(dtype))


def _result(like: Operand, dtype: torch.dtype, wanted: bool) -> Operand:
    return empty(like.shape, dtype) if wanted and like is not None else None


def _spread_rows(values: Tensor) -> Tensor:
    """Two-dimensional, the numbers of a row side by side; a view where they are so already."""
    shape = values.shape[0], math.prod(values.shape[1:])
    if not values[:1].is_contiguous() or (shape[0] > 1 and values.stride(0) < shape[1]):
        values = values.contiguous()
    return values.as_strided(shape, (max(values.stride(0), shape[1]), 1))


def finish(
    state: AttentionState, dtype: torch.dtype, bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """The result, of ``dtype``: ``relu(sums / total + bias)``; uses up ``state.sums``."""
    sums, total = state.sums, state.total
    kernels = _finish_kernels(sums, dtype)
    if kernels is None:
        sums.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1))
        return finish_(sums.to(dtype), bias, relu)
    out = sums if sums.dtype == dtype else empty(sums.shape, dtype)
    rows, heads = flat_rows(out), sums.shape[1]
    kernels.attention_finish(
        rows, heads, flat_rows(sums), total, _vector(bias, dtype), relu, num_threads()
    )
    return out


def finish_(out: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Add ``bias`` ``[heads, dim]`` to ``out`` ``[num_dst, heads, dim]`` and activate, in place."""
    if bias is None and not relu:
        return out
    kernels = _finish_kernels(out, out.dtype)
    if kernels is None:
        if bias is not None:
            out.add_(bias.detach().to(out.dtype))
        return out.relu_() if relu else out
    vector = _vector(bias, out.dtype)
    kernels.attention_finish(flat_rows(out), out.shape[1], None, None, vector, relu, num_threads())
    return out


def begin_backward(
    grad: Tensor, out: Tensor, bias: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradient of the attention itself, given that of what `finish_` made of it, and delta.

    Returns:
        ``g`` ``[num_dst, heads, dim]``, contiguous, of the dtype of ``out``, which is the gradient
        of the bias, too, summed over destinations; and ``<g, out - bias>`` of each destination and
        head, in the type of sums.
    """
    grad = grad.detach().to(out.dtype).contiguous()
    dtype, out = wide(out.dtype), out.detach()
    kernels = _finish_kernels(out, out.dtype)
    if kernels is None:
        passed_grad = grad.masked_fill(out <= 0, 0.0) if relu else grad
        plain = out.to(dtype) if bias is None else out.to(dtype) - bias.detach().to(dtype)
        return passed_grad, (passed_grad.to(dtype) * plain).sum(-1)
    passed_grad = empty(out.shape, out.dtype) if relu else grad
    delta = empty(out.shape[:2], dtype)
    passed, vector = flat_rows(passed_grad) if relu else None, _vector(bias, out.dtype)
    kernels.attention_delta(delta, flat_rows(grad), flat_rows(out), vector, passed, num_threads())
    return passed_grad, delta


def _finish_kernels(rows: Tensor, dtype: torch.dtype) -> ModuleType | None:
    """The kernels, if they can do this and there is something to do."""
    if rows.numel() == 0 or not rows.is_contiguous():
        return None
    return kernels_for(rows.device, dtype)


def _vector(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.detach().to(wide(dtype)).contiguous().view(-1)
