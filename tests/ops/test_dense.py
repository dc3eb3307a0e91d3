# SPDX-License-Identifier: Apache-2.0
"""Products of rows with matrices, and gradients of matrices. No process.

Oracle: numpy in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphshard import ops
from graphshard._base.kernels import _load, extension_available

pytestmark = pytest.mark.skipif(not extension_available(), reason="there are no kernels")

# Rows about the height of a tile, of a block and of a task; widths about those of panels.
NUM_ROWS = (0, 1, 5, 12, 13, 145, 600, 5000)
SIZES = ((1, 1), (3, 7), (12, 16), (13, 17), (40, 33), (300, 48), (513, 100))


@pytest.fixture(params=[16, 32, 64])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The kernels, with registers of so many bytes."""
    module: Any = _load()
    before = module.limit_registers(request.param)
    try:
        if module.limit_registers(request.param) != request.param:
            pytest.skip(f"this processor has no registers of {request.param} bytes")
        yield module
    finally:
        module.limit_registers(before)


def exact(x: Tensor, w: Tensor) -> np.ndarray[Any, Any]:
    return np.asarray(x.double().numpy() @ w.double().numpy())


def assert_near(found: Tensor, expected: np.ndarray[Any, Any], terms: int) -> None:
    """Within what rounding each of so many terms of size 1 may do."""
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-5, atol=3e-6 * terms**0.5)


@pytest.mark.parametrize(("inner", "width"), SIZES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_rows_times_matrices(num_rows: int, inner: int, width: int, kernels: Any) -> None:
    x, w, other = torch.randn(num_rows, inner), torch.randn(inner, width), torch.randn(num_rows, 2)
    others = torch.randn(width, 2).t()  # of other strides
    bias, plus = torch.randn(1, width), torch.randn(num_rows, width)
    expected = exact(x, w) + exact(other, others)
    for first in (None, bias, plus):
        before = 0 if first is None else first.double().numpy()
        for relu in (False, True):
            out = torch.full((num_rows, width), float("nan"))
            kernels.multiply_rows(out, [x, other], [w, others], first, relu, 2)
            result = expected + before
            assert_near(out, np.maximum(result, 0) if relu else result, inner)
    kernels.multiply_rows(plus, [x], [w], plus.clone(), False, 1)
    again = plus.clone()
    kernels.multiply_rows(again, [x], [w], again, False, 1)
    assert_near(again, exact(x, w) + plus.double().numpy(), inner)


@pytest.mark.parametrize(("inner", "width"), SIZES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_gradients_of_matrices(num_rows: int, inner: int, width: int, kernels: Any) -> None:
    x, grad = torch.randn(num_rows, inner), torch.randn(num_rows, width)
    out = torch.full((inner, width), float("nan"))
    kernels.multiply_transposed(out, x, grad, 2)
    assert_near(out, exact(x.t(), grad), num_rows)


def test_rows_that_lie_apart(kernels: Any) -> None:
    x, w, grad = torch.randn(50, 30), torch.randn(20, 9), torch.randn(50, 40)
    whole = torch.zeros(50, 12)
    kernels.multiply_rows(whole[:, 1:10], [x[:, 5:25]], [w], None, False, 1)
    assert_near(whole[:, 1:10], exact(x[:, 5:25], w), 20)
    assert not whole[:, [0, 10, 11]].any()
    same = x[:1].expand(50, 30)
    kernels.multiply_rows(whole[:, 1:10], [same[:, :20]], [w], None, False, 1)
    assert_near(whole[:, 1:10], exact(same[:, :20], w), 20)
    out = torch.zeros(7, 33)
    kernels.multiply_transposed(out, x[:, 3:10], grad[:, :33], 1)
    assert_near(out, exact(x[:, 3:10].t(), grad[:, :33]), 50)


def test_neither_threads_nor_other_rows_change_a_bit(kernels: Any) -> None:
    x, w, grad = torch.randn(9000, 130), torch.randn(130, 47), torch.randn(9000, 47)
    results, gradients = [], []
    for threads in (1, 2, 5):
        out, of_matrix = torch.zeros(9000, 47), torch.zeros(130, 47)
        kernels.multiply_rows(out, [x], [w], None, False, threads)
        kernels.multiply_transposed(of_matrix, x, grad, threads)
        results.append(out)
        gradients.append(of_matrix)
    assert all(torch.equal(out, results[0]) for out in results)
    assert all(torch.equal(out, gradients[0]) for out in gradients)
    for begin, end in ((0, 1), (1, 14), (777, 4001)):
        part = torch.zeros(end - begin, 47)
        kernels.multiply_rows(part, [x[begin:end]], [w], None, False, 1)
        assert torch.equal(part, results[0][begin:end])


def test_what_is_no_number_stays_where_it_is(kernels: Any) -> None:
    x, w = torch.randn(30, 20), torch.randn(20, 9)
    x[3, 4], x[7, 1], w[:, 5] = float("nan"), float("inf"), float("nan")
    for relu in (False, True):
        out = torch.zeros(30, 9)
        kernels.multiply_rows(out, [x], [w], None, relu, 1)
        expected = x.double() @ w.double()
        expected = expected.relu() if relu else expected
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.isinf(), expected.isinf())
    out = torch.zeros(20, 9)
    kernels.multiply_transposed(out, x, torch.ones(30, 9), 1)
    expected = x.double().t() @ torch.ones(30, 9, dtype=torch.float64)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())


@pytest.mark.parametrize(
    "changed",
    [
        {"out": torch.zeros(5, 3)},
        {"out": torch.zeros(3, 6).t()},
        {"rows": [torch.zeros(6, 5)]},
        {"rows": []},
        {"rows": [torch.zeros(4, 6).t()]},
        {"matrices": [torch.zeros(4, 2)]},
        {"first": torch.zeros(2, 3)},
        {"first": torch.zeros(6, 2)},
    ],
    ids=str,
)
def test_operands_that_do_not_fit(changed: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "out": torch.zeros(6, 3), "rows": [torch.zeros(6, 4)], "matrices": [torch.zeros(4, 3)],
        "first": None, "relu": False, "num_threads": 1,
    } | changed  # fmt: skip
    module: Any = _load()
    with pytest.raises(ValueError, match="must"):
        module.multiply_rows(*given.values())


def test_what_is_written_lies_apart() -> None:
    module: Any = _load()
    x, rows, matrix = torch.zeros(6, 6), torch.zeros(6, 4), torch.zeros(4, 3)
    with pytest.raises(ValueError, match="must not overlap"):
        module.multiply_rows(x[:, 1:4], [rows], [matrix], x[:, :3], False, 1)
    with pytest.raises(ValueError, match="must not overlap"):
        module.multiply_rows(x, [x], [torch.zeros(6, 6)], None, False, 1)
    with pytest.raises(ValueError, match="must not overlap"):
        module.multiply_transposed(x, x, torch.zeros(6, 6), 1)
    with pytest.raises(ValueError, match="rows must be"):
        module.multiply_transposed(x, torch.zeros(5, 6), torch.zeros(6, 6), 1)


@pytest.mark.parametrize("gains", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_operators_take_either_way(
    dtype: torch.dtype, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = _load()
    monkeypatch.setattr(module, "gains_from_products", lambda: gains)
    x, w, grad = (torch.randn(s).to(dtype) for s in ((2000, 40), (40, 30), (2000, 30)))
    bias, plus = torch.randn(30).to(dtype), torch.randn(30, 2000).to(dtype).t()
    close = {"rtol": 0.02, "atol": 0.5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-3}
    for first in (None, bias, plus):
        found = ops.multiply([(x, w), (x.flip(1), w)], first, relu=True)
        sums = x.double() @ w.double() + x.flip(1).double() @ w.double()
        sums = sums if first is None else sums + first.double()
        torch.testing.assert_close(found.double(), sums.relu(), **close)
    with torch.no_grad():
        found = ops.multiply_transposed(x, grad)
    torch.testing.assert_close(found.double(), x.double().t() @ grad.double(), **close)
