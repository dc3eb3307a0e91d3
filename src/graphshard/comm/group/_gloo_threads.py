# SPDX-License-Identifier: Apache-2.0
"""wait_until_idle: threads of gloo release what they worked on before their group ends.

[Note: the end of a group of gloo]
A thread of gloo that has done an operation releases its tensors a moment later, for which it needs
the interpreter's lock. The end of the group waits for its threads. Where the last reference to the
group is that of a `DistributedDataParallel`, which goes while the lock is held, both wait for each
other for ever; and where the interpreter has gone meanwhile the process aborts. Hence a group is
not left before its threads have nothing in hand.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

_TASKS = Path("/proc/self/task")
_ARE_NAMED = TorchVersion(torch.__version__) >= "2.11"
_NAME = "pt_gloo_runloop"
_CHECK_SECONDS = 0.01
_MOST_SECONDS = 5.0
_PAUSE_SECONDS = 0.05


def wait_until_idle() -> None:
    """Wait until no thread of any gloo group runs, or is about to.

    One that waits for the lock wakes up every few milliseconds, and one that was only interrupted
    counts as running: so a thread is idle that sleeps and has not woken up from one check to the
    next. Systems other than Linux do not tell, and torch before 2.11 does not name its threads;
    there this is a pause.
    """
    if not _TASKS.is_dir() or not _ARE_NAMED:
        time.sleep(_PAUSE_SECONDS)
        return
    deadline = time.monotonic() + _MOST_SECONDS
    before: dict[str, tuple[str, str]] = {}
    while time.monotonic() < deadline:
        now = _threads()
        if not now or (now == before and all(state == "S" for state, _ in now.values())):
            return
        before = now
        time.sleep(_CHECK_SECONDS)


def _threads() -> dict[str, tuple[str, str]]:
    """Of each thread of gloo its state and how often it has gone to sleep, by number."""
    found = {}
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() == _NAME:
                lines = (task / "status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines if ":" in line)
                state = status["State"].split()[0]
                found[task.name] = (state, status["voluntary_ctxt_switches"].strip())
    return found
