# SPDX-License-Identifier: Apache-2.0
"""Columns that are made when they are asked for, as original ids of parts are. No process group."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import graphshard
from graphshard._base.lazy_columns import LazyColumns, maker_of, tensors_there


def test_they_stand_for_a_dict() -> None:
    made = []

    def make() -> torch.Tensor:
        made.append(1)
        return torch.arange(3)

    columns = LazyColumns({"here": torch.zeros(2)}, {"later": make})
    assert set(columns) == {"here", "later"}
    assert "later" in columns
    assert len(columns) == 2
    assert [rows.shape for rows in tensors_there(columns)] == [(2,)]
    give = maker_of(columns, "later")
    assert not made
    assert columns["later"] is columns["later"] is give() is dict(columns)["later"]
    assert len(made) == 1
    columns["own"] = torch.ones(1)
    del columns["here"]
    assert list(columns | {"more": give()}) == ["later", "own", "more"]
    assert list({"more": give()} | columns) == ["more", "later", "own"]
    assert columns.get("here") is None


def test_threads_read_the_same_column() -> None:
    both_make = threading.Barrier(2)

    def make() -> torch.Tensor:
        both_make.wait(10)
        return torch.zeros(1)

    columns = LazyColumns({}, {"later": make})
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(columns.__getitem__, ["later", "later"])
    assert first is second is columns["later"]


def test_a_part_makes_original_ids_when_they_are_read(tmp_path: Path) -> None:
    graph = graphshard.graph((torch.arange(20), torch.arange(20).flip(0)), num_nodes=20)
    graphshard.partition_graph(graph, "g", 1, tmp_path, part_method="random", quiet=True)
    data = graphshard.load_dgl_partition_data(tmp_path / "g.json", 0)
    sharded = graphshard.construct_full_graph(data)
    assert not tensors_there(data.node_features)
    assert not tensors_there(data.edge_features)
    ids = data.edge_features["_N:_E:_N/orig_id"]
    assert ids.dtype == torch.int64
    assert ids.sort().values.tolist() == list(range(20))
    assert next(iter(sharded.original_edge_ids.values())) is ids
