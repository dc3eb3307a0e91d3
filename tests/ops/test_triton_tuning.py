# SPDX-License-Identifier: Apache-2.0
"""Configurations of Triton kernels: no bit depends on the choice, and how one is chosen. No GPU.

Times are made up here; on a GPU they are taken (tests/ops/test_on_gpu.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import AttentionCase, random_adjacency
from ops_cases import interpreted_triton
from torch import Tensor

from graphshard import ops
from graphshard.ops._dispatch import force_triton

interpreted_triton()
tune = importlib.import_module("graphshard.ops.triton._tune")
launch = importlib.import_module("graphshard.ops.triton._launch")
spmm = importlib.import_module("graphshard.ops.triton.spmm")
attention = importlib.import_module("graphshard.ops.triton.attention")
sddmm = importlib.import_module("graphshard.ops.triton.sddmm")

SLOW, FAST, ODD, LARGE = ({"number": number} for number in range(4))
OUT_OF_SHARED_MEMORY = tune.OutOfResources(200_000, 100_000, "shared memory")


class Kernel:
    """Adds 1 to a result; one configuration rounds differently, one does not fit."""

    def __init__(self, out: Tensor) -> None:
        self.out, self.runs = out, []

    def __call__(self, configuration: dict[str, int]) -> None:
        self.runs.append(configuration["number"])
        if configuration is LARGE:
            raise OUT_OF_SHARED_MEMORY
        self.out += 1 + (1e-6 if configuration is ODD else 0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Whose times are given: the odd one would be fastest."""
    made = Kernel(torch.zeros(3))
    times = {0: 3.0, 1: 2.0, 2: 1.0}

    def seconds(call: Callable[[], None], device: torch.device) -> float:
        call()
        return times[made.runs[-1]]

    monkeypatch.setattr(tune, "_chosen", {})
    monkeypatch.setattr(tune, "seconds", seconds)
    monkeypatch.setattr(tune, "_may_measure", lambda device: True)
    return made


def run(kernel: Kernel, *configurations: dict[str, int], work: int = tune.LEAST_WORK) -> None:
    tune.run_tuned(("key",), configurations, kernel, [kernel.out], work, updated=True)


def test_the_fastest_that_gives_the_same_bits_is_kept(kernel: Kernel) -> None:
    run(kernel, LARGE, SLOW, ODD, FAST)
    assert kernel.runs == [3, 0, 0, 2, 1, 1, 1]  # each, its time unless it failed, and the best
    assert kernel.out.tolist() == [1, 1, 1], "launches to take the time leave no trace"
    run(kernel, LARGE, SLOW, ODD, FAST)
    assert kernel.runs[7:] == [1]
    assert kernel.out.tolist() == [2, 2, 2]


def test_small_operands_take_the_first_that_fits(kernel: Kernel) -> None:
    run(kernel, LARGE, SLOW, FAST, work=tune.LEAST_WORK - 1)
    assert kernel.runs == [3, 0]
    assert not tune._chosen
    with pytest.raises(tune.OutOfResources, match="shared memory"):
        run(kernel, LARGE, LARGE)


def test_without_memory_for_copies_the_first_that_fits_is_kept(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(call: Callable[[], None], device: torch.device) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(tune, "seconds", none_left)
    run(kernel, LARGE, SLOW, FAST)
    assert kernel.out.tolist() == [1, 1, 1]
    assert tune._chosen == {("key",): SLOW}


def test_nothing_is_measured_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tune._may_measure(torch.device("cpu"))
    assert not tune._may_measure(torch.device("meta"))
    monkeypatch.setenv("GRAPHSHARD_AUTOTUNE", "0")
    monkeypatch.setattr(tune, "INTERPRETED", False)
    assert not tune._may_measure(torch.device("cuda"))


def test_kernels_run_on_the_gpu_where_the_operands_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    operands = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:1", "cpu")]
    call = launch.on_its_device(lambda first, *, more: (first, more))
    assert [call(first, more=7) for first in operands] == [(first, 7) for first in operands]
    assert entered == [torch.device("cuda:1")]


def results_of_each(
    monkeypatch: pytest.MonkeyPatch, module: Any, some: list[Any], call: Callable[[], Any]
) -> list[Any]:
    """What a call gives with each configuration of one module's kernels."""
    found = []
    for configuration in some:
        monkeypatch.setattr(
            module,
            "run_tuned",
            lambda key, given, run, *rest, updated=False, c=configuration: run(c),
        )
        with force_triton():
            found.append(call())
    return found


@pytest.mark.parametrize(
    "width", [5, *(pytest.param(w, marks=pytest.mark.exhaustive) for w in (70, 300)), 150]
)
def test_all_configurations_of_sums_give_the_same_bits(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adj = random_adjacency(9, 2, 14)
    x, weights = torch.randn(9, width), torch.randn(14, 1)

    def call() -> list[Tensor]:
        largest, edges = ops.gspmm_arg(adj, "mul", "max", x, weights)
        return [ops.gspmm(adj, "mul", "sum", x, weights), largest, edges]

    some = spmm.configurations(width)
    assert len(some) > 1
    first, *others = results_of_each(monkeypatch, spmm, some, call)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_all_configurations_of_values_per_edge_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adj = random_adjacency(9, 9, 30)
    x = torch.randn(9, 20)
    some = sddmm.configurations(20)
    assert len(some) > 1
    found = results_of_each(monkeypatch, sddmm, some, lambda: ops.gsddmm(adj, "div", x, x))
    assert all(torch.equal(found[0], other) for other in found)


def test_tiles_of_attention_follow_from_the_shape_alone() -> None:
    """Sums within a tile are trees: a tile must be chosen by nothing that differs between runs."""
    assert {tuple(c) for c in attention.AHEAD} == {("STAGES",)}
    adj = random_adjacency(3, 3, 5)
    tiles = [
        attention.tile_of(AttentionCase("additive", heads=heads, dim=dim).make(adj))
        for heads, dim in ((8, 8), (3, 20), (1, 256), (2, 5000))
    ]
    taken = [[tile[name] for name in ("EDGES", "HEADS", "DIM", "num_warps")] for tile in tiles]
    assert taken == [[8, 8, 8, 1], [8, 4, 32, 1], [8, 1, 256, 2], [1, 1, 8192, 8]]
