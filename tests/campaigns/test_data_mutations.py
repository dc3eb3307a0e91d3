# SPDX-License-Identifier: Apache-2.0
"""Damaged data: folders of arrays, OGB's files, CSV and Parquet. Forked children.

A data folder carries no digests, so a changed number in an array is another data set and no damage
that could be seen. What is loaded is therefore compared with what NumPy, SciPy and pyarrow read in
the damaged files: everything that is accepted must be what they say.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaign_report import write_report
from trials import Campaign, run_trials

from graphshard.data import from_csv, from_ogb, from_parquet, load_dataset, to_csv, to_parquet
from graphshard.graph import Graph, graph
from graphshard.train.commands import run

COMMAND = "pytest tests/campaigns/test_data_mutations.py --all"
SAMPLE, ALL = {"ogb": 20, "command": 20}, 300
"""Mutations of each target: of the sample, where not 40, and of the whole campaign."""

AS_THE_FILES_SAY = "what the files say"
MEMORY = 64 << 20


def save(folder: Path, **arrays: Any) -> None:
    folder.mkdir(parents=True)
    for name, value in arrays.items():
        if isinstance(value, str):
            (folder / f"{name}.txt").write_text(value, encoding="utf-8")
        else:
            np.save(folder / f"{name}.npy", value)


def make_dense(folder: Path) -> None:
    rng = np.random.default_rng(0)
    save(
        folder,
        edge_index=rng.integers(0, 40, (2, 150)),
        feat=rng.random((40, 5), dtype=np.float32),
        label=rng.integers(-1, 3, 40),
        train_idx=np.arange(10),
        valid_idx=np.arange(10, 20),
        test_idx=np.arange(20, 40),
        classes="a\nb\nc\n",
    )


def make_sparse(folder: Path) -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    rng = np.random.default_rng(1)
    save(folder, edge_index=rng.integers(0, 40, (2, 150)))
    matrix = sparse.random_array((40, 30), density=0.1, format="csr", rng=rng, dtype=np.float32)
    sparse.save_npz(folder / "feat.npz", matrix)


def make_relations(folder: Path) -> None:
    rng = np.random.default_rng(2)
    save(
        folder,
        edge_index=rng.integers(0, 40, (2, 90)),
        edge_type=np.repeat(np.arange(3), 30),
        relation_ptr=np.array([0, 30, 60, 90]),
        relations="likes\nknows\nhates\n",
        label=rng.integers(-1, 3, 40),
        train_masks=rng.random((2, 40)) < 0.5,
    )


def make_typed(folder: Path) -> None:
    rng = np.random.default_rng(3)
    save(
        folder,
        edge_index__paper__by__author=rng.integers(0, 20, (2, 60)),
        edge_index__author__writes__paper=rng.integers(0, 20, (2, 60)).astype(np.int32),
        feat__paper=np.asfortranarray(rng.random((20, 4))),
        label__author=rng.integers(0, 3, 20),
        train_idx_5=np.arange(4),
        node_types="author\t20\npaper\t20\nvenue\t7\n",
    )


def rows(g: Graph) -> list[tuple[int, ...]]:
    return [tuple(side.tolist()) for side in g.edges(order="eid")]


def read_sparse(path: Path) -> np.ndarray:
    """A CSR matrix as SciPy makes it of the arrays that NumPy reads."""
    from scipy import sparse

    with np.load(path, allow_pickle=False) as archive:
        data, indices, indptr, shape = (
            archive[name] for name in ("data", "indices", "indptr", "shape")
        )
    dense: np.ndarray = sparse.csr_array((data, indices, indptr), tuple(shape)).toarray()
    return dense.astype(np.float64)


def folder_matches(folder: Path, split: int | None) -> bool:
    """Whether what is loaded is what NumPy and SciPy read."""
    data = load_dataset(folder, split=split, dtype=torch.float64, max_feature_bytes=MEMORY)
    g = data.graph

    def read(name: str) -> np.ndarray:
        return np.load(folder / f"{name}.npy", allow_pickle=False)

    for etype in g.canonical_etypes:
        suffix = "" if g.is_homogeneous else "__" + "__".join(etype)
        sides = [side.numpy() for side in g.edges(etype=etype, order="eid")]
        if not np.array_equal(sides, read(f"edge_index{suffix}")):
            return False
    for ntype in g.ntypes:
        suffix = "" if g.is_homogeneous else f"__{ntype}"
        fields = g.nodes[ntype].data
        if (folder / f"feat{suffix}.npy").exists():
            feat = read(f"feat{suffix}").astype(np.float64)
        elif (folder / f"feat{suffix}.npz").exists():
            feat = read_sparse(folder / f"feat{suffix}.npz")
        else:
            feat = None
        if (feat is None) != ("feat" not in fields):
            return False
        if feat is not None and not np.array_equal(fields["feat"].numpy(), feat, equal_nan=True):
            return False
        is_labelled = (folder / f"label{suffix}.npy").exists()
        if is_labelled and not np.array_equal(fields["label"], read(f"label{suffix}")):
            return False
    fields = g.nodes[data.target].data
    if (folder / "train_masks.npy").exists() and split is not None:
        return np.array_equal(fields["train_mask"].numpy(), read("train_masks")[split])
    for split_name, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        path = folder / f"{name}_idx{'' if split is None else f'_{split}'}.npy"
        ids = np.load(path) if path.exists() else np.zeros(0, dtype=np.int64)
        if not np.array_equal(fields[f"{split_name}_mask"].numpy().nonzero()[0], np.unique(ids)):
            return False
    return True


def put(path: Path, table: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(",".join(str(cell) for cell in row) for row in table)
    path.write_bytes(gzip.compress(text.encode() + b"\n", mtime=0))


def make_ogb(folder: Path) -> None:
    """Three data sets of OGB's layouts: CSV, several types, arrays."""
    raw = folder / "ogbn_arxiv" / "raw"
    put(raw / "edge.csv.gz", [(i % 7, (3 * i) % 7) for i in range(30)])
    put(raw / "num-node-list.csv.gz", [[7]])
    put(raw / "node-feat.csv.gz", [(0.5 * i, -i) for i in range(7)])
    put(raw / "node-label.csv.gz", [[i % 3] for i in range(7)])
    mag = folder / "ogbn_mag" / "raw"
    put(mag / "num-node-dict.csv.gz", [("author", "paper"), (4, 5)])
    put(mag / "triplet-type-list.csv.gz", [("author", "writes", "paper")])
    put(mag / "relations" / "author___writes___paper" / "edge.csv.gz", [(0, 1), (3, 4)])
    put(mag / "node-feat" / "paper" / "node-feat.csv.gz", [(0.5 * i, -i) for i in range(5)])
    put(mag / "node-label" / "paper" / "node-label.csv.gz", [[i % 3] for i in range(5)])
    arrays = folder / "ogbn_papers100M" / "raw"
    arrays.mkdir(parents=True)
    np.savez(
        arrays / "data.npz",
        edge_index=np.array([[0, 1, 2], [1, 2, 0]]),
        num_nodes_list=np.array([4]),
        node_feat=np.ones((4, 3), dtype=np.float16),
        node_year=np.array([[2000]] * 4),
    )
    np.savez(arrays / "node-label.npz", node_label=np.array([[0.0], [np.nan], [1.0], [1.0]]))
    for name, inside in (("arxiv", "."), ("mag", "paper"), ("papers100M", ".")):
        for number, split in enumerate(("train", "valid", "test")):
            put(folder / f"ogbn_{name}" / "split" / "time" / inside / f"{split}.csv.gz", [[number]])


def use_ogb(folder: Path) -> str:
    """Read all three; what they say is not compared, since their checksums tell of most damage."""
    for name in ("ogbn-arxiv", "ogbn-mag", "ogbn-papers100M"):
        if (folder / name.replace("-", "_") / "raw").is_dir():  # else it would be downloaded
            from_ogb(name, folder)
    return AS_THE_FILES_SAY


def make_tables(folder: Path) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(4)
    src, dst = (torch.from_numpy(side) for side in rng.integers(0, 40, (2, 200)))
    g = graph((src, dst), num_nodes=40)
    g.edata["weight"] = torch.from_numpy(rng.random(200))
    to_csv(g, folder / "edges.csv", edge_columns=["weight"])
    to_csv(g, folder / "edges.csv.gz", edge_columns=["weight"])
    to_parquet(g, folder / "edges.parquet", edge_columns=["weight"])


def use_tables(folder: Path) -> str:
    from pyarrow import csv, parquet

    for path in sorted(folder.iterdir()):
        is_parquet = path.suffix == ".parquet"
        if is_parquet:
            g = from_parquet(path, "src", "dst", ["weight"])
        else:
            g = from_csv(path, "src", "dst", ["weight"], delimiter=",")
        table = (parquet.read_table if is_parquet else csv.read_csv)(path)
        theirs = [tuple(table.column(name).to_pylist()) for name in ("src", "dst")]
        if rows(g) != theirs:
            return f"{path} differs from what pyarrow reads"
    return AS_THE_FILES_SAY


def use_folder(split: int | None) -> Callable[[Path], str]:
    return lambda folder: AS_THE_FILES_SAY if folder_matches(folder, split) else "something else"


def use_command(folder: Path) -> int:
    """``graphshard partition`` of a data set: done, or the code of wrong input, told as one."""
    out = folder.parent / "out"
    arguments = f"partition --data {folder} --parts 2 --method random --quiet --out {out}"
    code = run(arguments.split())
    return 0 if code in (0, 2) else code


TARGETS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "dense": (make_dense, use_folder(None)),
    "sparse": (make_sparse, use_folder(None)),
    "relations": (make_relations, use_folder(1)),
    "typed": (make_typed, use_folder(5)),
    "ogb": (make_ogb, use_ogb),
    "tables": (make_tables, use_tables),
    "command": (make_dense, use_command),
}


@pytest.mark.timeout(7200)
def test_damaged_data(tmp_path: Path, run_all: bool) -> None:
    outcomes: dict[str, Counter[str]] = {}
    campaigns: list[Campaign] = []
    for name, (make, use) in TARGETS.items():
        if name in ("tables", "ogb"):
            pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        original, scratch = tmp_path / "original" / name, tmp_path / name
        make(original)
        scratch.mkdir()
        numbers = range(ALL if run_all else SAMPLE.get(name, 40))
        campaigns.append(run_trials(use, original, scratch, numbers))
        outcomes[name] = campaigns[-1].outcomes
    if run_all:
        write_report(
            "data_mutations",
            "Data sets loaded from damaged files",
            COMMAND,
            outcomes,
            [
                "The same result is here what NumPy, SciPy or pyarrow read in the damaged file, "
                "since such files carry no digest of ours; for `ogb` it is that all was read, for "
                "`command` that `graphshard partition` ended with 0 or with 2, the code of "
                "wrong input, counted together."
            ],
        )
    for campaign in campaigns:
        campaign.check()
