# SPDX-License-Identifier: Apache-2.0
"""MonitorServer: a thread of rank 0 through which ranks learn of each other's failures.

Every rank holds one TCP connection to it, apart from those that carry tensors. The kernel closes
the connection when a process dies, however it dies, so a death is known at once and without
polling; keep-alive probes find hosts that vanish. The server puts all failures in one order and
sends each to every rank, so that all ranks name the same first cause. Messages are lines of JSON:

::

    rank -> server   {"token", "rank"}                       first line: authentication
                     {"token", "rank", "event"}              the same, of a process turned away
                     {"event": {...}}                        this rank failed, or gives up waiting
                     {"ask": n}                              which operation is every rank in?
                     {"here": [asker, n, rank, state]}       this rank's answer
                     {"bye": true}                           an orderly end
    server -> rank   {"event": {...}} | {"where": [asker, n]} | {"here": [asker, n, rank, state]}
                     {"left": rank}                          an orderly end of a rank

Any process that reaches the port may connect. Of an unauthenticated connection one short line is
read, for a limited time, and few such are kept; of others each line must have a form above. What
does not ends the connection on which it came, and nothing else.
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

from .address import notice_dead_host

_MAX_LINE = 1 << 20
_MAX_FIRST_LINE = 1 << 12
_MAX_UNAUTHENTICATED = 64
_AUTHENTICATION_SECONDS = 10.0
_SEND_SECONDS = 2.0
_JOIN_SECONDS = 5.0


class Lines:
    """Cuts a stream of bytes into JSON messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, max_line: int = _MAX_LINE) -> list[dict[str, Any]]:
        """Messages that are complete now; ValueError if a line is no JSON object, or too long."""
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


def send_event(address: tuple[str, int], token: str, rank: int, event: dict[str, Any]) -> None:
    """Announce an event without joining, as ``rank``; nothing happens if no server is there."""
    with contextlib.suppress(OSError), socket.create_connection(address, _JOIN_SECONDS) as server:
        server.sendall(line({"token": token, "rank": rank, "event": event}))
        server.recv(1)  # the server closes the connection once it has passed it on


@dataclass(eq=False)
class _Connection:
    tcp: socket.socket
    deadline: float  # for its token
    rank: int | None = None
    left: bool = False
    lines: Lines = field(default_factory=Lines)


class MonitorServer:
    """Serves until `close`, and then closes the listener; one daemon thread.

    For ``event_seconds`` it accepts events of processes that were turned away.
    """

    def __init__(
        self, listener: socket.socket, token: str, world_size: int, event_seconds: float = 0.0
    ) -> None:
        self._token = token
        self._event_deadline = time.monotonic() + event_seconds
        self._world_size = world_size
        self._ranks: dict[int, _Connection] = {}
        self._unauthenticated: dict[_Connection, None] = {}  # oldest first
        self._events: list[dict[str, Any]] = []
        self._left: list[int] = []
        self._listener = listener
        self._listener.setblocking(False)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(self._woken, selectors.EVENT_READ, "wake")
        self._thread = threading.Thread(target=self._serve, name="graphshard-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the ranks that rank 0 ends in good order, and stop."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(_JOIN_SECONDS)
        self._wake.close()

    def close_inherited(self) -> None:
        """Close the inherited descriptors in a forked child, where the thread does not run."""
        for connection in [*self._ranks.values(), *self._unauthenticated]:
            connection.tcp.close()
        self._listener.close()
        self._wake.close()
        self._woken.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0 if self._unauthenticated else None):
                if key.data == "wake":
                    self._stop()
                    return
                if key.data == "listener":
                    self._accept()
                elif key.data.tcp.fileno() >= 0:  # not dropped since
                    self._read(key.data)
            while self._unauthenticated:
                oldest = next(iter(self._unauthenticated))
                full = len(self._unauthenticated) > _MAX_UNAUTHENTICATED + self._world_size
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
            accepted, _ = self._listener.accept()
        except OSError:
            time.sleep(0.01)  # there may be no descriptor to spare, for as long as it lasts
            return
        accepted.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):
            notice_dead_host(accepted)
        connection = _Connection(accepted, time.monotonic() + _AUTHENTICATION_SECONDS)
        self._unauthenticated[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        most = _MAX_FIRST_LINE if connection.rank is None else _MAX_LINE
        try:
            data = connection.tcp.recv(min(most, 1 << 16))
            goes_on = bool(data)
            for message in connection.lines.feed(data, most):
                if connection.rank is not None:
                    self._handle(connection, connection.rank, message)
                elif not self._admit(connection, message):
                    goes_on = False
                    break
        except Exception:  # whatever came, it ends this connection alone
            goes_on = False
        if not goes_on:
            self._drop(connection)

    def _admit(self, connection: _Connection, message: dict[str, Any]) -> bool:
        token = _of_type(str, message["token"]).encode(errors="replace")
        rank = _of_type(int, message["rank"])
        if not hmac.compare_digest(token, self._token.encode()) or not self._is_rank(rank):
            return False
        if "event" in message:
            # Two processes came as one rank while ranks may still come: which is the right one?
            # Later than that the second one is another job's.
            if time.monotonic() < self._event_deadline:
                self._announce(self._event_of(rank, message["event"]))
            return False
        if rank in self._ranks:
            return False
        connection.rank = rank
        del self._unauthenticated[connection]
        self._ranks[rank] = connection
        for event in self._events:
            self._send(connection, {"event": event})
        for left in self._left:
            self._send(connection, {"left": left})
        return True

    def _handle(self, connection: _Connection, rank: int, message: dict[str, Any]) -> None:
        if "event" in message:
            self._announce(self._event_of(rank, message["event"]))
        elif "ask" in message:
            question = _of_type(int, message["ask"])
            self._broadcast({"where": [rank, question]}, skip=rank)
        elif "here" in message:
            asker, question, _, state = _of_type(list, message["here"])
            self._check_state(state)
            asking = self._ranks.get(_of_type(int, asker))
            if asking is not None:
                self._send(asking, {"here": [asker, _of_type(int, question), rank, state]})
        elif "bye" in message:
            connection.left = True
            self._left.append(rank)
            self._broadcast({"left": rank}, skip=rank)
        else:
            raise ValueError(f"no such message: {sorted(message)}")

    def _is_rank(self, value: object) -> bool:
        return type(value) is int and 0 <= value < self._world_size

    def _event_of(self, rank: int, event: Any) -> dict[str, Any]:
        """A rank's event, if it has the form of one; that a rank ended only the server says."""
        kind, ranks, text = event["kind"], _of_type(list, event["ranks"]), event["text"]
        if kind not in ("raised", "gave up") or not all(map(self._is_rank, ranks)):
            raise ValueError("not an event")
        return {"kind": kind, "rank": rank, "ranks": ranks, "text": _of_type(str, text)}

    def _check_state(self, state: Any) -> None:
        """Check that a rank's answer has the form that `FailureMonitor` gives it."""
        for group, name, number, peers, seconds in _of_type(list, state["operations"]):
            _of_type(str, group), _of_type(str, name), _of_type(int, number)
            _of_type((int, float), seconds)
            if not all(map(self._is_rank, _of_type(list, peers))):
                raise ValueError("not a rank")
        if state["last"] is not None:
            name, number, seconds = _of_type(list, state["last"])
            _of_type(str, name), _of_type(int, number), _of_type((int, float), seconds)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.tcp)
        connection.tcp.close()
        self._unauthenticated.pop(connection, None)
        if connection.rank is None:
            return
        del self._ranks[connection.rank]
        if not connection.left:
            self._announce({"kind": "ended", "rank": connection.rank, "ranks": [connection.rank]})

    def _announce(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        self._broadcast({"event": event})

    def _broadcast(self, message: dict[str, Any], skip: int | None = None) -> None:
        # Rank 0 last: when it learns of an event, and perhaps ends this process, all others know.
        for rank in sorted(self._ranks, reverse=True):
            if rank != skip:
                self._send(self._ranks[rank], message)

    def _send(self, connection: _Connection, message: dict[str, Any]) -> None:
        # A connection that cannot be written to is dropped when it is read.
        with contextlib.suppress(OSError):
            connection.tcp.sendall(line(message))


def _of_type(types: type[Any] | tuple[type[Any], ...], value: Any) -> Any:
    """The value, which must be of the type; a boolean is no number here."""
    if not isinstance(value, types) or isinstance(value, bool):
        raise ValueError(f"a {type(value).__name__} in the wrong place")
    return value
