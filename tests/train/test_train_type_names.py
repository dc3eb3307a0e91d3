# SPDX-License-Identifier: Apache-2.0
"""Types of any name in training runs and their checkpoints. 2 ranks, and no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train_cases import (
    as_values,
    config_of,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
)

import graphshard
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks
from type_name_cases import RELATIONS, SIZES, named


def renamed() -> Any:
    """The same graph under names that need no care, in the same order."""
    graph, ntypes = named(), {name: f"t{i}" for i, name in enumerate(sorted(SIZES))}
    etypes = {
        (s, r, d): (ntypes[s], f"r{i}", ntypes[d]) for i, (s, r, d) in enumerate(sorted(RELATIONS))
    }
    plain: Any = graphshard.heterograph(
        {new: graph.edges(etype=old, order="eid") for old, new in etypes.items()},
        {new: SIZES[old] for old, new in ntypes.items()},
    )
    assert plain.canonical_etypes == [etypes[e] for e in graph.canonical_etypes]
    for old, new in ntypes.items():
        plain.nodes[new].data.update(dict(graph.nodes[old].data.items()))
    return plain


def parts_of(folder: Path, graph: Any) -> str:
    owner = {t: torch.arange(graph.num_nodes(t)) % 2 for t in graph.ntypes}
    partition_graph(graph, "kg", 2, folder, part_method=owner, quiet=True)
    return str(folder / "kg.json")


@pytest.mark.parametrize("num_bases", [3])
def test_a_run_does_not_depend_on_names(tmp_path: Path, num_bases: int) -> None:
    losses = []
    for name, graph in (("named", named()), ("renamed", renamed())):
        config = config_of(parts_of(tmp_path / name, graph), model="rgcn", num_bases=num_bases)
        results = run_ranks(train_on_rank, 2, as_values(config))
        losses.append(results[0]["result"]["losses"])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5


@pytest.mark.parametrize("mode", ["full", "sample"])
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, mode: str) -> None:
    make = config_of if mode == "full" else sampled_config_of
    train = train_on_rank if mode == "full" else train_sampled_on_rank
    parts = parts_of(tmp_path / "parts", named())
    whole = run_ranks(train, 2, as_values(make(parts, model="rgcn", epochs=4)))[0]
    saved = {"model": "rgcn", "save_every": 1, "checkpoint_dir": str(tmp_path / "run")}
    run_ranks(train, 2, as_values(make(parts, epochs=2, **saved)))
    resumed = run_ranks(train, 2, as_values(make(parts, epochs=4, resume=True, **saved)))[0]
    assert whole["shared"].keys() == resumed["shared"].keys()
    for name, value in whole["shared"].items():
        assert torch.equal(value, resumed["shared"][name]), name
