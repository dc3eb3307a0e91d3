# SPDX-License-Identifier: Apache-2.0
"""Values of a wrong kind in the JSON of a partition, DGL's and ours; names that are no text."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import graphshard
from graphshard.data import NodeDataset, to_csv, to_parquet
from graphshard.data.task import partition_dataset
from graphshard.errors import PartitionFormatError
from graphshard.fullbatch import load_dgl_partition_data
from graphshard.graph import Graph, graph, heterograph, save_graphs
from graphshard.partition import (
    convert_partition,
    load_partition,
    partition_graph,
    verify_partition,
)
from graphshard.partition.format import build_of
from graphshard.servers import DistEmbedding, DistGraph, DistTensor, exit_client, save_checkpoint
from graphshard.testing import run_ranks
from graphshard.train._checkpoint import CheckpointFolder

HALF = "a\ud800"
"""Text that no encoding has: Python makes such of bytes that are not UTF-8."""

BYTES = os.fsdecode(b"\xff\xfe")
"""A file name of another encoding: the file system holds it, and safetensors opens no such file."""

SETTINGS = {
    "halo_hops": ["1", 1.0, None, -1, True, [1]],
    "num_trainers_per_machine": ["2", 0, None, 1.5],
    "part_method": [3, None, "", ["metis"], HALF],
    "graph_name": [7, "", HALF],
    "num_nodes": ["6", 6.5],
}
OURS_ALONE: dict[str, list[Any]] = {
    "graph_formats": ["coo", [1], ["dense"], None],
    "edges_by_destination": ["yes", 1],
    "idtype": ["int16", None, ["int32"]],
}


def small() -> Graph:
    g = graph(([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]))
    g.ndata["x"] = torch.ones(6, 2)
    return g


@pytest.fixture(scope="module", params=["ours", "dgl"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    partition_graph(small(), "g", 2, folder / "ours", part_method="random", quiet=True)
    if request.param == "ours":
        return folder / "ours" / "g.json"
    return convert_partition(folder / "ours" / "g.json", folder / "dgl", "dgl")


def verified(path: Path) -> None:
    problems = verify_partition(path)
    if problems:
        raise PartitionFormatError(problems[0])


def served(path: Path) -> None:
    exit_client()
    DistGraph("g", part_config=str(path))


def test_settings_of_a_wrong_kind(parts: Path, tmp_path: Path) -> None:
    text = parts.read_text()
    cases = dict(SETTINGS)
    if "build" in json.loads(text):
        cases |= OURS_ALONE
    readers: list[Callable[[Path], object]] = [
        lambda path: load_partition(path, 0),
        lambda path: load_dgl_partition_data(path, 1),
        lambda path: convert_partition(path, tmp_path / "out"),
        verified,
        served,
    ]
    try:
        for key, values in cases.items():
            for value in values:
                content = {**json.loads(text), key: value}
                if "build" in content:
                    content["build"] = build_of(content)
                parts.write_text(json.dumps(content))
                for read in readers:
                    with pytest.raises(PartitionFormatError, match=f"{key}|its maps hold"):
                        read(parts)
    finally:
        parts.write_text(text)
        exit_client()
    assert verify_partition(parts) == []


def with_field(nodes: bool) -> Graph:
    g = small()
    (g.ndata if nodes else g.edata)[HALF] = torch.ones(6)
    return g


NAMED: dict[str, Callable[[Path], object]] = {
    "graph": lambda d: partition_graph(small(), HALF, 1, d, quiet=True),
    "node feature": lambda d: partition_graph(with_field(True), "g", 1, d, quiet=True),
    "edge feature": lambda d: partition_graph(with_field(False), "g", 1, d, quiet=True),
    "folder": lambda d: partition_graph(small(), "g", 1, d / HALF, quiet=True),
    "folder of bytes": lambda d: partition_graph(small(), "g", 1, d / BYTES, quiet=True),
    "node type": lambda d: heterograph({("u", "r", HALF): ([0], [0])}),
    "relation": lambda d: heterograph({("u", HALF, "u"): ([0], [0])}),
    "empty type": lambda d: heterograph({("u", "r", "u"): ([0], [0])}, {"u": 1, HALF: 2}),
    "file of DGL": lambda d: save_graphs(d / "g.bin", with_field(True)),
    "label in a file of DGL": lambda d: save_graphs(d / "g.bin", small(), {HALF: torch.ones(1)}),
    "path of a file of DGL": lambda d: save_graphs(d / HALF, small()),
    "column of a CSV file": lambda d: to_csv(with_field(False), d / "g.csv", edge_columns=[HALF]),
    "source of a Parquet file": lambda d: to_parquet(small(), d / "g.parquet", src=HALF),
    "path of a table": lambda d: to_csv(small(), d / HALF),
    "data set": lambda d: partition_dataset(NodeDataset.from_graph(small(), name=HALF), 1, d),
    "class": lambda d: NodeDataset(
        name="a",
        graph=NodeDataset.from_graph(small()).graph,
        num_classes=1,
        target="_N",
        class_names=(HALF,),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_that_is_no_text(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text that (UTF-8|the file system) can hold") as caught:
        NAMED[name](tmp_path)
    assert not isinstance(caught.value, UnicodeError)
    assert not list(tmp_path.iterdir())


def test_a_tensor_of_a_name_that_is_no_text(tmp_path: Path) -> None:
    partition_graph(small(), "g", 1, tmp_path / "parts", quiet=True)
    served(tmp_path / "parts" / "g.json")
    for make in (
        lambda: DistTensor((6,), torch.int64, HALF, part_policy="node~_N"),
        lambda: DistEmbedding(6, 2, HALF, part_policy="node~_N"),
        lambda: save_checkpoint(tmp_path / BYTES, 1),
        lambda: save_checkpoint(
            tmp_path / "run", 1, model=torch.nn.ModuleDict({HALF: torch.nn.Linear(1, 1)})
        ),
    ):
        with pytest.raises(ValueError, match="text that UTF-8 can hold"):
            make()
    path = save_checkpoint(tmp_path / "run", 1, extra={HALF: HALF})
    assert graphshard.servers.load_checkpoint(tmp_path / "run").extra == {HALF: HALF}
    assert path.name == "step-00000001"
    exit_client()


def test_a_partition_that_was_moved_to_such_a_folder(tmp_path: Path) -> None:
    partition_graph(small(), "g", 1, tmp_path / "parts", quiet=True)
    shutil.move(tmp_path / "parts", tmp_path / BYTES)
    with pytest.raises(PartitionFormatError, match="the path of a tensor file must be text"):
        load_partition(tmp_path / BYTES / "g.json", 0)


def test_a_run_is_told_of_such_a_folder_before_it_trains(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / BYTES, {})
    with pytest.raises(ValueError, match="checkpoint_dir must be text that UTF-8 can hold"):
        folder.prepare(resume=False, write=True)
    assert not list(tmp_path.iterdir())


def failing(rank: int, world_size: int) -> str:
    """An error that speaks of such a path, on one rank alone."""
    error = FileNotFoundError(f"no file {HALF}") if rank == 1 else None
    try:
        graphshard.comm.share_error(error)
    except FileNotFoundError as shared:
        return ascii(shared)
    return "no error"


def test_an_error_with_such_a_name_reaches_all_ranks() -> None:
    for text in run_ranks(failing, 2, timeout=60):
        assert "no file a" in text
        assert "ud800" in text
