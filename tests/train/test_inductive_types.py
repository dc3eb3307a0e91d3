# SPDX-License-Identifier: Apache-2.0
"""New users and items with a model of old ones, held against PyG, pandas and scikit-learn.

Columns stand in another order, one is new, cells are missing or of unknown categories, and the new
tables are cut into other numbers of parts. The model is what its two files say: a state_dict and a
card. 3 gloo ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor
from torch_geometric.nn import SAGEConv
from train_cases import config_of

from graphshard.data import EdgeTable, NodeTable, Tables, partition_tables
from graphshard.errors import PartitionFormatError
from graphshard.testing import run_ranks
from graphshard.train import FullBatchRun, predict

RELATIONS = [("user", "buys", "item"), ("user", "follows", "user"), ("item", "made_by", "user")]


def _frames(seed: int, num_users: int, cities: list[str]) -> dict[str, pd.DataFrame]:
    random = np.random.default_rng(seed)
    users = pd.DataFrame({"id": [f"u{seed}-{n}" for n in range(num_users)]})
    users["age"] = random.normal(40, 9, num_users)
    users.loc[::4, "age"] = np.nan
    users["city"] = random.choice(cities, num_users)
    users["joined"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(
        random.integers(0, 900, num_users), unit="D"
    )
    users["part"] = random.choice(["train", "val", "test"], num_users, p=[0.6, 0.2, 0.2])
    users["segment"] = pd.Series(random.choice(["basic", "gold"], num_users)).mask(
        random.random(num_users) < 0.2
    )
    items = pd.DataFrame({"id": random.permutation(1000)[:15] + 2**61 * seed})
    items["price"] = random.lognormal(1, 1, 15)
    made = {"user": users, "item": items}
    for source, name, target in RELATIONS:
        made[name] = pd.DataFrame(
            {"a": random.choice(made[source]["id"], 90), "b": random.choice(made[target]["id"], 90)}
        )
    return made


def _tables(frames: dict[str, pd.DataFrame], label: str | None) -> Tables:
    users = NodeTable(
        files=frames["user"],
        id="id",
        label=label,
        split=label and "part",
        ignore=("part", "segment") if label is None and "part" in frames["user"] else (),
    )
    edges = {
        etype: EdgeTable(files=frames[etype[1]], source="a", target="b") for etype in RELATIONS
    }
    return Tables(
        nodes={"user": users, "item": NodeTable(files=frames["item"], id="id")}, edges=edges
    )


def _seconds(frame: pd.DataFrame) -> np.ndarray:
    return (frame[["joined"]] - pd.Timestamp(0)) / pd.Timedelta(1, "s")


def _encoded(old: dict[str, pd.DataFrame], new: dict[str, pd.DataFrame]) -> dict[str, Tensor]:
    """The features of new rows by the statistics of old ones: of users those for training."""
    train, users = old["user"][old["user"]["part"] == "train"], new["user"]
    age = StandardScaler().fit(train[["age"]]).transform(users[["age"]])
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(train[["city"]])
    columns = [
        np.nan_to_num(age),
        np.isnan(age),
        one_hot.transform(users[["city"]]),
        StandardScaler().fit(_seconds(train)).transform(_seconds(users)),
    ]
    price = StandardScaler().fit(old["item"][["price"]]).transform(new["item"][["price"]])
    rows = {"user": np.concatenate(columns, axis=1), "item": price}
    return {ntype: torch.tensor(x, dtype=torch.float32).double() for ntype, x in rows.items()}


def _by_pyg(run: Path, features: dict[str, Tensor], new: dict[str, pd.DataFrame]) -> np.ndarray:
    """Probabilities of users: a layer for each relation, and a matrix for a node's own row."""
    card = json.loads((run / "model.json").read_text(encoding="utf-8"))
    state = load_file(run / "model.safetensors")
    number = {t: {u: n for n, u in enumerate(new[t]["id"])} for t in ("user", "item")}
    edges = {
        (s, name, t): torch.tensor(
            [[number[s][u] for u in new[name]["a"]], [number[t][v] for v in new[name]["b"]]]
        )
        for s, name, t in RELATIONS
    }
    h = {
        ntype: features[ntype] @ state[f"projections.{place}.weight"].T
        for place, ntype in enumerate(card["feature_widths"])
    }
    for layer in range(card["config"]["layers"]):
        sums = {}
        for place, ntype in enumerate(card["node_types"]):
            own = f"layers.{layer}.own.{place}"
            sums[ntype] = h[ntype] @ state[f"{own}.weight"].T + state[f"{own}.bias"]
        for etype in map(tuple, card["relations"]):
            name = f"layers.{layer}.relations.mods.{etype}"
            out, width = state[f"{name}.fc_self.weight"].shape
            conv = SAGEConv((width, width), out).double()
            theirs = {"lin_l.weight": "fc_neigh.weight", "lin_l.bias": "fc_self.bias"}
            theirs["lin_r.weight"] = "fc_self.weight"
            conv.load_state_dict({a: state[f"{name}.{b}"] for a, b in theirs.items()})
            sums[etype[2]] = sums[etype[2]] + conv((h[etype[0]], h[etype[2]]), edges[etype])
        last = layer + 1 == card["config"]["layers"]
        h = sums if last else {ntype: rows.relu() for ntype, rows in sums.items()}
    found: np.ndarray = h["user"].detach().softmax(1).numpy()
    return found


def _predict_on_rank(rank: int, world_size: int, values: dict[str, Any]) -> None:
    predict(**values, device="cpu", timeout=30.0)


def test_new_nodes_of_several_types(tmp_path: Path) -> None:
    old, new = _frames(1, 50, ["Oslo", "Rome"]), _frames(2, 31, ["Rome", "Oslo", "Atlantis"])
    data = partition_tables(_tables(old, "segment"), 1, tmp_path / "old", name="g")
    run = tmp_path / "run"
    FullBatchRun(config_of(str(data), model="sage", epochs=4, dropout=0.0, run=str(run))).train()
    frame = new["user"].drop(columns=["part", "segment"])
    new["user"] = frame[list(frame)[::-1]].assign(more=1.0)
    made = [
        partition_tables(_tables(new, None), parts, tmp_path / str(parts), encodings_from=data)
        for parts in (1, 3)
    ]
    one = predict(made[0], run, device="cpu").to_pandas()
    out = tmp_path / "p.parquet"
    run_ranks(_predict_on_rank, 3, {"data": str(made[1]), "run": str(run), "out": str(out)})
    pd.testing.assert_frame_equal(pd.read_parquet(out), one, rtol=0, atol=1e-12)
    assert one["id"].tolist() == new["user"]["id"].tolist()
    expected = _by_pyg(run, _encoded(old, new), new)
    found = one[["p_basic", "p_gold"]].to_numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)  # features are float32
    report = json.loads(made[1].with_name(f"{made[1].stem}.tables.json").read_text("utf-8"))
    (city,) = [f for f in report["nodes"]["user"]["features"] if f["column"] == "city"]
    assert city["num_unknown"] == (new["user"]["city"] == "Atlantis").sum() > 0


def test_what_new_tables_lack_is_said(tmp_path: Path) -> None:
    old, new = _frames(1, 50, ["Oslo", "Rome"]), _frames(2, 31, ["Rome", "Oslo"])
    data = partition_tables(_tables(old, "segment"), 1, tmp_path / "old", name="g")
    tables = _tables({**new, "user": new["user"].drop(columns="age")}, None)
    text = r"column 'age' is missing, which the other partition encodes; add it, with empty cells"
    with pytest.raises(ValueError, match=text):
        partition_tables(tables, 1, tmp_path / "a", encodings_from=data)
    renamed = {("user", "likes", "item"): next(iter(tables.edges.values()))}
    less = Tables(nodes=_tables(new, None).nodes, edges=renamed)
    path = partition_tables(less, 1, tmp_path / "b", encodings_from=data)
    notes = json.loads(path.with_name(f"{path.stem}.tables.json").read_text("utf-8"))["notes"]
    assert "user:likes:item is new, without features" in " ".join(notes)
    assert "is missing here" in " ".join(notes)
    with pytest.raises(PartitionFormatError, match=r"nowhere\.json does not exist"):
        partition_tables(_tables(new, None), 1, tmp_path / "c", encodings_from="nowhere.json")
