# SPDX-License-Identifier: Apache-2.0
"""Operators on a GPU: the values of the CPU, the same bits again, little memory. A GPU.

What `tests/ops/test_triton.py` sees in Triton's interpreter is compiled here, with the
configurations that are chosen by their times. The oracle is the reference on the CPU, in float64.
"""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from attention_cases import AttentionCase, inputs_of, random_adjacency
from torch import Tensor

from graphshard import ops
from graphshard.ops import Adjacency, Attention, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
IDTYPES = [torch.int32, torch.int64]
CLOSE = {
    torch.float64: {"atol": 1e-9, "rtol": 1e-9},
    torch.float32: {"atol": 1e-3, "rtol": 1e-4},
    torch.bfloat16: {"atol": 0.3, "rtol": 0.03},
    torch.float16: {"atol": 0.05, "rtol": 0.01},
}
SPMM = [
    ("copy_lhs", "sum"),
    ("copy_rhs", "mean"),
    ("mul", "sum"),
    ("add", "max"),
    ("mul", "min"),
    ("div", "mean"),
]


def graph_with_hubs(idtype: torch.dtype) -> Adjacency:
    """A source and a destination with more edges than a piece has."""
    return random_adjacency(500, 400, 6000, idtype, hub=5000)


def on_gpu(adj: Adjacency) -> Adjacency:
    src, dst = (ends.cuda() for ends in adj.coo())
    return Adjacency(src, dst, adj.num_src, adj.num_dst)


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    tolerance = {name: size * scale for name, size in CLOSE[found.dtype].items()}
    torch.testing.assert_close(found.double().cpu(), expected.double(), **tolerance)


def twice_the_same(call: object) -> list[Tensor]:
    """What a call gives, if it gives the same bits again."""
    assert callable(call)
    first, *others = (call() for _ in range(3))
    for other in others:
        for one, again in zip(first, other, strict=True):
            assert torch.equal(one, again)
    return list(first)


@pytest.mark.parametrize("idtype", IDTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "reduce"), SPMM)
def test_sums_and_extrema(op: str, reduce: str, dtype: torch.dtype, idtype: torch.dtype) -> None:
    adj = graph_with_hubs(idtype)
    lhs = (torch.randn(adj.num_src, 4, 16) + 2).to(dtype)
    rhs = (torch.rand(adj.num_edges, 4, 1) + 0.5).to(dtype)
    grad = torch.randn(adj.num_dst, 4, 1 if op == "copy_rhs" else 16)
    mine = [side.cuda().requires_grad_() for side in (lhs, rhs)]
    wide = [side.double().requires_grad_() for side in (lhs, rhs)]

    def call() -> list[Tensor]:
        out = ops.gspmm(device_adj, op, reduce, *mine)
        weights = grad.to(out)
        return [out, *torch.autograd.grad(out, mine, weights, materialize_grads=True)]

    device_adj = on_gpu(adj)
    out, *grads = twice_the_same(call)
    expected = reference.gspmm(adj, op, reduce, *wide)
    # Sums of 5000 numbers; rounded messages make ties where there are none in float64.
    close(out, expected, 3 if dtype.itemsize > 2 else 1)
    if reduce in ("sum", "mean") and dtype.itemsize > 2:
        wanted = torch.autograd.grad(expected, wide, grad.double(), materialize_grads=True)
        for found, its in zip(grads, wanted, strict=True):
            close(found, its, 10)


@pytest.mark.parametrize(
    ("score", "size"),
    list(itertools.product(["additive", "joint", "dot"], [(8, 8), (3, 20), (1, 256), (2, 1100)])),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(score: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    heads, dim = size
    adj = graph_with_hubs(torch.int32)
    case = AttentionCase(score, heads=heads, dim=dim, edge=True, factor=1, dropout=0.3)
    attention = case.make(adj, dtype)
    device_adj = on_gpu(adj)
    mine = moved(attention)
    inputs = inputs_of(mine)

    def call() -> list[Tensor]:
        out = ops.attend(device_adj, mine)
        squares = (out.float() if dtype.itemsize == 2 else out).square()
        return [out, *torch.autograd.grad(squares.sum(), inputs)]

    out, *grads = twice_the_same(call)
    if dim > 300:  # the reference makes rows per edge
        return
    wide = case.make(adj)
    operands = [None if t is None else t.detach().double() for t in attention.operands]
    wide = wide.with_operands([None if t is None else t.requires_grad_() for t in operands])
    expected = reference.attend(adj, wide)
    close(out, expected, 3)
    if dtype.itemsize > 2:
        for found, its in zip(
            grads, torch.autograd.grad(expected.square().sum(), inputs_of(wide)), strict=True
        ):
            close(found, its, 10)


def moved(attention: Attention) -> Attention:
    """On the GPU, with operands that want gradients there."""
    operands = [
        None if t is None else t.detach().cuda().requires_grad_() for t in attention.operands
    ]
    return attention.with_operands(operands)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_added(dtype: torch.dtype) -> None:
    for total in {dtype, torch.promote_types(dtype, torch.float32)}:
        table = torch.randn(4000, 2, 70).to(total)
        rows = torch.randn(2500, 70).to(dtype)
        places = torch.randperm(4000)[:2500]
        expected = table.clone()
        expected[:, 1].index_add_(0, places, rows.to(total))
        for idtype in IDTYPES:
            found = table.cuda()
            ops.add_rows(found[:, 1], places.to(idtype).cuda(), rows.cuda())
            assert torch.equal(found.cpu(), expected)


def test_gradients_of_gathers_repeat() -> None:
    adj = on_gpu(graph_with_hubs(torch.int64))
    rows = torch.randn(adj.num_src, 33, device="cuda", requires_grad=True)
    weights = torch.randn(adj.num_edges, 33, device="cuda")

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(ops.gsddmm(adj, "copy_lhs", rows, None, "u"), rows, weights)

    (found,) = twice_the_same(call)
    expected = torch.zeros(rows.shape, dtype=torch.float64)
    close(found, expected.index_add_(0, adj.coo()[0].cpu(), weights.double().cpu()), 30)


def test_configurations_are_chosen_among_equals() -> None:
    tune = importlib.import_module("graphshard.ops.triton._tune")
    spmm = importlib.import_module("graphshard.ops.triton.spmm")
    adj = on_gpu(random_adjacency(50_000, 50_000, 500_000, torch.int32, hub=9000))
    x = torch.randn(50_000, 64, device="cuda")
    before = set(tune._chosen)
    found = ops.gspmm(adj, "copy_lhs", "sum", x)
    (key,) = set(tune._chosen) - before
    assert tune._chosen[key] in spmm.configurations(64)
    for configuration in spmm.configurations(64):
        tune._chosen[key] = configuration
        assert torch.equal(ops.gspmm(adj, "copy_lhs", "sum", x), found)


def test_attention_stores_nothing_per_edge() -> None:
    adj = on_gpu(random_adjacency(20_000, 20_000, 1_000_000, torch.int32))
    adj.csc(), adj.csr()
    mine = moved(AttentionCase("additive", heads=8, dim=8).make(adj, torch.float32))
    ops.attend(adj, mine).square().sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops.attend(adj, mine).square().sum().backward()
    rows = 20_000 * 64 * 4
    assert torch.cuda.max_memory_allocated() - before < 20 * rows < 1_000_000 * 64 * 4
