# SPDX-License-Identifier: Apache-2.0
"""Rows of tensors to all ranks, any number to each, through the backend or shared memory.

[Note: through shared memory]
    gloo moves rows through a socket: four copies, two of them in the kernel. On one machine a
    sender can put them into a block that the others map, most often as it gathers them. A message
    of a few words per tensor, by the same collective of the same group, says where they are, and
    each reader copies its part out when it waits. So a rank still waits for nothing but messages,
    and a rank that is killed, late or in another operation is found out as ever.

    Which exchanges go this way is decided here alone, by `shared_blocks`: those of plans of which
    some rank receives `LARGE_BYTES` and more, which all ranks know from the plan. At the first
    such exchange of a group the ranks find out whether each can see each other's memory: on one
    machine, with the extension, in one process namespace. If any cannot, or its environment has
    GRAPHSHARD_SHARED_MEMORY=0, all go on with gloo alone.

[Note: packing]
    Rows of several tensors, of any dtypes and widths, are one stream of bytes per peer: for each
    tensor in turn its rows back to back, no header, no padding. Both ends know dtypes, widths and
    row counts, so the number of bytes is exactly ``rows * row_bytes``, before zeros are left out.
    Floating-point rows may be rounded to a narrower wire dtype; the receiver widens them.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.kernels import empty
from ._shared_memory import Hosts as Hosts
from ._shared_memory import SharedArray as SharedArray
from ._shared_memory import SharedBlocks as SharedBlocks
from ._shared_memory import SharedPeer
from ._shared_memory import named_file as named_file
from ._shared_memory import share_arrays as share_arrays
from .address import process_namespace
from .collectives import (
    Pending,
    all_gather,
    finish_collective,
    from_backend,
    room_for,
    start_all_to_all,
    start_collective,
    verify,
)
from .collectives import as_bytes as as_bytes
from .collectives import row_bytes as row_bytes
from .group import (
    GroupState,
    close_in_children,
    close_inherited_groups,
    count,
    group_state,
    operation,
)
from .nonzero_words import word_bytes

Splits = Sequence[Sequence[int]]
"""``splits[i][r]``: rows of tensor ``i`` for, or from, rank ``r``."""

LARGE_BYTES = 1 << 20
"""Exchanges of which some rank receives this much, and more, go through shared memory."""

_CPU = torch.device("cpu")
_WORDS = 3  # that say where rows are: descriptor, use, offset


def exchange_rows(
    state: GroupState,
    tensors: Sequence[Tensor],
    send_splits: Splits,
    recv_splits: Splits,
    name: str,
    meanwhile: Callable[[], None] | None = None,
) -> list[Tensor]:
    """`start_exchange`, then ``meanwhile``, then wait."""
    return start_exchange(state, tensors, send_splits, recv_splits, name).wait(meanwhile)


def start_exchange(
    state: GroupState,
    tensors: Sequence[Tensor | Sequence[Tensor]],
    send_splits: Splits,
    recv_splits: Splits,
    name: str,
    blocks: SharedBlocks | None = None,
) -> Pending:
    """Start to exchange rows of several tensors in one ``all_to_all_single``.

    Args:
        state: The group; every rank must call with the same dtypes and trailing shapes.
        tensors: ``tensors[i]`` is ``[sum(send_splits[i]), *]``, its rows grouped by destination,
            or a tensor for each destination (without ``blocks``), so that several are copied into
            the message from where they lie. They must not change before the wait is over.
        name: What error messages call the operation.
        blocks: Through which memory, see `shared_blocks`; None leaves it to the backend.

    Returns:
        For each tensor ``[sum(recv_splits[i]), *]``, rows grouped by source.
    """
    # Shapes and dtypes without the memory.
    firsts = [rows if isinstance(rows, Tensor) else rows[0] for rows in tensors]
    likes = [first.new_empty((0, *first.shape[1:])) for first in firsts]
    send_bytes = bytes_by_rank(likes, send_splits)
    if blocks is not None:
        to = dict(zip(state.members, send_bytes, strict=True))
        del to[state.members[state.rank]]
        count("all_to_all", sum(to.values()), to)
        return _start_shared(state, blocks, firsts, likes, send_splits, recv_splits, name)
    recv_bytes = bytes_by_rank(likes, recv_splits)
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        stream = as_bytes(tensors[0])
    else:
        parts = [
            rows.split(list(splits)) if isinstance(rows, Tensor) else rows
            for rows, splits in zip(tensors, send_splits, strict=True)
        ]
        stream = joined(parts, firsts[0].device)
    of_word = word_bytes(*likes) if likes else None
    pending = start_all_to_all(state, stream, send_bytes, recv_bytes, name, of_word)
    return pending.then(lambda streams: parted(streams[0], likes, recv_splits))


def shared_blocks(state: GroupState, largest: int) -> SharedBlocks | None:
    """Where an exchange puts its rows; None for memory that only the backend can move.

    Every rank must call, with the most bytes that any rank receives.
    """
    if largest < LARGE_BYTES or state.world_size == 1 or state.backend != "gloo":
        return None
    if state.comm_device is not None and state.comm_device.type != "cpu":
        return None
    if not state.tried_shared:
        state.shared = _set_up(state)
        state.tried_shared = True
    return state.shared


def _start_shared(
    state: GroupState,
    blocks: SharedBlocks,
    tensors: Sequence[Tensor],
    likes: Sequence[Tensor],
    send_splits: Splits,
    recv_splits: Splits,
    name: str,
) -> Pending:
    """Each tensor in a block of its own, and one collective of the words that say where."""
    words = []
    for tensor, splits in zip(tensors, send_splits, strict=True):
        if tensor.device.type != "cpu":  # straight to where others look
            tensor = blocks.empty(tensor.shape, tensor.dtype).copy_(tensor)
        readers = [rank for rank, rows in enumerate(splits) if rows]
        location = blocks.publish(tensor.contiguous(), readers)
        starts = [0, *accumulate(splits)][:-1]
        words.append([(*location, start * row_bytes(tensor)) for start in starts])
    message = torch.tensor(words, dtype=torch.int64).transpose(0, 1).contiguous()
    rows = _SharedRows(state, blocks, likes, recv_splits)

    def start() -> dist.Work | None:
        return dist.all_to_all_single(rows.where, message, group=state.group, async_op=True)

    number, rows.work = start_collective(state, name, start)

    def finish() -> list[Tensor]:
        finish_collective(state, name, number, rows.work)
        return rows.read(name, number)

    return Pending(finish)


class _SharedRows:
    """Rows that others have put into shared memory, and the message that says where."""

    def __init__(
        self, state: GroupState, blocks: SharedBlocks, likes: Sequence[Tensor], splits: Splits
    ) -> None:
        shape = (state.world_size, len(likes), _WORDS)
        self.where = torch.full(shape, -1, dtype=torch.int64)  # the message
        self.work: dist.Work | None = None  # what brings it
        self._state, self._blocks, self._likes, self._splits = state, blocks, likes, splits

    def read(self, name: str, number: int) -> list[Tensor]:
        """The rows, once the message is here. To be called once."""
        arrived = [
            room_for((sum(rows), *like.shape[1:]), like.dtype, _CPU, like.device)
            for like, rows in zip(self._likes, self._splits, strict=True)
        ]
        runs = [
            rows.view(-1).view(torch.uint8).split([n * row_bytes(rows) for n in splits])
            for rows, splits in zip(arrived, self._splits, strict=True)
        ]
        for source, (locations, parts) in enumerate(
            zip(self.where.tolist(), zip(*runs, strict=True), strict=True)
        ):
            if any(part.numel() for part in parts):
                with operation(self._state, name, number, [source]):
                    for location, part in zip(locations, parts, strict=True):
                        if part.numel():
                            self._blocks.read(source, location, part)
        self.work = None
        return from_backend(arrived, [like.device for like in self._likes])

    def __del__(self) -> None:
        # Left unread, as after an error. The writers learn it once the message is here.
        if self.work is not None:
            skip = functools.partial(_skip, self._blocks.read, self.where, self._splits)
            self._blocks.later(self.work.is_completed, skip)


def _skip(
    read: Callable[[int, Sequence[int], Tensor], None], where: Tensor, splits: Splits
) -> None:
    """Note that this rank is done with rows that it has not read."""
    nothing = torch.empty(0, dtype=torch.uint8)
    for source, locations in enumerate(where.tolist()):
        for location, rows in zip(locations, splits, strict=True):
            if rows[source]:
                with contextlib.suppress(RuntimeError):  # the writer may be gone
                    read(source, location, nothing)


def _set_up(state: GroupState) -> SharedBlocks | None:
    """This rank's blocks, if every rank can see every other's; every rank must call."""
    blocks = SharedBlocks.make(state.rank, state.world_size)
    me = blocks.me if blocks is not None else SharedPeer(0, 0, 0)
    namespace = process_namespace()
    words = _gather(state, [blocks is not None, namespace, me.process, me.descriptor, me.token])
    peers = [SharedPeer(*rest) for _, _, *rest in words]
    # Only in the same namespace is it safe to open what another process names.
    is_seen = (
        blocks is not None
        and all(has and other == namespace for has, other, *_ in words)
        and all(blocks.can_see(peer) for peer in peers)
    )
    if not all(seen for (seen,) in _gather(state, [is_seen])) or blocks is None:
        return None
    blocks.peers.extend(peers)
    close_in_children(close_inherited_groups)
    return blocks


def _gather(state: GroupState, numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's numbers. No trace counts it: whether it happens is a matter of the machine."""
    mine = torch.tensor([int(number) for number in numbers], dtype=torch.int64)
    return [part.tolist() for part in all_gather(state, mine, "shared memory", None)]


# -- packing ---------------------------------------------------------------------------------------


def bytes_by_rank(likes: Sequence[Tensor], splits: Splits) -> list[int]:
    """Bytes in the message for, or from, each rank."""
    sizes = [row_bytes(like) for like in likes]
    return [
        sum(rows * size for rows, size in zip(by_tensor, sizes, strict=True))
        for by_tensor in zip(*splits, strict=True)
    ]


def joined(parts: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """The bytes of ``parts[i][r]``, rows of tensor ``i`` for rank ``r``, by rank and tensor."""
    runs = [
        as_bytes(part).to(device) for by_tensor in zip(*parts, strict=True) for part in by_tensor
    ]
    return _concatenated(runs)


def parted(stream: Tensor, likes: Sequence[Tensor], splits: Splits) -> list[Tensor]:
    """Undo `joined`: tensors like ``likes``, with ``sum(splits[i])`` rows, grouped by rank.

    The stream must start its own memory; a result may be a view of it.
    """
    if len(likes) == 1:
        return [_as_rows(stream, likes[0], sum(splits[0]))]
    sizes = [row_bytes(like) for like in likes]
    lengths = [
        rows * size
        for by_tensor in zip(*splits, strict=True)
        for rows, size in zip(by_tensor, sizes, strict=True)
    ]
    runs = stream.split(lengths)
    return [
        _as_rows(_concatenated(runs[i :: len(likes)]), like, sum(splits[i]))
        for i, like in enumerate(likes)
    ]


def _concatenated(runs: Sequence[Tensor]) -> Tensor:
    """Bytes one after the other. One run alone, as where there are two ranks, is not copied."""
    filled = [run for run in runs if run.numel()]
    if len(filled) == 1:
        return filled[0]
    return torch.cat(
        filled or list(runs),
        out=empty((sum(run.numel() for run in filled),), torch.uint8, runs[0].device),
    )


def _as_rows(stream: Tensor, like: Tensor, num_rows: int) -> Tensor:
    """A stream of bytes, seen as ``num_rows`` rows like ``like``'s; copied if it is not aligned."""
    shape = (num_rows, *like.shape[1:])
    if stream.numel() == 0:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    stream = stream.to(like.device)
    if stream.storage_offset() % like.element_size():
        stream = stream.clone()
    return stream.view(like.dtype).view(shape)


# -- for users -------------------------------------------------------------------------------------


def ragged_all_to_all(
    x: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send rows to every rank, a different number to each; every rank must call.

    Ranks compare, in one round of a few numbers, what they send, what they expect, dtypes and
    trailing shapes. The backward pass is the reverse exchange, which every rank must reach (see
    `anchor`).

    Args:
        x: ``[sum(send_splits), *]``, rows grouped by destination.
        send_splits: Rows for each rank, own slot included.
        recv_splits: Rows from each rank, own slot included.
        group: Who takes part; None is the default group.

    Returns:
        ``[sum(recv_splits), *]``, rows grouped by source.

    Raises:
        ValueError: On every rank: splits that do not fit the group, the tensor or those of the
            other ranks; dtypes or trailing shapes that differ between ranks.
        RankError: Another rank failed, or did not answer in time.
    """
    state = group_state(group)
    sends, recvs = [int(n) for n in send_splits], [int(n) for n in recv_splits]
    error = _ragged_fault(state, x, sends, recvs)
    of_rows = f"{x.dtype}{list(x.shape[1:])}".removeprefix("torch.")
    told = torch.zeros(2 + 2 * state.world_size, dtype=torch.int64)
    told[0], told[1] = error is not None, zlib.crc32(of_rows.encode())
    if error is None:
        told[2:] = torch.tensor([*sends, *recvs])
    table = torch.stack(all_gather(state, told, "ragged_all_to_all", "agree"))
    if bool(table[:, 0].any()) or bool((table[:, 1] != table[0, 1]).any()):
        verify(state, of_rows, "dtype and trailing shape of ragged_all_to_all", error)
    sent, expected = table[:, 2:].split(state.world_size, dim=1)
    for receiver, sender in (expected != sent.t()).nonzero().tolist():
        raise ValueError(
            f"recv_splits must be what the others send: rank {state.members[receiver]} expects "
            f"{int(expected[receiver, sender])} rows from rank {state.members[sender]}, which "
            f"sends {int(sent[sender, receiver])}"
        )
    return _RaggedAllToAll.apply(x, state, sends, recvs)


def _ragged_fault(
    state: GroupState, x: Tensor, sends: Sequence[int], recvs: Sequence[int]
) -> ValueError | None:
    """What is wrong with the arguments of `ragged_all_to_all` on this rank."""
    for label, splits in (("send_splits", sends), ("recv_splits", recvs)):
        if len(splits) != state.world_size or min(splits) < 0:
            return ValueError(
                f"{label} must hold {state.world_size} numbers of rows, one per rank (got {splits})"
            )
    if x.dim() == 0 or x.shape[0] != sum(sends):
        return ValueError(
            f"x must have sum(send_splits) = {sum(sends)} rows (got shape {tuple(x.shape)})"
        )
    if sends[state.rank] != recvs[state.rank]:
        return ValueError(
            f"rank {state.rank} must receive from itself what it sends to itself "
            f"(got {sends[state.rank]} sent, {recvs[state.rank]} received)"
        )
    return None


def ragged_all_to_all_alike(
    x: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`ragged_all_to_all` of rows and splits that this package made: ranks do not compare them."""
    return _RaggedAllToAll.apply(x, group_state(group), list(send_splits), list(recv_splits))


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
