# SPDX-License-Identifier: Apache-2.0
"""What trainers drop or delete is mapped no more, by any of them; the kernel says what is mapped.

Trainers are processes, servers run in threads of the test.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import NUM_ROWS, POLICY, TOKEN, join, leave

from graphshard.comm import barrier
from graphshard.errors import RankError
from graphshard.servers import (
    DistEmbedding,
    DistTensor,
    SparseAdagrad,
    SparseAdam,
    SparseSGD,
    TableServer,
    current_job,
)
from graphshard.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="the system has no /proc with what is mapped"
)

ROUNDS = 3


def mapped() -> list[str]:
    """Tables of servers that this process has mapped, unlinked ones included."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "/graphshard-folder-" in line]


def unnamed(rank: int) -> None:
    DistTensor((NUM_ROWS, 20), torch.float32)[rank] = torch.ones(1, 20)


def filled_by_function(rank: int) -> None:
    tensor = DistTensor((NUM_ROWS, 3), torch.bfloat16, init_func=lambda s, d: torch.ones(s).to(d))
    assert tensor[:].sum() == NUM_ROWS * 3


def combined_masks(rank: int) -> None:
    mask = DistTensor((NUM_ROWS,), torch.bool, "mask")
    mask[rank] = torch.ones(1, dtype=torch.bool)
    assert (mask | mask)[rank] == (mask & mask | mask)[rank]


def trained(kind: Callable[..., Any]) -> Callable[[int], None]:
    def train(rank: int) -> None:
        embedding = DistEmbedding(NUM_ROWS, 4, "rows", lambda s, d: torch.ones(s, dtype=d))
        optimizer = kind([embedding], 0.1)
        embedding(torch.arange(rank, NUM_ROWS, 7)).sum().backward()
        optimizer.step()

    return train


def deleted(rank: int) -> None:
    """By all ranks; one object of it lives on, and another is made under its name."""
    tensor, other = (DistTensor((NUM_ROWS, 9), torch.int64, "x", persistent=True) for _ in "ab")
    tensor[rank] = torch.ones(1, 9, dtype=torch.int64)
    tensor.delete()
    with pytest.raises(KeyError, match="no tensor named 'node~_N~x'"):
        other[rank]
    with pytest.raises(KeyError, match="no tensor named 'node~_N~x'"):
        other.local_partition  # noqa: B018
    new = DistTensor((NUM_ROWS, 2), torch.float64, "x")
    del tensor, other
    gc.collect()
    current_job().cluster.settle()
    barrier()
    assert new.count_nonzero() == 0
    barrier()
    new[rank] = torch.ones(1, 2, dtype=torch.float64)


def refused(rank: int) -> None:
    tensor = DistTensor((NUM_ROWS, 9), torch.int64, "x")
    with pytest.raises((ValueError, RankError), match="pass attach=True"):
        DistTensor((NUM_ROWS, 9), torch.int64, "x", attach=False)
    with pytest.raises((ValueError, RankError), match="exists with shape"):
        DistTensor((NUM_ROWS, 8), torch.int64, "x")
    tensor[rank] = torch.ones(1, 9, dtype=torch.int64)


def read_in_place(rank: int) -> None:
    """Rows that the caller still has stay; a tensor that is looked up by its name is no reason."""
    tensor = DistTensor((NUM_ROWS,), torch.float32, "x")
    rows = tensor.local_partition
    rows[:] = 1
    found = DistTensor.existing(current_job(), tensor.name)
    barrier()
    assert found.count_nonzero() == NUM_ROWS
    del tensor
    gc.collect()
    assert rows.sum() == rows.numel()


KINDS: dict[str, Callable[[int], None]] = {
    "unnamed": unnamed,
    "filled by a function": filled_by_function,
    "combined masks": combined_masks,
    "SparseSGD": trained(SparseSGD),
    "SparseAdagrad": trained(SparseAdagrad),
    "SparseAdam": trained(SparseAdam),
    "deleted": deleted,
    "refused": refused,
    "read in place": read_in_place,
}


def make_and_drop(rank: int, world_size: int, addresses: list[str]) -> dict[str, list[int]]:
    """How many tables are mapped after each round, by kind."""
    gc.collect()  # what an earlier test left in this process
    gc.freeze()  # what is here already need not be walked over in each round
    job = join(addresses, rank % len(addresses))
    stays = DistTensor((NUM_ROWS,), torch.float32, "stays")
    stays[rank] = torch.ones(1)
    counts: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for kind, numbers in counts.items():
        for _ in range(ROUNDS):
            KINDS[kind](rank)
            gc.collect()
            barrier()
            job.cluster.settle()
            barrier()
            numbers.append(len(mapped()))
        job.cluster.refresh()
        assert job.cluster.names() == [stays.name] == job.cluster.held(), kind
        assert stays[rank] == 1, kind
    leave()
    gc.unfreeze()
    return counts


@pytest.mark.parametrize(
    ("num_hosts", "world_size"),
    [(1, 1), pytest.param(1, 2, marks=pytest.mark.exhaustive), (2, 3)],
)
def test_what_is_dropped_is_mapped_no_more(
    num_hosts: int, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "graphshard.server")  # records keep errors, these the rows
    servers = [TableServer(host, TOKEN) for host in range(num_hosts)]
    try:
        for server in servers:
            server.start()
        before = set(mapped())  # of servers of earlier tests, which may be freed at any time
        addresses = [server.address for server in servers]
        for counts in run_ranks(make_and_drop, world_size, addresses):
            assert counts == {kind: [1] * ROUNDS for kind in KINDS}  # what stays
        assert len(set(mapped()) - before) == num_hosts
        for server in servers:
            assert [info.name for info in server.tables.infos()] == [f"{POLICY}~stays"]
    finally:
        for server in servers:
            server.stop()
