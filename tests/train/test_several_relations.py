# SPDX-License-Identifier: Apache-2.0
"""Tasks on edges of several relations, against numpy and torch; gloo ranks are as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from test_link_tasks import NAMES as NAMES_OF_NUMBERS
from test_link_tasks import write as write_links
from train_cases import (
    GRAPHS,
    as_values,
    config_of,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    write_parts,
)

from graphshard.testing import RanksFailed, run_ranks
from graphshard.train import FullBatchRun, TaskInfo, predict, read_task, write_task

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
NAMES = {WRITES: "author:writes:paper", CITES: "paper:cites:paper"}
LINKS = TaskInfo(
    name="g",
    kind="link prediction",
    target=(WRITES, CITES),
    reverse_of=(("paper", "rev_writes", "author"), None),
)
SHORT: dict[str, Any] = {"model": "rgcn", "dropout": 0.0, "epochs": 3}
CASES: dict[str, tuple[dict[str, Any], TaskInfo | None]] = {
    "several_links": ({"task": "link prediction", "negatives": 7}, LINKS),
    "several_edge_classes": ({"task": "edge classification"}, None),
}


def write(folder: Path, kind: str, num_parts: int, how: str = "random") -> str:
    data = write_parts(folder, kind, num_parts, how)
    task = CASES[kind][1]
    if task is not None:
        write_task(data, task)
    return data


def ends_of(kind: str, etype: Any) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    graph = GRAPHS[kind]()
    src, dst = (end.numpy() for end in graph.edges(etype=etype))
    data = graph.edges[etype].data
    return src, dst, {s: data[f"{s}_mask"].numpy() for s in ("train", "val", "test")}


def rows_of(run: FullBatchRun) -> dict[str, np.ndarray]:
    """What the network gives to nodes, by original number."""
    rows: Any = run._learner.evaluation_scores()
    run._learner.model.eval()
    with torch.no_grad():
        rows = run._learner.node_rows()
    original = run._shard.original_ids
    return {t: of[torch.argsort(original[t])].numpy() for t, of in rows.items()}


def test_metrics_of_links_are_of_each_relation_and_of_all(tmp_path: Path) -> None:
    kind = "several_links"
    run = FullBatchRun(config_of(write(tmp_path, kind, 1), **{**SHORT, **CASES[kind][0]}))
    last = run.train().last
    rows, predictor = rows_of(run), run._learner.model.predictor
    factors: Any = predictor.relations
    for split in ("val", "test"):
        all_ranks = []
        for number, etype in enumerate((WRITES, CITES)):
            src, dst, masks = ends_of(kind, etype)
            scores = (rows[etype[0]] * factors[number].detach().numpy()) @ rows[etype[2]].T
            ranks = []
            for u, v in zip(src[masks[split]], dst[masks[split]], strict=True):
                others = np.ones(scores.shape[1], dtype=bool)
                others[dst[src == u]] = False
                ranks.append(1 + (scores[u][others] > scores[u, v]).sum())
            all_ranks += ranks
            found = last.by_relation[NAMES[etype]]
            assert found["mrr"][split] == pytest.approx((1 / np.array(ranks)).mean())
            assert found["hits@3"][split] == pytest.approx((np.array(ranks) <= 3).mean())
        assert last.metrics["mrr"][split] == pytest.approx((1 / np.array(all_ranks)).mean())


def test_evaluated_edges_of_all_relations_carry_no_messages(tmp_path: Path) -> None:
    kind = "several_links"
    config = config_of(write(tmp_path, kind, 1), **{**SHORT, **CASES[kind][0]})
    shard = FullBatchRun(config)._shard
    for etype, of_type in shard.data.edges.items():
        pairs = list(zip(of_type.src.tolist(), of_type.dst.tolist(), strict=True))
        original = [shard.original_ids[t] for t in etype[::2]]
        left = sorted((int(original[0][u]), int(original[1][v])) for u, v in pairs)
        if etype in NAMES:
            src, dst, masks = ends_of(kind, etype)
            stays = ~(masks["val"] | masks["test"])
            assert left == sorted(zip(src[stays].tolist(), dst[stays].tolist(), strict=True))


@pytest.mark.parametrize(
    ("kind", "num_parts", "how"),
    [
        ("several_links", 3, "few_edges"),
        ("several_edge_classes", 2, "random"),
        pytest.param("several_links", 5, "empty_part", marks=pytest.mark.exhaustive),
        pytest.param("several_edge_classes", 5, "empty_part", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("is_sampled", [False, True])
def test_workers_learn_as_one_does(
    kind: str, num_parts: int, how: str, is_sampled: bool, tmp_path: Path
) -> None:
    values = {**SHORT, **CASES[kind][0]}
    if kind == "several_edge_classes":
        values["model"] = "gat"
        values["hidden"] = 3
    one = FullBatchRun(config_of(write(tmp_path, kind, 1), **values)).train()
    data = write(tmp_path, kind, num_parts, how)
    config: Any = config_of(data, **values)
    if is_sampled:  # full batch draws all neighbours, and keeps all edges
        config = sampled_config_of(data, **values, fanouts=(-1, -1), exclude_targets=False)
    work = train_sampled_on_rank if is_sampled else train_on_rank
    for found in run_ranks(work, num_parts, as_values(config)):
        result = found["result"]
        torch.testing.assert_close(result["losses"], one.losses, rtol=0, atol=1e-9)
        assert result["num_nodes"] == one.num_nodes
        expected = one.as_dict()["last"]
        for name in ("metrics", "by_relation", "val_loss", "accuracy"):
            torch.testing.assert_close(result["last"][name], expected[name], rtol=0, atol=1e-9)


def predict_on_ranks(rank: int, world_size: int, values: dict[str, Any]) -> None:
    predict(**values, device="cpu", timeout=30.0)


def predicted(folder: Path, kind: str, parts: int, **more: Any) -> pd.DataFrame:
    out = folder / "found.parquet"
    values = {"data": write(folder, kind, parts, "empty_part"), "run": str(folder / "run")}
    run_ranks(predict_on_ranks, parts, {**values, "out": str(out), **more})
    return pd.read_parquet(out)


def trained(folder: Path, kind: str) -> FullBatchRun:
    values = {**SHORT, **CASES[kind][0], "run": str(folder / "run")}
    run = FullBatchRun(config_of(write(folder, kind, 1), **values))
    run.train()
    assert run._learner.best is not None
    run._learner.model.load_state_dict(run._learner.best[0])
    run._learner.embeddings.load_state_dict(run._learner.best[1])
    return run


def test_links_of_several_relations_are_scored_and_found(tmp_path: Path) -> None:
    kind = "several_links"
    run = trained(tmp_path, kind)
    rows, factors = rows_of(run), run._learner.model.predictor.relations.detach().numpy()
    scores = {
        etype: (rows[etype[0]] * factors[n]) @ rows[etype[2]].T
        for n, etype in enumerate((WRITES, CITES))
    }
    pairs = pd.DataFrame(
        {
            "source": [3, 5, 29, 39],
            "target": [4, 4, 0, 1],
            "relation": ["writes", "cites", "writes", "paper:cites:paper"],
        }
    )
    pairs.to_csv(tmp_path / "pairs.csv", index=False)
    found = predicted(tmp_path, kind, 3, pairs=str(tmp_path / "pairs.csv"))
    pd.testing.assert_frame_equal(found[list(pairs)], pairs)
    expected = [
        scores[WRITES if "writes" in name else CITES][u, v]
        for u, v, name in pairs.itertuples(index=False)
    ]
    np.testing.assert_allclose(found["score"], expected, rtol=0, atol=1e-12)
    for etype in (WRITES, CITES):
        left = scores[etype].copy()
        src, dst, _ = ends_of(kind, etype)
        left[src, dst] = -np.inf
        if etype == CITES:
            np.fill_diagonal(left, -np.inf)
        found = predicted(tmp_path, kind, 2, top=3, relations=etype[1])
        assert set(found["relation"]) == {NAMES[etype]}
        best = np.argsort(-left, axis=1, kind="stable")[:, :3]
        assert found["source"].tolist() == np.repeat(np.arange(len(left)), 3).tolist()
        assert found["target"].tolist() == best.flatten().tolist()
    both = predicted(tmp_path, kind, 2, top=3)
    assert both["rank"].tolist() == [1, 2, 3] * (30 + 40)
    assert len(both) == 3 * (30 + 40)
    assert both["relation"].tolist() == [NAMES[WRITES]] * 90 + [NAMES[CITES]] * 120


def test_edges_of_several_relations_are_predicted_in_their_order(tmp_path: Path) -> None:
    kind = "several_edge_classes"
    trained(tmp_path, kind)
    one = predict(str(tmp_path / f"{kind}-1-random" / "g.json"), str(tmp_path / "run"))
    ranks = predicted(tmp_path, kind, 3)
    pd.testing.assert_frame_equal(ranks, one.to_pandas(), check_exact=False, atol=1e-12)
    at = 0
    for etype in (WRITES, CITES):
        src, dst, _ = ends_of(kind, etype)
        piece = ranks.iloc[at : at + len(src)]
        assert piece["relation"].unique().tolist() == [NAMES[etype]]
        assert piece["source"].tolist() == src.tolist()
        assert piece["target"].tolist() == dst.tolist()
        at += len(src)
    assert at == len(ranks)


def test_relations_are_chosen_by_name(tmp_path: Path) -> None:
    data = write(tmp_path, "several_links", 1)
    values = {**SHORT, "task": "link prediction"}
    run = FullBatchRun(config_of(data, **values, relations="cites"))
    assert run._shard.edges is not None
    assert run._shard.edges.relations == (CITES,)
    with pytest.raises(ValueError, match="'sites', which 0 have; there are author:writes:paper"):
        FullBatchRun(config_of(data, **values, relations="cites,sites"))
    with pytest.raises(ValueError, match="relations is for tasks on edges"):
        FullBatchRun(config_of(data, model="rgcn", task="node classification", relations="cites"))


def test_the_task_reads_back(tmp_path: Path) -> None:
    data = write(tmp_path, "several_links", 1)
    assert read_task(data) == LINKS
    assert LINKS.targets == (WRITES, CITES)
    one = TaskInfo(name="g", kind="link prediction", target=(WRITES,))
    assert one.target == WRITES
    assert one.reverses == (None,)
    with pytest.raises(ValueError, match="must differ"):
        TaskInfo(name="g", kind="link prediction", target=(WRITES, WRITES))
    with pytest.raises(ValueError, match="an entry for each of 2 relations"):
        TaskInfo(
            name="g", kind="link prediction", target=(WRITES, CITES), reverse_of=(None, None, None)
        )


def test_best_links_of_a_knowledge_graph(tmp_path: Path) -> None:
    data = write_links(tmp_path, "relation_links", 1)
    values = {**SHORT, "task": "link prediction", "negatives": 7, "run": str(tmp_path / "run")}
    run = FullBatchRun(config_of(data, **values))
    run.train()
    run._learner.model.load_state_dict(run._learner.best[0])  # type: ignore[index]
    run._learner.embeddings.load_state_dict(run._learner.best[1])  # type: ignore[index]
    rows = rows_of(run)["_N"]
    factors: Any = run._learner.model.predictor.relations
    graph = GRAPHS["relation_links"]()
    src, dst = (end.numpy() for end in graph.edges())
    number = graph.edata["etype"].numpy()
    scores = np.stack([(rows * factors[r].detach().numpy()) @ rows.T for r in range(6)], axis=1)
    scores[src, number, dst] = -np.inf
    scores[np.arange(40), :, np.arange(40)] = -np.inf

    def found(parts: int, **more: Any) -> pd.DataFrame:
        out, where = tmp_path / "found.csv", write_links(tmp_path, "relation_links", parts)
        options = {"data": where, "run": str(tmp_path / "run"), "out": str(out), "top": 4}
        run_ranks(predict_on_ranks, parts, {**options, **more})
        return pd.read_csv(out)

    for relations, numbers in ((None, [0, 1, 2]), ("is a", [2]), ("rev_knows,likes", [0, 4])):
        table = found(3, relations=relations)
        of_some = scores[:, numbers].reshape(40, -1)
        best = np.argsort(-of_some, axis=1, kind="stable")[:, :4]
        assert table["source"].tolist() == np.repeat(np.arange(40), 4).tolist()
        assert table["rank"].tolist() == [1, 2, 3, 4] * 40
        assert table["target"].tolist() == (best % 40).flatten().tolist()
        names = [NAMES_OF_NUMBERS[numbers[n]] for n in (best // 40).flatten()]
        assert table["relation"].tolist() == names
        expected = np.take_along_axis(of_some, best, axis=1).flatten()
        np.testing.assert_allclose(table["score"], expected, rtol=0, atol=1e-12)
    pairs = pd.DataFrame({"a": [0, 1], "b": [5, 6], "relation": ["is a", "4"]})
    pairs.to_csv(tmp_path / "pairs.csv", index=False)
    table = found(2, pairs=str(tmp_path / "pairs.csv"), top=None)
    assert table["relation"].tolist() == ["is a", "4"]
    with pytest.raises(RanksFailed, match="relations must be relations that the model was trained"):
        found(2, relations="has")
