# SPDX-License-Identifier: Apache-2.0
"""The process from which ranks are forked: it has imported everything, so a rank starts at once.

Not to be imported: `_processes` starts it with ``python -m``. Its arguments are the number of a
Unix socket, a folder for files, "fork", and packages that ranks will import. A message on the
socket asks for a rank: three descriptors (where jobs come from, where answers go, where the output
goes) and, as text, the file for stack dumps. It answers with lines of JSON:

::

    {"ready": true, "opened_gpu": false}    once; with an open GPU it must not fork
    {"started": pid}                    for each message
    {"ended": pid, "code": code}        for each rank that has ended; minus the signal if killed

When the socket ends it ends too, with all ranks and the folder. If the third argument is "once", it
becomes the first rank itself: where forking a process that has loaded torch is not safe.

A rank runs jobs one after the other (`serve`). A job is a line of JSON; the answer is a line, once
the outcome is on disk. When the jobs end, because the parent closed their pipe or died, the process
ends, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import io
import json
import os
import queue
import random
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from ..comm import guard, initialize_comms, shutdown_comms
from ..comm.collectives import wait_for_all
from ..comm.group import group_state
from ..errors import RankError
from ._processes import pool
from ._values import load_value, save_value

MAX_MESSAGE = 4096

_NOT_INITIALIZED = 3
"""What CUDA's driver answers before ``cuInit``."""


def main() -> None:
    """Serve until the socket ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    ranks: set[int] = set()
    folder, once = sys.argv[2], sys.argv[3] == "once"
    # Ctrl-C is for the parent, whose report is wanted, and not one from each rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _load(sys.argv[4:])
    # For the garbage collector of a rank this is not garbage, nor worth a walk over all of it.
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _tell(control, {"ready": True, "opened_gpu": _has_opened_gpu()})
    while True:
        readable, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _reap(control, ranks)
        if control.fileno() in readable:
            try:
                data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 3)
            except OSError:
                data = b""
            if not data:
                # Ranks end by themselves when their jobs do, but not if they are stopped.
                for rank in ranks:
                    with contextlib.suppress(OSError):
                        os.killpg(rank, signal.SIGKILL)
                shutil.rmtree(folder, ignore_errors=True)
                return
            pid = 0 if once else os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                if once:
                    # The socket stays open, so that it ends with this process.
                    _tell(control, {"started": os.getpid()})
                else:
                    os.setsid()  # what a rank starts in turn is ended with it
                    control.close()
                jobs, notify, output = descriptors
                os.dup2(output, 1)
                os.dup2(output, 2)
                serve(jobs, notify, data.decode())
            for descriptor in descriptors:
                os.close(descriptor)
            ranks.add(pid)
            _tell(control, {"started": pid})


def _load(packages: list[str]) -> None:
    """Import packages, and what torch imports late: once here and not in each rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in packages:
            with contextlib.suppress(Exception):  # a rank that imports it will say so
                importlib.import_module(package)
    parameter = torch.zeros(1, requires_grad=True)
    torch.optim.SGD([parameter], lr=0.0)
    torch.testing.assert_close(parameter, parameter)


def _has_opened_gpu() -> bool:
    """Whether something here has initialized CUDA, which a forked process cannot use then."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):  # it has not been loaded; there is no such mode here
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def _reap(control: socket.socket, ranks: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        ranks.discard(pid)
        _tell(control, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(control: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the parent is gone: the socket will say so
        control.sendall(json.dumps(message).encode() + b"\n")


_SECONDARY = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "pair closure",
    "timed out waiting",
)


def serve(jobs_from: int, notify_to: int, stacks_file: str) -> NoReturn:
    """Run the jobs that come on a descriptor, and answer on another, until they end.

    SIGUSR1 writes the stacks of all threads to a file.
    """
    stacks = Path(stacks_file).open("w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_jobs, args=(jobs_from, jobs), daemon=True).start()
    with os.fdopen(notify_to, "w", buffering=1) as notify:
        while True:
            ok = _run(jobs.get())
            sys.stdout.flush()
            sys.stderr.flush()
            notify.write("done\n" if ok else "ending\n")
            if not ok:
                # Open connections, stuck threads and half-done collectives end here, at once.
                os._exit(1)


def _read_jobs(jobs_from: int, jobs: queue.Queue[dict[str, Any]]) -> None:
    with os.fdopen(jobs_from) as lines:
        for line in lines:
            jobs.put(json.loads(line))
    os._exit(0)


def _run(job: dict[str, Any]) -> bool:
    """Run one job and write its outcome; whether the process can be used again."""
    box = Path(job["box"])
    rank, world_size = job["rank"], job["world_size"]
    outcome = box / f"outcome{rank}"
    try:
        _prepare(job)
        pool.importing = job["file"]
        try:
            function = attrgetter(job["qualname"])(_import(job["module"], job["file"]))
        finally:
            pool.importing = None
        args = load_value(box / "args")
        if job["group"]:
            store = dist.FileStore(str(box / "store"), world_size)
            initialize_comms(rank, world_size, timeout=job["timeout"], store=store)
        with guard():
            result = function(rank, world_size, *args)
        save_value(box / f"result{rank}", result)
        save_value(outcome, {"ok": True})
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        secondary = isinstance(error, RankError) or (
            isinstance(error, RuntimeError | OSError)
            and any(mark in str(error).lower() for mark in _SECONDARY)
        )
        save_value(
            outcome, {"ok": False, "text": text, "secondary": secondary, "time": time.time()}
        )
        return False
    if dist.is_initialized() and not job["group"]:
        return False  # the function left a group of its own: the next job gets a fresh process
    try:
        if dist.is_initialized():
            # Not before the other ranks, which may still need this one.
            wait_for_all(group_state())
            shutdown_comms()
    except RuntimeError:
        return False  # another rank failed: the report is about that one
    return True


def _prepare(job: dict[str, Any]) -> None:
    """The state that every job starts from, whatever the one before left behind."""
    os.environ.clear()
    os.environ.update(job["environment"])
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(line_buffering=job["stream"])
    os.chdir(job["directory"])
    sys.path[:] = job["path"]
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(job["filters"]):
        kind = _category(category)
        if kind is not None:
            warnings.filterwarnings(action, message, kind, module, line)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the setter imports torch's compiler
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _category(name: str) -> type[Warning] | None:
    module, _, qualname = name.partition(":")
    category = getattr(sys.modules.get(module), qualname, None)
    return category if isinstance(category, type) and issubclass(category, Warning) else None


def _import(name: str, file: str) -> ModuleType:
    """The module of a file: by name if that leads to the file, else from the file itself."""
    if name == "__main__":
        name = "__graphshard_main__"
    module = sys.modules.get(name)
    if module is None:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            module = None
    if module is not None and _same_file(module, file):
        return module
    # Test files of one name in several folders, and folders that are on no path.
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"cannot import {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _same_file(module: ModuleType, file: str) -> bool:
    loaded_from = getattr(module, "__file__", None)
    return loaded_from is not None and os.path.realpath(loaded_from) == os.path.realpath(file)


if __name__ == "__main__":
    main()
