# SPDX-License-Identifier: Apache-2.0
"""What follows an attention in a layer, a bias and a ReLU, done in the memory of its result.

Backward, the finished result is all that is kept of it. With ``out = relu(a + bias)`` and the
gradient ``g`` of ``a``, which is 0 where ``out`` is, ``<g, a> = <g, out - bias>``: no ``a`` needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._memory import empty
from . import _attention_compute as compute
from ._attention_rule import wide


def finish_(out: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Add ``bias`` ``[heads, dim]`` to ``out`` ``[num_dst, heads, dim]`` and activate, in place."""
    if bias is not None:
        out.add_(bias.detach().to(out.dtype))
    return out.relu_() if relu else out


def begin_backward(grad: Tensor, out: Tensor, relu: bool) -> Tensor:
    """Gradient of the attention itself, given that of what `finish_` made of it.

    Args:
        grad: ``[num_dst, heads, dim]``.
        out: What `finish_` returned.
        relu: As for `finish_`.

    Returns:
        ``[num_dst, heads, dim]``, contiguous, of the dtype of ``out``. It is the gradient of the
        bias, too, summed over destinations.
    """
    return where_positive(grad, out) if relu else grad.to(out.dtype).contiguous()


def where_positive(grad: Tensor, out: Tensor) -> Tensor:
    """``grad`` where the result ``out`` of a ReLU is positive, else 0; of the dtype of ``out``."""
    grad = grad.to(out.dtype)
    if torch.is_grad_enabled():  # of a gradient that will be differentiated again
        return grad * (out > 0)
    found = empty(out.shape, out.dtype, out.device)
    torch.ops.aten.threshold_backward.grad_input(grad, out, 0, grad_input=found)
    return found


def delta(grad: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    """``<grad, out - bias>`` of each destination and head, in the type of sums.

    Args:
        grad: What `begin_backward` returned, or some of its heads or columns.
        out: What `finish_` returned, likewise.
        bias: As for `finish_`, likewise.
    """
    found = compute.delta(grad, out)
    if bias is None or grad.numel() == 0:
        return found
    dtype = wide(grad.dtype)
    per_head = torch.block_diag(*bias.detach().to(dtype).unsqueeze(-1).unbind(0))
    return found.sub_(grad.detach().flatten(1).to(dtype) @ per_head)
