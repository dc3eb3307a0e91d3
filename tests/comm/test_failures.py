# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, hang, stop, raise or leave: every other rank raises in time and names them.

Up to 4 ranks; one test forks two programs.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from forked_programs import start_program
from graphshard.comm import (
    ExchangePlan,
    _monitor,
    agree,
    all_reduce,
    fetch_halo,
    guard,
    ragged_all_to_all,
    report_failure,
    shutdown_comms,
    start_fetch,
)
from graphshard.comm.collectives import LONG_BYTES
from graphshard.comm.group import group_state
from graphshard.errors import RankError
from graphshard.testing import RanksFailed, run_ranks

TIMEOUT = 1.5
SIZE = 3


class Operations:
    """Each kind of wait, on small tensors that every rank has used before."""

    def __init__(self, rank: int, world_size: int) -> None:
        rows = [torch.arange(2 if owner != rank else 0) for owner in range(world_size)]
        self.world_size = world_size
        self.plan = ExchangePlan.build(rows, 2)
        self.x = torch.ones(2, 3, requires_grad=True)
        for name in ("all_to_all", "long_slices", "message", "all_reduce", "backward"):
            getattr(self, name)()
        _wait_for_all(world_size)  # else one that fails now fails another's first operations
        group_state().timeout = timedelta(seconds=TIMEOUT)

    def all_to_all(self):
        return fetch_halo([(self.plan, self.x.detach())])

    def long_slices(self):
        """In which there are messages besides the collective."""
        splits = [LONG_BYTES] * self.world_size
        ragged_all_to_all(torch.ones(sum(splits), dtype=torch.uint8), splits, splits)

    def message(self):
        for step in range(1, self.world_size):
            start_fetch(self.plan, step, [self.x.detach()]).wait()

    def all_reduce(self):
        all_reduce(self.x.detach())

    def backward(self):
        fetch_halo([(self.plan, self.x)])[0].sum().backward()


def _wait_for_all(world_size: int) -> None:
    """Until every rank is here. It is in the file of the start, which no rank's end can break."""
    store = dist.distributed_c10d._get_default_store()
    store.add("here", 1)
    deadline = time.monotonic() + 20
    while store.add("here", 0) < world_size:
        assert time.monotonic() < deadline, "a rank did not come"
        time.sleep(0.01)


def survive(rank, world_size, victim, action, operation, pause):
    """Run an operation while the victim does something else; what this rank saw."""
    operations = Operations(rank, world_size)
    _monitor._ANSWER_SECONDS = _monitor._EVENT_SECONDS = 1.0
    if rank == victim:
        time.sleep(pause)
        if action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        if action == "raise":
            raise KeyError("the cause")
        if action == "leave":
            shutdown_comms()
            time.sleep(TIMEOUT + 0.5)
            return None
        if action == "hang":
            time.sleep(TIMEOUT + 1)
        if action == "differ":
            agree("x", "a check that the others do not make")
    start = time.monotonic()
    try:
        getattr(operations, operation)()
    except RankError as error:
        return time.monotonic() - start, error.ranks, str(error)
    return None


def outcomes(victim, action, operation, pause=0.3):
    """What the ranks other than the victim saw, by rank."""
    try:
        args = (victim, action, operation, pause)
        results = dict(enumerate(run_ranks(survive, SIZE, *args, timeout=TIMEOUT + 4)))
    except RanksFailed as failed:
        assert sorted(failed.errors) == [victim], str(failed)
        results = failed.results
    results.pop(victim, None)
    assert sorted(results) == [rank for rank in range(SIZE) if rank != victim]
    return results


@pytest.mark.parametrize(
    ("operation", "victim"),
    [
        ("all_to_all", 0),  # which has the hub of the monitors
        ("message", 1),
        ("all_reduce", 0),
        ("backward", 1),
        ("long_slices", 2),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("all_to_all", 1), ("message", 0), ("all_reduce", 1), ("backward", 0))
        ),
    ],
)
def test_a_rank_killed_in_the_middle(operation, victim):
    for rank, (seconds, ranks, text) in outcomes(victim, "kill", operation).items():
        assert ranks == (victim,)
        assert seconds < TIMEOUT + 3
        assert text.startswith(f"rank {rank}: ")
        assert f"rank {victim} is gone: its process ended without shutdown_comms()" in text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_before_the_others_come(victim):
    for seconds, ranks, _ in outcomes(victim, "kill", "all_reduce", 0.0).values():
        assert ranks == (victim,)
        assert seconds < TIMEOUT + 3


@pytest.mark.parametrize(
    ("operation", "victim"),
    [("all_reduce", 0), pytest.param("message", 1, marks=pytest.mark.exhaustive)],
)
def test_a_rank_that_hangs(operation, victim):
    for rank, (seconds, ranks, text) in outcomes(victim, "hang", operation).items():
        assert ranks == (victim,), text
        assert TIMEOUT - 0.5 < seconds < TIMEOUT + 4
        assert f"rank {victim} did not take part: rank {victim} left " in text
        assert text.startswith(f"rank {rank}: ")


@pytest.mark.parametrize(
    ("operation", "victim"),
    [("long_slices", 0), pytest.param("all_to_all", 2, marks=pytest.mark.exhaustive)],
)
def test_a_rank_that_is_stopped(operation, victim):
    for seconds, ranks, text in outcomes(victim, "stop", operation).values():
        assert ranks == (victim,)
        assert seconds < TIMEOUT + 4
        assert f"rank {victim} does not answer (it is stopped, it holds the interpreter" in text


@pytest.mark.parametrize(("operation", "victim"), [("all_to_all", 0), ("long_slices", 1)])
def test_a_rank_that_raises(operation, victim):
    for seconds, ranks, text in outcomes(victim, "raise", operation).values():
        assert ranks == (victim,)
        assert seconds < TIMEOUT + 2
        assert f"rank {victim} raised KeyError: 'the cause'" in text


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_rank_that_leaves(victim):
    for _, ranks, text in outcomes(victim, "leave", "all_reduce").values():
        assert ranks == (victim,)
        assert f"rank {victim} left with shutdown_comms()" in text


def test_ranks_in_different_operations():
    for _, ranks, text in outcomes(1, "differ", "all_to_all", 0.0).values():
        assert ranks == (1,)
        assert "ranks are in different operations: " in text
        assert "ranks [0, 2] in fetch_halo (operation " in text
        assert "rank 1 in agree (operation " in text


def cascade(rank, world_size):
    """Rank 1 is killed; rank 0, with the hub, notices, and ends; rank 2 comes late."""
    operations = Operations(rank, world_size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(1.5)
    try:
        operations.all_to_all()
    except RankError as error:
        if rank == 0:
            assert error.ranks == (1,)
            os._exit(7)
        return error.ranks, str(error)


def test_a_cascade_still_names_the_first():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(cascade, 3)
    assert "rank 0 ended with code 7" in str(caught.value)
    ranks, text = caught.value.results[2]
    assert ranks == (1,)
    assert "rank 1 is gone" in text


def raise_and_stay(rank, world_size):
    """A rank reports its failure but lives on: nobody waits for the timeout."""
    operations = Operations(rank, world_size)
    group_state().timeout = timedelta(seconds=30)
    if rank == 1:
        try:
            with guard():
                raise ValueError("not today")
        except ValueError:
            time.sleep(2)
        return None
    start = time.monotonic()
    try:
        operations.all_reduce()
    except RankError as error:
        first = time.monotonic() - start, error.ranks, str(error)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError: not today"):
        operations.message()
    assert time.monotonic() - start < 5  # of 30
    return first


def test_a_reported_failure_ends_collectives_at_once():
    zero, _, two = run_ranks(raise_and_stay, 3)
    for seconds, ranks, text in (zero, two):
        assert seconds < 10
        assert ranks == (1,)
        assert "rank 1 raised ValueError: not today" in text


def exit_normally(rank, world_size):
    for code in (0, None):
        with pytest.raises(SystemExit), guard():
            raise SystemExit(code)
    report_failure(RankError("not my fault", [2]))
    with guard():
        pass
    time.sleep(0.2)
    all_reduce(torch.ones(1))


def test_what_is_no_failure_is_not_reported():
    run_ranks(exit_normally, 2)


def own_group(rank, world_size, path):
    """In a group that the user made, too, waits end with a RankError."""
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    operations = Operations(rank, world_size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        operations.message() if rank == 0 else operations.all_to_all()
    except RankError as error:
        return error.ranks, str(error)


def test_a_group_that_the_user_made(tmp_path):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(own_group, 2, str(tmp_path / "store"), group=False)
    ranks, text = caught.value.results[0]
    assert ranks == (1,)
    assert text.startswith("rank 0: start_fetch with rank 1 failed after ")
    assert "onnection" in text


def own_group_that_hangs(rank, world_size, path, victim, how):
    """Monitors come to a group that torch made, too, and tell who waits for whom."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    operations = Operations(rank, world_size)
    started = time.monotonic()
    if rank == victim:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3 * TIMEOUT)
        return None
    try:
        operations.all_reduce()
    except RankError as error:
        return list(error.ranks), str(error), time.monotonic() - started


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_rank_that_hangs_in_a_group_of_torch(tmp_path, victim):
    path = str(tmp_path / "store")
    found = run_ranks(own_group_that_hangs, 3, path, victim, "busy", group=False)
    for ranks, text, seconds in (one for one in found if one is not None):
        assert ranks == [victim]
        assert f"rank {victim}" in text
        assert "did not take part: " in text or "gave up first" in text
        assert seconds > TIMEOUT - 0.5
    assert sum(one is None for one in found) == 1


def fork_and_die(rank, world_size):
    """A forked child outlives rank 1 and holds copies of its connections, except the monitor's."""
    if rank == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    monitor = group_state().monitor
    deadline = time.monotonic() + 10
    while not monitor._events:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first = monitor._events[0]["rank"]
    shutdown_comms()
    return first


def test_children_of_a_dead_rank_do_not_hide_its_death():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fork_and_die, 2)
    assert caught.value.results == {0: 1}


def die_with_a_child_that_lives_on(rank, world_size):
    """The child holds copies of its parent's connections, so those of the backend stay whole."""
    operations = Operations(rank, world_size)
    group_state().timeout = timedelta(seconds=40)
    if rank == 1:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        operations.all_reduce()
    except RankError as error:
        return time.monotonic() - start, error.ranks, str(error)


def test_a_collective_does_not_wait_for_a_dead_rank_whose_child_lives_on():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(die_with_a_child_that_lives_on, 3)
    for rank in (0, 2):
        seconds, ranks, text = caught.value.results[rank]
        assert ranks == (1,)
        assert seconds < 20
        assert "rank 1 is gone" in text


PROGRAM = """
import sys, time, torch
import torch.distributed as dist
from graphshard import comm

rank, path = int(sys.argv[1]), sys.argv[2]
comm.initialize_comms(rank, 2, store=dist.FileStore(path, -1), timeout=5)
with comm.guard():
    comm.all_reduce(torch.ones(1))
    if rank == 1:
        print("ready", flush=True)
        time.sleep(60)
    comm.all_reduce(torch.ones(1))
"""


def test_a_survivors_process_ends(tmp_path):
    processes = [start_program(PROGRAM, str(rank), str(tmp_path / "store")) for rank in range(2)]
    survivor, victim = processes
    try:
        assert victim.stdout.readline() == "ready\n"
        victim.kill()
        _, errors = survivor.communicate(timeout=30)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert survivor.returncode == 1
    # Last of what it says itself: libraries may have words of their own when a process ends.
    last = [line for line in errors.splitlines() if "graphshard.errors." in line][-1]
    assert "graphshard.errors.RankError: rank 0: all_reduce with rank 1 failed after " in last
    assert "rank 1 is gone" in last
