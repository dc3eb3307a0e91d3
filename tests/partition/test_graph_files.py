# SPDX-License-Identifier: Apache-2.0
"""Graphs partitioned from files of NumPy: the bytes of the same graph in memory. No group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from partition_cases import random_ids, typed
from test_streamed_partition import communities, files_of

from graphshard.graph import Graph
from graphshard.partition import GraphFiles, partition_graph


def written(folder: Path, g: Graph) -> GraphFiles:
    """The files of a graph, in the order of its types."""
    folder.mkdir()

    def save(name: str, array: Any) -> Path:
        np.save(path := folder / f"{name}.npy", array)
        return path

    def features(what: str, owners: list[Any], frames: Any) -> dict[Any, dict[str, Path]]:
        return {
            owner: {
                name: save(f"{what}-{i}-{name}", frames[owner].data[name].numpy())
                for name in frames[owner].data
            }
            for i, owner in enumerate(owners)
        }

    edges = {
        etype: save(f"edges-{i}", np.stack([ids.numpy() for ids in g.edges(etype=etype)]))
        for i, etype in enumerate(g.canonical_etypes)
    }
    of_nodes = features("node", g.ntypes, g.nodes)
    of_edges = features("edge", g.canonical_etypes, g.edges)
    if len(g.ntypes) == 1:
        (edge_file,) = edges.values()
        return GraphFiles(
            num_nodes=g.num_nodes(),
            edges=edge_file,
            node_features=of_nodes[g.ntypes[0]],
            edge_features=of_edges[g.canonical_etypes[0]],
        )
    return GraphFiles(
        num_nodes={ntype: g.num_nodes(ntype) for ntype in g.ntypes},
        edges=edges,
        node_features=of_nodes,
        edge_features=of_edges,
    )


def with_features(g: Graph) -> Graph:
    for ntype in g.ntypes:
        count = g.num_nodes(ntype)
        g.nodes[ntype].data["x"] = torch.randn(count, 3, 2)
        g.nodes[ntype].data["train_mask"] = random_ids(4, count, 1) == 0
    for etype in g.canonical_etypes:
        g.edges[etype].data["w"] = torch.arange(g.num_edges(etype)).float()
    return g


@pytest.mark.parametrize("make", [communities, typed])
@pytest.mark.parametrize(
    "method", [pytest.param("multilevel", marks=pytest.mark.compiled), "random", "metis"]
)
def test_the_bytes_of_the_graph_in_memory(tmp_path: Path, make: Any, method: str) -> None:
    g = with_features(make())
    files = written(tmp_path / "files", g)
    arguments: dict[str, Any] = {
        "part_method": method,
        "balance_split": True,
        "balance_edges": True,
        "tolerance": 1.5,
        "memory": None if method == "metis" else 1 << 24,
        "quiet": True,
    }
    for name, source in (("memory", g), ("files", files)):
        partition_graph(source, "g", 3, tmp_path / f"out-{name}", **arguments)
    assert files_of(tmp_path / "out-memory") == files_of(tmp_path / "out-files")


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int16])
def test_other_integers(tmp_path: Path, dtype: type) -> None:
    g = communities(500, 3000)
    edges = np.stack([ids.numpy() for ids in g.edges()])
    for name, array in (("a", edges), ("b", edges.astype(dtype))):
        np.save(tmp_path / f"{name}.npy", array)
        files = GraphFiles(num_nodes=500, edges=tmp_path / f"{name}.npy")
        partition_graph(files, "g", 2, tmp_path / name, part_method="multilevel", quiet=True)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("array", "changes", "text"),
    [
        (np.zeros((3, 4), int), {}, r"integers of shape \[2, num_edges\]"),
        (np.zeros((2, 4)), {}, r"integers of shape \[2, num_edges\]"),
        (np.array([[0, 9], [1, 1]]), {}, r"sources in \[0, 5\) \(got 9\)"),
        (np.array([[0, 1], [1, -2]]), {}, r"destinations in \[0, 5\) \(got -2\)"),
        (np.asfortranarray(np.zeros((2, 9), int)), {}, "row after row"),
        (np.zeros((2, 4), int), {"num_nodes": -1}, "must not be negative"),
        (np.zeros((2, 4), int), {"node_features": {"x": torch.zeros(4)}}, "a row for each of"),
        (np.zeros((2, 4), int), {"idtype": torch.int16}, "idtype must be"),
    ],
)
def test_files_that_cannot_be(
    tmp_path: Path, array: Any, changes: dict[str, Any], text: str
) -> None:
    np.save(tmp_path / "edges.npy", array)
    arguments: dict[str, Any] = {"num_nodes": 5, "edges": tmp_path / "edges.npy", **changes}
    with pytest.raises(ValueError, match=text):
        partition_graph(
            GraphFiles(**arguments), "g", 2, tmp_path, part_method="random", memory=1 << 24
        )
    assert [path.name for path in tmp_path.iterdir()] == ["edges.npy"]


def test_a_file_that_is_none_or_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "edges.npy"
    np.save(path, np.zeros((2, 400), int))
    path.write_bytes(path.read_bytes()[:-8])
    for text in (r"must have \d+ bytes", "must be a .npy file"):
        with pytest.raises(ValueError, match=text):
            partition_graph(
                GraphFiles(num_nodes=5, edges=path),
                "g",
                2,
                tmp_path,
                memory=1 << 24,
                part_method="random",
            )
        path.write_bytes(b"no array" * 40)
