# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints: a lock, names, digests.

Numbered checkpoints in a folder that all ranks share, each whole or not there at all.

::

    checkpoint_dir/
    ├── epoch-00000020/
    ├── epoch-00000010/            the one before; older ones are removed
    ├── epoch-00000030.partial/    being written, or left by a run that was killed: never read
    └── .lock                      held by rank 0 of the run that writes here: see `RunLock`

A checkpoint is written under its partial name, the manifest last, and then renamed, which is one
atomic step.


Manifests with a digest over themselves, and tensor files whose digests they hold.

::

    {
     "format": "graphshard-...",
     "format_version": 2,
     ...
     "files": {"shared.safetensors": {"bytes": ..., "blake2b": ...}, ...},
     "blake2b": "..."           of all the rest, written with sorted keys and without spaces
    }

The digest is taken and placed alike in all versions and formats, so that damage is told from a
checkpoint of another version.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from .._base.files import check_regular, read_json_regular, sync_folder, write_json
from ..comm import rank
from ..comm.collectives import raise_everywhere, text_of_rank_0
from ..errors import CheckpointError, PartitionFormatError
from ..partition.files import FileRecord, TensorFile, digest_of

LOCK_FILE = ".lock"

_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK)
_OWNER_BYTES = 512


class RunLock:
    """Holds a folder for this process until `release`, or until the process ends.

    The lock is the kernel's (``flock`` on a file in the folder), so that it ends with the process
    that holds it, however that ends. The file stays, and says who took the lock last.

    Args:
        folder: The folder; it exists.

    Raises:
        CheckpointError: Another process holds it; names that one. Or the file of the lock cannot
            be opened or made.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        # No link is followed and nothing is waited for, whatever stands in place of the file.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"{path} must be a plain file that this process may write ({error.strerror}), to "
                "hold the folder with; remove what is there, or give another checkpoint_dir"
            ) from None
        self._end = weakref.finalize(self, os.close, descriptor)
        try:
            _lock(descriptor, folder)
        except BaseException:
            self.release()
            raise
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        with contextlib.suppress(OSError):  # of a full disk: the lock itself needs no room
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)

    def release(self) -> None:
        """Free the folder; a second call does nothing."""
        self._end()


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise CheckpointError(
                f"{folder} is in use by another run ({_owner(descriptor)}); wait for that run or "
                "end it, or give another checkpoint_dir"
            ) from None
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}), so nothing keeps another run from "
            "writing there; give each run its own checkpoint_dir",
            RuntimeWarning,
            stacklevel=2,
        )


def _owner(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        found = os.pread(descriptor, _OWNER_BYTES, 0).decode("utf-8", errors="replace")
        if found.isprintable() and found:
            return found
    return "which has not said yet who it is"


# ---------------------------------------------------------------------------- checkpoints._folder

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


# ---------------------------------------------------------------------------- checkpoints._sealed

MANIFEST = "manifest.json"

_DIGEST_KEY = "blake2b"
_DIGEST_BYTES = 16
_HEX_DIGEST = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")


class DamagedError(Exception):
    """A checkpoint is not whole; the one before may be."""


def digest_of_content(content: Mapping[str, Any], key: str = _DIGEST_KEY) -> str:
    """Digest of a JSON object, without the digest that it carries under a key."""
    rest = {name: value for name, value in content.items() if name != key}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def records_of(paths: Iterable[Path]) -> dict[str, FileRecord]:
    """Size and digest of tensor files that have been written, by name."""
    return {
        path.name: FileRecord(path.stat().st_size, TensorFile.open(path).blake2b) for path in paths
    }


def write_sealed(folder: Path, content: dict[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Write the manifest of a checkpoint, with its digest, and sync it to disk."""
    content = content | {"files": {name: asdict(record) for name, record in files.items()}}
    content[_DIGEST_KEY] = digest_of_content(content)
    write_json(folder / MANIFEST, content)


def read_sealed(folder: Path, kind: str, version: int) -> tuple[dict[str, Any], str]:
    """What the manifest of a checkpoint says, not checked further, and its digest.

    Raises:
        DamagedError: It is missing, or is not what was written.
        CheckpointError: It is of another format, or another version of it.
    """
    path = folder / MANIFEST
    try:
        content = read_json_regular(path)
        if not isinstance(content, dict):
            raise ValueError(f"it must be a JSON object, and is a {type(content).__name__}")
        carried = content.get(_DIGEST_KEY)
        if carried is not None and carried != digest_of_content(content):
            raise ValueError("its digest is not that of its content")
        found = content.get("format"), content.get("format_version")
        if found != (kind, version) and (carried is not None or found == (kind, 1)):
            raise CheckpointError(
                f"{folder} has the format {found}, and this graphshard reads {(kind, version)}; "
                "resume with the graphshard that wrote it"
            )
        return content, _hex_digest(_DIGEST_KEY, carried)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} is missing or damaged ({error})") from None


def check_record(name: str, value: Any) -> FileRecord:
    """What a manifest says of a file; ValueError if it is no such thing."""
    if not isinstance(value, dict) or set(value) != {"bytes", "blake2b"}:
        raise ValueError(f"files['{name}'] must have bytes and blake2b (got {value!r:.80})")
    return FileRecord(
        check_positive(value, "bytes"), _hex_digest(f"blake2b of {name}", value["blake2b"])
    )


def _hex_digest(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _HEX_DIGEST.fullmatch(value):
        raise ValueError(
            f"{name} must be {2 * _DIGEST_BYTES} digits in base 16 (got {value!r:.80})"
        )
    return value


def check_positive(content: Mapping[str, Any], key: str, least: int = 1) -> int:
    """A whole number of a JSON object; ValueError if it is none."""
    value = content.get(key)
    if type(value) is not int or value < least:
        raise ValueError(f"{key} must be an integer, at least {least} (got {value!r:.80})")
    return value


def json_object(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object in a JSON object; ValueError if it is none."""
    value = content.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a JSON object (got {value!r:.80})")
    return value


def open_checked(path: Path, record: FileRecord, *, whole: bool = True) -> TensorFile:
    """A tensor file of a checkpoint.

    Args:
        path: The file.
        record: What the manifest says of it.
        whole: Read every byte, and compare their digest; else the header alone.

    Raises:
        DamagedError: It is missing, or not the file that the manifest speaks of.
    """
    try:
        size = check_regular(path).st_size
        if size != record.bytes:
            raise DamagedError(f"{path} is damaged: it has {size} bytes and not {record.bytes}")
        file = TensorFile.open(path)
        if file.blake2b != record.blake2b or (whole and digest_of(path) != record.blake2b):
            raise DamagedError(f"{path} is damaged: its digest is not that of the manifest")
        return file
    except (PartitionFormatError, OSError) as error:
        raise DamagedError(f"{path} is missing or damaged ({error})") from None


def read_checked(path: Path, record: FileRecord, *, whole: bool = True) -> dict[str, Tensor]:
    """The tensors of `open_checked`, mapped from the file."""
    file = open_checked(path, record, whole=whole)
    try:
        return file.read()
    except (PartitionFormatError, OSError) as error:
        raise DamagedError(f"{path} is missing or damaged ({error})") from None
