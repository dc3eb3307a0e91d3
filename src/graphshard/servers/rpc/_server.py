# SPDX-License-Identifier: Apache-2.0
"""MessageServer: answers messages of those who know the token.

A client keeps streams open and sends one message after the other on each; each is answered by one,
which is what a handler returns, or ``"error"`` with what it raised. So a bad request costs its
sender an error, and the others nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from ...errors import MessageError
from ._acceptor import StreamAcceptor
from ._message import WireMessage
from ._presence import HERE, LEAVE, SILENT_SECONDS, GoneClientError, PresentClients
from ._stream import MessageStream

Handler: TypeAlias = Callable[[WireMessage], WireMessage]

MAX_MESSAGE = 1 << 30
MIN_TOKEN = 16
_MESSAGE_SECONDS = 60.0

_log = logging.getLogger("graphshard.server")
#: What handlers raise on purpose; the client raises the same. All else is a fault of the server.
EXPECTED: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    NotImplementedError,
    OSError,
    MemoryError,
)


class MessageServer:
    """A server of one process, that answers from now on, in threads, until `stop` is called.

    Args:
        handlers: By op.
        token: What clients must know; at least 16 characters.
        host: Address to listen on.
        port: 0 for a free one.
        certificate: Paths of a certificate chain and its key, PEM, for TLS; None for none.
        max_message: Most bytes of a message.
        on_client_gone: Called with the id of a client that had announced itself and has left, or
            is gone; see ``_presence.py``. The requests of a client have its id as ``sender``.
        silent_seconds: A client of which nothing was heard for so long is logged.

    Raises:
        ValueError: The token is too short.
        OSError: The address is in use, or none of this machine; or the certificate cannot be read.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None,
        max_message: int = MAX_MESSAGE,
        on_client_gone: Callable[[str], object] | None = None,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        if len(token) < MIN_TOKEN:
            raise ValueError(
                f"a token must have at least {MIN_TOKEN} characters (got {len(token)}); make one "
                "with secrets.token_hex()"
            )
        tls: ssl.SSLContext | None = None
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*certificate)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            raise OSError(
                f"no server can listen on {host}:{port} ({error.strerror or error}); choose "
                "another port, or an address of this machine"
            ) from None
        self.host, self.port = host, listener.getsockname()[1]
        self._handlers = dict(handlers)
        self.clients = PresentClients(on_client_gone or (lambda client: None), silent_seconds)
        self._streams: set[MessageStream] = set()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._acceptor = StreamAcceptor(listener, token, max_message, self._serve, tls)

    def wait(self) -> None:
        """Wait until `stop` is called."""
        self._stopped.wait()

    def stop(self) -> None:
        """Stop answering; streams that are open end with an error at their other end."""
        self.clients.stop()
        self._stopped.set()
        self._acceptor.stop()
        with self._lock:
            for stream in self._streams:
                stream.end()

    def _serve(self, stream: MessageStream, _: socket.socket, peer: str) -> None:
        """Answer what one connection asks, until it ends."""
        stream.set_timeout(_MESSAGE_SECONDS)
        with self._lock:
            self._streams.add(stream)
        try:
            while not self._stopped.is_set():
                self._answer_next(stream, peer)
        except (OSError, MessageError) as error:
            _log.debug("the stream of %s has ended: %s", peer, error)
        except Exception:
            _log.exception("the stream of %s has failed", peer)
        finally:
            with self._lock:
                self._streams.discard(stream)
            self.clients.ended(stream.client, stream)
            stream.close()

    def _answer_next(self, stream: MessageStream, peer: str) -> None:
        """Receive a request, and answer it."""
        try:
            request = replace(
                stream.receive(may_idle=True), sender=stream.client, max_answer=stream.most_sent
            )
        except MessageError as error:
            _log.warning("refused a message from %s: %.500s", peer, error)
            stream.send(_error_message(error))
            if not stream.is_in_step:
                raise
            return
        except TimeoutError:
            _log.warning("%s stopped in the midst of a message", peer)
            raise
        answer = self._answer(request, peer, stream)
        try:
            stream.send(answer)
        except MessageError as error:
            stream.send(_error_message(error))

    def _answer(self, request: WireMessage, peer: str, stream: MessageStream) -> WireMessage:
        try:
            if request.op == LEAVE:
                return self.clients.leave(stream.client)
            self.clients.check(stream.client)
            if request.op == HERE:
                stream.notice_dead_host()
                return self.clients.here(stream.client, request.fields.get("label"), stream)
            handler = self._handlers.get(request.op)
            if handler is None:
                raise MessageError(f"unknown request {request.op!r:.80}")
            answer = handler(request)
            self.clients.check(stream.client)  # it may be gone since
            return answer
        except GoneClientError as error:
            _log.warning("refused %.80s from %s, which is gone", request.op, peer)
            return _error_message(error)
        except EXPECTED as error:
            _log.warning("refused %.80s from %s: %.500s", request.op, peer, error)
            return _error_message(error)
        except Exception as error:
            _log.exception("failed at %.80s from %s", request.op, peer)
            return _error_message(error)


def _error_message(error: Exception) -> WireMessage:
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind in EXPECTED]
    if isinstance(error, MessageError | GoneClientError):
        kinds = [type(error).__name__]
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    text = str(text)
    if not kinds:
        text = f"{type(error).__name__}: {text}"
    return WireMessage("error", {"kind": kinds[0] if kinds else "", "text": text[:10_000]})
