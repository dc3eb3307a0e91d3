# SPDX-License-Identifier: Apache-2.0
"""What is read does not depend on what waits on disk, and in what blocks files are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import feather, parquet

from graphshard.data import EdgeTable, NodeTable, Tables, _kept_columns, _table_files
from graphshard.data._kept_columns import KeptColumns
from graphshard.data._read_tables import TablesGraph, read_tables

NUM_NODES, NUM_EDGES = 300, 2000


def frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Users, some of them twice, and edges, some of them several times."""
    draw = np.random.default_rng(0)
    numbers = draw.permutation(NUM_NODES)
    users = pd.DataFrame(
        {
            "id": [f"u{number}" for number in numbers],
            "age": np.where(draw.random(NUM_NODES) < 0.1, np.nan, draw.normal(40, 9, NUM_NODES)),
            "country": draw.choice(["DE", "FR", "IT"], NUM_NODES),
            "is_new": draw.random(NUM_NODES) < 0.5,
            "since": pd.Timestamp("2024-01-01") + pd.to_timedelta(numbers, "D"),
            "segment": draw.choice(["a", "b"], NUM_NODES),
        }
    )
    users = pd.concat([users, users.assign(country="DE").iloc[::7]])
    edges = pd.DataFrame(
        {
            "from": [f"u{number}" for number in draw.integers(0, NUM_NODES + 20, NUM_EDGES)],
            "to": [f"u{number}" for number in draw.integers(0, NUM_NODES, NUM_EDGES)],
            "strength": draw.random(NUM_EDGES).round(3),
            "count": draw.integers(0, 9, NUM_EDGES),
        }
    )
    return users, edges


def write(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True, date_format="iso")
    elif path.suffix == ".arrow":
        table = pa.Table.from_pandas(frame, preserve_index=False)
        feather.write_feather(table, str(path), chunksize=100)
    else:
        frame.to_parquet(path, index=False, row_group_size=100)
    return path


def read(nodes: Any, edges: Any) -> TablesGraph:
    tables = Tables(
        nodes={"user": NodeTable(files=nodes, id="id", label="segment", split=[0.6, 0.2, 0.2])},
        edges={
            ("user", "knows", "user"): EdgeTable(
                files=edges, source="from", target="to", weight="strength"
            )
        },
        parallel="drop",
    )
    return read_tables(tables)


def assert_same(left: TablesGraph, right: TablesGraph) -> None:
    assert left.report.as_json() == right.report.as_json()
    assert left.task == right.task
    for ntype, ids in left.ids.items():
        assert ids.equals(right.ids[ntype])
    for ends, others in zip(left.graph.edges(), right.graph.edges(), strict=True):
        assert torch.equal(ends, others)
    for fields, others in (
        (left.graph.nodes["user"].data, right.graph.nodes["user"].data),
        (left.graph.edges["knows"].data, right.graph.edges["knows"].data),
    ):
        assert set(fields) == set(others)
        assert all(torch.equal(fields[name], others[name]) for name in fields)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "arrow", "parquet"])
def test_columns_that_wait_on_disk_are_the_same(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, edges = frames()
    files = write(users, tmp_path / f"users.{ending}"), write(edges, tmp_path / f"edges.{ending}")
    expected = read(*files)
    assert expected.report.nodes["user"].num_conflicting > 0
    assert expected.report.edges[("user", "knows", "user")].num_parallel > 0
    monkeypatch.setattr("graphshard.data._read_tables.rows_at_once", lambda: 64)
    monkeypatch.setattr(_table_files, "_BLOCK", 4096)
    monkeypatch.setattr(_table_files, "_JSON_BLOCK", 4096)
    for most in (0, 1 << 14):
        monkeypatch.setattr(_kept_columns, "MOST_IN_MEMORY", most)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        assert_same(expected, read(*files))
    left_over = [path.name for path in tmp_path.iterdir() if path not in files]
    assert not left_over


def test_tables_in_memory_are_those_of_files(tmp_path: Path) -> None:
    users, edges = frames()
    files = [write(f, tmp_path / f"{i}.parquet") for i, f in enumerate((users, edges))]
    in_memory = [parquet.read_table(file) for file in files]
    left, right = read(*files), read(*in_memory)
    left.report.first.clear(), right.report.first.clear()  # they name files
    assert_same(left, right)


def test_kept_arrays_come_back_as_they_were() -> None:
    arrays = [
        pa.array(["a", None, "b"]).dictionary_encode(),
        pa.array(["c"]).dictionary_encode(),
        pa.array([[1.0, 2.0], None]),
        pa.array([1, None, 3, 4]).slice(1, 2),
        pa.array([], pa.string()),
    ]
    kept = KeptColumns(40)
    put = [kept.put(array) for array in arrays]
    assert kept.column(put[:2], arrays[0].type).to_pylist() == ["a", None, "b", "c"]
    for array, place in zip(arrays, put, strict=True):
        column = kept.column([place], array.type)
        assert column.to_pylist() == array.to_pylist()
    last = kept.column(put[2:3], arrays[2].type)
    kept.close()
    assert last.to_pylist() == [[1.0, 2.0], None]


def test_types_of_json_are_those_of_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"from": i, "to": i + 1, "x": i} for i in range(50)]
    rows += [{"from": i, "to": i + 1, "x": i + 0.5, "when": "2024-01-01"} for i in range(50, 90)]
    rows += [{"from": i, "to": i + 1, "when": "never"} for i in range(90, 99)]
    path = tmp_path / "edges.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(_table_files, "_JSON_BLOCK", 256)
    source = _table_files.TableSource(path)
    assert source.schema.field("x").type == pa.float64()
    assert source.schema.field("when").type == pa.string()
    read = [batch.columns.to_pylist() for batch in source.batches(source.schema.names, 1)]
    values = [row for batch in read for row in batch]
    assert values == [{"x": None, "when": None, **row} for row in rows]
