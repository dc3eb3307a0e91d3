# SPDX-License-Identifier: Apache-2.0
"""TemporaryFolder: a folder that goes with the processes that use it, however they end.

Its owner holds a lock on it, which the kernel releases when the owner has ended, and processes that
inherit the descriptor have, too. A process that makes a folder first removes those without a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

_PREFIX = "graphshard-folder-"
_SHARED_MEMORY = "/dev/shm"


class TemporaryFolder:
    """A new folder where temporary files go; also a context manager, which gives the path.

    The lock is on the folder itself; what locks folders too, like a partition, needs one inside.

    Args:
        parent: Where it goes; by default where temporary files go.

    Attributes:
        path: The folder.
        descriptor: Holds the lock; a process that inherits it keeps the folder.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        parent = tempfile.gettempdir() if parent is None else parent
        remove_abandoned(parent)
        self.descriptor = -1
        while self.descriptor < 0:
            self.path = Path(parent, _PREFIX + secrets.token_hex(8))
            # First, because Ctrl-C may come at any time.
            self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())
            self.path.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):
                self.descriptor = _held(self.path, is_new=True)
        self._close = weakref.finalize(self, _close, self.descriptor, os.getpid())
        self._close.atexit = False

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove it now."""
        self._finalizer()
        self._close()


def shared_memory_folder() -> str | None:
    """The folder of files that are memory; None if the system has none."""
    return _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None


def remove_abandoned(*parents: str | os.PathLike[str]) -> None:
    """Remove folders of processes that were killed.

    Args:
        parents: Where they are; by default where temporary files go, and in shared memory.
    """
    memory = shared_memory_folder()
    for parent in parents or {tempfile.gettempdir(), memory or tempfile.gettempdir()}:
        for path in Path(parent).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                descriptor = _held(path)
                if descriptor >= 0:
                    _remove(path, os.getpid())
                    os.close(descriptor)


def _held(path: Path, is_new: bool = False) -> int:
    """A descriptor that holds the lock on a folder; -1 if another process has it, or had it.

    Args:
        path: The folder.
        is_new: Whether it is this process's own; then a file system without locks does no harm.

    Raises:
        OSError: The folder is gone, not a folder, not ours, or without locks.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return -1
        except OSError:
            if not is_new:
                raise
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        os.stat(path)  # it may have been removed between the two calls
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path, process: int) -> None:
    """Remove a folder; not from a child that was forked from its owner."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def _close(descriptor: int, process: int) -> None:
    """Release the lock; a child that was forked keeps it as long as it lives."""
    if os.getpid() == process:
        os.close(descriptor)
