# SPDX-License-Identifier: Apache-2.0
"""Rows to send: runs as they lie, few runs copied, the rest gathered; against plain indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphshard.comm import ExchangePlan, SentRows, fetch_halo, start_fetch, start_fetch_all
from graphshard.comm.halo import LONG_RUN
from graphshard.testing import run_ranks

NUM_ROWS = 8 * LONG_RUN
ROWS = {
    "nothing": torch.arange(0),
    "one row": torch.tensor([7]),
    "one run": torch.arange(5, 500),
    "all rows": torch.arange(NUM_ROWS),
    "two long runs": torch.cat([torch.arange(10, 2000), torch.arange(3000, 5000)]),
    "a run and what comes before it": torch.cat([torch.arange(3000, 6000), torch.arange(2000)]),
    "a run twice": torch.arange(LONG_RUN, 3 * LONG_RUN).repeat(2),
    "short runs": torch.cat([torch.arange(10, 20), torch.arange(30, 40)]),
    "backwards": torch.arange(100, 0, -1),
    "scattered": torch.randint(NUM_ROWS, (3000,), generator=torch.Generator().manual_seed(0)),
}
NUM_RUNS = {
    "one row": 1,
    "one run": 1,
    "all rows": 1,
    "two long runs": 2,
    "a run and what comes before it": 2,
    "a run twice": 2,
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_rows_are_those_of_indexing(name: str, dtype: torch.dtype) -> None:
    rows = ROWS[name]
    sent = SentRows(rows)
    assert len(sent) == rows.numel()
    assert len(sent.runs) == NUM_RUNS.get(name, 0)
    for shape in [(NUM_ROWS, 3), (NUM_ROWS,), (NUM_ROWS, 2, 0)]:
        tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        expected = tensor[rows]
        assert torch.equal(sent.of(tensor), expected)
        out = torch.zeros_like(expected)
        sent.copy_to(out, tensor)
        assert torch.equal(out, expected)
    columns = torch.randn(NUM_ROWS, 6)[:, 1:4]
    assert torch.equal(sent.of(columns), columns[rows])


def test_one_run_is_not_copied_unless_memory_is_asked_for() -> None:
    tensor, sent = torch.randn(NUM_ROWS, 4), SentRows(ROWS["one run"])
    assert sent.is_slice
    assert sent.of(tensor).data_ptr() == tensor[5].data_ptr()
    asked = []

    def allocate(shape, dtype, device) -> Tensor:
        asked.append(tuple(shape))
        return torch.empty(shape, dtype=dtype, device=device)

    copied = sent.of(tensor, allocate)
    assert asked == [(495, 4)]
    assert torch.equal(copied, tensor[5:500])
    assert copied.data_ptr() != tensor[5].data_ptr()


def read(rank: int, world_size: int, name: str, owner: int) -> Tensor:
    """What ``rank`` reads of ``owner``: the named rows, moved by the reader's number."""
    return (ROWS[name] + 3 * rank) % NUM_ROWS if rank != owner else ROWS["nothing"]


def every_way(rank: int, world_size: int, name: str) -> None:
    needed = [read(rank, world_size, name, owner) for owner in range(world_size)]
    plan = ExchangePlan.build(needed, NUM_ROWS)
    for peer in range(world_size):
        asked = read(peer, world_size, name, rank)
        assert torch.equal(plan.send_rows(peer), asked)
        assert torch.equal(plan.sent[peer].index_on(torch.device("cpu")), asked)
    for dtype, wire in [(torch.float64, None), (torch.bfloat16, None), (torch.float32, torch.half)]:
        tensors = [
            (torch.arange(NUM_ROWS * width).view(NUM_ROWS, width) % 97 + owner).to(dtype)
            for owner in range(world_size)
            for width in (3, 100)
        ]
        of = [[tensors[2 * o + w][needed[o]] for o in range(world_size)] for w in (0, 1)]
        expected = [torch.cat(parts) for parts in of]
        own = tensors[2 * rank : 2 * rank + 2]
        for count in (1, 2):
            requests = [(plan, t) for t in own[:count]]
            for got in (fetch_halo(requests, wire), start_fetch_all(requests, wire).wait()):
                for some, wanted in zip(got, expected, strict=False):
                    assert some.dtype == dtype
                    assert torch.equal(some, wanted)
        for step in range(1, world_size):
            source = (rank - step) % world_size
            for w, some in enumerate(start_fetch(plan, step, own, wire).wait()):
                assert torch.equal(some, of[w][source])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["one run", "two long runs", "scattered", "nothing"])
@pytest.mark.parametrize("shared", [True, False])
def test_rows_arrive_whichever_way_they_go(
    name: str, world_size: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setenv("GRAPHSHARD_SHARED_MEMORY", "0")
    run_ranks(every_way, world_size, name)
