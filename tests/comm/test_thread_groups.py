# SPDX-License-Identifier: Apache-2.0
"""ThreadGroups: groups for threads, beside the main one. 1 to 3 gloo ranks."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphshard.comm import ThreadGroups, all_reduce, initialize_comms, shutdown_comms
from graphshard.comm.collectives import Cancelled, all_to_all
from graphshard.comm.group import group_state
from graphshard.testing import run_ranks


def exchange(groups: ThreadGroups, purpose: str, rank: int, size: int) -> list[int]:
    state = group_state(groups.group(purpose))
    ones = [1] * size
    return all_to_all(state, torch.arange(size) + 10 * rank, ones, ones).tolist()


def in_threads(rank, world_size):
    """Two threads and the main one communicate at the same time, each in an order of its own."""
    groups = ThreadGroups(["a", "b"])
    found: dict[str, Any] = {"before": groups.num_operations}

    def work(purpose: str, count: int) -> None:
        found[purpose] = [exchange(groups, purpose, rank, world_size) for _ in range(count)]

    threads = [threading.Thread(target=work, args=a) for a in (("a", 30), ("b", 20))]
    for thread in threads:
        thread.start()
    total = [int(all_reduce(torch.ones(1, dtype=torch.int64))) for _ in range(25)]
    for thread in threads:
        thread.join()
    names = [group_state(groups.group(p)).name for p in ("a", "b")]
    found |= {"total": total, "after": groups.num_operations, "names": names}
    groups.close()
    return found


def test_threads_communicate_side_by_side():
    results = run_ranks(in_threads, 3)
    for rank, found in enumerate(results):
        expected = [rank, 10 + rank, 20 + rank]
        assert (found["before"], found["after"]) == ((0, 0), (30, 20))
        assert found["a"] == [expected] * 30
        assert found["b"] == [expected] * 20
        assert found["total"] == [3] * 25
        assert found["names"] == results[0]["names"]
        assert found["names"][0].startswith("thread group ")
        assert found["names"][0].endswith(" for a")


def cancelled(rank, world_size):
    groups = ThreadGroups(["a"])
    exchange(groups, "a", rank, world_size)
    found: dict[str, Any] = {"fine": not groups.are_broken}
    if rank == 0:
        timer = threading.Timer(0.5, groups.cancel)
        timer.start()
        start = time.monotonic()
        with pytest.raises(Cancelled):
            exchange(groups, "a", rank, world_size)
        found["seconds"] = time.monotonic() - start
        timer.join()
    found["broken"] = groups.are_broken
    all_reduce(torch.ones(1))  # the main group goes on
    groups.close()
    again = ThreadGroups(["a"])
    found["again"] = exchange(again, "a", rank, world_size)
    again.close()
    return found


def test_a_wait_can_be_cancelled():
    for rank, found in enumerate(run_ranks(cancelled, 2)):
        assert found["fine"]
        assert found["broken"] == (rank == 0)
        assert found["again"] == [rank, 10 + rank]
        assert found.get("seconds", 0) < 3


def over_some_ranks(rank, world_size):
    members = [0, 2]
    group = dist.new_group(members)
    if rank not in members:
        return None
    groups = ThreadGroups(["a"], group)
    found = exchange(groups, "a", members.index(rank), 2)
    groups.close()
    again = ThreadGroups(["a"], group)
    return [found, exchange(again, "a", members.index(rank), 2)]


def test_over_some_of_the_ranks():
    zero, one, two = run_ranks(over_some_ranks, 3)
    assert zero == [[0, 10]] * 2
    assert one is None
    assert two == [[1, 11]] * 2


def by_itself(rank, world_size):
    groups = ThreadGroups(["a"])
    return [groups.group("a") is None, list(groups.num_operations), exchange(groups, "a", 0, 1)]


def test_a_process_on_its_own_needs_none():
    assert run_ranks(by_itself, 1) == [[True, [], [0]]]
    groups = ThreadGroups(["a"])
    assert groups.group("a") is None
    groups.close()


def descriptors(rank, world_size):
    counts = []
    for _ in range(4):
        groups = ThreadGroups(["a", "b"])
        exchange(groups, "a", rank, world_size)
        groups.close()
        del groups
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc lists")
def test_groups_are_given_back():
    first = run_ranks(descriptors, 2)
    second = run_ranks(descriptors, 2)  # the main group of the first call is gone too
    for rank in range(2):
        # What an earlier job of the process has may go meanwhile; what is kept four times, stays.
        for counts in (first[rank], second[rank], [first[rank][0], second[rank][-1]]):
            assert all(a >= b for a, b in zip(counts[0], counts[-1], strict=True)), (first, second)


def outlive(rank, world_size, path):
    """Groups that are closed when the default group has gone, and another one is there."""
    totals = []
    for start in range(2):
        store = dist.FileStore(f"{path}{start}", world_size)
        initialize_comms(rank, world_size, store=store, timeout=20)
        if start == 0:
            groups = ThreadGroups(["a"])
            exchange(groups, "a", rank, world_size)
        else:
            groups.close()
        totals.append(int(all_reduce(torch.ones(1))))
        shutdown_comms()
    return totals


def test_groups_that_outlive_their_group_leave_the_next_one_alone(tmp_path):
    assert run_ranks(outlive, 2, str(tmp_path / "store"), group=False) == [[2, 2]] * 2
