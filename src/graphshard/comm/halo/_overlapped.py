# SPDX-License-Identifier: Apache-2.0
"""start_fetch_all, start_return_all: the whole halo in one collective, while something else runs.

They send what `fetch_halo` and its backward send, but return at once; so the caller can compute on
its own rows until `wait`. Through shared memory wide rows have a collective of their own. They know
nothing of autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .._pending import Arrived, Pending
from ..collectives import AllToAll
from ..group import GroupState
from ..wire import (
    SharedAllToAll,
    SharedBlocks,
    allocator,
    as_bytes,
    joined,
    narrowed,
    parted,
    row_bytes,
    shared_blocks,
    start_exchange,
    widened,
    wire_dtype,
)
from ._exchange import Request
from ._plan import most_bytes
from ._signature import check_requests

Item = TypeVar("Item")
Splits = list[list[int]]
_WIDE = 4  # times the bytes of all other rows


def start_fetch_all(
    requests: Sequence[Request], wire: torch.dtype | None = None, needs_grad: Sequence[bool] = ()
) -> Pending:
    """Start to fetch the halo rows of each tensor; every rank must call, and must wait.

    Args:
        requests: As for `fetch_halo`. The tensors must not change before the rows are waited for.
        wire: In which dtype wider floating-point rows travel; None is their own.
        needs_grad: Which requests will have gradients to return, equal on all ranks; for the
            check alone. None of them by default.

    Returns:
        A `Pending` whose ``wait()`` gives ``[plan.num_halo, *]`` for each request.

    Raises:
        ValueError: As `fetch_halo`.
        RankError: Another rank failed.
    """
    if not requests:
        return Arrived([])
    plans = [plan for plan, _ in requests]
    tensors = [tensor for _, tensor in requests]
    rows = [plan.num_rows for plan in plans]
    needs = list(needs_grad) or [False] * len(plans)
    state = check_requests("fetch_halo", plans, tensors, rows, needs, wire)
    if state.world_size == 1:
        return Arrived([t.detach().new_empty((0, *t.shape[1:])) for t in tensors])
    send, recv = [p.send_splits for p in plans], [p.recv_splits for p in plans]
    blocks = shared_blocks(state, most_bytes(plans, tensors, wire))

    def start(chosen: Sequence[int]) -> Pending:
        stream = _gathered(_at(requests, chosen), wire, blocks)
        splits = _at(send, chosen), _at(recv, chosen)
        return _Exchange(state, blocks, stream, _at(tensors, chosen), *splits, wire, "fetch_halo")

    return _Together.start(start, _companies(tensors, blocks))


def start_return_all(requests: Sequence[Request], wire: torch.dtype | None = None) -> Pending:
    """Start to send halo rows home; every rank must call, and must wait.

    Args:
        requests: Pairs of a plan and a tensor ``[plan.num_halo, *]``.
        wire: As for `start_fetch_all`.

    Returns:
        A `Pending` whose ``wait()`` gives ``[sum(plan.send_splits), *]`` for each request: what
        came for the rows ``plan.send_index``, in that order. `ExchangePlan.add_returned` adds it.

    Raises:
        ValueError: As `return_halo`.
        RankError: Another rank failed.
    """
    if not requests:
        return Arrived([])
    plans = [plan for plan, _ in requests]
    tensors = [tensor.detach() for _, tensor in requests]
    rows = [plan.num_halo for plan in plans]
    state = check_requests("return_halo(sum)", plans, tensors, rows, wire=wire)
    if state.world_size == 1:
        return Arrived(tensors)
    send, recv = [p.recv_splits for p in plans], [p.send_splits for p in plans]
    parts = [narrowed(tensor, wire) for tensor in tensors]
    blocks = shared_blocks(state, most_bytes(plans, tensors, wire))

    def start(chosen: Sequence[int]) -> Pending:
        leaving, splits = _at(parts, chosen), (_at(send, chosen), _at(recv, chosen))
        alone = len(leaving) == 1
        stream = as_bytes(leaving[0]) if alone else joined(leaving, splits[0], allocator(blocks))
        return _Exchange(state, blocks, stream, _at(tensors, chosen), *splits, wire, "return_halo")

    return _Together.start(start, _companies(tensors, blocks))


def _at(items: Sequence[Item], places: Sequence[int]) -> list[Item]:
    return [items[place] for place in places]


def _companies(tensors: Sequence[Tensor], blocks: SharedBlocks | None) -> list[list[int]]:
    """Which tensors travel in one stream; the same on all ranks.

    Each stream costs a message to every rank, but tensors in one stream cost a copy at either end.
    Where messages only tell of shared memory, wide rows travel without the narrow ones.
    """
    everything = list(range(len(tensors)))
    sizes = [row_bytes(tensor) for tensor in tensors]
    widest = max(everything, key=lambda i: sizes[i])
    if blocks is None or len(tensors) == 1 or sizes[widest] < _WIDE * (sum(sizes) - sizes[widest]):
        return [everything]
    return [[widest], [i for i in everything if i != widest]]


class _Together:
    """Exchanges of some tensors each, as one of all."""

    def __init__(self, parts: Sequence[Pending], places: Sequence[Sequence[int]]) -> None:
        self._parts, self._places = parts, places

    @classmethod
    def start(
        cls, start: Callable[[Sequence[int]], Pending], places: Sequence[Sequence[int]]
    ) -> Pending:
        """``start`` of each group of tensors, which stand at ``places``."""
        parts = [start(chosen) for chosen in places]
        return parts[0] if len(parts) == 1 else cls(parts, places)

    def wait(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for part, chosen in zip(self._parts, self._places, strict=True):
            found |= zip(chosen, part.wait(), strict=True)
        return [found[place] for place in sorted(found)]


class _Exchange:
    """One all-to-all of bytes, and how to read what comes."""

    def __init__(
        self,
        state: GroupState,
        blocks: SharedBlocks | None,
        stream: Tensor,
        likes: Sequence[Tensor],
        send: Splits,
        recv: Splits,
        wire: torch.dtype | None,
        name: str,
    ) -> None:
        self._dtypes = [like.dtype for like in likes]
        # Only shape and dtype of what travels are needed from here on: the rows may be let go.
        self._likes = [like.detach()[:0].to(wire_dtype(like.dtype, wire)).clone() for like in likes]
        self._recv = recv
        sizes = [row_bytes(like) for like in self._likes]
        send_bytes, recv_bytes = (
            [
                sum(rows[r] * size for rows, size in zip(splits, sizes, strict=True))
                for r in range(state.world_size)
            ]
            for splits in (send, recv)
        )
        self._work: AllToAll | SharedAllToAll | None = start_exchange(
            state, blocks, stream, send_bytes, recv_bytes, name
        )
        self._done: list[Tensor] = []

    def wait(self) -> list[Tensor]:
        if self._work is not None:
            stream, self._work = self._work.wait(), None
            self._done = widened(parted(stream, self._likes, self._recv), self._dtypes)
        return self._done


def _gathered(
    requests: Sequence[Request], wire: torch.dtype | None, blocks: SharedBlocks | None
) -> Tensor:
    """The bytes that every rank reads of each tensor, by rank and then by tensor.

    Rows go from the tensor straight to their place, so that they are copied once, or not at all.
    """
    tensors = [tensor.detach() for _, tensor in requests]
    plans = [plan for plan, _ in requests]
    device = tensors[0].device
    if len(tensors) == 1:
        as_is = wire_dtype(tensors[0].dtype, wire) == tensors[0].dtype
        allocate = blocks.empty if blocks is not None and as_is else None
        return as_bytes(narrowed(plans[0].all_sent.of(tensors[0], allocate), wire))
    likes = [narrowed(tensor[:0], wire) for tensor in tensors]
    sizes = [row_bytes(like) for like in likes]
    total = sum(sum(p.send_splits) * size for p, size in zip(plans, sizes, strict=True))
    stream = allocator(blocks)((total,), torch.uint8, device)
    start = 0
    for reader in range(plans[0].world_size):
        for plan, tensor, like, size in zip(plans, tensors, likes, sizes, strict=True):
            sent = plan.sent[reader]
            run = stream[start : start + len(sent) * size]
            start += run.numel()
            if run.numel() == 0:
                continue
            is_aligned = run.storage_offset() % like.element_size() == 0
            if is_aligned and like.dtype == tensor.dtype and tensor.device == device:
                sent.copy_to(run.view(like.dtype).view(-1, *tensor.shape[1:]), tensor)
            else:
                run.copy_(as_bytes(narrowed(sent.of(tensor), wire)))
    return stream
