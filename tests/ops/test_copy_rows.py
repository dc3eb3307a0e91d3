# SPDX-License-Identifier: Apache-2.0
"""copy_rows against indexing in torch, for every dtype, width and alignment."""

from __future__ import annotations

import pytest
import torch

from case_selection import sampled
from graphshard.ops import copy_rows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int16, torch.uint8]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.randint(0, 2 if dtype == torch.bool else 100, shape)
    return values.to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "index_dtype"),
    sampled([(), (1,), (3,), (16,), (4, 7), (0,)], DTYPES, [torch.int32, torch.int64]),
    ids=str,
)
def test_against_indexing(
    shape: tuple[int, ...], dtype: torch.dtype, index_dtype: torch.dtype, way: str
) -> None:
    table = some(dtype, 50, *shape)
    rows = torch.randint(0, 50, (30,)).to(index_dtype)
    places = torch.randperm(40)[:30].to(index_dtype)
    out = some(dtype, 40, *shape)
    expected = out.clone()
    expected[places.long()] = table[rows.long()]
    copy_rows(out, places, table, rows)
    assert torch.equal(out, expected)
    expected[:30] = table[rows.long()]
    copy_rows(out, None, table, rows)
    assert torch.equal(out, expected)
    expected[places.long()] = table[:30]
    copy_rows(out, places, table, None)
    assert torch.equal(out, expected)
    expected[:7] = table[:7]
    copy_rows(out, None, table[:7], None)
    assert torch.equal(out, expected)
    copy_rows(out, places[:0], table, rows[:0])
    copy_rows(out, None, table[:0], None)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("offset", [0, 2, 5])
@pytest.mark.parametrize("width", [64, 100, 2048])
def test_many_rows_and_tables_that_begin_anywhere(width: int, offset: int, way: str) -> None:
    """Large results are written another way; see csrc/runtime/rows.cpp."""
    num_rows = 2_000_000 // width
    table = torch.randn(num_rows * width + offset)[offset:].view(num_rows, width)
    out = torch.zeros(num_rows * width + offset)[offset:].view(num_rows, width)
    rows, places = torch.randint(0, num_rows, (num_rows,)), torch.randperm(num_rows)
    copy_rows(out, places, table, rows)
    assert torch.equal(out[places], table[rows])


def test_tables_that_are_not_contiguous(way: str) -> None:
    table, out = torch.randn(6, 10).t(), torch.zeros(6, 4).t()
    rows, places = torch.tensor([9, 0]), torch.tensor([1, 3])
    copy_rows(out, places, table, rows)
    assert torch.equal(out[places], table[rows])
    assert not out[[0, 2]].any()


def test_a_gradient_is_not_recorded(way: str) -> None:
    table, out = torch.randn(3, 2, requires_grad=True), torch.zeros(3, 2)
    copy_rows(out, None, table, torch.tensor([2, 1, 0]))
    assert not out.requires_grad
    assert torch.equal(out, table.detach().flip(0))


@pytest.mark.parametrize(("rows", "places"), [([3], [0]), ([-1], [0]), ([0], [2]), ([0], [-1])])
def test_out_of_range(rows: list[int], places: list[int], way: str) -> None:
    table, out = torch.randn(3, 4), torch.zeros(2, 4)
    with pytest.raises(IndexError):
        copy_rows(out, torch.tensor(places), table, torch.tensor(rows))


def test_rows_must_be_alike(way: str) -> None:
    with pytest.raises(ValueError, match="rows of one dtype and shape"):
        copy_rows(torch.zeros(3, 4), None, torch.zeros(3, 5), None)
    with pytest.raises(ValueError, match="rows of one dtype and shape"):
        copy_rows(torch.zeros(3, 4), None, torch.zeros(3, 4).double(), None)
