# SPDX-License-Identifier: Apache-2.0
"""Where the hosts of a job come from, and the command that starts an agent on each of them."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..._host_agent import START
from ...servers import HostAddress
from ._shell import RemoteShell, quoted_path

_SLURM_PORT = 30_050
_SLURM_PORTS = 2_000
_ANSWER_SECONDS = 30.0


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
        shell: How they are reached.
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
        environment: Has Slurm's variables.

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
