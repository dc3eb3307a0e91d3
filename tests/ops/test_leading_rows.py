# SPDX-License-Identifier: Apache-2.0
"""The first rows of a tensor: torch's slice is the oracle."""

from __future__ import annotations

import pytest
import torch

from graphshard.nn.inputs import are_leading_rows
from graphshard.ops import leading_rows

LARGE = (1 << 15, 40)  # more than 4 MB of float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 1000, LARGE[0]])
def test_rows_and_gradient_are_those_of_a_slice(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * LARGE[0], LARGE[1], generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(count, LARGE[1], generator=generator).to(dtype)

    ours, plain = leading_rows(x, count), x[:count]
    assert type(ours.grad_fn).__name__ == "_LeadingRowsBackward"
    assert torch.equal(ours, plain)
    grads = []
    for rows in (ours, plain):
        # Read by others, too, before it and after it.
        loss = (x.sum() + (rows * weights).sum()) + x[:5].square().sum()
        (grad,) = torch.autograd.grad(loss, [x])
        grads.append(grad)
    assert torch.equal(*grads)
    assert grads[0][count:].float().sum() != 0 or count == len(x)


def test_gradients_of_gradients() -> None:
    x = torch.randn(LARGE, dtype=torch.float64, requires_grad=True)
    seconds = []
    for rows in (leading_rows(x, 100), x[:100]):
        (grad,) = torch.autograd.grad((rows**3).sum(), [x], create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), [x])
        seconds.append(second)
    torch.testing.assert_close(*seconds)


def test_small_rows_and_those_without_a_gradient_are_sliced() -> None:
    for x in (torch.ones(4, 3, requires_grad=True), torch.ones(LARGE)):
        assert leading_rows(x, 2)._base is x
    with torch.no_grad():
        assert leading_rows(torch.ones(LARGE, requires_grad=True), 2).grad_fn is None


def test_which_rows_are_the_first_of_others() -> None:
    x = torch.randn(*LARGE, requires_grad=True)
    heads = x.unflatten(1, (4, 10))
    for some, rows in ((x, x), (x[:7], x), (leading_rows(x, 7), x), (heads[:7], heads)):
        assert are_leading_rows(some, rows)
    others = (x[1:7], x[:7, :20], x[:14:2], x[:7].clone(), heads[:7], torch.randn(7, 40))
    assert not any(are_leading_rows(some, x) for some in others)
