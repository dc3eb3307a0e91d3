# SPDX-License-Identifier: Apache-2.0
"""What follows an attention in a layer, a bias and a ReLU, done in the memory of its result.

Backward, the finished result is all that is kept of it. With ``out = relu(a + bias)`` and the
gradient ``g`` of ``a``, which is 0 where ``out`` is, ``<g, a> = <g, out - bias>``: no ``a`` needed.
Each is one pass over the rows.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..._base.kernels import empty, kernels_for, num_threads
from .._attention_rule import wide
from ..spmm import flat_rows
from .compute import AttentionState


def finish(
    state: AttentionState, dtype: torch.dtype, bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """The result, of ``dtype``: ``relu(sums / total + bias)``; uses up ``state.sums``.

    Args:
        state: Of all edges; rows without any give 0.
        dtype: That of the attention.
        bias: ``[heads, dim]``, or None.
        relu: Whether there is a ReLU.
    """
    sums, total = state.sums, state.total
    kernels = _kernels(sums, dtype)
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
    kernels = _kernels(out, out.dtype)
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

    Args:
        grad: ``[num_dst, heads, dim]``.
        out: What `finish_` returned.
        bias: As for `finish_`.
        relu: As for `finish_`.

    Returns:
        ``g`` ``[num_dst, heads, dim]``, contiguous, of the dtype of ``out``, which is the gradient
        of the bias, too, summed over destinations; and ``<g, out - bias>`` of each destination and
        head, in the type of sums.
    """
    grad = grad.detach().to(out.dtype).contiguous()
    dtype, out = wide(out.dtype), out.detach()
    kernels = _kernels(out, out.dtype)
    if kernels is None:
        found = grad.masked_fill(out <= 0, 0.0) if relu else grad
        plain = out.to(dtype) if bias is None else out.to(dtype) - bias.detach().to(dtype)
        return found, (found.to(dtype) * plain).sum(-1)
    found = empty(out.shape, out.dtype) if relu else grad
    delta = empty(out.shape[:2], dtype)
    passed, vector = flat_rows(found) if relu else None, _vector(bias, out.dtype)
    kernels.attention_delta(delta, flat_rows(grad), flat_rows(out), vector, passed, num_threads())
    return found, delta


def _kernels(rows: Tensor, dtype: torch.dtype) -> ModuleType | None:
    """The kernels, if they can do this and there is something to do."""
    if rows.numel() == 0 or not rows.is_contiguous():
        return None
    return kernels_for(rows.device, dtype)


def _vector(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.detach().to(wide(dtype)).contiguous().view(-1)
