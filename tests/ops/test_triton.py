# SPDX-License-Identifier: Apache-2.0
"""Triton kernels against the reference and formulas written out, in Triton's interpreter.

A sample: with ``--all`` every test that takes ``way`` runs in them. Long rows are cut into pieces
here after three edges.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from attention_cases import CASES, AttentionCase, inputs_of, written_out
from ops_cases import GRAPHS, adjacency, interpreted_triton, num_rows, values
from torch import Tensor

from case_selection import pairwise
from graphshard import ops
from graphshard.ops import reference
from graphshard.ops._dispatch import force_triton

interpreted_triton()
bounds_checked = importlib.import_module("triton_bounds").bounds_checked
tasks = importlib.import_module("graphshard.ops.triton._tasks")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
IDTYPES = [torch.int32, torch.int64]
CLOSE = {torch.bfloat16: {"atol": 0.05, "rtol": 0.02}, torch.float16: {"atol": 0.01, "rtol": 0.002}}
SOME_SHAPES = [((5,), (1,)), ((2, 3), (2, 1)), ((2, 3), (3,)), ((), ()), ((0,), (1,))]
SPMM = pairwise(
    [
        (op, reduce, dtype, name, shapes)
        for op in ("copy_lhs", "copy_rhs", "add", "sub", "mul", "div")
        for reduce in ("sum", "mean", "max", "min")
        for dtype in DTYPES
        for name in GRAPHS
        for shapes in SOME_SHAPES
    ]
)


@pytest.fixture(autouse=True)
def _in_triton() -> Iterator[None]:
    with force_triton(), bounds_checked():
        yield


@pytest.fixture(params=[tasks.MOST_EDGES, 3], ids=["whole", "cut"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MOST_EDGES", request.param)


def test_sums_and_extrema_over_edges(pieces: None) -> None:
    for number, (op, reduce, dtype, name, (node, edge)) in enumerate(SPMM):
        adj = adjacency(name, IDTYPES[number % 2])
        lhs = values(adj.num_src, node, dtype, 1).requires_grad_()
        rhs = values(adj.num_edges, edge, dtype, 2).requires_grad_()
        both = None if op == "copy_rhs" else lhs, None if op == "copy_lhs" else rhs
        check(ops.gspmm(adj, op, reduce, *both), reference.gspmm(adj, op, reduce, *both), lhs, rhs)
        if reduce in ("max", "min"):
            found = ops.gspmm_arg(adj, op, reduce, *both)
            torch.testing.assert_close(found, reference.gspmm_arg(adj, op, reduce, *both))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "dot"])
def test_values_per_edge(op: str) -> None:
    some = ("odd", "one hub", "no edges")
    cases = [
        (d, n, s, t)
        for d in (torch.float64, torch.bfloat16)
        for n in some
        for s in SOME_SHAPES
        for t in ("uv", "ve", "eu")
    ]
    for dtype, name, (left, right), targets in pairwise(cases):
        if op == "dot" and left[-1:] != right[-1:]:
            left = right = (2, 3)
        adj = adjacency(name)
        lhs = values(num_rows(adj, targets[0]), left, dtype, 1).requires_grad_()
        rhs = values(num_rows(adj, targets[1]), right, dtype, 2).requires_grad_()
        expected = reference.gsddmm(adj, op, lhs, rhs, *targets)
        check(ops.gsddmm(adj, op, lhs, rhs, *targets), expected, lhs, rhs)


def test_softmax_over_edges(pieces: None) -> None:
    for dtype, name in ((d, n) for d in DTYPES for n in GRAPHS):
        adj = adjacency(name)
        logits = values(adj.num_edges, (2,), dtype, 1).requires_grad_()
        check(ops.edge_softmax(adj, logits), reference.edge_softmax(adj, logits), logits)


@pytest.mark.parametrize(
    ("pieces", "case"),
    [  # every second case in one of the ways
        pytest.param(most_edges, c, marks=[] if i % 4 == remainder else pytest.mark.exhaustive)
        for i, c in enumerate(CASES)
        for remainder, most_edges in ((1, tasks.MOST_EDGES), (3, 3))
    ],
    ids=str,
    indirect=["pieces"],
)
def test_attention(case: AttentionCase, pieces: None) -> None:
    adj = adjacency("odd")
    attention = case.make(adj)
    inputs = inputs_of(attention)
    expected = written_out(adj, attention) + 0 * sum(t.sum() for t in inputs)
    check(ops.attend(adj, attention), expected, *inputs)


def test_attention_of_halves_and_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for graph in ("odd", "no edges"):
            adj = adjacency(graph, torch.int32)
            attention = CASES[0].make(adj, dtype)
            check(
                ops.attend(adj, attention), reference.attend(adj, attention), *inputs_of(attention)
            )


def test_a_nan_is_the_maximum_and_ties_go_to_the_first_edge() -> None:
    adj = ops.Adjacency(torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 1, 0]), 3, 2)
    rows = torch.tensor([[1.0, 7.0], [torch.nan, 7.0], [2.0, 3.0]])
    found, edges = ops.gspmm_arg(adj, "copy_lhs", "max", rows)
    torch.testing.assert_close(found[1], torch.tensor([torch.nan, 7.0]), equal_nan=True)
    assert edges.tolist() == [[3, 3], [1, 0]]


def check(ours: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Values, shape, dtype, and gradients."""
    close = CLOSE.get(ours.dtype, {})
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, **close)
    weights = torch.randint(1, 4, ours.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((ours * weights).sum(), inputs, allow_unused=True)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs, allow_unused=True)
    for mine, its in zip(found, wanted, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            torch.testing.assert_close(mine, its, **close)
