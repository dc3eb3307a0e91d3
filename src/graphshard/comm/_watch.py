# SPDX-License-Identifier: Apache-2.0
"""Watch: one rank's knowledge of the others, and the words for what went wrong.

It never disturbs a run. When an operation has failed or timed out, `Watch.diagnose` says which
ranks are to blame: the first failure that the hub has announced, or else, after asking every rank
where it is, those that an operation waits for in vain. What one rank finds out it announces, so
that ranks that fail later, because of it, name the same first cause.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._group import LANE
from ._hub import Hub, Lines, keep_alive, line

_CONNECT_SECONDS = 20.0
_NEWS_SECONDS = 3.0
_JOIN_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
_GOODBYE_SECONDS = 2.0

Place = tuple[str, str, int, list[int], float]
"""An operation under way: group, name, number in the group, peers, seconds so far."""


@dataclass(frozen=True)
class Verdict:
    """What went wrong, in words, and the ranks held responsible."""

    text: str
    ranks: tuple[int, ...]


class Watch:
    """This rank's end of the connection to the hub; one daemon thread.

    Args:
        addresses: Where the hub may be reached; the first that answers is used.
        token: What the hub wants to hear.
        rank: This rank, in the default group.
        world_size: Number of ranks.
        hub: The hub itself, on rank 0, which closes it.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        token: str,
        rank: int,
        world_size: int,
        hub: Hub | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._hub = hub
        self._socket = _connect(addresses)
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._left: set[int] = set()
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}
        self._questions = itertools.count()
        self._places: dict[int, tuple[str, str, int, list[int], float]] = {}
        self._last: tuple[str, int, float] | None = None
        self._closing = False
        self._connected = True
        self._send({"token": token, "rank": rank})
        self._thread = threading.Thread(target=self._listen, name="graphshard-watch", daemon=True)
        self._thread.start()

    # -- what operations report ----------------------------------------------------------------

    def enter(self, group: str, name: str, number: int, peers: list[int]) -> None:
        """This thread starts an operation of a group; peers are global ranks."""
        self._places[threading.get_ident()] = (group, name, number, peers, time.monotonic())

    def leave(self) -> None:
        """This thread's operation is over."""
        place = self._places.pop(threading.get_ident(), None)
        if place is not None:
            self._last = (place[1], place[2], time.monotonic())

    def given_up(self) -> bool:
        """Whether a rank has announced that it will not take part in anything any more."""
        return any(event["kind"] != "ended" for event in self._events)

    def report(self, text: str) -> None:
        """Announce that this rank fails, and why; returns once the hub has it (or soon after)."""
        self._announce({"kind": "raised", "rank": self._rank, "ranks": [self._rank], "text": text})

    def close(self) -> None:
        """Say good-bye, stop the thread and, on rank 0, the hub."""
        self._closing = True
        self._send({"bye": True})
        for how in (socket.SHUT_WR, socket.SHUT_RDWR):
            # First let the hub answer with its own end; do not depend on it.
            with contextlib.suppress(OSError):
                self._socket.shutdown(how)
            self._thread.join(_GOODBYE_SECONDS)
        self._thread.join(_JOIN_SECONDS)
        self._socket.close()
        if self._hub is not None:
            self._hub.close()

    def forget(self) -> None:
        """Close the inherited descriptors in a forked child.

        Else the child would keep the connection open after its parent's death.
        """
        self._socket.close()
        if self._hub is not None:
            self._hub.forget()

    # -- finding out -----------------------------------------------------------------------------

    def diagnose(self, name: str, peers: Sequence[int], timed_out: bool) -> Verdict | None:
        """Say who is to blame for the failure of an operation of this thread; None if unknown.

        Args:
            name: The operation.
            peers: Global ranks that it waited for.
            timed_out: Whether time ran out; else a connection broke, and news of a death is
                to be expected.
        """
        gone = sorted(peer for peer in peers if peer in self._left)
        if not timed_out and not gone:
            self._until(lambda: bool(self._events) or not self._left.isdisjoint(peers), 1.0)
            gone = sorted(peer for peer in peers if peer in self._left)
        if not self._events:
            if gone:
                found = Verdict(f"{_ranks(gone)} left with shutdown_comms()", tuple(gone))
            elif self._connected:
                found = self._search(name, peers)
            else:
                return None  # rank 0 has left in good order, and its hub with it
            news = {"kind": "gave up", "rank": self._rank, "text": found.text}
            self._announce({**news, "ranks": list(found.ranks)})
            if not self._events:
                return found
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

    def _search(self, name: str, peers: Sequence[int]) -> Verdict:
        """Ask every rank where it is, and follow who waits for whom."""
        states = self._ask()
        if 0 in peers and not states and 0 not in self._left:
            text = f"{_ranks([0])} {self._tell(0, None)}, and without it nothing is known of others"
            return Verdict(text, (0,))
        me = self._places.get(threading.get_ident())
        here = (*me[1:3], me[0]) if me is not None else (name, -1, "")
        missing: list[int] = []
        places: dict[tuple[str, int, str], list[int]] = {here: [self._rank]}
        queue = list(peers)
        seen = {self._rank}
        while queue:
            peer = queue.pop(0)
            if peer in seen:
                continue
            seen.add(peer)
            found = _relevant(states[peer]["places"], here[2]) if peer in states else []
            if peer in self._left or not found:
                missing.append(peer)
                continue
            keys = [(place[1], place[2], place[0]) for place in found]
            places.setdefault(here if here in keys else keys[0], []).append(peer)
            queue += [p for place in found for p in place[3]]
        missing.sort()
        if missing:
            told = "; ".join(
                f"rank {peer} {self._tell(peer, states.get(peer))}" for peer in missing
            )
            return Verdict(f"{_ranks(missing)} did not take part: {told}", tuple(missing))
        if len(places) == 1:
            return Verdict(
                "every rank is in the operation, but it does not complete; is the network between "
                "them broken?",
                tuple(peers),
            )
        # Most ranks are right; if there is no telling, the lowest is.
        right = max(places, key=lambda key: (len(places[key]), -min(places[key])))
        blamed = sorted(rank for key, ranks in places.items() if key != right for rank in ranks)
        told = "; ".join(
            f"{_ranks(sorted(ranks))} in {key[0]} (operation {key[1]})"
            for key, ranks in places.items()
        )
        return Verdict(f"ranks are in different operations: {told}", tuple(blamed))

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

    def _announce(self, event: dict[str, Any]) -> None:
        """Send an event and wait until the hub has passed it on, or some other before it."""
        known = len(self._events)
        self._send({"event": event})
        self._until(lambda: not self._connected or len(self._events) > known, _NEWS_SECONDS)

    def _until(self, condition: Any, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(condition, seconds)

    # -- the thread --------------------------------------------------------------------------------

    def _listen(self) -> None:
        lines = Lines()
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                break
            try:
                for message in lines.feed(data):
                    self._take(message)
            except Exception:  # not the hub's words; nothing more is to be learnt from them
                break
        with self._changed:
            self._connected = False
            if not self._closing and 0 not in self._left:
                # The hub is gone, and with it rank 0.
                self._events.append({"kind": "ended", "rank": 0, "ranks": [0]})
            self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        if "where" in message:
            asker, question = message["where"]
            self._send({"here": [asker, question, self._rank, self._state()]})
            return
        with self._changed:
            if "event" in message:
                self._events.append(message["event"])
            elif "left" in message:
                self._left.add(message["left"])
            elif "here" in message:
                _, question, rank, state = message["here"]
                if question in self._answers:
                    self._answers[question][rank] = state
            self._changed.notify_all()

    def _state(self) -> dict[str, Any]:
        now = time.monotonic()
        last = self._last
        return {
            "places": [(*place[:4], now - place[4]) for place in list(self._places.values())],
            "last": (last[0], last[1], now - last[2]) if last is not None else None,
        }

    def _send(self, message: dict[str, Any]) -> None:
        # A failure to send means that the hub is gone, which the thread finds out.
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(line(message))


def _connect(addresses: Sequence[tuple[str, int]]) -> socket.socket:
    errors = []
    for address in addresses:
        try:
            connection = socket.create_connection(address, _CONNECT_SECONDS)
        except OSError as error:
            errors.append(f"{address[0]}:{address[1]}: {error}")
            continue
        connection.settimeout(None)
        keep_alive(connection)
        return connection
    raise ConnectionError(f"rank 0 cannot be reached ({'; '.join(errors)})")


def _relevant(places: list[Place], group: str) -> list[Place]:
    """Those of a rank's operations, one per thread, that tell whether it takes part in a group.

    What its other loader threads wait for says nothing about the thread that is missed.
    """
    same = [place for place in places if place[0] == group]
    return same or [place for place in places if not place[0].startswith(LANE)]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
