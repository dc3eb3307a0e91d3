# SPDX-License-Identifier: Apache-2.0
"""StreamAcceptor: takes connections, and hands on those whose other ends know the token.

Anybody who reaches the port may connect, so what costs a connection anything is bounded before its
token is known. Each has one deadline for all that it must say, however slowly it says it. Few are
waited for at a time; one more ends the oldest of the address that has the most. So who opens many
keeps out those of its own address alone, and those only if it opens that many within the
milliseconds that a client needs.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ...errors import MessageError
from ._stream import MessageStream, TokenError, end_socket, prepare

PROOF_SECONDS = 10.0
_MOST_UNPROVEN = 128
_ACCEPT_SECONDS = 1.0
_LOG_SECONDS, _MOST_LOGGED = 60.0, 20

_log = logging.getLogger("graphshard.server")

StreamTaker: TypeAlias = Callable[[MessageStream, socket.socket, str], None]
"""Called with a stream, its socket, and the address of its other end."""


@dataclass(eq=False)
class _Unproven:
    """A connection that has yet to prove that it knows the token."""

    connected: socket.socket
    host: str
    is_ended: bool = False


class StreamAcceptor:
    """Takes connections in threads, from now on, until `stop` is called.

    Args:
        listener: The listening socket, which becomes this object's.
        token: What clients must know.
        max_message: Most bytes of a message that they may send.
        take: Called in a thread of its own for each client that knows the token; it closes the
            stream.
        tls: Of the server, for TLS.
        proof_seconds: What a client has to prove that it knows the token.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        max_message: int,
        take: StreamTaker,
        tls: ssl.SSLContext | None = None,
        proof_seconds: float = PROOF_SECONDS,
    ) -> None:
        self._listener, self._token, self._max_message = listener, token, max_message
        self._take, self._tls, self._proof_seconds = take, tls, proof_seconds
        self._unproven: dict[_Unproven, None] = {}  # oldest first
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._refusals = _RefusalLog()
        listener.settimeout(_ACCEPT_SECONDS)
        self._thread = threading.Thread(target=self._run, name="graphshard-accept", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more, close the listener, and end those that have yet to prove who they are."""
        self._stopped.set()
        end_socket(self._listener)  # who waits for a client wakes up, on Linux
        self._listener.close()
        with self._lock:
            for unproven in self._unproven:
                end_socket(unproven.connected)
        self._thread.join(2 * _ACCEPT_SECONDS)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                connected, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._stopped.is_set():  # as when no more files can be opened
                    _log.error("cannot take a connection: %s", error)
                    time.sleep(0.1)
                continue
            unproven = _Unproven(connected, str(address[0]))
            peer = f"{address[0]}:{address[1]}"
            self._add(unproven)
            try:
                threading.Thread(
                    target=self._serve,
                    args=(unproven, peer),
                    name=f"graphshard-stream-{peer}",
                    daemon=True,
                ).start()
            except RuntimeError as error:  # no more threads can be started
                _log.error("cannot serve %s: %s", peer, error)
                self._remove(unproven)
                connected.close()

    def _add(self, unproven: _Unproven) -> None:
        """Wait for one more; end another one if they are too many."""
        with self._lock:
            self._unproven[unproven] = None
            waiting = [each for each in self._unproven if not each.is_ended]
            if len(waiting) <= _MOST_UNPROVEN:
                return
            ((most, _),) = Counter(each.host for each in waiting).most_common(1)
            oldest = next(each for each in waiting if each.host == most)
            oldest.is_ended = True
            end_socket(oldest.connected)

    def _remove(self, unproven: _Unproven) -> None:
        with self._lock:
            del self._unproven[unproven]

    def _serve(self, unproven: _Unproven, peer: str) -> None:
        try:
            stream = self._proven(unproven, peer)
        finally:
            self._remove(unproven)
        if stream is not None:
            self._take(stream, unproven.connected, peer)

    def _proven(self, unproven: _Unproven, peer: str) -> MessageStream | None:
        deadline = time.monotonic() + self._proof_seconds
        try:
            prepare(unproven.connected, self._proof_seconds)
            if self._tls is not None:
                with self._lock:  # it can be ended at any time, and is another object then
                    unproven.connected = self._tls.wrap_socket(
                        unproven.connected, server_side=True, do_handshake_on_connect=False
                    )
                    wrapped = unproven.connected
                wrapped.do_handshake()  # all of it within the socket's timeout
            stream = MessageStream(unproven.connected, self._max_message)
            stream.verify(self._token, deadline)
        except (OSError, MessageError, TokenError, ValueError) as error:
            why = str(error)
            if unproven.is_ended:
                why = f"{_MOST_UNPROVEN} others have yet to prove who they are"
            if not self._stopped.is_set():
                self._refusals.add(peer, why)
            unproven.connected.close()
            return None
        return stream


class _RefusalLog:
    """Says who was refused; of very many, so many a minute, and how many the others were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin, self._count = 0.0, 0

    def add(self, peer: str, why: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._begin > _LOG_SECONDS:
                unsaid = self._count - _MOST_LOGGED
                if unsaid > 0:
                    _log.warning("refused %d more connections", unsaid)
                self._begin, self._count = now, 0
            self._count += 1
            if self._count <= _MOST_LOGGED:
                _log.warning("refused %s: %s", peer, why)
