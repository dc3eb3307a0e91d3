# SPDX-License-Identifier: Apache-2.0
"""ragged_all_to_all: rows to all ranks, any number to each, with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .group import GroupState, group_state
from .transport import exchange_rows


def ragged_all_to_all(
    x: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send rows to every rank, a different number to each; every rank must call.

    Nothing is negotiated: ``recv_splits`` must be what the others send here, and dtype and
    trailing shape must be equal on all ranks. The backward pass is the reverse exchange, which
    every rank must reach (see `anchor`).

    Args:
        x: ``[sum(send_splits), *]``, rows grouped by destination.
        send_splits: Rows for each rank, own slot included.
        recv_splits: Rows from each rank, own slot included.
        group: Who takes part; None is the default group.

    Returns:
        ``[sum(recv_splits), *]``, rows grouped by source.

    Raises:
        ValueError: Splits that do not fit the group or the tensor.
        RankError: Another rank failed, or did not answer in time.
    """
    state = group_state(group)
    sends, recvs = [int(n) for n in send_splits], [int(n) for n in recv_splits]
    for label, splits in (("send_splits", sends), ("recv_splits", recvs)):
        if len(splits) != state.world_size or min(splits) < 0:
            raise ValueError(
                f"{label} must hold {state.world_size} numbers of rows, one per rank (got {splits})"
            )
    if x.dim() == 0 or x.shape[0] != sum(sends):
        raise ValueError(
            f"x must have sum(send_splits) = {sum(sends)} rows (got shape {tuple(x.shape)})"
        )
    if sends[state.rank] != recvs[state.rank]:
        raise ValueError(
            f"rank {state.rank} must receive from itself what it sends to itself "
            f"(got {sends[state.rank]} sent, {recvs[state.rank]} received)"
        )
    out: Tensor = _RaggedAllToAll.apply(x, state, sends, recvs)
    return out


class _RaggedAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, state: GroupState, sends: list[int], recvs: list[int]
    ) -> Tensor:
        ctx.state, ctx.sends, ctx.recvs = state, sends, recvs
        (arrived,) = exchange_rows(state, [x], [sends], [recvs], "ragged_all_to_all")
        return arrived.detach()  # a view of other memory could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _RaggedAllToAll.apply(grad, ctx.state, ctx.recvs, ctx.sends), None, None, None
