# SPDX-License-Identifier: Apache-2.0
"""from_ogb on folders of OGB's layout made here, with a stand-in for ogb. No process."""

from __future__ import annotations

import re
import sys
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from ogb_files import arxiv, mag, put, put_split

from graphshard.data import from_ogb
from graphshard.data._array_graph import Arrays
from graphshard.data._ogb import read_ogb_arrays
from graphshard.dgl.data import DglNodePropPredDataset


def test_csv_layout(tmp_path: Path) -> None:
    arxiv(tmp_path)
    raw = tmp_path / "ogbn_arxiv" / "raw"
    put(raw / "node_time.csv.gz", [[1600000000.0 + i / 4] for i in range(5)])
    put(raw / "node_id.csv.gz", [[2**62 + i] for i in range(5)])
    data = from_ogb("ogbn-arxiv", tmp_path, idtype=torch.int32)
    g = data.graph
    assert (data.name, data.num_classes, g.num_nodes(), g.idtype) == (
        "ogbn-arxiv",
        3,
        5,
        torch.int32,
    )
    assert [side.tolist() for side in g.edges()] == [[0, 3, 1], [1, 1, 2]]
    assert g.ndata["feat"].dtype == torch.float32
    assert g.ndata["feat"][3].tolist() == [1.5, -3.0]
    assert g.ndata["node_year"].tolist() == [2010, 2011, 2012, 2013, 2014]
    assert g.ndata["node_time"].tolist() == [1600000000.0 + i / 4 for i in range(5)]
    assert g.ndata["node_id"].tolist() == [2**62 + i for i in range(5)]
    assert g.ndata["label"].tolist() == [2, 0, 1, 0, 2]
    assert [data.node_ids(s).tolist() for s in ("train", "val", "test")] == [[0, 4], [1], [2, 3]]


def test_undirected_layout_has_each_reverse_behind_its_edge(tmp_path: Path) -> None:
    raw = tmp_path / "ogbn_proteins" / "raw"
    put(raw / "edge.csv.gz", [(0, 1), (2, 1)])
    put(raw / "num-node-list.csv.gz", [[3]])
    put(raw / "edge-feat.csv.gz", [(0.1, 0.2), (0.3, 0.4)])
    put(raw / "node_species.csv.gz", [[3702], [3702], [4932]])
    put(raw / "node-label.csv.gz", [(0, 1, 1), (1, 0, 0), (0, 0, 0)])
    put_split(tmp_path / "ogbn_proteins" / "split" / "species", [0], [1], [2])
    data = from_ogb("ogbn-proteins", tmp_path)
    assert [side.tolist() for side in data.graph.edges()] == [[0, 1, 2, 1], [1, 0, 1, 2]]
    feat = torch.tensor([[0.1, 0.2], [0.1, 0.2], [0.3, 0.4], [0.3, 0.4]])
    assert torch.equal(data.graph.edata["edge_feat"], feat)
    assert data.graph.ndata["label"].shape == (3, 3)
    assert data.num_classes == 3


def test_npz_layout(tmp_path: Path) -> None:
    raw = tmp_path / "ogbn_papers100M" / "raw"
    raw.mkdir(parents=True)
    np.savez(
        raw / "data.npz",
        edge_index=np.array([[0, 1], [2, 2]]),
        node_feat=np.arange(8, dtype=np.float16).reshape(4, 2),
        node_year=np.array([[1], [2], [3], [4]]),
        num_nodes_list=np.array([4]),
        num_edges_list=np.array([2]),
    )
    label = np.array([[1.0], [np.nan], [0.0], [np.nan]], dtype=np.float32)
    np.savez(raw / "node-label.npz", node_label=label)
    put_split(tmp_path / "ogbn_papers100M" / "split" / "time", [0], [2], [2])
    g = from_ogb("ogbn-papers100M", tmp_path).graph
    assert g.ndata["label"].tolist() == [1, -1, 0, -1]
    assert g.ndata["feat"].shape == (4, 2)
    assert g.ndata["node_year"].tolist() == [1, 2, 3, 4]
    assert [side.tolist() for side in g.edges()] == [[0, 1], [2, 2]]


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_labels_and_splits_stay_on_disk(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphshard.data._array_graph._BLOCK_ROWS", 1 << 12)
    num_nodes = 400_000 if form == "npz" else 40_000
    draw = np.random.default_rng(0)
    label = draw.integers(0, 50, num_nodes).astype(np.float32)
    label[draw.random(num_nodes) < 0.5] = np.nan
    raw = tmp_path / "ogbn_papers100M" / "raw"
    raw.mkdir(parents=True)
    if form == "npz":
        counts = {"num_nodes_list": np.array([num_nodes]), "num_edges_list": np.array([1])}
        np.savez(raw / "data.npz", edge_index=np.array([[0], [1]]), **counts)
        np.savez(raw / "node-label.npz", node_label=label[:, None])
    else:
        put(raw / "edge.csv.gz", [(0, 1)])
        put(raw / "num-node-list.csv.gz", [[num_nodes]])
        put(raw / "node-label.csv.gz", [[x] for x in label])
    split = [list(range(first, num_nodes, 3)) for first in range(3)]
    put_split(tmp_path / "ogbn_papers100M" / "split" / "time", *split)
    folder = tmp_path / "disk"
    folder.mkdir()
    tracemalloc.start()
    try:
        read = read_ogb_arrays("ogbn-papers100M", tmp_path, Arrays(folder))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if form == "npz":  # of CSV some thousand rows of text are looked at, whatever their number
        assert peak < num_nodes * 8
    fields = read.content.nodes["_N"]
    names = ["label", "train_mask", "val_mask", "test_mask"]
    assert all(isinstance(fields[name], np.memmap) for name in names)
    whole = from_ogb("ogbn-papers100M", tmp_path)
    assert whole.num_classes == read.num_classes == 50
    expected = np.where(np.isnan(label), -1, label)
    for name in names:
        assert np.array_equal(fields[name], whole.graph.ndata[name].numpy())
    assert np.array_equal(fields["label"], expected)
    assert [np.flatnonzero(fields[name]).tolist() for name in names[1:]] == split


def test_as_ogb_gives_it_to_users_of_dgl(tmp_path: Path) -> None:
    arxiv(tmp_path)
    dataset = DglNodePropPredDataset("ogbn-arxiv", tmp_path)
    (graph, labels), split = dataset[0], dataset.get_idx_split()
    assert (len(dataset), dataset.num_classes, graph.num_edges()) == (1, 3, 3)
    assert set(graph.ndata) == {"feat", "year"}
    assert labels.tolist() == [[2], [0], [1], [0], [2]]
    assert {k: v.tolist() for k, v in split.items()} == {
        "train": [0, 4],
        "valid": [1],
        "test": [2, 3],
    }
    assert set(dataset[0][0].ndata) == {"feat", "year"}  # as often as it is asked for
    with pytest.raises(IndexError, match=r"one graph, number 0 \(got 1\)"):
        dataset[1]
    mag(tmp_path)
    dataset = DglNodePropPredDataset("ogbn-mag", root=tmp_path)
    (graph, labels), split = dataset[0], dataset.get_idx_split()
    assert {k: v.tolist() for k, v in labels.items()} == {"paper": [[7], [3]]}
    assert {k: v.tolist() for k, v in split["valid"].items()} == {"paper": [1]}
    assert set(graph.nodes["paper"].data) == {"feat", "year"}
    assert set(graph.edges["writes"].data) == {"reltype"}


def test_typed_layout(tmp_path: Path) -> None:
    mag(tmp_path)
    data = from_ogb("ogbn-mag", tmp_path)
    g = data.graph
    assert (data.target, data.num_classes) == ("paper", 8)
    assert (g.num_nodes("author"), g.num_nodes("paper")) == (3, 2)
    assert [side.tolist() for side in g.edges(etype="writes")] == [[0, 2], [1, 0]]
    assert g.edges["writes"].data["edge_reltype"].tolist() == [0, 0]
    assert g.nodes["paper"].data["feat"].tolist() == [[1.5, 2.5], [0.5, 0.25]]
    assert data.node_ids("train").tolist() == [0]
    assert "feat" not in g.nodes["author"].data


def test_downloads_through_ogb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, root: str) -> None:
        asked.append((name, root))
        if name == "ogbn-arxiv":
            arxiv(Path(root))

    module = types.ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    assert from_ogb("ogbn-arxiv", tmp_path).num_classes == 3
    from_ogb("ogbn-arxiv", tmp_path)
    assert asked == [("ogbn-arxiv", str(tmp_path))], "a second read must not download again"
    with pytest.raises(ValueError, match="ogb was asked to download ogbn-other but left no"):
        from_ogb("ogbn-other", tmp_path)


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(ImportError, match=r'pip install "graphshard\[ogb\]"'):
        from_ogb("ogbn-products", tmp_path)
    with pytest.raises(ValueError, match=r"must be a node data set of OGB .* \(got 'ogbl-ppa'\)"):
        from_ogb("ogbl-ppa", tmp_path)
    arxiv(tmp_path)
    (tmp_path / "ogbn_arxiv" / "raw" / "edge.csv.gz").unlink()
    with pytest.raises(ValueError, match=r"edge\.csv\.gz is missing"):
        from_ogb("ogbn-arxiv", tmp_path)
    put(tmp_path / "ogbn_arxiv" / "raw" / "edge.csv.gz", [("a", "b")])
    with pytest.raises(ValueError, match=r"edge\.csv\.gz must hold numbers"):
        from_ogb("ogbn-arxiv", tmp_path)


def test_a_file_that_lost_all_its_bytes_is_named(tmp_path: Path) -> None:
    mag(tmp_path)
    files = [path for path in tmp_path.rglob("*.csv.gz") if path.name != "num-edge-list.csv.gz"]
    assert len(files) == 11
    for path in files:
        content = path.read_bytes()
        path.write_bytes(b"")
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}.* empty"):
            from_ogb("ogbn-mag", tmp_path)
        path.write_bytes(content)
    from_ogb("ogbn-mag", tmp_path)
