# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite, labels with gaps, splits that overlap: told. Up to 3 gloo ranks."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from train_cases import as_values, config_of, plain_graph, sampled_config_of

import graphshard
from graphshard.partition import partition_graph
from graphshard.testing import RanksFailed, run_ranks
from graphshard.train import (
    FullBatchConfig,
    FullBatchRun,
    SampledConfig,
    SampledRun,
    load_shard,
    train_full_batch,
)


def written(folder: Path, graph: graphshard.Graph, num_parts: int = 1) -> str:
    method = torch.arange(graph.num_nodes()) % num_parts  # original node 4 is of part 1 of 3
    partition_graph(graph, "g", num_parts, folder, part_method=method, quiet=True)
    return str(folder / "g.json")


def stop_on_rank(
    rank: int, world_size: int, values: dict[str, Any], sampled: bool, poison: bool
) -> tuple[str, int]:
    """The text of the error that ends a run, and the number of epochs that it had finished."""
    config: Any = SampledConfig(**values) if sampled else FullBatchConfig(**values)
    shard = load_shard(config.resolved())
    if poison and rank == 1:
        features = {"_N": shard.features["_N"].clone()}
        features["_N"][0, 2] = float("nan")
        shard = dataclasses.replace(shard, features=features)
    run = (SampledRun if sampled else FullBatchRun)(config, shard=shard)
    with pytest.raises(FloatingPointError) as error:
        run.train()
    state = run._learner.shared_state()
    assert all(bool(value.isfinite().all()) for value in state.values()) or not poison
    return str(error.value), run._history.epoch


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_rank_whose_rows_are_not_finite_is_named_on_all_ranks(
    sampled: bool, dtype: str, tmp_path: Path
) -> None:
    data = written(tmp_path, plain_graph(), 3)
    make = sampled_config_of if sampled else config_of
    values = as_values(make(data, model="sage", dtype=dtype))
    ranks = run_ranks(stop_on_rank, 3, values, sampled, True)
    assert len(set(ranks)) == 1
    text, epochs = ranks[0]
    assert epochs == 0
    assert text.startswith("rank 1: the training loss of epoch 1")
    assert "for part 1): features '_N' hold 1 of " in text


def dense_gcn_epoch(graph: graphshard.Graph, weight: torch.Tensor, lr: float) -> int:
    """In which epoch the loss of a GCN of one layer stops being finite: by plain torch."""
    src, dst = graph.edges()
    dense = torch.zeros(graph.num_nodes(), graph.num_nodes())
    dense.index_put_((dst, src), torch.ones(src.shape[0]), accumulate=True)
    matrix = dense / (dense.sum(1).sqrt()[:, None] * dense.sum(0).clamp(min=1).sqrt())
    weight, bias = weight.clone().requires_grad_(), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [weight, bias], "weight_decay": 5e-4}], lr=lr)
    data = graph.ndata
    rows = data["train_mask"] & (data["label"] >= 0)
    for epoch in range(1, 10):
        scores = matrix @ (data["feat"].float() @ weight) + bias
        loss = F.cross_entropy(scores[rows], data["label"][rows])
        if not math.isfinite(loss.item()):
            return epoch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError("it stays finite")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_diverges_stops_in_the_epoch_in_which_torch_does(
    world_size: int, tmp_path: Path
) -> None:
    graph = plain_graph()
    graph.ndata["feat"] = 100 * graph.ndata["feat"]
    data = written(tmp_path, graph, world_size)
    settings = {
        "model": "gcn",
        "layers": 1,
        "dropout": 0.0,
        "hidden": None,
        "dtype": "float32",
        "lr": 1e37,
    }
    config = config_of(data, **settings, eval_every=5)
    torch.manual_seed(0)
    initial = FullBatchRun(dataclasses.replace(config, data=written(tmp_path / "one", graph)))
    weight = initial._learner.shared_state()["model/layers.0.weight"]
    expected = dense_gcn_epoch(graph, weight, 1e37)
    ranks = run_ranks(stop_on_rank, world_size, as_values(config), False, False)
    assert len(set(ranks)) == 1
    text, epochs = ranks[0]
    assert epochs == expected - 1
    assert f"the training loss of epoch {expected} is not finite" in text
    assert "lower lr (got 1e+37)" in text


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, "float64"), (math.inf, "float32"), (1e300, "bfloat16")]
)
def test_features_that_are_not_finite_are_refused_on_every_rank(
    value: float, dtype: str, tmp_path: Path
) -> None:
    graph = plain_graph()
    graph.ndata["feat"][4, 7] = value
    data = written(tmp_path, graph, 3)
    with pytest.raises(RanksFailed) as error:
        run_ranks(stop_on_rank, 3, as_values(config_of(data, dtype=dtype)), False, False)
    assert set(error.value.errors) == {0, 1, 2}
    for text in map(str, error.value.errors.values()):
        assert "'_N/feat' of part 1 is not for 1 of " in text
        assert "for node 4, column 7); replace such values" in text


def warnings_of(folder: Path, graph: graphshard.Graph, **values: Any) -> list[str]:
    config = config_of(written(folder, graph), epochs=1, **values)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_full_batch(config)
    return [str(item.message) for item in caught]


def test_labels_splits_and_rates_that_cannot_be_meant_are_a_warning_each(tmp_path: Path) -> None:
    assert warnings_of(tmp_path / "fine", plain_graph()) == []
    gaps = plain_graph()
    gaps.ndata["label"] = torch.where(gaps.ndata["label"] == 2, 2000, gaps.ndata["label"])
    (text,) = warnings_of(tmp_path / "gaps", gaps)
    assert "has 2001 classes, of which 1998 have no node (2, 3, 4, ...)" in text
    overlap = plain_graph()
    data = overlap.ndata
    data["test_mask"] = data["test_mask"] | data["train_mask"]
    count = int((data["test_mask"] & data["train_mask"] & (data["label"] >= 0)).sum())
    (text,) = warnings_of(tmp_path / "overlap", overlap)
    assert f"has {count} labelled nodes in both train_mask and test_mask" in text
    (text,) = warnings_of(tmp_path / "lr", plain_graph(), lr=0.0)
    assert "lr is 0" in text
    one = plain_graph()
    one.ndata["label"] = one.ndata["label"].clamp(max=0)
    (text,) = warnings_of(tmp_path / "one", one)
    assert "has one class" in text


def test_a_mask_that_is_none_and_bases_without_relations_are_refused(tmp_path: Path) -> None:
    graph = plain_graph()
    graph.ndata["val_mask"] = torch.arange(graph.num_nodes())
    with pytest.raises(ValueError, match="val_mask must hold True or False.*got 2"):
        train_full_batch(config_of(written(tmp_path / "mask", graph)))
    with pytest.raises(ValueError, match=r"num_bases must be at most .* 4, .* \(got 5\)"):
        config = config_of(written(tmp_path / "g", plain_graph()), model="rgcn", num_bases=5)
        train_full_batch(config)
