# SPDX-License-Identifier: Apache-2.0
"""Every task by command, from tables: three workers as one, and both as scikit-learn has it.

What is compared is what the commands write: ``history.jsonl`` and the predictions, in float64. Of
the model that is kept, losses and metrics are computed once more, from its predictions joined with
the tables by their ids. Workers are forked.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sklearn

from graphshard.train.commands import run

NUM_USERS, NUM_ITEMS, NUM_EDGES = 60, 25, 150
SPLITS = ["train", "val", "test"]
CLASSES = ["late", "on time, nearly", "Zoë"]
TAGS = ["a", "b", "rare"]
OF_CLASSES = ["accuracy", "macro_f1", "auroc", "average_precision"]

#: What is learnt: the table of it in a plain graph and in a typed one, and what its labels are.
TASKS = {
    "node classification": ("users", "users", "class"),
    "multi-label classification": ("users", "users", "tags"),
    "node regression": ("users", "users", "value"),
    "edge classification": ("follows", "buys", "class"),
    "edge regression": ("follows", "buys", "value"),
    "link prediction": ("follows", "buys", "link"),
}


def _labels(kind: str, random: np.random.Generator, count: int) -> Any:
    """A label a row, with gaps."""
    is_missing = random.random(count) < 0.2
    if kind == "value":
        return np.where(is_missing, np.nan, random.normal(5e3, 400, count)).astype("float32")
    if kind == "class":
        return pd.Series(random.choice(CLASSES, count)).mask(is_missing)
    has_tag = random.random((count, len(TAGS))) < [0.5, 0.4, 0.3]
    sets = [np.array(TAGS)[row].tolist() for row in has_tag]
    return [None if gone else row for gone, row in zip(is_missing, sets, strict=True)]


def _tables(folder: Path, labelled: str, kind: str) -> dict[str, pd.DataFrame]:
    """Users, items, who follows whom and who buys what; ids are texts, and large numbers."""
    random = np.random.default_rng(7)
    users = pd.DataFrame({"user": [f"u{n:x}é" for n in random.permutation(999)[:NUM_USERS]]})
    users["age"] = random.normal(40, 9, NUM_USERS).round(1)
    users["city"] = random.choice(["Oslo", "Rome", "Lima"], NUM_USERS)
    items = pd.DataFrame({"item": random.permutation(NUM_ITEMS) + 2**62})
    items["price"] = random.lognormal(1, 1, NUM_ITEMS)
    tables = {"users": users, "items": items}
    for name, ends in (("follows", users["user"]), ("buys", items["item"])):
        pairs = {"from": random.choice(users["user"], NUM_EDGES)}
        pairs["to"] = random.choice(ends, NUM_EDGES)
        tables[name] = pd.DataFrame(pairs).drop_duplicates(ignore_index=True)
    table = tables[labelled]
    if kind != "link":
        table["label"] = _labels(kind, random, len(table))
    table["part"] = random.choice(SPLITS, len(table), p=[0.5, 0.25, 0.25])
    for name, frame in tables.items():
        frame.to_parquet(folder / f"{name}.parquet", index=False)
    return tables


def _call(*words: str) -> None:
    assert run([word for some in words for word in some.split()]) == 0


def _partitioned(folder: Path, relation: str, kind: str, is_typed: bool, num_parts: int) -> str:
    """The path of the JSON."""
    parts = folder / f"parts{num_parts}"
    if not parts.exists():
        words = ["partition --name g --node-id user --source from --target to --quiet"]
        words += [f"--parts {num_parts} --out {parts} --nodes user={folder}/users.parquet"]
        words += [f"--edges user:follows:user={folder}/follows.parquet"]
        if is_typed:
            words += [f"--nodes item={folder}/items.parquet"]
            words += [f"--edges user:buys:item={folder}/buys.parquet"]
        words += ["--split part", f"--links {relation}" if kind == "link" else "--label label"]
        _call(*words)
    return f"{parts}/g.json"


def _trained(
    folder: Path, relation: str, kind: str, is_typed: bool, mode: str, workers: tuple[int, int]
) -> tuple[list[Any], pd.DataFrame]:
    """By so many workers: the lines of the history, and, by so many, the best one's predictions."""
    parts = [_partitioned(folder, relation, kind, is_typed, count) for count in workers]
    place, out = folder / f"run{workers[0]}", folder / f"predictions{workers[0]}.parquet"
    words = [f"train --data {parts[0]} --workers {workers[0]} --run {place} --quiet"]
    words += [f"--mode {mode} --dropout 0 --model {'rgcn' if is_typed else 'sage'}"]
    if kind == "link" and is_typed:
        # Where sources and targets have layers of their own, softmax does not depend on a bias of
        # the targets, and Adam makes steps of what rounding leaves of its gradient.
        words += ["--loss bce"]
    words += ["--dtype float64 --epochs 3 --hidden 4 --device cpu --timeout 60"]
    if mode == "sample":  # of all neighbours, and in one step: as many steps for any workers
        words += ["--fanouts -1,-1 --batch-size 0"]
        if kind == "link":  # a worker leaves out the edges of its own share of a step
            words += ["--no-exclude-targets"]
    if kind in ("class", "tags"):
        words += [f"--metrics {','.join(OF_CLASSES)}"]
    _call(*words)
    words = [f"predict --data {parts[1]} --run {place} --out {out} --device cpu"]
    if kind == "link":
        words += [f"--pairs {folder}/pairs.parquet"]
    _call(*words)
    lines = (place / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], pd.read_parquet(out)


def _best(folder: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((folder / "run3" / "model.json").read_text("utf-8"))
    return card["best"]


def _of_classes(names: list[str], truth: np.ndarray, shares: np.ndarray) -> dict[str, float]:
    chosen = shares.argmax(1)
    indicator = np.eye(len(names))[truth]
    return {
        "accuracy": sklearn.accuracy_score(truth, chosen),
        "macro_f1": sklearn.f1_score(truth, chosen, average="macro"),
        "auroc": sklearn.roc_auc_score(truth, shares, multi_class="ovr"),
        "average_precision": sklearn.average_precision_score(indicator, shares),
        "loss": sklearn.log_loss(truth, shares, labels=range(len(names))),
    }


def _of_tags(truth: np.ndarray, shares: np.ndarray) -> dict[str, float]:
    pairs = truth.ravel(), shares.ravel()
    return {
        "accuracy": sklearn.accuracy_score(pairs[0], pairs[1] > 0.5),
        "macro_f1": sklearn.f1_score(truth, shares > 0.5, average="macro"),
        "auroc": sklearn.roc_auc_score(truth, shares, average="macro"),
        "average_precision": sklearn.average_precision_score(truth, shares, average="macro"),
        "loss": sklearn.log_loss(*pairs),
    }


def _of_values(truth: np.ndarray, found: np.ndarray, training: pd.Series) -> dict[str, float]:
    error = sklearn.mean_squared_error(truth, found)
    absolute = sklearn.mean_absolute_error(truth, found)
    return {"rmse": error**0.5, "mae": absolute, "loss": error / training.var(ddof=0)}


def _of_links(table: pd.DataFrame, scores: pd.DataFrame, split: str) -> dict[str, float]:
    """Filtered ranks by a search over all targets."""
    by_source = scores.pivot(index="source", columns="target", values="score")
    ranks = []
    for source, target in table.loc[table["part"] == split, ["from", "to"]].to_numpy():
        of_source = by_source.loc[source]
        known = table.loc[table["from"] == source, "to"]
        ranks.append(1 + (of_source.drop(known) > of_source[target]).sum())
    ranks = np.array(ranks)
    return {"mrr": (1 / ranks).mean(), **{f"hits@{k}": (ranks <= k).mean() for k in (1, 3, 10)}}


def _expected(kind: str, table: pd.DataFrame, found: pd.DataFrame, split: str) -> dict[str, float]:
    """Metrics and loss of a split, from predictions in the order of the table, or of all pairs."""
    if kind == "link":
        return _of_links(table, found, split)
    rows = (table["part"] == split) & table["label"].notna()
    truth, found = table["label"][rows], found[rows]
    if kind == "value":
        training = table["label"][table["part"] == "train"].astype(float)
        return _of_values(truth.astype(float), found["prediction"], training)
    names = CLASSES if kind == "class" else TAGS
    shares = found[[f"p_{name}" for name in names]].to_numpy()
    if kind == "class":
        assert found["prediction"].tolist() == [names[place] for place in shares.argmax(1)]
        return _of_classes(names, truth.map(names.index).to_numpy(), shares)
    return _of_tags(np.array([[name in row for name in names] for row in truth]), shares)


CASES = [*product(TASKS, (False, True), ("full", "sample"), ([(1, 1), (3, 3)],))]
BY_DEFAULT = [("node regression", False, "full", [(3, 1)])]


@pytest.mark.usefixtures("forked_interpreters")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("task", "is_typed", "mode", "workers"),
    [*BY_DEFAULT, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES)],
)
def test_three_workers_are_as_one_and_as_the_tables_say(
    task: str, is_typed: bool, mode: str, workers: list[tuple[int, int]], tmp_path: Path
) -> None:
    *of_graph, kind = TASKS[task]
    labelled = of_graph[is_typed]
    tables = _tables(tmp_path, labelled, kind)
    table = tables[labelled]
    others = tables["items"]["item"] if is_typed else tables["users"]["user"]
    pairs = pd.MultiIndex.from_product(
        [tables["users"]["user"], others], names=["source", "target"]
    )
    pairs.to_frame(index=False).to_parquet(tmp_path / "pairs.parquet")
    runs = [_trained(tmp_path, labelled, kind, is_typed, mode, count) for count in workers]
    one, three = runs[0], runs[-1]
    assert len(one[0]) == len(three[0]) == 3
    for line, expected in zip(three[0], one[0], strict=True):
        for name in ("epoch", "loss", "losses", "metrics", "by_relation"):
            torch.testing.assert_close(line.get(name), expected.get(name), rtol=1e-10, atol=1e-10)
    pd.testing.assert_frame_equal(three[1], one[1], rtol=1e-10, atol=1e-10)

    found = three[1]
    keys = [["id"], ["user"]] if labelled == "users" else [["source", "target"], ["from", "to"]]
    best = _best(tmp_path)
    line = next(line for line in three[0] if line["epoch"] == best["epoch"])
    if kind != "link":
        assert found[keys[0]].to_numpy().tolist() == table[keys[1]].to_numpy().tolist()
    for split in SPLITS[kind == "link" :]:  # links are ranked in evaluations
        metrics = {name: by_split[split] for name, by_split in line["metrics"].items()}
        expected = _expected(kind, table, found, split)
        loss = expected.pop("loss", None)
        if split in line["losses"] and loss is not None:
            assert line["losses"][split] == pytest.approx(loss, rel=1e-10)
        for name, value in expected.items():  # torchmetrics computes two of them in float32
            rounding = 1e-6 if name in ("auroc", "average_precision") else 1e-10
            assert metrics.pop(name) == pytest.approx(value, rel=rounding, abs=rounding)
        assert not metrics
