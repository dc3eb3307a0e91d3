# SPDX-License-Identifier: Apache-2.0
"""``graphshard launch`` with real servers, torchrun and trainers, on two hosts.

Hosts are network namespaces with sshd, to which the parts go by ``graphshard copy``; where those
are not permitted, folders of this machine and a program in the place of ssh. The sample that always
runs is one job; ``make test-all`` has both kinds of hosts, two trainers each, and failures.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts import TestHosts, hosts_of, why_no_namespaces

from graphshard.data import load_dataset, random_graph
from graphshard.partition import partition_graph
from graphshard.servers import initialize
from graphshard.train.commands import run
from graphshard.train.launch._job_on_hosts import script_line

SCRIPT = """
import os, sys, time

import torch

import graphshard.dgl as dgl
from graphshard.servers import DistGraph, DistNodeDataLoader, node_split

print("pid", os.getpid())
dgl.distributed.initialize("ip_config.txt")
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
g = DistGraph("cora", part_config="data/cora.json")
seeds = node_split(g.ndata["train_mask"], g.get_partition_book())
sampler = dgl.dataloading.NeighborSampler(
    [10, 25], prefetch_node_feats=["feat"], prefetch_labels=["label"]
)
loader = DistNodeDataLoader(g, seeds, sampler, batch_size=35, shuffle=True, seed=0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [dgl.nn.SAGEConv(1433, 16, "mean"), dgl.nn.SAGEConv(16, 7, "mean")]
        )

    def forward(self, blocks, h):
        h = torch.relu(self.layers[0](blocks[0], h))
        return self.layers[1](blocks[1], h)


torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
losses = []
for epoch in range(4):
    for _, _, blocks in loader:
        loss = torch.nn.functional.cross_entropy(
            model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
if "wait" in sys.argv:
    print("waiting")
    time.sleep(1000)
if "raise" in sys.argv and rank == 1:
    raise RuntimeError("on purpose")
if "raise" in sys.argv:
    torch.distributed.barrier()
print("losses", losses[0], losses[-1], "of", len(losses), "host", os.environ["GRAPHSHARD_HOST"])
dgl.distributed.exit_client()
torch.distributed.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of jobs that are to fail stay there, and nowhere else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """What hosts are: those asked for, or the best that there are here."""
    reason = why_no_namespaces()
    if getattr(request, "param", "namespaces") == "loopback":
        return "loopback"
    if reason is not None and hasattr(request, "param"):
        pytest.skip(reason)
    if reason is not None:
        sys.stderr.write(f"hosts are folders of this machine, because {reason}\n")
    return "namespaces" if reason is None else "loopback"


@pytest.fixture(scope="module")
def hosts(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    """Two hosts that have their parts, and the script."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text(SCRIPT)
    shutil.copy(Path(__file__).parents[1] / "own_models.py", folder / "code")
    with hosts_of(kind, folder) as found:
        partition_graph(load_dataset("cora").graph, "cora", 2, folder / "cora", quiet=True)
        done = run(
            [
                *("copy", "--ip_config", str(found.ip_config), "--workspace", "~/job"),
                *("--part_config", str(folder / "cora" / "cora.json"), "--rel_data_path", "data"),
                *("--script_folder", str(folder / "code"), "--ssh-command", found.ssh),
            ]
        )
        assert done == 0
        yield found


def command(hosts: TestHosts, num_trainers: int, script: str) -> list[str]:
    return [
        *("launch", "--ip_config", str(hosts.ip_config), "--workspace", "~/job"),
        *("--part_config", "data/cora.json", "--ssh-command", hosts.ssh),
        *("--num_trainers", str(num_trainers), "--num_servers", "1", "--num_omp_threads", "1"),
        *("--extra_envs", "TRAINED=1", "ALSO=2", f"HOSTS_OF_TEST={hosts.ip_config}", script),
    ]


def check_losses(printed: str, num_hosts: int, num_trainers: int) -> None:
    """Each rank has printed what it got, and has learnt."""
    for rank in range(num_hosts * num_trainers):
        host = rank // num_trainers
        prefix = rf"\[host {host} rank {rank}\] losses (\S+) (\S+) of (\d+) host {host}"
        (found,) = re.findall(prefix, printed)
        assert float(found[1]) < 0.7 * float(found[0])
        assert int(found[2]) == 4 * -(-140 // (35 * num_hosts * num_trainers))


def pids(printed: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"rank \d+\] pid (\d+)", printed)]


def check_gone(printed: str) -> None:
    """No trainer that has printed its number is there (numbers are those of this machine)."""
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids(printed)):
        assert time.monotonic() < deadline, "trainers are left"
        time.sleep(0.05)


def test_a_job_on_two_hosts(hosts: TestHosts, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command(hosts, 1, "python3 code/train.py")) == 0, capfd.readouterr()
    printed = capfd.readouterr().out
    check_losses(printed, 2, 1)
    for host, address in enumerate(hosts.addresses):
        assert (
            f"[host {host} server] host {host} of 2 serves data/cora.json on {address}:" in printed
        )
    check_gone(printed)
    if hosts.kind == "namespaces":  # nothing is left in the memory that only they see
        for host in range(2):
            assert hosts.shell(host, "ls /dev/shm") == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["full", "sample"])
def test_a_model_of_one_s_own_is_trained_by_command(
    mode: str, hosts: TestHosts, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its module is in the folder of scripts, which `graphshard copy` has brought."""
    train = (
        f"cd code && python -m graphshard train --data ../data/cora.json --mode {mode} "
        f"--run ../{mode} --model own_models:Net --model-args aggregator=pool --epochs 2 "
        "--device cpu"
    )
    assert run(command(hosts, 1, train)) == 0, capfd.readouterr()
    printed = capfd.readouterr().out
    assert "own_models:Net, 2 worker(s)" in printed
    assert re.search(r"rank 0\].*test accuracy", printed)
    found = hosts.shell(0, f"cat job/{mode}/model.json")
    assert '"own_models:Net"' in found


def test_a_partition_that_is_not_there_is_said_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "--local", "1", "--workspace", str(tmp_path), "--part-config", "no.json"]
    assert run([*words, "python train.py"]) == 2
    printed = capfd.readouterr()
    assert printed.err.startswith(f"error: partition config {tmp_path / 'no.json'} does not exist")
    assert "server" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give one of --ip-config (hosts over ssh), --local N and --slurm"),
        (["--local", "2", "--slurm"], "give one of --ip-config"),
        (["--local", "0"], "the number of local hosts must be at least 1 (got 0)"),
        (["--local", "1", "--num-trainers", "0"], "num_trainers must be at least 1 (got 0)"),
        (["--local", "1", "--timeout", "0"], "timeout must be above 0 (got 0.0)"),
        (["--local", "1", "--tls-key", "k"], "--tls-certificate and --tls-key go together"),
        (["--local", "1", "--extra-envs", "A"], "--extra-envs takes NAME=VALUE (got 'A')"),
        (["--local", "1", "--workspace", "/no/such"], "/no/such"),
        (["--ip-config", "no-such-file"], "no-such-file"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "--part-config", "x.json", *words, "python train.py"]) in (1, 2)
    printed = capfd.readouterr().err
    assert error in printed
    assert "Traceback" not in printed


def test_the_command_of_a_trainer_is_a_line_for_a_shell() -> None:
    line = "A=1 python3 train.py --name 'a b' $HOME/*; echo done"
    assert script_line([line]) == line
    assert script_line(["python", "train.py", "a b", "$HOME"]) == "python train.py 'a b' '$HOME'"
    assert script_line(["train.py --epochs 3"]) == "python train.py --epochs 3"
    assert script_line(["train.py", "a b"]) == "python train.py 'a b'"
    with pytest.raises(ValueError, match="the command of a trainer is empty"):
        script_line([" "])


LISTENING = """
import os, sys
from contextlib import suppress
from pathlib import Path

import torch

import graphshard
import graphshard.dgl as dgl

dgl.distributed.initialize()
torch.distributed.init_process_group("gloo")
g = dgl.distributed.DistGraph("g", part_config="parts/g.json")
rows = dgl.distributed.DistEmbedding(g.num_nodes(), 2, "rows")
optimizer = dgl.distributed.optim.SparseAdam([rows], lr=0.1)
rows(torch.arange(3)).sum().backward()
optimizer.step()  # trainers have connections to each other now
for _ in range(3):  # by now rank 0 has started the monitor
    graphshard.comm.barrier()
parents = {}
for folder in Path("/proc").glob("[0-9]*"):
    with suppress(OSError):  # it has ended
        parents[folder.name] = (folder / "stat").read_text().rpartition(")")[2].split()[1]


def is_of_the_job(process):
    while process in parents and process not in os.environ["BEFORE"].split():
        process = parents[process]
    return process == os.environ["LAUNCHER"]


sockets = set()
for process in filter(is_of_the_job, parents):
    with suppress(OSError):  # it has ended
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                sockets.add(os.readlink(descriptor))
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:  # it listens
            print("listens at", words[1].split(":")[0])
torch.distributed.barrier()
print("words", sys.argv[1:])
"""
#: Options of a script that are beginnings of torchrun's.
ABBREVIATIONS = "--log out.txt --node 1 --num 2 --max 3 --local 4 --master 5 --n 6 --m 7 --r 8 -m"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("nested_forks")
@pytest.mark.exhaustive  # the job on two hosts has the same parts
def test_a_local_job_stays_on_127_0_0_1_and_a_script_s_options_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    partition_graph(random_graph(60, 300, seed=0), "g", 2, tmp_path / "parts", quiet=True)
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    monkeypatch.setenv("BEFORE", " ".join(path.name for path in Path("/proc").glob("[0-9]*")))
    (tmp_path / "train.py").write_text(LISTENING)
    words = ["launch", "--local", "2", "--workspace", str(tmp_path), "--part-config"]
    words += ["parts/g.json", "--log-dir", str(tmp_path / "logs")]
    words += ["--server-options", "--log-level info"]
    line = f"A=$(echo b) && python train.py {ABBREVIATIONS} $A"
    assert run([*words, line]) == 0, capfd.readouterr()
    printed = capfd.readouterr().out
    addresses = re.findall(r"listens at (\w+)", printed)
    assert len(addresses) >= 2 * 4  # seen by each: two servers, torchrun's store, rank 0's monitor
    assert set(addresses) == {"0100007F" if sys.byteorder == "little" else "7F000001"}
    for rank in range(2):
        assert f"[host {rank} rank {rank}] words {[*ABBREVIATIONS.split(), 'b']}" in printed
    # Kept, because a folder was given.
    (folder,) = (tmp_path / "logs").iterdir()
    server = (folder / "host1-server.log").read_text()
    assert "host 1 of 2 serves parts/g.json" in server
    came = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO trainer rank 0 .* has come$"
    assert re.search(came, server, re.MULTILINE), server
    assert "words" in (folder / "host0-rank0.log").read_text()


def test_initialize_takes_the_hosts_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count before the file that a script gives, which may list others."""
    (tmp_path / "one_host").write_text("127.0.0.1\n")
    (tmp_path / "two_hosts").write_text("127.0.0.1\n127.0.0.2\n")
    monkeypatch.setenv("GRAPHSHARD_HOST", "2")
    monkeypatch.setenv("GRAPHSHARD_IP_CONFIG", str(tmp_path / "one_host"))
    for given in (tmp_path / "two_hosts", "no-such-file", None):
        with pytest.raises(ValueError, match=r"must be the number of a host, in \[0, 1\)"):
            initialize(given)


@pytest.mark.exhaustive
def test_servers_with_tls(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    partition_graph(load_dataset("cora").graph, "cora", 2, tmp_path / "data", quiet=True)
    (tmp_path / "train.py").write_text(SCRIPT)
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    words = ["launch", "--local", "2", "--workspace", str(tmp_path), "--part-config"]
    words += ["data/cora.json", "--tls-certificate", "cert.pem", "--tls-key", "key.pem"]
    assert run([*words, "python train.py"]) == 0, capfd.readouterr()
    check_losses(capfd.readouterr().out, 2, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_hosts", [1, 3])
def test_hosts_on_this_machine(
    num_hosts: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One host may have several parts; DGL's way to give several variables is taken."""
    partition_graph(load_dataset("cora").graph, "cora", 3, tmp_path / "data", quiet=True)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["launch", "--local", str(num_hosts), "--workspace", str(tmp_path), "--num_clients"]
    words += ["2", "--part_config", "data/cora.json", "--extra_envs", "A=1", "B=2", "train.py"]
    assert run(words) == 0, capfd.readouterr()
    check_losses(capfd.readouterr().out, num_hosts, 2)


def test_more_hosts_than_parts_are_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    partition_graph(load_dataset("cora").graph, "cora", 2, tmp_path, quiet=True)
    assert (
        run(["launch", "--local", "3", "--part-config", str(tmp_path / "cora.json"), "x.py"]) == 2
    )
    printed = capfd.readouterr()
    assert "2 parts need 1 to 2 hosts (got 3)" in printed.err
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)


both = pytest.mark.parametrize("kind", ["namespaces", "loopback"], indirect=True, scope="module")


@pytest.mark.exhaustive
@both
def test_two_trainers_on_each_of_two_hosts(
    hosts: TestHosts, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(command(hosts, 2, "python3 code/train.py")) == 0, capfd.readouterr()
    check_losses(capfd.readouterr().out, 2, 2)


@pytest.mark.exhaustive
@both
def test_a_trainer_that_raises_is_reported_first(
    hosts: TestHosts, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(command(hosts, 2, "python3 code/train.py raise")) == 1
    printed = capfd.readouterr()
    assert printed.err.startswith("error: host 0 rank 1 ended with exit code 1\n")
    assert "RuntimeError: on purpose" in printed.err.split("\nthen ")[0]
    assert len(pids(printed.out)) == 4
    check_gone(printed.out)


@pytest.mark.exhaustive
@both
def test_a_server_that_is_killed_is_named(hosts: TestHosts) -> None:
    with waiting(hosts) as (launcher, printed):
        (server,) = servers_of(hosts, 1)
        os.kill(server, signal.SIGKILL)
        out, error = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert error.startswith("error: host 1 server ended with signal SIGKILL")
    assert "[host 1 server] ended with signal SIGKILL; all hosts are told to stop" in out
    check_gone(printed)


@pytest.mark.exhaustive
@both
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_launcher_is_ended(
    hosts: TestHosts, number: signal.Signals
) -> None:
    with waiting(hosts) as (launcher, printed):
        launcher.send_signal(number)
        launcher.communicate(timeout=60)
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 130)
    check_gone(printed)
    deadline = time.monotonic() + 30
    while servers_of(hosts):
        assert time.monotonic() < deadline, "servers are left"
        time.sleep(0.05)


@contextmanager
def waiting(hosts: TestHosts) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job whose trainers wait, and what was printed until all do."""
    words = [sys.executable, "-m", "graphshard", *command(hosts, 2, "python3 code/train.py wait")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            printed = ""
            while printed.count("] waiting\n") < 4:
                line = launcher.stdout.readline()
                assert line, launcher.communicate()
                printed += line
            yield launcher, printed
        finally:
            launcher.kill()


def servers_of(hosts: TestHosts, host: int | None = None) -> list[int]:
    """Numbers of the processes that are servers of a job on these hosts."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")[:-1]
            variables = (folder / "environ").read_text(errors="replace").split("\0")
        except OSError:
            continue
        is_ours = "serve" in words and f"HOSTS_OF_TEST={hosts.ip_config}" in variables
        if is_ours and (host is None or words[-2:] == ["--host", str(host)]):
            found.append(int(folder.name))
    return found
