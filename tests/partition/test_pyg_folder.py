# SPDX-License-Identifier: Apache-2.0
"""Folders of PyG's Partitioner: read part by part, converted, and what damaged files give.

The oracle is PyG, which writes the folders (METIS, which it takes from pyg-lib, is replaced by a
random assignment), and torch.load. No process group, but for one start of two ranks.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import graphshard
from graphshard.errors import PartitionFormatError
from graphshard.partition import convert_partition, verify_partition
from graphshard.partition.pyg_folder import read_pt
from graphshard.testing import run_ranks
from graphshard.train.commands import app

pytest.importorskip("torch_geometric", reason="PyG, which writes the folders, is not installed")

from torch_geometric.data import Data, HeteroData
from torch_geometric.distributed import Partitioner
from torch_geometric.loader.cluster import ClusterData

NUM_PARTS = 3
ETYPES = [("a", "to", "b"), ("b", "rev_to", "a"), ("a", "self", "a")]
SIZES = {"a": 30, "b": 20}


save = torch.save  # noqa: TID251 - what is read here is what torch writes
load = torch.load  # noqa: TID251


def plain_data() -> Data:
    generator = torch.Generator().manual_seed(1)
    return Data(
        x=torch.randn(50, 4, generator=generator),
        time=torch.randint(0, 9, (50,), generator=generator),
        edge_index=torch.randint(0, 50, (2, 300), generator=generator),
        edge_attr=torch.randn(300, 2, generator=generator, dtype=torch.float64),
    )


def typed_data() -> HeteroData:
    generator = torch.Generator().manual_seed(2)
    data = HeteroData()
    for ntype, count in SIZES.items():
        data[ntype].x = torch.randn(count, 4, generator=generator)
    for etype in ETYPES:
        ends = [torch.randint(0, SIZES[t], (120,), generator=generator) for t in etype[::2]]
        data[etype].edge_index = torch.stack(ends)
        data[etype].edge_attr = torch.randn(120, 1, generator=generator)
    return data


@pytest.fixture(scope="module", params=["plain", "typed"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A folder that PyG wrote, and the data."""
    data = plain_data() if request.param == "plain" else typed_data()
    folder = tmp_path_factory.mktemp("pyg") / request.param

    def assigned(self: Any, edge_index: Any, num_nodes: int) -> torch.Tensor:
        return torch.randperm(num_nodes, generator=torch.Generator().manual_seed(3)) % NUM_PARTS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClusterData, "_metis", assigned)
        Partitioner(data, NUM_PARTS, str(folder)).generate_partition()
    return folder, data


def stores(data: Any) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Node types and relations, as we call those of plain data, to what PyG has."""
    if isinstance(data, HeteroData):
        return {t: data[t] for t in data.node_types}, {t: data[t] for t in data.edge_types}
    return {"_N": data}, {("_N", "_E", "_N"): data}


def test_parts_are_those_that_pyg_wrote(written: tuple[Path, Any]) -> None:
    folder, data = written
    nodes, edges = stores(data)
    parts = [graphshard.load_dgl_partition_data(folder, part) for part in range(NUM_PARTS)]
    rows: dict[str, list[torch.Tensor]] = {}
    for ntype, store in nodes.items():
        ids = [part.node_features[f"{ntype}/orig_id"] for part in parts]
        file = "node_map.pt" if ntype == "_N" else f"node_map/{ntype}.pt"
        owner = load(folder / file)
        assert all(bool((owner[own] == part).all()) for part, own in enumerate(ids))
        assert torch.equal(torch.cat(ids).sort().values, torch.arange(store.num_nodes))
        for part, own in zip(parts, ids, strict=True):
            assert torch.equal(part.node_features[f"{ntype}/feat"], store.x[own])
            if "time" in store:
                assert torch.equal(part.node_features[f"{ntype}/time"], store.time[own])
        rows[ntype] = ids
    for etype, store in edges.items():
        key = ":".join(etype)
        found = [part.edge_features[f"{key}/orig_id"] for part in parts]
        assert torch.equal(torch.cat(found).sort().values, torch.arange(store.num_edges))
        for number, (part, eids) in enumerate(zip(parts, found, strict=True)):
            relation = part.edges[etype]
            src = [
                int(rows[etype[0]][owner][row])
                for owner, row in zip(
                    relation.src_part.tolist(), relation.src.tolist(), strict=True
                )
            ]
            ends = torch.stack([torch.tensor(src), rows[etype[2]][number][relation.dst.long()]])
            assert torch.equal(ends, store.edge_index[:, eids])
            assert torch.equal(part.edge_features[f"{key}/edge_attr"], store.edge_attr[eids])


def test_converted(written: tuple[Path, Any], tmp_path: Path) -> None:
    folder, data = written
    done = CliRunner().invoke(app, ["convert", str(folder), "--out", str(tmp_path / "ours")])
    assert done.exit_code == 0, done.output
    path = tmp_path / "ours" / f"{folder.name}.json"
    verify_partition(path)
    nodes, edges = stores(data)
    for part in range(NUM_PARTS):
        ours = graphshard.load_dgl_partition_data(path, part)
        theirs = graphshard.load_dgl_partition_data(folder / "META.json", part)
        for ntype, store in nodes.items():
            ids = ours.node_features[f"{ntype}/orig_id"]
            given = theirs.node_features[f"{ntype}/orig_id"]
            assert torch.equal(ids.sort().values, given)
            assert torch.equal(ours.node_features[f"{ntype}/feat"], store.x[ids])
        for etype, store in edges.items():
            key = ":".join(etype)
            eids = ours.edge_features[f"{key}/orig_id"]
            assert torch.equal(eids.sort().values, theirs.edge_features[f"{key}/orig_id"].sort()[0])
            assert torch.equal(ours.edge_features[f"{key}/edge_attr"], store.edge_attr[eids])
    done = CliRunner().invoke(app, ["inspect", str(folder)])
    assert done.exit_code != 0
    assert "graphshard convert" in f"{done.output} {done.exception}".replace("\n", " ")
    with pytest.raises(ValueError, match="convert that again"):
        convert_partition(folder, tmp_path / "dgl", "dgl")


def summed(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    data = graphshard.pyg.shard(folder)
    total = torch.zeros_like(data.feat if "feat" in data else data.x)
    total.index_add_(0, data.edge_index[1], data.x[data.edge_index[0]])
    return {"ids": data.n_id, "sums": total}


def test_ranks_share_the_parts(written: tuple[Path, Any]) -> None:
    folder, data = written
    if isinstance(data, HeteroData):
        pytest.skip("typed parts are sharded in tests/pyg; one start of ranks is enough")
    found = run_ranks(summed, NUM_PARTS, str(folder))
    expected = torch.zeros_like(data.x)
    expected.index_add_(0, data.edge_index[1], data.x[data.edge_index[0]])
    for one in found:
        torch.testing.assert_close(one["sums"], expected[one["ids"]])


# -- the reader of .pt files -----------------------------------------------------------------------


VALUES: dict[str, Any] = {
    "tensors": [torch.randn(3, 4), torch.arange(5, dtype=torch.int32), torch.tensor(2.5)],
    "dtypes": {
        str(dtype): torch.ones(3).to(dtype)
        for dtype in (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
        )
    },
    "views": (torch.arange(24).view(4, 6).t(), torch.arange(10)[3:7], torch.empty(0, 3)),
    "plain": {"a": None, "b": True, "c": -(2**40), "d": "ü", "e": 1.5, "f": [1, [2]], "g": 300},
    "defaults": defaultdict(dict, {("a", "to", "b"): {"x": torch.zeros(2)}}),
    "ordered": OrderedDict(x=torch.ones(1)),
    "many": [torch.tensor([i]) for i in range(300)],
    "long": {f"key{i}": i for i in range(2000)},
}


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_that_torch_saved(name: str, tmp_path: Path) -> None:
    save(VALUES[name], tmp_path / "value.pt")
    assert_same(read_pt(tmp_path / "value.pt"), VALUES[name])


def test_shared_storages_are_shared(tmp_path: Path) -> None:
    whole = torch.arange(8)
    save([whole, whole[2:]], tmp_path / "value.pt")
    one, other = read_pt(tmp_path / "value.pt")
    other[0] = 99
    assert int(one[2]) == 99


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def rewritten(path: Path, change: Any) -> None:
    """An archive with its records changed: from name and bytes to bytes, or None to drop it."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            new = change(name, content)
            if new is not None:
                archive.writestr(name, new)


DAMAGE: dict[str, tuple[Any, str]] = {
    "no storage": (lambda n, c: None if n.endswith("data/0") else c, "has no record 'data/0'"),
    "short storage": (lambda n, c: c[:-8] if n.endswith("data/0") else c, "numbers, and not"),
    "half a number": (lambda n, c: c[:-3] if n.endswith("data/0") else c, "part of a number"),
    "no pickle": (lambda n, c: None if n.endswith("data.pkl") else c, "has no record 'data.pkl'"),
    "cut pickle": (lambda n, c: c[:40] if n.endswith("data.pkl") else c, "cannot be read"),
    "other order": (lambda n, c: b"big" if n.endswith("byteorder") else c, "endian"),
    "huge tensor": (
        lambda n, c: c.replace(b"K\x06\x85", b"M\xff\xff\x85") if n.endswith("data.pkl") else c,
        "does not fit its storage",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_errors(name: str, tmp_path: Path) -> None:
    change, message = DAMAGE[name]
    path = tmp_path / "value.pt"
    save({"x": torch.arange(6)}, path)
    rewritten(path, change)
    with pytest.raises(PartitionFormatError, match=message):
        read_pt(path)


def test_nothing_in_a_file_runs(tmp_path: Path, capsys: Any) -> None:
    save({"x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(PartitionFormatError, match="print"):
        read_pt(tmp_path / "evil.pt")
    save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    with pytest.raises(PartitionFormatError, match="none that these files have"):
        read_pt(tmp_path / "module.pt")
    assert capsys.readouterr().out == ""
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x00" * 1000000)
    with pytest.raises(PartitionFormatError, match="compressed"):
        read_pt(tmp_path / "bomb.pt")
    save(torch.ones(2), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(PartitionFormatError, match=r"torch 1\.6 or later"):
        read_pt(tmp_path / "old.pt")


def test_random_changes_are_errors_or_values(tmp_path: Path, run_all: bool) -> None:
    """A changed byte gives an error, or a value if it was in a number; never anything else."""
    path = tmp_path / "value.pt"
    save({("a", "b"): {"x": torch.arange(40).view(8, 5), "y": [1.5, None, "z"]}}, path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        program = archive.read("value/data.pkl")
    start = content.index(program)
    generator = np.random.default_rng(0)
    outcomes = {"value": 0, "error": 0}
    for _ in range(20_000 if run_all else 300):
        changed = bytearray(content)
        at = int(generator.integers(start, start + len(program)))
        changed[at] = int(generator.integers(256))
        if generator.random() < 0.3:
            changed = changed[: int(generator.integers(len(changed)))]
        path.write_bytes(changed)
        try:
            read_pt(path)
            outcomes["value"] += 1
        except PartitionFormatError:
            outcomes["error"] += 1
    assert outcomes["error"] > 50


def test_random_programs_are_errors_or_values(tmp_path: Path, run_all: bool) -> None:
    """The same with digests that fit, so that the interpreter meets what was changed."""
    path = tmp_path / "value.pt"
    save({("a", "b"): {"x": torch.arange(40).view(8, 5), "y": [1.5, None, "z"]}}, path)
    content = path.read_bytes()
    generator = np.random.default_rng(1)

    def changed(name: str, record: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return record
        program = bytearray(record)
        for _ in range(int(generator.integers(1, 4))):
            program[int(generator.integers(len(program)))] = int(generator.integers(256))
        return bytes(program)

    errors = 0
    for _ in range(20_000 if run_all else 300):
        path.write_bytes(content)
        rewritten(path, changed)
        try:
            read_pt(path)
        except PartitionFormatError:
            errors += 1
    assert errors > 50


def test_folders_that_contradict_themselves(written: tuple[Path, Any], tmp_path: Path) -> None:
    folder, data = written
    copied = tmp_path / "copied"

    def loaded(part: int = 0) -> Any:
        return graphshard.load_dgl_partition_data(copied, part)

    def fresh() -> None:
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(folder, copied)

    fresh()
    with pytest.raises(ValueError, match="no part 7"):
        loaded(7)
    (copied / "part_0" / "graph.pt").unlink()
    with pytest.raises(PartitionFormatError, match=r"graph\.pt"):
        loaded()
    fresh()
    shutil.copy(copied / "part_1" / "graph.pt", copied / "part_0" / "graph.pt")
    with pytest.raises(PartitionFormatError, match="not those that edge_map gives"):
        loaded()
    fresh()
    shutil.copy(copied / "part_1" / "node_feats.pt", copied / "part_0" / "node_feats.pt")
    with pytest.raises(PartitionFormatError, match="not those that node_map gives"):
        loaded()
    fresh()
    meta = json.loads((copied / "META.json").read_text())
    for key, value in (("num_parts", -1), ("is_hetero", None), ("num_parts", 1)):
        (copied / "META.json").write_text(json.dumps({**meta, key: value}))
        with pytest.raises(PartitionFormatError):
            loaded()
    if isinstance(data, HeteroData):
        (copied / "META.json").write_text(json.dumps({**meta, "node_types": ["../a", "b"]}))
        with pytest.raises(PartitionFormatError, match="name each node type"):
            loaded()
