# SPDX-License-Identifier: Apache-2.0
"""affine and linear against torch.nn.functional; large results and small ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from case_selection import sampled
from graphshard.ops import AffineInSteps, affine, is_relu, linear

SMALL, LARGE = 7, 9000  # rows; 9000 x 128 float32 live in a block that is kept


def operands(rows, dtype, count, with_bias, with_plus):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    products = [(random(rows, 24 + i), random(24 + i, 128)) for i in range(count)]
    bias = random(128) if with_bias else None
    return products, bias, random(rows, 128) if with_plus else None


def expected(products, bias, plus, relu):
    result = sum(x @ w for x, w in products)
    for term in (bias, plus):
        result = result if term is None else result + term
    return F.relu(result) if relu else result


@pytest.mark.parametrize(
    ("rows", "dtype", "count", "with_bias", "with_plus", "relu"),
    sampled([SMALL, LARGE], [torch.float32, torch.float64], [1, 2], *[[False, True]] * 3),
)
def test_value_and_gradients_are_those_of_plain_torch(
    rows, dtype, count, with_bias, with_plus, relu
):
    products, bias, plus = operands(rows, dtype, count, with_bias, with_plus)
    inputs = [t for t in [*itertools.chain(*products), bias, plus] if t is not None]
    wide_inputs = [t.detach().double().requires_grad_() for t in inputs]
    found = iter(wide_inputs)
    wide_products = [(next(found), next(found)) for _ in products]
    wide_bias = next(found) if with_bias else None
    wide_plus = next(found) if with_plus else None
    result = affine(products, bias, plus, relu)
    oracle = expected(wide_products, wide_bias, wide_plus, relu)
    cotangent = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(result, inputs, cotangent)
    oracles = torch.autograd.grad(oracle, wide_inputs, cotangent.double())
    # The gradients of matrices are sums over all rows.
    tolerance = {"rtol": 1e-5, "atol": 1e-3} if dtype == torch.float32 else {}
    torch.testing.assert_close(result.double(), oracle, **tolerance)
    for grad, of_oracle in zip(grads, oracles, strict=True):
        torch.testing.assert_close(grad.double(), of_oracle, **tolerance)


@pytest.mark.parametrize(
    ("rows", "early", "late", "with_bias", "with_plus", "relu", "bfloat16"),
    sampled([SMALL, LARGE], [0, 1, 2], [0, 1], *[[False, True]] * 4),
)
def test_in_steps_it_is_the_same(rows, early, late, with_bias, with_plus, relu, bfloat16):
    if early + late == 0:
        return
    dtype = torch.float32 if bfloat16 else torch.float64
    products, bias, plus = operands(rows, dtype, early + late, with_bias, with_plus)
    inputs = [t for t in [*itertools.chain(*products), bias, plus] if t is not None]
    cotangent = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(dtype)

    if bfloat16 and relu:  # where a sum is near 0, rounding says what the ReLU lets through
        cotangent *= expected(products, bias, plus, False).detach().abs() > 0.3

    def in_steps(starts):
        steps = AffineInSteps(products[:early], [w for _, w in products[early:]], bias)
        if starts:
            steps.start()
        return steps.finish([x for x, _ in products[early:]], plus, relu)

    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        whole, *found = affine(products, bias, plus, relu), in_steps(False), in_steps(True)
    tolerance = {"rtol": 0.02, "atol": 0.1} if bfloat16 else {"rtol": 1e-9, "atol": 1e-9}
    grads = torch.autograd.grad(whole, inputs, cotangent.to(whole.dtype))
    for result in found:
        torch.testing.assert_close(result, whole, **tolerance)
        for twice in (True, False):  # the second time over the same nodes
            parts = cotangent.to(result.dtype)
            others = torch.autograd.grad(result, inputs, parts, retain_graph=twice)
            for grad, other in zip(grads, others, strict=True):
                torch.testing.assert_close(other, grad, **tolerance)


@pytest.mark.compiled
def test_gradients_of_what_was_started_come_last():
    events = []
    (x, w), (y, v) = operands(LARGE, torch.float32, 2, False, False)[0]
    v.register_hook(lambda _: events.append("matrix"))
    y = y.detach().requires_grad_()
    steps = AffineInSteps([(x, w)], [v])
    steps.start()
    between = y.sin()
    between.register_hook(lambda _: events.append("rows"))
    y.register_hook(lambda _: events.append("between"))
    steps.finish([between]).sum().backward()
    assert events == ["rows", "between", "matrix"]


@pytest.mark.parametrize("early", [0, 1])
def test_gradients_of_rows_alone_leave_nothing_behind(early):
    products, bias, _ = operands(LARGE, torch.float64, 2, True, False)
    steps = AffineInSteps(products[:early], [w for _, w in products[early:]], bias)
    steps.start()
    result, oracle = steps.finish([x for x, _ in products[early:]]), expected(products, bias, 0, 0)
    last = products[1][0], products[1][1]
    for power, inputs in ((2, last[:1]), (3, last), (2, last[:1]), (3, last[1:])):
        found, wanted = (
            torch.autograd.grad((out**power).sum(), inputs, retain_graph=True)
            for out in (result, oracle)
        )
        torch.testing.assert_close(found, wanted)


def test_gradients_of_gradients():
    products, bias, plus = operands(LARGE, torch.float64, 1, True, True)
    (x, w), *_ = products
    cotangent = torch.randn(LARGE, 128, dtype=torch.float64)

    def second(result):
        (first,) = torch.autograd.grad(result, w, cotangent, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    found = second(affine(products, bias, plus, relu=True))
    oracle = second(expected(products, bias, plus, relu=True))
    torch.testing.assert_close(found, oracle)
    for early in (products, []):
        steps = AffineInSteps(early, [] if early else [w], bias)
        steps.start()
        rows = [] if early else [x]
        torch.testing.assert_close(second(steps.finish(rows, plus, relu=True)), oracle)


@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_autocast_gives_what_a_linear_layer_gives(rows):
    layer = torch.nn.Linear(16, 256)
    x = torch.randn(rows, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        found = linear(x, layer)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_leading_dimensions_stay():
    layer = torch.nn.Linear(8, 128)
    x = torch.randn(3000, 4, 8)
    torch.testing.assert_close(linear(x, layer), layer(x))


def test_a_hooked_or_derived_layer_is_called():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    derived, hooked = Doubled(8, 128), torch.nn.Linear(8, 128)
    seen = []
    hooked.register_forward_hook(lambda *_: seen.append(True))
    x = torch.randn(LARGE, 8)
    assert torch.equal(linear(x, derived), derived(x))
    linear(x, hooked)
    assert seen == [True]


def test_transforms_of_functions_see_plain_operators():
    layer = torch.nn.Linear(8, 128)
    x = torch.randn(LARGE, 8)
    _, tangent = torch.func.jvp(lambda x: linear(x, layer), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.ones_like(x) @ layer.weight.t())


def test_which_activations_are_the_relu():
    assert all(is_relu(a) for a in (F.relu, torch.relu, torch.nn.ReLU()))
    assert not any(is_relu(a) for a in (None, F.elu, torch.nn.ReLU6(), torch.nn.LeakyReLU()))


def test_gradients_of_one_input_are_added_in_place() -> None:
    x = torch.randn(20_000, 128, requires_grad=True)  # large enough for memory that is used again
    first, second = (torch.randn(128, 128, requires_grad=True) for _ in range(2))
    h = x * 1
    total = (affine([(h, first)]) + affine([(h, second)])).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        total.backward()
    assert "aten::add" not in {event.key for event in profile.key_averages()}
