# SPDX-License-Identifier: Apache-2.0
"""CSV and Parquet edge lists; pyarrow writes what is read and reads what is written. No process."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from graphshard.data import from_csv, from_parquet, to_csv, to_parquet
from graphshard.graph import Graph, graph, heterograph

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
from pyarrow import csv, parquet  # noqa: E402


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def edges(g: Graph, etype: Any = None) -> list[list[int]]:
    return [side.tolist() for side in g.edges(etype=etype, order="eid")]


def weighted() -> Graph:
    g = graph(([3, 0, 0, 2], [1, 1, 1, 2]), num_nodes=4)
    g.edata["w"] = torch.tensor([0.1, 1e-8, -3.0, 2.5])
    g.edata["n"] = torch.tensor([1, -2, 3, 4], dtype=torch.int64)
    g.edata["flag"] = torch.tensor([True, False, True, True])
    return g


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_csv(tmp_path: Path, idtype: torch.dtype) -> None:
    path = write(tmp_path / "e.csv", "src,w,dst\n3,0.5,1\n0,2,1\n0,-1e3,1\n")
    g = from_csv(path, edge_columns=["w"], idtype=idtype)
    assert edges(g) == [[3, 0, 0], [1, 1, 1]]
    assert (g.num_nodes(), g.idtype) == (4, idtype)
    assert g.edata["w"].dtype == torch.float64
    assert g.edata["w"].tolist() == [0.5, 2.0, -1000.0]
    assert from_csv(path, num_nodes=9).num_nodes() == 9
    assert from_csv(path, edge_columns=["w"], dtype=torch.float32).edata["w"].dtype == torch.float32


def test_csv_forms(tmp_path: Path) -> None:
    path = write(tmp_path / "e.txt", "# a comment\n0\t1\t5\n1\t2\t6\n")
    g = from_csv(
        path, "from", "to", ["k"], delimiter="\t", skip_rows=1, column_names=["from", "to", "k"]
    )
    assert edges(g) == [[0, 1], [1, 2]]
    assert g.edata["k"].tolist() == [5, 6]
    with gzip.open(tmp_path / "e.csv.gz", "wt") as file:
        file.write("src,dst\n0,1\n")
    assert edges(from_csv(tmp_path / "e.csv.gz")) == [[0], [1]]
    same = write(tmp_path / "same.csv", "a\n0\n2\n")
    assert edges(from_csv(same, "a", "a")) == [[0, 2], [0, 2]]


@pytest.mark.parametrize("relabel", [False, True])
def test_csv_without_rows(tmp_path: Path, relabel: bool) -> None:
    path = write(tmp_path / "e.csv", "src,dst,w\n")
    if relabel:
        g, names = from_csv(path, edge_columns=["w"], relabel=True)
        assert names == {}
    else:
        g = from_csv(path, edge_columns=["w"])
    assert (g.num_nodes(), g.num_edges()) == (0, 0)
    assert g.edata["w"].shape == (0,)


def test_csv_relabel(tmp_path: Path) -> None:
    path = write(tmp_path / "e.csv", 'src,dst\nbob,"an, na"\neve,bob\nbob,NA\n007,7\n')
    with pytest.raises(ValueError, match="'dst', row 3: a node name must not be empty; .* as NA"):
        from_csv(path, relabel=True)  # as pandas reads it
    g, names = from_csv(path, relabel=True, null_values=[""])
    assert list(names) == ["bob", "an, na", "eve", "NA", "007", "7"]  # row by row
    assert list(names.values()) == list(range(6))
    assert edges(g) == [[0, 2, 0, 4], [1, 0, 3, 5]]
    assert g.num_nodes() == 6
    path = write(tmp_path / "i.csv", "src,dst\n-5,1000000000000\n1000000000000,7\n")
    g, names = from_csv(path, relabel=True, idtype=torch.int32)
    assert names == {-5: 0, 1000000000000: 1, 7: 2}
    assert edges(g) == [[0, 1], [1, 2]]


def test_csv_round_trip(tmp_path: Path) -> None:
    g, path = weighted(), tmp_path / "e.csv"
    to_csv(g, path, "a", "b", ["w", "n", "flag"], delimiter=";")
    back = from_csv(
        path, "a", "b", ["w", "n", "flag"], delimiter=";", num_nodes=4, dtype=torch.float32
    )
    assert edges(back) == edges(g)
    for name in ("w", "n", "flag"):
        assert back.edata[name].dtype == g.edata[name].dtype
        assert torch.equal(back.edata[name], g.edata[name])
    table = csv.read_csv(path, parse_options=csv.ParseOptions(delimiter=";"))
    assert table.column_names == ["a", "b", "w", "n", "flag"]


def test_compressed_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "e.csv.gz"
    to_csv(weighted(), path)
    with gzip.open(path, "rt") as file:
        assert file.readline() == '"src","dst"\n'
    assert edges(from_csv(path)) == edges(weighted())
    assert [each.name for each in tmp_path.iterdir()] == ["e.csv.gz"]


def test_names_round_trip(tmp_path: Path) -> None:
    path = write(tmp_path / "e.csv", "src,dst\nx,y\nz,x\n")
    g, names = from_csv(path, relabel=True)
    for save, load, file in (
        (to_csv, from_csv, tmp_path / "copy.csv"),
        (to_parquet, from_parquet, tmp_path / "copy.parquet"),
    ):
        save(g, file, names=names)
        again, same_names = load(file, relabel=True)
        assert edges(again) == edges(g)
        assert list(same_names) == list(names)
    with pytest.raises(ValueError, match=r"names must name every node \(2 names, node 2\)"):
        to_csv(g, path, names={"x": 0, "z": 1})
    with pytest.raises(ValueError, match="0, 1, 2"):
        to_csv(g, path, names={"x": 1, "z": 0, "y": 2})


def test_parquet_keeps_dtypes(tmp_path: Path) -> None:
    g, path = weighted(), tmp_path / "e.parquet"
    g.edata["v"] = torch.arange(8, dtype=torch.float32).reshape(4, 2)
    g.edata["half"] = torch.tensor([1, 2, 3, 4], dtype=torch.float16)
    g.edata["byte"] = torch.tensor([1, 2, 3, 255], dtype=torch.uint8)
    names = ["w", "n", "flag", "v", "half", "byte"]
    to_parquet(g, path, edge_columns=names)
    back = from_parquet(path, edge_columns=names, num_nodes=4)
    assert edges(back) == edges(g)
    for name in names:
        assert back.edata[name].dtype == g.edata[name].dtype
        assert torch.equal(back.edata[name], g.edata[name])
    table = parquet.read_table(path)
    assert table.column("src").to_pylist() == [3, 0, 0, 2]


def test_parquet_relabel_and_types(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "e.parquet",
        src=pyarrow.array(["p", "q", "p"]).dictionary_encode(),
        dst=pyarrow.array(["q", "q", "r"]),
        u=pyarrow.array([1, 2, 3], pyarrow.uint32()),
    )
    g, names = from_parquet(path, edge_columns=["u"], relabel=True)
    assert names == {"p": 0, "q": 1, "r": 2}
    assert edges(g) == [[0, 1, 0], [1, 1, 2]]
    assert g.edata["u"].dtype == torch.int64
    path = write_parquet(
        tmp_path / "i.parquet",
        src=pyarrow.array([5, 9], pyarrow.int16()),
        dst=pyarrow.array([9, 5], pyarrow.uint64()),
    )
    assert from_parquet(path).num_nodes() == 10
    g, names = from_parquet(path, relabel=True)
    assert names == {5: 0, 9: 1}
    empty = write_parquet(
        tmp_path / "0.parquet",
        src=pyarrow.array([], pyarrow.int64()),
        dst=pyarrow.array([], pyarrow.int64()),
    )
    assert from_parquet(empty, num_nodes=3).num_nodes() == 3


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_typed(tmp_path: Path, form: str) -> None:
    g = heterograph(
        {("user", "plays", "game"): ([0, 2], [1, 1]), ("user", "knows", "user"): ([1], [0])},
        {"user": 4, "game": 3},
    )
    g.edges["plays"].data["hours"] = torch.tensor([1.5, 2.5])
    paths = {etype: tmp_path / f"{etype[1]}.{form}" for etype in g.canonical_etypes}
    columns = {("user", "plays", "game"): ["hours"]}
    save, load = (to_csv, from_csv) if form == "csv" else (to_parquet, from_parquet)
    save(g, paths, edge_columns=columns)
    back = load(paths, edge_columns=columns, num_nodes={"user": 4, "game": 3})
    assert back.canonical_etypes == g.canonical_etypes
    assert back.num_nodes("user") == 4
    assert all(edges(back, e) == edges(g, e) for e in g.canonical_etypes)
    assert back.edges["plays"].data["hours"].tolist() == [1.5, 2.5]
    named, names = load(paths, relabel=True)
    assert names == {"user": {1: 0, 0: 1, 2: 2}, "game": {1: 0}}
    assert edges(named, "plays") == [[1, 2], [0, 0]]
    save(named, paths, names=names)
    assert all(edges(load(paths), e) == edges(g, e) for e in g.canonical_etypes)
    with pytest.raises(ValueError, match="path must be a dict with a file for each relation"):
        save(g, tmp_path / "one")
    with pytest.raises(ValueError, match="path must have a file for each relation"):
        save(g, {("user", "plays", "game"): tmp_path / "one"})
    with pytest.raises(TypeError, match="num_nodes must be a dict of node types"):
        load(paths, num_nodes=4)


BAD_CSV = {
    "src,dst\n0,1\n2,\n": "column 'dst', row 2: a node id must not be empty",
    "src,dst\n0,1\n,2\n": "column 'src', row 2: a node id must not be empty",
    "src,dst\n0,1\n3,1.5\n": "column 'dst', row 2: a node id must be an integer from 0 (got '1.5')",
    "src,dst\n0,1\n3,1\n-4,0\n": "column 'src', row 3: node id -4 must not be negative",
    "src,dst\n0,1\nbob,0\n": "(got 'bob'); where a table holds names instead of ids, read "
    "it with graphshard.from_csv(..., relabel=True)",
    "src\n0\n": "must have a column for each end of an edge (got ['src'])",
    "src,dst\n0,1\n0,9\n": "column 'dst', row 2: node id 9 must be below num_nodes=5",
    "src,dst\n0,1\n0,3000000000\n": "row 2: node id 3000000000 must be below num_nodes=5",
    "src,dst\n0,1\n0,1,2\n": "each row must have as many cells as the first (got 3 of 2 in row 2: "
    "'0,1,2')",
    "": "is empty; give a file with at least a header",
}


@pytest.mark.parametrize("text", BAD_CSV)
def test_bad_csv(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(ValueError, match=re.escape(BAD_CSV[text])) as caught:
        from_csv(path, num_nodes=5)
    assert str(path) in str(caught.value)


def test_bad_edge_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.csv", "src,dst,w,t\n0,1,1.5,2\n1,0,,x\n")
    with pytest.raises(ValueError, match="column 'w', row 2: an edge column must not be empty"):
        from_csv(path, edge_columns=["w"])
    with pytest.raises(ValueError, match=r"column 't', row 2: .* numbers \(got 'x'\)"):
        from_csv(path, edge_columns=["t"])
    with pytest.raises(ValueError, match="column 'q' is missing"):
        from_csv(path, edge_columns=["q"])
    with pytest.raises(TypeError, match=r"write \['w'\]"):
        from_csv(path, edge_columns="w")
    dates = write_parquet(
        tmp_path / "d.parquet", src=[0], dst=[0], d=pyarrow.array([0], pyarrow.date32())
    )
    with pytest.raises(ValueError, match=r"column 'd', row 1: an edge column must hold numbers"):
        from_parquet(dates, edge_columns=["d"])


def test_bad_parquet(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"src": [0.0, 1.5], "dst": [0, 1]}, "column 'src': ids must be whole numbers that fit"),
        ({"src": [0, None], "dst": [0, 1]}, "column 'src', row 2: a node id must not be empty"),
        ({"src": [0, 1], "dst": [0, -1]}, "column 'dst', row 2: node id -1 must not be negative"),
        ({"src": ["0", "b"], "dst": [0, 1]}, "column 'src', row 2: a node id must be an integer"),
    ]
    for columns, text in cases:
        write_parquet(path, **columns)
        with pytest.raises(ValueError, match=re.escape(text)):
            from_parquet(path)
    with pytest.raises(ValueError, match=r"does not fit torch\.int32; pass idtype=torch\.int64"):
        from_parquet(write_parquet(path, src=[0], dst=[2**31]), idtype=torch.int32)
    with pytest.raises(ValueError, match="ids must be whole numbers"):
        from_parquet(write_parquet(path, src=[0.5], dst=[1]), relabel=True)
    with pytest.raises(ValueError, match=r"ids of '_N' must be .*; store both alike"):
        from_parquet(write_parquet(path, src=["a"], dst=[1]), relabel=True)
    write_parquet(path, src=[0], dst=[0], u=pyarrow.array([2**63], pyarrow.uint64()))
    with pytest.raises(ValueError, match=f"column 'u', row 1: {2**63} does not fit"):
        from_parquet(path, edge_columns=["u"])
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        from_parquet(write(path, "src,dst\n0,1\n"))
    with pytest.raises(FileNotFoundError):
        from_parquet(tmp_path / "none.parquet")


def long_numbers() -> dict[str, Any]:
    """What float32 cannot tell apart, and int64 not hold, as tables of events have it."""
    return {
        "src": [0, 1, 2],
        "dst": [1, 2, 0],
        "time": [1600000000.0, 1600000000.25, 1600000001.0],
        "real": [0.1, 1e300, 5e-324],
        "id": [2**53 + 1, -(2**63), 2**63 - 1],
        "flag": [True, False, True],
    }


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet"])
def test_numbers_are_those_of_pandas(tmp_path: Path, ending: str) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    path, columns = tmp_path / f"events.{ending}", ["time", "real", "id", "flag"]
    frame = pandas.DataFrame(long_numbers())
    if ending == "parquet":
        frame.to_parquet(path)
        g, theirs = from_parquet(path, edge_columns=columns), pandas.read_parquet(path)
    else:
        frame.to_csv(path, index=False)
        g, theirs = from_csv(path, edge_columns=columns), pandas.read_csv(path)
    for name in columns:
        assert g.edata[name].numpy().dtype == theirs[name].dtype
        assert g.edata[name].tolist() == theirs[name].tolist() == long_numbers()[name]


@pytest.mark.parametrize(("save", "load"), [(to_csv, from_csv), (to_parquet, from_parquet)])
def test_float64_comes_back(tmp_path: Path, save: Any, load: Any) -> None:
    g = graph(([0, 1, 2], [1, 2, 0]))
    for name in ("time", "real", "id", "flag"):
        g.edata[name] = torch.tensor(
            long_numbers()[name], dtype=torch.float64 if name in ("time", "real") else None
        )
    save(g, tmp_path / "table", edge_columns=list(g.edata))
    back = load(tmp_path / "table", edge_columns=list(g.edata))
    for name, column in g.edata.items():
        assert back.edata[name].dtype == column.dtype
        assert torch.equal(back.edata[name], column)


BIG = [2**63 + 5, 0, 2**64 - 1, 2**63 + 5]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("other", [[1, 2, 0, 2**63 - 1], [-1, 2, 0, -(2**63)], BIG[::-1]])
def test_names_beyond_63_bits(tmp_path: Path, ending: str, other: list[int]) -> None:
    path = tmp_path / f"hashes.{ending}"
    kind = pyarrow.uint64() if max(other) >= 2**63 else pyarrow.int64()
    table = pyarrow.table(
        {"src": pyarrow.array(BIG, pyarrow.uint64()), "dst": pyarrow.array(other, kind)}
    )
    if ending == "csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path)
    load, save = (from_csv, to_csv) if ending == "csv" else (from_parquet, to_parquet)
    with pytest.raises(ValueError, match=rf"row 1: node id {BIG[0]} does not fit 64 bits"):
        load(path)
    if ending == "parquet" and min(other) < 0:
        with pytest.raises(ValueError, match="must fit int64, or uint64, all of them"):
            load(path, relabel=True)
        return
    g, names = load(path, relabel=True)
    by_row = [name for pair in zip(BIG, other, strict=True) for name in pair]
    assert list(names) == list(dict.fromkeys(by_row))  # by first appearance
    by_id = list(names)
    assert [[by_id[i] for i in side] for side in edges(g)] == [BIG, other]
    save(g, tmp_path / f"again.{ending}", names=names)
    again, same = load(tmp_path / f"again.{ending}", relabel=True)
    assert (edges(again), list(same)) == (edges(g), by_id)


def test_whole_numbers_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "ids.csv", f"src,dst,id,real\n0,1,5,1e30\n1,0,{2**63},{2**63}\n")
    with pytest.raises(ValueError, match=rf"column 'id', row 2: {2**63} does not fit 64 bits"):
        from_csv(path, edge_columns=["id"])
    g = from_csv(path, edge_columns=["real"])
    assert g.edata["real"].tolist() == [1e30, float(2**63)]


def test_lists_of_one_length(tmp_path: Path) -> None:
    rows = [[0.1, 2.0, 3.0], [4.0, 5.0, 1e300]]
    columns = {
        "vector": pyarrow.array(rows, pyarrow.list_(pyarrow.float64())),
        "large": pyarrow.array([[1, 2**62], [3, 4]], pyarrow.large_list(pyarrow.int64())),
        "matrix": pyarrow.array([[[1, 2], [3, 4], [5, 6]]] * 2),
        "ragged": pyarrow.array([[1.0], [2.0, 3.0]]),
        "hole": pyarrow.array([[1.0, 2.0], [3.0, None]]),
        "none": pyarrow.array([[1.0], None]),
        "empty": pyarrow.array([[], []], pyarrow.list_(pyarrow.float64())),
    }
    path = write_parquet(tmp_path / "e.parquet", src=[0, 1], dst=[1, 0], **columns)
    g = from_parquet(path, edge_columns=["vector", "large", "matrix", "empty"])
    assert g.edata["vector"].dtype == torch.float64
    assert g.edata["vector"].tolist() == rows
    assert g.edata["large"].tolist() == [[1, 2**62], [3, 4]]
    assert g.edata["matrix"].tolist() == columns["matrix"].to_pylist()
    assert g.edata["empty"].shape == (2, 0)
    part = pyarrow.table({"src": [0, 1, 0], "dst": [1, 0, 0], "v": [[9], *[[1, 2]] * 2]})[1:]
    parquet.write_table(part, tmp_path / "slice.parquet")
    assert from_parquet(tmp_path / "slice.parquet", edge_columns=["v"]).edata["v"].shape == (2, 2)
    for name, text in {
        "ragged": "row 2: the lists of an edge column must have one length (got 2, and 1 in row 1)",
        "hole": "row 2: a list must not hold an empty place",
        "none": "row 2: an edge column must not be empty",
    }.items():
        with pytest.raises(ValueError, match=re.escape(f"column {name!r}, {text}")):
            from_parquet(path, edge_columns=[name])


def test_folder_of_parquet_files(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    folder = tmp_path / "edges.parquet"
    folder.mkdir()
    for number, (src, dst) in enumerate([([0, 1], [1, 2]), ([5, 3], [3, 0]), ([], [])]):
        part = {"src": pyarrow.array(src, pyarrow.int64()), "dst": dst, "w": [0.1] * len(src)}
        part = {
            **part,
            "dst": pyarrow.array(dst, pyarrow.int64()),
            "w": pyarrow.array(part["w"], pyarrow.float64()),
        }
        write_parquet(folder / f"part-{number}.parquet", **part)
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.parquet.crc").touch()
    theirs = pandas.read_parquet(folder)
    g = from_parquet(folder, edge_columns=["w"])
    assert edges(g) == [theirs["src"].tolist(), theirs["dst"].tolist()]
    assert g.edata["w"].tolist() == theirs["w"].tolist()
    write_parquet(folder / "part-9.parquet", src=["a"], dst=["b"], w=[0.5])
    with pytest.raises(
        ValueError, match=r"part-9.parquet: the columns must have types that become"
    ):
        from_parquet(folder)
    (folder / "part-9.parquet").write_text("no Parquet")
    with pytest.raises(ValueError, match=r"cannot be read as parquet: .*part-9.parquet"):
        from_parquet(folder)
    (folder / "part-9.parquet").rename(folder / "notes.txt")
    with pytest.raises(ValueError, match=r"cannot be read as parquet: .*notes.txt"):
        from_parquet(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no file"):
        from_parquet(tmp_path / "empty")


OTHER_FORMS = {
    "# from a site\nsrc,dst\n0,1\n1,2\n": {"skip_rows": 1},
    "# one\n# two\tthree\n0\t1\n1\t2\n": {
        "skip_rows": 2,
        "delimiter": "\t",
        "column_names": ["src", "dst"],
    },
    "src;dst\n0;1\n1;2\n": {"delimiter": ";"},
    "0 1\n1 2\n": {"delimiter": " ", "column_names": ["src", "dst"]},
}


@pytest.mark.parametrize("text", OTHER_FORMS)
def test_what_is_not_said_goes_by_the_file(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "e.csv", text)
    assert edges(from_csv(path)) == [[0, 1], [1, 2]]
    assert edges(from_csv(path, **OTHER_FORMS[text])) == [[0, 1], [1, 2]]  # type: ignore[call-overload]


def test_columns_that_are_not_said_go_by_usual_names(tmp_path: Path) -> None:
    path = write(tmp_path / "e.csv", "weight,target,source\n0.5,1,0\n1.5,2,1\n")
    g = from_csv(path, edge_columns=["weight"])
    assert (edges(g), g.edata["weight"].tolist()) == ([[0, 1], [1, 2]], [0.5, 1.5])
    path = write(tmp_path / "bare.csv", "0,1,7\n1,2,8\n")
    assert edges(from_csv(path, "1", "0", ["2"])) == [[1, 2], [0, 1]]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    half = "\ud800"
    path = write(tmp_path / "e.csv", "src,dst\n0,1\n")
    for load in (from_csv, from_parquet):
        with pytest.raises(ValueError, match="name of a column must be text that UTF-8 can hold"):
            load(path, src=half)
    g, _ = from_csv(path, relabel=True)
    with pytest.raises(ValueError, match="a name must be text that UTF-8 can hold"):
        to_csv(g, path, names={half: 0, "b": 1})
    with pytest.raises(ValueError, match="name of a column must be text that UTF-8 can hold"):
        to_csv(g, path, src=half)


def test_bad_arguments(tmp_path: Path) -> None:
    path = write(tmp_path / "e.csv", "src,dst\n0,1\n")
    g = weighted()
    with pytest.raises(ValueError, match="num_nodes cannot be given with relabel"):
        from_csv(path, relabel=True, num_nodes=4)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="delimiter must be one character"):
        from_csv(path, delimiter=", ")
    with pytest.raises(TypeError, match=r"idtype must be torch.int32 or torch.int64"):
        from_csv(path, idtype=torch.int16)
    with pytest.raises(ValueError, match="at least one relation"):
        from_csv({})
    with pytest.raises(TypeError, match="must be a triple"):
        from_csv({"plays": path})  # type: ignore[dict-item]
    g.edata["v"] = torch.ones(4, 2)
    g.edata["h"] = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"one number per edge .* use to_parquet"):
        to_csv(g, path, edge_columns=["v"])
    with pytest.raises(TypeError, match=r"bfloat16.*store \.float"):
        to_parquet(g, path, edge_columns=["h"])
    with pytest.raises(ValueError, match="also the name of a column of node ids"):
        to_csv(g, path, src="v", edge_columns=["v"])
    with pytest.raises(KeyError, match="no field 'q'"):
        to_csv(g, path, edge_columns=["q"])
    assert path.read_text() == "src,dst\n0,1\n", "a refused write must not touch the file"
