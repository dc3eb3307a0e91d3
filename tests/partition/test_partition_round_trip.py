# SPDX-License-Identifier: Apache-2.0
"""All parts together are the graph that went in, bit for bit. No process group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from partition_cases import (
    DTYPES,
    GRAPHS,
    add_features,
    as_dicts,
    assignment_of,
    etype_key,
    plain,
    typed,
)
from torch import Tensor

from graphshard._base.typing import CanonicalEType
from graphshard.graph import Graph
from graphshard.partition import (
    load_partition,
    load_partition_feats,
    partition_graph,
    verify_partition,
)


@pytest.fixture(autouse=True)
def _no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk would take most of the time, and shows nothing here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def rebuild(path: Path, g: Graph, num_parts: int) -> None:
    """Put the parts together again by their original ids, and compare with ``g``."""
    node_seen = {ntype: torch.zeros(g.num_nodes(ntype), dtype=torch.int64) for ntype in g.ntypes}
    ends: dict[CanonicalEType, Tensor] = {
        etype: torch.full((2, g.num_edges(etype)), -1) for etype in g.canonical_etypes
    }
    loaded = [load_partition(path, part) for part in range(num_parts)]
    orig_ids: dict[str, Tensor] = {
        ntype: torch.cat([feats[f"{ntype}/orig_id"] for _, feats, *_ in loaded])
        for ntype in g.ntypes
    }
    for part, (local, node_feats, edge_feats, book, name, ntypes, etypes) in enumerate(loaded):
        assert name == "g"
        assert ntypes == g.ntypes
        assert etypes == g.canonical_etypes
        assert book.partid == part
        assert local.idtype == g.idtype
        for ntype in g.ntypes:
            ids = node_feats[f"{ntype}/orig_id"]
            node_seen[ntype][ids] += 1
            compare_features(node_feats, ntype, g.nodes[ntype].data, ids)
        src, dst = local.edges()
        types, per_type = book.map_to_per_ntype(local.ndata["_ID"])
        inner = local.edata["inner_edge"]
        for number, etype in enumerate(g.canonical_etypes):
            ids = edge_feats[f"{etype_key(etype)}/orig_id"]
            compare_features(edge_feats, etype_key(etype), g.edges[etype].data, ids)
            mine = inner & (local.edata["_TYPE"] == number)
            u, v = src[mine].long(), dst[mine].long()
            assert (types[u] == g.ntypes.index(etype[0])).all()
            assert (types[v] == g.ntypes.index(etype[2])).all()
            assert (ends[etype][:, ids] == -1).all()
            ends[etype][0, ids] = orig_ids[etype[0]][per_type[u]]
            ends[etype][1, ids] = orig_ids[etype[2]][per_type[v]]
            # By destination, and for one destination by original id.
            assert np.array_equal(np.lexsort((ids, v)), np.arange(len(ids)))
    for ntype in g.ntypes:
        assert (node_seen[ntype] == 1).all()
    for etype in g.canonical_etypes:
        src, dst = g.edges(etype=etype)
        assert torch.equal(ends[etype], torch.stack([src, dst]).long())


def compare_features(feats: dict[str, Tensor], owner: str, given: Any, ids: Tensor) -> None:
    names = {key.rsplit("/", 1)[1] for key in feats if key.rsplit("/", 1)[0] == owner}
    assert names == {*given.keys(), "orig_id"}
    for name in given:
        found = feats[f"{owner}/{name}"]
        assert found.dtype == given[name].dtype
        assert torch.equal(found, given[name].detach()[ids])


SIZES = [
    *((name, num_parts) for name in GRAPHS for num_parts in (1, 3)),
    ("empty", 2),
    ("edgeless", 7),  # one node per part
    ("edgeless", 9),  # more parts than nodes
    ("bipartite", 21),
    ("bipartite", 23),
]


@pytest.mark.parametrize("method", ["metis", "random", "own"])
@pytest.mark.parametrize(("name", "num_parts"), SIZES)
def test_parts_rebuild_the_graph(name: str, num_parts: int, method: Any, tmp_path: Path) -> None:
    g = add_features(GRAPHS[name]())
    num_nodes = g.num_nodes()
    if method == "own":
        # Leaves the last part, and perhaps others, without nodes.
        own = torch.from_numpy(assignment_of(num_nodes, max(1, num_parts - 1)))
        sizes = [g.num_nodes(ntype) for ntype in g.ntypes]
        method = dict(zip(g.ntypes, own.split(sizes), strict=True))
    partition_graph(g, "g", num_parts, tmp_path, part_method=method, quiet=True)
    assert verify_partition(tmp_path / "g.json") == []
    rebuild(tmp_path / "g.json", g, num_parts)


@pytest.mark.parametrize("formats", ["coo", "csc", "csr", ("csc", "coo"), ("coo", "csc", "csr")])
@pytest.mark.parametrize("make", [plain, typed])
def test_every_stored_format_holds_the_same_edges(make: Any, formats: Any, tmp_path: Path) -> None:
    g = add_features(make())
    partition_graph(g, "g", 3, tmp_path, num_hops=2, graph_formats=formats, quiet=True)
    assert verify_partition(tmp_path / "g.json") == []
    rebuild(tmp_path / "g.json", g, 3)


@pytest.mark.parametrize("num_hops", [0, 1, 2])
@pytest.mark.parametrize("reorder", [False, True])
def test_any_halo_and_order(num_hops: int, reorder: bool, tmp_path: Path) -> None:
    g = add_features(typed())
    partition_graph(g, "g", 3, tmp_path, num_hops=num_hops, reorder=reorder, quiet=True)
    assert verify_partition(tmp_path / "g.json") == []
    rebuild(tmp_path / "g.json", g, 3)


@pytest.mark.parametrize("make", [plain, typed])
def test_the_mapping_gives_original_ids(make: Any, tmp_path: Path) -> None:
    g = make()
    mapping = partition_graph(g, "g", 3, tmp_path, return_mapping=True, quiet=True)
    assert isinstance(mapping[0], Tensor) == g.is_homogeneous
    nodes, edges = as_dicts(g, mapping)
    for part in range(3):
        _, node_feats, edge_feats, book, *_ = load_partition(tmp_path / "g.json", part)
        for ntype in g.ntypes:
            ids = book.partid2nids(part, ntype)
            assert torch.equal(nodes[ntype][ids], node_feats[f"{ntype}/orig_id"])
        for etype in g.canonical_etypes:
            ids = book.partid2eids(part, etype)
            assert edges[etype].dtype == torch.int64
            assert torch.equal(edges[etype][ids], edge_feats[f"{etype_key(etype)}/orig_id"])


def test_one_part_keeps_the_ids_it_had(tmp_path: Path) -> None:
    g = typed()
    nodes, _ = partition_graph(g, "g", 1, tmp_path, return_mapping=True, quiet=True)
    for ntype in g.ntypes:
        assert torch.equal(nodes[ntype], torch.arange(g.num_nodes(ntype)))


def test_without_reordering_nodes_keep_their_relative_order(tmp_path: Path) -> None:
    g = typed()
    nodes, _ = partition_graph(g, "g", 3, tmp_path, reorder=False, return_mapping=True, quiet=True)
    *_, book, _, _, _ = load_partition(tmp_path / "g.json", 0)
    for ntype in g.ntypes:
        for part in range(3):
            assert (nodes[ntype][book.partid2nids(part, ntype)].diff() > 0).all()


def test_the_callers_graph_is_not_changed(tmp_path: Path) -> None:
    g = plain()
    g.ndata["x"] = torch.randn(50, 2)
    before = g.ndata["x"].clone()
    partition_graph(g, "g", 2, tmp_path, num_trainers_per_machine=2, quiet=True)
    assert set(g.ndata) == {"x"}
    assert not set(g.edata)
    assert torch.equal(g.ndata["x"], before)


@pytest.mark.parametrize("method", ["metis", "random"])
@pytest.mark.parametrize("make", [plain, typed])
def test_trainers_are_written_for_nodes_and_edges(make: Any, method: str, tmp_path: Path) -> None:
    g = make()
    partition_graph(g, "g", 2, tmp_path, part_method=method, num_trainers_per_machine=3, quiet=True)
    seen = set()
    for part in range(2):
        local, node_feats, edge_feats, *_ = load_partition(tmp_path / "g.json", part)
        per_node = torch.cat([node_feats[f"{ntype}/trainer_id"] for ntype in g.ntypes])
        per_edge = torch.cat(
            [edge_feats[f"{etype_key(etype)}/trainer_id"] for etype in g.canonical_etypes]
        )
        assert (per_node // 3 == part).all()
        _, dst = local.edges()
        assert torch.equal(per_node[dst[local.edata["inner_edge"]]], per_edge)
        seen |= set(per_node.tolist())
    assert seen == set(range(6))


def test_structure_fields_of_the_callers_graph_are_not_features(tmp_path: Path) -> None:
    g = plain()
    g.ndata["_ID"] = torch.arange(50)
    g.edata["_TYPE"] = torch.zeros(g.num_edges())
    partition_graph(g, "g", 2, tmp_path, quiet=True)
    _, node_feats, edge_feats, *_ = load_partition(tmp_path / "g.json", 0)
    assert set(node_feats) == {"_N/orig_id"}
    assert set(edge_feats) == {"_N:_E:_N/orig_id"}


def test_features_are_optional_to_load_and_never_written_back(tmp_path: Path) -> None:
    g = add_features(plain())
    partition_graph(g, "g", 2, tmp_path, quiet=True)
    path = tmp_path / "g.json"
    _, node_feats, edge_feats, *_ = load_partition(path, 0, load_feats=False)
    assert (node_feats, edge_feats) == ({}, {})
    only_nodes, no_edges = load_partition_feats(path, 0, load_edges=False)
    no_nodes, only_edges = load_partition_feats(path, 0, load_nodes=False)
    assert no_edges is None
    assert no_nodes is None
    assert "_N:_E:_N/wide" in only_edges
    before = only_nodes["_N/wide"].clone()
    only_nodes["_N/wide"].zero_()
    again, _ = load_partition_feats(path, 0)
    assert torch.equal(again["_N/wide"], before)
    assert verify_partition(path) == []


def test_every_dtype_is_there() -> None:
    """The other tests compare dtypes; this one makes sure that the graphs have them."""
    dtypes = {feature.dtype for feature in add_features(plain()).ndata.values()}
    assert dtypes == set(DTYPES)


def test_equal_arguments_give_equal_files_and_the_seed_matters(tmp_path: Path) -> None:
    g = add_features(typed())

    def files(name: str, seed: int, method: str) -> dict[str, bytes]:
        folder = tmp_path / name
        partition_graph(
            g, "g", 3, folder, part_method=method, balance_edges=True, seed=seed, quiet=True
        )
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    for method in ("metis", "random"):
        first = files(f"{method}-first", 0, method)
        assert set(first) == {
            "g.json",
            *(
                f"part{part}/{name}.safetensors"
                for part in range(3)
                for name in ("graph", "node_feats", "edge_feats")
            ),
        }
        assert first == files(f"{method}-again", 0, method)
    assert first != files("random-other", 1, "random")


def test_local_structure_is_as_documented(tmp_path: Path) -> None:
    partition_graph(typed(), "g", 3, tmp_path, quiet=True)
    for part in range(3):
        local, _, _, book, *_ = load_partition(tmp_path / "g.json", part)
        ids, inner = local.ndata["_ID"], local.ndata["inner_node"]
        num_inner = int(inner.sum())
        assert inner.dtype == torch.bool
        assert inner[:num_inner].all()
        assert torch.equal(ids[:num_inner], book.partid2nids(part))
        assert (ids[num_inner:].diff() > 0).all()
        assert torch.equal(local.ndata["part_id"], book.nid2partid(ids))
        assert torch.equal(local.ndata["_TYPE"].long(), book.map_to_per_ntype(ids)[0])
        ids, inner = local.edata["_ID"], local.edata["inner_edge"]
        num_inner = int(inner.sum())
        assert inner.dtype == torch.bool
        assert inner[:num_inner].all()
        assert torch.equal(ids[:num_inner], book.partid2eids(part))
        assert (ids[num_inner:].diff() > 0).all()
        assert torch.equal(local.edata["_TYPE"].long(), book.map_to_per_etype(ids)[0])
        assert (local.edata["_TYPE"][:num_inner].diff() >= 0).all()
        assert (local.ndata["_TYPE"][: int(local.ndata["inner_node"].sum())].diff() >= 0).all()


def test_without_hops_only_sources_are_kept(tmp_path: Path) -> None:
    g = plain()
    partition_graph(g, "g", 3, tmp_path, num_hops=0, quiet=True)
    for part in range(3):
        local, *_ = load_partition(tmp_path / "g.json", part)
        assert local.edata["inner_edge"].all()
        src, _ = local.edges()
        foreign = (~local.ndata["inner_node"]).nonzero().flatten()
        assert set(foreign.tolist()) <= set(src.tolist())
