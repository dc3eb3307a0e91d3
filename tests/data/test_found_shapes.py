# SPDX-License-Identifier: Apache-2.0
"""Tables in the shapes in which people have them: read as pandas reads them, or one line of error.

A case is files, the words of one command, and what comes of it. No process group.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from graphshard.data import EdgeTable, FileOptions, NodeTable, Tables, partition_tables
from graphshard.data._read_tables import TablesGraph, read_tables
from graphshard.train.commands import run

NODE, EDGE = 0, 1


class Shape(NamedTuple):
    """Files, where the nodes and edges are, and what is expected.

    Args:
        edges: Pairs of users' ids, of the first relation; or a piece of the error.
        features: Names of columns of the first type of nodes, or of edges where nodes have no
            table, to their encodings; None: any.
    """

    files: dict[str, Any]
    nodes: tuple[str, ...]
    edge_files: tuple[str, ...]
    edges: list[tuple[Any, Any]] | str
    features: dict[str, str] | None = None
    more: Mapping[str, Any] = MappingProxyType({})


RATINGS = "userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n2,1029,4.0,835355493\n"
MOVIES = (
    "movieId,title,genres\n31,Dangerous Minds (1995),Drama\n"
    '1029,"American President, The (1995)",Comedy|Drama|Romance\n5,Heat,(no genres listed)\n'
)
RATED = "user:rated:movie=ratings.csv"
TWO_PARTS = [pd.DataFrame({"src": [1], "dst": [2]}), pd.DataFrame({"src": [2], "dst": [3]})]
SHAPES = {
    "SNAP": Shape(
        {"CA.txt.gz": "# Directed\n# Nodes: 3\n# FromNodeId\tToNodeId\n1\t2\n2\t3\n"},
        (),
        ("CA.txt.gz",),
        [(1, 2), (2, 3)],
    ),
    "SNAP with signs": Shape(
        {"s.txt": "# FromNodeId\tToNodeId\tSign\n1\t2\t-1\n2\t3\t1\n"},
        (),
        ("s.txt",),
        [(1, 2), (2, 3)],
        {"Sign": "standardized"},
    ),
    "names after a mark of comments": Shape(
        {"e.csv": "#src,dst\na,b\n"}, (), ("e.csv",), [("a", "b")]
    ),
    "MovieLens": Shape(
        {"ratings.csv": RATINGS, "movies.csv": MOVIES},
        ("movie=movies.csv",),
        (RATED,),
        [(1, 31), (2, 1029)],
        {"title": "category", "genres": "category"},
    ),
    "MovieLens without types": Shape(
        {"ratings.csv": RATINGS, "movies.csv": MOVIES},
        ("movies.csv",),
        ("ratings.csv",),
        "name the types as SOURCE:RELATION:TARGET=FILE",
    ),
    "MovieLens 1M": Shape(
        {
            "ratings.dat": "1::1193::5::978300760\n2::661::3::978302109\n",
            "users.dat": "1::F::1::10::48067\n2::M::56::16::70072\n",
            "movies.dat": "1193::One Flew Over (1975)::Drama\n661::James (1996)::Animation\n",
        },
        ("movie=movies.dat", "user=users.dat"),
        ("user:rated:movie=ratings.dat",),
        [(1, 1193), (2, 661)],
    ),
    "MovieLens 1M in Latin": Shape(
        {"ratings.dat": "1::7::5::9\n", "movies.dat": "7::Misérables::Drama\n".encode("latin-1")},
        ("movie=movies.dat",),
        ("user:rated:movie=ratings.dat",),
        "name its encoding, such as encoding = latin-1",
    ),
    "MovieLens 100K": Shape(
        {
            "u.data": "196\t242\t3\t881250949\n186\t302\t3\t891717742\n",
            "u.item": "242|Toy Story|01-Jan-1995||http://x/a%20b|0|1\n302|Eye|01-Jan-1995||y|1|0\n",
        },
        ("item=u.item",),
        ("user:rated:item=u.data",),
        [(196, 242), (186, 302)],
    ),
    "OGB": Shape(
        {
            "raw/edge.csv.gz": "0,1\n1,2\n2,0\n",
            "raw/node-feat.csv.gz": "0.1,0.2\n0.3,0.4\n0.5,0.6\n",
        },
        ("node=raw/node-feat.csv.gz",),
        ("raw/edge.csv.gz",),
        [(0, 1), (1, 2), (2, 0)],
        {"column_0": "standardized", "column_1": "standardized"},
        {"node_id": "#"},
    ),
    "OGB, labels in a file of their own": Shape(
        {
            "raw/edge.csv.gz": "0,1\n1,2\n2,0\n",
            "raw/node-feat.csv.gz": "0.1,0.2\n0.3,0.4\n0.5,0.6\n",
            "raw/node-label.csv.gz": "1\n0\n1\n",
        },
        ("node=raw/node-feat.csv.gz", "node=raw/node-label.csv.gz"),
        ("raw/edge.csv.gz",),
        "column 'column_0' must be in one table of node (it is in another, too); rename it",
        more={"node_id": "#"},
    ),
    "numbers of rows in two files": Shape(
        {"a.csv": "x\n1\n2\n", "b.csv": "y\n3\n4\n", "e.csv": "0,1\n1,1\n"},
        ("node=a.csv", "node=b.csv"),
        ("e.csv",),
        [(0, 1), (1, 1)],
        {"x": "standardized", "y": "standardized"},
        {"node_id": "#"},
    ),
    "MovieLens of a million": Shape(
        {
            "movies.dat": "31::Minds (1995)::Drama\n1029::Amélie::Comedy|Drama\n".encode("latin-1"),
            "users.dat": "1::F::1::10::48067\n2::M::56::16::70072\n",
            "ratings.dat": "1::31::5::978300760\n2::1029::3::978302109\n",
        },
        ("movie=movies.dat", "user=users.dat"),
        ("user:rated:movie=ratings.dat",),
        [(1, 31), (2, 1029)],
        {"column_1": "category", "column_2": "multi-hot"},
        {
            "label": "rated=2",
            "time": "3",
            "separators": {"movie=2": "|"},
            "options": FileOptions(encoding="latin-1"),
        },
    ),
    "Spark": Shape(
        {
            "e/_SUCCESS": "",
            "e/.part-00000.crc": "x",
            "e/part-00000-3f-c000.snappy.parquet": TWO_PARTS[0],
            "e/part-00001-3f-c000.snappy.parquet": TWO_PARTS[1],
            "e/part-00002-3f-c000.snappy.parquet": TWO_PARTS[1][:0],
        },
        (),
        ("e",),
        [(1, 2), (2, 3)],
    ),
    "Spark without a header": Shape(
        {"e/_SUCCESS": "", "e/part-00000": "1,2\n", "e/part-00001": "2,3\n", "e/part-00002": ""},
        (),
        ("e",),
        [(1, 2), (2, 3)],
    ),
    "Hive": Shape(
        {
            "e/day=2024-01-01/a.parquet": TWO_PARTS[0],
            "e/day=__HIVE_DEFAULT_PARTITION__/b.parquet": TWO_PARTS[1],
        },
        (),
        ("e",),
        [(1, 2), (2, 3)],
        {"day": "category"},
    ),
    "Hive in CSV": Shape(
        {
            "e/day=1/in=a%20b/a.csv": "src,dst\n1,2\n",
            "e/day=2/in=__HIVE_DEFAULT_PARTITION__/b.csv": "src,dst\n2,3\n",
        },
        (),
        ("e",),
        [(1, 2), (2, 3)],
        {"day": "standardized", "in": "category"},
    ),
    "Neo4j": Shape(
        {
            "n.csv": ":ID,name,:LABEL,born:int\nn1,Keanu,Actor,1964\nn2,Carrie,Actor;Person,1967\n",
            "r.csv": ":START_ID,role,:END_ID,:TYPE\nn1,Neo,n2,KNOWS\n",
        },
        ("person=n.csv",),
        ("r.csv",),
        [("n1", "n2")],
        {"name": "category", ":LABEL": "category", "born:int": "standardized"},
    ),
    "Neo4j with groups of ids": Shape(
        {
            "n.csv": "personId:ID(Person),name\n1,Keanu\n2,Carrie\n",
            "m.csv": "movieId:ID(Movie),title\ntt1,Matrix\n",
            "r.csv": ":START_ID(Person),role,:END_ID(Movie)\n1,Neo,tt1\n",
        },
        ("actors=n.csv", "films=m.csv"),
        ("r.csv",),
        [(1, "tt1")],
    ),
    "DGL": Shape(
        {
            "nodes.csv": 'node_id,label,feat\n0,1,"0.1, 0.2"\n1,0,"0.3, 1e-05"\n',
            "edges.csv": "src_id,dst_id\n0,1\n1,0\n",
        },
        ("nodes.csv",),
        ("edges.csv",),
        [(0, 1), (1, 0)],
        {"feat": "vector"},
        {"label": "label"},
    ),
    "lists that pandas writes": Shape(
        {
            "n.csv": 'id,v,w\n1,"[0.1, 0.2]","1,234"\n2,"[0.3, 4]","2,345"\n3,,"3,456"\n',
            "e.csv": "a,b\n1,2\n",
        },
        ("n.csv",),
        ("e.csv",),
        [(1, 2)],
        {"v": "vector", "w": "category"},
    ),
    "GraphStorm": Shape(
        {
            "n.parquet": pa.table({"n_id": ["a", "b"], "feat": [[1.0, 2.0], [3.0, 4.0]]}),
            "e.parquet": pa.table({"source_id": ["a", "b"], "dest_id": ["b", "a"]}),
        },
        ("n.parquet",),
        ("e.parquet",),
        [("a", "b"), ("b", "a")],
        {"feat": "vector"},
    ),
    "Elliptic": Shape(
        {
            "features.csv": "230425980,1,-0.17\n5530458,1,-0.16\n",
            "edgelist.csv": "txId1,txId2\n230425980,5530458\n",
        },
        ("tx=features.csv",),
        ("edgelist.csv",),
        [(230425980, 5530458)],
    ),
    "Excel": Shape(
        {
            "n.csv": "\ufeffid;name;preis\r\n1;Müller;1,50\r\n2;Öz;2\r\n3;x;1.234,50\r\n",
            "e.csv": "sep=;\nvon;nach\n1;2\n2;3\n",
        },
        ("n.csv",),
        ("e.csv",),
        [(1, 2), (2, 3)],
        {"name": "category", "preis": "standardized"},
    ),
    "Excel in UTF-16": Shape(
        {"n.csv": "id;name\n1;Müller\n2;Öz\n".encode("utf-16"), "e.csv": "von;nach\n1;2\n"},
        ("n.csv",),
        ("e.csv",),
        [(1, 2)],
        {"name": "category"},
    ),
    "Latin after a while": Shape(
        {"e.csv": b"a,b\n" + b"1,2\n" * 20000 + "ö,2\n".encode("latin-1")},
        (),
        ("e.csv",),
        "Row #20002",
    ),
    "the index of pandas": Shape(
        {"n.csv": ",key,x\n0,a,1\n1,b,2\n", "e.csv": ",von,nach\n0,a,b\n1,b,a\n"},
        ("n.csv",),
        ("e.csv",),
        [("a", "b"), ("b", "a")],
        {"x": "standardized"},
    ),
    "the index of pandas in Parquet": Shape(
        {"e.parquet": pd.DataFrame({"src": [1], "dst": [2], "w": [0.5]}, index=[7])},
        (),
        ("e.parquet",),
        [(1, 2)],
        {"w": "standardized"},
    ),
    "row names of R": Shape(
        {"n.csv": '"","x"\n"a",1\n"b",2\n', "e.csv": '"","f","t"\n"1","a","b"\n"2","b","a"\n'},
        ("n.csv",),
        ("e.csv",),
        [("a", "b"), ("b", "a")],
        {"x": "standardized"},
    ),
    "MatrixMarket": Shape(
        {"g.mtx": "%%MatrixMarket matrix coordinate pattern symmetric\n% c\n3 3 2\n1 2\n3 1\n"},
        (),
        ("g.mtx",),
        [(1, 2), (3, 1)],
    ),
    "a delimiter at the end of rows": Shape(
        {"e.csv": "src,dst\n1,2,\n2,3,\n"}, (), ("e.csv",), [(1, 2), (2, 3)]
    ),
    "repeated rows": Shape(
        {"n.csv": "id,x\n1,2\n1,2\n2,5\n", "e.csv": "src,dst\n1,2\n1,2\n"},
        ("n.csv",),
        ("e.csv",),
        [(1, 2), (1, 2)],
    ),
    "zeros in front": Shape(
        {"n.csv": "id,x\n007,1\n7,2\n010,3\n", "e.csv": "src,dst\n007,7\n010,007\n"},
        ("n.csv",),
        ("e.csv",),
        [("007", "7"), ("010", "007")],
    ),
    "zeros that one table lost": Shape(
        {"n.csv": "id,x\n007,1\n010,3\n", "e.csv": "src,dst\n7,10\n"},
        ("n.csv",),
        ("e.csv",),
        "got '10' in row 1, column 'dst', where the table of nodes has '010'); write both alike",
    ),
    "ids that became reals": Shape(
        {"n.csv": "id,x\n1,3\n2,4\n", "e.csv": "src,dst\n1.0,2.0\n"},
        ("n.csv",),
        ("e.csv",),
        "where the table of nodes has '2'",
    ),
    "ids with blanks around": Shape(
        {"n.csv": "id,x\nu1,3\n u2,4\n", "e.csv": "src,dst\nu1,u2\n"},
        ("n.csv",),
        ("e.csv",),
        "where the table of nodes has ' u2'); write both alike",
    ),
    "ids in another case": Shape(
        {"n.csv": "id,x\nA7,3\nB9,4\n", "e.csv": "src,dst\na7,b9\n"},
        ("n.csv",),
        ("e.csv",),
        "where the table of nodes has 'B9'); write both alike",
    ),
    "ids with everything in them": Shape(
        {
            "n.csv": 'id,x\n"a b",1\n"say ""hi""",2\n"line\nbreak",3\n🙂,4\n',
            "e.csv": 'src,dst\n"a b","say ""hi"""\n"line\nbreak",🙂\n',
        },
        ("n.csv",),
        ("e.csv",),
        [("a b", 'say "hi"'), ("line\nbreak", "🙂")],
    ),
    "a line break in quotes after a megabyte": Shape(
        {"e.csv": "src,dst\n" + "a,b\n" * 300_000 + '"c\nd",e\n'},
        (),
        ("e.csv",),
        [("a", "b")] * 300_000 + [("c\nd", "e")],
    ),
    "text and numbers": Shape(
        {
            "n.parquet": pd.DataFrame({"id": [1, 2]}),
            "e.parquet": pd.DataFrame({"src": ["1"], "dst": ["2"]}),
        },
        ("n.parquet",),
        ("e.parquet",),
        "(got text, such as '1'); store both alike",
    ),
    "marks of missing cells": Shape(
        {
            "n.csv": "id,x,c\n1,NA,a\n2,N/A,\n3,null,\\N\n4,5,b\nNA,3,b\n",
            "e.csv": "src,dst\n1,2\n\\N,3\n",
        },
        ("n.csv",),
        ("e.csv",),
        [(1, 2)],
        {"x": "standardized", "c": "category"},
    ),
    "marks of one's own": Shape(
        {"n.csv": "id,y\n1,unknown\n2,5\n", "e.csv": "src,dst\n1,2\n"},
        ("n.csv",),
        ("e.csv",),
        [(1, 2)],
        {"y": "standardized"},
        {"options": FileOptions(more_null_values=("unknown",))},
    ),
    "NUL in text": Shape(
        {"e.csv": "src,dst\na,b\nc\0d,e\n"}, (), ("e.csv",), [("a", "b"), ("c\0d", "e")]
    ),
    "hashes": Shape(
        {"e.csv": "src,dst\n0x1f,00ff\n1e5,0xAB\n"},
        (),
        ("e.csv",),
        [("0x1f", "00ff"), ("1e5", "0xAB")],
    ),
    "times of three kinds": Shape(
        {
            "n.csv": "id,d,t,u\n1,2024-01-05,1600-01-01 00:00:00,2024-01-05T10:00:00Z\n"
            "2,0001-01-01,2500-01-01 00:00:00,2024-01-05T10:00:00+02:00\n",
            "e.csv": "src,dst\n1,2\n",
        },
        ("n.csv",),
        ("e.csv",),
        [(1, 2)],
        {"d": "time", "t": "time", "u": "time"},
    ),
    "days first": Shape(
        {"e.csv": "src,dst,t\n1,2,05.01.2024\n"},
        (),
        ("e.csv",),
        "such as '05.01.2024'); write times as 2024-01-31",
        None,
        {"time": "t"},
    ),
    "times too old": Shape(
        {"e.csv": "src,dst,t\n1,2,0001-01-01\n"},
        (),
        ("e.csv",),
        "must be between 1678 and 2261",
        None,
        {"time": "t"},
    ),
    "weights in words": Shape(
        {"e.csv": "src,dst,w\n1,2,much\n"},
        (),
        ("e.csv",),
        "such as 'much'); write numbers",
        None,
        {"weight": "w"},
    ),
    "nothing": Shape({"e.csv": ""}, (), ("e.csv",), "is empty"),
    "blank lines": Shape({"e.csv": "\n\n  \n"}, (), ("e.csv",), "is empty"),
    "a header of nodes": Shape(
        {"n.csv": "id,x\n", "e.csv": "src,dst\n1,2\n"},
        ("n.csv",),
        ("e.csv",),
        "where the table of nodes has no row",
    ),
    "no row as wide as the header": Shape(
        {"e.csv": "src,dst\n1,2,3\n4,5,6\n"},
        (),
        ("e.csv",),
        "each row must have as many cells as the first (got ",
    ),
    "a quote that is never closed": Shape(
        {"e.csv": 'src,dst\na,b\n"c,d\ne,f\n'}, (), ("e.csv",), "row 2: a quote must be closed"
    ),
    "a quote that is never closed in a large file": Shape(
        {"e.csv": 'src,dst\n"c,d\n' + "e,f\n" * 600_000}, (), ("e.csv",), "a quote is never closed"
    ),
    "one column": Shape({"e.csv": "a\nb\n"}, (), ("e.csv",), "a column for each end"),
    "neighbours in a line": Shape(
        {"e.txt": "1 2 3\n2 3\n3 1 2 4\n"}, (), ("e.txt",), "a column for each end"
    ),
    "a web page": Shape(
        {"e.csv": "<!DOCTYPE html><html>404</html>\n"}, (), ("e.csv",), "got a web page"
    ),
    "a pointer": Shape(
        {"e.csv": "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n"},
        (),
        ("e.csv",),
        "git lfs pull",
    ),
    "Pajek": Shape({"g.net": '*Vertices 1\n1 "a"\n*Arcs\n1 1\n'}, (), ("g.net",), "of Pajek"),
    "GraphML": Shape({"g.xml": "<?xml version='1.0'?><graphml/>\n"}, (), ("g.xml",), "got XML"),
    "a pickle": Shape({"e.pkl": b"\x80\x04\x95ab"}, (), ("e.pkl",), "of what format it is"),
    "a workbook": Shape({"e.xlsx": b"PK\x03\x04\0"}, (), ("e.xlsx",), "an archive, or a workbook"),
    "a list in JSON": Shape(
        {"e.json": '[{"src":1,"dst":2},{"src":2,"dst":3}]'}, (), ("e.json",), "lines=True"
    ),
    "a broken line in JSON": Shape(
        {"e.jsonl": '{"src":1,"dst":2}\n{"src":2,"dst"\n'},
        (),
        ("e.jsonl",),
        "in row 1; mend the line",
    ),
    "two kinds of ids in JSON": Shape(
        {"e.jsonl": '{"src":1,"dst":2}\n{"src":"a","dst":3}\n'},
        (),
        ("e.jsonl",),
        "give the column values of one kind",
    ),
    "objects for ids": Shape(
        {"e.jsonl": '{"src":{"$oid":"a"},"dst":{"$oid":"b"}}\n'}, (), ("e.jsonl",), "store them as"
    ),
}


def written(files: dict[str, Any], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, pd.DataFrame):
            content.to_parquet(path)
        elif isinstance(content, pa.Table):
            parquet.write_table(content, path)
        else:
            data = content.encode() if isinstance(content, str) else content
            path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def edges_by_ids(read: TablesGraph, etype: tuple[str, str, str]) -> list[tuple[Any, Any]]:
    src, dst = read.graph.edges(etype=etype)
    of_type = [read.ids[etype[0]].to_pylist(), read.ids[etype[2]].to_pylist()]
    return [(of_type[0][a], of_type[1][b]) for a, b in zip(src.tolist(), dst.tolist(), strict=True)]


@pytest.mark.parametrize("name", list(SHAPES))
def test_what_people_have_is_read_or_one_line_of_error(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    written(shape.files, tmp_path)

    def read() -> tuple[TablesGraph, Tables]:
        tables = Tables.from_files(shape.nodes, shape.edge_files, base=tmp_path, **shape.more)
        return read_tables(tables), tables

    if isinstance(shape.edges, str):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            read()
        assert shape.edges in str(error.value)
        assert "\n" not in str(error.value)
        return
    found, tables = read()
    assert edges_by_ids(found, next(iter(tables.edges))) == shape.edges
    if shape.features is not None:
        reports: dict[Any, Any] = {**found.report.nodes, **found.report.edges}
        owner = next(iter(tables.nodes)) if tables.nodes else next(iter(tables.edges))
        features = {feature.column: feature.encoding for feature in reports[owner].features}
        assert features == shape.features


def test_commas_in_numbers_and_lists_in_cells_are_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text('id;a;v\n1;1,5;"[1, 2]"\n2;1.234,25;"[3, 4]"\n')
    nodes = NodeTable(files="n.csv", id="id", features={"a": "number", "v": "vector"})
    edges = EdgeTable(files=pa.table({"s": [1], "t": [2]}), source="s", target="t")
    etype = ("user", "knows", "user")
    read = read_tables(Tables(nodes={"user": nodes}, edges={etype: edges}, base=tmp_path))
    assert read.graph.ndata["feat"].tolist() == [[1.5, 1.0, 2.0], [1234.25, 3.0, 4.0]]


def test_a_label_may_be_cut_at_separators(tmp_path: Path) -> None:
    written({"movies.csv": MOVIES, "ratings.csv": RATINGS}, tmp_path)
    (tmp_path / "g.toml").write_text(
        '[nodes.movie]\nfiles = "movies.csv"\nid = "movieId"\nfeatures = []\n'
        'label = {column = "genres", separator = "|"}\nsplit = [1.0]\n'
        '[edges.rated]\nfiles = "ratings.csv"\nsource = "userId"\nsource_type = "user"\n'
        'target = "movieId"\ntarget_type = "movie"\n'
    )
    tables = Tables.from_toml(tmp_path / "g.toml")
    read = read_tables(tables)
    genres = pd.read_csv(tmp_path / "movies.csv")["genres"].str.get_dummies("|")
    assert read.task.class_names == tuple(genres.columns)
    assert read.task.is_multilabel
    label = read.graph.nodes["movie"].data["label"]
    assert label.tolist() == genres.to_numpy().tolist()
    assert 'separator = "|"' in tables.to_toml()


def test_a_class_of_unknown_is_told_and_can_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    n = "txId,class\n" + "".join(f"{i},{['unknown', '1', '2'][i % 3]}\n" for i in range(12))
    written({"n.csv": n, "e.csv": "a,b\n1,2\n2,3\n"}, tmp_path)
    words = ["partition", "--nodes", f"tx={tmp_path / 'n.csv'}", "--edges", str(tmp_path / "e.csv")]
    words += [
        "--label",
        "class",
        "--parts",
        "1",
        "--out",
        str(tmp_path / "p"),
        "--method",
        "random",
    ]
    assert run(words) == 0
    assert "'unknown' is one of the classes; --null 'unknown'" in capsys.readouterr().out
    assert run([*words, "--null", "unknown"]) == 0
    printed = capsys.readouterr().out
    assert "--null" not in printed
    assert "without a label" in printed


def test_tables_without_a_row_make_no_partition(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\n")
    tables = Tables.from_files((), [tmp_path / "e.csv"])
    with pytest.raises(ValueError, match="must have a row at least"):
        partition_tables(tables, 1, tmp_path / "p")
