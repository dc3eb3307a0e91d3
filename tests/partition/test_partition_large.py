# SPDX-License-Identifier: Apache-2.0
"""What makes partitioning large graphs quick: less effort, threads, 32 bits. No processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from partition_cases import plain, random_ids, typed
from torch import Tensor

from graphshard.graph import graph
from graphshard.partition import (
    UndirectedGraph,
    _node_order,
    _streamed,
    assign,
    load_partition_stats,
    metis_partition,
    partition_graph,
)
from graphshard.partition._metis import _is_symmetric
from graphshard.partition.checked_files import write_tensors


def communities(num_nodes: int, size: int, degree: int) -> tuple[Tensor, Tensor]:
    """Edges both ways, nine in ten between nodes with the same number divided by ``size``."""
    src = random_ids(num_nodes, num_nodes * degree // 2, 0)
    near = src // size * size + random_ids(size, src.shape[0], 1)
    dst = torch.where(random_ids(10, src.shape[0], 2) > 0, near, random_ids(num_nodes, len(src), 3))
    return torch.cat([src, dst]), torch.cat([dst, src])


def directed(src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    return torch.minimum(src, dst), torch.maximum(src, dst)


def grouped(src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.sort(src * 1000 + dst).indices
    return src[order], dst[order]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [False, True])
@pytest.mark.parametrize("change", [grouped, directed, lambda src, dst: (src, dst)])
def test_undirected_graph_equals_a_dense_matrix(
    change: Any, count: bool, dtype: torch.dtype
) -> None:
    """Symmetric and sorted, symmetric, and one-way edges; with loops and repetitions."""
    src, dst = change(*communities(200, 20, 12))
    made = UndirectedGraph.from_edges([(src.to(dtype), dst.to(dtype))], 200, count=count)
    dense = np.zeros((200, 200), dtype=np.int64)
    np.add.at(dense, (src.numpy(), dst.numpy()), 1)
    np.fill_diagonal(dense, 0)
    dense += dense.T
    rows, columns = np.nonzero(dense)
    assert made.indptr.tolist() == np.searchsorted(rows, np.arange(201)).tolist()
    assert made.indices.tolist() == columns.tolist()
    assert made.indices.dtype == np.int32
    if count:
        assert made.counts is not None
        assert made.counts.tolist() == dense[rows, columns].tolist()
    UndirectedGraph(made.indptr, made.indices)  # checks everything


@pytest.mark.parametrize("both_ways", [False, True])
def test_as_many_repetitions_as_a_byte_has_values_are_still_an_edge(both_ways: bool) -> None:
    src, dst = torch.zeros(128, dtype=torch.int64), torch.ones(128, dtype=torch.int64)
    pairs = (
        [(src, dst), (dst, src)] if both_ways else [(torch.cat([src, src]), torch.cat([dst, dst]))]
    )
    assert UndirectedGraph.from_edges(pairs, 2).indices.tolist() == [1, 0]


def test_calls_of_metis_from_several_threads_repeat() -> None:
    """Its random numbers are those of the C library, which all threads share."""
    made = UndirectedGraph.from_edges([communities(3000, 30, 8)], 3000)
    alone = [metis_partition(made, 7, seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: metis_partition(made, 7, seed=seed), range(4)))
    for one, other in zip(alone, together, strict=True):
        assert one.tolist() == other.tolist()


def cut_of(folder: Path) -> int:
    return load_partition_stats(folder / "g.json").edge_cut


def test_large_graphs_of_many_edges_get_fewer_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Mapping[str, Any]] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return metis_partition(*arguments, **options)

    monkeypatch.setattr(assign, "metis_partition", watched)
    g = graph(communities(4000, 50, 20))
    partition_graph(g, "g", 4, tmp_path / "full", balance_edges=True, quiet=True)
    monkeypatch.setattr(assign, "_LARGE_EDGES", 10_000)
    partition_graph(g, "g", 4, tmp_path / "less", balance_edges=True, quiet=True)
    mesh = torch.arange(20_000)
    partition_graph(graph((mesh, mesh.roll(1))), "g", 4, tmp_path / "mesh", quiet=True)
    assert [(call["num_iterations"], call["num_trials"]) for call in calls] == [
        (10, None),
        (3, 1),
        (10, None),
    ]
    assert cut_of(tmp_path / "less") <= 1.1 * cut_of(tmp_path / "full")


def test_the_threads_of_torch_change_nothing(tmp_path: Path) -> None:
    """The same files, bit for bit, from one thread and from two."""
    builds = []
    before = torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        try:
            for make in (plain, typed):
                folder = tmp_path / f"{make.__name__}-{number}"
                partition_graph(make(), "g", 3, folder, balance_edges=True, quiet=True)
                builds.append((folder / "g.json").read_text())
        finally:
            torch.set_num_threads(before)
    assert builds[:2] == builds[2:]


def test_orders_of_many_parts_are_those_of_each_alone() -> None:
    """Parts are prepared, cut in clusters and placed in different threads."""
    size = 2 * _node_order.CLUSTER_NODES
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(3 * size))
    src, dst = communities(3 * size, 100, 8)
    made = UndirectedGraph.from_edges([(shuffled[src], shuffled[dst])], 3 * size)
    parts = np.arange(3 * size) % 3
    together = _node_order.order_nodes(parts, [0, 3 * size], 3, made)
    for part in range(3):
        members = np.flatnonzero(parts == part)
        inside = made.matrix()[members][:, members]
        alone = members[_node_order.clustered_order(inside)]
        assert together[part * size : (part + 1) * size].tolist() == alone.tolist()


@contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("part-0/part_graph", OSError("disk full")),
        ("part-3/node_feats", OSError("disk full")),
        ("part-1/edge_feats", OSError("disk full")),
        ("part-2/node_feats", MemoryError("part 2")),
    ],
)
def test_an_error_in_a_writing_thread_is_told(
    bad: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, tensors: Any, **options: Any) -> Any:
        if str(path).endswith(bad):
            raise error
        return write_tensors(path, tensors, **options)

    monkeypatch.setattr(_streamed, "write_tensors", broken)
    with no_thread_left(), pytest.raises(type(error), match=str(error)):
        partition_graph(plain(), "g", 4, tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_with_an_edge_turned_round_is_not_taken_for_undirected() -> None:
    src, dst = grouped(*directed(*communities(200, 20, 12)))
    pairs = torch.unique(torch.stack([src[src != dst], dst[src != dst]]), dim=1)
    both = torch.unique(torch.cat([pairs, pairs.flip(0)], dim=1), dim=1)
    assert _is_symmetric(both[0], both[1], 200)
    for place in range(0, both.shape[1], 50):
        kept = torch.arange(both.shape[1]) != place
        assert not _is_symmetric(both[0][kept], both[1][kept], 200)
        made = UndirectedGraph.from_edges([(both[0][kept], both[1][kept])], 200)
        assert made.num_edges == pairs.shape[1]
    assert not _is_symmetric(pairs[0], pairs[1], 200)
