# SPDX-License-Identifier: Apache-2.0
"""torch.autograd.gradcheck of every operator in float64, and of the derivatives' derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_cases import SHAPES, adjacency, generic, in_each_way, num_rows

from graphshard import ops

BINARY = ("add", "sub", "mul", "div")
SMALL = [s for s in SHAPES if 0 not in s[0] and s[0] != (17,)]


@in_each_way(
    "op,reduce,shape", [*BINARY, "copy_lhs", "copy_rhs"], ["sum", "mean", "max", "min"], SMALL
)
def test_gspmm(op: str, reduce: str, shape: Any, way: str) -> None:
    adj = adjacency("odd")
    lhs = None if op == "copy_rhs" else generic(adj.num_src, shape[0], 1)
    rhs = None if op == "copy_lhs" else generic(adj.num_edges, shape[1], 2)
    inputs = [t for t in (lhs, rhs) if t is not None]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        found = iter(tensors)
        left = None if lhs is None else next(found)
        right = None if rhs is None else next(found)
        return ops.gspmm(adj, op, reduce, left, right)

    assert torch.autograd.gradcheck(run, inputs)


@in_each_way("op,targets,shape", [*BINARY, "dot"], ["uv", "ue", "ev", "ee"], SMALL)
def test_gsddmm(op: str, targets: str, shape: Any, way: str) -> None:
    if op == "dot" and shape[0][-1:] != shape[1][-1:]:
        shape = (shape[0], shape[0])
    adj = adjacency("square")
    lhs = generic(num_rows(adj, targets[0]), shape[0], 1)
    rhs = generic(num_rows(adj, targets[1]), shape[1], 2)
    assert torch.autograd.gradcheck(lambda a, b: ops.gsddmm(adj, op, a, b, *targets), [lhs, rhs])


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_edge_softmax(norm_by: str, way: str) -> None:
    adj = adjacency("odd")
    logits = generic(adj.num_edges, (2, 1), 3)
    assert torch.autograd.gradcheck(lambda z: ops.edge_softmax(adj, z, norm_by), [logits])
    assert torch.autograd.gradgradcheck(lambda z: ops.edge_softmax(adj, z, norm_by), [logits])


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_second_derivatives_of_gspmm(reduce: str, way: str) -> None:
    adj = adjacency("odd")
    lhs, rhs = generic(adj.num_src, (2, 3), 1), generic(adj.num_edges, (2, 1), 2)
    for op in ("mul", "div"):
        run = lambda a, b, op=op: ops.gspmm(adj, op, reduce, a, b)  # noqa: E731
        assert torch.autograd.gradgradcheck(run, [lhs, rhs])


def test_second_derivatives_of_gsddmm(way: str) -> None:
    adj = adjacency("square")
    lhs, rhs = generic(adj.num_src, (3,), 1), generic(adj.num_dst, (3,), 2)
    for op in ("mul", "dot"):
        run = lambda a, b, op=op: ops.gsddmm(adj, op, a, b)  # noqa: E731
        assert torch.autograd.gradgradcheck(run, [lhs, rhs])
