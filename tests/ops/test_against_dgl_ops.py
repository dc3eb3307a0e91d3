# SPDX-License-Identifier: Apache-2.0
"""Operators against DGL 1.1.3: every operator, reduction, target, broadcast; values and gradients.

DGL's max and min give the gradient of a tie to one edge as well, the first in its own order, so
those gradients are compared on values without ties.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ops_cases import GRAPHS, SHAPES, adjacency, generic, num_rows
from torch import Tensor

from case_selection import sampled
from dgl_peer import dgl
from graphshard import ops

BINARY = ("add", "sub", "mul", "div")
REAL_GRAPHS = ["odd", "one hub"]
REAL_SHAPES = [s for s in SHAPES if s[0] and 0 not in s[0]]


def dgl_graph(name: str) -> Any:
    src, dst, num_src, num_dst = GRAPHS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dgl.heterograph(
            {("s", "e", "d"): (torch.tensor(src), torch.tensor(dst))}, {"s": num_src, "d": num_dst}
        )


def compare(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    """Values, and gradients of a loss that weighs every entry differently."""
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs)
    weights = torch.rand(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad((ours * weights).sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad((theirs * weights).sum(), inputs, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("name", "op", "reduce", "shape"),
    sampled(
        REAL_GRAPHS,
        [*BINARY, "copy_lhs", "copy_rhs"],
        ["sum", "mean", "max", "min"],
        REAL_SHAPES,
    ),
    ids=str,
)
def test_gspmm(name: str, op: str, reduce: str, shape: Any, way: str) -> None:
    adj, graph = adjacency(name), dgl_graph(name)
    lhs = None if op == "copy_rhs" else generic(adj.num_src, shape[0], 1)
    rhs = None if op == "copy_lhs" else generic(adj.num_edges, shape[1], 2)
    inputs = [t for t in (lhs, rhs) if t is not None]
    theirs = dgl.ops.gspmm(graph, op, reduce, lhs, rhs)
    # Where nothing arrives DGL's operator leaves the infinity that its `update_all` turns into 0.
    theirs = theirs.masked_fill(theirs.isinf(), 0.0)
    compare(ops.gspmm(adj, op, reduce, lhs, rhs), theirs, inputs)


@pytest.mark.parametrize(
    ("name", "op", "targets", "shape"),
    sampled(REAL_GRAPHS, [*BINARY, "dot"], ["uv", "vu", "ue", "eu", "ve", "ev", "ee"], REAL_SHAPES),
    ids=str,
)
def test_gsddmm(name: str, op: str, targets: str, shape: Any, way: str) -> None:
    if op == "dot" and shape[0][-1] != shape[1][-1]:
        shape = (shape[0], shape[0])
    adj, graph = adjacency(name), dgl_graph(name)
    lhs = generic(num_rows(adj, targets[0]), shape[0], 1)
    rhs = generic(num_rows(adj, targets[1]), shape[1], 2)
    ours = ops.gsddmm(adj, op, lhs, rhs, *targets)
    compare(ours, dgl.ops.gsddmm(graph, op, lhs, rhs, *targets), [lhs, rhs])


@pytest.mark.parametrize("features", [(1,), (4, 1), (3,)], ids=str)
@pytest.mark.parametrize("norm_by", ["dst", "src"])
@pytest.mark.parametrize("name", REAL_GRAPHS)
def test_edge_softmax(name: str, norm_by: str, features: tuple[int, ...], way: str) -> None:
    adj = adjacency(name)
    logits = generic(adj.num_edges, features, 3)
    theirs = dgl.nn.functional.edge_softmax(dgl_graph(name), logits, norm_by=norm_by)
    compare(ops.edge_softmax(adj, logits, norm_by), theirs, [logits])
