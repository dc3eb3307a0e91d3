# SPDX-License-Identifier: Apache-2.0
"""The description of a task beside a partition, data sets by name, and memory. No process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_cases import NUM_CLASSES, typed_graph, write_parts

from forked_programs import run_program
from graphshard import PartitionFormatError
from graphshard.data import NodeDataset
from graphshard.data.prepare import Preparation, has_relations, read_dataset
from graphshard.data.task import partition_dataset, task_path
from graphshard.partition.format import digest_of_content
from graphshard.train import TaskInfo, read_task, write_task


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 2)
    assert read_task(data) == TaskInfo(name="g")
    task = TaskInfo(
        name="plain", target="_N", num_classes=3, num_relations=4, class_names=("a", "b", "c")
    )
    write_task(data, task)
    assert read_task(data) == task
    assert [p.name for p in Path(data).parent.iterdir() if p.name.startswith(".")] == []


RATES = ("user", "rates", "film")
USER = {"id": {"column": "id", "type": "string"}, "features": []}
KINDS: dict[str, TaskInfo] = {
    "values": TaskInfo(name="g", kind="node regression", target="_N"),
    "several labels": TaskInfo(name="g", target="_N", num_classes=3, is_multilabel=True),
    "links": TaskInfo(
        name="g",
        kind="link prediction",
        target=RATES,
        reverse_of=("film", "rev_rates", "user"),
        schema={"nodes": {"user": USER}, "edges": {}, "label": None},
    ),
}


@pytest.mark.parametrize("case", KINDS)
def test_every_kind_of_task_is_read_as_it_was_written(case: str, tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 1)
    write_task(data, KINDS[case])
    assert read_task(data) == KINDS[case]


def test_a_task_of_the_former_version_is_one_of_classes(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 1)
    task = TaskInfo(name="g", target="_N", num_classes=3)
    write_task(data, task)
    content = json.loads(task_path(data).read_text())
    for name in ("is_multilabel", "reverse_of", "schema", "digest"):
        del content[name]
    content["format_version"] = 2
    content["digest"] = digest_of_content(content, "digest")
    task_path(data).write_text(json.dumps(content))
    assert read_task(data) == task


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "ranking"},
        {"kind": "link prediction", "target": "user"},
        {"kind": "node regression", "target": RATES},
    ],
)
def test_a_kind_that_is_none_or_of_another_target_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        TaskInfo(name="g", **values)


def test_a_task_of_another_partition_of_the_same_name_is_not_taken(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 2)
    write_task(data, TaskInfo(name="plain", target="_N", num_classes=99))
    before = task_path(data).read_text()
    other = write_parts(tmp_path, "plain", 2, "no_train")
    task_path(other).write_text(before)
    assert read_task(other) == TaskInfo(name="g")


@pytest.mark.parametrize("damage", ["not JSON", "[]", "{}", '{"format": "other"}'])
def test_a_damaged_task_is_an_error_that_says_what_to_do(damage: str, tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 2)
    task_path(data).write_text(damage)
    with pytest.raises(PartitionFormatError, match="remove the file to have the task derived"):
        read_task(data)


def test_a_partitioned_data_set_carries_its_task(tmp_path: Path) -> None:
    dataset = NodeDataset.from_graph(typed_graph(), name="tiny", target="paper")
    data = partition_dataset(
        dataset, 2, tmp_path, part_method="random", balance_field="label", options={"a": 1}
    )
    assert data == tmp_path / "tiny.json"
    task = read_task(data)
    assert (task.target, task.num_classes, task.options) == ("paper", NUM_CLASSES, {"a": 1})
    assert json.loads(task_path(data).read_text())["task"] == "node classification"
    with pytest.raises(ValueError, match="must name a node feature of type 'paper'"):
        partition_dataset(dataset, 2, tmp_path, balance_field="colour")


def folder(path: Path, *, relations: bool) -> Path:
    path.mkdir()
    np.save(path / "edge_index.npy", np.array([[0, 1, 2, 2], [1, 2, 3, 2]]))
    np.save(path / "feat.npy", np.array([[1.0, 3.0], [2, 0], [0, 0], [5, 5]], dtype=np.float32))
    if relations:
        np.save(path / "edge_type.npy", np.array([0, 0, 1, 1]))
    return path


def test_a_data_set_is_prepared_as_told(tmp_path: Path) -> None:
    plain = str(folder(tmp_path / "plain", relations=False))
    assert read_dataset(plain).graph.num_edges() == 4
    prepared = read_dataset(
        plain, Preparation(self_loops=True, bidirected=True, row_normalize=True)
    )
    assert prepared.graph.num_edges() == 6 + 4
    assert prepared.graph.ndata["feat"].sum(1).tolist() == pytest.approx([1.0, 1.0, 0.0, 1.0])
    assert not has_relations(plain)


def test_published_preparations_are_the_default_for_known_names(tmp_path: Path) -> None:
    known = read_dataset(str(folder(tmp_path / "citeseer", relations=False)))
    assert known.graph.num_edges() == 3 + 4
    assert known.graph.ndata["feat"][0].tolist() == [0.25, 0.75]
    raw = read_dataset(
        str(tmp_path / "citeseer"), Preparation(self_loops=False, row_normalize=False)
    )
    assert raw.graph.num_edges() == 4
    assert raw.graph.ndata["feat"][0].tolist() == [1.0, 3.0]


def test_relations_get_their_inverse_unless_told(tmp_path: Path) -> None:
    path = str(folder(tmp_path / "facts", relations=True))
    assert has_relations(path)
    assert read_dataset(path).num_relations == 4
    assert read_dataset(path, Preparation(inverse=False)).num_relations == 2
    with pytest.raises(ValueError, match="self_loops and bidirected are for graphs without"):
        read_dataset(path, Preparation(self_loops=True))
    with pytest.raises(ValueError, match="to_bidirected=True for both directions"):
        read_dataset(str(folder(tmp_path / "p", relations=False)), Preparation(inverse=True))


def test_edge_lists_have_no_features(tmp_path: Path) -> None:
    table = tmp_path / "edges.csv"
    table.write_text("src,dst\n0,1\n1,1\n")
    dataset = read_dataset(str(table), Preparation(self_loops=True, bidirected=True))
    assert dataset.name == "edges"
    assert dataset.graph.num_edges() == 4
    assert dataset.num_classes == 0
    assert len(read_dataset(str(table), Preparation(inverse=True)).graph.canonical_etypes) == 2
    with pytest.raises(ValueError, match="row_normalize is for folders of arrays"):
        read_dataset(str(table), Preparation(row_normalize=True))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems only know the peak of a life")
def test_peak_memory_counts_what_was_held_since_the_start_and_freed() -> None:
    """In a process of its own: one that has run other tests has freed memory to use again."""
    script = """
        import torch
        from graphshard._base.memory import PeakMemory, current_memory
        memory = PeakMemory()
        before = current_memory()
        held = torch.ones(30 * 2**18)  # 30 MiB
        held.add_(1)
        del held
        assert 28 * 2**20 < memory.above_start() < 60 * 2**20, memory.above_start()
        assert current_memory() < before + 20 * 2**20
        assert PeakMemory().above_start() < 10 * 2**20
    """
    run_program(script, MALLOC_MMAP_THRESHOLD_=str(1 << 20))
