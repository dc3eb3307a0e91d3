# SPDX-License-Identifier: Apache-2.0
"""Modules that share passes: order, errors, gradient mode, threads. No process, and 2 ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import graph_of, write_parts
from torch import Tensor, nn

import graphshard
from graphshard import function as fn
from graphshard.fullbatch._together import Together
from graphshard.nn import HeteroGraphConv, SAGEConv
from graphshard.testing import run_ranks


def ask(together: Together, *request: Any) -> Any:
    coroutine = together.current()
    assert coroutine is not None
    return coroutine.ask(request)


def test_requests_are_answered_together_and_in_order() -> None:
    asked: list[list[Any]] = []

    def answer(requests: list[Any]) -> list[Any]:
        asked.append([r[0] for r in requests])
        return [r[0] * 10 for r in requests]

    together = Together(answer, torch.device("cpu"))

    def module(number: int, times: int) -> int:
        return sum(ask(together, number + i) for i in range(times))

    results = together.run([lambda: module(1, 2), lambda: module(5, 0), lambda: module(7, 1)])
    assert results == [10 + 20, 0, 70]
    assert asked == [[1, 7], [2]]
    assert together.current() is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_ends_all_and_leaves_no_thread(when: str) -> None:
    together = Together(lambda requests: [0] * len(requests), torch.device("cpu"))
    finished: list[str] = []

    def good() -> int:
        found = int(ask(together, 1))
        finished.append("good")
        return found

    def bad() -> int:
        if when == "after":
            ask(together, 2)
        raise ValueError("what went wrong")

    with pytest.raises(ValueError, match="what went wrong"):
        together.run([good, bad, good])
    assert finished == (["good"] if when == "after" else [])
    assert [t for t in threading.enumerate() if t.name == "graphshard-relation"] == []
    assert together.run([good, good]) == [0, 0]


def test_an_error_in_the_answer_reaches_the_caller() -> None:
    def answer(requests: list[Any]) -> list[Any]:
        raise RuntimeError("no answer")

    together = Together(answer, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no answer"):
        together.run([lambda: ask(together, 1), lambda: ask(together, 2)])
    assert [t for t in threading.enumerate() if t.name == "graphshard-relation"] == []


def test_modules_run_under_the_callers_modes() -> None:
    together = Together(lambda requests: [0] * len(requests), torch.device("cpu"))

    def modes() -> tuple[bool, bool]:
        ask(together, 0)
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert together.run([modes, modes]) == [(False, True)] * 2
    assert together.run([modes, modes]) == [(True, False)] * 2


class CapturesAResult(nn.Module):
    """Its message function uses a tensor that was computed before: refused, in a thread too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, graph: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        doubled = self.weight * 2
        with graph.local_scope():
            graph.srcdata["h"] = inputs[0]
            graph.update_all(lambda edges: {"m": edges.src["h"] * doubled}, fn.sum("m", "s"))
            result: Tensor = graph.dstdata["s"]
            return result


def refuse(rank: int, world_size: int, parts: str) -> list[str]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    inputs = {t: torch.ones(data.num_owned(t), 6) for t in data.node_type_names}
    conv = HeteroGraphConv({e: CapturesAResult() for e in graph.etypes})
    texts = []
    try:
        conv(graph, inputs)
    except RuntimeError as error:
        texts.append(str(error))
    good = HeteroGraphConv({e: SAGEConv(6, 6, "mean") for e in graph.etypes})
    texts.append(str(sorted(good(graph, inputs))))
    texts.append(str([t.name for t in threading.enumerate() if t.name == "graphshard-relation"]))
    return texts


def test_captured_tensors_are_refused_inside_a_typed_layer(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), 2, "random")
    for error, following, threads in run_ranks(refuse, 2, parts):
        assert "computed before it ran" in error
        assert following == "['a', 'b']"
        assert threads == "[]"
