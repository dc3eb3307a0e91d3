# SPDX-License-Identifier: Apache-2.0
"""What Linux says of the pages of this process."""

from __future__ import annotations

import platform
from pathlib import Path

LARGE_PAGE = 1 << 21
SHARED = Path("/dev/shm")


def can_move_shared_memory() -> bool:
    """Whether this system can move shared memory into large pages."""
    version = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    allowed = setting.is_file() and "[deny]" not in setting.read_text()
    return SHARED.is_dir() and version >= (6, 1) and allowed


def bytes_in_large_pages(address: int) -> int:
    """Of the map of shared memory at an address."""
    found, is_it = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, stop = (int(number, 16) for number in first.split("-"))
            is_it = start <= address < stop
        elif is_it and first == "ShmemPmdMapped:":
            found += int(line.split()[1]) * 1024
    return found
