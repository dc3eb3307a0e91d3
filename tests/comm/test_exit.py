# SPDX-License-Identifier: Apache-2.0
"""The ends of groups, and of programs that do not call `shutdown_comms`. 2 ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from forked_programs import cold_forks
from graphshard import comm
from graphshard.comm import _start
from graphshard.testing import run_ranks

HEAD = """
    import atexit, os, sys, time
    from pathlib import Path

    def report():
        # Registered first, this runs last, and the interpreter ends after it.
        names = [entry.read_text().strip() for entry in Path("/proc/self/task").glob("*/comm")]
        print("at the end:", sorted(name for name in names if "gloo" in name), flush=True)
        Path(f"ended{os.environ['RANK']}").touch()

    atexit.register(report)
    import torch
    import torch.distributed as dist
    from graphshard import comm

    rank = int(os.environ["RANK"])
    store = dist.FileStore("store", 2)
"""


def run(folder, program):
    """Run a program as two ranks; the exit status of each, what it printed, and its errors.

    Rank 0 is an interpreter that was started, whose end is the point, and the other is forked.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    script = folder / "program.py"
    script.write_text(textwrap.dedent(HEAD) + textwrap.dedent(program))
    ranks = []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": path}
        with cold_forks() if rank else contextlib.nullcontext():
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    cwd=folder,
                    env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
    try:
        outputs = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(p.returncode, *output) for p, output in zip(ranks, outputs, strict=True)]


START = {
    "graphshard's": "comm.initialize_comms(store=store, timeout=60)",
    "own": 'dist.init_process_group("gloo", store=store, rank=rank, world_size=2)',
    "at exit": "comm.initialize_comms(store=store); atexit.register(comm.shutdown_comms)",
}


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's list of threads")
@pytest.mark.parametrize(
    "start",
    [
        name if i == 0 else pytest.param(name, marks=pytest.mark.exhaustive)
        for i, name in enumerate(START)
    ],
)
def test_no_thread_of_a_group_outlives_the_interpreter(tmp_path, start):
    # Such a thread aborts the process, now and then, when it releases a tensor.
    program = f"{START[start]}\ncomm.all_reduce(torch.ones(2))\n"
    for status, printed, errors in run(tmp_path, program):
        last = printed.splitlines()[-1:]  # some releases of gloo print, too
        assert (status, last) == (0, ["at the end: []"]), errors


def test_a_collective_that_was_left_does_not_hold_up_the_end(tmp_path):
    program = """
        from graphshard.comm.collectives import start_all_to_all
        from graphshard.comm.group import group_state
        from graphshard.errors import RankError

        comm.initialize_comms(store=store, timeout=60)
        comm.all_reduce(torch.ones(2))
        if rank == 0:
            pending = start_all_to_all(group_state(), torch.ones(2), [1, 1], [1, 1])
            sys.exit(3)
        deadline = time.monotonic() + 30
        while not Path("ended0").exists():  # the other rank ends while this one does not come
            assert time.monotonic() < deadline
            time.sleep(0.05)
        try:
            comm.all_reduce(torch.ones(2))
        except RankError as error:
            print(error)
    """
    (first, _, errors), (second, printed, _) = run(tmp_path, textwrap.dedent(program))
    assert first == 3, errors
    assert second == 0
    assert "rank 0 is gone: its process ended without shutdown_comms()" in printed


@pytest.mark.exhaustive
def test_a_program_that_fails_is_named(tmp_path):
    program = """
        comm.initialize_comms(store=store, timeout=60)
        comm.all_reduce(torch.ones(2))
        if rank == 1:
            raise KeyError("the cause")
        comm.all_reduce(torch.ones(2))
    """
    (_, _, first), (_, _, second) = run(tmp_path, textwrap.dedent(program))
    assert "rank 1 is gone: its process ended without shutdown_comms()" in first
    assert "KeyError: 'the cause'" in second


def end_with_a_model_that_holds_the_group(rank, world_size, folder):
    """`DistributedDataParallel` goes last, and its end waits for the threads of the group."""
    for turn in range(20):
        comm.initialize_comms(rank, world_size, store=dist.FileStore(f"{folder}/{turn}", 2))
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        comm.all_reduce(torch.ones(2))
        comm.shutdown_comms()
        del model


def test_a_model_that_outlives_its_group_does_not_hang(tmp_path):
    run_ranks(end_with_a_model_that_holds_the_group, 2, str(tmp_path), group=False, timeout=60.0)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's list of threads")
def test_threads_of_gloo_are_waited_for_until_they_sleep(monkeypatch):
    found = []
    monkeypatch.setattr(_start, "_GLOO_THREADS_ARE_NAMED", True)
    monkeypatch.setattr(_start, "_GLOO_THREAD", "pytest-busy")
    lasts = threading.Event()

    def work():
        ctypes.CDLL(None).prctl(15, b"pytest-busy", 0, 0, 0)  # PR_SET_NAME
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:  # wakes up again and again, as one without the lock
            time.sleep(0.003)
        found.append("slept")
        lasts.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while not _start._gloo_threads():
            time.sleep(0.001)
        _start.wait_until_idle()
        assert found == ["slept"]
    finally:
        lasts.set()
        thread.join()
    deadline = time.monotonic() + 20
    while _start._gloo_threads():  # the system is a moment behind
        assert time.monotonic() < deadline
        time.sleep(0.01)
