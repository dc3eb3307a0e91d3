# SPDX-License-Identifier: Apache-2.0
"""Odd little graphs of both libraries with the same features, and what is equal between the two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import networkx
import numpy as np
import scipy.sparse
import torch
from graph_oracle import rand

from dgl_peer import dgl

#: Sources, destinations, number of nodes.
PLAIN: dict[str, tuple[list[int], list[int], int]] = {
    "empty": ([], [], 0),
    "one node": ([], [], 1),
    "no edges": ([], [], 4),
    "one loop": ([0], [0], 1),
    "loops": ([0, 0, 2, 1], [0, 0, 2, 0], 4),
    "parallel": ([3, 0, 0, 2, 2, 1, 0, 3], [0, 1, 1, 0, 2, 0, 3, 3], 5),
    "isolated": ([2, 2, 0, 1, 3, 4, 4, 1, 0, 2], [0, 0, 1, 2, 2, 4, 0, 4, 2, 1], 7),
    "star": ([1, 2, 3, 4, 5], [0, 0, 0, 0, 0], 6),
    "path": ([0, 1, 2, 3], [1, 2, 3, 4], 5),
    "random": (
        torch.randint(12, (60,), generator=torch.Generator().manual_seed(1)).tolist(),
        torch.randint(12, (60,), generator=torch.Generator().manual_seed(2)).tolist(),
        14,
    ),
}

KNOWS, PLAYS, RATES, LIKED = (
    ("user", "knows", "user"),
    ("user", "plays", "game"),
    ("user", "rates", "game"),
    ("game", "liked", "user"),
)
#: Relations, and numbers of nodes. DGL 1.1.3 ends the process at a type without any relation.
TYPED: dict[str, tuple[dict[Any, Any], dict[str, int]]] = {
    "usual": (
        {
            KNOWS: ([0, 1, 2, 2, 3], [1, 2, 0, 0, 3]),
            PLAYS: ([0, 1, 3, 3], [0, 1, 1, 2]),
            RATES: ([2, 2, 0], [1, 0, 0]),
            LIKED: ([0, 2, 2], [3, 0, 1]),
        },
        {"user": 5, "game": 4},
    ),
    "empty type": (
        {KNOWS: ([0, 0, 1], [0, 1, 1]), PLAYS: ([], []), LIKED: ([], [])},
        {"user": 3, "game": 0},
    ),
    "empty relation": (
        {KNOWS: ([1, 1], [1, 1]), PLAYS: ([0, 0], [1, 1]), RATES: ([], []), LIKED: ([1], [0])},
        {"user": 2, "game": 3},
    ),
    "no edges": ({KNOWS: ([], []), PLAYS: ([], []), LIKED: ([], [])}, {"user": 2, "game": 1}),
    "nothing": ({KNOWS: ([], []), PLAYS: ([], []), LIKED: ([], [])}, {"user": 0, "game": 0}),
}


def plain(library: Any, name: str, idtype: torch.dtype) -> Any:
    """A graph with fields ``h`` [N, 3], ``w`` [E, 3] and ``s`` [E, 1]."""
    src, dst, num_nodes = PLAIN[name]
    ends = torch.tensor(src, dtype=idtype), torch.tensor(dst, dtype=idtype)
    return _filled(library.graph(ends, num_nodes=num_nodes))


def typed(library: Any, name: str, idtype: torch.dtype) -> Any:
    """A graph with these fields on every type and relation."""
    relations, counts = TYPED[name]
    ends = {
        etype: tuple(torch.tensor(side, dtype=idtype) for side in sides)
        for etype, sides in relations.items()
    }
    return _filled(library.heterograph(ends, counts))


def _filled(g: Any) -> Any:
    for i, ntype in enumerate(sorted(g.ntypes)):
        g.nodes[ntype].data["h"] = rand(g.num_nodes(ntype), 3, seed=i)
    for i, etype in enumerate(sorted(g.canonical_etypes)):
        g.edges[etype].data["w"] = rand(g.num_edges(etype), 3, seed=10 + i)
        g.edges[etype].data["s"] = rand(g.num_edges(etype), 1, seed=20 + i)
    return g


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """What differs between an answer of this package and DGL's, in words.

    Tensors have one dtype, shape and values; floats one value to ten digits; graphs types,
    numbers, edges in order of their ids, and features.
    """
    if isinstance(theirs, dgl.DGLGraph):
        yield from _graph_differences(ours, theirs, where)
    elif isinstance(theirs, torch.Tensor):
        is_tensor = isinstance(ours, torch.Tensor) and ours.dtype == theirs.dtype
        if is_tensor and torch.equal(ours, theirs):  # a fifth of the time of what tells the gap
            return
        try:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)
        except AssertionError as error:
            yield f"{where}: {' '.join(str(error).split())}"
    elif scipy.sparse.issparse(theirs):
        yield from differences(ours.toarray(), theirs.toarray(), where)
    elif isinstance(theirs, np.ndarray):
        if ours.dtype != theirs.dtype or not np.array_equal(ours, theirs):
            yield f"{where}: {ours} of {ours.dtype}, not {theirs} of {theirs.dtype}"
    elif isinstance(theirs, networkx.Graph):
        mine, its = (
            [len(g), sorted((u, v, int(number)) for u, v, number in g.edges(data="id"))]
            for g in (ours, theirs)
        )
        yield from differences(mine, its, where)
    elif isinstance(theirs, Mapping):
        yield from differences(sorted(map(str, ours)), sorted(map(str, theirs)), f"{where} keys")
        for key in [key for key in theirs if key in ours]:
            mine, its = ours[key], theirs[key]
            if key in ("_ID", "_TYPE"):  # DGL has int64 ones on some int32 graphs
                mine, its = mine.long(), its.long()
            yield from differences(mine, its, f"{where}[{key!r}]")
    elif isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            yield f"{where}: {len(ours)} items, not {len(theirs)}"
        for i, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(mine, its, f"{where}[{i}]")
    elif isinstance(theirs, float):
        if not np.isclose(ours, theirs, rtol=1e-6, atol=0, equal_nan=True):
            yield f"{where}: {ours}, not {theirs}"
    elif ours != theirs:
        yield f"{where}: {ours!r}, not {theirs!r}"


def _graph_differences(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    for name in ("ntypes", "canonical_etypes", "srctypes", "dsttypes", "idtype", "is_block"):
        yield from differences(getattr(ours, name), getattr(theirs, name), f"{where}.{name}")
    if ours.canonical_etypes != theirs.canonical_etypes:
        return
    sides = ("src", "dst") if theirs.is_block else ("",)
    for side in sides:
        for ntype in getattr(theirs, f"{side}types" if side else "ntypes"):
            mine, its = (getattr(g, f"{side}nodes")[ntype].data for g in (ours, theirs))
            count = f"num_{side}_nodes" if side else "num_nodes"
            yield from differences(
                (getattr(ours, count)(ntype), dict(mine)),
                (getattr(theirs, count)(ntype), dict(its)),
                f"{where} {side} {ntype}",
            )
    for etype in theirs.canonical_etypes:
        mine, its = (
            (*g.edges(etype=etype, order="eid"), dict(g.edges[etype].data)) for g in (ours, theirs)
        )
        yield from differences(mine, its, f"{where} {etype}")
    if not theirs.is_block:
        for kind, names in (("nodes", theirs.ntypes), ("edges", theirs.canonical_etypes)):
            ask = f"batch_num_{kind}"
            for name in names:
                yield from differences(
                    getattr(ours, ask)(name), getattr(theirs, ask)(name), f"{where} {ask} {name}"
                )
