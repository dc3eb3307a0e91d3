# SPDX-License-Identifier: Apache-2.0
"""Categories of edges: learnt rows beside their features; gloo ranks are as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_cases import (
    GRAPHS,
    as_values,
    config_of,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    write_parts,
)

from graphshard.partition import partition_graph
from graphshard.testing import run_ranks
from graphshard.train import FullBatchRun, predict

CASES: dict[str, dict[str, Any]] = {
    "edge_categories": {"model": "gat", "hidden": 3, "heads": 2},
    "typed_categories": {"model": "gatv2", "hidden": 3, "heads": 2},
    "several_edge_classes": {"model": "sage", "task": "edge classification"},
}
SHORT: dict[str, Any] = {"dropout": 0.0, "epochs": 3, "self_loops": False}


def with_rows_for_categories(kind: str, run: FullBatchRun, folder: Path) -> str:
    """The same graph, with learnt rows as features in the place of categories."""
    graph, tables = GRAPHS[kind](), run._learner.network.edge_category_tables
    for etype in graph.canonical_etypes:
        data = graph.edges[etype].data
        if "categories" in data:
            key = ":".join(etype)
            with torch.no_grad():
                rows = tables.rows_of(key, data.pop("categories"))  # type: ignore[operator]
            feat = [data["feat"]] if "feat" in data else []
            data["feat"] = torch.cat([*feat, rows], dim=1)
    partition_graph(graph, "g", 1, str(folder), part_method="random", quiet=True)
    return str(folder / "g.json")


@pytest.mark.parametrize("kind", CASES)
def test_scores_are_those_of_learnt_rows_as_features(kind: str, tmp_path: Path) -> None:
    values = {**SHORT, **CASES[kind]}
    run = FullBatchRun(config_of(write_parts(tmp_path, kind, 1), **values))
    before = {n: p.clone() for n, p in run._learner.network.edge_category_tables.named_parameters()}
    run.train()
    for name, parameter in run._learner.network.edge_category_tables.named_parameters():
        used = (parameter != before[name]).any(1)
        assert used.any(), name
    state = {
        name: value
        for name, value in run._learner.model.state_dict().items()
        if "edge_category_tables" not in name
    }
    other = FullBatchRun(config_of(with_rows_for_categories(kind, run, tmp_path / "o"), **values))
    other._learner.model.load_state_dict(state)
    other._learner.embeddings.load_state_dict(run._learner.embeddings.state_dict())
    mine, expected = (r._learner.evaluation_scores() for r in (run, other))
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(
    ("kind", "is_sampled"),
    [
        ("edge_categories", True),
        ("typed_categories", False),
        pytest.param("edge_categories", False, marks=pytest.mark.exhaustive),
        pytest.param("typed_categories", True, marks=pytest.mark.exhaustive),
        pytest.param("several_edge_classes", True, marks=pytest.mark.exhaustive),
    ],
)
def test_workers_learn_as_one_does(kind: str, is_sampled: bool, tmp_path: Path) -> None:
    values = {**SHORT, **CASES[kind], "both_directions": True}
    one = FullBatchRun(config_of(write_parts(tmp_path, kind, 1), **values)).train()
    data = write_parts(tmp_path, kind, 3, "empty_part")
    config: Any = config_of(data, **values)
    if is_sampled:
        config = sampled_config_of(data, **values, fanouts=(-1, -1))
    work = train_sampled_on_rank if is_sampled else train_on_rank
    for found in run_ranks(work, 3, as_values(config)):
        torch.testing.assert_close(found["result"]["losses"], one.losses, rtol=0, atol=1e-9)


def predict_on_ranks(rank: int, world_size: int, values: dict[str, Any]) -> None:
    predict(**values, device="cpu", timeout=30.0)


def test_a_run_predicts_with_its_tables(tmp_path: Path) -> None:
    kind = "several_edge_classes"
    data, run = write_parts(tmp_path, kind, 1), str(tmp_path / "run")
    values = {**SHORT, **CASES[kind], "both_directions": True}
    FullBatchRun(config_of(data, **values, run=run)).train()
    one = predict(data, run, device="cpu").to_pandas()
    parts = write_parts(tmp_path, kind, 3)
    out = str(tmp_path / "found.parquet")
    run_ranks(predict_on_ranks, 3, {"data": parts, "run": run, "out": out})
    import pandas as pd

    probabilities = ["p_0", "p_1", "p_2"]
    found = pd.read_parquet(out)
    np.testing.assert_allclose(found[probabilities], one[probabilities], rtol=0, atol=1e-12)
    graph = GRAPHS[kind]()
    del graph.edges["cites"].data["categories"]
    partition_graph(graph, "g", 1, str(tmp_path / "less"), part_method="random", quiet=True)
    with pytest.raises(ValueError, match="'paper:cites:paper' had 2 columns of categories in tr"):
        predict(str(tmp_path / "less" / "g.json"), run, device="cpu")
