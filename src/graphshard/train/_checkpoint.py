# SPDX-License-Identifier: Apache-2.0
"""CheckpointFolder: checkpoints of a run on many ranks, whole or not there at all.

::

    checkpoint_dir/
    ├── epoch-00000020/
    │   ├── manifest.json          identity of the run, history, digests: see ``_manifest.py``
    │   ├── shared.safetensors     what all ranks hold alike: model, its moments, best model
    │   ├── rank-0.safetensors     what rank 0 alone holds: embeddings, their moments, generator
    │   └── rank-1.safetensors ...
    ├── epoch-00000010/            the one before; older ones are removed
    ├── epoch-00000030.partial/    being written, or left by a run that was killed: never read
    └── .lock                      held by rank 0 of the run that writes here: see `RunLock`

A checkpoint is written under its partial name, the manifest last, and then renamed, which is one
atomic step. All ranks must see one folder. Tensors are safetensors, the rest is JSON.

A run that only reads takes no lock. If the one that writes removes a checkpoint meanwhile, the
reader finds it damaged and takes the one before, or says that none is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from .._regular_files import check_regular
from .._written_files import sync_folder
from ..comm import agree, is_initialized, rank, world_size
from ..errors import CheckpointError, PartitionFormatError, RankError
from ..partition.files import FileRecord, TensorFile, digest_of, write_tensors
from ._collectives import raise_everywhere, reduce_ints
from ._manifest import (
    SHARED,
    DamagedError,
    Manifest,
    checkpoint_name,
    epoch_of,
    rank_file,
    read_manifest,
    write_manifest,
)
from ._result import History

KEPT = 2
"""Checkpoints that are kept: the newest, and one more in case its files get damaged."""

_PARTIAL = ".partial"

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after an epoch, as one rank has it."""

    shared: dict[str, Tensor]  # what all ranks hold alike
    local: dict[str, Tensor]  # what this rank alone holds
    history: History  # the same on all ranks


class CheckpointFolder:
    """The checkpoints of one run. Every method is collective.

    Args:
        path: The folder.
        identity: What a run must have in common with the one that wrote a checkpoint; plain
            values, the same on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._identity: dict[str, Any] = json.loads(json.dumps(dict(identity)))
        self._lock: RunLock | None = None

    def prepare(self, *, resume: bool, write: bool) -> None:
        """Check the folder before anything is trained; to write, make it and hold it: see `close`.

        What killed runs left half written is removed.

        Raises:
            CheckpointError: To resume, and there is no folder; to start afresh in a folder that
                holds checkpoints; or to write where another run does.
        """

        def check() -> None:
            if resume and not self.path.is_dir():
                raise CheckpointError(
                    f"there is no folder of checkpoints at {self.path} to resume from; give the "
                    "checkpoint_dir of the run, or do not resume"
                )
            if write:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = RunLock(self.path)
            if not resume and self._names():
                raise CheckpointError(
                    f"{self.path} holds checkpoints of an earlier run ({self._names()[0]}); resume "
                    "that run, or give another checkpoint_dir"
                )
            if write:
                for item in self.path.iterdir():
                    if item.name.endswith(_PARTIAL) and epoch_of(item.name.removesuffix(_PARTIAL)):
                        _remove(item)

        try:
            _on_rank_0(check)
            _everywhere(self._check_visible if write else lambda: None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other runs write to the folder; a second call does nothing. Not collective."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _check_visible(self) -> None:
        if not self.path.is_dir():
            raise CheckpointError(
                f"rank 0 made the folder {self.path}, but this rank does not see it; "
                "checkpoint_dir must be on storage that all ranks share"
            )

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and remove those that are too old.

        Raises:
            OSError: A rank could not write; raised on every rank.
        """
        name = checkpoint_name(checkpoint.history.epoch)
        partial = self.path / f"{name}{_PARTIAL}"
        try:
            _on_rank_0(lambda: _fresh_folder(partial))
            _everywhere(lambda: _write_own(partial, checkpoint))
            _on_rank_0(lambda: self._finish(partial, self.path / name, checkpoint))
        except (OSError, ValueError, RankError):  # a rank that failed may be gone, not say why
            if rank() == 0:  # a disk that is full needs the room
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _finish(self, partial: Path, final: Path, checkpoint: Checkpoint) -> None:
        """Write the manifest over what all ranks wrote, and put the checkpoint in its place."""
        written = [partial / name for name in (SHARED, *map(rank_file, range(world_size())))]
        files = {
            path.name: FileRecord(path.stat().st_size, TensorFile.open(path).blake2b)
            for path in written
        }
        manifest = Manifest(world_size(), self._identity, checkpoint.history, files)
        write_manifest(partial, manifest)
        sync_folder(partial)
        _remove(final)  # found damaged when the run was resumed
        os.rename(partial, final)
        sync_folder(self.path)
        for old in self._names()[KEPT:]:
            with contextlib.suppress(OSError):
                _remove(self.path / old)

    def newest(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole; None if there is none.

        Raises:
            CheckpointError: It belongs to another run, or all checkpoints are damaged.
        """
        names = _everywhere(self._names)
        if is_initialized():
            agree("\n".join(names), f"the list of checkpoints in {self.path}")
        for name in names:
            found, damage = self._try(self.path / name)
            if not reduce_ints([int(damage is not None)], "max")[0]:
                return found
            reason = damage or f"{self.path / name} is damaged for another rank"
            warnings.warn(f"{reason}; trying the one before", RuntimeWarning, stacklevel=2)
        if names:
            raise CheckpointError(
                f"no checkpoint in {self.path} is whole; start the run again in another folder"
            )
        return None

    def _try(self, folder: Path) -> tuple[Checkpoint | None, str | None]:
        """The checkpoint, or what is damaged. All ranks read the same manifest."""

        def read() -> tuple[str, Checkpoint | None, str | None]:
            digest = ""
            try:
                manifest = read_manifest(folder)
                digest = manifest.digest
                self._check_identity(folder, manifest)
                return digest, self._read(folder, manifest), None
            except DamagedError as error:
                return digest, None, str(error)

        digest, found, damage = _everywhere(read)
        if is_initialized() and not reduce_ints([int(not digest)], "max")[0]:
            agree(digest, f"the manifest of {folder}")
        return found, damage

    def _names(self) -> list[str]:
        """Finished checkpoints, newest first."""
        if not self.path.is_dir():
            return []
        epochs = [epoch_of(item.name) for item in self.path.iterdir()]
        return [checkpoint_name(epoch) for epoch in sorted(filter(None, epochs), reverse=True)]

    def _read(self, folder: Path, manifest: Manifest) -> Checkpoint:
        return Checkpoint(
            shared=_read_file(folder / SHARED, manifest),
            local=_read_file(folder / rank_file(rank()), manifest),
            history=manifest.history,
        )

    def _check_identity(self, folder: Path, manifest: Manifest) -> None:
        if manifest.world_size != world_size():
            raise CheckpointError(
                f"{folder} was written by {manifest.world_size} workers (got {world_size()}); "
                "resume with as many"
            )
        theirs, mine = manifest.identity, self._identity
        different = [
            f"{key} was {theirs.get(key)!r} and is {mine.get(key)!r}"
            for key in sorted({*theirs, *mine})
            if theirs.get(key) != mine.get(key)
        ]
        if different:
            raise CheckpointError(
                f"{folder} belongs to another run: {'; '.join(different)}; resume with the same "
                "settings and the same partition, or start afresh in another checkpoint_dir"
            )


def _write_own(folder: Path, checkpoint: Checkpoint) -> None:
    write_tensors(folder / rank_file(rank()), checkpoint.local)
    if rank() == 0:
        write_tensors(folder / SHARED, checkpoint.shared)


def _read_file(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    record = manifest.files[path.name]
    try:
        size = check_regular(path).st_size
        if size != record.bytes:
            raise DamagedError(f"{path} is damaged: it has {size} bytes and not {record.bytes}")
        file = TensorFile.open(path)
        if file.blake2b != record.blake2b or digest_of(path) != record.blake2b:
            raise DamagedError(f"{path} is damaged: its digest is not that of the manifest")
        return file.read()
    except (PartitionFormatError, OSError) as error:
        raise DamagedError(f"{path} is missing or damaged ({error})") from None


def _everywhere(action: Callable[[], _T]) -> _T:
    """Do something on every rank; if it fails on one, raise on all."""
    error: Exception | None = None
    try:
        result = action()
    except (OSError, ValueError) as caught:
        error = caught
    raise_everywhere(error)
    return result


def _on_rank_0(action: Callable[[], None]) -> None:
    """Do something on rank 0, and go on together."""
    _everywhere(action if rank() == 0 else lambda: None)


def _fresh_folder(path: Path) -> None:
    _remove(path)
    path.mkdir()


def _remove(path: Path) -> None:
    """Remove a folder with all in it, or whatever else has its name; it need not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load_model_state(checkpoint: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The best model's ``state_dict`` from one checkpoint, ``checkpoint_dir/epoch-...``.

    Embeddings of nodes are not in it: each rank wrote those of its own nodes.

    Raises:
        CheckpointError: It is missing or damaged, of another format version, or of an epoch before
            the first evaluation.
    """
    folder = Path(checkpoint)
    try:
        shared = _read_file(folder / SHARED, read_manifest(folder))
    except DamagedError as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint ({error})") from None
    state = {k: v.clone() for k, v in tensors_under(shared, "best/").items()}
    if not state:
        raise CheckpointError(
            f"{folder} holds no best model: nothing had been evaluated by then; take a later "
            "checkpoint"
        )
    return state


def tensors_under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, under the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


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
