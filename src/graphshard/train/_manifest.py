# SPDX-License-Identifier: Apache-2.0
"""Manifest: the JSON of a checkpoint, with a digest over itself, and a check of all that it says.

::

    {
     "format": "graphshard-checkpoint",
     "format_version": 2,
     "epoch": 20,               the number in the folder's name, and that of the history
     "world_size": 2,
     "identity": {...},         what a run that resumes must have in common
     "history": {...},          see `History`
     "files": {"shared.safetensors": {"bytes": ..., "blake2b": ...}, "rank-0.safetensors": ...},
     "blake2b": "..."           of all the rest, written with sorted keys and without spaces
    }

The digest is taken and placed alike in all versions from 2 on, so that damage is told from a
checkpoint of another version.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._regular_files import read_json_regular
from .._written_files import write_json
from ..errors import CheckpointError
from ..partition.files import FileRecord
from ._result import History

FORMAT = "graphshard-checkpoint"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
SHARED = "shared.safetensors"

_NAME = re.compile(r"epoch-([0-9]{8,20})")
_DIGEST_KEY = "blake2b"
_DIGEST_BYTES = 16
_HEX_DIGEST = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")


class DamagedError(Exception):
    """A checkpoint is not whole; the one before may be."""


@dataclass(frozen=True)
class Manifest:
    """What a manifest says, checked."""

    world_size: int
    identity: dict[str, Any]
    history: History
    files: dict[str, FileRecord]
    digest: str = ""


def checkpoint_name(epoch: int) -> str:
    """Name of the folder of a checkpoint."""
    return f"epoch-{epoch:08d}"


def epoch_of(name: str) -> int | None:
    """The epoch in the name of a checkpoint's folder; None if it is no such name."""
    found = _NAME.fullmatch(name)
    epoch = 0 if found is None else int(found[1])
    return epoch if epoch and checkpoint_name(epoch) == name else None


def rank_file(rank: int) -> str:
    """Name of the file with what a rank alone holds."""
    return f"rank-{rank}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, with its digest, and sync it to disk."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "epoch": manifest.history.epoch,
        "world_size": manifest.world_size,
        "identity": manifest.identity,
        "history": manifest.history.as_dict(),
        "files": {name: asdict(record) for name, record in manifest.files.items()},
    }
    content[_DIGEST_KEY] = digest_of_content(content)
    write_json(folder / MANIFEST, content)


def digest_of_content(content: Mapping[str, Any], key: str = _DIGEST_KEY) -> str:
    """Digest of a JSON object, without the digest that it carries under a key."""
    rest = {name: value for name, value in content.items() if name != key}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        DamagedError: It is missing, is not what was written, or does not belong to this folder.
        CheckpointError: It is of another format version.
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
        if found != (FORMAT, FORMAT_VERSION) and (carried is not None or found == (FORMAT, 1)):
            raise CheckpointError(
                f"{folder} has the format {found}, and this graphshard reads "
                f"{(FORMAT, FORMAT_VERSION)}; resume with the graphshard that wrote it"
            )
        return _checked(folder, content)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} is missing or damaged ({error})") from None


def _checked(folder: Path, content: dict[str, Any]) -> Manifest:
    """The manifest of a content whose digest is right, or is missing."""
    epoch, world_size = (_positive(content, key) for key in ("epoch", "world_size"))
    if folder.name != checkpoint_name(epoch):
        raise ValueError(f"it is of epoch {epoch}, and its folder is {folder.name}")
    history = History.from_dict(_object(content, "history"))
    if history.epoch != epoch:
        raise ValueError(f"it is of epoch {epoch}, and its history of epoch {history.epoch}")
    files = _object(content, "files")
    names = {SHARED, *map(rank_file, range(min(world_size, len(files))))}
    if set(files) != names or len(files) != world_size + 1:
        raise ValueError(f"files must be {SHARED} and one of each of {world_size} ranks")
    return Manifest(
        world_size=world_size,
        identity=_object(content, "identity"),
        history=history,
        files={name: _record(name, value) for name, value in files.items()},
        digest=_hex_digest(_DIGEST_KEY, content.get(_DIGEST_KEY)),
    )


def _record(name: str, value: Any) -> FileRecord:
    if not isinstance(value, dict) or set(value) != {"bytes", "blake2b"}:
        raise ValueError(f"files['{name}'] must have bytes and blake2b (got {value!r:.80})")
    return FileRecord(
        _positive(value, "bytes"), _hex_digest(f"blake2b of {name}", value["blake2b"])
    )


def _hex_digest(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _HEX_DIGEST.fullmatch(value):
        raise ValueError(
            f"{name} must be {2 * _DIGEST_BYTES} digits in base 16 (got {value!r:.80})"
        )
    return value


def _positive(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} must be an integer, at least 1 (got {value!r:.80})")
    return value


def _object(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a JSON object (got {value!r:.80})")
    return value
