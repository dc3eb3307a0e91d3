# SPDX-License-Identifier: Apache-2.0
"""Manifests with a digest over themselves, and tensor files whose digests they hold.

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

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ..._base.files import check_regular, read_json_regular, write_json
from ...errors import CheckpointError, PartitionFormatError
from ...partition.files import FileRecord, TensorFile, digest_of

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
