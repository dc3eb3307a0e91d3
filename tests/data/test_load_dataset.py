# SPDX-License-Identifier: Apache-2.0
"""load_dataset: the bundled graph, folders made here, and real ones where they are. No process.

Real folders are looked for in GRAPHSHARD_DATASETS, then beside the repository.
"""

from __future__ import annotations

import gzip
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from ogb_files import arxiv

from graphshard.data import NodeDataset, from_csv, from_parquet, load_dataset
from graphshard.data.prepare import read_dataset, read_graph, with_links
from graphshard.graph import Graph, from_scipy, graph, heterograph, remove_self_loop

DATASETS = Path(
    os.environ.get("GRAPHSHARD_DATASETS")
    or Path(__file__).resolve().parents[2].parent / "shared" / "datasets"
)


def real(name: str) -> Path:
    folder = DATASETS / name
    if not folder.is_dir():
        pytest.skip(f"no data set {name}: set GRAPHSHARD_DATASETS to the folder of data sets")
    return folder


def sizes(data: NodeDataset) -> list[int]:
    return [len(data.node_ids(split)) for split in ("train", "val", "test")]


# ------------------------------------------------------------------------------------------- cora


def test_cora_has_its_published_counts() -> None:
    cora = load_dataset("cora")
    g = cora.graph
    assert (g.num_nodes(), g.num_edges(), cora.num_classes) == (2708, 10556, 7)
    assert (cora.name, cora.target, cora.num_relations) == ("cora", "_N", 1)
    assert sizes(cora) == [140, 500, 1000]
    assert g.ndata["feat"].shape == (2708, 1433)
    assert g.ndata["feat"].dtype == torch.float32
    assert int((g.ndata["feat"] == 1).sum()) == int((g.ndata["feat"] != 0).sum()) == 49216
    assert torch.bincount(g.ndata["label"][cora.node_ids("train")]).tolist() == [20] * 7
    assert torch.bincount(g.ndata["label"]).tolist() == [351, 217, 418, 818, 426, 298, 180]
    src, dst = g.edges()
    assert g.has_edges_between(dst, src).all()
    assert (src != dst).all()


def test_cora_options() -> None:
    cora = load_dataset(
        "cora", row_normalize=True, add_self_loop=True, dtype=torch.float64, idtype=torch.int32
    )
    assert cora.graph.idtype == cora.node_ids("val").dtype == torch.int32
    assert cora.graph.num_edges() == 10556 + 2708
    assert remove_self_loop(cora.graph).num_edges() == 10556
    feat = cora.graph.ndata["feat"]
    assert feat.dtype == torch.float64
    torch.testing.assert_close(feat.sum(1), torch.ones(2708, dtype=torch.float64))
    assert load_dataset("cora", to_bidirected=True).graph.num_edges() == 10556
    assert "feat" not in load_dataset("cora", features=False).graph.ndata
    assert load_dataset("cora", dtype=torch.bfloat16).graph.ndata["feat"].dtype == torch.bfloat16


def test_cora_features_are_what_scipy_reads() -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    import graphshard.data

    folder = Path(graphshard.data.__file__).parent / "cora"
    matrix = sparse.load_npz(folder / "feat.npz").toarray()
    assert torch.equal(load_dataset("cora").graph.ndata["feat"], torch.from_numpy(matrix))
    assert "MIT" in (folder / "LICENSE.txt").read_text()


# ----------------------------------------------------------------------------------- folders here


def make_folder(path: Path, **arrays: Any) -> Path:
    path.mkdir(exist_ok=True)
    for name, value in arrays.items():
        if isinstance(value, str):
            (path / f"{name}.txt").write_text(value, encoding="utf-8")
        else:
            np.save(path / f"{name}.npy", np.asarray(value))
    return path


PLAIN: dict[str, Any] = {
    "edge_index": [[0, 1, 3], [1, 2, 3]],
    "feat": [[1.0, 3.0], [0.0, 0.0], [2.0, 2.0], [0.0, 5.0]],
    "label": [0, 2, -1, 1],
    "train_idx": [1, 0],
    "test_idx": [3],
}


def test_folder(tmp_path: Path) -> None:
    data = load_dataset(make_folder(tmp_path / "mine", **PLAIN), row_normalize=True)
    assert (data.name, data.num_classes, data.class_names) == ("mine", 3, ())
    assert data.graph.ndata["feat"].tolist() == [[0.25, 0.75], [0, 0], [0.5, 0.5], [0, 1]]
    assert [data.node_ids(s).tolist() for s in ("train", "val", "test")] == [[0, 1], [], [3]]
    assert data.graph.ndata["label"].tolist() == [0, 2, -1, 1]
    both = load_dataset(tmp_path / "mine", to_bidirected=True, add_self_loop=True).graph
    pairs = sorted(zip(*(side.tolist() for side in both.edges()), strict=True))
    assert pairs == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("stored", "kept", "sparse"),
    [
        *(
            (stored, kept, sparse)
            for stored, kept in (
                (np.float64, torch.float64),
                (np.float32, torch.float32),
                (np.uint8, torch.float32),
                (np.int16, torch.float32),
                (np.int32, torch.float64),
                (np.int64, torch.float64),
                (np.uint64, torch.float64),
            )
            for sparse in (False, True)
        ),
        (np.float16, torch.float16, False),  # which SciPy has no matrices of
        (np.bool_, torch.float32, True),  # a dense matrix holds numbers
    ],
)
def test_features_keep_their_digits(
    tmp_path: Path, stored: Any, kept: torch.dtype, sparse: bool
) -> None:
    kind = np.dtype(stored)
    largest: Any = 1600000000.25 if kind.itemsize > 2 else 1000.5
    if kind.kind in "iu":
        largest = min(2**53 - 1, np.iinfo(kind).max)
    matrix = np.array([[0, 1], [largest, 0], [0, 0], [1, 0]]).astype(kind)
    folder = make_folder(tmp_path / "mine", **{k: v for k, v in PLAIN.items() if k != "feat"})
    if sparse:
        scipy_sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
        scipy_sparse.save_npz(folder / "feat.npz", scipy_sparse.csr_matrix(matrix))
    else:
        np.save(folder / "feat.npy", matrix)
    feat = load_dataset(folder).graph.ndata["feat"]
    assert feat.dtype == kept
    assert feat.double().tolist() == matrix.astype(np.float64).tolist()
    narrow = load_dataset(folder, dtype=torch.float32).graph.ndata["feat"]
    assert narrow.dtype == torch.float32
    assert narrow.tolist() == matrix.astype(np.float32).tolist()


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
def test_features_that_no_real_number_stands_for(tmp_path: Path, kind: Any) -> None:
    matrix = np.full((4, 1), 2**53 + 1, dtype=kind)
    folder = make_folder(tmp_path / "mine", **{**PLAIN, "feat": matrix})
    with pytest.raises(ValueError, match=rf"integers beyond 2\^53 .*{2**53 + 1}"):
        load_dataset(folder)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("val_idx.npy", "did you mean valid_idx.npy?"),
        ("train_mask.npy", "did you mean train_idx.npy, which holds node ids: numpy.flatnonzero"),
        ("feats.npy", "did you mean feat.npy?"),
        ("x.npy", "did you mean feat.npy?"),
        ("labels.npy", "did you mean label.npy?"),
        ("y.npy", "did you mean label.npy?"),
        ("edge_weight.npy", "this layout has no features of edges"),
        ("edge_types.npy", "did you mean edge_type.npy?"),
        ("test_index.npy", "did you mean test_idx.npy?"),
        ("feat.csv", "did you mean feat.npy?"),
        ("train_idx_a.npy", "did you mean train_idx.npy?"),
        ("relations.txt", "belongs to edge_type.npy"),
        ("feat.npz", "feat.npz are both there"),
        ("label__user.npy", "did you mean label.npy?"),
    ],
)
def test_file_of_an_unknown_name(tmp_path: Path, name: str, meant: str) -> None:
    folder = make_folder(tmp_path / "mine", **PLAIN)
    assert load_dataset(folder).graph.num_nodes() == 4
    (folder / name).touch()
    with pytest.raises(ValueError, match=re.escape(meant)) as caught:
        load_dataset(folder)
    assert str(folder / name) in str(caught.value) or name == "feat.npz"
    if "did you mean" in meant:
        assert "The layout is edge_index.npy, edge_type.npy" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("feat__papers.npy", "did you mean feat__paper.npy?"),
        ("label__auther.npy", "did you mean label__author.npy?"),
        ("feat.npy", "did you mean feat__"),
        ("edge_type.npy", "did you mean"),
    ],
)
def test_file_of_an_unknown_type(tmp_path: Path, name: str, meant: str) -> None:
    folder = make_folder(tmp_path / "typed", edge_index__paper__by__author=[[0, 1], [1, 1]])
    (folder / name).touch()
    with pytest.raises(ValueError, match=re.escape(meant)) as caught:
        load_dataset(folder)
    assert str(folder / name) in str(caught.value)


def test_notes_beside_a_data_set(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine", **PLAIN)
    for name in ("README.md", "readme.txt", "LICENSE", ".hidden", "_SUCCESS", "paper.pdf"):
        (folder / name).touch()
    (folder / "parts").mkdir()
    assert load_dataset(folder).graph.num_nodes() == 4


def write_forms(folder: Path) -> dict[str, tuple[Path, str, Any]]:
    """One graph in forms that no data set has: path, the call that an error names, its result."""
    io = pytest.importorskip("scipy.io", reason="SciPy is not installed")
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    matrix = sparse.coo_matrix((np.ones(2), ([0, 1], [1, 2])), shape=(3, 3))
    tsv, gz, mtx, npz = (folder / f"a.{ending}" for ending in ("tsv", "csv.gz", "mtx", "npz"))
    tsv.write_text("src\tdst\n0\t1\n1\t2\n")
    with gzip.open(gz, "wt") as file:
        file.write("src,dst\n0,1\n1,2\n")
    io.mmwrite(mtx, matrix)
    sparse.save_npz(npz, matrix)
    (folder / "tables").mkdir()
    table = pyarrow.table({"src": [0, 1], "dst": [1, 2]})
    parquet.write_table(table, folder / "tables" / "part-0.parquet")
    return {
        "tsv": (tsv, f"from_csv({str(tsv)!r})", from_csv(tsv)),
        "csv.gz": (gz, f"from_csv({str(gz)!r})", from_csv(gz)),
        "mtx": (
            mtx,
            f"from_scipy(scipy.io.mmread({str(mtx)!r}))",
            from_scipy(io.mmread(mtx)),
        ),
        "npz": (
            npz,
            f"from_scipy(scipy.sparse.load_npz({str(npz)!r}))",
            from_scipy(sparse.load_npz(npz)),
        ),
        "parquet": (
            folder / "tables",
            f"from_parquet({str(folder / 'tables')!r})",
            from_parquet(folder / "tables"),
        ),
    }


@pytest.mark.parametrize("form", ["tsv", "csv.gz", "mtx", "npz", "parquet"])
def test_what_is_no_folder_of_arrays_is_told_how_it_is_read(tmp_path: Path, form: str) -> None:
    path, call, by_that_call = write_forms(tmp_path)[form]
    with pytest.raises(ValueError, match=re.escape(f"graphshard.{call} reads it")) as caught:
        load_dataset(path)
    assert str(path) in str(caught.value)
    assert [side.tolist() for side in by_that_call.edges()] == [[0, 1], [1, 2]]
    if form == "npz":
        with pytest.raises(ValueError, match=re.escape(f"graphshard.{call} reads it")):
            read_dataset(str(path))
    else:
        read = read_dataset(str(path)).graph
        assert [side.tolist() for side in read.edges()] == [[0, 1], [1, 2]]


def test_raw_folders_are_told_how_they_are_read(tmp_path: Path) -> None:
    ogb, planetoid = tmp_path / "ogbn_arxiv", tmp_path / "planetoid"
    (ogb / "raw").mkdir(parents=True)
    planetoid.mkdir()
    (planetoid / "ind.citeseer.x").touch()
    for folder, call in (
        (ogb, f"data.from_ogb('ogbn-arxiv', root={str(tmp_path)!r})"),
        (planetoid, f"dgl.data.CitationGraphDataset('citeseer', raw_dir={str(planetoid)!r})[0]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"graphshard.{call}")):
            load_dataset(folder)
    with pytest.raises(ValueError, match=r"num-node-list\.csv\.gz is missing"):
        read_dataset(str(ogb))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_dataset(str(tmp_path / "none.tsv"))


def test_a_folder_of_the_layout_of_ogb_may_have_any_name(tmp_path: Path) -> None:
    arxiv(tmp_path)
    of_arxiv = read_dataset(str(tmp_path / "ogbn_arxiv"))
    for name in ("ogb", "my-papers_2"):
        (tmp_path / "ogbn_arxiv").rename(tmp_path / name)
        read = read_dataset(str(tmp_path / name))
        assert torch.equal(read.graph.ndata["feat"], of_arxiv.graph.ndata["feat"])
        assert [side.tolist() for side in read.graph.edges()] == [[0, 3, 1], [1, 1, 2]]
        assert read.node_ids("test").tolist() == [2, 3]
        (tmp_path / name).rename(tmp_path / "ogbn_arxiv")


def test_names_of_a_table_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "names.csv"
    path.write_text("src,dst\nada,bob\n")
    assert read_dataset(str(path)).graph.num_nodes() == 2
    with pytest.raises(ValueError, match=r"graphshard.from_csv\(..., relabel=True\)"):
        read_graph(path)


def test_folder_of_edges_alone(tmp_path: Path) -> None:
    data = load_dataset(make_folder(tmp_path / "mine", edge_index=np.array([[0], [5]])))
    assert (data.graph.num_nodes(), data.num_classes, sizes(data)) == (6, 0, [0, 0, 0])
    assert data.graph.ndata["label"].tolist() == [-1] * 6


def test_folder_with_published_splits(tmp_path: Path) -> None:
    masks = np.array([[1, 0, 0, 1], [0, 1, 0, 0]], dtype=bool)
    folder = make_folder(tmp_path / "mine", **PLAIN, train_masks=masks, test_masks=~masks)
    assert load_dataset(folder).node_ids("train").tolist() == [0, 1]
    data = load_dataset(folder, split=1)
    assert data.node_ids("train").tolist() == [1]
    assert data.node_ids("test").tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match=r"split must be in \[0, 2\) .* \(got 2\)"):
        load_dataset(folder, split=2)


def test_knowledge_graph(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "kg",
        edge_index=[[0, 1, 2, 0], [2, 2, 0, 2]],
        edge_type=[0, 0, 1, 1],
        relation_ptr=[0, 2, 4],
        label=[0, 1, -1],
        train_idx=[0, 1],
        relations="http://x.org/ns#knows\nhttp://x.org/ns#likes\n",
        classes="bad\ngood\n",
    )
    data = load_dataset(folder)
    assert data.graph.edata["etype"].tolist() == [0, 0, 1, 1]
    assert data.graph.edata["norm"].tolist() == [[0.5], [0.5], [1.0], [1.0]]
    assert data.class_names == ("bad", "good")
    assert data.num_relations == 2
    twice = load_dataset(folder, add_inverse=True, dtype=torch.float64)
    assert [side.tolist() for side in twice.graph.edges()] == [
        [0, 1, 2, 0, 2, 2, 0, 2],
        [2, 2, 0, 2, 0, 1, 2, 0],
    ]
    assert twice.graph.edata["etype"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert twice.graph.edata["norm"].squeeze(1).tolist() == [0.5, 0.5, 1, 1, 1, 1, 1, 1]
    assert twice.relation_names[2:] == ("rev_http://x.org/ns#knows", "rev_http://x.org/ns#likes")
    typed = load_dataset(folder, as_typed=True, add_inverse=True)
    assert typed.target == "entity"
    assert typed.graph.etypes == ["ns-knows", "ns-likes", "rev_ns-knows", "rev_ns-likes"]
    assert [side.tolist() for side in typed.graph.edges(etype="rev_ns-likes")] == [[0, 2], [2, 0]]
    assert typed.node_ids("train").tolist() == [0, 1]


def test_typed_folder(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "typed",
        edge_index__paper__by__author=[[0, 1], [1, 1]],
        edge_index__paper__in__venue=np.zeros((2, 0), dtype=np.int32),
        feat__paper=np.ones((3, 2), dtype=np.float32),
        label__author=[1, 0],
        train_idx_5=[0],
        node_types="author\t2\npaper\t3\nvenue\t4\n",
    )
    data = load_dataset(folder, add_inverse=True, split=5)
    g = data.graph
    assert [g.num_nodes(t) for t in ("author", "paper", "venue")] == [2, 3, 4]
    assert data.target == "author"
    assert g.num_edges(("author", "rev_by", "paper")) == 2
    assert g.nodes["paper"].data["feat"].shape == (3, 2)
    assert data.node_ids("train").tolist() == [0]
    with pytest.raises(ValueError, match=r"has no split 7; it has \['5'\]"):
        load_dataset(folder, split=7)
    with pytest.raises(ValueError, match="for graphs without relations"):
        load_dataset(folder, to_bidirected=True)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "transposed": ({"edge_index": [[0, 1], [1, 2], [2, 3]]}, r"must be \[2, num_edges\]"),
    "negative": ({"edge_index": [[0, -1], [0, 1]]}, r"ids from 0 \(edge 1 is \[-1  1\]\)"),
    "fractions": ({"edge_index": [[0.5], [1.0]]}, "must hold integers in 2 dimension"),
    "objects": ({"label": np.array([None, 1], dtype=object)}, "cannot be read as a plain array"),
    "too few labels": ({"label": [0, 1]}, "the number of nodes of type '_N' must be one"),
    "too few nodes": ({"feat": [[1.0]], "label": [0]}, "an edge names node 3"),
    "split": ({"train_idx": [4]}, r"node ids in \[0, 4\) \(got 4 to 4\)"),
    "edge types": ({"edge_type": [0]}, "a relation id from 0 for each of the 3 edges"),
    "pointer": ({"edge_type": [0, 0, 1], "relation_ptr": [0, 1, 3]}, "sorted by relation"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_folders(tmp_path: Path, case: str) -> None:
    arrays, message = BAD[case]
    folder = make_folder(tmp_path / "bad", **(PLAIN | arrays))
    with pytest.raises(ValueError, match=message) as caught:
        load_dataset(folder)
    assert str(folder) in str(caught.value)


def test_damaged_features(tmp_path: Path) -> None:
    arrays = {name: value for name, value in PLAIN.items() if name != "feat"}
    folder = make_folder(tmp_path / "bad", **arrays)
    good: dict[str, Any] = {
        "data": np.ones(2, dtype=np.float32),
        "indices": np.array([0, 2]),
        "indptr": np.array([0, 1, 1, 2, 2]),
        "shape": np.array([4, 3]),
    }
    np.savez(folder / "feat.npz", **good)
    assert load_dataset(folder).graph.ndata["feat"].tolist()[2] == [0, 0, 1]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"indices": np.array([0, 3])}, r"columns must be in \[0, 3\)"),
        ({"indptr": np.array([0, 2, 1, 2, 2])}, "indptr must ascend from 0 to 2"),
        ({"indptr": np.array([0, 2])}, "2 row pointers"),
    ]
    for change, message in changes:
        np.savez(folder / "feat.npz", **(good | change))
        with pytest.raises(ValueError, match=message):
            load_dataset(folder)
    np.savez(folder / "feat.npz", data=good["data"])
    with pytest.raises(ValueError, match=r"missing: \['indices', 'indptr', 'shape'\]"):
        load_dataset(folder)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"give one of \['cora'\]"):
        load_dataset(tmp_path / "none")
    with pytest.raises(ValueError, match="has neither edge_index.npy nor"):
        load_dataset(make_folder(tmp_path / "empty"))
    with pytest.raises(ValueError, match="add_inverse and as_typed are for graphs with relations"):
        load_dataset("cora", add_inverse=True)
    with pytest.raises(ValueError, match=re.escape("would take 0.0 GB as dense torch.float32")):
        load_dataset("cora", max_feature_bytes=1000)
    with pytest.raises(ValueError, match="has no split 3"):
        load_dataset("cora", split=3)
    with pytest.raises(TypeError, match=r"dtype must be a floating point dtype"):
        load_dataset("cora", dtype=torch.int64)
    with pytest.raises(TypeError, match=r"idtype must be torch\.int32 or torch\.int64"):
        load_dataset("cora", idtype=torch.int16)


# ---------------------------------------------------------------------------------- real folders

# name: nodes, edges, classes, [train, val, test]; the published counts
PUBLISHED: dict[str, tuple[int, int, int, list[int]]] = {
    "cora": (2708, 10556, 7, [140, 500, 1000]),
    "citeseer": (3327, 9104, 6, [120, 500, 1000]),
    "pubmed-partial": (19717, 88648, 3, [60, 500, 1000]),
    "nell": (65755, 251550, 186, [105, 0, 969]),
    "amazon-computers": (13752, 287209, 10, [200, 300, 12881]),
    "coauthor-physics": (34493, 495924, 5, [100, 150, 34243]),
    "tolokers": (11758, 519000, 2, [5879, 2939, 2940]),
    "aifb": (8285, 29043, 4, [140, 0, 36]),
    "mutag": (23644, 74227, 2, [272, 0, 68]),
    "cnr-2000": (325557, 3216152, 0, [0, 0, 0]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    data = load_dataset(real(name), features=False)
    counts = (data.graph.num_nodes(), data.graph.num_edges(), data.num_classes, sizes(data))
    assert counts == PUBLISHED[name]


def test_both_directions_have_their_published_counts() -> None:
    computers = load_dataset(real("amazon-computers"), features=False, to_bidirected=True)
    assert computers.graph.num_edges() == 491722
    tolokers = load_dataset(real("tolokers"), to_bidirected=True, split=7)
    assert tolokers.graph.num_edges() == 1038000
    assert sizes(tolokers) == [5879, 2939, 2940]
    assert tolokers.graph.ndata["feat"].shape == (11758, 10)


@pytest.mark.parametrize(("name", "relations"), [("aifb", 45), ("mutag", 23)])
def test_knowledge_graphs_have_their_published_counts(name: str, relations: int) -> None:
    one = load_dataset(real(name))
    both = load_dataset(real(name), add_inverse=True, dtype=torch.float64)
    assert (one.num_relations, both.num_relations) == (relations, 2 * relations)
    g = both.graph
    assert g.num_edges() == 2 * one.graph.num_edges()
    assert g.edata["etype"].dtype == torch.int64
    # the norms of one relation into one node add up to 1
    key = g.edges()[1] * both.num_relations + g.edata["etype"]
    _, group = torch.unique(key, return_inverse=True)
    total = torch.zeros(int(group.max()) + 1, dtype=torch.float64)
    total.index_add_(0, group, g.edata["norm"].squeeze(1))
    torch.testing.assert_close(total, torch.ones_like(total))
    typed = load_dataset(real(name), as_typed=True).graph
    assert len(typed.etypes) == relations
    assert typed.num_edges() == one.graph.num_edges()


def test_norm_is_dgls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dgl = pytest.importorskip("dgl", reason="DGL has no release for this Python")
    data = load_dataset(real("aifb"), add_inverse=True)
    etype = data.graph.edata["etype"]
    src, dst = data.graph.edges()
    for r in (0, 39, 84):
        chosen = etype == r
        oracle = dgl.graph((src[chosen], dst[chosen]), num_nodes=8285)
        norm = data.graph.edata["norm"][chosen].squeeze(1)
        torch.testing.assert_close(norm, dgl.norm_by_dst(oracle))


@pytest.mark.parametrize(("split", "train"), [(None, 80), (20, 80), (40, 160), (60, 240)])
def test_dblp(split: int | None, train: int) -> None:
    data = load_dataset(real("dblp-heco"), split=split, features=split is None)
    g = data.graph
    assert {t: g.num_nodes(t) for t in g.ntypes} == {
        "author": 4057,
        "paper": 14328,
        "conf": 20,
        "term": 7723,
    }
    assert [g.num_edges(e) for e in ("pa", "pc", "pt")] == [19645, 14328, 85810]
    assert (data.target, data.num_classes, sizes(data)) == ("author", 4, [train, 1000, 1000])
    if split is None:
        widths = {t: g.nodes[t].data["feat"].shape[1] for t in ("author", "paper", "term")}
        assert widths == {"author": 334, "paper": 4231, "term": 50}
        assert "feat" not in g.nodes["conf"].data


def test_huge_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"would take 16.1 GB .* pass features=False"):
        load_dataset(real("nell"))


# ----------------------------------------------------------------------------------------- links


def test_fb15k_237_has_its_published_counts() -> None:
    data = read_dataset(os.fspath(real("fb15k-237")))
    g = data.graph
    assert (g.num_nodes(), g.num_edges(), data.num_relations) == (14541, 620232, 474)
    counts = [int(g.edata[f"{split}_mask"].sum()) for split in ("train", "val", "test")]
    assert counts == [272115, 17535, 20466]
    assert (data.links, data.reverse_of) == ((("_N", "_E", "_N"),),) * 2


FACTS = {
    "train": [[0, 1, 2], [2, 0, 1], [4, 1, 0], [3, 2, 3]],
    "valid": [[2, 1, 0]],
    "test": [[1, 0, 2], [0, 2, 3]],
}


def folder_of_facts(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, facts in (FACTS | changed).items():
        np.save(folder / f"{name}.npy", np.array(facts, np.int32).reshape(-1, 3))
    (folder / "README.md").write_text("facts")
    return folder


def test_facts_are_edges_with_splits(tmp_path: Path) -> None:
    folder = folder_of_facts(tmp_path / "facts")
    facts = np.array([fact for of_split in FACTS.values() for fact in of_split])
    plain = load_dataset(folder)
    assert [end.tolist() for end in plain.graph.edges()] == facts[:, [0, 2]].T.tolist()
    assert plain.graph.edata["etype"].tolist() == facts[:, 1].tolist()
    assert plain.graph.edata["test_mask"].tolist() == [False] * 5 + [True] * 2
    assert plain.reverse_of == (None,)
    both = load_dataset(folder, add_inverse=True)
    src, dst = both.graph.edges()
    assert torch.equal(src[7:], dst[:7])
    assert torch.equal(both.graph.edata["etype"][7:], both.graph.edata["etype"][:7] + 3)
    assert both.graph.edata["val_mask"].nonzero().tolist() == [[4]]
    typed = load_dataset(folder, as_typed=True, add_inverse=True)
    names = [f"relation_{r}" for r in range(3)]
    assert [etype[1] for etype in typed.links] == names
    assert [etype[1] for etype in typed.reverse_of if etype] == [f"rev_{name}" for name in names]
    for number, etype in enumerate(typed.links):
        rows = facts[facts[:, 1] == number]
        assert [end.tolist() for end in typed.graph.edges(etype=etype)] == rows[
            :, [0, 2]
        ].T.tolist()
        mask = (facts[:, 1] == number).nonzero()[0] < 4
        assert typed.graph.edges[etype].data["train_mask"].tolist() == mask.tolist()
    (folder / "entities.txt").write_text("\n".join("abcdefg"))
    assert load_dataset(folder).graph.num_nodes() == 7


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"train": [[0, -1, 2]]}, r"train.npy must be \[num_facts, 3\].*-1"),
        ({"test": [[0, 99999, 2]]}, "relation ids below"),
        ({"valid": [[2**30, 0, 1]]}, "calls for"),
    ],
)
def test_wrong_facts_are_one_line(changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text) as error:
        load_dataset(folder_of_facts(tmp_path, **changed))
    assert "\n" not in str(error.value)


def test_another_file_among_facts_is_named(tmp_path: Path) -> None:
    (folder_of_facts(tmp_path) / "dev.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"dev.npy is no file of a folder of facts"):
        load_dataset(tmp_path)


def test_edges_of_any_data_set_can_be_links() -> None:
    cora = with_links(load_dataset("cora", add_self_loop=True))
    src, dst = (end.numpy() for end in cora.graph.edges())
    frame = pd.DataFrame({"lo": np.minimum(src, dst), "hi": np.maximum(src, dst)})
    for split in ("train", "val", "test"):
        frame[split] = cora.graph.edata[f"{split}_mask"].numpy()
    loops = frame["lo"] == frame["hi"]
    assert not frame.loc[loops, ["train", "val", "test"]].any(axis=None)
    of_pair = frame[~loops].groupby(["lo", "hi"])[["train", "val", "test"]]
    assert (of_pair.min() == of_pair.max()).all(axis=None)
    assert (of_pair.max().sum(axis=1) == 1).all()
    assert of_pair.max().sum().tolist() == [4486, 264, 528]  # of 5278: 85, 5 and 10 %
    assert cora.links == cora.reverse_of == (("_N", "_E", "_N"),)
    assert with_links(cora) is cora
    assert not torch.equal(
        with_links(load_dataset("cora"), seed=1).graph.edata["val_mask"],
        with_links(load_dataset("cora")).graph.edata["val_mask"],
    )


def test_links_of_graphs_with_relations(tmp_path: Path) -> None:
    etypes = [("a", "to", "b"), ("a", "with", "a"), ("b", "rev_to", "a")]
    src, dst = torch.arange(40) % 10, torch.arange(40) // 4
    ends = {etypes[0]: (src, dst), etypes[1]: (src, (src + dst) % 10), etypes[2]: (dst, src)}
    data = with_links(NodeDataset.from_graph(heterograph(ends), target="a"))
    assert dict(zip(data.links, data.reverse_of, strict=True)) == {
        etypes[0]: etypes[2],
        etypes[1]: None,
    }
    assert not any(name.endswith("mask") for name in data.graph.edges[etypes[2]].data)
    folder = folder_of_facts(tmp_path / "facts")
    np.save(folder / "edge_index.npy", np.stack([src.numpy(), dst.numpy()]))
    np.save(folder / "edge_type.npy", np.arange(40) % 2)
    for name in FACTS:
        (folder / f"{name}.npy").unlink()
    graph = with_links(read_dataset(os.fspath(folder))).graph
    chosen = sum(graph.edata[f"{split}_mask"].int() for split in ("train", "val", "test"))
    assert torch.equal(
        chosen > 0, (graph.edata["etype"] < 2) & (graph.edges()[0] != graph.edges()[1])
    )


# ----------------------------------------------------------------------------------- NodeDataset


def test_data_set_of_a_graph() -> None:
    g = graph(([0, 1], [1, 2]))
    g.ndata["label"] = torch.tensor([0, 4, 1])
    data = NodeDataset.from_graph(g, name="mine")
    assert (data.num_classes, data.target, sizes(data)) == (5, "_N", [0, 0, 0])
    assert "train_mask" not in g.ndata, "the graph that was given must stay as it was"
    several = graph(([0, 1], [1, 2]))
    several.ndata["label"] = torch.rand(3, 6)
    assert NodeDataset.from_graph(several).num_classes == 6
    typed = heterograph({("a", "r", "b"): ([0], [0])})
    with pytest.raises(ValueError, match="2 node types could be it"):
        NodeDataset.from_graph(typed)
    typed.nodes["b"].data["label"] = torch.tensor([-1])
    data = NodeDataset.from_graph(typed)
    assert (data.target, data.num_classes, data.num_relations) == ("b", 0, 1)
    with pytest.raises(ValueError, match="split must be one of"):
        data.node_ids("valid")


def masked(**fields: Any) -> Graph:
    g = graph(([0], [1]))
    empty = torch.zeros(2, dtype=torch.bool)
    base = {"label": torch.tensor([0, 1]), "train_mask": empty, "val_mask": empty}
    for name, value in {**base, "test_mask": empty, **fields}.items():
        g.ndata[name] = value
    return g


def test_data_set_checks_its_graph() -> None:
    options: dict[str, Any] = {"name": "x", "num_classes": 2, "target": "_N"}
    NodeDataset(graph=masked(), **options)
    with pytest.raises(ValueError, match="target must be a node type"):
        NodeDataset(graph=masked(), **(options | {"target": "user"}))
    with pytest.raises(TypeError, match="train_mask must be a bool vector"):
        NodeDataset(graph=masked(train_mask=torch.zeros(2)), **options)
    with pytest.raises(ValueError, match="num_classes must not be negative"):
        NodeDataset(graph=masked(), **(options | {"num_classes": -1}))
    with pytest.raises(ValueError, match=r"missing: \['label'"):
        NodeDataset(graph=graph(([0], [1])), **options)


def test_rows_of_some_types_are_normalised(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "typed",
        edge_index__a__to__b=[[0, 1], [1, 0]],
        feat__a=[[1.0, 3.0], [0.0, 2.0]],
        feat__b=[[-1.0, 1.5], [4.0, 4.0]],
        label__a=[0, 1],
        train_idx=[0],
    )
    g = load_dataset(folder, row_normalize=("a",)).graph
    assert g.nodes["a"].data["feat"].tolist() == [[0.25, 0.75], [0, 1]]
    assert g.nodes["b"].data["feat"].tolist() == [[-1.0, 1.5], [4.0, 4.0]]


def test_word_counts_of_dblp_are_normalised_and_word_vectors_are_not() -> None:
    real("dblp-heco")
    nodes = read_dataset(str(DATASETS / "dblp-heco")).graph.nodes
    for ntype in ("author", "paper"):
        sums = nodes[ntype].data["feat"].sum(1)
        torch.testing.assert_close(sums[sums > 0], torch.ones_like(sums[sums > 0]))
    plain = np.load(DATASETS / "dblp-heco" / "feat__term.npy")
    assert np.array_equal(nodes["term"].data["feat"].numpy(), plain)


def test_features_of_some_nodes_alone_are_said_to_be_left_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "some", edge_index=[[0, 1], [1, 0]], label=[0, 1])
    np.savez(Path(folder) / "feat_known.npz", data=np.ones(1))
    with pytest.warns(UserWarning, match="features of some nodes alone, in feat_known.npz"):
        assert not load_dataset(folder).graph.ndata.keys() & {"feat"}
    load_dataset(folder, features=False)
