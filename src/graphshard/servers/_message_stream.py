# SPDX-License-Identifier: Apache-2.0
"""Messages, streams of them over sockets, and who may open one.

`WireMessage` is a name, some plain values and some tensors, as a header and one run of bytes::

    header   JSON, UTF-8: {"op": str, "fields": {...}, "tensors": [[dtype, shape], ...]}
    payload  the tensors' rows back to back, each from a multiple of 64 bytes on

Between hosts a long tensor that has many zeros is sent without them, as in `graphshard.comm`. Its
entry is [dtype, shape, bytes], of which there are fewer than of the tensor; the tensors after it
follow as if it were whole, which is what `most_sent` is about, too.

Nothing in a message is code, and decoding checks every length before it makes a tensor.

`MessageStream` has messages over a connected socket, whose two ends prove that they know the
token::

    client  PROTOCOL, id of the client, random bytes
    server  PROTOCOL, most bytes of a message, random bytes
    client  HMAC-SHA256 by the token of all that was said
    server  whether it is right, and the same of its own
    both    messages: length of the header, length of the payload, header, payload

So the token never travels. Without TLS all else can be read by who can read the network.

[Note: sockets]
    Payloads are received into the memory that tensors are views of, and sent from where tensors
    lie: the processor copies each byte once a side, in the kernel. A library that frames messages
    copies them once or twice more; 5 MB over Arrow Flight cost its client 3 to 4.5 ms of processor
    time where `recv_into` takes 0.7.

`StreamAcceptor` takes connections, and hands on those whose other ends know the token. Anybody who
reaches the port may connect, so what costs a connection anything is bounded before its token is
known. Each has one deadline for all that it must say, however slowly it says it. Few are waited for
at a time; one more ends the oldest of the address that has the most. So who opens many keeps out
those of its own address alone, and those only if it opens that many within the milliseconds that a
client needs.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import math
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.kernels import empty
from ..comm.address import joins_one_host, notice_dead_host
from ..comm.collectives import LONG_BYTES
from ..comm.nonzero_words import put_zeros, without_zeros, word_bytes
from ..errors import MessageError

Spec: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

MAX_HEADER = 1 << 24  # some 60,000 tables are listed in one
MAX_TENSORS = 4096
MAX_EXTENTS = 16
_ALIGNMENT = 64
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class WireMessage:
    """What one side says to the other.

    Args:
        op: What is asked for, or ``"error"``.
        fields: Values that JSON has.
        tensors: Dense, on the CPU.
        payload: uint8, the memory that ``tensors`` are views of, laid out as on the wire; None
            where they lie elsewhere.
        sender: Id of the client that a server has it from; not sent.
        max_answer: Most bytes of the tensors that answer it, where it came over the wire; not sent.
    """

    op: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    payload: Tensor | None = None
    sender: str = ""
    max_answer: int | None = None

    def check_answer(self, specs: Sequence[Spec]) -> None:
        """Raise MessageError if such tensors are too many bytes; before they are gathered."""
        size = _layout(specs)[1]
        if self.max_answer is not None and size > self.max_answer:
            raise MessageError(
                f"the answer to {self.op!r:.80} has at most {self.max_answer} bytes (it would have "
                f"{size}); ask for fewer rows at once"
            )

    @classmethod
    def allocate(cls, op: str, fields: Mapping[str, Any], specs: Sequence[Spec]) -> WireMessage:
        """A message whose tensors are to be filled in, where they are sent from."""
        offsets, size = _layout(specs)
        payload = empty([size], torch.uint8)
        tensors = [_view(payload, spec, at) for spec, at in zip(specs, offsets, strict=True)]
        return cls(op, fields, tensors, payload)

    @property
    def num_bytes(self) -> int:
        """Of the payload, with all zeros."""
        return _layout([(tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors])[1]

    def encode(self, *, leave_out_zeros: bool = False) -> tuple[bytes, list[memoryview]]:
        """Header, and the payload in pieces that follow each other; tensors are not copied.

        Args:
            leave_out_zeros: Of long tensors that have many.

        Raises:
            MessageError: A dtype that cannot be sent, or a header that is too long.
        """
        specs = [(tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors]
        for dtype, _ in specs:
            check_dtype(dtype)
        sent = [bytes_of(t, leave_out_zeros=leave_out_zeros) for t in self.tensors]
        is_shorter = [len(data) < t.nbytes for data, t in zip(sent, self.tensors, strict=True)]
        header = json.dumps(
            {
                "op": self.op,
                "fields": self.fields,
                "tensors": [
                    [_NAMES[dtype], list(shape), *([len(data)] if shorter else [])]
                    for (dtype, shape), data, shorter in zip(specs, sent, is_shorter, strict=True)
                ],
            }
        ).encode()
        if len(header) > MAX_HEADER:
            raise MessageError(
                f"the header of a message must have at most {MAX_HEADER} bytes (got "
                f"{len(header)}); use shorter names, or ask for fewer of them at once"
            )
        if self.payload is not None and not any(is_shorter):
            return header, [bytes_of(self.payload)]
        pieces, end = [], 0
        for tensor, data, offset in zip(self.tensors, sent, _layout(specs)[0], strict=True):
            pieces += [memoryview(bytes(offset - end)), data]
            end = offset + tensor.nbytes
        return header, [piece for piece in pieces if len(piece)]


@dataclass(frozen=True)
class MessageRoom:
    """A message whose payload is to come.

    Args:
        message: The message.
        pieces: Of its payload, to be filled in turn.
        shorter: Tensors that come without their zeros, and as how many bytes.
    """

    message: WireMessage
    pieces: Sequence[memoryview]
    shorter: Sequence[tuple[Tensor, int]]

    @classmethod
    def from_header(cls, header: bytes, size: int, most: int) -> MessageRoom:
        """For the message that a header describes.

        Args:
            size: Bytes that follow the header.
            most: Most bytes of the payload, with all zeros.

        Raises:
            MessageError: It is none, or the tensors that it describes have another size.
        """
        if len(header) > MAX_HEADER:
            raise MessageError(f"a header has {len(header)} bytes; at most {MAX_HEADER} are legal")
        try:
            content = json.loads(header)
            op, fields, listed = content["op"], content["fields"], content["tensors"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise MessageError("a header must be JSON with op, fields and tensors") from None
        if not (isinstance(op, str) and isinstance(fields, dict) and isinstance(listed, list)):
            raise MessageError("a header must hold a text, an object and a list")
        if len(listed) > MAX_TENSORS:
            raise MessageError(f"a message has at most {MAX_TENSORS} tensors (got {len(listed)})")
        specs = [_spec(entry) for entry in listed]
        offsets, whole = _layout(specs)
        ends = [at + _num_bytes(spec) for at, spec in zip(offsets, specs, strict=True)]
        sent = {i: _shorter_size(entry) for i, entry in enumerate(listed) if len(entry) == 3}
        for i, num_bytes in sent.items():
            if num_bytes >= ends[i] - offsets[i]:
                raise MessageError(
                    f"a tensor of {ends[i] - offsets[i]} bytes is less without its zeros (got "
                    f"{num_bytes})"
                )
        expected = whole - sum(ends[i] - offsets[i] - num_bytes for i, num_bytes in sent.items())
        if expected != size:
            raise MessageError(f"the tensors of a message take {expected} bytes (got {size} bytes)")
        check_size(whole, most)
        message = WireMessage.allocate(op, fields, specs)
        assert message.payload is not None
        memory, begin, pieces = message.payload.numpy().data, 0, []
        for i, num_bytes in sent.items():
            pieces.append(memory[begin : offsets[i] + num_bytes])
            begin = ends[i]
        shorter = [(message.tensors[i], num_bytes) for i, num_bytes in sent.items()]
        return cls(message, [*pieces, memory[begin:]], shorter)

    def filled(self) -> WireMessage:
        """The message, once its payload has come.

        Raises:
            MessageError: Something in it is not what a tensor without its zeros is.
        """
        try:
            for tensor, size in self.shorter:
                put_zeros(tensor.view(-1).view(torch.uint8), size, word_bytes(tensor))
        except ValueError as error:
            raise MessageError(str(error)) from None
        return self.message


def check_dtype(dtype: torch.dtype) -> None:
    """Raise MessageError unless tensors of a dtype can be sent."""
    if dtype not in _NAMES:
        raise MessageError(
            f"tensors of {', '.join(_DTYPES)} can be sent (got {dtype}); convert it first"
        )


def check_shape(shape: Sequence[Any]) -> None:
    """Raise MessageError unless tensors of a shape can be sent."""
    is_short = len(shape) <= MAX_EXTENTS
    if not is_short or not all(type(extent) is int and 0 <= extent < 2**48 for extent in shape):
        raise MessageError(
            f"the shape of a tensor has at most {MAX_EXTENTS} extents, whole numbers of 0 or more "
            f"(got {len(shape)}: {list(shape[:20])!s:.80})"
        )
    if math.prod(max(extent, 1) for extent in shape) >= 2**48:
        raise MessageError(f"a tensor has less than 2^48 elements (got shape {tuple(shape)})")


def dtype_name(dtype: torch.dtype) -> str:
    """How a message names a dtype."""
    check_dtype(dtype)
    return _NAMES[dtype]


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of a name, or MessageError."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise MessageError(f"unknown dtype {name!r:.80}; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _spec(entry: Any) -> Spec:
    if not (isinstance(entry, list) and len(entry) in (2, 3) and isinstance(entry[1], list)):
        raise MessageError("a tensor is described by its dtype and shape, and bytes where fewer")
    name, shape = entry[:2]
    check_shape(shape)
    return dtype_named(name), tuple(shape)


def _shorter_size(entry: list[Any]) -> int:
    """Bytes of a tensor without its zeros."""
    if type(entry[2]) is not int or entry[2] <= 0:
        raise MessageError(f"bytes are a whole number above 0 (got {entry[2]!r:.80})")
    return entry[2]


def _num_bytes(spec: Spec) -> int:
    return math.prod(spec[1]) * spec[0].itemsize


def _layout(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """First byte of each tensor, and the length of all."""
    offsets, end = [], 0
    for spec in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + _num_bytes(spec)
    return offsets, end


def _view(payload: Tensor, spec: Spec, offset: int) -> Tensor:
    dtype, shape = spec
    return payload[offset : offset + _num_bytes(spec)].view(dtype).view(shape)


def bytes_of(tensor: Tensor, *, leave_out_zeros: bool = False) -> memoryview:
    """The memory of a tensor, which is copied only if it is not contiguous.

    Args:
        leave_out_zeros: Whether a long one may be sent without its zeros; `put_zeros` undoes it.
            What is returned is shorter then.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if leave_out_zeros and data.numel() >= LONG_BYTES:
        packed = without_zeros(data, word_bytes(tensor))
        data = data if packed is None else packed
    return data.numpy().data


# ---------------------------------------------------------------------------- streams

PROTOCOL = b"graphshard 3\n"
_HELLO = struct.Struct(f"<{len(PROTOCOL)}s8s32s")
_GREETING = struct.Struct(f"<{len(PROTOCOL)}sQ32s")
_PROOF = struct.Struct("<32s")
_VERDICT = struct.Struct("<?32s")
_HEAD = struct.Struct("<IQ")
_PIECES = 64
_SKIPPED = 1 << 16
_DEAD_SECONDS = 60


class TokenError(Exception):
    """The two ends of a stream do not know the same token."""


class MessageStream:
    """One end of a connection.

    Methods raise TokenError if the other end does not know the token, MessageError if it is none of
    ours or a message is none, and OSError if the connection is gone or something is late. A
    deadline is a time of `time.monotonic`, by which all must be done; where there is none, each
    wait is bounded by the timeout.

    Args:
        connected: The socket; its timeout bounds each wait within a message.
        max_message: Most bytes of a message that the other end may send, with all zeros.

    Attributes:
        leaves_out_zeros: Whether long tensors are sent without their zeros; where both ends are on
            one host, that takes longer.
        client: Id of the client, once it has begun.
        is_in_step: Whether it is known where the next message begins.
        most_sent: Most bytes of a message that the other end takes.
    """

    def __init__(self, connected: socket.socket, max_message: int) -> None:
        self._socket, self._max_message = connected, max_message
        self.most_sent = max_message
        self.leaves_out_zeros = not joins_one_host(connected)
        self.client = ""
        self.is_in_step = True

    def prove(self, token: str, client: str, deadline: float) -> None:
        """Begin as the client, whose id is 16 hexadecimal digits."""
        hello = _HELLO.pack(PROTOCOL, bytes.fromhex(client), secrets.token_bytes(32))
        self._send_bytes(memoryview(hello), deadline)
        greeting = self._receive_bytes(_GREETING.size, deadline=deadline)
        protocol, self.most_sent, _ = _GREETING.unpack(greeting)
        if protocol != PROTOCOL:
            raise MessageError("it is no server of graphshard, or one of another version")
        said = hello + greeting
        self._send_bytes(memoryview(_proof(token, b"client", said)), deadline)
        verdict = self._receive_bytes(_VERDICT.size, deadline=deadline)
        is_right, proof = _VERDICT.unpack(verdict)
        if not is_right or not hmac.compare_digest(proof, _proof(token, b"server", said)):
            raise TokenError("the server knows another token")
        self.client = client

    def verify(self, token: str, deadline: float) -> None:
        """Begin as the server."""
        hello = self._receive_bytes(_HELLO.size, deadline=deadline)
        protocol, client, _ = _HELLO.unpack(hello)
        if protocol != PROTOCOL:
            raise MessageError("it is no client of graphshard, or one of another version")
        greeting = _GREETING.pack(PROTOCOL, self._max_message, secrets.token_bytes(32))
        self._send_bytes(memoryview(greeting), deadline)
        proof = self._receive_bytes(_PROOF.size, deadline=deadline)
        is_right = hmac.compare_digest(proof, _proof(token, b"client", hello + greeting))
        own = _proof(token, b"server", hello + greeting) if is_right else bytes(32)
        self._send_bytes(memoryview(_VERDICT.pack(is_right, own)), deadline)
        if not is_right:
            raise TokenError("it does not know the token")
        self.client = client.hex()

    def send(self, message: WireMessage, deadline: float | None = None) -> None:
        """Send a message."""
        check_size(message.num_bytes, self.most_sent)
        header, pieces = message.encode(leave_out_zeros=self.leaves_out_zeros)
        size = sum(map(len, pieces))
        waiting = deque([memoryview(_HEAD.pack(len(header), size) + header), *pieces])
        if isinstance(self._socket, ssl.SSLSocket):
            for piece in waiting:
                self._send_bytes(piece, deadline)
            return
        while waiting:
            self._wait_until(deadline)
            take_away(waiting, send_some(self._socket, waiting))

    def receive(self, may_idle: bool = False, deadline: float | None = None) -> WireMessage:
        """The next message.

        Args:
            may_idle: Whether the other end may be silent before it begins.

        Raises:
            MessageError: It is none. Another one can be received if the stream `is_in_step`.
        """
        head = self._receive_bytes(_HEAD.size, may_idle, deadline)
        header_size, size = _HEAD.unpack(head)
        try:
            if header_size > MAX_HEADER:
                raise MessageError(f"a header has at most {MAX_HEADER} bytes (got {header_size})")
            check_size(size, self._max_message)
        except MessageError:
            self.is_in_step = False
            raise
        header = self._receive_bytes(header_size, deadline=deadline)
        try:
            room = MessageRoom.from_header(header, size, self._max_message)
        except (MessageError, MemoryError, RuntimeError) as error:
            while size:
                size -= len(self._receive_bytes(min(size, _SKIPPED), deadline=deadline))
            if isinstance(error, MessageError):
                raise
            raise MessageError(f"there is no memory for a message ({error})") from None
        for piece in room.pieces:
            self._receive_into(piece, deadline=deadline)
        return room.filled()

    def set_timeout(self, seconds: float) -> None:
        """Bound each wait within a message from now on."""
        self._socket.settimeout(seconds)

    def notice_dead_host(self) -> None:
        """End within about a minute if the other host is gone, also while bytes wait for it.

        `prepare` sees to it while none do. Not where much is sent: a process that is stopped does
        not read, and its host is not gone.
        """
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = 1000 * _DEAD_SECONDS
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def end(self) -> None:
        """End the connection; who waits for it, in any thread, gets an error. It is not freed."""
        end_socket(self._socket)

    def close(self) -> None:
        """End and free the connection."""
        self.end()
        self._socket.close()

    def close_inherited(self) -> None:
        """Free a forked child's copy of the connection, which goes on without it."""
        self._socket.close()

    def _wait_until(self, deadline: float | None) -> None:
        """Have the next wait end at a deadline, or raise TimeoutError if it is past."""
        if deadline is None:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not send, or take, all in time")
        self.set_timeout(left)

    def _send_bytes(self, data: memoryview, deadline: float | None) -> None:
        while data:
            self._wait_until(deadline)
            data = data[self._socket.send(data) :]

    def _receive_bytes(
        self, size: int, may_idle: bool = False, deadline: float | None = None
    ) -> bytes:
        buffer = bytearray(size)
        self._receive_into(memoryview(buffer), may_idle, deadline)
        return bytes(buffer)

    def _receive_into(
        self, memory: memoryview, may_idle: bool = False, deadline: float | None = None
    ) -> None:
        at = 0
        while at < len(memory):
            self._wait_until(deadline)
            try:
                received = self._socket.recv_into(memory[at:])
            except TimeoutError:
                if may_idle and at == 0:
                    continue
                raise
            if received == 0:
                raise ConnectionResetError("it ended the connection")
            at += received


def send_some(connected: socket.socket, pieces: deque[memoryview]) -> int:
    """Send what goes at once of bytes in pieces; returns how many went."""
    return connected.sendmsg(list(islice(pieces, _PIECES)))


def take_away(pieces: deque[memoryview], size: int) -> None:
    """Take the first bytes of some pieces away."""
    while pieces and size >= len(pieces[0]):
        size -= len(pieces.popleft())
    if size:
        pieces[0] = pieces[0][size:]


def end_socket(connected: socket.socket) -> None:
    """End a connection; who waits for it, in any thread, gets an error. It is not freed."""
    with contextlib.suppress(OSError):  # it has ended
        # Not the method of an SSLSocket, which takes away what other threads are using.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def prepare(connected: socket.socket, timeout: float) -> None:
    """Set the options of a socket; a host that is gone is noticed within about a minute."""
    connected.settimeout(timeout)
    notice_dead_host(connected, _DEAD_SECONDS // 2, _DEAD_SECONDS // 6, 3)


def _proof(token: str, side: bytes, said: bytes) -> bytes:
    return hmac.digest(token.encode(), side + said, "sha256")


def check_size(size: int, most: int) -> None:
    """Raise MessageError unless a message of a size can be sent where that many bytes can."""
    if size > most:
        raise MessageError(
            f"a message has at most {most} bytes (got {size}); send fewer rows at once"
        )


# ---------------------------------------------------------------------------- who may open a stream

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
