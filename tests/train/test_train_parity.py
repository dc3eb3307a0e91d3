# SPDX-License-Identifier: Apache-2.0
"""N workers train as one does: losses, accuracies, weights. Up to 3 gloo ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import networkx as nx
import pytest
import torch
from train_cases import as_values, config_of, train_on_rank, write_parts

from graphshard.partition import load_partition
from graphshard.testing import RanksFailed, run_ranks

NUM_STEPS = 3  # epochs of one step each, with an evaluation after each
CASES = {
    "gcn": ("plain", {"model": "gcn"}),
    "sage": ("plain", {"model": "sage", "layers": 3}),
    "sage_gcn": ("plain", {"model": "sage", "aggregator": "gcn"}),
    "gat": ("plain", {"model": "gat", "heads": 2, "hidden": 3}),
    "rgcn": ("plain", {"model": "rgcn", "num_bases": 2}),
    "rgcn_one_hot": ("knowledge", {"model": "rgcn"}),
    "rgcn_one_hot_bases": ("knowledge", {"model": "rgcn", "num_bases": 3}),
    "gcn_embeddings": ("knowledge", {"model": "gcn"}),
    "rgcn_typed": ("typed", {"model": "rgcn"}),
    "rgcn_typed_bases": ("typed", {"model": "rgcn", "num_bases": 2}),
    "gatv2": ("plain", {"model": "gatv2", "heads": 2, "hidden": 3}),
    "gcn_own_rows": ("plain", {"model": "gcn", "residual": True, "norm": True, "layers": 3}),
    "gat_encoder": ("plain", {"model": "gat", "heads": 2, "hidden": 3, "encoder": True}),
    "sage_encoder": ("knowledge", {"model": "sage", "encoder": True, "norm": True}),
    "gcn_typed": ("typed", {"model": "gcn"}),
    "sage_typed": ("typed", {"model": "sage"}),
    "gat_typed": ("typed", {"model": "gat", "heads": 2, "hidden": 3}),
    "sage_typed_norm": ("typed", {"model": "sage", "norm": True, "encoder": True}),
    "gatv2_typed": ("typed", {"model": "gatv2", "heads": 2, "hidden": 3}),
    "hgt": ("typed", {"model": "hgt", "heads": 2}),
    "hgt_plain": ("plain", {"model": "hgt", "heads": 2}),
    "both_directions": ("plain", {"model": "sage", "both_directions": True}),
    "both_typed": ("typed", {"model": "sage", "both_directions": True, "layers": 3}),
}
HOWS = ("random", "empty_part", "no_train")
# In training these are others, which run always: a choice or two of a layer more.
LIKE_OTHERS = ("rgcn_one_hot_bases", "gat_encoder", "hgt_plain", "gatv2_typed", "sage_typed")
HOW_AND_CASE = [  # each other case in one of the ways; in all of them with ``--all``
    pytest.param(
        how,
        case,
        marks=[] if (i + j) % 3 == 0 and case not in LIKE_OTHERS else pytest.mark.exhaustive,
    )
    for i, how in enumerate(HOWS)
    for j, case in enumerate(CASES)
]


def run(folder: Path, case: str, world_size: int, how: str, **more: Any) -> list[dict[str, Any]]:
    kind, values = CASES[case]
    data = write_parts(folder, kind, world_size, how)
    config = config_of(data, dropout=0.0, **{**values, **more})
    found: list[dict[str, Any]] = run_ranks(train_on_rank, world_size, as_values(config))
    return found


@cache
def one_worker(case: str) -> list[dict[str, Any]]:
    """`run` on one part, which is the same however the graph would be cut."""
    with TemporaryDirectory() as folder:
        return run(Path(folder), case, 1, "random", epochs=NUM_STEPS)


def embedding_rows(ranks: list[dict[str, Any]]) -> list[torch.Tensor]:
    """The rows of each table in the order of their ids, whatever the partition."""
    tables = []
    while (name := f"embeddings/rows.{len(tables)}") in ranks[0]["local"]:
        ids = torch.cat([rank["local"][f"embeddings/ids_{len(tables)}"] for rank in ranks])
        assert torch.unique(ids).numel() == ids.numel()
        tables.append(torch.cat([rank["local"][name] for rank in ranks])[torch.argsort(ids)])
    return tables


@pytest.mark.parametrize(("how", "case"), HOW_AND_CASE)
def test_workers_train_as_one_does(how: str, case: str, tmp_path: Path) -> None:
    (one,) = one_worker(case)
    several = run(tmp_path, case, 3, how, aggregation="oneshot", epochs=NUM_STEPS)
    for rank in several:
        expected, found = one["result"], rank["result"]
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=0, atol=1e-10)
        assert found["num_nodes"] == expected["num_nodes"]
        for which in ("best", "last"):
            assert found[which]["accuracy"] == pytest.approx(expected[which]["accuracy"])
            assert found[which]["val_loss"] == pytest.approx(expected[which]["val_loss"], abs=1e-10)
        for name, value in one["shared"].items():
            torch.testing.assert_close(rank["shared"][name], value, rtol=0, atol=1e-10)
    assert several[0]["result"] == several[1]["result"] == several[2]["result"]
    expected_rows = embedding_rows([one])
    assert bool(expected_rows) == (CASES[case][0] != "plain")
    torch.testing.assert_close(embedding_rows(several), expected_rows, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("case", "rematerialize"),
    [  # each case in one of the ways; in both with ``--all``
        pytest.param(case, is_again, marks=[] if (i + j) % 2 == 0 else pytest.mark.exhaustive)
        for i, case in enumerate(
            ["gcn", "gat", "rgcn", "rgcn_one_hot", "rgcn_typed", "gatv2_typed", "hgt"]
        )
        for j, is_again in enumerate((True, False))
    ],
)
def test_sequential_aggregation_trains_the_same(
    case: str, rematerialize: bool, tmp_path: Path
) -> None:
    (one,) = one_worker(case)
    options = {"aggregation": "sequential", "rematerialize": rematerialize, "epochs": NUM_STEPS}
    two = run(tmp_path, case, 2, "random", **options)
    assert two[0]["result"]["aggregation"] == "sequential"
    torch.testing.assert_close(
        two[1]["result"]["losses"], one["result"]["losses"], rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(
    "aggregation", [pytest.param("sequential", marks=pytest.mark.exhaustive), "oneshot"]
)
def test_depth_changes_nothing_and_narrow_rows_little(aggregation: str, tmp_path: Path) -> None:
    options = {"aggregation": aggregation}
    exact = run(tmp_path, "gat", 3, "random", **options)[0]["result"]["losses"]
    deep = run(tmp_path, "gat", 3, "random", **options, prefetch=2)[0]["result"]["losses"]
    assert deep == exact
    narrow = run(tmp_path, "gat", 3, "random", **options, halo_dtype="bfloat16")
    losses = narrow[0]["result"]["losses"]
    assert losses != exact
    torch.testing.assert_close(losses, exact, rtol=2**-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_train(dtype: str, tmp_path: Path) -> None:
    two = run(tmp_path, "gcn", 2, "random", dtype=dtype)
    losses = two[0]["result"]["losses"]
    assert losses[-1] < losses[0]
    assert two[0]["shared"]["model/layers.0.weight"].dtype == getattr(torch, dtype)


def test_a_run_repeats_and_dropout_differs_by_rank_and_seed(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 2)
    seeds = [1, 1, 2]
    runs = [
        run_ranks(train_on_rank, 2, as_values(config_of(data, model="gcn", seed=seed)))
        for seed in seeds
    ]
    losses = [ranks[0]["result"]["losses"] for ranks in runs]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert not torch.equal(runs[0][0]["local"]["random"], runs[0][1]["local"]["random"])


def test_bytes_per_epoch_are_those_of_the_halo_and_the_gradients(tmp_path: Path) -> None:
    """Two GCN layers in one-shot mode: what is sent and its gradients; gradients of 4 weights."""
    two = run(tmp_path, "gcn", 2, "random", aggregation="oneshot")
    halo = run_ranks(fewest_rows_of_rank, 2, write_parts(tmp_path, "plain", 2))
    parameters = two[0]["result"]["num_parameters"]
    exchanged = 8 * (6 + 3) * sum(halo)  # float64, hidden width, classes
    per_rank = two[0]["result"]["bytes_per_epoch"]
    is_finite = 8  # whether the loss is, before the step
    compared = 256  # whether ranks have the same model, and what there is to sum
    assert sum(per_rank) == 2 * exchanged + 2 * (is_finite + compared + 8 * parameters)


def fewest_rows_of_rank(rank: int, world_size: int, data: str) -> int:
    """Rows and partial sums that the other of two ranks sends: the size of a maximum matching."""
    part = load_partition(data, rank)[0]
    src, dst = part.edges()
    is_here = part.ndata["inner_node"].bool()
    is_cut = is_here[dst] & ~is_here[src]
    pair = nx.Graph()
    pair.add_edges_from(
        (("u", u), ("v", v))
        for u, v in zip(src[is_cut].tolist(), dst[is_cut].tolist(), strict=True)
    )
    sources = {node for node in pair if node[0] == "u"}
    size = len(nx.bipartite.maximum_matching(pair, sources)) // 2
    assert 0 < size <= 0.95 * len(sources), "the case has nothing to save"
    return size


WRONG_RUNS = {
    "self_loops is for graphs with one node type": ("typed", {"self_loops": True}),
    "has 2 parts, which need as many workers": ("two", {"model": "gcn"}),
    "rgcn needs relations": ("bare", {"model": "rgcn"}),
    "gcn needs every node to have an in-edge": ("no_loops", {"self_loops": False}),
    "there is nothing to train on": ("no_train", {"model": "gcn"}),
    "must have the feature 'label'": ("no_label", {"model": "gcn"}),
    "labels must be one class number per node": ("many_labels", {"model": "gcn"}),
}


@pytest.mark.parametrize("message", list(WRONG_RUNS))
def test_what_cannot_be_trained_is_refused_on_every_rank(message: str, tmp_path: Path) -> None:
    import train_cases
    from train_cases import plain_graph, typed_graph

    import graphshard
    from graphshard.partition import partition_graph

    kind, values = WRONG_RUNS[message]
    graph = typed_graph() if kind == "typed" else plain_graph()
    if kind == "bare":
        del graph.edata["etype"]
    if kind == "no_loops":
        data = dict(graph.ndata)
        graph = graphshard.graph(([0, 1], [1, 2]), num_nodes=train_cases.NUM_NODES)
        for name, value in data.items():
            graph.ndata[name] = value
    if kind == "no_train":
        graph.ndata["train_mask"] = torch.zeros_like(graph.ndata["train_mask"])
    if kind == "no_label":
        del graph.ndata["label"]
    if kind == "many_labels":
        graph.ndata["label"] = torch.zeros(train_cases.NUM_NODES, 4)
    partition_graph(graph, "g", 2, str(tmp_path / "g"), part_method="random", quiet=True)
    config = config_of(str(tmp_path / "g" / "g.json"), **values)
    world_size = 3 if kind == "two" else 2
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train_on_rank, world_size, as_values(config))
    assert sorted(failed.value.errors) == list(range(world_size))
    if kind != "two":  # a rank without a part says so first
        assert all(message in text for text in failed.value.errors.values()), failed.value.errors


def test_ranks_with_different_settings_are_told(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 2)
    with pytest.raises(RanksFailed, match="configuration of the run must be the same"):
        run_ranks(train_with_own_seed, 2, as_values(config_of(data)))


def train_with_own_seed(rank: int, world_size: int, values: dict[str, Any]) -> None:
    train_on_rank(rank, world_size, {**values, "seed": rank})
