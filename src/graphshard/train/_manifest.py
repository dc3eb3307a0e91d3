# SPDX-License-Identifier: Apache-2.0
"""Manifest: what the JSON of a run's checkpoint says besides digests, and a check of all of it.

::

    {
     "format": "graphshard-checkpoint",
     "format_version": 2,
     "epoch": 20,               the number in the folder's name, and that of the history
     "world_size": 2,
     "identity": {...},         what a run that resumes must have in common
     "history": {...},          see `History`
     "files": {"shared.safetensors": ..., "rank-0.safetensors": ..., ...},
     "blake2b": "..."
    }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..partition.files import FileRecord
from ..servers.checkpoints import (
    SHARED,
    CheckpointNames,
    DamagedError,
    check_positive,
    check_record,
    json_object,
    rank_file,
    read_sealed,
    write_sealed,
)
from ._result import History

FORMAT = "graphshard-checkpoint"
FORMAT_VERSION = 2
EPOCHS = CheckpointNames("epoch")


@dataclass(frozen=True)
class Manifest:
    """What a manifest says, checked."""

    world_size: int
    identity: dict[str, Any]
    history: History
    files: dict[str, FileRecord]
    digest: str = ""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, with its digest, and sync it to disk."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "epoch": manifest.history.epoch,
        "world_size": manifest.world_size,
        "identity": manifest.identity,
        "history": manifest.history.as_dict(),
    }
    write_sealed(folder, content, manifest.files)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        DamagedError: It is missing, is not what was written, or does not belong to this folder.
        CheckpointError: It is of another format version.
    """
    content, digest = read_sealed(folder, FORMAT, FORMAT_VERSION)
    try:
        return _checked(folder, content, digest)
    except ValueError as error:
        raise DamagedError(f"the manifest of {folder} is damaged ({error})") from None


def _checked(folder: Path, content: Mapping[str, Any], digest: str) -> Manifest:
    epoch, world_size = (check_positive(content, key) for key in ("epoch", "world_size"))
    if folder.name != EPOCHS.name(epoch):
        raise ValueError(f"it is of epoch {epoch}, and its folder is {folder.name}")
    history = History.from_dict(json_object(content, "history"))
    if history.epoch != epoch:
        raise ValueError(f"it is of epoch {epoch}, and its history of epoch {history.epoch}")
    files = json_object(content, "files")
    names = {SHARED, *map(rank_file, range(min(world_size, len(files))))}
    if set(files) != names or len(files) != world_size + 1:
        raise ValueError(f"files must be {SHARED} and one of each of {world_size} ranks")
    return Manifest(
        world_size=world_size,
        identity=json_object(content, "identity"),
        history=history,
        files={name: check_record(name, value) for name, value in files.items()},
        digest=digest,
    )
