# SPDX-License-Identifier: Apache-2.0
"""Any process of a launched job is killed at some moment: it is named, and nothing of it is left.

Also where another one is suspended, and for that reason ends nothing and says nothing.

As in test_run.py the agents are real, and servers, engines and trainers are stubs; a server has a
folder in shared memory. ``make test-all`` has the campaign.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import test_run
from test_run import check_all_gone, commands

from forked_programs import start_program
from graphshard._base.files import shared_memory_folder
from graphshard.train.launch import on_this_machine
from graphshard.train.launch._job_on_hosts import JobCommands, run_job

#: As `graphshard serve` does: tables in shared memory, and what killed ones have left goes.
SERVER = """
import importlib.util, os, signal, sys, time, types
spec = importlib.util.find_spec("graphshard")
package = sys.modules["graphshard"] = types.ModuleType("graphshard")
package.__path__ = spec.submodule_search_locations
from graphshard._base.files import TemporaryFolder, remove_abandoned, shared_memory_folder
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
try:
    with TemporaryFolder(shared_memory_folder()) as folder:
        (folder / "table").touch()
        name = f"{os.environ['NOTES']}/server {os.environ['GRAPHSHARD_HOST']}"
        open(name + ".new", "w").write(f"{os.getpid()} {os.getppid()} {folder}")
        os.rename(name + ".new", name)
        print("up", flush=True)
        time.sleep(1000)
finally:
    remove_abandoned()
"""
TRAINER = (
    "name = f\"{os.environ['NOTES']}/trainer {host} {rank}\"; "
    "watcher = parent(os.getppid()) if os.environ['SHELL_STAYS'] else os.getppid(); "
    "open(name + '.new', 'w').write(f'{os.getpid()} {watcher} {parent(watcher)}'); "
    "os.rename(name + '.new', name); "
    "time.sleep(1000)"
)
LAUNCHER = """
import sys
sys.path.insert(0, {folder!r})
import test_killed_jobs
from pathlib import Path
test_killed_jobs.launch(Path(sys.argv[1]), sys.argv[2])
"""
NAMES = {
    "launcher": r"^$",
    "agent": r"host {host} \(127\.0\.0\.1\) is gone: its agent ended with signal SIGKILL",
    "server": r"host {host} server ended with signal SIGKILL",
    "engine": r"host {host} torchrun ended with signal SIGKILL",
    "watcher": r"host {host} rank {rank} was ended, because the process that watches it was killed",
    "trainer": r"host {host} rank {rank} ended with signal SIGKILL",
}


def launch(notes: Path, end: str) -> None:
    """What the launcher is: a job of two hosts with two trainers each, and its report."""
    outcome = run_job(on_this_machine(2), job(notes, end), token=test_run.TOKEN, on_line=print)
    print("report:", outcome.report(), flush=True)


def job(notes: Path, end: str) -> JobCommands:
    made = commands(TRAINER, notes, end=end)
    return replace(
        made,
        server=[["{python}", "-c", SERVER]] * 2,
        environment={
            **made.environment,
            "TMPDIR": os.environ["TMPDIR"],
            "SHELL_STAYS": "yes" if end else "",
        },
    )


def numbers_in(path: Path) -> list[str]:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path.name} within 60 s"
        time.sleep(0.005)
    return path.read_text().split()


def victim(notes: Path, role: str, host: int, rank: int, launcher: int) -> int:
    """The number of a process, once it is there."""
    if role == "launcher":
        numbers_in(notes / f"trainer {host} {rank % 2}")
        return launcher
    if role in ("server", "agent"):
        return int(numbers_in(notes / f"server {host}")[role == "agent"])
    place = ("trainer", "watcher", "engine").index(role)
    return int(numbers_in(notes / f"trainer {host} {rank % 2}")[place])


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where all temporary files of a job go."""
    made = Path(tempfile.mkdtemp(prefix="gs-killed-"))
    monkeypatch.setenv("TMPDIR", str(made))
    yield made
    shutil.rmtree(made)


def run_case(
    folder: Path, notes: Path, role: str, chosen: random.Random, suspended: str | None = None
) -> None:
    """A job of which one process is killed, after another, of the other host, was suspended.

    The launcher goes on after a second; others stay as they are.
    """
    host, second = chosen.randrange(2), chosen.randrange(2)
    rank = 2 * host + second
    end = chosen.choice(["", "; exit $?"])  # where the shell stays, and where it becomes python
    program = LAUNCHER.format(folder=str(Path(__file__).parent))
    launcher = start_program(program, str(notes), end, TMPDIR=str(folder))
    try:
        process = victim(notes, role, host, rank, launcher.pid)
        time.sleep(chosen.random() * chosen.choice([0.01, 0.5]))
        tables = [numbers_in(notes / f"server {each}")[2] for each in range(2)]
        if suspended is not None:
            other = victim(notes, suspended, 1 - host, chosen.randrange(2), launcher.pid)
            os.kill(other, signal.SIGSTOP)
            if suspended == "launcher":
                time.sleep(1)
                os.kill(other, signal.SIGCONT)
        os.kill(process, signal.SIGKILL)
        printed, errors = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    check_all_gone(notes, 40.0)
    if role != "launcher":
        report = printed.partition("report: error: ")[2]
        name = NAMES[role].format(host=host, rank=rank)
        if role == "trainer" and end:
            name = f"host {host} rank {rank} ended with (exit code 137|signal SIGKILL)"
        assert re.match(name, report), (role, printed, errors)
    deadline = time.monotonic() + 20
    while left := [path for path in [*tables, *folder.glob("graphshard-*")] if Path(path).exists()]:
        assert time.monotonic() < deadline, (role, left)
        time.sleep(0.02)


@pytest.mark.skipif(shared_memory_folder() is None, reason="the system has no shared memory")
@pytest.mark.parametrize(
    "role",
    [
        pytest.param(role, marks=pytest.mark.exhaustive if role in ("agent", "engine") else ())
        for role in NAMES
    ],
)
@pytest.mark.parametrize(
    "count", [1, pytest.param(30, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3000)])]
)
def test_a_process_that_is_killed_is_named_and_leaves_nothing(
    folder: Path, tmp_path: Path, role: str, count: int
) -> None:
    chosen = random.Random(f"{role} {count}")
    for number in range(count):
        notes = tmp_path / f"notes {number}"
        notes.mkdir()
        run_case(folder, notes, role, chosen)


@pytest.mark.skipif(shared_memory_folder() is None, reason="the system has no shared memory")
@pytest.mark.parametrize(
    "suspended",
    [
        pytest.param(role, marks=() if role == "trainer" else pytest.mark.exhaustive)
        for role in NAMES
    ],
)
@pytest.mark.parametrize(
    "count", [1, pytest.param(10, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3000)])]
)
def test_a_process_that_is_suspended_goes_with_its_job(
    folder: Path, tmp_path: Path, suspended: str, count: int
) -> None:
    chosen = random.Random(f"{suspended} {count}")
    for number in range(count):
        notes = tmp_path / f"notes {number}"
        notes.mkdir()
        run_case(folder, notes, "trainer", chosen, suspended)
