# SPDX-License-Identifier: Apache-2.0
"""Hub: rank 0's switchboard, through which ranks learn of each other's failures.

Every rank holds one TCP connection to it, apart from those that carry tensors. The kernel closes
the connection when a process dies, however it dies, so a death is known at once and without
polling; keep-alive probes find hosts that vanish. The hub puts all failures in one order and sends
each to every rank, so that all ranks name the same first cause. Lines of JSON are all that travels:

::

    member -> hub   {"token", "rank"}                       who I am; first line
                    {"token", "rank", "event"}              the same, of who may not come in
                    {"event": {...}}                        I failed, or give up on somebody
                    {"ask": n}                              where is everyone?
                    {"here": [asker, n, rank, state]}       where I am
                    {"bye": true}                           an orderly end
    hub -> member   {"event": {...}} | {"where": [asker, n]} | {"here": [asker, n, rank, state]}
                    {"left": rank}                          an orderly end of a rank

Whoever reaches the port may write to it. So little is read, and for a short time, of a connection
that has not shown the token, and few such are kept; of every other each line is held against the
forms above. Whatever does not fit ends the connection on which it came, and nothing else.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

_MAX_LINE = 1 << 20
_MAX_FIRST_LINE = 1 << 12
_MAX_STRANGERS = 64
_STRANGER_SECONDS = 10.0
_SEND_SECONDS = 2.0
_JOIN_SECONDS = 5.0


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out, within half a minute, that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Lines:
    """Cuts a stream of bytes into JSON messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, max_line: int = _MAX_LINE) -> list[dict[str, Any]]:
        """Messages that are complete now.

        Raises:
            ValueError: Something else than lines of JSON objects, of no more than ``max_line``
                bytes.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, [*lines, self._rest])) > max_line:
            raise ValueError("a line is too long")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a line is nested too deeply") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line is not an object")
        return messages


def line(message: dict[str, Any]) -> bytes:
    """The form in which a message travels."""
    return json.dumps(message).encode() + b"\n"


def send_news(address: tuple[str, int], token: str, rank: int, event: dict[str, Any]) -> None:
    """Announce an event without being a member; nothing happens if the hub is not there.

    Args:
        address: Of the hub.
        token: What the hub wants to hear.
        rank: Whom the event is about.
        event: As a member announces it.
    """
    with contextlib.suppress(OSError), socket.create_connection(address, _JOIN_SECONDS) as hub:
        hub.sendall(line({"token": token, "rank": rank, "event": event}))
        hub.recv(1)  # the hub hangs up once it has passed it on


@dataclass(eq=False)
class _Member:
    connection: socket.socket
    deadline: float
    rank: int | None = None
    left: bool = False
    lines: Lines = field(default_factory=Lines)


class Hub:
    """Serves until `close`; one daemon thread.

    Args:
        listener: Where ranks can connect to; closed with the hub.
        token: What a member must know to be heard.
        world_size: Number of ranks.
        news_seconds: For how long to take news from others than members.
    """

    def __init__(
        self, listener: socket.socket, token: str, world_size: int, news_seconds: float = 0.0
    ) -> None:
        self._token = token
        self._news_deadline = time.monotonic() + news_seconds
        self._world_size = world_size
        self._members: dict[int, _Member] = {}
        self._strangers: dict[_Member, None] = {}  # have not shown the token; oldest first
        self._events: list[dict[str, Any]] = []
        self._left: list[int] = []
        self._listener = listener
        self._listener.setblocking(False)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(self._woken, selectors.EVENT_READ, "wake")
        self._thread = threading.Thread(target=self._serve, name="graphshard-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the ranks that rank 0 ends in good order, and stop."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(_JOIN_SECONDS)
        self._wake.close()

    def forget(self) -> None:
        """Close the inherited descriptors in a forked child, where the thread does not run."""
        for member in [*self._members.values(), *self._strangers]:
            member.connection.close()
        self._listener.close()
        self._wake.close()
        self._woken.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0 if self._strangers else None):
                if key.data == "wake":
                    self._stop()
                    return
                if key.data == "listener":
                    self._accept()
                elif key.data.connection.fileno() >= 0:  # not dropped since
                    self._read(key.data)
            while self._strangers:
                oldest = next(iter(self._strangers))
                full = len(self._strangers) > _MAX_STRANGERS + self._world_size
                if not full and time.monotonic() < oldest.deadline:
                    break
                self._drop(oldest)

    def _stop(self) -> None:
        self._broadcast({"left": 0})
        for key in list(self._selector.get_map().values()):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            sock.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(0.01)  # there may be no descriptor to spare, for as long as it lasts
            return
        connection.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):
            keep_alive(connection)
        stranger = _Member(connection, time.monotonic() + _STRANGER_SECONDS)
        self._strangers[stranger] = None
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _read(self, member: _Member) -> None:
        most = _MAX_FIRST_LINE if member.rank is None else _MAX_LINE
        try:
            data = member.connection.recv(min(most, 1 << 16))
            goes_on = bool(data)
            for message in member.lines.feed(data, most):
                if member.rank is not None:
                    self._handle(member, member.rank, message)
                elif not self._admit(member, message):
                    goes_on = False
                    break
        except Exception:  # whatever came, it ends this connection alone
            goes_on = False
        if not goes_on:
            self._drop(member)

    def _admit(self, member: _Member, message: dict[str, Any]) -> bool:
        token = _of_type(str, message["token"]).encode(errors="replace")
        rank = _of_type(int, message["rank"])
        if not hmac.compare_digest(token, self._token.encode()) or not self._is_rank(rank):
            return False
        if "event" in message:
            # A rank that comes twice while ranks may still come: which is the right one?
            # Later than that, who comes is a stranger.
            if time.monotonic() < self._news_deadline:
                self._announce(self._event_of(rank, message["event"]))
            return False
        if rank in self._members:
            return False
        member.rank = rank
        del self._strangers[member]
        self._members[rank] = member
        for event in self._events:
            self._send(member, {"event": event})
        for left in self._left:
            self._send(member, {"left": left})
        return True

    def _handle(self, member: _Member, rank: int, message: dict[str, Any]) -> None:
        if "event" in message:
            self._announce(self._event_of(rank, message["event"]))
        elif "ask" in message:
            question = _of_type(int, message["ask"])
            self._broadcast({"where": [rank, question]}, skip=rank)
        elif "here" in message:
            asker, question, _, state = _of_type(list, message["here"])
            self._check_state(state)
            found = self._members.get(_of_type(int, asker))
            if found is not None:
                self._send(found, {"here": [asker, _of_type(int, question), rank, state]})
        elif "bye" in message:
            member.left = True
            self._left.append(rank)
            self._broadcast({"left": rank}, skip=rank)
        else:
            raise ValueError(f"no such message: {sorted(message)}")

    def _is_rank(self, value: object) -> bool:
        return type(value) is int and 0 <= value < self._world_size

    def _event_of(self, rank: int, event: Any) -> dict[str, Any]:
        """A rank's event, if it has the form of one. That a rank ended is not for ranks to say."""
        kind, ranks, text = event["kind"], _of_type(list, event["ranks"]), event["text"]
        if kind not in ("raised", "gave up") or not all(map(self._is_rank, ranks)):
            raise ValueError("not an event")
        return {"kind": kind, "rank": rank, "ranks": ranks, "text": _of_type(str, text)}

    def _check_state(self, state: Any) -> None:
        """Hold a rank's account of itself against the form that `Watch` gives it."""
        for group, name, number, peers, seconds in _of_type(list, state["places"]):
            _of_type(str, group), _of_type(str, name), _of_type(int, number)
            _of_type((int, float), seconds)
            if not all(map(self._is_rank, _of_type(list, peers))):
                raise ValueError("not a rank")
        if state["last"] is not None:
            name, number, seconds = _of_type(list, state["last"])
            _of_type(str, name), _of_type(int, number), _of_type((int, float), seconds)

    def _drop(self, member: _Member) -> None:
        self._selector.unregister(member.connection)
        member.connection.close()
        self._strangers.pop(member, None)
        if member.rank is None:
            return
        del self._members[member.rank]
        if not member.left:
            self._announce({"kind": "ended", "rank": member.rank, "ranks": [member.rank]})

    def _announce(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        self._broadcast({"event": event})

    def _broadcast(self, message: dict[str, Any], skip: int | None = None) -> None:
        # Rank 0 last: when it learns of an event, and perhaps ends this process, all others know.
        for rank in sorted(self._members, reverse=True):
            if rank != skip:
                self._send(self._members[rank], message)

    def _send(self, member: _Member, message: dict[str, Any]) -> None:
        # A member that cannot be written to is dropped when its connection is read.
        with contextlib.suppress(OSError):
            member.connection.sendall(line(message))


def _of_type(types: type[Any] | tuple[type[Any], ...], value: Any) -> Any:
    """The value, which must be of the type; a boolean is no number here."""
    if not isinstance(value, types) or isinstance(value, bool):
        raise ValueError(f"a {type(value).__name__} in the wrong place")
    return value
