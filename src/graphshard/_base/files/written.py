# SPDX-License-Identifier: Apache-2.0
"""Writing files: an error that names the file, and what to do about it.

Of a write that fails, the system's error tells the reason ("No space left on device") and nothing
else: which file, on which disk, only the writer knows.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_CURES = {
    errno.ENOSPC: "make room on that disk, or write to another",
    errno.EDQUOT: "make room within your quota, or write to another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or write to another file system",
}
_CURE = "check that disk, or write to another"


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write a file in here: an `OSError` that names no file becomes one that names ``path``.

    Raises:
        OSError: With the same ``errno``, such as ``ENOSPC``.
    """
    check_path(path)
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # of opening or renaming: it says which file
            raise
        reason = error.strerror or str(error)
        cure = _CURES.get(error.errno or 0, _CURE)
        text = f"{os.fspath(path)} cannot be written ({reason}); {cure}"
        raise (OSError(text) if error.errno is None else OSError(error.errno, text)) from error


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise if the file system cannot hold a path.

    Raises:
        ValueError: It cannot.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a path must be text that the file system can hold (got {os.fspath(path)!a:.200}, "
            f"whose character {error.start} is half of one); choose another"
        ) from None


def check_text(name: str, what: str) -> str:
    """Return ``name`` if UTF-8 can hold it, as every file and message here is written in it.

    A text that was read from bytes of another encoding, such as a file name in Latin-1, has halves
    of characters in it.

    Raises:
        ValueError: It cannot.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} must be text that UTF-8 can hold (got {name!a:.80}, whose character "
            f"{error.start} is half of one); rename it"
        ) from None
    return name


def write_json(path: Path, content: Mapping[str, Any], *, final: Path | None = None) -> None:
    """Write a new file, sync it to disk; errors name ``final``, where it will be, if given."""
    with writing(final or path), open(path, "x", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
