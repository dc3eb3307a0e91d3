# SPDX-License-Identifier: Apache-2.0
"""How servers and trainers talk: a server that answers messages, a client of one, who is there.

`MessageServer` answers messages of those who know the token of the job. A client keeps streams open
and sends one message after the other on each; each is answered by one, which is what a handler
returns, or ``"error"`` with what it raised. So a bad request costs its sender an error, and the
others nothing.

`PresentClients` is how a server learns that a client is there, has left, or is gone. A client keeps
one stream for this alone and says on it, every few seconds, that it is there. It is
gone when that stream ends without a word. The kernel ends it when the process has ended, however it
ended, and about a minute after the last sign of a host that lost power or cannot be reached.

Silence alone means nothing: a process that is stopped, or that computes for minutes in a function
that holds the interpreter, goes on with what it has. It is logged, and nothing is released.

What a client had is released when it is gone. If it speaks again, as after its network was away, it
gets a `GoneClientError` for whatever it asks, because its tensors may be deleted by then.

`MessageClient` sends requests to one server, several at a time, each bounded by a timeout.

[Note: in the caller's thread]
    A thread that sleeps takes some tenths of a millisecond to wake up. Who waits for an answer at
    once sends and receives itself (`MessageClient.begin`), so that no other thread has to: lookups
    of two trainers on two hosts take 0.83 of the time that they take through threads. What is to
    arrive while its caller computes (`MessageClient.start`) needs a thread, as the server does not
    wait for ever until it is read.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import ssl
import stat
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from ..comm.group import close_in_children
from ..errors import MessageError, ServerError
from ._message_stream import MessageStream, StreamAcceptor, TokenError, WireMessage, prepare

_log = logging.getLogger("graphshard.server")
TOKEN, TOKEN_FILE = "GRAPHSHARD_TOKEN", "GRAPHSHARD_TOKEN_FILE"


def read_token() -> str:
    """The token, from the file that ``GRAPHSHARD_TOKEN_FILE`` names, or ``GRAPHSHARD_TOKEN``.

    Raises:
        ValueError: There is none, or others may read the file.
    """
    path = os.environ.get(TOKEN_FILE)
    if path is None:
        if TOKEN not in os.environ:
            raise ValueError(f"there is no token; set {TOKEN_FILE} to a file that holds one")
        return os.environ[TOKEN]
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise ValueError(
            f"{path} must be readable by its owner alone (got mode {mode:o}); chmod 600 it, and "
            "make another token"
        )
    return Path(path).read_text(encoding="utf-8").strip()


# ---------------------------------------------------------------------------- who is there

BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
HERE, LEAVE = "here", "leave"
_MAX_LABEL = 200


class GoneClientError(Exception):
    """A client asks for something after what it had was released."""


@dataclass
class _Client:
    label: str
    heard: float
    stream: object
    is_silent: bool = False


class PresentClients:
    """The clients of a server.

    Args:
        on_gone: Called with the id of a client that has left or is gone; to release what it had.
        silent_seconds: After how long without a word it is logged that a client is silent.
    """

    def __init__(
        self, on_gone: Callable[[str], object], silent_seconds: float = SILENT_SECONDS
    ) -> None:
        self._on_gone, self._silent_seconds = on_gone, silent_seconds
        self._clients: dict[str, _Client] = {}
        self._gone: dict[str, str] = {}  # and why; ids are random and never used again
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._watch = threading.Thread(target=self._run, name="graphshard-presence", daemon=True)
        self._watch.start()

    def labels(self) -> list[str]:
        """Who is there."""
        with self._lock:
            return sorted(client.label for client in self._clients.values())

    def here(self, client: str, label: Any, stream: object) -> WireMessage:
        """A client says that it is there, on a stream of its own; MessageError if not who."""
        is_label = isinstance(label, str) and 0 < len(label) <= _MAX_LABEL and label.isprintable()
        if not client or not is_label:
            raise MessageError("a client that announces itself has an id and a label")
        with self._lock:
            before = self._clients.get(client)
            self._clients[client] = _Client(label, time.monotonic(), stream)
        if before is None:
            _log.info("%s has come", label)
        elif before.is_silent:
            _log.info("%s is heard again", label)
        return WireMessage("ok")

    def check(self, client: str) -> None:
        """Raise GoneClientError if a client is gone, and release what it was given since."""
        why = self._gone.get(client)
        if why is not None:
            self._on_gone(client)
            raise GoneClientError(why)

    def leave(self, client: str) -> WireMessage:
        """A client says that it leaves."""
        self._remove(client, None)
        return WireMessage("ok")

    def ended(self, client: str, stream: object) -> None:
        """A stream has ended; if it was the one of a client's presence, the client is gone."""
        with self._lock:
            present = self._clients.get(client)
            if present is None or present.stream is not stream:
                return
        self._remove(client, "its connection ended without a word")

    def stop(self) -> None:
        """Look no longer."""
        self._stopped.set()

    def _remove(self, client: str, why: str | None) -> None:
        with self._lock:
            left = self._clients.pop(client, None)
            if left is None or self._stopped.is_set():
                return
            if why is not None:
                self._gone[client] = (
                    f"has released what {left.label} held, because {why}; its tensors may be gone "
                    "or changed by others: start the job again from its last checkpoint"
                )
        if why is None:
            _log.info("%s has left", left.label)
        else:
            _log.warning("%s is gone: %s", left.label, why)
        self._on_gone(client)

    def _run(self) -> None:
        while not self._stopped.wait(min(BEAT_SECONDS, self._silent_seconds / 4)):
            late = time.monotonic() - self._silent_seconds
            with self._lock:
                clients = self._clients.values()
                silent = [c for c in clients if c.heard < late and not c.is_silent]
                for client in silent:
                    client.is_silent = True
            for client in silent:
                _log.warning(
                    "nothing was heard of %s for %g s; what it holds stays while its connection "
                    "lasts",
                    client.label,
                    self._silent_seconds,
                )


# ---------------------------------------------------------------------------- server

Handler: TypeAlias = Callable[[WireMessage], WireMessage]

MAX_MESSAGE = 1 << 30
MIN_TOKEN = 16
_MESSAGE_SECONDS = 60.0

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
        port: 0 for a free one.
        certificate: Paths of a certificate chain and its key, PEM, for TLS; None for none.
        on_client_gone: Called with the id of a client that had announced itself and has left, or
            is gone. The requests of a client have its id as ``sender``.
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
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    if not kinds:
        text = f"{type(error).__name__}: {text}"
    return WireMessage("error", {"kind": kinds[0] if kinds else "", "text": text[:10_000]})


# ---------------------------------------------------------------------------- client

_KINDS = {kind.__name__: kind for kind in (*EXPECTED, MessageError)}
_GONE = GoneClientError.__name__
_RETRY_SECONDS = 0.2
_END_SECONDS = 5.0
_MOST_BEGUN = 1 << 18  # bytes of a request that its caller sends itself
_open: weakref.WeakSet[MessageClient] = weakref.WeakSet()
_leaving: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class MessageClient:
    """A server, as its clients see it. Safe to use from several threads, not across a fork.

    Args:
        address: ``host:port``.
        host: Number of the host, for errors.
        timeout: Longest wait for an answer, in seconds.
        certificates: Path of the PEM certificates that the server's must be signed with, for TLS.
        streams: Most requests at a time.

    Raises:
        OSError: The certificates cannot be read.
    """

    def __init__(
        self,
        address: str,
        token: str,
        host: int = 0,
        timeout: float = 60.0,
        certificates: str | os.PathLike[str] | None = None,
        streams: int = 4,
    ) -> None:
        self.address, self.host, self.timeout = address, host, timeout
        tls = None if certificates is None else ssl.create_default_context(cafile=certificates)
        name, _, port = address.rpartition(":")
        self._server = _Server(name.strip("[]"), int(port), token, secrets.token_hex(8), tls)
        self._queue: SimpleQueue[_PendingCall | None] = SimpleQueue()
        self._lock, self._workers, self._most = threading.RLock(), list[_CallStream](), streams
        self._num_open = 0
        self._pid = os.getpid()
        self._beats: list[_Beat] = []
        self._idle: list[_Stream] = []
        self._own: weakref.WeakSet[_Stream] = weakref.WeakSet()  # that callers use themselves
        self._close = weakref.finalize(
            self, _close, self._queue, self._workers, self._own, self._idle, self._beats, self._pid
        )
        self._close.atexit = False
        if not _open:
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        close_in_children(_close_inherited)  # else they keep this process's tensors, too
        _open.add(self)

    def call(self, request: WireMessage, timeout: float | None = None) -> WireMessage:
        """The answer to a request.

        Raises:
            ServerError: The server is gone, refuses, failed, or did not answer in time.
            Exception: What the server's handler raised: `ValueError`, `IndexError`, ...
        """
        return self.begin(request, timeout).result()

    def begin(self, request: WireMessage, timeout: float | None = None) -> PendingAnswer:
        """Send a request, whose answer ``result()`` receives: for who waits for it soon.

        Large requests are sent as by `start`. See [Note: in the caller's thread].
        """
        if sum(tensor.numel() * tensor.element_size() for tensor in request.tensors) > _MOST_BEGUN:
            return self.start(request, timeout)
        with self._lock:
            self._check_open()
            stream = self._idle.pop() if self._idle else None
            if stream is None and len(self._own) < self._most:
                stream = _Stream(self._server)
                self._own.add(stream)
        if stream is None:
            return self.start(request, timeout)
        seconds = self.timeout if timeout is None else timeout
        return PendingAnswer(self, _OwnCall(request, seconds, stream, self._idle))

    def start(self, request: WireMessage, timeout: float | None = None) -> PendingAnswer:
        """Send a request, and go on; at most as many as there are streams travel at a time."""
        call = _PendingCall(request, self.timeout if timeout is None else timeout)
        with self._lock:
            self._check_open()
            self._num_open += 1
            if len(self._workers) < min(self._most, self._num_open):
                self._workers.append(_CallStream(self._server, self._queue))
            self._queue.put(call)
        call.answer.add_done_callback(self._ended)
        return PendingAnswer(self, call)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a connection does not outlive a fork; make another one")
        if not self._close.alive:
            raise RuntimeError("the connection is closed; make another one")
        self.check_present()

    def check_present(self) -> None:
        """Raise ServerError if the server has released what this client had asked for.

        To be called before memory is used in place.
        """
        for beat in self._beats:
            if beat.gone:
                raise self.error(beat.gone)

    def _ended(self, _: object) -> None:
        with self._lock:
            self._num_open -= 1

    def announce(self, label: str) -> None:
        """Tell the server who this is, now and every few seconds, so that it notices the end.

        What `HostTables.create` was asked for over this connection is released then. If that was a
        mistake, each request, and `check_present`, raises from then on.

        Args:
            label: For the server's log: ``"rank 3 (process 17 of host-a)"``.

        Raises:
            ServerError: The server does not answer.
        """
        if self._beats:
            return
        beat = _Beat(self._server, label)
        self._beats.append(beat)
        if not beat.heard.wait(self.timeout):
            raise self.error(f"did not answer within {self.timeout:g} s")

    def wait_until_up(self, timeout: float) -> None:
        """Ask until the server answers.

        Raises:
            ServerError: It has not within ``timeout`` seconds, or refuses the token.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.call(
                    WireMessage("ping"), max(0.1, min(self.timeout, deadline - time.monotonic()))
                )
                return
            except ServerError as error:
                if isinstance(error.__cause__, TokenError):
                    raise
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise self.error(
                        f"cannot be reached within {timeout:g} s ({_reason(error.__cause__)}); "
                        "is it started, and is its address right?",
                        error.__cause__,
                    ) from None
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """End the streams; what still waits for an answer gets an error."""
        self._close()

    def error(self, what: str, cause: BaseException | None = None) -> ServerError:
        """An error that names the server."""
        error = ServerError(
            f"the graph server of host {self.host} ({self.address}) {what}", self.host
        )
        error.__cause__ = cause
        return error


class PendingAnswer:
    """The answer to a request that was sent."""

    def __init__(self, client: MessageClient, call: _PendingCall | _OwnCall) -> None:
        self._client, self._call = client, call

    def result(self) -> WireMessage:
        """Wait for it; raises as `MessageClient.call`."""
        call, client = self._call, self._client
        try:
            answer = call.wait()
        except (FutureTimeout, TimeoutError):
            call.cancel()
            raise client.error(
                f"did not answer {call.request.op!r} within {call.timeout:g} s; is the host up, "
                "and has the server memory left?"
            ) from None
        except TokenError as error:
            raise client.error(
                "refused the token; the servers and all trainers of a job need the same one", error
            ) from error
        except OSError as error:
            raise client.error(f"is gone ({_reason(error)})", error) from error
        if answer.op != "error":
            return answer
        kind, text = str(answer.fields.get("kind", "")), str(answer.fields.get("text", ""))
        if kind in _KINDS:
            raise _KINDS[kind](text)
        raise client.error(text if kind == _GONE else f"failed: {text}")


class _PendingCall:
    """A request, and its answer to come."""

    def __init__(self, request: WireMessage, timeout: float) -> None:
        self.request, self.timeout = request, timeout
        self.deadline = time.monotonic() + timeout
        self.answer: Future[WireMessage] = Future()
        self.stream: _CallStream | None = None

    def wait(self) -> WireMessage:
        return self.answer.result(max(0.0, self.deadline - time.monotonic()))

    def cancel(self) -> None:
        self.answer.cancel()
        if self.stream is not None:
            self.stream.cancel(self)


class _OwnCall:
    """A request that its caller sends, and whose answer it receives, over a stream of its own."""

    def __init__(
        self, request: WireMessage, timeout: float, stream: _Stream, idle: list[_Stream]
    ) -> None:
        self.request, self.timeout = request, timeout
        self._deadline = time.monotonic() + timeout
        self._stream, self._idle = stream, idle
        self._answer: WireMessage | Exception | None = None
        try:
            stream.send(request, timeout)
        except Exception as error:
            self._end(error)

    def wait(self) -> WireMessage:
        if self._answer is None:
            try:
                self._end(self._stream.receive(self._deadline))
            except Exception as error:
                self._end(error)
        if isinstance(self._answer, Exception):
            raise self._answer
        assert self._answer is not None
        return self._answer

    def cancel(self) -> None:
        return  # an exchange that fails ends its connection

    def _end(self, answer: WireMessage | Exception) -> None:
        self._answer = answer
        self._idle.append(self._stream)

    def __del__(self) -> None:
        if self._answer is None:  # and will not be waited for
            self._stream.close()
            self._idle.append(self._stream)


@dataclass(frozen=True)
class _Server:
    """Where a server is, and how a client connects to it."""

    name: str
    port: int
    token: str
    client: str
    tls: ssl.SSLContext | None

    def connect(self, deadline: float) -> MessageStream:
        """A stream whose two ends know the token, by a time of `time.monotonic`."""
        connected = connect_by(self.name, self.port, deadline)
        try:
            if self.tls is not None:  # all of whose beginning is within the socket's timeout
                connected = self.tls.wrap_socket(connected, server_hostname=self.name)
            stream = MessageStream(connected, MAX_MESSAGE)
            stream.prove(self.token, self.client, deadline)
        except BaseException:
            connected.close()
            raise
        return stream


def connect_by(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address of a host that answers in time; OSError if none does."""
    unreachable = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not connect in time")
        connected = socket.socket(family, kind, protocol)
        try:
            prepare(connected, left)
            connected.connect(address)
            connected.settimeout(max(0.001, deadline - time.monotonic()))
        except OSError as error:
            connected.close()
            unreachable = error
            continue
        except BaseException:
            connected.close()
            raise
        return connected
    raise unreachable


class _Stream:
    """A stream to the server, made for its first request and again after an error."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._connected: MessageStream | None = None

    def send(self, request: WireMessage, timeout: float) -> None:
        """Send a request; the timeout is for connecting, proving and sending together."""
        deadline = time.monotonic() + timeout
        try:
            if self._connected is None:
                self._connected = self._server.connect(deadline)
            self._connected.send(request, deadline)
        except BaseException:
            self.close()
            raise

    def receive(self, deadline: float | None) -> WireMessage:
        """The answer; without a deadline, whenever it comes while the connection lasts."""
        try:
            if self._connected is None:
                raise ConnectionResetError("the connection was closed")
            return self._connected.receive(may_idle=deadline is None, deadline=deadline)
        except BaseException:
            self.close()
            raise

    def end(self) -> None:
        """Give up the exchange that runs in another thread."""
        if (connected := self._connected) is not None:
            connected.end()

    def close(self) -> None:
        """Free the connection; the next exchange makes another one."""
        connected, self._connected = self._connected, None
        if connected is not None:
            connected.close()

    def close_inherited(self) -> None:
        """Free a forked child's copy of the connection."""
        if (connected := self._connected) is not None:
            connected.close_inherited()


class _CallStream:
    """A thread that sends the requests of a queue over a stream of its own."""

    def __init__(self, server: _Server, queue: SimpleQueue[_PendingCall | None]) -> None:
        self._stream, self._queue = _Stream(server), queue
        self._current: _PendingCall | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="graphshard-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                self._stream.close()
                return
            if not call.answer.set_running_or_notify_cancel():
                continue
            call.stream = self
            with self._lock:
                self._current = call
            answer: WireMessage | BaseException
            deadline = time.monotonic() + call.timeout + _RETRY_SECONDS  # who waits is told first
            try:
                self._stream.send(call.request, call.timeout)
                answer = self._stream.receive(deadline)
            except BaseException as error:  # for those who wait
                answer = error
            with self._lock:
                self._current = None
            if isinstance(answer, BaseException):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)
            del call, answer

    def cancel(self, call: _PendingCall | None = None) -> None:
        """Give up the exchange that runs for a call; None for any."""
        with self._lock:
            if self._current is not None and call in (None, self._current):
                self._stream.end()


class _Beat:
    """A thread that tells the server that this process is there, and at the end that it leaves.

    It waits for answers as long as the connection lasts: whichever of the two processes is stopped
    meanwhile, the server would take the end of this connection for the end of the client.

    Attributes:
        heard: Set once the server has answered.
        gone: What the server says once it has given this client up; the thread ends then.
    """

    def __init__(self, server: _Server, label: str) -> None:
        self._stream, self._label = _Stream(server), label
        self.gone = ""
        self.heard, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphshard-beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        _leaving.add(self._thread)
        self._stopped.set()

    def _run(self) -> None:
        while True:
            word = LEAVE if self._stopped.is_set() else HERE
            with contextlib.suppress(OSError, MessageError, TokenError):
                self._stream.send(WireMessage(word, {"label": self._label}), SILENT_SECONDS)
                answer = self._stream.receive(None)
                if answer.fields.get("kind") == _GONE:
                    self.gone = str(answer.fields.get("text"))
                self.heard.set()
            if word == LEAVE or self.gone:
                self._stream.close()
                return
            self._stopped.wait(BEAT_SECONDS)


def _reason(error: BaseException | None) -> str:
    """What went wrong, in a few words."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)[:300]


def _close_inherited() -> None:
    for client in list(_open):
        threads: list[_CallStream | _Beat] = [*client._workers, *client._beats]
        for stream in (*client._own, *(thread._stream for thread in threads)):
            stream.close_inherited()


def _close(
    queue: SimpleQueue[_PendingCall | None],
    workers: list[_CallStream],
    own: weakref.WeakSet[_Stream],
    idle: list[_Stream],
    beats: list[_Beat],
    pid: int,
) -> None:
    """End the streams. The garbage collector may call this, in the midst of anything."""
    if os.getpid() != pid:  # they are those of the process that was forked
        return
    while True:
        try:
            call = queue.get_nowait()
        except Empty:
            break
        if call is not None:
            call.answer.set_exception(ConnectionResetError("the connection was closed"))
    for _ in workers:
        queue.put(None)
    for worker in workers:
        worker.cancel()
    for stream in list(own):
        stream.end()
    for stream in idle:
        stream.close()
    for beat in beats:
        beat.stop()


def _end_all() -> None:
    """At the end of the interpreter: let servers hear that this process leaves."""
    for client in list(_open):
        client.close()
    deadline = time.monotonic() + _END_SECONDS
    for thread in list(_leaving):
        thread.join(max(0.0, deadline - time.monotonic()))
