# SPDX-License-Identifier: Apache-2.0
"""start_fetch and start_return, shard by shard, against plain indexing. 1 to 5 ranks."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from comm_cases import make_exchange

from graphshard.comm import start_fetch, start_return, trace
from graphshard.testing import run_ranks


def check_steps(rank, world_size):
    case = make_exchange(rank, world_size)
    plan = case.plan
    features = case.values(3)
    labels = case.values(dtype=torch.int32)
    flags = case.values(2, 1, dtype=torch.bool)
    mine = [features[rank], labels[rank], flags[rank]]
    row_bytes = 3 * 8 + 4 + 2
    start_fetch(plan, 1, mine).wait() if world_size > 1 else None  # the first use is checked
    with trace() as counted:
        for step in range(1, world_size):
            source, target = (rank - step) % world_size, (rank + step) % world_size
            pending = start_fetch(plan, step, mine)
            rows = pending.wait()
            assert pending.wait() is rows
            wanted = case.needed[rank][source]
            for got, values in zip(rows, (features, labels, flags), strict=True):
                assert got.dtype == values[source].dtype
                assert torch.equal(got, values[source][wanted])
            back = start_return(plan, step, rows).wait() if step > 1 else None
            if back is not None:
                for got, own in zip(back, mine, strict=True):
                    assert torch.equal(got, own[case.needed[target][rank]])
    sent = sum(plan.send_splits) * row_bytes
    returned = sum(plan.recv_splits[(rank - step) % world_size] for step in range(2, world_size))
    # Only messages with rows in them are sent; the first start_return is checked by the ranks.
    assert counted.bytes_sent.get("send", 0) == sent + returned * row_bytes
    messages = sum(n > 0 for n in plan.send_splits) + sum(
        plan.recv_splits[(rank - step) % world_size] > 0 for step in range(2, world_size)
    )
    assert counted.calls.get("send", 0) == messages
    assert counted.calls.get("agree", 0) == (world_size > 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_step_brings_one_shard(world_size):
    run_ranks(check_steps, world_size)


def check_prefetch(rank, world_size):
    """All steps in flight at once, and a return between them, are not taken for each other."""
    case = make_exchange(rank, world_size)
    features = case.values(3)
    steps = range(1, world_size)
    for _ in range(3):
        pending = {step: start_fetch(case.plan, step, [features[rank]]) for step in steps}
        back = {}
        for step in steps:
            (rows,) = pending[step].wait()
            source = (rank - step) % world_size
            assert torch.equal(rows, features[source][case.needed[rank][source]])
            back[step] = start_return(case.plan, step, [rows * step])
        for step in reversed(steps):
            (grads,) = back[step].wait()
            reader = (rank + step) % world_size
            assert torch.equal(grads, features[rank][case.needed[reader][rank]] * step)


def test_several_in_flight():
    run_ranks(check_prefetch, 3)
    run_ranks(check_prefetch, 5)


def check_own_messages(rank, world_size):
    """Each tensor lands in memory of its own, whatever its dtype; what was sent is let go."""
    case = make_exchange(rank, world_size)
    plan = case.plan
    shapes = {
        torch.bool: (3,),
        torch.bfloat16: (2, 2),
        torch.float16: (),
        torch.int16: (1,),
        torch.uint8: (5,),
        torch.float64: (0,),  # no bytes: no message, and nothing missing
        torch.float32: (2, 1, 3),
    }
    values = [case.values(*shape, dtype=dtype) for dtype, shape in shapes.items()]
    mine = [rows[rank] for rows in values]
    alive = []
    start = dist.batch_isend_irecv

    def recorded(messages):
        alive.extend(weakref.ref(m.tensor) for m in messages if m.op is dist.isend)
        return start(messages)

    for step in [*range(1, world_size), 1]:
        source = (rank - step) % world_size
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", recorded)
            pending = start_fetch(plan, step, mine)
        found = pending.wait()
        for rows, got in zip(values, found, strict=True):
            assert got.dtype == rows[source].dtype
            assert torch.equal(got, rows[source][case.needed[rank][source]])
            assert got.is_contiguous()
            assert got.untyped_storage().nbytes() == got.numel() * got.element_size()
    num_messages = sum(t.shape[1:].numel() > 0 for t in mine)
    assert len(alive) == num_messages * sum(
        plan.send_splits[(rank + step) % world_size] > 0 for step in [*range(1, world_size), 1]
    )
    assert all(sent() is None for sent in alive)


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_tensor_travels_on_its_own(world_size):
    run_ranks(check_own_messages, world_size)


def check_columns(rank, world_size):
    """Views of some columns, as full batch sends them."""
    case = make_exchange(rank, world_size)
    features = case.values(4, 6)
    for step in range(1, world_size):
        source, target = (rank - step) % world_size, (rank + step) % world_size
        (rows,) = start_fetch(case.plan, step, [features[rank][:, 1:3]]).wait()
        assert torch.equal(rows, features[source][case.needed[rank][source]][:, 1:3])
        grads = features[source][case.needed[rank][source]][:, :, ::2]
        (back,) = start_return(case.plan, step, [grads]).wait()
        assert torch.equal(back, features[rank][case.needed[target][rank]][:, :, ::2])


def test_columns_of_wide_rows():
    run_ranks(check_columns, 3)


def check_rules(rank, world_size):
    case = make_exchange(rank, world_size)
    x = torch.ones(case.num_rows, 2)
    errors = []
    for call in (
        lambda: start_fetch(case.plan, 0, [x]),
        lambda: start_return(case.plan, world_size, [x]),
        lambda: start_fetch(case.plan, 1, [x[:, 0], x[1:]] if rank == 0 else [x[:, 0], x]),
        lambda: start_fetch(case.plan, 1, [x, x] if rank == 2 else [x]),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    assert start_fetch(case.plan, 1, []).wait() == []
    assert start_return(case.plan, 1, []).wait() == []
    return errors


def test_rules():
    for low, high, rows, number in run_ranks(check_rules, 3):
        assert low == "step must be in [1, 3), one for each other rank (got 0)"
        assert high == "step must be in [1, 3), one for each other rank (got 3)"
        assert rows == (
            "rank 0: start_fetch: the tensor of request 1 must have 4 rows (got shape (3, 2))"
        )
        assert number.startswith(
            "what start_fetch exchanges must be the same on all ranks, but rank 2 differs"
        )
