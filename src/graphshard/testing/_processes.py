# SPDX-License-Identifier: Apache-2.0
"""The processes behind `run_ranks`: a template, and the ranks forked from it and kept.

Ranks are known to have ended by a line from the template, which is their parent. They end by
themselves when this process ends, however it does: their jobs come through a pipe that it holds.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._base.files import TemporaryFolder
from ..comm.address import local_environment

MAX_KEPT = 5
"""Ranks that stay alive between calls."""

_START_SECONDS = 180.0
_END_SECONDS = 5.0
_SLOW_TO_IMPORT = ("dgl", "pytest", "torch_geometric")
# Elsewhere a process that has loaded torch must not fork, so each rank has a template to itself.
_CAN_FORK = sys.platform == "linux"
# `torch.cuda.is_available` then asks the driver's library for management. Ranks do not inherit it.
_ASKS_WITHOUT_OPENING = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(eq=False)
class Template:
    """The process that ranks are forked from."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    folder: TemporaryFolder
    codes: dict[int, int] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of files of ranks
    ready: bool = False
    ended: bool = False
    rest: bytes = b""
    forks: bool = True  # else it becomes its only rank itself
    opened_gpu: bool = False

    @classmethod
    def start(cls, forks: bool) -> Template:
        """One from which ranks can be forked; or one for a rank, where that is not possible.

        CUDA does not outlive a fork, and some packages open it when they are imported.
        """
        template = cls._started(forks)
        if template.forks and template.opened_gpu:
            template.stop()
            template = cls._started(forks=False)
        return template

    @classmethod
    def _started(cls, forks: bool) -> Template:
        ours, theirs = socket.socketpair()
        folder = TemporaryFolder()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with (folder.path / "template").open("w") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "graphshard.testing._template"),
                    *(str(theirs.fileno()), str(folder.path), "fork" if forks else "once"),
                    *(_imported_packages() if forks else ()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno(), folder.descriptor],
                env={**rank_environment(), "PYTHONPATH": path, **_ASKS_WITHOUT_OPENING},
                start_new_session=True,
            )
        theirs.close()
        template = cls(process, ours, folder, forks=forks)
        deadline = time.monotonic() + _START_SECONDS
        while not template.ready and not template.ended and time.monotonic() < deadline:
            template.read(deadline - time.monotonic())
        if not template.ready:
            printed = (folder.path / "template").read_text()
            template.stop()
            raise RuntimeError(f"the process that ranks are made from did not start:\n{printed}")
        return template

    def read(self, seconds: float) -> None:
        """Take what the template has to say, waiting no longer than some seconds for it."""
        if self.ended:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            if not selector.select(max(0.0, seconds)):
                return
        try:
            data = self.control.recv(65536)
        except OSError:
            data = b""
        self.ended = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ended" in message:
                self.codes[message["ended"]] = message["code"]
            elif "started" in message:
                # Process numbers come round again, and this one is not the rank that had it before.
                self.codes.pop(message["started"], None)
                self.started.append(message["started"])
            else:
                self.ready, self.opened_gpu = True, message["opened_gpu"]
        if self.ended and not self.forks:
            self.codes[self.process.pid] = self.process.wait(_END_SECONDS)

    def stop(self) -> None:
        """End it, and with it the ranks that are left."""
        self.ended = True
        self.control.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_SECONDS)
        self.folder.cleanup()


@dataclass(eq=False)
class RankProcess:
    """One rank's process, seen from the caller."""

    template: Template
    pid: int  # its process number, and that of its process group
    jobs: int  # descriptor to which jobs are written
    notify: int  # descriptor from which its answers are read
    stacks: Path  # where it writes its stacks on SIGUSR1
    log: Path  # what it prints
    log_start: int = 0
    usable: bool = True  # can take another job; false once it is about to end

    @classmethod
    def start(cls, template: Template) -> RankProcess:
        number = next(template.numbers)
        stacks = template.folder.path / f"stacks{number}"
        log = template.folder.path / f"log{number}"
        jobs_from, jobs = os.pipe()
        notify, notify_to = os.pipe()
        with log.open("w") as output:
            socket.send_fds(
                template.control, [str(stacks).encode()], [jobs_from, notify_to, output.fileno()]
            )
        os.close(jobs_from)
        os.close(notify_to)
        deadline = time.monotonic() + _START_SECONDS
        while not template.started:
            template.read(deadline - time.monotonic())
            if template.ended or time.monotonic() > deadline:
                raise RuntimeError("the process that ranks are made from has ended, or is stuck")
        return cls(template, template.started.pop(), jobs, notify, stacks, log)

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        return self.template.codes.get(self.pid, -signal.SIGKILL if self.template.ended else None)

    def alive(self) -> bool:
        self.template.read(0.0)
        return self.code is None

    def send(self, job: dict[str, Any]) -> None:
        self.log_start = self.log.stat().st_size
        data = json.dumps(job).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it died: the wait will find that out
            while data:
                data = data[os.write(self.jobs, data) :]

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def printed(self) -> str:
        with self.log.open(errors="replace") as file:
            file.seek(self.log_start)
            return file.read()

    def stop(self) -> None:
        """Close its pipes, at which an idle rank ends by itself; wait, and use force if need be."""
        if self.jobs >= 0:
            os.close(self.jobs)
            self.jobs = -1
        self._wait()
        self.kill()

    def kill(self) -> None:
        """End it, and what it started, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._wait()
        for name in ("jobs", "notify"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)
        if not self.template.forks:
            self.template.stop()

    def _wait(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while self.alive() and time.monotonic() < deadline:
            self.template.read(deadline - time.monotonic())


class Pool:
    """Ranks that are kept from call to call; the first that asks starts the template.

    Attributes:
        importing: In a rank, the file that it imports at the moment to find its function.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.importing: str | None = None
        self._workers: list[RankProcess] = []
        self._template: Template | None = None
        self._owner = os.getpid()

    @contextmanager
    def take(self, number: int) -> Iterator[list[RankProcess]]:
        """The first ``number`` ranks, started where needed; afterwards some are kept."""
        if self._template is not None and self._template.ended:
            self.stop()
        self._drop_dead()
        while len(self._workers) < number:
            if self._template is None or not self._template.forks:
                self._template = Template.start(_CAN_FORK if self._template is None else False)
            self._workers.append(RankProcess.start(self._template))
        try:
            yield self._workers[:number]
        finally:
            self._drop_dead()
            for worker in self._workers[MAX_KEPT:]:
                worker.stop()
            del self._workers[MAX_KEPT:]

    @property
    def folder(self) -> str | None:
        """Where the files of a call belong: what the template removes if this process cannot."""
        template = self._template
        return None if template is None or not template.forks else str(template.folder.path)

    def stop(self) -> None:
        """End all ranks and the template."""
        if os.getpid() != self._owner:
            return  # a child that was forked from the owner
        with self.lock:
            for worker in self._workers:
                worker.stop()
            self._workers.clear()
            if self._template is not None and self._template.forks:
                self._template.stop()
            self._template = None

    def _drop_dead(self) -> None:
        for worker in list(self._workers):
            if not (worker.usable and worker.alive()):
                worker.kill()
                self._workers.remove(worker)


def _imported_packages() -> list[str]:
    """Packages that the caller has imported, as its ranks will, where that takes long."""
    modules = {name: sys.modules.get(name) for name in _SLOW_TO_IMPORT}
    # Under `graphshard.dgl` as a program another module has the name.
    return [name for name, module in modules.items() if getattr(module, "__name__", None) == name]


def rank_environment() -> dict[str, str]:
    """The caller's environment, with the settings that local ranks need."""
    return {**local_environment(), "OMP_NUM_THREADS": "1"}


# Kept between calls; that is what makes a test on three ranks take milliseconds.
pool = Pool()
atexit.register(pool.stop)
