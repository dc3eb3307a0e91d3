# SPDX-License-Identifier: Apache-2.0
"""Negative samplers: which pairs, how they are spread, and that they repeat. No process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loader_cases import dgl, plain, typed
from scipy.stats import chisquare

from graphshard.dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform, Uniform
from graphshard.graph import graph, heterograph
from graphshard.sampling import DrawSeed

IDTYPES = [torch.int32, torch.int64]
DRAW = DrawSeed(5)


def pairs_of(result: Any) -> list[tuple[int, int]]:
    return list(zip(*(x.tolist() for x in result), strict=True))


@pytest.mark.parametrize("idtype", IDTYPES)
def test_per_source_keeps_sources_as_dgl(idtype: torch.dtype) -> None:
    g, of_dgl = plain(idtype=idtype), plain(dgl)
    eids = torch.tensor([5, 0, 119, 7])
    source, destination = Uniform(3)(g, eids.to(idtype))
    assert source.dtype == destination.dtype == idtype
    expected, _ = dgl.dataloading.negative_sampler.Uniform(3)(of_dgl, eids)
    assert source.tolist() == expected.tolist()
    assert destination.shape == (12,)
    assert 0 <= int(destination.min()) <= int(destination.max()) < 20


@pytest.mark.parametrize("idtype", IDTYPES)
@pytest.mark.parametrize("make", [PerSourceUniform, GlobalUniform])
def test_typed(make: Any, idtype: torch.dtype) -> None:
    g = typed(idtype=idtype)
    eids = {"buys": torch.arange(30, dtype=idtype), ("user", "knows", "user"): [3, 1]}
    found = make(2)(g, eids)
    assert list(found) == [("user", "buys", "item"), ("user", "knows", "user")]
    for etype, (source, destination) in found.items():
        assert len(source) == len(destination) == 2 * len(eids.get(etype, eids["buys"]))
        assert int(source.max()) < g.num_nodes(etype[0])
        assert int(destination.max()) < g.num_nodes(etype[2])


def test_destinations_are_uniform() -> None:
    g = plain(num_nodes=20)
    _, destination = Uniform(500)(g, torch.arange(120), DRAW)
    assert chisquare(torch.bincount(destination, minlength=20).numpy()).pvalue > 1e-3


def test_free_pairs_are_uniform() -> None:
    g = plain()
    source, destination = GlobalUniform(500, replace=True)(g, torch.arange(120), DRAW)
    assert len(source) == 120 * 500
    counts = torch.zeros(20, 20).index_put((source, destination), torch.tensor(1.0), True)
    free = torch.ones(20, 20, dtype=torch.bool).fill_diagonal_(False)
    free[g.edges()] = False
    assert bool((counts[~free] == 0).all())
    assert chisquare(counts[free].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_global_never_hits_an_edge(replace: bool, loops: bool) -> None:
    # 30 nodes, nearly half of all pairs are edges
    src, dst = torch.randint(30, (2, 500), generator=torch.Generator().manual_seed(0))
    g = graph((src, dst), num_nodes=30)
    sampler = GlobalUniform(1, exclude_self_loops=not loops, replace=replace)
    pairs = pairs_of(sampler(g, torch.arange(200)))
    assert len(pairs) == 200
    assert not set(pairs) & set(zip(src.tolist(), dst.tolist(), strict=True))
    assert loops or all(u != v for u, v in pairs)
    assert replace or len(set(pairs)) == len(pairs)


def test_self_loops_between_types_are_no_loops() -> None:
    g = heterograph({("a", "r", "b"): ([0], [1])}, {"a": 2, "b": 2})
    pairs = pairs_of(GlobalUniform(3)(g, torch.tensor([0])))
    assert set(pairs) == {(0, 0), (1, 0), (1, 1)}  # all that are free


def test_a_graph_without_free_pairs() -> None:
    nodes = torch.arange(4)
    g = graph((nodes.repeat_interleave(4), nodes.repeat(4)))
    source, destination = GlobalUniform(2)(g, nodes)
    assert source.numel() == destination.numel() == 0
    # One free pair only, and it may come once, or once per edge.
    g = graph(([0, 1, 1], [0, 0, 1]))
    assert pairs_of(GlobalUniform(2)(g, [0, 1])) == [(0, 1)]
    assert pairs_of(GlobalUniform(2, replace=True)(g, [0, 1])) == [(0, 1)] * 4


def test_redundancy_limits_tries() -> None:
    src, dst = torch.randint(30, (2, 500), generator=torch.Generator().manual_seed(0))
    g = graph((src, dst), num_nodes=30)
    found = [
        len(GlobalUniform(1, redundancy=r, replace=True)(g, torch.arange(400), DRAW)[0])
        for r in (0, 0.5, 1, 10)
    ]
    # Two in five pairs are edges or loops: that part of the rest is lost with each try.
    assert 200 < found[0] < found[1] == found[2] < 360
    assert found[3] == 400


@pytest.mark.parametrize(
    "sampler",
    [Uniform(3), GlobalUniform(3), GlobalUniform(3, replace=True)],
    ids=["source", "global", "global replace"],
)
def test_pairs_repeat_by_draw_and_edge(sampler: Any) -> None:
    g = plain()

    def by_edge(eids: list[int], draw: DrawSeed = DRAW) -> list[Any]:
        pairs = pairs_of(sampler(g, torch.tensor(eids), draw))
        assert len(pairs) == 3 * len(eids)
        return [pairs[3 * i : 3 * i + 3] for i in range(len(eids))]

    first = by_edge([4, 90, 33])
    assert by_edge([4, 90, 33]) == first
    assert by_edge([33, 4])[::-1] == [first[0], first[2]]
    assert by_edge([4, 90, 33], DRAW.at(step=1)) != first
    assert by_edge([4, 90, 33], DRAW.at(epoch=1)) != first
    assert first[0] != first[1]


def test_without_a_draw_torch_decides() -> None:
    g = plain()

    def drawn() -> list[tuple[int, int]]:
        torch.manual_seed(8)
        return [*pairs_of(Uniform(2)(g, [1, 2])), *pairs_of(Uniform(2)(g, [1, 2]))]

    assert drawn() == drawn()
    assert drawn()[:4] != drawn()[4:]


@pytest.mark.parametrize("sampler", [Uniform(2), GlobalUniform(2)], ids=["source", "global"])
def test_no_edges(sampler: Any) -> None:
    for g in (plain(), graph(([], []), num_nodes=3), graph(([], []))):
        source, destination = sampler(g, torch.empty(0, dtype=torch.int64))
        assert source.numel() == destination.numel() == 0


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"k must be a positive number .* \(got 0\)"):
        Uniform(0)
    with pytest.raises(ValueError, match="redundancy must not be negative"):
        GlobalUniform(1, redundancy=-0.5)
    with pytest.raises(TypeError, match="eids must be a dictionary from relation to ids"):
        Uniform(1)(typed(), [0])
    with pytest.raises(ValueError, match=r"eids of .* must be in \[0, 120\) \(got 120\)"):
        Uniform(1)(plain(), [120])
