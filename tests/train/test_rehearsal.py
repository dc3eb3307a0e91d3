# SPDX-License-Identifier: Apache-2.0
"""Networks of the user's own, rehearsed on small graphs: blocks by hand, and what runs tell of it.

Up to 2 ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import Net
from torch import nn
from train_cases import as_values, config_of, sampled_config_of, write_parts

import graphshard as gs
from graphshard.errors import ModelError
from graphshard.plan import (
    Exchanges,
    GraphSize,
    Machines,
    Network,
    PartSize,
    Rates,
    StepEvents,
    full_batch_step,
    plan_full_batch,
)
from graphshard.testing import run_ranks
from graphshard.train import FullBatchConfig, FullBatchRun, ModelSchema, SampledRun
from graphshard.train._rehearsal import Rehearsal

EDGE = ("_N", "_E", "_N")
SCHEMA = ModelSchema(
    node_types=("_N",), canonical_etypes=(EDGE,), target="_N", node_widths={"_N": 12}
)
WHOLE = PartSize(nodes={"_N": 1e6}, edges={EDGE: 9e6})


class Plain(nn.Module):
    """Two products and a ReLU between them; nothing travels along edges."""

    def __init__(self, schema: ModelSchema, **_: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 5)

    def forward(self, graphs: Any, features: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.last(self.first(features).relu())
        return rows[: graphs[-1].num_dst_nodes()]


class Fickle(Plain):
    """It does something else on large graphs."""

    def forward(self, graphs: Any, features: torch.Tensor) -> torch.Tensor:
        rows = super().forward(graphs, features)
        return rows * 2 if graphs[0].num_edges() > 1500 else rows


class Failing(Plain):
    """It fails where nodes have no numbers of their own."""

    def forward(self, graphs: Any, features: torch.Tensor) -> torch.Tensor:
        return super().forward(graphs, features) * graphs[0].ndata["mine"]


def sizes_at_peak(events: StepEvents) -> tuple[float, list[float]]:
    """The most bytes in use, and what was taken, largest first."""
    in_use: dict[int, float] = {}
    peak = 0.0
    for block, size, _ in (*events.forward, *events.backward):
        if size is None:
            in_use.pop(block)
        else:
            in_use[block] = size
        peak = max(peak, sum(in_use.values()))
    return peak, sorted((s for _, s, _ in events.forward if s is not None), reverse=True)


def test_blocks_by_hand() -> None:
    rehearsal = Rehearsal(f"{__name__}:Plain", SCHEMA, {}, torch.float32, [])
    trained = rehearsal([WHOLE], trains=True)
    _, taken = sizes_at_peak(trained)
    # The first product, its ReLU, and the last product; of a million nodes.
    assert taken[:3] == pytest.approx([1e6 * 32 * 4] * 2 + [1e6 * 5 * 4], rel=0.005)
    assert trained.num_parameters == 12 * 32 + 32 + 32 * 5 + 5
    matrices = [size for _, size, _ in trained.backward if size == 32 * 5 * 4]
    assert matrices, "the gradient of a matrix is as large on a graph of any size"
    # An evaluation keeps nothing: the product and its ReLU, and then the result.
    evaluated = rehearsal([WHOLE], trains=False)
    assert not evaluated.backward
    assert sizes_at_peak(evaluated)[0] == pytest.approx(2 * 1e6 * 32 * 4, rel=0.01)
    block = PartSize(nodes={"_N": 1e3}, sources={"_N": 5e3}, edges={EDGE: 1e4})
    assert sizes_at_peak(rehearsal([block], trains=True))[1][0] == pytest.approx(5e3 * 32 * 4)


def test_a_plan_of_a_network_that_is_seen_is_that_of_one_that_is_known() -> None:
    """SAGE written by a user, and the same on paper, within what paper leaves out."""
    schema = ModelSchema(
        node_types=("_N",), canonical_etypes=(EDGE,), target="_N", node_widths={"_N": 64}
    )
    arguments = {"hidden": 64, "layers": 2, "dropout": 0.5, "out": 10}
    own = Rehearsal(f"{Net.__module__}:Net", schema, arguments, torch.float32, [])
    graph = GraphSize(
        name="g", nodes={"_N": 1e6}, edges={EDGE: 9e6}, features={"_N": 64}, num_classes=10,
        target="_N", train=1e5,
    )  # fmt: skip
    # Net has a linear layer first, and no ReLU or dropout after it.
    known = Network(model="sage", features={"_N": 64}, out=10, hidden=64, layers=2, dropout=0.5)
    peaks = []
    for seen in (None, own):
        network = Network(**{**vars(known), "own": seen})
        how = Exchanges(mode="oneshot")
        machines = Machines(rates=Rates(interpreter=0.0))
        epoch = plan_full_batch(graph, network, machines, how)
        peaks.append(epoch.memory.expected)
        assert sum(epoch.items.values()) == pytest.approx(epoch.memory.expected, rel=0.02)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.25)


class Attentive(Net):
    """Attention, of which nothing is known."""

    @staticmethod
    def _layer(schema: ModelSchema, width: int, out: int, aggregator: Any) -> nn.Module:
        return gs.nn.GATConv(width, out, 1, allow_zero_in_degree=True, activation=_one_head)


def _one_head(rows: torch.Tensor) -> torch.Tensor:
    return rows.flatten(1)


TYPED_SCHEMA = ModelSchema(
    node_types=("a", "b"),
    canonical_etypes=(("a", "r", "b"), ("b", "s", "a")),
    target="b",
    node_widths={"a": 12, "b": 6},
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("schema", [SCHEMA, TYPED_SCHEMA], ids=["plain", "typed"])
def test_zeros_of_rows_that_are_read(schema: ModelSchema, dtype: torch.dtype) -> None:
    """The first layer reads products; the second what is behind a ReLU and a dropout of a half."""
    arguments = {"hidden": 32, "layers": 3, "dropout": 0.5, "out": 5}
    edges = dict.fromkeys(schema.canonical_etypes, 9e6)
    part = PartSize(nodes=dict.fromkeys(schema.node_types, 1e6), edges=edges)
    own = Rehearsal(f"{Net.__module__}:Net", schema, arguments, dtype, [])
    # The last one multiplies before it sums.
    trained = own([part] * 3, trains=True)
    assert trained.zeros == pytest.approx([0, 0.75, 0], abs=0.1)
    assert own([part] * 3, trains=False).zeros == pytest.approx([0, 0.5, 0], abs=0.15)
    if schema is SCHEMA:
        attentive = Rehearsal(f"{__name__}:Attentive", schema, arguments, dtype, [])
        assert attentive([part] * 3, trains=True).zeros == (0, 0, 0)


def test_zeros_that_were_seen_are_those_of_the_plan() -> None:
    arguments = {"hidden": 64, "layers": 3, "dropout": 0.5, "out": 5}
    own = Rehearsal(f"{Net.__module__}:Net", SCHEMA, arguments, torch.float32, [])
    part = PartSize(
        nodes={"_N": 1e5}, edges={EDGE: 9e5}, halo={"_N": 1e4}, sent={"_N": 1e4}, train=1e5
    )
    graph = GraphSize(
        name="g", nodes={"_N": 2e5}, edges={EDGE: 18e5}, features={"_N": 12}, num_classes=5,
        target="_N", train=2e5, parts=(part, part),
    )  # fmt: skip
    network = Network(
        model="sage", features={"_N": 12}, out=5, hidden=64, layers=3, encoder=True, own=own
    )
    how = Exchanges(mode="oneshot", num_ranks=2)
    seen = own([part] * 3, trains=True).zeros
    step = full_batch_step(graph, network, part, how, Rates())
    first, second, last = (e for e in step.tape.exchanges if e.direction == "forward")
    assert not any(first.zeros[0] + last.zeros[0])
    assert second.zeros[0][1] == pytest.approx(seen[1] * 1e4 * 64 * 4)
    assert second.zeros[0][0] == pytest.approx((seen[1] - 0.1) * 1e4 * 64 * 4)


@pytest.mark.parametrize(
    ("name", "why"),
    [("Fickle", "does not do the same on graphs of two sizes"), ("Failing", "KeyError")],
)
def test_networks_that_cannot_be_rehearsed_say_why(name: str, why: str) -> None:
    rehearsal = Rehearsal(f"{__name__}:{name}", SCHEMA, {}, torch.float32, [])
    with pytest.raises(ModelError, match=f"must run on small graphs of random edges.*{why}"):
        rehearsal([WHOLE], trains=True)


def notes_of(rank: int, world_size: int, values: dict[str, Any]) -> list[str]:
    """What a run says of its plan."""
    notes: list[str] = []
    FullBatchRun(FullBatchConfig(**values), progress=lambda r: notes.append(r.note or "")).train()
    return [note for note in notes if "plan" in note]


@pytest.mark.parametrize(
    ("kind", "num_ranks", "values"),
    [
        ("plain", 2, {"model": "own_models:Net"}),
        ("typed", 2, {"model": "own_models:Net", "dtype": "bfloat16"}),
        pytest.param(
            "typed", 5, {"model": "own_models:Net"}, marks=pytest.mark.exhaustive, id="empty"
        ),
        pytest.param(
            "edge_values", 2, {"model": "own_models:Net", "task": "edge regression"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "several_links", 2, {"model": "own_models:Net", "task": "link prediction"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("edge_categories", 1, {"model": "gat"}, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_runs_tell_their_plans(
    kind: str, num_ranks: int, values: dict[str, Any], tmp_path: Path
) -> None:
    how = "empty_part" if num_ranks == 5 else "random"
    data = write_parts(tmp_path, kind, num_ranks, how)
    config = config_of(data, epochs=1, **values)
    told = run_ranks(notes_of, num_ranks, as_values(config))[0]
    assert [note.split(":")[0] for note in told] == ["planned", "against the plan"]


def test_a_budget_is_held_against_own_models_and_tasks_on_edges(tmp_path: Path) -> None:
    data = write_parts(tmp_path / "nodes", "plain", 1)
    refused = r"memory must be at least .* MiB .*got 50 MiB"
    with pytest.raises(ValueError, match=refused):
        SampledRun(sampled_config_of(data, model="own_models:Net", memory="50MiB"))
    with pytest.raises(ValueError, match=refused):
        FullBatchRun(config_of(data, model="own_models:Layered", memory="50MiB"))
    data = write_parts(tmp_path / "edges", "edge_values", 1)
    on_edges = {"model": "sage", "task": "edge regression", "memory": "50MiB"}
    with pytest.raises(ValueError, match=refused):
        FullBatchRun(config_of(data, **on_edges))
    with pytest.raises(ValueError, match=refused):
        SampledRun(sampled_config_of(data, **on_edges))


def test_a_run_within_a_budget_rehearses_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that is held against the budget is that which is told."""
    trained: list[bool] = []
    events = Rehearsal._events

    def counted(rehearsal: Rehearsal, *given: Any, trains: bool) -> Any:
        trained.append(trains)
        return events(rehearsal, *given, trains=trains)

    monkeypatch.setattr(Rehearsal, "_events", counted)
    config = config_of(write_parts(tmp_path, "plain", 1), model="own_models:Layered", memory="8GiB")
    notes: list[str] = []
    run = FullBatchRun(config, progress=lambda report: notes.append(report.note or ""))
    assert trained == [True, True, False, False]  # on graphs of two sizes
    assert run._planned is not None
    assert run._planned.at_start() in notes
    with pytest.raises(ValueError, match="memory must be at least"):
        SampledRun(sampled_config_of(config.data, model=config.model, memory="50MiB"))
    # Blocks of a step, and no evaluation beside it: that goes layer by layer.
    assert trained[4:] == [True, True]
