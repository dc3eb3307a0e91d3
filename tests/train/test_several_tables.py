# SPDX-License-Identifier: Apache-2.0
"""Tables in which several relations are to be learnt: by flags and TOML, against pandas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from graphshard.data import EdgeTable, NodeTable, Tables, partition_tables
from graphshard.data.dataset import SPLITS
from graphshard.fullbatch import load_dgl_partition_data
from graphshard.train import read_task
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
    out = ["--parts", "2", "--method", "random", "--out", str(tmp_path / "p"), "--name", "g"]
    flags = ["--links", "buys,follows", "--split", "0.5,0.25,0.25", "--ignore", "stars"]
    assert run(["partition", *words, *flags, *out, "--inverse"]) == 0
    data = str(tmp_path / "p" / "g.json")
    task = read_task(data)
    assert task.kind == "link prediction"
    assert task.targets == (BUYS, FOLLOWS)
    assert task.reverses == (("item", "rev_buys", "user"), ("user", "rev_follows", "user"))
    flags = ["--run", str(tmp_path / "run"), "--epochs", "2", "--device", "cpu", "--quiet"]
    assert run(["train", "--data", data, *flags]) == 0
    out = ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "x.csv"), "--top", "2"]
    assert run(["predict", "--data", data, *out, "--relations", "buys", "--quiet"]) == 0
    found = pd.read_csv(tmp_path / "x.csv")
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
