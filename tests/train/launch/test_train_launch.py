# SPDX-License-Identifier: Apache-2.0
"""The launcher, with workers that are a line of Python each: no torch, no process group."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forked_programs import start_program
from graphshard.comm import _monitor
from graphshard.comm.group import MARGIN_SECONDS
from graphshard.train import launch_workers
from graphshard.train.launch import _children, _host_agent, _watch

GRACE_SECONDS = _watch.GRACE_SECONDS

HERE = "import os, sys, time; rank = int(os.environ['RANK']); "


def command(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", HERE + code]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture(autouse=True)
def _short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch, "GRACE_SECONDS", 0.5)


def test_workers_get_torchrun_s_environment_and_their_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    lines: list[str] = []
    names = "WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    code = f"print(rank, *[os.environ[n] for n in '{names}'.split()])"
    outcome = launch_workers(command(code), 3, on_stderr=lines.append)
    assert outcome.exit_code == 0
    assert outcome.report() == ""
    rank, world, local, local_world, address, port, threads = lines[0].split()
    assert (rank, world, local, local_world, address) == ("0", "3", "0", "3", "127.0.0.1")
    assert 1024 < int(port) < 65536
    assert int(threads) == max(1, len(os.sched_getaffinity(0)) // 3)
    assert [exit.stderr[0].split()[0] for exit in outcome.exits] == ["0", "1", "2"]


def test_events_of_rank_0_arrive_in_order() -> None:
    code = (
        "fd = os.environ.get('GRAPHSHARD_EVENTS_FD'); "
        "[os.write(int(fd), b'{\"n\": %d}\\n' % n) for n in range(3)] if fd else None; "
        "assert (fd is None) == (rank != 0)"
    )
    events: list[dict[str, Any]] = []
    assert launch_workers(command(code), 2, on_event=events.append).exit_code == 0
    assert events == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_the_first_cause_comes_first_and_victims_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 blames another at once; rank 2 is the cause and ends later; rank 1 blames it too."""
    monkeypatch.setattr(_watch, "GRACE_SECONDS", 20.0)  # all end by themselves
    code = (
        "time.sleep(0.3 * (rank == 2)); "
        "print('rank', rank, 'says', file=sys.stderr, flush=True); "
        "os._exit(1 if rank == 2 else 3)"
    )
    outcome = launch_workers(command(code), 3, timeout=5)
    assert outcome.exit_code == 1
    assert outcome.failed[0].rank == 2
    report = outcome.report().splitlines()
    assert report[0] == "error: rank 2 ended with exit code 1"
    assert report[1] == "  | rank 2 says"
    assert "then rank 0 ended with exit code 3: rank 0 says" in report


def test_a_killed_worker_is_named_with_its_signal_and_the_rest_is_ended() -> None:
    pids: list[int] = []
    code = "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)"
    start = time.monotonic()
    outcome = launch_workers(command(code), 3, timeout=0.2, on_start=pids.extend)
    assert time.monotonic() - start < 10
    assert outcome.exit_code == 1
    report = outcome.report().splitlines()
    assert report[0] == "error: rank 1 ended with signal SIGKILL"
    assert report[1] == "then rank 0 was ended by the launcher: it said nothing"
    assert not any(alive(pid) for pid in pids)


def test_a_worker_that_ignores_sigterm_is_ended_all_the_same() -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "os._exit(1) if rank == 1 else time.sleep(60)"
    )
    outcome = launch_workers(command(code), 2, timeout=0.2)
    assert [exit.ended_by_us for exit in outcome.exits] == [True, False]
    assert outcome.exits[0].code == -signal.SIGKILL


@pytest.mark.parametrize("hang", ["time.sleep(600)", "os.kill(os.getpid(), 19)"])
def test_a_worker_that_does_not_end_as_the_others_have_is_named_and_ended(hang: str) -> None:
    """Rank 0 has delivered its result and ended with 0: the clock runs all the same."""
    pids: list[int] = []
    lines: list[str] = []
    code = f"print('rank', rank, flush=True); {hang} if rank == 1 else None"
    start = time.monotonic()
    outcome = launch_workers(
        command(code), 3, timeout=2.0, on_start=pids.extend, on_stderr=lines.append
    )
    assert 2.0 < time.monotonic() - start < 2.0 + MARGIN_SECONDS
    assert [exit.code for exit in outcome.exits] == [0, -signal.SIGTERM, 0]
    assert (outcome.exit_code, outcome.culprits) == (1, (1,))
    report = outcome.report().splitlines()
    assert report == [
        "error: rank 1 did not end: it had 2 s after the first worker had ended in good order, and "
        "was ended by the launcher",
        "  | rank 1",
    ]
    assert lines[1:] == ["graphshard: waited 1 s of 2 s for ranks [1] to end as the others have"]
    assert not any(alive(pid) for pid in pids)


def test_after_a_failure_the_others_are_not_given_the_timeout() -> None:
    """A worker that is killed while the others still start: they could only wait for it."""
    code = "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)"
    start = time.monotonic()
    outcome = launch_workers(command(code), 2, timeout=300)
    assert time.monotonic() - start < MARGIN_SECONDS
    assert outcome.culprits == (1,)


def test_a_stopped_worker_is_ended_by_sigterm_and_blamed() -> None:
    """Rank 0 blames rank 1, which is stopped, as a worker does that waited for it in vain."""
    code = (
        "os.kill(os.getpid(), 19) if rank == 1 else None; "
        "print('\x1efailure 1'); print('error: rank 0: waited for rank 1', flush=True); "
        "os._exit(3)"
    )
    lines: list[str] = []
    outcome = launch_workers(command(code), 2, timeout=300, on_stderr=lines.append)
    assert lines == []
    assert outcome.culprits == (1,)
    assert [exit.code for exit in outcome.exits] == [3, -signal.SIGTERM]
    report = outcome.report().splitlines()
    assert report[1] == "  | error: rank 0: waited for rank 1"
    assert report[2] == "then rank 1 was ended by the launcher: it said nothing"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_what_a_worker_has_started_ends_with_it(end: str, tmp_path: Path) -> None:
    """A child that lives on holds copies of its parent's connections and of its output."""
    code = (
        "pid = os.fork() if rank == 1 else None; "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(pid)) if pid else None; "
        f"time.sleep(600) if pid == 0 else None; {end} if rank == 1 else None"
    )
    start = time.monotonic()
    launch_workers(command(code), 2, timeout=300)
    assert time.monotonic() - start < MARGIN_SECONDS
    wait_until_gone([int((tmp_path / "pid").read_text())], 5)


def test_notices_of_any_worker_are_shown() -> None:
    code = "print('graphshard: rank', rank, 'waited' if rank else '') if rank < 2 else print('x')"
    lines: list[str] = []
    launch_workers(command(code), 3, on_stderr=lines.append)
    assert sorted(lines) == ["graphshard: rank 0 ", "graphshard: rank 1 waited"]


def test_the_parts_of_the_margin_add_up() -> None:
    parts = (
        _monitor._ANSWER_SECONDS,
        _monitor._EVENT_SECONDS,
        GRACE_SECONDS,
        _children.TERMINATE_SECONDS,
    )
    assert sum(parts) <= MARGIN_SECONDS - 1.0


def test_wrong_input_is_reported_in_one_line() -> None:
    code = "print('noise'); print('error: lr is wrong'); os._exit(2)"
    outcome = launch_workers(command(code), 2, timeout=5)
    assert outcome.exit_code == 2
    assert outcome.report() == "error: lr is wrong"


def test_what_all_workers_say_alike_is_reported_in_one_line() -> None:
    """Such as a loss that is not finite, which every rank learns of."""
    code = "print('\x1efailure'); print('error: rank 0: the loss is inf'); os._exit(1)"
    lines: list[str] = []
    outcome = launch_workers(command(code), 2, timeout=5, on_stderr=lines.append)
    assert outcome.exit_code == 1
    assert outcome.report() == "error: rank 0: the loss is inf"
    assert lines == []


def test_long_lines_and_long_outputs_are_cut() -> None:
    code = "[print('x' * 9000) for _ in range(300)]; os._exit(1)"
    report = launch_workers(command(code), 1, timeout=5).report()
    assert len(report.splitlines()) < 70
    assert max(len(line) for line in report.splitlines()) < 600


def test_a_callback_that_raises_ends_the_workers() -> None:
    pids: list[int] = []

    def stop(line: str) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        launch_workers(
            command("print('hello', flush=True); time.sleep(60)"),
            2,
            on_start=pids.extend,
            on_stderr=stop,
        )
    assert not any(alive(pid) for pid in pids)


def test_a_command_that_does_not_exist_is_told() -> None:
    with pytest.raises(FileNotFoundError):
        launch_workers(["/nowhere/python"], 2)
    with pytest.raises(ValueError, match="num_workers must be at least 1"):
        launch_workers(command("pass"), 0)


LAUNCHER = """
import sys
from graphshard.train import launch_workers
def show(*words):
    print(*words, flush=True)
launch_workers([sys.executable, "-S", "-c", sys.argv[1]], 2, on_start=lambda pids: show(*pids),
               on_stderr=show)
"""


def start_launcher(worker: str) -> tuple[Any, list[int]]:
    launcher = start_program(LAUNCHER, worker)
    return launcher, [int(pid) for pid in launcher.stdout.readline().split()]


def wait_until_gone(pids: list[int], seconds: float) -> None:
    stop = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < stop, "a worker is still alive"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGHUP, marks=pytest.mark.exhaustive),
    ],
)
def test_ctrl_c_and_sigterm_stop_all(number: int) -> None:
    launcher, pids = start_launcher("import time; time.sleep(100)")
    assert len(pids) == 2
    launcher.send_signal(number)
    _, error = launcher.communicate(timeout=20)
    assert launcher.returncode != 0
    assert "KeyboardInterrupt" in error
    wait_until_gone(pids, 5)


def test_a_second_signal_ends_stubborn_workers_at_once() -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    launcher, pids = start_launcher(stubborn)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=20)
    assert launcher.returncode != 0
    wait_until_gone(pids, 5)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's")
def test_workers_die_with_a_launcher_that_is_killed() -> None:
    # As an agent enters the package: without torch.
    end = "module.end_with_launcher(); print('there', flush=True); import time; time.sleep(100)"
    worker = _host_agent.START.replace("_host_agent", "_worker")
    worker = worker.replace("sys.exit(module.main(sys.argv[1:]))", end)
    launcher, pids = start_launcher(worker)
    assert launcher.stdout.readline() == "there\n"  # the other may still import
    launcher.kill()
    launcher.communicate(timeout=20)
    wait_until_gone(pids, 60)


def test_the_watching_thread_notices_that_the_parent_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the kernel has no such service: the thread, with a parent that is not ours."""
    from graphshard.train.launch import _worker

    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(_worker.os, "_exit", end)
    monkeypatch.setattr(_worker, "_WATCH_SECONDS", 0.01)
    _worker._watch_parent(os.getpid() + 123456)
    assert ended.wait(5)
    assert codes == [130]


def test_a_report_of_rank_0_passes_as_json() -> None:
    from graphshard.train._result import EpochReport, Evaluation
    from graphshard.train.launch import report_from_dict

    evaluation = Evaluation(epoch=3, accuracy={"val": 0.25}, val_loss=0.1 + 0.2)
    report = EpochReport(epoch=3, epochs=9, loss=1 / 3, evaluation=evaluation)
    import dataclasses

    assert report_from_dict(json.loads(json.dumps(dataclasses.asdict(report)))) == report


def test_the_workers_of_a_launch_know_that_they_are_one_job() -> None:
    code = "print(os.environ['GRAPHSHARD_JOB_ID'])"
    names = [{exit.stderr[0] for exit in launch_workers(command(code), 2).exits} for _ in range(2)]
    assert [len(found) for found in names] == [1, 1]
    assert names[0] != names[1]
