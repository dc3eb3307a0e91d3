# SPDX-License-Identifier: Apache-2.0
"""Gradients of gspmm, gsddmm and edge_softmax.

Each backward pass is written in the differentiable functions of this file, so a gradient of a
gradient needs no code of its own. The gradient of a sum over in-edges is a sum over out-edges
(`spmm` on the reversed adjacency) or a value per edge (`sddmm`), and the other way round: nothing
of size [num_edges, features] is made unless an operand or a result has that size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._adjacency import Adjacency
from .._broadcast import sum_to_row
from .._check import Operand
from . import _compute
from ._argmax import argmax_backward


def _tracked(*values: Operand) -> bool:
    return torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in values)


def spmm(adj: Adjacency, op: str, reduce: str, lhs: Operand, rhs: Operand) -> Tensor:
    """Differentiable `_compute.spmm`, without the argmax."""
    lhs = None if op == "copy_rhs" else lhs
    rhs = None if op == "copy_lhs" else rhs
    if not _tracked(lhs, rhs):
        return _compute.spmm(adj, op, reduce, lhs, rhs)[0]
    result: Tensor = _SpMM.apply(adj, op, reduce, lhs, rhs)
    return result


def sddmm(
    adj: Adjacency, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str, rhs_target: str
) -> Tensor:
    """Differentiable `_compute.sddmm`."""
    if not _tracked(lhs, rhs):
        return _compute.sddmm(adj, op, lhs, rhs, lhs_target, rhs_target)
    result: Tensor = _SDDMM.apply(adj, op, lhs, rhs, lhs_target, rhs_target)
    return result


def gather(adj: Adjacency, values: Tensor, target: str) -> Tensor:
    """Rows of the target of each edge: differentiable `_compute.gather`, and `e` as it is."""
    if target == "e":
        return values
    if not _tracked(values):
        return _compute.gather(adj, values, target)
    result: Tensor = _Gather.apply(adj, values, target)
    return result


def scatter(adj: Adjacency, values: Tensor, target: str) -> Tensor:
    """Sum of edge rows per target, the adjoint of `gather`."""
    if target == "e":
        return values
    return spmm(adj.reverse() if target == "u" else adj, "copy_rhs", "sum", None, values)


def edge_softmax(adj: Adjacency, logits: Tensor) -> Tensor:
    """Differentiable `_compute.edge_softmax`."""
    if not _tracked(logits):
        return _compute.edge_softmax(adj, logits)
    result: Tensor = _EdgeSoftmax.apply(adj, logits)
    return result


def _edge_softmax_backward(adj: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
    if not _tracked(out, grad):
        return _compute.edge_softmax_backward(adj, out, grad)
    result: Tensor = _EdgeSoftmaxBackward.apply(adj, out, grad)
    return result


class _SpMM(Function):
    @staticmethod
    def forward(
        ctx: Any, adj: Adjacency, op: str, reduce: str, lhs: Operand, rhs: Operand
    ) -> Tensor:
        out, arg = _compute.spmm(adj, op, reduce, lhs, rhs)
        out = out.detach()  # a view of other memory could not be changed in place
        _, _, _, lhs_grad, rhs_grad = ctx.needs_input_grad
        ctx.adj, ctx.op, ctx.reduce = adj, op, reduce
        ctx.lhs_shape = None if lhs is None else lhs.shape
        ctx.rhs_shape = None if rhs is None else rhs.shape
        scales = op in ("mul", "div")
        ctx.save_for_backward(
            lhs if scales and rhs_grad else None,
            rhs if scales and (lhs_grad or op == "div") else None,
            arg,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Operand, ...]:
        adj, op = ctx.adj, ctx.op
        lhs, rhs, arg = ctx.saved_tensors
        _, _, _, lhs_wanted, rhs_wanted = ctx.needs_input_grad
        if arg is not None:
            shapes, wanted = (ctx.lhs_shape, ctx.rhs_shape), (lhs_wanted, rhs_wanted)
            grads = argmax_backward(adj, op, grad, arg, (lhs, rhs), shapes, wanted)
            return (None, None, None, *grads)
        if ctx.reduce == "mean":
            degrees = adj.in_degrees().clamp(min=1).to(grad.dtype)
            grad = grad / degrees.view(-1, *[1] * (grad.dim() - 1))
        lhs_grad = rhs_grad = None
        if lhs_wanted:
            row = tuple(ctx.lhs_shape[1:])
            if op in ("mul", "div"):
                lhs_grad = sum_to_row(spmm(adj.reverse(), op, "sum", grad, rhs), row)
            else:
                lhs_grad = spmm(adj.reverse(), "copy_lhs", "sum", sum_to_row(grad, row), None)
        if rhs_wanted:
            row = tuple(ctx.rhs_shape[1:])
            if op in ("mul", "div"):
                rhs_grad = _product_onto_row(adj, lhs, "u", grad, "v", row)
                rhs_grad = -rhs_grad / (rhs * rhs) if op == "div" else rhs_grad
            else:
                rhs_grad = gather(adj, sum_to_row(grad, row), "v")
                rhs_grad = -rhs_grad if op == "sub" else rhs_grad
        return None, None, None, lhs_grad, rhs_grad


class _SDDMM(Function):
    @staticmethod
    def forward(
        ctx: Any,
        adj: Adjacency,
        op: str,
        lhs: Tensor,
        rhs: Tensor,
        lhs_target: str,
        rhs_target: str,
    ) -> Tensor:
        _, _, lhs_grad, rhs_grad, _, _ = ctx.needs_input_grad
        ctx.adj, ctx.op, ctx.targets = adj, op, (lhs_target, rhs_target)
        ctx.rows = tuple(lhs.shape[1:]), tuple(rhs.shape[1:])
        scales = op in ("mul", "div", "dot")
        ctx.save_for_backward(
            lhs if scales and rhs_grad else None,
            rhs if scales and (lhs_grad or op == "div") else None,
        )
        return _compute.sddmm(adj, op, lhs, rhs, lhs_target, rhs_target).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Operand, ...]:
        adj, op = ctx.adj, ctx.op
        lhs, rhs = ctx.saved_tensors
        lhs_target, rhs_target = ctx.targets
        lhs_row, rhs_row = ctx.rows
        _, _, lhs_wanted, rhs_wanted, _, _ = ctx.needs_input_grad
        lhs_grad = rhs_grad = None
        if lhs_wanted:
            if op in ("mul", "div", "dot"):
                factor = 1 / rhs if op == "div" else rhs
                lhs_grad = _product_onto_target(adj, grad, factor, rhs_target, lhs_target, lhs_row)
            else:
                lhs_grad = scatter(adj, sum_to_row(grad, lhs_row), lhs_target)
        if rhs_wanted:
            if op in ("mul", "div", "dot"):
                rhs_grad = _product_onto_target(adj, grad, lhs, lhs_target, rhs_target, rhs_row)
                rhs_grad = -rhs_grad / (rhs * rhs) if op == "div" else rhs_grad
            else:
                rhs_grad = scatter(adj, sum_to_row(grad, rhs_row), rhs_target)
                rhs_grad = -rhs_grad if op == "sub" else rhs_grad
        return None, None, lhs_grad, rhs_grad, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, adj: Adjacency, values: Tensor, target: str) -> Tensor:
        ctx.adj, ctx.target = adj, target
        return _compute.gather(adj, values, target).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Operand, ...]:
        return None, scatter(ctx.adj, grad, ctx.target), None


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, adj: Adjacency, logits: Tensor) -> Tensor:
        out = _compute.edge_softmax(adj, logits).detach()
        ctx.adj = adj
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Operand, ...]:
        (out,) = ctx.saved_tensors
        return None, _edge_softmax_backward(ctx.adj, out, grad)


class _EdgeSoftmaxBackward(Function):
    """``out * (grad - S(out * grad))``, where S sums over a destination and hands back to edges."""

    @staticmethod
    def forward(ctx: Any, adj: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
        ctx.adj = adj
        ctx.save_for_backward(out, grad)
        return _compute.edge_softmax_backward(adj, out, grad)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Operand, ...]:
        adj = ctx.adj
        out, grad = ctx.saved_tensors
        _, out_wanted, grad_wanted = ctx.needs_input_grad
        out_grad = None
        if out_wanted:
            shift = gather(adj, scatter(adj, out * grad, "v"), "v")
            other = gather(adj, scatter(adj, out * upper, "v"), "v")
            out_grad = upper * (grad - shift) - grad * other
        return None, out_grad, _edge_softmax_backward(adj, out, upper) if grad_wanted else None


def _product_onto_row(
    adj: Adjacency,
    lhs: Tensor,
    lhs_target: str,
    rhs: Tensor,
    rhs_target: str,
    row: tuple[int, ...],
) -> Tensor:
    """Product of two operands per edge, summed down to rows of shape ``row``.

    The dimensions to sum over go last and become a dot product, so that only [num_edges, *row] is
    ever made.
    """
    shape = torch.broadcast_shapes(lhs.shape[1:], rhs.shape[1:])
    padded = (1,) * (len(shape) - len(row)) + row
    summed = [dim for dim, size in enumerate(padded) if size == 1 and shape[dim] != 1]
    if summed:
        size = tuple(shape[dim] for dim in summed)
        kept = [dim for dim in range(len(shape)) if dim not in summed]
        lhs, rhs = (_move_last(side, kept, summed, size) for side in (lhs, rhs))
    out = sddmm(adj, "dot" if summed else "mul", lhs, rhs, lhs_target, rhs_target)
    return out.reshape(adj.num_edges, *row)


def _move_last(values: Tensor, kept: list[int], summed: list[int], size: tuple[int, ...]) -> Tensor:
    """[rows, *shape] to [rows, *kept, product of summed], broadcast over ``summed`` only."""
    rows = values.shape[0]
    values = values.reshape(
        rows, *[1] * (len(kept) + len(summed) + 1 - values.dim()), *values.shape[1:]
    )
    values = values.permute(0, *(dim + 1 for dim in kept), *(dim + 1 for dim in summed))
    kept_shape = values.shape[1 : 1 + len(kept)]
    return values.expand(rows, *kept_shape, *size).reshape(rows, *kept_shape, math.prod(size))


def _product_onto_target(
    adj: Adjacency,
    edge_values: Tensor,
    factor: Tensor,
    factor_target: str,
    target: str,
    row: tuple[int, ...],
) -> Tensor:
    """Sum of ``edge_values * factor`` over the edges of each target, as rows of shape ``row``."""
    if target == "e" or factor_target == "e":
        products = _product_onto_row(adj, edge_values, "e", factor, factor_target, row)
        return scatter(adj, products, target)
    if factor_target == target:
        total = scatter(adj, edge_values, target)
        return sum_to_row(torch.mul(*_align(total, factor)), row)
    view = adj.reverse() if target == "u" else adj
    return sum_to_row(spmm(view, "mul", "sum", factor, edge_values), row)


def _align(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    dim = max(lhs.dim(), rhs.dim())
    lhs = lhs.reshape(lhs.shape[0], *[1] * (dim - lhs.dim()), *lhs.shape[1:])
    return lhs, rhs.reshape(rhs.shape[0], *[1] * (dim - rhs.dim()), *rhs.shape[1:])
