# SPDX-License-Identifier: Apache-2.0
"""Traced steps: bytes by layer and receiver against rows counted by hand. Up to 3 gloo ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn
from train_cases import (
    NUM_CLASSES,
    assignment,
    config_of,
    plain_graph,
    sampled_config_of,
    write_parts,
)

from graphshard.comm import trace
from graphshard.testing import run_ranks
from graphshard.train import FullBatchConfig, FullBatchRun, SampledConfig, SampledRun
from graphshard.train._run_folder import read_run_config
from graphshard.train._step_picture import _short, draw_steps
from graphshard.train._step_trace import (
    RankSteps,
    TraceRequest,
    _Recorder,
    chrome_trace,
    trace_steps,
)
from graphshard.train.commands import run


def traced_on_rank(
    rank: int, world_size: int, mode: str, values: dict[str, Any], steps: int, operators: bool
) -> list[str]:
    config: Any = {"full": FullBatchConfig, "sample": SampledConfig}[mode](**values)
    made: Any = {"full": FullBatchRun, "sample": SampledRun}[mode](config)
    return [json.dumps(dataclasses.asdict(each)) for each in trace_steps(made, steps, 2, operators)]


def traced(
    config: FullBatchConfig | SampledConfig, ranks: int, steps: int = 1, operators: bool = False
) -> list[RankSteps]:
    values = dataclasses.asdict(config)
    texts, *others = run_ranks(traced_on_rank, ranks, config.mode, values, steps, operators)
    assert not any(others)
    return [RankSteps.from_json(text) for text in texts]


@pytest.mark.parametrize("aggregation", ["oneshot", "sequential"])
def test_each_layer_sends_the_rows_that_others_read(tmp_path: Path, aggregation: str) -> None:
    num_parts = 3
    data = write_parts(tmp_path, "plain", num_parts, "no_train")
    # Both layers send rows of as many columns, 8 bytes each.
    config = config_of(
        data, model="gcn", hidden=NUM_CLASSES, aggregation=aggregation, dropout=0, eval_every=5
    )
    ranks = traced(config, num_parts)

    graph = plain_graph()
    owners = assignment(graph, num_parts, "no_train").tolist()
    pairs: dict[tuple[int, int], nx.Graph] = {}
    for source, target in zip(*(ids.tolist() for ids in graph.edges()), strict=True):
        pair = pairs.setdefault((owners[source], owners[target]), nx.Graph())
        pair.add_edge(("from", source), ("to", target))
    expected: dict[tuple[str, str], dict[tuple[int, int], int]] = {}
    saved = 0
    for (owner, reader), pair in pairs.items():
        if owner != reader:
            rows = {node for node in pair if node[0] == "from"}
            fewest = len(nx.bipartite.maximum_matching(pair, rows)) // 2  # rows and partial sums
            count = fewest if fewest <= 0.95 * len(rows) else len(rows)
            saved += len(rows) - count
            for layer in ("layers.0", "layers.1"):
                size = count * NUM_CLASSES * 8
                expected.setdefault((layer, "forward"), {})[owner, reader] = size
                expected.setdefault((layer, "backward"), {})[reader, owner] = size
    assert saved > 0
    sent: dict[tuple[str, str], dict[tuple[int, int], int]] = {}
    for each in ranks:
        for layer, direction, to, number in each.bytes:
            if layer and to >= 0:
                sent.setdefault((layer, direction), {})[each.rank, to] = number
    assert sent == expected


@pytest.mark.parametrize(("mode", "kind", "steps"), [("full", "typed", 1), ("sample", "plain", 2)])
def test_spans_lie_in_the_steps(tmp_path: Path, mode: str, kind: str, steps: int) -> None:
    data = write_parts(tmp_path, kind, 2)
    make: Any = {"full": config_of, "sample": sampled_config_of}[mode]
    config = make(data, model="rgcn" if kind == "typed" else "sage", epochs=6, eval_every=6)
    ranks = traced(config, 2, steps, operators=mode == "sample")
    for each in ranks:
        seconds = each.seconds()
        assert sum(seconds.values()) == pytest.approx((each.end - each.begin) / 1e9)
        assert min(seconds.values()) >= 0
        for kind_of_span, count in (("forward", 2), ("backward", 2), ("optimizer", 1)):
            spans = [span for span in each.spans if span[1] == kind_of_span]
            assert len(spans) == count * steps
            assert all(each.begin <= span[2] <= span[3] <= each.end for span in spans)
        assert any(span[1] == "wait" for span in each.spans)
        assert each.end == max(span[3] for span in each.spans if span[1] == "optimizer")
    events = chrome_trace(ranks)["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    forward = [e for e in events if e.get("cat") == "forward" and e["pid"] == 1]
    assert [e["name"] for e in forward] == ["layers.0", "layers.1"] * steps
    operators = [e for e in events if e.get("cat") == "cpu_op" and e["pid"] == 1]
    assert bool(operators) == (mode == "sample")
    # A layer multiplies matrices, on whatever clock its times were noted.
    for e in forward if operators else ():
        inside = [o for o in operators if e["ts"] <= o["ts"] <= e["ts"] + e["dur"]]
        assert any("linear" in o["name"] or "mm" in o["name"] for o in inside)
    draw_steps(ranks, tmp_path / "x.png", "a $name$")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight


class Outer(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows @ self.weight).relu()


def test_what_follows_an_inner_module_in_backward_is_the_outer_ones() -> None:
    model = nn.Sequential(Outer(), Outer())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = nn.Parameter(torch.ones(3, 2))  # as learned embeddings are
    with trace(timeline=True) as opened:
        recorder = _Recorder(model, optimizer, opened, warm_up=1)
        for _ in range(3):
            model(rows).sum().backward()
            optimizer.step()
        recorder.close()
    assert opened.spans is not None
    names = [span.name for span in opened.spans if span.kind == "backward"]
    assert names == ["1", "1.inner", "1", "0", "0.inner", "0"] * 2
    assert not rows._backward_hooks


def test_names_in_the_picture_are_short() -> None:
    assert _short("layers.0.relations.mods.('user', 'b$', 'item')") == r"layers.0 user:b\$:item"
    assert _short("layers.1") == "layers.1"
    assert _short("encoder." * 20 + "last") == "encoder.en…r.encoder.encoder.last"


def test_what_is_waited_for_is_taken_off() -> None:
    spans = [
        ("inputs", "inputs", 0, 10, 0),
        ("a", "wait", 5, 8, 0),
        ("layers.0", "forward", 10, 30, 0),
        ("layers.0.inner", "forward", 12, 20, 0),
        ("b", "wait", 18, 35, 0),
        ("b again", "wait", 20, 25, 0),
        ("c", "wait", 0, 100, 1),  # another thread's
        ("optimizer", "optimizer", 90, 100, 0),
    ]
    steps = RankSteps(0, "here", 0, 100, spans, [], [])
    nanoseconds = {kind: round(1e9 * value) for kind, value in steps.seconds().items()}
    assert nanoseconds == {
        "forward": 8,
        "backward": 0,
        "optimizer": 10,
        "inputs": 7,
        "other": 55,
        "waiting": 20,
    }


@pytest.mark.usefixtures("forked_interpreters")
def test_the_command_shows_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, folder = write_parts(tmp_path, "plain", 2), str(tmp_path / "run")
    words = ["--data", data, "--device", "cpu", "--epochs", "2", "--run", folder, "--quiet"]
    assert run(["train", "--model", "gat", *words]) == 0
    before = read_run_config(folder)
    assert (before.model, before.epochs) == ("gat", 2)
    capsys.readouterr()
    assert run(["trace", folder, "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "milliseconds of 2 steps" in shown
    assert "waiting" in shown
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert (tmp_path / "run" / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", str(tmp_path)]) == 2
    assert "there is no config.toml in" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text('[train]\nmode = "full"\n')
    assert run(["trace", str(tmp_path)]) == 2
    assert "is not the configuration of a run" in capsys.readouterr().err
    assert run(["trace", str(tmp_path), "--steps", "0"]) == 2
    assert "steps must be at least 1 (got 0)" in capsys.readouterr().err
    request = TraceRequest(run="a", out="b", operators=True)
    assert TraceRequest.from_json(request.to_json()) == request
