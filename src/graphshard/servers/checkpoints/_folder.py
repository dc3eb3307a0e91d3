# SPDX-License-Identifier: Apache-2.0
"""Numbered checkpoints in a folder that all ranks share, each whole or not there at all.

::

    checkpoint_dir/
    ├── epoch-00000020/
    ├── epoch-00000010/            the one before; older ones are removed
    ├── epoch-00000030.partial/    being written, or left by a run that was killed: never read
    └── .lock                      held by rank 0 of the run that writes here: see `RunLock`

A checkpoint is written under its partial name, the manifest last, and then renamed, which is one
atomic step.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..._base.files import sync_folder
from ...comm import rank
from ...comm.collectives import raise_everywhere, text_of_rank_0
from ...errors import CheckpointError

PARTIAL = ".partial"
_SEEN = ".seen-"
SHARED = "shared.safetensors"
VISIBLE_SECONDS = 10.0
"""Longest wait for what rank 0 wrote: network file systems remember that a name was not there."""

_T = TypeVar("_T")


def rank_file(rank: int) -> str:
    """Name of the file with what a rank alone holds."""
    return f"rank-{rank}.safetensors"


@dataclass(frozen=True)
class CheckpointNames:
    """Names of the folders of checkpoints: a word and a number.

    Args:
        word: What is counted.
        least: The first number.
    """

    word: str
    least: int = 1

    def name(self, number: int) -> str:
        """Of the checkpoint of a number."""
        return f"{self.word}-{number:08d}"

    def number(self, name: str) -> int | None:
        """The number in a name; None if it is no such name."""
        found = re.fullmatch(rf"{self.word}-([0-9]{{8,20}})", name)
        number = self.least - 1 if found is None else int(found[1])
        return number if number >= self.least and self.name(number) == name else None

    def find(self, folder: Path) -> list[str]:
        """Finished checkpoints in a folder, newest first."""
        if not folder.is_dir():
            return []
        numbers = [self.number(item.name) for item in folder.iterdir()]
        found = sorted((number for number in numbers if number is not None), reverse=True)
        return [self.name(number) for number in found]

    def remove_partial(self, folder: Path) -> None:
        """Remove what killed runs left half written."""
        for item in folder.iterdir():
            if item.name.startswith(_SEEN):
                remove(item)
            whole = item.name.removesuffix(PARTIAL)
            if whole != item.name and self.number(whole) is not None:
                remove(item)

    def remove_old(self, folder: Path, kept: int, spared: Collection[str] = ()) -> None:
        """Keep so many of the newest, and those of some names."""
        with contextlib.suppress(OSError):
            for old in self.find(folder)[kept:]:
                if old not in spared:
                    remove(folder / old)


def write_whole(
    final: Path, write_own: Callable[[Path], object], write_manifest: Callable[[Path], object]
) -> None:
    """Write a checkpoint on all ranks. Collective.

    Args:
        final: Its folder, in one that exists.
        write_own: Writes this rank's files into a folder.
        write_manifest: Then, on rank 0, writes the manifest over the files of all ranks.

    Raises:
        Exception: What a rank raised, on all ranks; nothing is left of the checkpoint.
    """
    partial = final.with_name(final.name + PARTIAL)
    try:
        on_rank_0(lambda: _fresh_folder(partial))
        everywhere(lambda: write_own(partial))
        on_rank_0(lambda: _finish(partial, final, write_manifest))
    except Exception:  # a rank that failed may be gone, not say why
        if rank() == 0:  # a disk that is full needs the room
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _finish(partial: Path, final: Path, write_manifest: Callable[[Path], object]) -> None:
    write_manifest(partial)
    sync_folder(partial)
    remove(final)  # found damaged when the run was resumed
    os.rename(partial, final)
    sync_folder(final.parent)


def check_shared(folder: Path) -> None:
    """Raise unless all ranks see what rank 0 writes to a folder. Collective."""
    name = text_of_rank_0(f"{_SEEN}{secrets.token_hex(8)}")

    def check() -> None:
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not (folder / name).is_file():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank 0 wrote to the folder {folder}, but this rank does not see it there; "
                    "checkpoint_dir must be on storage that all ranks share"
                )
            time.sleep(0.05)

    try:
        on_rank_0((folder / name).touch)
        everywhere(check)
    finally:
        if rank() == 0:
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)


def everywhere(action: Callable[[], _T]) -> _T:
    """Do something on every rank; if it fails on one, raise on all. Collective."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    raise_everywhere(error)
    return result


def on_rank_0(action: Callable[[], object]) -> None:
    """Do something on rank 0, and go on together. Collective."""
    everywhere(action if rank() == 0 else lambda: None)


def _fresh_folder(path: Path) -> None:
    remove(path)
    path.mkdir()


def remove(path: Path) -> None:
    """Remove a folder with all in it, or whatever else has its name; it need not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
