# SPDX-License-Identifier: Apache-2.0
"""MessageStream: messages over a connected socket, whose two ends prove that they know the token.

::

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
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import ssl
import struct
import time
from collections import deque
from itertools import islice

from ...errors import MessageError
from ._message import MAX_HEADER, WireMessage

PROTOCOL = b"graphshard 2\n"
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

    Args:
        connected: The socket; its timeout bounds each wait within a message.
        max_message: Most bytes of a message that the other end may send.

    Attributes:
        client: Id of the client, once it has begun.
        is_in_step: Whether it is known where the next message begins.
        most_sent: Most bytes of a message that the other end takes.
    """

    def __init__(self, connected: socket.socket, max_message: int) -> None:
        self._socket, self._max_message = connected, max_message
        self.most_sent = max_message
        self.client = ""
        self.is_in_step = True

    def prove(self, token: str, client: str, deadline: float) -> None:
        """Begin as the client.

        Args:
            token: What the server must know, too.
            client: Id of this client, 16 hexadecimal digits.
            deadline: Until when all of it must be done, by `time.monotonic`.

        Raises:
            TokenError: The server does not know the token.
            MessageError: The other end is no such server.
            OSError: The connection is gone.
        """
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
        """Begin as the server.

        Args:
            token: What the client must know, too.
            deadline: Until when all of it must be done, by `time.monotonic`.

        Raises:
            TokenError: The client does not know the token.
            MessageError: The other end is no such client.
            OSError: The connection is gone.
        """
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
        """Send a message.

        Args:
            message: What is sent.
            deadline: Until when, by `time.monotonic`; else each wait is bounded by the timeout.

        Raises:
            MessageError: It is none, or longer than the other end takes; nothing is sent.
            OSError: The connection is gone, or the other end does not read.
        """
        header, pieces = message.encode()
        size = sum(map(len, pieces))
        check_size(size, self.most_sent)
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
            deadline: Until when, by `time.monotonic`; else each wait is bounded by the timeout.

        Raises:
            MessageError: It is none. Another one can be received if the stream `is_in_step`.
            OSError: The connection is gone, or a message stops in its midst.
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
            message = WireMessage.from_header(header, size)
        except (MessageError, MemoryError, RuntimeError) as error:
            while size:
                size -= len(self._receive_bytes(min(size, _SKIPPED), deadline=deadline))
            if isinstance(error, MessageError):
                raise
            raise MessageError(f"there is no memory for a message ({error})") from None
        assert message.payload is not None
        self._receive_into(message.payload.numpy().data, deadline=deadline)
        return message

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
        """Have the next wait end at a deadline.

        Raises:
            TimeoutError: It is past.
        """
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
        found = bytearray(size)
        self._receive_into(memoryview(found), may_idle, deadline)
        return bytes(found)

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
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _DEAD_SECONDS // 2),
        ("TCP_KEEPINTVL", _DEAD_SECONDS // 6),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(token: str, side: bytes, said: bytes) -> bytes:
    return hmac.digest(token.encode(), side + said, "sha256")


def check_size(size: int, most: int) -> None:
    """Raise MessageError unless a message of a size can be sent where that many bytes can."""
    if size > most:
        raise MessageError(
            f"a message has at most {most} bytes (got {size}); send fewer rows at once"
        )
