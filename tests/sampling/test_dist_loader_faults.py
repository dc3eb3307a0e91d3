# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, raise, hang or are interrupted while a DataLoader is at work.

The others end with a RankError that names them, soon; nothing is left behind. Up to 3 gloo ranks;
one test starts interpreters.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_cases import graph_of, left_behind, manager_of, write_parts

from forked_programs import forked_interpreters
from graphshard import RankError
from graphshard.comm import _monitor, all_reduce
from graphshard.comm.group import group_state
from graphshard.sampling import DataLoader, DistNeighborSampler
from graphshard.testing import RanksFailed, run_ranks

SIZE = 3
VICTIM = 1
TIMEOUT = 2.0
COLLECTIVE = {"transport": "collective", "map_features": False}


class Failing(DistNeighborSampler):
    """Does something in place of the draws of one step."""

    def __init__(self, action: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.action = action

    def draw(self, structure: Any, seeds: Any, draw_seed: Any, **options: Any) -> Any:
        if draw_seed.step == 3:
            self.action()
        return super().draw(structure, seeds, draw_seed, **options)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise LookupError("the cause")


def nothing() -> None:
    pass


ACTIONS = {"kill": kill, "raise": fail, "hang": lambda: time.sleep(TIMEOUT + 3), "none": nothing}


def loader_of(parts: str, rank: int, action: Any = nothing, **options: Any) -> DataLoader:
    manager = manager_of(parts, rank)
    features = {"x": torch.ones(manager.num_nodes(), 4)}
    sampler = Failing(action, [3, 2], input_node_features=features)
    seeds = torch.arange(24) if rank < 2 else torch.arange(0)
    return DataLoader(manager, seeds, sampler, 2, seed=0, **{**COLLECTIVE, **options})


def survive(
    rank: int, world_size: int, parts: str, where: str, action: str, prefetch: int
) -> dict[str, Any] | None:
    """Iterate while the victim does something in its loop or in a thread; what this rank saw."""
    is_first_pass = True  # whose threads may be as far ahead as the step of the action

    def act() -> None:
        if rank == VICTIM and not is_first_pass:
            ACTIONS[action]()

    loader = loader_of(parts, rank, act if where == "stage" else nothing, prefetch=prefetch)
    _monitor._ANSWER_SECONDS = _monitor._EVENT_SECONDS = 1.0
    for _ in loader:  # every group has been used before
        break
    is_first_pass = False
    limit = timedelta(seconds=TIMEOUT)
    group_state().timeout = limit
    for state in loader._resources.groups._states.values() if prefetch else ():
        state.timeout = limit
    seen = 0
    start = time.monotonic()
    try:
        for batch in loader:
            seen += 1
            start = time.monotonic()
            if where == "loop" and batch.step == 3:
                act()
    except RankError as error:
        seconds = time.monotonic() - start
        text, ranks = str(error), list(error.ranks)
        del error
        loader.close()
        return {
            "text": text,
            "ranks": ranks,
            "seconds": seconds,
            "seen": seen,
            "left": left_behind(),
        }
    return None


def outcomes(tmp_path: Path, *args: Any) -> tuple[dict[int, Any], dict[int, str]]:
    parts = write_parts(tmp_path, graph_of("plain"), SIZE, "random")
    try:
        return dict(enumerate(run_ranks(survive, SIZE, parts, *args, timeout=30))), {}
    except RanksFailed as failed:
        return failed.results, failed.errors


@pytest.mark.parametrize(
    ("where", "prefetch"),
    [
        ("loop", 0),
        ("loop", 3),
        ("stage", 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("loop", 1), ("stage", 0), ("stage", 3))
        ),
    ],
)
def test_a_rank_that_is_killed(tmp_path: Path, where: str, prefetch: int) -> None:
    results, errors = outcomes(tmp_path, where, "kill", prefetch)
    assert sorted(errors) == [VICTIM], errors
    assert sorted(results) == [0, 2]
    # The victim has asked for step 3, so its threads may have finished ``prefetch`` steps more.
    at_most = {"loop": 4 + prefetch, "stage": 3}[where]
    for rank, found in results.items():
        assert found["ranks"] == [VICTIM]
        assert found["text"].startswith(f"rank {rank}: ")
        assert f"rank {VICTIM} is gone" in found["text"]
        assert found["seconds"] < TIMEOUT + 4
        assert found["seen"] <= at_most
        assert found["left"] == []


@pytest.mark.parametrize(
    ("where", "prefetch"),
    [("loop", 0), pytest.param("loop", 2, marks=pytest.mark.exhaustive), ("stage", 2)],
)
def test_a_rank_that_raises(tmp_path: Path, where: str, prefetch: int) -> None:
    results, errors = outcomes(tmp_path, where, "raise", prefetch)
    assert sorted(errors) == [VICTIM], errors
    assert "LookupError: the cause" in errors[VICTIM]
    assert "in fail" in errors[VICTIM]  # the traceback of the thread
    for found in results.values():
        assert found["ranks"] == [VICTIM]
        assert f"rank {VICTIM} raised LookupError: the cause" in found["text"]
        assert found["left"] == []


@pytest.mark.parametrize(
    ("where", "prefetch"), [pytest.param("loop", 2, marks=pytest.mark.exhaustive), ("stage", 1)]
)
def test_a_rank_that_hangs(tmp_path: Path, where: str, prefetch: int) -> None:
    results, _ = outcomes(tmp_path, where, "hang", prefetch)
    for found in (results[0], results[2]):
        assert found["ranks"] == [VICTIM], found["text"]
        assert f"rank {VICTIM} did not take part" in found["text"]
        assert found["seconds"] < TIMEOUT + 4
        assert found["left"] == []


def cancelled(rank: int, world_size: int, parts: str) -> dict[str, Any]:
    """Close a loader while its threads wait for a rank that will not come."""
    loader = loader_of(parts, rank, prefetch=2)
    found: dict[str, Any] = {}
    run = iter(loader)
    next(run)
    if rank == 0:
        next(run)  # its threads now have permission for a batch that nobody else has
        start = time.monotonic()
        loader.close()
        found["seconds"] = time.monotonic() - start
    found["left"] = left_behind() if rank == 0 else []
    all_reduce(torch.ones(1))  # the main group is as it was
    return found


def test_a_loader_can_be_closed_while_its_threads_wait(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    zero, _ = run_ranks(cancelled, 2, parts)
    assert zero["seconds"] < 4
    assert zero["left"] == []


def open_things() -> tuple[int, int]:
    """Descriptors and threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled() -> tuple[int, int]:
    """What is open once nothing has closed for a while: threads that end take their time."""
    deadline = time.monotonic() + 20
    now, before = open_things(), (0, 0)
    while now != before and time.monotonic() < deadline:
        time.sleep(0.3)
        now, before = open_things(), now
    return now


def come_and_go(
    rank: int, world_size: int, parts: str
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What is open after loaders were closed, and after they were dropped."""
    closed, dropped = [], []
    for number in range(6):
        loader = loader_of(parts, rank, map_features=number % 2 == 0, prefetch=1)
        for _ in loader:
            if number > 2:
                break
        if number % 3:
            loader.close()
            closed.append(settled())
        else:
            del loader
            dropped.append(settled())
    return closed, dropped


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc lists")
def test_loaders_give_back_their_groups(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for closed, dropped in run_ranks(come_and_go, 2, parts):
        assert len(set(closed)) == len(set(dropped)) == 1, (closed, dropped)
        # A closed loader has its graph, and that the file whose edges it maps.
        (descriptors, threads) = closed[0]
        assert dropped[0] == (descriptors - 1, threads)


def different_exits(rank: int, world_size: int, parts: str) -> dict[str, Any]:
    """Rank 0 leaves the loop a batch later; then both try to begin another pass."""
    loader = loader_of(parts, rank, prefetch=1)
    _monitor._ANSWER_SECONDS = _monitor._EVENT_SECONDS = 1.0
    run = iter(loader)
    for _ in range(2):
        next(run)
    for state in (group_state(), *loader._resources.groups._states.values()):
        state.timeout = timedelta(seconds=TIMEOUT)
    if rank == 0:
        next(run)
    run.close()
    start = time.monotonic()
    try:
        iter(loader)
    except RuntimeError as error:
        return {"text": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start}
    return {}


def test_leaving_at_different_batches_is_an_error_and_no_wait_without_end(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for found in run_ranks(different_exits, 2, parts):
        assert found["seconds"] < TIMEOUT + 6
        assert "Error" in found["text"]


PROGRAM = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
import graphshard
from graphshard import comm
from graphshard.sampling import DataLoader, DistNeighborSampler

rank, store, parts, mode = int(sys.argv[1]), *sys.argv[2:]
comm.initialize_comms(rank, 2, store=dist.FileStore(store, -1), timeout=30)
manager = graphshard.construct_full_graph(graphshard.load_dgl_partition_data(parts, rank))
sampler = DistNeighborSampler(
    [3, 2], input_node_features={"x": torch.ones(manager.num_nodes(), 4)}
)
loader = DataLoader(
    manager, torch.arange(24), sampler, 1, seed=0, transport="collective", map_features=False
)
with comm.guard():
    if mode == "ends":
        batches = iter(loader)
        next(batches)
    for batch in loader if mode != "ends" else ():
        if batch.step == 3 and mode == "raises" and rank == 1:
            raise ValueError("not today")
        if batch.step == 3 and mode == "ctrl-c":
            print("ready", flush=True)
            if rank == 1:
                time.sleep(60)
"""

EXITS = {
    # mode: exit codes that each rank may have
    "ends": ((0,), (0,)),
    "raises": ((1,), (1,)),
    "ctrl-c": ((-signal.SIGINT, 1), (-signal.SIGINT, 1)),
}


def start(folder: Path, parts: str, mode: str) -> list[subprocess.Popen[str]]:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(2):
        # One of the two is an interpreter that was started: rank 0 where all is well.
        with contextlib.nullcontext() if (rank == 0) == (mode == "ends") else forked_interpreters():
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(program), str(rank), str(folder / "store"), parts, mode],
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                        "OMP_NUM_THREADS": "1",
                        "GLOO_SOCKET_IFNAME": "lo",
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
    return ranks


@pytest.mark.timeout(240)
def test_programs_end_cleanly(tmp_path: Path, run_all: bool) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    # Interpreters are dear. How one ends with threads at work is in the other two, and what a rank
    # that raises tells others is above.
    modes = [mode for mode in EXITS if run_all or mode != "raises"]
    running = {mode: start(tmp_path / mode, parts, mode) for mode in modes}
    try:
        for mode, ranks in running.items():
            if mode == "ctrl-c":  # one rank is in its loop then, the other waits for a batch
                for process in ranks:
                    assert process.stdout.readline() == "ready\n", process.communicate()[1]
                time.sleep(0.5)
                for process in ranks:  # as a terminal does
                    process.send_signal(signal.SIGINT)
                sent = time.monotonic()
            for process, codes in zip(ranks, EXITS[mode], strict=True):
                _, errors = process.communicate(timeout=100)
                assert process.returncode in codes, f"{mode}: {process.returncode}\n{errors}"
                for mark in ("Fatal", "terminate called", "Exception ignored", "core dumped"):
                    assert mark not in errors, f"{mode}: {errors}"
                if mode == "raises":
                    raised = [line for line in errors.splitlines() if "Error: " in line]
                    assert "ValueError: not today" in "".join(raised[-1:]), errors
                if mode == "ctrl-c":
                    assert time.monotonic() - sent < 20
                    assert "KeyboardInterrupt" in errors or "RankError" in errors
    finally:
        for ranks in running.values():
            for process in ranks:
                process.kill()
                process.communicate()
    assert left_behind() == []
