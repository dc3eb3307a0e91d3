# SPDX-License-Identifier: Apache-2.0
"""group_by_range and ungroup against plain Python lists."""

from __future__ import annotations

import pytest
import torch

from case_selection import sampled
from graphshard.ops import group_by_range, ungroup

BOTH = [torch.int32, torch.int64]


@pytest.mark.parametrize(
    ("count", "sizes", "id_dtype", "dtype"),
    sampled([0, 1, 200], [(5,), (3, 4), (0, 3, 0, 0, 4, 0), (1, 2) * 20], BOTH, BOTH),
    ids=str,
)
def test_grouping(
    count: int, sizes: tuple[int, ...], id_dtype: torch.dtype, dtype: torch.dtype, way: str
) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    ids = torch.randint(0, starts[-1], (count,)).to(id_dtype)
    owner = [max(r for r in range(len(sizes)) if starts[r] <= i and sizes[r]) for i in ids.tolist()]
    for last in {0, len(sizes) // 2, len(sizes) - 1}:
        order, rows, found = group_by_range(ids, starts, last, dtype)
        expected = sorted(range(count), key=lambda i: (owner[i] == last, owner[i], i))
        assert order.tolist() == expected
        assert rows.tolist() == [int(ids[i]) - starts[owner[i]] for i in expected]
        assert found == [owner.count(r) for r in range(len(sizes))]
        assert (order.dtype, rows.dtype) == (torch.int64, dtype)


@pytest.mark.parametrize("ids", [[-1, 2], [2, 7]])
def test_an_id_that_nobody_owns(ids: list[int], way: str) -> None:
    with pytest.raises(ValueError, match=r"every id must be in \[0, 7\) \(got"):
        group_by_range(torch.tensor(ids), [0, 3, 7], 0, torch.int32)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("value_dtype", BOTH, ids=str)
@pytest.mark.parametrize("count", [0, 1, 60])
def test_ungrouping(count: int, value_dtype: torch.dtype, dtype: torch.dtype, way: str) -> None:
    lists = [torch.randint(0, 99, (n,)).tolist() for n in torch.randint(0, 5, (count,)).tolist()]
    order = torch.randperm(count)
    values = torch.tensor([v for values in lists for v in values], dtype=value_dtype)
    counts, moved = ungroup(order, torch.tensor([len(v) for v in lists]).long(), values, dtype)
    at = {place: number for number, place in enumerate(order.tolist())}
    expected = [lists[at[place]] for place in range(count)]
    assert counts.tolist() == [len(v) for v in expected]
    assert moved.tolist() == [v for values in expected for v in values]
    assert moved.dtype == dtype


def test_counts_that_do_not_add_up(way: str) -> None:
    with pytest.raises(ValueError, match="counts must add up to 4"):
        ungroup(torch.tensor([1, 0]), torch.tensor([1, 2]), torch.arange(4), torch.int64)
