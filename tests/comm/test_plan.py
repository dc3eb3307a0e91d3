# SPDX-License-Identifier: Apache-2.0
"""ExchangePlan: fields against the request lists, bad requests. 1 to 5 gloo ranks."""

from __future__ import annotations

import pytest
import torch
from comm_cases import NUM_ROWS, make_exchange

from graphshard.comm import ExchangePlan
from graphshard.testing import run_ranks


def check_fields(rank, world_size):
    case = make_exchange(rank, world_size)
    plan = case.plan
    assert (plan.rank, plan.world_size, plan.num_rows) == (rank, world_size, NUM_ROWS[rank])
    asked = [case.needed[asker][rank] for asker in range(world_size)]
    assert plan.send_splits == [rows.numel() for rows in asked]
    assert torch.equal(plan.send_index, torch.cat(asked))
    assert plan.send_index.dtype == torch.int64
    assert plan.recv_splits == [rows.numel() for rows in case.needed[rank]]
    assert plan.num_halo == sum(plan.recv_splits)
    start = 0
    for peer in range(world_size):
        assert torch.equal(plan.send_rows(peer), asked[peer])
        stop = start + plan.recv_splits[peer]
        assert plan.halo_range(peer) == (start, stop)
        start = stop
    assert plan.bytes_per_gather(12) == 12 * sum(plan.send_splits)
    again = make_exchange(rank, world_size).plan
    assert again.serial == plan.serial + 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_fields(world_size):
    run_ranks(check_fields, world_size)


def build_with(rank, world_size, bad, what):
    needed = [torch.tensor([0, 1], dtype=torch.int32) for _ in range(world_size)]
    needed[rank] = needed[rank][:0]
    num_rows = 2
    if rank == bad:
        other = (rank + 1) % world_size
        if what == "range":
            needed[other] = torch.tensor([0, 1, 2])
        elif what == "negative":
            needed[other] = torch.tensor([-1])
        elif what == "own":
            needed[rank] = torch.tensor([0])
        elif what == "length":
            needed.pop()
        elif what == "dtype":
            needed[other] = torch.tensor([0.5])
        elif what == "shape":
            needed[other] = torch.zeros(1, 1, dtype=torch.int64)
        elif what == "list":
            needed[other] = [0]
        elif what == "rows":
            num_rows = -1
    try:
        ExchangePlan.build(needed, num_rows)
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        (
            "range",
            "ValueError",
            "rank 2: needed[2] of rank 1 must hold row numbers in [0, 2), the rows of rank 2 "
            "(got 2)",
        ),
        (
            "negative",
            "ValueError",
            "rank 2: needed[2] of rank 1 must hold row numbers in [0, 2), the rows of rank 2 "
            "(got -1)",
        ),
        (
            "own",
            "ValueError",
            "rank 1: needed[1] must be empty on rank 1, which owns those rows (got 1 row numbers)",
        ),
        ("length", "ValueError", "rank 1: needed must hold one tensor per rank: 3 (got 2)"),
        ("dtype", "TypeError", "rank 1: needed[2] must hold integers (got torch.float32)"),
        ("shape", "ValueError", "rank 1: needed[2] must have one dimension (got shape (1, 1))"),
        ("list", "TypeError", "rank 1: needed[2] must be a tensor (got list)"),
        ("rows", "ValueError", "rank 1: num_rows must not be negative (got -1)"),
    ],
)
def test_bad_requests_raise_on_every_rank(what, kind, text):
    assert run_ranks(build_with, 3, 1, what) == [(kind, text)] * 3
