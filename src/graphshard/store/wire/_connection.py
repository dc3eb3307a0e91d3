# SPDX-License-Identifier: Apache-2.0
"""FlightConnection: requests to one server, several at a time, each bounded by a timeout."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ...comm import Pending
from ...errors import MessageError, ServerError
from ._arrow import COMMAND, arrow, arrow_flight, batch_of, stream_schema
from ._message import WireMessage
from ._presence import BEAT_SECONDS, HERE, LEAVE
from ._server import CLIENT_HEADER, EXPECTED, MAX_MESSAGE, message_of, wait_for_streams

_KINDS = {kind.__name__: kind for kind in (*EXPECTED, MessageError)}
_RETRY_SECONDS = 0.2
_END_SECONDS = 5.0
_open: weakref.WeakSet[FlightConnection] = weakref.WeakSet()
_ending: list[threading.Thread] = []


class FlightConnection:
    """A server, as its clients see it. Safe to use from several threads, not across a fork.

    Args:
        address: ``host:port``.
        token: Of the server.
        host: Number of the host, for errors.
        timeout: Longest wait for an answer, in seconds.
        certificates: Path of the PEM certificates that the server's must be signed with, for TLS.
        streams: Most requests at a time.
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
        scheme = "grpc" if certificates is None else "grpc+tls"
        options: dict[str, Any] = {}
        if certificates is not None:
            options["tls_root_certs"] = Path(certificates).read_bytes()
        self._client = arrow_flight().FlightClient(f"{scheme}://{address}", **options)
        headers = [
            (b"authorization", f"Bearer {token}".encode()),
            (CLIENT_HEADER.encode(), secrets.token_hex(8).encode()),
        ]
        self._options = arrow_flight().FlightCallOptions(headers=headers)
        self._queue: SimpleQueue[_PendingCall | None] = SimpleQueue()
        self._lock, self._workers, self._most = threading.RLock(), list[_CallStream](), streams
        self._num_open = 0
        self._pid = os.getpid()
        self._beats: list[_Beat] = []
        self._close = weakref.finalize(
            self, _close, self._queue, self._workers, self._beats, self._client
        )
        self._close.atexit = False
        if not _open:
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _open.add(self)

    def call(self, request: WireMessage, timeout: float | None = None) -> WireMessage:
        """The answer to a request.

        Args:
            request: What is asked.
            timeout: As for the connection, for this request.

        Raises:
            ServerError: The server is gone, refuses, failed, or did not answer in time.
            Exception: What the server's handler raised: `ValueError`, `IndexError`, ...
        """
        return self.start(request, timeout).result()

    def start(self, request: WireMessage, timeout: float | None = None) -> PendingAnswer:
        """Send a request, and go on; at most as many as there are streams travel at a time."""
        if os.getpid() != self._pid:
            raise RuntimeError("a connection does not outlive a fork; make another one")
        call = _PendingCall(request, self.timeout if timeout is None else timeout)
        with self._lock:
            if not self._close.alive:
                raise RuntimeError("the connection is closed; make another one")
            self._num_open += 1
            if len(self._workers) < min(self._most, self._num_open):
                self._workers.append(_CallStream(self._client, self._options, self._queue))
            self._queue.put(call)
        call.answer.add_done_callback(self._ended)
        return PendingAnswer(self, call)

    def _ended(self, _: object) -> None:
        with self._lock:
            self._num_open -= 1

    def announce(self, label: str) -> None:
        """Tell the server who this is, now and every few seconds, so that it notices the end.

        What `HostTables.create` was asked for over this connection is released then.

        Args:
            label: For the server's log: ``"rank 3 (process 17 of host-a)"``.

        Raises:
            ServerError: The server does not answer.
        """
        if self._beats:
            return
        beat = _Beat(_Stream(self._client, self._options), label)
        self._beats.append(beat)
        if not beat.wait_until_heard(self.timeout):
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
                if isinstance(error.__cause__, arrow_flight().FlightUnauthenticatedError):
                    raise
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise self.error(
                        f"cannot be reached within {timeout:g} s ({_first_line(error.__cause__)}); "
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

    def __init__(self, connection: FlightConnection, call: _PendingCall) -> None:
        self._connection, self._call = connection, call

    def result(self) -> WireMessage:
        """Wait for it; raises as `FlightConnection.call`."""
        call, connection = self._call, self._connection
        try:
            answer = call.answer.result(max(0.0, call.deadline - time.monotonic()))
        except FutureTimeout:
            call.cancel()
            raise connection.error(
                f"did not answer {call.request.op!r} within {call.timeout:g} s; is the host up, "
                "and has the server memory left?"
            ) from None
        except arrow_flight().FlightUnauthenticatedError as error:
            raise connection.error(
                "refused the token; the servers and all trainers of a job need the same one", error
            ) from error
        except (arrow().ArrowException, OSError) as error:
            raise connection.error(f"is gone ({_first_line(error)})", error) from error
        if answer.op != "error":
            return answer
        kind, text = str(answer.fields.get("kind", "")), str(answer.fields.get("text", ""))
        if kind in _KINDS:
            raise _KINDS[kind](text)
        raise connection.error(f"failed: {text}")

    def then(self, function: Any) -> Pending:
        """What ``function`` makes of the answer, a list of tensors, as a `Pending`."""
        return Pending(lambda: function(self.result()))


class _PendingCall:
    """A request, and its answer to come."""

    def __init__(self, request: WireMessage, timeout: float) -> None:
        self.request, self.timeout = request, timeout
        self.deadline = time.monotonic() + timeout
        self.answer: Future[WireMessage] = Future()
        self.stream: _CallStream | None = None

    def cancel(self) -> None:
        self.answer.cancel()
        if self.stream is not None:
            self.stream.cancel(self)


class _Stream:
    """A stream to the server, made for its first request and again after an error."""

    def __init__(self, client: Any, options: Any) -> None:
        self._client, self._options = client, options
        self._reader: Any = None
        self._writer: Any = None

    def exchange(self, request: WireMessage) -> WireMessage:
        """The answer to a request; without a timeout, see `cancel`."""
        try:
            header, payload = request.encode()
            if self._writer is None:
                descriptor = arrow_flight().FlightDescriptor.for_command(COMMAND)
                self._writer, self._reader = self._client.do_exchange(descriptor, self._options)
                self._writer.begin(stream_schema())
            self._writer.write_with_metadata(batch_of(payload), arrow().py_buffer(header))
            try:
                return message_of(self._reader.read_chunk(), MAX_MESSAGE)
            except StopIteration:
                raise ConnectionResetError("it ended the stream") from None
        except BaseException:
            self.end()
            raise

    def cancel(self) -> None:
        """Give up the exchange that runs."""
        reader = self._reader
        if reader is not None:
            reader.cancel()

    def end(self) -> None:
        """Give the stream up; destructors then have nothing to wait for."""
        writer, reader, self._writer, self._reader = self._writer, self._reader, None, None
        if writer is not None:
            with contextlib.suppress(arrow().ArrowException, OSError):
                reader.cancel()
                writer.close()


class _CallStream:
    """A thread that sends the requests of a queue over a stream of its own."""

    def __init__(self, client: Any, options: Any, queue: SimpleQueue[_PendingCall | None]) -> None:
        self._stream, self._queue = _Stream(client, options), queue
        self._current: _PendingCall | None = None
        self._thread = threading.Thread(target=self._run, name="graphshard-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                self._stream.end()
                return
            if not call.answer.set_running_or_notify_cancel():
                continue
            self._current = call
            call.stream = self
            try:
                answer = self._stream.exchange(call.request)
            except BaseException as error:  # for those who wait
                self._current = None
                _set(call.answer, error)
            else:
                self._current = None
                _set(call.answer, answer)
            del call

    def cancel(self, call: _PendingCall | None) -> None:
        """Give up the exchange that runs for a call."""
        if call is not None and self._current is call:
            self._stream.cancel()

    def end(self) -> None:
        """Wait until the thread has ended, after the None that ends it; cancel what it does."""
        self.cancel(self._current)
        self._thread.join(_END_SECONDS)


class _Beat:
    """A thread that tells the server that this process is there, and at the end that it leaves."""

    def __init__(self, stream: _Stream, label: str) -> None:
        self._stream, self._label = stream, label
        self._heard, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphshard-beat", daemon=True)
        self._thread.start()

    def wait_until_heard(self, timeout: float) -> bool:
        return self._heard.wait(timeout)

    def stop(self) -> None:
        self._stopped.set()

    def end(self) -> None:
        """Wait until the thread has ended, after `stop`."""
        self._thread.join(_END_SECONDS)
        self._stream.cancel()

    def _run(self) -> None:
        while True:
            word = LEAVE if self._stopped.is_set() else HERE
            with contextlib.suppress(arrow().ArrowException, OSError, MessageError):
                self._stream.exchange(WireMessage(word, {"label": self._label}))
                self._heard.set()
            if word == LEAVE:
                self._stream.end()
                return
            self._stopped.wait(BEAT_SECONDS)


def _first_line(error: BaseException | None) -> str:
    """What Flight says, without what gRPC adds."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = line.split(", with message: ", 1)[-1]
    return text.split(". gRPC client debug context", 1)[0][:300]


def _set(answer: Future[WireMessage], found: WireMessage | BaseException) -> None:
    if isinstance(found, BaseException):
        answer.set_exception(found)
    else:
        answer.set_result(found)


def _close(
    queue: SimpleQueue[_PendingCall | None],
    workers: list[_CallStream],
    beats: list[_Beat],
    client: Any,
) -> None:
    """End the streams and their client, in a thread.

    The garbage collector may call this, in the midst of anything. And what gRPC waits for may need
    the interpreter's lock, which the destructor of a client holds, and its `close` does not.
    """
    while True:
        try:
            call = queue.get_nowait()
        except Empty:
            break
        if call is not None:
            call.answer.set_exception(ConnectionResetError("the connection was closed"))
    for _ in workers:
        queue.put(None)
    for beat in beats:
        beat.stop()

    def end() -> None:
        _ending[:] = [t for t in _ending if t.is_alive() or t is threading.current_thread()]
        for worker in workers:
            worker.end()
        for beat in beats:
            beat.end()
        with contextlib.suppress(arrow().ArrowException, OSError):
            client.close()

    thread = threading.Thread(target=end, name="graphshard-close", daemon=True)
    _ending.append(thread)
    thread.start()


def _end_all() -> None:
    """At the end of the interpreter: no thread may be within gRPC then."""
    for connection in list(_open):
        connection.close()
    while _ending:
        _ending.pop().join(_END_SECONDS)
    wait_for_streams()  # of servers in this process
