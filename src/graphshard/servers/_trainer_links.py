# SPDX-License-Identifier: Apache-2.0
"""TrainerLinks: rows from each trainer to each other one, over sockets of their own.

[Note: gradients between hosts]
    gloo asks every trainer how much it sends before it sends, and moves it in a thread of its own,
    which has to wake up. Here rows say themselves how many they are, and who needs them moves them:
    it sends and receives, on all sockets, whatever is possible without waiting. Nor do rows visit
    the GPU where the backend is NCCL. `benchmarks/graph_servers.py` has the figures. A head says
    how many rows there are, then follow bytes of those tensors that are long, which are fewer where
    zeros are left out, then the tensors.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from .._base.kernels import empty
from ..comm.address import joins_one_host
from ..comm.collectives import LONG_BYTES, gather_texts, is_in_vain, start_collective
from ..comm.group import GroupState, count, operation
from ..comm.nonzero_words import put_zeros, word_bytes
from ..errors import MessageError
from ._message_stream import (
    PROOF_SECONDS,
    MessageStream,
    StreamAcceptor,
    TokenError,
    bytes_of,
    send_some,
    take_away,
)
from .rpc import connect_by

_HEAD = struct.Struct("<QQQ")  # operation, number, rows
_MOST_ROWS = 1 << 48
_SLICE_SECONDS = 1.0
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


@dataclass(frozen=True)
class PeerRows:
    """What one trainer has for another.

    Args:
        number: Any number, below 2^64, that both know the meaning of.
        tensors: ``[n, *]`` each, on the CPU.
    """

    number: int
    tensors: Sequence[Tensor]


class TrainerLinks:
    """A socket to each other trainer. All of them make theirs together; that is collective.

    Args:
        state: Their group, of two or more.
        server: ``host:port`` of a graph server of another host, or of this one if there is no
            other: the others reach this trainer at the address from which it reaches that.

    Raises:
        OSError: There is no port left to listen on.
        RankError: A trainer failed, or did not answer in time.
    """

    def __init__(self, state: GroupState, server: str) -> None:
        self.state = state
        self._links: dict[int, _Link] = {}
        token = secrets.token_hex()
        family, address = _own_address(server)
        with socket.create_server((address, 0), family=family) as listener:
            host, port = listener.getsockname()[:2]
            texts = gather_texts(state, f"{host} {port} {token}")
            number, _ = start_collective(state, "connections of trainers", lambda: None)
            try:
                with operation(state, "connections of trainers", number):
                    for rank, text in enumerate(texts[: state.rank]):
                        self._connect(rank, text)
                    self._accept(listener, token)
            except BaseException:
                self.close()
                raise

    @property
    def peers(self) -> list[int]:
        """The other ranks, from the next one on, so that not all begin with the same."""
        me, size = self.state.rank, self.state.world_size
        return [(me + step) % size for step in range(1, size)]

    def exchange(
        self, offers: Iterable[PeerRows], likes: Sequence[Tensor], name: str
    ) -> dict[int, PeerRows]:
        """What the others have for this trainer, by rank. Collective.

        Args:
            offers: For each of `peers` in turn; each is sent while the next ones are made.
            likes: Tensors with the dtypes and row shapes of all of them.
            name: What error messages call the operation.

        Raises:
            RankError: A trainer failed, or did not answer in time. The links are closed then.
        """
        if not self._links:
            raise RuntimeError(f"{name} needs the links to other trainers, which are closed")
        number, _ = start_collective(self.state, name, lambda: None)
        try:
            with operation(self.state, name, number):
                begun: list[_Link] = []
                for rank, rows in zip(self.peers, offers, strict=True):
                    begun.append(self._links[rank])
                    begun[-1].begin(number, rows, likes)
                    for link in begun:
                        link.move()
                self._move_all(begun)
        except BaseException:
            self.close()
            raise
        to = {self.state.members[rank]: link.num_sent for rank, link in self._links.items()}
        count("all_to_all", sum(to.values()), to)
        return {rank: self._links[rank].received() for rank in self.peers}

    def close(self) -> None:
        """End the connections; who waits for this trainer gets an error."""
        for link in self._links.values():
            link.socket.close()
        self._links.clear()

    def _move_all(self, links: Sequence[_Link]) -> None:
        """Send and receive until all is done."""
        seconds = self.state.timeout.total_seconds()
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for link in links:
                if not link.is_done:
                    selector.register(link.socket, _BOTH, link)
            ready = list(selector.get_map().values())
            while selector.get_map():
                for key in ready:
                    link = key.data
                    link.move()
                    if link.is_done:
                        selector.unregister(key.fileobj)
                    elif key.events != link.events:
                        selector.modify(key.fileobj, link.events, link)
                if not selector.get_map():
                    return
                ready = [key for key, _ in selector.select(_SLICE_SECONDS)]
                if not ready and is_in_vain(self.state):
                    raise RuntimeError("another rank failed")
                if not ready and time.monotonic() > deadline:
                    names = sorted(key.data.rank for key in selector.get_map().values())
                    raise RuntimeError(f"ranks {names} sent nothing within {seconds:g} s")

    def _connect(self, rank: int, text: str) -> None:
        """To a rank below this one, which accepts."""
        host, port, token = text.split()
        seconds = self.state.timeout.total_seconds()
        connected = None
        try:
            deadline = time.monotonic() + seconds
            connected = connect_by(host, int(port), deadline)
            MessageStream(connected, 0).prove(token, f"{self.state.rank:016x}", deadline)
        except (OSError, MessageError, TokenError) as error:
            if connected is not None:
                connected.close()
            raise RuntimeError(f"rank {rank} at {host}:{port} cannot be reached: {error}") from None
        self._links[rank] = _Link(connected, rank)

    def _accept(self, listener: socket.socket, token: str) -> None:
        """All ranks above this one, which connect."""
        expected = set(range(self.state.rank + 1, self.state.world_size))
        seconds = self.state.timeout.total_seconds()
        deadline = time.monotonic() + seconds
        arrived: SimpleQueue[tuple[str, socket.socket]] = SimpleQueue()
        acceptor = StreamAcceptor(
            listener,
            token,
            0,
            lambda stream, connected, _: arrived.put((stream.client, connected)),
            proof_seconds=min(seconds, PROOF_SECONDS),
        )
        try:
            while expected:
                if is_in_vain(self.state):
                    raise RuntimeError("another rank failed")
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"ranks {sorted(expected)} did not connect within {seconds:g} s"
                    )
                try:
                    client, connected = arrived.get(timeout=_SLICE_SECONDS)
                except Empty:
                    continue
                rank = int(client, 16)
                if rank not in expected:
                    connected.close()
                    continue
                expected.remove(rank)
                self._links[rank] = _Link(connected, rank)
        finally:
            acceptor.stop()
            while not arrived.empty():
                arrived.get()[1].close()


class _Link:
    """A socket to one other trainer."""

    def __init__(self, connected: socket.socket, rank: int) -> None:
        connected.setblocking(False)
        self.socket, self.rank = connected, rank
        self.leaves_out_zeros = not joins_one_host(connected)
        self.num_sent = 0
        self._outgoing: deque[memoryview] = deque()
        self._incoming: deque[memoryview] = deque()
        self._head, self._rows = bytearray(_HEAD.size), PeerRows(0, [])
        self._sizes = torch.empty(0, dtype=torch.int64)
        self._number, self._likes = 0, list[Tensor]()
        self._then: Callable[[_Link], None] = _Link._expect_sizes

    def begin(self, operation_number: int, rows: PeerRows, likes: Sequence[Tensor]) -> None:
        """Have rows to send, and expect such rows."""
        self._number, self._likes = operation_number, list(likes)
        num_rows = rows.tensors[0].shape[0]
        pieces = [bytes_of(t, leave_out_zeros=self.leaves_out_zeros) for t in rows.tensors]
        self.num_sent = sum(tensor.nbytes for tensor in rows.tensors)
        sizes = torch.tensor([len(pieces[i]) for i in _long(rows.tensors)], dtype=torch.int64)
        head = memoryview(_HEAD.pack(operation_number, rows.number, num_rows))
        self._outgoing.extend(piece for piece in (head, bytes_of(sizes), *pieces) if len(piece))
        self._incoming.append(memoryview(self._head))
        self._then = _Link._expect_sizes

    @property
    def is_done(self) -> bool:
        """Whether all is sent and received."""
        return not self._outgoing and not self._incoming

    @property
    def events(self) -> int:
        """What it waits for."""
        reads = selectors.EVENT_READ if self._incoming else 0
        return reads | (selectors.EVENT_WRITE if self._outgoing else 0)

    def received(self) -> PeerRows:
        """What the other has sent, once that is done. To be called once."""
        rows, self._rows = self._rows, PeerRows(0, [])
        return rows

    def move(self) -> None:
        """Send and receive what is possible without waiting.

        Raises:
            RuntimeError: The connection is gone, or the other is in another operation.
        """
        try:
            while self._send() or self._receive():
                pass
        except OSError as error:
            reason = error.strerror or str(error)
            raise RuntimeError(f"the connection to rank {self.rank} is gone: {reason}") from error

    def _send(self) -> bool:
        """Whether some bytes went."""
        if not self._outgoing:
            return False
        try:
            sent = send_some(self.socket, self._outgoing)
        except BlockingIOError:
            return False
        take_away(self._outgoing, sent)
        return True

    def _receive(self) -> bool:
        """Whether some bytes came."""
        if not self._incoming:
            return False
        try:
            received = self.socket.recv_into(self._incoming[0])
        except BlockingIOError:
            return False
        if received == 0:
            raise ConnectionResetError("it was ended by the other")
        take_away(self._incoming, received)
        if not self._incoming:
            self._then(self)
        return True

    def _expect_sizes(self) -> None:
        """Make room for the rows that the head describes."""
        operation_number, number, num_rows = _HEAD.unpack(self._head)
        if operation_number != self._number:
            raise RuntimeError(
                f"rank {self.rank} is in operation {operation_number}, and this rank is in "
                f"{self._number}; all trainers must call the same, in the same order"
            )
        if num_rows > _MOST_ROWS:
            raise RuntimeError(f"rank {self.rank} has sent no number of rows ({num_rows})")
        tensors = [empty((num_rows, *like.shape[1:]), like.dtype) for like in self._likes]
        self._rows = PeerRows(number, tensors)
        self._sizes = torch.empty(len(_long(tensors)), dtype=torch.int64)
        self._then = _Link._expect_rows
        if len(self._sizes):
            self._incoming.append(bytes_of(self._sizes))
        else:
            self._expect_rows()

    def _expect_rows(self) -> None:
        """Receive rows into the room for them, of which some may come without their zeros."""
        pieces = [bytes_of(tensor) for tensor in self._rows.tensors]
        for i, size in zip(_long(self._rows.tensors), self._sizes.tolist(), strict=True):
            if not 0 < size <= len(pieces[i]):
                raise RuntimeError(
                    f"rank {self.rank} has sent {size} bytes for a tensor of {len(pieces[i])}"
                )
            pieces[i] = pieces[i][:size]
        self._incoming.extend(piece for piece in pieces if len(piece))
        self._then = _Link._put_zeros

    def _put_zeros(self) -> None:
        for i, size in zip(_long(self._rows.tensors), self._sizes.tolist(), strict=True):
            tensor = self._rows.tensors[i]
            if size == tensor.nbytes:
                continue
            try:
                put_zeros(tensor.view(-1).view(torch.uint8), size, word_bytes(tensor))
            except ValueError as error:
                raise RuntimeError(f"rank {self.rank} has sent no rows: {error}") from None


def _long(tensors: Sequence[Tensor]) -> list[int]:
    """Which tensors say how many bytes they are sent as."""
    return [i for i, tensor in enumerate(tensors) if tensor.nbytes >= LONG_BYTES]


def _own_address(server: str) -> tuple[int, str]:
    """Family and address of this host on the way to a server. Nothing is sent to find it."""
    host, _, port = server.rpartition(":")
    family, *_, there = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return family, str(probe.getsockname()[0])
