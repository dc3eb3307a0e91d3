# SPDX-License-Identifier: Apache-2.0
"""Sparse optimizers against torch.optim on torch.nn.Embedding(sparse=True) in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from clusters import NUM_ROWS, alone, join, leave, served
from torch import Tensor

from graphshard.comm import barrier
from graphshard.servers import DistEmbedding, DistTensor, SparseAdagrad, SparseAdam, SparseSGD
from graphshard.testing import run_ranks

WIDTH, STEPS = 5, 12
OURS: dict[str, Any] = {
    "sgd": lambda e: SparseSGD([e], 0.1),
    "adagrad": lambda e: SparseAdagrad([e], 0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "adam": lambda e: SparseAdam([e], 0.01, betas=(0.8, 0.95)),
}
TORCHS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, 0.01, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.SparseAdam(p, 0.01, betas=(0.8, 0.95)),
}


def first() -> Tensor:
    return torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def batch(step: int, rank: int) -> Tensor:
    """Ids with repeats, few or many; of some ranks at some steps none, of all at step 4."""
    if step == 4 or (step + rank) % 3 == 0:
        return torch.empty(0, dtype=torch.int64)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    most = 50 if step % 2 else NUM_ROWS
    count = 2 if step == 7 else 30  # of two, a trainer gets one, or none
    return torch.randint(0, NUM_ROWS if step == 7 else most, (count,), generator=generator)


def train(rank: int, world_size: int, addresses: list[str], kind: str) -> Tensor:
    if addresses:
        join(addresses, rank % len(addresses))
    else:
        alone()
    embedding = DistEmbedding(NUM_ROWS, WIDTH, "emb")
    if rank == 0:
        embedding.weight[:] = first()
    barrier()
    optimizer = OURS[kind](embedding)
    for step in range(STEPS):
        ids = batch(step, rank)
        one, other, _unused = embedding(ids), embedding(ids[:5]), embedding([1, 2])
        optimizer.zero_grad()  # between the lookup and the backward, as scripts do
        if ids.numel():
            (one**2).sum().backward()
            other.sum().backward()  # gradients of several backwards add up
        optimizer.step()
    found: Tensor = embedding.weight[:]
    barrier()
    leave()
    return found


def oracle(world_size: int, kind: str) -> Tensor:
    embedding = torch.nn.Embedding(NUM_ROWS, WIDTH, sparse=True, _weight=first())
    optimizer = TORCHS[kind](embedding.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [batch(step, rank) for rank in range(world_size)]
        for ids in batches:
            if ids.numel():
                ((embedding(ids) ** 2).sum() + embedding(ids[:5]).sum()).backward()
        if any(ids.numel() for ids in batches):
            optimizer.step()
    return embedding.weight.detach()


def added_rank_by_rank(world_size: int) -> Tensor:
    """Steps of SGD, with the gradients of each rank added up first, and then those sums."""
    weight = first()
    for step in range(STEPS):
        total: Tensor | None = None
        for ids in (batch(step, rank) for rank in range(world_size)):
            grads = torch.cat([2 * weight[ids], torch.ones_like(weight[ids[:5]])])
            own = torch.zeros_like(weight).index_add_(0, torch.cat([ids, ids[:5]]), grads)
            total = own if total is None else total + own
        assert total is not None
        weight.add_(total, alpha=-0.1)
    return weight


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", list(OURS))
@pytest.mark.parametrize(("num_hosts", "world_size"), [(0, 1), (1, 2), (3, 3), (3, 2)])
def test_rows_change_as_in_one_process(kind: str, num_hosts: int, world_size: int) -> None:
    with served(num_hosts) as addresses:
        found = run_ranks(train, world_size, addresses, kind)
    expected = oracle(world_size, kind)
    assert not torch.equal(expected, first())
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-6, atol=1e-6)
    if kind == "sgd":  # on whichever host a row is, and whoever takes care of it
        assert torch.equal(found[0], added_rank_by_rank(world_size))


#: What each trainer looks up in a step: rows, none of them, or some that are not in its loss.
LOOKUPS = (
    ("rows", "nothing", "nothing"),
    ("no rows", "nothing", "not in the loss"),
    ("rows", "rows", "no rows"),
    ("nothing", "nothing", "nothing"),
    ("not in the loss", "not in the loss", "not in the loss"),
    ("nothing", "no rows", "nothing"),
    ("rows times 0", "nothing", "nothing"),
    ("no rows", "no rows", "no rows"),
    ("nothing", "rows", "rows times 0"),
    ("rows", "nothing", "rows"),
)


def look_up(kind: str, step: int, rank: int, embedding: Any) -> None:
    """What a trainer does with an embedding, ours or torch's, before a step."""
    if kind == "nothing":
        return
    rows = torch.arange(rank, NUM_ROWS, 3 + step)
    looked_up = embedding(rows[:0] if kind == "no rows" else rows)
    if kind != "not in the loss":
        ((looked_up**2).sum() * (0.0 if kind == "rows times 0" else 1.0)).backward()


#: How gradients are forgotten, before the lookups of each step: to None, or to zeros.
SET_TO_NONE = {
    "none": [True] * len(LOOKUPS),
    "zeros": [False] * len(LOOKUPS),
    "both": [step % 4 == 0 for step in range(len(LOOKUPS))],
}
#: Steps of "both" in which those of the loss are forgotten, too.
FORGOTTEN = (2, 6)


def count_steps(
    rank: int, world_size: int, addresses: list[str], kind: str, zeroing: str
) -> tuple[int, Tensor]:
    join(addresses, rank % len(addresses))
    embedding = DistEmbedding(NUM_ROWS, WIDTH, "emb")
    if rank == 0:
        embedding.weight[:] = first()
    barrier()
    optimizer = OURS[kind](embedding)
    for step, lookups in enumerate(LOOKUPS):
        optimizer.zero_grad(SET_TO_NONE[zeroing][step])
        look_up(lookups[rank], step, rank, embedding)
        if zeroing == "both" and step in FORGOTTEN:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    barrier()
    found = int(optimizer.tensors()[-1][0]), embedding.weight[:]
    barrier()
    leave()
    return found


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["adam", "adagrad"])
@pytest.mark.parametrize("zeroing", list(SET_TO_NONE))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_counts_as_in_torch(kind: str, zeroing: str, world_size: int) -> None:
    """Also one whose gradients have no rows, or are zeros; not one without gradients."""
    with served(min(world_size, 2)) as addresses:
        found = run_ranks(count_steps, world_size, addresses, kind, zeroing)
    embedding = torch.nn.Embedding(NUM_ROWS, WIDTH, sparse=True, _weight=first())
    optimizer = TORCHS[kind](embedding.parameters())
    for step, lookups in enumerate(LOOKUPS):
        optimizer.zero_grad(SET_TO_NONE[zeroing][step])
        for rank in range(world_size):
            look_up(lookups[rank], step, rank, embedding)
        if zeroing == "both" and step in FORGOTTEN:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    for num_steps, rows in found:
        assert num_steps == int(optimizer.state[embedding.weight]["step"])
        torch.testing.assert_close(rows, embedding.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("here", [0, 2])
def test_rows_are_changed_where_they_lie_and_at_once_elsewhere(here: int) -> None:
    """Of three hosts' rows, those of one in place; the others over the wire."""
    with served(3) as addresses:
        cluster = join(addresses, here).cluster
        tables = [DistTensor((NUM_ROWS, 6), torch.float32, name) for name in ("one", "two")]
        expected = [torch.randn(NUM_ROWS, 6) for _ in tables]
        for table, rows in zip(tables, expected, strict=True):
            table[:] = rows
        ids = torch.arange(3, NUM_ROWS, 2)
        grads, seen, places = torch.randn(ids.numel(), 6), [], []

        def change(values: Sequence[Tensor], rows: Tensor, begin: int, end: int) -> None:
            seen.append((begin, end))
            places.append(values[0].data_ptr())
            values[0][rows] += values[1][rows]
            values[1][rows] -= grads[begin:end]

        cluster.update([table.name for table in tables], ids, change)
        expected[0][ids] += expected[1][ids]
        expected[1][ids] -= grads
        assert torch.equal(tables[0][:], expected[0])
        assert torch.equal(tables[1][:], expected[1])
        assert tables[0].local_partition.data_ptr() == places[0]
        bounds = sorted(seen)
        assert len(bounds) == 2  # one host has no rows
        assert [end for _, end in bounds[:-1]] == [begin for begin, _ in bounds[1:]]
        with pytest.raises(IndexError, match="got 5000"):
            cluster.update([tables[0].name], torch.tensor([0, NUM_ROWS]), change)
        cluster.close()
    leave()


def test_without_gradients_enabled_nothing_is_kept() -> None:
    alone()
    embedding = DistEmbedding(NUM_ROWS, WIDTH, "emb", lambda s, d: torch.ones(s, dtype=d))
    with torch.no_grad():
        rows = embedding(torch.tensor([3, 4]))
    assert not rows.requires_grad
    assert embedding.gradients()[0].numel() == 0
    assert torch.equal(rows, torch.ones(2, WIDTH))
    leave()


def test_wrong_arguments_are_errors() -> None:
    alone()
    embedding = DistEmbedding(NUM_ROWS, WIDTH, "emb")
    with pytest.raises(IndexError, match="got 5000"):
        embedding([NUM_ROWS])
    with pytest.raises(ValueError, match="lr must be a number of at least 0"):
        SparseAdam([embedding], lr=-1)
    with pytest.raises(ValueError, match=r"betas must be two numbers in \[0, 1\)"):
        SparseAdam([embedding], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="eps"):
        SparseAdagrad([embedding], eps=float("nan"))
    with pytest.raises(ValueError, match="params must be a list"):
        SparseSGD([], 0.1)
    with pytest.raises(TypeError, match=r"torch\.optim"):
        SparseSGD([torch.nn.Parameter(torch.zeros(2))], 0.1)  # type: ignore[list-item]
    leave()
