# SPDX-License-Identifier: Apache-2.0
"""``graphshard serve`` and `initialize`: tokens, several servers, what is left when they end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from graphshard.data import random_graph
from graphshard.errors import ServerError
from graphshard.partition import partition_graph
from graphshard.servers import (
    DistGraph,
    GraphServer,
    MessageClient,
    WireMessage,
    exit_client,
    initialize,
)
from graphshard.servers._message_stream import MessageStream
from graphshard.train.commands import run

SHARED = Path("/dev/shm")
TOKEN = "f00d" * 8


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("parts")
    graph = random_graph(num_nodes=60, num_edges=300, seed=1)
    graph.ndata["feat"] = torch.arange(60.0).view(-1, 1)
    partition_graph(graph, "g", 3, folder, part_method="random", quiet=True)
    return str(folder / "g.json")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def ip_config(tmp_path: Path) -> Path:
    """Two hosts on ports that were free."""
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    path = tmp_path / "ip_config.txt"
    path.write_text("# two hosts\n" + "".join(f"127.0.0.1 {port} 1\n" for port in ports))
    return path


def start(parts: str, ip_config: Path, host: int, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "graphshard", "serve", parts]
    command += ["--ip-config", str(ip_config), "--host", str(host)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


@contextmanager
def serving(parts: str, ip_config: Path, token: Path) -> Iterator[list[subprocess.Popen[str]]]:
    servers = [start(parts, ip_config, h, GRAPHSHARD_TOKEN_FILE=str(token)) for h in range(2)]
    try:
        for host, server in enumerate(servers):
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith(f"host {host} of 2 serves"), server.communicate()
        yield servers
    finally:
        for server in servers:
            server.kill()
            server.communicate(timeout=30)


def folders(server: subprocess.Popen[str]) -> list[Path]:
    """Folders of shared memory that a process has open."""
    links = Path(f"/proc/{server.pid}/fd").iterdir()
    targets = {Path(os.readlink(link)) for link in links}
    return [t for t in targets if t.parent == SHARED and t.name.startswith("graphshard-")]


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


def check_log(server: subprocess.Popen[str], address: str) -> None:
    """A server says who comes and goes, and whom it refuses."""
    with pytest.raises(ServerError, match="refused the token"):
        MessageClient(address, "beef" * 8, timeout=20).call(WireMessage("ping"))
    host, _, port = address.rpartition(":")
    stream = MessageStream(socket.create_connection((host, int(port)), 20), 1 << 20)
    stream.prove(TOKEN, "0123456789abcdef", time.monotonic() + 20)
    for message in (WireMessage("here", {"label": "trainer 7"}), WireMessage("no such")):
        stream.send(message)
        stream.receive()
    stream.close()
    assert server.stderr is not None
    lines = [server.stderr.readline().rstrip("\n") for _ in range(4)]
    for texts in (  # each connection has a thread, whose lines come in order
        [r"WARNING refused 127.0.0.1:\d+: it does not know the token"],
        [
            "INFO trainer 7 has come",
            r"WARNING refused no such from 127.0.0.1:\d+: unknown request 'no such'",
            "WARNING trainer 7 is gone: its connection ended without a word",
        ],
    ):
        said = [line for line in lines if any(re.fullmatch(TIME + text, line) for text in texts)]
        assert len(said) == len(texts), lines
        assert all(map(re.fullmatch, (TIME + text for text in texts), said)), lines


@pytest.mark.skipif(not SHARED.is_dir(), reason="no /dev/shm on this system")
@pytest.mark.usefixtures("forked_interpreters")
def test_it_serves_and_logs_until_it_is_ended(
    parts: str, ip_config: Path, token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHSHARD_TOKEN_FILE", str(token))
    monkeypatch.setenv("GRAPHSHARD_HOST", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving(parts, ip_config, token) as servers:
        address = ip_config.read_text().splitlines()[1].split()
        check_log(servers[0], ":".join(address[:2]))
        initialize(ip_config, timeout=20)
        with pytest.raises(RuntimeError, match="connected already"):
            initialize(ip_config)
        g = DistGraph("g")
        assert torch.equal(g.ndata["feat"][:].view(-1).sort().values, torch.arange(60.0))
        held = folders(servers[0]) + folders(servers[1])
        assert len(held) == 2
        (tmp_path / "graphshard-folder-left").mkdir()  # by an agent that was killed
        for server in servers:
            server.send_signal(signal.SIGTERM)
            _, error = server.communicate(timeout=30)
            assert server.returncode == 130, error
            *logged, last = error.splitlines()
            assert last == "interrupted", error
            assert all(re.fullmatch(TIME + "INFO .*", line) for line in logged), error
        assert not (tmp_path / "graphshard-folder-left").exists()
        assert not any(path.exists() for path in held)
        with pytest.raises(ServerError, match="graph server of host 0 .* is gone"):
            g.ndata["feat"][:]
    exit_client()


def test_a_wrong_token_is_refused(
    parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHSHARD_HOST", "0")
    monkeypatch.setenv("GRAPHSHARD_TOKEN", "beef" * 8)
    server, path = GraphServer(0, 1, parts, TOKEN), tmp_path / "ip_config.txt"
    path.write_text(server.address.replace(":", " "))
    with pytest.raises(ServerError, match="refused the token"):
        initialize(path, timeout=20)
    server.stop()


def refused(parts: str, ip_config: Path, host: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of wrong input, in one line."""
    command = ["serve", parts, "--ip-config", str(ip_config), "--host", str(host)]
    assert run(command) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


def test_wrong_input_is_one_line(
    parts: str,
    ip_config: Path,
    token: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("GRAPHSHARD_TOKEN", "GRAPHSHARD_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert "there is no token" in refused(parts, ip_config, 0, capsys)
    monkeypatch.setenv("GRAPHSHARD_TOKEN_FILE", str(token))
    assert "must be a line of" in refused(parts, ip_config, 5, capsys)
    token.chmod(0o644)
    error = refused(parts, ip_config, 0, capsys)
    assert "readable by its owner alone (got mode 644)" in error
    monkeypatch.delenv("GRAPHSHARD_TOKEN_FILE")
    monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
    ip_config.write_text("127.0.0.1 70000\n")
    assert "a port must be in [1, 65535]" in refused(parts, ip_config, 0, capsys)
    ip_config.write_text("".join(f"127.0.0.1 {port}\n" for port in range(3000, 3004)))
    assert "3 parts need 1 to 3 hosts (got 4)" in refused(parts, ip_config, 0, capsys)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "lists no hosts"),
        ("1.2.3.4 five\n", "must be 'address"),
        ("1.2.3.4 5 6 7\n", "must be 'address"),
        ("1.2.3.4\n1.2.3.4 30050\n", "is listed twice"),
    ],
)
def test_a_list_of_hosts_that_is_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: str
) -> None:
    monkeypatch.setenv("GRAPHSHARD_HOST", "0")
    monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
    path = tmp_path / "ip_config.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=error):
        initialize(path)
    with pytest.raises(ValueError, match="pass ip_config"):
        initialize()


@pytest.mark.parametrize("number", ["1", "-1", "x", ""])
def test_the_number_of_a_host_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setenv("GRAPHSHARD_HOST", number)
    path = tmp_path / "ip_config.txt"
    path.write_text("127.0.0.1\n")
    with pytest.raises(ValueError, match="must be the number of a host"):
        initialize(path)
