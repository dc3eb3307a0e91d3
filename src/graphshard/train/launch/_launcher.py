# SPDX-License-Identifier: Apache-2.0
"""launch_workers: N ranks as local processes, from start to end, without an orphan.

[Note: how a run ends]
    A worker that fails says why on standard error and by its `ExitCode`; the others learn of it
    through the process group, and each fails with a `RankError` that names it. They need the failed
    worker to finish, so they have `_GRACE_SECONDS` to say what they know, whatever the timeout, and
    are then ended. After a worker has ended with 0 the others have the timeout to do so, too.
    Reported first is the first cause: the worker that ended first among those that blame no other.
    See [Note: how soon a job ends] in comm/group/_failure.py.

    Workers have sessions of their own, so Ctrl-C reaches the launcher alone, which ends them and
    what they have started. If the launcher is killed, the kernel (on Linux) or a thread in each
    worker ends it.

[Note: why not torch.distributed.elastic]
    Its launcher API (``start_processes``, and the agents and torchrun above it) keeps none of the
    above, as of torch 2.13. When a worker fails, the next poll sends SIGTERM to all others: where
    rank 0 blames rank 1 and ends 0.5 s before it, rank 0 is reported as the cause, and the reason
    that rank 1 had is lost. It gives them 30 s, a constant: with one worker failed and another one
    stopped (SIGSTOP), the job ended after 30.6 s, where `MARGIN_SECONDS` is 10. While no worker has
    failed it waits without end: with one that has ended with 0 and one that hangs, it had not
    returned after 40 s. Output goes to files or to this process's own streams, no descriptor for
    events can be passed to a command, what a worker that ended by itself has started is left, and
    signal handlers stay replaced.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ..._children import Child, LineStream, end_children, how_ended, read_streams
from ...comm.group import JOB_VARIABLE, NOTICE, local_environment
from ._worker import EVENTS_VARIABLE, FAILURE_MARK, PARENT_VARIABLE, ExitCode

_TAIL_LINES = 60
_LINE_CHARACTERS = 500
_GRACE_SECONDS = 2.0

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """How one worker ended.

    Args:
        rank: Which.
        code: Exit code; negative: the signal that ended it.
        place: 0 for the first worker that ended, and so on.
        ended_by_us: Whether the launcher ended it, because others had failed or long ended.
        stderr: The last lines of what it said.
        blames: The ranks that it held responsible for its failure.
    """

    rank: int
    code: int
    place: int
    ended_by_us: bool
    stderr: tuple[str, ...]
    blames: tuple[int, ...] = ()

    @property
    def how(self) -> str:
        """``"signal SIGKILL"`` or ``"exit code 1"``."""
        return how_ended(self.code)

    @property
    def blame(self) -> tuple[bool, bool, int]:
        """Sorts the first cause first."""
        return self.ended_by_us, self.code == ExitCode.OTHER_RANK, self.place


@dataclass(frozen=True)
class LaunchOutcome:
    """How all workers ended.

    Args:
        exits: By rank.
        timeout: Seconds that workers had to end after the first one had.
    """

    exits: tuple[WorkerExit, ...]
    timeout: float = 0.0

    @property
    def failed(self) -> list[WorkerExit]:
        """Workers that failed, the first cause first."""
        return sorted((e for e in self.exits if e.code != 0), key=lambda e: e.blame)

    @property
    def exit_code(self) -> int:
        """0, or that of the first cause; 1 where a signal ended it."""
        failed = self.failed
        if not failed:
            return 0
        return failed[0].code if failed[0].code > 0 else 1

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks held responsible: the first cause, or those that it blames."""
        failed = self.failed
        if not failed:
            return ()
        if failed[0].ended_by_us:
            return tuple(exit.rank for exit in failed)
        return failed[0].blames or (failed[0].rank,)

    def report(self) -> str:
        """What went wrong, the first cause first; a single line for what all workers explain."""
        failed = self.failed
        if not failed:
            return ""
        first = failed[0]
        if first.code == ExitCode.WRONG_INPUT:
            return first.stderr[-1] if first.stderr else "error: wrong input"
        told = {exit.stderr[-1:] for exit in self.exits if exit.code == ExitCode.FAILED}
        if len(told) == 1 and len(failed) == len(self.exits) and not first.ended_by_us:
            (last,) = told
            if last and last[0].startswith("error: ") and all(e.code == first.code for e in failed):
                return last[0]
        lines = [f"error: rank {first.rank} ended with {first.how}"]
        if first.ended_by_us:
            lines = [
                f"error: rank {first.rank} did not end: it had {self.timeout:g} s after the first "
                "worker had ended in good order, and was ended by the launcher"
            ]
        lines += [f"  | {_short(line)}" for line in first.stderr]
        for other in failed[1:]:
            said = _short(other.stderr[-1]) if other.stderr else "it said nothing"
            end = "was ended by the launcher" if other.ended_by_us else f"ended with {other.how}"
            lines.append(f"then rank {other.rank} {end}: {said}")
        return "\n".join(lines)


def _short(line: str) -> str:
    return line if len(line) <= _LINE_CHARACTERS else f"{line[:_LINE_CHARACTERS]} ..."


def launch_workers(
    command: Sequence[str],
    num_workers: int,
    *,
    timeout: float = 300.0,
    on_event: Callable[[Event], None] | None = None,
    on_stderr: Callable[[str], None] | None = None,
    on_start: Callable[[list[int]], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LaunchOutcome:
    """Run a command as N local ranks and wait until all have ended.

    Args:
        command: What each worker runs. It gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT, as from torchrun, GRAPHSHARD_JOB_ID, and OMP_NUM_THREADS
            unless that is set.
        num_workers: Number of ranks.
        timeout: Seconds that workers have to end after one has ended with 0; give what they wait
            for each other. After one has failed the others have a few seconds.
        on_event: Called with what rank 0 passes to `send_event`.
        on_stderr: Called with each line that rank 0 writes to standard output or error, up to the
            reason of a failure, which is in the report; and with what there is to say, by any
            worker or the launcher, about a wait that has used half of its time.
        on_start: Called with the process ids, by rank.
        environment: Further variables.

    Returns:
        How each worker ended. Also if some failed: ask ``exit_code`` and ``report()``.

    Raises:
        KeyboardInterrupt: Ctrl-C; all workers have been ended.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1 (got {num_workers})")
    on_line = on_stderr or _ignore
    with stop_on_signals():
        workers: list[_Worker] = []
        try:
            port = _free_port()
            common = {JOB_VARIABLE: secrets.token_hex(8), **(environment or {})}
            for rank in range(num_workers):
                variables = {**_variables(rank, num_workers, port), **common}
                workers.append(_Worker.start(command, rank, variables, on_line, on_event))
            if on_start is not None:
                on_start([worker.process.pid for worker in workers])
            _watch(workers, timeout, on_line)
        finally:
            _end(workers)
            for worker in workers:
                worker.close()
        return LaunchOutcome(tuple(worker.exit() for worker in workers), timeout)


def _ignore(said: object) -> None:
    pass


@dataclass(eq=False)
class _Worker(Child):
    """One worker's process and what it has said."""

    rank: int
    on_line: Callable[[str], None]
    streams: list[LineStream] = field(default_factory=list)  # what it prints; events
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    place: int | None = None
    ended_by_us: bool = False
    failing: bool = False
    blames: tuple[int, ...] = ()

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        rank: int,
        variables: dict[str, str],
        on_line: Callable[[str], None],
        on_event: Callable[[Event], None] | None,
    ) -> _Worker:
        ends = os.pipe() if rank == 0 else ()  # for events
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables if not ends else {**variables, EVENTS_VARIABLE: str(ends[1])},
                pass_fds=ends[1:],
                start_new_session=True,
            )
        except BaseException:
            for end in ends[:1]:
                os.close(end)
            raise
        finally:
            for end in ends[1:]:
                os.close(end)
        worker = cls(process, rank, on_line)
        assert process.stdout is not None
        worker.streams.append(LineStream(process.stdout, worker.take))
        tell = on_event or _ignore
        for end in ends[:1]:
            events = os.fdopen(end, "rb", buffering=0)
            worker.streams.append(LineStream(events, lambda line: tell(json.loads(line))))
        return worker

    def take(self, line: str) -> None:
        """Keep a line that the worker has printed, and pass on what is to be shown now."""
        if line.startswith(FAILURE_MARK):
            self.failing = True
            self.blames = tuple(map(int, line.removeprefix(FAILURE_MARK).split()))
            return
        self.tail.append(line)
        if (self.rank == 0 and not self.failing) or line.startswith(NOTICE):
            self.on_line(line)

    def close(self) -> None:
        for stream in self.streams:
            stream.file.close()

    def exit(self) -> WorkerExit:
        if self.streams[0].rest:
            self.tail.append(self.streams[0].rest.decode(errors="replace"))
        code = self.process.poll()
        return WorkerExit(
            rank=self.rank,
            code=-signal.SIGKILL if code is None else code,  # None: killed, and not gone yet
            place=sys.maxsize if self.place is None else self.place,
            ended_by_us=self.ended_by_us,
            stderr=tuple(self.tail),
            blames=self.blames,
        )


def _watch(workers: list[_Worker], timeout: float, on_line: Callable[[str], None]) -> None:
    """Read what workers say until all have ended, or have had their time after one has."""
    deadline = notice = math.inf
    ended = 0
    with selectors.DefaultSelector() as selector:
        for stream in (stream for worker in workers for stream in worker.streams):
            selector.register(stream.file, selectors.EVENT_READ, stream)
        while ended < len(workers):
            now = time.monotonic()
            for worker in workers:
                if worker.place is not None or (code := worker.code()) is None:
                    continue
                worker.place = ended
                ended += 1
                if code == 0:
                    deadline = min(deadline, now + timeout)
                    notice = min(notice, now + timeout / 2)
                else:
                    deadline, notice = min(deadline, now + _GRACE_SECONDS), math.inf
                    # A child with copies of its connections would hide its end from the others.
                    worker.signal(signal.SIGTERM)
            if ended < len(workers) and now > min(deadline, notice):
                if now > deadline:
                    break
                notice = math.inf
                late = [worker.rank for worker in workers if worker.place is None]
                on_line(
                    f"{NOTICE}waited {timeout / 2:g} s of {timeout:g} s for ranks {late} to end as "
                    "the others have"
                )
            read_streams(selector)
        stop = time.monotonic() + 1.0  # output not read yet; a child may hold a pipe
        while selector.get_map() and ended == len(workers) and time.monotonic() < stop:
            read_streams(selector)


def _end(workers: Sequence[_Worker]) -> None:
    """End what still runs, and what the others have started."""
    for worker in workers:
        worker.ended_by_us = worker.code() is None
    end_children(workers)


def _variables(rank: int, num_workers: int, port: int) -> dict[str, str]:
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, num_cores // num_workers)),
        **local_environment(),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The workers find the modules that this process finds.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        PARENT_VARIABLE: str(os.getpid()),
    }


def _free_port() -> int:
    """A port that is free now; another process may take it before rank 0 listens.

    Ports below the range from which systems serve outgoing connections are taken least often, so
    some of those are tried first; not by the numbers that a program may have seeded.
    """
    for port in [*random.SystemRandom().sample(range(20000, 32000), 20), 0]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError("no free port on 127.0.0.1 for the workers to meet at")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that ``finally`` blocks run.

    One that is ignored, as nohup has it, stays ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
