# SPDX-License-Identifier: Apache-2.0
"""Strangers connect to a server in every way that needs no token, and clients notice nothing.

``make test-all`` has the campaign; the sample that always runs is a short one.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter

import pytest
import torch
from clusters import TABLE, TOKEN

from graphshard.servers import MessageClient, TableServer, WireMessage

BEGINNING = b"graphshard 3\n" + bytes(40)
KINDS = ["silent", "slow", "half", "wrong proof", "garbage", "closed at once", "reset", "tls"]


class Strangers:
    """Connections of strangers, of which some say something now and then."""

    def __init__(self, address: str, chosen: random.Random) -> None:
        host, port = address.split(":")
        self.place, self.chosen = (host, int(port)), chosen
        self.slow: list[tuple[socket.socket, list[int]]] = []
        self.silent: list[socket.socket] = []
        self.num_kinds: Counter[str] = Counter()

    def come(self) -> None:
        """One more."""
        kind = self.chosen.choice(KINDS)
        self.num_kinds[kind] += 1
        raw = socket.create_connection(self.place, 20)
        with contextlib.suppress(OSError):  # the server may have had enough of it
            if kind in ("silent", "slow"):
                self.silent.append(raw)
                if kind == "slow":
                    self.slow.append((raw, [0]))
                return
            if kind == "half":
                raw.sendall(BEGINNING[: self.chosen.randrange(1, len(BEGINNING))])
                self.silent.append(raw)
                return
            if kind == "wrong proof":
                raw.sendall(BEGINNING + self.chosen.randbytes(32))
            elif kind == "garbage":
                raw.sendall(self.chosen.randbytes(self.chosen.randrange(1, 1 << 16)))
            elif kind == "tls":
                raw.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
            elif kind == "reset":
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()

    def go_on(self) -> None:
        """The slow ones say a byte more; those that were ended go."""
        for raw, sent in list(self.slow):
            try:
                raw.send(BEGINNING[sent[0] : sent[0] + 1])
                sent[0] += 1
            except OSError:
                self.slow.remove((raw, sent))

    def leave(self) -> None:
        for raw in self.silent:
            raw.close()


def num_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize(
    "rounds",
    [40, pytest.param(2000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)])],
)
def test_strangers_keep_nobody_out_and_leave_nothing(
    rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = TableServer(0, TOKEN)
    server.start()
    trainer = MessageClient(server.address, TOKEN, timeout=20)
    trainer.announce("trainer 0")
    trainer.call(WireMessage("create", TABLE))
    before = threading.active_count(), num_descriptors()
    strangers = Strangers(server.address, random.Random(rounds))
    right = torch.zeros(100, 2, dtype=torch.int64)
    try:
        for number in range(rounds):
            for _ in range(strangers.chosen.randrange(60)):
                strangers.come()
            strangers.go_on()
            rows = torch.tensor([number % 100, (7 * number + 1) % 100])
            values = torch.full((2, 2), number)
            trainer.call(WireMessage("write", {"name": TABLE["name"]}, [rows, values]))
            right[rows] = values
            late = MessageClient(server.address, TOKEN, timeout=20)
            read = WireMessage("read", {"names": [[TABLE["name"]]]}, [torch.arange(100)])
            assert torch.equal(late.call(read).tensors[0], right)
            late.close()
            if len(strangers.silent) > 500:  # descriptors of this process are few
                strangers.leave()
                strangers.silent.clear()
                strangers.slow.clear()
            caplog.clear()
    finally:
        strangers.leave()
    deadline = time.monotonic() + 60
    while (threading.active_count(), num_descriptors()) > before:
        assert time.monotonic() < deadline, "connections of strangers are left"
        time.sleep(0.05)
    assert server.num_clients() == 1
    assert set(strangers.num_kinds) == set(KINDS)
    trainer.close()
    server.stop()
