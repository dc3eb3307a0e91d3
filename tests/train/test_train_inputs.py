# SPDX-License-Identifier: Apache-2.0
"""What networks are given besides features: weights and features of edges, categories of nodes.

GAT with features of edges beside PyG's; N ranks, and samples with all neighbours, as one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_cases import (
    as_values,
    config_of,
    plain_graph,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    typed_graph,
)

import graphshard
from graphshard.nn.edge_attention import EdgeScoredGATConv, EdgeScoredGATv2Conv
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks
from graphshard.train import FullBatchRun

CASES = {
    "gcn": ("plain", {"model": "gcn"}),
    "sage": ("plain", {"model": "sage"}),
    "gat": ("plain", {"model": "gat", "heads": 2, "hidden": 3}),
    "gatv2": ("plain", {"model": "gatv2", "heads": 2, "hidden": 3}),
    "rgcn": ("plain", {"model": "rgcn"}),
    "sage_typed": ("typed", {"model": "sage"}),
    "gat_typed": ("typed", {"model": "gat", "heads": 2, "hidden": 3}),
    "hgt": ("typed", {"model": "hgt", "heads": 2}),
    "own": ("typed", {"model": "own_models:Net"}),
}


def graph_of(kind: str) -> graphshard.Graph:
    """With weights and features of edges, and categories of some nodes."""
    draw = torch.Generator().manual_seed(8)
    graph = plain_graph() if kind == "plain" else typed_graph()
    for etype in graph.canonical_etypes[:2]:
        count = graph.num_edges(etype)
        data = graph.edges[etype].data
        data["weight"] = torch.rand(count, generator=draw, dtype=torch.float64)
        data["feat"] = torch.rand(count, 3, generator=draw, dtype=torch.float64)
    ntype = graph.ntypes[-1]  # places have nothing but this
    count = graph.num_nodes(ntype)
    graph.nodes[ntype].data["categories"] = torch.stack(
        [torch.randint(0, n, (count,), generator=draw) for n in (3, 9)], dim=1
    )
    return graph


def trained(folder: Path, case: str, world_size: int, is_sampled: bool = False, **more: Any) -> Any:
    kind, values = CASES[case]
    target = folder / f"{kind}-{world_size}"
    partition_graph(graph_of(kind), "g", world_size, str(target), part_method="random", quiet=True)
    options = {"dropout": 0.0, "epochs": 3, **values, **more}
    config: Any = config_of(str(target / "g.json"), **options)
    train = train_on_rank
    if is_sampled:
        config = sampled_config_of(str(target / "g.json"), fanouts=(-1, -1), **options)
        train = train_sampled_on_rank
    return run_ranks(train, world_size, as_values(config))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=pytest.mark.exhaustive if c in ("sage", "gatv2", "gat_typed") else ())
        for c in CASES
    ],
)
def test_ranks_and_samples_train_as_one_process_does(case: str, tmp_path: Path) -> None:
    (one,) = trained(tmp_path, case, 1)
    losses = one["result"]["losses"]
    two = trained(tmp_path, case, 2, aggregation="sequential")
    torch.testing.assert_close(two[1]["result"]["losses"], losses, rtol=0, atol=1e-10)
    for name, value in one["shared"].items():
        torch.testing.assert_close(two[0]["shared"][name], value, rtol=0, atol=1e-10)
    sampled = trained(tmp_path, case, 2, is_sampled=True)
    torch.testing.assert_close(sampled[0]["result"]["losses"], losses, rtol=0, atol=1e-10)
    assert any("category_tables.tables.0.1.weight" in name for name in one["shared"])


def test_categories_are_rows_beside_the_features(tmp_path: Path) -> None:
    """A GCN with them is one whose features are the features with those rows."""
    graph = graph_of("plain")
    del graph.edata["weight"]
    partition_graph(graph, "g", 1, str(tmp_path), part_method="random", quiet=True)
    run = FullBatchRun(config_of(str(tmp_path / "g.json"), dropout=0.0))
    learner = run._learner
    numbers = graph.ndata["categories"]
    tables = learner.model.category_tables.tables[0]  # type: ignore[union-attr]
    assert [tuple(table.weight.shape) for table in tables] == [(3, 2), (9, 5)]
    rows = [graph.ndata["feat"], *(t.weight[numbers[:, i]] for i, t in enumerate(tables))]
    order = learner._shard.original_ids["_N"]
    first, second = learner.model.layers
    whole = graph.local_var()
    expected = second(whole, torch.relu(first(whole, torch.cat(rows, 1))))[order]
    torch.testing.assert_close(learner.scores(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_attention_reads_edges_as_pygs_does(kind: str) -> None:
    from torch_geometric.nn import GATConv, GATv2Conv

    draw = torch.Generator().manual_seed(1)
    src, dst = (torch.randint(0, 12, (40,), generator=draw) for _ in range(2))
    dst[:12] = torch.arange(12)
    x = torch.randn(12, 5, generator=draw).double()
    feat = torch.randn(40, 3, generator=draw).double()
    torch.manual_seed(2)
    options = {"heads": 2, "edge_dim": 3, "add_self_loops": False}
    ours: Any
    theirs: Any
    if kind == "gat":
        ours, theirs = EdgeScoredGATConv(5, 4, 2, 0.0, 0.0, edge_feats=3), GATConv(5, 4, **options)
        pairs = {"lin": "fc", "lin_edge": "fc_edge"}
        vectors = {"att_src": "attn_l", "att_dst": "attn_r", "att_edge": "attn_e"}
    else:
        ours, theirs = (
            EdgeScoredGATv2Conv(5, 4, 2, 0.0, 0.0, edge_feats=3),
            GATv2Conv(5, 4, **options),
        )
        pairs = {"lin_l": "fc_src", "lin_r": "fc_dst", "lin_edge": "fc_edge"}
        vectors = {"att": "attn"}
    ours, theirs = ours.double(), theirs.double()
    with torch.no_grad():
        for name, own in pairs.items():
            getattr(theirs, name).weight.copy_(getattr(ours, own).weight)
            if getattr(ours, own).bias is not None:
                getattr(theirs, name).bias.copy_(getattr(ours, own).bias)
        for name, own in vectors.items():
            getattr(theirs, name).copy_(getattr(ours, own))
        theirs.bias.zero_()
    graph = graphshard.graph((src, dst), num_nodes=12)
    found, wanted = ours(graph, x, feat), theirs(x, torch.stack([src, dst]), feat)
    torch.testing.assert_close(found.flatten(1), wanted, rtol=0, atol=1e-12)
    found.square().sum().backward()
    wanted.square().sum().backward()
    gradient: Tensor = theirs.lin_edge.weight.grad
    torch.testing.assert_close(ours.fc_edge.weight.grad, gradient, rtol=0, atol=1e-10)


def test_what_a_model_does_not_read_is_said(tmp_path: Path) -> None:
    partition_graph(graph_of("plain"), "g", 1, str(tmp_path), part_method="random", quiet=True)
    for model, said in (
        ("gcn", ["features of edges are there, and gcn does not read them (gat and gatv2 do)"]),
        ("gat", ["weights of edges are there, and gat does not read them (gcn and sage do)"]),
        ("own_models:OwnGCN", []),
    ):
        notes: list[str] = []
        config = config_of(str(tmp_path / "g.json"), model=model)
        FullBatchRun(config, progress=lambda report, notes=notes: notes.append(str(report.note)))
        assert [note for note in notes if "of edges" in note] == said


def test_times_of_edges_are_said_to_be_read_by_none(tmp_path: Path) -> None:
    graph = plain_graph()
    graph.edata["time"] = torch.arange(graph.num_edges())
    partition_graph(graph, "g", 1, str(tmp_path), part_method="random", quiet=True)
    notes: list[str] = []
    config = config_of(str(tmp_path / "g.json"))
    FullBatchRun(config, progress=lambda report: notes.append(str(report.note)))
    assert "times of edges are there, and gcn does not read them (no model does)" in notes
