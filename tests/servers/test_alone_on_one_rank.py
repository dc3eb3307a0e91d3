# SPDX-License-Identifier: Apache-2.0
"""What one trainer does alone, as scripts of DGL do: ``if rank == 0: evaluate()``.

A loader that is local disturbs nobody; what is collective says so in time, names who is missing,
and leaves the group as it was: the program's own collectives, by torch, are right before and after.
Servers in threads, 2 and 3 gloo ranks in a group that ``torch.distributed`` made.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_graph_cases import TOKEN, Servers, join

from graphshard.comm import shutdown_comms
from graphshard.comm.group import group_state
from graphshard.dgl.dataloading import DataLoader, NeighborSampler
from graphshard.errors import RankError
from graphshard.servers import (
    DistEdgeDataLoader,
    DistGraph,
    DistNodeDataLoader,
    DistTensor,
    exit_client,
    load_checkpoint,
    node_split,
    save_checkpoint,
)
from graphshard.testing import run_ranks

WAIT = 0.6


def summed(rank: int) -> float:
    """Of the numbers of ranks from 1 on, by torch alone."""
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return float(total)


def start(rank: int, world_size: int, ip_config: str, store: str) -> DistGraph:
    join(ip_config, 0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    return DistGraph("plain")


def end() -> None:
    dist.barrier()
    exit_client()
    shutdown_comms()


def local_loaders(rank: int, world_size: int, ip_config: str, store: str) -> list[Any]:
    g, found, sampler = start(rank, world_size, ip_config, store), [], NeighborSampler([-1])
    nodes = torch.arange(50)
    if rank == 0:
        for make in (DistNodeDataLoader, DataLoader):
            loader = make(g, nodes, sampler, batch_size=7, collective=False)
            outputs = [seeds for _, seeds, _ in loader]
            found.append([len(seeds) for seeds in outputs])
            assert torch.equal(torch.cat(outputs), nodes)
    found.append(summed(rank))
    if rank == world_size - 1:
        loader = DistEdgeDataLoader(g, nodes, sampler, batch_size=20, collective=False)
        found.append([pairs.num_edges() for _, pairs, _ in loader])
        with pytest.raises(TypeError, match=r"collective must be True or False \(got 'no'\)"):
            DistNodeDataLoader(g, nodes, sampler, collective="no")
    found.append(summed(rank))
    mine = torch.arange(15 * rank, 15 * rank + 15 - rank)  # together, and equally often
    found.append(len(DistNodeDataLoader(g, mine, sampler, batch_size=5)))
    end()
    return found


@pytest.fixture
def servers(parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    exit_client()
    monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
    with ExitStack() as stack:
        yield Servers(stack, parts["plain"][0], 1, tmp_path)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_local_loader_is_made_by_one_rank(servers: Any, tmp_path: Path, num_ranks: int) -> None:
    arguments = (str(servers.ip_config), str(tmp_path / "store"))
    found = run_ranks(local_loaders, num_ranks, *arguments, group=False)
    batches, total = [7] * 7 + [1], num_ranks * (num_ranks + 1) / 2
    expected = [[total, total, 3] for _ in range(num_ranks)]
    expected[0][:0] = [batches, batches]
    expected[-1].insert(-2, [20, 20, 10])
    assert found == expected


ALONE = {
    "DistNodeDataLoader": "collective=False",
    "DistEdgeDataLoader": "collective=False",
    "DataLoader": "collective=False",
    "DistTensor": "all trainers make a DistTensor together",
    "the trainers' shares of rows": "force_even=True",
    "save_checkpoint": "call it on every rank",
    "load_checkpoint": "call it on every rank",
    "barrier": "call it on every rank",
}


def do(what: str, g: DistGraph, folder: str) -> Any:
    nodes, sampler = torch.arange(5), NeighborSampler([2])
    if what == "DistTensor":
        return DistTensor((g.num_nodes(), 2), torch.float32, "alone")
    if what == "save_checkpoint":
        return save_checkpoint(f"{folder}/saved", 1)
    if what == "load_checkpoint":
        return load_checkpoint(f"{folder}/saved")
    if what == "barrier":
        return g.barrier()
    if what == "the trainers' shares of rows":
        mask = torch.ones(g.num_nodes(), dtype=torch.bool)
        return node_split(mask, g.get_partition_book(), force_even=False)
    loaders = {"DataLoader": DataLoader, "DistNodeDataLoader": DistNodeDataLoader}
    return loaders.get(what, DistEdgeDataLoader)(g, nodes, sampler)


def alone(rank: int, world_size: int, ip_config: str, store: str) -> list[Any]:
    g, found = start(rank, world_size, ip_config, store), []
    group_state().timeout = timedelta(seconds=WAIT)
    one = world_size - 1
    for what in ALONE:
        if rank == one:
            try:
                do(what, g, os.path.dirname(store))
            except RankError as error:
                found.append((what, list(error.ranks), str(error)))
        found.append(summed(rank))
    end()
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_one_rank_does_alone_is_told_in_time(
    servers: Any, tmp_path: Path, num_ranks: int
) -> None:
    arguments = (str(servers.ip_config), str(tmp_path / "store"))
    *others, found = run_ranks(alone, num_ranks, *arguments, group=False)
    total = num_ranks * (num_ranks + 1) / 2
    assert others == [[total] * len(ALONE)] * (num_ranks - 1)
    assert found[1::2] == [total] * len(ALONE)
    missing = list(range(num_ranks - 1))
    for (what, ranks, text), (expected, cure) in zip(found[::2], ALONE.items(), strict=True):
        assert what == expected
        assert text.startswith(f"rank {num_ranks - 1}: {what} with rank")
        assert "did not come: " in text
        assert cure in text
        assert ranks in (missing, [])
