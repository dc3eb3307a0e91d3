# SPDX-License-Identifier: Apache-2.0
"""Where the hosts of a job come from, and the command that starts an agent on each of them.

`RemoteShell` has the command lines that run something on another host, by the system's ssh.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...servers import HostAddress
from ._host_agent import START

_SLURM_PORT = 30_050
_SLURM_PORTS = 2_000
_ANSWER_SECONDS = 30.0
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
        """The command line that has a host's shell run a command."""
        if address.startswith("-"):
            raise ValueError(f"the address of a host must not begin with '-' (got {address!r})")
        words = [*self._program(), "-T", "-o", "BatchMode=yes"]
        words += ["-o", f"ConnectTimeout={self.connect_timeout}"]
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


@dataclass(frozen=True)
class JobHosts:
    """The hosts of a job, by number.

    Args:
        addresses: Where the server of each listens.
        commands: What starts an agent on each, its standard streams being this process's pipes.
        by: The program that reaches them, for messages.
        num_on_machine: Hosts that share a machine, and so its cores.
    """

    addresses: Sequence[HostAddress]
    commands: Sequence[Sequence[str]]
    by: str
    num_on_machine: int = 1

    @property
    def ip_config(self) -> str:
        """The text of the file that lists them."""
        return "".join(f"{host.address} {host.port}\n" for host in self.addresses)


def over_ssh(addresses: Sequence[HostAddress], shell: RemoteShell, python: str) -> JobHosts:
    """Hosts of an ip_config, over ssh.

    Args:
        addresses: The hosts; one address may be there more than once, with several ports.
        python: The interpreter there that has graphshard.
    """
    start = f"exec {quoted_path(python)} -c {shlex.quote(START)}"
    commands = [shell.to(host.address, start) for host in addresses]
    most = max(sum(h.address == host.address for h in addresses) for host in addresses)
    return JobHosts(addresses, commands, "ssh", most)


def on_this_machine(num_hosts: int) -> JobHosts:
    """So many hosts that are processes of this machine, with free ports of 127.0.0.1."""
    if num_hosts < 1:
        raise ValueError(f"the number of local hosts must be at least 1 (got {num_hosts})")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_hosts)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [int(each.getsockname()[1]) for each in sockets]
    addresses = [HostAddress("127.0.0.1", port) for port in ports]
    command = [sys.executable, "-c", START]
    return JobHosts(addresses, [command] * num_hosts, "its agent", num_hosts)


def of_slurm_job(python: str, environment: Mapping[str, str] = os.environ) -> JobHosts:
    """The nodes of the Slurm allocation that this process is in, by ``srun``.

    Args:
        python: The interpreter there that has graphshard.

    Raises:
        ValueError: This process is in no allocation, or Slurm cannot say which nodes it has.
    """
    nodes, job = environment.get("SLURM_JOB_NODELIST"), environment.get("SLURM_JOB_ID", "")
    if nodes is None or not job.isdecimal():
        raise ValueError(
            "there is no Slurm allocation (no SLURM_JOB_NODELIST and SLURM_JOB_ID in the "
            "environment); run graphshard launch inside salloc or sbatch"
        )
    asked = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(
            f"{shlex.join(asked)} failed ({error}); is Slurm installed here?"
        ) from None
    names = done.stdout.split()
    if done.returncode or not names:
        raise ValueError(f"{shlex.join(asked)} failed: {done.stderr.strip() or 'no nodes'}")
    # Jobs that share a node get different ports.
    port = _SLURM_PORT + int(job) % _SLURM_PORTS
    common = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--unbuffered", "--export=ALL"]
    # The agent's processes share all cores of the node that the job has.
    common += ["--cpu-bind=none", "--kill-on-bad-exit=0", "--quit-on-interrupt"]
    commands = [[*common, f"--nodelist={name}", python, "-c", START] for name in names]
    return JobHosts([HostAddress(name, port) for name in names], commands, "srun")
