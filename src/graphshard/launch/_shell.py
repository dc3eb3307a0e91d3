# SPDX-License-Identifier: Apache-2.0
"""RemoteShell: command lines that run something on another host, by the system's ssh."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RemoteShell:
    """How hosts are reached.

    Host keys, users and keys are as the user's ssh configuration says; a host that asks for a
    password fails at once.

    Args:
        command: The program with its options, such as ``"ssh -F other_config"``.
        port: Port of sshd; None as configured.
        username: Name of the user there; None as configured.
        connect_timeout: Seconds to connect.
    """

    command: str = "ssh"
    port: int | None = None
    username: str | None = None
    connect_timeout: int = 15

    def to(self, address: str, command: str) -> list[str]:
        """The command line that has a host's shell run a command.

        Raises:
            ValueError: The address cannot be one.
        """
        if address.startswith("-"):
            raise ValueError(f"the address of a host must not begin with '-' (got {address!r})")
        words = shlex.split(self.command)
        if not words:
            raise ValueError("the ssh command must name a program, such as ssh (got nothing)")
        words += ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.connect_timeout}"]
        # A host that is gone is noticed after about 20 s.
        words += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"]
        words += ["-p", str(self.port)] if self.port is not None else []
        words += ["-l", self.username] if self.username else []
        return [*words, address, command]


def quoted_path(path: str) -> str:
    """A path for the shell of a host; ``~/`` is the home folder there."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (f"/{shlex.quote(path[2:])}" if path[2:] else "")
    return shlex.quote(path)
