# SPDX-License-Identifier: Apache-2.0
"""GroupState: what graphshard adds to a process group; `operation`: one step of communication.

`trace` counts steps of communication and what they send, and notes when they wait. Every function
that communicates reports to `count` as it starts, once; with no trace open that is a loop over an
empty tuple.

[Note: the registry] ``torch.distributed`` keeps process groups in process-wide state; the few facts
that graphshard adds to a group live beside it, in one dictionary with weak keys. It is the only
process-wide state of this package. A group that the user made gets its entry on first use.

[Note: how soon a job ends]
    With the timeout that the group was made with: from the moment when a rank dies, fails, or lets
    another one wait in vain, until every other process of the job is gone, it takes no longer than
    timeout + `MARGIN_SECONDS`. Nearly always it takes less: the end of a process is known at once.

    ::

        at most   timeout            a rank waits for one that is silent: stopped, hung, cut off
                  _ANSWER_SECONDS    ... asks all ranks where they are              (_monitor.py)
                  _EVENT_SECONDS     ... tells them what it has found, and fails    (_monitor.py)
                  GRACE_SECONDS      the launcher gives the rest time to fail, too  (train/launch)
                  TERMINATE_SECONDS  ... and those that it ends time to end         (train/launch)

    After a rank has ended in good order the launcher gives the others the timeout to do so, too.
    torchrun, in place of the launcher, gives a process that it ends half a minute. After half of a
    wait a rank says for whom it waits (see `FailureMonitor`).

[Note: traces are process wide]
    The backward pass may run in autograd's own threads, so neither a thread-local nor a context
    variable would see it. The tuple of open traces is replaced, never changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.distributed as dist

from ..errors import RankError

if TYPE_CHECKING:
    from ._monitor import FailureMonitor
    from ._shared_memory import SharedBlocks
    from ._sync import EarlySums
    from .collectives import ThreadGroups

MARGIN_SECONDS = 10.0
"""What may pass beyond the timeout until a failed job has ended; see the note."""


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks, for a message."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def first_line(error: BaseException) -> str:
    """The first line of an error, without the position before it and the advice after it."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    line = re.sub(r"^\[\S+:\d+\] ", "", text.splitlines()[0])
    return line.split(". This is typically caused")[0]


DEFAULT_TIMEOUT = timedelta(seconds=300)

THREAD_GROUP = "thread group "
"""How the names of groups begin that belong to a loader's threads; see `ThreadGroups`."""

HOST_BACKENDS = ("gloo", "mpi", "ucc")
"""Backends that move host memory, and whose waits block the host."""


@dataclass(eq=False)
class GroupState:
    """One process group as this package uses it."""

    group: dist.ProcessGroup | None  # None for a process that is alone, without any
    rank: int  # this process, in the group
    world_size: int
    members: tuple[int, ...]  # their global ranks
    name: str  # equal on all ranks
    backend: str  # as torch.distributed spells it
    timeout: timedelta  # the longest that any wait in the group may take
    # Where payloads must live for the backend; None chooses by backend.
    comm_device: torch.device | None = None
    # Knows which ranks are alive, where ``initialize_comms`` made the default group.
    monitor: FailureMonitor | None = None
    num_operations: int = 0  # started so far; equal on all ranks that are in step
    num_plans: int = 0  # exchange plans built so far
    num_meetings: dict[str, int] = field(default_factory=dict)  # by what; see `come_together`
    # Sums of gradients that begin while a backward runs: of the model that was synchronized last.
    early_sums: EarlySums | None = None
    early_groups: ThreadGroups | None = None  # in which these travel
    # Set to make waits in the group end with `Cancelled`; None where that cannot be.
    cancelled: threading.Event | None = None
    # Collectives that were started and have not been waited for.
    in_flight: set[dist.Work] = field(default_factory=set)
    closed: bool = False  # the group has been shut down
    shared: SharedBlocks | None = None  # through which ranks exchange large payloads
    tried_shared: bool = False  # the ranks have found out whether they can have such memory
    made_here: bool = False  # by ``initialize_comms``, not by the program itself
    looks_for_monitor: int = 0  # of a group that the program made; see `join_late`
    interface: str | None = None  # put into the environment for gloo, until the group is shut down
    process: int = field(default_factory=os.getpid)  # a forked child inherits the entry, not more

    def payload_device(self, device: torch.device) -> torch.device:
        """Where data that lives on ``device`` must be copied before the backend can send it."""
        if self.comm_device is not None:
            return self.comm_device
        if self.backend in HOST_BACKENDS:
            return torch.device("cpu")
        if self.backend == "nccl" and device.type != "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return device

    @property
    def small_device(self) -> torch.device:
        """Where the few numbers that ranks exchange among themselves live."""
        return self.payload_device(torch.device("cpu"))


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()


def is_initialized() -> bool:
    """Whether a default process group exists, made by ``initialize_comms`` or by the user."""
    return dist.is_available() and dist.is_initialized()


def group_state(group: dist.ProcessGroup | None = None) -> GroupState:
    """The facts about a group; None is the default group.

    Where there is no default group, a process that was not started as one of several is alone:
    its group has one member and nothing is ever sent.

    Raises:
        RuntimeError: There is no default group, but this process is one of several.
        ValueError: This process is not a member of ``group``.
    """
    if group is None:
        if not is_initialized():
            expected = os.environ.get("WORLD_SIZE", "1")
            if expected != "1":
                raise RuntimeError(
                    f"there is no process group, and this process is one of {expected}; call "
                    "graphshard.initialize_comms() first"
                )
            return alone()
        group = dist.group.WORLD
        assert group is not None
    state = _states.get(group) if isinstance(group, dist.ProcessGroup) else None
    return _of_users_group(group) if state is None else state


@functools.cache
def alone() -> GroupState:
    """The group of a process that is, or acts as if it were, the only one."""
    return GroupState(None, 0, 1, (0,), "alone", "none", DEFAULT_TIMEOUT)


def register(state: GroupState) -> None:
    """Say what is known about a group, before it is used."""
    assert state.group is not None
    _states[state.group] = state


def forget(state: GroupState) -> None:
    """Release a group that has been destroyed, so that its connections and threads end."""
    assert state.group is not None
    _states.pop(state.group, None)
    if not all(work.is_completed() for work in state.in_flight):
        # The end of a gloo group waits for its operations, and one of them waits for a rank that
        # may never come. So the group stays as it is until the process has ended: nothing must wait
        # for it, the interpreter at its end included.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state.group))
    # Whatever still refers to the state must not keep the group, and its threads, alive. Threads of
    # gloo may have to take the GIL before they end, and torch before 2.8 keeps it while it ends a
    # group; not so while it ends the part that has the threads, which is therefore last.
    part: object = None
    with contextlib.suppress(RuntimeError):  # it has no such part
        part = state.group._get_backend(torch.device("cpu"))
    state.group, state.closed, state.shared = None, True, None
    state.early_sums = state.early_groups = None
    del part
    state.in_flight.clear()


def registered() -> list[GroupState]:
    """What is known about any group."""
    return list(_states.values())


def _default_state() -> GroupState | None:
    """What is known about the default group."""
    return None if dist.group.WORLD is None else _states.get(dist.group.WORLD)


def _of_users_group(group: dist.ProcessGroup) -> GroupState:
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "group must be a process group that this process is a member of, or None for the "
            f"default group (got {group!r})"
        )
    default = _default_state() or alone()
    backend = str(dist.get_backend(group))
    state = GroupState(
        group=group,
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        members=tuple(dist.get_process_group_ranks(group)),
        name=group.group_name,
        backend=backend,
        timeout=min(default.timeout, _timeout_of(group)),
        comm_device=default.comm_device if default.backend == backend else None,
        monitor=default.monitor,
    )
    register(state)
    return state


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The longest that the backend itself waits, as the group was made."""
    for device in ("cpu", "cuda"):
        # There may be none for such a device, or one that does not say.
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return DEFAULT_TIMEOUT


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's number in the group, from 0; 0 where there is no process group."""
    return group_state(group).rank if group is not None or is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of processes in the group; 1 where there is no process group."""
    return group_state(group).world_size if group is not None or is_initialized() else 1


@functools.cache
def close_in_children(close: Callable[[], None]) -> None:
    """From now on forked children close what they inherit, by this function; once per process.

    Else a child would keep connections open, and memory alive, after its parent's death.
    """
    os.register_at_fork(after_in_child=close)


def close_inherited_groups() -> None:
    """Close a forked child's copies of what groups have."""
    for state in registered():
        if state.monitor is not None:
            state.monitor.close_inherited()
        if state.shared is not None:
            state.shared.close_inherited()
        state.monitor = state.shared = None


# -- operations -----------------------------------------------------------------------------------

RunningOperation = tuple[str, str, int, list[int], float, float]
"""Group, name, number in the group, peers, when it started, the seconds that it may take."""


class OperationLog:
    """Which operation each thread of this process is in, for the `FailureMonitor`."""

    def __init__(self) -> None:
        self._running: dict[int, RunningOperation] = {}
        self._last: tuple[str, int, float] | None = None
        #: Whether a rank has announced that it has failed or has given up.
        self.has_failure = False

    def enter(
        self, group: str, name: str, number: int, peers: list[int], limit: float = math.inf
    ) -> None:
        """This thread starts an operation, which waits for ``peers`` (global ranks).

        After half of ``limit``, in seconds, a notice says for whom it waits.
        """
        self._running[threading.get_ident()] = group, name, number, peers, time.monotonic(), limit

    def leave(self) -> None:
        """This thread's operation is over."""
        ended = self._running.pop(threading.get_ident(), None)
        if ended is not None:
            self._last = (ended[1], ended[2], time.monotonic())


# -- counting --------------------------------------------------------------------------------------

TraceKind: TypeAlias = Literal[
    "all_to_all", "send", "all_reduce", "broadcast", "all_gather", "agree", "barrier"
]
"""What is counted; ``agree`` is every check that ranks make among themselves."""


@dataclass(frozen=True)
class Span:
    """What a thread did for a while.

    Attributes:
        name: What waited, or what a user of `Trace.add_span` calls it.
        begin, end: Nanoseconds of `time.perf_counter_ns`.
        thread: Its `threading.get_ident`.
        kind: "wait" for communication; what others give.
    """

    name: str
    begin: int
    end: int
    thread: int
    kind: str = "wait"


class Trace:
    """What this rank has sent while the trace was open.

    Attributes:
        calls: Number of operations by kind; a kind that did not occur is absent.
        bytes_sent: Payload bytes sent to other ranks, by kind. What a rank keeps for itself is
            not counted. An ``all_to_all`` or ``send`` counts what it sends, an ``all_gather`` and
            (on the sending rank) a ``broadcast`` count the payload once for each other rank, and
            an ``all_reduce`` counts its payload once, whatever algorithm the backend runs. Zeros
            count, although long messages are sent without them.
        bytes_to: Bytes sent by `scope` and receiver: ``bytes_to[scope, r]``, with r a rank of the
            job, or None for what goes to all, by whatever way the backend takes.
        scope: Whose bytes those to come are: a name that is set from outside, such as a layer's.
        spans: When this process has waited for others, or None: only with ``timeline=True``. Bytes
            that move while threads compute are not waited for.
    """

    def __init__(self, thread: int | None = None, timeline: bool = False) -> None:
        self.calls: dict[str, int] = {}
        self.bytes_sent: dict[str, int] = {}
        self.bytes_to: dict[tuple[str, int | None], int] = {}
        self.scope = ""
        self.spans: list[Span] | None = [] if timeline else None
        self._thread = thread
        self._lock = threading.Lock()

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_sent.values())

    def add_span(self, name: str, begin: int, end: int, kind: str) -> None:
        """Note what this thread has done, in a trace with a timeline; see `Span`."""
        if self.spans is not None and self._thread in (None, threading.get_ident()):
            self.spans.append(Span(name, begin, end, threading.get_ident(), kind))

    def _add(self, kind: TraceKind, num_bytes: int, to: Mapping[int, int] | None) -> None:
        if self._thread is not None and self._thread != threading.get_ident():
            return
        with self._lock:
            self.calls[kind] = self.calls.get(kind, 0) + 1
            self.bytes_sent[kind] = self.bytes_sent.get(kind, 0) + num_bytes
            for receiver, part in ({None: num_bytes} if to is None else to).items():
                if part:
                    key = self.scope, receiver
                    self.bytes_to[key] = self.bytes_to.get(key, 0) + part

    def __repr__(self) -> str:
        return f"Trace(calls={self.calls}, bytes_sent={self.bytes_sent})"


_open: tuple[Trace, ...] = ()
_open_lock = threading.Lock()


@contextmanager
def trace(only_this_thread: bool = False, *, timeline: bool = False) -> Iterator[Trace]:
    """Count the communication of this process while the block runs; traces may be nested.

    Args:
        only_this_thread: Leave out what other threads send. The backward pass may run in others.
        timeline: Also note when threads wait, see `Trace.spans`.

    Example:
        >>> with trace() as counted:
        ...     pass
        >>> counted.total_calls, counted.total_bytes
        (0, 0)
    """
    global _open
    counted = Trace(threading.get_ident() if only_this_thread else None, timeline)
    with _open_lock:
        _open = (*_open, counted)
    try:
        yield counted
    finally:
        with _open_lock:
            _open = tuple(other for other in _open if other is not counted)


def count(kind: TraceKind, num_bytes: int, to: Mapping[int, int] | None = None) -> None:
    """Report one operation to every open trace.

    Args:
        num_bytes: All that it sends.
        to: How much of that to which ranks of the job; None for what goes to all.
    """
    for counted in _open:
        counted._add(kind, num_bytes, to)


# -- one step of communication ---------------------------------------------------------------------


@contextmanager
def operation(
    state: GroupState, name: str, number: int, peers: Sequence[int] | None = None
) -> Iterator[None]:
    """Run one step of communication; a failure inside becomes a `RankError`.

    For messages it has a name and a number in the group; it waits for ``peers``, or for all.

    Raises:
        RankError: Anything in the block raised a RuntimeError other than out of memory.
        RuntimeError: The group has been shut down.
    """
    if state.closed:
        raise RuntimeError(
            f"{name} needs the process group '{state.name}', which has been shut down; make what "
            "uses it again after initialize_comms"
        )
    others = []
    for peer in range(state.world_size) if peers is None else peers:
        if peer != state.rank:
            others.append(state.members[peer])
    if state.monitor is None and state.world_size > 1:
        _find_monitor(state)
    monitor = state.monitor
    if monitor is not None:
        monitor.enter(state.name, name, number, others, state.timeout.total_seconds())
    start = time.perf_counter_ns()
    try:
        if monitor is not None and monitor.has_failure:
            raise RuntimeError("not started")
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if state.shared is not None:
            state.shared.fail()
        seconds = (time.perf_counter_ns() - start) / 1e9
        raise _rank_error(state, name, others, error, seconds) from error
    finally:
        for opened in _open:
            if opened.spans is not None:
                opened.add_span(name, start, time.perf_counter_ns(), "wait")
        if monitor is not None:
            monitor.leave()


def _find_monitor(state: GroupState) -> None:
    """The monitor of the default group, which the program may have made itself."""
    from ._monitor import join_late, wants_monitor

    default = _default_state()
    if default is None:
        return
    if default.monitor is None and wants_monitor(default):
        join_late(default)
    state.monitor = default.monitor


def _rank_error(
    state: GroupState, name: str, peers: Sequence[int], error: BaseException, waited: float
) -> RankError:
    """The error of an operation that waited for global ranks, some seconds, and then failed."""
    me = state.members[state.rank]
    reason = first_line(error)
    head = f"rank {me}: {name} with {rank_names(peers)} failed after {waited:.1f} s"
    if state.monitor is not None:
        timed_out = waited >= state.timeout.total_seconds() - 0.2
        verdict = state.monitor.diagnose(name, peers, timed_out)
        if verdict is not None:
            return RankError(f"{head}: {verdict.text} (the backend said: {reason})", verdict.ranks)
    return RankError(f"{head}: {reason}", peers if len(peers) == 1 else ())


# -- meeting ---------------------------------------------------------------------------------------

_POLL_SECONDS = (0.001, 0.1)  # the first time between two looks, and the longest


def come_together(what: str, rule: str, state: GroupState | None = None) -> None:
    """Return once all ranks of the default group are here; every rank must call.

    A collective that one rank starts alone meets whatever collective the others start next in that
    group: they exchange the wrong data, or wait until the group's timeout. So what a program may
    well do on one rank alone (``if rank == 0: evaluate()``) is announced in the store of the group
    first. Who is missing is then known, nothing is sent, and the error can say what to do.

    Args:
        what: What they do together, "DistNodeDataLoader"; equal on all ranks.
        rule: For the error: who must do it, and what to do where one rank does it alone.
        state: The group; the default group by default. Others have no store, and are not checked.

    Raises:
        RankError: A rank did not come within the group's timeout, or failed.
    """
    state = group_state() if state is None else state
    store = default_store() if state.world_size > 1 and state.group is dist.group.WORLD else None
    if store is None:
        return
    number = state.num_meetings[what] = state.num_meetings.get(what, 0) + 1
    base = f"graphshard/meetings/{what}"
    missing = [r for r in range(state.world_size) if r != state.rank]
    seconds, pause = state.timeout.total_seconds(), _POLL_SECONDS[0]
    monitor, start = state.monitor, time.monotonic()
    with operation(state, what, number):
        store.set(f"{base}/{number}/{state.rank}", "")
        while True:
            missing = [r for r in missing if not store.check([f"{base}/{number}/{r}"])]
            if not missing:
                break
            failed = monitor is not None and (monitor.has_failure or monitor.has_lost(missing))
            if failed or time.monotonic() - start > seconds:
                absent = rank_names([state.members[r] for r in missing])
                raise RuntimeError(f"{absent} did not come: {rule}")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
    # All have come, so all have left the one before.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.delete_key(f"{base}/{number - 1}/{state.rank}")


def default_store() -> dist.Store | None:
    """The default group's; None where it has none, as under MPI."""
    try:
        store: dist.Store = dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
    return store
