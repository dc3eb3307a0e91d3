# SPDX-License-Identifier: Apache-2.0
"""DGL's partition folders with one thing damaged: read, or refused in our words. No process.

They carry no digest, so that a number that was changed in a feature cannot be told. DGL itself is
not needed here: the folders are written by us.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from partition_cases import bipartite, plain

import graphshard
from graphshard.errors import PartitionFormatError
from graphshard.partition import convert_partition, load_partition, partition_graph

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))

from dgl_file_cases import damaged

pytestmark = pytest.mark.usefixtures("no_syncing")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", [plain, bipartite])
def test_damaged_folders(make: object, run_all: bool, tmp_path: Path) -> None:
    graph = make()  # type: ignore[operator]
    for ntype in graph.ntypes:
        graph.nodes[ntype].data["x"] = torch.rand(graph.num_nodes(ntype), 3)
    partition_graph(graph, "g", 2, tmp_path / "ours", quiet=True, part_method="random")
    config = convert_partition(tmp_path / "ours" / "g.json", tmp_path / "theirs")
    files = sorted(p for p in config.parent.rglob("*") if p.is_file())
    refused = 0
    for number in range(3_000 if run_all else 60):
        path = files[random.Random(number).randrange(len(files))]
        original = path.read_bytes()
        path.write_bytes(damaged(original, number))
        for part in range(2):
            try:
                load_partition(config, part)
                data = graphshard.load_dgl_partition_data(config, part)
            except PartitionFormatError as error:
                named = {str(path), str(config), f"part {part} of {config}"}
                assert any(name in str(error) for name in named), f"mutation {number} of {path}"
                refused += 1
                continue
            for etype, edges in data.edges.items():
                assert bool((edges.dst >= 0).all()), f"mutation {number} of {path}"
                assert bool((edges.dst < data.num_owned(etype[2])).all())
                owned = torch.tensor(data.node_map(etype[0]).starts).diff()
                assert bool((edges.src < owned[edges.src_part.long()]).all())
        path.write_bytes(original)
    assert refused > 20
    for part in range(2):
        load_partition(config, part)
