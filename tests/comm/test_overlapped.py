# SPDX-License-Identifier: Apache-2.0
"""The whole halo while something else runs, and rows in fewer bits, against plain indexing.

1 to 5 ranks.
"""

from __future__ import annotations

import pytest
import torch
from comm_cases import make_exchange

from graphshard.comm import (
    fetch_halo,
    start_fetch,
    start_fetch_all,
    start_return,
    start_return_all,
    trace,
)
from graphshard.testing import run_ranks

DTYPES = {
    torch.float64: (3,),
    torch.bool: (3,),
    torch.bfloat16: (),
    torch.float32: (2, 2),
    torch.uint8: (5,),
    torch.int64: (0,),
}


def check_fetch(rank, world_size):
    """One tensor, and many of odd sizes, whose runs are not aligned to their dtypes."""
    case = make_exchange(rank, world_size)
    all_values = [case.values(*shape, dtype=dtype) for dtype, shape in DTYPES.items()]
    for chosen in (all_values[:1], all_values, all_values[::-1]):
        requests = [(case.plan, values[rank]) for values in chosen]
        start_fetch_all(requests).wait()  # the first use is checked
        with trace() as counted:
            pending = start_fetch_all(requests)
            rows = pending.wait()
        assert pending.wait() is rows
        for got, values in zip(rows, chosen, strict=True):
            assert got.dtype == values[rank].dtype
            assert torch.equal(got, case.halo_of(rank, values))
        shapes = [(values[rank].element_size(), values[rank].shape[1:]) for values in chosen]
        row_bytes = sum(size * shape.numel() for size, shape in shapes)
        if world_size > 1:
            assert counted.calls == {"all_to_all": 1}
            assert counted.total_bytes == sum(case.plan.send_splits) * row_bytes
    assert start_fetch_all([]).wait() == []
    assert start_return_all([]).wait() == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_whole_halo_comes_in_one_collective(world_size):
    run_ranks(check_fetch, world_size)


def check_return(rank, world_size):
    """What comes home is added like by an index_add over all ranks, also for rows read twice."""
    case = make_exchange(rank, world_size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        halos = [
            torch.arange(case.halo_of(r, case.values(3)).numel()).view(-1, 3).to(dtype) + 100 * r
            for r in range(world_size)
        ]
        pending = start_return_all([(case.plan, halos[rank]), (case.plan, halos[rank] * 2)])
        total = torch.ones(case.num_rows, 3, dtype=dtype)
        expected = torch.ones(case.num_rows, 3, dtype=torch.float64)
        for reader in range(world_size):
            start = 0
            for owner in range(world_size):
                rows = case.needed[reader][owner]
                if owner == rank and rank != reader:
                    part = halos[reader][start : start + rows.numel()].double()
                    expected.index_add_(0, rows, part)
                start += rows.numel() if owner != reader else 0
        arrived, double = pending.wait()
        assert torch.equal(double, arrived * 2)
        case.plan.add_returned(total, arrived)
        close = {torch.float64: 0.0, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
        torch.testing.assert_close(total.double(), expected, rtol=close, atol=0.0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_what_comes_home_is_added(world_size):
    run_ranks(check_return, world_size)


def check_in_flight(rank, world_size):
    """Two exchanges at once, with others between their start and their end."""
    case = make_exchange(rank, world_size)
    first, second = case.values(3), case.values(2, seed=2)
    for _ in range(3):
        one = start_fetch_all([(case.plan, first[rank])])
        two = start_fetch_all([(case.plan, second[rank])])
        (again,) = fetch_halo([(case.plan, first[rank])])
        (rows,) = two.wait()
        assert torch.equal(rows, case.halo_of(rank, second))
        (rows,) = one.wait()
        assert torch.equal(rows, case.halo_of(rank, first))
        assert torch.equal(rows, again)


def test_several_in_flight():
    run_ranks(check_in_flight, 3)


def check_wire(rank, world_size, wire):
    """Rows are rounded once, to what the wire holds; what is narrow or no float is not touched."""
    case = make_exchange(rank, world_size)
    wide, ints, low = (
        case.values(4),
        case.values(2, dtype=torch.int32),
        case.values(3, dtype=torch.float16),
    )
    requests = [(case.plan, values[rank]) for values in (wide, ints, low)]
    expected = [case.halo_of(rank, values) for values in (wide, ints, low)]
    expected[0] = expected[0].to(wire).double()
    with trace() as counted:
        for rows in (start_fetch_all(requests, wire).wait(), fetch_halo(requests, wire)):
            for got, wanted in zip(rows, expected, strict=True):
                assert got.dtype == wanted.dtype
                assert torch.equal(got, wanted)
    row_bytes = 4 * 2 + 2 * 4 + 3 * 2
    assert counted.bytes_sent["all_to_all"] == 2 * sum(case.plan.send_splits) * row_bytes
    for step in range(1, world_size):
        source, target = (rank - step) % world_size, (rank + step) % world_size
        rows = start_fetch(case.plan, step, [t for _, t in requests], wire).wait()
        wanted = case.needed[rank][source]
        assert torch.equal(rows[0], wide[source][wanted].to(wire).double())
        assert torch.equal(rows[1], ints[source][wanted])
        (back,) = start_return(case.plan, step, [wide[source][wanted]], wire).wait()
        assert back.dtype == torch.float64
        assert torch.equal(back, wide[rank][case.needed[target][rank]].to(wire).double())


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_rows_in_fewer_bits(wire):
    run_ranks(check_wire, 3, wire)


def check_wire_gradient(rank, world_size):
    """Gradients are rounded on the way, and summed in the dtype of the rows."""
    case = make_exchange(rank, world_size)
    x = case.values(3)[rank].requires_grad_()
    (rows,) = fetch_halo([(case.plan, x)], torch.bfloat16)
    weights = [
        torch.linspace(0.1, 7.0, case.halo_of(r, case.values(3)).numel(), dtype=torch.float64)
        for r in range(world_size)
    ]
    (rows * weights[rank].view_as(rows)).sum().backward()
    rounded = [w.to(torch.bfloat16).double().view(-1, 3) for w in weights]
    expected = torch.zeros(case.num_rows, 3, dtype=torch.float64)
    for reader in range(world_size):
        start = 0
        for owner in range(world_size):
            count = case.needed[reader][owner].numel()
            if owner == rank:
                part = rounded[reader][start : start + count]
                expected.index_add_(0, case.needed[reader][owner], part)
            start += count
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=0.0)


def test_gradients_in_fewer_bits():
    run_ranks(check_wire_gradient, 3)


def check_disagreement(rank, world_size):
    case = make_exchange(rank, world_size)
    x = torch.ones(case.num_rows, 2)
    try:
        fetch_halo([(case.plan, x)], torch.bfloat16 if rank == 1 else None)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_must_agree_on_the_wire():
    for text in run_ranks(check_disagreement, 2):
        assert "rank 0 has 'fetch_halo: plan 0 float32[rows, 2]'" in text
        assert "rank 1 has 'fetch_halo: plan 0 float32[rows, 2], as bfloat16'" in text
