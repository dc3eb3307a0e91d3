# SPDX-License-Identifier: Apache-2.0
"""Hosts: which ranks can share memory, found out by trying.

Names of hosts say little where ranks run in containers. So each rank writes a file that only it can
have named, and the others look whether they see it, on the same running kernel.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ..comm._collectives import all_gather
from ..comm._group import GroupState

_SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PREFIX = "graphshard-"
_TEXT_BYTES = 1024


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group, by host.

    Args:
        rank: This process.
        leader: For each rank the smallest rank on its host.
    """

    rank: int
    leader: tuple[int, ...]

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
        """Collective.

        Args:
            state: The group.
            directory: Where files can be shared; by default in shared memory, else where
                temporary files go. Ranks that do not see the same one count as being apart.
        """
        if state.world_size == 1:
            return cls(0, (0,))
        folder = directories(directory)[0]
        name = fresh_name()
        token = folder / name
        written = False
        with contextlib.suppress(OSError):
            token.touch(mode=0o600, exist_ok=False)
            written = True
        try:
            texts = gather_texts(state, f"{_kernel()} {name}")
            kernels, names = zip(*(text.split() for text in texts), strict=True)
            seen = [
                kernel == _kernel() and written and os.access(folder / other, os.R_OK | os.W_OK)
                for kernel, other in zip(kernels, names, strict=True)
            ]
            sees = torch.stack(all_gather(state, torch.tensor(seen, dtype=torch.uint8)))
        finally:
            if written:
                token.unlink(missing_ok=True)
        mutual = (sees & sees.t()).bool()
        mutual.fill_diagonal_(True)
        nearest = mutual.to(torch.int64).argmax(1).tolist()
        # Where sight is not transitive, a rank whose leader follows another one stays alone.
        leader = tuple(n if nearest[n] == n else r for r, n in enumerate(nearest))
        return cls(state.rank, leader)


def directories(directory: str | os.PathLike[str] | None) -> list[Path]:
    """Where shared files may lie, the best place first."""
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
        if len(os.fsencode(place)) > _TEXT_BYTES // 2:
            raise OSError(f"the path of a shared file must be shorter (got {place})")
        if shutil.disk_usage(place).free > num_bytes:
            return place
    rooms = ", ".join(f"{place}: {shutil.disk_usage(place).free}" for place in places)
    raise OSError(
        f"sharing memory on this host needs {num_bytes} bytes (free: {rooms}); make room, or use "
        "transport='collective' and map_features=False"
    )


def fresh_name() -> str:
    """A file name that nobody else has."""
    return _PREFIX + secrets.token_hex(16)


def gather_texts(state: GroupState, text: str) -> list[str]:
    """Every rank's text of less than a kilobyte, by rank."""
    data = text.encode()
    assert len(data) < _TEXT_BYTES, text
    payload = torch.tensor(list(data.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
    return [bytes(part.tolist()).rstrip(b"\0").decode() for part in all_gather(state, payload)]


def _kernel() -> str:
    """A name of the running system, equal for all that runs on it."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()
