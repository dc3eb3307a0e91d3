# SPDX-License-Identifier: Apache-2.0
"""Files of pairs that split edges, held against pandas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from graphshard.data._read_tables import read_tables
from graphshard.data.tables import EdgeTable, NodeTable, Tables
from graphshard.train.commands import run

SPLITS = ("train", "val", "test")
KEYS = ["user", "item", "kind"]


def _frames(ids: str, random: np.random.Generator) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Edges, of which some have the same two ends; and of each distinct one the split, or none."""
    users, items = random.permutation(30)[:20], random.permutation(2**62 + np.arange(25))[:15]
    edges = pd.DataFrame({"user": random.choice(users, 150), "item": random.choice(items, 150)})
    edges["kind"] = random.choice(["sees", "buys"], 150)
    if ids == "text":
        edges["user"] = edges["user"].map("u{:x}é".format)
        edges["item"] = edges["item"].map("item, {}".format)
    return edges, edges.drop_duplicates(ignore_index=True)


def _tables(edges: Any, files: dict[str, str], **more: Any) -> Tables:
    table = EdgeTable(files=edges, source="user", target="item", split={"files": files}, **more)
    return Tables(edges={("user", "sees", "item"): table})


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("ids", ["text", "integer"])
def test_edges_are_in_the_splits_that_name_their_ends(
    ids: str, ending: str, has_header: bool, tmp_path: Path
) -> None:
    random = np.random.default_rng(3)
    edges, _ = _frames(ids, random)
    pairs = edges[["user", "item"]].drop_duplicates(ignore_index=True)
    pairs["split"] = random.choice([*SPLITS, "none"], len(pairs))
    files = {}
    for split in SPLITS:
        some = pairs.loc[pairs["split"] == split, ["user", "item"]].sample(frac=1, random_state=0)
        files[split] = str(tmp_path / f"{split}.{ending}")
        if ending == "csv":
            some.to_csv(files[split], index=False, header=has_header)
        else:  # in another order, or by their places
            named = some[["item", "user"]] if has_header else some.set_axis(["a", "b"], axis=1)
            named.assign(more=1).to_parquet(files[split], index=False)
    fields = read_tables(_tables(edges, files)).graph.edges["sees"].data
    expected = edges.merge(pairs, on=["user", "item"], how="left")["split"]
    for split in SPLITS:
        assert fields[f"{split}_mask"].tolist() == (expected == split).tolist()


def test_relations_of_a_knowledge_graph_are_told_apart(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    edges, facts = _frames("integer", random)
    edges["item"], facts["item"] = edges["item"] % 7, facts["item"] % 7
    facts = facts.drop_duplicates(ignore_index=True)
    facts["split"] = random.choice([*SPLITS, "none"], len(facts))
    files = {}
    for split in SPLITS:
        files[split] = str(tmp_path / f"{split}.tsv")
        some = facts.loc[facts["split"] == split, KEYS]
        some.to_csv(files[split], index=False, sep="\t", header=split == "val")
    table = EdgeTable(
        files=edges, source="user", target="item", relation_column="kind", split={"files": files}
    )
    read = read_tables(Tables(edges={("thing", "to", "thing"): table}))
    expected = edges.merge(facts, on=KEYS, how="left")["split"]
    for split in SPLITS:
        found = read.graph.edges["to"].data[f"{split}_mask"]
        assert found.tolist() == (expected == split).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user,item\n1,2\n1,9\n", r"must name nodes of type item \(got '9', and 1 such rows\)"),
        ("1,2\n3,4\n3,2\n", r"edges of user:sees:item \(got '3' and '2', and 1 such rows\); drop"),
        ("1\n3\n", r"must have the columns user, item \(got column_0\); write the ids of both"),
        ("user,item\n1,\n", r"must name both ends of an edge \(got an empty cell\)"),
    ],
)
def test_what_is_no_edge_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(text, encoding="utf-8")
    edges = pd.DataFrame({"user": [1, 3], "item": [2, 4]})
    with pytest.raises(ValueError, match=message):
        read_tables(_tables(edges, {"train": str(tmp_path / "train.csv")}))


def test_by_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.csv").write_text("user,item,stars\na,x,1\nb,y,5\nc,x,3\na,y,2\n", encoding="utf-8")
    Path("train.csv").write_text("user,item\na,x\nb,y\n", encoding="utf-8")
    Path("val.csv").write_text("c,x\n", encoding="utf-8")
    files = "--split-files train=train.csv,val=val.csv"
    for what in ("--label stars --label-task regression", "--links e"):
        words = f"partition --edges user:e:item=e.csv {what} {files} --parts 1 --out p --quiet"
        assert run(words.split()) == 0
    from graphshard.partition import load_partition

    _, _, edge_fields, *_ = load_partition("p/e.json", 0)
    masks = {n: edge_fields[f"user:e:item/{n}_mask"].tolist() for n in SPLITS}
    assert [sum(mask) for mask in masks.values()] == [2, 1, 0]


def test_nodes_are_split_by_ids_alone(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a\n", encoding="utf-8")
    users = pd.DataFrame({"id": ["a", "b"], "label": ["x", "y"]})
    edges = EdgeTable(files=pd.DataFrame({"s": ["a"], "t": ["b"]}), source="s", target="t")
    split = {"files": {"train": str(tmp_path / "t.csv")}}
    table = NodeTable(files=users, id="id", label="label", split=split)
    read = read_tables(Tables(nodes={"u": table}, edges={("u", "e", "u"): edges}))
    assert read.graph.nodes["u"].data["train_mask"].tolist() == [True, False]
