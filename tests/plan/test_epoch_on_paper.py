# SPDX-License-Identifier: Apache-2.0
"""Epochs on paper beside real ones, and beside what is found by hand.

Bytes are those that a trace of a real epoch counts (2 and 3 gloo ranks), parameters those of the
real model. Memory is compared with the high-water mark of a process, with ``--all``. Nothing is
compared with a clock.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import graphshard as gs
from graphshard.comm import halo as comm_halo
from graphshard.comm.transport import start_exchange
from graphshard.data import random_graph
from graphshard.fullbatch import row_transport
from graphshard.fullbatch.fewest_rows import count_fewest_rows
from graphshard.fullbatch.topology import LocalEdges
from graphshard.partition import partition_graph
from graphshard.plan import (
    EpochPlan,
    Exchanges,
    GraphSize,
    Machines,
    Memory,
    Network,
    PartSize,
    Rates,
    Sampling,
    Tape,
    _networks,
    estimated_parts,
    full_batch_step,
    make_plan,
    parse_bytes,
    parse_link,
    plan_full_batch,
    plan_sampled,
    read_rates,
    sampled_parts,
)
from graphshard.testing import run_ranks
from graphshard.train import FullBatchConfig, _calibrate
from graphshard.train._calibrate import TrialNetwork, calibrate
from graphshard.train._defaults import DENSE
from graphshard.train._plan_inputs import exchanges_of, facts_of, network_of, size_of_partition

EDGE = ("_N", "_E", "_N")
COMPARED = 256
"""Bytes of an epoch in which ranks compare their models, and what gradients there are."""


class Own(torch.nn.Module):
    """A network of a user, of a linear layer for each type and means along relations."""

    def __init__(self, schema: Any, hidden: int, layers: int, dropout: float, out: int) -> None:
        super().__init__()
        self.inputs = torch.nn.ModuleDict(
            {t: torch.nn.Linear(width, hidden) for t, width in schema.node_widths.items()}
        )
        self.layers = torch.nn.ModuleList(
            gs.nn.HeteroGraphConv(
                {
                    etype: gs.nn.SAGEConv(hidden, out if i + 1 == layers else hidden, "mean")
                    for etype in schema.canonical_etypes
                }
            )
            for i in range(layers)
        )

    def forward(self, graphs: Any, features: Any) -> Any:
        rows = {t: self.inputs[t](x) for t, x in features.items()}
        for layer, graph in zip(self.layers, graphs, strict=True):
            rows = layer(graph, rows)
        return rows


class Broken(Own):
    """It reads what no node has."""

    def forward(self, graphs: Any, features: Any) -> Any:
        return graphs[0].ndata["nothing"]


COMMON: dict[str, Any] = {"hidden": 8, "layers": 2, "epochs": 2, "dropout": 0.3}
SEQUENTIAL = {"aggregation": "sequential"}


def write_plain(folder: Path, num_parts: int) -> str:
    graph = random_graph(300, 1200, seed=0, feat_dim=12, num_classes=5)
    partition_graph(graph, "g", num_parts, str(folder), part_method="random", quiet=True)
    return str(folder / "g.json")


def write_hubs(folder: Path, num_parts: int) -> str:
    """A graph in which few nodes have most edges, in and out: sums of rows save a third."""
    torch.manual_seed(0)
    hubs, others = torch.randint(12, (900,)), torch.randint(300, (900,))
    graph = gs.graph((torch.cat([hubs, others]), torch.cat([others, hubs])), num_nodes=300)
    graph.ndata["feat"] = torch.randn(300, 12)
    graph.ndata["label"] = torch.randint(5, (300,))
    for number, split in enumerate(("train", "val", "test")):
        graph.ndata[f"{split}_mask"] = torch.arange(300) % 3 == number
    partition_graph(graph, "g", num_parts, str(folder), part_method="random", quiet=True)
    return str(folder / "g.json")


def write_typed(folder: Path, num_parts: int) -> str:
    partition_graph(typed(), "g", num_parts, str(folder), part_method="random", quiet=True)
    return str(folder / "g.json")


def typed() -> gs.Graph:
    sizes = {"author": 60, "paper": 120}
    torch.manual_seed(0)

    def edges(source: str, target: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(sizes[source], (count,)), torch.randint(sizes[target], (count,))

    graph = gs.heterograph(
        {
            ("author", "writes", "paper"): edges("author", "paper", 200),
            ("paper", "cites", "paper"): edges("paper", "paper", 300),
            ("paper", "rev_writes", "author"): edges("paper", "author", 150),
        },
        sizes,
    )
    graph.nodes["paper"].data["feat"] = torch.randn(120, 12)
    graph.nodes["author"].data["feat"] = torch.randn(60, 6)
    graph.nodes["paper"].data["label"] = torch.randint(5, (120,))
    for number, split in enumerate(("train", "val", "test")):
        graph.nodes["paper"].data[f"{split}_mask"] = torch.arange(120) % 3 == number
    return graph


def write_edges(folder: Path, num_parts: int) -> str:
    """The typed graph with a class of each citation, and with links of two relations."""
    torch.manual_seed(1)
    graph = typed()
    for number, name in enumerate(("writes", "cites")):
        data, count = graph.edges[name].data, graph.num_edges(name)
        chosen = torch.rand(count)
        for split, low in (("train", 0.0), ("val", 0.6), ("test", 0.8)):
            data[f"{split}_mask"] = (chosen >= low) & (chosen < low + (0.6, 0.2)[low > 0])
        if number:
            data["label"] = torch.randint(-1, 5, (count,))
            data["feat"] = torch.randn(count, 3)
    partition_graph(graph, "g", num_parts, str(folder), part_method="random", quiet=True)
    return str(folder / "g.json")


def write_links(folder: Path, num_parts: int, num_relations: int = 0) -> str:
    """Links both ways, of which the held-out ones lose their reverses; numbers of relations."""
    torch.manual_seed(2)
    src, dst = torch.randint(300, (2, 700))
    graph = gs.graph((torch.cat([src, dst]), torch.cat([dst, src])), num_nodes=300)
    graph.ndata["feat"] = torch.randn(300, 12)
    chosen = torch.rand(1400)
    for split, low in (("train", 0.0), ("val", 0.8), ("test", 0.9)):
        graph.edata[f"{split}_mask"] = (chosen >= low) & (chosen < low + (0.8, 0.1)[low > 0])
    if num_relations:
        number = torch.randint(num_relations // 2, (700,))
        graph.edata["etype"] = torch.cat([number, number + num_relations // 2])
    partition_graph(graph, "g", num_parts, str(folder), part_method="random", quiet=True)
    return str(folder / "g.json")


def write_numbered_links(folder: Path, num_parts: int) -> str:
    return write_links(folder, num_parts, 6)


def write_columns(folder: Path, num_parts: int) -> str:
    """Papers have categories beside features, authors sparse features and nothing else."""
    graph = typed()
    papers, authors = graph.nodes["paper"].data, graph.nodes["author"].data
    papers["categories"] = torch.stack([torch.arange(120) % n for n in (3, 40)], dim=1)
    del authors["feat"]
    columns = torch.randint(1, 90, (60, 7)).sort(1, descending=True).values
    columns[:, 5:] = 0
    authors["feat_columns"], authors["feat_values"] = columns.int(), torch.rand(60, 7)
    partition_graph(graph, "g", num_parts, str(folder), part_method="random", quiet=True)
    return str(folder / "g.json")


def epochs_of(
    rank: int, world_size: int, data: str, cases: list[dict[str, Any]]
) -> list[tuple[list[int], int, str]]:
    """Bytes of each rank's last epoch, parameters, and how rows came."""
    found = []
    for case in cases:
        result = gs.train.train_full_batch(FullBatchConfig(data=data, **COMMON | case))
        found.append((result.bytes_per_epoch, result.num_parameters, result.aggregation))
    return found


def planned(data: str, case: dict[str, Any], mode: str, num_ranks: int) -> tuple[EpochPlan, float]:
    """The plan of a case, and the parameters of its network."""
    config = FullBatchConfig(data=data, **COMMON | case)
    graph, kind = size_of_partition(Path(data), config)
    network = network_of(config.resolved(facts_of(graph)), graph, kind)
    how = dataclasses.replace(exchanges_of(config), mode=mode, num_ranks=num_ranks)
    step = full_batch_step(graph, network, graph.parts[0], how, Rates())
    epoch = plan_full_batch(graph, network, Machines(rates=Rates()), how)
    return epoch, step.tape.num_parameters


PLAIN_CASES: list[dict[str, Any]] = [
    {"model": "gcn", "halo_dtype": "bfloat16", "residual": True},
    {"model": "gat", "heads": 2, **SEQUENTIAL},
    {"model": "gat", "heads": 2, "encoder": False},
    {"model": "sage", "halo_dtype": "int8"},
]
MORE_PLAIN: list[dict[str, Any]] = [
    {"model": "sage"},
    {"model": "sage", "dropout": 0.0, "encoder": False, "norm": False},
    {"model": "sage", **SEQUENTIAL},
    {"model": "sage", "aggregator": "pool"},
    {"model": "sage", "aggregator": "gcn"},
    {"model": "sage", "dtype": "float64"},
    {"model": "sage", "self_loops": True, "both_directions": False},
    {"model": "gat", "heads": 2},
    {"model": "gat", "heads": 2, "rematerialize": False, **SEQUENTIAL},
    {"model": "gatv2", "heads": 2},
    {"model": "gatv2", "heads": 2, **SEQUENTIAL},
    {"model": "gatv2", "heads": 2, "encoder": False},
    {"model": "gat", "heads": 2, "encoder": False, "dropout": 0.0},
    {"model": "sage", "aggregator": "pool", "encoder": False, "halo_dtype": "int8"},
]
HUB_CASES: list[dict[str, Any]] = [{"model": "sage"}, {"model": "gcn", **SEQUENTIAL}]
TYPED_CASES: list[dict[str, Any]] = [{"model": "sage"}, {"model": "hgt", "heads": 2}]
MORE_TYPED: list[dict[str, Any]] = [
    {"model": "rgcn", "num_bases": 2},
    *({"model": model, **SEQUENTIAL} for model in ("rgcn", "sage", "gcn")),
    {"model": "gcn"},
    {"model": "gat", "heads": 2},
    {"model": "gat", "heads": 2, **SEQUENTIAL},
    {"model": "gatv2", "heads": 2},
    {"model": "hgt", "heads": 2, **SEQUENTIAL},
    *({"model": model, "halo_dtype": "int8"} for model in ("hgt", "sage", "gat")),
    {"model": "gcn", "halo_dtype": "int8", **SEQUENTIAL},
]


ON_CITES = {"task": "edge classification", "relations": "cites"}
ON_BOTH = {"task": "link prediction", "relations": "writes,cites"}
EDGE_CASES: list[dict[str, Any]] = [{"model": "sage", **ON_CITES}, {"model": "sage", **ON_BOTH}]
MORE_EDGES: list[dict[str, Any]] = [
    {"model": "gat", "heads": 2, "halo_dtype": "bfloat16", **ON_CITES},
    {"model": "hgt", "heads": 2, **ON_CITES},
    {"model": "gcn", "predictor": "dot", **ON_BOTH, **SEQUENTIAL},
    {"model": "rgcn", "negatives": 20, **ON_BOTH, "relations": "writes"},
]
LINK_CASES: list[dict[str, Any]] = [
    {"model": "gcn", "task": "link prediction"},
    {"model": "sage", "task": "link prediction", "loss": "bce", **SEQUENTIAL},
]
NUMBERED: list[dict[str, Any]] = [
    {"model": "rgcn", "task": "link prediction", "both_directions": False},
    {"model": "gcn", "task": "link prediction", "both_directions": False, "negatives": 30},
    {"model": "sage", "task": "link prediction", "both_directions": False, "negatives": 30},
]
COLUMN_CASES: list[dict[str, Any]] = [{"model": "sage"}, {"model": "hgt", "heads": 2}]


@pytest.mark.parametrize(
    ("write", "num_ranks", "cases"),
    [
        pytest.param(write_edges, 2, EDGE_CASES, id="edges-2"),
        pytest.param(write_links, 3, LINK_CASES[:1], id="links-3"),
        pytest.param(write_columns, 2, COLUMN_CASES[:1], id="columns-2"),
        *(
            pytest.param(write, 3, cases, id=f"{name}-3", marks=pytest.mark.exhaustive)
            for name, write, cases in (
                ("edges", write_edges, EDGE_CASES + MORE_EDGES),
                ("numbered", write_numbered_links, NUMBERED),
                ("more-links", write_links, LINK_CASES),
                ("columns", write_columns, COLUMN_CASES),
            )
        ),
        pytest.param(write_plain, 3, PLAIN_CASES, id="plain-3"),
        pytest.param(write_typed, 2, TYPED_CASES, id="typed-2"),
        pytest.param(write_hubs, 2, HUB_CASES, id="hubs-2"),
        pytest.param(
            write_plain, 2, PLAIN_CASES + MORE_PLAIN, id="plain-2", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            write_hubs, 3, PLAIN_CASES + MORE_PLAIN, id="hubs-3", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            write_typed, 3, TYPED_CASES + MORE_TYPED, id="typed-3", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_bytes_and_parameters_are_those_of_a_traced_epoch(
    tmp_path: Path, write: Any, num_ranks: int, cases: list[dict[str, Any]]
) -> None:
    data = write(tmp_path, num_ranks)
    results = run_ranks(epochs_of, num_ranks, data, cases)[0]
    for case, (sent, num_parameters, mode) in zip(cases, results, strict=True):
        epoch, parameters = planned(data, case, mode, num_ranks)
        assert parameters == num_parameters, case
        # Beside rows and gradients there are flags, which no plan counts: a hundred bytes or so.
        sent = [bytes_sent - COMPARED for bytes_sent in sent]
        assert epoch.sent.expected == pytest.approx(max(sent), rel=0.01, abs=200), case
        assert epoch.sent_in_all == pytest.approx(sum(sent), rel=0.01, abs=200 * num_ranks), case
        assert sum(epoch.by_layer.values()) <= epoch.sent.expected


def epochs_with_states(
    rank: int, world_size: int, data: str, cases: list[dict[str, Any]]
) -> list[tuple[list[int], int, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_transport, "LEAST_SAVED", 1)
        return epochs_of(rank, world_size, data, cases)


STATES_CASES: list[dict[str, Any]] = [
    {"model": "gat", "heads": 2},
    {"model": "gat", "heads": 2, "halo_dtype": "bfloat16"},
    {"model": "gatv2", "heads": 2},
]


@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_states_of_destinations_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    data = write_hubs(tmp_path, num_ranks)
    results = run_ranks(epochs_with_states, num_ranks, data, STATES_CASES)[0]
    for case, (sent, _, mode) in zip(STATES_CASES, results, strict=True):
        with_rows, _ = planned(data, case, mode, num_ranks)
        with monkeypatch.context() as patch:
            patch.setattr(_networks, "_LEAST_SAVED", 1)
            epoch, _ = planned(data, case, mode, num_ranks)
        sent = [bytes_sent - COMPARED for bytes_sent in sent]
        assert epoch.sent.expected == pytest.approx(max(sent), rel=0.01, abs=200), case
        assert epoch.sent_in_all == pytest.approx(sum(sent), rel=0.01, abs=200 * num_ranks), case
        assert epoch.sent_in_all < with_rows.sent_in_all or case["model"] == "gatv2"


def zeros_of(
    rank: int, world_size: int, data: str, cases: list[dict[str, Any]]
) -> list[list[tuple[str, int, int]]]:
    """Of each exchange of a training epoch its name, its bytes, and those of its zeros."""
    sent: list[tuple[str, int, int]] = []

    def counted(state: Any, rows: Any, send: Any, recv: Any, name: str, *more: Any) -> Any:
        tensors = [t for part in rows for t in ([part] if isinstance(part, torch.Tensor) else part)]
        zeros = sum(int((t == 0).sum()) * t.element_size() for t in tensors)
        sent.append((name, sum(t.nbytes for t in tensors), zeros))
        return start_exchange(state, rows, send, recv, name, *more)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_halo, "start_exchange", counted)
        for case in cases:
            run = gs.train.FullBatchRun(FullBatchConfig(data=data, **COMMON | case))
            run._learner.descent.start_at(0, 1)
            for epoch in range(2):  # the first fetches what stays
                sent.clear()
                run._train_epoch(epoch)
            found.append(list(sent))
    return found


WIDE = {"hidden": 64, "layers": 3, "dropout": 0.5}
ZERO_CASES: list[dict[str, Any]] = [
    {"model": "sage", **WIDE},
    {"model": "sage", "encoder": False, "norm": False, **WIDE, "hidden": 12},
    {"model": "sage", "halo_dtype": "bfloat16", **WIDE, "dropout": 0.0},
    {"model": "gcn", **WIDE},
]
MORE_ZEROS: list[dict[str, Any]] = [
    {"model": "sage", "aggregator": "pool", **WIDE},
    {"model": "sage", "aggregator": "gcn", "dtype": "float64", **WIDE},
]
ATTENTION: list[dict[str, Any]] = [
    {"model": model, "heads": 2, **WIDE, "hidden": 16} for model in ("gat", "gatv2")
]
TYPED_ZEROS: list[dict[str, Any]] = [{"model": "sage", **WIDE}, {"model": "gat", **WIDE}]
MORE_TYPED_ZEROS: list[dict[str, Any]] = [
    {"model": "rgcn", **WIDE},
    {"model": "gcn", **WIDE},
]


@pytest.mark.parametrize(
    ("write", "num_ranks", "cases"),
    [
        pytest.param(write_plain, 2, ZERO_CASES, id="plain-2"),
        pytest.param(write_typed, 2, TYPED_ZEROS, id="typed-2"),
        pytest.param(write_hubs, 2, ZERO_CASES[:1], id="hubs-2"),
        *(
            pytest.param(write, 3, cases, id=f"{name}-3", marks=pytest.mark.exhaustive)
            for name, write, cases in (
                ("plain", write_plain, ZERO_CASES + MORE_ZEROS + ATTENTION),
                ("typed", write_typed, TYPED_ZEROS + MORE_TYPED_ZEROS),
                ("hubs", write_hubs, [ZERO_CASES[0], *ZERO_CASES[2:], *MORE_ZEROS]),
            )
        ),
    ],
)
def test_zeros_are_those_that_an_epoch_sends(
    tmp_path: Path, write: Any, num_ranks: int, cases: list[dict[str, Any]]
) -> None:
    data = write(tmp_path, num_ranks)
    results = run_ranks(zeros_of, num_ranks, data, cases)
    for i, case in enumerate(cases):
        tapes = tapes_of(data, case, num_ranks)
        for tape, sent in zip(tapes, (of_rank[i] for of_rank in results), strict=True):
            assert len(tape.exchanges) == len(sent), case
            for each, (name, size, zeros) in zip(tape.exchanges, sent, strict=True):
                assert each.sent == pytest.approx(size), case
                if name == "fetch_halo":
                    assert each.zeros[0][1] / size == pytest.approx(zeros / size, abs=0.1), case


ZEROS_NETWORK = Network(
    model="sage", features={"_N": 64}, out=4, hidden=64, layers=2, dropout=0.5, encoder=True
)
ZEROS_PART = PartSize(
    nodes={"_N": 50_000}, edges={EDGE: 400_000}, halo={"_N": 10_000}, sent={"_N": 9_000},
    train=50_000,
)  # fmt: skip


def zeros_tape(part: PartSize = ZEROS_PART, network: Network = ZEROS_NETWORK, **how: Any) -> Tape:
    graph = GraphSize(
        name="g", nodes={"_N": 1e5}, edges={EDGE: 8e5}, features={"_N": 64}, num_classes=4,
        target="_N", train=1e5,
    )  # fmt: skip
    exchanges = Exchanges(**{"mode": "oneshot", "num_ranks": 2, **how})
    return full_batch_step(graph, network, part, exchanges, Rates()).tape


def test_bytes_on_a_link_by_hand() -> None:
    """Half of the numbers are zero behind a ReLU, and half of the others behind the dropout."""
    first, last, *back = zeros_tape().exchanges
    # What comes is more: 10,000 rows of 64 numbers, of which a quarter, and a bit for each.
    size = 10_000 * 64 * 4
    assert (first.received, first.on_link(1)) == (size, size * (0.25 + 1 / 32))
    # 0.4 and 0.6 of zeros before the dropout.
    assert first.on_link(1, 0) == pytest.approx(size * (0.3 + 1 / 32))
    assert first.on_link(1, 2) == pytest.approx(size * (0.2 + 1 / 32))
    # The last layer sends products of 4 columns, and gradients are of all numbers.
    assert last.on_link(1) == 10_000 * 4 * 4
    assert [each.on_link(1) for each in back] == [10_000 * 4 * 4, size]
    # Messages of less than 64 KB go as they are: 250 rows of 256 bytes to each of 36 others.
    assert first.on_link(35) == size * (0.25 + 1 / 32)
    assert first.on_link(36) == 9_000 * 64 * 4
    assert first.on_link(40) == size
    # One bit a number of two bytes; float64 is taken as words of four.
    assert zeros_tape(wire=2).exchanges[0].on_link(1) == size / 2 * (0.25 + 1 / 16)
    in_float64 = dataclasses.replace(ZEROS_NETWORK, itemsize=8)
    double = zeros_tape(network=in_float64, wire=8).exchanges[0]
    assert double.on_link(1) == 2 * size * (0.25 + 1 / 32)
    # Rows that are fetched again in the backward have them, too.
    pool = dataclasses.replace(ZEROS_NETWORK, model="rgcn", num_relations=5, num_bases=2)
    again = [e for e in zeros_tape(network=pool, mode="sequential").exchanges if e.zeros[0][1]]
    assert [e.direction for e in again] == ["forward", "backward"]
    # Without dropout one half; in an evaluation there is none.
    plain = dataclasses.replace(ZEROS_NETWORK, dropout=0.0)
    assert zeros_tape(network=plain).exchanges[0].on_link(1) == size * (0.5 + 1 / 32)
    tape = Tape(Memory({}), records=False)
    rows = tape.dropout(tape.relu(tape.given(10, 4)), 0.5)
    assert rows.zeros == (0.4, 0.5, 0.6)
    # A factor leaves zeros, and a product of matrices does not.
    assert tape.scaled(rows).zeros == rows.zeros
    assert not any(tape.affine([rows], 4).zeros)


@pytest.mark.parametrize(
    ("sums", "share"),
    [
        ((0, 0, 0, 2_000), 4 / 6 * 3 / 4),  # of rows alone
        ((0, 0, 0, 5_000), None),  # too few to be left out
        ((2_000, 1_000, 0, 1_000), 2 / 6 * 3 / 4 + 2 / 6 * 9 / 16 + 1 / 6 * 27 / 64),
    ],
)
def test_sums_are_zero_where_all_their_rows_are(sums: Any, share: float | None) -> None:
    fewest = {"_N": (6_000.0, 6_000.0)}
    part = dataclasses.replace(ZEROS_PART, fewest=fewest, sums={"_N": (sums, sums)})
    first = zeros_tape(part).exchanges[0]
    size = 6_000 * 64 * 4
    assert first.sent == size
    left = 1.0 if share is None else 1 - share + 1 / 32
    assert first.on_link(1) == pytest.approx(size * left)
    # Where it is not known which are sums, all are taken as such.
    unknown = dataclasses.replace(part, sums={})
    assert zeros_tape(unknown).exchanges[0].on_link(1) == size


def test_sums_are_counted_by_their_rows() -> None:
    """One of three rows and one of two, and a row that three destinations read."""
    src, dst = torch.tensor([0, 1, 2, 3, 3, 3, 4, 5]), torch.tensor([0, 0, 0, 1, 2, 3, 4, 4])
    edges = LocalEdges(torch.ones(8, dtype=torch.int64), src, dst, 5)
    counts = count_fewest_rows([edges], 0, 2)
    assert counts[:, 1].tolist() == [6, 3, 2, 1, 1, 0, 0]
    assert not counts[:, 0].any()


def test_zeros_are_left_out_on_links_alone() -> None:
    """Two hosts with a rank each; the exchange that is told are the bytes before."""
    graph = GraphSize(
        name="g", nodes={"_N": 1e5}, edges={EDGE: 8e5}, features={"_N": 64}, num_classes=4,
        target="_N", train=1e5, parts=(ZEROS_PART, ZEROS_PART),
    )  # fmt: skip
    rates = Rates(exchange=1e12, latency=1e-30)
    how = Exchanges(mode="oneshot", num_ranks=2)
    size, narrow = 10_000 * 64 * 4, 10_000 * 4 * 4
    link = 1e3
    epoch = plan_full_batch(graph, ZEROS_NETWORK, Machines(rates=rates, link=link), how)
    model = 4 * (64 * 64 + 64 + 2 * 64 * 64 + 64 + 2 * 64 * 4 + 4)
    rows = size * (0.25 + 1 / 32) + narrow + narrow + size
    assert epoch.exchange == pytest.approx(1.04 * (rows + model) / link, rel=1e-3)
    assert epoch.sent.expected == 9_000 * 68 * 4 + 10_000 * 68 * 4 + model
    # Rows of a ReLU may have a tenth of the zeros more or less, which is 0.05 of these bytes.
    spread = 1 + rates.uncertainty
    ends = 1.04 * 0.05 * size / link
    assert epoch.seconds.high / spread - epoch.seconds.expected == pytest.approx(ends, rel=0.01)
    assert epoch.seconds.expected - epoch.seconds.low * spread == pytest.approx(ends, rel=0.01)
    here = plan_full_batch(graph, ZEROS_NETWORK, Machines(rates=rates), how)
    assert here.seconds.high == here.seconds.expected * spread


@pytest.mark.parametrize("model", ["sage", "gcn"])
def test_gradients_of_results_are_spared_zeros(model: str) -> None:
    """Behind a ReLU and a dropout a quarter is left, of unlabelled rows none; norms have none."""
    network = dataclasses.replace(ZEROS_NETWORK, model=model)
    how = {"between_hosts": True, "has_reverses": True}
    few = dataclasses.replace(ZEROS_PART, train=10_000)
    for mode in ("oneshot", "sequential"):
        first, _, of_last, back = zeros_tape(few, network, **how, mode=mode).exchanges
        # The rows that were sent are those whose gradients are.
        assert (back.sent, back.received) == (first.sent, first.received)
        assert back.zeros == first.zeros
        assert of_last.sent == 9_000 * 4 * 4
        assert of_last.zeros[0] == pytest.approx([0.8 * of_last.sent] * 3)
    assert not any(zeros_tape(network=network, **how).exchanges[2].zeros[0])
    normed = dataclasses.replace(network, norm=True)
    assert not any(zeros_tape(network=normed, **how).exchanges[-1].zeros[0])


@pytest.mark.parametrize(
    ("how", "aggregator"),
    [
        ({}, "mean"),
        ({"between_hosts": True}, "mean"),
        ({"has_reverses": True}, "mean"),  # more than 1 MB goes through memory of the host
        ({"between_hosts": True, "has_reverses": True, "wire": 1}, "mean"),
        ({"between_hosts": True, "has_reverses": True}, "gcn"),
    ],
)
def test_where_gradients_of_inputs_return(how: dict[str, Any], aggregator: str) -> None:
    network = dataclasses.replace(ZEROS_NETWORK, aggregator=aggregator)
    *_, back = zeros_tape(network=network, **how).exchanges
    of_row = 68 if how.get("wire") == 1 else 64 * 4
    assert (back.sent, back.zeros[0]) == (10_000 * of_row, (0.0, 0.0, 0.0))


@pytest.mark.parametrize("reverses", [True, False])
def test_reverses_of_a_partition_are_seen(tmp_path: Path, reverses: bool) -> None:
    graph = random_graph(200, 900, seed=0, feat_dim=8, num_classes=3)
    src, dst = graph.edges()
    if reverses:
        edges = torch.cat([src, dst]), torch.cat([dst, src])
        both = gs.graph(edges, num_nodes=200)
        both.ndata.update(graph.ndata)
        graph = both
    partition_graph(graph, "g", 3, str(tmp_path), quiet=True)
    config = FullBatchConfig(data=str(tmp_path / "g.json"), model="sage", both_directions=False)
    size, _ = size_of_partition(tmp_path / "g.json", config)
    assert {part.has_reverses for part in size.parts} == {reverses}


def tapes_of(data: str, case: dict[str, Any], num_ranks: int) -> list[Tape]:
    """An epoch of each rank on paper, by one-shot exchanges."""
    config = FullBatchConfig(data=data, **COMMON | case)
    graph, kind = size_of_partition(Path(data), config)
    network = network_of(config.resolved(facts_of(graph)), graph, kind)
    how = dataclasses.replace(exchanges_of(config), mode="oneshot", num_ranks=num_ranks)
    return [full_batch_step(graph, network, part, how, Rates()).tape for part in graph.parts]


def test_open_settings_are_those_that_training_takes(tmp_path: Path) -> None:
    """Edges a node are counted before reverses are added, which is what the defaults go by."""
    num_edges = round(0.75 * DENSE * 300)
    graph = random_graph(300, num_edges, seed=0, feat_dim=12, num_classes=5)
    partition_graph(graph, "g", 1, str(tmp_path), part_method="random", quiet=True)
    config = FullBatchConfig(data=str(tmp_path / "g.json"), model="sage", epochs=1)
    found = run_ranks(parameters_of, 1, config.data)[0]
    graph_size, kind = size_of_partition(tmp_path / "g.json", config)
    assert graph_size.num_edges / graph_size.num_nodes > DENSE > num_edges / 300
    network = network_of(config.resolved(facts_of(graph_size)), graph_size, kind)
    how = dataclasses.replace(exchanges_of(config), mode="oneshot", num_ranks=1)
    step = full_batch_step(graph_size, network, graph_size.parts[0], how, Rates())
    assert step.tape.num_parameters == found


def parameters_of(rank: int, world_size: int, data: str) -> int:
    config = FullBatchConfig(data=data, model="sage", epochs=1)
    return gs.train.train_full_batch(config).num_parameters


def test_a_layer_by_hand() -> None:
    """1000 rows, one SAGE layer from 8 to 4 columns that narrows first, all rows with a loss."""
    network = Network(model="sage", features={"_N": 8}, out=4, hidden=16, layers=1)
    part = PartSize(
        nodes={"_N": 1000}, edges={EDGE: 5000}, halo={"_N": 300}, sent={"_N": 200}, train=1000
    )
    graph = GraphSize(
        name="g", nodes={"_N": 2000}, edges={EDGE: 10000}, features={"_N": 8}, num_classes=4,
        target="_N", train=2000, parts=(part, part),
    )  # fmt: skip
    how = Exchanges(mode="oneshot", num_ranks=2)
    step = full_batch_step(graph, network, part, how, Rates())
    # The product of 8 columns and W travels, 4 columns; its gradient comes back.
    forward, backward = step.tape.exchanges
    assert (forward.sent, forward.received) == (200 * 4 * 4, 300 * 4 * 4)
    assert (backward.sent, backward.received) == (300 * 4 * 4, 200 * 4 * 4)
    assert forward.overlaps == {"edges": 5000 * 16.0}
    # Two products, and for two matrices a gradient: 2 * 1000 * 8 * 4 operations each.
    assert step.tape.work["product"] == step.tape.work["weights"] == 2 * 64_000
    assert step.tape.work["edges"] == 2 * 5000 * 16
    assert step.tape.num_parameters == 8 * 4 * 2 + 4


def test_time_by_hand() -> None:
    """An exchange is hidden as far as there is something to do meanwhile."""
    rates = Rates(product=1e6, weights=1e6, edges=1e3, elements=1e30, start=1e-30, latency=1e-30,
                  exchange=1e12)  # fmt: skip
    network = Network(model="sage", features={"_N": 8}, out=4, hidden=16, layers=1)
    part = PartSize(
        nodes={"_N": 1000}, edges={EDGE: 5000}, cut={EDGE: 4900}, halo={"_N": 300},
        sent={"_N": 300}, train=1000,
    )  # fmt: skip
    graph = GraphSize(
        name="g", nodes={"_N": 2000}, edges={EDGE: 10000}, features={"_N": 8}, num_classes=4,
        target="_N", train=2000, parts=(part, part),
    )  # fmt: skip
    how = Exchanges(mode="oneshot", num_ranks=2)
    link = 1000.0
    epoch = plan_full_batch(graph, network, Machines(rates=rates, link=link), how)
    assert epoch.compute == pytest.approx(0.256 + 160.0, rel=1e-3)
    hidden = 100 * 16 / 1e3  # of own edges, while rows travel
    one_way = 1.04 * 300 * 16 / link  # both directions at once
    gradients = 1.04 * 68 * 4 / link
    assert epoch.exchange == pytest.approx(2 * (one_way - hidden) + gradients, rel=1e-3)
    assert epoch.seconds.expected == pytest.approx(epoch.compute + epoch.exchange)
    here = plan_full_batch(graph, network, Machines(rates=rates), how)
    assert here.exchange == 0 or here.exchange < 1e-6
    assert here.bound_by == "sums over edges"


def test_rows_live_as_long_as_something_reads_them() -> None:
    memory = Memory({})
    tape = Tape(memory)
    x = tape.given(10, 4)
    h = tape.affine([x], 8)
    assert memory.peak == 10 * 8 * 4
    h = tape.elementwise(h, "result")  # the first result goes
    y = tape.affine([h], 2)
    del h  # the tape holds it
    loss = tape.cross_entropy(y, 10)
    del y
    tape.backward(loss)
    # Gradients of two matrices and two biases stay until the next backward.
    assert sum(memory._in_use.values()) == (4 * 8 + 8 + 8 * 2 + 2) * 4
    memory.begin_backward()
    assert sum(memory._in_use.values()) == 0


def test_halo_of_random_parts_by_hand() -> None:
    graph = GraphSize(
        name="g", nodes={"_N": 1000.0}, edges={EDGE: 4000.0}, features={}, num_classes=2,
        target="_N", train=100.0,
    )  # fmt: skip
    (part,) = estimated_parts(graph, 4, share=1.0, uneven=1.0)
    assert part.halo["_N"] == pytest.approx(750 * (1 - math.exp(-1)))
    assert part.nodes["_N"] == 250
    (alone,) = estimated_parts(graph, 1, share=1.0)
    assert not alone.halo
    counted = dataclasses.replace(graph, parts=(part,) * 4).with_counted_share()
    assert counted.share[1] == pytest.approx(1.0)


def test_blocks_of_a_sampled_step() -> None:
    graph = GraphSize(
        name="g", nodes={"_N": 1e9}, edges={EDGE: 1e11}, features={"_N": 8}, num_classes=2,
        target="_N", train=1e6,
    )  # fmt: skip
    (first, last), drawn = sampled_parts(graph, (5, 10), {"_N": 100.0}, 100)
    assert last.edges[EDGE] == 1000
    assert last.sources is not None
    assert last.sources["_N"] == pytest.approx(1100, rel=1e-3)  # of a billion, hardly one twice
    assert first.nodes == last.sources
    assert drawn == pytest.approx(1000 + 5 * 1100, rel=1e-3)
    network = Network(model="sage", features={"_N": 8}, out=2, hidden=16, layers=2)
    sampling = Sampling(fanouts=(5, 10), batch_size=100)
    epoch = plan_sampled(graph, network, 4, Machines(rates=Rates()), sampling)
    assert epoch.steps == 2500
    assert epoch.mode == "sampled"
    in_files = dataclasses.replace(sampling, in_files=True, cache_bytes=1e9)
    other = plan_sampled(graph, network, 4, Machines(rates=Rates()), in_files)
    assert other.mode == "sampled, features in files"
    assert "features" not in other.items
    assert other.items["cache"] == 1e9
    # Nor are rows of all nodes there in an evaluation.
    assert other.memory.expected < epoch.memory.expected - 1e9 / 4 * 8 * 4 + 1e9


def test_the_first_mode_that_fits_is_taken() -> None:
    graph = GraphSize(
        name="g", nodes={"_N": 1e6}, edges={EDGE: 2e7}, features={"_N": 128}, num_classes=40,
        target="_N", train=1e4, share=(1.0, 1.0, 1.0),
    )  # fmt: skip
    network = Network(model="gat", features={"_N": 128}, out=40, hidden=32, heads=4, layers=3)

    def rows(memory: str) -> list[EpochPlan]:
        machines = Machines(rates=Rates(), memory=parse_bytes(memory), link=1e9)
        return list(make_plan(graph, network, [8], machines).rows)

    assert [row.mode for row in rows("64GiB")] == ["full batch"]
    (sequential,) = rows("2.6GiB")
    assert sequential.mode == "full batch, rematerialized"
    assert sequential.fits
    large = dataclasses.replace(graph, nodes={"_N": 1e8}, edges={EDGE: 2e8})
    machines = Machines(rates=Rates(), memory=parse_bytes("4GiB"), link=1e9)
    (files,) = make_plan(large, dataclasses.replace(network, layers=2), [8], machines).rows
    assert files.mode == "sampled, features in files"
    assert files.fits
    wide = dataclasses.replace(graph, features={"_N": 4000})
    of_wide = dataclasses.replace(network, features={"_N": 4000})
    machines = Machines(rates=Rates(), memory=parse_bytes("2.6GiB"), link=1e9)
    (whole,) = make_plan(wide, of_wide, [8], machines).rows
    assert whole.mode == "full batch, features in files"
    assert "features" not in whole.items
    (nothing,) = rows("0.5GiB")
    assert not nothing.fits
    assert nothing.bound_by.startswith("memory: ")


@pytest.mark.exhaustive
def test_rates_are_measured_with_the_network() -> None:
    graph = GraphSize(
        name="g", nodes={"_N": 2000.0}, edges={EDGE: 16000.0}, features={"_N": 16}, num_classes=3,
        target="_N", train=100.0,
    )  # fmt: skip
    kind = "node classification"
    config = FullBatchConfig(data="numbers", model="gat", hidden=4, heads=2).resolved()
    trial = TrialNetwork.of(config, graph, kind)
    assert trial is not None
    assert trial.settings["heads"] == 2
    cores = len(os.sched_getaffinity(0))
    rates = calibrate([1, 1000], 0.2, trial, clock="cpu")
    assert 0.1 <= rates.network < 20
    assert [rates.num_ranks, *(each.num_ranks for each in rates.fewer)] == [cores, 1][:cores]
    assert rates.beside(1).num_ranks == 1
    typed = dataclasses.replace(graph, nodes={"a": 1.0, "b": 2.0})
    assert TrialNetwork.of(config, typed, kind) is None
    assert TrialNetwork.of(config, graph, "link prediction") is None


def test_trials_take_a_sample_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ranks in the parts that there are, with one as a whole; typed and plain."""
    monkeypatch.setattr(_calibrate, "_TRIAL_NUMBERS", 1e4)
    monkeypatch.setattr(_calibrate, "_FEWEST_TRIAL_NODES", 20)
    for write, model in ((write_typed, "sage"), (write_plain, "gcn")):
        data = Path(write(tmp_path / model, 2))
        config = FullBatchConfig(data=str(data), **COMMON | {"model": model})
        graph, kind = size_of_partition(data, config)
        trial = TrialNetwork.of(config.resolved(facts_of(graph)), graph, kind, data)
        assert trial is not None
        for num_ranks in (1, 2):
            made = trial.partitioned(num_ranks, tmp_path / f"{model}-{num_ranks}")
            sample, _ = size_of_partition(Path(made.data), made)
            assert len(sample.parts) == num_ranks
            assert sample.features == graph.features
            assert (sample.num_classes, sample.target) == (graph.num_classes, graph.target)
            assert 0 < sample.num_nodes < graph.num_nodes / 2
            if num_ranks == 2:
                for part, whole in zip(sample.parts, graph.parts, strict=True):
                    share = sample.num_nodes / graph.num_nodes
                    for ntype, count in whole.nodes.items():
                        assert part.nodes[ntype] == pytest.approx(share * count, abs=2)
            network = network_of(made.resolved(facts_of(sample)), sample, kind)
            assert network == network_of(config.resolved(facts_of(graph)), graph, kind)


def test_the_factor_of_a_network_is_of_computing_alone() -> None:
    graph = GraphSize(
        name="g", nodes={"_N": 1e6}, edges={EDGE: 2e7}, features={"_N": 128}, num_classes=40,
        target="_N", train=1e4,
    )  # fmt: skip
    network = Network(model="sage", features={"_N": 128}, out=40, hidden=64, layers=2)
    once, twice, thrice = (
        make_plan(graph, network, [4], Machines(rates=Rates(network=factor), link=1e6)).rows[0]
        for factor in (1.0, 2.0, 3.0)
    )
    # What new memory takes was measured by itself.
    assert thrice.compute - twice.compute == pytest.approx(twice.compute - once.compute)
    assert once.compute < 0.99 * twice.compute < 2 * once.compute
    assert once.exchange - once.compute <= twice.exchange < once.exchange  # more of it is hidden


def test_more_ranks_need_less_each() -> None:
    graph = GraphSize(
        name="g", nodes={"_N": 1e7}, edges={EDGE: 2e8}, features={"_N": 128}, num_classes=40,
        target="_N", train=1e6,
    )  # fmt: skip
    for model in ("gcn", "sage", "gat", "gatv2", "rgcn"):
        network = Network(
            model=model, features={"_N": 128}, out=40, hidden=32, heads=4, layers=3,
            num_relations=5, dropout=0.5,
        )  # fmt: skip
        plan = make_plan(graph, network, [1, 2, 8, 32], Machines(rates=Rates(), link=1e9))
        peaks = [row.memory.expected for row in plan.rows]
        assert peaks == sorted(peaks, reverse=True), model
        assert plan.fewest == 1
        for row in plan.rows:
            assert row.memory.low < row.memory.expected < row.memory.high
            # Items at the peak are what makes it up.
            assert sum(row.items.values()) == pytest.approx(row.memory.expected, rel=0.02)


def test_rates_are_kept_in_a_file(tmp_path: Path) -> None:
    rates = Rates(product=1.0e9, spread={"product": 0.2}, source="here")
    rates.save(tmp_path / "rates.json")
    assert read_rates(tmp_path / "rates.json") == rates
    both = dataclasses.replace(rates, num_ranks=4, fewer=(rates,))
    both.save(tmp_path / "rates.json")
    assert read_rates(tmp_path / "rates.json") == both
    assert [both.beside(number).num_ranks for number in (1, 3, 4, 9)] == [1, 1, 4, 4]
    (tmp_path / "rates.json").write_text('{"product": -1}')
    with pytest.raises(ValueError, match=r"product must be a number above 0 \(got -1\)"):
        read_rates(tmp_path / "rates.json")
    (tmp_path / "rates.json").write_text("a,b")
    with pytest.raises(ValueError, match=r"rates.json must hold rates .*; write it again"):
        read_rates(tmp_path / "rates.json")
    (tmp_path / "rates.json").write_text('{"speed": 1}')
    with pytest.raises(ValueError, match="must hold rates"):
        read_rates(tmp_path / "rates.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10Gbit/s", 1.25e9), ("400Mbit", 5e7), ("1.2GB/s", 1.2e9), ("1Gbps", 1.25e8)],
)
def test_links(text: str, expected: float) -> None:
    assert parse_link(text) == pytest.approx(expected)


def test_wrong_numbers_say_what_is_right() -> None:
    with pytest.raises(ValueError, match=r"link must be a rate such as 10Gbit/s"):
        parse_link("fast")
    with pytest.raises(ValueError, match=r"such as 64GiB \(got '-3GiB'\)"):
        parse_bytes("-3GiB")
    assert parse_bytes("64GiB") == 64 * 2**30
    assert parse_bytes("1e9") == 1e9
    graph = GraphSize(
        name="g", nodes={"_N": 3.0}, edges={EDGE: 2.0}, features={}, num_classes=2, target="_N",
        train=1.0,
    )  # fmt: skip
    network = Network(model="gcn", features={}, out=2, hidden=4, layers=2)
    with pytest.raises(ValueError, match=r"at most the 3 nodes \(got 4\)"):
        make_plan(graph, network, [4], Machines(rates=Rates()))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from graphshard.train.commands import run

    Rates(source="a test").save(tmp_path / "rates.json")
    common = ["plan", "--rates", str(tmp_path / "rates.json"), "--model", "sage"]
    numbers = [*common, "--nodes", "111e6", "--edges", "3.2e9", "--ranks", "8,128"]
    out = tmp_path / "plan.json"
    assert run([*numbers, "--memory", "64GiB", "--link", "10Gbit/s", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "fewest ranks that fit: 8" in shown
    assert "seconds per epoch" in shown
    content = json.loads(out.read_text())
    assert [row["ranks"] for row in content["rows"]] == [8, 128]
    data = write_typed(tmp_path / "parts", 2)
    assert run([*common[:3], "--model", "rgcn", "--data", data]) == 0
    assert "rgcn" in capsys.readouterr().out
    # Of tasks on edges, and of a network of one's own, what there was no plan of is told.
    data = write_edges(tmp_path / "edges", 2)
    for kind, relations in (("edge classification", "cites"), ("link prediction", "writes,cites")):
        task = ["--task", kind, "--relations", relations]
        assert run([*common[:3], "--model", "gcn", "--data", data, *task]) == 0
        shown = capsys.readouterr().out
        assert "edges of the task" in shown
        assert f"no epoch of {kind}" in shown
    own = ["--model", f"{__name__}:Own", "--ranks", "1,2"]
    assert run([*common[:3], *own, "--data", data, *task]) == 0
    assert "is drawn on from two small graphs" in capsys.readouterr().out
    numbers = [*common[:3], "--nodes", "1e6", "--edges", "1e7", "--model", f"{__name__}:Broken"]
    assert run([*numbers, "--ranks", "1"]) == 2
    error = capsys.readouterr().err
    assert "must run on small graphs of random edges to be planned" in error
    assert error.count("\n") == 1
    numbers = [*common, "--nodes", "111e6", "--edges", "3.2e9", "--ranks", "8,128"]
    wrong = [
        (common, "say of what to make a plan"),
        ([*common, "--nodes", "5"], "plain numbers are both"),
        ([*numbers, "--link", "fast"], "link must be a rate"),
        ([*common, "--nodes", "-1", "--edges", "1"], "nodes must be a number, at least 1"),
        ([*common, "--nodes", "9", "--edges", "9", "--ranks", "0"], "ranks must be whole numbers"),
    ]
    for arguments, text in wrong:
        assert run(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1


OF_RUN = """
import json, sys, torch
from graphshard._base.memory import peak_memory, peak_own_memory
from graphshard.train import FullBatchConfig, FullBatchRun
torch.set_num_threads(1)
config = FullBatchConfig(data=sys.argv[1], epochs=4, **json.loads(sys.argv[2]))
run = FullBatchRun(config)
run.train()
took = peak_memory() if config.memory is None else peak_own_memory()
print(run._planned.memory, took)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("edges", {"model": "sage", "hidden": 64, "layers": 2, "task": "edge classification"}),
        ("links", {"model": "sage", "hidden": 64, "layers": 2, "task": "link prediction"}),
        ("sparse", {"model": "gcn", "hidden": 64, "layers": 2}),
        ("nodes", {"model": "own_models:Net", "hidden": 64, "layers": 3}),
        ("nodes", {"model": "sage", "hidden": 64, "layers": 2, "memory": "3GiB"}),
        ("wide", {"model": "sage", "hidden": 16, "layers": 2, "memory": "3GiB"}),
    ],
)
def test_memory_of_a_run_is_what_it_told(tmp_path: Path, kind: str, case: dict[str, Any]) -> None:
    """Within 15 %, as below; most are within 10. The last is a tiny graph with wide features."""
    count, width = (2_700, 1_433) if kind == "wide" else (60_000, 64)
    graph = random_graph(count, 8 * count, seed=0, feat_dim=width, num_classes=10)
    if kind in ("edges", "links"):
        for name in ("label", "train_mask", "val_mask", "test_mask"):
            del graph.ndata[name]
        number = torch.arange(graph.num_edges()) % 1000
        for split, low, high in (("train", 0, 300), ("val", 300, 305), ("test", 305, 310)):
            graph.edata[f"{split}_mask"] = (number >= low) & (number < high)
        graph.edata["label"] = number % 7
    if kind == "sparse":
        del graph.ndata["feat"]
        columns = torch.randint(1, 3000, (count, 30)).sort(1, descending=True).values
        graph.ndata["feat_columns"], graph.ndata["feat_values"] = columns, torch.rand(count, 30)
    partition_graph(graph, "g", 1, str(tmp_path), part_method="random", reorder=False, quiet=True)
    path = [str(Path(__file__).parent.parent / "train"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", OF_RUN, str(tmp_path / "g.json"), json.dumps(case)],
        capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "THP_MEM_ALLOC_ENABLE": "1", "PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip
    planned, took = map(float, done.stdout.split())
    assert planned == pytest.approx(took, rel=0.15)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [
        {"model": "sage", "layers": 3, "hidden": 128, "dropout": 0.0},
        {"model": "gat", "layers": 2, "hidden": 16, "heads": 8},
        {"model": "gcn", "layers": 2, "hidden": 64},
    ],
)
def test_memory_is_that_of_a_process(tmp_path: Path, case: dict[str, Any]) -> None:
    """Within 15 % of the peak of a process, one rank, 60,000 nodes: see [Note: blocks of malloc].

    Torch has large pages there, as in every rank. Without, seven runs of the first case had peaks
    of 951 to 1,106 MiB, by where malloc happened to find room; with them, runs agree within 1 %.
    """
    graph = random_graph(60_000, 480_000, seed=0, feat_dim=128, num_classes=40)
    partition_graph(graph, "g", 1, str(tmp_path), part_method="random", reorder=False, quiet=True)
    data = str(tmp_path / "g.json")
    code = (
        "import sys, json, torch; torch.set_num_threads(1)\n"
        "from graphshard.train import FullBatchConfig, train_full_batch\n"
        "from graphshard._base.memory import peak_memory\n"
        "for data in sys.argv[2:]:\n"
        "    config = FullBatchConfig(data=data, epochs=3, **json.loads(sys.argv[1]))\n"
        "    train_full_batch(config)\n"
        "    print(peak_memory())\n"
    )
    tiny = write_plain(tmp_path / "tiny", 1)
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(case), tiny, data],
        capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "THP_MEM_ALLOC_ENABLE": "1"},
    )  # fmt: skip
    interpreter, peak = map(int, done.stdout.split())
    config = FullBatchConfig(data=data, **case)
    size, kind = size_of_partition(Path(data), config)
    network = network_of(config.resolved(facts_of(size)), size, kind)
    rates = Rates(interpreter=interpreter)
    step = full_batch_step(size, network, size.parts[0], Exchanges(mode="oneshot"), rates)
    assert step.memory.peak == pytest.approx(peak, rel=0.15)
