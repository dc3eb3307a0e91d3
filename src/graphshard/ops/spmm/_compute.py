# SPDX-License-Identifier: Apache-2.0
"""Runs one operator without autograd: in the compiled kernels where they can, else in plain torch.

Arguments have been checked and have one dtype. The kernels read contiguous rows and write into
tensors that are allocated here. An array crosses to C++ detached: nanobind would take one that
requires grad without a word. A view whose negation torch has put off is negated where it crosses,
and refused where it would be written to: see csrc/bindings/arrays.h.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..._base.kernels import empty, kernels_for, num_threads
from .. import _check
from .._adjacency import Adjacency
from .._broadcast import RowLoop, Shape, copy_loop, dot_loop, row_loop, row_places, sum_to_row
from .._check import Operand
from .._dispatch import triton_for
from . import fallback


def spmm(
    adj: Adjacency, op: str, reduce: str, lhs: Operand, rhs: Operand
) -> tuple[Tensor, Tensor | None]:
    """Reduced messages [num_dst, ...]; for max and min also the argmax, same shape."""
    lhs = None if lhs is None or op == "copy_rhs" else lhs.detach()
    rhs = None if rhs is None or op == "copy_lhs" else rhs.detach()
    like = lhs if lhs is not None else rhs
    assert like is not None
    kernels = kernels_for(like.device, like.dtype)
    if kernels is None:
        return _without_extension(like).spmm(adj, op, reduce, lhs, rhs)
    loop = _spmm_loop(lhs, rhs)
    out = empty((adj.num_dst, *loop.shape), like.dtype)
    has_arg = reduce in ("max", "min")
    arg = empty(out.shape, adj.idtype) if has_arg else None
    _run_spmm(kernels, out, arg, adj, op, reduce, lhs, rhs, loop)
    return out, arg


def spmm_add(out: Tensor, adj: Adjacency, op: str, lhs: Operand, rhs: Operand) -> None:
    """Add the sums of messages to ``out`` [num_dst, ...], in place."""
    lhs = None if lhs is None or op == "copy_rhs" else lhs.detach()
    rhs = None if rhs is None or op == "copy_lhs" else rhs.detach()
    like = lhs if lhs is not None else rhs
    assert like is not None
    loop = _spmm_loop(lhs, rhs)
    shape, out = (adj.num_dst, *loop.shape), out.detach()
    if out.shape != shape or out.dtype != like.dtype or out.device != like.device:
        raise ValueError(
            "out must have the shape and dtype of the sums, and be on their device, "
            f"{shape}, {like.dtype} and {like.device} (got {tuple(out.shape)}, {out.dtype} and "
            f"{out.device})"
        )
    in_place = out.is_contiguous() and _check.is_plain(out)
    in_place &= not any(t is not None and _check.share_memory(out, t) for t in (lhs, rhs))
    kernels = kernels_for(like.device, like.dtype) if in_place else None
    if kernels is None:
        out += spmm(adj, op, "sum", lhs, rhs)[0]
    else:
        _run_spmm(kernels, out, None, adj, op, "add", lhs, rhs, loop)


def _run_spmm(
    kernels: ModuleType,
    out: Tensor,
    arg: Operand,
    adj: Adjacency,
    op: str,
    reduce: str,
    lhs: Operand,
    rhs: Operand,
    loop: RowLoop,
) -> None:
    if out.numel() == 0:
        return
    reads_edges = op != "copy_lhs" or reduce in ("max", "min")
    kernels.spmm(
        flat_rows(out),
        *adj.csc(ids=reads_edges),
        adj.num_src,
        flat_rows(lhs),
        flat_rows(rhs),
        flat_rows(arg),
        op,
        reduce,
        *_loop_arguments(loop),
        num_threads(),
    )


def sddmm(
    adj: Adjacency, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str, rhs_target: str
) -> Tensor:
    """``op`` of two operands per edge: [num_edges, ...]; for dot the last dimensions are equal."""
    lhs, rhs = lhs.detach(), rhs.detach()
    kernels = kernels_for(lhs.device, lhs.dtype)
    if kernels is None:
        return _without_extension(lhs).sddmm(adj, op, lhs, rhs, lhs_target, rhs_target)
    make_loop = dot_loop if op == "dot" else row_loop
    loop = make_loop(tuple(lhs.shape[1:]), tuple(rhs.shape[1:]))
    out = empty((adj.num_edges, *loop.shape), lhs.dtype)
    if not out.numel():
        return out
    if loop.inner == 0:
        return out.zero_()
    arguments = (flat_rows(lhs), flat_rows(rhs), lhs_target, rhs_target, op, *_loop_arguments(loop))
    if op == "dot" or adj.has_sequential_csc():
        # Rows of the destination are read once, and stay in the cache for all of its edges.
        indptr, indices, eids = adj.csc()
        edges = (indptr, indices, eids, adj.num_src)
        kernels.sddmm_csc(flat_rows(out), *edges, *arguments, num_threads())
    else:
        src, dst = adj.coo()
        edges_in_order = (src, dst, adj.num_src, adj.num_dst)
        kernels.sddmm_coo(flat_rows(out), *edges_in_order, *arguments, num_threads())
    return out


def gather(adj: Adjacency, values: Tensor, target: str) -> Tensor:
    """The row of each edge's source or destination, any dtype: [num_edges, ...]."""
    index = adj.coo()[0 if target == "u" else 1]
    values = values.detach()
    kernels = kernels_for(values.device)
    if kernels is None:
        return values.index_select(0, index)
    out = empty((adj.num_edges, *values.shape[1:]), values.dtype)
    return torch.index_select(values, 0, index, out=out)


def edge_softmax(adj: Adjacency, logits: Tensor) -> Tensor:
    """Softmax over the in-edges of each destination: [num_edges, ...]."""
    logits = logits.detach()
    kernels = kernels_for(logits.device, logits.dtype)
    if kernels is None:
        return _without_extension(logits).edge_softmax(adj, logits)
    out = empty(logits.shape, logits.dtype)
    if out.numel():
        indptr, _, eids = adj.csc()
        kernels.edge_softmax(flat_rows(out), indptr, eids, flat_rows(logits), num_threads())
    return out


def edge_softmax_backward(adj: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
    """``out * (grad - sum of out * grad over the destination)``: [num_edges, ...]."""
    out, grad = out.detach(), grad.detach()
    kernels = kernels_for(out.device, out.dtype)
    if kernels is None:
        return _without_extension(out).edge_softmax_backward(adj, out, grad)
    result = empty(out.shape, out.dtype)
    if out.numel():
        indptr, _, eids = adj.csc()
        kernels.edge_softmax_backward(
            flat_rows(result), indptr, eids, flat_rows(out), flat_rows(grad), num_threads()
        )
    return result


def argmax_backward(
    adj: Adjacency,
    op: str,
    grad: Tensor,
    arg: Tensor,
    operands: tuple[Operand, Operand],
    rows: tuple[Shape | None, Shape | None],
    wanted: tuple[bool, bool],
) -> tuple[Operand, Operand] | None:
    """Gradients of max or min, given the argmax; None where no kernel can do it.

    Args:
        adj: The edges.
        op: The operator that made the messages.
        grad: [num_dst, ...] gradient of the result.
        arg: Ids of the edges that have the maximum, same shape.
        operands: Source rows and edge rows, each where ``op`` scales by it.
        rows: Shape of a source row and of an edge row; None where ``op`` does not look at it.
        wanted: Whether to compute the gradient of each operand.
    """
    kernels = kernels_for(grad.device, grad.dtype)
    if kernels is None:
        return None
    shape = tuple(grad.shape[1:])
    wide = torch.float32 if grad.dtype == torch.bfloat16 else grad.dtype
    lhs, rhs = (None if side is None else flat_rows(side.detach()) for side in operands)
    lhs_places, rhs_places = (
        row_places(shape if row is None else row, shape, grad.device).contiguous().view(-1)
        for row in rows
    )
    lhs_grad = rhs_grad = None
    if wanted[0]:
        lhs_grad = empty((adj.num_src, *shape), wide).zero_()
    if wanted[1]:
        assert rows[1] is not None
        rhs_grad = empty((adj.num_edges, *rows[1]), wide).zero_()
    if arg.numel():
        kernels.argmax_backward(
            flat_rows(grad.detach()),
            flat_rows(arg),
            adj.coo()[0],
            adj.num_src,
            lhs,
            rhs,
            lhs_places,
            rhs_places,
            op,
            flat_rows(lhs_grad),
            flat_rows(rhs_grad),
            num_threads(),
        )
    if lhs_grad is not None:
        assert rows[0] is not None
        lhs_grad = sum_to_row(lhs_grad, rows[0]).to(grad.dtype)
    return lhs_grad, None if rhs_grad is None else rhs_grad.to(grad.dtype)


def _without_extension(like: Tensor) -> Any:
    return triton_for(like.device, like.dtype) or fallback


def _spmm_loop(lhs: Operand, rhs: Operand) -> RowLoop:
    if lhs is None or rhs is None:
        only = rhs if lhs is None else lhs
        assert only is not None
        return copy_loop(tuple(only.shape[1:]))
    return row_loop(tuple(lhs.shape[1:]), tuple(rhs.shape[1:]))


def _loop_arguments(loop: RowLoop) -> tuple[Tensor, Tensor, int, int, int]:
    return (
        loop.lhs_offsets,
        loop.rhs_offsets,
        loop.inner,
        loop.lhs_step,
        loop.rhs_step,
    )


def flat_rows(values: Operand) -> Operand:
    """Two-dimensional, contiguous: a view wherever one exists."""
    if values is None:
        return None
    return values.detach().contiguous().view(values.shape[0], math.prod(values.shape[1:]))
