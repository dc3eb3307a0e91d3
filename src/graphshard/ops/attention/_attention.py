# SPDX-License-Identifier: Apache-2.0
"""attend: attention over in-edges in one pass, and its gradient; nothing per edge and head kept.

`head_products` makes what a node contributes to additive scores, both ends at once.

[Note: results that are changed in place]
    The backward reads the result, which the caller may have changed in place by then:
    ``F.relu(layer(g, x), inplace=True)`` is how many programs activate. A copy would be kept for
    all who do not. So the result itself is kept, and computed again, from the operands, if torch's
    count of its changes has moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..._base.kernels import empty, kernels_for
from .. import _check, reference
from .._adjacency import Adjacency, HasAdjacency, as_adjacency
from .._attention_rule import SCORES, Attention, EdgeMask, wide
from ..spmm import flat_rows
from . import compute
from .compute import begin_backward, finish_


def attend(adj: Adjacency | HasAdjacency, attention: Attention) -> Tensor:
    """Weighted mean of source values by a softmax over the in-edges of each destination.

    Forward it is one pass over in-edges with an online softmax. Backward the weights are computed
    again; what is kept are the operands, the result, and two numbers per destination and head. The
    result may be changed in place; see [Note: results that are changed in place].
    Sums are in float32 for bfloat16 and float16. Gradients of gradients are taken by way of
    `reference.attend`, which makes a number per edge and head.

    Returns:
        ``[num_dst, heads, dim]``, 0 for a destination without in-edges.

    Raises:
        TypeError: An operand is not a tensor of floating-point numbers.
        ValueError: An operand has the wrong shape or is on another device.

    Example:
        >>> adj = Adjacency(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), 2, 2)
        >>> values, zeros = torch.tensor([[[2.0]], [[4.0]]]), torch.zeros(2, 1)
        >>> attend(adj, Attention.additive(values, zeros, zeros)).flatten()
        tensor([4., 3.])
    """
    adj = as_adjacency(adj)
    check_attention(adj.num_src, adj.num_dst, adj.num_edges, adj.device, attention)
    tensors = (*attention.operands, attention.bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _Attend.apply(adj, _with_tensors(attention, [None] * 7), *tensors)
    return finish_(compute.whole(adj, attention)[0], attention.bias, attention.relu)


def _with_tensors(rule: Attention, tensors: Sequence[Tensor | None]) -> Attention:
    *operands, bias = tensors
    return rule.with_operands(operands).finished(bias, rule.relu)


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, adj: Adjacency, rule: Attention, *tensors: Tensor | None) -> Tensor:
        attention = _with_tensors(rule, [t if t is None else t.detach() for t in tensors])
        out, peak, total = _finished(adj, attention)
        out = out.detach()  # a view of other memory could not be changed in place
        ctx.adj, ctx.rule, ctx.changes = adj, rule, Changes(out)
        # The same memory, whose changes torch does not count, or it would refuse them.
        ctx.save_for_backward(*tensors, peak, total, out.data)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, peak, total, out = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # the gradient may be differentiated
            # Views: one tensor may have two places, and each place has a gradient of its own.
            places = [t if t is None else t.view_as(t) for t in tensors]
            again = reference.attend(ctx.adj, _with_tensors(ctx.rule, places))
            inputs = [t for t, w in zip(places, wanted, strict=True) if w and t is not None]
            shares = iter(torch.autograd.grad(again, inputs, grad, create_graph=True))
            return (None, None, *(next(shares) if w else None for w in wanted))
        attention, bias = _with_tensors(ctx.rule, tensors), tensors[-1]
        if ctx.changes.any():
            out = _finished(ctx.adj, attention)[0]
        grad, delta = begin_backward(grad, out, bias, ctx.rule.relu)
        grads = compute.gradients(ctx.adj, attention, (peak, total, delta), grad, wanted[:-1])
        return (None, None, *grads, grad.sum(0).to(bias.dtype) if wanted[-1] else None)


def _finished(adj: Adjacency, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """The result, peak and total, without autograd."""
    out, peak, total = compute.whole(adj, attention)
    return finish_(out, attention.bias, attention.relu), peak, total


class Changes:
    """Whether a tensor has been changed in place since; keeps its count of them, not its values."""

    def __init__(self, tensor: Tensor) -> None:
        self._counter = tensor.detach()  # of the same count
        self._counter.data = tensor.new_empty(0)
        self._count = self._counter._version

    def any(self) -> bool:
        """Whether there was a change."""
        return self._counter._version != self._count


def check_attention(
    num_src: int, num_dst: int, num_edges: int, device: torch.device, attention: Attention
) -> None:
    """Raise unless every operand has the shape that its place asks for."""
    a = attention
    if not isinstance(a, Attention):
        raise TypeError(
            f"attention must be an Attention (got {type(a).__name__}); make one with "
            "Attention.additive, joint or dot"
        )
    _check.check_choice("score of attention", a.score, SCORES)
    _check.check_bool("relu of attention", a.relu)
    _check.check_number("slope of attention", a.slope)
    _check.check_number("scale of attention", a.scale)
    for name in ("values", "dst", "src", "edge", "vector", "factor", "bias"):
        value = getattr(a, name)
        if value is None and name not in ("values", "dst"):
            continue
        _check.check_tensor(f"{name} of attention", value)
        if value.device != device:
            raise ValueError(
                f"{name} of attention must be on the device of the adjacency, {device} "
                f"(got {value.device}); move one of them with .to(...)"
            )
        if value.dtype not in _check.VALUE_DTYPES:
            raise TypeError(
                f"{name} of attention must be float32, float64, bfloat16 or float16 "
                f"(got {value.dtype}); convert it with .float()"
            )
    if (a.src is None) != (a.score == "joint"):
        raise ValueError(
            "joint scores read the values, others have a src "
            f"(got {a.score} scores and src {'None' if a.src is None else 'given'}); use "
            "Attention.additive, joint or dot"
        )
    heads = a.values.shape[1] if a.values.dim() == 3 else -1
    rows = {"additive": (heads,), "joint": (heads, _last(a.values)), "dot": (heads, _last(a.dst))}
    row = rows[a.score]
    expected: dict[str, tuple[Tensor | None, int, str, tuple[int, ...]]] = {
        "values": (a.values, num_src, "num_src", (heads, _last(a.values))),
        "src": (a.src, num_src, "num_src", row),
        "dst": (a.dst, num_dst, "num_dst", row),
        "edge": (a.edge, num_edges, "num_edges", row if a.score == "joint" else (heads,)),
    }
    for name, (value, count, count_name, shape) in expected.items():
        if value is None:
            continue
        _check.check_operand("attention", a.score, name, value, count_name, count, device)
        if tuple(value.shape[1:]) != shape or -1 in shape:
            raise ValueError(
                f"{name} of an attention with {a.score} scores must be [{count_name}, "
                f"{', '.join('dim' if s == -1 else str(s) for s in shape)}] (got shape "
                f"{tuple(value.shape)}); heads come second, their columns third"
            )
    if a.factor is not None:
        _check.check_operand(
            "attention", a.score, "factor", a.factor, "num_edges", num_edges, device
        )
        if a.factor.dim() != 2 or a.factor.shape[1] not in (1, heads):
            raise ValueError(
                f"factor of attention must have one column or one per head, {heads} (got shape "
                f"{tuple(a.factor.shape)}); flatten what stands between edges and heads"
            )
    if (a.vector is not None) != (a.score == "joint"):
        raise ValueError("joint scores, and no others, have a vector; use Attention.joint")
    if a.vector is not None and tuple(a.vector.shape) != row:
        raise ValueError(
            f"vector of attention must be [heads, dim] = {list(row)} (got shape "
            f"{tuple(a.vector.shape)})"
        )
    if a.bias is not None and a.bias.shape != a.values.shape[1:]:
        raise ValueError(
            f"bias of attention must be [heads, dim] = {list(a.values.shape[1:])} (got shape "
            f"{tuple(a.bias.shape)})"
        )
    keys = None if not isinstance(a.mask, EdgeMask) else a.mask.keys
    if a.mask is not None and not isinstance(a.mask, EdgeMask):
        raise TypeError(f"mask of attention must be an EdgeMask (got {type(a.mask).__name__})")
    if keys is not None and keys.device != device:
        raise ValueError(f"keys of a mask must be on {device} (got {keys.device}); move them")
    if keys is not None and (keys.dtype != torch.int32 or keys.shape != (num_edges,)):
        raise ValueError(
            f"keys of a mask must be int32 [{num_edges}] (got {keys.dtype} {tuple(keys.shape)}); "
            "make them with edge_keys"
        )


def _last(values: Tensor) -> int:
    return values.shape[2] if values.dim() == 3 else -1


def head_products(rows: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Dot products of each head of each row with two vectors of that head.

    ``(rows * first).sum(-1)`` and ``(rows * second).sum(-1)``, in one pass over ``rows`` forward
    and one backward. For that the rows are handed back: the gradient of the returned ones is
    added on the way, without a pass of its own.

    Args:
        rows: ``[num_rows, heads, dim]``.
        first: ``[heads, dim]``.
        second: ``[heads, dim]``.

    Returns:
        ``rows``, and both products ``[num_rows, heads]`` in the type of sums: float32 for bfloat16.

    Raises:
        TypeError: An argument is not a tensor of floating-point numbers.
        ValueError: The shapes do not belong together, or devices differ.
    """
    for name, value in (("rows", rows), ("first", first), ("second", second)):
        if _check.check_tensor(name, value).dtype not in _check.VALUE_DTYPES:
            raise TypeError(
                f"{name} must be float32, float64, bfloat16 or float16 (got {value.dtype}); "
                "convert it with .float()"
            )
        if value.device != rows.device:
            raise ValueError(f"{name} must be on the device of rows, {rows.device}; move it")
    row = tuple(rows.shape[1:])
    if len(row) != 2 or tuple(first.shape) != row or tuple(second.shape) != row:
        raise ValueError(
            "rows must be [num_rows, heads, dim] and both vectors [heads, dim] (got "
            f"{tuple(rows.shape)}, {tuple(first.shape)} and {tuple(second.shape)}); flatten what "
            "stands before the heads into them"
        )
    # Not asked of the number of rows: on a sharded graph all ranks must record the same steps.
    if kernels_for(rows.device, rows.dtype) is None or 0 in row:
        return rows, *_plain_products(rows, first, second)
    tensors = (rows, first, second)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _HeadProducts.apply(*tensors)
    return rows, *_compute_products(*tensors)


def _plain_products(rows: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    values = rows.to(wide(rows.dtype))
    first, second = first.to(values.dtype), second.to(values.dtype)
    return (values * first).sum(-1), (values * second).sum(-1)


def _compute_products(rows: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    kernels = kernels_for(rows.device, rows.dtype)
    assert kernels is not None
    dtype = wide(rows.dtype)
    products = [torch.empty(rows.shape[:2], dtype=dtype) for _ in range(2)]
    vectors = _stacked(first, second, dtype)
    kernels.head_products(flat_rows(rows.detach()), vectors, *products, torch.get_num_threads())
    return products[0], products[1]


def _stacked(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack([first.detach(), second.detach()]).to(dtype).view(2, -1)


class _HeadProducts(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows, first, second)
        ctx.set_materialize_grads(False)
        return rows.detach(), *_compute_products(rows, first, second)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, first, second = ctx.saved_tensors
        passed, *of_products = grads
        dtype = wide(rows.dtype)
        if all(grad is None for grad in of_products):
            return passed, None, None
        by_first, by_second = (
            rows.new_zeros(rows.shape[:2], dtype=dtype) if grad is None else grad
            for grad in of_products
        )
        if torch.is_grad_enabled():  # the gradient may be differentiated
            by_first, by_second = by_first.unsqueeze(-1), by_second.unsqueeze(-1)
            values = rows.to(dtype)
            total = by_first * first + by_second * second
            rows_grad = (total if passed is None else passed + total).to(rows.dtype)
            return rows_grad, (by_first * values).sum(0), (by_second * values).sum(0)
        kernels = kernels_for(rows.device, rows.dtype)
        assert kernels is not None
        rows_grad = empty(rows.shape, rows.dtype)
        vectors_grad = torch.empty((2, math.prod(rows.shape[1:])), dtype=dtype)
        vectors = _stacked(first, second, dtype)
        grads_of_rows = map(flat_rows, (passed, by_first, by_second, rows_grad))
        kernels.head_products_backward(
            flat_rows(rows), vectors, *grads_of_rows, vectors_grad, torch.get_num_threads()
        )
        first_grad, second_grad = vectors_grad.view(2, *rows.shape[1:])
        return rows_grad, first_grad, second_grad
