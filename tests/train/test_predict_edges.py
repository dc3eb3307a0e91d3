# SPDX-License-Identifier: Apache-2.0
"""Edges, pairs and best links of any number of parts, against numpy on one. Up to 5 gloo ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from train_cases import GRAPHS, config_of, write_parts

from graphshard._base.ranges import RangeMap
from graphshard.testing import RanksFailed, run_ranks
from graphshard.train import FullBatchRun, TaskInfo, _predict, predict, write_task
from graphshard.train._predict_edges import fetched_ids, numbers_of_ids

PLAIN, WRITES = ("_N", "_E", "_N"), ("author", "writes", "paper")
CASES: dict[str, tuple[dict[str, Any], TaskInfo | None]] = {
    "edge_classes": ({"model": "sage"}, None),
    "edge_values": ({"model": "sage"}, None),
    "plain_links": ({"model": "sage", "negatives": 7}, None),
    "typed_links": (
        {"model": "rgcn", "negatives": 7},
        TaskInfo(
            name="g",
            kind="link prediction",
            target=WRITES,
            reverse_of=("paper", "rev_writes", "author"),
        ),
    ),
}
TASKS = {"classes": "edge classification", "values": "edge regression", "links": "link prediction"}


def write(folder: Path, kind: str, parts: int, how: str = "random") -> str:
    """A partition, with its task beside it."""
    data = write_parts(folder, kind, parts, how)
    task = CASES[kind][1]
    if task is not None:
        write_task(data, task)
    return data


@cache
def folder_of_runs() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def trained(kind: str) -> tuple[str, str, FullBatchRun]:
    """A partition into one part, and a run on it, with its best model in place."""
    folder = Path(folder_of_runs().name) / kind
    data, values = write(folder, kind, 1), CASES[kind][0]
    task = TASKS[kind.split("_")[1]]
    settings = {"epochs": 2, "dropout": 0.0, "task": task, "run": str(folder / "run"), **values}
    run = FullBatchRun(config_of(data, **settings))
    run.train()
    assert run._learner.best is not None
    run._learner.model.load_state_dict(run._learner.best[0])
    run._learner.embeddings.load_state_dict(run._learner.best[1])
    return data, str(folder / "run"), run


def rows_of_nodes(kind: str) -> dict[str, np.ndarray]:
    """What the network gives to nodes, by original number."""
    run = trained(kind)[2]
    run._learner.model.eval()
    with torch.no_grad():
        rows = run._learner.node_rows()
    original = run._shard.original_ids
    return {t: r[torch.argsort(original[t])].numpy() for t, r in rows.items()}


def predict_on_ranks(rank: int, world_size: int, values: dict[str, Any]) -> None:
    predict(**values, device="cpu", timeout=30.0)


def predicted(folder: Path, kind: str, parts: int, how: str, **more: Any) -> pd.DataFrame:
    out = folder / f"{parts}.parquet"
    values = {"data": write(folder, kind, parts, how), "run": trained(kind)[1], "out": str(out)}
    run_ranks(predict_on_ranks, parts, {**values, **more})
    return pd.read_parquet(out)


def known_edges(kind: str) -> tuple[np.ndarray, np.ndarray]:
    etype = PLAIN if kind in ("plain_links", "edge_classes") else WRITES
    src, dst = GRAPHS[kind]().edges(etype=etype)
    return src.numpy(), dst.numpy()


@pytest.mark.parametrize(
    ("kind", "parts", "how"), [("edge_classes", 3, "random"), ("edge_values", 2, "empty_part")]
)
def test_edges_in_their_own_order(kind: str, parts: int, how: str, tmp_path: Path) -> None:
    table = predicted(tmp_path, kind, parts, how)
    src, dst = known_edges(kind)
    assert table["source"].tolist() == src.tolist()
    assert table["target"].tolist() == dst.tolist()
    run: Any = trained(kind)[2]
    ((source, name, target),) = run._shard.edges.relations
    rows = {t: torch.from_numpy(of_type) for t, of_type in rows_of_nodes(kind).items()}
    edata = GRAPHS[kind]().edges[source, name, target].data
    feat = edata.get("feat")
    predictor = run._learner.model.predictor
    with torch.no_grad():
        feat = None if feat is None else feat.double()
        scores = predictor(rows[source][src], rows[target][dst], feat)
        expected = run._shard.task.predictions(scores).numpy()
    if kind == "edge_classes":
        found = table[[f"p_{n}" for n in range(expected.shape[1])]].to_numpy()
        assert table["prediction"].tolist() == expected.argmax(1).tolist()
    else:
        found = table.filter(like="prediction").to_numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    mask = edata["val_mask"].numpy()
    some = predicted(tmp_path / "some", kind, parts, how, nodes="val", memory="3GiB")
    pd.testing.assert_frame_equal(
        some, table[mask].reset_index(drop=True), check_exact=False, atol=1e-12
    )


def test_edges_are_scored_some_at_a_time(tmp_path: Path) -> None:
    data, run, _ = trained("edge_classes")
    expected = predict(data, run, device="cpu").to_pandas()
    with mock.patch.object(_predict, "_ROWS_AT_ONCE", 7):
        found = predict(data, run, device="cpu", memory="3GiB").to_pandas()
    pd.testing.assert_frame_equal(found, expected, check_exact=False, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "parts", "how"), [("plain_links", 3, "empty_part"), ("typed_links", 2, "random")]
)
def test_pairs_and_the_best_links_of_nodes(kind: str, parts: int, how: str, tmp_path: Path) -> None:
    source, target = ("author", "paper") if kind == "typed_links" else ("_N", "_N")
    rows = rows_of_nodes(kind)
    scores = rows[source] @ rows[target].T
    random = np.random.default_rng(0)
    pairs = pd.DataFrame(
        {
            "to": random.integers(0, scores.shape[1], 50),
            "weight": 1.0,
            "source": random.integers(0, scores.shape[0], 50),
        }
    ).rename(columns={"to": "target"})
    pairs.to_csv(tmp_path / "pairs.csv", index=False)
    found = predicted(tmp_path, kind, parts, how, pairs=(tmp_path / "pairs.csv").as_uri())
    assert list(found) == ["source", "target", "score"]
    pd.testing.assert_frame_equal(found[["source", "target"]], pairs[["source", "target"]])
    expected = scores[pairs["source"], pairs["target"]]
    np.testing.assert_allclose(found["score"], expected, rtol=0, atol=1e-12)

    src, dst = known_edges(kind)
    left = scores.copy()
    left[src, dst] = -np.inf
    if source == target:
        np.fill_diagonal(left, -np.inf)
    (tmp_path / "ids.txt").write_text("7\n2\n")
    for nodes, ids in (("all", range(len(scores))), (str(tmp_path / "ids.txt"), [2, 7])):
        more = {} if nodes == "all" else {"memory": "3GiB"}
        found = predicted(tmp_path / str(len(ids)), kind, parts, how, top=4, nodes=nodes, **more)
        best = {u: np.argsort(-left[u], kind="stable")[:4] for u in ids}
        assert found["source"].tolist() == [u for u in ids for _ in range(4)]
        assert found["rank"].tolist() == [1, 2, 3, 4] * len(ids)
        assert found["target"].tolist() == [v for u in ids for v in best[u]]
        expected = np.concatenate([left[u, best[u]] for u in ids])
        np.testing.assert_allclose(found["score"], expected, rtol=0, atol=1e-12)


def test_of_nodes_with_few_others_there_are_few_links(tmp_path: Path) -> None:
    found = predicted(tmp_path, "typed_links", 2, "random", top=1000)
    src, dst = known_edges("typed_links")
    expected = 30 * 40 - len({*zip(src.tolist(), dst.tolist(), strict=True)})
    assert len(found) == expected
    assert not set(zip(found["source"], found["target"], strict=True)) & set(
        zip(src, dst, strict=True)
    )


@pytest.mark.parametrize(("kind", "parts"), [("typed_links", 2), ("plain_links", 3)])
def test_rows_of_nodes_by_which_edges_are_scored(kind: str, parts: int, tmp_path: Path) -> None:
    more = {"memory": "3GiB"} if kind == "typed_links" else {}
    found = predicted(tmp_path, kind, parts, "empty_part", embeddings=True, **more)
    rows = rows_of_nodes(kind)
    if kind == "typed_links":
        assert found["type"].tolist() == ["author"] * 30 + ["paper"] * 40
        assert found["id"].tolist() == [*range(30), *range(40)]
        expected = np.concatenate([rows["author"], rows["paper"]])
    else:
        assert found["id"].tolist() == list(range(40))
        expected = rows["_N"]
    np.testing.assert_allclose(np.stack(found["embedding"]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("edge_classes", {"pairs": "P"}, "pairs is for link prediction"),
        ("plain_links", {"embeddings": True, "top": 2}, "are rows of nodes; leave out pairs"),
        ("edge_values", {"top": 2}, "top is for one class of several per row"),
        ("plain_links", {"nodes": "val"}, "nodes must be all or a file of ids"),
        ("plain_links", {"pairs": "P", "top": 3}, "leave out pairs"),
        (
            "plain_links",
            {"pairs": "P"},
            "as target of type '_N' (2 of 3: 40 in row 2, 77 in row 3)",
        ),
        ("plain_links", {"pairs": "nowhere"}, "pairs must be a file"),
        ("plain_links", {"pairs": "O"}, "must have the columns source, target (got source)"),
    ],
)
def test_what_cannot_be_predicted_of_edges(
    kind: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "p.csv").write_text("source,target\n1,2\n2,40\n0,77\n")
    (tmp_path / "o.csv").write_text("source\n1\n")
    files = {"P": str(tmp_path / "p.csv"), "O": str(tmp_path / "o.csv")}
    values = {k: files.get(v, v) if isinstance(v, str) else v for k, v in values.items()}
    with pytest.raises(ValueError) as caught:
        predict(trained(kind)[0], trained(kind)[1], device="cpu", **values)
    assert message in str(caught.value)
    if kind == "plain_links" and "2 of 3" in message:
        with pytest.raises(RanksFailed) as failed:
            predicted(tmp_path, kind, 2, "random", **values)
        assert message in str(failed.value)


def test_ids_of_other_ranks_come_in_their_type() -> None:
    assert run_ranks(ids_of_rank, 3) == [True] * 3


def ids_of_rank(rank: int, world_size: int) -> bool:
    sizes = [4, 0, 3]
    ranges = RangeMap.from_sizes(sizes)
    for kind, made in (
        (pa.string(), [f"é{n}" * n for n in range(7)]),
        (pa.uint64(), [2**64 - 1 - n for n in range(7)]),
        (pa.large_binary(), [bytes([n]) for n in range(7)]),
    ):
        all_ids = pa.array(made, kind)
        own = all_ids.slice(ranges.starts[rank], sizes[rank])
        wanted = [torch.tensor([6, 0, 0, 3]), torch.tensor([5]), torch.zeros(0).long()][rank]
        assert fetched_ids(wanted, ranges, own).equals(all_ids.take(pa.array(wanted.numpy())))
        asked = pa.array([made[5], made[0], made[3]], kind)
        assert numbers_of_ids(asked, own, ranges).tolist() == [5, 0, 3]
    return True
