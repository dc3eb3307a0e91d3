# SPDX-License-Identifier: Apache-2.0
"""Products of many rows with a matrix, for what autograd calls.

torch leaves them to MKL, which on processors that are not Intel's takes registers of 32 bytes.
Where the machine has wider ones, kernels multiply float32 (see csrc/dense/products.h); elsewhere,
and for other types, torch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._base.kernels import empty, kernels_for, num_threads

_LEAST = 1 << 20
"""Multiplications for which a kernel is called: fewer take less time than the call."""

_WORTH_A_FUNCTION = 1 << 23
"""Multiplications for which kernels are called by a Function of Python: the call takes 30 us."""

_NARROWEST = 4
"""Columns of a result; those of fewer are read faster than they are laid out."""


def multiply(
    products: Sequence[tuple[Tensor, Tensor]],
    first: Tensor | None = None,
    relu: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Rows times matrices, added up one after another behind ``first``.

    Args:
        products: At least one pair of rows ``[num_rows, in_i]`` and a matrix ``[in_i, width]``, all
            of one dtype and device.
        first: ``[num_rows, width]`` or ``[width]``; may be ``out``. Without it zeros.
        relu: Whether negative sums become zeros.
        out: ``[num_rows, width]``; without it in the memory of results.

    Returns:
        ``out``.
    """
    rows, matrices = [x.detach() for x, _ in products], [w.detach() for _, w in products]
    if out is None:
        out = empty((rows[0].shape[0], matrices[0].shape[1]), rows[0].dtype, rows[0].device)
    apart = [out, *rows, *([] if first is None or first.dim() == 1 else [first])]
    work = out.numel() * sum(x.shape[1] for x in rows)
    kernels = kernels_for(out.device) if _are_served(out, apart, matrices, work) else None
    if kernels is not None and kernels.gains_from_products():
        if first is not None:
            first = first.detach() if first.dim() == 2 else first.detach()[None]
        kernels.multiply_rows(out, rows, matrices, first, relu, num_threads())
        return out
    for x, w in zip(rows, matrices, strict=True):
        if first is None:
            torch.mm(x, w, out=out)
        elif first is out:
            out.addmm_(x, w)
        else:
            torch.addmm(first.detach(), x, w, out=out)
        first = out
    return out.relu_() if relu else out


def multiply_transposed(rows: Tensor, grads: Tensor) -> Tensor:
    """A matrix's gradient, ``rows.t() @ grads``; by torch where autograd is on.

    Args:
        rows: ``[num_rows, in]`` that the matrix was multiplied with.
        grads: ``[num_rows, width]`` of the product; of the same dtype and device.

    Returns:
        ``[in, width]``.
    """
    if torch.is_grad_enabled():  # it will be differentiated again
        return rows.t() @ grads
    rows, grads = rows.detach(), grads.detach()
    work = rows.numel() * grads.shape[1]
    kernels = kernels_for(rows.device) if _are_served(grads, [rows, grads], [], work) else None
    if kernels is not None and kernels.gains_from_products():
        out = torch.empty(rows.shape[1], grads.shape[1])
        kernels.multiply_transposed(out, rows, grads, num_threads())
        return out
    return rows.t() @ grads


def gains(products: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether kernels are enough faster than torch to be called by a Function of Python."""
    work = sum(x.shape.numel() * w.shape[1] for x, w in products)
    if work < _WORTH_A_FUNCTION or any(x.dtype != torch.float32 for x, _ in products):
        return False
    if torch.is_autocast_enabled("cpu") or any(w.shape[1] < _NARROWEST for _, w in products):
        return False
    kernels = kernels_for(products[0][0].device)
    return kernels is not None and bool(kernels.gains_from_products())


def _are_served(
    result: Tensor, rows: Sequence[Tensor], matrices: Sequence[Tensor], work: int
) -> bool:
    """Whether kernels are there for operands like these, and worth a call."""
    return (
        work >= _LEAST
        and result.shape[1] >= _NARROWEST
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (*rows, *matrices))
        and all(t.stride(1) == 1 for t in rows)
    )
