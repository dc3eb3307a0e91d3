# SPDX-License-Identifier: Apache-2.0
"""PeakMemory: how much more memory a process has held than at a given moment."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """The largest resident memory since this object was made, less what was resident then.

    On Linux the kernel's high-water mark of the process is set back when the object is made, so
    the answer is exact. Elsewhere the mark of the whole life of the process is all there is, and
    a peak before the start hides a smaller one after it.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # sets the high-water mark to what is resident now
        self._start = current_memory()

    def above_start(self) -> int:
        """Bytes."""
        return max(0, peak_memory() - self._start)


def current_memory() -> int:
    """Bytes that are resident now; where the system does not say, the most there ever were."""
    return _status("VmRSS") or peak_memory()


def peak_memory() -> int:
    """The most bytes that were resident at once."""
    high_water = _status("VmHWM")
    if high_water is not None:
        return high_water
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(key: str) -> int | None:
    if os.name != "posix" or not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None
