# SPDX-License-Identifier: Apache-2.0
"""SeedOrder: equal steps, nothing twice, the same order again. No process group."""

from __future__ import annotations

import pytest
import torch

from graphshard.sampling._dist_loader import SeedOrder


def orders(sizes, batch_size, *, shuffle=True, drop_last=False, seed=1):
    """The order of each rank; rank r has the ids from 1000 r."""
    return [
        SeedOrder(
            {"_N": torch.arange(n) + 1000 * rank},
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            sizes=sizes,
        )
        for rank, n in enumerate(sizes)
    ]


def epoch_of(order, epoch):
    places = order.of_epoch(epoch)
    return [order.batch(places, step) for step in range(order.num_steps)]


def flat(batches, ntype="_N"):
    return torch.cat([batch[ntype] for batch in batches]).tolist()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("sizes", "steps"),
    [([10], 3), ([8], 2), ([0], 0), ([0, 0], 0), ([0, 1], 1), ([9, 4, 0], 3), ([4, 4], 1)],
)
def test_every_seed_is_taken_once_and_all_ranks_take_as_many_steps(sizes, steps, shuffle):
    ranks = orders(sizes, 4, shuffle=shuffle)
    for rank, order in enumerate(ranks):
        assert order.num_steps == steps
        batches = epoch_of(order, 0)
        own = list(range(1000 * rank, 1000 * rank + sizes[rank]))
        if steps:
            assert sorted(flat(batches)) == own
            assert shuffle or flat(batches) == own
        lengths = [batch["_N"].numel() for batch in batches]
        assert lengths == sorted(lengths, reverse=True)
    for step in range(steps):
        total = sum(epoch_of(order, 0)[step]["_N"].numel() for order in ranks)
        assert {order.num_global(step) for order in ranks} == {total}


@pytest.mark.parametrize(("sizes", "steps"), [([10], 2), ([3, 2], 0), ([11, 4, 3], 2)])
def test_drop_last(sizes, steps):
    for rank, order in enumerate(orders(sizes, 4, drop_last=True)):
        assert order.num_steps == steps
        lengths = [batch["_N"].numel() for batch in epoch_of(order, 3)]
        assert lengths == [4] * (sizes[rank] // 4) + [0] * (steps - sizes[rank] // 4)
        assert [order.num_global(s) for s in range(steps)] == [
            4 * sum(n // 4 > s for n in sizes) for s in range(steps)
        ]


def test_the_order_depends_on_seed_epoch_and_rank():
    seen = [
        tuple(x % 1000 for x in flat(epoch_of(order, epoch)))
        for seed in (1, 2)
        for order in orders([20, 20], 7, seed=seed)
        for epoch in (0, 1)
    ]
    assert len(set(seen)) == 8
    again = [tuple(flat(epoch_of(order, 1))) for order in orders([20, 20], 7)]
    assert again == [tuple(flat(epoch_of(order, 1))) for order in orders([20, 20], 7)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_types_are_cut_together(shuffle):
    seeds = {
        "a": torch.arange(5, dtype=torch.int32),
        "b": torch.arange(50, 57),
        "c": torch.arange(0),
    }
    order = SeedOrder(seeds, 4, shuffle=shuffle, drop_last=False, seed=0, rank=0, sizes=[12])
    batches = epoch_of(order, 0)
    assert [sum(ids.numel() for ids in batch.values()) for batch in batches] == [4, 4, 4]
    for ntype, ids in seeds.items():
        assert sorted(flat(batches, ntype)) == ids.tolist()
        assert all(batch[ntype].dtype == ids.dtype for batch in batches)
    if not shuffle:
        assert batches[1]["a"].tolist() == [4]
        assert batches[1]["b"].tolist() == [50, 51, 52]
