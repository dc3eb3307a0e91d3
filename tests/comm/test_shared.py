# SPDX-License-Identifier: Apache-2.0
"""Exchanges through shared memory: as through gloo, also when ranks are late, leave or die.

1 to 3 ranks. The cases of other files, which use few bytes, run here with a threshold of one.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from comm_cases import make_exchange

from graphshard._base.kernels import extension_available
from graphshard.comm import (
    ExchangePlan,
    all_reduce,
    barrier,
    fetch_halo,
    return_halo,
    shutdown_comms,
    start_fetch_all,
    start_return_all,
    trace,
    transport,
)
from graphshard.comm.group import group_state
from graphshard.errors import RankError
from graphshard.testing import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(
    not extension_available() or not hasattr(os, "memfd_create"),
    reason="needs the extension, and Linux",
)


def with_any_size(rank, world_size, module, function, *args):
    """A case with all its exchanges of plans in shared memory."""
    before, transport.LARGE_BYTES = transport.LARGE_BYTES, 1
    state = group_state()
    try:
        found = getattr(importlib.import_module(module), function)(rank, world_size, *args)
        assert state.tried_shared
        assert state.closed or state.shared is not None
        return found
    finally:
        transport.LARGE_BYTES = before


CASES = [
    ("test_exchange", "check_values", (2, 3, 5)),
    ("test_exchange", "check_layouts", (3,)),
    ("test_exchange", "check_several_plans", (3,)),
    ("test_exchange", "check_gradients", (2, 5)),
    ("test_exchange", "check_double_backward", (3,)),
    ("test_exchange", "check_return", (2, 3)),
    ("test_overlapped", "check_fetch", (2, 3, 5)),
    ("test_overlapped", "check_return", (3,)),
]


@pytest.mark.parametrize(
    ("module", "function", "world_size"),
    [(module, function, size) for module, function, sizes in CASES for size in sizes],
)
def test_the_cases_of_other_files(module, function, world_size):
    run_ranks(with_any_size, world_size, module, function)


def run_shared(function, world_size, *args, **options):
    return run_ranks(with_any_size, world_size, __name__, function.__name__, *args, **options)


def check_every_way(rank, world_size):
    """Every function, wide and narrowed rows, one and several tensors; counted as ever."""
    case = make_exchange(rank, world_size)
    plan, wide, whole = case.plan, case.values(3), case.values(2, dtype=torch.int32)
    for wire in (None, torch.bfloat16):
        expected = case.halo_of(rank, wide)
        expected = expected if wire is None else expected.to(wire).double()
        for tensors in ([wide[rank]], [wide[rank], whole[rank]]):
            requests = [(plan, tensor) for tensor in tensors]
            start_fetch_all(requests, wire).wait()  # the first use is checked
            fetch_halo(requests, wire)
            with trace() as counted:
                one, two = start_fetch_all(requests, wire).wait(), fetch_halo(requests, wire)
            assert counted.calls == {"all_to_all": 2}
            row_bytes = 3 * (2 if wire else 8) + 2 * 4 * (len(tensors) - 1)
            assert counted.total_bytes == 2 * sum(plan.send_splits) * row_bytes
            assert torch.equal(one[0], expected)
            assert torch.equal(two[0], expected)
            assert all(torch.equal(rows, case.halo_of(rank, whole)) for rows in one[1:] + two[1:])
        halo = case.halo_of(rank, wide)
        (home,) = start_return_all([(plan, halo)], wire).wait()
        total = torch.zeros(case.num_rows, 3, dtype=torch.float64)
        plan.add_returned(total, home)
        (again,) = return_halo([(plan, halo if wire is None else halo.to(wire).double())])
        torch.testing.assert_close(total, again)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_way(world_size):
    run_ranks(fetch_first, world_size)
    run_shared(check_every_way, world_size)


def fetch_first(rank, world_size):
    """With few bytes nobody looks for shared memory."""
    case = make_exchange(rank, world_size)
    values = case.values(3)
    (rows,) = fetch_halo([(case.plan, values[rank])])
    assert torch.equal(rows, case.halo_of(rank, values))
    assert not group_state().tried_shared


def two_ranks(rank, rows=64, width=32):
    """A plan by which each of two ranks reads all rows of the other."""
    needed = [torch.arange(rows if owner != rank else 0) for owner in range(2)]
    return ExchangePlan.build(needed, rows), torch.arange(rows * width).view(rows, width).float()


def turned_off(rank, world_size):
    if rank == 1:
        os.environ["GRAPHSHARD_SHARED_MEMORY"] = "0"
    plan, x = two_ranks(rank)
    (rows,) = fetch_halo([(plan, x + rank)])
    assert torch.equal(rows, x + (1 - rank))
    state = group_state()
    os.environ.pop("GRAPHSHARD_SHARED_MEMORY", None)
    return state.tried_shared, state.shared is None


def check_company(rank, world_size):
    """Wide rows beside narrow ones: one collective, and each tensor in memory of its own."""
    case = make_exchange(rank, world_size)
    plan, wide, narrow = case.plan, case.values(64), case.values(2)
    requests = [(plan, narrow[rank].bool()), (plan, wide[rank]), (plan, narrow[rank].float())]
    start_fetch_all(requests).wait()  # the first use is checked
    with trace() as seen:
        rows = start_fetch_all(requests).wait()
    assert seen.calls == {"all_to_all": 1}
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in rows)
    halos = case.halo_of(rank, wide), case.halo_of(rank, narrow)
    for found, expected in zip(rows, (halos[1].bool(), halos[0], halos[1].float()), strict=True):
        assert torch.equal(found, expected)
    grads = [(plan, halos[0]), (plan, halos[1])]
    for found, (_, grad) in zip(start_return_all(grads).wait(), grads, strict=True):
        (alone,) = start_return_all([(plan, grad)]).wait()
        assert torch.equal(found, alone)


def test_wide_rows_beside_narrow_ones():
    run_shared(check_company, 3)


def test_off_on_one_rank_is_off_for_all():
    assert run_ranks(with_threshold, 2, "turned_off") == [(True, True)] * 2


def with_threshold(rank, world_size, function):
    """As `with_any_size`, where there need not be shared memory in the end."""
    before, transport.LARGE_BYTES = transport.LARGE_BYTES, 1
    try:
        return globals()[function](rank, world_size)
    finally:
        transport.LARGE_BYTES = before


def in_subgroups(rank, world_size):
    """Two groups over the same ranks have blocks of their own."""
    other = torch.distributed.new_group([0, 1])
    plan, x = two_ranks(rank)
    needed = [torch.arange(64 if owner != rank else 0) for owner in range(2)]
    second = ExchangePlan.build(needed, 64, group=other)
    one, two = start_fetch_all([(plan, x)]), start_fetch_all([(second, x + 1)])
    assert torch.equal(two.wait()[0], x + 1)
    assert torch.equal(one.wait()[0], x)
    assert group_state().shared is not group_state(other).shared


def test_groups_beside_each_other():
    run_shared(in_subgroups, 2)


def slow_reader(rank, world_size):
    """What is in flight stays as it was sent, however late it is read."""
    plan, x = two_ranks(rank)
    shared = None
    for _ in range(3):
        pending = [start_fetch_all([(plan, x + i)]) for i in range(4)]
        pairs = [start_return_all([(plan, x - i)]) for i in range(4)]
        shared = group_state().shared
        assert shared.counts()[0] >= 8 * x.numel() * 4
        barrier()  # nothing is read before
        if rank == 1:
            time.sleep(0.2)
        for i in (2, 0, 3, 1):
            assert torch.equal(pending[i].wait()[0], x + i)
            assert torch.equal(pairs[i].wait()[0], x - i)
        barrier()
        peak = shared.counts()[2]
    used, waiting, most = shared.counts()
    assert used == 0
    assert waiting <= peak == most
    addresses = {block.address for block in shared._blocks}
    for i in range(20):
        assert torch.equal(fetch_halo([(plan, x * i)])[0], x * i)
        barrier()
    assert {block.address for block in shared._blocks} <= addresses
    assert shared.counts()[2] == most


def test_a_block_is_used_again_only_when_all_have_read_it():
    run_shared(slow_reader, 2)


def no_copy(rank, world_size):
    """The rows of each tensor are gathered into the block that is sent."""
    plan, x = two_ranks(rank)
    for _ in range(2):
        fetch_halo([(plan, x)])
        barrier()
        start_fetch_all([(plan, x)]).wait()
        barrier()
    assert len(group_state().shared._blocks) == 1
    for _ in range(2):
        start_fetch_all([(plan, x), (plan, x)]).wait()
        barrier()
    assert len(group_state().shared._blocks) == 2


def test_rows_are_gathered_into_the_block():
    run_shared(no_copy, 2)


def descriptors():
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return names


def many_exchanges(rank, world_size):
    plan, x = two_ranks(rank)
    counts = []
    for i in range(120):
        width = 1 + (7 * i) % 32
        (rows,) = fetch_halo([(plan, x[:, :width])])
        assert torch.equal(rows, x[:, :width])
        start_return_all([(plan, rows)]).wait()
        if i > 20:
            counts.append(len(descriptors()))
    barrier()
    assert max(counts) - min(counts) <= 4  # of two blocks
    shutdown_comms()
    gc.collect()
    assert not [name for name in descriptors() if "graphshard" in name and "memfd" in name]
    return None


def test_nothing_is_left():
    def files():
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    before = files()
    run_shared(many_exchanges, 2)
    left = {name for name in files() - before if "graphshard" in name}
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:  # tests beside this one have some for a moment
        time.sleep(0.1)
        left &= files()
    assert not left


def killed_after_start(rank, world_size):
    rows = [torch.arange(2 if owner != rank else 0) for owner in range(world_size)]
    plan, x = ExchangePlan.build(rows, 2), torch.ones(2, 3)
    fetch_halo([(plan, x)])
    group_state().timeout = timedelta(seconds=3)
    barrier()
    pending = start_fetch_all([(plan, x)])
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    start = time.monotonic()
    try:
        pending.wait()
        barrier()
    except RankError as error:
        return time.monotonic() - start, error.ranks, str(error)
    return None


def test_a_rank_killed_before_its_rows_are_read():
    with pytest.raises(RanksFailed) as caught:
        run_shared(killed_after_start, 3)
    assert sorted(caught.value.errors) == [1], str(caught.value)
    for rank, (seconds, ranks, text) in caught.value.results.items():
        assert ranks == (1,)
        assert seconds < 3
        assert text.startswith(f"rank {rank}: ")
        assert "rank 1 is gone" in text


def leave_early(rank, world_size):
    """A rank that has all it needs may go, as with gloo: others read what it sent."""
    plan, x = two_ranks(rank)
    fetch_halo([(plan, x)])
    pending = start_fetch_all([(plan, x + rank)])
    if rank == 1:
        time.sleep(0.7)
    (rows,) = pending.wait()
    assert torch.equal(rows, x + (1 - rank))
    start = time.monotonic()
    shutdown_comms()
    return time.monotonic() - start


def test_who_leaves_waits_until_others_have_read():
    early, late = run_shared(leave_early, 2)
    assert 0.1 < early < 5
    assert late < 1


def leave_unread(rank, world_size):
    """Ranks that both leave with rows unread do not wait for each other."""
    plan, x = two_ranks(rank)
    fetch_halo([(plan, x)])
    pending = start_fetch_all([(plan, x)])
    barrier()
    start = time.monotonic()
    shutdown_comms()
    with pytest.raises(RuntimeError, match="has been shut down"):
        pending.wait()
    return time.monotonic() - start


def test_ranks_that_leave_with_rows_unread():
    assert max(run_shared(leave_unread, 2)) < 2


def dropped(rank, world_size):
    """Rows that nobody waits for, as after an error, do not keep their block for ever."""
    plan, x = two_ranks(rank)
    for i in range(10):
        start_fetch_all([(plan, x + i)])
        barrier()
        assert torch.equal(fetch_halo([(plan, x * i)])[0], x * i)
    deadline = time.monotonic() + 20
    is_held = True
    while is_held and time.monotonic() < deadline:
        # Each exchange gives back the blocks of those that are complete and unread by then.
        fetch_halo([(plan, x)])
        barrier()
        held = torch.tensor(group_state().shared.counts()[0])
        is_held = bool(all_reduce(held, "max"))
    assert not is_held
    assert len(group_state().shared._blocks) <= 3


def test_exchanges_that_are_dropped():
    run_shared(dropped, 2)


def in_a_child(rank, world_size):
    plan, x = two_ranks(rank)
    pending = start_fetch_all([(plan, x)])
    barrier()
    assert [name for name in descriptors() if "memfd:graphshard" in name]
    child = os.fork()
    if child == 0:
        os._exit(len([name for name in descriptors() if "memfd:graphshard" in name]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(pending.wait()[0], x)
    assert torch.equal(fetch_halo([(plan, x + 1)])[0], x + 1)
    barrier()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_let_go():
    run_shared(in_a_child, 2)


def leave_to_a_silent_rank(rank, world_size):
    plan, x = two_ranks(rank)
    fetch_halo([(plan, x)])
    pending = start_fetch_all([(plan, x)])
    barrier()
    if rank == 1:
        time.sleep(3)
        return None
    pending.wait()
    group_state().timeout = timedelta(seconds=1)
    with pytest.raises(RankError, match=r"rank 0: shutdown_comms waited 1 s for ranks \[1\]") as e:
        shutdown_comms()
    assert not torch.distributed.is_initialized()
    return e.value.ranks


def test_who_leaves_says_who_has_not_read():
    assert run_shared(leave_to_a_silent_rank, 2) == [(1,), None]
