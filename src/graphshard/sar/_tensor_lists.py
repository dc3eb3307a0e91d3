# SPDX-License-Identifier: Apache-2.0
"""Lists with a tensor for each rank, under SAR's names: all_to_all, exchange_tensors, ...

Every one is a flat exchange, whatever the backend: gloo has no ``all_to_all`` of lists. Every rank
must call, with lists as long as there are ranks. No gradient flows through them; see
`ragged_all_to_all` for one that does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.config import Config
from ..comm.collectives import all_reduce_, share_error, verify
from ..comm.collectives import all_to_all as flat_all_to_all
from ..comm.group import GroupState, group_state


def comm_device() -> torch.device:
    """Where tensors must be for the backend to send them; others are copied there and back."""
    return group_state().small_device


def backend() -> str:
    """Name of the backend of the default group; ``"none"`` for a process without one."""
    return group_state().backend


def all_to_all(
    recv_tensors: Sequence[Tensor],
    send_tensors: Sequence[Tensor],
    move_to_comm_device: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send ``send_tensors[r]`` to rank ``r``, and fill ``recv_tensors[r]`` with what it sends here.

    Args:
        recv_tensors: One for each rank, filled in place; with as many elements as are sent here.
            Any may be empty.
        send_tensors: One for each rank. All tensors, on all ranks, have one dtype.
        move_to_comm_device: Accepted for SAR's scripts: what lives elsewhere is always moved.

    Raises:
        ValueError: Not one tensor for each rank, several dtypes, or a tensor that has not as many
            elements as are sent to it; on every rank.
        RankError: Another rank failed, or did not answer in time.
    """
    state = group_state(group)
    error = _mistake(state, recv_tensors, send_tensors)
    dtype = "" if error is not None else str(send_tensors[0].dtype)
    verify(state, dtype, "the dtype of the tensors of one exchange", error, "convert with .to(...)")
    coming = _told(state, [tensor.numel() for tensor in send_tensors])
    for sender, (size, tensor) in enumerate(zip(coming, recv_tensors, strict=True)):
        if size != tensor.numel():
            error = ValueError(
                f"rank {state.rank} has room for {tensor.numel()} elements from rank {sender}, "
                f"which sends {size}; give it a tensor of the shape that is sent"
            )
    share_error(error, group)
    rounds = _num_rounds(state, recv_tensors, send_tensors)
    device = recv_tensors[0].device
    for step in range(rounds):
        out, into = (
            [tensor.detach().reshape(-1).tensor_split(rounds)[step] for tensor in tensors]
            for tensors in (send_tensors, recv_tensors)
        )
        payload = torch.cat([piece.to(device) for piece in out])
        splits = [piece.numel() for piece in out], [piece.numel() for piece in into]
        received = flat_all_to_all(state, payload, *splits)
        for tensor, piece in zip(recv_tensors, received.split(splits[1]), strict=True):
            _fill(tensor, piece, step, rounds)


def exchange_tensors(
    tensors: Sequence[Tensor],
    recv_sizes: Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Send ``tensors[r]`` to rank ``r``; returns what each rank sent here.

    Args:
        tensors: One for each rank, of one dtype and, but for the first dimension, one shape, the
            same on all ranks.
        recv_sizes: First dimension of what each rank sends here; None asks them first.

    Raises:
        ValueError: Not one tensor for each rank, or tensors that differ in more than their first
            dimension; on every rank.
        RankError: Another rank failed, or did not answer in time.
    """
    state = group_state(group)
    error = None
    rows = {tuple(tensor.shape[1:]) if tensor.dim() else None for tensor in tensors}
    if len(tensors) != state.world_size or len(rows) != 1 or None in rows:
        error = ValueError(
            f"tensors must be {state.world_size}, one per rank, whose shapes differ in the first "
            f"dimension alone (got shapes {[tuple(tensor.shape) for tensor in tensors]})"
        )
    share_error(error, group)
    if recv_sizes is None:
        recv_sizes = _told(state, [tensor.shape[0] for tensor in tensors])
    (shape,) = rows
    assert shape is not None
    received = [tensors[0].new_empty((int(size), *shape)) for size in recv_sizes]
    all_to_all(received, tensors, group=group)
    return received


def exchange_single_tensor(
    recv_idx: int,
    send_idx: int,
    recv_tensor: Tensor,
    send_tensor: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send one tensor to one rank while another is received from one; every rank must call.

    Args:
        recv_idx: The rank that sends here.
        send_idx: The rank that this one sends to.
        recv_tensor: Filled in place; of the shape that ``recv_idx`` sends.
        send_tensor: Of the same dtype.

    Raises:
        ValueError: A rank that does not exist, two dtypes, or a tensor for this rank itself that
            does not fit; on every rank.
        RankError: Another rank failed, or did not answer in time.
    """
    state = group_state(group)
    error = None
    for name, index in (("recv_idx", recv_idx), ("send_idx", send_idx)):
        if not 0 <= index < state.world_size:
            error = ValueError(f"{name} must be in [0, {state.world_size}) (got {index})")
    share_error(error, group)
    sent, received = ([send_tensor.new_empty(0)] * state.world_size for _ in range(2))
    sent[send_idx], received[recv_idx] = send_tensor, recv_tensor
    all_to_all(received, sent, group=group)


def _told(state: GroupState, counts: list[int]) -> list[int]:
    """The number that each rank has for this one, of a number for each rank."""
    ones = [1] * state.world_size
    return flat_all_to_all(state, torch.tensor(counts), ones, ones).tolist()


def _mistake(
    state: GroupState, received: Sequence[Tensor], sent: Sequence[Tensor]
) -> ValueError | None:
    size = state.world_size
    if len(received) != size or len(sent) != size:
        return ValueError(
            f"lists of tensors must have one for each of {size} ranks (got {len(received)} to "
            f"receive and {len(sent)} to send)"
        )
    dtypes = {tensor.dtype for tensor in (*received, *sent)}
    if len(dtypes) > 1:
        return ValueError(
            f"tensors of one exchange must have one dtype (got {sorted(map(str, dtypes))})"
        )
    return None


def _num_rounds(state: GroupState, received: Sequence[Tensor], sent: Sequence[Tensor]) -> int:
    """In how many messages the tensors go; the same on all ranks."""
    most = Config.max_collective_size
    if most <= 0:
        return 1
    total = sum(tensor.numel() for tensor in (*received, *sent))
    rounds = torch.tensor([max(1, -(-total // most))])
    return int(all_reduce_(state, rounds, dist.ReduceOp.MAX, "all_to_all"))


def _fill(tensor: Tensor, piece: Tensor, step: int, rounds: int) -> None:
    target = tensor.detach()
    flat = target.reshape(-1)
    flat.tensor_split(rounds)[step].copy_(piece)
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))
