# SPDX-License-Identifier: Apache-2.0
"""Hosts for tests, reached by ssh: network namespaces, or folders of this machine.

A namespace has an address of its own, an sshd, and shared memory and a workspace that others do not
see. Where namespaces are not permitted, or there is no sshd, a program that takes the place of ssh
runs what it is given on this machine, in a home folder for each address.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))

_IN_NAMESPACE = """\
mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {home} && mount -t tmpfs tmpfs /run &&
mkdir -m 755 /run/sshd && exec {sshd} -D -e -f {config}
"""
_SSHD_CONFIG = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv HOME={home} PYTHONPATH={path}
"""
_SSH_CONFIG = """\
Host *
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking accept-new
LogLevel ERROR
"""
_LOOPBACK_SSH = """\
#!/bin/sh
# ssh -T -o ... ADDRESS COMMAND, on this machine
while [ $# -gt 2 ]; do shift; done
export HOME="{folder}/$1"
[ -d "$HOME" ] || {{ echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; }}
cd "$HOME" && exec sh -c "$2"
"""


@dataclass(frozen=True)
class TestHosts:
    """Two hosts.

    Args:
        kind: "namespaces" or "loopback".
        addresses: Of the hosts.
        ssh: The command that reaches them.
        ip_config: The file that lists them.
    """

    __test__ = False

    kind: str
    addresses: tuple[str, str]
    ssh: str
    ip_config: Path

    def shell(self, host: int, command: str) -> str:
        """What a command prints on a host."""
        words = [*shlex.split(self.ssh), self.addresses[host], command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


def why_no_namespaces() -> str | None:
    """Why hosts cannot be namespaces here; None if they can."""
    for program in ("ip", "unshare", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if SSHD is None:
        return "sshd is not installed"
    if os.geteuid() != 0:
        return "namespaces with addresses need root"
    name = f"gs-cluster-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    mounts = ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"]
    mounted = subprocess.run(["ip", "netns", "exec", name, *mounts], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"mounts are not permitted: {mounted.stderr.strip()}" if mounted.returncode else None


@contextlib.contextmanager
def hosts_of(kind: str, folder: Path) -> Iterator[TestHosts]:
    """Two hosts of a kind; what they need is kept in a folder."""
    with (namespaces if kind == "namespaces" else loopback)(folder) as hosts:
        yield hosts


@contextlib.contextmanager
def loopback(folder: Path) -> Iterator[TestHosts]:
    """Addresses of this machine, with a program that takes the place of ssh."""
    addresses = ("127.0.0.1", "127.0.0.2")
    for address in addresses:
        (folder / address).mkdir()
    program = folder / "ssh"
    program.write_text(_LOOPBACK_SSH.format(folder=folder))
    program.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield TestHosts("loopback", addresses, str(program), _ip_config(folder, addresses, port))


@contextlib.contextmanager
def namespaces(folder: Path) -> Iterator[TestHosts]:
    """Network namespaces with sshd in them; the ssh of the tests runs in the first."""
    addresses = ("10.77.3.1", "10.77.3.2")
    home = folder / "home"
    home.mkdir()
    with ExitStack() as stack:
        names = stack.enter_context(networks(addresses))
        for key in ("host_key", "key"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
        path = os.pathsep.join(entry for entry in sys.path if entry)
        for name, address in zip(names, addresses, strict=True):
            config = folder / f"sshd_{name}"
            config.write_text(
                _SSHD_CONFIG.format(address=address, folder=folder, home=home, path=path)
            )
            script = _IN_NAMESPACE.format(home=home, sshd=SSHD, config=config)
            inside = ["ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", script]
            with (folder / f"log_{name}").open("w") as log:
                server = subprocess.Popen(inside, stdout=log, stderr=log)
            stack.callback(stop, server)
        ssh = f"ip netns exec {names[0]} ssh -F {folder / 'ssh_config'}"
        hosts = TestHosts("namespaces", addresses, ssh, _ip_config(folder, addresses, 30050))
        _wait_for(hosts, folder)
        yield hosts


@contextlib.contextmanager
def networks(addresses: tuple[str, str]) -> Iterator[list[str]]:
    """Names of two network namespaces with these addresses; processes in them end with this."""
    mark = os.getpid()
    names = [f"gs-cluster-{mark}-{number}" for number in range(2)]
    ends = [f"gsc{mark}{end}" for end in "ab"]
    link = ("ip", "-n", names[0], "link")
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        _do(*link, "add", ends[0], "type", "veth", "peer", "name", ends[1])
        _do(*link, "set", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, addresses, strict=True):
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _do("ip", "-n", name, "link", "set", end, "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():  # what a failed test has left
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a daemon."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _ip_config(folder: Path, addresses: tuple[str, str], port: int) -> Path:
    path = folder / "ip_config.txt"
    path.write_text("".join(f"{address} {port}\n" for address in addresses))
    return path


def _wait_for(hosts: TestHosts, folder: Path) -> None:
    """Wait until sshd answers."""
    deadline = time.monotonic() + 20
    for host in range(2):
        while True:
            words = [*shlex.split(hosts.ssh), hosts.addresses[host], "true"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=20)
            if done.returncode == 0:
                break
            if time.monotonic() > deadline:
                logs = [path.read_text() for path in folder.glob("log_*")]
                raise RuntimeError("\n".join([done.stderr, *logs]))
            time.sleep(0.05)
