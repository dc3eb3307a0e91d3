# SPDX-License-Identifier: Apache-2.0
"""RunLock: a folder of checkpoints is written by one run at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import warnings
import weakref
from pathlib import Path

from ...errors import CheckpointError

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
