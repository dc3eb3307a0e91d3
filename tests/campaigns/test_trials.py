# SPDX-License-Identifier: Apache-2.0
"""Mutations repeat from their number, and every end of a trial is told. Forked children."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from mutations import mutate
from trials import CLEAN, SAME, digest, run_trials

from graphshard import PartitionFormatError


def make_folder(folder: Path) -> Path:
    (folder / "part-0").mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps({"size": 3, "names": ["x", "y"], "deep": {"z": 1.5}}))
    for number in range(3):
        (folder / "part-0" / f"{number}.bin").write_bytes(bytes(range(100)) * (number + 1))
    return folder


def contents(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = path.is_dir()
    return found


def test_a_number_does_the_same_again_and_every_number_does_something(tmp_path: Path) -> None:
    original = contents(make_folder(tmp_path / "original"))
    kinds = set()
    unchanged = 0
    for number in range(300):
        first, second = (make_folder(tmp_path / f"{number}" / side) for side in "ab")
        assert mutate(first, number) == mutate(second, number)
        assert contents(first) == contents(second)
        unchanged += contents(first) == original
        kinds.add(mutate(make_folder(tmp_path / f"{number}" / "c"), number).split()[2])
    assert unchanged < 30, "a byte may be overwritten with itself"
    assert len(kinds) > 20


def test_every_ending_is_told_and_the_next_mutation_is_tried(tmp_path: Path) -> None:
    original = make_folder(tmp_path / "original")

    def damage(folder: Path, number: int) -> str:
        (folder / "number").write_text(str(number))
        return f"{number}: number"

    def use(folder: Path) -> int:
        number = int((folder / "number").read_text()) if (folder / "number").exists() else 0
        if number == 1:
            raise KeyError("a")
        if number == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 3:
            time.sleep(100)
        if number == 4:
            return len(bytearray(200 << 20)) * 0
        if number == 5:
            bytearray(1 << 40)
        if number == 6:
            return 1
        if number == 7:
            raise ValueError(f"{folder}: not worded by us")
        if number == 8:
            os._exit(3)
        if number == 9:
            raise SystemExit(0)
        return 0

    campaign = run_trials(
        use, original, tmp_path / "scratch", range(11), damage=damage, deadline=2.0, chunk=5
    )
    assert [trial.outcome for trial in campaign.trials] == [
        SAME,
        "wrong: traceback KeyError",
        "crash: SIGSEGV",
        "hang: no answer in 2 s",
        "memory",
        "wrong: traceback MemoryError",
        "wrong: silent difference",
        "wrong: unworded ValueError",
        "crash: exit status 3",
        "wrong: traceback SystemExit",
        SAME,
    ]
    assert [trial.number for trial in campaign.trials] == list(range(11))
    with pytest.raises(AssertionError, match="9 of 11 trials went wrong"):
        campaign.check()


def test_our_own_error_that_names_the_folder_is_clean(tmp_path: Path) -> None:
    from graphshard.partition.checked_files import TensorFile

    def use(folder: Path) -> str:
        if not (folder / "a.json").exists() or not (folder / "part-0" / "2.bin").exists():
            TensorFile.open(folder / "nothing")
        return digest({"a": [1, 2.5, "x"]})

    def damage(folder: Path, number: int) -> str:
        (folder / "a.json").unlink()
        return f"{number}: a.json deleted"

    original = make_folder(tmp_path / "original")
    campaign = run_trials(use, original, tmp_path / "scratch", range(2), damage=damage)
    assert campaign.outcomes == {CLEAN: 2}, campaign.trials
    assert PartitionFormatError.__name__ in campaign.trials[0].detail


def test_an_undamaged_folder_that_fails_is_no_campaign(tmp_path: Path) -> None:
    def use(folder: Path) -> None:
        raise ValueError("always")

    with pytest.raises(AssertionError, match="(?s)the undamaged folder: .*always"):
        run_trials(use, make_folder(tmp_path / "original"), tmp_path / "scratch", range(3))
