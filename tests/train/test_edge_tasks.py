# SPDX-License-Identifier: Apache-2.0
"""Classes and values of edges: against plain torch; gloo ranks are as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train_cases import (
    GRAPHS,
    as_values,
    config_of,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    write_parts,
)

from graphshard._base.ranges import RangeMap
from graphshard.testing import run_ranks
from graphshard.train import FullBatchRun, SampledRun, TaskInfo, write_task
from graphshard.train._edges import EndRows, TargetEdges, distinct_ends

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "classes": ("edge_classes", {"model": "gcn", "task": "edge classification"}),
    "values": ("edge_values", {"model": "rgcn", "task": "edge regression"}),
}
LAST = {"dropout": 0.0, "epochs": 3}


def dense_gcn(graph: Any, weights: list[Tensor]) -> Tensor:
    """Two graph convolutions of the nodes by a dense matrix."""
    src, dst = graph.edges()
    dense = torch.zeros(40, 40, dtype=torch.float64)
    dense.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)
    dense = dense / (dense.sum(1, keepdim=True) * dense.sum(0, keepdim=True)).sqrt()
    hidden = F.relu(dense @ (graph.ndata["feat"] @ weights[0]) + weights[1])
    return dense @ (hidden @ weights[2]) + weights[3]


def test_training_is_that_of_plain_torch(tmp_path: Path) -> None:
    kind, values = CASES["classes"]
    run = FullBatchRun(config_of(write_parts(tmp_path, kind, 1), **values, **LAST))
    weights = [p.detach().clone().requires_grad_() for p in run._learner.model.parameters()]
    graph = GRAPHS[kind]()
    label, (src, dst) = graph.edata["label"], graph.edges()
    masks = {s: graph.edata[f"{s}_mask"] & (label >= 0) for s in ("train", "val", "test")}

    def scores(mask: Tensor) -> Tensor:
        rows = dense_gcn(graph, weights[:4])
        both = torch.cat([rows[src[mask]], rows[dst[mask]], graph.edata["feat"][mask]], dim=1)
        return F.relu(both @ weights[4].T + weights[5]) @ weights[6].T + weights[7]

    penalized = {"params": weights[:2], "weight_decay": 5e-4}
    optimizer = torch.optim.Adam([penalized, {"params": weights[2:]}], lr=0.01)
    losses = []
    for _ in range(LAST["epochs"]):
        loss = F.cross_entropy(scores(masks["train"]), label[masks["train"]])
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    result = run.train()
    assert result.losses == pytest.approx(losses, abs=1e-10)
    assert result.num_nodes == {split: int(mask.sum()) for split, mask in masks.items()}
    with torch.no_grad():
        for split, mask in masks.items():
            right = scores(mask).argmax(1) == label[mask]
            assert result.last.accuracy[split] == pytest.approx(float(right.double().mean()))
        val_loss = F.cross_entropy(scores(masks["val"]), label[masks["val"]])
        assert result.last.val_loss == pytest.approx(float(val_loss), abs=1e-10)


@pytest.mark.parametrize(
    ("case", "num_parts", "how"),
    [
        ("classes", 3, "few_edges"),
        pytest.param("values", 2, "few_edges", marks=pytest.mark.exhaustive),
        ("values", 5, "empty_part"),
        pytest.param("classes", 2, "random", marks=pytest.mark.exhaustive),
    ],
)
def test_workers_score_edges_as_one_does(
    case: str, num_parts: int, how: str, tmp_path: Path
) -> None:
    kind, values = CASES[case]
    one = FullBatchRun(config_of(write_parts(tmp_path, kind, 1), **values, **LAST)).train()
    config = config_of(write_parts(tmp_path, kind, num_parts, how), **values, **LAST)
    for found in run_ranks(train_on_rank, num_parts, as_values(config)):
        result = found["result"]
        torch.testing.assert_close(result["losses"], one.losses, rtol=0, atol=1e-10)
        assert result["num_nodes"] == one.num_nodes
        for which in ("best", "last"):
            expected = one.as_dict()[which]
            for name in ("accuracy", "metrics"):
                torch.testing.assert_close(result[which][name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_samples_of_all_neighbours_learn_the_same(case: str, tmp_path: Path) -> None:
    kind, values = CASES[case]
    full = FullBatchRun(config_of(write_parts(tmp_path, kind, 1), **values, **LAST)).train()
    data = write_parts(tmp_path, kind, 2, "few_edges")
    config = sampled_config_of(data, **values, **LAST, fanouts=(-1, -1))
    for found in run_ranks(train_sampled_on_rank, 2, as_values(config)):
        torch.testing.assert_close(found["result"]["losses"], full.losses, rtol=0, atol=1e-10)
        last = found["result"]["last"]
        assert last["val_loss"] == pytest.approx(full.last.val_loss, abs=1e-10)


def test_batches_of_edges_are_learnt_from_in_another_order_each_epoch(tmp_path: Path) -> None:
    kind, values = CASES["values"]
    data = write_parts(tmp_path, kind, 1)
    settings = {**values, "fanouts": (3, 3), "batch_size": 4, "epochs": 4}
    run = SampledRun(sampled_config_of(data, **settings))
    assert run._order is not None
    orders = [run._order.of_epoch(epoch).order for epoch in (0, 1, 0)]
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])
    result = run.train()
    assert result.sampling is not None
    assert result.sampling.steps_per_epoch == -(-result.num_nodes["train"] // 4)
    assert result.losses[-1] < result.losses[0]


def test_the_partition_says_what_to_learn_of_which_edges(tmp_path: Path) -> None:
    kind, values = CASES["values"]
    data = write_parts(tmp_path, kind, 1)
    relation = ("author", "writes", "paper")
    write_task(data, TaskInfo(name="g", kind="edge regression", target=relation))
    told = FullBatchRun(config_of(data, model="rgcn", epochs=1)).train()
    asked = FullBatchRun(config_of(data, **values, epochs=1)).train()
    assert told.losses == asked.losses


def test_ends_of_two_types_are_apart() -> None:
    ids = torch.tensor([3, 1, 3])
    number = torch.tensor([0, 1, 0])
    relations = ("a", "r", "b"), ("b", "q", "b")
    edges = TargetEdges(relations, number, ids, ids, ids + 1, None, None, number)
    assert {t: i.tolist() for t, i in distinct_ends(edges).items()} == {"a": [3], "b": [1, 2, 4]}
    assert edges.node_types == ("a", "b")
    assert [t for t, _ in edges.by_type(1)] == ["b"]
    rows = {"a": torch.arange(5.0).view(-1, 1), "b": 10 + torch.arange(5.0).view(-1, 1)}
    ranges = {"a": RangeMap((0, 5)), "b": RangeMap((0, 5))}
    sources, destinations = EndRows(edges, ranges)(rows)
    assert sources.view(-1).tolist() == [3, 11, 3]
    assert destinations.view(-1).tolist() == [14, 12, 14]


def test_a_partition_without_labels_of_edges_is_refused(tmp_path: Path) -> None:
    config = config_of(write_parts(tmp_path, "plain", 1), task="edge classification")
    with pytest.raises(ValueError, match="one relation must have the feature 'label'.*none has"):
        FullBatchRun(config)
