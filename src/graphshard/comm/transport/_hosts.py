# SPDX-License-Identifier: Apache-2.0
"""Hosts: which ranks can share memory, found out by trying.

Names of hosts say little where ranks run in containers. So each rank writes a file that only it can
have named, and the others look whether they see it, on the same running kernel.

[Note: files with a name] What ranks share is in files, since others may see those but not the
process (containers with one /dev/shm and process numbers of their own), and users may want them
elsewhere. A file has a name for a moment only, in which it is empty. Who makes it locks it for as
long: the kernel ends the lock with the process, so a file without one was left behind by a process
that was killed in that moment, and the next that looks for its hosts removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..collectives import all_gather, gather_texts
from ..group import GroupState, machine_name

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "graphshard-"
_MAX_PATH_BYTES = 512
_ATTEMPTS = 100


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group, by host."""

    rank: int  # this process
    leader: tuple[int, ...]  # for each rank the smallest rank on its host

    @property
    def leaders(self) -> list[int]:
        """One rank of each host, ascending."""
        return sorted(set(self.leader))

    @property
    def here(self) -> list[int]:
        """Ranks on this host, ascending; this one among them."""
        return [r for r, leader in enumerate(self.leader) if leader == self.leader[self.rank]]

    @property
    def is_leader(self) -> bool:
        return self.leader[self.rank] == self.rank

    @classmethod
    def find(cls, state: GroupState, directory: str | os.PathLike[str] | None = None) -> Hosts:
        """The hosts of a group; collective.

        Files can be shared in ``directory``, by default in shared memory, else where temporary
        files go. Ranks that do not see the same one count as being apart.
        """
        if state.world_size == 1:
            return cls(0, (0,))
        for folder in directories(directory):
            remove_abandoned(folder)
        folder = directories(directory)[0]
        name, written = "nothing", False
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                name = stack.enter_context(named_file(folder))[0].name
                written = True
            texts = gather_texts(state, f"{machine_name()} {name}")
            kernels, names = zip(*(text.split() for text in texts), strict=True)
            seen = [
                kernel == machine_name()
                and written
                and os.access(folder / other, os.R_OK | os.W_OK)
                for kernel, other in zip(kernels, names, strict=True)
            ]
            sees = torch.stack(all_gather(state, torch.tensor(seen, dtype=torch.uint8)))
        mutual = (sees & sees.t()).bool()
        mutual.fill_diagonal_(True)
        nearest = mutual.to(torch.int64).argmax(1).tolist()
        # Where sight is not transitive, a rank whose leader follows another one stays alone.
        leader = tuple(n if nearest[n] == n else r for r, n in enumerate(nearest))
        return cls(state.rank, leader)


def directories(directory: str | os.PathLike[str] | None) -> list[Path]:
    """Where shared files may be, the best place first."""
    if directory is not None:
        return [Path(directory)]
    places = [_SHARED_MEMORY, Path(tempfile.gettempdir())]
    return [place for place in places if place.is_dir() and os.access(place, os.W_OK)] or places[1:]


def directory_with_room(directory: str | os.PathLike[str] | None, num_bytes: int) -> Path:
    """The best place that has room.

    Raises:
        OSError: None has.
    """
    places = directories(directory)
    for place in places:
        if len(os.fsencode(place)) > _MAX_PATH_BYTES:
            raise OSError(f"the path of a shared file must be shorter (got {place})")
        if shutil.disk_usage(place).free > num_bytes:
            return place
    rooms = ", ".join(f"{place}: {shutil.disk_usage(place).free}" for place in places)
    raise OSError(
        f"sharing memory on this host needs {num_bytes} bytes (free: {rooms}); make room, or use "
        "transport='collective' and map_features=False"
    )


@contextlib.contextmanager
def named_file(folder: Path) -> Iterator[tuple[Path, int]]:
    """A new and empty file, and a descriptor of it; it loses its name at the end at the latest.

    See [Note: files with a name].

    Raises:
        OSError: Nothing can be written there.
    """
    for _ in range(_ATTEMPTS):
        path = folder / (_PREFIX + secrets.token_hex(16))
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process was quicker, and is about to remove it
                continue
            except OSError:  # there are no locks here, so no process gets one and removes it
                pass
            if os.fstat(descriptor).st_nlink:
                yield path, descriptor
                return
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)
    raise OSError(f"what this process writes to {folder} is removed at once")


def remove_abandoned(folder: Path) -> None:
    """Remove this user's files of which no living process holds the lock."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if re.fullmatch(_PREFIX + "[0-9a-f]{32}", name):
                with contextlib.suppress(OSError):
                    _remove_abandoned_file(folder / name)


def _remove_abandoned_file(path: Path) -> None:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(descriptor)
