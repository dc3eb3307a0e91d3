# SPDX-License-Identifier: Apache-2.0
"""Data sets whose files are damaged, or are no files. No process; see also ``tests/campaigns``."""

from __future__ import annotations

import os
import resource
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphshard.data import from_csv, from_parquet, load_dataset, to_csv, to_parquet
from graphshard.data.npy import read_npy, read_npz
from graphshard.graph import graph
from graphshard.train.commands import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.mkdir()
    np.save(path / "edge_index.npy", np.array([[0, 1, 3], [1, 2, 3]]))
    np.save(path / "label.npy", np.array([0, 2, -1, 1]))
    return path


def everything(name: str) -> bool:
    return True


# ----------------------------------------------------------------------------------- NumPy's files

ARRAYS: dict[str, Any] = {
    "integers": np.arange(6).reshape(2, 3),
    "no dimension": np.array(3.5),
    "one value": np.array([3], dtype=np.int8),
    "no rows": np.zeros((0, 5), dtype=np.float32),
    "no columns": np.zeros((5, 0)),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "another order of bytes": np.arange(5, dtype=">i4"),
    "half": np.ones((2, 2), dtype=np.float16),
    "bool": np.array([[True, False]]),
    "complex": np.array([1 + 2j]),
    "wide": np.ones((1,) * 20),
    "unsigned": np.array([2**64 - 1], dtype=np.uint64),
    "long double": np.array([1.5], dtype=np.longdouble),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_arrays_are_what_numpy_wrote(name: str, version: tuple[int, int], tmp_path: Path) -> None:
    array = ARRAYS[name]
    with open(tmp_path / "a.npy", "wb") as file:
        np.lib.format.write_array(file, array, version, allow_pickle=False)
    np.savez(tmp_path / "a.npz", a=array)
    np.savez_compressed(tmp_path / "b.npz", a=array)
    read = [read_npy(tmp_path / "a.npy")]
    read += [read_npz(tmp_path / f"{stem}.npz", everything)["a"] for stem in "ab"]
    for found in read:
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert np.array_equal(found, array)


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


PLAIN = "{'descr': '<i8', 'fortran_order': False, 'shape': (4,), }"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin as a .npy file"),
    "pickle": (b"\x80\x04K\x01.", "does not begin as a .npy file"),
    "version": (b"\x93NUMPY\x07\x00" + bytes(8), "does not begin as a .npy file"),
    "header is longer than the file": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "4294967295 bytes"),
    "half a string": (npy("{'descr': '<i8"), "not what NumPy writes"),
    "a program": (npy("__import__('os').abort()"), "not what NumPy writes"),
    "deep": (npy("(" * 9000), "not what NumPy writes"),
    "a key twice": (npy(PLAIN.replace("descr", "shape")), "not what NumPy writes"),
    "objects": (npy(PLAIN.replace("<i8", "|O"), bytes(32)), "not an array of numbers"),
    "records": (npy(PLAIN.replace("<i8", "V8"), bytes(32)), "not an array of numbers"),
    "text": (npy(PLAIN.replace("<i8", "<U99999999"), bytes(32)), "not an array of numbers"),
    "short": (npy(PLAIN, bytes(31)), "says int64 [4], 32 bytes, and 31 bytes follow"),
    "long": (npy(PLAIN, bytes(33)), "33 bytes follow"),
    "huge": (npy(PLAIN.replace("4,", "40000000000000,"), bytes(32)), "and 32 bytes follow"),
    "beyond 64 bits": (npy(PLAIN.replace("4,", "4" * 17 + ", 0"), b""), "says the shape"),
    "digits": (npy(PLAIN.replace("4,", "4" * 5000), b""), "not an array of numbers"),
    "dimensions": (npy(PLAIN.replace("4,", "1," * 60), bytes(8)), "says the shape"),
    "neither true nor false": (npy(PLAIN.replace("<i8", "|b1"), b"\0\1\7\1"), "neither true nor"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_arrays_are_refused(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as a plain array") as caught:
        read_npy(tmp_path / "a.npy")
    assert message in str(caught.value)
    assert str(tmp_path / "a.npy") in str(caught.value)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", content)
    with pytest.raises(ValueError, match="archive of plain arrays") as caught:
        read_npz(tmp_path / "a.npz", everything)
    assert message in str(caught.value)


def test_an_archive_cannot_promise_more_than_deflate_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.zeros(1000))
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")  # of the directory: the size before compression is at 24
    content[entry + 24 : entry + 28] = (2**31).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is said to have 2147483648 bytes, more than"):
        read_npz(path, everything)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", bytes(1000))
    with pytest.raises(ValueError, match="compressed in a way that NumPy does not write"):
        read_npz(path, everything)


# ----------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"PK\x05\x06" + bytes(18), b"x" * 100])
def test_damaged_sparse_features_are_one_line_of_the_command(
    content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "feat.npz").write_bytes(content)
    with pytest.raises(ValueError, match=f"{folder}/feat.npz"):
        load_dataset(folder)
    out = folder.parent / "out"
    assert run(f"partition --data {folder} --parts 2 --quiet --out {out}".split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folder}/feat.npz ")
    assert len(error.splitlines()) == 1


def test_a_stray_end_of_file_is_not_shown_as_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object, **__: object) -> None:
        raise EOFError("a reader's own")

    monkeypatch.setattr("graphshard.data.prepare.read_dataset_arrays", end)
    with pytest.raises(EOFError, match="a reader's own"):
        run("partition --data cora --parts 2 --out nowhere".split())


FILES = ["edge_index.npy", "label.npy", "feat.npy", "feat.npz", "train_idx.npy", "classes.txt"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", ["pipe", "folder", "dangling link", "device"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_neither_read_nor_taken_for_absent(
    what: str, name: str, folder: Path
) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere" if what == "dangling link" else "/dev/zero")
    with pytest.raises(ValueError, match=str(path)):
        load_dataset(folder)


NUMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "label": ({"label": [0, 1, 2, 2**62]}, r"a label must be below 65536 \(got 4611686018"),
    "unsigned label": (
        {"label": np.array([0, 1, 2, 2**64 - 1], dtype=np.uint64)},
        r"label.npy must hold integers below 2\^63",
    ),
    "relation": ({"edge_type": [0, 0, 2**50]}, "edge_type.npy must hold relation ids below 65536"),
    "pointer": (
        {"edge_type": [0, 0, 1], "relation_ptr": [0, 2, 2**60]},
        "relation_ptr.npy does not fit",
    ),
    "no pointer": (
        {"edge_type": [0, 0, 0], "relation_ptr": np.zeros(0, dtype=int)},
        "relation_ptr.npy does not fit",
    ),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_no_file_bears_out(case: str, folder: Path) -> None:
    arrays, message = NUMBERS[case]
    for name, value in arrays.items():
        np.save(folder / f"{name}.npy", value)
    with pytest.raises(ValueError, match=message):
        load_dataset(folder)


def test_numbers_of_nodes_that_no_file_bears_out(tmp_path: Path) -> None:
    np.save(tmp_path / "edge_index.npy", np.array([[0], [2**40]]))
    message = f"{tmp_path} calls for 1099511627777 nodes of type '_N', more than the 1048576"
    with pytest.raises(ValueError, match=message):
        load_dataset(tmp_path)
    np.save(tmp_path / "edge_index.npy", np.array([[0], [2**20 - 1]]))
    assert load_dataset(tmp_path).graph.num_nodes() == 2**20
    (tmp_path / "edge_index.npy").rename(tmp_path / "edge_index__a__r__b.npy")
    no_count = "a number of nodes"
    for count, wanted in (("10" * 8, "calls for"), ("\u00b2", no_count), ("9" * 30, no_count)):
        (tmp_path / "node_types.txt").write_text(f"a\t{count}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=wanted):
            load_dataset(tmp_path)


FEATURES = ["<f2", ">f4", ">f8", ">i2", "<u2", ">u4", "<u8", "i1", "u1", "g"]


@pytest.mark.parametrize("dtype", FEATURES)
def test_features_of_every_dtype_keep_their_values(dtype: str, folder: Path) -> None:
    values = np.array([[1, 2], [3, 4], [5, 100], [0, 0]], dtype=dtype)
    np.save(folder / "feat.npy", values)
    found = load_dataset(folder, dtype=torch.float64).graph.ndata["feat"]
    assert found.tolist() == values.astype(np.float64).tolist()


# ------------------------------------------------------------------------------------------ tables


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_damaged_tables(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path = tmp_path / f"edges.{kind}"
    read = from_parquet if kind == "parquet" else from_csv
    (to_parquet if kind == "parquet" else to_csv)(graph(([0, 1], [1, 2])), path)
    whole = path.read_bytes()
    damage = [whole[: len(whole) // 2], b"\xff" * 40, b""]
    if kind == "parquet":  # the description, which ends with its length and a word
        start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
        damage.insert(0, whole[:start] + b"\x7f" * 16 + whole[start + 16 :])
    for content in damage[1:] if kind == "csv" else damage:
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=f"{path} cannot be read as|{path}, column|{path} is empty"
        ):
            read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{path} must be a regular file"):
        read(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{path}"):
        read(path)


def test_a_table_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    g = graph((torch.arange(20000), torch.arange(20000)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(OSError, match=f"{tmp_path}/edges.csv cannot be written .*too large"):
            to_csv(g, tmp_path / "edges.csv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
