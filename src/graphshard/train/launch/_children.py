# SPDX-License-Identifier: Apache-2.0
"""Child processes in sessions of their own: the lines they write, how they end, ending them.

Standard library alone, so that a process that only watches others need not load torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

POLL_SECONDS = 0.05
TERMINATE_SECONDS = 1.5
_PR_SET_PDEATHSIG = 1


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def signal_with_parent(number: int) -> bool:
    """Have the kernel signal this process when its parent ends; whether it has such a service."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0)
    return False


@dataclass(eq=False)
class LineStream:
    """Lines that a process writes, and what takes each."""

    file: IO[bytes]
    take: Callable[[str], None]
    rest: bytes = b""

    def read(self) -> bool:
        """Take what has come; False at the end."""
        data = os.read(self.file.fileno(), 65536)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.take(line.decode(errors="replace"))
        return bool(data)

    def finish(self) -> None:
        """Take what is left of a line without an end."""
        rest, self.rest = self.rest, b""
        if rest:
            self.take(rest.decode(errors="replace"))


@dataclass(eq=False)
class Child:
    """A process that was started with a session of its own."""

    process: subprocess.Popen[bytes]

    def code(self) -> int | None:
        """How the process ended, as Popen has it; None while it runs.

        The kernel keeps its number until Popen has waited for it, so that `signal` reaches no
        other process.
        """
        if self.process.returncode is None and hasattr(os, "waitid"):
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            status = os.waitid(os.P_PID, self.process.pid, how)
            if status is None:
                return None
            return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Signal the process and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def end_children(children: Sequence[Child], seconds: float = TERMINATE_SECONDS) -> None:
    """End what still runs: SIGTERM, then SIGKILL; at once, if a second signal comes meanwhile.

    Args:
        children: Processes that `Child.process.wait` was not called for.
        seconds: Time between the two signals.
    """
    running = [child for child in children if child.code() is None]
    try:
        for child in running:
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)  # what is stopped takes no other signal
        stop = time.monotonic() + seconds
        while any(child.code() is None for child in running) and time.monotonic() < stop:
            time.sleep(POLL_SECONDS)
    finally:
        for child in children:  # also what those that ended by themselves have started
            child.signal(signal.SIGKILL)
        for child in children:  # one that the system cannot end now is not waited for
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(TERMINATE_SECONDS)


def read_streams(selector: selectors.BaseSelector) -> None:
    """Take what the registered `LineStream`s have to say within a moment."""
    if not selector.get_map():
        time.sleep(POLL_SECONDS)
    for key, _ in selector.select(POLL_SECONDS) if selector.get_map() else ():
        stream: LineStream = key.data
        if not stream.read():
            selector.unregister(stream.file)


def how_ended(code: int) -> str:
    """``"signal SIGKILL"`` or ``"exit code 1"``."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
