# SPDX-License-Identifier: Apache-2.0
"""Rows that travel as int8: unbiased, alike whoever sends them, how far off. 1, 2 and 3 ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphshard import comm
from graphshard.comm import ExchangePlan, fetch_halo
from graphshard.comm.collectives import Int8Wire, narrowed, widened, wire_row_bytes
from graphshard.testing import run_ranks

NUM_NODES, WIDTH = 30, 40


def rows_of(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = 10.0 ** torch.randint(-6, 6, (NUM_NODES, 1), generator=generator)
    return (torch.randn(NUM_NODES, WIDTH, generator=generator) * size).to(dtype)


def rounded(rows: Tensor, key: int, numbers: Tensor | None = None) -> Tensor:
    wire = Int8Wire(key)
    return widened(narrowed(rows, wire, numbers), rows, wire)


def test_the_mean_over_keys_is_the_row() -> None:
    """Within five standard deviations, of numbers that are rounded up with a known probability."""
    rows, count = rows_of(), 2000
    scale = rows.abs().amax(1, keepdim=True) / 127
    total, squares = torch.zeros_like(rows).double(), torch.zeros_like(rows).double()
    for key in range(count):
        off = ((rounded(rows, key) - rows) / scale).double()
        assert float(off.abs().max()) <= 1 + 1e-4
        total += off
        squares += off**2
    mean, chance = total / count, (rows.double() / scale.double()) % 1
    spread = (chance * (1 - chance) / count).sqrt()
    assert bool((mean.abs() <= 5 * spread + 3 / count).all())
    # And of their sums: any two places are independent.
    whole = mean.sum() / (squares.sum() / count / count).sqrt()
    assert abs(float(whole)) < 4


def test_rounding_goes_by_number_and_not_by_place() -> None:
    rows = rows_of()
    order = torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(NUM_NODES) + 1000
    assert torch.equal(rounded(rows, 3, numbers)[order], rounded(rows[order], 3, numbers[order]))
    assert not torch.equal(rounded(rows, 3, numbers), rounded(rows, 4, numbers))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_odd_rows(dtype: torch.dtype) -> None:
    rows = rows_of(dtype)
    rows[3] = 0.0
    rows[5, 2], rows[6, 1] = float("nan"), float("-inf")
    found = rounded(rows, 0)
    assert found.dtype == dtype
    assert found.shape == rows.shape
    assert bool((found[3] == 0).all())
    assert bool(found[5:7].isnan().all())
    assert bool(found[7:].isfinite().all())
    assert wire_row_bytes(rows, torch.int8) == WIDTH + 4
    for left_alone in (rows[:, :1].float(), torch.arange(5), rows[:0, :0]):
        assert narrowed(left_alone, Int8Wire(0)) is left_alone
    assert rounded(rows[:0], 0).shape == (0, WIDTH)
    assert rounded(rows.view(NUM_NODES, 5, 8), 0).shape == (NUM_NODES, 5, 8)


def exchange(rank: int, world_size: int) -> dict[int, Tensor]:
    """What each row is at its readers."""
    owned = torch.arange(NUM_NODES)[rank::world_size]
    own = rows_of()[owned].requires_grad_()
    needed = [
        torch.arange(len(range(r, NUM_NODES, world_size)) if r != rank else 0)
        for r in range(world_size)
    ]
    plan = ExchangePlan.build(needed, owned.numel())
    plan.number_rows(owned)
    for _ in range(2):
        with comm.trace() as trace:
            (halo,) = fetch_halo([(plan, own)], Int8Wire(7))
    assert trace.bytes_sent == {"all_to_all": plan.bytes_per_gather(WIDTH + 4)}
    halo.sum().backward()
    torch.testing.assert_close(own.grad, torch.full_like(own, float(world_size - 1)))
    found = [torch.arange(NUM_NODES)[r::world_size] for r in range(world_size) if r != rank]
    return dict(zip(torch.cat(found).tolist(), halo.detach(), strict=True))


def test_rows_are_the_same_whoever_has_them() -> None:
    expected = rounded(rows_of(), 7)
    for num_ranks in (2, 3):
        for found in run_ranks(exchange, num_ranks):
            for node, row in found.items():
                assert torch.equal(row, expected[node])
