# SPDX-License-Identifier: Apache-2.0
"""nfs_ip_init: tell all ranks the address of rank 0's host through a file they share."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from ..errors import RankError
from ._group import DEFAULT_TIMEOUT

_POLL_SECONDS = 0.1


def nfs_ip_init(
    rank: int, ip_file: str | Path, timeout: timedelta | float = DEFAULT_TIMEOUT
) -> str:
    """The address of rank 0's host, by way of a file; pass it to `initialize_comms`.

    Rank 0 writes the file, whole at once and over any old one; the others wait for it. A file that
    an earlier run left behind is told by its age: it counts only if it is not older than
    ``timeout`` by the clock of the file system. So ranks must start within ``timeout`` of each
    other, and a job that starts again sooner than that after one that used the same file, with
    rank 0 on another host, needs another file name (or ``ip_file`` deleted first).

    Args:
        rank: This process's number.
        ip_file: A path that is the same file for all ranks; its folder must exist.
        timeout: The longest to wait for rank 0, in seconds or as a timedelta.

    Raises:
        RankError: Rank 0 wrote no file in time.
        FileNotFoundError: The folder of ``ip_file`` does not exist.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if rank < 0:
        raise ValueError(f"rank must not be negative (got {rank})")
    path = Path(ip_file)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"the folder of ip_file must exist, on a file system that all ranks share (got {path})"
        )
    if rank == 0:
        address = own_address()
        _write(path, address)
        return address
    deadline = time.monotonic() + seconds
    oldest = _time_there(path.parent) - seconds
    while True:
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= oldest:
                return path.read_text(encoding="ascii").strip()
        if time.monotonic() >= deadline:
            state = "is of an earlier run" if path.exists() else "does not exist"
            raise RankError(
                f"rank {rank}: rank 0 did not write its address to {path} within {seconds:g} s "
                f"(the file {state}); is rank 0 running, and is it the same file there?",
                [0],
            )
        time.sleep(_POLL_SECONDS)
        # A network file system shows a new file once its folder has been read again.
        with contextlib.suppress(OSError):
            os.listdir(path.parent)


def own_address() -> str:
    """The address of this host that others most likely reach; loopback if it has no other."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel only chooses the interface that leads out.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _write(path: Path, text: str) -> None:
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _time_there(folder: Path) -> float:
    """The time by the clock that dates files in the folder, which may be another host's."""
    with tempfile.NamedTemporaryFile(prefix=".clock.", dir=folder) as file:
        file.write(b".")
        file.flush()
        return os.stat(file.name).st_mtime
