# SPDX-License-Identifier: Apache-2.0
"""A trainer is killed, or silent, amid reads and writes: the servers stay whole.

The others name one that was killed. One that is silent for longer than the limit of the servers,
because it is stopped or holds its interpreter, goes on with what it has.

Four trainers work on three hosts. Each row that is written says which row it is and in which round,
so what the servers have afterwards is checked against one array.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from clusters import NUM_ROWS, TOKEN, join, leave
from torch import Tensor

from graphshard.comm import barrier
from graphshard.errors import RankError
from graphshard.servers import DistTensor, TableServer, current_job
from graphshard.testing import RanksFailed, run_ranks

NUM_HOSTS, NUM_TRAINERS, ROUNDS = 3, 4, 1000


@pytest.fixture
def servers() -> Iterator[list[TableServer]]:
    made = [TableServer(host, TOKEN) for host in range(NUM_HOSTS)]
    for server in made:
        server.start()
    yield made
    for server in made:
        server.stop()


def rows_of(number: int, writer: int) -> Tensor:
    """Ids that a trainer writes in a round; those of others are others."""
    order = torch.Generator().manual_seed(number)
    return torch.randperm(NUM_ROWS, generator=order)[writer :: NUM_TRAINERS * 3]


def values_of(ids: Tensor, number: int) -> Tensor:
    return torch.stack([ids, torch.full_like(ids, number + 1), ids * 7 + number], 1)


def work(
    rank: int, world_size: int, addresses: list[str], first: int, victim: int, delay: float
) -> dict[str, Any]:
    """Rounds of writes and reads, until a trainer is killed, or for a few if none is."""
    join(addresses, rank % NUM_HOSTS, attach=rank != 1)
    for host in current_job().cluster.hosts:
        host.connection.announce(f"trainer {rank}")  # type: ignore[attr-defined]
    kept = DistTensor((NUM_ROWS, 3), torch.int64, "kept", persistent=True)
    passing = DistTensor((NUM_ROWS,), torch.int64, "passing")
    found = {"passing": passing.count_nonzero(), "kept": kept[:]}
    barrier()
    passing[rank] = torch.ones(1, dtype=torch.int64)
    barrier()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    done = first
    try:
        for number in range(first, first + (ROUNDS if victim >= 0 else 3)):
            ids = rows_of(number, rank)
            kept[ids] = values_of(ids, number)
            assert torch.equal(kept[ids[:50]], values_of(ids[:50], number))
            barrier()
            done = number + 1
    except RankError as error:
        return found | {"error": str(error), "ranks": list(error.ranks), "done": done}
    final = kept[:]
    barrier()
    del passing
    leave()
    return found | {"final": final, "done": done}


def expected_rows(done: int) -> Tensor:
    """The array after whole rounds."""
    array = torch.zeros(NUM_ROWS, 3, dtype=torch.int64)
    for number in range(done):
        for writer in range(NUM_TRAINERS):
            ids = rows_of(number, writer)
            array[ids] = values_of(ids, number)
    return array


def work_and_fall_silent(
    rank: int, world_size: int, addresses: list[str], how: str, seconds: float
) -> dict[str, Tensor]:
    """Rounds of writes and reads; each trainer in turn is silent in one."""
    join(addresses, rank % NUM_HOSTS, attach=rank != 1, timeout=60 + seconds)
    for host in current_job().cluster.hosts:
        host.connection.announce(f"trainer {rank}")  # type: ignore[attr-defined]
    passing = DistTensor((NUM_ROWS, 3), torch.int64, "passing")
    for number in range(NUM_TRAINERS):
        ids = rows_of(number, rank)
        if rank == number and how == "stopped":
            later = f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
            with subprocess.Popen(["/bin/sh", "-c", later], start_new_session=True):
                passing[ids] = values_of(ids, number)
        elif rank == number:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        passing[ids] = values_of(ids, number)
        assert torch.equal(passing[ids[:50]], values_of(ids[:50], number))
        barrier()
    final = passing[:]
    barrier()
    del passing
    leave()
    return {"final": final}


@pytest.mark.parametrize(
    "seconds",
    [
        2.0,
        pytest.param(75.0, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)]),
    ],
)
@pytest.mark.parametrize(
    "how",  # test_saving.py has the other one in every run
    ["stopped", pytest.param("holding the interpreter", marks=pytest.mark.exhaustive)],
)
def test_a_silent_trainer_costs_nothing(how: str, seconds: float) -> None:
    made = [TableServer(host, TOKEN, silent_seconds=seconds / 2) for host in range(NUM_HOSTS)]
    try:
        for server in made:
            server.start()
        addresses = [server.address for server in made]
        timeout = 120 + 5 * seconds
        for result in run_ranks(
            work_and_fall_silent, NUM_TRAINERS, addresses, how, seconds, timeout=timeout
        ):
            assert torch.equal(result["final"], expected_rows(NUM_TRAINERS))
    finally:
        for server in made:
            server.stop()


LONG = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=LONG)])
def test_a_killed_trainer_costs_the_job_and_nothing_else(
    servers: list[TableServer], kills: int, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = [server.address for server in servers]
    chosen, done = random.Random(kills), 0
    for _ in range(kills):
        victim = chosen.randrange(NUM_TRAINERS)
        with pytest.raises(RanksFailed) as caught:
            run_ranks(
                work, NUM_TRAINERS, addresses, done, victim, chosen.uniform(0.05, 1), timeout=120
            )
        survivors = caught.value.results
        assert survivors.keys() == set(range(NUM_TRAINERS)) - {victim}
        for result in survivors.values():
            assert result["passing"] == 0  # what the job before had is gone
            assert victim in result["ranks"], result["error"]
        whole = max(result["done"] for result in survivors.values())
        # Rounds that have ended are there; of the next one, each row is there or not.
        before, rows = expected_rows(whole), stored(servers)
        changed = (rows != before).any(1).nonzero().view(-1)
        written = torch.cat([rows_of(whole, writer) for writer in range(NUM_TRAINERS)])
        assert torch.isin(changed, written).all()
        assert torch.equal(rows[changed], values_of(changed, whole))
        deadline = time.monotonic() + 30
        while any(server.num_clients() for server in servers):
            assert time.monotonic() < deadline, "servers do not notice that trainers are gone"
            time.sleep(0.02)
        assert f"trainer {victim} is gone" in caplog.text
        done = whole
    for result in run_ranks(work, NUM_TRAINERS, addresses, done, -1, 0.0, timeout=120):
        assert result["passing"] == 0
        assert torch.equal(result["kept"], rows)
        assert result["done"] == done + 3
        assert torch.equal(result["final"], expected_rows(done + 3))


def stored(servers: list[TableServer]) -> Tensor:
    """What the servers have of the persistent tensor."""
    return torch.cat([server.tables.rows("node~_N~kept").clone() for server in servers])
