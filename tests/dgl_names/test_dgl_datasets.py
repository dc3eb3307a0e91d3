# SPDX-License-Identifier: Apache-2.0
"""Data sets under DGL's names, read from local files; DGL reads the same ones. No processes."""

from __future__ import annotations

import math
import os
import pickle  # to write files as others wrote them; nothing here reads one
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor

import graphshard.dgl
from dgl_peer import dgl
from graphshard.dgl import data
from graphshard.dgl.data.citation_graph import read_planetoid
from graphshard.dgl.data.rdf import read_triples
from graphshard.dgl.data.utils import load_info, save_info, split_dataset
from graphshard.graph import Graph, graph, save_graphs


def planetoid(folder: Path, name: str, protocol: int = 2, missing: int = 0) -> None:
    """The eight files, of a graph with some test nodes that no file has."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    num_known, num_test, width = 520, 12, 9
    words = (rng.random((num_known + num_test, width)) < 0.3).astype(np.float32)
    one_hot = np.eye(3, dtype=np.int32)[rng.integers(0, 3, num_known + num_test)]
    test = np.sort(rng.permutation(num_test + missing)[:num_test]) + num_known
    test[0], test[-1] = num_known, num_known + num_test + missing - 1
    lists: dict[int, list[int]] = defaultdict(list)
    for u in range(num_known + num_test + missing):
        lists[u] = [int(v) for v in rng.integers(0, num_known + num_test, 3)]
    parts = {
        "x": scipy.sparse.csr_matrix(words[:20]),
        "y": one_hot[:20],
        "allx": scipy.sparse.csr_matrix(words[:num_known]),
        "ally": one_hot[:num_known],
        "tx": scipy.sparse.csr_matrix(words[num_known:]),
        "ty": one_hot[num_known:],
        "graph": lists,
    }
    for part, value in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(value, protocol=protocol))
    test = rng.permutation(test)
    (folder / f"ind.{name}.test.index").write_text("\n".join(map(str, test)) + "\n")


def same(found: Graph, wanted: Any) -> None:
    assert [side.tolist() for side in found.edges()] == [side.tolist() for side in wanted.edges()]
    assert set(found.ndata) == set(wanted.ndata)
    for name, values in wanted.ndata.items():
        assert found.ndata[name].dtype == values.dtype, name
        assert torch.allclose(found.ndata[name].double(), values.double()), name


@pytest.mark.filterwarnings(  # DGL leaves a file open
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(("title", "missing"), [("cora_v2", 0), ("citeseer", 4)])
def test_planetoid_files_give_what_dgl_makes_of_them(
    title: str, missing: int, tmp_path: Path
) -> None:
    ours, theirs = (
        {
            "cora_v2": module.data.CoraGraphDataset,
            "citeseer": module.data.CiteseerGraphDataset,
        }[title]
        for module in (__import__("graphshard.dgl").dgl, dgl)
    )
    for reverse_edge in (True, False):
        root = tmp_path / str(reverse_edge)
        folder = root / os.path.basename(theirs_path(title, root))
        planetoid(folder, title, missing=missing)
        wanted = theirs(raw_dir=str(root), verbose=False, reverse_edge=reverse_edge)
        found = ours(raw_dir=root, verbose=False, reverse_edge=reverse_edge)
        same(found[0], wanted[0])
        assert found.num_classes == wanted.num_classes
        if reverse_edge:  # DGL has saved it meanwhile
            for path in folder.glob("ind.*"):
                path.unlink()
            same(ours(raw_dir=root, verbose=False)[0], wanted[0])


def theirs_path(title: str, root: Path) -> str:
    """Where DGL looks for the files of a data set."""
    base = dgl.data.dgl_dataset.DGLBuiltinDataset
    url = dgl.data.utils._get_dgl_url(f"dataset/{title}.zip")
    blank = base.__new__(base)
    blank._name, blank._url, blank._raw_dir = title, url, str(root)
    return str(blank.raw_path)


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_planetoid_files_of_any_protocol(protocol: int, tmp_path: Path) -> None:
    planetoid(tmp_path, "cora", protocol)
    planetoid(tmp_path / "two", "cora", 2)
    for part in ("allx", "ty", "graph"):
        folders = tmp_path, tmp_path / "two"
        found, wanted = (read_planetoid(folder / f"ind.cora.{part}") for folder in folders)
        if part == "allx":
            found, wanted = found.toarray(), wanted.toarray()
        assert np.array_equal(found, wanted) if part != "graph" else found == wanted


def test_files_as_python_2_wrote_them(tmp_path: Path) -> None:
    raw = np.array([[1, 0], [0, 1], [1, 0]], dtype="<i4").tobytes()
    text = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b"
        b"\x87Rq\x03(K\x01K\x03K\x02\x86cnumpy\ndtype\nq\x04U\x02i4K\x00K\x01\x87Rq\x05(K\x03U\x01<"
        b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U" + bytes([len(raw)]) + raw + b"tb."
    )
    (tmp_path / "y").write_bytes(text)
    assert read_planetoid(tmp_path / "y").tolist() == [[1, 0], [0, 1], [1, 0]]


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/graphshard-planetoid-was-run",)


def test_what_is_no_planetoid_file_is_refused_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "ind.cora.x"
    hostile = [Hostile(), {0: [Hostile()]}, np.array([Hostile()], dtype=object), "x", {0: ["x"]}]
    for value in hostile:
        for protocol in (0, 2, 4):
            path.write_bytes(pickle.dumps(value, protocol=protocol))
            with pytest.raises(ValueError, match="is not a Planetoid file that can be read"):
                read_planetoid(path)
    assert not os.path.exists("/tmp/graphshard-planetoid-was-run")


def test_damaged_planetoid_files_are_refused(tmp_path: Path, run_all: bool) -> None:
    planetoid(tmp_path, "cora")
    rng, path = random.Random(0), tmp_path / "damaged"
    for part in ("y", "tx", "graph"):
        whole = (tmp_path / f"ind.cora.{part}").read_bytes()
        for _ in range(5000 if run_all else 150):
            text = bytearray(whole)
            for _ in range(rng.choice([1, 1, 4])):
                text[rng.randrange(min(len(text), 600))] = rng.randrange(256)
            path.write_bytes(text[: rng.randrange(len(text))] if rng.random() < 0.3 else text)
            try:
                read_planetoid(path)
            except ValueError as error:
                assert "is not a Planetoid file" in str(error)


AIFB = """<http://www.aifb.uni-karlsruhe.de/Personen/viewPerson/id1instance> <http://swrc.ontoware.org/ontology#name> "Ann \\u00e9 \\"x\\"" .
<http://www.aifb.uni-karlsruhe.de/Publikationen/viewPublikation/id7instance> <http://swrc.ontoware.org/ontology#author> <http://www.aifb.uni-karlsruhe.de/Personen/viewPerson/id1instance> .
# a comment

<http://www.aifb.uni-karlsruhe.de/Personen/viewPerson/id1instance> <http://swrc.ontoware.org/ontology#affiliation> <http://www.aifb.uni-karlsruhe.de/Forschungsgruppen/viewForschungsgruppe/id2instance> .
<http://www.aifb.uni-karlsruhe.de/Personen/viewPerson/id3instance> <http://www.w3.org/1999/02/22-rdf-syntax-ns#type> <http://www.aifb.uni-karlsruhe.de/Personen/viewPerson/id1instance> .
_:b <http://swrc.ontoware.org/ontology#author> "5"^^<http://www.w3.org/2001/XMLSchema#int> .
"""  # noqa: E501


def test_triples_become_a_typed_graph(tmp_path: Path) -> None:
    folder = tmp_path / "aifb-hetero_0123abcd"
    folder.mkdir()
    (folder / "aifb.nt").write_text(AIFB)
    person = "http://www.aifb.uni-karlsruhe.de/Personen/viewPerson/"
    (folder / "trainingSet.tsv").write_text(f"person\tid\tlabel\n{person}id1instance\t0\tgroup A\n")
    (folder / "testSet.tsv").write_text(
        f"person\tid\tlabel\n{person}id3instance\t1\tgroup B\n{person}id9instance\t2\tgroup B\n"
    )
    dataset = data.AIFBDataset(raw_dir=tmp_path, verbose=False)
    g = dataset[0]
    assert dataset.predict_category == "Personen"
    assert (dataset.num_classes, len(dataset)) == (2, 1)
    assert g.canonical_etypes == sorted(
        [
            ("Personen", "22-rdf-syntax-ns#type", "Personen"),
            ("Personen", "rev-22-rdf-syntax-ns#type", "Personen"),
            ("Personen", "ontology#name", "_Literal"),
            ("_Literal", "rev-ontology#name", "Personen"),
            ("Publikationen", "ontology#author", "Personen"),
            ("Personen", "rev-ontology#author", "Publikationen"),
        ]
    )
    people = g.nodes["Personen"].data
    assert people["train_mask"].tolist() == [True, False]
    assert people["test_mask"].tolist() == [False, True]
    assert people["label"].tolist() == people["labels"].tolist() == [0, 1]
    plain = data.AIFBDataset(insert_reverse=False, raw_dir=folder, verbose=False)[0]
    assert len(plain.canonical_etypes) == 3
    terms = {term.text for triple in read_triples(folder / "aifb.nt") for term in triple}
    assert 'Ann é "x"' in terms
    (folder / "aifb.nt").write_text("@prefix a: <b> .\n")
    with pytest.raises(ValueError, match="line 1 of .* is not one triple"):
        data.AIFBDataset(raw_dir=tmp_path, verbose=False)


def test_what_dgl_saved_of_an_rdf_graph_is_read(tmp_path: Path) -> None:
    g = dgl.heterograph(
        {("d", "has", "bond"): ([0, 1], [1, 0]), ("bond", "rev-has", "d"): ([1], [0])}
    )
    g.nodes["d"].data["labels"] = torch.tensor([1, -1])
    (tmp_path / "mutag-hetero").mkdir()
    dgl.save_graphs(str(tmp_path / "mutag-hetero" / "mutag-hetero_dgl_graph.bin"), [g])
    dataset = data.MUTAGDataset(raw_dir=tmp_path, verbose=False)
    assert (dataset.num_classes, dataset.predict_category) == (2, "d")
    assert dataset[0].nodes["d"].data["label"].tolist() == [1, -1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (data.AMDataset, "trainingSet.tsv"),
        (data.BGSDataset, "bgs-hetero"),
        (data.PubmedGraphDataset, "ind.pubmed"),
        (data.CoraGraphDataset, "cora_v2_dgl_graph.bin"),
    ],
)
def test_nothing_is_downloaded(kind: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"is not downloaded: put .*{name}"):
        kind(raw_dir=tmp_path)


def test_cora_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path))
    dataset = data.CoraGraphDataset(verbose=False, transform=lambda g: g.num_edges())
    assert (dataset.num_classes, dataset[0]) == (7, 10556)
    assert data.CoraGraphDataset(verbose=False, reverse_edge=False)[0].num_edges() == 5278


class Squares(data.DGLDataset):
    """As DGL's guide writes one."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.processed = False
        super().__init__(name="squares", raw_dir=str(root), hash_key=(1,), **options)

    def process(self) -> None:
        self.processed, self.g = True, graph(([0, 1, 2, 3], [1, 2, 3, 0]))

    def has_cache(self) -> bool:
        return os.path.exists(self.path)

    def save(self) -> None:
        os.makedirs(self.save_path, exist_ok=True)
        save_graphs(self.path, [self.g])

    def load(self) -> None:
        self.g = data.load_graphs(self.path)[0][0]

    @property
    def path(self) -> str:
        return os.path.join(self.save_path, f"{self.hash}.bin")

    def __getitem__(self, idx: int) -> Any:
        return self.g

    def __len__(self) -> int:
        return 1


def test_data_sets_of_users_load_and_save(tmp_path: Path) -> None:
    assert Squares(tmp_path).processed
    again = Squares(tmp_path)
    assert not again.processed
    assert again[0].num_edges() == 4
    assert Squares(tmp_path, force_reload=True).processed
    Path(again.path).write_bytes(b"damaged")
    assert Squares(tmp_path).processed
    assert repr(again) == f'Dataset("squares", num_graphs=1, save_path={again.save_path})'


def test_small_data_sets_have_the_sizes_of_their_kinds() -> None:
    dataset = data.MiniGCDataset(16, 10, 20, seed=3)
    assert dataset.labels.tolist() == [kind for kind in range(8) for _ in range(2)]
    for g, label in (dataset[i] for i in range(16)):
        n, edges = g.num_nodes(), (g.num_edges() - g.num_nodes()) // 2
        degrees = sorted((g.in_degrees() - 1).tolist())
        assert bool(g.has_edges_between(g.edges()[1], g.edges()[0]).all())
        if label == 0:
            assert (edges, degrees) == (n, [2] * n)
        elif label == 1:
            assert (edges, degrees[-1]) == (n - 1, n - 1)
        elif label == 2:
            assert (edges, degrees[0]) == (2 * (n - 1), 3)
        elif label == 3:
            assert degrees[0] == 1
        elif label == 4:
            assert degrees == [math.log2(n)] * n
        elif label == 5:
            assert degrees[-1] <= 4
        elif label == 6:
            assert edges == n * (n - 1) // 2
        else:
            assert degrees == [3] * n
    club, wanted = data.KarateClubDataset()[0], dgl.data.KarateClubDataset()[0]
    assert set(zip(*(s.tolist() for s in club.edges()), strict=True)) == set(
        zip(*(s.tolist() for s in wanted.edges()), strict=True)
    )
    assert torch.equal(club.ndata["label"], wanted.ndata["label"])


def test_small_things_for_data_sets(tmp_path: Path) -> None:
    info = {"num_classes": 3, "names": ["a"], "codes": {1: "x", 2: {"deep": 0.5}}}
    save_info(tmp_path / "info", info)
    assert load_info(tmp_path / "info") == info
    save_info(tmp_path / "rows", {"rows": np.arange(3), "weights": torch.ones(2)})
    read = load_info(tmp_path / "rows")
    assert isinstance(read["rows"], np.ndarray)
    assert isinstance(read["weights"], Tensor)
    with pytest.raises(TypeError, match="info must be made of"):
        save_info(tmp_path / "info", {"x": object()})
    (tmp_path / "info").write_bytes(pickle.dumps({"num_classes": 3}))
    with pytest.raises(ValueError, match="DGL's are pickles, which are not read"):
        load_info(tmp_path / "info")
    for arguments in (
        {},
        {"frac_list": [0.5, 0.2, 0.3]},
        {"frac_list": [0.3, 0.3, 0.4]},
        {"frac_list": [0.5, 0.5, 0.0]},
        {"shuffle": True, "random_state": 3},
    ):
        ours, theirs = (m.split_dataset(range(17), **arguments) for m in (data, dgl.data.utils))
        assert [list(p.indices) for p in ours] == [list(p.indices) for p in theirs]
    with pytest.raises(ValueError, match=r"together 1 \(got 0.5000\)"):
        split_dataset(range(3), [0.5])


@pytest.mark.parametrize("ratio", [(0.6, 0.2, 0.2), (0.5, 0.3, 0.1), (0.0, 1.0, 0.0)])
def test_masks_of_random_splits_are_dgls(ratio: tuple[float, ...]) -> None:
    masks = []
    for module, make in ((data.utils, graphshard.dgl), (dgl.data.utils, dgl)):
        graphs = [
            make.heterograph({("a", "r", "b"): ([0], [0])}, {"a": 11, "b": count})
            for count in (7, 1, 20)
        ]
        np.random.seed(3)
        for ntype in ("a", "b"):
            module.add_nodepred_split(graphs, ratio, ntype)
        masks.append([dict(g.nodes[ntype].data) for g in graphs for ntype in ("a", "b")])
        places = module.idx2mask([1, 4], 6)
        assert places.shape == (6,)
        assert module.generate_mask_tensor(places).tolist() == [0, 1, 0, 0, 1, 0]
    for ours, theirs in zip(*masks, strict=True):
        assert set(ours) == set(theirs) == {"train_mask", "val_mask", "test_mask"}
        for name, mask in theirs.items():
            assert ours[name].dtype == mask.dtype == torch.bool
            assert torch.equal(ours[name], mask)
    with pytest.raises(ValueError, match="ratio must have three numbers"):
        data.utils.add_nodepred_split([], [0.5, 0.5])


def test_reddit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "reddit_f6b3e56b"
    edges = scipy.sparse.random(30, 30, 0.1, random_state=0)
    edges = (edges + edges.T).tocoo()
    rows = {
        "feature": rng.random((30, 4)),
        "label": rng.integers(0, 41, 30),
        "node_types": rng.integers(1, 4, 30),
    }
    peer = dgl.data.RedditDataset.__new__(dgl.data.RedditDataset)
    for place in (tmp_path / "reddit", folder):
        place.mkdir()
        scipy.sparse.save_npz(place / "reddit_graph.npz", edges)
        np.savez(place / "reddit_data.npz", **rows)
    peer._name, peer._self_loop_str, peer._verbose, peer._url = "reddit", "", False, None
    peer._raw_dir = str(tmp_path)
    peer.process()
    found = data.RedditDataset(raw_dir=tmp_path)
    assert found.num_classes == peer.num_classes == 41
    # The order of edges into one node is not said.
    wanted, ours = (
        sorted(zip(*map(Tensor.tolist, g.edges()), strict=True)) for g in (peer._graph, found[0])
    )
    assert ours == wanted
    for name, rows_of_nodes in peer._graph.ndata.items():
        torch.testing.assert_close(found[0].ndata[name], rows_of_nodes, check_dtype=False)
    np.savez(tmp_path / "reddit" / "reddit_data.npz", **{**rows, "label": rows["label"][:9]})
    with pytest.raises(ValueError, match="must have the same nodes"):
        data.RedditDataset(raw_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="reddit_self_loop_graph.npz and reddit_data.npz"):
        data.RedditDataset(self_loop=True, raw_dir=tmp_path)
