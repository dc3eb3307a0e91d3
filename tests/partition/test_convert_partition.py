# SPDX-License-Identifier: Apache-2.0
"""Partitions from DGL's files to ours and back, by the command and by the function. No process."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl_folder_cases import assert_bits, assert_same_part, dgl_loads, dgl_writes, made_old
from partition_cases import GRAPHS, add_features

import graphshard
from graphshard.errors import PartitionFormatError
from graphshard.graph import add_self_loop
from graphshard.partition import (
    convert_partition,
    load_partition,
    load_partition_stats,
    partition_graph,
    verify_partition,
)
from graphshard.train import FullBatchConfig, FullBatchRun, TaskInfo, read_task, write_task
from graphshard.train.commands import run

pytestmark = pytest.mark.usefixtures("no_syncing")


def assert_alike(one: Path, two: Path, num_parts: int) -> None:
    """Everything is the same, `orig_id` and local ids included; but bools may be bytes."""
    for part in range(num_parts):
        first, second = load_partition(one, part), load_partition(two, part)
        for ends in zip(first[0].edges(), second[0].edges(), strict=True):
            assert torch.equal(*ends)
        for side in ("ndata", "edata"):
            assert_bits(dict(getattr(first[0], side)), dict(getattr(second[0], side)))
        assert_bits(first[1], second[1])
        assert_bits(first[2], second[2])
        assert first[3].metadata() == second[3].metadata()
        assert first[4:] == second[4:]


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_dgl_loads_what_we_convert(name: str, tmp_path: Path) -> None:
    """Also parts of graphs that DGL itself cannot partition."""
    graph, num_parts = add_features(GRAPHS[name]()), 3
    options: dict[str, Any] = {"graph_formats": ("coo", "csc")} if name == "int32" else {}
    partition_graph(graph, "g", num_parts, tmp_path / "ours", quiet=True, **options)
    ours, folder = tmp_path / "ours" / "g.json", tmp_path / "theirs"
    theirs = convert_partition(ours, folder)
    assert sorted(os.listdir(folder)) == ["g.json", "part0", "part1", "part2"]
    assert verify_partition(theirs) == []
    assert_alike(ours, theirs, num_parts)
    for part in range(num_parts):
        if graph.num_nodes() and name != "edgeless":  # of bfloat16 DGL cannot read empty ones
            sizes = [len(rows) for of in load_partition(ours, part)[1:3] for rows in of.values()]
            if min(sizes):
                assert_same_part(load_partition(ours, part), dgl_loads(theirs, part))
    back = convert_partition(theirs, tmp_path / "back")
    assert verify_partition(back) == []
    assert_alike(ours, back, num_parts)
    before, after = load_partition_stats(ours), load_partition_stats(back)
    assert (before.edge_cut, before.halo_nodes) == (after.edge_cut, after.halo_nodes)


@pytest.mark.parametrize(
    ("name", "num_parts", "options"),
    [
        ("plain", 3, {}),
        ("plain", 1, {}),
        ("typed", 2, {"num_hops": 2, "graph_formats": "csc"}),
        ("typed", 3, {}),
        ("typed", 1, {}),
    ],
)
def test_what_dgl_wrote_comes_back_as_it_was(
    name: str, num_parts: int, options: dict[str, Any], tmp_path: Path
) -> None:
    _, theirs, _ = dgl_writes(name, tmp_path / "theirs", num_parts, **options)
    ours = convert_partition(theirs, tmp_path / "ours")
    assert verify_partition(ours) == []
    assert_alike(theirs, ours, num_parts)
    back = convert_partition(ours, tmp_path / "back")
    for part in range(num_parts):
        assert_same_part(load_partition(ours, part), dgl_loads(theirs, part))
        first, second = dgl_loads(theirs, part), dgl_loads(back, part)
        assert_bits(dict(first[0].ndata), dict(second[0].ndata))
        assert_bits(dict(first[0].edata), dict(second[0].edata))
        assert_bits(first[1], second[1])
        assert_bits(first[2], second[2])
    told = json.loads(theirs.read_text())
    assert json.loads(back.read_text()) == told


def test_old_folders_become_new_ones(tmp_path: Path) -> None:
    _, config, mapping = dgl_writes("typed", tmp_path / "old", 2)
    made_old(config, mapping)
    ours = convert_partition(config, tmp_path / "ours", to="graphshard")
    new = convert_partition(config, tmp_path / "new", to="dgl")
    assert verify_partition(ours) == []
    for part in range(2):
        assert_same_part(load_partition(ours, part), dgl_loads(new, part))
        feats = dgl_loads(new, part)[1]
        assert torch.equal(feats["author/orig_id"], load_partition(ours, part)[1]["author/orig_id"])


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    partition_graph(add_features(GRAPHS["plain"]()), "g", 2, tmp_path / "ours", quiet=True)
    ours = tmp_path / "ours" / "g.json"
    with pytest.raises(ValueError, match="out_path must be another folder"):
        convert_partition(ours, tmp_path / "ours")
    with pytest.raises(ValueError, match="to must be 'dgl', 'graphshard' or None"):
        convert_partition(ours, tmp_path / "new", to="pyg")  # type: ignore[arg-type]
    (tmp_path / "new" / "part1").mkdir(parents=True)
    with pytest.raises(ValueError, match="part1 exists"):
        convert_partition(ours, tmp_path / "new")
    assert os.listdir(tmp_path / "new") == ["part1"]
    (tmp_path / "new" / "part1").rmdir()
    rows = tmp_path / "ours" / "part1" / "node_feats.safetensors"
    data = bytearray(rows.read_bytes())
    data[-1] ^= 1
    rows.write_bytes(data)
    with pytest.raises(PartitionFormatError, match="its checksum differs"):
        convert_partition(ours, tmp_path / "new")
    assert os.listdir(tmp_path / "new") == []


def test_a_full_disk_is_told_of_the_file_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition_graph(add_features(GRAPHS["plain"]()), "g", 2, tmp_path / "ours", quiet=True)
    theirs = convert_partition(tmp_path / "ours" / "g.json", tmp_path / "theirs")

    def is_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", is_full)
    for config in (tmp_path / "ours" / "g.json", theirs):
        with pytest.raises(OSError, match="cannot be written .No space left on device") as caught:
            convert_partition(config, tmp_path / "new")
        assert str(tmp_path / "new") in str(caught.value)
        assert list((tmp_path / "new").rglob("*")) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The task goes along; and training on DGL's files gives the same losses, to the bit."""
    graph = GRAPHS["plain"]()
    graph.ndata["feat"] = torch.rand(50, 4)
    graph.ndata["label"] = torch.arange(50) % 3
    for place, split in enumerate(("train", "val", "test")):
        graph.ndata[f"{split}_mask"] = torch.arange(50) % 7 % 3 == place
    partition_graph(add_self_loop(graph), "g", 1, tmp_path / "ours", quiet=True)
    names = ("one", "two", "three")
    task = TaskInfo(name="g", target="_N", num_classes=3, class_names=names)
    write_task(tmp_path / "ours" / "g.json", task)
    assert run(["convert", str(tmp_path / "ours"), "--out", str(tmp_path / "theirs")]) == 0
    assert run(["verify", str(tmp_path / "theirs")]) == 0
    assert run(["convert", str(tmp_path / "theirs"), "--out", str(tmp_path / "back")]) == 0
    assert run(["inspect", str(tmp_path / "back")]) == 0
    assert "classify nodes of type _N into 3 classes" in capsys.readouterr().out
    losses = []
    for folder in ("ours", "theirs", "back"):
        assert read_task(tmp_path / folder / "g.json") == task
        config = FullBatchConfig(data=str(tmp_path / folder / "g.json"), epochs=2, seed=1)
        losses.append(FullBatchRun(config.resolved()).train().losses)
    assert losses[0] == losses[1] == losses[2]
    capsys.readouterr()
    assert run(["inspect", str(tmp_path / "theirs")]) == 0
    assert "DGL wrote it: it has no statistics" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "theirs"), "--plot", "x.png"]) == 2
    assert "has no statistics, because DGL wrote it" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "ours"), "--out", str(tmp_path / "ours")]) == 2


def test_the_command_on_single_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cora, edges = tmp_path / "cora.bin", tmp_path / "edges.csv"
    assert run(["convert", "cora", "--out", str(cora)]) == 0
    (graph,), _ = graphshard.load_graphs(cora)
    expected = graphshard.data.load_dataset("cora", row_normalize=True, add_self_loop=True).graph
    assert torch.equal(graph.ndata["feat"], expected.ndata["feat"])
    parts = ["--parts", "2", "--out", str(tmp_path / "parts"), "--balance-split", "--quiet"]
    assert run(["partition", "--data", str(cora), *parts]) == 0
    edges.write_text("src,dst\n0,1\n1,2\n")
    assert run(["convert", str(edges), "--out", str(tmp_path / "edges.dgl")]) == 0
    (graph,), _ = graphshard.load_graphs(tmp_path / "edges.dgl")
    assert graph.edges()[1].tolist() == [1, 2]
    assert run(["convert", str(tmp_path / "edges.dgl"), "--out", str(tmp_path / "new.csv")]) == 0
    assert (tmp_path / "new.csv").read_text().replace('"', "") == edges.read_text()
    capsys.readouterr()
    graphshard.save_graphs(tmp_path / "huge.bin", graphshard.graph(([], []), num_nodes=2**50))
    arguments = ["--data", str(tmp_path / "huge.bin"), "--parts", "2", "--out", str(tmp_path / "h")]
    assert run(["partition", *arguments]) == 2
    assert "calls for 1125899906842624 nodes" in capsys.readouterr().err
    for arguments, words in (
        ([str(cora), "--out", str(tmp_path / "cora.csv")], "write a .bin file"),
        ([str(cora), "--out", str(tmp_path / "cora.txt")], "a graph goes to a file in"),
        ([str(cora), "--out", str(tmp_path / "c.bin"), "--to", "dgl"], "--to is for partitions"),
        ([str(tmp_path / "none.bin"), "--out", "x.bin"], "No such file"),
    ):
        assert run(["convert", *arguments]) == 2
        assert words in capsys.readouterr().err
