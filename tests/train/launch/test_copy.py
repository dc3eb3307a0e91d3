# SPDX-License-Identifier: Apache-2.0
"""``graphshard copy`` to two hosts, which are namespaces with sshd or folders of this machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import TestHosts, hosts_of, why_no_namespaces

from graphshard.data import random_graph
from graphshard.partition import partition_graph
from graphshard.train.commands import run

BOTH = pytest.mark.parametrize("hosts", ["loopback", "namespaces"], indirect=True, scope="module")
SAMPLE = pytest.mark.parametrize(
    "hosts",
    ["loopback", pytest.param("namespaces", marks=pytest.mark.exhaustive)],
    indirect=True,
    scope="module",
)
FILES = ("edge_feats.safetensors", "graph.safetensors", "node_feats.safetensors")


@pytest.fixture(scope="module")
def hosts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestHosts]:
    reason = why_no_namespaces() if request.param == "namespaces" else None
    if reason is not None:
        pytest.skip(reason)
    with hosts_of(request.param, tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts, in ``data/g`` of a folder."""
    folder = tmp_path_factory.mktemp("parts")
    graph = random_graph(num_nodes=60, num_edges=300, seed=1)
    partition_graph(graph, "g", 3, folder / "data" / "g", part_method="random", quiet=True)
    return folder


@pytest.fixture
def workspace(request: pytest.FixtureRequest) -> str:
    """A new folder for each test, with a name that a shell would take apart."""
    return f"~/it's {request.node.name[:20]} $HOME"


def copy(hosts: TestHosts, parts: Path, workspace: str, *more: str) -> int:
    """Run the command in the folder of the parts."""
    before = Path.cwd()
    os.chdir(parts)
    try:
        return run(
            [
                *("copy", "--ip_config", str(hosts.ip_config), "--part_config", "data/g/g.json"),
                *("--workspace", workspace, "--ssh-command", hosts.ssh, *more),
            ]
        )
    finally:
        os.chdir(before)


def listed(hosts: TestHosts, host: int, workspace: str) -> set[str]:
    inside = workspace.removeprefix("~/").replace("'", "'\\''")
    found = hosts.shell(host, f"cd ~/'{inside}' && find . -type f")
    return {line.removeprefix("./") for line in found.splitlines()}


def there(hosts: TestHosts, host: int, workspace: str, name: str, command: str) -> str:
    inside = workspace.removeprefix("~/").replace("'", "'\\''")
    return hosts.shell(host, f"cd ~/'{inside}' && {command} {name}")


@BOTH
def test_each_host_gets_its_parts_and_a_json_that_loads_there(
    hosts: TestHosts, parts: Path, workspace: str, tmp_path: Path
) -> None:
    scripts = tmp_path / "code"
    (scripts / "inner").mkdir(parents=True)
    (scripts / "run me.sh").write_text("echo ran")
    (scripts / "run me.sh").chmod(0o755)
    (scripts / "inner" / "empty.py").touch()
    assert copy(hosts, parts, workspace, "--script_folder", str(scripts)) == 0
    more = {"ip_config.txt", "data/g/g.json", "code/run me.sh", "code/inner/empty.py"}
    for host, own in enumerate(([0], [1, 2])):
        expected = {f"data/g/part{part}/{file}" for part in own for file in FILES}
        assert listed(hosts, host, workspace) == expected | more
    assert there(hosts, 1, workspace, "'./code/run me.sh'", "") == "ran\n"
    names = sorted(f"data/g/part{part}/{file}" for part in (1, 2) for file in FILES)
    printed = there(hosts, 1, workspace, " ".join(["data/g/g.json", *names]), "sha256sum")
    for line in printed.splitlines():
        digest, name = line.split()
        assert digest == hashlib.sha256((parts / name).read_bytes()).hexdigest(), name


@pytest.mark.filterwarnings("always:.*it is not copied")
@pytest.mark.parametrize("hosts", ["loopback"], indirect=True, scope="module")
def test_links_in_the_folder_of_scripts_are_followed(
    hosts: TestHosts,
    parts: Path,
    workspace: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What arrives is what ``cp -rL`` makes of the same folder."""
    real, code = tmp_path / "elsewhere", tmp_path / "code v2"
    (real / "models" / "inner").mkdir(parents=True)
    (real / "models" / "inner" / "net.py").write_text("net")
    (real / "one.py").write_text("one")
    code.mkdir()
    (code / "train.py").write_text("train")
    (code / "models").symlink_to(real / "models")
    (code / "again").symlink_to("models", target_is_directory=True)
    (code / "one.py").symlink_to(real / "one.py")
    (tmp_path / "code").symlink_to(code)
    right = tmp_path / "right"
    subprocess.run(["cp", "-rL", str(tmp_path / "code"), str(right)], check=True)
    (code / "models" / "inner" / "back").symlink_to(code / "models")
    (code / ".#train.py").symlink_to("me@host.3")  # as an editor makes them
    os.mkfifo(code / "pipe")
    assert copy(hosts, parts, workspace, "--script_folder", str(tmp_path / "code")) == 0
    errors = capfd.readouterr().err
    for name, why in (
        ("models/inner/back", "is a link to a folder that it is in"),
        (".#train.py", "is a link that leads nowhere"),
        ("pipe", "is neither a file nor a folder"),
    ):
        assert f"warning: {tmp_path}/code/{name} {why}; it is not copied" in errors
    expected = {f"code/{p.relative_to(right)}" for p in right.rglob("*") if p.is_file()}
    found = {name for name in listed(hosts, 0, workspace) if name.startswith("code")}
    assert found == expected
    for name in expected:
        sent = there(hosts, 0, workspace, f"'./{name}'", "cat")
        assert sent == (right / name.removeprefix("code/")).read_text()


@SAMPLE
def test_what_is_there_is_not_sent_again_and_what_is_damaged_is(
    hosts: TestHosts, parts: Path, workspace: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert copy(hosts, parts, workspace, "--rel_data_path", "d") == 0
    first = capfd.readouterr().out
    assert f"host 0 ({hosts.addresses[0]}): 5 files sent" in first
    assert f"host 1 ({hosts.addresses[1]}): 8 files sent" in first
    assert copy(hosts, parts, workspace, "--rel_data_path", "d") == 0
    second = capfd.readouterr().out
    assert "0 files sent (0 bytes), 5 there already" in second
    assert "0 files sent (0 bytes), 8 there already" in second
    # One is cut short, one has another byte, one was left half-written; the rest stays.
    damage = "truncate -s 100 d/part1/graph.safetensors && mv d/g.json d/g.json.partial1 && "
    damage += "printf x | dd bs=1 seek=99 conv=notrunc status=none of="
    there(hosts, 1, workspace, "", f"{damage}d/part2/graph.safetensors")
    assert copy(hosts, parts, workspace, "--rel_data_path", "d") == 0
    third = capfd.readouterr().out
    assert "host 1" in third
    assert "3 files sent" in third
    assert "5 there already" in third
    expected = {f"d/part{part}/{file}" for part in (1, 2) for file in FILES}
    assert listed(hosts, 1, workspace) == expected | {"d/g.json", "ip_config.txt"}


@SAMPLE
def test_a_host_that_fails_is_named_and_the_others_get_theirs(
    hosts: TestHosts,
    parts: Path,
    workspace: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wrong = tmp_path / "hosts"
    wrong.write_text(f"{hosts.addresses[0]}\nno-such-host.invalid\n")
    assert copy(hosts, parts, workspace, "--ip-config", str(wrong)) == 1
    printed = capfd.readouterr()
    assert "error: host 1 (no-such-host.invalid): the list of files there: " in printed.err
    assert "ended with exit code 255" in printed.err
    assert f"host 0 ({hosts.addresses[0]}): 5 files sent" in printed.out


@SAMPLE
def test_a_folder_in_the_place_of_a_file_is_an_error(
    hosts: TestHosts, parts: Path, workspace: str, capfd: pytest.CaptureFixture[str]
) -> None:
    there_is = workspace.removeprefix("~/").replace("'", "'\\''")
    hosts.shell(1, f"mkdir -p ~/'{there_is}'/data/g/part1/graph.safetensors/full")
    assert copy(hosts, parts, workspace) == 1
    printed = capfd.readouterr()
    assert f"error: host 1 ({hosts.addresses[1]}): data/g/part1/graph.safetensors" in printed.err
    assert "a folder has its name" in printed.err
    assert "data/g/g.json" not in listed(hosts, 1, workspace)  # it goes last


def test_a_host_that_says_nothing_is_not_waited_for(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The program in the place of ssh hangs."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1\n")
    hangs = tmp_path / "ssh"
    hangs.write_text("#!/bin/sh\nexec sleep 100\n")
    hangs.chmod(0o755)
    found = TestHosts("loopback", ("127.0.0.1", ""), str(hangs), hosts)
    begun = time.monotonic()
    assert copy(found, parts, "~/x", "--timeout", "0.3") == 1
    assert "the list of files there: not done within 0.3 s" in capfd.readouterr().err
    assert time.monotonic() - begun < 50


def test_wrong_input_is_one_line(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"127.0.0.{i}\n" for i in range(1, 5)))
    found = TestHosts("loopback", ("127.0.0.1", ""), "no-such-program", hosts)
    assert copy(found, parts, "~/x") == 2
    assert "3 parts need 1 to 3 hosts (got 4)" in capfd.readouterr().err
    hosts.write_text("127.0.0.1\n")
    assert copy(found, parts, "~/x") == 1
    assert "no-such-program was not found; pass --ssh-command" in capfd.readouterr().err
    assert copy(found, parts, "~/x", "--rel-data-path", "../x") == 2
    assert "must be a path inside the workspace (got '../x')" in capfd.readouterr().err
    assert copy(found, parts, "~/x", "--script-folder", "no-such") == 2
    assert "script_folder must be a folder (got 'no-such')" in capfd.readouterr().err
    hosts.write_text("-oProxyCommand=false\n")
    assert copy(found, parts, "~/x") == 1
    assert "must not begin with '-'" in capfd.readouterr().err
    (parts / "data/g/part1/graph.safetensors").rename(parts / "away")
    try:
        hosts.write_text("127.0.0.1\n")
        assert copy(found, parts, "~/x") == 2
        assert "part1/graph.safetensors" in capfd.readouterr().err
    finally:
        (parts / "away").rename(parts / "data/g/part1/graph.safetensors")
