# SPDX-License-Identifier: Apache-2.0
"""leading_rows: the destinations of a block, which are the first rows of its sources."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._base.kernels import LARGE_BYTES, empty
from ._affine import are_plain


def leading_rows(rows: Any, count: int) -> Any:
    """``rows[:count]``; a large gradient is filled up with zeros in memory that is used again.

    Of a layer on a block the gradient of a slice, in new memory, took up to a third of the time.

    Args:
        rows: ``[num_rows, *]``, or anything else that can be sliced.
    """
    is_large = isinstance(rows, Tensor) and rows.nbytes >= LARGE_BYTES
    if not is_large or not rows.requires_grad or not torch.is_grad_enabled():
        return rows[:count]
    return _LeadingRows.apply(rows, count) if are_plain([rows]) else rows[:count]


class _LeadingRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int) -> Tensor:
        ctx.shape = rows.shape
        return rows[:count].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        count = grad.shape[0]
        if torch.is_grad_enabled():  # it will be differentiated again
            rest = grad.new_zeros((ctx.shape[0] - count, *ctx.shape[1:]))
            return torch.cat([grad, rest]), None
        whole = empty(ctx.shape, grad.dtype, grad.device)
        whole[:count] = grad
        whole[count:] = 0
        return whole, None
