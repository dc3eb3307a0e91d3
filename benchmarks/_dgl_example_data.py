# SPDX-License-Identifier: Apache-2.0
"""Files of DGL's data sets for its example programs: Cora and Citeseer as brought, others drawn.

Both libraries read the same files, as they are published, from folders of DGL's names. The drawn
ones are small and have no meaning: they show that a program runs and what it prints, not how well
a model learns.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import scipy.io
import scipy.sparse

_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
#: Data sets that stand in the folder after `write_data`, by what a result calls them.
REAL = ("cora", "citeseer", "karate")


def write_data(folder: Path, planetoid: Path) -> None:
    """Put all sets into a folder that becomes ``DGL_DOWNLOAD_DIR``.

    Args:
        folder: Where; `write_ogb` writes beside the programs.
        planetoid: The files ``ind.cora.x`` and so on.
    """
    for name, title in (("cora_v2", "cora"), ("citeseer", "citeseer")):
        target = _folder(folder, name, f"https://data.dgl.ai/dataset/{name}.zip")
        for part in _PARTS:
            shutil.copy(planetoid / f"ind.{title}.{part}", target / f"ind.{name}.{part}")
    rng = np.random.default_rng(0)
    _reddit(folder, rng)
    _ppi(folder, rng)
    for name in ("MUTAG", "DD", "PROTEINS", "ENZYMES"):
        _tu(folder, name, rng)
    _gin(folder, "MUTAG", rng)
    _fraud(folder, rng)
    _knowledge_graph(folder, rng)
    _benchmark(folder, "amazon_co_buy_computer", rng)
    _rdf(folder, rng)
    _trees(folder, rng)


def _folder(root: Path, name: str, url: str) -> Path:
    """The folder into which DGL unpacks what it has downloaded."""
    folder = root / f"{name}_{hashlib.sha1(url.encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _communities(rng: np.random.Generator, num_nodes: int, num_labels: int) -> Any:
    """Labels, features that tell of them, and edges mostly within them."""
    labels = rng.integers(0, num_labels, num_nodes)
    features = (rng.random((num_nodes, 32)) + np.eye(num_labels, 32)[labels]).astype(np.float32)
    src = rng.integers(0, num_nodes, 12 * num_nodes)
    dst = rng.integers(0, num_nodes, 12 * num_nodes)
    near = (labels[src] == labels[dst]) | (rng.random(len(src)) < 0.1)
    return labels, features, src[near], dst[near]


def _reddit(root: Path, rng: np.random.Generator) -> None:
    labels, features, src, dst = _communities(rng, 1000, 41)
    adj = scipy.sparse.coo_matrix((np.ones(len(src)), (src, dst)), (1000, 1000)).tocsr()
    adj = ((adj + adj.T) != 0).astype(np.float32)
    for suffix in ("", "_self_loop"):
        folder = _folder(root, f"reddit{suffix}", f"https://data.dgl.ai/dataset/reddit{suffix}.zip")
        loops = scipy.sparse.eye(1000, dtype=np.float32) if suffix else 0 * adj
        matrix = ((adj + loops) != 0).astype(np.float32).tocoo()
        scipy.sparse.save_npz(folder / f"reddit{suffix}_graph.npz", matrix)
        kinds = np.repeat([1, 2, 3], [600, 200, 200])
        np.savez(folder / "reddit_data.npz", feature=features, label=labels, node_types=kinds)


def _ppi(root: Path, rng: np.random.Generator) -> None:
    folder = _folder(root, "ppi", "https://data.dgl.ai/dataset/ppi.zip")
    for mode, first, last in (("train", 1, 20), ("valid", 21, 22), ("test", 23, 24)):
        graph_id = np.repeat(np.arange(first, last + 1), 30)
        ends = rng.integers(0, 30, (2, 200 * (last + 1 - first)))
        shift = 30 * np.repeat(np.arange(last + 1 - first), 200)
        pairs = sorted(
            {(int(a), int(b)) for a, b in (ends + shift).T}
            | {(node, node) for node in range(len(graph_id))}
        )
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(len(graph_id)))
        graph.add_edges_from(pairs)
        stored = networkx.node_link_data(graph, edges="links")
        stored["edges"] = stored["links"]  # newer releases of NetworkX look here
        (folder / f"{mode}_graph.json").write_text(json.dumps(stored), encoding="utf-8")
        np.save(folder / f"{mode}_feats.npy", rng.random((len(graph_id), 50)))
        np.save(folder / f"{mode}_labels.npy", rng.integers(0, 2, (len(graph_id), 121)))
        np.save(folder / f"{mode}_graph_id.npy", graph_id)


def _small_graphs(rng: np.random.Generator) -> list[tuple[int, list[tuple[int, int]]]]:
    """Cycles and stars with some more edges: number of nodes, and edges in both directions."""
    graphs = []
    for number in range(120):
        size = int(rng.integers(8, 16))
        ends = [(0 if number % 2 else i, (i + 1) % size) for i in range(size)]
        ends += [(int(a), int(b)) for a, b in rng.integers(0, size, (2, 2))]
        pairs = {(a, b) for a, b in ends if a != b}
        graphs.append((size, sorted(pairs | {(b, a) for a, b in pairs})))
    return graphs


def _tu(root: Path, name: str, rng: np.random.Generator) -> None:
    url = f"https://www.chrsmrrs.com/graphkerneldatasets/{name}.zip"
    folder = _folder(root, name, url) / name
    folder.mkdir(parents=True, exist_ok=True)
    graphs = _small_graphs(rng)
    sizes = [size for size, _ in graphs]
    offsets = np.cumsum([0, *sizes])
    content = {
        "A": [
            f"{a + offset + 1}, {b + offset + 1}"
            for (_, pairs), offset in zip(graphs, offsets, strict=False)
            for a, b in pairs
        ],
        "graph_indicator": np.repeat(np.arange(1, len(sizes) + 1), sizes).tolist(),
        "graph_labels": [1 + number % 2 for number in range(len(sizes))],
        "node_labels": rng.integers(0, 4, sum(sizes)).tolist(),
    }
    for kind, lines in content.items():
        text = "\n".join(map(str, lines)) + "\n"
        (folder / f"{name}_{kind}.txt").write_text(text, encoding="utf-8")


def _gin(root: Path, name: str, rng: np.random.Generator) -> None:
    folder = root / "GINDataset" / "dataset" / name
    folder.mkdir(parents=True, exist_ok=True)
    graphs = _small_graphs(rng)
    lines = [str(len(graphs))]
    for number, (size, pairs) in enumerate(graphs):
        lines.append(f"{size} {number % 2}")
        for node in range(size):
            near = [b for a, b in pairs if a == node]
            lines.append(" ".join(map(str, [int(rng.integers(0, 4)), len(near), *near])))
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _fraud(root: Path, rng: np.random.Generator) -> None:
    for name, file, url, nets, size in (
        ("yelp", "YelpChi.mat", "FraudYelp", ("net_rur", "net_rtr", "net_rsr"), 500),
        ("amazon", "Amazon.mat", "FraudAmazon", ("net_upu", "net_usu", "net_uvu"), 3800),
    ):
        folder = _folder(root, name, f"https://data.dgl.ai/dataset/{url}.zip")
        content: dict[str, Any] = {
            net: scipy.sparse.random(size, size, 5 / size, "csc", random_state=7 + i)
            + scipy.sparse.coo_matrix(([1.0], ([size - 1], [0])), (size, size)).tocsc()
            for i, net in enumerate(nets)
        }
        label = (rng.random((1, size)) < 0.3).astype(np.int64)
        features = scipy.sparse.csc_matrix(rng.random((size, 8)) + label.T)
        scipy.io.savemat(folder / file, {"features": features, "label": label, **content})


def _knowledge_graph(root: Path, rng: np.random.Generator) -> None:
    folder = _folder(root, "FB15k-237", "https://data.dgl.ai/dataset/FB15k-237.tgz")
    for kind, count, letter in (("entities", 200, "m"), ("relations", 8, "r")):
        text = "".join(f"{i}\t/{letter}/{i}\n" for i in range(count))
        (folder / f"{kind}.dict").write_text(text, encoding="utf-8")
    for file, count in (("train", 3000), ("valid", 200), ("test", 200)):
        rows = rng.integers(0, [200, 8, 200], (count, 3))
        text = "".join(f"/m/{a}\t/r/{r}\t/m/{b}\n" for a, r, b in rows)
        (folder / f"{file}.txt").write_text(text, encoding="utf-8")


def _benchmark(root: Path, name: str, rng: np.random.Generator) -> None:
    folder = _folder(root, name, f"https://data.dgl.ai/dataset/{name}.zip")
    labels, features, src, dst = _communities(rng, 600, 10)
    adj = scipy.sparse.csr_matrix((np.ones(len(src)), (src, dst)), (600, 600))
    matrices = {"adj": adj, "attr": scipy.sparse.csr_matrix(features)}
    parts = {
        f"{title}_{part}": getattr(matrix, part)
        for title, matrix in matrices.items()
        for part in ("data", "indices", "indptr", "shape")
    }
    np.savez(folder / f"{name}.npz", labels=labels, **parts)


def _rdf(root: Path, rng: np.random.Generator) -> None:
    """AIFB: persons, who belong to a group, write publications, and these have topics."""
    folder = _folder(root, "aifb-hetero", "https://data.dgl.ai/dataset/rdf/aifb-hetero.zip")
    base = "http://www.aifb.uni-karlsruhe.de"
    person = [f"{base}/Personen/viewPersonOWL/id{i}instance" for i in range(60)]
    paper = [f"{base}/Publikationen/viewPublikationOWL/id{i}instance" for i in range(120)]
    topic = [f"{base}/Forschungsgebiete/viewForschungsgebietOWL/id{i}instance" for i in range(8)]
    ontology = "http://swrc.ontoware.org/ontology"
    kind_of = "http://www.w3.org/1999/02/22-rdf-syntax-ns#type"
    names = (("Person", person), ("Publication", paper), ("ResearchTopic", topic))
    triples = {(who, kind_of, f"{ontology}#{kind}") for kind, all_ in names for who in all_}
    group = rng.integers(0, 4, 60)
    for i, who in enumerate(paper):
        for author in rng.integers(0, 60, 3):
            triples |= {
                (who, f"{ontology}#author", person[author]),
                (person[author], f"{ontology}#publication", who),
                (who, f"{ontology}#isAbout", topic[(2 * group[author] + i % 2) % 8]),
            }
    text = "".join(f"<{s}> <{p}> <{o}> .\n" for s, p, o in sorted(triples))
    (folder / "aifbfixed_complete.n3").write_text(text, encoding="utf-8")
    for file, rows in (("trainingSet", range(40)), ("testSet", range(40, 60))):
        lines = ["person\tid\tlabel_affiliation"]
        lines += [
            f"{person[i]}\t{i}\t{base}/Forschungsgruppen/viewForschungsgruppeOWL/id{group[i]}instance"
            for i in rows
        ]
        (folder / f"{file}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _trees(root: Path, rng: np.random.Generator) -> None:
    folder = root / "sst"
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"word{i}" for i in range(30)]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")

    def tree(depth: int) -> str:
        label = int(rng.integers(0, 5))
        if depth == 0:
            return f"({label} {words[int(rng.integers(0, 30))]})"
        return f"({label} {tree(depth - 1)} {tree(depth - 1)})"

    for mode, count in (("train", 40), ("dev", 10), ("test", 10)):
        text = "".join(tree(int(rng.integers(1, 4))) + "\n" for _ in range(count))
        (folder / f"{mode}.txt").write_text(text, encoding="utf-8")


def write_ogb(root: Path) -> None:
    """``ogbn-arxiv`` and ``ogbn-products`` in OGB's files, drawn, below a folder ``dataset``."""
    rng = np.random.default_rng(1)
    for name, split, num_labels in (("arxiv", "time", 40), ("products", "sales_ranking", 47)):
        folder = root / f"ogbn_{name}"
        labels, features, src, dst = _communities(rng, 800, num_labels)
        labels[:num_labels] = np.arange(num_labels)
        raw = folder / "raw"
        _rows(raw / "edge.csv.gz", np.stack([src, dst], 1))
        _rows(raw / "num-node-list.csv.gz", [[800]])
        _rows(raw / "num-edge-list.csv.gz", [[len(src)]])
        _rows(raw / "node-feat.csv.gz", features.round(3))
        _rows(raw / "node-label.csv.gz", labels[:, None])
        if name == "arxiv":
            _rows(raw / "node_year.csv.gz", rng.integers(2000, 2020, (800, 1)))
        for part, ids in zip(
            ("train", "valid", "test"), np.split(np.arange(800), [500, 650]), strict=True
        ):
            _rows(folder / "split" / split / f"{part}.csv.gz", ids[:, None])
        (folder / "RELEASE_v1.txt").write_text("", encoding="utf-8")


def _rows(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(",".join(map(str, row)) + "\n" for row in np.asarray(rows).tolist()))
