# SPDX-License-Identifier: Apache-2.0
"""Tensor files of partitions that are damaged, or make no sense though signed. No process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from partition_cases import contents, plain, typed
from test_partition_writer import assign, put, rewrite, swap_first_two

from graphshard.errors import PartitionFormatError
from graphshard.fullbatch import load_dgl_partition_data
from graphshard.graph import graph
from graphshard.partition import (
    load_partition,
    load_partition_book,
    load_partition_feats,
    partition_graph,
    verify_partition,
)
from graphshard.partition.checked_files import TensorFile

pytestmark = pytest.mark.usefixtures("no_syncing")


# The structure, with digests that agree


KEYS = {
    "pointers": ("src", "indptr"),
    "gaps": ("src", "dst/wide", "halo/wide", "outer/wide"),
    "coo": ("coo/src", "coo/dst"),
    "csc": ("csc/indptr", "csc/indices"),  # edges are in this order, so it needs no ids
    "csr": ("csr/indptr", "csr/indices", "csr/eids"),
}


@pytest.fixture(params=list(KEYS))
def one_format(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """Both forms of today, and the three of format 1."""
    made, form = tmp_path / "parts", request.param
    if form == "pointers":
        ends = torch.arange(50).repeat(8), torch.arange(400) * 7 % 50
        partition_graph(graph(ends), "g", 2, made, quiet=True)
    elif form == "gaps":
        partition_graph(plain(), "g", 2, made, quiet=True)
    else:
        old = "plain" if form == "coo" else "grouped"
        shutil.copytree(Path(__file__).parent / "format_1" / old, made)
        others = [key for name in ("coo", "csc", "csr") if name != form for key in KEYS[name]]
        rewrite(made, 0, "part_graph", lambda t: [t.pop(key, None) for key in others])
    return made, form


OLD = Path(__file__).parent / "format_1"
ENTRIES = (-(2**63), -(2**31), -1, 1, 10**4, 2**31 - 1, 2**31, 2**62, 2**63 - 1)


def is_refused(folder: Path, part: int = 0) -> None:
    """Neither loading nor verifying may compute with it; a signal would end this process."""
    with pytest.raises(PartitionFormatError, match="is not the structure of a part"):
        load_partition(folder / "g.json", part)
    with pytest.raises(PartitionFormatError, match="is not the structure of a part"):
        load_dgl_partition_data(folder / "g.json", part)
    assert verify_partition(folder / "g.json")
    assert verify_partition(folder / "g.json", checksums=False)


def test_pointers_and_ids_that_lead_outside_are_told(
    one_format: tuple[Path, str], run_all: bool
) -> None:
    folder, name = one_format
    original, sound = contents(folder), verify_partition(folder / "g.json")
    for key in KEYS[name]:
        held = TensorFile.open(folder / "part0/graph.safetensors").read()[key]
        whole = torch.iinfo(held.dtype)
        for place in (0, 3, -1):
            for value in ENTRIES[:: 1 if run_all else 3]:
                if not whole.min <= value <= whole.max or max(place, 0) >= len(held):
                    continue
                if value == 1 and (place == 3 or "indptr" not in key):
                    continue  # which may be right
                rewrite(folder, 0, "part_graph", assign(key, place, value))
                is_refused(folder)
                for file, content in original.items():
                    (folder / file).write_bytes(content)
    assert verify_partition(folder / "g.json") == sound  # nothing, or the size of a file


def test_pointers_whose_differences_overflow_are_told(tmp_path: Path) -> None:
    """Steps of 2 ** 62 wrap around to the right number of edges, and none of them is negative."""
    shutil.copytree(OLD / "grouped", tmp_path, dirs_exist_ok=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["csc/indices"], tensors["csc/indptr"] = (
            tensors[f"csc/{name}"].long() for name in ("indices", "indptr")
        )
        pointer = tensors["csc/indptr"]
        pointer[1:5] = torch.tensor([2**62, -(2**63), -(2**62), 0])
        assert bool((pointer[:6].diff() >= 0).all())

    rewrite(tmp_path, 0, "part_graph", change)
    is_refused(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"src": t["src"].double()}),
        lambda t: t.update({"src": t["src"].view(1, -1)}),
        lambda t: t.update({"dst/gaps": t["dst/gaps"].int()}),
        lambda t: t.update({"halo/wide": t["halo/wide"].int()}),
        lambda t: t.update({"outer/gaps": t["outer/gaps"][:-1].clone()}),
        lambda t: t.update({"outer/gaps": torch.full_like(t["outer/gaps"], 255)}),
        lambda t: t.update({"indptr": torch.zeros(5, dtype=torch.int32)}),
        lambda t: t.pop("dst/gaps"),
        lambda t: t.clear(),
        put("halo", 0, 2**62),
        put("halo", 0, -(2**63)),
    ],
)
def test_columns_that_contradict_the_maps_are_told(change: Any, folder: Path) -> None:
    rewrite(folder, 0, "part_graph", change)
    is_refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"node/_ID": t["node/_ID"].int()}),
        lambda t: t.update({"node/part_id": t["node/part_id"].float()}),
        lambda t: t.update({"node/_TYPE": t["node/_TYPE"].view(-1, 1)}),
        lambda t: t.update({"node/_TYPE": t["node/_TYPE"][:-1].clone()}),
        lambda t: t.update({"edge/_ID": t["edge/_ID"][:-1].clone()}),
        lambda t: t.update({"edge/inner_edge": t["edge/inner_edge"].to(torch.uint8)}),
        lambda t: t.update({"coo/src": t["coo/src"].double()}),
        lambda t: t.update({"coo/dst": t["coo/dst"][:-1].clone()}),
        lambda t: t.update({"coo/dst": t["coo/dst"].int()}),
        lambda t: t.pop("coo/dst"),
        lambda t: t.clear(),
        swap_first_two("node/_ID"),
        swap_first_two("edge/_ID"),
        assign("node/_ID", -1, 10**6),
        assign("edge/_ID", -1, -1),
        assign("node/_ID", -1, 0),
        assign("edge/_ID", -1, 0),
        assign("node/inner_node", -1, 1),
        assign("node/part_id", 0, 1),
        assign("edge/_TYPE", 0, 77),
        assign("edge/_TYPE", 0, -1),
        assign("node/_TYPE", -1, 2**31 - 1),
        assign("node/part_id", -1, 99),
        assign("edge/inner_edge", -1, 1),
    ],
)
def test_columns_of_format_1_that_contradict_the_maps_are_told(change: Any, tmp_path: Path) -> None:
    shutil.copytree(OLD / "typed", tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, 0, "part_graph", change)
    is_refused(tmp_path)


def test_an_own_edge_that_ends_elsewhere_is_told_before_ranks_use_it(folder: Path) -> None:
    num_inner = load_partition_book(folder / "g.json", 0)[0].metadata()[0]["num_nodes"]
    rewrite(folder, 0, "part_graph", put("dst", 0, num_inner))
    with pytest.raises(PartitionFormatError, match="ends at a node of another part"):
        load_dgl_partition_data(folder / "g.json", 0)
    rewrite(folder, 0, "part_graph", put("dst", 0, num_inner - 1))  # a venue
    with pytest.raises(PartitionFormatError, match="ends at a node that is not of type"):
        load_dgl_partition_data(folder / "g.json", 0)


def test_formats_that_hold_other_edges_are_told(tmp_path: Path) -> None:
    shutil.copytree(OLD / "grouped", tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, 0, "part_graph", swap_first_two("csr/indices"))
    (problem,) = verify_partition(tmp_path / "g.json")
    assert problem == "part 0: its edges in the format csr are others than its edges"


def test_orig_ids_of_another_form_are_told(folder: Path) -> None:
    rewrite(
        folder,
        1,
        "node_feats",
        lambda t: t.update({"paper/orig_id": t["paper/orig_id"].double()}),
    )
    with pytest.raises(PartitionFormatError, match=r"got torch.float64 of shape"):
        load_partition(folder / "g.json", 1)
    (problem,) = verify_partition(folder / "g.json")
    assert "must hold orig_id" in problem


# Damage without digests that agree


@pytest.mark.parametrize("key", ["src", "dst/gaps", "halo/wide"])
def test_a_flipped_bit_of_the_structure_does_not_load(key: str, folder: Path) -> None:
    flip(folder / "part1/graph.safetensors", key)
    for load in (load_partition, load_dgl_partition_data):
        with pytest.raises(PartitionFormatError, match="its checksum differs"):
            load(folder / "g.json", 1)


def flip(path: Path, key: str, bit: int = 1) -> None:
    """Flip a bit of the first entry of a tensor."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + json.loads(content[8:start])[key]["data_offsets"][0]] ^= bit
    path.write_bytes(content)


def test_a_flipped_bit_of_a_feature_is_found_if_asked_for(tmp_path: Path) -> None:
    g = plain()
    g.ndata["x"] = torch.rand(50)
    partition_graph(g, "g", 2, tmp_path, quiet=True)
    flip(tmp_path / "part1/node_feats.safetensors", "_N/x")
    path = tmp_path / "g.json"
    load_partition(path, 1)
    for load in (load_partition, load_partition_feats, load_dgl_partition_data):
        load(path, 0, checksums=True)
        with pytest.raises(PartitionFormatError, match="its checksum differs"):
            load(path, 1, checksums=True)


def test_a_bool_that_is_neither_is_told(tmp_path: Path) -> None:
    """In torch a byte of 16 in a mask counts as 16 rows, of which one is filled."""
    g = plain()
    g.ndata["mask"] = torch.ones(50, dtype=torch.bool)
    partition_graph(g, "g", 2, tmp_path, quiet=True)
    flip(tmp_path / "part1/node_feats.safetensors", "_N/mask", 16)
    with pytest.raises(PartitionFormatError, match="a bool of '_N/mask' is neither 0 nor 1"):
        load_partition(tmp_path / "g.json", 1)


def test_a_stale_part_does_not_load(folder: Path, tmp_path: Path) -> None:
    """A host that kept a part of an earlier partition of the same sizes."""
    other = tmp_path / "other"
    partition_graph(typed(), "g", 3, other, part_method="random", seed=5, quiet=True)
    shutil.rmtree(folder / "part1")
    shutil.copytree(other / "part1", folder / "part1")
    with pytest.raises(PartitionFormatError, match="is not the one that g.json describes"):
        load_partition(folder / "g.json", 1)


HEADERS = {
    "dtype": (lambda h: h["x"].update(dtype="F8_E4M3"), "has the unknown dtype"),
    "no dtype": (lambda h: h["x"].pop("dtype"), "says of 'x' what tensors do not have"),
    "list": (lambda h: h.update(x=[]), "says of 'x' what tensors do not have"),
    "shape": (lambda h: h["x"].update(shape=[2**61]), "contradict each other"),
    "negative": (lambda h: h["x"].update(shape=[-3]), "must be whole numbers"),
    "true": (lambda h: h["x"].update(shape=[True]), "must be whole numbers"),
    "offsets": (lambda h: h["x"].update(data_offsets=[0]), "too many numbers, or too few"),
    "gap": (lambda h: h["x"].update(data_offsets=[8, 20]), "contradict|gap or overlap"),
    "metadata": (lambda h: h.update(__metadata__=[]), "its metadata are not texts"),
    "digest": (lambda h: h.update(__metadata__={"blake2b": 7}), "its metadata are not texts"),
    "outside": (lambda h: h["x"].update(shape=[30], data_offsets=[0, 120]), "it has 12 for them"),
}


@pytest.mark.parametrize("name", list(HEADERS))
def test_headers_of_another_form_are_told(name: str, tmp_path: Path) -> None:
    from graphshard.partition.checked_files import TensorFile, write_tensors

    change, message = HEADERS[name]
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.arange(3, dtype=torch.int32)})
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    with pytest.raises(PartitionFormatError, match=message):
        TensorFile.open(path)
    path.write_bytes(b"\xff" * 8 + content[8:])  # a header of 2 ** 64 - 1 bytes
    with pytest.raises(PartitionFormatError, match="too few for its header"):
        TensorFile.open(path)
