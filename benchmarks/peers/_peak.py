# SPDX-License-Identifier: Apache-2.0
"""The most memory that a process has held: of itself alone."""

from __future__ import annotations

import re
import resource
from pathlib import Path


def peak_mb() -> float:
    """Peak resident memory of this process, in MB.

    What `getrusage` says begins with what the process that started this one had held before.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if found is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(found[1]) / 1024
