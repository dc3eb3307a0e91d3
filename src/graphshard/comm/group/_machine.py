# SPDX-License-Identifier: Apache-2.0
"""What this process shares with another one: the machine, its network, the numbers of processes.

Three questions that containers answer differently. Each function gives a name that is equal in two
processes if, and only if, they share that. Whether they see the same files is found out by trying.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from pathlib import Path


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
