# SPDX-License-Identifier: Apache-2.0
"""SAR's calls: reductions in place, lists of tensors, how a group is made. 1 to 4 ranks."""

from __future__ import annotations

import socket
import warnings

import pytest
import torch
import torch.distributed as dist

import graphshard.sar as sar
from graphshard import RankError
from graphshard.comm import trace
from graphshard.comm.group import group_state
from graphshard.testing import run_ranks


def reductions(rank: int, world_size: int) -> None:
    ranks = torch.arange(world_size)
    largest = torch.tensor(rank)  # as SAR's scripts find the number of classes
    assert sar.comm.all_reduce(largest, dist.ReduceOp.MAX, move_to_comm_device=True) is largest
    assert largest.item() == world_size - 1
    table = torch.full((2, 3), float(rank)).t()
    sar.comm.all_reduce(table, op=dist.ReduceOp.SUM)
    assert torch.equal(table, torch.full((3, 2), float(ranks.sum())))
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    sar.comm.all_reduce(parameter, dist.ReduceOp.SUM)
    assert parameter.item() == world_size
    kept = torch.tensor([rank])
    assert sar.comm.all_reduce(kept).item() == ranks.sum()
    assert sar.comm.all_reduce(kept, "min").item() == 0
    assert kept.item() == rank
    with pytest.raises(ValueError, match=r"'sum', 'max', 'min' or a ReduceOp .got 'mean'"):
        sar.comm.all_reduce(kept, "mean")
    with pytest.raises(TypeError, match="positional"):
        sar.comm.all_reduce(kept, "sum", False, None)
    assert sar.comm_device() == torch.device("cpu")
    assert (sar.comm.backend(), sar.comm.rank(), sar.comm.world_size()) == (
        "gloo",
        rank,
        world_size,
    )


def lists(rank: int, world_size: int, largest: int) -> None:
    sar.Config.max_collective_size = largest
    try:
        sent = [torch.full((world_size,), to) for to in range(world_size)]
        received = [torch.zeros(world_size, dtype=torch.int64) for _ in range(world_size)]
        with trace() as counted:
            sar.comm.all_to_all(received, sent)
        assert all(torch.equal(r, torch.full((world_size,), rank)) for r in received)
        if largest and world_size > 1:
            rounds = -(-2 * world_size**2 // largest)
            assert counted.calls["all_to_all"] == 1 + rounds  # the first tells the sizes
            # As many rounds as the rank with most elements needs.
            sent = [torch.ones(largest * (rank == to == 0)) for to in range(world_size)]
            with trace() as counted:
                sar.comm.all_to_all([torch.zeros_like(each) for each in sent], sent)
            assert counted.calls["all_to_all"] == 1 + 2
        # Other shapes for each rank, some of them empty, one of them not contiguous.
        sent = [torch.full((to, 2, rank), float(10 * rank + to)) for to in range(world_size)]
        received = [torch.zeros(2, rank, sender).transpose(1, 2) for sender in range(world_size)]
        sar.comm.all_to_all(received, sent, move_to_comm_device=True)
        for sender, found in enumerate(received):
            assert torch.equal(found, torch.full_like(found, 10 * sender + rank))
        sent = [torch.full((rank + to, 3), float(rank)) for to in range(world_size)]
        sizes = [sender + rank for sender in range(world_size)]
        for recv_sizes in (None, sizes):
            found = sar.comm.exchange_tensors(sent, recv_sizes)
            for sender, rows in enumerate(found):
                assert torch.equal(rows, torch.full((sender + rank, 3), float(sender)))
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        token = torch.zeros(2, 2)
        sar.comm.exchange_single_tensor(left, right, token, torch.full((2, 2), float(rank)))
        assert torch.equal(token, torch.full((2, 2), float(left)))
    finally:
        sar.Config.max_collective_size = 0


def mistakes(rank: int, world_size: int) -> None:
    """Of one rank: an error on all, and the next exchange works."""
    fine = [torch.zeros(1) for _ in range(world_size)]
    short = torch.zeros(1 if rank else 2)
    cases = [
        (
            lambda: sar.comm.all_to_all(fine[: world_size - (rank == 0)], fine),
            "for each of 2 ranks",
        ),
        (
            lambda: sar.comm.all_to_all(fine, fine[: world_size - (rank == 0)]),
            "for each of 2 ranks",
        ),
        (lambda: sar.comm.all_to_all(fine, [f.double() if rank else f for f in fine]), "one dtype"),
        (
            lambda: sar.comm.all_to_all(*[[f.double() if rank else f for f in fine]] * 2),
            "dtype of the tensors of one exchange must be the same on all ranks",
        ),
        (lambda: sar.comm.all_to_all([fine[0], short], fine), "room for 2 elements from rank 1"),
        (
            lambda: sar.comm.exchange_tensors([torch.tensor(1.0)] * world_size),
            "first dimension alone",
        ),
        (lambda: sar.comm.exchange_single_tensor(0, 2 * rank, *fine), r"send_idx .* \(got 2\)"),
    ]
    for call, text in cases:
        with pytest.raises((ValueError, RankError), match=text):
            call()
        sar.comm.all_to_all(fine, [torch.ones(1)] * world_size)


def everything(rank: int, world_size: int) -> None:
    reductions(rank, world_size)
    for largest in (0, 5):
        lists(rank, world_size, largest)
    if world_size == 2:
        mistakes(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_calls_of_sar(world_size: int) -> None:
    run_ranks(everything, world_size)


def start_as_sar(rank: int, world_size: int, folder: str, port: int) -> None:
    address = sar.nfs_ip_init(_rank=rank, ip_file=f"{folder}/ip_file")
    with pytest.warns(RuntimeWarning, match="'ccl' .* is not in this torch, and 'gloo' takes its"):
        sar.initialize_comms(
            _rank=rank,
            _world_size=world_size,
            master_ip_address=address,
            backend="ccl",
            _comm_device=torch.device("cpu"),
            master_port_number=port,
        )
    assert sar.comm.all_reduce(torch.ones(1)).item() == world_size
    assert (sar.comm.backend(), group_state().comm_device) == ("gloo", torch.device("cpu"))
    with pytest.raises(RuntimeError, match="there is a default process group already"):
        sar.initialize_comms(rank, world_size, address, "gloo")
    sar.shutdown_comms()
    # Of a group that the program makes itself, nothing more is made.
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=rf"has world_size {world_size} \(got 7\)"):
        sar.initialize_comms(rank, 7, address, "gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sar.initialize_comms(rank, world_size, address, "gloo")
        sar.initialize_comms(rank, world_size, address, "ccl")
    assert dist.group.WORLD is group
    assert sar.comm.all_reduce(torch.ones(1)).item() == world_size
    sar.shutdown_comms()


def test_a_group_is_made_as_sar_makes_it(tmp_path: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_ranks(start_as_sar, 2, str(tmp_path), port, group=False)


def test_an_argument_has_one_name_at_a_time() -> None:
    with pytest.raises(TypeError, match=r"give rank once, as rank or as _rank \(got 0 and 1\)"):
        sar.initialize_comms(0, 1, _rank=1)
    with pytest.raises(TypeError, match="give rank once"):
        sar.nfs_ip_init(0, "file", _rank=0)
    with pytest.raises(TypeError, match=r"needs the rank and the file \(got rank None, ip_file x"):
        sar.nfs_ip_init(ip_file="x")
