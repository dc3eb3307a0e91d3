# SPDX-License-Identifier: Apache-2.0
"""The hosts of a cluster, as DGL's ip_config file lists them: one a line, ``address [port]``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PORT = 30050


@dataclass(frozen=True)
class HostAddress:
    """Where the server of a host listens."""

    address: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


def read_ip_config(path: str | os.PathLike[str]) -> list[HostAddress]:
    """The hosts that a file lists, in its order; empty lines and what follows ``#`` do not count.

    A third number in a line, DGL's count of servers, is accepted and not needed.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is none, a host is listed twice, or there are none.
    """
    hosts: list[HostAddress] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"line {number} of {os.fspath(path)}"
        if len(words) > 3 or not all(word.isdecimal() for word in words[1:]):
            raise ValueError(f"{where} must be 'address [port]' (got {line.strip()!r:.200})")
        port = int(words[1]) if len(words) > 1 else DEFAULT_PORT
        if not 0 < port < 65_536:
            raise ValueError(f"{where}: a port must be in [1, 65535] (got {port})")
        host = HostAddress(words[0], port)
        if host in hosts:
            raise ValueError(f"{where}: {host} is listed twice; give each host its own line")
        hosts.append(host)
    if not hosts:
        raise ValueError(f"{os.fspath(path)} lists no hosts; write one address a line")
    return hosts


def parts_of_host(host: int, num_hosts: int, num_parts: int) -> range:
    """The parts that a host has: runs that differ by one part at most."""
    if not 0 < num_hosts <= num_parts:
        raise ValueError(
            f"{num_parts} parts need 1 to {num_parts} hosts (got {num_hosts}); partition the graph "
            "into at least as many parts as there are hosts"
        )
    return range(*even_share(host, num_hosts, num_parts))


def even_share(number: int, num_shares: int, count: int) -> tuple[int, int]:
    """``(start, stop)`` of a share of ``[0, count)``; shares differ by one at most."""
    return number * count // num_shares, (number + 1) * count // num_shares


def starts_of_hosts(starts: Sequence[int], num_hosts: int) -> tuple[int, ...]:
    """First id of each host, and the number of ids, from the first id of each part."""
    num_parts = len(starts) - 1
    firsts = [parts_of_host(h, num_hosts, num_parts).start for h in range(num_hosts)]
    return (*(starts[first] for first in firsts), starts[-1])
