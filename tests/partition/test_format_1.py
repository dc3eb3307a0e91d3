# SPDX-License-Identifier: Apache-2.0
"""Folders of format 1, as graphshard wrote them until November 2026, load as they did. No process.

``tests/partition/format_1`` was written by commit 8cdab7a7, of the graphs that are made here. What
its files say is read with safetensors alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from partition_cases import contents, int32, plain, typed
from safetensors.torch import load_file
from torch import Tensor

from graphshard.errors import PartitionFormatError
from graphshard.fullbatch import load_dgl_partition_data
from graphshard.graph import Graph
from graphshard.partition import (
    convert_partition,
    load_partition,
    load_partition_feats,
    load_partition_stats,
    partition_graph,
    verify_partition,
)

pytestmark = pytest.mark.usefixtures("no_syncing")

FOLDERS = Path(__file__).parent / "format_1"
CASES: dict[str, tuple[Callable[[], Graph], int, dict[str, Any]]] = {
    "plain": (plain, 2, {}),
    "typed": (typed, 3, {"num_hops": 2}),
    "grouped": (int32, 2, {"graph_formats": ["csc", "csr"], "num_hops": 0}),
}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    alike = (one[name].dtype == two[name].dtype for name in one)
    return one.keys() == two.keys() and all(alike) and all(torch.equal(one[n], two[n]) for n in one)


def assert_same_parts(one: Path, two: Path, num_parts: int) -> None:
    """All that loading gives, dtypes included."""
    for part in range(num_parts):
        first, second = load_partition(one, part), load_partition(two, part)
        for name in ("coo", "csc", "csr"):
            ours, theirs = (getattr(g.relations[0], name)() for g in (first[0], second[0]))
            for a, b in zip(ours, theirs, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
        assert same(dict(first[0].ndata), dict(second[0].ndata))
        assert same(dict(first[0].edata), dict(second[0].edata))
        assert same(first[1], second[1])
        assert same(first[2], second[2])
        assert first[3].metadata() == second[3].metadata()
        assert first[4:] == second[4:]
        ours, theirs = (load_dgl_partition_data(path, part) for path in (one, two))
        for etype, edges in ours.edges.items():
            others = theirs.edges[etype]
            assert torch.equal(edges.src_part, others.src_part)
            assert torch.equal(edges.src, others.src)
            assert torch.equal(edges.dst, others.dst)


@pytest.mark.parametrize("name", list(CASES))
def test_a_folder_of_format_1_loads_to_the_same_graph(name: str, tmp_path: Path) -> None:
    make, num_parts, options = CASES[name]
    old = FOLDERS / name / "g.json"
    assert json.loads(old.read_text())["format_version"] == 1
    for part in range(num_parts):
        graph, node_feats, edge_feats, *_ = load_partition(old, part, checksums=True)
        files = [FOLDERS / name / f"part{part}" / f"{f}.safetensors" for f in FILES]
        stored = load_file(files[0])
        for side, data in (("node", graph.ndata), ("edge", graph.edata)):
            fields = {k.split("/")[1]: v for k, v in stored.items() if k.startswith(side)}
            assert same(dict(data), fields)
        for form, arrays in (("coo", graph.edges()), ("csc", graph.relations[0].csc())):
            for key, array in zip(("src", "dst", "eids") if form == "coo" else CSC, arrays):  # noqa: B905
                assert (
                    array is None
                    or f"{form}/{key}" not in stored
                    or torch.equal(array, stored[f"{form}/{key}"])
                )
        assert graph.idtype == make().idtype
        assert same(node_feats, load_file(files[1]))
        assert same(edge_feats, load_file(files[2]))
        assert same(load_partition_feats(old, part)[1] or {}, edge_feats)
    assert verify_partition(old) == []
    shutil.copytree(FOLDERS / name, tmp_path / "replaced")
    path = tmp_path / "replaced" / "g.json"
    g = make()
    for ntype in g.ntypes:
        count = g.num_nodes(ntype)
        values = torch.arange(count * 2, dtype=torch.float32).view(count, 2) / 8
        g.nodes[ntype].data.update({"x": values, "mask": torch.arange(count) % 3 == 0})
    for etype in g.canonical_etypes:
        weight = torch.arange(g.num_edges(etype)).to(torch.bfloat16)
        g.edges[etype].data["weight"] = weight
    given = {ntype: torch.arange(g.num_nodes(ntype)) % num_parts for ntype in g.ntypes}
    parts = given if len(given) > 1 else next(iter(given.values()))
    partition_graph(
        *(g, "g", num_parts, path.parent), part_method=parts, reorder=False, quiet=True, **options
    )
    assert json.loads(path.read_text())["format_version"] == 2
    assert verify_partition(path) == []
    assert_same_parts(old, path, num_parts)
    before, after = load_partition_stats(old), load_partition_stats(path)
    assert before.edge_cut == after.edge_cut
    # And written again, which is how a folder becomes one of format 2.
    again = convert_partition(old, tmp_path / "again", to="graphshard")
    assert verify_partition(again) == []
    assert_same_parts(old, again, num_parts)
    written, expected = contents(tmp_path / "again"), contents(path.parent)
    assert {k: v for k, v in written.items() if "json" not in k} == {
        k: v for k, v in expected.items() if "json" not in k
    }


FILES = ("graph", "node_feats", "edge_feats")
CSC = ("indptr", "indices", "eids")


def test_damage_of_format_1_is_found_and_later_formats_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "grouped", tmp_path / "g")
    structure = folder / "part1" / "graph.safetensors"
    whole = structure.read_bytes()
    for place in range(len(whole) - 1, len(whole) // 2, -max(1, len(whole) // 40)):
        structure.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert verify_partition(folder / "g.json")
        with pytest.raises(PartitionFormatError):
            load_partition(folder / "g.json", 1)
    structure.write_bytes(whole)
    assert verify_partition(folder / "g.json") == []
    path = folder / "g.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"format_version": 3}))
    with pytest.raises(PartitionFormatError, match="format version 3, and this graphshard reads 1"):
        load_partition(path, 0)
