# SPDX-License-Identifier: Apache-2.0
"""Triton kernels where types, graphs and shapes are odd together, in Triton's interpreter. No GPU.

The oracles are plain torch, formulas written out, and DGL's layers. ``--all`` runs whole products.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import pytest
import torch
from attention_cases import AttentionCase, inputs_of, random_adjacency, written_out
from ops_cases import GRAPHS, adjacency, cut_off, interpreted_triton, negated, values
from torch import Tensor

from case_selection import sampled
from dgl_peer import dgl, dgl_nn
from graphshard import graph, ops
from graphshard.dgl.nn import AGNNConv
from graphshard.ops import reference
from graphshard.ops._dispatch import force_triton

interpreted_triton()
bounds_checked = importlib.import_module("triton_bounds").bounds_checked
tasks = importlib.import_module("graphshard.ops.triton._tasks")
argmax = importlib.import_module("graphshard.ops.spmm")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
IDTYPES = [torch.int32, torch.int64]
CLOSE = {torch.bfloat16: {"atol": 0.05, "rtol": 0.03}, torch.float16: {"atol": 0.02, "rtol": 0.01}}
SCORES = ["additive", "joint", "dot"]
HUB = tasks.MOST_EDGES + 50


@pytest.fixture(autouse=True)
def _in_triton() -> Iterator[None]:
    with force_triton(), bounds_checked():
        yield


def hub(idtype: torch.dtype) -> ops.Adjacency:
    """Nodes with more edges than a piece has, with one, and with none; from seven sources."""
    src, dst = torch.arange(HUB + 1) % 7, torch.tensor([1] * HUB + [0])
    return ops.Adjacency(src.to(idtype), dst.to(idtype), 7, 3)


def check(ours: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Values and gradients."""
    close = CLOSE.get(ours.dtype, {})
    torch.testing.assert_close(ours, expected, **close)
    weights = torch.randint(1, 4, ours.shape, generator=torch.Generator().manual_seed(1))
    found, wanted = (
        torch.autograd.grad((out * weights).sum(), inputs, materialize_grads=True)
        for out in (ours, expected)
    )
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its, **close)


@pytest.mark.parametrize(
    ("score", "dtype", "idtype", "name", "dropout"),
    sampled(SCORES, DTYPES, IDTYPES, list(GRAPHS), [0.0, 0.4]),
)
def test_attention_of_every_type_on_every_graph(
    score: str, dtype: torch.dtype, idtype: torch.dtype, name: str, dropout: float
) -> None:
    adj = adjacency(name, idtype)
    attention = AttentionCase(score, heads=3, edge=dropout > 0, dropout=dropout).make(adj, dtype)
    check(ops.attend(adj, attention), reference.attend(adj, attention), inputs_of(attention))


@pytest.mark.parametrize(
    ("score", "size"),
    [
        pytest.param(score, size, marks=[] if (i + j) % 3 == 0 else pytest.mark.exhaustive)
        for i, score in enumerate(SCORES)
        for j, size in enumerate([(8, 8), (5, 40), (1, 300), (3, 1), (2, 1100)])
    ],
)
def test_attention_in_tiles_that_are_not_full(score: str, size: tuple[int, int]) -> None:
    heads, dim = size
    adj = adjacency("odd")
    attention = AttentionCase(score, heads=heads, dim=dim, factor=heads).make(adj)
    expected = written_out(adj, attention) + 0 * sum(t.sum() for t in inputs_of(attention))
    check(ops.attend(adj, attention), expected, inputs_of(attention))


@pytest.mark.parametrize(
    ("score", "of_sources"),
    [
        pytest.param(s, both, marks=[] if s == "additive" and not both else pytest.mark.exhaustive)
        for s in SCORES
        for both in (False, True)
    ],
)
def test_attention_over_a_row_longer_than_a_piece(
    score: str, of_sources: bool, run_all: bool
) -> None:
    adj = hub(torch.int32)
    if of_sources:
        adj = random_adjacency(4, 3, 6, hub=HUB)
        assert adj.reverse().in_degrees().max() > tasks.MOST_EDGES
    assert adj.in_degrees().max() > tasks.MOST_EDGES
    attention = AttentionCase(score, heads=2, dropout=0.2 * run_all).make(adj)
    expected = written_out(adj, attention) + 0 * sum(t.sum() for t in inputs_of(attention))
    if run_all:
        check(ops.attend(adj, attention), expected, inputs_of(attention))
    else:  # gradients of rows in pieces: tests/ops/test_triton.py, with short ones
        with torch.no_grad():
            torch.testing.assert_close(ops.attend(adj, attention), expected)


@pytest.mark.parametrize(
    ("dtype", "reduce"),
    [(torch.float32, "sum"), pytest.param(torch.float16, "max", marks=pytest.mark.exhaustive)],
)
def test_a_row_longer_than_a_piece(dtype: torch.dtype, reduce: str) -> None:
    adj = hub(torch.int64)
    rows = torch.randn(7, 2).to(dtype)
    found = ops.gspmm(adj, "copy_lhs", reduce, rows)
    src, dst = adj.coo()
    messages = rows.double()[src]
    index = dst.view(-1, 1).expand_as(messages)
    how = {"sum": "sum", "max": "amax"}[reduce]
    expected = torch.zeros(3, 2, dtype=torch.float64)
    expected = expected.scatter_reduce(0, index, messages, how, include_self=False)
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(found, expected.to(dtype), **tolerance)


@pytest.mark.parametrize(
    ("dtype", "idtype", "shape", "is_wide"),
    sampled(DTYPES, IDTYPES, [(5,), (), (2, 3), (300,)], [True, False]),
)
def test_rows_are_added_at_distinct_places(
    dtype: torch.dtype, idtype: torch.dtype, shape: tuple[int, ...], is_wide: bool
) -> None:
    total = torch.float32 if is_wide and dtype.itemsize == 2 else dtype
    table = torch.randn(40, 2, *shape).to(total)
    out = table[:, 1]  # some columns of a larger table
    places = torch.randperm(40)[:25]
    rows = torch.randn(25, *shape).to(dtype)
    expected = table.clone()
    expected[:, 1].index_add_(0, places, rows.to(total))
    if total == torch.bfloat16:
        exact = table[:, 1].float().index_add_(0, places, rows.float())
        expected[:, 1] = cut_off(exact, total)
    ops.add_rows(out, places.to(idtype), rows)
    assert torch.equal(table, expected)
    with pytest.raises(IndexError, match="places"):
        ops.add_rows(out, torch.tensor([40], dtype=idtype), rows[:1])


@pytest.mark.parametrize(
    ("op", "reduce", "dtype", "name", "shapes"),
    sampled(
        ["copy_lhs", "add", "sub", "mul", "div"],
        ["max", "min"],
        DTYPES,
        list(GRAPHS),
        [((5,), (5,)), ((2, 3), (2, 1)), ((1, 3), (2, 1)), ((), ())],
    ),
)
def test_gradients_of_maxima_are_sums_by_source(
    op: str,
    reduce: str,
    dtype: torch.dtype,
    name: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adj = adjacency(name, torch.int32)
    lhs = values(adj.num_src, shapes[0], dtype, 1).requires_grad_()
    rhs = values(adj.num_edges, shapes[1], dtype, 2).requires_grad_()
    both = lhs, None if op == "copy_lhs" else rhs
    ours = ops.gspmm(adj, op, reduce, *both)
    expected = reference.gspmm(adj, op, reduce, *both)
    weights = torch.randint(1, 4, ours.shape, generator=torch.Generator().manual_seed(1))
    inputs = [lhs] if op == "copy_lhs" else [lhs, rhs]
    wanted = torch.autograd.grad((expected * weights).sum(), inputs, materialize_grads=True)
    scattered = []
    put = argmax._put
    monkeypatch.setattr(argmax, "_put", lambda *given: scattered.append(1) or put(*given))
    found = torch.autograd.grad((ours * weights).sum(), inputs)
    assert len(scattered) == (op != "copy_lhs" and adj.num_edges > 0), "sources are not scattered"
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its, **CLOSE.get(dtype, {}))


def test_sums_over_views_of_negatives() -> None:
    """In memory their numbers have the other sign."""
    src, dst, num_src, num_dst = GRAPHS["odd"]
    adj = adjacency("odd")
    ids = (negated(torch.tensor(end)) for end in (src, dst))
    in_views = ops.Adjacency(*ids, num_src, num_dst)
    x = values(num_src, (3,), torch.float64, 1).requires_grad_()
    for reduce in ("sum", "max"):
        found = ops.gspmm(in_views, "copy_lhs", reduce, negated(x))
        expected = reference.gspmm(adj, "copy_lhs", reduce, x)
        torch.testing.assert_close(found, expected)
        grads = (
            torch.autograd.grad(out, x, view(torch.ones(num_dst, 3, dtype=x.dtype)))
            for out, view in ((found, negated), (expected, torch.clone))
        )
        torch.testing.assert_close(*grads)
    for op in ("dot", "add"):
        found = ops.gsddmm(in_views, op, negated(x), x[:num_dst])
        torch.testing.assert_close(found, reference.gsddmm(adj, op, x, x[:num_dst]))
    softmax = ops.edge_softmax(in_views, negated(x[src]))
    torch.testing.assert_close(softmax, reference.edge_softmax(adj, x[src]))


@pytest.mark.parametrize("score", SCORES)
def test_attention_over_views_of_negatives(score: str) -> None:
    adj = adjacency("odd")
    attention = AttentionCase(score, heads=3, edge=score == "additive").make(adj, torch.float64)
    names = ("values", "src", "dst", "edge", "vector", "factor")
    operands = {name: getattr(attention, name) for name in names}
    views = {name: negated(t) for name, t in operands.items() if t is not None}
    check(
        ops.attend(adj, dataclasses.replace(attention, **views)),
        reference.attend(adj, attention),
        inputs_of(attention),
    )


def test_agnn_is_that_of_dgl() -> None:
    src, dst = torch.tensor([0, 1, 2, 3, 3, 1]), torch.tensor([1, 2, 0, 3, 0, 0])
    theirs, ours = dgl_nn.AGNNConv(0.7), AGNNConv(0.7)
    x, y = (torch.randn(4, 5, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    x.requires_grad_()
    y.requires_grad_()
    expected = theirs(dgl.graph((src, dst), num_nodes=4), x)
    found = ours(graph((src, dst), num_nodes=4), y)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    torch.testing.assert_close(ours.beta.grad, theirs.beta.grad)
