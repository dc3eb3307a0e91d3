# SPDX-License-Identifier: Apache-2.0
"""CheckpointFolder: checkpoints of a run on many ranks, whole or not there at all.

::

    checkpoint_dir/
    ├── epoch-00000020/
    │   ├── manifest.json          format, identity of the run, history, size and digest of files
    │   ├── shared.safetensors     what all ranks hold alike: model, its moments, best model
    │   ├── rank-0.safetensors     what rank 0 alone holds: embeddings, their moments, generator
    │   └── rank-1.safetensors ...
    ├── epoch-00000010/            the one before; older ones are removed
    └── epoch-00000030.partial/    being written, or left by a run that was killed: never read

A checkpoint is written under its partial name, the manifest last, and then renamed, which is one
atomic step. All ranks must see one folder. Tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm import agree, is_initialized, rank, share_error, world_size
from ..errors import CheckpointError, PartitionFormatError
from ..partition._files import TensorFile, digest_of, write_tensors
from ._counts import reduced

FORMAT = "graphshard-checkpoint"
FORMAT_VERSION = 1
KEPT = 2
"""Checkpoints that are kept: the newest, and one more in case its files get damaged."""

_NAME = re.compile(r"epoch-(\d{8,})")
_MANIFEST = "manifest.json"
_SHARED = "shared.safetensors"
_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after an epoch, as one rank has it.

    Args:
        epoch: Epochs trained.
        shared: What all ranks hold alike.
        local: What this rank alone holds.
        history: Plain values, the same on all ranks.
    """

    epoch: int
    shared: dict[str, Tensor]
    local: dict[str, Tensor]
    history: dict[str, Any]


class CheckpointFolder:
    """The checkpoints of one run. Every method is collective.

    Args:
        path: The folder.
        identity: What a run must have in common with the one that wrote a checkpoint; plain
            values, the same on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._identity = json.loads(json.dumps(dict(identity)))

    def prepare(self, *, resume: bool, write: bool) -> None:
        """Check the folder before anything is trained, and make it if it is to be written.

        Raises:
            CheckpointError: To resume, and there is no folder; or to start afresh in a folder that
                holds checkpoints.
        """

        def check() -> None:
            if resume and not self.path.is_dir():
                raise CheckpointError(
                    f"there is no folder of checkpoints at {self.path} to resume from; give the "
                    "checkpoint_dir of the run, or do not resume"
                )
            if not resume and self._names():
                raise CheckpointError(
                    f"{self.path} holds checkpoints of an earlier run ({self._names()[0]}); resume "
                    "that run, or give another checkpoint_dir"
                )
            if write:
                self.path.mkdir(parents=True, exist_ok=True)

        _on_rank_0(check)
        _everywhere(self._check_visible if write else _nothing)

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
        name = f"epoch-{checkpoint.epoch:08d}"
        partial = self.path / f"{name}{_PARTIAL}"
        _on_rank_0(lambda: _fresh_folder(partial))

        def write() -> None:
            write_tensors(partial / _rank_file(rank()), checkpoint.local)
            if rank() == 0:
                write_tensors(partial / _SHARED, checkpoint.shared)

        _everywhere(write)

        def finish() -> None:
            written = [partial / name for name in (_SHARED, *map(_rank_file, range(world_size())))]
            files = {
                path.name: {"bytes": path.stat().st_size, "blake2b": TensorFile.open(path).blake2b}
                for path in written
            }
            content = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "epoch": checkpoint.epoch,
                "world_size": world_size(),
                "identity": self._identity,
                "history": checkpoint.history,
                "files": files,
            }
            _write_json(partial / _MANIFEST, content)
            final = self.path / name
            if final.exists():  # found damaged when the run was resumed
                shutil.rmtree(final)
            os.rename(partial, final)
            _sync(self.path)
            for old in self._names()[KEPT:]:
                shutil.rmtree(self.path / old, ignore_errors=True)

        _on_rank_0(finish)

    def newest(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole; None if there is none.

        Raises:
            CheckpointError: It belongs to another run, or all checkpoints are damaged.
        """
        names: list[str] = []
        _everywhere(lambda: names.extend(self._names()))
        if is_initialized():
            agree("\n".join(names), f"the list of checkpoints in {self.path}")
        for name in names:
            found, damage = self._try(self.path / name)
            if not reduced([int(damage is not None)], "max")[0]:
                return found
            reason = damage or f"{self.path / name} is damaged for another rank"
            warnings.warn(f"{reason}; trying the one before", RuntimeWarning, stacklevel=2)
        if names:
            raise CheckpointError(
                f"no checkpoint in {self.path} is whole; start the run again in another folder"
            )
        return None

    def _try(self, folder: Path) -> tuple[Checkpoint | None, str | None]:
        """The checkpoint, or what is damaged."""
        found: list[Checkpoint] = []
        damage: list[str] = []

        def read() -> None:
            try:
                found.append(self._read(folder))
            except _Damaged as error:
                damage.append(str(error))

        _everywhere(read)
        return (found[0], None) if found else (None, damage[0])

    def unusable(self, found: Checkpoint, error: Exception) -> CheckpointError:
        """The error for a checkpoint whose content does not fit the run."""
        return CheckpointError(
            f"the checkpoint of epoch {found.epoch} in {self.path} does not fit this run "
            f"({error}); resume with the same graph and model"
        )

    def _names(self) -> list[str]:
        """Finished checkpoints, newest first."""
        if not self.path.is_dir():
            return []
        names = [item.name for item in self.path.iterdir() if _NAME.fullmatch(item.name)]
        return sorted(names, key=lambda name: -int(name.removeprefix("epoch-")))

    def _read(self, folder: Path) -> Checkpoint:
        try:
            content = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            version = content["format"], content["format_version"]
            epoch, files = int(content["epoch"]), content["files"]
            identity, history = content["identity"], content["history"]
            writers = int(content["world_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _Damaged(f"{folder / _MANIFEST} is missing or damaged ({error})") from None
        if version != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"{folder} has the format {version}, and this graphshard reads "
                f"{(FORMAT, FORMAT_VERSION)}; resume with the graphshard that wrote it"
            )
        self._check_identity(folder, identity, writers)
        return Checkpoint(
            epoch=epoch,
            shared=_read_file(folder / _SHARED, files),
            local=_read_file(folder / _rank_file(rank()), files),
            history=history,
        )

    def _check_identity(self, folder: Path, identity: Any, writers: int) -> None:
        if writers != world_size():
            raise CheckpointError(
                f"{folder} was written by {writers} workers (got {world_size()}); resume with as "
                "many"
            )
        if identity != self._identity:
            identity = identity if isinstance(identity, dict) else {}
            different = [
                f"{key} was {identity.get(key)!r} and is {self._identity.get(key)!r}"
                for key in sorted({*identity, *self._identity})
                if identity.get(key) != self._identity.get(key)
            ]
            raise CheckpointError(
                f"{folder} belongs to another run: {'; '.join(different)}; resume with the same "
                "settings, or start afresh in another checkpoint_dir"
            )


class _Damaged(Exception):
    """A checkpoint is not whole; the one before may be."""


def _nothing() -> None:
    return None


def _rank_file(of_rank: int) -> str:
    return f"rank-{of_rank}.safetensors"


def _read_file(path: Path, files: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        record = files[path.name]
        file = TensorFile.open(path)
        whole = path.stat().st_size == record["bytes"] and file.blake2b == record["blake2b"]
        if not whole or digest_of(path) != record["blake2b"]:
            raise _Damaged(f"{path} is damaged: its digest is not that of the manifest")
        return file.read()
    except (PartitionFormatError, OSError, KeyError, TypeError) as error:
        raise _Damaged(f"{path} is missing or damaged ({error})") from None


def _everywhere(action: Callable[[], None]) -> None:
    """Do something on every rank; if it fails on one, raise on all."""
    error: Exception | None = None
    try:
        action()
    except (OSError, ValueError) as caught:
        error = caught
    if is_initialized():
        share_error(error)
    elif error is not None:
        raise error


def _on_rank_0(action: Callable[[], None]) -> None:
    """Do something on rank 0, and go on together."""
    _everywhere(action if rank() == 0 else _nothing)


def _fresh_folder(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_model_state(checkpoint: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The best model's ``state_dict`` from one checkpoint, ``checkpoint_dir/epoch-...``.

    Embeddings of nodes are not in it: each rank wrote those of its own nodes.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    folder = Path(checkpoint)
    try:
        files = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        shared = _read_file(folder / _SHARED, files)
    except (_Damaged, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint ({error})") from None
    return {
        k.removeprefix("best/"): torch.clone(v) for k, v in shared.items() if k.startswith("best/")
    }
