# SPDX-License-Identifier: Apache-2.0
"""Tables and folders whose edges stay on disk: bytes and reports as in memory. No process group."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ogb_files
import pytest
import torch

from graphshard._base.kernels import extension_available
from graphshard.data import (
    EdgeTable,
    NodeTable,
    Tables,
    _array_graph,
    _kept_columns,
    _ogb,
    _read_tables,
    _table_targets,
    dataset,
    partition_tables,
    splits,
)
from graphshard.data._partition_tables import prepared_tables, report_path
from graphshard.data.prepare import Preparation, is_table, partition_by_name, read_dataset
from graphshard.data.task import partition_dataset, read_task
from graphshard.graph import heterograph, save_graphs
from graphshard.partition import partition_graph
from graphshard.partition._writer import PartitionWriter
from graphshard.partition.load import load_partition_feats

pandas = pytest.importorskip("pandas", reason="tables are made with it")

pytestmark = pytest.mark.skipif(
    not extension_available(), reason="edges on disk need the compiled kernels"
)
MEMORY = 1 << 24
SEES = ("user", "sees", "user")


def tables(seed: int, **more: Any) -> Tables:
    """Users and edges between them, with everything that edges can have."""
    rng = np.random.default_rng(seed)
    ids = np.array([f"u{i}" for i in rng.permutation(60)])
    nodes = pandas.DataFrame({"id": ids, "x": rng.random(60), "y": rng.integers(0, 3, 60)})
    ends = ids[rng.integers(0, 60, (2, 400))].astype(object)
    ends[0, :20], ends[1, 10:30] = "nobody", ids[5]
    edges = pandas.DataFrame(
        {
            "from": ends[0],
            "to": ends[1],
            "w": np.where(rng.random(400) < 0.1, np.nan, rng.random(400)),
            "t": rng.integers(0, 50, 400),
            "r": rng.choice(["likes", "hates"], 400),
            "colour": rng.choice(["red", "green", None], 400),
            "part": rng.choice(["train", "val", "test", None], 400),
            "kind": rng.choice(["a", "b", None], 400),
        }
    )
    of_edges = dict(more.pop("edges", {}))
    used = {of_edges.get(key) for key in ("weight", "time", "label", "relation_column")}
    ignored = [name for name in edges.columns[2:] if name not in {"colour", *used}]
    if of_edges.pop("plain", False):
        of_edges["features"], ignored = (), []
    return Tables(
        nodes={"user": NodeTable(files=nodes, id="id", **more.pop("nodes", {}))},
        edges={
            SEES: EdgeTable(files=edges, source="from", target="to", **of_edges, ignore=ignored)
        },
        **more,
    )


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"edges": {"weight": "w", "time": "t"}, "dangling": "add"}, {"self_loops": True}),
    ({"edges": {"weight": "w"}, "parallel": "drop"}, {"bidirected": True, "self_loops": True}),
    ({"edges": {"plain": True}, "nodes": {"label": "y"}}, {"bidirected": True}),
    ({"edges": {"label": "kind", "split": {"column": "part"}}}, {"inverse": True}),
    ({"edges": {"split": [0.6, 0.2, 0.2]}, "parallel": "drop"}, {"bidirected": True}),
    ({"edges": {"split": {"time": "t", "fractions": [0.5, 0.3, 0.2]}}}, {}),
    ({"edges": {"relation_column": "r", "split": [0.8, 0.1, 0.1]}}, {"inverse": True}),
    ({"edges": {"label": "t", "split": [0.5, 0.2]}}, {"self_loops": True}),
]


@pytest.fixture
def in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_array_graph, "_BLOCK_ROWS", 61)
    monkeypatch.setattr(splits, "_BLOCK_ROWS", 61)
    monkeypatch.setattr(_table_targets, "_BLOCK_ROWS", 61)
    monkeypatch.setattr(_read_tables, "_MOST_AT_ONCE", 0)
    monkeypatch.setattr(_read_tables, "rows_at_once", lambda: 64)
    monkeypatch.setattr(_kept_columns, "MOST_IN_MEMORY", 0)
    monkeypatch.setattr(_kept_columns, "_RELEASED_EVERY", 1024)


@pytest.mark.usefixtures("in_small_blocks")
@pytest.mark.parametrize("case", range(len(CASES)))
def test_bytes_and_reports_are_those_of_tables_in_memory(case: int, tmp_path: Path) -> None:
    described, prepared = CASES[case]
    preparation = Preparation(**prepared)
    read = _read_tables.read_tables(tables(case, **dict(described)), name="g")
    graph, task = prepared_tables(read, preparation)
    arguments: dict[str, Any] = {"part_method": "random", "memory": MEMORY, "quiet": True}
    if task.target == "user":
        arguments = {"part_method": "multilevel", "balance_split": True, "quiet": True}
    partition_graph(graph.graph(), "g", 3, tmp_path / "memory", **arguments)
    path = partition_tables(
        tables(case, **dict(described)),
        3,
        tmp_path / "disk",
        name="g",
        preparation=preparation,
        **arguments,
    )
    assert json.loads(report_path(path).read_text()) == json.loads(
        json.dumps(read.report.as_json())
    )
    ours = {p.relative_to(tmp_path / "memory") for p in (tmp_path / "memory").rglob("*.*")}
    assert len(ours) == 10
    for name in ours:
        assert (tmp_path / "disk" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()
    left_over = [p.name for p in path.parent.iterdir() if not p.name.startswith(("part", "g."))]
    assert not left_over


def plain_folder(folder: Path, rng: np.random.Generator) -> None:
    np.save(folder / "edge_index.npy", rng.integers(0, 50, (2, 300)).astype(np.int32))
    np.save(folder / "feat.npy", rng.integers(0, 9, (50, 4)).astype(np.uint8))


def knowledge_folder(folder: Path, rng: np.random.Generator) -> None:
    np.save(folder / "edge_index.npy", rng.integers(0, 50, (2, 300)))
    np.save(folder / "edge_type.npy", np.sort(rng.integers(0, 3, 300)).astype(np.int16))
    (folder / "relations.txt").write_text("likes\nhates\nknows\n")


def sparse_folder(folder: Path, rng: np.random.Generator) -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="writes the file")
    np.save(folder / "edge_index.npy", rng.integers(0, 50, (2, 300)))
    words = sparse.random(50, 30, 0.1, "csr", random_state=0)
    np.savez(
        folder / "feat.npz",
        data=words.data,
        indices=words.indices,
        indptr=words.indptr,
        shape=words.shape,
    )


def typed_folder(folder: Path, rng: np.random.Generator) -> None:
    np.save(folder / "edge_index__a__to__b.npy", rng.integers(0, 30, (2, 200)))
    np.save(folder / "edge_index__b__is__b.npy", rng.integers(0, 40, (2, 200)).astype(np.uint16))
    (folder / "node_types.txt").write_text("a\t50\nb\t40\n")
    np.save(folder / "feat__b.npy", rng.random((40, 3)))


@pytest.mark.usefixtures("in_small_blocks")
@pytest.mark.parametrize(
    ("write", "prepared"),
    [
        (plain_folder, {"bidirected": True, "self_loops": True}),
        (plain_folder, {"self_loops": False}),
        (sparse_folder, {"row_normalize": True}),
        (knowledge_folder, {}),
        (typed_folder, {"inverse": True}),
    ],
)
def test_bytes_of_folders_are_those_of_folders_in_memory(
    write: Any, prepared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "data").mkdir()
    rng = np.random.default_rng(7)
    write(folder, rng)
    label = "label__a.npy" if write is typed_folder else "label.npy"
    np.save(folder / label, rng.integers(0, 3, 50))
    np.save(folder / "train_idx.npy", np.arange(20))
    monkeypatch.setattr(dataset, "_BLOCK_VALUES", 64)
    preparation = Preparation(**prepared)
    arguments: dict[str, Any] = {"part_method": "random", "memory": MEMORY, "name": "g"}
    in_memory = partition_dataset(
        read_dataset(str(folder), preparation), 3, tmp_path / "memory", **arguments
    )
    arguments["title"] = arguments.pop("name")
    on_disk = partition_by_name(
        str(folder), 3, tmp_path / "disk", preparation=preparation, **arguments
    )
    ours = {p.relative_to(in_memory.parent) for p in in_memory.parent.rglob("*.*")}
    assert len(ours) == 11
    assert ours == {p.relative_to(on_disk.parent) for p in on_disk.parent.rglob("*.*")}
    for name in ours:
        assert (on_disk.parent / name).read_bytes() == (in_memory.parent / name).read_bytes()


def ogb_csv(folder: Path) -> Path:
    ogb_files.arxiv(folder)
    ogb_files.put(folder / "ogbn_arxiv/raw/node_h.csv.gz", [[1], [2], [0.5], [4], [2**30]])
    return folder / "ogbn_arxiv"


def ogb_undirected(folder: Path) -> Path:
    ogb_files.arxiv(folder)
    ogb_files.put(folder / "ogbn_arxiv/raw/edge-feat.csv.gz", [[1], [2], [0.5]])
    return (folder / "ogbn_arxiv").rename(folder / "ogbn_products")


def ogb_typed(folder: Path) -> Path:
    ogb_files.mag(folder)
    return folder / "ogbn_mag"


def ogb_npz(folder: Path) -> Path:
    raw, rng = folder / "ogbn_papers100M" / "raw", np.random.default_rng(3)
    raw.mkdir(parents=True)
    write, more = (np.savez_compressed, np.int32) if folder.name == "data" else (np.savez, None)
    write(
        raw / "data.npz",
        edge_index=rng.integers(0, 40, (2, 300)).astype(more or np.int64),
        node_feat=rng.random((40, 3)).astype(np.float16),
        node_year=rng.integers(0, 9, (40, 1)),
        num_nodes_list=np.array([40]),
        num_edges_list=np.array([300]),
    )
    np.savez(raw / "node-label.npz", node_label=rng.integers(0, 3, (40, 1)).astype(np.float32))
    ogb_files.put_split(folder / "ogbn_papers100M" / "split" / "time", [0, 7], [2], [3])
    return folder / "ogbn_papers100M"


def dgl_file(folder: Path, formats: str) -> Path:
    rng = np.random.default_rng(5)
    graph = heterograph(
        {
            ("a", "to", "b"): tuple(torch.from_numpy(rng.integers(0, 30, (2, 200)))),
            ("b", "is", "b"): tuple(torch.from_numpy(rng.integers(0, 40, (2, 100)))),
        },
        {"a": 30, "b": 40},
    )
    graph.nodes["b"].data["odd name"] = torch.rand(40, 3, dtype=torch.float64)
    graph.nodes["b"].data["label"] = torch.from_numpy(rng.integers(0, 3, 40))
    graph.nodes["b"].data["train_mask"] = torch.arange(40) < 9
    graph.edges["to"].data["w"] = torch.rand(200)
    graph.nodes["b"].data["half"] = torch.rand(40, 3).bfloat16()
    save_graphs(folder / "g.bin", graph, formats=formats)
    return folder / "g.bin"


def plain_dgl_file(folder: Path) -> Path:
    rng = np.random.default_rng(6)
    graph = heterograph(
        {("n", "e", "n"): tuple(torch.from_numpy(rng.integers(0, 50, (2, 300))).int())}, {"n": 50}
    )
    graph.edata["w"] = torch.rand(300)
    graph.ndata["half"], graph.ndata["odd"] = torch.rand(50).bfloat16(), torch.ones(50).byte()
    save_graphs(folder / "g.dgl", graph)
    return folder / "g.dgl"


def edge_table(folder: Path) -> Path:
    rng = np.random.default_rng(8)
    columns = {"src": rng.integers(0, 99, 300), "dst": rng.integers(0, 99, 300)}
    pandas.DataFrame(columns).to_csv(folder / "edges.tsv", sep="\t", index=False)
    return folder / "edges.tsv"


@pytest.mark.filterwarnings("ignore:ogbn-mag has")
@pytest.mark.usefixtures("in_small_blocks")
@pytest.mark.parametrize(
    ("write", "prepared"),
    [
        (ogb_csv, {"bidirected": True}),
        pytest.param(ogb_undirected, {}, marks=pytest.mark.exhaustive),
        (ogb_typed, {}),
        (ogb_npz, {"self_loops": True}),
        (partial(dgl_file, formats="coo"), {"inverse": True}),
        (partial(dgl_file, formats="csc"), {}),
        pytest.param(partial(dgl_file, formats="csr"), {}, marks=pytest.mark.exhaustive),
        (plain_dgl_file, {"bidirected": True, "self_loops": True}),
        (edge_table, {"bidirected": True}),
    ],
)
def test_bytes_of_other_data_are_those_in_memory(
    write: Any, prepared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    source, preparation = str(write(tmp_path / "data")), Preparation(**prepared)
    monkeypatch.setattr(_ogb, "_ROWS_AT_ONCE", 2)
    dataset = read_dataset(source, preparation)
    arguments: dict[str, Any] = {"part_method": "random", "memory": MEMORY}
    in_memory = partition_dataset(dataset, 2, tmp_path / "memory", name="g", **arguments)
    on_disk = partition_by_name(
        source, 2, tmp_path / "disk", title="g", preparation=preparation, **arguments
    )
    for part in (0, 1):
        for file in ("graph", "node_feats", "edge_feats"):
            name = f"part{part}/{file}.safetensors"
            if is_table(source) and file == "node_feats":
                continue  # the data set in memory has labels, which nothing is known of
            assert (on_disk.parent / name).read_bytes() == (in_memory.parent / name).read_bytes()
    if not is_table(source):
        assert on_disk.read_bytes() == in_memory.read_bytes()
    tasks = [read_task(path) for path in (in_memory, on_disk)]
    assert tasks[0].target == tasks[1].target or is_table(source)
    assert not any(p.name.startswith("graphshard-folder") for p in on_disk.parent.iterdir())


def test_numbers_of_nodes_that_outgrow_32_bits(tmp_path: Path) -> None:
    ends = _array_graph.Arrays(tmp_path).ends(None)
    for numbers in ([1, 2], [], [2**31, 3], [7, 2**40]):
        for side, column in enumerate(ends.room(len(numbers) + 1)):
            column[:] = [*(number + side for number in numbers), -1]
        ends.keep(np.array([*(True for _ in numbers), False]))
    src, dst = ends.arrays()
    assert src.tolist() == [1, 2, 2**31, 3, 7, 2**40]
    assert (dst - src).tolist() == [1] * 6
    assert src.dtype == np.int64


def test_a_run_that_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files that tables are made into are other files each time, and hold the same."""

    def cut_off(*_: object) -> None:
        raise OSError("cut off")

    arguments: dict[str, Any] = {"name": "g", "part_method": "multilevel", "quiet": False}
    with monkeypatch.context() as patched, pytest.raises(OSError, match="cut off"):
        patched.setattr(PartitionWriter, "commit", cut_off)
        partition_tables(tables(3), 2, tmp_path / "out", **arguments)
    capfd.readouterr()
    path = partition_tables(tables(3), 2, tmp_path / "out", **arguments)
    assert "going on where an earlier run of the same work ended" in capfd.readouterr().err
    whole = partition_tables(tables(3), 2, tmp_path / "whole", **{**arguments, "quiet": True})
    assert path.read_bytes() == whole.read_bytes()


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"\.npy cannot be written \(No space left .*\); "):
        partition_tables(tables(0), 2, tmp_path / "out", part_method="multilevel")
    assert not list(tmp_path.iterdir())


def test_a_task_of_edges_that_nothing_is_known_of(tmp_path: Path) -> None:
    """Encodings of another partition: labels unknown, no split."""
    described = {"edges": {"label": "kind", "split": [0.5, 0.2]}}
    arguments: dict[str, Any] = {"name": "g", "part_method": "random", "memory": MEMORY}
    first = partition_tables(tables(1, **described), 2, tmp_path / "a", **arguments)
    second = partition_tables(tables(2), 2, tmp_path / "b", encodings_from=first, **arguments)
    _, edges = load_partition_feats(second, 0)
    assert edges is not None
    assert (edges["user:sees:user/label"] == -1).all()
    assert not edges["user:sees:user/train_mask"].any()
