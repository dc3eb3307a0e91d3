# SPDX-License-Identifier: Apache-2.0
"""Runs whose features stay in files: they are those of features in memory. Up to 5 ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from train_cases import as_values, sampled_config_of, train_sampled_on_rank, write_parts

from graphshard import load_dgl_partition_data
from graphshard._base.file_rows import FilePiece, RowsFile, RowsInFiles
from graphshard._base.kernels import force_extension
from graphshard.errors import PartitionFormatError
from graphshard.partition import convert_partition
from graphshard.testing import run_ranks
from graphshard.train import SampledRun

EDGES, LINKS = {"task": "edge classification"}, {"task": "link prediction"}
EDGE_VALUES = {"task": "edge regression"}

CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "gcn": ("plain", 1, "random", {"model": "gcn"}),
    "sage": ("plain", 2, "random", {"model": "sage", "layers": 3, "fanouts": (3, 2, 2)}),
    "gat": ("plain", 2, "empty_part", {"model": "gat", "heads": 2, "hidden": 3}),
    "rgcn": ("plain", 2, "random", {"model": "rgcn", "num_bases": 2}),
    "one_hot": ("knowledge", 2, "random", {"model": "rgcn"}),
    "typed": ("typed", 2, "random", {"model": "sage", "norm": True, "encoder": True}),
    "typed_empty": ("typed", 5, "empty_part", {"model": "gatv2", "heads": 2, "hidden": 3}),
    "hgt": ("typed", 1, "random", {"model": "hgt", "heads": 2}),
    "hgt_plain": ("plain", 1, "random", {"model": "hgt", "heads": 2}),
    "typed_rgcn": ("typed", 2, "no_train", {"model": "rgcn"}),
    "bfloat16": ("plain", 2, "random", {"model": "sage", "dtype": "bfloat16"}),
    "edges": ("edge_values", 2, "random", {"model": "gat", "hidden": 3, **EDGE_VALUES}),
    "edge_classes": ("edge_classes", 2, "random", {"model": "gat", "hidden": 3, **EDGES}),
    "links": ("plain_links", 2, "random", {"model": "sage", **LINKS}),
    "typed_links": ("typed_links", 2, "random", {"model": "sage", **LINKS}),
    "apart": ("typed", 2, "random", {"model": "sage", "map_features": False}),
}


USUAL = ("typed", "bfloat16")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in USUAL else pytest.mark.exhaustive) for c in CASES],
)
def test_features_in_files_train_the_same(case: str, tmp_path: Path) -> None:
    kind, world_size, how, values = CASES[case]
    data = write_parts(tmp_path, kind, world_size, how)
    found = []
    for more in ({}, {"memory": "3GiB"}):
        given = {"fanouts": (3, 2), "batch_size": 5, "dropout": 0.3, "epochs": 3, **values, **more}
        config = sampled_config_of(data, **given)
        found.append(run_ranks(train_sampled_on_rank, world_size, as_values(config)))
    for in_memory, in_files in zip(*found, strict=True):
        assert in_files["result"]["losses"] == in_memory["result"]["losses"]
        for part in ("shared", "local"):
            for name, value in in_memory[part].items():
                assert torch.equal(in_files[part][name], value), name
        mine, theirs = in_files["result"]["last"], in_memory["result"]["last"]
        for metric, by_split in theirs["metrics"].items():
            assert mine["metrics"][metric] == pytest.approx(by_split, abs=1e-2)
        if values.get("dtype") is None:
            assert mine["val_loss"] == pytest.approx(theirs["val_loss"], abs=1e-9)


def test_a_budget_too_small_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 1)
    with pytest.raises(ValueError, match=r"memory must be at least .* MiB .*got 50 MiB; most of"):
        SampledRun(sampled_config_of(data, model="sage", memory="50MiB"))
    with pytest.raises(ValueError, match=r"memory must be a number of bytes above 0.*got 'much'"):
        sampled_config_of(data, memory="much")
    with pytest.raises(ValueError, match="cache_bytes is part of memory"):
        sampled_config_of(data, memory=1 << 30, cache_bytes=5)


def test_rows_of_files_are_those_of_tensors(tmp_path: Path) -> None:
    table = torch.randn(300, 7)
    (tmp_path / "rows").write_bytes(b"header" + table.numpy().tobytes())
    file = RowsFile(tmp_path / "rows")
    row = 7 * 4
    parts = [
        RowsInFiles((FilePiece(file, 6 + start * row, count),), torch.float32, (7,), torch.float32)
        for start, count in ((0, 100), (100, 0), (100, 200))
    ]
    rows = RowsInFiles.joined(parts)
    assert rows.shape == table.shape
    assert torch.equal(torch.cat(list(rows.blocks())), table)
    ids = torch.randint(0, 300, (500,), generator=torch.Generator().manual_seed(1))
    places = torch.randperm(600, generator=torch.Generator().manual_seed(2))[:500]
    for dtype in (torch.float32, torch.bfloat16):
        for index in (ids, ids.int()):
            for kernels in (True, False):
                with force_extension(kernels):
                    out, spread = torch.empty(500, 7, dtype=dtype), torch.zeros(600, 7, dtype=dtype)
                    rows.read(out, None, index)
                    rows.read(spread, places, index)
                assert torch.equal(out, table.to(dtype)[ids])
                assert torch.equal(spread[places], out)
    with pytest.raises(IndexError, match="outside its table"):
        rows.read(torch.empty(1, 7), None, torch.tensor([300]))
    with pytest.raises(PartitionFormatError, match="ends before its last row"):
        os.truncate(tmp_path / "rows", 6 + 250 * row)
        rows.read(torch.empty(1, 7), None, torch.tensor([299]))


def test_folders_of_dgl_are_named(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 1)
    found = convert_partition(data, tmp_path / "dgl", to="dgl")
    with pytest.raises(PartitionFormatError, match="which DGL wrote.*graphshard convert"):
        load_dgl_partition_data(found, 0, leave_features=True)
