# SPDX-License-Identifier: Apache-2.0
"""Hub: rank 0's switchboard, through which ranks learn of each other's failures.

Every rank holds one TCP connection to it, apart from those that carry tensors. The kernel closes
the connection when a process dies, however it dies, so a death is known at once and without
polling; keep-alive probes find hosts that vanish. The hub puts all failures in one order and sends
each to every rank, so that all ranks name the same first cause. Lines of JSON are all that travels:

::

    member -> hub   {"token", "rank"}                       who I am; first line
                    {"event": {...}}                        I failed, or give up on somebody
                    {"ask": n}                              where is everyone?
                    {"here": [asker, n, rank, state]}       where I am
                    {"bye": true}                           an orderly end
    hub -> member   {"event": {...}} | {"where": [asker, n]} | {"here": [asker, n, rank, state]}
                    {"left": rank}                          an orderly end of a rank
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

_MAX_LINE = 1 << 20
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

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Messages that are complete now.

        Raises:
            ValueError: Something else than lines of JSON objects.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise ValueError("a line is too long")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line is not an object")
        return messages


def line(message: dict[str, Any]) -> bytes:
    """The form in which a message travels."""
    return json.dumps(message).encode() + b"\n"


@dataclass(eq=False)
class _Member:
    connection: socket.socket
    rank: int | None = None
    left: bool = False
    lines: Lines = field(default_factory=Lines)


class Hub:
    """Serves until `close`; one daemon thread.

    Args:
        local: Listen on the loopback interface only, else on all. The port is any free one.
        token: What a member must know to be heard.
        world_size: Number of ranks.
    """

    def __init__(self, local: bool, token: str, world_size: int) -> None:
        self._token = token
        self._world_size = world_size
        self._members: dict[int, _Member] = {}
        self._events: list[dict[str, Any]] = []
        self._left: list[int] = []
        self._selector = selectors.DefaultSelector()
        if local:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=world_size)
        elif socket.has_dualstack_ipv6():
            self._listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=world_size, dualstack_ipv6=True
            )
        else:
            self._listener = socket.create_server(("", 0), backlog=world_size)
        self.port: int = self._listener.getsockname()[1]
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
        for member in self._members.values():
            member.connection.close()
        self._listener.close()
        self._wake.close()
        self._woken.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data == "wake":
                    self._stop()
                    return
                if key.data == "listener":
                    self._accept()
                else:
                    self._read(key.data)

    def _stop(self) -> None:
        self._broadcast({"left": 0})
        for key in list(self._selector.get_map().values()):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            sock.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(_SEND_SECONDS)
            keep_alive(connection)
            self._selector.register(connection, selectors.EVENT_READ, _Member(connection))

    def _read(self, member: _Member) -> None:
        try:
            data = member.connection.recv(65536)
            messages = member.lines.feed(data)
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            if member.rank is None:
                if not self._admit(member, message):
                    data = b""
                    break
            else:
                self._handle(member, message)
        if not data:
            self._drop(member)

    def _admit(self, member: _Member, message: dict[str, Any]) -> bool:
        rank = message.get("rank")
        if not hmac.compare_digest(str(message.get("token")).encode(), self._token.encode()):
            return False
        if not isinstance(rank, int) or rank in self._members or not 0 <= rank < self._world_size:
            return False
        member.rank = rank
        self._members[rank] = member
        for event in self._events:
            self._send(member, {"event": event})
        for left in self._left:
            self._send(member, {"left": left})
        return True

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        assert member.rank is not None
        if "event" in message:
            self._announce(message["event"])
        elif "ask" in message:
            self._broadcast({"where": [member.rank, message["ask"]]}, skip=member.rank)
        elif "here" in message:
            asker = self._members.get(message["here"][0])
            if asker is not None:
                self._send(asker, message)
        elif "bye" in message:
            member.left = True
            self._left.append(member.rank)
            self._broadcast({"left": member.rank}, skip=member.rank)

    def _drop(self, member: _Member) -> None:
        self._selector.unregister(member.connection)
        member.connection.close()
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
