# SPDX-License-Identifier: Apache-2.0
"""Arguments of partition_graph that cannot be meant, and those of other releases of DGL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphshard
from graphshard.partition import load_partition, partition_graph


def ring(num_nodes: int = 12) -> graphshard.Graph:
    src = torch.arange(num_nodes)
    return graphshard.graph((src, (src + 1) % num_nodes))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


def test_arguments_of_other_releases_of_dgl_are_taken_as_they_are_met(tmp_path: Path) -> None:
    partition_graph(ring(), "g", 2, tmp_path / "plain", quiet=True)
    more = {"use_graphbolt": True, "reshuffle": True, "store_eids": True, "store_inner_node": True}
    partition_graph(ring(), "g", 2, tmp_path / "more", quiet=True, **more)
    assert contents(tmp_path / "more") == contents(tmp_path / "plain")
    graph, *_ = load_partition(tmp_path / "more" / "g.json", 0)
    assert int(graph.ndata["inner_node"].sum()) == 6


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("reshuffle", "every part owns contiguous ids; leave it out, and take original ids from"),
        ("store_eids", "store_eids=False leaves out what every partition file holds"),
        ("store_inner_node", "store_inner_node=False leaves out"),
        ("store_inner_edge", "store_inner_edge=False leaves out"),
    ],
)
def test_what_files_here_cannot_be_is_a_sentence(argument: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=text):
        partition_graph(ring(), "g", 2, tmp_path, quiet=True, **{argument: False})
    assert list(tmp_path.iterdir()) == []


def test_far_more_parts_than_nodes_are_told_before_they_are_made(tmp_path: Path) -> None:
    text = "num_parts=65 is more than the graph's 3 nodes: 62 parts at least are made and stay"
    with pytest.raises(UserWarning, match=text):  # an error here, and so nothing is made
        partition_graph(ring(3), "g", 65, tmp_path / "g", part_method="random", quiet=True)
    assert not (tmp_path / "g").exists()
    partition_graph(ring(3), "g", 5, tmp_path / "g", quiet=True)  # as tests do
    parts = [load_partition(tmp_path / "g" / "g.json", part)[0] for part in range(5)]
    assert sorted(int(part.ndata["inner_node"].sum()) for part in parts) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("split", [True, "val_mask"])
def test_splits_without_a_node_are_nothing_to_balance(split: Any, tmp_path: Path) -> None:
    graph = ring()
    graph.ndata["val_mask"] = torch.zeros(12, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"have no node: \['val_mask'\]\); set them"):
        partition_graph(graph, "g", 2, tmp_path, balance_split=split, quiet=True)
    graph.ndata["val_mask"][3] = True
    partition_graph(graph, "g", 2, tmp_path, balance_split=split, quiet=True)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"part_method": "random", "objtype": "vol"}, "objtype is what METIS minimises"),
        ({"part_method": [0, 1] * 6, "objtype": "vol"}, "objtype has no effect on an assignment"),
        ({"part_method": [0, 1] * 6, "seed": 3}, "seed has no effect on an assignment"),
    ],
)
def test_what_a_method_ignores_is_a_warning(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=text):
        partition_graph(ring(), "g", 2, tmp_path, quiet=True, **settings)
