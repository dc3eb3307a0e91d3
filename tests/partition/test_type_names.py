# SPDX-License-Identifier: Apache-2.0
"""Types with '/', ':' and '~' in their names: through files, checks and conversions. No process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dgl_peer import dgl
from graphshard import heterograph
from graphshard.errors import PartitionFormatError
from graphshard.fullbatch import load_dgl_partition_data
from graphshard.fullbatch._partition_data import suffix_key_lookup
from graphshard.graph import load_graphs, save_graphs
from graphshard.partition import (
    convert_partition,
    load_partition,
    load_partition_book,
    partition_graph,
    verify_partition,
)
from type_name_cases import RELATIONS, SIZES, named


def check_parts(json_path: Path, graph: Any, num_parts: int) -> None:
    """Every feature and every edge of a graph, by original id, is in some part."""
    edges: dict[Any, set[int]] = {etype: set() for etype in graph.canonical_etypes}
    seen = dict.fromkeys((*graph.ntypes, *graph.canonical_etypes), 0)
    assert verify_partition(json_path) == []
    originals = []
    for part in range(num_parts):
        data = load_dgl_partition_data(json_path, part)
        assert data.canonical_etypes == tuple(graph.canonical_etypes)
        assert data.node_type_names == tuple(graph.ntypes)
        originals.append({t: data.node_features[f"{t}/orig_id"] for t in graph.ntypes})
    for part in range(num_parts):
        _, node_feats, edge_feats, *_ = load_partition(json_path, part)
        data = load_dgl_partition_data(json_path, part)
        for ntype in graph.ntypes:
            ids = node_feats[f"{ntype}/orig_id"]
            seen[ntype] += len(ids)
            for name, rows in graph.nodes[ntype].data.items():
                assert torch.equal(node_feats[f"{ntype}/{name}"], rows[ids])
        for etype in graph.canonical_etypes:
            ids = edge_feats[f"{':'.join(etype)}/orig_id"]
            seen[etype] += len(ids)
            assert torch.equal(
                edge_feats[f"{':'.join(etype)}/w"], graph.edges[etype].data["w"][ids]
            )
            found = data.edges[etype]
            src, dst = (end[ids] for end in graph.edges(etype=etype, order="eid"))
            owner, row = found.src_part.long(), found.src.long()
            theirs = torch.tensor(
                [int(originals[p][etype[0]][r]) for p, r in zip(owner, row, strict=True)]
            )
            assert torch.equal(theirs, src)
            assert torch.equal(originals[part][etype[2]][found.dst.long()], dst)
            edges[etype].update(ids.tolist())
    assert all(seen[t] == SIZES[t] for t in graph.ntypes)
    assert all(len(ids) == 90 for ids in edges.values())


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("method", ["metis", "random"])
def test_partition_load_and_verify(tmp_path: Path, num_parts: int, method: Any) -> None:
    graph = named()
    partition_graph(graph, "kg", num_parts, tmp_path, part_method=method, quiet=True)
    check_parts(tmp_path / "kg.json", graph, num_parts)
    book, _, ntypes, etypes = load_partition_book(tmp_path / "kg.json", 0)
    assert list(ntypes) == graph.ntypes
    assert list(etypes) == book.canonical_etypes == sorted(RELATIONS)
    again = convert_partition(tmp_path / "kg.json", tmp_path / "again", "graphshard")
    check_parts(again, graph, num_parts)


def test_a_feature_is_found_by_its_name_alone(tmp_path: Path) -> None:
    graph = heterograph({("a/b", "r", "c/d"): ([0], [0]), ("c/d", "s", "a/b"): ([0], [0])})
    graph.nodes["a/b"].data["x"] = torch.ones(1, 2)
    graph.nodes["c/d"].data["x"] = torch.full((1, 2), 3.0)
    partition_graph(graph, "g", 1, tmp_path, quiet=True)
    data = load_dgl_partition_data(tmp_path / "g.json", 0)
    rows = suffix_key_lookup(data.node_features, "x", True, data.node_type_names)
    assert rows.tolist() == [[1, 1], [3, 3]]


def test_names_without_a_colon_go_through_files_of_dgl(tmp_path: Path) -> None:
    """DGL takes the names of a relation apart at ':', and so has what has none."""
    src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
    etypes = [("/m/x", "/film/film~cast./y", "/m/z"), ("/m/z", "of", "/m/x")]
    graph: Any = heterograph(dict.fromkeys(etypes, (src, dst)))
    for ntype in graph.ntypes:
        graph.nodes[ntype].data["feat"] = torch.arange(3.0)
    for etype in etypes:
        graph.edges[etype].data["w"] = torch.arange(3.0)
    partition_graph(graph, "kg", 2, tmp_path / "ours", part_method="random", quiet=True)
    theirs = convert_partition(tmp_path / "ours" / "kg.json", tmp_path / "dgl")
    for part in range(2):
        loaded = dgl.distributed.load_partition(str(theirs), part)
        _, node_feats, edge_feats, *_ = load_partition(tmp_path / "ours" / "kg.json", part)
        for mine, other in ((node_feats, loaded[1]), (edge_feats, loaded[2])):
            for name, rows in other.items():
                assert torch.equal(mine[name], rows)
        assert {tuple(etype) for etype in loaded[6]} == set(etypes)
    back = convert_partition(theirs, tmp_path / "back")
    assert verify_partition(back) == []


def test_what_dgl_cannot_take_apart_is_refused(tmp_path: Path) -> None:
    partition_graph(named(), "kg", 2, tmp_path / "ours", quiet=True)
    with pytest.raises(ValueError, match=r"DGL's files, which separate .* by ':'"):
        convert_partition(tmp_path / "ours" / "kg.json", tmp_path / "dgl", "dgl")
    assert not (tmp_path / "dgl").exists()


def test_two_relations_of_one_name_in_files_are_refused(tmp_path: Path) -> None:
    graph = heterograph({("a", "b:c", "a"): ([0], [0]), ("a:b", "c", "a"): ([0], [0])})
    with pytest.raises(ValueError, match=r"two relations must differ .* rename one"):
        partition_graph(graph, "g", 2, tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())


def test_graphs_go_through_files_of_dgl(tmp_path: Path) -> None:
    graph = named()
    save_graphs(tmp_path / "g.bin", graph)
    (theirs,), _ = dgl.load_graphs(str(tmp_path / "g.bin"))
    (ours,), _ = load_graphs(tmp_path / "g.bin")
    for etype in RELATIONS:
        for mine, other, first in zip(
            ours.edges(etype=etype),
            theirs.edges(etype=etype),
            graph.edges(etype=etype),
            strict=True,
        ):
            assert torch.equal(mine, first)
            assert torch.equal(other, first)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("canonical_etypes", 5, "canonical_etypes must be a list"),
        ("canonical_etypes", [["a", "b"]], "a relation must be of three names"),
        ("canonical_etypes", [["a", "b", 3]], "a name in canonical_etypes must be a text"),
        ("canonical_etypes", [], "is not of the form 'source:relation:destination'"),
    ],
)
def test_damaged_names_in_the_json(tmp_path: Path, key: str, value: Any, text: str) -> None:
    partition_graph(named(), "kg", 2, tmp_path, quiet=True)
    path = tmp_path / "kg.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(PartitionFormatError, match=text):
        load_partition(path, 0)
