# SPDX-License-Identifier: Apache-2.0
"""The METIS binding and the undirected graph that it works on. No process group."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import networkx
import numpy as np
import pytest
import torch

from graphshard.errors import MetisError
from graphshard.partition import UndirectedGraph, _metis, metis_available, metis_partition


def ring(num_nodes: int, count: bool = False) -> UndirectedGraph:
    nodes = torch.arange(num_nodes)
    return UndirectedGraph.from_edges([(nodes, nodes.roll(-1))], num_nodes, count=count)


def clustered(num_clusters: int, size: int, seed: int = 0) -> UndirectedGraph:
    """Dense clusters with a few edges between them."""
    generator = np.random.default_rng(seed)
    inside = generator.integers(0, size, (2, num_clusters * size * 6))
    inside += np.repeat(np.arange(num_clusters) * size, size * 6)
    between = generator.integers(0, num_clusters * size, (2, num_clusters))
    src, dst = torch.from_numpy(np.concatenate([inside, between], axis=1))
    return UndirectedGraph.from_edges([(src, dst)], num_clusters * size, count=True)


def cut(graph: UndirectedGraph, parts: np.ndarray[Any, Any]) -> int:
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return int((parts[rows] != parts[graph.indices]).sum()) // 2


def test_undirected_graph_equals_networkx() -> None:
    generator = np.random.default_rng(0)
    pairs = generator.integers(0, 30, (200, 2))
    other = generator.integers(0, 30, (50, 2))
    graph = UndirectedGraph.from_edges(
        [tuple(torch.from_numpy(edges.T)) for edges in (pairs, other)], 35, count=True
    )
    oracle: Any = networkx.MultiGraph()
    oracle.add_nodes_from(range(35))
    oracle.add_edges_from((int(u), int(v)) for u, v in np.concatenate([pairs, other]) if u != v)
    assert graph.num_edges == networkx.Graph(oracle).number_of_edges()
    assert graph.counts is not None
    for node in range(35):
        place = slice(graph.indptr[node], graph.indptr[node + 1])
        assert graph.indices[place].tolist() == sorted(set(oracle[node]))
        expected = [oracle.number_of_edges(node, other) for other in sorted(set(oracle[node]))]
        assert graph.counts[place].tolist() == expected


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 1, 2], [1, 1], "no self loops"),
        ([0, 1, 1], [1], "in both directions"),
        ([0, 1, 2], [1, 2], r"indices must be in \[0, 2\)"),
        ([0, 1, 2], [1, -1], r"indices must be in \[0, 2\)"),
        ([0, 2, 1], [1], "must ascend"),
        ([0, 1, 3], [1, 0], "end with the length"),
        ([], [], "end with the length"),
    ],
)
def test_what_metis_would_not_survive_is_refused(
    indptr: list[int], indices: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        UndirectedGraph(np.array(indptr, dtype=np.int32), np.array(indices, dtype=np.int32))


def test_counts_must_fit() -> None:
    with pytest.raises(ValueError, match="one entry per entry"):
        UndirectedGraph(np.array([0, 1, 2]), np.array([1, 0]), np.array([1]))


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(MetisError, match="fewer than 2\\*\\*31 nodes"):
        UndirectedGraph.from_edges([], 2**31)


@pytest.mark.parametrize("method", ["kway", "recursive"])
def test_clusters_are_found(method: Any) -> None:
    graph = clustered(4, 60)
    parts = metis_partition(graph, 4, method=method)
    assert cut(graph, parts) <= 4
    assert np.bincount(parts).tolist() == [60] * 4


def test_objective_vol_runs_and_cuts_well() -> None:
    graph = clustered(4, 60)
    assert cut(graph, metis_partition(graph, 4, objective="vol")) <= 8


def test_a_ring_is_cut_in_as_many_places_as_there_are_parts() -> None:
    graph = ring(600)
    assert cut(graph, metis_partition(graph, 5)) == 5


def test_edge_counts_can_decide_where_to_cut() -> None:
    """A ring in which every fourth edge is single and the others fivefold."""
    nodes = torch.arange(64)
    strong = nodes[nodes % 4 != 3].repeat(5)
    weak = nodes[nodes % 4 == 3]
    src = torch.cat([strong, weak])
    graph = UndirectedGraph.from_edges([(src, (src + 1) % 64)], 64, count=True)
    parts = metis_partition(graph, 4, weigh_edges=True)
    at = np.flatnonzero(parts != np.roll(parts, -1))
    assert len(at) == 4
    assert (at % 4 == 3).all()


def test_several_constraints_are_balanced_at_once() -> None:
    generator = np.random.default_rng(0)
    src, dst = torch.from_numpy(generator.integers(0, 4000, (2, 20000)))
    graph = UndirectedGraph.from_edges([(src, dst)], 4000)
    weights = np.stack(
        [np.ones(4000), generator.integers(0, 30, 4000), generator.random(4000) < 0.2], axis=1
    ).astype(np.int64)
    parts = metis_partition(graph, 4, node_weights=weights, tolerances=[1.03, 1.04, 1.05])
    for column, bound in enumerate((1.05, 1.05, 1.05)):
        loads = np.bincount(parts, weights[:, column], minlength=4)
        assert loads.max() / loads.mean() <= bound


def test_seed_decides() -> None:
    graph = clustered(1, 500)
    first, again, other = (metis_partition(graph, 4, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("num_nodes", "num_parts"), [(0, 3), (1, 1), (1, 4), (5, 5), (3, 9), (12, 1)]
)
def test_degenerate_sizes(num_nodes: int, num_parts: int) -> None:
    graph = UndirectedGraph.from_edges([], num_nodes)
    parts = metis_partition(graph, num_parts)
    assert parts.shape == (num_nodes,)
    assert np.bincount(parts, minlength=num_parts).max(initial=0) <= -(-num_nodes // num_parts)


def test_no_edges_and_disconnected_graphs() -> None:
    lonely = metis_partition(UndirectedGraph.from_edges([], 100), 4)
    assert np.bincount(lonely, minlength=4).max() <= 27
    pairs = torch.arange(0, 100, 2)
    graph = UndirectedGraph.from_edges([(pairs, pairs + 1)], 100)
    assert cut(graph, metis_partition(graph, 5)) <= 5


def test_metis_prints_nothing_even_when_one_node_outweighs_all(
    capfd: pytest.CaptureFixture[str],
) -> None:
    leaves = torch.arange(1, 1000)
    graph = UndirectedGraph.from_edges([(torch.zeros_like(leaves), leaves)], 1000)
    weights = np.zeros((1000, 1), dtype=np.int64)
    weights[0] = 1000
    sys.stdout.write("before\n")
    parts = metis_partition(graph, 8, node_weights=weights)
    assert parts.max() < 8
    assert capfd.readouterr().out == "before\n"


def test_what_others_print_meanwhile_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    with _metis._quiet(True):
        os.write(1, b"another thread\n\t***METIS complains\n")
    assert capfd.readouterr().out == "another thread\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_parts": 0}, "num_parts must be at least 1 \\(got 0\\)"),
        ({"objective": "flow"}, "objtype must be 'cut' or 'vol' \\(got 'flow'\\)"),
        ({"method": "spectral"}, "method must be 'kway' or 'recursive'"),
        ({"method": "recursive", "objective": "vol"}, "use method='kway'"),
        ({"seed": -1}, "seed must be in"),
        ({"tolerances": [1.0]}, "numbers above 1"),
        ({"tolerances": [1.1, 1.1]}, "must hold 1 numbers"),
        ({"node_weights": np.ones((5, 1), int)}, r"got shape \(5, 1\) for 10 nodes"),
        ({"node_weights": np.ones(10, int)}, r"got shape \(10,\)"),
        ({"node_weights": np.ones((10, 0), int)}, "at least one constraint"),
        ({"node_weights": np.ones((10, 1))}, "must be integers"),
        ({"node_weights": -np.ones((10, 1), int)}, "must not be negative"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metis_partition(ring(10), **{"num_parts": 2, **arguments})


def test_weights_beyond_32_bits_are_refused() -> None:
    weights = np.full((10, 1), 2**30)
    with pytest.raises(MetisError, match="weight in constraint 0 must be below 2147483647"):
        metis_partition(ring(10), 2, node_weights=weights)


def test_what_the_header_says() -> None:
    assert metis_available()
    library = _metis.load_metis()
    assert library is not None
    assert library.index_type is np.int32
    assert library.real_type is np.float32
    assert library.version[0] == 5
    assert library.options["PTYPE"] == 0
    assert library.options["NUMBERING"] > library.options["SEED"] > library.options["OBJTYPE"]


def test_error_status_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _metis.load_metis()
    assert library is not None
    monkeypatch.setitem(library.options, "NITER", library.options["OBJTYPE"])  # 10: no objective
    with pytest.raises(MetisError, match="METIS refused the input .* 10 nodes, 10 edges, 2 parts"):
        metis_partition(ring(10), 2)


@pytest.fixture
def without_the_wheel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_metis, "_find", lambda distribution, name: None)
    _metis.load_metis.cache_clear()
    yield
    _metis.load_metis.cache_clear()


@pytest.mark.usefixtures("without_the_wheel")
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    assert not metis_available()
    with pytest.raises(MetisError, match="pip install cmeel-metis"):
        metis_partition(ring(10), 2)


@pytest.mark.usefixtures("without_the_wheel")
def test_pymetis_is_the_fallback_for_one_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    class Options:
        def __init__(self, **given: int) -> None:
            self.__dict__.update(given)

    def part_graph(num_parts: int, **given: Any) -> tuple[int, list[int]]:
        calls.append({"num_parts": num_parts, **given})
        return 0, [node % num_parts for node in range(10)]

    fake: Any = ModuleType("pymetis")
    fake.Options, fake.part_graph = Options, part_graph
    monkeypatch.setitem(sys.modules, "pymetis", fake)
    weights = np.arange(10)[:, None]
    parts = metis_partition(ring(10), 3, node_weights=weights, tolerances=[1.05], seed=4)
    assert parts.tolist() == [node % 3 for node in range(10)]
    assert calls[0]["num_parts"] == 3
    assert calls[0]["vweights"] == list(range(10))
    assert calls[0]["xadj"] == list(range(0, 21, 2))
    assert (calls[0]["options"].seed, calls[0]["options"].ufactor) == (4, 50)
    with pytest.raises(MetisError, match="asked for 2 constraints.*cmeel-metis"):
        metis_partition(ring(10), 3, node_weights=np.ones((10, 2), int))
    with pytest.raises(MetisError, match="asked for objtype vol"):
        metis_partition(ring(10), 3, objective="vol")


def write_header(folder: Path, text: str) -> None:
    (folder / "metis.h").write_text(text)
    (folder / "libmetis.so").write_text("not a library")


GOOD_HEADER = """#define IDXTYPEWIDTH 32
#define REALTYPEWIDTH 32
#define METIS_VER_MAJOR         5
#define METIS_VER_MINOR         2
#define METIS_VER_SUBMINOR      1
typedef enum { METIS_OPTION_PTYPE } moptions_et;
"""


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "cannot read"),
        (GOOD_HEADER.replace("         5", " 6"), "METIS 5 is needed"),
        (GOOD_HEADER, "cannot load METIS.*reinstall cmeel-metis"),
    ],
)
def test_broken_installations_are_told(
    header: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_header(tmp_path, header)
    files = {"libmetis": "libmetis.so", "metis.h": "metis.h"}
    monkeypatch.setattr(
        _metis, "_find", lambda _, name: tmp_path / files[name] if name in files else None
    )
    _metis.load_metis.cache_clear()
    try:
        assert not metis_available()
        with pytest.raises(MetisError, match=message):
            metis_partition(ring(10), 2)
    finally:
        _metis.load_metis.cache_clear()
