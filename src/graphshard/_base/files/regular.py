# SPDX-License-Identifier: Apache-2.0
"""Opening files that others wrote: regular files only, never waiting, JSON without surprises.

A named pipe in place of a file blocks the process that opens it, a device may never end, and a
folder gives an error that names no cure. Whatever is read from a partition, a checkpoint or a data
set is opened here, or checked here before a library opens it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import IO, Any

PathLike = str | os.PathLike[str]


class NotRegularFileError(OSError):
    """What a path names is a pipe, a socket or a device, and not a regular file."""


def check_regular(path: PathLike) -> os.stat_result:
    """Check that a path names a regular file, directly or through a link, without opening it.

    Returns:
        What the system says of the file; ``st_size`` is its size in bytes.

    Raises:
        FileNotFoundError: There is nothing, or a link that leads to nothing.
        IsADirectoryError: It is a folder.
        NotRegularFileError: It is a pipe, a socket or a device.
        OSError: The system refuses to say, such as for a name that is too long.
    """
    try:
        found = os.stat(path)
    except ValueError as error:  # a zero byte in the name
        raise FileNotFoundError(
            errno.ENOENT, f"no file can have this name ({error})", path
        ) from None
    _check(found, path)
    return found


def open_regular(path: PathLike, mode: str = "rb") -> IO[Any]:
    """Open a regular file for reading; anything else is an error at once, never a wait.

    Args:
        path: The file.
        mode: "rb", or "r" for text in UTF-8.

    Raises:
        ValueError: The mode is neither.
        FileNotFoundError: There is no such file.
        IsADirectoryError: It is a folder.
        NotRegularFileError: It is a pipe, a socket or a device.
        OSError: The system refuses to open it.
    """
    if mode not in ("rb", "r"):
        raise ValueError(f"mode must be 'rb' or 'r' (got {mode!r}); files are only read here")
    check_regular(path)
    # What was a file a moment ago may be a pipe now: without O_NONBLOCK opening that would wait.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    try:
        _check(os.fstat(descriptor), path)
        if hasattr(os, "set_blocking"):
            os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, mode, encoding="utf-8" if mode == "r" else None)
    except BaseException:
        os.close(descriptor)
        raise


def read_text_regular(path: PathLike) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        UnicodeDecodeError: It is not UTF-8.
        OSError: As for `open_regular`.
    """
    with open_regular(path, "r") as file:
        text: str = file.read()
    return text


def read_json_regular(path: PathLike) -> Any:
    """What a JSON file in UTF-8 holds; stricter than the standard library.

    Raises:
        ValueError: As for `parse_json`.
        OSError: As for `open_regular`.
    """
    return parse_json(read_text_regular(path))


def parse_json(text: str | bytes) -> Any:
    """What a JSON text in UTF-8 says, if it says one thing only and in numbers that exist.

    Raises:
        ValueError: It is not JSON, or names a key twice, nests too deeply, or has a number that is
            none or has thousands of digits.
    """
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_without_repetition,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"it has the key {twice[:80]!r} twice")
    return content


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:80]} is out of range")
    return value


def _check(found: os.stat_result, path: PathLike) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(Path(path)))
    kinds = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for is_kind, name in kinds if is_kind(found.st_mode)), "a device")
    raise NotRegularFileError(errno.EINVAL, f"{kind}, not a regular file", str(Path(path)))
