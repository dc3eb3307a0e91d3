# SPDX-License-Identifier: Apache-2.0
"""launch_workers: N ranks as local processes, from start to end, without an orphan."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...comm.address import JOB_VARIABLE, local_environment
from ...errors import NOTICE, RankError
from ._children import Child, LineStream, how_ended, num_cores
from ._watch import TAIL_LINES, Watch, report_text
from ._worker import EVENTS_VARIABLE, FAILURE_MARK, PARENT_VARIABLE, ExitCode, stop_on_signals

_LINE_CHARACTERS = 500
_REST_SECONDS = 1.0

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """How one worker ended.

    Args:
        code: Exit code; negative: the signal that ended it.
        place: 0 for the first worker that ended, and so on.
        ended_by_us: Whether the launcher ended it, because others had failed or long ended.
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

    def check(self) -> None:
        """Raise what went wrong, if anything did.

        Raises:
            ValueError: The workers' input is wrong.
            RankError: A worker failed; the message starts with the first cause.
        """
        reason = self.report().removeprefix("error: ")
        if self.exit_code == ExitCode.WRONG_INPUT:
            raise ValueError(reason)
        if self.exit_code:
            raise RankError(reason, self.culprits)

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
        return report_text((self._what(exit), [*map(_short, exit.stderr)]) for exit in failed)

    def _what(self, exit: WorkerExit) -> str:
        if not exit.ended_by_us:
            return f"rank {exit.rank} ended with {exit.how}"
        if exit is not self.failed[0]:
            return f"rank {exit.rank} was ended by the launcher"
        return (
            f"rank {exit.rank} did not end: it had {self.timeout:g} s after the first worker had "
            "ended in good order, and was ended by the launcher"
        )


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
        timeout: Seconds that workers have to end after one has ended with 0; give what they wait
            for each other. After one has failed the others have a few seconds.
        on_event: Called with what rank 0 passes to `send_event`.
        on_stderr: Called with each line that rank 0 writes to standard output or error, up to the
            reason of a failure, which is in the report; and with what there is to say, by any
            worker or the launcher, about a wait that has used half of its time.
        on_start: Called with the process ids, by rank.

    Returns:
        How each worker ended. Also if some failed: ask ``exit_code`` and ``report()``.

    Raises:
        KeyboardInterrupt: Ctrl-C; all workers have been ended.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1 (got {num_workers})")
    on_line = on_stderr or _ignore
    watch = Watch(range(num_workers), timeout, on_line)
    workers: list[_Worker] = []
    ended: list[_Worker] = []

    def on_end(worker: Child, code: int) -> None:
        assert isinstance(worker, _Worker)
        worker.place = len(ended)
        ended.append(worker)
        if code == 0:
            watch.note_end(worker.rank)
            return
        watch.note_failure()
        # A child with copies of its connections would hide its end from the others.
        worker.signal(signal.SIGTERM)

    with stop_on_signals():
        try:
            port = _free_port()
            common = {JOB_VARIABLE: secrets.token_hex(8), **(environment or {})}
            for rank in range(num_workers):
                variables = {**_variables(rank, num_workers, port), **common}
                worker, streams = _start(command, rank, variables, on_line, on_event or _ignore)
                workers.append(worker)
                watch.add(worker, streams)
            if on_start is not None:
                on_start([worker.process.pid for worker in workers])
            watch.run(lambda: None, on_end)
            if len(ended) == num_workers:  # output not read yet
                watch.listen(_REST_SECONDS)
        finally:
            for worker in workers:
                worker.ended_by_us = worker.code() is None
            watch.close()
        return LaunchOutcome(tuple(worker.exit() for worker in workers), timeout)


def _ignore(said: object) -> None:
    pass


@dataclass(eq=False)
class _Worker(Child):
    """One worker's process and what it has said."""

    rank: int
    on_line: Callable[[str], None]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    place: int = sys.maxsize
    ended_by_us: bool = False
    failing: bool = False
    blames: tuple[int, ...] = ()
    output: LineStream = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        self.output = LineStream(self.process.stdout, self.take)

    def take(self, line: str) -> None:
        """Keep a line that the worker has printed, and pass on what is to be shown now."""
        if line.startswith(FAILURE_MARK):
            self.failing = True
            self.blames = tuple(map(int, line.removeprefix(FAILURE_MARK).split()))
            return
        self.tail.append(line)
        if (self.rank == 0 and not self.failing) or line.startswith(NOTICE):
            self.on_line(line)

    def exit(self) -> WorkerExit:
        if self.output.rest:
            self.tail.append(self.output.rest.decode(errors="replace"))
        code = self.process.poll()
        return WorkerExit(
            rank=self.rank,
            code=-signal.SIGKILL if code is None else code,  # None: killed, and not gone yet
            place=self.place,
            ended_by_us=self.ended_by_us,
            stderr=tuple(self.tail),
            blames=self.blames,
        )


def _start(
    command: Sequence[str],
    rank: int,
    variables: dict[str, str],
    on_line: Callable[[str], None],
    on_event: Callable[[Event], None],
) -> tuple[_Worker, list[LineStream]]:
    """Start a worker; what it prints, and the events of rank 0, come by its streams."""
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
    worker = _Worker(process, rank, on_line)
    streams = [worker.output]
    for end in ends[:1]:
        events = os.fdopen(end, "rb", buffering=0)
        streams.append(LineStream(events, lambda line: on_event(json.loads(line))))
    return worker, streams


def _variables(rank: int, num_workers: int, port: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(max(1, num_cores() // num_workers)),
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
