# SPDX-License-Identifier: Apache-2.0
"""``graphshard launch --slurm`` under Slurm's own daemons: two nodes, each a network namespace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hosts import networks, stop, why_no_namespaces
from test_launch import SCRIPT, check_gone, check_losses

from graphshard.data import load_dataset
from graphshard.partition import partition_graph
from graphshard.train.commands import run

PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "srun", "scontrol", "sinfo")
ADDRESSES = ("10.77.4.1", "10.77.4.2")

CONFIG = """\
ClusterName=test
SlurmctldHost=n0({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName=n0 NodeAddr={addresses[0]} CPUs=2 State=UNKNOWN
NodeName=n1 NodeAddr={addresses[1]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why Slurm cannot be started here; None if it can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return why_no_namespaces()


class Slurm:
    """Two nodes; commands of users run on the first."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.folder, self.stack = folder, stack
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.names = stack.enter_context(networks(ADDRESSES))
        (folder / "state").mkdir()
        lines = ["127.0.0.1 localhost", *(f"{a} n{i}" for i, a in enumerate(ADDRESSES))]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, addresses=ADDRESSES))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for node in range(2):
            (folder / f"spool.n{node}").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        options = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        socket = f"--socket={folder}/munge.socket"
        self.start(0, "munged", "--foreground", "--force", socket, *options)
        self.start(0, "slurmctld", "-D")
        for node in range(2):
            self.start(node, "slurmd", "-D", "-N", f"n{node}")
        deadline = time.monotonic() + 60
        while (found := self.ask("sinfo", "-h", "-o", "%t %D").strip()) != "idle 2":
            logs = "".join(path.read_text() for path in folder.glob("*.output"))
            assert time.monotonic() < deadline, f"{found}\n{logs}"
            assert all(daemon.poll() is None for daemon in self.daemons), f"{found}\n{logs}"
            time.sleep(0.2)

    def inside(self, node: int, *command: str) -> list[str]:
        """A command as it runs on a node: with its name, its address and its own memory."""
        setup = f'mount --bind {self.folder}/hosts /etc/hosts && hostname n{node} && exec "$@"'
        words = ["ip", "netns", "exec", self.names[node], "unshare", "-m", "--uts"]
        return [*words, "sh", "-c", setup, "sh", *command]

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
        return {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": path}

    def start(self, node: int, *command: str) -> None:
        with (self.folder / f"{command[0]}{node}.output").open("w") as output:
            words = self.inside(node, *command)
            process = subprocess.Popen(words, stdout=output, stderr=output, env=self.environment)
        self.daemons.append(process)
        self.stack.callback(stop, process)

    def ask(self, *command: str) -> str:
        words = self.inside(0, *command)
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, env=self.environment
        )
        return done.stdout + done.stderr

    def popen(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        words = self.inside(0, *command)
        return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=self.environment)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    partition_graph(load_dataset("cora").graph, "cora", 2, folder / "data", quiet=True)
    (folder / "train.py").write_text(SCRIPT)
    with ExitStack() as stack:
        yield Slurm(stack, folder)


def launch(slurm: Slurm, *script: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "graphshard", "launch", "--slurm", "--num-trainers", "2"]
    program += ["--workspace", str(slurm.folder), "--part-config", "data/cora.json", *script]
    return slurm.popen("salloc", "--nodes=2", "--exclusive", *program)


@pytest.mark.exhaustive
def test_two_trainers_on_each_of_two_nodes(slurm: Slurm) -> None:
    with launch(slurm, "python train.py") as job:
        out, error = job.communicate(timeout=100)
    assert job.returncode == 0, out + error
    check_losses(out, 2, 2)


@pytest.mark.exhaustive
def test_a_trainer_that_raises_is_reported_first(slurm: Slurm) -> None:
    with launch(slurm, "python train.py raise") as job:
        out, error = job.communicate(timeout=100)
    assert job.returncode == 1, out + error
    report = error[error.index("error: ") :]
    assert report.startswith("error: host 0 rank 1 ended with exit code 1\n")
    assert "RuntimeError: on purpose" in report.split("\nthen ")[0]
    check_gone(out)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_launcher_is_ended(
    slurm: Slurm, number: signal.Signals
) -> None:
    with launch(slurm, "python train.py wait") as job:
        assert job.stdout is not None
        printed = ""
        while printed.count("] waiting\n") < 4:
            line = job.stdout.readline()
            assert line, job.communicate()
            printed += line
        (launcher,) = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if path.read_bytes().startswith(sys.executable.encode()) and is_launcher(path)
        ]
        os.kill(launcher, number)
        job.communicate(timeout=60)
    if number != signal.SIGKILL:  # which salloc does not tell from a good end
        assert job.returncode == 130
    check_gone(printed)


def is_launcher(path: Path) -> bool:
    words = path.read_text().split("\0")
    return "launch" in words and "--slurm" in words


def test_outside_an_allocation_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert run(["launch", "--slurm", "--part-config", "x.json", "python train.py"]) == 2
    assert "run graphshard launch inside salloc or sbatch" in capfd.readouterr().err
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", "")
    assert run(["launch", "--slurm", "--part-config", "x.json", "python train.py"]) == 2
    assert "scontrol show hostnames 'n[0-1]' failed" in capfd.readouterr().err
