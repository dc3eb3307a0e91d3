# SPDX-License-Identifier: Apache-2.0
"""Sums of rows of the widths that have a loop of their own, on destinations of every kind.

Oracle: the reference in float64. No process but one.
"""

from __future__ import annotations

import pytest
import torch
from ops_cases import in_each_way
from torch import Tensor

from graphshard import ops
from graphshard.ops import reference

NUM_SRC = 90
# No edge, few, about as many as are taken at a time, several times that, and more than a slice.
DEGREES = (0, 1, 3, 63, 64, 65, 130, 400, 0, 4096, 4097, 9000, 2, 0)
WIDTHS = [63, 64, 65, 128, 192, 256]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def adjacency(idtype: torch.dtype) -> ops.Adjacency:
    """Edges in any order, so that positions are not ids."""
    dst = torch.arange(len(DEGREES)).repeat_interleave(torch.tensor(DEGREES))
    dst = dst[torch.randperm(len(dst))]
    src = torch.randint(0, NUM_SRC, dst.shape)
    return ops.Adjacency(src.to(idtype), dst.to(idtype), NUM_SRC, len(DEGREES))


def tolerance(expected: Tensor, dtype: torch.dtype, way: str) -> float:
    """Of float64, of float32 over some thousand terms, and of one rounding to bfloat16.

    The interpreter of Triton does not round to bfloat16 but cuts off, which is up to twice as far.
    """
    share = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2**-8}[dtype]
    if way == "triton" and dtype == torch.bfloat16:
        share *= 2
    return share * float(expected.abs().max())


@in_each_way("width,dtype,idtype", WIDTHS, DTYPES, [torch.int32, torch.int64])
def test_sums_means_and_sums_that_continue(
    width: int, dtype: torch.dtype, idtype: torch.dtype, way: str
) -> None:
    adj = adjacency(idtype)
    sources = torch.randn(NUM_SRC, width).to(dtype)
    of_edges = torch.randn(adj.num_edges, width).to(dtype)
    before = torch.randn(len(DEGREES), width).to(dtype)
    before[0] = -0.0
    for op, lhs, rhs in (("copy_lhs", sources, None), ("copy_rhs", None, of_edges)):
        exact = [None if side is None else side.double() for side in (lhs, rhs)]
        for reduce in ("sum", "mean"):
            expected = reference.gspmm(adj, op, reduce, *exact)
            found = ops.gspmm(adj, op, reduce, lhs, rhs)
            assert found.dtype == dtype
            torch.testing.assert_close(
                found.double(), expected, rtol=0, atol=tolerance(expected, dtype, way)
            )
            assert torch.equal(found[0], torch.zeros(width, dtype=dtype))
        expected = before.double() + reference.gspmm(adj, op, "sum", *exact)
        out = before.clone()
        ops.gspmm_add(out, adj, op, lhs, rhs)
        # The sum may be rounded on its own, too.
        torch.testing.assert_close(
            out.double(), expected, rtol=0, atol=2 * tolerance(expected, dtype, way)
        )
        if way == "kernels":
            assert torch.equal(out[0].signbit(), before[0].signbit())  # nothing was added


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_threads_and_id_types_give_the_same_bits(width: int, dtype: torch.dtype) -> None:
    adj = adjacency(torch.int64)
    rows = torch.randn(NUM_SRC, width).to(dtype)
    for reduce in ("sum", "mean"):
        one = ops.gspmm(adj, "copy_lhs", reduce, rows)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            three = ops.gspmm(adj.astype(torch.int32), "copy_lhs", reduce, rows)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(one, three)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_numbers(dtype: torch.dtype, way: str) -> None:
    """NaN and infinity come out as in the reference; a mean of them, too."""
    special = torch.tensor([0.0, -0.0, 1.0, torch.nan, torch.inf, -torch.inf])
    columns = torch.randint(0, 3, (NUM_SRC, 64))
    columns[torch.randint(0, NUM_SRC, (64,)), torch.arange(64)] = torch.randint(3, 6, (64,))
    rows = special[columns].to(dtype)
    adj = adjacency(torch.int64)
    for reduce in ("sum", "mean"):
        expected = reference.gspmm(adj, "copy_lhs", reduce, rows.double())
        found = ops.gspmm(adj, "copy_lhs", reduce, rows)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isposinf(), expected.isposinf())
        assert torch.equal(found.isneginf(), expected.isneginf())
