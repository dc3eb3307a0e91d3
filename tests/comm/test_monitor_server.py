# SPDX-License-Identifier: Apache-2.0
"""The server and what unauthenticated and broken connections send it. One process, on loopback."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time

import pytest

from graphshard.comm import _monitor_server
from graphshard.comm._monitor import FailureMonitor
from graphshard.comm._monitor_server import Lines, MonitorServer, line, send_event

TOKEN = "secret"
SIZE = 4
STATE = {"operations": [["group", "all_reduce", 3, [0, 1], 0.5]], "last": ["barrier", 2, 1.5]}
EVENT = {"kind": "raised", "rank": 1, "ranks": [1], "text": "KeyError: 7"}
MESSAGES = [
    {"token": TOKEN, "rank": 1},
    {"event": EVENT},
    {"ask": 3},
    {"here": [0, 1, 1, STATE]},
    {"bye": True},
]


@pytest.fixture
def server():
    made = MonitorServer(socket.create_server(("127.0.0.1", 0)), TOKEN, SIZE)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("graphshard")]


def connect(server: MonitorServer) -> socket.socket:
    return socket.create_connection(server.address, 10)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server hangs up, which it has time to do."""
    connection.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


def check_serves(server: MonitorServer) -> None:
    """Two members can still come, and what one says reaches the other."""
    assert server._thread.is_alive()
    monitors = [FailureMonitor(server.address, TOKEN, rank, SIZE) for rank in (2, 3)]
    monitors[0].report("KeyError: last")
    deadline = time.monotonic() + 10
    texts: list[str | None] = []
    while "KeyError: last" not in texts:
        assert time.monotonic() < deadline
        texts = [event.get("text") for event in list(monitors[1]._events)]
    for monitor in monitors:
        monitor.close()


def send(server: MonitorServer, data: bytes) -> None:
    with connect(server) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


@pytest.mark.parametrize(
    "data",
    [
        b'{"token": "\\ud800", "rank": 1}\n',
        b"[" * 200_000 + b"\n",
        b'{"a":' * 700 + b"\n",
        b'{"token": ["secret"], "rank": 1}\n',
        b'{"token": "secret", "rank": true}\n',
        b'{"token": "secret", "rank": 1.0}\n',
        b"\xff\xfe\n",
        b"1" * 4000 + b"\n",
        b"\n",
    ],
    ids=range(9),
)
def test_what_is_unauthenticated_ends_its_connection_alone(server, data):
    send(server, data)
    check_serves(server)


@pytest.mark.parametrize(
    "message",
    [
        b"[" * 200_000,
        b"{}",
        *(
            json.dumps(message).encode()
            for message in [
                {"event": None},
                {"event": {**EVENT, "ranks": None}},
                {"event": {**EVENT, "ranks": [SIZE]}},
                {"event": {**EVENT, "kind": "ended"}},
                {"event": {**EVENT, "text": 3}},
                {"ask": [1]},
                {"here": [0, 1]},
                {"here": [[], 1, 1, STATE]},
                {"here": [0, {}, 1, STATE]},
                {"here": [0, 1, 1, {"operations": [[1, 2, 3, 4, 5]], "last": None}]},
                {"here": [0, 1, 1, {**STATE, "last": ["barrier", 2, "now"]}]},
            ]
        ),
    ],
    ids=range(13),
)
def test_what_a_member_says_has_a_form(server, message):
    """Else it is a member no more, and all others learn that it is gone."""
    others = FailureMonitor(server.address, TOKEN, 0, SIZE)
    send(server, line({"token": TOKEN, "rank": 1}) + message + b"\n")
    deadline = time.monotonic() + 10
    while not others._events:
        assert time.monotonic() < deadline
    assert others._events == [{"kind": "ended", "rank": 1, "ranks": [1]}]
    assert others._thread.is_alive()
    others.close()
    check_serves(server)


def test_a_member_speaks_for_itself(server):
    other = FailureMonitor(server.address, TOKEN, 0, SIZE)
    send(server, line({"token": TOKEN, "rank": 1}) + line({"event": {**EVENT, "rank": 3}}))
    deadline = time.monotonic() + 10
    while not other._events:
        assert time.monotonic() < deadline
    assert other._events[0]["rank"] == 1
    other.close()


def test_a_watch_survives_no_nonsense_but_knows_it(monkeypatch):
    """What breaks a monitor's thread counts as the end of the server: nothing is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for words in (b'{"where": 3}\n', b"[" * 200_000 + b"\n", b'{"here": []}\n', b"\xff\n"):
            monitor = FailureMonitor(listener.getsockname(), TOKEN, 1, 2)
            with listener.accept()[0] as server:
                server.sendall(words)
                monitor._thread.join(10)
                assert not monitor._thread.is_alive()
                assert not monitor._connected
                assert monitor._events[0]["rank"] == 0
            monitor.close()


def test_who_does_not_introduce_itself_is_dropped(server, monkeypatch):
    monkeypatch.setattr(_monitor_server, "_AUTHENTICATION_SECONDS", 0.1)
    with connect(server) as silent, connect(server) as slow:
        slow.sendall(b'{"token"')
        assert is_closed(silent)
        assert is_closed(slow)
    check_serves(server)


def test_unauthenticated_connections_are_few(server, monkeypatch):
    monkeypatch.setattr(_monitor_server, "_MAX_UNAUTHENTICATED", 3)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(30)]
        for connection in connections[: -3 - SIZE]:
            assert is_closed(connection)
        assert len(server._unauthenticated) <= 3 + SIZE + 1  # that one is about to go
        check_serves(server)


def test_news_from_who_may_not_come_in():
    server = MonitorServer(socket.create_server(("127.0.0.1", 0)), TOKEN, SIZE, event_seconds=60)
    member = FailureMonitor(server.address, TOKEN, 1, SIZE)
    send_event(server.address, "wrong", 1, EVENT)
    send_event(server.address, TOKEN, 1, EVENT)
    deadline = time.monotonic() + 10
    while not member._events:
        assert time.monotonic() < deadline
    assert member._events == [EVENT]
    member.close()
    server.close()
    send_event(server.address, TOKEN, 1, EVENT)  # nobody there


def test_news_that_come_late_are_no_news(server):
    """The server of a job that has run for long does not end it because somebody took its port."""
    member = FailureMonitor(server.address, TOKEN, 1, SIZE)
    send_event(server.address, TOKEN, 1, EVENT)
    assert member._events == []
    member.close()


def value_of(draw: random.Random, depth: int = 0):
    """Any JSON value, of the words that the server knows and of others."""
    words = ["token", "rank", "event", "ask", "here", "bye", "kind", "ranks", "text", TOKEN]
    kind = draw.randrange(9 if depth < 4 else 7)
    if kind == 7:
        return [value_of(draw, depth + 1) for _ in range(draw.randrange(5))]
    if kind == 8:
        return {draw.choice(words): value_of(draw, depth + 1) for _ in range(draw.randrange(4))}
    scalars = [None, True, draw.choice(words), "\ud800", draw.randrange(-3, 6), 1e308, 10**40]
    return scalars[kind]


def line_of(draw: random.Random) -> bytes:
    """A message, broken in one of several ways."""
    way = draw.randrange(5)
    if way == 0:
        return draw.randbytes(draw.choice([1, 10, 1000, 10_000]))
    if way == 1:
        return json.dumps(value_of(draw)).encode()
    message = json.loads(json.dumps(draw.choice(MESSAGES)))
    if way == 2:
        data = bytearray(json.dumps(message).encode())
        data[draw.randrange(len(data))] = draw.randrange(256)
        return bytes(data)
    if way == 3:
        return draw.choice([b"[", b'{"event":', b'"\\ud800', b"9"]) * draw.randrange(1, 30_000)
    message[draw.choice(list(message))] = value_of(draw)
    return json.dumps(message).encode()


@pytest.mark.timeout(1200)  # for all of them
def test_random_lines(run_all):
    draw = random.Random(0)
    for _ in range(100 if run_all else 5):
        # A new one now and then, since a server tells all that it knows to whoever comes.
        server = MonitorServer(socket.create_server(("127.0.0.1", 0)), TOKEN, SIZE)
        for _ in range(200):
            greeting = line({"token": TOKEN, "rank": 1}) if draw.random() < 0.5 else b""
            lines = [line_of(draw) for _ in range(draw.randrange(1, 4))]
            send(server, greeting + b"\n".join(lines) + b"\n")
            assert server._thread.is_alive()
        check_serves(server)
        server.close()


def test_random_lines_are_cut_or_refused(run_all):
    """Whatever comes, `Lines` raises nothing but ValueError, and keeps no more than its limit."""
    draw = random.Random(1)
    for _ in range(20_000 if run_all else 2000):
        lines = Lines()
        with contextlib.suppress(ValueError):
            lines.feed(line_of(draw) + b"\n" + line_of(draw), 4096)
            assert len(lines._rest) <= 4096
