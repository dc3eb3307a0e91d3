# SPDX-License-Identifier: Apache-2.0
"""MessageServer: answers messages over Arrow Flight, to those who know the token.

A client keeps a stream open and sends one message after the other; each is answered by one, which
is what a handler returns, or ``"error"`` with what it raised. So a bad request costs its sender an
error, and the others nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import hmac
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from ...errors import MessageError
from ._arrow import COMMAND, arrow, arrow_flight, batch_of, stream_schema
from ._message import WireMessage
from ._presence import HERE, LEAVE, SILENT_SECONDS, PresentClients

Handler: TypeAlias = Callable[[WireMessage], WireMessage]

MAX_MESSAGE = 1 << 30
MIN_TOKEN = 16
CLIENT_HEADER = "graphshard-client"
_CLIENT = re.compile(r"[0-9a-f]{1,64}")

_log = logging.getLogger("graphshard.server")
_END_SECONDS = 1.0
_streams = threading.Condition()
_num_streams = 0
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
            is gone. The requests of a client have its id as ``sender``.
        silent_seconds: A client of which nothing was heard for so long is gone.

    Raises:
        ValueError: The token is too short.
        OSError: The address is in use, or none of this machine.
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
        flight = arrow_flight()
        location = flight.Location.for_grpc_tcp(host, port)
        atexit.unregister(wait_for_streams)
        atexit.register(wait_for_streams)
        tls: list[tuple[bytes, bytes]] = []
        if certificate is not None:
            location = flight.Location.for_grpc_tls(host, port)
            chain, key = (Path(path).read_bytes() for path in certificate)
            tls = [(chain, key)]
        self.clients = PresentClients(on_client_gone or (lambda client: None), silent_seconds)
        try:
            self._flight = _flight_server()(
                handlers, max_message, location, tls, token, self.clients
            )
        except arrow().ArrowException as error:
            self.clients.stop()
            raise OSError(
                f"no server can listen on {host}:{port} ({str(error).splitlines()[0]}); choose "
                "another port, or an address of this machine"
            ) from None
        for finalizer in list(getattr(weakref.finalize, "_registry", ())):
            alive = finalizer.peek()
            if alive is not None and alive[0] is self._flight:
                finalizer.atexit = False  # pyarrow's, which waits for streams without end
        self.host, self.port = host, self._flight.port

    def wait(self) -> None:
        """Wait until `stop` is called."""
        self._flight.wait()

    def stop(self, timeout: float = 1.0) -> None:
        """Stop answering; streams that are open end with an error at their other end."""
        self.clients.stop()
        self._flight.stopping.set()
        stopper = threading.Thread(target=self._flight.shutdown, daemon=True)
        stopper.start()
        stopper.join(timeout)
        if stopper.is_alive():
            # Clients keep streams open. To free the server would wait for them without end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._flight))


@cache
def _flight_server() -> Any:
    """The class of Flight's servers, made when the first one is."""
    flight = arrow_flight()
    factory_base: Any = flight.ServerMiddlewareFactory
    middleware_base: Any = flight.ServerMiddleware
    server_base: Any = flight.FlightServerBase

    class Caller(middleware_base):
        """Whose call it is."""

        def __init__(self, client: str) -> None:
            super().__init__()
            self.client = client

    class TokenCheck(factory_base):
        """Refuses calls without the token, before anything of them is read."""

        def __init__(self, token: str) -> None:
            super().__init__()
            self._expected = f"Bearer {token}".encode()

        def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> Caller:
            first = {key.lower(): str(values[0]) for key, values in headers.items() if values}
            given = first.get("authorization", "")
            found = given.encode("utf-8", "replace")
            if info.method != flight.FlightMethod.DO_EXCHANGE:
                _log.warning("refused a call of %s", info.method)
                raise flight.FlightUnauthorizedError(
                    "this server answers graphshard's messages alone"
                )
            if not hmac.compare_digest(found, self._expected):
                _log.warning(
                    "refused a call %s", "with a wrong token" if given else "without token"
                )
                raise flight.FlightUnauthenticatedError("wrong token, or none")
            client = first.get(CLIENT_HEADER, "")
            return Caller(client if _CLIENT.fullmatch(client) else "")

    class AnsweringServer(server_base):
        def __init__(
            self,
            handlers: Mapping[str, Handler],
            max_message: int,
            location: Any,
            tls: list[tuple[bytes, bytes]],
            token: str,
            clients: PresentClients,
        ) -> None:
            self.handlers, self.max_message = dict(handlers), max_message
            self.clients = clients
            self.stopping = threading.Event()
            super().__init__(
                location, tls_certificates=tls, middleware={"token": TokenCheck(token)}
            )

        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            peer = context.peer()
            if descriptor.command != COMMAND or reader.schema != stream_schema():
                _log.warning("refused a stream of another protocol from %s", peer)
                raise flight.FlightServerError(
                    f"this server speaks {COMMAND.decode()!r}; use graphshard of the same version"
                )
            client = context.get_middleware("token").client
            writer.begin(stream_schema())
            _count_streams(1)
            try:
                while not self.stopping.is_set():
                    try:
                        chunk = reader.read_chunk()
                    except (StopIteration, flight.FlightCancelledError, OSError):
                        return  # the client has ended the stream
                    try:
                        header, payload = self._answer(chunk, peer, client, writer).encode()
                    except MessageError as error:
                        header, payload = _error_message(error).encode()
                    writer.write_with_metadata(batch_of(payload), arrow().py_buffer(header))
            finally:
                self.clients.ended(client, writer)
                _count_streams(-1)

        def _answer(self, chunk: Any, peer: str, client: str, stream: object) -> WireMessage:
            op = "a message"
            try:
                request = replace(message_of(chunk, self.max_message), sender=client)
                op = request.op
                if op == HERE:
                    return self.clients.here(client, request.fields.get("label"), stream)
                if op == LEAVE:
                    return self.clients.leave(client)
                handler = self.handlers.get(op)
                if handler is None:
                    raise MessageError(f"unknown request {op!r:.80}")
                return handler(request)
            except EXPECTED as error:
                _log.warning("refused %.80s from %s: %.500s", op, peer, error)
                return _error_message(error)
            except Exception as error:
                _log.exception("failed at %.80s from %s", op, peer)
                return _error_message(error)

    return AnsweringServer


def _count_streams(change: int) -> None:
    global _num_streams
    with _streams:
        _num_streams += change
        _streams.notify_all()


def wait_for_streams(timeout: float = _END_SECONDS) -> bool:
    """Whether all streams of this process's servers end in time.

    At the end of the interpreter no thread may be within gRPC: on its way back it would abort.
    """
    with _streams:
        return _streams.wait_for(lambda: _num_streams == 0, timeout)


def exit_process(code: int) -> NoReturn:
    """End this process, as ``sys.exit``; without atexit's functions where streams are open.

    A client that lives on keeps the streams open that a stopped server has. Their threads cannot be
    ended, and would abort the interpreter's end.
    """
    if not wait_for_streams(0.0):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _error_message(error: Exception) -> WireMessage:
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind in EXPECTED]
    if isinstance(error, MessageError):
        kinds = ["MessageError"]
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    text = str(text)
    if not kinds:
        text = f"{type(error).__name__}: {text}"
    return WireMessage("error", {"kind": kinds[0] if kinds else "", "text": text[:10_000]})


def message_of(chunk: Any, max_message: int) -> WireMessage:
    """The message in a chunk of a stream.

    Raises:
        MessageError: It holds none, or one that is too long.
    """
    if chunk.data is None or chunk.app_metadata is None:
        raise MessageError("a message has a header and a payload")
    column = chunk.data.column(0)
    if len(column) > max_message:
        raise MessageError(
            f"a message has at most {max_message} bytes (got {len(column)}); send fewer rows at "
            "once"
        )
    payload = arrow().py_buffer(b"")
    if len(column):
        payload = column.buffers()[1].slice(column.offset, len(column))
    return WireMessage.decode(chunk.app_metadata.to_pybytes(), payload)
