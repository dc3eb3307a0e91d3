# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: fixed seeds, one thread, no process left behind.

GRAPHSHARD_TEST_THREADS in the environment gives torch and the kernels more threads in the tests'
own process: `make test-processors`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
from collections.abc import Generator, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forked_programs

# Read when Triton is imported, which torch does here and there: without a GPU its kernels run in
# its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run every case and whole campaigns, not a sample of them (make test-all)",
    )


TESTS = Path(__file__).resolve().parent

# Nothing that is made while tests are collected is garbage; a walk over it takes a second.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Have each worker begin to read the tests at a place of its own.

    What pytest makes of a file it writes beside it, for all. Where nothing is written yet, workers
    that read one file after the other would all do the same work, 10 s of it.
    """
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        forked_programs.begin_worker()
        _tell_what_counts(config)
    if worker is None or [Path(argument).resolve() for argument in config.args] != [TESTS]:
        return
    ignored = {Path(path).resolve() for path in config.getoption("ignore") or ()}
    found = {TESTS / file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")}
    paths = sorted(found - ignored)
    before = list(accumulate(len([*path.rglob("test_*.py")]) or 1 for path in paths))
    begin = int(worker["workerid"].removeprefix("gw")) / worker["workercount"] * before[-1]
    first = next(place for place, files in enumerate(before) if files > begin)
    config.args[:] = map(str, paths[first:] + paths[:first])


def _tell_what_counts(config: pytest.Config) -> None:
    """Have a worker tell the process that reports of each test's outcome alone.

    That process takes a millisecond for the six messages of a test, of which there are ten
    thousand. What was set up and taken down well says nothing.
    """
    interactor = next(
        plugin
        for plugin in config.pluginmanager.get_plugins()
        if type(plugin).__name__ == "WorkerInteractor"
    )
    send = interactor.sendevent

    def send_what_counts(name: str, **event: Any) -> None:
        if name in ("logstart", "logfinish"):
            return
        report = event.get("data", {}) if name == "testreport" else {}
        if report.get("when") in ("setup", "teardown") and report["outcome"] == "passed":
            return
        send(name, **event)

    interactor.sendevent = send_what_counts


def pytest_collection_finish() -> None:
    """Spare the garbage collector, and tests that call it, all that stays to the end."""
    gc.collect()
    gc.freeze()
    gc.enable()


# Files that take long, or wait for processes: side by side from the start (pytest-xdist hands out
# files in this order), so that no worker is left with one of them at the end.
FIRST = (
    "test_kills.py",
    "test_launch.py",
    "test_docs.py",
    "test_extending.py",
    "test_cli_commands.py",
    "test_failures.py",
    "test_train_killed.py",
    "test_train_launch.py",
    "test_dist_loader_faults.py",
    "test_readme.py",
    # Those that compute longest: files of some seconds are the last.
    "test_train_sampled.py",
    "test_parity.py",
    "test_train_parity.py",
    "test_train_own_model.py",
    "test_train_checkpoint.py",
    "test_train_optimizer.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: (order.get(item.path.name, len(order)), item.path.parts))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    if item.get_closest_marker("compiled"):
        from graphshard._base.kernels import extension_available

        if not extension_available():
            pytest.skip("the compiled kernels are not installed")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    torch.set_num_threads(int(os.environ.get("GRAPHSHARD_TEST_THREADS", "1")))
    has_workers = session.config.pluginmanager.hasplugin("dsession")
    if has_workers:  # this process has others collect
        gc.enable()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell starts background jobs so, and their children would ignore Ctrl-C, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup does so
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if sys.platform == "linux":
        # A thread of gloo that wakes up takes the processor from the one that is sending, and spins
        # until that one lets go of their lock: a sixth of all time where ranks share processors.
        with contextlib.suppress(OSError):  # not permitted
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with forked_programs.forked_workers() if has_workers else contextlib.nullcontext():
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    testing = sys.modules.get("graphshard.testing")
    if testing is not None:
        testing.stop_ranks()
    forked_programs.stop()


@pytest.fixture(autouse=True)
def _environment_put_back() -> Iterator[None]:
    """What a test, or code that it runs, has set is gone after it."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without a walk up the stack for each device that is not there, a millisecond of a test
        torch.default_generator.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def forked_interpreters() -> Iterator[None]:
    """Programs that a test, or code that it runs, starts are forked: `forked_programs`."""
    with forked_programs.forked_interpreters():
        yield


@pytest.fixture
def nested_forks() -> Iterator[None]:
    """Also those that such programs start."""
    with forked_programs.nested_forks():
        yield


@pytest.fixture(scope="session")
def run_all(request: pytest.FixtureRequest) -> bool:
    """Whether every case is wanted (``make test-all``), and not a sample."""
    return bool(request.config.getoption("--all"))
