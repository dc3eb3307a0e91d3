# SPDX-License-Identifier: Apache-2.0
"""group_equal, sum_groups, update_rows against sorting, indexing and optimizers of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from case_selection import sampled
from graphshard.ops import UpdateRule, group_equal, sum_groups, update_rows

WIDTHS = [1, 3, 128, 129]
IDS = {
    "few": torch.tensor([7, 4, 7, 7, 0, 4]),
    "none": torch.tensor([], dtype=torch.int64),
    "one": torch.tensor([3]),
    "equal": torch.full((5,), 9),
    "many": torch.randint(0, 3000, (7000,)),
    "negative": torch.tensor([-1, 5, -9, -1]),
    "far apart": torch.tensor([2**63 - 1, -(2**63), 0, 2**63 - 1]),
    "ascending": torch.arange(100) // 3,
}
LR, EPS, BETAS = 0.1, 1e-3, (0.8, 0.95)
#: Of each step, from 1 on; and the optimizer of torch.
RULES: dict[str, tuple[Callable[[int], UpdateRule], Callable[..., Any]]] = {
    "sgd": (lambda step: UpdateRule("sgd", LR), lambda p: torch.optim.SGD(p, LR)),
    "adagrad": (
        lambda step: UpdateRule("adagrad", LR, EPS),
        lambda p: torch.optim.Adagrad(p, LR, eps=EPS),
    ),
    "adam": (
        lambda step: UpdateRule(
            "adam", LR * (1 - BETAS[1] ** step) ** 0.5 / (1 - BETAS[0] ** step), EPS, BETAS
        ),
        lambda p: torch.optim.SparseAdam(p, LR, BETAS, EPS),
    ),
}


def beginning_anywhere(rows: Tensor, offset: int) -> Tensor:
    """The same, ``offset`` bytes behind a multiple of 64."""
    size = rows.numel() * 4
    memory = torch.zeros(size + 128, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64 + offset
    held = torch.frombuffer(memory.numpy(), dtype=rows.dtype, count=rows.numel(), offset=begin)
    return held.view(rows.shape).copy_(rows)


@pytest.mark.parametrize(("case", "dtype"), sampled(list(IDS), [torch.int32, torch.int64]))
def test_equal_ids(case: str, dtype: torch.dtype, way: str) -> None:
    ids = IDS[case].to(dtype)
    distinct, starts, order = group_equal(ids)
    expected, counts = torch.unique(ids, return_counts=True)
    assert distinct.dtype == dtype
    assert torch.equal(distinct, expected)
    assert starts[0] == 0
    assert torch.equal(starts.diff(), counts)
    assert torch.equal(order, torch.argsort(ids, stable=True))


@pytest.mark.parametrize(("width", "offset"), sampled(WIDTHS, [0, 4, 2]))
def test_sums(width: int, offset: int, way: str) -> None:
    """Rows of three tables, one of them empty, to columns of a wider one."""
    tables = [torch.randn(n, width + 2)[:, 2:] for n in (40, 0, 25)]
    ids = torch.randint(0, 30, (65,))
    distinct, starts, order = group_equal(ids)
    wide = beginning_anywhere(torch.zeros(distinct.numel(), width + 5), offset)
    sum_groups(wide[:, 3:-2], tables, order, starts)
    expected = torch.zeros(30, width, dtype=torch.float64)
    expected.index_add_(0, ids, torch.cat(tables).double())
    torch.testing.assert_close(wide[:, 3:-2], expected[distinct].float(), rtol=1e-6, atol=1e-6)
    assert not wide[:, :3].any()
    assert not wide[:, -2:].any()
    some = torch.full((2, width), 5.0)
    sum_groups(some, tables, order, starts[4:7])  # of some groups alone; and of none
    assert torch.equal(some, wide[4:6, 3:-2])
    sum_groups(some[:0], tables, order, starts[:1])
    sum_groups(some[:1], tables, order, starts[:1].repeat(2))
    assert not some[0].any()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("kind", "width", "offset"), sampled(list(RULES), WIDTHS, [0, 4, 2]))
def test_rows_change_as_by_an_optimizer_of_torch(
    kind: str, width: int, offset: int, way: str
) -> None:
    rule, make = RULES[kind]
    first = torch.randn(50, width)
    embedding = torch.nn.Embedding(50, width, sparse=True, _weight=first.clone())
    optimizer = make(embedding.parameters())
    zeros = [torch.zeros(50, width) for _ in range(rule(1).num_tables - 1)]
    changed = [beginning_anywhere(table, offset) for table in (first, *zeros)]
    for step in (1, 2, 3):
        ids, grad = torch.randint(0, 50, (20 * step,)), torch.randn(20 * step, width)
        distinct, starts, order = group_equal(ids)
        update_rows(rule(step), changed, distinct.int(), [grad[:7], grad[7:]], order, starts)
        update_rows(rule(step), changed, distinct[:0], [grad], order, starts[:1])
        optimizer.zero_grad()
        (embedding(ids) * grad).sum().backward()
        optimizer.step()
    torch.testing.assert_close(changed[0], embedding.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("order", "inner", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6], (0, 0), 1e8),
        ([0, 1, 2, 3, 4, 5, 6], (1, 7), 1e8 + 8),
        ([0, 1, 2, 3, 4, 5, 6], (2, 7), 1e8 + 8),
        ([0, 1, 2, 3, 4, 5, 6], (3, 6), 1e8),
        ([1, 2, 3, 4, 5, 0, 6], (0, 0), 1e8 + 8),
        ([1, 0, 2, 3, 4, 5, 6], (2, 7), 1e8 + 8),
    ],
)
def test_gradients_of_a_range_are_added_up_first(
    order: list[int], inner: tuple[int, int], expected: float, way: str
) -> None:
    """1e8 grows when a 5 is added, and not when a 1 is, five times."""
    tables, weight = [torch.tensor([[1e8], [1.0]]), torch.ones(5, 1)], torch.zeros(1, 1)
    rule, row = UpdateRule("sgd", -1.0), torch.tensor([0])
    update_rows(rule, [weight], row, tables, torch.tensor(order), torch.tensor([0, 7]), inner)
    assert float(weight) == expected


def test_the_number_of_threads_does_not_matter() -> None:
    rule = RULES["adagrad"][0](1)
    ids, grad = torch.randint(0, 20_000, (30_000,)), torch.randn(30_000, 33)
    distinct, starts, order = group_equal(ids)
    found, number = [], torch.get_num_threads()
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            changed, sums = [torch.ones(20_000, 33) for _ in range(2)], grad[: distinct.numel()] * 0
            sum_groups(sums, [grad], order, starts)
            update_rows(rule, changed, distinct, [grad], order, starts)
            found.append([*changed, sums])
    finally:
        torch.set_num_threads(number)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", [1, 5]),
        ("rows", [-1, 2]),
        ("rows", [2, 1]),
        ("rows", [1, 1]),
        ("order", [0, 1, 3]),
        ("order", [0, 1, -1]),
        ("starts", [0, 2, 4]),
        ("starts", [-1, 2, 3]),
        ("starts", [0, 4, 3]),
    ],
)
def test_out_of_range_changes_nothing(name: str, value: list[int], way: str) -> None:
    given = {"rows": [1, 2], "order": [0, 1, 2], "starts": [0, 2, 3]} | {name: value}
    rows, order, starts = (torch.tensor(numbers) for numbers in given.values())
    changed, grads = [torch.ones(5, 4) for _ in range(2)], [torch.randn(3, 4)]
    with pytest.raises(IndexError):
        update_rows(RULES["adagrad"][0](1), changed, rows, grads, order, starts)
    assert all(bool((table == 1).all()) for table in changed)
    if name != "rows":
        with pytest.raises(IndexError):
            sum_groups(changed[0][:2], grads, order, starts)
        assert bool((changed[0] == 1).all())


def test_what_does_not_fit_is_an_error(way: str) -> None:
    rule, rows, starts = RULES["adagrad"][0](1), torch.tensor([1]), torch.tensor([0, 1])
    order, grad, table = torch.tensor([0]), torch.ones(1, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="adagrad changes a list of 2"):
        update_rows(rule, [table], rows, [grad], order, starts)
    with pytest.raises(ValueError, match=r"must have shape \(3, 4\)"):
        update_rows(rule, [table, torch.zeros(3, 5)], rows, [grad], order, starts)
    with pytest.raises(TypeError, match=r"must be torch.float32"):
        update_rows(rule, [table, table.double()], rows, [grad], order, starts)
    with pytest.raises(ValueError, match="one entry more than rows"):
        update_rows(rule, [table, table.clone()], rows, [grad], order, starts[:1])
    with pytest.raises(ValueError, match="as many columns as the first"):
        sum_groups(table[:1], [grad, torch.ones(1, 5)], order, starts)
    with pytest.raises(TypeError, match=r"torch.float32 on the CPU"):
        sum_groups(table[:1], [grad.double()], order, starts)
    with pytest.raises(ValueError, match="must be a list of one or more"):
        sum_groups(table[:1], [], order, starts)
    with pytest.raises(ValueError, match="name must be one of sgd, adagrad, adam"):
        UpdateRule("lion", 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rate must be a number"):
        UpdateRule("sgd", "fast")  # type: ignore[arg-type]
