# SPDX-License-Identifier: Apache-2.0
"""Failure monitors of all ranks in one process: what they find out. No process group."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

from graphshard.comm import _monitor
from graphshard.comm._monitor import FailureMonitor
from graphshard.comm._monitor_server import Lines, MonitorServer


class Ranks:
    """A server and the monitors of all ranks; `end` makes one disappear without a word."""

    def __init__(self, world_size: int) -> None:
        self.server = MonitorServer(socket.create_server(("127.0.0.1", 0)), "secret", world_size)
        address = self.server.address
        self.monitors = [
            FailureMonitor(address, "secret", r, world_size, self.server if r == 0 else None)
            for r in range(world_size)
        ]
        deadline = time.monotonic() + 20
        while len(self.server._ranks) < world_size:  # else it would not know who is gone
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def __getitem__(self, rank: int) -> FailureMonitor:
        return self.monitors[rank]

    def end(self, rank: int) -> None:
        monitor = self.monitors[rank]
        monitor._closing = True
        monitor._socket.shutdown(socket.SHUT_RDWR)
        monitor._thread.join()

    def ask(self, rank: int, name: str, number: int, peers: list[int], timed_out: bool = True):
        """The verdict on an operation that a rank is in, while the others are where they are."""
        self[rank].enter("group", name, number, peers)
        verdict = self[rank].diagnose(name, peers, timed_out)
        self[rank].leave()
        return verdict


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(_monitor, "_ANSWER_SECONDS", 10.0)  # all are alive, if perhaps slow
    made = Ranks(4)
    yield made
    for monitor in reversed(made.monitors):
        monitor.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("graphshard")]


def elsewhere(monitor: FailureMonitor, *args) -> threading.Thread:
    """Another thread of the same rank enters an operation and stays in it."""
    thread = threading.Thread(target=monitor.enter, args=args)
    thread.start()
    thread.join()
    return thread


def test_a_rank_that_ends_is_named(ranks):
    ranks.end(2)
    for rank in (0, 1, 3):
        verdict = ranks.ask(rank, "fetch_halo", 3, [r for r in range(4) if r != rank], False)
        assert verdict.ranks == (2,)
        assert verdict.text.startswith("rank 2 is gone: its process ended without shutdown_comms()")


def test_the_first_cause_is_the_same_for_all(ranks):
    ranks[3].report("ValueError: too many nodes")
    ranks.end(1)
    ranks[2].report("KeyError: 7")
    for rank in (0, 2):
        verdict = ranks.ask(rank, "all_reduce", 3, [r for r in range(4) if r != rank], False)
        assert (verdict.text, verdict.ranks) == ("rank 3 raised ValueError: too many nodes", (3,))
    assert ranks[0].has_failure


def test_a_rank_that_only_ends_gives_nothing_up(ranks):
    ranks.end(1)
    deadline = time.monotonic() + 5
    while not ranks[0]._events:
        assert time.monotonic() < deadline
    assert not ranks[0].has_failure


def test_who_has_not_come(ranks):
    elsewhere(ranks[1], "group", "all_reduce", 5, [0, 2, 3])
    ranks[2].enter("group", "fetch_halo", 4, [0, 1, 3])
    ranks[2].leave()
    verdict = ranks.ask(0, "all_reduce", 5, [1, 2, 3])
    assert verdict.ranks == (2, 3)
    assert verdict.text.startswith(
        "ranks [2, 3] did not take part: rank 2 left fetch_halo (operation 4) 0."
    )
    assert verdict.text.endswith("rank 3 has not communicated yet")
    again = ranks.ask(1, "all_reduce", 5, [0, 2, 3])
    assert again.ranks == (2, 3)
    assert again.text == f"rank 0 gave up first: {verdict.text}"


def test_waiting_is_followed_from_rank_to_rank(ranks):
    """Rank 0 waits for 1, which waits for 2, which waits for nobody; 3 is only busy."""
    elsewhere(ranks[1], "group", "start_fetch", 8, [2])
    verdict = ranks.ask(0, "start_fetch", 8, [1])
    assert verdict.ranks == (2,)


def test_what_threads_of_a_loader_wait_for_is_told_apart(ranks):
    """A loader thread says nothing about the main thread, nor about other loader threads."""
    peers = {rank: [r for r in range(4) if r != rank] for rank in range(4)}
    elsewhere(ranks[1], "thread group 7 for sampling", "draw", 3, peers[1])
    verdict = ranks.ask(0, "all_reduce", 5, [1])  # of the main group
    assert verdict.ranks == (1,)
    assert verdict.text.startswith("rank 1 did not take part: ")


def test_a_loader_thread_that_waits_for_a_busy_rank(ranks):
    elsewhere(ranks[1], "thread group 7 for sampling", "draw", 3, [0, 2])
    elsewhere(ranks[1], "thread group 8 for features", "rows", 2, [0, 2])
    elsewhere(ranks[2], "thread group 7 for sampling", "draw", 3, [0, 1])
    ranks[0].enter("thread group 8 for features", "rows", 2, [1, 2])
    verdict = ranks[0].diagnose("rows", [1, 2], True)
    ranks[0].leave()
    assert verdict.ranks == (2,)


@pytest.mark.parametrize("number", [5, 6])
def test_different_operations(ranks, number):
    name = "all_reduce" if number == 5 else "fetch_halo"
    for rank in (1, 3):
        elsewhere(ranks[rank], "group", "fetch_halo", 5, [r for r in range(4) if r != rank])
    elsewhere(ranks[2], "group", name, number, [0, 1, 3])
    verdict = ranks.ask(0, "fetch_halo", 5, [1, 2, 3])
    assert verdict.ranks == (2,)
    assert verdict.text == (
        "ranks are in different operations: ranks [0, 1, 3] in fetch_halo (operation 5); "
        f"rank 2 in {name} (operation {number})"
    )


def test_after_half_of_its_time_a_wait_is_told_once_by_one_rank(ranks, capsys):
    """Ranks 1 and 3 wait for all, rank 2 for rank 1; rank 0 has not come, and says nothing."""
    for rank, peers in ((1, [0, 2, 3]), (2, [1]), (3, [0, 1, 2])):
        thread = threading.Thread(target=ranks[rank].enter, args=("group", "sum", 5, peers, 1.0))
        thread.start()
        thread.join()
    deadline = time.monotonic() + 20
    while not ranks[1]._notices or any(n.is_alive() for r in (1, 2, 3) for n in ranks[r]._notices):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.2)  # nothing more comes
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("graphshard: rank 1 has waited ")
    assert line.endswith(
        " s of 1 s in sum (operation 5): rank 0 is not there yet: rank 0 has not communicated yet"
    )


def test_a_wait_that_ends_in_time_is_not_told(ranks, capsys):
    ranks[1].enter("group", "sum", 5, [0], 1.0)
    ranks[1].leave()
    elsewhere(ranks[2], "group", "sum", 6, [0], 600.0)
    time.sleep(1.5)
    assert capsys.readouterr().err == ""


def test_all_are_there(ranks):
    for rank in (1, 2, 3):
        elsewhere(ranks[rank], "group", "barrier", 5, [r for r in range(4) if r != rank])
    verdict = ranks.ask(0, "barrier", 5, [1, 2, 3])
    assert "every rank is in the operation, but it does not complete" in verdict.text
    assert verdict.ranks == (1, 2, 3)


def test_a_rank_that_left_in_good_order(ranks):
    ranks[1].close()
    verdict = ranks.ask(0, "start_fetch", 5, [1], False)
    assert (verdict.text, verdict.ranks) == ("rank 1 left with shutdown_comms()", (1,))


def test_a_rank_that_does_not_answer(ranks, monkeypatch):
    monkeypatch.setattr(_monitor, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(ranks[2], "_take", lambda message: None)
    verdict = ranks.ask(0, "start_fetch", 5, [2])
    assert verdict.ranks == (2,)
    assert "rank 2 does not answer (it is stopped" in verdict.text


def test_rank_0_takes_the_server_with_it(ranks):
    for connection in list(ranks.server._ranks.values()):
        connection.tcp.shutdown(socket.SHUT_RDWR)
    for rank in (1, 3):
        verdict = ranks.ask(rank, "all_reduce", 5, [0], False)
        assert verdict.ranks == (0,)
        assert "rank 0 is gone" in verdict.text


def test_after_an_orderly_end_of_rank_0_nothing_is_known(ranks):
    ranks[0].close()
    deadline = time.monotonic() + 5
    while ranks[1]._connected:
        assert time.monotonic() < deadline
    verdict = ranks.ask(1, "all_reduce", 5, [0, 2], False)
    assert (verdict.text, verdict.ranks) == ("rank 0 left with shutdown_comms()", (0,))
    assert ranks.ask(1, "start_fetch", 6, [2], True) is None
    ranks.monitors = ranks.monitors[1:]


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"token": "wrong", "rank": 1}).encode(),
        json.dumps({"rank": 1}).encode(),
        json.dumps({"token": "secret", "rank": 0}).encode(),  # taken
        json.dumps({"token": "secret", "rank": 4}).encode(),
        b"GET / HTTP/1.1",
        b"[1]",
    ],
)
def test_connections_without_the_token_are_refused(ranks, line):
    with socket.create_connection(ranks.server.address, 5) as connection:
        connection.sendall(
            line + b"\n" + b'{"event": {"kind": "raised", "rank": 1, "ranks": [1]}}\n'
        )
        connection.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    time.sleep(0.05)
    assert not ranks[0]._events


def test_lines_are_cut_wherever_they_arrive():
    lines = Lines()
    assert lines.feed(b'{"a": 1}\n{"b"') == [{"a": 1}]
    assert lines.feed(b": 2}") == []
    assert lines.feed(b"\n") == [{"b": 2}]
    with pytest.raises(ValueError, match="a line is too long"):
        lines.feed(b"x" * (1 << 21))


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionError, match=rf"rank 0 cannot be reached \(127.0.0.1:{port}"):
        FailureMonitor(("127.0.0.1", port), "secret", 1, 2)


def test_importing_starts_nothing():
    assert not [t for t in threading.enumerate() if t.name.startswith("graphshard")]
