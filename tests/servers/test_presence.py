# SPDX-License-Identifier: Apache-2.0
"""A server learns that a client has left or is gone, names it, and releases what it held.

Silence is not enough: processes here are stopped, or hold their interpreter, for longer than the
limit after which it is logged.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from clusters import TOKEN

from forked_programs import start_program
from graphshard.errors import MessageError, ServerError
from graphshard.servers import (
    Cluster,
    MessageClient,
    RowsRequest,
    ServedHost,
    TableInfo,
    TableServer,
    WireMessage,
    rpc,
)
from graphshard.servers.rpc import PresentClients

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
    made = TableServer(0, TOKEN, silent_seconds=1.0)
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
import ctypes, json, os, sys, time
from graphshard.servers import MessageClient, WireMessage
from graphshard.servers import rpc
rpc.BEAT_SECONDS = 0.1
connection = MessageClient(sys.argv[1], sys.argv[2], timeout=20)
connection.announce("trainer 3")
connection.call(WireMessage("create", json.loads(sys.argv[3])))
if sys.argv[4] == "fork" and os.fork() == 0:
    sys.stdin.read()  # as long as the test has it open
    os._exit(0)
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[4] == "hold the interpreter":
    ctypes.PyDLL(None).usleep(3_000_000)
print(connection.call(WireMessage("create", json.loads(sys.argv[3]))).fields["is_new"], flush=True)
sys.stdin.readline()
"""


@contextmanager
def client_process(server: TableServer, how: str) -> Iterator[Any]:
    """A process that has made a table, and asks for it again when it reads a line."""
    process = start_program(SCRIPT, server.address, TOKEN, json.dumps(TABLE), how)
    try:
        assert read_line(process) == "ready"
        assert names(server) == [TABLE["name"]]
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def read_line(process: Any) -> str:
    line: str = process.stdout.readline()
    return line.strip()


def write_line(process: Any) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("how", ["", "fork"])
def test_a_client_that_is_killed_is_named(
    server: TableServer, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Also where a process that it had forked lives on."""
    with client_process(server, how) as process:
        process.kill()
        wait_for(lambda: names(server) == [])
        assert "trainer 3 is gone: its connection ended without a word" in caplog.text
    one = connected(server, "trainer 4")
    assert one.call(WireMessage("create", TABLE)).fields["is_new"]
    one.close()


@pytest.mark.parametrize("how", ["stop", "hold the interpreter"])
def test_a_client_that_is_silent_keeps_what_it_held(
    impatient_server: TableServer, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    server = impatient_server
    caplog.set_level(logging.INFO, "graphshard.server")
    with client_process(server, how) as process:
        if how == "stop":
            process.send_signal(signal.SIGSTOP)
        write_line(process)
        wait_for(lambda: "nothing was heard of trainer 3 for 1 s" in caplog.text)
        time.sleep(1.0)
        assert names(server) == [TABLE["name"]]
        process.send_signal(signal.SIGCONT)
        assert read_line(process) == "False"  # the table was not new
        wait_for(lambda: "trainer 3 is heard again" in caplog.text)
        assert "is gone" not in caplog.text
        process.kill()
        wait_for(lambda: names(server) == [])


def test_a_client_that_was_given_up_is_told(
    server: TableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after its network was away: whatever it asks, and where it would use memory in place."""
    monkeypatch.setattr(rpc, "BEAT_SECONDS", 1000)
    connection = connected(server, "trainer 0")
    host = ServedHost(connection, may_attach=True)
    cluster = Cluster([host], 0)
    cluster.create(TableInfo.from_json(TABLE))
    assert host.rows("node~_N~x") is not None
    (beat,) = connection._beats
    assert beat._stream._connected is not None
    beat._stream._connected.end()
    wait_for(lambda: names(server) == [])
    why = (
        r"host 0 \(.*\) has released what trainer 0 held, because its connection ended without a "
        r"word; .* start the job again from its last checkpoint"
    )
    for op, fields in (("ping", {}), ("create", TABLE), ("read", {"names": []})):
        with pytest.raises(ServerError, match=why):
            connection.call(WireMessage(op, fields))
    assert names(server) == []
    monkeypatch.setattr(rpc, "BEAT_SECONDS", 0.05)
    again = rpc._Beat(connection._server, "trainer 0")
    connection._beats.append(again)
    assert again.heard.wait(20)
    ids = torch.tensor([1])
    for use in (
        lambda: host.rows("node~_N~x"),
        lambda: cluster.read([RowsRequest(["node~_N~x"], ids)]),
        lambda: cluster.write("node~_N~x", ids, torch.ones(1, 2)),
        lambda: connection.start(WireMessage("ping")),
    ):
        with pytest.raises(ServerError, match=why):
            use()
    connection.close()


SERVER_SCRIPT = """
import sys
from graphshard.servers import TableServer
server = TableServer(0, sys.argv[1])
server.start()
print(server.address, flush=True)
for line in sys.stdin:
    print([info.name for info in server.tables.infos()], server.num_clients(), flush=True)
"""


def test_a_server_that_was_stopped_has_what_clients_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those wait for it longer than for answers, and do not end the connection."""
    monkeypatch.setattr(rpc, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(rpc, "BEAT_SECONDS", 0.1)
    process = start_program(SERVER_SCRIPT, TOKEN)
    try:
        connection = MessageClient(read_line(process), TOKEN, timeout=20)
        connection.announce("trainer 0")
        connection.call(WireMessage("create", TABLE))
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        assert not connection.call(WireMessage("create", TABLE)).fields["is_new"]
        write_line(process)
        assert read_line(process) == f"[{TABLE['name']!r}] 1"
        connection.close()
    finally:
        process.kill()
        process.communicate(timeout=30)


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
