# SPDX-License-Identifier: Apache-2.0
"""Sums that continue in place: add_rows against index_add_, gspmm_add against two sums."""

from __future__ import annotations

import pytest
import torch
from ops_cases import cut_off

from graphshard.ops import Adjacency, add_rows, gspmm, gspmm_add

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def wide(dtype):
    return torch.float32 if dtype == torch.bfloat16 else dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (), (2, 3), (0,)])
def test_add_rows(way, dtype, index, shape):
    for kept in {wide(dtype), dtype}:
        check_add_rows(way, kept, dtype, index, shape)


def check_add_rows(way, kept, dtype, index, shape):
    out = torch.randn(40, *shape).to(kept)
    places = torch.randperm(40)[:25]
    rows = torch.randn(25, *shape).to(dtype)
    expected = out.clone().index_add_(0, places, rows.to(kept))
    if way == "triton" and kept == torch.bfloat16:
        expected = cut_off(out.float().index_add_(0, places, rows.float()), kept)
    add_rows(out, places.to(index), rows)
    assert torch.equal(out, expected)


def test_add_rows_to_some_columns(way):
    out = torch.zeros(9, 4, 3)
    rows = torch.randn(4, 2, 3)
    add_rows(out[:, 1:3], torch.tensor([8, 0, 3, 4]), rows)
    assert torch.equal(out[[8, 0, 3, 4], 1:3], rows)
    assert out.abs().sum() == rows.abs().sum()
    add_rows(out[:, :, 1:2], torch.tensor([1]), torch.ones(1, 4, 1))  # numbers apart
    assert torch.equal(out[1, :, 1], torch.ones(4))
    assert float(out[1].sum()) == 4


@pytest.mark.parametrize("place", [-1, 40])
def test_add_rows_outside_of_the_table(way, place):
    if way == "fallback" and place < 0:
        pytest.skip("torch itself decides what a negative row of index_add_ is")
    with pytest.raises((IndexError, RuntimeError)):
        add_rows(torch.zeros(40, 2), torch.tensor([place]), torch.ones(1, 2))


def test_add_rows_of_other_shapes(way):
    with pytest.raises(ValueError, match="rows of one shape"):
        add_rows(torch.zeros(4, 2), torch.tensor([0]), torch.ones(1, 3))
    with pytest.raises(ValueError, match="one entry per row"):
        add_rows(torch.zeros(4, 2), torch.tensor([0, 1]), torch.ones(1, 2))


def edges(num_src, num_dst, num_edges):
    return Adjacency(
        torch.randint(num_src, (num_edges,)), torch.randint(num_dst, (num_edges,)), num_src, num_dst
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_edges", [0, 3, 300, 20_000])
@pytest.mark.parametrize("op", ["copy_lhs", "copy_rhs", "mul", "add"])
def test_a_sum_continues(way, dtype, num_edges, op):
    # 20,000 edges into 5 nodes are taken in slices.
    adj = edges(30, 5 if num_edges == 20_000 else 50, num_edges)
    lhs = torch.randn(30, 2, 3).to(dtype)
    rhs = torch.randn(num_edges, 2, 1 if op == "mul" else 3).to(dtype)
    out = torch.randn(adj.num_dst, 2, 3).to(dtype)
    part = gspmm(adj, op, "sum", lhs.to(torch.float64), rhs.to(torch.float64))
    expected = out.double() + part
    gspmm_add(out, adj, op, lhs, rhs)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.02}[dtype]
    scale = expected.abs().max().item() + 1
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance * scale)


def test_rows_without_edges_are_not_touched(way):
    adj = Adjacency(torch.tensor([0]), torch.tensor([1]), 1, 3)
    out = torch.full((3, 2), float("inf"))
    gspmm_add(out, adj, "copy_lhs", torch.full((1, 2), -1.0))
    assert torch.isinf(out).all()
    if way != "fallback":
        out[0] = torch.nan
        gspmm_add(out, adj, "copy_lhs", torch.zeros(1, 2))
        assert torch.isnan(out[0]).all()


def test_another_shape_or_dtype_is_refused(way):
    adj = edges(3, 4, 5)
    with pytest.raises(ValueError, match="shape and dtype of the sums"):
        gspmm_add(torch.zeros(4, 3), adj, "copy_lhs", torch.zeros(3, 2))
    with pytest.raises(ValueError, match="shape and dtype of the sums"):
        gspmm_add(torch.zeros(4, 2), adj, "copy_lhs", torch.zeros(3, 2, dtype=torch.float64))
