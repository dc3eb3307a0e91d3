# SPDX-License-Identifier: Apache-2.0
"""Training on parts that do not belong together, or are damaged. Up to 3 ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from train_cases import (
    as_values,
    config_of,
    plain_graph,
    sampled_config_of,
    train_on_rank,
    typed_graph,
)

from graphshard import PartitionFormatError
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks
from graphshard.train import FullBatchRun, SampledRun, TaskInfo, write_task


def told_on_rank(rank: int, world_size: int, folders: list[str], values: dict[str, Any]) -> str:
    """What training says on a rank that looks for the partition on a disk of its own."""
    before = os.getcwd()
    os.chdir(folders[rank])
    try:
        train_on_rank(rank, world_size, values)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.chdir(before)
    return ""


def write(folder: Path, seed: int, num_parts: int = 2) -> str:
    partition_graph(
        plain_graph(), "g", num_parts, folder, part_method="random", seed=seed, quiet=True
    )
    return str(folder)


def test_ranks_that_read_different_partitions_are_told(tmp_path: Path) -> None:
    """The finding: two random partitions of Cora, one per rank, trained to a wrong model."""
    folders = [write(tmp_path / "one", 1), write(tmp_path / "two", 2)]
    builds = [json.loads(Path(f, "g.json").read_text())["build"] for f in folders]
    values = as_values(config_of("g.json"))
    assert run_ranks(told_on_rank, 2, [folders[0]] * 2, values) == ["", ""]
    (text,) = set(run_ranks(told_on_rank, 2, folders, values))
    assert f"rank 0 has '{builds[0]}', rank 1 has '{builds[1]}'" in text
    assert "copy one partition's folder to every host" in text


@pytest.mark.parametrize("name", ["graph", "node_feats", "edge_feats"])
def test_a_damaged_part_of_one_rank_is_told_on_all(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "parts", 1)
    path = Path(folder, "part1", f"{name}.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)
    (text,) = set(run_ranks(told_on_rank, 2, [folder] * 2, as_values(config_of("g.json"))))
    assert text.startswith("PartitionFormatError: rank 1: file part1")
    assert "is damaged (its checksum differs)" in text


@pytest.mark.parametrize("make", [plain_graph, typed_graph])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_damaged_feature_is_noticed_in_one_process(
    make: Any, is_sampled: bool, tmp_path: Path
) -> None:
    partition_graph(make(), "g", 1, tmp_path, quiet=True)
    path = tmp_path / "part0/node_feats.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    data = str(tmp_path / "g.json")
    with pytest.raises(PartitionFormatError, match="its checksum differs"):
        if is_sampled:
            SampledRun(sampled_config_of(data).resolved())
        else:
            FullBatchRun(config_of(data).resolved())


@pytest.mark.parametrize("feature", ["label", "etype"])
@pytest.mark.parametrize("number", [2**62, 2**63 - 1, 10**7])
def test_a_number_past_all_nodes_or_edges_takes_no_memory(
    feature: str, number: int, tmp_path: Path
) -> None:
    """A model has a row for every class and relation: one wrong entry asked for terabytes."""
    graph = plain_graph()
    (graph.ndata if feature == "label" else graph.edata)[feature][0] = number
    partition_graph(graph, "g", 1, tmp_path, quiet=True)
    config = config_of(str(tmp_path / "g.json"), model="rgcn")
    with pytest.raises(
        ValueError, match=rf"/{feature}' in .*g.json must number .*\(got {number}\)"
    ):
        FullBatchRun(config.resolved())


def test_a_description_of_billions_of_classes_takes_no_memory(tmp_path: Path) -> None:
    partition_graph(plain_graph(), "g", 1, tmp_path, quiet=True)
    for values in ({"num_classes": 10**9}, {"num_relations": 10**9}):
        write_task(tmp_path / "g.json", TaskInfo(name="g", target="_N", **values))
        with pytest.raises(ValueError, match=r"g.json is described as having 1000000000"):
            FullBatchRun(config_of(str(tmp_path / "g.json")).resolved())
