# SPDX-License-Identifier: Apache-2.0
"""From tables to predictions by the user's ids; models of one graph on another. 3 gloo ranks."""

from __future__ import annotations

import uuid
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from train_cases import config_of

from graphshard.data._partition_tables import partition_tables
from graphshard.data.tables import EdgeTable, NodeTable, Tables
from graphshard.testing import run_ranks
from graphshard.train import FullBatchRun, predict

NUM_USERS = 60
CLASSES = ["late", "early", "Zoë, on time"]


def users(seed: int = 0, count: int = NUM_USERS) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    label = random.choice(CLASSES, count).astype(object)
    label[random.random(count) < 0.3] = None
    return pd.DataFrame(
        {
            "user": [f"u{n:x}é" for n in random.permutation(1000)[:count]],
            "age": random.normal(40, 9, count).round(1),
            "city": random.choice(["Oslo", "Rome", "Lima"], count),
            "shop": [f"shop {n}" for n in random.integers(0, 45, count)],
            "segment": label,
        }
    )


def follows(frame: pd.DataFrame, seed: int = 1) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    ids = frame["user"].to_numpy()
    loops = pd.DataFrame({"from": ids, "to": ids})
    ends = random.choice(ids, (150, 2))
    return pd.concat([pd.DataFrame({"from": ends[:, 0], "to": ends[:, 1]}), loops])


def tables_of(frame: pd.DataFrame, edges: pd.DataFrame, label: str | None = None) -> Tables:
    split = None if label is None else [0.6, 0.2, 0.2]
    kinds = {"age": "standardized", "city": "category", "shop": "embedding"}
    features = {name: kind for name, kind in kinds.items() if name in frame}
    table = NodeTable(files=frame, id="user", features=features, label=label, split=split)
    return Tables(
        nodes={"user": table},
        edges={("user", "follows", "user"): EdgeTable(files=edges, source="from", target="to")},
    )


@cache
def folder_of_run() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def trained(kind: str, frame: pd.DataFrame, label: str, **values: Any) -> Path:
    folder = Path(folder_of_run().name) / kind
    if not folder.exists():
        tables = tables_of(frame, follows(frame), label=label)
        data = partition_tables(tables, 1, folder / "parts", name="g")
        run = str(folder / "run")
        config = config_of(str(data), model="sage", epochs=3, dropout=0.0, run=run, **values)
        FullBatchRun(config).train()
    return folder


def predict_on_ranks(rank: int, world_size: int, values: dict[str, Any]) -> None:
    predict(**values, device="cpu", timeout=30.0)


def test_classes_by_name_and_ids_of_the_table(tmp_path: Path) -> None:
    frame = users()
    folder = trained("classes", frame, "segment")
    one = predict(folder / "parts" / "g.json", folder / "run", device="cpu").to_pandas()
    assert one["id"].tolist() == frame["user"].tolist()
    names = sorted(CLASSES)
    assert list(one) == ["id", "prediction", *(f"p_{name}" for name in names)]
    chosen = one[[f"p_{name}" for name in names]].to_numpy().argmax(1)
    assert one["prediction"].tolist() == [names[number] for number in chosen]
    for parts, ending in ((3, "csv"), (5, "parquet")):
        tables = tables_of(frame, follows(frame), label="segment")
        data = partition_tables(tables, parts, tmp_path / str(parts), name="g")
        out = tmp_path / f"p.{ending}"
        values = {"data": str(data), "run": str(folder / "run"), "out": str(out)}
        run_ranks(predict_on_ranks, parts, values)
        found = pd.read_csv(out) if ending == "csv" else pd.read_parquet(out)
        pd.testing.assert_frame_equal(found, one, rtol=0, atol=1e-12)
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(frame["user"][[7, 3]]), encoding="utf-8")
    some = predict(folder / "parts" / "g.json", folder / "run", nodes=ids, device="cpu")
    assert some["id"].to_pylist() == frame["user"][[3, 7]].tolist()
    for first in ("", "user\n"):  # without and with a name of the column, no row is lost
        (tmp_path / "ids.csv").write_text(first + ids.read_text(encoding="utf-8"), encoding="utf-8")
        same = predict(
            folder / "parts" / "g.json", folder / "run", nodes=tmp_path / "ids.csv", device="cpu"
        )
        assert same == some
    rest = predict(folder / "parts" / "g.json", folder / "run", nodes="unlabelled", device="cpu")
    assert rest["id"].to_pylist() == frame["user"][frame["segment"].isna()].tolist()


@pytest.mark.parametrize("kind", ["int", "bool", "set", "value"])
def test_predictions_have_the_type_of_the_labels(kind: str) -> None:
    frame, random = users(), np.random.default_rng(5)
    frame["label"] = {
        "int": pd.array(random.choice([7, -3, 400], NUM_USERS), "int16"),
        "bool": random.random(NUM_USERS) < 0.5,
        "set": [[c for c in CLASSES if random.random() < 0.5] for _ in range(NUM_USERS)],
        "value": random.normal(1000, 50, NUM_USERS),
    }[kind]
    del frame["segment"]
    folder = trained(kind, frame, "label")
    table = predict(folder / "parts" / "g.json", folder / "run", device="cpu")
    found = table["prediction"]
    if kind == "value":
        assert found.type == pa.float64()
        assert 800 < found.to_numpy().mean() < 1200
        return
    expected = {"int": pa.int16(), "bool": pa.bool_(), "set": pa.list_(pa.string())}[kind]
    assert found.type == expected
    shares = {name[2:]: table[name].to_numpy() for name in table.column_names[2:]}
    if kind == "set":
        for row, names in enumerate(found.to_pylist()):
            assert names == [c for c in sorted(CLASSES) if shares[c][row] > 0.5]
        return
    names = {"int": ["-3", "7", "400"], "bool": ["false", "true"]}[kind]
    assert list(shares) == names
    best = np.stack(list(shares.values())).argmax(0)
    values = {"int": [-3, 7, 400], "bool": [False, True]}[kind]
    assert found.to_pylist() == [values[number] for number in best]


def test_new_users_with_the_encodings_of_training(tmp_path: Path) -> None:
    folder = trained("classes", users(), "segment")
    parts = folder / "parts" / "g.json"
    newer = users(seed=9, count=33).drop(columns="segment")
    newer.loc[3, "city"] = "Atlantis"
    tables = tables_of(newer, follows(newer))
    data = partition_tables(tables, 3, tmp_path / "new", name="g", encodings_from=parts)
    out = tmp_path / "p.parquet"
    run_ranks(predict_on_ranks, 3, {"data": str(data), "run": str(folder / "run"), "out": str(out)})
    found = pd.read_parquet(out)
    assert found["id"].tolist() == newer["user"].tolist()
    assert set(found["prediction"]) <= set(CLASSES)
    one = partition_tables(tables, 1, tmp_path / "one", name="g", encodings_from=parts)
    expected = predict(one, folder / "run", device="cpu").to_pandas()
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=1e-12)


def test_what_differs_from_training_is_said(tmp_path: Path) -> None:
    folder = trained("classes", users(), "segment")
    other = users(seed=9).drop(columns="segment")
    data = partition_tables(tables_of(other, follows(other)), 1, tmp_path / "a", name="g")
    with pytest.raises(ValueError, match=r"the column 'age' of 'user' is encoded otherwise \(mean"):
        predict(data, folder / "run", device="cpu")
    del other["age"]
    data = partition_tables(tables_of(other, follows(other)), 1, tmp_path / "b", name="g")
    with pytest.raises(ValueError, match="the column 'age' of 'user' is missing"):
        predict(data, folder / "run", device="cpu")


def test_learnt_rows_are_of_ids_and_not_of_row_numbers(tmp_path: Path) -> None:
    frame = users()[["user", "segment"]]
    edges = follows(frame)
    tables = tables_of(frame, edges, label="segment")
    run = str(tmp_path / "run")
    data = partition_tables(tables, 1, tmp_path / "parts", name="g")
    FullBatchRun(config_of(str(data), model="sage", epochs=2, run=run)).train()
    again = partition_tables(tables, 1, tmp_path / "again", name="g")
    assert predict(again, run, device="cpu").equals(predict(data, run, device="cpu"))
    shuffled = tables_of(frame.sample(frac=1, random_state=0), edges, label="segment")
    other = partition_tables(shuffled, 1, tmp_path / "other", name="g")
    with pytest.raises(ValueError, match="has other nodes of type 'user' than the model"):
        predict(other, run, device="cpu")


def test_links_by_the_ids_of_two_tables(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    people = pd.DataFrame({"name": [f"p{n}" for n in range(30)], "age": random.normal(size=30)})
    films = pd.DataFrame({"film": random.permutation(20) + 2**62, "year": random.normal(size=20)})
    seen = pd.DataFrame(
        {"who": random.choice(people["name"], 120), "what": random.choice(films["film"], 120)}
    ).drop_duplicates(ignore_index=True)
    tables = Tables(
        nodes={
            "person": NodeTable(files=people, id="name"),
            "film": NodeTable(files=films, id="film"),
        },
        edges={
            ("person", "saw", "film"): EdgeTable(
                files=seen, source="who", target="what", split=[0.6, 0.2, 0.2]
            )
        },
    )
    data = partition_tables(tables, 1, tmp_path / "one", name="g")
    run = str(tmp_path / "run")
    config = config_of(str(data), model="rgcn", epochs=2, both_directions=None, run=run)
    FullBatchRun(config).train()
    several = partition_tables(tables, 3, tmp_path / "three", name="g")
    seen.head(7).to_csv(tmp_path / "pairs.csv", index=False)
    for options in ({"top": 3}, {"pairs": str(tmp_path / "pairs.csv")}):
        one = predict(data, tmp_path / "run", device="cpu", **options).to_pandas()
        out = tmp_path / "p.parquet"
        values = {"data": str(several), "run": str(tmp_path / "run"), "out": str(out), **options}
        run_ranks(predict_on_ranks, 3, values)
        pd.testing.assert_frame_equal(pd.read_parquet(out), one, rtol=0, atol=1e-12)
        if "top" in options:
            assert one["source"].tolist() == [n for n in people["name"] for _ in range(3)]
            found = set(zip(one["source"], one["target"], strict=True))
            assert not found & set(zip(seen["who"], seen["what"], strict=True))
        else:
            assert one["source"].tolist() == seen["who"][:7].tolist()
            assert one["target"].tolist() == seen["what"][:7].tolist()
            seen.head(7).to_csv(tmp_path / "bare.csv", index=False, header=False)
            bare = predict(data, tmp_path / "run", device="cpu", pairs=str(tmp_path / "bare.csv"))
            pd.testing.assert_frame_equal(bare.to_pandas(), one)  # no row is taken for names


def test_ids_of_every_type_have_a_digest_of_their_values() -> None:
    from graphshard.train._export import _hashes

    texts = ["", "a", "b", "ab", "ba", "aa", "é", "a\0"]
    hashes = _hashes(pa.array(texts))
    assert torch.unique(hashes).numel() == len(texts)
    for kind in (pa.large_string(), pa.binary()):
        assert torch.equal(_hashes(pa.array(texts).cast(kind)), hashes)
    assert torch.equal(_hashes(pa.array(texts).dictionary_encode()), hashes)
    assert torch.equal(_hashes(pa.array(["x", *texts])[1:]), hashes)
    assert _hashes(pa.array([], pa.string())).numel() == 0
    numbers = _hashes(pa.array([2**64 - 1, 0, 5], pa.uint64()))
    assert torch.unique(numbers).numel() == 3
    fixed = _hashes(pa.array([b"0123456789abcdef", b"0123456789abcdeg"], pa.binary(16)))
    assert torch.unique(fixed).numel() == 2


def test_ids_that_are_uuids_are_found_in_files(tmp_path: Path) -> None:
    frame = users()
    keys = {user: uuid.UUID(int=n << 90) for n, user in enumerate(frame["user"])}
    edges = follows(frame)
    kind = getattr(pa, "uuid", lambda: None)()
    if kind is None:
        pytest.skip("this pyarrow has no type of UUIDs")

    def of(column: pd.Series) -> pa.Array:
        return kind.wrap_array(pa.array([keys[v].bytes for v in column], pa.binary(16)))

    nodes = pa.table({"id": of(frame["user"]), "age": frame["age"], "segment": frame["segment"]})
    ends = pa.table({"source": of(edges["from"]), "target": of(edges["to"])})
    labelled = NodeTable(files=nodes, id="id", label="segment", split=[0.6, 0.2, 0.2])
    split = EdgeTable(files=ends, source="source", target="target", split=[0.6, 0.2, 0.2])
    bare = EdgeTable(files=ends, source="source", target="target")
    relation = ("user", "follows", "user")
    chosen = [keys[frame["user"][n]] for n in (7, 2)]
    (tmp_path / "ids").write_text("".join(f"{key}\n" for key in chosen))
    (tmp_path / "ids.csv").write_text("id\n" + "".join(f"{key}\n" for key in chosen))
    parquet.write_table(pa.table({"id": nodes["id"].take([7, 2, 7])}), tmp_path / "ids.parquet")

    tables = Tables(nodes={"user": labelled}, edges={relation: bare})
    data = partition_tables(tables, 1, tmp_path / "nodes")
    FullBatchRun(config_of(str(data), model="sage", epochs=1, run=str(tmp_path / "1"))).train()
    predict(data, tmp_path / "1", tmp_path / "first.csv", nodes=tmp_path / "ids.csv")
    for name in ("ids", "ids.csv", "ids.parquet", "first.csv"):
        found = predict(data, tmp_path / "1", nodes=tmp_path / name)["id"]
        assert found.to_pylist() == chosen[::-1], name
    (tmp_path / "wrong.csv").write_text("id\n17\n")
    with pytest.raises(ValueError, match="'17' is no UUID"):
        predict(data, tmp_path / "1", nodes=tmp_path / "wrong.csv")

    unlabelled = NodeTable(files=nodes.drop_columns("segment"), id="id")
    tables = Tables(nodes={"user": unlabelled}, edges={relation: split})
    data = partition_tables(tables, 1, tmp_path / "links")
    FullBatchRun(config_of(str(data), model="sage", epochs=1, run=str(tmp_path / "2"))).train()
    pairs = f"source,target\n{chosen[0]},{chosen[1]}\n"
    (tmp_path / "pairs.csv").write_text(pairs)
    (row,) = predict(data, tmp_path / "2", pairs=tmp_path / "pairs.csv").to_pylist()
    assert [row["source"], row["target"]] == chosen


def test_ids_that_are_bytes_are_no_cells_of_a_csv(tmp_path: Path) -> None:
    frame = users()
    numbers = dict(zip(frame["user"], range(len(frame)), strict=True))
    edges = follows(frame)
    ends = {name: [bytes([numbers[v], 255]) for v in edges[name]] for name in edges}
    nodes = pd.DataFrame({"user": [bytes([n, 255]) for n in range(len(frame))]})
    nodes = nodes.assign(age=frame["age"], segment=frame["segment"])
    tables = tables_of(nodes, pd.DataFrame(ends), label="segment")
    data = partition_tables(tables, 1, tmp_path / "parts")
    FullBatchRun(config_of(str(data), model="sage", epochs=1, run=str(tmp_path / "run"))).train()
    with pytest.raises(ValueError, match=r"a CSV cannot hold ids .*; let out end in .parquet"):
        predict(data, tmp_path / "run", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()
    predict(data, tmp_path / "run", tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet")["id"].to_pylist() == nodes["user"].tolist()
