# SPDX-License-Identifier: Apache-2.0
"""Kernels and plain torch against the reference: dtypes, id types, odd graphs, ties, odd memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_cases import GRAPHS, SHAPES, adjacency, in_each_way, num_rows, values
from torch import Tensor

from forked_programs import run_program
from graphshard import ops
from graphshard._base.kernels import extension_available, force_extension
from graphshard.ops import reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
IDTYPES = [torch.int32, torch.int64]
BINARY = ("add", "sub", "mul", "div")


def check(ours: Any, expected: Any, inputs: list[Tensor]) -> None:
    """Values, shapes, dtypes and gradients."""
    close = {"atol": 0.05, "rtol": 0.02} if ours.dtype == torch.bfloat16 else {}
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, equal_nan=True, **close)
    weights = torch.randint(1, 4, ours.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((ours * weights).sum(), inputs, allow_unused=True)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        if b is not None or a is not None:
            torch.testing.assert_close(a, b, equal_nan=True, **close)


@in_each_way(
    "op,reduce,dtype,idtype",
    [*BINARY, "copy_lhs", "copy_rhs"],
    ["sum", "mean", "max", "min"],
    DTYPES,
    IDTYPES,
)
def test_gspmm(op: str, reduce: str, dtype: torch.dtype, idtype: torch.dtype, way: str) -> None:
    for name in GRAPHS:
        adj = adjacency(name, idtype)
        for node, edge in SHAPES:
            lhs = None if op == "copy_rhs" else values(adj.num_src, node, dtype, 1)
            rhs = None if op == "copy_lhs" else values(adj.num_edges, edge, dtype, 2)
            inputs = [t.requires_grad_() for t in (lhs, rhs) if t is not None]
            expected = reference.gspmm(adj, op, reduce, lhs, rhs)
            check(ops.gspmm(adj, op, reduce, lhs, rhs), expected, inputs)
            if reduce in ("max", "min"):
                found, edge_ids = ops.gspmm_arg(adj, op, reduce, lhs, rhs)
                value, argmax = reference.gspmm_arg(adj, op, reduce, lhs, rhs)
                torch.testing.assert_close(found, value)
                assert torch.equal(edge_ids.long(), argmax.long())


@in_each_way("op,dtype,idtype", [*BINARY, "dot", "copy_lhs", "copy_rhs"], DTYPES, IDTYPES)
def test_gsddmm(op: str, dtype: torch.dtype, idtype: torch.dtype, way: str) -> None:
    for name in GRAPHS:
        adj = adjacency(name, idtype)
        for left, right in ("uv", "vu", "ue", "ev", "ee", "uu"):
            for node, edge in SHAPES:
                if op == "dot" and node[-1:] != edge[-1:]:
                    continue
                lhs = values(num_rows(adj, left), node, dtype, 1).requires_grad_()
                rhs = values(num_rows(adj, right), edge, dtype, 2).requires_grad_()
                one = None if op == "copy_rhs" else lhs
                other = None if op == "copy_lhs" else rhs
                expected = reference.gsddmm(adj, op, one, other, left, right)
                inputs = [t for t in (one, other) if t is not None]
                check(ops.gsddmm(adj, op, one, other, left, right), expected, inputs)


@pytest.mark.parametrize("norm_by", ["dst", "src"])
@pytest.mark.parametrize("idtype", IDTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_softmax(dtype: torch.dtype, idtype: torch.dtype, norm_by: Any, way: str) -> None:
    for name in GRAPHS:
        adj = adjacency(name, idtype)
        for features in ((), (1,), (4, 1), (3,)):
            logits = values(adj.num_edges, features, dtype, 3).requires_grad_()
            expected = reference.edge_softmax(adj, logits, norm_by)
            check(ops.edge_softmax(adj, logits, norm_by), expected, [logits])


def test_a_tie_goes_to_the_smallest_edge_id(way: str) -> None:
    adj = ops.Adjacency(torch.tensor([2, 1, 0]), torch.tensor([0, 0, 0]), 3, 1)
    rows = torch.ones(3, 2, requires_grad=True)
    for reduce in ("max", "min"):
        (grad,) = torch.autograd.grad(ops.gspmm(adj, "copy_lhs", reduce, rows, None).sum(), rows)
        assert torch.equal(grad, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))


def test_results_may_be_changed_in_place(way: str) -> None:
    adj = adjacency("odd")
    x = values(adj.num_src, (2, 3), torch.float64, 1).requires_grad_()
    y = values(adj.num_dst, (2, 3), torch.float64, 2).requires_grad_()
    w = values(adj.num_edges, (2, 1), torch.float64, 3).requires_grad_()
    for operator in (
        lambda: ops.gspmm(adj, "copy_lhs", "sum", x, None),
        lambda: ops.gspmm(adj, "mul", "mean", x, w),
        lambda: ops.gspmm(adj, "mul", "max", x, w),
        lambda: ops.gsddmm(adj, "add", x, y),
        lambda: ops.gsddmm(adj, "dot", x, y),
        lambda: ops.gspmm(adj, "copy_rhs", "sum", None, w),
    ):
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        expected = torch.autograd.grad((operator() * 3 + 1).square().sum(), (x, y, w), **options)
        changed = operator().mul_(3).add_(1)
        found = torch.autograd.grad(changed.square().sum(), (x, y, w), **options)
        torch.testing.assert_close(found, expected)


def test_operands_in_odd_memory(way: str) -> None:
    adj = adjacency("odd")
    base = values(5, (adj.num_src,), torch.float64, 1)
    weights = values(adj.num_edges, (2,), torch.float64, 2)[:, :1]
    for lhs in (base.t(), base.t().flip(0)[:, ::2], base[:1].t().expand(-1, 3)):
        lhs = lhs.detach().requires_grad_()
        expected = reference.gspmm(adj, "mul", "sum", lhs, weights)
        check(ops.gspmm(adj, "mul", "sum", lhs, weights), expected, [lhs])


def test_infinity_and_nan_pass_through(way: str) -> None:
    adj = ops.Adjacency(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), 3, 2)
    rows = torch.tensor([[float("inf")], [1.0], [float("nan")]])
    out = ops.gspmm(adj, "copy_lhs", "sum", rows, None)
    assert out[0].item() == float("inf")
    assert torch.isnan(out[1]).item()
    logits = torch.tensor([[1000.0], [-1000.0], [3.0]])
    assert torch.equal(ops.edge_softmax(adj, logits), torch.tensor([[1.0], [0.0], [1.0]]))


def test_results_do_not_depend_on_the_number_of_threads(way: str) -> None:
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, 500, (20_000,), generator=generator)
    dst = (torch.rand(20_000, generator=generator) ** 3 * 500).long()
    adj = ops.Adjacency(src, dst, 500, 500)
    rows = torch.randn(500, 33, generator=generator)
    weights = torch.randn(20_000, 1, generator=generator)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(
                [
                    ops.gspmm(adj, "mul", "sum", rows, weights),
                    ops.gspmm(adj, "copy_lhs", "max", rows, None),
                    ops.gsddmm(adj, "dot", rows, rows),
                    ops.edge_softmax(adj, weights),
                ]
            )
    finally:
        torch.set_num_threads(before)
    if way == "kernels":
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda a, x, w: ops.gspmm(a, "dot", "sum", x, w), ValueError, "dot"),
        (lambda a, x, w: ops.gspmm(a, "mul", "median", x, w), ValueError, "median"),
        (lambda a, x, w: ops.gspmm(a, "mul", "sum", x[:-1], w), ValueError, "6"),
        (lambda a, x, w: ops.gspmm(a, "mul", "sum", x, w[:-1]), ValueError, "11"),
        (lambda a, x, w: ops.gspmm(a, "mul", "sum", x, None), (ValueError, TypeError), "rhs"),
        (lambda a, x, w: ops.gspmm(a, "mul", "sum", x, w.expand(-1, 4)), ValueError, "4"),
        (lambda a, x, w: ops.gsddmm(a, "mul", x, w, "u", "x"), ValueError, "x"),
        (lambda a, x, w: ops.edge_softmax(a, w, "both"), ValueError, "both"),
        (lambda a, x, w: ops.edge_softmax(a, w[:-1]), ValueError, "11"),
    ],
)
def test_wrong_input(call: Any, error: Any, text: str, way: str) -> None:
    adj = adjacency("odd")
    rows, weights = torch.ones(adj.num_src, 3), torch.ones(adj.num_edges, 1)
    with pytest.raises(error, match=text):
        call(adj, rows, weights)


def test_absence_of_the_kernels_warns_once() -> None:
    """In a process in which the extension cannot be imported."""
    script = """
        import sys, warnings
        sys.modules["graphshard._kernels"] = None
        import torch
        from graphshard import ops
        adj = ops.Adjacency(torch.tensor([0]), torch.tensor([1]), 2, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                out = ops.gspmm(adj, "copy_lhs", "sum", torch.ones(2, 1), None)
        texts = [str(w.message) for w in caught if "compiled kernels" in str(w.message)]
        assert len(texts) == 1, texts
        assert "pip install" in texts[0]
        assert out.tolist() == [[0.0], [1.0]]
        assert not ops.extension_available()
    """
    run_program(script, GRAPHSHARD_NO_EXTENSION=None)


def test_forcing_absent_kernels_is_an_error() -> None:
    if extension_available():
        with force_extension(False):
            assert not extension_available()
        assert extension_available()
        return
    with pytest.raises(RuntimeError, match="needs the compiled kernels"), force_extension(True):
        pass
