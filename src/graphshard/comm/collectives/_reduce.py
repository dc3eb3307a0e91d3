# SPDX-License-Identifier: Apache-2.0
"""all_reduce, barrier: combine a few numbers of all ranks; wait for them."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..group import GroupState, group_state
from . import _operations
from ._operations import all_reduce_

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(
    x: Tensor,
    reduce: Literal["sum", "max", "min"] = "sum",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Combine a tensor of every rank, element by element; every rank must call.

    Args:
        x: Any shape and a numeric dtype, both equal on all ranks.
        reduce: How to combine. Only "sum" is differentiable; its gradient is the sum of the
            gradients of all ranks.
        group: Who takes part; None is the default group.

    Returns:
        The same result on every rank, a new tensor.

    Raises:
        NotImplementedError: "max" or "min" of a tensor that requires a gradient.
        RankError: Another rank failed, or did not answer in time.
    """
    if reduce not in _OPS:
        raise ValueError(f"reduce must be 'sum', 'max' or 'min' (got {reduce!r})")
    state = group_state(group)
    if reduce == "sum":
        out: Tensor = _AllReduceSum.apply(x, state)
        return out
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"all_reduce({reduce!r}) has no gradient; pass x.detach(), or use 'sum'"
        )
    return all_reduce_(state, x.detach().clone(), _OPS[reduce])


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Return once every rank has called.

    Raises:
        RankError: Another rank failed, or did not answer in time.
    """
    _operations.wait_for_all(group_state(group))


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: GroupState) -> Tensor:
        ctx.state = state
        return all_reduce_(state, x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllReduceSum.apply(grad, ctx.state), None
