# SPDX-License-Identifier: Apache-2.0
"""Large exchanges between ranks on one machine: rows in shared memory, messages that say where.

gloo moves rows through a socket: four copies, two of them in the kernel. Here a sender puts them
into a block that the others can see, most often as it gathers them; a message of a few bytes, in
the same operation of the same group, says where they are; and each reader copies its part out when
it waits. So a rank still waits for nothing but messages, and a rank that is killed, late or in
another operation is found out as ever.

Who sends large amounts is known to all ranks from what they know of a plan. At the first such
exchange of a group they find out whether each can see each other's memory: on one machine, with
the extension, in one process namespace. If any cannot, or its environment has
GRAPHSHARD_SHARED_MEMORY=0, all go on with gloo alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..._memory import empty
from .._trace import Kind, count
from ..collectives import (
    AllToAll,
    all_to_all,
    operation,
    run_collective,
    start_all_to_all,
    wait_collective,
)
from ..group import GroupState, registered
from ._shared_blocks import Peer, SharedBlocks

LARGE_BYTES = 1 << 20
"""Exchanges of which some rank receives this much, and more, go through shared memory."""

_SMALL_SHARE = 16
_WORDS = 3  # of what a reader is told: descriptor, use, offset

Allocate = Callable[[Sequence[int], torch.dtype, torch.device | str], Tensor]


def shared_blocks(state: GroupState, largest: int) -> SharedBlocks | None:
    """Where an exchange puts its rows; None for memory that only gloo can move.

    Args:
        state: The group; every rank must call.
        largest: The most bytes that any rank receives, equal on all ranks.

    Raises:
        RankError: Another rank failed.
    """
    if largest < LARGE_BYTES or state.world_size == 1 or state.backend != "gloo":
        return None
    if state.comm_device is not None and state.comm_device.type != "cpu":
        return None
    if not state.tried_shared:
        state.shared = _set_up(state)
        state.tried_shared = True
    return state.shared


def allocator(blocks: SharedBlocks | None) -> Allocate:
    """What makes the memory for rows that are going to be sent."""
    return empty if blocks is None else blocks.empty


def is_message_shared(blocks: SharedBlocks | None, num_bytes: int) -> bool:
    """Whether one message between two ranks, which both know its size, is only told of."""
    return blocks is not None and num_bytes > 0 and num_bytes * _SMALL_SHARE >= LARGE_BYTES


class Letter:
    """Rows that others have put into shared memory, and a message of theirs that says where.

    Args:
        blocks: Of the group.
        sources: Ranks whose rows they are.
        sizes: Bytes from each.
        shape: Of all of them, one after the other.
        dtype: Of their entries.

    Attributes:
        where: int64, for the message: `told` of each source in turn.
        work: What brings the message.
    """

    def __init__(
        self,
        blocks: SharedBlocks,
        sources: Sequence[int],
        sizes: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.where = torch.full((len(sources) * _WORDS,), -1, dtype=torch.int64)
        self.work: dist.Work | None = None
        self._blocks = blocks
        self._sources, self._sizes = sources, sizes
        self._shape, self._dtype = shape, dtype

    def rows(self, state: GroupState, name: str, number: int) -> Tensor:
        """The rows, once the message is here. To be called once."""
        rows = empty(self._shape, self._dtype)
        into = rows.view(-1).view(torch.uint8)
        start = 0
        for source, size, place in _places(self._sources, self._sizes, self.where):
            with operation(state, name, number, [source]):
                self._blocks.read(source, place, into[start : start + size])
            start += size
        self.work = None
        return rows

    def __del__(self) -> None:
        # Left unread, as after an error. The writers are told once it is known which blocks.
        if self.work is not None:
            skip = functools.partial(
                _skip, self._blocks.read, self._sources, self._sizes, self.where
            )
            self._blocks.later(self.work.is_completed, skip)


def told(place: tuple[int, int], starts: Sequence[int] = (0,)) -> Tensor:
    """The message about a payload, for readers of what begins at these bytes of it; int64."""
    return torch.tensor([word for start in starts for word in (*place, start)], dtype=torch.int64)


class SharedAllToAll:
    """An all-to-all of bytes under way; every rank must wait for it. As `AllToAll`."""

    def __init__(
        self,
        state: GroupState,
        blocks: SharedBlocks,
        payload: Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        name: str,
    ) -> None:
        self._state, self._name, self._device = state, name, payload.device
        readers = [rank for rank, size in enumerate(send_splits) if size]
        place = blocks.publish(payload.contiguous().to("cpu"), readers)
        self._told = told(place, [0, *accumulate(send_splits)][:-1])
        shape = (sum(recv_splits),)
        self._letter = Letter(blocks, range(state.world_size), recv_splits, shape, torch.uint8)
        self._number = state.num_operations
        state.num_operations += 1
        with operation(state, name, self._number):
            self._letter.work = dist.all_to_all_single(
                self._letter.where, self._told, group=state.group, async_op=True
            )
        self._done: Tensor | None = None

    def wait(self) -> Tensor:
        """What came, by rank, once all of it is here."""
        if self._done is None:
            with operation(self._state, self._name, self._number):
                wait_collective(self._state, self._letter.work)
            rows = self._letter.rows(self._state, self._name, self._number)
            self._done = rows.to(self._device)
        return self._done


def start_exchange(
    state: GroupState,
    blocks: SharedBlocks | None,
    payload: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    name: str,
    kind: Kind = "all_to_all",
) -> AllToAll | SharedAllToAll:
    """`start_all_to_all` of bytes, through shared memory where `shared_blocks` gave some."""
    if blocks is None:
        return start_all_to_all(state, payload, send_splits, recv_splits, name, kind)
    count(kind, payload.numel() - send_splits[state.rank])
    return SharedAllToAll(state, blocks, payload, send_splits, recv_splits, name)


def exchange(
    state: GroupState,
    blocks: SharedBlocks | None,
    payload: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    name: str,
    kind: Kind = "all_to_all",
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """`all_to_all` of bytes, through shared memory where `shared_blocks` gave some."""
    if blocks is None:
        return all_to_all(state, payload, send_splits, recv_splits, name, kind, None, meanwhile)
    started = start_exchange(state, blocks, payload, send_splits, recv_splits, name, kind)
    del payload
    failure = None
    try:
        if meanwhile is not None:
            meanwhile()
    except Exception as error:  # the operation ends all the same, or the others would wait
        failure = error
    arrived = started.wait()
    if failure is not None:
        raise failure
    return arrived


def _places(
    sources: Sequence[int], sizes: Sequence[int], where: Tensor
) -> list[tuple[int, int, list[int]]]:
    """Of each source that sends anything: its rank, the bytes, and what it told."""
    places = where.view(-1, _WORDS).tolist()
    found = zip(sources, sizes, places, strict=True)
    return [(source, size, place) for source, size, place in found if size]


def _skip(
    read: Callable[[int, Sequence[int], Tensor], None],
    sources: Sequence[int],
    sizes: Sequence[int],
    where: Tensor,
) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    for source, _, place in _places(sources, sizes, where):
        with contextlib.suppress(RuntimeError):  # who is gone need not know
            read(source, place, nothing)


def _set_up(state: GroupState) -> SharedBlocks | None:
    """This rank's blocks, if every rank can see every other's; every rank must call."""
    blocks = SharedBlocks.make(state.rank, state.world_size)
    me = blocks.me if blocks is not None else Peer(0, 0, 0)
    words = _gather(state, [blocks is not None, _machine(), me.process, me.descriptor, me.token])
    peers = [Peer(*rest) for _, _, *rest in words]
    # Only on the same machine is it safe to open what another names.
    is_seen = (
        blocks is not None
        and all(has and machine == words[0][1] for has, machine, *_ in words)
        and all(blocks.can_see(peer) for peer in peers)
    )
    if not all(seen for (seen,) in _gather(state, [is_seen])) or blocks is None:
        return None
    blocks.peers.extend(peers)
    _forget_in_children()
    return blocks


def _gather(state: GroupState, numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's numbers. No trace counts it: whether it happens is a matter of the machine."""
    mine = torch.tensor([int(number) for number in numbers], dtype=torch.int64)
    parts = [torch.empty_like(mine) for _ in range(state.world_size)]
    run_collective(
        state,
        "shared memory",
        lambda: dist.all_gather(parts, mine, group=state.group, async_op=True),
    )
    return [part.tolist() for part in parts]


def _machine() -> int:
    """Equal on two ranks if they are on one machine and number its processes alike."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    digest = hashlib.blake2b(" ".join(parts).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@functools.cache
def _forget_in_children() -> None:
    """From now on, let go of blocks in forked children, once per process."""
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    for state in registered():
        if state.shared is not None:
            state.shared.forget()
            state.shared = None
