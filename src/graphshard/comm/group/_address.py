# SPDX-License-Identifier: Apache-2.0
"""Addresses: where to listen, and `nfs_ip_init`, which tells all ranks where rank 0's host is."""

from __future__ import annotations

import atexit
import contextlib
import errno
import ipaddress
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..._base.files import writing
from ...errors import RankError
from ._state import DEFAULT_TIMEOUT

JOB_VARIABLE = "GRAPHSHARD_JOB_ID"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_POLL_SECONDS = 0.1


def from_environment(name: str, variable: str) -> str:
    """What ``torchrun`` puts into the environment for an argument that was not given."""
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(
            f"{name} was not given and the environment has no {variable}; pass {name}=, or start "
            "the program with torchrun"
        )
    return text


def either_name(name: str, value: Any, other: Any) -> Any:
    """The argument ``name``, or what was given as ``_name``, which is SAR's word for it.

    Raises:
        TypeError: Both were given.
    """
    if value is not None and other is not None:
        raise TypeError(f"give {name} once, as {name} or as _{name} (got {value!r} and {other!r})")
    return other if value is None else value


def job_id() -> str | None:
    """The name of this process's job, from the environment; None where it has none."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's word for no name
    return os.environ.get(JOB_VARIABLE) or (None if run == "none" else run)


def listen(address: str, port: int) -> socket.socket:
    """Listen at one address (number or name) of this host, and at no other; port 0 is any.

    Raises:
        OSError: The port is in use (EADDRINUSE), or the address is not one of this host's
            (EADDRNOTAVAIL). Nor is a host's name that leads to its loopback interface, as it often
            does on that host itself: the others read the name in another way.
    """
    is_name = _is_name(address)
    unavailable = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, _, _, _, found in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        number = str(found[0])
        if is_name and is_loopback(number) and "localhost" not in address:
            continue
        try:
            return socket.create_server(found, family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            unavailable = error
    raise unavailable


def listen_for_others(addresses: Sequence[str], port: int) -> tuple[socket.socket, str]:
    """Listen at the first of some addresses that this host has, else at all that it has.

    It has none of them where addresses are translated on the way to a host.

    Returns:
        The listening socket, and where others should connect to.
    """
    for address in addresses:
        try:
            listener = listen(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            continue
        return listener, str(listener.getsockname()[0])
    warnings.warn(
        f"rank 0 listens on all interfaces, because its host has no address {addresses[0]} that "
        "others can reach; unless it is translated on the way, pass the number of such an address "
        "as master_ip_address",
        RuntimeWarning,
        stacklevel=2,
    )
    if socket.has_dualstack_ipv6():
        everywhere = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        everywhere = socket.create_server(("", port))
    return everywhere, addresses[0]


def is_loopback(address: str) -> bool:
    """Whether a number is one that leads only to this host; of a name that is not known."""
    return not _is_name(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def loopback_interface() -> str | None:
    """The name of the interface that leads only to this host."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def local_environment() -> dict[str, str]:
    """This process's environment, for ranks that it starts on its own host."""
    environment = dict(os.environ)
    loopback = loopback_interface()
    if loopback is not None:
        # Without it gloo looks up the host's name, which need not lead anywhere.
        environment.setdefault(GLOO_INTERFACE, loopback)
    return environment


def _is_name(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return True
    return False


def nfs_ip_init(
    rank: int | None = None,
    ip_file: str | Path | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    *,
    _rank: int | None = None,
) -> str:
    """The address of rank 0's host, by way of a file; pass it to `initialize_comms`.

    Rank 0 writes the file, whole at once and over any old one; the others wait for it. When the
    process of rank 0 ends, it removes the file. One that a killed process left behind is told by
    the name of the job in it, if the environment has one (``GRAPHSHARD_JOB_ID``), and by its age:
    it counts only if it is not older than ``timeout`` by the clock of the file system. So ranks
    must start within ``timeout`` of each other, and a job without a name that starts sooner than
    that after one that was killed, with the same file and rank 0 on another host, needs another
    file name (or ``ip_file`` deleted first).

    Args:
        rank: This process's number.
        ip_file: A path that is the same file for all ranks; its folder must exist.
        timeout: The longest to wait for rank 0, in seconds or as a timedelta.
        _rank: ``rank``, as SAR names it.

    Raises:
        TypeError: No rank, two of them, or no file.
        RankError: Rank 0 wrote no file in time.
        FileNotFoundError: The folder of ``ip_file`` does not exist.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    rank = either_name("rank", rank, _rank)
    if rank is None or ip_file is None:
        raise TypeError(
            f"nfs_ip_init needs the rank and the file (got rank {rank}, ip_file {ip_file})"
        )
    if rank < 0:
        raise ValueError(f"rank must not be negative (got {rank})")
    path = Path(ip_file)
    job = job_id()
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"the folder of ip_file must exist, on a file system that all ranks share (got {path})"
        )
    if rank == 0:
        address = own_address()
        _write(path, address if job is None else f"{address} {job}")
        atexit.register(_remove, path.absolute(), _identity(path), os.getpid())
        return address
    deadline = time.monotonic() + seconds
    oldest = _time_there(path.parent) - seconds
    while True:
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= oldest:
                address, _, other = path.read_text(encoding="utf-8").partition(" ")
                if job is None or other in ("", job):
                    return address.strip()
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
        with os.fdopen(descriptor, "w", encoding="utf-8") as file, writing(path):
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _remove(path: Path, identity: tuple[int, int], process: int) -> None:
    """Remove the file, if it still is the one that this process wrote."""
    with contextlib.suppress(OSError):
        if os.getpid() == process and _identity(path) == identity:
            path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _time_there(folder: Path) -> float:
    """The time by the clock that dates files in the folder, which may be another host's."""
    with tempfile.NamedTemporaryFile(prefix=".clock.", dir=folder) as file:
        file.write(b".")
        file.flush()
        return os.stat(file.name).st_mtime
