# SPDX-License-Identifier: Apache-2.0
"""head_products: what a node contributes to additive attention scores, both ends at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..._base.kernels import empty, kernels_for
from .. import _check
from .._attention_rule import wide
from ..spmm import flat_rows


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
        return rows, *_products(rows, first, second)
    tensors = (rows, first, second)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        result: tuple[Tensor, Tensor, Tensor] = _HeadProducts.apply(*tensors)
        return result
    return rows, *_forward(*tensors)


def _products(rows: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    values = rows.to(wide(rows.dtype))
    first, second = first.to(values.dtype), second.to(values.dtype)
    return (values * first).sum(-1), (values * second).sum(-1)


def _forward(rows: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    kernels = kernels_for(rows.device, rows.dtype)
    assert kernels is not None
    dtype = wide(rows.dtype)
    products = [torch.empty(rows.shape[:2], dtype=dtype) for _ in range(2)]
    vectors = _vectors(first, second, dtype)
    kernels.head_products(flat_rows(rows.detach()), vectors, *products, torch.get_num_threads())
    return products[0], products[1]


def _vectors(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack([first.detach(), second.detach()]).to(dtype).view(2, -1)


class _HeadProducts(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows, first, second)
        ctx.set_materialize_grads(False)
        return rows.detach(), *_forward(rows, first, second)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, first, second = ctx.saved_tensors
        passed, one, two = grads
        dtype = wide(rows.dtype)
        if one is None and two is None:
            return passed, None, None
        one = rows.new_zeros(rows.shape[:2], dtype=dtype) if one is None else one
        two = rows.new_zeros(rows.shape[:2], dtype=dtype) if two is None else two
        if torch.is_grad_enabled():  # the gradient may be differentiated
            one, two = one.unsqueeze(-1), two.unsqueeze(-1)
            values = rows.to(dtype)
            total = one * first + two * second
            rows_grad = (total if passed is None else passed + total).to(rows.dtype)
            return rows_grad, (one * values).sum(0), (two * values).sum(0)
        kernels = kernels_for(rows.device, rows.dtype)
        assert kernels is not None
        rows_grad = empty(rows.shape, rows.dtype)
        vectors_grad = torch.empty((2, math.prod(rows.shape[1:])), dtype=dtype)
        kernels.head_products_backward(
            flat_rows(rows),
            _vectors(first, second, dtype),
            flat_rows(passed),
            flat_rows(one),
            flat_rows(two),
            flat_rows(rows_grad),
            vectors_grad,
            torch.get_num_threads(),
        )
        first_grad, second_grad = vectors_grad.view(2, *rows.shape[1:])
        return rows_grad, first_grad, second_grad
