# SPDX-License-Identifier: Apache-2.0
"""Columns of one type of nodes in several tables, joined by id: what pandas' merge gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from graphshard.data import EdgeTable, JoinedTable, NodeTable, Tables
from graphshard.data._read_tables import TablesGraph, read_tables
from graphshard.train.commands import run


def frames() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Users; their vectors, some missing, some twice, some of nobody; and edges."""
    draw = np.random.default_rng(0)
    ids = np.array([f"u{number}" for number in draw.permutation(200)])
    users = pd.DataFrame(
        {"id": ids, "age": draw.normal(size=200), "segment": draw.choice(["a", "b"], 200)}
    )
    of = np.concatenate([draw.permutation(ids)[:150], ids[:20], ["nobody", "none"]])
    vectors = pd.DataFrame(
        {
            "user": of,
            "vector": list(draw.normal(size=(len(of), 3)).round(3)),
            "score": draw.normal(size=len(of)),
        }
    )
    edges = pd.DataFrame({"from": draw.choice(ids, 500), "to": draw.choice(ids, 500)})
    return users, vectors, edges


def merged(users: pd.DataFrame, vectors: pd.DataFrame) -> pd.DataFrame:
    first = vectors.drop_duplicates("user")
    return users.merge(first, how="left", left_on="id", right_on="user").drop(columns="user")


def read(nodes: NodeTable, edges: Any) -> TablesGraph:
    table = EdgeTable(files=edges, source="from", target="to")
    return read_tables(Tables(nodes={"user": nodes}, edges={("user", "knows", "user"): table}))


@pytest.mark.parametrize(("batch", "most_blocks"), [(7, 1000), (7, 3), (1 << 15, 1000)])
@pytest.mark.parametrize("ending", ["memory", "parquet", "csv"])
def test_joined_columns_are_those_of_a_merge(
    batch: int, most_blocks: int, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphshard.data._read_tables.rows_at_once", lambda: batch)
    monkeypatch.setattr("graphshard.data._read_tables._ROWS_IN_ORDER", 16)
    monkeypatch.setattr("graphshard.data._read_tables._MOST_BLOCKS", most_blocks)
    monkeypatch.setattr("graphshard.data._kept_columns.MOST_IN_MEMORY", 1000)
    users, vectors, edges = frames()
    vectors["city"] = pd.Categorical("c" + vectors["user"].str[-1:])
    options: dict[str, Any] = {"id": "id", "label": "segment", "split": [0.6, 0.2, 0.2]}
    one = read(NodeTable(files=merged(users, vectors), **options), edges)
    files: Any = vectors
    if ending != "memory":
        files = tmp_path / f"vectors.{ending}"
        vectors.to_csv(files, index=False) if ending == "csv" else vectors.to_parquet(files)
    joined = JoinedTable(files=files, id="user")
    two = read(NodeTable(files=users, join=[joined], **options), edges)
    assert set(one.graph.ndata) == set(two.graph.ndata)
    for name, values in one.graph.ndata.items():
        assert (values == two.graph.ndata[name]).all(), name
    (report,) = two.report.nodes["user"].joined
    is_there = users["id"].isin(vectors["user"])
    known = vectors["user"].isin(users["id"])
    assert report.num_rows == len(vectors)
    assert report.num_missing == int((~is_there).sum())
    assert report.num_without_node == int((~known).sum())
    assert report.num_duplicates == int(known.sum() - is_there.sum())


def test_flags_and_toml_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users, vectors, edges = frames()
    users.to_csv(tmp_path / "users.csv", index=False)
    vectors.to_parquet(tmp_path / "vectors.parquet")
    edges.to_csv(tmp_path / "edges.csv", index=False)
    files = ["--nodes", f"{tmp_path}/users.csv", "--nodes", f"users={tmp_path}/vectors.parquet"]
    files += ["--edges", f"users:knows:users={tmp_path}/edges.csv"]
    assert run(["tables", *files, "--label", "segment"]) == 0
    (tmp_path / "graph.toml").write_text(capsys.readouterr().out)
    tables = Tables.from_toml(tmp_path / "graph.toml")
    (joined,) = tables.nodes["users"].join
    assert joined.id == "user"
    assert Tables.from_toml(tmp_path / "graph.toml").to_toml() == tables.to_toml()
    report = read_tables(tables).report.nodes["users"]
    assert [feature.column for feature in report.features] == ["age", "vector", "score"]


def test_a_column_is_in_one_table(tmp_path: Path) -> None:
    users, vectors, edges = frames()
    joined = JoinedTable(files=vectors.assign(age=1.0), id="user")
    with pytest.raises(ValueError, match="column 'age' must be in one table of user .*; rename"):
        read(NodeTable(files=users, id="id", join=[joined]), edges)


def test_split_files_and_format_by_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users, _, edges = frames()
    users.to_csv(tmp_path / "users.parquet", index=False)  # the ending lies
    edges.to_csv(tmp_path / "edges.parquet", index=False)
    for split, rows in (("train", users["id"][:50]), ("val", users["id"][50:60])):
        rows.to_csv(tmp_path / f"{split}.txt", index=False, header=False)
    flags = ["--nodes", f"{tmp_path}/users.parquet", "--edges", f"{tmp_path}/edges.parquet"]
    flags += ["--format", "csv", "--label", "segment"]
    files = f"train={tmp_path}/train.txt,val={tmp_path}/val.txt"
    assert run(["tables", *flags, "--split-files", files]) == 0
    (tmp_path / "graph.toml").write_text(capsys.readouterr().out)
    read_graph = read_tables(Tables.from_toml(tmp_path / "graph.toml")).graph
    masks = [read_graph.ndata[f"{split}_mask"].numpy() for split in ("train", "val", "test")]
    assert [mask.sum() for mask in masks] == [50, 10, 0]
    assert masks[0][:50].all()
    assert run(["tables", *flags, "--split-files", "train"]) == 2
    assert "must be like train=FILE,val=FILE,test=FILE" in capsys.readouterr().err
    assert run(["tables", *flags, "--split-files", files, "--split", "0.6,0.2,0.2"]) == 2
    assert "leave one out" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["memory", "parquet", "csv"])
def test_tables_without_ids_are_joined_by_the_numbers_of_rows(ending: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    rows, more = pd.DataFrame({"x": draw.normal(size=9)}), pd.DataFrame({"y": draw.normal(size=7)})
    edges = pd.DataFrame({"from": draw.integers(0, 9, 30), "to": draw.integers(0, 9, 30)})
    files: list[Any] = [rows, more]
    if ending != "memory":
        for name, frame in (("a", rows), ("b", more)):
            write = frame.to_parquet if ending == "parquet" else frame.to_csv
            write(tmp_path / f"{name}.{ending}", index=False)
        files = [tmp_path / f"{name}.{ending}" for name in "ab"]
    features = {"x": "number", "y": "number"}
    joined = JoinedTable(files=files[1], id="#")
    table = read(NodeTable(files=files[0], id="#", features=features, join=(joined,)), edges)
    whole = pd.concat([rows, more], axis=1)
    expected = np.column_stack(
        [whole["x"], whole["y"].fillna(whole["y"].mean()), whole["y"].isna()]
    )
    feat = table.graph.ndata["feat"].numpy()
    np.testing.assert_allclose(feat, expected.astype(np.float32), rtol=1e-6)
    src, dst = (side.numpy() for side in table.graph.edges())
    assert (src.tolist(), dst.tolist()) == (edges["from"].tolist(), edges["to"].tolist())


@pytest.mark.parametrize("bad", ["a.csv", "b.csv"])
def test_numbers_of_rows_need_every_row(bad: str, tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        middle = "1,2,3\n" if name == bad else "1,2\n"
        (tmp_path / name).write_text(f"{name[0]},{name[0]}2\n0,1\n{middle}4,5\n")
    joined = JoinedTable(files=tmp_path / "b.csv", id="#")
    nodes = NodeTable(files=tmp_path / "a.csv", id="#", join=(joined,))
    with pytest.raises(
        ValueError, match=r"must have 2 cells in every row.*\(got 3 in row 2\)"
    ) as e:
        read(nodes, pd.DataFrame({"from": [0], "to": [2]}))
    assert bad in str(e.value)
