# SPDX-License-Identifier: Apache-2.0
"""Data sets that DGL downloads, made of small files as they are published; DGL reads them too.

No processes. The names of the files, and what is in them, are the real ones; the numbers are drawn.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from torch import Tensor

from dgl_peer import dgl
from graphshard.dgl import DGLError, data, nn
from graphshard.dgl.data.utils import (
    check_sha1,
    download,
    extract_archive,
    get_download_dir,
    load_info,
    save_info,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # DGL leaves files open, and deprecates names


def folder_of(root: Path, name: str, url: str) -> Path:
    """Where DGL unpacks."""
    digest = hashlib.sha1(url.encode()).hexdigest()[:8]
    folder = root / f"{name}_{digest}"
    folder.mkdir(parents=True)
    return folder


# Ids, and what DGL's reorder_graph leaves behind.
LEFT = {dgl.NID, dgl.EID, "__orig__"}


def same(found: Any, wanted: Any) -> None:
    """Two items of data sets."""
    if isinstance(wanted, tuple | list):
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            same(mine, theirs)
    elif isinstance(wanted, Tensor | np.ndarray):
        mine, theirs = torch.as_tensor(found), torch.as_tensor(wanted)
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, check_dtype=False, equal_nan=True)
    elif isinstance(wanted, dgl.DGLGraph):
        assert found.canonical_etypes == wanted.canonical_etypes
        assert found.num_nodes() == wanted.num_nodes()
        for etype in wanted.canonical_etypes:
            mine, theirs = found.edges(etype=etype), wanted.edges(etype=etype)
            if set(wanted.edges[etype].data) <= LEFT:  # DGL's order by destination is not stable
                mine, theirs = ordered(*mine), ordered(*theirs)
            same(mine, theirs)
            assert_fields(found.edges[etype].data, wanted.edges[etype].data)
        for ntype in wanted.ntypes:
            assert_fields(found.nodes[ntype].data, wanted.nodes[ntype].data)
    else:
        assert found == wanted


def ordered(src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """The same edges, by destination, and then by source."""
    assert not len(dst) or src.dtype == dst.dtype
    order = (dst.long() * (int(src.max()) + 1 if len(src) else 1) + src).argsort(stable=True)
    return src[order], dst[order]


def assert_fields(found: Any, wanted: Any) -> None:
    theirs = set(wanted) - LEFT
    assert set(found) - LEFT == theirs
    for name in theirs:
        same(found[name], wanted[name])


def compare(name: str, *args: Any, **kwargs: Any) -> Any:
    """All items of a data set, in DGL and here; returns ours."""
    ours = getattr(data, name)(*args, **kwargs)
    theirs = getattr(dgl.data, name)(*args, **kwargs)
    assert len(ours) == len(theirs) or name.startswith("Fraud")
    for number in range(len(ours)):
        same(ours[number], theirs[number])
    for attribute in ("num_classes", "num_labels", "num_tasks", "num_nodes", "num_rels"):
        if hasattr(theirs, attribute):
            assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    return ours


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("CoauthorCSDataset", "coauthor_cs"),
        ("AmazonCoBuyPhotoDataset", "amazon_co_buy_photo"),
    ],
)
def test_benchmark_sets(kind: str, name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, name, f"https://data.dgl.ai/dataset/{name}.zip")
    adj = scipy.sparse.random(30, 30, 0.1, "csr", random_state=0)
    attr = scipy.sparse.random(30, 6, 0.3, "csr", random_state=1)
    parts = {
        f"{title}_{part}": getattr(matrix, part)
        for title, matrix in (("adj", adj), ("attr", attr))
        for part in ("data", "indices", "indptr", "shape")
    }
    names = np.array([f"word {i}" for i in range(6)], dtype=object)  # as the real files have
    np.savez(folder / f"{name}.npz", labels=RNG.integers(0, 5, 30), names=names, **parts)
    compare(kind, raw_dir=tmp_path)
    saved = getattr(data, kind)(raw_dir=tmp_path)  # DGL has saved by now
    (folder / f"{name}.npz").unlink()
    same(getattr(data, kind)(raw_dir=tmp_path)[0].ndata["feat"], saved[0].ndata["feat"])
    with pytest.raises(FileNotFoundError, match=rf"get https.*{name}.zip, and put {name}.npz into"):
        getattr(data, kind)(raw_dir=tmp_path, force_reload=True)


def test_wiki_cs(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "wiki_cs", "https://data.dgl.ai/dataset/wiki_cs.zip")
    masks = (RNG.random((20, 12)) < 0.3).tolist()
    stored = {
        "features": RNG.random((12, 3)).tolist(),
        "labels": RNG.integers(0, 10, 12).tolist(),
        "train_masks": masks,
        "val_masks": masks[::-1],
        "stopping_masks": masks,
        "test_mask": masks[0],
        "links": [sorted({(i + 1) % 12, int(RNG.integers(12))}) for i in range(12)],
    }
    (folder / "data.json").write_text(json.dumps(stored))
    compare("WikiCSDataset", raw_dir=tmp_path)


@pytest.mark.parametrize("name", ["flickr", "yelp"])
def test_graph_saint_sets(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, name, f"https://data.dgl.ai/dataset/{name}.zip")
    scipy.sparse.save_npz(folder / "adj_full.npz", scipy.sparse.random(20, 20, 0.2, "csr"))
    np.save(folder / "feats.npy", RNG.random((20, 4)))
    classes = {str(i): [i % 2, 1] if name == "yelp" else i % 7 for i in range(20)}
    (folder / "class_map.json").write_text(json.dumps(classes))
    roles = {"tr": [0, 5, 6], "va": [1, 2], "te": list(range(7, 20))}
    (folder / "role.json").write_text(json.dumps(roles))
    for reorder in (False, True):
        options = {"raw_dir": tmp_path, "reorder": reorder, "force_reload": True}
        compare(f"{name.capitalize()}Dataset", **options)


def test_fraud(tmp_path: Path) -> None:
    for name, file, url in (
        ("yelp", "YelpChi.mat", "FraudYelp"),
        ("amazon", "Amazon.mat", "FraudAmazon"),
    ):
        folder = folder_of(tmp_path, name, f"https://data.dgl.ai/dataset/{url}.zip")
        count = 3400 if name == "amazon" else 40
        nets = {
            net: scipy.sparse.random(count, count, 100 / count**2, "csc")
            for net in data.FraudDataset.relations[name]
        }
        last = scipy.sparse.coo_matrix(([1.0], ([count - 1], [0])), shape=(count, count))
        nets = {net: (matrix + last).tocsc() for net, matrix in nets.items()}
        features = scipy.sparse.random(count, 5, 0.3, "csc")
        label = RNG.integers(0, 2, (1, count))
        scipy.io.savemat(folder / file, {"features": features, "label": label, **nets})
        ours = data.FraudDataset(name, tmp_path, train_size=0.4, verbose=False)
        theirs = dgl.data.FraudDataset(name, str(tmp_path), train_size=0.4, verbose=False)
        same(ours[0], theirs[0])
    with pytest.raises(ValueError, match="name must be one of"):
        data.FraudDataset("other")


@pytest.mark.parametrize("reverse", [True, False])
def test_knowledge_graphs(reverse: bool, tmp_path: Path) -> None:
    url = "https://data.dgl.ai/dataset/FB15k-237.tgz"
    folder = folder_of(tmp_path, "FB15k-237", url)
    (folder / "entities.dict").write_text("".join(f"{i}\t/m/{i}\n" for i in range(9)))
    (folder / "relations.dict").write_text("".join(f"{i}\t/r/{i}\n" for i in range(4)))
    for file, count in (("train", 20), ("valid", 4), ("test", 5)):
        lines = [
            f"/m/{RNG.integers(9)}\t/r/{RNG.integers(3)}\t/m/{RNG.integers(9)}\n"
            for _ in range(count)
        ]
        (folder / f"{file}.txt").write_text("".join(lines))
    ours = compare("FB15k237Dataset", reverse, raw_dir=tmp_path, verbose=False)
    assert ours.url == url
    with pytest.raises(ValueError, match="must be wn18, FB15k or FB15k-237"):
        data.knowledge_graph.load_data("other")


def write_tu(folder: Path, name: str, kinds: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    owner = np.repeat([1, 2, 3, 4], [3, 5, 2, 4])
    edges = [(i + 1, j + 1) for i in range(14) for j in range(14) if owner[i] == owner[j] and i < j]
    content = {
        "A": [f"{a}, {b}" for a, b in edges],
        "graph_indicator": owner.tolist(),
        "graph_labels": [3, -1, 3, 7],
        "graph_attributes": ["0.5", "1.5", "-2", "3"],
        "node_labels": RNG.integers(2, 5, 14).tolist(),
        "node_attributes": [f"{a:.3f}, {b:.3f}" for a, b in RNG.random((14, 2))],
        "edge_labels": RNG.integers(1, 3, len(edges)).tolist(),
    }
    content["node_labels"][:3] = [2, 3, 4]
    for kind, lines in content.items():
        if kind in ("A", "graph_indicator", *kinds):
            (folder / f"{name}_{kind}.txt").write_text("\n".join(map(str, lines)) + "\n")


@pytest.mark.parametrize(
    "kinds",
    [
        ("graph_labels", "node_labels", "edge_labels"),
        ("graph_labels", "node_labels", "node_attributes"),
        ("graph_attributes", "node_attributes"),
    ],
)
def test_tu(kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # DGL adds one to a row of one number, and makes an int of it: NumPy has no more of that.
    monkeypatch.setattr(dgl.data.tu, "max", np.max, raising=False)
    url = "https://www.chrsmrrs.com/graphkerneldatasets/MUTAG.zip"
    write_tu(folder_of(tmp_path, "MUTAG", url) / "MUTAG", "MUTAG", kinds)
    compare("TUDataset", "MUTAG", raw_dir=str(tmp_path))


@pytest.mark.parametrize("kinds", [("graph_labels", "node_labels"), ("graph_labels",)])
def test_legacy_tu(kinds: tuple[str, ...], tmp_path: Path) -> None:
    url = dgl.data.LegacyTUDataset._url.format("MUTAG")
    write_tu(folder_of(tmp_path, "MUTAG", url) / "MUTAG", "MUTAG", kinds)
    assert data.LegacyTUDataset._url == dgl.data.LegacyTUDataset._url
    ours = data.LegacyTUDataset("MUTAG", raw_dir=tmp_path, max_allow_node=4)
    theirs = dgl.data.LegacyTUDataset("MUTAG", raw_dir=str(tmp_path), max_allow_node=4)
    assert len(ours) == len(theirs) == 3
    for number in range(3):
        assert_same_feat(ours[number][0], theirs[number][0])
        assert int(ours[number][1]) == int(theirs[number][1])
    assert ours.statistics() == tuple(int(n) for n in theirs.statistics())
    assert len(data.LegacyTUDataset("MUTAG", raw_dir=tmp_path)) == 4


def assert_same_feat(mine: Any, theirs: Any) -> None:
    same(mine.edges(), theirs.edges())
    same(mine.ndata["feat"], theirs.ndata["feat"])


@pytest.mark.parametrize("options", [{}, {"degree_as_nlabel": True}])
@pytest.mark.parametrize("self_loop", [True, False])
def test_gin(self_loop: bool, options: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "GINDataset" / "dataset" / "IMDBBINARY"
    folder.mkdir(parents=True)
    text = "3\n3 1\n0 2 1 2\n1 1 0\n0 1 0\n2 5\n2 1 1\n0 1 0\n1 1\n0 0\n"
    (folder / "IMDBBINARY.txt").write_text(text)
    ours = compare("GINDataset", "IMDBBINARY", self_loop, raw_dir=str(tmp_path), **options)
    assert (ours.dim_nfeats, ours.gclasses) == (ours[0][0].ndata["attr"].shape[1], 2)
    (folder / "IMDBBINARY.txt").write_text(text[:30])
    with pytest.raises(ValueError, match=r"IMDBBINARY\.txt cannot be read"):
        data.GINDataset("IMDBBINARY", self_loop, raw_dir=tmp_path)


def test_ppi(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "ppi", "https://data.dgl.ai/dataset/ppi.zip")
    owner = np.repeat(np.arange(21, 23), [5, 4])
    links = [{"source": i, "target": (i * 2) % 9} for i in range(9)]
    stored = {
        "directed": False,
        "multigraph": False,
        "graph": {},
        "nodes": [{"id": i} for i in range(9)],
        "links": links,
        "edges": links,  # newer releases of NetworkX look here
    }
    (folder / "valid_graph.json").write_text(json.dumps(stored))
    np.save(folder / "valid_feats.npy", RNG.random((9, 3)))
    np.save(folder / "valid_labels.npy", RNG.integers(0, 2, (9, 121)))
    np.save(folder / "valid_graph_id.npy", owner)
    compare("PPIDataset", "valid", raw_dir=str(tmp_path))
    legacy = data.LegacyPPIDataset("valid", tmp_path)
    assert [tuple(part.shape) for part in legacy[1][1:]] == [(4, 3), (4, 121)]
    del stored["edges"]
    (folder / "valid_graph.json").write_text(json.dumps(stored))
    assert data.PPIDataset("valid", tmp_path)[0].num_nodes() == 5
    with pytest.raises(ValueError, match="mode must be one of"):
        data.PPIDataset("other")


def test_qm9(tmp_path: Path) -> None:
    counts = np.array([3, 5, 2])
    arrays = {"N": counts, "R": RNG.random((10, 3)) * 4, "Z": RNG.integers(1, 9, 10)}
    np.savez(tmp_path / "qm9_eV.npz", mu=RNG.random(3), gap=RNG.random(3), **arrays)
    compare("QM9Dataset", ["gap", "mu"], 2.0, raw_dir=str(tmp_path))
    with pytest.raises(ValueError, match="no arrays other"):
        data.QM9Dataset(["other"], raw_dir=tmp_path)


@pytest.mark.parametrize("keys", [["mu", "A"], ["gap"]])
def test_qm9_edge(keys: list[str], tmp_path: Path) -> None:
    np.savez(
        tmp_path / "qm9_edge.npz",
        n_node=np.array([3, 2]), n_edge=np.array([4, 2]),
        node_attr=RNG.random((5, 4)), node_pos=RNG.random((5, 3)),
        edge_attr=RNG.random((6, 2)), src=np.array([0, 1, 1, 2, 0, 1]),
        dst=np.array([1, 0, 2, 1, 1, 0]), targets=RNG.random((2, 19)),
    )  # fmt: skip
    compare("QM9EdgeDataset", keys, raw_dir=str(tmp_path))
    every = data.QM9EdgeDataset(raw_dir=tmp_path)
    assert every[1][1].shape == (19,)
    assert every.num_tasks == 19


def test_sentences(tmp_path: Path) -> None:
    folder = tmp_path / "sst"
    folder.mkdir()
    (folder / "vocab.txt").write_text("it\nis\ngood\n")
    (folder / "tiny.txt").write_text(
        "(3 (2 It) (4 (2 is) (4 (3 Good) (1 !))))\n(1 (0 bad) (2 is))\n"
    )
    trees = data.SSTDataset("tiny", raw_dir=tmp_path)
    assert (len(trees), trees.vocab_size, trees.num_classes) == (2, 3, 5)
    g = trees[0]
    same(g.edges(), (torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 0, 2, 2, 4, 4])))
    assert g.ndata["x"].tolist() == [-1, 0, -1, 1, -1, 2, -1]
    assert g.ndata["y"].tolist() == [3, 2, 4, 2, 4, 3, 1]
    assert g.ndata["mask"].tolist() == [0, 1, 0, 1, 0, 1, 1]
    (tmp_path / "glove.txt").write_text("good 0.5 1\nIT 2 3\nis 1 1\n")
    (folder / "train.txt").write_text("(1 (0 bad) (2 is))\n")
    trained = data.SSTDataset("train", str(tmp_path / "glove.txt"), raw_dir=tmp_path)
    assert trained.pretrained_emb is not None
    assert trained.pretrained_emb.tolist() == [[2, 3], [1, 1], [0.5, 1]]
    (folder / "tiny.txt").write_text("(1 (0 bad) 2 is))\n")
    with pytest.raises(ValueError, match="this line is no tree"):
        data.SSTDataset("tiny", raw_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BAShapeDataset", {"num_base_nodes": 60, "num_motifs": 9}),
        ("BACommunityDataset", {"num_base_nodes": 40, "num_motifs": 4, "num_inter_edges": 30}),
        ("TreeCycleDataset", {"tree_height": 4, "num_motifs": 7, "perturb_ratio": 0.1}),
        ("TreeGridDataset", {"tree_height": 4, "num_motifs": 5}),
    ],
)
def test_motifs_are_drawn_as_dgl_draws_them(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path))
    if name == "BACommunityDataset":  # its halves have no seed in NetworkX's own generator
        halves = [networkx.barabasi_albert_graph(40, 4, seed=i) for i in range(2)] * 2
        monkeypatch.setattr(networkx, "barabasi_albert_graph", lambda *a: halves.pop(0))
    compare(name, **options, seed=3, raw_dir=str(tmp_path), verbose=False)


def test_too_many_random_edges_are_refused() -> None:
    with pytest.raises(ValueError, match="perturb_ratio cannot exceed"):
        data.BAShapeDataset(10, 2, 1, perturb_ratio=1e6)


def test_block_models_are_drawn_as_dgl_draws_them(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path))

    class Fixed(np.random.RandomState):
        def __init__(self) -> None:
            super().__init__(5)

    made = []
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "RandomState", Fixed)  # each graph of DGL's has a new one
        for module in (data, dgl.data):
            random.seed(1)
            np.random.seed(1)
            made.append(module.SBMMixtureDataset(3, 20, 2))
    ours, theirs = made
    for number in range(3):
        same(ours[number][0], theirs[number][0])
        assert ours[number][1].num_edges() == theirs[number][1].num_edges()
        same(ours[number][2], theirs[number][2])
        same(ours[number][4], theirs[number][4])
    mine, its = (s.collate_fn([s[0], s[1]]) for s in made)
    same(mine[0], its[0])
    same(mine[2:], its[2:])
    assert len(data.SBMMixtureDataset(2, 20, 2, pq=[[5.0, 1.0]] * 2)) == 2
    for wrong in ({"n_communities": 3}, {"pq": "other"}, {"pq": [[1, 1]] * 9}):
        with pytest.raises(ValueError, match="must"):
            data.SBMMixtureDataset(**{"n_graphs": 2, "n_nodes": 20, "n_communities": 2, **wrong})


# ------------------------------------------------------------------ adapters


class Graphs:
    """A data set of somebody else."""

    name = "graphs"

    def __init__(self, library: Any, count: int = 1, **masks: Any) -> None:
        self._graphs = []
        for number in range(count):
            g = library.graph(([0, 1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]))
            g.ndata["feat"] = torch.arange(10.0)[:, None] + number
            g.ndata["label"] = torch.arange(10) % 3
            self._graphs.append(g)
        vars(self).update(masks)

    def __getitem__(self, index: int) -> Any:
        g = self._graphs[index]
        return g if len(self._graphs) == 1 else (g, torch.tensor(index))

    def __len__(self) -> int:
        return len(self._graphs)


LIBRARIES = [("ours", __import__("graphshard.dgl").dgl), ("theirs", dgl)]


def adapted(name: str, folder: Path, *args: Any, count: int = 1, **masks: Any) -> list[Any]:
    made = []
    for side, library in LIBRARIES:
        np.random.seed(2)
        source = Graphs(library, count, **masks)
        made.append(getattr(library.data, name)(source, *args, save_dir=str(folder / side)))
    return made


def test_sets_of_nodes(tmp_path: Path) -> None:
    ours, theirs = adapted("AsNodePredDataset", tmp_path, [0.5, 0.3, 0.2])
    same(ours[0], theirs[0])
    for name in ("train_idx", "val_idx", "test_idx"):
        same(getattr(ours, name), getattr(theirs, name))
    assert ours.num_classes == theirs.num_classes == 3
    assert os.listdir(ours.save_path) == os.listdir(theirs.save_path)  # same names, same hash
    again = data.AsNodePredDataset(
        Graphs(LIBRARIES[0][1]), [0.5, 0.3, 0.2], save_dir=tmp_path / "ours"
    )
    same(again.train_idx, ours.train_idx)  # kept
    read = data.AsNodePredDataset(
        Graphs(LIBRARIES[0][1]), [0.5, 0.3, 0.2], save_dir=tmp_path / "theirs"
    )
    same(read.train_idx, theirs.train_idx)  # what DGL kept
    with pytest.raises(ValueError, match="no train_mask, val_mask and test_mask"):
        data.AsNodePredDataset(Graphs(LIBRARIES[0][1]), save_dir=tmp_path)
    cora = data.AsNodePredDataset(data.CoraGraphDataset(verbose=False), save_dir=tmp_path)
    assert (cora.num_classes, len(cora.train_idx)) == (7, 140)


def test_sets_of_edges(tmp_path: Path) -> None:
    ours, theirs = adapted("AsLinkPredDataset", tmp_path, [0.3, 0.4, 0.3], 2)
    for name in ("val_edges", "test_edges"):
        same(getattr(ours, name), getattr(theirs, name))
    same(ours.train_graph, theirs.train_graph)
    assert ours.feat_size == theirs.feat_size == 1
    again = data.AsLinkPredDataset(
        Graphs(LIBRARIES[0][1]), [0.3, 0.4, 0.3], 2, save_dir=tmp_path / "ours"
    )
    same(again.test_edges, theirs.test_edges)
    with pytest.raises(ValueError, match="give split_ratio"):
        data.AsLinkPredDataset(Graphs(LIBRARIES[0][1]), save_dir=tmp_path)


@pytest.mark.parametrize("many", [False, True])
def test_sets_of_edges_of_ogb(many: bool, tmp_path: Path) -> None:
    pairs = torch.tensor([[0, 1], [1, 2], [5, 6]])
    if many:  # as ogbl-citation2 has them: a source's wrong destinations in a row
        part = {"source_node": pairs[:, 0], "target_node": pairs[:, 1]}
        part["target_node_neg"] = torch.tensor([[4, 7], [8, 9], [0, 3]])
    else:
        part = {"edge": pairs, "edge_neg": torch.tensor([[3, 9], [4, 0]])}
    split = dict.fromkeys(("train", "valid", "test"), part)
    ours, theirs = adapted("AsLinkPredDataset", tmp_path, get_edge_split=lambda: split)
    for name in ("val_edges", "test_edges"):
        same(getattr(ours, name), getattr(theirs, name))


def test_sets_of_graphs(tmp_path: Path) -> None:
    ours, theirs = adapted("AsGraphPredDataset", tmp_path, [0.5, 0.375, 0.125], count=8)
    masks = {f"{n}_mask": torch.arange(8) % 3 == i for i, n in enumerate(("train", "val", "test"))}
    given = adapted("AsGraphPredDataset", tmp_path / "masks", count=8, **masks)
    for mine, its in ((ours, theirs), given):
        for name in ("train_idx", "val_idx", "test_idx"):
            same(getattr(mine, name), getattr(its, name))
        assert (mine.num_tasks, mine.node_feat_size, mine.edge_feat_size) == (1, 1, None)
    again = data.AsGraphPredDataset(
        Graphs(LIBRARIES[0][1], 8), [0.5, 0.375, 0.125], save_dir=tmp_path / "ours"
    )
    same(again.train_idx, ours.train_idx)
    with pytest.raises(DGLError, match="give split_ratio"):
        data.AsGraphPredDataset(Graphs(LIBRARIES[0][1], 3), save_dir=tmp_path)


def test_sets_of_nodes_that_a_data_set_has(tmp_path: Path) -> None:
    split = {
        "train": torch.tensor([7, 2]), "valid": torch.tensor([0]), "test": torch.tensor([9, 4, 5])
    }  # fmt: skip

    class Ogb(Graphs):
        def __getitem__(self, index: int) -> Any:
            g = self._graphs[index]
            return g, g.ndata["label"][:, None]

    for number, options in enumerate(({}, {"num_classes": 8})):
        made = []
        for side, library in LIBRARIES:
            source = Ogb(library, get_idx_split=lambda: split, **options)
            folder = str(tmp_path / f"{side}{number}")
            made.append(library.data.AsNodePredDataset(source, save_dir=folder))
        ours, theirs = made
        again = data.AsNodePredDataset(Ogb(LIBRARIES[0][1]), save_dir=tmp_path / f"ours{number}")
        same(ours[0], theirs[0])
        for mine in (ours, again):
            assert mine.num_classes == theirs.num_classes == options.get("num_classes", 3)
            assert len(mine) == len(theirs) == 1
            for name in ("train_idx", "val_idx", "test_idx"):
                same(getattr(mine, name), getattr(theirs, name))


def test_sets_of_nodes_of_one_type(tmp_path: Path) -> None:
    made = []
    for side, library in LIBRARIES:
        g = library.heterograph({("a", "r", "b"): ([0, 1, 2], [3, 4, 11])})
        g.nodes["b"].data["label"] = torch.arange(12) % 5
        source = Graphs(library)
        source._graphs = [g]
        np.random.seed(1)
        arguments = source, [0.3, 0.3, 0.3], "b"
        folder = str(tmp_path / side)
        made.append(library.data.AsNodePredDataset(*arguments, save_dir=folder))
        made.append(library.data.AsNodePredDataset(*arguments, save_dir=folder))
    for mine, its in zip(made[:2], made[2:], strict=True):
        assert mine.num_classes == its.num_classes == 5
        for name in ("train_idx", "val_idx", "test_idx"):
            same(getattr(mine, name), getattr(its, name))
        assert "train_mask" not in mine[0].nodes["a"].data
    source._graphs[0].nodes["b"].data.pop("label")
    with pytest.raises(ValueError, match="must have their classes in the field 'label'"):
        data.AsNodePredDataset(source, [0.3, 0.3, 0.3], "b", save_dir=tmp_path / "none")


@pytest.mark.parametrize("ratio", [[0.5, 0.2, 0.3], [0.4, 0.25, 0.2], [0.2, 0.1, 0.1]])
@pytest.mark.parametrize("neg_ratio", [(), (1,), (4,)])
def test_edges_that_there_are_not(
    ratio: list[float], neg_ratio: tuple[int, ...], tmp_path: Path
) -> None:
    made = []
    for side, library in LIBRARIES:
        edges = np.random.default_rng(3).integers(0, 15, (2, 90))
        g = library.graph(tuple(map(torch.from_numpy, edges)), num_nodes=15)
        g.ndata["feat"] = torch.arange(30.0).reshape(15, 2)
        source = Graphs(library)
        source._graphs = [g]
        np.random.seed(5)
        arguments = source, ratio, *neg_ratio
        folder = str(tmp_path / side)
        made.append(library.data.AsLinkPredDataset(*arguments, save_dir=folder))
        made.append(library.data.AsLinkPredDataset(*arguments, save_dir=folder))  # as kept
    ours, theirs = made[:2], made[2:]
    for mine, its in zip(ours, theirs, strict=True):
        for name in ("val_edges", "test_edges"):
            same(getattr(mine, name), getattr(its, name))
        same(mine.train_graph, its.train_graph)
        assert mine.num_nodes == its.num_nodes == 15
        assert mine.feat_size == its.feat_size == 2
        assert mine.neg_ratio == its.neg_ratio
        assert len(mine) == len(its) == 1
        same(mine[0], its[0])
    for absent in (ours[0].val_edges[1], ours[0].test_edges[1]):
        assert not bool((absent[0] == absent[1]).any())
        assert not bool(ours[0].g.has_edges_between(*absent).any())


def test_sets_of_graphs_that_a_data_set_has(tmp_path: Path) -> None:
    split = {name: torch.tensor([i, i + 3]) for i, name in enumerate(("train", "valid", "test"))}
    options = {"get_idx_split": lambda: split, "num_tasks": 4, "num_classes": 6}
    for number, (ratio, given) in enumerate(((None, options), ([0.4, 0.3, 0.1], options))):
        made = []
        for side, library in LIBRARIES:
            source = Graphs(library, 9, **given)
            for g in source._graphs:
                g.edata["feat"] = torch.zeros(9, 3)
            folder = str(tmp_path / f"{side}{number}")
            for _ in range(2):
                np.random.seed(7)
                made.append(library.data.AsGraphPredDataset(source, ratio, save_dir=folder))
        for mine, its in zip(made[:2], made[2:], strict=True):
            for name in ("train_idx", "val_idx", "test_idx"):
                same(getattr(mine, name), getattr(its, name))
            for name in ("num_tasks", "num_classes", "node_feat_size", "edge_feat_size"):
                assert getattr(mine, name) == getattr(its, name) is not None
            assert len(mine) == len(its) == 9
            same(mine[2], its[2])
    assert (
        adapted("AsGraphPredDataset", tmp_path, [0.5, 0.25, 0.25], count=8)[0].num_classes is None
    )


def test_what_was_kept_for_another_question_is_not_taken(tmp_path: Path) -> None:
    def kept(kind: str, **options: Any) -> Path:
        source = Graphs(LIBRARIES[0][1], 1 if kind != "AsGraphPredDataset" else 8)
        made = getattr(data, kind)(source, [0.5, 0.3, 0.2], save_dir=tmp_path / kind, **options)
        return Path(made.save_path) / f"info_{made.hash}.json"

    for kind in ("AsNodePredDataset", "AsLinkPredDataset", "AsGraphPredDataset"):
        file = kept(kind)
        info = json.loads(file.read_text())
        assert info["split_ratio"] == [0.5, 0.3, 0.2]
        wrong = [{"split_ratio": [0.5, 0.2, 0.3]}]
        wrong += [{"target_ntype": "b"}] if kind == "AsNodePredDataset" else []
        for change in wrong:
            file.write_text(json.dumps({**info, **change}))
            kept(kind)
            assert json.loads(file.read_text()) == info  # made anew
        assert kept(kind, force_reload=True) == file


# ------------------------------------------------------------------ files


def test_files_are_taken_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://somewhere.org/data.zip"
    with pytest.raises(FileNotFoundError, match=rf"get {url} and put it at {tmp_path}/data.zip"):
        download(url, tmp_path)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("inside/a.txt", "a")
    assert download(url, path=tmp_path) == str(tmp_path / "data.zip")
    monkeypatch.chdir(tmp_path)
    assert download(url) == "data.zip"
    digest = hashlib.sha1((tmp_path / "data.zip").read_bytes()).hexdigest()
    assert check_sha1("data.zip", digest)
    download(url, sha1_hash=digest)
    with pytest.raises(ValueError, match="does not have the SHA-1"):
        download(url, sha1_hash="0" * 40)
    extract_archive("data.zip", tmp_path / "out")
    assert (tmp_path / "out" / "inside" / "a.txt").read_text() == "a"
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path / "new"))
    assert os.path.isdir(get_download_dir())
    monkeypatch.setenv("DGL_REPO", "http://mirror")
    assert data.utils._get_dgl_url("a/b.zip") == "http://mirror/a/b.zip"


def test_archives(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with tarfile.open(tmp_path / "good.tgz", "w:gz") as archive:
        archive.add(tmp_path / "a.txt", "x/a.txt")
    extract_archive(tmp_path / "good.tgz", tmp_path / "good")
    assert (tmp_path / "good" / "x" / "a.txt").exists()
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as packed:
        packed.writestr("x/a.txt", "new")
    with gzip.open(tmp_path / "a.txt.gz", "wb") as single:
        single.write(b"single")
    for name, inside, text in (
        ("good.zip", "x/a.txt", "new"),
        ("good.tgz", "x/a.txt", "a"),
        ("a.txt.gz", "a.txt", "single"),
    ):
        folder = tmp_path / "good"
        (folder / inside).unlink(missing_ok=True)
        extract_archive(tmp_path / name, folder)  # it is there, and stays as it is
        assert not (folder / inside).exists()
        extract_archive(tmp_path / name, folder, overwrite=True)
        assert (folder / inside).read_text() == text
    with tarfile.open(tmp_path / "up.tar", "w") as archive:
        archive.add(tmp_path / "a.txt", "../a.txt")
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    with zipfile.ZipFile(tmp_path / "up.zip", "w") as packed:
        packed.writestr("../b.txt", "b")
    (tmp_path / "broken.zip").write_bytes(b"PK no")
    (tmp_path / "other.rar").write_bytes(b"")
    for name in ("up.tar", "link.tar", "up.zip", "broken.zip", "other.rar"):
        with pytest.raises(ValueError, match="cannot be unpacked"):
            extract_archive(tmp_path / name, tmp_path / f"of_{name}")
    with pytest.raises(FileNotFoundError, match="put the archive at"):
        extract_archive(tmp_path / "none.zip", tmp_path / "none")


def test_an_archive_of_dgls_is_unpacked(tmp_path: Path) -> None:
    write_tu(tmp_path / "packed", "PTC", ("graph_labels",))
    with zipfile.ZipFile(tmp_path / "PTC.zip", "w") as archive:
        for file in (tmp_path / "packed").iterdir():
            archive.write(file, f"PTC/{file.name}")
    assert len(data.TUDataset("PTC", raw_dir=tmp_path)) == 4


def test_info_may_have_tensors(tmp_path: Path) -> None:
    info = {
        "labels": torch.arange(6).reshape(2, 3).T,
        "feats": np.ones((2, 2), dtype=np.float32),
        "num": np.int64(3),
        "names": {0: "a", 2: "b"},
        "deep": [1, {"x": torch.tensor(1.5)}, (2, None)],
        "odd": {"__graphshard__": 1},
    }
    save_info(tmp_path / "info", info)
    found = load_info(tmp_path / "info")
    assert list(found) == list(info)
    assert torch.equal(found["labels"], info["labels"])
    assert isinstance(found["feats"], np.ndarray)
    assert found["feats"].dtype == np.float32
    assert (found["num"], found["names"], found["odd"]) == (3, info["names"], info["odd"])
    assert found["deep"][1]["x"] == 1.5
    assert found["deep"][2] == [2, None]
    for number in (0, 1):
        save_info(tmp_path / "plain", {"n": number})
    assert json.loads((tmp_path / "plain").read_text()) == {"n": 1}
    with pytest.raises(TypeError, match="info must be made of"):
        save_info(tmp_path / "no", {"x": object()})
    for content in (b"\x80\x04}.", b"[1]", b"", (tmp_path / "info").read_bytes()[:60]):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ValueError, match=r"is not what save_info writes"):
            load_info(tmp_path / "bad")


def test_scripts_name_their_data_set() -> None:
    parser = argparse.ArgumentParser()
    data.register_data_args(parser)
    g = data.load_data(parser.parse_args(["--dataset", "cora"]))[0]
    assert g.num_nodes() == data.citation_graph.load_cora(verbose=False)[0].num_nodes() == 2708
    with pytest.raises(ValueError, match="--dataset must be cora"):
        data.load_data(parser.parse_args(["--dataset", "other"]))
    assert data.citegrh.load_pubmed is data.load_pubmed
    assert nn.Identity is not None
