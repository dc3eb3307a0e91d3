# SPDX-License-Identifier: Apache-2.0
"""How indices are cut into batches, on one rank and on several. No process group."""

from __future__ import annotations

import pytest
import torch

from graphshard.sampling.loader import SplitOrder


def all_batches(order: SplitOrder, epoch: int = 0) -> list:
    places = order.of_epoch(epoch)
    return [order.batch(places, step) for step in range(len(order))]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_one_rank(size: int, shuffle: bool, drop_last: bool) -> None:
    indices = torch.arange(100, 100 + size, dtype=torch.int32)
    order = SplitOrder(indices, 4, shuffle, drop_last, seed=1)
    batches = all_batches(order)
    assert all(batch.dtype == torch.int32 for batch in batches)
    sizes = [len(batch) for batch in batches]
    full, rest = divmod(size, 4)
    assert sizes == [4] * full + ([rest] if rest and not drop_last else [])
    taken = torch.cat([indices[:0], *batches])
    assert len(taken.unique()) == len(taken)
    if not shuffle:
        assert torch.equal(taken, indices[: len(taken)])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 12, 13, 24, 25])
def test_ranks_share_evenly(size: int, num_ranks: int, shuffle: bool, drop_last: bool) -> None:
    per_rank = [
        all_batches(SplitOrder(torch.arange(size), 3, shuffle, drop_last, 1, rank, num_ranks), 4)
        for rank in range(num_ranks)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    sizes = [len(batch) for batches in per_rank for batch in batches]
    taken = torch.cat([torch.arange(0), *(b for batches in per_rank for b in batches)])
    assert len(taken.unique()) == len(taken)
    if drop_last:
        assert set(sizes) <= {3}
        assert len(taken) == size // (3 * num_ranks) * 3 * num_ranks
    else:
        assert len(taken) == size
        assert not sizes or max(sizes) - min(sizes) <= 1
        assert max(sizes, default=0) <= 3
        if size >= 3 * num_ranks:
            assert min(sizes) > 0


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def taken(seed: int, epoch: int) -> list[int]:
        return torch.cat(all_batches(SplitOrder(range(50), 8, True, False, seed), epoch)).tolist()

    assert taken(1, 0) == taken(1, 0)
    assert len({tuple(taken(s, e)) for s, e in [(1, 0), (1, 1), (2, 0), (2, 1)]}) == 4
    assert sorted(taken(1, 0)) == list(range(50))


def test_types_are_mixed_and_kept_apart() -> None:
    indices = {"a": torch.arange(5), ("x", "r", "y"): [10, 11, 12, 13, 14, 15]}
    plain = all_batches(SplitOrder(indices, 4, False, False, 0))
    assert [{k: v.tolist() for k, v in batch.items()} for batch in plain] == [
        {"a": [0, 1, 2, 3]},
        {"a": [4], ("x", "r", "y"): [10, 11, 12]},
        {("x", "r", "y"): [13, 14, 15]},
    ]
    shuffled = all_batches(SplitOrder(indices, 4, True, False, 0))
    assert [sum(map(len, batch.values())) for batch in shuffled] == [4, 4, 3]
    for key, values in indices.items():
        seen = torch.cat([b[key] for b in shuffled if key in b])
        assert sorted(seen.tolist()) == list(values)
    assert len(shuffled[0]) == 2


def test_rows_of_a_table_are_indices_too() -> None:
    pairs = torch.arange(10).view(5, 2)
    batches = all_batches(SplitOrder(pairs, 2, True, False, 3))
    assert [tuple(batch.shape) for batch in batches] == [(2, 2), (2, 2), (1, 2)]


@pytest.mark.parametrize("indices", [[], torch.empty(0, dtype=torch.int64)])
def test_no_indices(indices: object) -> None:
    assert len(SplitOrder(indices, 2, True, False, 0)) == 0


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"batch_size must be a positive number \(got 0\)"):
        SplitOrder([1], 0, False, False, 0)
    with pytest.raises(TypeError, match=r"use mask.nonzero\(\)"):
        SplitOrder(torch.tensor([True]), 1, False, False, 0)
    with pytest.raises(TypeError, match=r"indices of 'user' must be a tensor .* \(got str"):
        SplitOrder({"user": "abc"}, 1, False, False, 0)
    with pytest.raises(TypeError, match="must have a dimension"):
        SplitOrder(torch.tensor(3), 1, False, False, 0)
