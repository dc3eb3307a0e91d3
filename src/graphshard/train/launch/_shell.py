# SPDX-License-Identifier: Apache-2.0
"""RemoteShell: command lines that run something on another host, by the system's ssh."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PERSIST_SECONDS = 60
_CLOSE_SECONDS = 5.0


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
        sockets: Folder in which ssh keeps sockets, so that commands to a host share a connection
            until `close`; None for a connection each. Its path must be short.
    """

    command: str = "ssh"
    port: int | None = None
    username: str | None = None
    connect_timeout: int = 15
    sockets: Path | None = None

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 2**16:
            raise ValueError(f"the port of sshd must be from 1 to 65535 (got {self.port})")

    def to(self, address: str, command: str) -> list[str]:
        """The command line that has a host's shell run a command.

        Raises:
            ValueError: The address cannot be one.
        """
        if address.startswith("-"):
            raise ValueError(f"the address of a host must not begin with '-' (got {address!r})")
        words = [
            *self._program(),
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={self.connect_timeout}",
        ]
        # A host that is gone is noticed after about 20 s.
        words += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"]
        if self.sockets is not None:
            # One that is not closed, because this process was killed, ends by itself.
            words += ["-o", "ControlMaster=auto", "-o", f"ControlPersist={_PERSIST_SECONDS}"]
        return [*words, *self._place(), address, command]

    def close(self, address: str) -> None:
        """End the connection to a host that commands have shared."""
        if self.sockets is None or not any(self.sockets.iterdir()):
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            words = [*self._program(), *self._place(), "-O", "exit", address]
            subprocess.run(words, capture_output=True, timeout=_CLOSE_SECONDS)

    def _program(self) -> list[str]:
        words = shlex.split(self.command)
        if not words:
            raise ValueError("the ssh command must name a program, such as ssh (got nothing)")
        return words

    def _place(self) -> list[str]:
        words = ["-o", f"ControlPath={self.sockets}/%C"] if self.sockets is not None else []
        words += ["-p", str(self.port)] if self.port is not None else []
        words += ["-l", self.username] if self.username else []
        return words


def quoted_path(path: str) -> str:
    """A path for the shell of a host; ``~/`` is the user's own folder there."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (f"/{shlex.quote(path[2:])}" if path[2:] else "")
    return shlex.quote(path)
