# SPDX-License-Identifier: Apache-2.0
"""Odd little adjacencies, operand shapes, and both ways of running an operator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from case_selection import sampled
from graphshard.ops import Adjacency


def interpreted_triton() -> Any:
    """Triton; where its interpreter does not run here, the test or the file is skipped."""
    reason = "Triton's interpreter before 3.7 fails with NumPy 2.4; or Triton has no release here"
    triton = pytest.importorskip("triton", minversion="3.7", reason=reason)
    if os.environ["TRITON_INTERPRET"] == "0":
        pytest.skip("Triton compiles here, for a GPU: test_on_gpu.py", allow_module_level=True)
    return triton


# name -> (sources, destinations, num_src, num_dst): parallel edges, self loops, isolated nodes
GRAPHS: dict[str, tuple[list[int], list[int], int, int]] = {
    "odd": ([2, 2, 0, 1, 3, 4, 4, 1, 0, 2, 5, 5], [0, 0, 1, 2, 2, 4, 0, 4, 2, 1, 0, 0], 7, 6),
    "square": ([0, 1, 2, 3, 3, 1, 1], [1, 2, 0, 3, 3, 0, 0], 5, 5),
    "no edges": ([], [], 3, 4),
    "no nodes": ([], [], 0, 0),
    "one hub": (list(range(40)), [0] * 40, 40, 2),
}

# (features of a node operand, features of an edge operand)
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((5,), (5,)),
    ((5,), (1,)),
    ((), ()),
    ((2, 3), (2, 1)),
    ((2, 3), (3,)),
    ((1, 3), (2, 1)),
    ((0,), (1,)),
    ((17,), (17,)),
]


def in_each_way(names: str, *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """The product of axes in each way to run an operator; a pairwise sample of it runs always.

    Args:
        names: Those of the parameters, with commas; ``way`` is one more.
        axes: The values of each.
    """
    cases = [
        *(
            pytest.param(*c.values, marks=[*c.marks, pytest.mark.compiled])
            if c.values[0] == "kernels"
            else c
            for c in sampled(["kernels", "torch"], *axes)
        ),
        *(pytest.param("triton", *c, marks=pytest.mark.exhaustive) for c in product(*axes)),
    ]
    return pytest.mark.parametrize(f"way,{names}", cases, ids=str, indirect=["way"])


def adjacency(name: str, idtype: torch.dtype = torch.int64) -> Adjacency:
    src, dst, num_src, num_dst = GRAPHS[name]
    return Adjacency(
        torch.tensor(src, dtype=idtype), torch.tensor(dst, dtype=idtype), num_src, num_dst
    )


def values(rows: int, features: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers away from 0, with ties: whole, and rounded to what bfloat16 can hold."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(1, 5, (rows, *features), generator=generator)
    sign = torch.randint(0, 2, whole.shape, generator=generator) * 2 - 1
    return (whole * sign).to(dtype)


def cut_off(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 in a narrower type as the interpreter of Triton stores it: bfloat16 is cut off."""
    if dtype == torch.bfloat16:
        exact = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return exact.to(dtype)


def generic(rows: int, features: tuple[int, ...], seed: int) -> Tensor:
    """float64 numbers without ties, away from 0."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand((rows, *features), generator=generator, dtype=torch.float64)
    return (draws + 0.5).requires_grad_()


def negated(values: Tensor) -> Tensor:
    """The same numbers: memory has those of the other sign, and torch knows."""
    view = torch._neg_view(-values)
    assert view.is_neg()
    return view


def num_rows(adj: Adjacency, target: str) -> int:
    return {"u": adj.num_src, "v": adj.num_dst, "e": adj.num_edges}[target]
