# SPDX-License-Identifier: Apache-2.0
"""A server learns that a client has left or is gone, names it, and releases what it held."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from clusters import TOKEN

from graphshard.errors import MessageError
from graphshard.store import MessageClient, TableServer, WireMessage
from graphshard.store.wire._presence import PresentClients

TABLE = {
    "name": "node~_N~x",
    "dtype": "float32",
    "row_shape": [2],
    "starts": [0, 10],
    "policy": "node~_N",
    "persistent": False,
}


@pytest.fixture
def server() -> Iterator[TableServer]:
    made = TableServer(0, TOKEN)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def impatient_server() -> Iterator[TableServer]:
    made = TableServer(0, TOKEN, silent_seconds=2.0)
    made.start()
    yield made
    made.stop()


def connected(server: TableServer, label: str) -> MessageClient:
    connection = MessageClient(server.address, TOKEN, timeout=20)
    connection.announce(label)
    return connection


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 30 s"
        time.sleep(0.02)


def names(server: TableServer) -> list[str]:
    return [info.name for info in server.tables.infos()]


def test_what_a_client_held_goes_when_it_leaves(
    server: TableServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "graphshard.server")
    one, other = connected(server, "trainer 0"), connected(server, "trainer 1")
    for connection in (one, other):
        connection.call(WireMessage("create", TABLE))
    one.call(WireMessage("create", TABLE | {"name": "node~_N~kept", "persistent": True}))
    one.close()
    wait_for(lambda: "trainer 0 has left" in caplog.text)
    assert names(server) == ["node~_N~kept", "node~_N~x"]  # the other one holds it
    other.close()
    wait_for(lambda: names(server) == ["node~_N~kept"])
    assert "is gone" not in caplog.text


def test_a_client_releases_what_it_asked_for_alone(server: TableServer) -> None:
    one, other = connected(server, "trainer 0"), connected(server, "trainer 1")
    one.call(WireMessage("create", TABLE))
    other.call(WireMessage("release", {"name": TABLE["name"]}))  # it has not asked for it
    assert names(server) == [TABLE["name"]]
    one.call(WireMessage("release", {"name": TABLE["name"]}))
    assert names(server) == []
    one.close()
    other.close()


SCRIPT = """
import json, sys, time
from graphshard.store import MessageClient, WireMessage
connection = MessageClient(sys.argv[1], sys.argv[2], timeout=20)
connection.announce("trainer 3")
connection.call(WireMessage("create", json.loads(sys.argv[3])))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "its connection ended without a word"),
        (signal.SIGSTOP, "nothing was heard of it for 2 s"),
    ],
)
def test_a_client_that_vanishes_is_named(
    server: TableServer,
    impatient_server: TableServer,
    caplog: pytest.LogCaptureFixture,
    number: int,
    why: str,
) -> None:
    server = impatient_server if number == signal.SIGSTOP else server
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, server.address, TOKEN, json.dumps(TABLE)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert names(server) == [TABLE["name"]]
        process.send_signal(number)
        wait_for(lambda: names(server) == [])
        assert f"trainer 3 is gone: {why}" in caplog.text
    finally:
        process.kill()
        process.communicate(timeout=30)
    one = connected(server, "trainer 4")
    assert one.call(WireMessage("create", TABLE)).fields["is_new"]
    one.close()


def test_a_stream_that_ends_otherwise_is_not_the_client(server: TableServer) -> None:
    connection = connected(server, "trainer 0")
    connection.call(WireMessage("create", TABLE))
    for stream in connection._workers:
        stream._stream.close()
    assert connection.call(WireMessage("ping")).op == "ok"
    assert names(server) == [TABLE["name"]]
    connection.close()


@pytest.mark.parametrize("label", [None, "", "x" * 1000, "two\nlines", 3])
def test_a_client_says_who_it_is(server: TableServer, label: object) -> None:
    connection = MessageClient(server.address, TOKEN, timeout=20)
    with pytest.raises(MessageError, match="an id and a label"):
        connection.call(WireMessage("here", {"label": label}))
    connection.close()


def test_a_client_is_gone_once() -> None:
    gone: list[str] = []
    clients = PresentClients(gone.append, silent_seconds=1000)
    stream = object()
    clients.here("a", "trainer 0", stream)
    clients.here("a", "trainer 0", stream)
    assert clients.labels() == ["trainer 0"]
    clients.ended("a", object())
    assert gone == []
    clients.ended("a", stream)
    clients.leave("a")
    assert (gone, clients.labels()) == (["a"], [])
    clients.stop()
