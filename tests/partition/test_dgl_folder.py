# SPDX-License-Identifier: Apache-2.0
"""Partition folders of DGL's, which DGL 1.1.3 writes here: read, verified, trained on.

Uses 2 gloo ranks, by `run_ranks`, for the last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl_folder_cases import assert_bits, assert_same_part, dgl_loads, dgl_writes, made_old
from partition_cases import plain
from torch import Tensor

import graphshard
from graphshard import function as fn
from graphshard.errors import PartitionFormatError
from graphshard.graph import load_graphs, save_graphs
from graphshard.graph.dgl_files import load_tensors, save_tensors
from graphshard.partition import (
    load_partition,
    load_partition_book,
    load_partition_feats,
    load_partition_stats,
    partition_graph,
    verify_partition,
)
from graphshard.testing import run_ranks


@pytest.mark.parametrize(
    ("name", "num_parts", "options"),
    [
        ("plain", 3, {}),
        ("plain", 1, {}),
        ("plain", 2, {"num_hops": 2, "graph_formats": "csc"}),
        ("typed", 3, {}),
        ("typed", 1, {}),
        ("typed", 2, {"num_hops": 2, "graph_formats": ["csr", "csc"]}),
        ("typed", 2, {"graph_formats": "csr"}),
        ("bipartite", 2, {}),
    ],
)
def test_what_dgl_writes_is_loaded_as_dgl_loads_it(
    name: str, num_parts: int, options: dict[str, Any], tmp_path: Path
) -> None:
    _, config, _ = dgl_writes(name, tmp_path, num_parts, **options)
    assert verify_partition(config) == []
    builds = set()
    for part in range(num_parts):
        ours, theirs = load_partition(config, part), dgl_loads(config, part)
        assert_same_part(ours, theirs)
        nodes, edges = load_partition_feats(config, part)
        assert nodes is not None
        assert edges is not None
        assert_bits(nodes, ours[1])
        assert_bits(edges, ours[2])
        data = graphshard.load_dgl_partition_data(config, part)
        for etype, own in data.edges.items():
            number = data.canonical_etypes.index(etype)
            graph = theirs[0]
            here = graph.edata["inner_edge"].bool()
            if "_TYPE" in graph.edata:
                here &= graph.edata["_TYPE"] == number
            src, dst = (ends[here] for ends in graph.edges(order="eid"))
            owner = theirs[3].nid2partid(graph.ndata["_ID"])
            assert torch.equal(own.src_part.long(), owner[src])
            starts = torch.tensor(data.node_map(etype[0]).starts)
            ids = theirs[3].map_to_per_ntype(graph.ndata["_ID"])[1]
            assert torch.equal(own.src.long(), ids[src] - starts[owner[src]])
            assert torch.equal(own.dst.long(), ids[dst] - data.node_map(etype[2]).starts[part])
        builds.add(data.build)
    assert len(builds) == 1
    assert None not in builds
    with pytest.raises(PartitionFormatError, match="has no statistics, because DGL wrote it"):
        load_partition_stats(config)
    with pytest.raises(ValueError, match="is not a partition that graphshard wrote"):
        partition_graph(plain(), name, 2, tmp_path, quiet=True)


@pytest.mark.parametrize("name", ["plain", "typed"])
def test_folders_of_old_releases(name: str, tmp_path: Path) -> None:
    """Relations that are named alone, no types, `orig_id` in the graph: nothing is lost."""
    _, config, mapping = dgl_writes(name, tmp_path, 2)
    new = [load_partition(config, part) for part in range(2)]
    theirs = [dgl_loads(config, part) for part in range(2)]
    made_old(config, mapping)
    assert verify_partition(config) == []
    for part in range(2):
        ours = load_partition(config, part)
        assert_same_part(ours, theirs[part])
        for old, recent, originals in (
            (ours[1], new[part][1], mapping[0]),
            (ours[2], new[part][2], mapping[1]),
        ):
            assert set(old) == set(recent)
            for owner, ids in originals.items():
                key = f"{owner if isinstance(owner, str) else ':'.join(owner)}/orig_id"
                assert torch.equal(old[key], ids[recent[key]])
    book, _, ntypes, etypes = load_partition_book(config, 1)
    assert (list(ntypes), list(etypes)) == (new[0][5], new[0][6])
    assert book.metadata() == new[1][3].metadata()


def test_a_relation_that_no_edge_explains(tmp_path: Path) -> None:
    _, config, mapping = dgl_writes("typed", tmp_path, 2)
    made_old(config, mapping)
    content = json.loads(config.read_text())
    content["etypes"]["likes"] = 3
    content["edge_map"]["likes"] = [[n, n] for _, n in content["edge_map"]["writes"]]
    config.write_text(json.dumps(content))
    with pytest.raises(PartitionFormatError, match="no edge tells which node types .*'likes'"):
        load_partition_book(config, 0)


def outputs(graph: Any, data: Any) -> dict[str, Tensor]:
    """Sums over the in-edges of each relation, weighted by edge, in float64."""
    found = {}
    for etype in graph.canonical_etypes:
        one = graph[etype]
        one.srcdata["x"] = data[etype[0]]
        one.edata["w"] = data[etype]
        one.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "y"))
        found[":".join(etype)] = one.dstdata["y"]
    return found


def train_part(rank: int, world_size: int, config: str) -> dict[str, Tensor]:
    """Outputs at this rank's nodes, and the gradients of its rows and of its edge weights."""
    data = graphshard.load_dgl_partition_data(config, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    inputs: dict[Any, Tensor] = {}
    for ntype in data.node_type_names:
        inputs[ntype] = data.node_features[f"{ntype}/wide"].flatten(1).double().requires_grad_()
    for etype in data.canonical_etypes:
        wide = data.edge_features[f"{':'.join(etype)}/wide"][:, 0, :1]
        inputs[etype] = wide.double().requires_grad_()
    found = outputs(graph, inputs)
    torch.stack([y.square().sum() for y in found.values()]).sum().backward()
    for kind, rows in inputs.items():
        name = kind if isinstance(kind, str) else ":".join(kind)
        found[f"grad {name}"] = torch.zeros_like(rows) if rows.grad is None else rows.grad
    return {name: rows.detach() for name, rows in found.items()}


@pytest.mark.parametrize("name", ["plain", "typed"])
def test_training_on_dgls_parts_gives_what_one_process_gives(name: str, tmp_path: Path) -> None:
    """By DGL's own mapping of ids; and so does a partition of ours with the same assignment."""
    graph, config, (nodes, edges) = dgl_writes(name, tmp_path / "theirs", 2)
    book, *_ = load_partition_book(config, 0)
    inputs: dict[Any, Tensor] = {
        t: graph.nodes[t].data["wide"].flatten(1).double().requires_grad_() for t in graph.ntypes
    }
    for etype in graph.canonical_etypes:
        inputs[etype] = graph.edges[etype].data["wide"][:, 0, :1].double().requires_grad_()
    whole = outputs(graph, inputs)
    torch.stack([y.square().sum() for y in whole.values()]).sum().backward()
    expected: dict[str, tuple[Tensor, Tensor]] = {}
    for etype in graph.canonical_etypes:
        key = ":".join(etype)
        expected[key] = whole[key].detach(), nodes[etype[2]]
        grad = inputs[etype].grad
        assert grad is not None
        expected[f"grad {key}"] = grad, edges[etype]
    for ntype in graph.ntypes:
        grad = inputs[ntype].grad
        expected[f"grad {ntype}"] = torch.zeros(1) if grad is None else grad, nodes[ntype]
    found = run_ranks(train_part, 2, str(config))
    for key, (rows, original) in expected.items():
        together = torch.cat([part[key] for part in found])
        torch.testing.assert_close(together, rows[original], rtol=0, atol=1e-10)
    parts = {t: torch.empty(len(ids), dtype=torch.int64) for t, ids in nodes.items()}
    for ntype, ids in nodes.items():
        parts[ntype][ids] = book.nid2partid(torch.arange(len(ids)), ntype)
    mapping = partition_graph(
        graph,
        "ours",
        2,
        tmp_path / "ours",
        part_method=parts if len(parts) > 1 else parts["_N"],
        return_mapping=True,
        quiet=True,
    )
    assert mapping is not None
    ours = run_ranks(train_part, 2, str(tmp_path / "ours" / "ours.json"))
    our_nodes = mapping[0] if isinstance(mapping[0], dict) else {"_N": mapping[0]}
    for etype in graph.canonical_etypes:
        key = ":".join(etype)
        together = [torch.cat([part[key] for part in of]) for of in (ours, found)]
        unmixed = [torch.empty_like(rows) for rows in together]
        unmixed[0][our_nodes[etype[2]]] = together[0]
        unmixed[1][nodes[etype[2]]] = together[1]
        torch.testing.assert_close(unmixed[0], unmixed[1], rtol=0, atol=1e-10)


def change(path: Path, **columns: Any) -> None:
    """Write a part's structure again with some columns changed, or left out."""
    (graph,), _ = load_graphs(path)
    for name, value in columns.items():
        data = graph.edata if name in ("inner_edge",) or name.startswith("e_") else graph.ndata
        key = name.removeprefix("e_")
        if value is None:
            del data[key]
        else:
            data[key] = value(data[key])
    save_graphs(path, graph)


def swapped(ids: Tensor) -> Tensor:
    return torch.cat([ids[1:2], ids[:1], ids[2:]])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"inner_node": None}, "inner_node is missing"),
        ({"_ID": None}, "_ID is missing"),
        ({"_ID": lambda ids: ids.float()}, "_ID is torch.float32"),
        ({"_ID": lambda ids: ids + 1000}, "damaged or not of this partition"),
        ({"_ID": swapped}, "inner nodes are not those of node_map"),
        ({"e__ID": swapped}, "inner edges are not those of edge_map"),
        ({"inner_node": lambda flags: flags * 2}, "neither 0 nor 1"),
        ({"inner_node": lambda flags: flags * 0}, "does not mark exactly the first"),
        ({"inner_edge": lambda flags: flags * 0}, "does not mark exactly the first"),
        ({"part_id": lambda owners: 1 - owners}, "part_id contradicts node_map"),
        ({"_ID": lambda ids: torch.cat([ids[:-1], ids[-2:-1]])}, "a foreign node is there twice"),
    ],
)
def test_a_structure_that_is_none(
    columns: dict[str, Any], words: str, tmp_path: Path, parts_by_dgl: Path
) -> None:
    config = parts_by_dgl
    path = config.parent / "part0" / "graph.dgl"
    before = path.read_bytes()
    try:
        change(path, **columns)
        with pytest.raises(PartitionFormatError, match=words) as caught:
            load_partition(config, 0)
        assert str(path) in str(caught.value)
        assert verify_partition(config)
    finally:
        path.write_bytes(before)


@pytest.fixture(scope="module")
def parts_by_dgl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, config, _ = dgl_writes("plain", tmp_path_factory.mktemp("theirs"), 2)
    return config


def test_files_that_are_missing_or_elsewhere(tmp_path: Path) -> None:
    _, config, _ = dgl_writes("plain", tmp_path / "theirs", 2)
    rows = load_tensors(config.parent / "part0" / "node_feat.dgl")
    save_tensors(config.parent / "part0" / "node_feat.dgl", {n: t[:-1] for n, t in rows.items()})
    with pytest.raises(PartitionFormatError, match="but part 0 owns"):
        load_partition(config, 0)
    (config.parent / "part1" / "node_feat.dgl").unlink()
    with pytest.raises(PartitionFormatError, match="is missing"):
        graphshard.load_dgl_partition_data(config, 1)
    assert len(verify_partition(config)) == 2
    os.rename(config.parent / "part1" / "edge_feat.dgl", tmp_path / "edge_feat.dgl")
    (config.parent / "part1" / "edge_feat.dgl").symlink_to(tmp_path / "edge_feat.dgl")
    (config.parent / "part1" / "node_feat.dgl").write_bytes(
        (config.parent / "part1" / "edge_feat.dgl").read_bytes()
    )
    with pytest.raises(PartitionFormatError, match="must lie inside the partition's folder"):
        load_partition_feats(config, 1, load_nodes=False)
    content = json.loads(config.read_text())
    for entry, words in (
        ({**content["part-0"], "part_graph": "../graph.dgl"}, "must stay inside"),
        ({**content["part-0"], "part_graph": "/graph.dgl"}, "must stay inside"),
        ({"part_graph_graphbolt": "part0/fused_csc_sampling_graph.pt"}, "pickle of GraphBolt's"),
        ({}, "names no part_graph of part 0"),
    ):
        config.write_text(json.dumps({**content, "part-0": entry}))
        with pytest.raises(PartitionFormatError, match=words):
            load_partition(config, 0)
