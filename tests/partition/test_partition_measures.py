# SPDX-License-Identifier: Apache-2.0
"""Halo, order, statistics and files, against brute force. No processes."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from partition_cases import assignment_of, plain, random_ids, typed
from rich.console import Console
from scipy.sparse import csgraph

from graphshard.errors import MetisError
from graphshard.graph import graph, heterograph
from graphshard.partition import (
    Balance,
    PartitionStats,
    _node_order,
    load_partition,
    load_partition_stats,
    partition_graph,
    verify_partition,
)
from graphshard.partition._metis import UndirectedGraph
from graphshard.partition._node_order import breadth_first_order, mean_log_gap, order_nodes
from graphshard.partition.checked_files import Rows, TensorFile, digest_of, write_tensors


@pytest.mark.parametrize("make", [plain, typed])
def test_statistics_are_what_brute_force_counts(make: Any, tmp_path: Path) -> None:
    g = make()
    parts = {n: torch.from_numpy(assignment_of(g.num_nodes(n), 4)) for n in g.ntypes}
    first = g.ntypes[0]
    g.nodes[first].data["train_mask"] = torch.arange(g.num_nodes(first)) % 3 == 0
    partition_graph(
        g, "g", 4, tmp_path, part_method=parts, balance_edges=True, balance_split=True, quiet=True
    )
    stats = load_partition_stats(tmp_path / "g.json")
    cut = [0] * 4
    foreign: list[set[Any]] = [set() for _ in range(4)]
    owned = [0] * 4
    for etype in g.canonical_etypes:
        for u, v in zip(*(ids.tolist() for ids in g.edges(etype=etype)), strict=True):
            source, target = int(parts[etype[0]][u]), int(parts[etype[2]][v])
            owned[target] += 1
            if source != target:
                cut[target] += 1
                foreign[target].add((etype[0], u))
                foreign[source].add((etype[2], v))
    assert stats.edge_cut == sum(cut)
    assert stats.edge_cut_fraction == sum(cut) / g.num_edges()
    assert stats.halo_nodes == sum(map(len, foreign))
    for part, sizes in enumerate(stats.parts):
        assert sizes.cut_edges == cut[part]
        assert sizes.inner_edges == owned[part]
        assert sizes.halo_nodes == len(foreign[part])
        assert sizes.inner_nodes == sum(int((ids == part).sum()) for ids in parts.values())
        files = (tmp_path / f"part{part}").iterdir()
        assert sizes.bytes == sum(file.stat().st_size for file in files)
    loads = {item.name: item.loads for item in stats.balances}
    masked = parts[first][g.nodes[first].data["train_mask"]].bincount(minlength=4)
    name = "train_mask" if g.is_homogeneous else f"train_mask of '{first}'"
    assert loads[name] == tuple(masked.tolist())
    name = "in-edges" if g.is_homogeneous else f"in-edges of '{first}'"
    degrees = sum(g.in_degrees(etype=e) for e in g.canonical_etypes if e[2] == first)
    assert loads[name] == tuple(torch.zeros(4).long().index_add(0, parts[first], degrees).tolist())
    assert stats.balances[0].ratio == max(stats.balances[0].loads) / np.mean(
        stats.balances[0].loads
    )


def test_statistics_survive_the_json_and_print(tmp_path: Path, capsys: Any) -> None:
    g = plain()
    partition_graph(g, "cats", 2, tmp_path, balance_edges=True)
    printed = capsys.readouterr().out
    stats = load_partition_stats(tmp_path / "cats.json")
    assert PartitionStats.from_dict(stats.as_dict()) == stats
    assert f"cats: 2 parts (metis), edge cut {stats.edge_cut} of 155" in printed
    assert "max/mean" in printed
    wide = Console(file=io.StringIO(), width=200)
    wide.print(stats.table())
    text = wide.file.getvalue()  # type: ignore[attr-defined]
    for number in (stats.parts[0].inner_nodes, stats.parts[1].inner_edges):
        assert re.search(rf"\b{number}\b", text)
    wide.print(stats.balance_table())
    assert "in-edges" in wide.file.getvalue()  # type: ignore[attr-defined]
    loads = Balance("user:rev_follows:user", (10**8,) * 3 + (10**9,) + (10**8,) * 60)
    narrow = Console(file=io.StringIO(), width=80)
    narrow.print(Balance.table("types", "type", [loads]))
    lines = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[1].endswith("┓")
    for number in ("7,300,000,000", "100,000,000", "1,000,000,000", "3", "8.767"):
        assert f" {number} │" in lines[4]
    partition_graph(g, "cats", 2, tmp_path, quiet=True)
    assert capsys.readouterr().out == ""


def test_nothing_to_balance_is_balanced(tmp_path: Path) -> None:
    partition_graph(graph(([], []), num_nodes=0), "g", 2, tmp_path, quiet=True)
    stats = load_partition_stats(tmp_path / "g.json")
    assert [item.ratio for item in stats.balances] == [1.0]
    assert stats.edge_cut_fraction == 0.0


# Order


def bandwidth(adjacency: Any, order: Any) -> int:
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    rows = np.repeat(np.arange(len(order)), np.diff(adjacency.indptr))
    return int(np.abs(place[rows] - place[adjacency.indices]).max())


def test_a_shuffled_grid_is_put_in_a_good_order() -> None:
    side = 20
    cells = np.arange(side * side).reshape(side, side)
    edges = np.concatenate(
        [
            np.stack([cells[:, :-1].ravel(), cells[:, 1:].ravel()]),
            np.stack([cells[:-1].ravel(), cells[1:].ravel()]),
        ],
        axis=1,
    )
    shuffled = np.random.default_rng(0).permutation(side * side)
    g = UndirectedGraph.from_edges([tuple(torch.from_numpy(shuffled[edges]))], side * side)
    matrix = g.matrix()
    order = breadth_first_order(matrix)
    assert sorted(order.tolist()) == list(range(side * side))
    oracle = csgraph.reverse_cuthill_mckee(scipy.sparse.csr_matrix(matrix), symmetric_mode=True)
    assert bandwidth(matrix, order) <= 1.5 * bandwidth(matrix, oracle)


def test_components_and_isolated_nodes_keep_their_order() -> None:
    g = UndirectedGraph.from_edges([(torch.tensor([1, 3, 6, 8]), torch.tensor([3, 5, 8, 4]))], 10)
    assert breadth_first_order(g.matrix()).tolist() == [0, 1, 3, 5, 2, 4, 8, 6, 7, 9]
    lonely = UndirectedGraph.from_edges([], 5)
    assert breadth_first_order(lonely.matrix()).tolist() == list(range(5))


def test_a_walk_over_one_component_is_that_over_many() -> None:
    """Isolated nodes lie between its nodes, and before the first and after the last."""
    src, dst = 2 * random_ids(200, 900, 0) + 10, 2 * random_ids(200, 900, 1) + 10
    matrix = UndirectedGraph.from_edges([(src, dst)], 500).matrix()
    degrees = np.diff(matrix.indptr)
    num_components, _ = csgraph.connected_components(matrix, directed=False)
    assert num_components == 1 + (degrees == 0).sum() > 300
    expected = _node_order._walk_over_components(matrix, degrees)
    assert breadth_first_order(matrix).tolist() == expected.tolist()


def test_a_good_order_is_left_alone() -> None:
    nodes = torch.arange(99)
    path = UndirectedGraph.from_edges([(nodes, nodes + 1)], 100)
    parts = np.zeros(100, dtype=np.int64)
    assert order_nodes(parts, [0, 100], 1, path).tolist() == list(range(100))
    matrix = path.matrix()
    forward = np.arange(100)
    assert mean_log_gap(matrix, forward, forward) == 0.0
    assert mean_log_gap(matrix, np.random.default_rng(0).permutation(100), forward) > 3.0


def communities(num_nodes: int, size: int) -> UndirectedGraph:
    """Nine neighbours in ten have the same number modulo ``num_nodes // size``."""
    count = num_nodes // size
    src, step = random_ids(num_nodes, 9 * num_nodes, 0), random_ids(size, 9 * num_nodes, 1)
    others = random_ids(num_nodes, num_nodes, 2), random_ids(num_nodes, num_nodes, 3)
    return UndirectedGraph.from_edges([(src, (src + step * count) % num_nodes), others], num_nodes)


def test_a_large_part_is_put_in_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 6 * _node_order.CLUSTER_NODES
    g = communities(size, _node_order.CLUSTER_NODES)
    parts, nodes, matrix = np.zeros(size, np.int64), np.arange(size), g.matrix()
    order = order_nodes(parts, [0, size], 1, g)
    assert sorted(order.tolist()) == nodes.tolist()
    assert order.tolist() == order_nodes(parts, [0, size], 1, g).tolist()
    walk = breadth_first_order(matrix)
    assert mean_log_gap(matrix, order, nodes) < mean_log_gap(matrix, walk, nodes) - 1
    src, dst = matrix.tocoo().coords
    place = np.argsort(order)
    far = np.abs(place[src] - place[dst]) > 1.1 * _node_order.CLUSTER_NODES
    assert far.mean() < 0.15

    two_types = order_nodes(parts, [0, size // 3, size], 1, g)
    assert (np.diff(two_types >= size // 3) >= 0).all()
    assert two_types[size // 3 :].tolist() == order[order >= size // 3].tolist()

    def missing(*_: Any, **__: Any) -> Any:
        raise MetisError("METIS is not there")

    monkeypatch.setattr(_node_order, "metis_partition", missing)
    assert _node_order.clustered_order(matrix).tolist() == walk.tolist()


def test_a_small_part_needs_no_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_node_order, "metis_partition", None)
    g = communities(2 * _node_order.CLUSTER_NODES - 2, 2)
    assert (
        _node_order.clustered_order(g.matrix()).tolist() == breadth_first_order(g.matrix()).tolist()
    )
    empty = UndirectedGraph.from_edges([], 3 * _node_order.CLUSTER_NODES)
    assert _node_order.clustered_order(empty.matrix()).tolist() == list(range(empty.num_nodes))


def test_order_is_by_part_then_type_then_place() -> None:
    g = UndirectedGraph.from_edges([(random_ids(30, 80, 0), random_ids(30, 80, 1))], 30)
    parts = assignment_of(30, 3)
    offsets = [0, 12, 30]
    order = order_nodes(parts, offsets, 4, g)
    assert sorted(order.tolist()) == list(range(30))
    keys = [(parts[node], node >= 12) for node in order]
    assert keys == sorted(keys)


def test_a_hub_is_ordered_in_no_time(tmp_path: Path) -> None:
    """Cuthill and McKee sort the neighbours of a node by degree, which can be quadratic."""
    leaves = torch.arange(1, 100_001)
    others = random_ids(100_000, 50_000, 0) + 1
    g = UndirectedGraph.from_edges(
        [(torch.zeros_like(leaves), leaves), (others, others.roll(1))], 100_001
    )
    order = breadth_first_order(g.matrix())
    assert len(set(order.tolist())) == 100_001


# Files


def test_rows_are_gathered_slice_by_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphshard.partition import checked_files

    monkeypatch.setattr(checked_files, "_SLICE_BYTES", 100)
    source = torch.randn(50, 7)
    index = random_ids(50, 33, 0)
    rows = Rows(source, index)
    assert rows.shape == (33, 7)
    pieces = list(rows.slices())
    assert max(piece.numel() * 4 for piece in pieces) <= 100
    record = write_tensors(tmp_path / "x", {"a": rows, "b": index, "c": torch.zeros(0, 3)})
    file = TensorFile.open(tmp_path / "x")
    assert torch.equal(file.read()["a"], source[index])
    assert file.shapes == {"a": (33, 7), "b": (33,), "c": (0, 3)}
    assert (tmp_path / "x").stat().st_size == record.bytes
    assert digest_of(tmp_path / "x") == file.blake2b == record.blake2b


def test_rows_wider_than_a_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphshard.partition import checked_files

    monkeypatch.setattr(checked_files, "_SLICE_BYTES", 10)
    source = torch.randn(5, 9)
    write_tensors(tmp_path / "x", {"a": Rows(source, torch.tensor([4, 0]))})
    assert torch.equal(TensorFile.open(tmp_path / "x").read()["a"], source[[4, 0]])


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", {})


def test_tensors_are_aligned_and_mapped(tmp_path: Path) -> None:
    """Features lie in pages of the file itself."""
    g = plain()
    g.ndata["flag"] = torch.zeros(50, dtype=torch.bool)
    g.ndata["x"] = torch.randn(50, 3, dtype=torch.float64)
    partition_graph(g, "g", 2, tmp_path, quiet=True)
    _, feats, *_ = load_partition(tmp_path / "g.json", 0)
    for feature in feats.values():
        assert feature.data_ptr() % feature.element_size() == 0
    if sys.platform != "linux":
        pytest.skip("only Linux tells what is mapped where")
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    path = str(tmp_path / "part0/node_feats.safetensors")
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in maps if line[-1] == path]
    feats.pop("_N/orig_id")  # in 32 bits
    for feature in feats.values():
        assert any(start <= feature.data_ptr() < stop for start, stop in ranges)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_parts": 0}, r"num_parts must be a whole number from 1 up \(got 0\)"),
        ({"num_parts": 2.0}, "num_parts must be a whole number"),
        ({"num_parts": True}, "num_parts must be a whole number"),
        ({"num_hops": -1}, "num_hops must be a whole number from 0 up"),
        ({"num_trainers_per_machine": 0}, "num_trainers_per_machine must be"),
        ({"tolerance": 0.05}, "tolerance must be at least 1.*pass 1.05"),
        ({"tolerance": float("nan")}, "tolerance must be at least 1"),
        ({"objtype": "flow"}, "objtype must be 'cut' or 'vol'"),
        ({"graph_formats": ["csx"]}, "graph_formats must be some of"),
        ({"graph_formats": []}, "graph_formats must be some of"),
        ({"part_method": "spectral"}, "part_method must be 'metis', 'multilevel', 'random' or"),
        ({"seed": -1}, "seed must be a whole number from 0 up"),
        ({"seed": 2**31}, "seed must be below"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"graph_name": "g", "num_parts": 2, "out_path": tmp_path / "out", **arguments}
    with pytest.raises(ValueError, match=message):
        partition_graph(plain(), **given, quiet=True)
    out = tmp_path / "out"
    assert not out.exists() or not any(out.iterdir())


def test_wrong_graphs(tmp_path: Path) -> None:
    def refused(error: type[Exception], message: str, g: Any, **arguments: Any) -> None:
        with pytest.raises(error, match=message):
            partition_graph(g, "g", 2, tmp_path, quiet=True, **arguments)
        assert not any(tmp_path.iterdir())

    refused(TypeError, "g must be a graphshard Graph \\(got list\\)", [])
    ends = torch.tensor([0]), torch.tensor([0])
    two = {("a", "r", "b"): ends, ("_N", "s", "b"): ends}
    refused(ValueError, "'_N' is reserved for the only node type", heterograph(two))
    two = {("a", "_E", "b"): ends, ("a", "s", "b"): ends}
    refused(ValueError, "'_E' is reserved for the only relation", heterograph(two))
    g = plain()
    g.ndata["a/b"] = torch.zeros(50)
    refused(ValueError, "without '/'.*'a/b' of node type '_N'", g)
    g = plain()
    g.edata["orig_id"] = torch.zeros(155)
    refused(ValueError, "'orig_id' is taken.*relation", g)
    g = plain()
    g.ndata["trainer_id"] = torch.zeros(50)
    refused(ValueError, "'trainer_id' is taken", g, num_trainers_per_machine=2)
    partition_graph(g, "g", 2, tmp_path / "fine", quiet=True)
    assert verify_partition(tmp_path / "fine/g.json") == []


def test_features_that_files_cannot_hold(tmp_path: Path) -> None:
    g = plain()
    g.ndata["z"] = torch.zeros(50, dtype=torch.complex64)
    with pytest.raises(TypeError, match="has dtype torch.complex64, which partition files"):
        partition_graph(g, "g", 2, tmp_path, quiet=True)
    g = plain()
    g.ndata["s"] = torch.eye(50).to_sparse()
    with pytest.raises(TypeError, match="must be a dense tensor.*to_dense"):
        partition_graph(g, "g", 2, tmp_path, quiet=True)


@pytest.mark.parametrize("objtype", ["cut", "vol"])
def test_objectives_differ_in_what_they_save(objtype: Any, tmp_path: Path) -> None:
    """A cluster structure that both find."""
    src = torch.cat([random_ids(50, 400, seed) + 50 * seed for seed in range(4)])
    dst = torch.cat([random_ids(50, 400, seed + 9) + 50 * seed for seed in range(4)])
    g = graph((src, dst), num_nodes=200)
    partition_graph(g, "g", 4, tmp_path, objtype=objtype, quiet=True)
    assert load_partition_stats(tmp_path / "g.json").edge_cut == 0


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(40, 3, 2),
        torch.randn(40, 5).to(torch.bfloat16),
        torch.randn(40, 6, dtype=torch.float64)[:, ::2],
        torch.randn(3, 40).T,
        torch.randn(40, 4, requires_grad=True),
        torch.arange(40),
        torch.arange(40) % 3 == 0,
        torch.zeros(40, 0),
    ],
    ids=lambda source: f"{source.dtype}-{tuple(source.shape)}-{tuple(source.stride())}",
)
def test_rows_of_any_form_are_gathered(source: torch.Tensor) -> None:
    for count in (0, 33):
        index = random_ids(40, count, 0)
        pieces = list(Rows(source, index).slices())
        assert all(piece.dtype == source.dtype for piece in pieces)
        assert torch.equal(torch.cat(pieces), source.detach()[index])
    assert next(Rows(source[:0], index[:0]).slices()).shape == source[:0].shape
