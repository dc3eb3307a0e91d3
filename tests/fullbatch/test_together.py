# SPDX-License-Identifier: Apache-2.0
"""Layers that share passes: order, errors, modes. No process, and 2 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import graph_of, write_parts
from torch import Tensor, nn

import graphshard
from graphshard import comm
from graphshard import function as fn
from graphshard.graph.message_passing import AggregationStep, Steps, run_together
from graphshard.nn import HeteroGraphConv, SAGEConv
from graphshard.testing import run_ranks


def ask(number: int) -> AggregationStep:
    graph: Any = None
    return AggregationStep(graph, number, None)


def test_aggregations_are_answered_together_and_in_order() -> None:
    asked: list[list[Any]] = []

    def steps(number: int, times: int) -> Steps[int]:
        for i in range(times):
            yield ask(number + i)
        return number * 10

    def update(together: Sequence[AggregationStep]) -> None:
        asked.append([one.message for one in together])

    started = [steps(1, 2), "no steps", steps(5, 0), steps(7, 1)]
    assert run_together(started, update) == [10, "no steps", 50, 70]
    assert asked == [[1, 7], [2]]


@pytest.mark.parametrize("when", ["before", "after", "update"])
def test_an_error_closes_all(when: str) -> None:
    left: list[str] = []

    def good() -> Steps[int]:
        try:
            yield ask(1)
            yield ask(2)
        finally:
            left.append("good")
        return 0

    def bad() -> Steps[int]:
        if when == "before":
            raise ValueError("what went wrong")
        yield ask(2)
        raise ValueError("what went wrong")

    def update(together: Sequence[AggregationStep]) -> None:
        if when == "update":
            raise ValueError("what went wrong")

    with pytest.raises(ValueError, match="what went wrong"):
        run_together([good(), bad(), good()], update)
    assert left == (["good"] if when == "before" else ["good", "good"])


def shared(rank: int, world_size: int, parts: str) -> list[int]:
    """Messages of typed layers in sequential mode: with steps, without, with a hook."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")

    class Other(SAGEConv):
        """A subclass, which may have changed the forward: it aggregates by itself."""

    found = []
    for kind, hooked in ((SAGEConv, False), (Other, False), (SAGEConv, True)):
        conv = HeteroGraphConv({e: kind(6, 8, "mean") for e in graph.etypes})
        if hooked:
            for module in conv.mods.values():
                module.register_forward_hook(lambda *_: None)
        inputs = {t: torch.ones(data.num_owned(t), 6, requires_grad=True) for t in graph.ntypes}
        with comm.trace() as trace:
            conv(graph, inputs)
        found.append(trace.bytes_sent["send"])
    return found


def test_layers_in_steps_share_what_they_fetch(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), 2, "random")
    for steps, alone, hooked in run_ranks(shared, 2, parts):
        assert steps < alone
        assert alone == hooked


class CapturesAResult(nn.Module):
    """Its message function uses a tensor that was computed before: refused."""

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
    return texts


def test_captured_tensors_are_refused_inside_a_typed_layer(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), 2, "random")
    for error, following in run_ranks(refuse, 2, parts):
        assert "computed before it ran" in error
        assert following == "['a', 'b']"
