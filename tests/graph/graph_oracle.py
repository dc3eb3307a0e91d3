# SPDX-License-Identifier: Apache-2.0
"""DGL as the oracle of graph tests: the same little graphs, with the same features, in both."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dgl_peer import dgl, dgl_fn
from graphshard import function as fn

# `graphshard.graph` is the constructor, as `dgl.graph` is; this is the package of the same name.
gs = importlib.import_module("graphshard.graph")

__all__ = ["dgl", "dgl_fn", "dgl_quiet", "fn", "gs"]

# Parallel edges (2 -> 0 twice), a self loop (4), isolated nodes (5, 6), sources without in-edges.
PLAIN = ([2, 2, 0, 1, 3, 4, 4, 1, 0, 2], [0, 0, 1, 2, 2, 4, 0, 4, 2, 1], 7)
PLAIN_GRAPHS: dict[str, tuple[list[int], list[int], int]] = {
    "mixed": PLAIN,
    "no_edges": ([], [], 3),
    "one_loop": ([0], [0], 1),
    "star": ([1, 2, 3, 4, 5], [0, 0, 0, 0, 0], 6),
}

TYPED = {
    ("user", "follows", "user"): ([0, 1, 2, 2, 3], [1, 2, 0, 0, 3]),
    ("user", "plays", "game"): ([0, 1, 3, 3], [0, 1, 1, 2]),
    ("user", "rates", "game"): ([2, 2, 0], [1, 0, 0]),
    ("game", "liked", "user"): ([0, 2, 2], [3, 0, 1]),
}
TYPED_NODES = {"user": 5, "game": 4}


class dgl_quiet(warnings.catch_warnings):
    """DGL warns when a user-defined function meets no edges, and about its own internals."""

    def __enter__(self) -> Any:
        log = super().__enter__()
        warnings.simplefilter("ignore")
        return log


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return _rand(*shape, seed=seed, dtype=dtype).clone()


@cache
def _rand(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    values = torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.5
    signs = torch.rand(*shape, generator=generator) < 0.5
    return torch.where(signs, -values, values).to(dtype)


def plain_pair(
    name: str = "mixed", idtype: torch.dtype = torch.int64, dim: int = 3
) -> tuple[gs.Graph, Any]:
    """(ours, DGL's) with node field ``h`` and edge fields ``w`` [E, dim] and ``s`` [E, 1]."""
    src, dst, num_nodes = PLAIN_GRAPHS[name]
    ends = torch.tensor(src, dtype=idtype), torch.tensor(dst, dtype=idtype)
    ours = gs.graph(ends, num_nodes=num_nodes)
    theirs = dgl.graph(ends, num_nodes=num_nodes)
    for g in (ours, theirs):
        g.ndata["h"] = rand(num_nodes, dim, seed=1)
        g.edata["w"] = rand(len(src), dim, seed=2)
        g.edata["s"] = rand(len(src), 1, seed=3)
    return ours, theirs


def typed_pair(
    data: Mapping[Any, Any] = TYPED, counts: Mapping[str, int] = TYPED_NODES
) -> tuple[gs.Graph, Any]:
    """(ours, DGL's) with field ``h`` on all nodes and ``w`` on all edges."""
    ours, theirs = gs.heterograph(data, counts), dgl.heterograph(data, counts)
    for g in (ours, theirs):
        for i, (ntype, count) in enumerate(sorted(counts.items())):
            g.nodes[ntype].data["h"] = rand(count, 2, seed=i)
        for i, etype in enumerate(sorted(data)):
            g.edges[etype].data["w"] = rand(len(data[etype][0]), 2, seed=10 + i)
    return ours, theirs


def assert_same_data(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Both hold the same fields with the same values."""
    assert set(ours.keys()) == set(theirs.keys())
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_features(ours: Any, theirs: Any) -> None:
    """All features of two graphs that are not blocks are equal."""
    for ntype in theirs.ntypes:
        assert_same_data(ours.nodes[ntype].data, theirs.nodes[ntype].data)
    for etype in theirs.canonical_etypes:
        assert_same_data(ours.edges[etype].data, theirs.edges[etype].data)


def assert_same_graph(ours: Any, theirs: Any, *, batch: bool = True) -> None:
    """Types, counts, edges by id, features and numbers per graph of a batch are equal."""
    assert ours.ntypes == theirs.ntypes
    assert ours.canonical_etypes == theirs.canonical_etypes
    assert ours.idtype == theirs.idtype
    for ntype in theirs.ntypes:
        assert ours.num_nodes(ntype) == theirs.num_nodes(ntype)
        if batch:
            assert torch.equal(ours.batch_num_nodes(ntype), theirs.batch_num_nodes(ntype))
    for etype in theirs.canonical_etypes:
        for mine, its in zip(
            ours.edges(etype=etype, order="eid"),
            theirs.edges(etype=etype, order="eid"),
            strict=True,
        ):
            assert torch.equal(mine, its)
        if batch:
            assert torch.equal(ours.batch_num_edges(etype), theirs.batch_num_edges(etype))
    assert_same_features(ours, theirs)
