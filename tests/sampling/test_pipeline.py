# SPDX-License-Identifier: Apache-2.0
"""Pipeline: order, permits, errors, stopping. No process group; some tests start interpreters."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import pytest
import torch

from graphshard._base.kernels import num_threads
from graphshard.sampling._pipeline import _PREFIX, Pipeline, Run, Stage


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(_PREFIX)]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    assert threads() == []
    yield
    assert threads() == []


def plus_one(x: int) -> int:
    return x + 1


def times_ten(x: int) -> int:
    return x * 10


TWO = [Stage("plus", plus_one), Stage("times", times_ten)]


@pytest.mark.parametrize("prefetch", [0, 1, 3, 100])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_all_batches_come_in_order(prefetch, count):
    pipeline = Pipeline(TWO, prefetch)
    for _ in range(2):  # a pipeline may be used again
        run = pipeline.run(range(count))
        assert list(run) == [(i + 1) * 10 for i in range(count)]
        assert run.delivered.num_batches == count
        assert threads() == []
        with pytest.raises(StopIteration):
            next(run)


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("place", [0, 1])
def test_workers_of_a_stage_work_side_by_side_and_deliver_in_order(prefetch, place):
    together = threading.Barrier(2)

    def work(x: int) -> int:
        if prefetch > 1:
            together.wait(20)  # nobody passes alone
        time.sleep(0.01 * (x % 3))
        return x + 1

    stages = [Stage("plus", plus_one)]
    stages.insert(place, Stage("slow", work, workers=2))
    for count in (0, 10):
        run = Pipeline(stages, prefetch).run(range(count))
        assert list(run) == [i + 2 for i in range(count)]
        assert threads() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_of_several_workers_comes_at_its_batch(workers):
    begun = []

    def fail(x: int) -> int:
        begun.append(x)
        if x == 5:
            raise ValueError("five")
        if x == 4:
            time.sleep(0.2)  # is behind the one that fails
            raise ValueError("four")
        return x

    run = Pipeline([Stage("fail", fail, workers), Stage("plus", plus_one)], 3).run(range(100))
    got = []
    with pytest.raises(ValueError, match="four"):
        got += run
    got += run
    assert threads() == []
    assert max(begun) <= 4 + 3 + 1


def test_workers_leave_threads_of_kernels_to_each_other():
    def limit(_: int) -> int:
        return num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        runs = {n: list(Pipeline([Stage("a", limit, n)], 2).run(range(3))) for n in (1, 2, 3)}
        assert num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert runs == {1: [4] * 3, 2: [2] * 3, 3: [1] * 3}


def test_without_stages_items_go_through():
    assert list(Pipeline([], 2).run("abc")) == ["a", "b", "c"]


@pytest.mark.parametrize("prefetch", [-1, 1.5, True])
def test_prefetch_must_be_a_number_of_batches(prefetch):
    with pytest.raises(ValueError, match="prefetch must be a number of batches, 0 or more"):
        Pipeline(TWO, prefetch)


def test_without_prefetch_everything_happens_in_the_callers_thread_when_asked():
    seen = []
    me = threading.get_ident()
    run = Pipeline([Stage("a", lambda x: seen.append((x, threading.get_ident())))], 0).run("xyz")
    assert threads() == []
    assert seen == []
    next(run)
    assert seen == [("x", me)]
    next(run)
    assert seen == [("x", me), ("y", me)]


def settled(counter: list[int], seconds: float = 0.15) -> int:
    """A count once it does not grow any more."""
    before = -1
    while before != len(counter):
        before = len(counter)
        time.sleep(seconds)
    return before


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_a_stage_works_on_what_has_been_permitted_only(prefetch):
    first: list[int] = []
    second: list[int] = []
    stages = [
        Stage("first", lambda x: first.append(x) or x),
        Stage("second", lambda x: second.append(x) or x),
    ]
    run = Pipeline(stages, prefetch).run(itertools.count())
    assert settled(first) == 0
    for asked in range(4):
        assert next(run) == asked
        assert settled(second) == settled(first) == asked + 1 + prefetch
    run.close()
    assert first == second == list(range(4 + prefetch))  # what was permitted, and nothing else


def test_items_are_taken_in_the_callers_thread():
    seen = []

    def items():
        for i in range(3):
            seen.append(threading.get_ident())
            yield i

    assert len(list(Pipeline(TWO, 2).run(items()))) == 3
    assert set(seen) == {threading.get_ident()}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_stages_record_no_gradients(prefetch):
    w = torch.ones(2, requires_grad=True)
    (out,) = Pipeline([Stage("a", lambda x: w * x)], prefetch).run([3.0])
    assert not out.requires_grad
    assert torch.is_grad_enabled()


def fail_at_two(x: int) -> int:
    if x == 2:
        raise KeyError("two")
    return x


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_comes_at_its_batch_with_its_traceback(prefetch, place):
    plain = Stage("plain", lambda x: x)
    stages = [Stage("fails", fail_at_two) if i == place else plain for i in range(3)]
    run = Pipeline(stages, prefetch).run(itertools.count())
    assert [next(run), next(run)] == [0, 1]
    with pytest.raises(KeyError, match="two") as caught:
        next(run)
    assert "fail_at_two" in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert threads() == []
    assert run.crew is None or run.crew.failure == "KeyError: 'two'"
    with pytest.raises(StopIteration):
        next(run)


def test_a_stage_that_failed_starts_nothing_more():
    seen = []

    def fails(x: int) -> int:
        seen.append(x)
        raise ValueError(x)

    run = Pipeline([Stage("a", plus_one), Stage("fails", fails)], 3).run(range(9))
    with pytest.raises(ValueError, match="1"):
        next(run)
    assert seen == [1]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_items_comes_after_the_batches_before_it(prefetch):
    def items():
        yield 1
        yield 2
        raise OSError("no more")

    run = Pipeline(TWO, prefetch).run(items())
    assert [next(run), next(run)] == [20, 30]
    with pytest.raises(OSError, match="no more"):
        next(run)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stage_that_runs_out_does_not_end_the_epoch(prefetch, workers):
    names = iter("abc")
    stages = [Stage("names", lambda x: (x, next(names)), workers)]
    run = Pipeline(stages, prefetch).run(range(9))
    with pytest.raises(RuntimeError, match="'names' of a loader raised StopIteration") as caught:
        list(run)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_even_system_exit_of_a_stage_reaches_the_caller():
    def leave(x: int) -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        list(Pipeline([Stage("a", leave)], 1).run(range(3)))


def test_break_stops_the_threads_once_they_have_finished():
    done = []

    def slow(x: int) -> int:
        time.sleep(0.02)
        done.append(x)
        return x

    for value in Pipeline([Stage("slow", slow)], 3).run(itertools.count()):
        if value == 1:
            break
    assert threads() == []
    assert done == [0, 1, 2, 3, 4]


def test_an_error_in_the_loop_stops_the_threads():
    def loop() -> None:
        for value in Pipeline(TWO, 3).run(itertools.count()):
            if value == 20:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        loop()
    assert threads() == []  # although the traceback lives
    del caught


def test_a_run_that_is_never_used_ends():
    run = Pipeline(TWO, 3).run(itertools.count())
    assert len(threads()) == 2
    del run
    gc.collect()


def test_the_pipeline_does_not_keep_batches():
    class Value:
        alive = 0

        def __init__(self) -> None:
            Value.alive += 1

        def __del__(self) -> None:
            Value.alive -= 1

    run = Pipeline([Stage("make", lambda _: Value()), Stage("same", lambda v: v)], 1).run(range(5))
    value = next(run)
    time.sleep(0.1)
    assert Value.alive == 2
    del value
    assert Value.alive == 1
    assert len(list(run)) == 4
    assert Value.alive == 0


def test_close_does_not_wait_for_ever_and_cancel_ends_what_waits():
    started = threading.Event()
    pipeline = Pipeline([], 1)

    def waits(x: int) -> int:
        started.set()
        pipeline.cancelled.wait()
        return x

    pipeline.stages = (Stage("waits", waits),)
    run = pipeline.run(range(3))
    run.crew.incoming.put(0)
    assert started.wait(5)
    start = time.monotonic()
    assert not run.close(0.1)
    assert time.monotonic() - start < 2
    assert len(threads()) == 1
    assert run.cancel()


def test_a_wait_can_be_interrupted():
    forever = threading.Event()
    run = Pipeline([Stage("waits", lambda x: forever.wait())], 1).run(range(3))
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(run)
    assert time.monotonic() - start < 2
    timer.join()
    forever.set()
    assert run.close()


def test_waiting_is_timed():
    run = Pipeline([Stage("slow", lambda x: time.sleep(0.05))], 1).run(range(3))
    list(run)
    assert 0.04 < run.delivered.seconds_waited < 3
    assert isinstance(run, Run)


PROGRAMS = {
    "ends": (0, "run = pipeline.run(range(99))\nnext(run)"),
    "raises": (1, "for x in pipeline.run(range(99)):\n    raise ValueError('stop')"),
    "is interrupted": (
        -signal.SIGINT,
        "for x in pipeline.run(range(99)):\n    raise KeyboardInterrupt",
    ),
    "exits": (5, "kept = pipeline.run(range(99))\nnext(kept)\nsys.exit(5)"),
}

HEAD = """
import sys, time, torch
from graphshard._base.kernels import num_threads
from graphshard.sampling._pipeline import Pipeline, Stage

def busy(x):
    for _ in range(20):
        torch.ones(64, 64) @ torch.ones(64, 64)
    return x

pipeline = Pipeline([Stage("busy", busy), Stage("sleeps", lambda x: time.sleep(0.05))], 50)
"""


@pytest.mark.exhaustive  # test_programs_end_cleanly has loaders of ranks
def test_the_interpreter_ends_cleanly_with_threads_at_work(tmp_path, run_all):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    names = list(PROGRAMS) if run_all else ["ends", "is interrupted"]  # with an error and without
    running = {}
    for name in names:
        _, body = PROGRAMS[name]
        program = tmp_path / f"{name}.py"
        program.write_text(HEAD + textwrap.dedent(body))
        running[name] = subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
    for name in names:
        code, _ = PROGRAMS[name]
        _, errors = running[name].communicate(timeout=150)
        assert running[name].returncode == code, errors
        assert "Fatal" not in errors
        assert "terminate called" not in errors
        assert "Exception ignored" not in errors
