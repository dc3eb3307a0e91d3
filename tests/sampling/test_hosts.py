# SPDX-License-Identifier: Apache-2.0
"""Files that ranks share: nothing stays of one whose owner is killed. One process, and 2 ranks."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from sharded_cases import left_behind

from graphshard.comm import _shared_memory
from graphshard.comm._shared_memory import Hosts, named_file, remove_abandoned
from graphshard.comm.collectives import wait_for_all
from graphshard.comm.group import group_state
from graphshard.comm.transport import SharedArray, share_arrays
from graphshard.testing import RanksFailed, run_ranks
from large_pages import LARGE_PAGE, bytes_in_large_pages, can_move_shared_memory

ABANDONED = "graphshard-" + "0123456789abcdef" * 2


def test_a_file_has_its_name_as_long_as_its_owner_wants(tmp_path: Path) -> None:
    with named_file(tmp_path) as (path, descriptor):
        assert os.listdir(tmp_path) == [path.name]
        assert len(path.name) == len(ABANDONED)
        remove_abandoned(tmp_path)
        assert path.exists()
        path.unlink()  # may go early
        assert os.write(descriptor, b"x") == 1
    assert os.listdir(tmp_path) == []


def test_only_what_is_certainly_abandoned_is_removed(tmp_path: Path) -> None:
    (tmp_path / ABANDONED).touch()
    kept = [f"{ABANDONED}0", "graphshard-notes", ABANDONED[:-1] + "g"]
    for name in kept:
        (tmp_path / name).touch()
    link = ABANDONED[:-1] + "0"
    (tmp_path / link).symlink_to(tmp_path / kept[0])
    pipe = ABANDONED[:-1] + "1"
    os.mkfifo(tmp_path / pipe)
    remove_abandoned(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, link, pipe])
    remove_abandoned(tmp_path / "missing")


def test_files_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ABANDONED).touch()
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    remove_abandoned(tmp_path)
    assert os.listdir(tmp_path) == [ABANDONED]


def test_a_file_that_is_removed_before_its_lock_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that looks for abandoned files comes between creation and lock."""
    plain = fcntl.flock
    calls = []

    def lock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / os.listdir(tmp_path)[0]).unlink()
        elif len(calls) == 2:
            raise BlockingIOError
        plain(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    with named_file(tmp_path) as (path, _):
        assert os.listdir(tmp_path) == [path.name]
    assert len(calls) == 3


def killed(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def share_and_die(rank: int, world_size: int, where: str, folder: str) -> None:
    """Rank 0 is killed while a file of its has a name: between making and opening, or looking."""
    if rank == 0 and where == "find":
        _shared_memory.gather_texts = killed
    state = group_state()
    own = torch.ones(1 << 20)
    array = SharedArray(own, [r << 20 for r in range(world_size + 1)])
    hosts = Hosts.find(state, folder)
    if rank == 0:
        _shared_memory.gather_texts = killed
    share_arrays(state, hosts, [array], whole=True, directory=folder)


def find(rank: int, world_size: int, folder: str) -> list[str]:
    Hosts.find(group_state(), folder)
    return os.listdir(folder)


@pytest.mark.parametrize("where", ["share", "find"])
def test_a_rank_that_is_killed_leaves_no_memory_and_soon_no_name(
    tmp_path: Path, where: str
) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(share_and_die, 2, where, str(tmp_path))
    left = list(tmp_path.iterdir())
    assert len(left) <= 1  # in the second case the other rank may have removed it already
    assert [file.stat().st_blocks for file in left] == [0] * len(left)
    run_ranks(find, 2, str(tmp_path))
    assert left_behind(tmp_path) == []


def share_large(rank: int, world_size: int) -> tuple[int, bool]:
    """Arrays with slices that begin inside of large pages."""
    state = group_state()
    counts = [3 * LARGE_PAGE + 100, 5 * LARGE_PAGE]
    starts = [0, counts[0], sum(counts)]
    own = torch.arange(starts[rank], starts[rank + 1]).remainder(251).to(torch.uint8)
    arrays = [SharedArray(own, starts), SharedArray(own, starts)]
    found = share_arrays(state, Hosts.find(state), arrays, whole=True)
    expected = torch.arange(starts[-1]).remainder(251).to(torch.uint8)
    same = all(torch.equal(array, expected) for array in found)
    wait_for_all(state, "reading")
    return bytes_in_large_pages(found[0].data_ptr()), same


def test_shared_arrays_are_in_large_pages() -> None:
    if not can_move_shared_memory():
        pytest.skip("this system makes no large pages of shared memory")
    for num_bytes, same in run_ranks(share_large, 2):
        assert same
        # Of 16 that are filled, all but those with the ends of slices.
        assert 12 * LARGE_PAGE <= num_bytes <= 16 * LARGE_PAGE
