# SPDX-License-Identifier: Apache-2.0
"""The operations of torch.distributed that graphshard uses: counted, staged, bounded, explained.

Each function takes the state of its group, counts itself in the open traces, copies its payload to
the device that the backend needs, waits no longer than the group's timeout, and turns whatever
goes wrong into a `RankError` that names the operation and the ranks that are missing. With one
rank none of them communicates or counts.

`trace` counts the operations and the bytes that they send. Every communication function of the
package reports to `count` as it starts, once; with no trace open that is a loop over an empty
tuple.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..group import HOST_BACKENDS, GroupState, group_state, operation
from ._staging import from_backend, room_for, to_backend

# -- counting --------------------------------------------------------------------------------------

TraceKind: TypeAlias = Literal[
    "all_to_all", "send", "all_reduce", "broadcast", "all_gather", "agree", "barrier"
]
"""What is counted; ``agree`` is every check that ranks make among themselves."""


class Trace:
    """What this rank has sent while the trace was open.

    Attributes:
        calls: Number of operations by kind; a kind that did not occur is absent.
        bytes_sent: Payload bytes sent to other ranks, by kind. What a rank keeps for itself is
            not counted. An ``all_to_all`` or ``send`` counts what it sends, an ``all_gather`` and
            (on the sending rank) a ``broadcast`` count the payload once for each other rank, and
            an ``all_reduce`` counts its payload once, whatever algorithm the backend runs.
    """

    def __init__(self, thread: int | None = None) -> None:
        self.calls: dict[str, int] = {}
        self.bytes_sent: dict[str, int] = {}
        self._thread = thread
        self._lock = threading.Lock()

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_sent.values())

    def _add(self, kind: TraceKind, num_bytes: int) -> None:
        if self._thread is not None and self._thread != threading.get_ident():
            return
        with self._lock:
            self.calls[kind] = self.calls.get(kind, 0) + 1
            self.bytes_sent[kind] = self.bytes_sent.get(kind, 0) + num_bytes

    def __repr__(self) -> str:
        return f"Trace(calls={self.calls}, bytes_sent={self.bytes_sent})"


# [Note: traces are process wide] The backward pass may run in autograd's own threads, so neither
# a thread-local nor a context variable would see it. The tuple is replaced, never changed.
_open: tuple[Trace, ...] = ()
_open_lock = threading.Lock()


@contextmanager
def trace(only_this_thread: bool = False) -> Iterator[Trace]:
    """Count the communication of this process while the block runs; traces may be nested.

    Args:
        only_this_thread: Leave out what other threads send. The backward pass may run in others.

    Example:
        >>> with trace() as counted:
        ...     pass
        >>> counted.total_calls, counted.total_bytes
        (0, 0)
    """
    global _open
    counted = Trace(threading.get_ident() if only_this_thread else None)
    with _open_lock:
        _open = (*_open, counted)
    try:
        yield counted
    finally:
        with _open_lock:
            _open = tuple(other for other in _open if other is not counted)


def count(kind: TraceKind, num_bytes: int) -> None:
    """Report one operation to every open trace."""
    for counted in _open:
        counted._add(kind, num_bytes)


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
    return monitor is not None and (monitor.has_failure() or monitor.has_lost(state.members))


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
) -> Pending:
    """Start to send slice ``r`` of a one-dimensional tensor to rank ``r``; one tensor comes.

    The backend's own threads move it (gloo), or a stream of the device (NCCL); this one is free.
    Every rank must call, and must wait; until then the payload must not change. The splits are
    elements for, and from, each rank, the own one included.
    """
    if state.world_size == 1:
        return Pending.of([payload.clone()])
    sent = payload.numel() - send_splits[state.rank]
    count("all_to_all", sent * payload.element_size())
    here = payload.device
    device = state.payload_device(here)
    (outgoing,) = to_backend([payload.contiguous()], device)
    incoming = room_for((sum(recv_splits),), payload.dtype, device, here)
    number, work = start_collective(
        state,
        name,
        lambda: dist.all_to_all_single(
            incoming,
            outgoing,
            list(recv_splits),
            list(send_splits),
            group=state.group,
            async_op=True,
        ),
    )
    del payload

    def finish() -> list[Tensor]:
        finish_collective(state, name, number, work)
        return from_backend([incoming], [here])

    return Pending(finish)


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
        count(kind, payload.nbytes * (state.world_size - 1))
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
    if state.world_size == 1:
        return payload
    count(kind, payload.nbytes)
    return _in_place(
        state, payload, name, lambda x: dist.all_reduce(x, op=op, group=state.group, async_op=True)
    )


def broadcast_(state: GroupState, payload: Tensor, source: int, name: str = "broadcast") -> Tensor:
    """Overwrite the payload with that of rank ``source`` of the group, in place."""
    if state.world_size == 1:
        return payload
    count("broadcast", payload.nbytes * (state.world_size - 1) * (state.rank == source))
    root, group = state.members[source], state.group
    return _in_place(
        state, payload, name, lambda x: dist.broadcast(x, src=root, group=group, async_op=True)
    )


def _in_place(
    state: GroupState, payload: Tensor, name: str, start: Callable[[Tensor], dist.Work | None]
) -> Tensor:
    (staged,) = to_backend([payload.contiguous()], state.payload_device(payload.device))
    run_collective(state, name, lambda: start(staged))
    if staged is payload:
        return payload
    # To a GPU the host need not wait: the memory of the copy is kept until the copy has been read.
    return payload.copy_(staged, non_blocking=payload.is_cuda)


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

    As ``torch.distributed.all_reduce``, and SAR's, it works in place where ``op`` is a
    ``ReduceOp``. Named by a word it leaves the tensor as it is, and has a gradient.

    Args:
        red_tensor: Any shape and a numeric dtype, both equal on all ranks.
        op: How to combine. Of the words, only "sum" is differentiable; its gradient is the sum of
            the gradients of all ranks.
        move_to_comm_device: Accepted for SAR's scripts: what lives elsewhere is always moved.
        group: Who takes part; None is the default group.

    Returns:
        The same result on every rank: ``red_tensor`` itself for a ``ReduceOp``, else a new tensor.

    Raises:
        NotImplementedError: "max" or "min" of a tensor that requires a gradient.
        ValueError: ``op`` is neither of both.
        RankError: Another rank failed, or did not answer in time.

    Example:
        >>> total = torch.tensor(3)
        >>> all_reduce(total, torch.distributed.ReduceOp.SUM), all_reduce(total, "max")
        (tensor(3), tensor(3))
    """
    state = group_state(group)
    if isinstance(op, dist.ReduceOp.RedOpType | dist.ReduceOp):
        all_reduce_(state, red_tensor.detach(), op)
        return red_tensor
    if op not in _OPS:
        raise ValueError(f"op must be 'sum', 'max', 'min' or a ReduceOp (got {op!r})")
    if op == "sum":
        out: Tensor = _AllReduceSum.apply(red_tensor, state)
        return out
    if red_tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"all_reduce({op!r}) has no gradient; pass x.detach(), or use 'sum'"
        )
    return all_reduce_(state, red_tensor.detach().clone(), _OPS[op])


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
