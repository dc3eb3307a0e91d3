# SPDX-License-Identifier: Apache-2.0
"""Runs whose features stay in files: they are those of features in memory. Up to 5 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet
import pytest
import torch
from train_cases import (
    as_values,
    config_of,
    plain_graph,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    write_parts,
)

import graphshard
from graphshard import load_dgl_partition_data
from graphshard._base.file_rows import FilePiece, RowsFile, RowsInFiles
from graphshard._base.kernels import force_extension
from graphshard._base.lazy_columns import LazyColumns
from graphshard.errors import PartitionFormatError
from graphshard.fullbatch import StoredEdges
from graphshard.partition import convert_partition, partition_graph
from graphshard.sampling.file_store import tables_in_files
from graphshard.testing import run_ranks
from graphshard.train import (
    FullBatchRun,
    SampledConfig,
    SampledRun,
    _row_files,
    _sampled_inputs,
    predict,
)

# As `CASES`, of full batch.
WHOLE: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "gcn": ("plain", 2, "random", {"model": "gcn"}),
    "gcn_wide": ("plain", 1, "random", {"model": "gcn", "hidden": 30, "residual": True}),
    "sage": ("plain", 2, "empty_part", {"model": "sage", "layers": 3}),
    "sage_wide": ("plain", 1, "random", {"model": "sage", "hidden": 30, "norm": True}),
    "sage_gcn": ("plain", 1, "random", {"model": "sage", "aggregator": "gcn", "hidden": 30}),
    "sage_pool": ("plain", 2, "random", {"model": "sage", "aggregator": "pool"}),
    "encoder": ("plain", 2, "random", {"model": "gcn", "encoder": True}),
    "gat": ("plain", 2, "random", {"model": "gat", "heads": 2, "aggregation": "sequential"}),
    "gatv2": ("plain", 5, "empty_part", {"model": "gatv2", "heads": 2, "hidden": 3}),
    "rgcn": ("plain", 2, "random", {"model": "rgcn", "num_bases": 2}),
    "rgcn_float32": ("plain", 1, "random", {"model": "rgcn", "dtype": "float32"}),
    "hgt_plain": ("plain", 1, "random", {"model": "hgt", "heads": 2}),
    "typed": ("typed", 2, "random", {"model": "sage", "norm": True, "encoder": True}),
    "typed_gatv2": ("typed", 5, "empty_part", {"model": "gatv2", "heads": 2, "hidden": 3}),
    "typed_rgcn": ("typed", 2, "no_train", {"model": "rgcn"}),
    "typed_hgt": ("typed", 1, "random", {"model": "hgt", "heads": 2}),
    "bfloat16": ("plain", 2, "random", {"model": "sage", "dtype": "bfloat16"}),
    "autocast": ("plain", 1, "random", {"model": "gat", "dtype": "float32", "autocast": True}),
    "categories": ("edge_categories", 1, "random", {"model": "gat", "dtype": "float32"}),
    "edges": ("edge_values", 2, "random", {"model": "gat", "task": "edge regression"}),
    "links": ("typed_links", 2, "random", {"model": "sage", "task": "link prediction"}),
    "own": ("plain", 2, "random", {"model": "own_models:Net", "dtype": "float32"}),
}

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
    "edges_float32": (
        "edge_values",
        1,
        "random",
        {"model": "gat", **EDGE_VALUES, "dtype": "float32"},
    ),
    "links": ("plain_links", 2, "random", {"model": "sage", **LINKS}),
    "typed_links": ("typed_links", 2, "random", {"model": "sage", **LINKS}),
    "own": ("plain", 2, "random", {"model": "own_models:Net", "dtype": "float32"}),
    "own_typed": ("typed", 2, "random", {"model": "own_models:Net"}),
    "layered": ("plain", 2, "random", {"model": "own_models:Layered"}),
    "layered_typed": ("typed", 5, "empty_part", {"model": "own_models:Layered"}),
    "machines": ("plain", 2, "random", {"model": "gcn", "dtype": "bfloat16"}),
    "machines_typed": ("edge_values", 3, "random", {"model": "gat", "hidden": 3, **EDGE_VALUES}),
    "apart": ("typed", 2, "random", {"model": "sage", "map_features": False}),
}


def train_apart(rank: int, world_size: int, values: dict[str, Any]) -> Any:
    """A run on a rank that sees no file of the others, as on a machine of its own."""

    def own(config: Any, num_ranks: int, part: int) -> Any:
        tables = tables_in_files(config, num_ranks, part)
        return {
            key: [rows if number == part else None for number, rows in enumerate(of_ranks)]
            for key, of_ranks in tables.items()
        }

    here = mock.patch.object(_row_files, "machine_name", return_value=f"machine-{rank}")
    with here, mock.patch.object(_sampled_inputs, "tables_in_files", own):
        return train_sampled_on_rank(rank, world_size, values)


USUAL = ("typed", "machines")


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
        train = train_apart if case.startswith("machines") and more else train_sampled_on_rank
        found.append(run_ranks(train, world_size, as_values(config)))
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


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c == "gat" else pytest.mark.exhaustive) for c in WHOLE],
)
def test_full_batch_of_features_in_files_is_that_of_features_in_memory(
    case: str, tmp_path: Path
) -> None:
    kind, world_size, how, values = WHOLE[case]
    data = write_parts(tmp_path, kind, world_size, how)
    found = []
    for more in ({}, {"memory": "3GiB"}):
        config = config_of(data, **{"dropout": 0.0, "epochs": 3, **values, **more})
        found.append(run_ranks(train_on_rank, world_size, as_values(config)))
    within = {"float32": 1e-5, "bfloat16": 0.05}.get(config.dtype, 1e-10)
    within = 0.02 if config.autocast else within
    for in_memory, in_files in zip(*found, strict=True):
        losses = in_memory["result"]["losses"]
        assert in_files["result"]["losses"] == pytest.approx(losses, abs=within)
        for part in ("shared", "local"):
            for name, value in in_memory[part].items():
                if value.is_floating_point():
                    other = in_files[part][name]
                    torch.testing.assert_close(other, value, rtol=0, atol=100 * within)


def test_dropout_of_features_in_files_is_random_and_repeats(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 1)
    config = config_of(data, model="sage", dropout=0.5, epochs=3, memory="3GiB")
    first, again = (FullBatchRun(config).train().losses for _ in range(2))
    assert first == again
    assert (
        first != FullBatchRun(config_of(data, model="sage", epochs=3, dropout=0.0)).train().losses
    )


def made_for_edges(rank: int, world_size: int, values: dict[str, Any]) -> list[Any]:
    """What a run with everything in files has made that is as long as its edges."""
    run = SampledRun(SampledConfig(**values))
    losses = run.train().losses
    data, (frame,) = run._shard.data, run._learner.graph._edge_frames
    (edges,) = data.edges.values()
    assert isinstance(edges, StoredEdges)
    assert isinstance(data.edge_features, LazyColumns)
    (original_ids,) = data.edge_features._makers.values()
    ids = frame.unread(graphshard.EID)._rows
    return [list(edges._columns), ids, original_ids.cache_info().currsize, len(losses)]


def test_edges_in_files_take_no_memory(tmp_path: Path) -> None:
    graph = graphshard.to_bidirected(plain_graph(), copy_ndata=True)
    partition_graph(graph, "g", 2, str(tmp_path), part_method="random", quiet=True)
    # Reverses and self loops are looked for, and are there.
    wanted = {"both_directions": None, "self_loops": None, "memory": "3GiB", "epochs": 1}
    config = sampled_config_of(str(tmp_path / "g.json"), model="gcn", **wanted)
    assert run_ranks(made_for_edges, 2, as_values(config)) == [[[], None, 0, 1]] * 2


def test_a_budget_too_small_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 1)
    with pytest.raises(ValueError, match=r"memory must be at least .* MiB .*got 50 MiB; most of"):
        SampledRun(sampled_config_of(data, model="sage", memory="50MiB"))
    with pytest.raises(ValueError, match=r"memory must be at least .*give more, mode sample, or"):
        FullBatchRun(config_of(data, model="sage", memory="50MiB"))
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


LIMITED = """
import resource, sys
from pathlib import Path
from graphshard.train import FullBatchConfig, SampledConfig, predict, train
resource.setrlimit(resource.RLIMIT_DATA, (900 << 20, 900 << 20))
_, data, kind, run = sys.argv
shape = dict(data=data, model="sage", hidden=16, epochs=1, dropout=0.0, encoder=False, norm=False)
shape |= dict(both_directions=False, memory=900 << 20 if kind != "memory" else None)
if kind == "predict":
    predict(data, run, run + ".parquet", device="cpu", embeddings=True, memory=900 << 20)
elif kind == "full":
    print(train(FullBatchConfig(**shape)).losses)
else:
    shape |= dict(fanouts=(5, 5), batch_size=200, run=run)
    shape |= dict(dtype="float64" if kind == "memory" else "float32")
    print(train(SampledConfig(**shape)).losses)
print(*(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))
"""


@pytest.mark.exhaustive
def test_memory_stays_under_a_limit_that_features_pass(tmp_path: Path) -> None:
    """800 MB of features, 900 MiB for all that a process has itself, Python and torch included."""
    count, random = 200_000, torch.Generator().manual_seed(1)
    ends = torch.randint(0, count, (2, 400_000), generator=random)
    graph = graphshard.graph((ends[0], ends[1]), num_nodes=count)
    graph.ndata["feat"] = torch.rand(count, 1000, generator=random)
    graph.ndata["label"] = torch.randint(0, 3, (count,), generator=random)
    graph.ndata["train_mask"] = torch.arange(count) < 2000
    graphshard.partition_graph(graph, "g", 1, tmp_path, part_method="random", quiet=True)
    del graph
    data, run = str(tmp_path / "g.json"), str(tmp_path / "run")
    command = [sys.executable, "-c", LIMITED, data]
    for kind in ("sample", "predict", "full"):
        done = subprocess.run([*command, kind, run], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert int(done.stdout.split()[-2]) < 900 << 10, kind
    refused = subprocess.run(
        [*command, "memory", run + "2"], capture_output=True, text=True, check=False
    )
    assert refused.returncode != 0
    found = pyarrow.parquet.read_table(run + ".parquet", memory_map=False)
    expected = predict(data, run, device="cpu", embeddings=True)
    assert found["id"].equals(expected["id"])
    for name in ("p_0", "p_1", "p_2"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-5)
