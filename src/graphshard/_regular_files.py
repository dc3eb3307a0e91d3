# SPDX-License-Identifier: Apache-2.0
"""Opening files that others wrote: regular files only, and never waiting.

A named pipe in place of a file blocks whoever opens it, a device may never end, and a folder gives
an error that names no cure. Whatever is read from a partition, a checkpoint or a data set is opened
here, or checked here before a library opens it.
"""

from __future__ import annotations

import errno
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


def _check(found: os.stat_result, path: PathLike) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(Path(path)))
    kinds = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for is_kind, name in kinds if is_kind(found.st_mode)), "a device")
    raise NotRegularFileError(errno.EINVAL, f"{kind}, not a regular file", str(Path(path)))
