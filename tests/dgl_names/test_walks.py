# SPDX-License-Identifier: Apache-2.0
"""Random walks and what they find, by hand, by statistics and beside DGL. No processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import graphshard
import graphshard.dgl
from dgl_peer import dgl
from graphshard.dgl import sampling, seed
from graphshard.errors import DGLError
from graphshard.graph import Graph, graph, heterograph

EDGES = ([0, 1, 1, 1, 0, 3], [1, 0, 2, 3, 2, 0])


def typed(idtype: torch.dtype = torch.int64) -> Graph:
    return heterograph(
        {
            ("user", "buys", "item"): ([0, 0, 1, 2, 3, 3], [0, 1, 1, 2, 2, 1]),
            ("item", "bought", "user"): ([0, 1, 1, 2, 2, 1], [0, 0, 1, 2, 3, 3]),
        },
        idtype=idtype,
    )


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_walks_take_edges_of_the_metapath(idtype: torch.dtype) -> None:
    g, path = typed(idtype), ["buys", ("item", "bought", "user")] * 3
    g.edges["bought"].data["p"] = torch.tensor([1.0, 0, 1, 0, 1, 1])
    for options in ({}, {"prob": "p"}, {"restart_prob": 0.3}):
        traces, eids, types = sampling.random_walk(
            g, [3, 0, 0, 2] * 20, metapath=path, return_eids=True, **options
        )
        assert traces.dtype == eids.dtype == types.dtype == idtype
        assert types.tolist() == [1, 0] * 3 + [1]  # in the order of g.ntypes
        for step, etype in enumerate(path):
            moved = traces[:, step + 1] >= 0
            assert torch.equal(eids[:, step] >= 0, moved)
            src, dst = g.find_edges(eids[moved, step], etype=etype)
            assert torch.equal(src, traces[moved, step])
            assert torch.equal(dst, traces[moved, step + 1])
            if etype != "buys" and "prob" in options:
                assert bool((g.edges[etype].data["p"][eids[moved, step].long()] > 0).all())
        ended = (traces < 0).long()
        assert bool((ended.diff(dim=1) >= 0).all())


def test_walks_repeat_from_a_seed_and_are_uniform() -> None:
    g = graph(([0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]))
    g.edata["w"] = torch.tensor([1.0, 2, 5, 1, 1, 1])
    drawn = []
    for _ in range(2):
        seed(3)
        drawn.append(sampling.random_walk(g, torch.zeros(4000).long(), length=3, prob="w")[0])
    assert torch.equal(*drawn)
    for step in (1, 3):
        counts = torch.bincount(drawn[0][:, step], minlength=4)[1:]
        assert torch.allclose(counts / 4000, torch.tensor([1.0, 2, 5]) / 8, atol=0.03)
    traces, _ = sampling.random_walk(g, torch.zeros(4000).long(), length=2, restart_prob=0.25)
    alive = (traces >= 0).double().mean(0)
    assert torch.allclose(alive, torch.tensor([1, 0.75, 0.5625]).double(), atol=0.03)
    stops = torch.tensor([0.0, 1.0, 0.0])
    traces, _ = sampling.random_walk(g, [0, 1], length=3, restart_prob=stops)
    assert (traces >= 0).tolist() == [[True, True, False, False]] * 2


def test_what_cannot_be_walked_is_refused() -> None:
    g, plain = typed(), graph(EDGES)
    plain.edata["two"] = torch.ones(6, 2)
    cases: list[tuple[str, Any]] = [
        ("needs a metapath", lambda: sampling.random_walk(g, [0], length=2)),
        ("give length", lambda: sampling.random_walk(plain, [0])),
        ("must begin where", lambda: sampling.random_walk(g, [0], metapath=["buys", "buys"])),
        ("a node id must be in", lambda: sampling.random_walk(plain, [9], length=1)),
        ("one number per edge", lambda: sampling.random_walk(plain, [0], length=1, prob="two")),
        ("no relation of the walk", lambda: sampling.random_walk(plain, [0], length=1, prob="w")),
        (
            "one for each of the 2 steps",
            lambda: sampling.random_walk(plain, [0], length=2, restart_prob=torch.zeros(3)),
        ),
        ("p and q", lambda: sampling.node2vec_random_walk(plain, [0], 0.0, 1.0, 2)),
        ("p and q", lambda: sampling.node2vec_random_walk(plain, [0], 1.0, 0.0, 2)),
        (
            "a graph of one relation",
            lambda: sampling.node2vec_random_walk(
                heterograph({("a", "r", "a"): ([0], [0]), ("a", "s", "a"): ([0], [0])}),
                [0],
                1.0,
                1.0,
                2,
            ),
        ),
        ("a graph of one relation", lambda: sampling.node2vec_random_walk(g, [0], 1.0, 1.0, 2)),
        (
            "must end at the node type",
            lambda: sampling.RandomWalkNeighborSampler(g, 1, 0.0, 1, 1, ["buys"]),
        ),
        ("one entry for each place", lambda: sampling.pack_traces(torch.ones(2, 3), torch.ones(2))),
    ]
    for words, call in cases:
        with pytest.raises(DGLError, match=words):
            call()


@pytest.mark.parametrize(("p", "q"), [(1.0, 0.1), (10.0, 10.0), (0.2, 1.0)])
def test_node2vec_prefers_what_dgl_prefers(p: float, q: float) -> None:
    shares = []
    for module in (graphshard.dgl, dgl):
        g = module.graph(EDGES)
        g.edata["w"] = torch.tensor([2.0, 1, 1, 3, 1, 1])
        module.seed(1)
        traces, eids = module.sampling.node2vec_random_walk(
            g, torch.zeros(6000, dtype=torch.int64), p, q, 3, prob="w", return_eids=True
        )
        counts = Counter(map(tuple, traces.tolist()))
        shares.append({walk: count / 6000 for walk, count in counts.items()})
        there = eids >= 0
        assert torch.equal(g.find_edges(eids[there])[1], traces[:, 1:][there])
    for walk in set(shares[0]) | set(shares[1]):
        assert abs(shares[0].get(walk, 0) - shares[1].get(walk, 0)) < 0.04, walk


def test_traces_are_packed_as_dgl_packs_them() -> None:
    traces = torch.tensor([[0, 1, -1, -1], [2, 1, 3, 0], [4, -1, -1, -1]])
    types = torch.tensor([0, 1, 0, 1])
    for ours, theirs in zip(
        sampling.pack_traces(traces, types), dgl.sampling.pack_traces(traces, types), strict=True
    ):
        assert torch.equal(ours, theirs)
    empty = sampling.pack_traces(torch.empty(0, 3, dtype=torch.int64), torch.zeros(3).long())
    assert [len(part) for part in empty] == [0, 0, 0, 0]


def test_neighbours_are_those_that_walks_visit_most() -> None:
    g = typed()
    sampler = sampling.PinSAGESampler(g, "item", "user", 2, 0.0, 400, 2)
    found = sampler([1, 1, 2])
    assert found.canonical_etypes == [("item", "_E", "item")]
    assert found.num_nodes() == 3
    src, dst = found.edges()
    assert dst.tolist() == [1, 1, 1, 1, 2, 2]
    assert src.tolist()[0] == src.tolist()[2] == 1  # it comes back to itself most
    counts = found.edata["weights"].tolist()
    assert counts[0] >= counts[1]
    assert sum(counts[:2]) <= 800
    same = sampling.RandomWalkNeighborSampler(g, 2, 0.0, 400, 2, ["bought", "buys"], "n")
    assert "n" in same(torch.tensor([0])).edata


def test_neighbours_of_certain_walks_are_dgls() -> None:
    found = []
    for module in (graphshard.dgl, dgl):
        g = module.graph(([0, 1, 2], [1, 2, 0]))
        sampler = module.sampling.RandomWalkNeighborSampler(g, 3, 0.0, 4, 3)
        drawn = sampler(torch.tensor([2, 0]))
        columns = (*drawn.edges(), drawn.edata["weights"])
        found.append(sorted(zip(*(column.tolist() for column in columns), strict=True)))
    assert found[0] == found[1]
