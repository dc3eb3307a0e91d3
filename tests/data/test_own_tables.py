# SPDX-License-Identifier: Apache-2.0
"""Tables in: files of every kind, ids by value, TOML, partitions. No process group."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, feather, ipc, parquet

from graphshard.data import (
    EdgeTable,
    FileOptions,
    NodeTable,
    Tables,
    partition_tables,
    user_ids,
)
from graphshard.data._read_tables import TablesGraph, read_tables
from graphshard.data.id_files import read_id_table
from graphshard.data.prepare import Preparation
from graphshard.data.task import read_task
from graphshard.errors import PartitionFormatError
from graphshard.partition import convert_partition, load_partition_feats, partition_graph
from graphshard.train import TaskInfo
from graphshard.train.commands import run
from graphshard.train.launch import files_of_host

FINDINGS = Path(__file__).resolve().parents[3] / "shared" / "findings3" / "tables"
FOLLOWS = ("user", "follows", "user")
USERS = "user_id,age,country,segment\nu1,31,DE,a\nu2,,FR,b\nu3,52,DE,a\nu4,18,,\n"
EDGES = (
    "follower,followee,since\n"
    "u1,u2,2024-01-05\nu2,u3,2023-11-30\nu3,u1,2024-02-01\nu9,u1,2024-02-02\n"
)


def edges_alone(files: Any, **more: Any) -> TablesGraph:
    """What is read of a table of edges whose nodes have no table."""
    table = EdgeTable(files=files, **{"source": "src", "target": "dst", **more})
    return read_tables(Tables(edges={FOLLOWS: table}))


def ends(read: TablesGraph) -> list[tuple[Any, Any]]:
    """The edges by users' ids."""
    ids = read.ids["user"].to_pylist()
    src, dst = read.graph.edges()
    return [(ids[a], ids[b]) for a, b in zip(src.tolist(), dst.tolist(), strict=True)]


def tables_in_memory(nodes: Any, edges: Any, **more: Any) -> Tables:
    return Tables(
        nodes={"user": NodeTable(files=nodes, id="id")},
        edges={FOLLOWS: EdgeTable(files=edges, source="src", target="dst")},
        **more,
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "users.csv").write_text(USERS)
    (tmp_path / "follows.csv").write_text(EDGES)
    return tmp_path


def from_files_in(folder: Path, **more: Any) -> Tables:
    return Tables.from_files(
        [f"user={folder / 'users.csv'}"],
        [folder / "follows.csv"],
        **{"source": "follower", "target": "followee", **more},
    )


# ------------------------------------------------------------------ files that users have


@pytest.mark.parametrize(
    "name",
    [
        *("CA-GrQc.txt.gz", "comments.csv", "crlf_bom.csv", "dict.parquet", "folder.parquet"),
        *("lists.parquet", "missing.csv", "plain.csv.gz", "semicolon.csv", "string_ids.csv"),
        *("uint64_big.parquet", "weights.csv"),
    ],
)
def test_found_tables_give_what_pandas_gives(name: str) -> None:
    if not FINDINGS.is_dir():
        pytest.skip("the tables of ../shared are not here")
    path = FINDINGS / name
    if "parquet" in name:
        frame = pd.read_parquet(path)
    elif name.startswith("CA-"):
        frame = pd.read_csv(path, sep="\t", comment="#", header=None, names=["src", "dst"])
    else:
        marks = ";" if name.startswith("semi") else ","
        frame = pd.read_csv(path, sep=marks, comment="#" if name.startswith("com") else None)
    frame = frame[["src", "dst"]].dropna()
    tables = Tables.from_files((), [path])
    read = read_tables(tables)
    (etype,) = tables.edges
    ids = read.ids[etype[0]].to_pylist()
    src, dst = read.graph.edges()
    for end, column in ((src, "src"), (dst, "dst")):
        expected = frame[column].tolist()
        assert [str(ids[i]) for i in end.tolist()] == [
            str(int(x)) if isinstance(x, float) else str(x) for x in expected
        ]


MESSY = {
    "no header": ("1,2\n2,3\n", [(1, 2), (2, 3)]),
    "tabs and a header": ("src\tdst\n1\t2\n", [(1, 2)]),
    "bars": ("src|dst\n1|2\n", [(1, 2)]),
    "runs of spaces": ("# SNAP\n 1   2\n 10 3\n", [(1, 2), (10, 3)]),
    "KONECT": ("% sym unweighted\n1 2\n2 3\n", [(1, 2), (2, 3)]),
    "MovieLens": ("1::1193::5::978300760\n2::661::3::978302109\n", [(1, 1193), (2, 661)]),
    "empty lines": ("src,dst\n\n1,2\n\n2,3\n", [(1, 2), (2, 3)]),
    "comments between": ("src,dst\n1,2\n# a word\n2,3\n", [(1, 2), (2, 3)]),
    "blanks around": ("src, dst\n1, 2\n2, 3\n", [(1, 2), (2, 3)]),
    "padded": ("src,dst\n007,7\n", [("007", "7")]),
    "late name": ("src,dst\n" + "1,2\n" * 3 + "x,2\n", [("1", "2")] * 3 + [("x", "2")]),
    "newline in quotes": ('src,dst\n"a\nb",c\n', [("a\nb", "c")]),
    "quoted": ('"src","dst"\n"1","2"\n', [(1, 2)]),
    "large": ("src,dst\n18446744073709551615,0\n", [(2**64 - 1, 0)]),
    "larger": ("src,dst\n18446744073709551616,0\n", [("18446744073709551616", "0")]),
    "large and negative": ("src,dst\n18446744073709551615,-1\n", [(str(2**64 - 1), "-1")]),
}


@pytest.mark.parametrize("case", list(MESSY))
def test_csv_as_people_have_it(case: str, tmp_path: Path) -> None:
    text, expected = MESSY[case]
    path = tmp_path / "edges.csv"
    path.write_text(text)
    tables = Tables.from_files((), [path])
    (etype,) = tables.edges
    read = read_tables(Tables(edges={FOLLOWS: tables.edges[etype]}))
    assert ends(read) == expected


def test_rows_of_another_width_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    path.write_text("src,dst\n1,2\n3\n4,5,6\n7,8\n,9\n")
    read = edges_alone(path)
    assert ends(read) == [(1, 2), (7, 8)]
    report = read.report.edges[FOLLOWS]
    assert report.refused == {"empty src": 1, "wrong number of cells": 2}
    assert [(row.row, row.problem) for row in read.report.first] == [
        (5, "an end of an edge is empty"),
        (2, "1 cells in place of 2"),
        (3, "3 cells in place of 2"),
    ]
    assert str(read.report.first[1]) == (
        f"{path}, row 2: 1 cells in place of 2 (got '3'); quote cells that hold the delimiter"
    )


def test_rows_are_numbered_in_wide_tables_too(tmp_path: Path) -> None:
    names = ["src", "dst", *(f"x{i}" for i in range(10))]
    rows = [",".join(["1", "2", *"0123456789"]) for _ in range(5)]
    rows[2], rows[4] = "1,2", ",".join(["", "2", *"0123456789"])
    (tmp_path / "e.csv").write_text("\n".join([",".join(names), *rows]) + "\n")
    report = edges_alone(tmp_path / "e.csv").report
    assert sorted(row.row for row in report.first) == [3, 5]
    assert report.num_bad == 2


def test_folders_as_spark_and_hive_write_them(tmp_path: Path) -> None:
    frame = pd.DataFrame({"src": [1, 2, 3, 4], "dst": [2, 3, 4, 1], "day": [1, 1, 2, 2]})
    for day, rows in frame.groupby("day"):
        folder = tmp_path / "edges" / f"day={day}"
        folder.mkdir(parents=True)
        parquet.write_table(pa.Table.from_pandas(rows[["src", "dst"]]), folder / "part-0.parquet")
    (tmp_path / "edges" / "_SUCCESS").touch()
    (tmp_path / "edges" / "day=1" / ".part-0.parquet.crc").write_bytes(b"crc")
    read = edges_alone(tmp_path / "edges")
    assert ends(read) == [(1, 2), (2, 3), (3, 4), (4, 1)]
    assert [feature.column for feature in read.report.edges[FOLLOWS].features] == ["day"]
    names = sorted(str(path) for path in (tmp_path / "edges").rglob("*.parquet"))
    for files in (names, str(tmp_path / "edges" / "*"), str(tmp_path / "edges" / "**.parquet")):
        assert ends(edges_alone(files)) == ends(read)
    assert ends(edges_alone(f"file://{tmp_path}/edges")) == ends(read)


def test_files_of_one_table_may_differ_in_width_and_order(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    first = pa.table({"src": pa.array([1], pa.int32()), "dst": pa.array([2], pa.int32())})
    second = pa.table({"dst": pa.array([2**40]), "src": pa.array([1])})
    parquet.write_table(first, tmp_path / "p" / "a.parquet")
    parquet.write_table(second, tmp_path / "p" / "b.parquet")
    assert ends(edges_alone(tmp_path / "p")) == [(1, 2), (1, 2**40)]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.csv").write_text("src,dst\n1,2\n")
    (tmp_path / "c" / "b.csv").write_text("dst;src\n2;x\n")
    assert ends(edges_alone(tmp_path / "c")) == [("1", "2"), ("x", "2")]


def test_arrow_json_and_compressed_files(tmp_path: Path) -> None:
    table = pa.table({"src": ["a", "b"], "dst": ["b", "c"], "w": [1.0, 2.5]})
    feather.write_feather(table, tmp_path / "e.feather", compression="zstd")
    with ipc.new_stream(str(tmp_path / "e.arrow"), table.schema) as writer:
        writer.write_table(table)
    rows = [json.dumps(row) for row in table.to_pylist()]
    (tmp_path / "e.jsonl").write_text("\n".join(rows))
    (tmp_path / "e.json.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    with pa.CompressedOutputStream(str(tmp_path / "e.csv.zst"), "zstd") as stream:
        csv.write_csv(table, stream)
    for path in sorted(tmp_path.iterdir()):
        read = edges_alone(path, weight="w")
        assert ends(read) == [("a", "b"), ("b", "c")]
        assert read.graph.edata["weight"].tolist() == [1.0, 2.5]


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "e.csv": (b"", "is empty; give a file with at least a header"),
    "latin.csv": (b"src,dst\nM\xfcnchen,a\n", "encoding = latin-1"),
    "e.parquet": (b"src,dst\n1,2\n", "cannot be read as parquet"),
    "e.xlsx": (b"PK", "tell of what format it is"),
    "gzip.csv": (
        gzip.compress(b"src,dst\n1,2\n"),
        "what gzip has compressed); give its name the ending",
    ),
    "gzip": (gzip.compress(b"src,dst\n1,2\n"), "what gzip has compressed"),
    "pq.csv": (b"PAR1\x15\0\xbc", "must be CSV (got Parquet); say format = parquet"),
    "old.feather": (b"FEA1" + bytes(60), "Feather of version 1); read it by pandas.read_feather"),
    "book.csv": (b"PK\x03\x04\x14\0", "an archive, or a workbook); unpack it"),
    "one.csv": (b"dst\n1\n", "column 'src' is missing; there are 'dst'"),
    "case.csv": (b"Src,dst\n1,2\n", "did you mean 'Src'?"),
}


@pytest.mark.parametrize("name", list(BAD_FILES))
def test_damaged_files_are_one_line(name: str, tmp_path: Path) -> None:
    data, expected = BAD_FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
        edges_alone(tmp_path / name)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_letters_that_begin_as_other_files_do_are_csv(tmp_path: Path) -> None:
    for name, text in (("a", "PAR1,dst\nx,y\n"), ("b", "BZh9,dst\nx,y\n"), ("c", "PK,dst\nx,y\n")):
        path = tmp_path / f"{name}.csv"
        path.write_text(text)
        src = text.split(",")[0]
        edges = EdgeTable(files=path, source=src, target="dst")
        assert ends(read_tables(Tables(edges={FOLLOWS: edges}))) == [("x", "y")]


def test_hashes_in_json_lines_are_what_python_reads(tmp_path: Path) -> None:
    rows = [
        {"src": 2**63 + i, "dst": 2**64 - 1 - i, "w": 1e19 * i, "y": 2**63 + i % 2, "n": i - 1}
        for i in range(3)
    ]
    lines = [json.dumps(row) for row in [{**rows[0], "src": 7, "y": None}, *rows]]
    (tmp_path / "e.jsonl").write_text("\n".join(lines))
    table = EdgeTable(files=tmp_path / "e.jsonl", source="src", target="dst", label="y", weight="w")
    read = read_tables(Tables(edges={FOLLOWS: table}))
    expected = [json.loads(line) for line in lines]
    assert ends(read) == [(row["src"], row["dst"]) for row in expected]
    weight = np.array([row["w"] for row in expected], np.float32)
    assert read.graph.edata["weight"].tolist() == weight.tolist()
    assert read.task.class_names == (str(2**63), str(2**63 + 1))
    assert read.graph.edata["label"].tolist() == [-1, 0, 1, 0]
    # Beside negative numbers there is no type for them, and nothing is rounded in silence.
    (tmp_path / "e.jsonl").write_text(
        '{"src": -1, "dst": 2}\n{"src": 18446744073709551615, "dst": 1}'
    )
    with pytest.raises(ValueError, match="store them as integers or text"):
        read_tables(
            Tables(
                edges={FOLLOWS: EdgeTable(files=tmp_path / "e.jsonl", source="src", target="dst")}
            )
        )


EDGE_ROWS = pd.DataFrame({"src": ["a"], "dst": ["b"]})
NO_TABLES: dict[str, tuple[Any, type[Exception], str]] = {
    "a dict": ({"src": ["a"]}, TypeError, r"or one table .*\(got dict\); make one table of it"),
    "an array": (np.zeros((2, 2)), TypeError, r"got ndarray\)"),
    "a number": (7, TypeError, r"got int\)"),
    "several": ([EDGE_ROWS, EDGE_ROWS], TypeError, r"got list\).* pandas.concat"),
    "one name twice": (EDGE_ROWS.set_axis(["x", "x"], axis=1), ValueError, "rename one of them"),
    "128 bits": (EDGE_ROWS.assign(w=[2**70]), ValueError, "larger than 64 bits.*make text of"),
    "an index": (
        EDGE_ROWS.set_index("src"),
        ValueError,
        r"it is the index: pass .*reset_index\(\)",
    ),
}


@pytest.mark.parametrize("name", list(NO_TABLES))
def test_what_is_no_table_in_memory(name: str) -> None:
    source, kind, message = NO_TABLES[name]
    with pytest.raises(kind, match=message) as error:
        edges_alone(source)
    assert "\n" not in str(error.value)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        edges_alone(tmp_path / "none.csv")
    with pytest.raises(FileNotFoundError, match="no file fits"):
        edges_alone(tmp_path / "*.csv")


def test_latin_1_is_read_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_bytes("src,dst\nMünchen,Köln\n".encode("latin-1"))
    read = edges_alone(tmp_path / "e.csv", options=FileOptions(encoding="latin-1"))
    assert ends(read) == [("München", "Köln")]


# ------------------------------------------------------------------ ids

UUIDS = [uuid.UUID(int=i * 10**30).bytes for i in range(3)]
SAME_IDS = {
    "int32 and int64": (pa.array([1, 2, 3], pa.int32()), pa.array([1, 3]), "int32"),
    "uint64 and int64": (pa.array([1, 2, 2**64 - 1], pa.uint64()), pa.array([1, -1]), "uint64"),
    "int64 and uint64": (pa.array([1, -1]), pa.array([1, 2**64 - 1], pa.uint64()), "int64"),
    "float and int": (pa.array([1, 2]), pa.array([1.0, 2.0]), "int64"),
    "decimal": (pa.array([1, 2]).cast(pa.decimal128(20, 0)), pa.array([1, 2]), "int64"),
    "text and dictionary": (
        pa.array(["a", "b"]),
        pa.array(["b", "a"]).dictionary_encode(),
        "string",
    ),
    "dictionary and large text": (
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array(["b", "x"], pa.large_string()),
        "string",
    ),
    "view": (pa.array(["a", "b"], pa.string_view()), pa.array(["a", "b"]), "string"),
    "uuid": (
        pa.array(UUIDS, pa.binary(16)),
        pa.array(UUIDS[::-1], pa.binary(16)),
        "fixed_size_binary[16]",
    ),
    "bytes": (pa.array([b"a", b"\xff"]), pa.array([b"\xff", b"a"]), "binary"),
}


@pytest.mark.parametrize("case", list(SAME_IDS))
def test_ids_are_compared_by_value(case: str) -> None:
    of_nodes, of_edges, kind = SAME_IDS[case]
    nodes = pa.table({"id": of_nodes})
    edges = pa.table({"src": of_edges, "dst": pa.array([of_edges[0].as_py()] * len(of_edges))})
    if pa.types.is_dictionary(of_edges.type):
        edges = edges.set_column(1, "dst", edges["dst"].dictionary_encode())
    elif edges["dst"].type != of_edges.type:
        edges = edges.set_column(1, "dst", edges["dst"].cast(of_edges.type))
    read = read_tables(tables_in_memory(nodes, edges))
    known = of_nodes.to_pylist()
    first = of_edges[0].as_py()
    expected = [(i, first) for i in of_edges.to_pylist() if i in known and first in known]
    assert ends(read) == expected
    assert str(read.ids["user"].type) == kind
    assert read.ids["user"].to_pylist() == known


def test_text_that_reads_as_integers_is_text_where_files_have_types(tmp_path: Path) -> None:
    nodes = pa.table({"id": ["1", "02"]})
    (tmp_path / "e.csv").write_text("src,dst\n1,02\n1,2\n")
    read = read_tables(tables_in_memory(nodes, tmp_path / "e.csv"))
    assert ends(read) == [("1", "02")]
    (tmp_path / "n.csv").write_text("id\n1\n2\n")
    read = read_tables(tables_in_memory(tmp_path / "n.csv", pa.table({"src": ["1"], "dst": ["2"]})))
    assert ends(read) == [("1", "2")]
    numbers = pa.table({"src": [1], "dst": [2]})
    assert ends(read_tables(tables_in_memory(tmp_path / "n.csv", numbers))) == [(1, 2)]
    with pytest.raises(ValueError, match="must be text, as in") as error:
        read_tables(tables_in_memory(nodes, numbers))
    assert "got integers, such as 1" in str(error.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.5, 2.0], "whole numbers that fit double exactly (got 1.5)"),
        ([True, False], "ids must be text, integers, or bytes"),
        ([[1], [2]], "ids must be text, integers, or bytes"),
    ],
)
def test_what_cannot_be_an_id(values: list[Any], expected: str) -> None:
    nodes = pa.table({"id": values})
    with pytest.raises(ValueError, match="store them as") as error:
        read_tables(tables_in_memory(nodes, pa.table({"src": [1], "dst": [2]})))
    assert expected in str(error.value)


def test_ids_that_are_row_numbers() -> None:
    nodes = pd.DataFrame({"x": [0.5, 1.5, 2.5]})
    edges = pa.table({"a": [2, 0, 3], "b": [0, 1, 1]})
    tables = Tables(
        nodes={"user": NodeTable(files=nodes, id="#")},
        edges={FOLLOWS: EdgeTable(files=edges, source="a", target="b")},
    )
    read = read_tables(tables)
    assert ends(read) == [(2, 0), (0, 1)]
    assert read.graph.ndata["feat"].shape == (3, 1)


def test_no_edge_that_leads_to_nodes_is_an_error() -> None:
    nodes, edges = pa.table({"id": ["a", "b"]}), pa.table({"src": ["x", "a"], "dst": ["b", "y"]})
    with pytest.raises(ValueError, match="no edge of user:follows:user has both ends") as error:
        read_tables(tables_in_memory(nodes, edges))
    assert "got 'y'" in str(error.value)


def test_files_whose_names_say_nothing_are_looked_into(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t2\t5\n2\t3\t4\n")
    (tmp_path / "out.moreno").write_text("% sym\n1 2\n")
    (tmp_path / "part-00000").write_text('{"src": 1, "dst": 2}\n')
    parquet.write_table(pa.table({"src": [1], "dst": [2]}), tmp_path / "part-00001")
    for path in sorted(tmp_path.iterdir()):
        (etype,) = (tables := Tables.from_files((), [path])).edges
        read = read_tables(Tables(edges={FOLLOWS: tables.edges[etype]}))
        assert ends(read)[0] == (1, 2)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("follows.csv.gz", "follows"),
        ("follows/day=*/*.parquet", "follows"),
        ("follows/day=1/hour=2/part-00000-a1b2.snappy.parquet", "follows"),
        ("follows/part-*", "follows"),
        ("follows/**/*.csv", "follows"),
        ("part.csv", "part"),
        ("./*.csv", "table"),
    ],
)
def test_a_relation_is_called_as_its_files_or_their_folder(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(re.sub(r"\*+", "1", path if Path(path).suffix else f"{path}.csv"))
    if file.suffix == ".gz":
        content = gzip.compress(b"src,dst\na,b\n")
    elif file.suffix == ".parquet":
        content = pd.DataFrame({"src": ["a"], "dst": ["b"]}).to_parquet()
    else:
        content = b"src,dst\na,b\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    ((_, found, _),) = Tables.from_files((), [path]).edges
    assert found == name


def test_dangling_ends() -> None:
    nodes, edges = (
        pa.table({"id": ["a", "b"]}),
        pa.table({"src": ["a", "y", "a"], "dst": ["x", "b", "b"]}),
    )
    assert ends(read_tables(tables_in_memory(nodes, edges))) == [("a", "b")]
    added = read_tables(tables_in_memory(nodes, edges, dangling="add"))
    assert added.ids["user"].to_pylist() == ["a", "b", "x", "y"]
    assert added.report.nodes["user"].num_from_edges == 2
    with pytest.raises(ValueError, match="as --dangling error asks") as error:
        read_tables(tables_in_memory(nodes, edges, dangling="error"))
    assert "row 1, column 'dst'" in str(error.value)
    assert "got 'x'" in str(error.value)


def test_rows_that_contradict_an_earlier_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("id,x,name\na,1,A\nb,2,B\na,1,A\nb,3,B\nb,2,\n")
    nodes = NodeTable(files=tmp_path / "n.csv", id="id")
    edges = EdgeTable(files=pa.table({"src": ["a"], "dst": ["b"]}), source="src", target="dst")
    report = read_tables(Tables(nodes={"user": nodes}, edges={FOLLOWS: edges})).report
    assert (report.nodes["user"].num_duplicates, report.nodes["user"].num_conflicting) == (3, 2)
    assert [(row.row, row.column, row.value) for row in report.first] == [
        (4, "x", "b"),
        (5, "name", "b"),
    ]
    assert report.num_bad == 2


# ------------------------------------------------------------------ descriptions


def test_a_first_description_from_files_says_what_it_reads(files: Path) -> None:
    tables = Tables.from_files(
        [f"user={files / 'users.csv'}"],
        [files / "follows.csv"],
        source="follower",
        target="followee",
    )
    text = tables.to_toml()
    path = files / "graph.toml"
    path.write_text(text)
    assert Tables.from_toml(path).to_toml() == text
    assert read_tables(Tables.from_toml(path)).ids["user"].to_pylist() == ["u1", "u2", "u3", "u4"]


def test_toml_says_everything(files: Path) -> None:
    (files / "graph.toml").write_text(
        """
dangling = "add"
parallel = "drop"
seed = 3
[nodes.user]
files = ["users.csv"]
id = "user_id"
label = {column = "segment", task = "classification"}
split = [0.5, 0.5]
delimiter = ","
[nodes.user.features]
age = "logarithm"
country = {encoding = "embedding"}
[edges.follows]
files = "follows.csv"
source = "follower"
target = "followee"
time = "since"
[edges."user likes user"]
relation = "likes"
source_type = "user"
target_type = "user"
files = "follows.csv"
source = "followee"
target = "follower"
ignore = ["since"]
"""
    )
    tables = Tables.from_toml(files / "graph.toml")
    read = read_tables(tables)
    assert read.graph.canonical_etypes == [FOLLOWS, ("user", "likes", "user")]
    assert read.ids["user"].to_pylist() == ["u1", "u2", "u3", "u4", "u9"]
    fields = read.graph.nodes["user"].data
    assert fields["feat"].shape == (5, 2)
    assert fields["categories"].tolist() == [[1], [2], [1], [0], [0]]
    assert fields["label"].tolist() == [0, 1, 0, -1, -1]
    times = read.graph.edges[FOLLOWS].data["time"]
    assert times[0] == pd.Timestamp("2024-01-05").value
    assert Tables.from_toml(files / "graph.toml").to_toml() == tables.to_toml()


BAD_TOML = {
    "[nodes.user": "is not TOML",
    'dangled = "drop"\n[edges.e]\nfiles="x"': "must say source_type and target_type",
    '[nodes.n]\nfiles="x"': "[nodes.n] must say id",
    '[nodes.n]\nfiles="x"\nid="i"\ncolour="red"': "[nodes.n]: unknown key 'colour'",
    '[nodes.n]\nfiles="x"\nid="i"': "there must be a table of edges at least",
    '[nodes.n]\nfiles="x"\nid="i"\nlabel="i"\nfeatures=["i"]': "column 'i' is id",
    '[nodes.n]\nfiles="x"\nid="i"\nsplit=[2]': "sum to at most 1",
    '[nodes.n]\nfiles="x"\nid="i"\nsplit=".6,.2"': "as a list (got '.6,.2'); write [0.6, 0.2]",
    '[nodes.n]\nfiles="x"\nid="i"\nsplit={a=1}': "split must have one of column",
    '[nodes.n]\nfiles="x"\nid="i"\n[edges.e]\nfiles="y"\nsource="a"\ntarget="b"\nformat="xls"': (
        "format must be csv, parquet, arrow or json"
    ),
    'dangling="keep"\n[nodes.n]\nfiles="x"\nid="i"\n[edges.e]\nfiles="y"\nsource="a"\ntarget="b"': (
        "dangling must be one of"
    ),
}


@pytest.mark.parametrize("text", list(BAD_TOML))
def test_a_description_that_cannot_be_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "g.toml").write_text(text)
    with pytest.raises(ValueError, match="g.toml") as error:
        Tables.from_toml(tmp_path / "g.toml")
    assert BAD_TOML[text] in str(error.value)
    assert "\n" not in str(error.value).removesuffix("\n")


RATINGS = "userId,movieId,rating\n1,10,4.0\n2,10,3.5\n1,20,5.0\n3,99,1.0\n"


def test_types_are_told_by_columns_or_by_the_user(tmp_path: Path) -> None:
    (tmp_path / "movies.csv").write_text("movieId,year\n10,1999\n20,2003\n")
    (tmp_path / "tags.csv").write_text("userId,age\n1,30\n2,40\n3,50\n")
    (tmp_path / "ratings.csv").write_text(RATINGS)
    nodes = [f"movie={tmp_path / 'movies.csv'}", f"user={tmp_path / 'tags.csv'}"]
    tables = Tables.from_files(nodes, [tmp_path / "ratings.csv"])
    assert list(tables.edges) == [("user", "ratings", "movie")]
    with pytest.raises(ValueError, match="'userId' does not tell of which type"):
        Tables.from_files(nodes[:1], [tmp_path / "ratings.csv"])
    named = Tables.from_files(nodes[:1], [f"user:rated:movie={tmp_path / 'ratings.csv'}"])
    read = read_tables(named)
    assert read.ids["user"].to_pylist() == [1, 2, 3]
    assert read.ids["movie"].to_pylist() == [10, 20]
    src, dst = read.graph.edges(etype="rated")
    assert (src.tolist(), dst.tolist()) == ([0, 1, 0], [0, 0, 1])
    ratings = f"user:rated:movies={tmp_path / 'ratings.csv'}"
    numbered = Tables.from_files([tmp_path / "movies.csv"], [ratings], node_id="#")
    assert numbered.nodes["movies"].id == "#"


def test_typed_tables_give_what_pandas_gives() -> None:
    draw = np.random.default_rng(2)
    users = pd.DataFrame({"id": [f"u{i}" for i in draw.permutation(30)]})
    items = pd.DataFrame({"id": draw.permutation(50)[:40] * 3})
    buys = pd.DataFrame({"u": draw.choice(users["id"], 80), "i": draw.integers(0, 150, 80)})
    tags = pd.DataFrame({"i": draw.choice(items["id"], 60), "tag": draw.choice(list("abcde"), 60)})
    tables = Tables(
        nodes={"user": NodeTable(files=users, id="id"), "item": NodeTable(files=items, id="id")},
        edges={
            ("user", "buys", "item"): EdgeTable(files=buys, source="u", target="i"),
            ("item", "has", "tag"): EdgeTable(files=tags, source="i", target="tag"),
        },
    )
    read = read_tables(tables)
    assert read.ids["tag"].to_pylist() == tags["tag"].drop_duplicates().tolist()
    for (source_type, name, target_type), frame in (
        (("user", "buys", "item"), buys[buys["i"].isin(items["id"])]),
        (("item", "has", "tag"), tags),
    ):
        for ntype, end, column in zip(
            (source_type, target_type), read.graph.edges(etype=name), frame.columns, strict=True
        ):
            ids = read.ids[ntype].to_pylist()
            assert [ids[i] for i in end.tolist()] == frame[column].tolist()


# ------------------------------------------------------------------ partitions


def call(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


def test_the_walk_from_two_files(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    out = files / "parts"
    words = ["--node-id", "user_id", "--source", "follower", "--target", "followee"]
    inputs = ["--nodes", files / "users.csv", "--edges", files / "follows.csv"]
    asked = ["--label", "segment", "--split", "0.7,0.3,0", "--parts", 2, "--out", out]
    assert call("partition", *inputs, *words, *asked) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in ("1 dangling follower", "25.0 %", "country", "u9"):
        assert text in printed.out
    ids = sorted(
        i for part in range(2) for i in user_ids(out / "follows.json", part)["users"].to_pylist()
    )
    assert ids == ["u1", "u2", "u3", "u4"]
    report = json.loads((out / "follows.tables.json").read_text())
    assert report["label"]["classes"] == {"a": 2, "b": 1}
    assert report["bad_rows"]["number"] == 1
    assert report["bad_rows"]["first"][0]["value"] == "u9"
    assert call("inspect", out) == 0
    assert "classify nodes of type users into 2 classes" in capsys.readouterr().out
    assert call("verify", out / "follows.json") == 0
    with open(out / "part0" / "ids-0.arrow", "ab") as file:
        file.write(b"x")
    assert call("verify", out / "follows.json") == 1
    with pytest.raises(PartitionFormatError, match="does not hold the ids"):
        user_ids(out / "follows.json", 0)


def test_tables_writes_a_description_that_partition_takes(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = ["--nodes", f"user={files / 'users.csv'}", "--edges", files / "follows.csv"]
    ends_of = ["--source", "follower", "--target", "followee", "--label", "segment"]
    assert call("tables", *inputs, *ends_of) == 0
    (files / "graph.toml").write_text(capsys.readouterr().out)
    common = ["--parts", 1, "--out", files / "parts", "--quiet"]
    assert call("partition", "--tables", files / "graph.toml", *common, "--dangling", "add") == 0
    assert len(user_ids(files / "parts" / "graph.json", 0)["user"]) == 5
    assert capsys.readouterr().out == ""
    assert call("partition", *inputs, "--tables", files / "graph.toml", *common) == 2
    assert "one of --data, --tables" in capsys.readouterr().err
    assert call("partition", *common) == 2
    assert call("partition", "--data", "cora", "--label", "x", *common) == 2


def test_rows_of_parts_are_those_of_the_table(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    names = [f"n{i}" for i in draw.permutation(40)]
    nodes = pd.DataFrame({"id": names, "x": draw.normal(size=40).astype(np.float32)})
    edges = pd.DataFrame(
        {"src": draw.choice(names, 200), "dst": draw.choice(names, 200), "w": np.arange(200.0)}
    )
    tables = Tables(
        nodes={"user": NodeTable(files=nodes, id="id", features={"x": "number"})},
        edges={FOLLOWS: EdgeTable(files=edges, source="src", target="dst")},
    )
    for num_parts in (1, 2, 5):
        path = partition_tables(tables, num_parts, tmp_path / str(num_parts))
        found = {}
        for part in range(num_parts):
            rows, _ = load_partition_feats(path, part)
            assert rows is not None
            ids = user_ids(path, part)["user"].to_pylist()
            found |= dict(zip(ids, rows["user/feat"][:, 0].tolist(), strict=True))
        assert found == dict(zip(nodes["id"], nodes["x"].tolist(), strict=True))


def test_ids_go_along_when_a_partition_is_copied_or_converted(files: Path) -> None:
    tables = Tables.from_files(
        [f"user={files / 'users.csv'}"],
        [files / "follows.csv"],
        source="follower",
        target="followee",
    )
    path = partition_tables(tables, 2, files / "parts")
    names = [file.target for file in files_of_host(path, 1, 2)]
    assert "part1/ids-0.arrow" in names
    assert "part0/ids-0.arrow" not in names
    assert "follows.dataset.json" in names
    assert call("convert", path, "--out", files / "dgl") == 0
    for part in range(2):
        expected = user_ids(path, part)["user"].to_pylist()
        assert user_ids(files / "dgl" / "follows.json", part)["user"].to_pylist() == expected
    # Written again over the old one.
    partition_tables(tables, 1, files / "parts")
    assert len(user_ids(path, 0)["user"]) == 4


def test_partitions_that_were_not_made_from_tables_have_no_ids(tmp_path: Path) -> None:
    from graphshard import graph

    partition_graph(graph(([0, 1], [1, 0])), "g", 1, tmp_path, quiet=True)
    assert user_ids(tmp_path / "g.json", 0) == {}
    convert_partition(tmp_path / "g.json", tmp_path / "dgl")
    assert user_ids(tmp_path / "dgl" / "g.json", 0) == {}


def prepared(
    tmp_path: Path, edges: Any, preparation: Preparation, **more: Any
) -> tuple[Any, TaskInfo]:
    """Edges of a partition in one part, by ids, with their weights; and the task."""
    table = EdgeTable(files=pa.table(edges), source="src", target="dst", **more)
    path = partition_tables(
        Tables(edges={FOLLOWS: table}), 1, tmp_path / "p", preparation=preparation
    )
    from graphshard.partition import load_partition

    graph, _, feats, *_ = load_partition(path, 0)
    ids = user_ids(path, 0)["user"].to_pylist()
    src, dst = graph.edges()
    weight = feats.get("user:follows:user/weight", torch.zeros(0)).tolist()
    pairs = [(ids[a], ids[b]) for a, b in zip(src.tolist(), dst.tolist(), strict=True)]
    return sorted(zip(pairs, weight, strict=True)) if weight else sorted(pairs)


def test_reverses_have_the_features_of_their_edges(tmp_path: Path) -> None:
    edges = {"src": ["a", "b", "c", "c"], "dst": ["b", "a", "a", "c"], "w": [1.0, 2.0, 3.0, 4.0]}
    both = prepared(tmp_path, edges, Preparation(bidirected=True), weight="w")
    assert both == [
        (("a", "b"), 1.0),
        (("a", "c"), 3.0),
        (("b", "a"), 2.0),
        (("c", "a"), 3.0),
        (("c", "c"), 4.0),
    ]
    loops = prepared(tmp_path, edges, Preparation(self_loops=True), weight="w")
    assert [row for row in loops if row[0][0] == row[0][1]] == [((x, x), 1.0) for x in "abc"]
    del edges["w"]
    assert prepared(tmp_path, edges, Preparation(bidirected=True)) == [
        *(("a", "b"), ("a", "c"), ("b", "a"), ("c", "a"), ("c", "c")),
    ]


def test_edges_to_be_predicted(tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(30)]
    draw = np.random.default_rng(1)
    edges = {"src": draw.choice(names, 100).tolist(), "dst": draw.choice(names, 100).tolist()}
    edges["src"] += edges["dst"][:50]
    edges["dst"] += edges["src"][:50]
    table = EdgeTable(files=pa.table(edges), source="src", target="dst", split=[0.8, 0.1, 0.1])
    read = read_tables(Tables(edges={FOLLOWS: table}))
    assert (read.task.kind, read.task.target) == ("link prediction", FOLLOWS)
    fields = read.graph.edata
    masks = torch.stack([fields[f"{split}_mask"] for split in ("train", "val", "test")])
    assert bool((masks.sum(0) == 1).all())
    of_pair: dict[Any, int] = {}
    for pair, split in zip(ends(read), masks.int().argmax(0).tolist(), strict=True):
        assert of_pair.setdefault(frozenset(pair), split) == split
    path = partition_tables(
        Tables(edges={FOLLOWS: table}), 2, tmp_path, preparation=Preparation(inverse=True)
    )
    task = read_task(path)
    assert task.reverse_of == ("user", "rev_follows", "user")
    assert task.schema is not None
    assert set(task.schema["edges"]) == {"user:follows:user"}


def test_labels_of_edges(tmp_path: Path) -> None:
    table = EdgeTable(
        files=pa.table({"src": [1, 2, 3, 1], "dst": [2, 3, 1, 3], "kind": ["x", None, "y", "x"]}),
        source="src",
        target="dst",
        label="kind",
        split=[0.5, 0.5],
    )
    read = read_tables(Tables(edges={FOLLOWS: table}))
    assert read.task.kind == "edge classification"
    assert read.graph.edata["label"].tolist() == [0, -1, 1, 0]
    assert read.report.label is not None
    assert read.report.label.classes == {"x": 2, "y": 1}


def test_rows_of_two_splits_are_reported() -> None:
    columns = {"id": list("abcd"), "y": [0, 1, 0, None], "tr": [1, 1, 0, 1], "te": [1, 0, 1, 1]}
    split = {"masks": {"train": "tr", "test": "te"}}
    table = NodeTable(files=pa.table(columns), id="id", label="y", split=split)
    edges = EdgeTable(files=pa.table({"s": ["a"], "t": ["b"]}), source="s", target="t")
    report = read_tables(Tables(nodes={"user": table}, edges={FOLLOWS: edges})).report
    (note,) = report.notes
    assert note.startswith("1 rows of user are in train and in test")
    assert report.label is not None
    assert report.label.splits == {"train": 2, "val": 0, "test": 2}


def test_splits_in_every_way(files: Path) -> None:
    nodes = pa.table(
        {
            "id": list("abcdef"),
            "y": [0, 1, 0, 1, 0, 1],
            "fold": ["train", "train", "val", "val", "test", None],
            "tr": [1, 1, 0, 0, 0, 0],
            "day": pd.to_datetime([f"2024-01-0{i}" for i in (6, 5, 4, 3, 2, 1)]),
        }
    )
    edges = EdgeTable(files=pa.table({"s": ["a"], "t": ["b"]}), source="s", target="t")
    (files / "train.txt").write_text("c\nd\n")
    (files / "test.csv").write_text("id\na\n")

    def masks(split: Any) -> list[list[int]]:
        table = NodeTable(files=nodes, id="id", label="y", split=split)
        read = read_tables(Tables(nodes={"user": table}, edges={FOLLOWS: edges}, base=files))
        fields = read.graph.ndata
        return [fields[f"{s}_mask"].nonzero().view(-1).tolist() for s in ("train", "val", "test")]

    assert masks("fold") == masks({"column": "fold"}) == [[0, 1], [2, 3], [4]]
    assert masks({"masks": {"train": "tr"}}) == [[0, 1], [], []]
    assert masks({"files": {"train": "train.txt", "test": "test.csv"}}) == [[2, 3], [], [0]]
    assert masks({"fractions": [0.5, 0.5], "time": "day"}) == [[3, 4, 5], [0, 1, 2], []]
    assert sum(map(len, masks([0.5, 0.25, 0.25]))) == 6
    assert sum(map(len, masks(None))) == 6
    with pytest.raises(ValueError, match="must name nodes of type user"):
        (files / "train.txt").write_text("c\nnone\n")
        masks({"files": {"train": "train.txt"}})


def test_new_data_in_the_encodings_of_old_data(files: Path) -> None:
    tables = from_files_in(files, label="segment", split=[1.0])
    old = partition_tables(tables, 1, files / "old")
    new = files / "new"
    new.mkdir()
    (new / "users.csv").write_text("user_id,age,country\nu1,31,DE\nv,40,IT\n")
    (new / "follows.csv").write_text("follower,followee,since\nv,u1,2024-05-01\n")
    others = from_files_in(new)
    path = partition_tables(others, 1, files / "parts", encodings_from=old)
    rows, _ = load_partition_feats(path, 0)
    before, _ = load_partition_feats(old, 0)
    assert rows is not None
    assert before is not None
    assert torch.equal(rows["user/feat"][0], before["user/feat"][0])
    assert rows["user/label"].tolist() == [-1, -1]
    assert read_task(path).class_names == ("a", "b")
    report = json.loads((files / "parts" / "follows.tables.json").read_text())
    assert [f["num_unknown"] for f in report["nodes"]["user"]["features"]] == [0, 1]


def test_the_task_of_version_2_is_read(tmp_path: Path) -> None:
    from graphshard import graph
    from graphshard.data.task import task_path
    from graphshard.partition.format import digest_of_content, read_config

    partition_graph(graph(([0, 1], [1, 0])), "g", 1, tmp_path, quiet=True)
    content = {
        "format": "graphshard-dataset",
        "format_version": 2,
        "task": "node classification",
        "build": read_config(tmp_path / "g.json").build,
        "name": "g",
        "target": "_N",
        "num_classes": 3,
        "num_relations": None,
        "class_names": ["a", "b", "c"],
        "options": None,
    }
    content["digest"] = digest_of_content(content, "digest")
    task_path(tmp_path / "g.json").write_text(json.dumps(content))
    assert read_task(tmp_path / "g.json") == TaskInfo(
        name="g", target="_N", num_classes=3, class_names=("a", "b", "c")
    )


class _AsPolarsGivesIt:
    """A table that has text as views, as frames of Polars are handed over."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("kind", ["frame", "table", "parquet", "arrow"])
def test_text_may_be_views(kind: str, tmp_path: Path) -> None:
    view = pa.string_view()
    nodes = pa.table(
        {
            "id": pa.array(["a", "b", "b", "c", None], view),
            "k": pa.array(["x", "y", "x", "x", "x"], view),
        }
    )
    edges = pa.table(
        {
            "src": pa.array(["a", "b", None, "c"], view),
            "dst": pa.array(["b", "c", "c", "z"], view),
            "words": pa.array([["x"], ["y"], [], []], pa.list_(view)),
        }
    )
    tables: list[Any] = [nodes, edges]
    for place, table in enumerate(list(tables)):
        path = tmp_path / f"{place}.{kind}"
        if kind == "frame":
            tables[place] = _AsPolarsGivesIt(table)
        elif kind == "parquet":
            parquet.write_table(table, path)
            tables[place] = path
        elif kind == "arrow":
            with ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
            tables[place] = path
    read = read_tables(tables_in_memory(*tables))
    assert ends(read) == [("a", "b"), ("b", "c")]
    assert read.graph.ndata["feat"].tolist() == [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    added = read_tables(tables_in_memory(*tables, dangling="add"))
    assert added.ids["user"].to_pylist() == ["a", "b", "c", "z"]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((pa.int16(), pa.int64()), "int16"),
        ((pa.int64(), pa.uint64()), "int64"),
        ((pa.string(), pa.large_string()), "string"),
        ((pa.binary(1), pa.binary()), "fixed_size_binary[1]"),
    ],
)
def test_the_two_ends_may_have_types_of_two_widths(kinds: tuple[Any, Any], expected: str) -> None:
    values: list[Any] = [1, 2, 3]
    if not pa.types.is_integer(kinds[0]):
        values = [b"a", b"b", b"c"] if "binary" in str(kinds[0]) else ["a", "b", "c"]
    src, dst = pa.array(values[:2], kinds[0]), pa.array(values[1:], kinds[1])
    read = edges_alone(pa.table({"src": src, "dst": dst}))
    assert ends(read) == [(values[0], values[1]), (values[1], values[2])]
    assert str(read.ids["user"].type) == expected


def test_lists_of_json_may_begin_with_null(tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text(
        '{"id": 1, "v": [null, 1.5]}\n{"id": 2, "v": [2.5, 3.5]}\n{"id": 2, "v": [2.5, 4.5]}\n'
    )
    nodes = NodeTable(files=tmp_path / "n.jsonl", id="id", features={"v": "vector"})
    edges = EdgeTable(files=pa.table({"src": [1], "dst": [2]}), source="src", target="dst")
    read = read_tables(Tables(nodes={"user": nodes}, edges={FOLLOWS: edges}))
    assert read.graph.ndata["feat"].tolist() == [[2.5, 1.5, 1.0], [2.5, 3.5, 0.0]]
    assert read.report.nodes["user"].num_conflicting == 1


def test_a_column_without_a_value_in_training_rows_is_left_out() -> None:
    nodes = pa.table({"id": [1, 2], "x": [None, 4e9], "y": ["a", "b"], "part": ["train", "test"]})
    node_table = NodeTable(files=nodes, id="id", label="y", split="part")
    edges = EdgeTable(files=pa.table({"src": [1], "dst": [2]}), source="src", target="dst")
    read = read_tables(Tables(nodes={"user": node_table}, edges={FOLLOWS: edges}))
    assert read.report.nodes["user"].unused == {"x": "no training row has a value in it"}


def test_a_file_of_ids_loses_no_row(tmp_path: Path) -> None:
    """A comma in an id without quotes is another cell: said, and not left out."""
    nodes = pd.DataFrame({"id": ["x,y", "a", "b"], "label": [0, 1, 0]})
    edges = pd.DataFrame({"src": ["a"], "dst": ["b"]})
    files = {name: str(tmp_path / f"{name}.csv") for name in ("train", "test")}
    Path(files["train"]).write_text("id\na\nx,y\n")
    Path(files["test"]).write_text('id\n"x,y"\nb\n')

    def tables() -> Tables:
        of_nodes = NodeTable(files=nodes, id="id", label="label", split={"files": files})
        return Tables(
            nodes={"user": of_nodes},
            edges={FOLLOWS: EdgeTable(files=edges, source="src", target="dst")},
        )

    with pytest.raises(ValueError, match=r"got 2 of 1 in row 3: 'x,y'.*put ids .* in quotes"):
        read_tables(tables())
    Path(files["train"]).write_text("id\na\n")
    graph = read_tables(tables()).graph
    assert graph.nodes["user"].data["test_mask"].tolist() == [True, False, True]
    Path(files["train"]).write_text("id\na\nx,y\n")
    with pytest.raises(ValueError, match=r"got 2 of 1 in row \d: 'x,y'"):
        read_id_table(Path(files["train"]), ["id"])


def test_a_label_that_several_tables_have_is_of_one(tmp_path: Path) -> None:
    (tmp_path / "users.dat").write_text("1::M::35\n2::F::18\n")
    (tmp_path / "ratings.dat").write_text("1::7::5\n2::7::3\n1::8::4\n")
    files = [f"user={tmp_path}/users.dat"], [f"user:rated:movie={tmp_path}/ratings.dat"]
    rated = ("user", "rated", "movie")
    for owner in ("rated", "user:rated:movie"):
        tables = Tables.from_files(*files, label=f"{owner}=column_2", label_task="regression")
        assert tables.edges[rated].label == {"column": "column_2", "task": "regression"}
        assert tables.nodes["user"].label is None
    assert Tables.from_files(*files, label="user=column_1").nodes["user"].label == "column_1"
    both = [*files[1], f"user:sent:user={tmp_path}/ratings.dat"]
    for label, of in (("movie=column_2", "none"), ("user=column_9", "none"), ("none", "none")):
        with pytest.raises(ValueError, match=f"of {of}; there are .*: TYPE=COLUMN"):
            Tables.from_files(files[0], both, label=label)


def by_places(folder: Path, has_header: bool) -> Tables:
    """Users and ratings, whose columns go by their names or by their places."""
    rng = np.random.default_rng(0)
    users = pd.DataFrame(
        {"id": range(100, 130), "age": rng.integers(9, 90, 30), "x": rng.random(30)}
    )
    users["part"] = rng.choice(["train", "val", "test"], 30)
    users["kind"] = rng.choice(["a", "b"], 30)
    rated = pd.DataFrame({"who": rng.integers(100, 130, 80), "whom": rng.integers(100, 130, 80)})
    rated["stars"], rated["when"] = rng.random(80), rng.integers(0, 99, 80)
    rated["note"], rated["what"] = rng.integers(0, 9, 80), rng.choice(["likes", "hates"], 80)
    for name, frame in (("users", users), ("rated", rated)):
        frame.to_csv(folder / f"{name}.csv", index=False, header=has_header)

    def called(names: str, frame: pd.DataFrame) -> list[str]:
        places = (str(list(frame.columns).index(name)) for name in names.split())
        return names.split() if has_header else list(places)

    key, label, split, age = called("id kind part age", users)
    source, target, weight, time, relation, note = called("who whom stars when what note", rated)
    tables = Tables.from_files(
        [folder / "users.csv"],
        [folder / "rated.csv"],
        node_id=key,
        label=label,
        split=split,
        source=source,
        target=target,
        weight=weight,
        time=time,
        relation_column=relation,
    )
    (users_table,) = tables.nodes.values()
    features = {"x" if has_header else "2": "number", age: "standardized"}
    nodes = {"users": dataclasses.replace(users_table, features=features)}
    edges = {
        etype: dataclasses.replace(table, ignore=[note]) for etype, table in tables.edges.items()
    }
    return dataclasses.replace(tables, nodes=nodes, edges=edges)


def fields_of(read: TablesGraph) -> list[dict[str, Any]]:
    """Features of nodes, and of edges."""
    graph = read.graph
    return [{n: rows.tolist() for n, rows in of.items()} for of in (graph.ndata, graph.edata)]


def test_columns_without_names_go_by_their_places(tmp_path: Path) -> None:
    reads = []
    for has_header in (True, False):
        (folder := tmp_path / str(has_header)).mkdir()
        tables = by_places(folder, has_header)
        (folder / "graph.toml").write_text(tables.to_toml())
        reads.append(read_tables(tables))
        again = read_tables(Tables.from_toml(folder / "graph.toml"))
        assert fields_of(reads[-1]) == fields_of(again)
    named, placed = reads
    assert set(named.graph.edata) == {"weight", "time", "etype"}
    assert fields_of(named) == fields_of(placed)
    assert named.task.class_names == placed.task.class_names == ("a", "b")


def test_places_that_are_none(tmp_path: Path) -> None:
    by_places(tmp_path, False)
    for option in ("ignore", "time", "weight", "label"):
        value: Any = ["9"] if option == "ignore" else "9"
        with pytest.raises(ValueError, match=rf"{option} must .* '9'"):
            Tables.from_files([tmp_path / "users.csv"], [tmp_path / "rated.csv"], **{option: value})
    tables = Tables.from_files([], [tmp_path / "rated.csv"], ignore=["4"], time="3")
    assert [(t.ignore, t.time) for t in tables.edges.values()] == [(["column_4"], "column_3")]
