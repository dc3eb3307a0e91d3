# SPDX-License-Identifier: Apache-2.0
"""Memory: how much is left, how much is in use, and what stays when it is freed.

[Note: memory that is left]
    What a process can still get is the least of what the machine has left and of what each control
    group around it leaves: containers, batch systems and systemd limit memory that way, and they
    nest. Pages of the file cache that were not used of late count as free, because the kernel
    gives them up before it refuses memory. Limits of the address space (``RLIMIT_AS``) do not
    count: mapped files are not memory.

[Note: freed memory]
    glibc asks the system for every block above some size (32 MB at most) and gives it back as soon
    as it is freed. The activations of a sampled step are larger and are freed with the step, so
    each step pays for mapping and clearing all its memory again. Since all steps of sampled
    training are alike, what one of them frees fits the next, and it is kept. 16 steps of GraphSAGE
    (hidden 256, fanouts 15, 10, 5, batches of 1000, one thread) take 5.1 s of processor time so and
    6.9 s otherwise, of which 1.6 s are the system's. Steps of sparse optimizers are alike, too:
    a trainer of `benchmarks/graph_servers.py` takes 18.9 ms of processor time so, else 21.8.
    Full-batch training, which is careful about its peak, does not ask for this.

[Note: large pages]
    Pages of 4 KB cost an epoch of three layers of GraphSAGE, 100,000 nodes and 128 columns, 40,000
    traps into the kernel, and a tenth of its processor time. torch's allocator asks for large pages
    by itself where the environment has THP_MEM_ALLOC_ENABLE, which it reads when the first tensor
    is made. So a process that is one of several asks when it joins the others: under torchrun, too,
    without being started anew. Peak memory is the same or less.

[Note: records of collectives]
    torch notes of each of the last 2,000 collectives from which lines it was called, for post
    mortems of NCCL: five blocks of 1 to 1,024 bytes. malloc puts them beside tensors, and what
    those leave is parted by them for hundreds of epochs: after eight, a rank took 675 and 696 MiB
    with columns of categories where it takes 651 and 659, and 1,206 and 1,244 where it predicts
    links, not 1,078 and 1,103 (60,000 nodes, 2 ranks). So none are kept where there is no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch


def available_memory(root: str | os.PathLike[str] = "/") -> int:
    """Bytes that this process can still get. See [Note: memory that is left].

    Where the system does not say what is free (macOS), half of what there is; where it says
    nothing at all, 1 GiB.

    Args:
        root: The directory that has ``proc`` and the mounted control groups, for tests.
    """
    root = Path(root)
    return max(0, min([_left_in_machine(root), *_left_in_control_groups(root)]))


def _left_in_machine(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _numbers(root / "proc/meminfo")["MemAvailable"] * 1024
    for name, share in (("SC_AVPHYS_PAGES", 1), ("SC_PHYS_PAGES", 2)):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") // share
    return 1 << 30


def _left_in_control_groups(root: Path) -> Iterator[int]:
    """What each control group leaves that holds this process and limits memory."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except (OSError, ValueError):
        return
    paths = dict(line.split(":", 2)[1:] for line in groups if line.count(":") >= 2)
    for line in mounts:
        mount, _, kind = line.partition(" - ")
        fields, options = mount.split(), kind.split()
        if len(fields) < 5 or len(options) < 3:
            continue
        if options[0] == "cgroup2":
            path, files = paths.get(""), _V2
        elif options[0] == "cgroup" and "memory" in options[2].split(","):
            path, files = next((p for c, p in paths.items() if "memory" in c.split(",")), None), _V1
        else:
            continue
        if path is not None:
            top = root / _unescaped(fields[4]).lstrip("/")
            for folder in _folders(top, _unescaped(fields[3]), path):
                yield from _left_in_folder(folder, *files)


_Files: TypeAlias = tuple[tuple[str, ...], str, str]
"""What limits, what is used, and what of that is cache which was not used of late."""
_V2: _Files = ("memory.max", "memory.high"), "memory.current", "inactive_file"
_V1: _Files = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"


def _folders(top: Path, mounted: str, path: str) -> Iterator[Path]:
    """The folder of a control group and those around it, up to where the hierarchy is mounted."""
    inside = Path(path)
    with contextlib.suppress(ValueError):  # a container may see paths of the host
        inside = Path("/") / inside.relative_to(mounted)
    names = [] if ".." in inside.parts else list(inside.parts[1:])
    for count in range(len(names), -1, -1):
        yield top.joinpath(*names[:count])


def _left_in_folder(folder: Path, limits: Sequence[str], usage: str, cache: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        used = int((folder / usage).read_text())
        with contextlib.suppress(OSError, ValueError):
            used -= _numbers(folder / "memory.stat").get(cache, 0)
        for name in limits:
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                yield int((folder / name).read_text()) - used


def _numbers(file: Path) -> dict[str, int]:
    """The lines ``name number`` of a file."""
    pairs = (line.split()[:2] for line in file.read_text().splitlines())
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) == 2}


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path)


class PeakMemory:
    """The largest resident memory since this object was made, less what was resident then.

    On Linux the kernel's high-water mark of the process is set back when the object is made, so
    the answer is exact. Elsewhere the mark of the whole life of the process is all there is, and
    a peak before the start hides a smaller one after it.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # sets the high-water mark to what is resident now
        #: What was resident then, in bytes; and what of that was no page of a file.
        self.start, self.own = current_memory(), own_memory()
        #: The same with what `imported` says of later.
        self.base, self.base_own = self.start, self.own

    def imported(self) -> None:
        """What came since this object was made is code, not data: `base` holds it, too."""
        self.base, self.base_own = current_memory(), own_memory()

    def above_start(self) -> int:
        """Bytes."""
        return max(0, peak_memory() - self.start)


class PeakDeviceMemory:
    """The most memory that tensors of a device took at once since this object was made.

    Args:
        device: A GPU; nothing is known of others.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> int:
        """Bytes; 0 where it is not a GPU."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.max_memory_allocated(self._device))


def current_memory() -> int:
    """Bytes that are resident now; where the system does not say, the most there ever were."""
    return _status("VmRSS") or peak_memory()


def own_memory() -> int:
    """Bytes that are resident now without pages of files; all of them where nothing tells."""
    return _status("RssAnon") or current_memory()


def peak_own_memory() -> int:
    """The most there were without pages of files, if there were as many of these as now."""
    return max(own_memory(), peak_memory() - (_status("RssFile") or 0))


def peak_memory() -> int:
    """The most bytes that were resident at once."""
    high_water = _status("VmHWM")
    if high_water is not None:
        return high_water
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(key: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def ask_for_large_pages() -> None:
    """Let tensors of the CPU lie in large pages, if none has been made; see [Note: large pages].

    Nothing happens where the system gives such pages to all or to none, or where the environment
    has the variable already.
    """
    with contextlib.suppress(OSError, ValueError):
        if "[madvise]" in _LARGE_PAGES.read_text():
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


_RECORDS = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"


def leave_out_records_of_collectives() -> None:
    """Let torch note no collectives, unless the environment says how many, or there is a GPU.

    To be called before the first group; see [Note: records of collectives].
    """
    if not any(name in os.environ for name in _RECORDS) and not torch.cuda.is_available():
        os.environ[_RECORDS[0]] = "0"


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_BLOCK = 1 << 30
_MOST_KEPT = (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep freed blocks of up to 1 GiB, for good, up to 2 GiB of them.

    See [Note: freed memory]. Nothing happens where the C library is not glibc, where
    GRAPHSHARD_KEEP_MEMORY is 0, or where the environment tells malloc itself what to do.

    Returns:
        Whether it does.
    """
    told = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if told or os.environ.get("GRAPHSHARD_KEEP_MEMORY", "1") == "0":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all([mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK), mallopt(_TRIM_THRESHOLD, _MOST_KEPT)])
