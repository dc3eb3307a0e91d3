# SPDX-License-Identifier: Apache-2.0
"""FailureMonitor: one rank's knowledge of the others, and the words for what went wrong.

It never disturbs a run. When an operation has failed or timed out, `FailureMonitor.diagnose` says
which ranks are to blame: the first failure that the server has announced, or else, after asking
every rank which operation it is in, those that an operation waits for in vain. What one rank finds
out it announces, so that ranks that fail later, because of it, name the same first cause.

Of a wait that has used half of its time the lowest of the waiting ranks says on standard error,
once, for whom it waits, and what those are in. A silent rank is never taken for dead before the
time of an operation that waits for it is over; it may be busy.

[Note: a group of the program's own]
    `initialize_comms` starts the monitors before the group, where all ranks wait for each other
    anyway. Where the program has made the default group itself, by torch.distributed, no rank may
    wait for another: a rank may never use this package again, or at all. So each rank does what it
    can at its first operations, through the store of the group, and leaves the rest for the next
    one (`join_late`):

    1. every rank writes on which network it is;
    2. rank 0, once it knows the network of all, starts the server where they can reach it and as
       few others as possible, and writes where that is;
    3. every rank connects, once it reads that.

    Operations are collective, so after three of them all have done so. Until then, and where the
    group has no store, errors carry what the backend said.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import NOTICE
from ._monitor_server import Lines, MonitorServer, line
from .address import is_loopback, listen_for_others, network_name, notice_dead_host, own_address
from .group import (
    THREAD_GROUP,
    GroupState,
    OperationLog,
    RunningOperation,
    close_in_children,
    close_inherited_groups,
    default_store,
    rank_names,
)

_CONNECT_SECONDS = 20.0
_EVENT_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_ANSWER_SECONDS = 3.5
_GOODBYE_SECONDS = 2.0
_CHECK_SECONDS = 0.5
_DRAIN_SECONDS = 5.0


@dataclass(frozen=True)
class Verdict:
    """What went wrong, in words, and the ranks held responsible."""

    text: str
    ranks: tuple[int, ...]


class FailureMonitor(OperationLog):
    """This rank's end of the connection to the server; one daemon thread.

    Rank 0 has the server itself, too, and closes it.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        rank: int,
        world_size: int,
        server: MonitorServer | None = None,
    ) -> None:
        super().__init__()
        self._rank = rank
        self._world_size = world_size
        self._server = server
        try:
            self._socket = socket.create_connection(address, _CONNECT_SECONDS)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise ConnectionError(f"rank 0 cannot be reached ({where}: {error})") from error
        self._socket.settimeout(None)
        notice_dead_host(self._socket)
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._left: set[int] = set()
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}
        self._questions = itertools.count()
        self._noticed: dict[int, RunningOperation] = {}
        self._gone: dict[int, float] = {}
        self._closing = False
        self._connected = True
        self._send({"token": token, "rank": rank})
        self._notices: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._listen, name="graphshard-monitor", daemon=True)
        self._thread.start()

    def has_lost(self, peers: Sequence[int]) -> bool:
        """Whether one of some ranks is gone for so long that nothing it sent can still arrive.

        Its connections need not be broken: a child that it forked may hold copies of them, or, if
        it left in good order, it may itself.
        """
        latest = time.monotonic() - _DRAIN_SECONDS
        return any(self._gone.get(peer, math.inf) < latest for peer in peers)

    def report(self, text: str) -> None:
        """Announce that this rank fails, and why; returns once the server has it, or soon."""
        self._announce({"kind": "raised", "rank": self._rank, "ranks": [self._rank], "text": text})

    def close(self) -> None:
        """Say good-bye, stop the thread and, on rank 0, the server."""
        self._closing = True
        self._send({"bye": True})
        for how in (socket.SHUT_WR, socket.SHUT_RDWR):
            # First let the server answer with its own end; do not depend on it.
            with contextlib.suppress(OSError):
                self._socket.shutdown(how)
            self._thread.join(_GOODBYE_SECONDS)
        self._thread.join(_JOIN_SECONDS)
        for notice in self._notices:
            notice.join(_JOIN_SECONDS)
        self._socket.close()
        if self._server is not None:
            self._server.close()

    def drop(self) -> None:
        """End the connection without a good-bye, as the end of the process does."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close_inherited(self) -> None:
        """Close the inherited descriptors in a forked child."""
        self._socket.close()
        if self._server is not None:
            self._server.close_inherited()

    # -- finding out -----------------------------------------------------------------------------

    def diagnose(self, name: str, peers: Sequence[int], timed_out: bool) -> Verdict | None:
        """Say who is to blame for the failure of an operation of this thread; None if unknown.

        If it did not time out a connection broke, and the event of a rank's end is to be expected.
        """
        gone = sorted(peer for peer in peers if peer in self._left)
        if not timed_out and not gone:
            self._until(lambda: bool(self._events) or not self._left.isdisjoint(peers), 1.0)
            gone = sorted(peer for peer in peers if peer in self._left)
        if not self._events:
            if gone:
                verdict = Verdict(f"{rank_names(gone)} left with shutdown_comms()", tuple(gone))
            elif self._connected:
                me = self._running.get(threading.get_ident())
                verdict, _ = self._search(me or ("", name, -1, list(peers), 0.0, 0.0))
            else:
                return None  # rank 0 has left in good order, and the server with it
            ranks = list(verdict.ranks)
            event = {"kind": "gave up", "rank": self._rank, "ranks": ranks, "text": verdict.text}
            # Where rank 0 is silent, so is the server.
            self._announce(event, 0.0 if 0 in ranks else _EVENT_SECONDS)
            if not self._events:
                return verdict
        return self._explain(self._events[0])

    def _explain(self, event: dict[str, Any]) -> Verdict:
        rank, ranks = event["rank"], tuple(event["ranks"])
        if event["kind"] == "ended":
            return Verdict(
                f"rank {rank} is gone: its process ended without shutdown_comms() (it was killed, "
                "it crashed, or it exited)",
                ranks,
            )
        if event["kind"] == "raised":
            return Verdict(f"rank {rank} raised {event['text']}", ranks)
        if rank == self._rank:
            return Verdict(event["text"], ranks)
        return Verdict(f"rank {rank} gave up first: {event['text']}", ranks)

    def _search(
        self, own: RunningOperation, absence: str = "did not take part"
    ) -> tuple[Verdict, list[int]]:
        """Ask every rank which operations it is in, and follow who waits for whom.

        Returns:
            The verdict, and the ranks that were found waiting, this one among them.
        """
        group, name, number, peers, *_ = own
        states = self._ask()
        if 0 in peers and not states and 0 not in self._left:
            text = f"rank 0 {self._tell(0, None)}, and without it nothing is known of others"
            return Verdict(text, (0,)), [self._rank]
        here = (name, number, group)
        missing: list[int] = []
        ranks_in: dict[tuple[str, int, str], list[int]] = {here: [self._rank]}
        queue = list(peers)
        seen = {self._rank}
        while queue:
            peer = queue.pop(0)
            if peer in seen:
                continue
            seen.add(peer)
            running = _relevant(states[peer]["operations"], group) if peer in states else []
            if peer in self._left or not running:
                missing.append(peer)
                continue
            keys = [(name, number, group) for group, name, number, *_ in running]
            ranks_in.setdefault(here if here in keys else keys[0], []).append(peer)
            queue += [p for operation in running for p in operation[3]]
        waiting = [rank for ranks in ranks_in.values() for rank in ranks]
        missing.sort()
        if missing:
            told = "; ".join(
                f"rank {peer} {self._tell(peer, states.get(peer))}" for peer in missing
            )
            return Verdict(f"{rank_names(missing)} {absence}: {told}", tuple(missing)), waiting
        if len(ranks_in) == 1:
            text = (
                "every rank is in the operation, but it does not complete; is the network between "
                "them broken?"
            )
            return Verdict(text, tuple(peers)), waiting
        # Most ranks are right; if there is no telling, the lowest is.
        right = max(ranks_in, key=lambda key: (len(ranks_in[key]), -min(ranks_in[key])))
        blamed = sorted(rank for key, ranks in ranks_in.items() if key != right for rank in ranks)
        told = "; ".join(
            f"{rank_names(sorted(ranks))} in {key[0]} (operation {key[1]})"
            for key, ranks in ranks_in.items()
        )
        return Verdict(f"ranks are in different operations: {told}", tuple(blamed)), waiting

    def _start_notices(self) -> None:
        """Look for operations that have used half of their time."""
        now = time.monotonic()
        for thread, running in list(self._running.items()):
            *_, start, limit = running
            if now - start > limit / 2 and self._noticed.get(thread) is not running:
                self._noticed[thread] = running
                args = (thread, running)
                notice = threading.Thread(
                    target=self._notice, args=args, name="graphshard-notice", daemon=True
                )
                self._notices = [n for n in self._notices if n.is_alive()] + [notice]
                notice.start()

    def _notice(self, thread: int, running: RunningOperation) -> None:
        verdict, waiting = self._search(running, "is not there yet")
        _, name, number, _, start, limit = running
        still = self._running.get(thread) is running and self._connected and not self._events
        if still and self._rank == min(waiting):
            seconds = time.monotonic() - start
            sys.stderr.write(
                f"{NOTICE}rank {self._rank} has waited {seconds:.0f} s of {limit:g} s in {name} "
                f"(operation {number}): {verdict.text}\n"
            )
            sys.stderr.flush()

    def _tell(self, peer: int, state: dict[str, Any] | None) -> str:
        if peer in self._left:
            return "left with shutdown_comms()"
        if state is None:
            return "does not answer (it is stopped, it holds the interpreter, or its host is gone)"
        if state["last"] is None:
            return "has not communicated yet"
        name, number, seconds = state["last"]
        return f"left {name} (operation {number}) {seconds:.1f} s ago and started nothing since"

    def _ask(self) -> dict[int, dict[str, Any]]:
        question = next(self._questions)
        answers: dict[int, dict[str, Any]] = {}
        self._answers[question] = answers
        self._send({"ask": question})
        others = set(range(self._world_size)) - {self._rank}
        self._until(
            lambda: not self._connected or others <= answers.keys() | self._left, _ANSWER_SECONDS
        )
        return answers

    def _announce(self, event: dict[str, Any], seconds: float = _EVENT_SECONDS) -> None:
        """Send an event and wait until the server has passed it on, or some other before it."""
        num_events = len(self._events)
        self._send({"event": event})
        self._until(lambda: not self._connected or len(self._events) > num_events, seconds)

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(condition, seconds)

    # -- the thread --------------------------------------------------------------------------------

    def _listen(self) -> None:
        lines = Lines()
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                if not selector.select(_CHECK_SECONDS):
                    self._start_notices()
                    continue
                try:
                    data = self._socket.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    break
                try:
                    for message in lines.feed(data):
                        self._take(message)
                except Exception:  # not a message of the server; there is nothing more to learn
                    break
        with self._changed:
            self._connected = False
            if not self._closing and 0 not in self._left:
                # The server is gone, and with it rank 0.
                self._events.append({"kind": "ended", "rank": 0, "ranks": [0]})
                self._gone[0] = time.monotonic()
            self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        if "where" in message:
            asker, question = message["where"]
            self._send({"here": [asker, question, self._rank, self._state()]})
            return
        with self._changed:
            if "event" in message:
                event = message["event"]
                self._events.append(event)
                self.has_failure |= event["kind"] != "ended"
                if event["kind"] == "ended":
                    self._gone.setdefault(event["rank"], time.monotonic())
            elif "left" in message:
                self._left.add(message["left"])
                self._gone.setdefault(message["left"], time.monotonic())
            elif "here" in message:
                _, question, rank, state = message["here"]
                if question in self._answers:
                    self._answers[question][rank] = state
            self._changed.notify_all()

    def _state(self) -> dict[str, Any]:
        now = time.monotonic()
        last = self._last
        return {
            "operations": [(*o[:4], now - o[4]) for o in list(self._running.values())],
            "last": (last[0], last[1], now - last[2]) if last is not None else None,
        }

    def _send(self, message: dict[str, Any]) -> None:
        # A failure to send means that the server is gone, which the thread finds out.
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(line(message))


def _relevant(operations: list[Any], group: str) -> list[Any]:
    """Those of a rank's operations, one per thread, that tell whether it takes part in a group.

    What its other loader threads wait for says nothing about the thread that is missed.
    """
    same = [o for o in operations if o[0] == group]
    return same or [o for o in operations if not o[0].startswith(THREAD_GROUP)]


# -- starting --------------------------------------------------------------------------------------

_MOST_LOOKS = 100
_MONITOR_KEY = "graphshard/monitor"
_one_at_a_time = threading.Lock()


def join_late(state: GroupState) -> None:
    """Go on towards a monitor for the default group, without waiting."""
    if not _one_at_a_time.acquire(blocking=False):  # threads of loaders come here, too
        return
    try:
        if state.monitor is None:
            state.looks_for_monitor += 1
            store = default_store()
            if store is None:
                state.looks_for_monitor = _MOST_LOOKS
            elif state.looks_for_monitor < _MOST_LOOKS:  # after so many, ranks do without
                _next_step(state, store)
    except (RuntimeError, OSError, ValueError):  # then there is none: nothing depends on it
        state.looks_for_monitor = _MOST_LOOKS
    finally:
        _one_at_a_time.release()


def wants_monitor(state: GroupState) -> bool:
    """Whether `join_late` may still find one."""
    return (
        state.world_size > 1
        and not state.made_here
        and state.looks_for_monitor < _MOST_LOOKS
        and state.group is dist.group.WORLD
        and state.process == os.getpid()
    )


def _next_step(state: GroupState, store: dist.Store) -> None:
    if state.looks_for_monitor == 1:
        store.set(f"{_MONITOR_KEY}/network/{state.rank}", network_name())
    addresses = ["127.0.0.1"]
    if state.rank == 0:
        networks = [f"{_MONITOR_KEY}/network/{r}" for r in range(state.world_size)]
        if not store.check(networks):
            return
        if len({store.get(key) for key in networks}) > 1:
            addresses = [own_address()]
            if is_loopback(addresses[0]):
                state.looks_for_monitor = _MOST_LOOKS
                return
    elif not store.check([_MONITOR_KEY]):
        return
    state.monitor = start_monitor(store, _MONITOR_KEY, state.rank, state.world_size, addresses)[0]


def start_monitor(
    store: dist.Store,
    key: str,
    rank: int,
    world_size: int,
    addresses: Sequence[str],
    is_local: bool = False,
    event_seconds: float = 0.0,
) -> tuple[FailureMonitor, bool]:
    """This rank's monitor; rank 0 starts the server.

    Args:
        store: Through which ranks learn where the server is.
        key: Under which rank 0 writes it.
        addresses: For rank 0: it listens at the first of these that its host has.
        is_local: For rank 0: what all ranks are to know.

    Returns:
        The monitor, and what rank 0 has said of ``is_local``.

    Raises:
        RuntimeError: The store has failed.
        OSError: Rank 0 cannot listen, or cannot be reached.
    """
    close_in_children(close_inherited_groups)
    server = None
    try:
        if rank == 0:
            listener, host = listen_for_others(addresses, 0)
            token = secrets.token_hex(16)
            server = MonitorServer(listener, token, world_size, event_seconds)
            port = server.address[1]
            server_facts = {"host": host, "port": port, "token": token, "local": is_local}
            store.set(key, json.dumps(server_facts))
        facts = json.loads(store.get(key))
        address = facts["host"], facts["port"]
        return FailureMonitor(address, facts["token"], rank, world_size, server), facts["local"]
    except (RuntimeError, OSError):
        if server is not None:
            with contextlib.suppress(OSError):
                server.close()
        raise
