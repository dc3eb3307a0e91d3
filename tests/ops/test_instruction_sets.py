# SPDX-License-Identifier: Apache-2.0
"""Kernels for processors of several kinds, on this one. No process, and programs.

Oracles: the reference in plain torch, and torch.optim.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch
from attention_cases import AttentionCase
from ops_cases import adjacency

from forked_programs import run_program
from graphshard import ops
from graphshard._base.kernels import kernels_for
from graphshard.ops import reference

CPU = torch.device("cpu")


@pytest.fixture(params=[16, 32, 64])
def register_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    """The width of the registers that kernels use meanwhile."""
    kernels = kernels_for(CPU)
    if kernels is None:
        pytest.skip("the compiled kernels are not installed")
    before = kernels.limit_registers(request.param)
    try:
        if kernels.limit_registers(request.param) != request.param:
            pytest.skip(f"this processor has no registers of {request.param} bytes")
        yield request.param
    finally:
        kernels.limit_registers(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 100])
def test_sums_and_products(width: int, dtype: torch.dtype, register_bytes: int) -> None:
    adj = adjacency("odd")
    lhs = torch.randn(adj.num_src, width).to(dtype).requires_grad_()
    rhs = torch.randn(adj.num_edges, width).to(dtype).requires_grad_()
    at_dst = torch.randn(adj.num_dst, width).to(dtype)
    exact = [x.detach().double().requires_grad_() for x in (lhs, rhs)]
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    for reduce in ("sum", "mean", "max", "min"):
        found = ops.gspmm(adj, "mul", reduce, lhs, rhs)
        expected = reference.gspmm(adj, "mul", reduce, *exact)
        torch.testing.assert_close(found.double(), expected, **close)
    copied = ops.gspmm(adj, "copy_lhs", "sum", lhs, None)
    expected = reference.gspmm(adj, "copy_lhs", "sum", exact[0], None)
    torch.testing.assert_close(copied.double(), expected, **close)
    dots = ops.gsddmm(adj, "dot", lhs, at_dst)
    expected = reference.gsddmm(adj, "dot", exact[0], at_dst.double())
    torch.testing.assert_close(dots.double(), expected, **close)


@pytest.mark.parametrize("score", ["additive", "joint", "dot"])
def test_attention(score: str, register_bytes: int) -> None:
    adj = adjacency("odd")
    for heads, dim in ((4, 16), (3, 5)):
        case = AttentionCase(score, heads, dim, edge=True)
        found = ops.attend(adj, case.make(adj, torch.float32))
        expected = reference.attend(adj, case.make(adj, torch.float64))
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    logits = torch.randn(adj.num_edges, 3)
    expected = reference.edge_softmax(adj, logits.double())
    found = ops.edge_softmax(adj, logits).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


STEPS_AS_TORCH = """
    import torch
    from graphshard import ops

    if not ops.extension_available():
        raise SystemExit
    torch.manual_seed(0)
    table, grad, rows = torch.randn(50, 64), torch.randn(50, 64), torch.arange(50)
    parameter = torch.nn.Parameter(table.clone())
    parameter.grad = grad.clone()
    torch.optim.SGD([parameter], 0.1).step()
    ops.update_rows(ops.UpdateRule("sgd", 0.1), [table], rows, [grad], rows, torch.arange(51))
    assert torch.equal(table, parameter.detach()), torch.backends.cpu.get_cpu_capability()
"""


@pytest.mark.parametrize(
    "capability", ["default", pytest.param("avx2", marks=pytest.mark.exhaustive)]
)
def test_what_holds_torchs_kernels_holds_these(capability: str) -> None:
    """A product is rounded before it is added where torch rounds it, and not where it does not."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("torch chooses by this variable on x86 alone")
    if capability == "avx2" and "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("AVX2 is more than torch uses here")
    run_program(STEPS_AS_TORCH, ATEN_CPU_CAPABILITY=capability)
