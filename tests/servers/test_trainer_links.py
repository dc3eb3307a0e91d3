# SPDX-License-Identifier: Apache-2.0
"""Rows between trainers: all of them arrive, and who fails ends the others' wait."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from graphshard._base.kernels import extension_available, force_extension
from graphshard.comm import barrier
from graphshard.comm.collectives import LONG_BYTES
from graphshard.comm.group import group_state
from graphshard.errors import RankError
from graphshard.servers import _trainer_links
from graphshard.servers._message_stream import bytes_of
from graphshard.servers._trainer_links import PeerRows, TrainerLinks
from graphshard.testing import RanksFailed, run_ranks

SERVER = "127.0.0.1:9"
LIKES = [
    torch.empty(0, dtype=torch.int64),
    torch.empty(0, 3, dtype=torch.bfloat16),
    torch.empty(0, 2, 5, dtype=torch.float64),
]


def rows_for(sender: int, receiver: int, operation: int, most: int, zeros: float = 0.0) -> PeerRows:
    """What a rank sends to another one, such a share of it zero; every rank can make it."""
    seeded = torch.Generator().manual_seed(operation * 100 + sender * 10 + receiver)
    count = int(torch.randint(most + 1, (), generator=seeded)) if sender != operation % 4 else 0
    tensors = []
    for like in LIKES:
        rows = torch.randn(count, *like.shape[1:], generator=seeded) * 1000
        rows[torch.rand(rows.shape, generator=seeded) < zeros] = 0
        tensors.append(rows.to(like.dtype))
    return PeerRows(2**63 + operation, tensors)


def send_and_receive(rank: int, world_size: int, mosts: list[int], zeros: float = 0.0) -> None:
    links = TrainerLinks(group_state(), SERVER)
    for operation, most in enumerate(mosts):
        offers = [rows_for(rank, peer, operation, most, zeros) for peer in links.peers]
        for peer, rows in links.exchange(iter(offers), LIKES, "rows").items():
            right = rows_for(peer, rank, operation, most, zeros)
            assert rows.number == right.number
            for found, expected in zip(rows.tensors, right.tensors, strict=True):
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
    links.close()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_rows_arrive_in_each_of_many_operations(world_size: int) -> None:
    run_ranks(send_and_receive, world_size, [0, 1, *[300] * 40])


def test_more_arrives_than_sockets_hold() -> None:
    run_ranks(send_and_receive, 3, [400_000, 10, 400_000], timeout=120.0)


# -- without zeros ---------------------------------------------------------------------------------


def between_hosts() -> list[tuple[int, int]]:
    """Links are as between hosts from here on; sizes of tensors, and as how many bytes they go."""
    sizes: list[tuple[int, int]] = []

    def counted(tensor: Tensor, *, leave_out_zeros: bool = False) -> memoryview:
        data = bytes_of(tensor, leave_out_zeros=leave_out_zeros)
        if leave_out_zeros:
            sizes.append((tensor.nbytes, len(data)))
        return data

    _trainer_links.bytes_of = counted  # type: ignore[attr-defined]
    _trainer_links.joins_one_host = lambda _: False  # type: ignore[attr-defined]
    return sizes


def send_without_zeros(rank: int, world_size: int) -> list[tuple[int, int]]:
    sizes = between_hosts()
    with force_extension(extension_available() and rank != 1):
        send_and_receive(rank, world_size, [0, 20, 40_000, 1, 90_000], 0.8)
    return sizes


@pytest.mark.parametrize("world_size", [2, 5])
def test_between_hosts_rows_travel_without_zeros(world_size: int) -> None:
    for rank, sizes in enumerate(run_ranks(send_without_zeros, world_size, timeout=120.0)):
        assert any(size >= LONG_BYTES for size, _ in sizes)
        for size, sent in sizes:
            is_shorter = size >= LONG_BYTES and rank != 1 and extension_available()
            assert sent < 0.6 * size if is_shorter else sent == size


def lie(rank: int, world_size: int, how: str) -> str:
    """Rank 1 says that its rows are other bytes than they are."""
    between_hosts()
    counted, rows = _trainer_links.bytes_of, torch.zeros(40_000)

    def lying(tensor: Tensor, *, leave_out_zeros: bool = False) -> memoryview:
        data = counted(tensor, leave_out_zeros=leave_out_zeros)
        if tensor.dtype == torch.int64 and how in ("long", "none", "less"):
            return counted(tensor + {"long": 160_000, "none": -tensor[0], "less": -2}[how])
        if leave_out_zeros and how == "bits":
            return memoryview(bytes(len(data) - 1) + b"\x80")
        return data

    if rank == 1:
        _trainer_links.bytes_of = lying  # type: ignore[attr-defined]
    links = TrainerLinks(group_state(), SERVER)
    with pytest.raises(RankError) as caught:
        links.exchange([PeerRows(0, [rows])], [rows[:0]], "rows")
        barrier()
    links.close()
    return str(caught.value)


@pytest.mark.skipif(not extension_available(), reason="no zeros are left out")
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("long", "rank 1 has sent 165000 bytes for a tensor of 160000"),
        ("none", "rank 1 has sent 0 bytes for a tensor of 160000"),
        ("less", "rank 1 has sent no rows: a message of 160000 bytes came as 4998"),
        ("bits", "rank 1 has sent no rows: a message of 160000 bytes came as 5000"),
    ],
)
def test_rows_that_are_not_what_they_are_said_to_be_are_an_error(how: str, why: str) -> None:
    assert why in run_ranks(lie, 2, how)[0]


# ---------------------------------------------------------------------------- failures


def fail(rank: int, world_size: int, how: str) -> dict[str, Any]:
    links = TrainerLinks(group_state(), SERVER)
    big = [torch.zeros(1_000_000, dtype=torch.int64)]
    like = [big[0][:0]]

    def offers() -> Iterator[PeerRows]:
        for _ in links.peers:
            if rank == 1 and how == "raises":
                raise ValueError("no memory for sums")
            if rank == 1 and how == "is killed":
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            yield PeerRows(0, big)

    if rank == 1 and how == "is in another operation":
        group_state().num_operations += 1
    start = time.monotonic()
    try:
        links.exchange(offers(), like, "rows")
    except (RankError, ValueError) as error:
        seconds = time.monotonic() - start
        text, ranks = f"{type(error).__name__}: {error}", list(getattr(error, "ranks", ()))
        with pytest.raises(RuntimeError, match="closed"):
            links.exchange(offers(), like, "rows")
        return {"text": text, "ranks": ranks, "seconds": seconds}
    raise AssertionError("the exchange has ended well")


def test_a_trainer_that_raises_ends_the_wait_of_the_others() -> None:
    found = run_ranks(fail, 2, "raises")
    assert found[1]["text"] == "ValueError: no memory for sums"
    assert found[0]["text"].startswith("RankError: rank 0: rows with rank 1 failed")
    assert found[0]["ranks"] == [1]
    assert found[0]["seconds"] < 30


def test_a_trainer_that_is_killed_is_named() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail, 3, "is killed")
    survivors = caught.value.results
    assert survivors.keys() == {0, 2}
    for result in survivors.values():
        assert result["ranks"] == [1], result["text"]
        assert result["seconds"] < 30


def test_a_trainer_in_another_operation_is_told() -> None:
    found = run_ranks(fail, 2, "is in another operation")
    assert any("all trainers must call the same" in result["text"] for result in found)


def never_come(rank: int, world_size: int) -> dict[str, Any]:
    links = TrainerLinks(group_state(), SERVER)
    if rank == 1:
        time.sleep(3)
        return {}
    group_state().timeout = timedelta(seconds=1)
    with pytest.raises(RankError) as caught:
        links.exchange([PeerRows(0, [LIKES[0]])], LIKES[:1], "rows")
    return {"text": str(caught.value), "ranks": list(caught.value.ranks)}


def test_no_wait_is_longer_than_the_timeout() -> None:
    found = run_ranks(never_come, 2)[0]
    assert found["ranks"] == [1]
    assert "sent nothing within 1 s" in found["text"]


SILENT: list[socket.socket] = []


class Intruded(TrainerLinks):
    """Its rank 0 hears from strangers first; some say nothing, and stay."""

    def _connect(self, rank: int, text: str) -> None:
        host, port, _ = text.split()
        SILENT.extend(socket.create_connection((host, int(port))) for _ in range(5))
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" * 20)
        with pytest.raises(RuntimeError, match="another token"):
            super()._connect(rank, f"{host} {port} {'0' * 64}")
        super()._connect(rank, text)


def meet_among_strangers(rank: int, world_size: int) -> list[Tensor]:
    group_state().timeout = timedelta(seconds=25)  # less than the silent have, one after another
    links = Intruded(group_state(), SERVER)
    while SILENT:
        SILENT.pop().close()
    mine = PeerRows(0, [torch.tensor([rank])])
    found = links.exchange([mine] * (world_size - 1), LIKES[:1], "rows")
    barrier()
    links.close()
    return [found[peer].tensors[0] for peer in sorted(found)]


def test_strangers_are_refused_and_keep_nobody_waiting() -> None:
    found = run_ranks(meet_among_strangers, 3)
    for rank, rows in enumerate(found):
        assert [int(row) for row in rows] == [peer for peer in range(3) if peer != rank]
