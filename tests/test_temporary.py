# SPDX-License-Identifier: Apache-2.0
"""Temporary folders go with their owners, also those that are killed.

A few processes, forked where they are no command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from graphshard._base.files import TemporaryFolder, remove_abandoned

OWNER = """
import os, sys, time
from graphshard._base.files import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "file").write_text("x")
if sys.argv[1] == "fork" and os.fork() == 0:
    print(os.getpid(), folder.path, flush=True)
    time.sleep(100)
if sys.argv[1] != "fork":
    print(os.getpid(), folder.path, flush=True)
if sys.argv[1] == "exit":
    sys.exit(0)
time.sleep(100)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start(*arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def start_owner(how: str) -> tuple[subprocess.Popen[str], int, Path]:
    owner = start("-c", OWNER, how)
    assert owner.stdout is not None
    pid, path = owner.stdout.readline().split()
    return owner, int(pid), Path(path)


def test_it_goes_with_its_end_of_use(temporary: Path) -> None:
    with TemporaryFolder() as path:
        assert path.parent == temporary
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "inside").mkdir()
    assert not path.exists()
    kept = TemporaryFolder()
    remove_abandoned()
    assert kept.path.is_dir()
    path = kept.path
    del kept
    assert not path.exists()


@pytest.mark.usefixtures("forked_interpreters")
def test_it_goes_with_its_process(temporary: Path) -> None:
    owner, _, path = start_owner("exit")
    owner.communicate(timeout=30)
    assert owner.returncode == 0
    assert not path.exists()


@pytest.mark.usefixtures("forked_interpreters")
def test_that_of_a_killed_process_goes_when_another_one_is_made(temporary: Path) -> None:
    killed, _, abandoned = start_owner("kill")
    living, _, used = start_owner("live")
    killed.kill()
    killed.communicate(timeout=30)
    assert (abandoned / "file").exists()
    with TemporaryFolder():
        assert not abandoned.exists()
        assert (used / "file").exists()
    living.kill()
    living.communicate(timeout=30)


@pytest.mark.usefixtures("forked_interpreters")
def test_a_child_that_lives_on_keeps_it(temporary: Path) -> None:
    owner, child, path = start_owner("fork")
    owner.kill()
    owner.wait(30)
    remove_abandoned()
    assert (path / "file").exists()
    os.kill(child, signal.SIGKILL)
    owner.communicate(timeout=30)  # until the child has closed its end
    remove_abandoned()
    assert not path.exists()


def test_what_only_looks_like_one_stays(temporary: Path, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (temporary / "graphshard-folder-link").symlink_to(elsewhere)
    (temporary / "graphshard-folder-file").write_text("x")
    (temporary / "graphshard-other").mkdir()
    remove_abandoned()
    assert len(list(temporary.iterdir())) == 3
    assert elsewhere.is_dir()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.exhaustive)]
)
def test_a_command_that_is_ended_while_it_partitions_leaves_nothing(
    number: int, temporary: Path
) -> None:
    command = start("-m", "graphshard", "train", "--data", "cora", "--model", "gcn")
    stop = time.monotonic() + 60
    while not any(temporary.glob("graphshard-*")):  # tempfile itself writes a probe first
        assert time.monotonic() < stop
        assert command.poll() is None, command.communicate()
        time.sleep(0.001)
    command.send_signal(number)
    _, error = command.communicate(timeout=60)
    assert command.returncode == 130
    assert error.splitlines()[-1] == "interrupted"
    assert not list(temporary.iterdir())
