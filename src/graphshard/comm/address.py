# SPDX-License-Identifier: Apache-2.0
"""Addresses: where to listen, and what this process shares with another one.

`machine_name`, `network_name` and `process_namespace` answer three questions that containers answer
differently: each gives a name that is equal in two processes if, and only if, they share that.
Whether they see the same files is found out by trying.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

JOB_VARIABLE = "GRAPHSHARD_JOB_ID"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_T = TypeVar("_T")


def from_environment(name: str, variable: str) -> str:
    """What ``torchrun`` puts into the environment for an argument that was not given."""
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(
            f"{name} was not given and the environment has no {variable}; pass {name}=, or start "
            "the program with torchrun"
        )
    return text


def either_name(name: str, value: _T, other: _T) -> _T:
    """The argument ``name``, or ``_name``, SAR's word for it; TypeError if both were given."""
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
    for family, _, _, _, socket_address in socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM
    ):
        number = str(socket_address[0])
        if is_name and is_loopback(number) and "localhost" not in address:
            continue
        try:
            return socket.create_server(socket_address, family=family, backlog=socket.SOMAXCONN)
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
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    everywhere = socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    return everywhere, addresses[0]


def notice_dead_host(
    connection: socket.socket, idle: int = 10, interval: int = 5, count: int = 4
) -> None:
    """Send at once, and let the kernel find out, within half a minute, that the other host is gone.

    It is probed after so many seconds of silence, every so many seconds, so many times.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in zip(("IDLE", "INTVL", "CNT"), (idle, interval, count), strict=True):
        option = getattr(socket, f"TCP_KEEP{name}", None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_loopback(address: str) -> bool:
    """Whether an address leads only to this host; False for a name, which is not looked up."""
    return not _is_name(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def joins_one_host(connected: socket.socket) -> bool:
    """Whether both ends of a connection have one address, or are on the loopback interface."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    try:
        own, other = connected.getsockname()[0], connected.getpeername()[0]
    except OSError:  # it has ended
        return True
    return own == other or is_loopback(other)


def loopback_interface() -> str | None:
    """The name of the interface that leads only to this host."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def local_environment() -> dict[str, str]:
    """This process's environment, for ranks that it starts on its own host."""
    environment = dict(os.environ)
    if (loopback := loopback_interface()) is not None:
        # Without it gloo looks up the host's name, which need not lead anywhere.
        environment.setdefault(GLOO_INTERFACE, loopback)
    return environment


def _is_name(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return True
    return False


def own_address() -> str:
    """The address of this host that others most likely reach; loopback if it has no other."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel only chooses the interface that leads out.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def machine_name() -> str:
    """Equal for all that runs on one kernel, containers included."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def network_name() -> str:
    """Equal only for processes that reach each other on the loopback interface."""
    return f"{socket.gethostname()} {machine_name()} {_namespace('net')}"


def process_namespace() -> int:
    """Equal for processes of one machine that number processes alike; of 56 bits."""
    name = f"{machine_name()} {_namespace('pid')}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""
