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

All ranks must see one folder. Tensors are safetensors, the rest is JSON. See `checkpoints` for how
they are written.

A run that only reads takes no lock. If the one that writes removes a checkpoint meanwhile, the
reader finds it damaged and takes the one before, or says that none is whole.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .._base.files import check_text
from ..comm import agree, is_initialized, rank, world_size
from ..comm.collectives import reduce_ints
from ..errors import CheckpointError
from ..partition.files import write_tensors
from ..servers.checkpoints import (
    SHARED,
    DamagedError,
    RunLock,
    check_shared,
    everywhere,
    on_rank_0,
    rank_file,
    read_checked,
    records_of,
    write_whole,
)
from ._manifest import EPOCHS, Manifest, read_manifest, write_manifest
from ._result import History

KEPT = 2
"""Checkpoints that are kept: the newest, and one more in case its files get damaged."""


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
            check_text(str(self.path), "checkpoint_dir")
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
                EPOCHS.remove_partial(self.path)

        try:
            on_rank_0(check)
            if write:
                check_shared(self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other runs write to the folder; a second call does nothing. Not collective."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and remove those that are too old.

        Raises:
            OSError: A rank could not write; raised on every rank.
        """
        final = self.path / EPOCHS.name(checkpoint.history.epoch)
        write_whole(
            final,
            lambda folder: _write_own(folder, checkpoint),
            lambda folder: self._write_manifest(folder, checkpoint),
        )
        if rank() == 0:
            EPOCHS.remove_old(self.path, KEPT)

    def _write_manifest(self, folder: Path, checkpoint: Checkpoint) -> None:
        files = records_of(folder / n for n in (SHARED, *map(rank_file, range(world_size()))))
        write_manifest(folder, Manifest(world_size(), self._identity, checkpoint.history, files))

    def newest(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole; None if there is none.

        Raises:
            CheckpointError: It belongs to another run, or all checkpoints are damaged.
        """
        names = everywhere(self._names)
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

        digest, found, damage = everywhere(read)
        if is_initialized() and not reduce_ints([int(not digest)], "max")[0]:
            agree(digest, f"the manifest of {folder}")
        return found, damage

    def _names(self) -> list[str]:
        """Finished checkpoints, newest first."""
        return EPOCHS.find(self.path)

    def _read(self, folder: Path, manifest: Manifest) -> Checkpoint:
        own = rank_file(rank())
        return Checkpoint(
            shared=read_checked(folder / SHARED, manifest.files[SHARED]),
            local=read_checked(folder / own, manifest.files[own]),
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


def load_model_state(checkpoint: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The best model's ``state_dict`` from one checkpoint, ``checkpoint_dir/epoch-...``.

    Embeddings of nodes are not in it: each rank wrote those of its own nodes.

    Raises:
        CheckpointError: It is missing or damaged, of another format version, or of an epoch before
            the first evaluation.
    """
    folder = Path(checkpoint)
    try:
        shared = read_checked(folder / SHARED, read_manifest(folder).files[SHARED])
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
