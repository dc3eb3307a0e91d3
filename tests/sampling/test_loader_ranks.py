# SPDX-License-Identifier: Apache-2.0
"""Loaders under data-parallel training: how ranks share indices. Uses 2 and 3 gloo ranks."""

from __future__ import annotations

import pytest
import torch
from loader_cases import plain
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphshard
from graphshard.dgl.dataloading import DataLoader, EdgeDataLoader, NeighborSampler
from graphshard.dgl.dataloading.negative_sampler import Uniform
from graphshard.testing import run_ranks


def seeds_of_rank(rank: int, world_size: int, num_seeds: int, drop_last: bool) -> list[list[int]]:
    torch.manual_seed(rank)  # the order must not depend on it
    loader = DataLoader(
        plain(),
        torch.arange(num_seeds),
        NeighborSampler([2]),
        use_ddp=True,
        batch_size=2,
        shuffle=True,
        drop_last=drop_last,
    )
    batches = [outputs.tolist() for _ in range(2) for _, outputs, _ in loader]
    assert len(batches) == 2 * len(loader)
    return batches


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_seeds", [20, 17, 4, 1])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_seeds_are_shared(num_ranks: int, num_seeds: int, drop_last: bool) -> None:
    per_rank = run_ranks(seeds_of_rank, num_ranks, num_seeds, drop_last)
    assert len({len(batches) for batches in per_rank}) == 1
    steps = len(per_rank[0]) // 2
    whole = num_seeds // (2 * num_ranks)
    assert steps == (whole if drop_last else -(-num_seeds // (2 * num_ranks)))
    epochs = []
    for epoch in range(2):
        taken = [
            seed
            for batches in per_rank
            for batch in batches[epoch * steps : (epoch + 1) * steps]
            for seed in batch
        ]
        assert len(taken) == len(set(taken)) == (whole * 2 * num_ranks if drop_last else num_seeds)
        epochs.append(taken)
    assert num_seeds < 4 or epochs[0] != epochs[1] or not steps


def gradient_of_rank(rank: int, world_size: int) -> list[torch.Tensor]:
    """Gradients of one batch under DistributedDataParallel."""
    torch.manual_seed(0)
    g = plain()
    model = nn.Linear(3, 2).double()
    parallel = DistributedDataParallel(model) if world_size > 1 else model
    loader = EdgeDataLoader(
        g,
        torch.arange(12),
        NeighborSampler([2]),
        use_ddp=True,
        ddp_seed=4,
        negative_sampler=Uniform(1),
        batch_size=12 // world_size,
        shuffle=True,
    )
    ((_, pairs, negative, blocks),) = loader
    total = 0.0
    with blocks[0].local_scope():
        blocks[0].srcdata["h"] = parallel(blocks[0].srcdata["feat"].double())
        mean = graphshard.function.mean("m", "h")
        blocks[0].update_all(graphshard.function.copy_u("h", "m"), mean)
        h = blocks[0].dstdata["h"]
    for graph, sign in ((pairs, 1.0), (negative, -1.0)):
        source, destination = graph.edges()
        total = total + sign * (h[source] * h[destination]).sum(1)
    total.mean().backward()
    return [p.grad for p in model.parameters()]


def test_gradients_are_those_of_one_process() -> None:
    """What is drawn for a node and for an edge does not depend on the rank."""
    (alone,) = run_ranks(gradient_of_rank, 1)
    for num_ranks in (2, 3):
        for of_rank in run_ranks(gradient_of_rank, num_ranks):
            for found, expected in zip(of_rank, alone, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
