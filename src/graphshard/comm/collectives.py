# SPDX-License-Identifier: Apache-2.0
"""The operations of torch.distributed that graphshard uses: counted, staged, bounded, explained.

Each function takes the state of its group, counts itself in the open traces, copies its payload to
the device that the backend needs, waits no longer than the group's timeout, and turns whatever
goes wrong into a `RankError` that names the operation and the ranks that are missing. With one
rank none of them communicates or counts.

[Note: copies to and from the backend]
    A GPU's rows reach gloo through host memory, and CPU tensors reach NCCL through the device. What
    comes from or goes to a GPU is copied through page-locked memory, at the speed of the bus, on a
    stream of its own: rows that arrive are copied while kernels of the shard before still run.
    torch keeps freed page-locked blocks and uses them again, once the copies that read them are
    over.

[Note: order of copies]
    Out: the copy stream waits for what the caller's stream has been given so far, or, inside
    `copying_ahead`, up to an event; the host waits for the copy before the backend reads the
    buffer. In: the caller's stream waits for the copy, the host does not. What is allocated on one
    stream and read on another is marked (``record_stream``), so that its memory is not used again
    too early.

[Note: both directions of a link]
    Over TCP gloo sends what a peer has said it is ready to receive, and says so on the connection
    on which the data go the other way. A rank that is late in an ``all_to_all_single`` finds the
    others ready, and queues its data before it says that it is ready itself: so one direction waits
    for the other, and both take twice the time of the link. Here a long slice is a message of its
    own, and a rank says that it is ready for all of them before it sends any. Both ends know the
    size of a slice, so no rank has to be told. Short slices travel in the collective, which starts
    after them: where it is complete their data have passed, so faults are noticed as ever, and no
    wait for a message blocks. With them travels how many bytes a message has where zeros are left
    out, see `without_zeros`.

[Note: checks]
    `agree` and `share_error` are checks whose verdict every rank learns, so that none is left
    waiting. Both cost one all_gather of a few bytes per rank while all is well. Only when something
    is wrong do the ranks exchange texts, in a second round that all of them know to be needed.

[Note: groups of threads]
    Collectives of one group must start in the same order on every rank, and threads keep no order
    among themselves. So every thread that communicates gets a group of its own over the same ranks:
    gloo, in host memory, monitored as its base group is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors
from .._base.kernels import empty
from .group import (
    HOST_BACKENDS,
    THREAD_GROUP,
    GroupState,
    TraceKind,
    count,
    forget,
    group_state,
    is_initialized,
    operation,
    rank,
    rank_names,
    register,
    world_size,
)
from .nonzero_words import put_zeros, without_zeros, word_bytes

# -- rows as they travel ---------------------------------------------------------------------------

WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.int8)
"""What rows may be rounded to."""


@dataclass(frozen=True)
class Int8Wire:
    """Rows as int8, each with a float32 scale after it, its largest magnitude over 127.

    A number is rounded up or down at random, so that its expectation is itself. Which way goes by
    the key, the number of the row and the column alone, and not by who sends it.

    Args:
        key: Another one rounds another way; those of gradients that are returned use the next.
    """

    key: int


Wire: TypeAlias = torch.dtype | Int8Wire | None
"""How floating-point rows travel: rounded to a dtype, or as they are."""

_SCALE_BYTES = 4


def keyed(wire: Wire) -> Wire:
    """A new key for rows that travel as int8, by torch's generator; anything else as it is.

    Without gradients it is always the same key, and the generator is not moved.
    """
    if wire != torch.int8:
        return wire
    return Int8Wire(int(torch.randint(2**62, ())) if torch.is_grad_enabled() else 0)


def is_rounded(tensor: Tensor, wire: Wire) -> bool:
    """Whether rows like these travel in another form: if it is of fewer bytes."""
    return wire_row_bytes(tensor, wire) < row_bytes(tensor)


def wire_row_bytes(tensor: Tensor, wire: Wire) -> int:
    """Bytes in one row of ``[rows, *]`` on its way."""
    as_it_is = row_bytes(tensor)
    if wire is None or not tensor.dtype.is_floating_point:
        return as_it_is
    numbers = math.prod(tensor.shape[1:])
    if isinstance(wire, Int8Wire) or wire == torch.int8:
        return min(as_it_is, numbers + _SCALE_BYTES)
    return min(as_it_is, numbers * wire.itemsize)


def narrowed(tensor: Tensor, wire: Wire, numbers: Tensor | None = None) -> Tensor:
    """Rows as they travel; the same tensor where nothing changes.

    Args:
        numbers: int64 ``[rows]``, by which rows are rounded at random; None is their places.
    """
    if wire is None or not is_rounded(tensor, wire):
        return tensor
    if isinstance(wire, Int8Wire):
        return _as_int8(tensor, wire.key, numbers)
    assert isinstance(wire, torch.dtype)
    return tensor.to(wire)


def widened(arrived: Tensor, like: Tensor, wire: Wire) -> Tensor:
    """Rows as they were before `narrowed`, ``like`` having their dtype and trailing shape."""
    if wire is None or not is_rounded(like, wire):
        return arrived
    if not isinstance(wire, Int8Wire):
        return arrived.to(like.dtype)
    scale = arrived[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    rows = arrived[:, :-_SCALE_BYTES].to(torch.float32).mul_(scale)
    return rows.to(like.dtype).view(arrived.shape[0], *like.shape[1:])


def _as_int8(tensor: Tensor, key: int, numbers: Tensor | None) -> Tensor:
    """int8 ``[rows, columns + 4]``: rows in units of their scales, and the scales."""
    rows = tensor.detach().flatten(1).float()
    count, columns = rows.shape
    largest = rows.abs().amax(1, keepdim=True)
    scale = largest / 127
    # Of what is not finite the whole row is not a number.
    scale = torch.where(largest.isfinite(), scale, float("nan"))
    units = torch.where(largest > 0, rows / scale, 0.0)
    if numbers is None:
        numbers = torch.arange(count, device=rows.device)
    # A shift for each row and one for each column: their sum, modulo 1, is uniform at each place,
    # and independent at any two. Costs a hash per row, not per number.
    shift = _uniform(numbers.to(rows.device), 2 * key).view(-1, 1)
    shift = shift + _uniform(torch.arange(columns, device=rows.device), 2 * key + 1)
    shift -= (shift >= 1).to(shift.dtype)
    units = units.add_(shift).floor_().clamp_(-127, 127).nan_to_num_()
    out = torch.empty((count, columns + _SCALE_BYTES), dtype=torch.int8, device=rows.device)
    out[:, :columns] = units
    out[:, columns:] = scale.reshape(count).view(torch.int8).view(count, _SCALE_BYTES)
    return out


def _uniform(numbers: Tensor, key: int) -> Tensor:
    """float32 in [0, 1) for each number: a mix of it and the key (that of SplitMix64)."""
    word = numbers.to(torch.int64) + _signed(key * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ ((word >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    word = word ^ ((word >> 31) & ((1 << 33) - 1))
    return ((word >> 40) & 0xFFFFFF).to(torch.float32) / (1 << 24)


def _signed(word: int) -> int:
    """The 64 bits of a number as torch has them."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >= 1 << 63 else word


def row_bytes(tensor: Tensor) -> int:
    """Bytes in one row of ``[rows, *]``."""
    return tensor.element_size() * math.prod(tensor.shape[1:])


def as_bytes(tensor: Tensor) -> Tensor:
    """One-dimensional uint8 view of a tensor (of a copy, where it is not contiguous)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


# -- copies to and from the backend ----------------------------------------------------------------


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU on which rows are copied to and from the host."""
    return torch.cuda.Stream(device)


def to_backend(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Contiguous tensors on the device that the backend sends from, complete.

    Tensors that are there already are returned as they are.
    """
    staged, copied = [], {}
    for tensor in tensors:
        if device.type != "cpu" or not tensor.is_cuda:
            staged.append(tensor.to(device))
            continue
        stream = _copy_stream(tensor.device)
        if tensor.device not in copied:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            staged.append(buffer.copy_(tensor, non_blocking=True))
            copied[tensor.device] = stream.record_event()
    for event in copied.values():
        event.synchronize()
    return staged


def room_for(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, here: torch.device
) -> Tensor:
    """Memory on ``device`` for what the backend receives, and `from_backend` takes to ``here``."""
    if device.type == "cpu" and here.type == "cuda":
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    return empty(shape, dtype, device)


def from_backend(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Tensors that have been received, each where it is wanted; from `room_for` without a wait."""
    delivered = []
    for tensor, device in zip(tensors, devices, strict=True):
        if device.type != "cuda" or tensor.is_cuda:
            delivered.append(tensor.to(device))
            continue
        stream, reader = _copy_stream(device), torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            arrived = tensor.to(device, non_blocking=True)
        arrived.record_stream(reader)
        reader.wait_stream(stream)
        delivered.append(arrived)
    return delivered


@contextlib.contextmanager
def copying_ahead(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """Rows that are sent meanwhile are gathered and copied as soon as an event has passed.

    Without it they would wait for all kernels that have been started, such as those of the shard
    that is being computed. They must be staged, so that the host waits until they have been read.

    Args:
        after: What `rows_are_ready` gave when the rows were there; None changes nothing.
    """
    if after is None:
        yield
        return
    stream = _copy_stream(device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield


def rows_are_ready(state: GroupState, device: torch.device) -> torch.cuda.Event | None:
    """An event after all that a GPU has been given so far, for `copying_ahead`.

    None where rows of ``device`` are sent from where they are: the backend's stream is ordered
    after the caller's.
    """
    if device.type != "cuda" or state.world_size == 1 or state.payload_device(device).type != "cpu":
        return None
    return torch.cuda.current_stream(device).record_event()


# -- waiting ---------------------------------------------------------------------------------------


class Pending:
    """Tensors that are being received, by threads of the backend or a stream of the device.

    Several operations may be in flight at once, if every rank starts and waits for them in the
    same order. A rank that fails between must wait all the same, or the others wait for it.

    Args:
        finish: Waits, and returns what was received; called once unless it raises.
    """

    def __init__(self, finish: Callable[[], list[Tensor]]) -> None:
        self._finish: Callable[[], list[Tensor]] | None = finish
        self._received: list[Tensor] = []

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Pending:
        """Tensors that are here already."""
        return Pending(lambda: list(tensors))

    def wait(self, meanwhile: Callable[[], None] | None = None) -> list[Tensor]:
        """Wait for all of it; returns what was received. A second call returns the same.

        Args:
            meanwhile: Called before. If it raises, the error goes on after the wait.

        Raises:
            RankError: A peer failed, or did not answer within the group's timeout.
        """
        if meanwhile is not None:
            try:
                meanwhile()
            except Exception:
                self.wait()
                raise
        if self._finish is not None:
            self._received = self._finish()
            self._finish = None  # and with it what was sent
        return self._received

    def then(self, function: Callable[[list[Tensor]], list[Tensor]]) -> Pending:
        """What ``function`` makes of the tensors, once they are waited for."""
        return Pending(lambda: function(self.wait()))


_SLICE = timedelta(seconds=1)
_SHORT_SLICE = timedelta(seconds=0.2)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


LONG_BYTES = 1 << 16
"""A slice of an ``all_to_all`` of this much, and more, is a message of its own with gloo."""

NUM_TAGS = 1 << 20
"""Tags of messages, which are numbers of operations, modulo this."""


class Cancelled(BaseException):
    """A wait was ended from within this process, by `GroupState.cancelled`."""


def wait(state: GroupState, work: dist.Work) -> None:
    """Wait for a message, no longer than the group's timeout.

    The host must not block for a device backend: there a wait only orders the streams, and the
    backend itself enforces the timeout that the group was made with.
    """
    if state.backend in HOST_BACKENDS:
        work.wait(state.timeout)
    else:
        work.wait()


def wait_collective(state: GroupState, work: dist.Work | None) -> None:
    """`wait` for a collective, by slices.

    So it ends early once a rank has announced that it failed, or is gone although its connections
    are not, or the group is cancelled; and the interpreter gets to handle signals.
    """
    if work is None:
        return
    if state.backend not in HOST_BACKENDS or (state.monitor is None and state.backend != "gloo"):
        wait(state, work)
        state.in_flight.discard(work)
        return
    deadline = time.monotonic() + state.timeout.total_seconds()
    longest = _SLICE if state.cancelled is None else _SHORT_SLICE
    while True:
        left = max(timedelta(milliseconds=1), timedelta(seconds=deadline - time.monotonic()))
        # A collective that is not complete may be waited for again. (A message may not.)
        try:
            work.wait(min(longest, left))
            break
        except RuntimeError:
            if work.is_completed():
                work.wait(_SLICE)  # its own error, if it has one
                break
            if state.cancelled is not None and state.cancelled.is_set():
                raise Cancelled from None
            if is_in_vain(state) or time.monotonic() >= deadline:
                raise
    state.in_flight.discard(work)


def is_in_vain(state: GroupState) -> bool:
    """Whether it is no use to wait for the group: a rank has announced a failure, or is gone."""
    monitor = state.monitor
    return monitor is not None and (monitor.has_failure or monitor.has_lost(state.members))


# -- collectives -----------------------------------------------------------------------------------


def start_collective(
    state: GroupState, name: str, start: Callable[[], dist.Work | None]
) -> tuple[int, dist.Work | None]:
    """Start an operation of the whole group; `finish_collective` waits for what this returns."""
    number = state.num_operations
    state.num_operations += 1
    with operation(state, name, number):
        work = start()
    if work is not None and state.backend in HOST_BACKENDS:
        state.in_flight.add(work)
    return number, work


def finish_collective(state: GroupState, name: str, number: int, work: dist.Work | None) -> None:
    """Wait for what `start_collective` has started."""
    with operation(state, name, number):
        wait_collective(state, work)


def run_collective(state: GroupState, name: str, start: Callable[[], dist.Work | None]) -> None:
    """Start an operation of the whole group, and wait for it."""
    finish_collective(state, name, *start_collective(state, name, start))


def all_to_all(
    state: GroupState,
    payload: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    name: str = "all_to_all",
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """`start_all_to_all`, then ``meanwhile``, then wait."""
    pending = start_all_to_all(state, payload, send_splits, recv_splits, name)
    return pending.wait(meanwhile)[0]


def start_all_to_all(
    state: GroupState,
    payload: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    name: str = "all_to_all",
    of_word: int | None = None,
) -> Pending:
    """Start to send slice ``r`` of a one-dimensional tensor to rank ``r``; one tensor comes.

    The backend's own threads move it (gloo), or a stream of the device (NCCL); this one is free.
    Every rank must call, and must wait; until then the payload must not change. The splits are
    elements for, and from, each rank, the own one included.

    Args:
        of_word: Bytes of the words that the payload is made of, see `word_bytes`, equal on all
            ranks; None takes those of its dtype.
    """
    if state.world_size == 1:
        return Pending.of([payload.clone()])
    sizes = {r: n * payload.element_size() for r, n in zip(state.members, send_splits, strict=True)}
    sizes.pop(state.members[state.rank])
    count("all_to_all", sum(sizes.values()), sizes)
    of_word = word_bytes(payload) if of_word is None else of_word
    here = payload.device
    device = state.payload_device(here)
    (outgoing,) = to_backend([payload.contiguous()], device)
    incoming = room_for((sum(recv_splits),), payload.dtype, device, here)
    sends, receives = (
        list(outgoing.split(list(send_splits))),
        list(incoming.split(list(recv_splits))),
    )
    long_sends, long_receives = _take_long(state, sends, 1), _take_long(state, receives, -1)
    short_received = incoming
    if long_sends or long_receives:
        receives[state.rank].copy_(sends[state.rank])
        sends[state.rank], receives[state.rank] = outgoing[:0], incoming[:0]
        sends, receives = [as_bytes(x) for x in sends], [as_bytes(x) for x in receives]
        short_received = receives[0].new_empty(sum(x.numel() for x in receives))
    messages: list[dist.Work] = []
    tag = state.num_operations % NUM_TAGS

    def start() -> dist.Work | None:
        group = state.group
        assert group is not None
        # See [Note: both directions of a link] for the order.
        messages.extend(group.recv([x], r, tag) for r, x in long_receives)
        for r, x in long_sends:
            packed = without_zeros(x, of_word)
            if packed is not None:
                sends[r].view(torch.int64).fill_(packed.numel())
            messages.append(group.send([x if packed is None else packed], r, tag))
        return dist.all_to_all_single(
            short_received,
            outgoing if short_received is incoming else torch.cat(sends),
            [x.numel() for x in receives],
            [x.numel() for x in sends],
            group=group,
            async_op=True,
        )

    number, work = start_collective(state, name, start)
    del payload

    def finish() -> list[Tensor]:
        with operation(state, name, number):
            wait_collective(state, work)
            for message in messages:
                wait(state, message)
        messages.clear()
        if short_received is not incoming:
            parts = short_received.split([x.numel() for x in receives])
            for x, part in zip(receives, parts, strict=True):
                x.copy_(part)
        for r, x in long_receives:
            if size := int(receives[r].view(torch.int64)):
                put_zeros(x, size, of_word)
        return from_backend([incoming], [here])

    return Pending(finish)


_SIZE_BYTES = 8
"""That say how many bytes of a long slice were sent without its zeros; 0 for all of it."""


def _take_long(state: GroupState, slices: list[Tensor], way: int) -> list[tuple[int, Tensor]]:
    """Bytes of slices that are messages of their own, and their ranks.

    The nearest rank above this one is first (``way`` 1), or that below (-1). In the list room for
    the number of bytes takes the place of each.
    """
    taken = []
    for step in range(1, state.world_size if state.backend == "gloo" else 1):
        r = (state.rank + way * step) % state.world_size
        if slices[r].nbytes >= LONG_BYTES:
            taken.append((r, as_bytes(slices[r])))
            slices[r] = torch.zeros(_SIZE_BYTES, dtype=torch.uint8)
    return taken


def all_gather(
    state: GroupState,
    payload: Tensor,
    name: str = "all_gather",
    kind: TraceKind | None = "all_gather",
) -> list[Tensor]:
    """Give every rank every rank's payload; shape and dtype must be the same everywhere."""
    if state.world_size == 1:
        return [payload.clone()]
    if kind is not None:
        _count_for_each(state, kind, payload.nbytes)
    here = payload.device
    device = state.payload_device(here)
    (outgoing,) = to_backend([payload.contiguous()], device)
    shape, dtype = outgoing.shape, outgoing.dtype
    incoming = [room_for(shape, dtype, device, here) for _ in range(state.world_size)]
    group = state.group
    run_collective(
        state, name, lambda: dist.all_gather(incoming, outgoing, group=group, async_op=True)
    )
    return from_backend(incoming, [here] * state.world_size)


def all_reduce_(
    state: GroupState,
    payload: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    name: str = "all_reduce",
    kind: TraceKind = "all_reduce",
) -> Tensor:
    """Combine the payloads of all ranks, in place, the same result everywhere."""
    return start_all_reduce(state, payload, op, name, kind).wait()[0]


def start_all_reduce(
    state: GroupState,
    payload: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    name: str = "all_reduce",
    kind: TraceKind = "all_reduce",
) -> Pending:
    """`all_reduce_`, to be waited for; until then the payload must not change."""
    if state.world_size == 1:
        return Pending.of([payload])
    count(kind, payload.nbytes)
    return _start_in_place(
        state, payload, name, lambda x: dist.all_reduce(x, op=op, group=state.group, async_op=True)
    )


def broadcast_(state: GroupState, payload: Tensor, source: int, name: str = "broadcast") -> Tensor:
    """Overwrite the payload with that of rank ``source`` of the group, in place."""
    if state.world_size == 1:
        return payload
    _count_for_each(state, "broadcast", payload.nbytes * (state.rank == source))
    root, group = state.members[source], state.group
    return _start_in_place(
        state, payload, name, lambda x: dist.broadcast(x, src=root, group=group, async_op=True)
    ).wait()[0]


def _count_for_each(state: GroupState, kind: TraceKind, num_bytes: int) -> None:
    """Count a payload that goes to each other rank."""
    to = dict.fromkeys(state.members, num_bytes)
    del to[state.members[state.rank]]
    count(kind, sum(to.values()), to)


def _start_in_place(
    state: GroupState, payload: Tensor, name: str, start: Callable[[Tensor], dist.Work | None]
) -> Pending:
    (staged,) = to_backend([payload.contiguous()], state.payload_device(payload.device))
    number, work = start_collective(state, name, lambda: start(staged))

    def finish() -> list[Tensor]:
        finish_collective(state, name, number, work)
        if staged is payload:
            return [payload]
        # To a GPU the host need not wait: the memory of the copy is kept until it has been read.
        return [payload.copy_(staged, non_blocking=payload.is_cuda)]

    return Pending(finish)


def wait_for_all(state: GroupState, name: str = "barrier") -> None:
    """Return once every rank has called."""
    if state.world_size > 1:
        count("barrier", 0)
        token = torch.zeros(1, dtype=torch.uint8, device=state.small_device)
        run_collective(
            state, name, lambda: dist.all_reduce(token, group=state.group, async_op=True)
        )


# -- for users -------------------------------------------------------------------------------------


def all_reduce(
    red_tensor: Tensor,
    op: Literal["sum", "max", "min"] | dist.ReduceOp.RedOpType = "sum",
    move_to_comm_device: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Combine a tensor of every rank, element by element; every rank must call.

    A round of a few bytes before it compares shapes and dtypes.
    As ``torch.distributed.all_reduce``, and SAR's, it works in place where ``op`` is a
    ``ReduceOp``. Named by a word it leaves the tensor as it is, and has a gradient.

    Args:
        red_tensor: Any shape, and a dtype that the backend has; both equal on all ranks.
        op: How to combine. Of the words, only "sum" is differentiable; its gradient is the sum of
            the gradients of all ranks.
        move_to_comm_device: Accepted for SAR's scripts: what lives elsewhere is always moved.
        group: Who takes part; None is the default group.

    Returns:
        The same result on every rank, ``red_tensor`` itself for a ``ReduceOp``, else a new tensor.

    Raises:
        NotImplementedError: "max" or "min" of a tensor that requires a gradient; on every rank.
        ValueError: On every rank, if shapes, dtypes or ``op`` differ between ranks, or ``op`` is
            none that the backend has.
        TypeError: On every rank, if the backend has no such numbers.
        RankError: Another rank failed, or did not answer in time.

    Example:
        >>> total = torch.tensor(3)
        >>> all_reduce(total, torch.distributed.ReduceOp.SUM), all_reduce(total, "max")
        (tensor(3), tensor(3))
    """
    state = group_state(group)
    described = f"{red_tensor.dtype}{list(red_tensor.shape)} {op}".removeprefix("torch.")
    error = _all_reduce_fault(state, red_tensor, op)
    verify(state, described, "the tensor of an all_reduce", error, name="all_reduce")
    if isinstance(op, str):
        return all_reduce_alike(red_tensor, op, group=group)
    all_reduce_(state, red_tensor.detach(), op)
    return red_tensor


def all_reduce_alike(
    tensor: Tensor,
    op: Literal["sum", "max", "min"] = "sum",
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`all_reduce` of what this package makes, which is alike on all ranks: it is not compared."""
    state = group_state(group)
    if op == "sum":
        return _AllReduceSum.apply(tensor, state)
    return all_reduce_(state, tensor.detach().clone(), _OPS[op])


_GLOO_LACKS = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _all_reduce_fault(state: GroupState, tensor: Tensor, op: Any) -> Exception | None:
    """What is wrong with the arguments of `all_reduce` on this rank."""
    is_word = not isinstance(op, dist.ReduceOp.RedOpType | dist.ReduceOp)
    if is_word and op not in _OPS:
        return ValueError(f"op must be 'sum', 'max', 'min' or a ReduceOp (got {op!r})")
    if is_word and op != "sum" and tensor.requires_grad and torch.is_grad_enabled():
        return NotImplementedError(
            f"all_reduce({op!r}) has no gradient; pass x.detach(), or use 'sum'"
        )
    if tensor.layout != torch.strided:
        return TypeError(f"all_reduce takes dense tensors (got layout {tensor.layout})")
    if state.backend != "gloo" or state.world_size == 1:
        return None
    if tensor.dtype in _GLOO_LACKS:
        return TypeError(f"gloo has no all_reduce of {tensor.dtype}; convert with .to(torch.int64)")
    if op == dist.ReduceOp.AVG:
        return ValueError("gloo has no ReduceOp.AVG; use SUM, and divide by the number of ranks")
    return None


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Return once every rank has called.

    Raises:
        RankError: Another rank failed, or did not answer in time.
    """
    wait_for_all(group_state(group))


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: GroupState) -> Tensor:
        ctx.state = state
        return all_reduce_(state, x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllReduceSum.apply(grad, ctx.state), None


# -- checks, and numbers and texts of all ranks ----------------------------------------------------

_DIGEST_BYTES = 32
_MAX_TEXT_BYTES = 8192
_SHOWN = 300
_SHORT, _FEW = 40, 8  # characters, and different values, up to which each is shown with its ranks

_KNOWN_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        IndexError,
        NotImplementedError,
        RuntimeError,
        FloatingPointError,
        OSError,
        FileNotFoundError,
        PermissionError,
        MemoryError,
        errors.PartitionFormatError,
        errors.MetisError,
        errors.CheckpointError,
    )
}


def agree(value: str | bytes, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank passes the same value; every rank must call.

    Args:
        value: Any text or bytes; 32 bytes of it, its hash, travel.
        what: What the value is, for the message: "the partition's format version".
        group: Who must agree; None is the default group.

    Raises:
        ValueError: On every rank, if the values differ; names the ranks that differ from rank 0.
    """
    verify(group_state(group), value, what, None)


def share_error(error: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
    """Share the verdict of a check that may fail on one rank alone; every rank must call.

    Args:
        error: What this rank's check found, or None if all is well here.
        group: Who takes part; None is the default group.

    Raises:
        Exception: On every rank if any rank passed an error: of the same type as the first bad
            rank's where that type is a common built-in or one of graphshard's, else `RankError`.
            The first bad rank chains its own error.
    """
    verify(group_state(group), b"", "", error)


def raise_everywhere(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """`share_error`, also where there is no process group."""
    if group is not None or is_initialized():
        share_error(error, group)
    elif error is not None:
        raise error


@contextmanager
def shared_errors(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Have what one rank raises in it raised by all, so that none waits for it. Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_everywhere(error, group)


def verify(
    state: GroupState,
    value: str | bytes,
    what: str,
    error: BaseException | None,
    cure: str = "",
    name: str = "agree",
) -> None:
    """`share_error`, then `agree`, in the same single round; the message ends with ``cure``.

    ``name`` is what errors of ranks that fail or do not come call the operation.
    """
    if state.world_size == 1:
        if error is not None:
            raise error
        return
    # a path may have halves of characters, and this rank must not fail where others wait
    data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
    digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
    verdicts = _gather_bytes(state, bytes([error is not None]) + digest, name)
    failed = [r for r, verdict in enumerate(verdicts) if verdict[0]]
    if failed:
        _raise_shared(state, failed, error)
    if any(verdict != verdicts[0] for verdict in verdicts):
        _raise_different(state, verdicts, data, what, cure)


def _raise_shared(state: GroupState, failed: list[int], error: BaseException | None) -> None:
    text = f"{type(error).__name__}\n{error}" if error is not None else ""
    first = failed[0]
    kind_name, _, message = gather_texts(state, text)[first].partition("\n")
    who = state.members[first]
    others = [state.members[r] for r in failed[1:]]
    head = f"rank {who}: {message}" + (f" (so did ranks {others})" if others else "")
    error_type = _KNOWN_ERRORS.get(kind_name)
    if error_type is not None:
        shared: Exception = error_type(head)
    else:
        shared = errors.RankError(f"rank {who} raised {kind_name}: {message}", [who])
    if state.rank == first and error is not None:
        raise shared from error
    raise shared


def _raise_different(
    state: GroupState, verdicts: list[bytes], value: bytes, what: str, cure: str
) -> None:
    texts = gather_texts(state, value.decode(errors="backslashreplace"))
    different = [r for r, verdict in enumerate(verdicts) if verdict != verdicts[0]]
    ranks = [state.members[r] for r in different]
    first_text, other_text = _around_difference(texts[0], texts[different[0]])
    difference = f"rank {state.members[0]} has {first_text!r}, rank {ranks[0]} has {other_text!r}"
    if max(map(len, texts)) <= _SHORT and len(set(texts)) <= _FEW:
        holders: dict[str, list[int]] = {}
        for member, text in zip(state.members, texts, strict=True):
            holders.setdefault(text, []).append(member)
        difference = ", ".join(
            f"{rank_names(who)} {'has' if len(who) == 1 else 'have'} {text!r}"
            for text, who in holders.items()
        )
    raise ValueError(
        f"{what} must be the same on all ranks, but {rank_names(ranks)} "
        f"{'differs' if len(ranks) == 1 else 'differ'} from rank {state.members[0]}: "
        f"{difference}{'; ' if cure else ''}{cure}"
    )


def _around_difference(first: str, second: str) -> tuple[str, str]:
    """The parts of two long texts around the first character that differs."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    start = 0 if same < _SHOWN // 2 else same - _SHOWN // 4
    return first[start : start + _SHOWN], second[start : start + _SHOWN]


def _gather_bytes(state: GroupState, data: bytes, name: str = "agree") -> list[bytes]:
    """Every rank's bytes; the length must be the same everywhere."""
    payload = torch.tensor(list(data), dtype=torch.uint8, device=state.small_device)
    return [bytes(part.tolist()) for part in all_gather(state, payload, name, "agree")]


def gather_texts(state: GroupState, text: str) -> list[str]:
    """Every rank's text, by rank, cut after a few kilobytes."""
    data = text.encode(errors="backslashreplace")[:_MAX_TEXT_BYTES]
    sizes = [
        int.from_bytes(size, "big") for size in _gather_bytes(state, len(data).to_bytes(8, "big"))
    ]
    longest = max(sizes)
    parts = _gather_bytes(state, data.ljust(longest, b"\0")) if longest else [b""] * len(sizes)
    return [part[:size].decode(errors="replace") for part, size in zip(parts, sizes, strict=True)]


def reduce_ints(numbers: Sequence[int], how: Literal["sum", "max"] = "sum") -> list[int]:
    """Each number, summed or maximised over the ranks; collective."""
    return [int(n) for n in _reduced(torch.tensor(numbers, dtype=torch.int64), how).tolist()]


def reduce_floats(numbers: Sequence[float], how: Literal["sum", "max"] = "sum") -> list[float]:
    """Each number, summed or maximised over the ranks in float64; collective."""
    return [float(n) for n in _reduced(torch.tensor(numbers, dtype=torch.float64), how).tolist()]


def _reduced(numbers: Tensor, how: Literal["sum", "max"]) -> Tensor:
    return all_reduce_alike(numbers, how) if is_initialized() else numbers


def gather_int(number: int) -> list[int]:
    """The number of every rank, by rank; collective."""
    mine = [0] * world_size()
    mine[rank()] = number
    return reduce_ints(mine)


def text_of_rank_0(text: str) -> str:
    """The text of rank 0, on every rank; collective."""
    if not is_initialized():
        return text
    data = text.encode(errors="surrogatepass") if rank() == 0 else b""
    size = reduce_ints([len(data)], "max")[0]
    payload = torch.frombuffer(bytearray(data.ljust(max(1, size), b" ")), dtype=torch.uint8)
    received = broadcast_(group_state(), payload, 0)
    return bytes(received.numpy())[:size].decode(errors="surrogatepass")


# -- groups of threads -----------------------------------------------------------------------------


class ThreadGroups:
    """One group per purpose, over the ranks of a base group. Making them is collective.

    Args:
        purposes: What each is for; for messages, and equal on all ranks.
        group: The base group; None is the default group. Where it has one rank there is nothing
            to send, and every one is the base group itself.

    Raises:
        NotImplementedError: On every rank, if the base group was started by MPI.
    """

    def __init__(self, purposes: Sequence[str], group: dist.ProcessGroup | None = None) -> None:
        self.cancelled = threading.Event()
        self._closes = True
        self._states: dict[str, GroupState] = {}
        self._base = group
        base = group_state(group)
        if base.world_size == 1:
            return
        if base.backend == "mpi":
            raise NotImplementedError(
                "threads of a loader communicate in gloo groups of their own, which a program "
                "that MPI started cannot make; pass prefetch=0"
            )
        # The name of a group over some of the ranks would be given again, while the store still
        # holds addresses under it. So those are kept until the process has ended.
        self._closes = base.group is dist.group.WORLD
        for purpose in purposes:
            self._states[purpose] = _open_group(base, purpose, self.cancelled)

    def group(self, purpose: str) -> dist.ProcessGroup | None:
        """The group for a purpose, for one thread at a time."""
        state = self._states.get(purpose)
        return self._base if state is None else state.group

    @property
    def num_operations(self) -> tuple[int, ...]:
        """Operations started so far in each; equal on all ranks that are in step."""
        return tuple(state.num_operations for state in self._states.values())

    @property
    def are_broken(self) -> bool:
        """Whether an operation was left unfinished, so that ranks are not in step any more."""
        return any(state.in_flight for state in self._states.values())

    def cancel(self) -> None:
        """End what threads wait for in the groups, within a moment; they are of no use then."""
        self.cancelled.set()

    def close(self) -> None:
        """Give the groups back. No thread may use them any more; not collective."""
        self.cancel()
        states, self._states = self._states, {}
        for state in states.values() if self._closes else ():
            if state.closed:  # together with the default group
                continue
            with contextlib.suppress(ValueError, AssertionError):  # gone with the default group
                dist.destroy_process_group(state.group)
            forget(state)


Lanes = ThreadGroups
"""The former name of `ThreadGroups`."""


def _open_group(base: GroupState, purpose: str, cancelled: threading.Event) -> GroupState:
    if base.group is dist.group.WORLD:
        group = dist.new_group(backend="gloo", timeout=base.timeout)
    else:
        # torch names such a group by its ranks and by the number of groups that the process has.
        num_groups = str(len(dist.distributed_c10d._world.pg_names))
        agree(num_groups, "the number of process groups that a process is a member of", base.group)
        group = dist.new_group(
            list(base.members), timeout=base.timeout, backend="gloo", use_local_synchronization=True
        )
    assert isinstance(group, dist.ProcessGroup)
    state = GroupState(
        group=group,
        rank=base.rank,
        world_size=base.world_size,
        members=base.members,
        name=f"{THREAD_GROUP}{group.group_name} for {purpose}",
        backend="gloo",
        timeout=base.timeout,
        comm_device=torch.device("cpu"),
        monitor=base.monitor,
        cancelled=cancelled,
    )
    register(state)
    return state
