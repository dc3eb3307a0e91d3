# SPDX-License-Identifier: Apache-2.0
"""Tables in which several relations are to be learnt: by flags and TOML, against pandas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from graphshard.data import EdgeTable, NodeTable, Tables, partition_tables
from graphshard.data.dataset import SPLITS
from graphshard.fullbatch import load_dgl_partition_data
from graphshard.train import FullBatchConfig, FullBatchRun, predict, read_task
from graphshard.train.commands import run

BUYS, FOLLOWS = ("user", "buys", "item"), ("user", "follows", "user")


def frames() -> dict[str, pd.DataFrame]:
    random = np.random.default_rng(0)
    users, items = [f"u{n}" for n in range(30)], [f"i{n}" for n in range(20)]
    return {
        "users": pd.DataFrame({"user_id": users, "age": random.integers(18, 80, 30)}),
        "items": pd.DataFrame({"item_id": items, "price": random.random(20)}),
        "buys": pd.DataFrame(
            {
                "user_id": random.choice(users, 90),
                "item_id": random.choice(items, 90),
                "stars": random.choice(["good", "bad", None], 90),
            }
        ),
        "follows": pd.DataFrame(
            {
                "source": random.choice(users, 60),
                "target": random.choice(users, 60),
                "stars": random.choice(["bad", "so so"], 60),
            }
        ),
    }


def write(folder: Path) -> list[str]:
    for name, frame in frames().items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    paths = {name: folder / f"{name}.csv" for name in ("users", "items", "buys", "follows")}
    words = ["--nodes", f"user={paths['users']}", "--nodes", f"item={paths['items']}"]
    words += ["--edges", f"user:buys:item={paths['buys']}"]
    return [*words, "--edges", f"user:follows:user={paths['follows']}", "--quiet"]


def test_links_of_several_relations_by_flags(tmp_path: Path) -> None:
    words = write(tmp_path)
    out = ["--parts", "1", "--out", str(tmp_path / "p"), "--name", "g"]
    flags = ["--links", "buys,follows", "--split", "0.5,0.25,0.25", "--ignore", "stars"]
    assert run(["partition", *words, *flags, *out, "--inverse"]) == 0
    data = str(tmp_path / "p" / "g.json")
    task = read_task(data)
    assert task.kind == "link prediction"
    assert task.targets == (BUYS, FOLLOWS)
    assert task.reverses == (("item", "rev_buys", "user"), ("user", "rev_follows", "user"))
    config = FullBatchConfig(data=data, run=str(tmp_path / "run"), epochs=2, device="cpu")
    FullBatchRun(config).train()
    found = predict(data, config.run, top=2, relations="buys", device="cpu").to_pandas()
    assert set(found["relation"]) == {"user:buys:item"}
    assert found["source"].tolist() == [f"u{n}" for n in range(30) for _ in range(2)]
    assert set(found["target"]) <= set(frames()["items"]["item_id"])


def test_labels_of_several_relations_are_of_the_same_classes(tmp_path: Path) -> None:
    read = frames()
    tables = Tables(
        nodes={
            "user": NodeTable(files=read["users"], id="user_id"),
            "item": NodeTable(files=read["items"], id="item_id"),
        },
        edges={
            BUYS: EdgeTable(files=read["buys"], source="user_id", target="item_id", label="stars"),
            FOLLOWS: EdgeTable(
                files=read["follows"], source="source", target="target", label="stars"
            ),
        },
    )
    path = partition_tables(tables, 1, tmp_path)
    task = read_task(path)
    assert task.kind == "edge classification"
    assert task.targets == (BUYS, FOLLOWS)
    assert task.class_names == ("bad", "good", "so so")
    data = load_dgl_partition_data(str(path), 0)
    for name, etype in (("buys", BUYS), ("follows", FOLLOWS)):
        fields = {k.split("/")[1]: v for k, v in data.edge_features.items() if etype[1] in k}
        codes = read[name]["stars"].map({"bad": 0, "good": 1, "so so": 2}).fillna(-1).to_numpy()
        assert fields["label"].tolist() == codes[fields["orig_id"]].tolist()
        masks = np.stack([fields[f"{split}_mask"].numpy() for split in SPLITS])
        assert (masks.sum(0) == (fields["label"].numpy() >= 0)).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split", "0.5,0.25,0.25"], "say which relations are to be predicted: --links buys"),
        (["--links", "buys,sells"], "links must name relations (got 'sells', which 0 of"),
        (["--links", "buys", "--label", "age"], "links are edges that are told from none"),
    ],
)
def test_what_flags_cannot_say(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["partition", *write(tmp_path), *flags, "--parts", "1", "--out", str(tmp_path / "p")]
    assert run(words) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split())


def test_labels_of_several_types_are_refused() -> None:
    read: dict[str, Any] = frames()
    read["follows"]["stars"] = 1.5
    edges = {
        BUYS: EdgeTable(files=read["buys"], source="user_id", target="item_id", label="stars"),
        FOLLOWS: EdgeTable(files=read["follows"], source="source", target="target", label="stars"),
    }
    with pytest.raises(ValueError, match="labels must be of the types of those of the other rel"):
        partition_tables(Tables(edges=edges), 1, "nowhere")


def knowledge() -> pd.DataFrame:
    random = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "head": [f"/m/{n}" for n in random.integers(0, 40, 300)],
            "rel": random.choice(["born in", "knows", "é/is a"], 300),
            "tail": [f"/m/{n}" for n in random.integers(0, 40, 300)],
            "part": random.choice(["train", "val", "test"], 300, p=[0.8, 0.1, 0.1]),
        }
    )


def test_a_knowledge_graph_from_one_table(tmp_path: Path) -> None:
    frame = knowledge()
    frame.to_csv(tmp_path / "triples.csv", index=False)
    words = ["partition", "--edges", str(tmp_path / "triples.csv"), "--relation-column", "rel"]
    words += ["--split", "part", "--inverse", "--method", "random", "--name", "g"]
    assert run([*words, "--parts", "2", "--out", str(tmp_path / "p"), "--quiet"]) == 0
    data = str(tmp_path / "p" / "g.json")
    task = read_task(data)
    names = ("born in", "knows", "é/is a")
    assert task.relation_names == (*names, *(f"rev_{name}" for name in names))
    assert task.num_relations == 6
    assert task.reverse_of == task.target == ("node", "triples", "node")
    found = []
    for part in (0, 1):
        of_part = load_dgl_partition_data(data, part)
        fields = of_part.edge_features
        columns = ("orig_id", "etype", "train_mask", "val_mask", "test_mask")
        key = "node:triples:node"
        found.append(pd.DataFrame({name: fields[f"{key}/{name}"].numpy() for name in columns}))
    rows = pd.concat(found).sort_values("orig_id").reset_index(drop=True)
    number = frame["rel"].map({name: n for n, name in enumerate(names)})
    assert rows["etype"].tolist() == [*number, *(number + 3)]
    for split in ("train", "val", "test"):
        expected = [*(frame["part"] == split), *[False] * 300]
        assert rows[f"{split}_mask"].tolist() == expected
    one = str(tmp_path / "one" / "g.json")
    assert run([*words, "--parts", "1", "--out", str(tmp_path / "one"), "--quiet"]) == 0
    values = {"model": "rgcn", "num_bases": 2, "epochs": 2, "device": "cpu"}
    FullBatchRun(FullBatchConfig(data=one, run=str(tmp_path / "run"), **values)).train()
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    assert set(card["best"]["by_relation"]) <= {*names}
    assert set(card["best"]["by_relation"])
    run_folder = tmp_path / "run"
    best = predict(one, run_folder, top=2, relations="born in", device="cpu").to_pandas()
    assert set(best["relation"]) == {"born in"}
    known = frame[frame["rel"] == "born in"]
    pairs = {*zip(best["source"], best["target"], strict=True)}
    assert not pairs & {*zip(known["head"], known["tail"], strict=True)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel": "drop"}, "with parallel edges kept"),
        ({"rel": None}, "each row must have a relation (got 300 rows without one in 'rel')"),
    ],
)
def test_what_a_knowledge_graph_cannot_be(change: dict[str, Any], message: str) -> None:
    frame = knowledge()
    settings = {key: value for key, value in change.items() if key == "parallel"}
    if "rel" in change:
        frame["rel"] = pd.Series([None] * 300, dtype="string")
    table = EdgeTable(files=frame, source="head", target="tail", relation_column="rel")
    with pytest.raises(ValueError) as caught:
        partition_tables(Tables(edges={("n", "r", "n"): table}, **settings), 1, "nowhere")
    assert message in str(caught.value)


def test_relations_are_numbered_as_in_training(tmp_path: Path) -> None:
    frame = knowledge()
    options = {"source": "head", "target": "tail", "relation_column": "rel"}

    def tables(rows: pd.DataFrame) -> Tables:
        return Tables(edges={("n", "r", "n"): EdgeTable(files=rows, ignore=["part"], **options)})

    first = partition_tables(tables(frame), 1, tmp_path / "a")
    fewer = frame[frame["rel"] != "born in"]
    second = partition_tables(tables(fewer), 1, tmp_path / "b", encodings_from=first)
    assert read_task(second).relation_names == read_task(first).relation_names
    etype = load_dgl_partition_data(str(second), 0).edge_features["n:r:n/etype"]
    assert sorted(set(etype.tolist())) == [1, 2]
    other = frame.assign(rel="has")
    with pytest.raises(ValueError, match="1 relations in 'rel' are not those of the encodings"):
        partition_tables(tables(other), 1, tmp_path / "c", encodings_from=first)


def test_whole_numbers_are_values_where_that_is_said(tmp_path: Path) -> None:
    frames()["follows"].assign(stars=range(60)).to_csv(tmp_path / "follows.csv", index=False)
    words = ["partition", "--edges", str(tmp_path / "follows.csv"), "--label", "stars", "--quiet"]
    words += ["--parts", "1", "--name", "g", "--label-task", "regression"]
    assert run([*words, "--out", str(tmp_path / "p")]) == 0
    assert read_task(tmp_path / "p" / "g.json").kind == "edge regression"
    classes = Tables(
        edges={
            FOLLOWS: EdgeTable(
                files=frames()["follows"], source="source", target="target", label="stars"
            )
        }
    )
    data = str(partition_tables(classes, 1, tmp_path / "c"))
    config = FullBatchConfig(data=data, task="edge regression", device="cpu")
    with pytest.raises(ValueError, match=r"labels that were made classes \(bad, so so\)"):
        FullBatchRun(config)
