# SPDX-License-Identifier: Apache-2.0
"""Tables of Polars: what they give is what pandas gives of the same values."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from graphshard.data import EdgeTable, NodeTable, Tables, partition_tables, user_ids
from graphshard.data._read_tables import TablesGraph, read_tables

pl = pytest.importorskip("polars", reason="Polars is not installed: pip install polars")

NUM_ROWS = 24
DAYS = [datetime.date(2020, 1, 1), None, datetime.date(1960, 5, 5)]
TIMES = [datetime.datetime(2020, 1, 1, 3, 4, 5, 678000), None, datetime.datetime(1999, 2, 3)]

#: Values, the type that Polars has them in, and what Arrow or pandas has in its place.
COLUMNS: dict[str, tuple[list[Any], Any, Any]] = {
    "int64": ([3, -1, 7], pl.Int64, "int64"),
    "int8 with nulls": ([3, None, 7], pl.Int8, "Int8"),
    "uint64": ([2**63, 2**64 - 4096, 5], pl.UInt64, "uint64"),
    "float32 with NaN": ([1.5, None, float("nan")], pl.Float32, "float32"),
    "boolean": ([True, False, None], pl.Boolean, pd.ArrowDtype(pa.bool_())),
    "text": (["a", "ü", None, ""], pl.String, pd.ArrowDtype(pa.string())),
    "long text": (["a" * 40, "b" * 41, None], pl.String, pd.ArrowDtype(pa.large_string())),
    "categorical": (["b", "ü", None], pl.Categorical, "category"),
    "enum": (["y", "x"], pl.Enum(["y", "x", "z"]), "category"),
    "date": (DAYS, pl.Date, pd.ArrowDtype(pa.date32())),
    "time in ms": (TIMES, pl.Datetime("ms"), pd.ArrowDtype(pa.timestamp("ms"))),
    "time in ns": (TIMES, pl.Datetime("ns"), pd.ArrowDtype(pa.timestamp("ns"))),
    "decimal": (["1.5", "-2.25"], pl.Decimal(10, 2), pd.ArrowDtype(pa.float64())),
    "list": ([[1.0, 2.0], [3.0, 4.0]], pl.List(pl.Float64), object),
    "list with nulls": ([[1.0, 2.0], None, [3.0, 4.0]], pl.List(pl.Float64), object),
    "array": ([[1.0, 2.0], [3.0, 4.0]], pl.Array(pl.Float32, 2), object),
    "words": ([["a", "b"], ["c"], [], None], pl.List(pl.String), object),
    "words of categories": ([["a", "b"], ["c"], [], None], pl.List(pl.Categorical), object),
    "empty": ([None], pl.Null, pd.ArrowDtype(pa.null())),
}


def polars_column(name: str) -> Any:
    values, kind, _ = COLUMNS[name]
    rows = list(itertools.islice(itertools.cycle(values), NUM_ROWS))
    if isinstance(kind, pl.Decimal):
        return pl.Series(rows).cast(kind)
    return pl.Series(rows, dtype=kind)


def pandas_column(name: str) -> pd.Series:
    values, _, kind = COLUMNS[name]
    if name == "decimal":
        values = list(map(float, values))
    if name.startswith("time"):
        values = [None if value is None else pd.Timestamp(value) for value in values]
    return pd.Series(list(itertools.islice(itertools.cycle(values), NUM_ROWS)), dtype=kind)


def read(nodes: Any, edges: Any, label: str | None = None) -> TablesGraph:
    node_table = NodeTable(
        files=nodes, id="id", label=label, split=None if label is None else [1.0]
    )
    edge_table = EdgeTable(files=edges, source="src", target="dst")
    tables = Tables(nodes={"user": node_table}, edges={("user", "knows", "user"): edge_table})
    return read_tables(tables)


def assert_same(found: TablesGraph, wanted: TablesGraph) -> None:
    """Ids, ends, fields of nodes, encodings, classes."""
    assert found.ids["user"].to_pylist() == wanted.ids["user"].to_pylist()
    for of_found, of_wanted in zip(found.graph.edges(), wanted.graph.edges(), strict=True):
        assert of_found.tolist() == of_wanted.tolist()
    fields = wanted.content.nodes["user"]
    assert set(found.content.nodes["user"]) == set(fields)
    for name, rows in fields.items():
        np.testing.assert_array_equal(np.asarray(found.content.nodes["user"][name]), rows)
    assert found.task.class_names == wanted.task.class_names
    assert set(found.report.nodes["user"].unused) == set(wanted.report.nodes["user"].unused)


def names(count: int = NUM_ROWS) -> list[str]:
    return [f"u{number}" for number in range(count)]


EDGES = {"src": names(), "dst": names()[::-1]}


@pytest.mark.parametrize("name", COLUMNS)
def test_features_are_those_of_pandas(name: str) -> None:
    frame = pl.DataFrame({"id": names(), "x": polars_column(name)})
    same = pd.DataFrame({"id": names(), "x": pandas_column(name)})
    wanted = read(same, pd.DataFrame(EDGES))
    assert_same(read(frame, pl.DataFrame(EDGES)), wanted)
    cut = pl.concat([frame[:5], frame[5:6], frame[6:]], rechunk=False)
    assert_same(read(cut, pl.DataFrame(EDGES)), wanted)
    before = pl.concat([frame[:1].with_columns(id=pl.lit("none")), frame])[1:]
    assert_same(read(before, pl.DataFrame(EDGES)), wanted)


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "x.parquet": lambda frame, path: frame.write_parquet(path),
    "x.arrow": lambda frame, path: frame.write_ipc(path),
}


@pytest.mark.parametrize("file", WRITERS)
@pytest.mark.parametrize("name", COLUMNS)
def test_files_that_polars_writes_are_its_tables(name: str, file: str, tmp_path: Path) -> None:
    frame = pl.DataFrame({"id": names(), "x": polars_column(name)})
    WRITERS[file](frame, tmp_path / file)
    wanted = read(pd.DataFrame({"id": names(), "x": pandas_column(name)}), pd.DataFrame(EDGES))
    assert_same(read(tmp_path / file, pl.DataFrame(EDGES)), wanted)


@pytest.mark.parametrize("name", ["uint64", "text", "categorical", "enum", "boolean", "words"])
def test_labels_are_those_of_pandas(name: str) -> None:
    found = read(
        pl.DataFrame({"id": names(), "y": polars_column(name)}), pl.DataFrame(EDGES), label="y"
    )
    same = pd.DataFrame({"id": names(), "y": pandas_column(name)})
    assert_same(found, read(same, pd.DataFrame(EDGES), label="y"))


IDS = {
    "uint64": (pl.UInt64, [2**63, 2**64 - 1, 5]),
    "int32": (pl.Int32, [-7, 2**31 - 1, 0]),
    "text": (pl.String, ["a", "ü" * 20, "007"]),
    "categorical": (pl.Categorical, ["b", "a", "c"]),
    "enum": (pl.Enum(["c", "b", "a"]), ["b", "a", "c"]),
    "bytes": (pl.Binary, [b"0" * 16, b"\xff" * 16, b""]),
}


@pytest.mark.parametrize("name", IDS)
def test_ids_come_back(name: str, tmp_path: Path) -> None:
    kind, values = IDS[name]
    ids = pl.Series("id", values, dtype=kind)
    edges = pl.DataFrame({"src": ids, "dst": ids.reverse()})
    tables = Tables(
        nodes={"user": NodeTable(files=pl.DataFrame({"id": ids}), id="id")},
        edges={("user", "knows", "user"): EdgeTable(files=edges, source="src", target="dst")},
    )
    path = partition_tables(tables, 1, tmp_path, part_method="random")
    assert sorted(user_ids(path, 0)["user"].to_pylist()) == sorted(values)


def test_ends_may_be_of_another_type_than_ids() -> None:
    ids = pl.Series("id", ["a", "b", "c"])
    for kind in (pl.String, pl.Categorical, pl.Enum(["c", "b", "a"])):
        edges = pl.DataFrame({"src": ids.cast(kind), "dst": ids.reverse()})
        src, dst = read(pl.DataFrame({"id": ids.cast(pl.Categorical)}), edges).graph.edges()
        assert (src.tolist(), dst.tolist()) == ([0, 1, 2], [2, 1, 0])


def test_what_is_no_table_of_arrow_is_said_in_a_line() -> None:
    frame = pl.DataFrame({"id": names()})
    with pytest.raises(ValueError, match=r"LazyFrame cannot.*; pass what its collect\(\) gives"):
        read(frame.lazy(), pl.DataFrame(EDGES))
    wide = frame.with_columns(x=pl.int_range(NUM_ROWS).cast(pl.Int128))
    with pytest.raises(ValueError, match=r"no integers of 128 bits; cast them to Int64 or String"):
        read(wide, pl.DataFrame(EDGES))
