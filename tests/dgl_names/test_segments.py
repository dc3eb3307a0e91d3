# SPDX-License-Identifier: Apache-2.0
"""Operators on groups of rows and operators by name, against DGL's. No process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dgl_peer import dgl
from graphshard import graph
from graphshard.dgl import ops

SIZES = torch.tensor([2, 3, 0, 4, 1, 0])


def same_with_gradients(
    mine: Callable[..., Tensor], its: Callable[..., Tensor], *rows: Tensor
) -> None:
    results = []
    for call in (mine, its):
        leaves = [row.clone().requires_grad_() for row in rows]
        out = call(*leaves)
        out = out.masked_fill(out.isinf(), 0)  # DGL's maximum of nothing; ours is 0
        out.square().sum().backward()
        results.append((out, *(leaf.grad for leaf in leaves)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reducer", ["sum", "mean", "max", "min"])
def test_segment_reduce(reducer: str) -> None:
    same_with_gradients(
        lambda x: ops.segment_reduce(SIZES, x, reducer),
        lambda x: dgl.ops.segment_reduce(SIZES, x, reducer),
        torch.rand(10, 3),
    )


def test_segment_softmax() -> None:
    same_with_gradients(
        lambda x: ops.segment_softmax(SIZES, x),
        lambda x: dgl.ops.segment_softmax(SIZES, x),
        torch.rand(10, 3),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrices_per_group_and_per_row(dtype: torch.dtype) -> None:
    a, b = torch.rand(10, 4, dtype=dtype), torch.rand(6, 4, 5, dtype=dtype)
    same_with_gradients(
        lambda a, b: ops.segment_mm(a, b, SIZES), lambda a, b: dgl.ops.segment_mm(a, b, SIZES), a, b
    )
    index = torch.tensor([5, 0, 0, 3, 3, 1, 5, 2, 0, 4])
    same_with_gradients(
        lambda a, b: ops.gather_mm(a, b, idx_b=index),
        lambda a, b: dgl.ops.gather_mm(a, b, idx_b=index),
        a,
        b,
    )
    half = ops.segment_mm(a.bfloat16(), b.bfloat16(), SIZES)
    torch.testing.assert_close(half.to(dtype), ops.segment_mm(a, b, SIZES), atol=0.05, rtol=0.05)
    assert ops.segment_mm(a[:0], b[:0], SIZES[:0]).shape == (0, 5)


NAMES = [
    name
    for name in dir(dgl.ops)
    if name.split("_")[0] in ("copy", "u", "v", "e") and hasattr(ops, name)
]


def test_every_name_of_dgl_is_there() -> None:
    theirs = {name for name in dir(dgl.ops) if name.split("_")[0] in ("copy", "u", "v", "e")}
    assert theirs - {"edge"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_operators_by_name(name: str) -> None:
    ends = torch.tensor([0, 1, 1, 2, 3]), torch.tensor([1, 0, 2, 2, 0])
    mine, its = graph(ends, num_nodes=5), dgl.graph(ends, num_nodes=5)
    sides = [part for part in name.split("_") if part in ("u", "v", "e")]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.rand(5, 3, generator=generator) + 0.5 for _ in sides]
    same_with_gradients(
        lambda *x: getattr(ops, name)(mine, *x),
        lambda *x: getattr(dgl.ops, name)(its, *x),
        *rows,
    )


def test_numbers_must_be_integers() -> None:
    with pytest.raises(TypeError, match="seglen must be one row of integers"):
        ops.segment_reduce(torch.tensor([1.5, 1.5]), torch.ones(3))
    with pytest.raises(TypeError, match="idx_b must be one row of integers"):
        ops.gather_mm(torch.ones(1, 2), torch.ones(1, 2, 2), idx_b=torch.zeros(1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.segment_reduce(SIZES, torch.ones(9)), "must add up to the 9 rows of value"),
        (lambda: ops.segment_mm(torch.ones(9, 2), torch.ones(6, 2, 2), SIZES), "the 9 rows of a"),
        (lambda: ops.segment_mm(torch.ones(10, 3), torch.ones(6, 2, 2), SIZES), r"a \[rows, m\]"),
        (
            lambda: ops.gather_mm(
                torch.ones(2, 2), torch.ones(1, 2, 2), idx_b=torch.tensor([0, 1])
            ),
            r"idx_b must be in \[0, 1\)",
        ),
    ],
)
def test_wrong_groups_are_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
