# SPDX-License-Identifier: Apache-2.0
"""agree, share_error, all_reduce: verdicts that every rank learns. 1 to 5 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from graphshard.comm import (
    ExchangePlan,
    agree,
    all_reduce,
    barrier,
    fetch_halo,
    rank,
    share_error,
    start_fetch,
    trace,
    world_size,
)
from graphshard.errors import PartitionFormatError
from graphshard.testing import run_ranks


def agree_on(own, size, values):
    with trace() as counted:
        agree("the same" * 5000, "a long text")
    assert counted.calls == ({"agree": 1} if size > 1 else {})
    assert counted.total_bytes == 33 * (size - 1)
    try:
        agree(values[own], "the format version")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("size", [1, 3])
def test_equal_values_pass(size):
    assert run_ranks(agree_on, size, ["v1"] * size) == [None] * size


def test_the_ranks_that_differ_are_named():
    text = (
        "the format version must be the same on all ranks, but ranks [2, 4] differ from rank 0: "
        "ranks [0, 1, 3] have 'v1', rank 2 has 'v2', rank 4 has 'v3'"
    )
    assert run_ranks(agree_on, 5, ["v1", "v1", "v2", "v1", "v3"]) == [text] * 5


def test_long_values_are_shown_around_the_difference():
    one, two = "a" * 3000 + "b" + "c" * 3000, "a" * 3000 + "d" + "c" * 3000
    (text, _) = run_ranks(agree_on, 2, [one, two])
    assert "aabcc" in text
    assert "aadcc" in text
    assert len(text) < 800


def test_values_that_differ_beyond_what_is_shown():
    (text, _) = run_ranks(agree_on, 2, ["a" * 9000, "a" * 9001])
    assert "but rank 1 differs from rank 0" in text


def agree_on_bytes(own, size):
    try:
        agree(b"\xff\x00" if own == 1 else b"\xff\x01", "the key")
    except ValueError as error:
        return str(error)
    return None


def test_bytes():
    for text in run_ranks(agree_on_bytes, 2):
        assert r"rank 0 has '\\xff\x01', rank 1 has '\\xff\x00'" in text


def share(own, size, errors):
    error = make(errors[own])
    with trace() as counted:
        try:
            share_error(error)
        except Exception as shared:
            assert error is None or errors[own] != first(errors) or shared.__cause__ is error
            return type(shared).__name__, str(shared), getattr(shared, "ranks", None)
    assert counted.calls == {"agree": 1}
    return None


def make(name):
    kinds = {"value": ValueError, "format": PartitionFormatError, "zero": ZeroDivisionError}
    return kinds[name](f"a {name} problem") if name else None


def first(errors):
    return next(name for name in errors if name)


def test_no_error_passes():
    assert run_ranks(share, 3, [None] * 3) == [None] * 3


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None, "value", None], ("ValueError", "rank 1: a value problem", None)),
        (
            [None, "format", "value"],
            ("PartitionFormatError", "rank 1: a format problem (so did ranks [2])", None),
        ),
        (
            ["zero", None, None],
            ("RankError", "rank 0 raised ZeroDivisionError: a zero problem", (0,)),
        ),
    ],
)
def test_the_first_error_is_shared(errors, expected):
    assert run_ranks(share, 3, errors) == [expected] * 3


def share_alone(own, size):
    share_error(None)
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        share_error(error)
    assert caught.value is error


def test_one_rank_raises_its_own_error():
    run_ranks(share_alone, 1)


def check_all_reduce(own, size):
    values = [torch.tensor([[r, -r], [2 * r, 5]], dtype=torch.int64) for r in range(size)]
    stacked = torch.stack(values)
    mine = values[own].clone()
    assert torch.equal(all_reduce(mine), stacked.sum(0))
    assert torch.equal(all_reduce(mine, "max"), stacked.amax(0))
    assert torch.equal(all_reduce(mine.t(), "min"), stacked.amin(0).t())
    assert torch.equal(mine, values[own])
    with trace() as counted:
        x = torch.full((3,), own + 1.0, dtype=torch.float64, requires_grad=True)
        (all_reduce(x) * (own + 1)).sum().backward()
    total = float(sum(range(1, size + 1)))
    assert torch.equal(x.grad, torch.full((3,), total, dtype=torch.float64))
    assert counted.calls == ({"agree": 1, "all_reduce": 2} if size > 1 else {})
    assert counted.total_bytes == (48 + 33 * (size - 1) if size > 1 else 0)
    with pytest.raises(NotImplementedError, match="has no gradient; pass x.detach"):
        all_reduce(x, "max")
    with pytest.raises(ValueError, match="op must be 'sum', 'max', 'min' or a ReduceOp"):
        all_reduce(x, "mean")


def reduce_badly(own, size):
    messages = []
    for x, op in (
        (torch.ones(4, dtype=torch.float64 if own == 1 else torch.float32), "sum"),
        (torch.ones(1000 if own == 1 else 4), "max"),
        (torch.ones(4), "min" if own == 1 else "max"),
        (torch.ones(4), torch.distributed.ReduceOp.AVG),
        (torch.ones(4, dtype=torch.int16), "sum"),
        (torch.eye(2).to_sparse(), "sum"),
        (torch.ones(2), "mean" if own == 1 else "sum"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            all_reduce(x, op)
        messages.append(str(caught.value))
    assert torch.equal(all_reduce(torch.ones(2)), torch.full((2,), float(size)))
    return messages


def test_tensors_that_cannot_be_reduced_are_an_error_on_all_ranks():
    texts = [
        "rank 1 has 'float64[4] sum'",
        "rank 1 has 'float32[1000] max'",
        "rank 1 has 'float32[4] min'",
        "gloo has no ReduceOp.AVG; use SUM, and divide",
        "gloo has no all_reduce of torch.int16; convert with",
        "all_reduce takes dense tensors",
        "rank 1: op must be 'sum', 'max', 'min' or a ReduceOp (got 'mean')",
    ]
    for messages in run_ranks(reduce_badly, 3):
        for message, text in zip(messages, texts, strict=True):
            assert text in message


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce(size):
    run_ranks(check_all_reduce, size)


def in_subgroup(own, size):
    """Ranks 1 and 2 are a group of their own; messages name ranks of the whole."""
    group = dist.new_group([1, 2])
    if own == 0:
        with pytest.raises(ValueError, match="group must be a process group that this process is"):
            agree("a", "it", group)
        return None
    assert (rank(group), world_size(group)) == (own - 1, 2)
    assert all_reduce(torch.tensor([own]), group=group).item() == 3
    barrier(group)
    mine, other = torch.full((2, 3), float(own)), torch.full((2, 3), 3.0 - own)
    nothing = torch.empty(0, dtype=torch.int64)
    rows = torch.tensor([1, 0])
    plan = ExchangePlan.build([rows, nothing] if own == 2 else [nothing, rows], 2, group)
    assert torch.equal(fetch_halo([(plan, mine)])[0], other)
    assert torch.equal(start_fetch(plan, 1, [mine]).wait()[0], other)
    try:
        agree(str(own), "it", group)
    except ValueError as error:
        return str(error)
    return None


def test_subgroups():
    text = (
        "it must be the same on all ranks, but rank 2 differs from rank 1: "
        "rank 1 has '1', rank 2 has '2'"
    )
    assert run_ranks(in_subgroup, 3) == [None, text, text]


def test_a_process_that_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (rank(), world_size()) == (0, 1)
    agree("a", "it")
    assert torch.equal(all_reduce(torch.ones(2)), torch.ones(2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"call graphshard.initialize_comms\(\) first"):
        agree("a", "it")
