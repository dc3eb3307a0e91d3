# SPDX-License-Identifier: Apache-2.0
"""Weights and masks written in ways that torch does not count: draws go by what is there now.

The right edges are known without a sampler: where one half of the edges may be drawn and all
neighbours are wanted, that half is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_cases import manager_of, plain_graph, typed_graph, write_parts
from torch import Tensor

import graphshard.dgl as dgl
from graphshard.graph import EID, Graph
from graphshard.sampling import DataLoader, DrawSeed, NeighborSampler
from graphshard.testing import run_ranks


def unordered_graph() -> Graph:
    """Edges come neither by source nor by destination, and every node has several of each."""
    generator = torch.Generator().manual_seed(4)
    src, dst = torch.randint(0, 20, (2, 200), generator=generator)
    return dgl.graph((src, dst), num_nodes=20)


def halves(graph: Graph) -> tuple[Tensor, Tensor]:
    is_even = torch.arange(graph.num_edges()) % 2 == 0
    return is_even, ~is_even


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


def drawn_by(graph: Graph, name: str, way: str) -> Tensor:
    """Ascending ids of the edges that are drawn where every edge of the first layer may be."""
    option: Any = "mask" if graph.edata[name].dtype in (torch.bool, torch.uint8) else "prob"
    everything = torch.arange(graph.num_nodes())
    if way == "frontier":
        return dgl.sampling.sample_neighbors(graph, everything, -1, prob=name).edata[EID].sort()[0]
    direction = "out" if way == "out" else "in"
    sampler = NeighborSampler([-1], edge_dir=direction, **{option: name})  # type: ignore[arg-type]
    if way == "loader":
        loader = dgl.dataloading.DataLoader(graph, everything, sampler, batch_size=20)
        (blocks,) = [batch[2] for batch in loader]
    else:
        blocks = sampler.sample(graph, everything)[2]
    return blocks[0].edata[EID].sort()[0]


@pytest.mark.parametrize("way", ["sample", "out", "loader", "frontier"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=["vector", "column"])
def test_a_write_is_seen(dtype: torch.dtype, way: str, shape: tuple[int, ...]) -> None:
    if way == "frontier" and dtype == torch.uint8:
        pytest.skip("sample_neighbors takes bool for a mask, as DGL does")
    graph = unordered_graph()
    graph.edata["w"] = torch.ones(200, dtype=dtype).view(shape)
    weights = graph.edata["w"]
    assert len(drawn_by(graph, "w", way)) == 200
    for allowed in halves(graph):
        weights.data.copy_(allowed.view(shape))
        assert torch.equal(drawn_by(graph, "w", way), allowed.nonzero().view(-1))


def test_a_column_of_a_matrix_is_read_where_it_lies() -> None:
    graph = unordered_graph()
    matrix = torch.ones(200, 3)
    graph.edata["w"] = matrix[:, 1]
    assert len(drawn_by(graph, "w", "sample")) == 200
    for allowed in halves(graph):
        matrix.numpy()[:, 1] = allowed.numpy()
        assert torch.equal(drawn_by(graph, "w", "sample"), allowed.nonzero().view(-1))


@pytest.mark.parametrize("walk", ["uniform", "node2vec"])
def test_walks_see_a_write(walk: str) -> None:
    graph = unordered_graph()
    graph.edata["w"] = torch.ones(200)
    nodes = torch.arange(20).repeat(20)
    for allowed in (None, *halves(graph)):
        if allowed is not None:
            graph.edata["w"].data.copy_(allowed)
        if walk == "uniform":
            eids = dgl.sampling.random_walk(graph, nodes, length=3, prob="w", return_eids=True)[1]
        else:
            eids = dgl.sampling.node2vec_random_walk(
                graph, nodes, 1, 2, 3, prob="w", return_eids=True
            )[1]
        eids = eids[eids >= 0]
        assert len(eids.unique()) > 60
        assert allowed is None or bool(allowed[eids].all())


def test_what_was_written_is_not_drawn_where_it_is_no_weight() -> None:
    graph = unordered_graph()
    graph.edata["w"] = torch.ones(200)
    drawn_by(graph, "w", "sample")
    graph.edata["w"].data[::2] = -1
    assert torch.equal(drawn_by(graph, "w", "sample"), halves(graph)[1].nonzero().view(-1))
    graph.edata["w"].add_(0)  # counted: it is checked again
    with pytest.raises(ValueError, match=r"finite weights of 0 or more .*\(got -1.0 at edge 0\)"):
        drawn_by(graph, "w", "sample")
    graph.edata["w"] = torch.ones(200, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"must be real to sample by \(got torch.complex64\)"):
        drawn_by(graph, "w", "sample")


ODD_RANKS: list[tuple[int, ...]] = [(), (0, 1), (0,), (0,)]
"""By pass, the ranks that allow edges of odd original id; the others allow the even ones."""


def draws(
    rank: int, world_size: int, parts: str, how: str, edge_dir: str, transport: str
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """By pass and relation the ids of drawn edges; and the original ids of a rank's edges."""
    manager = manager_of(parts, rank)
    name, dtype = ("m", torch.bool) if how == "mask" else ("w", torch.float64)
    own = manager.original_edge_ids
    for etype, ids in own.items():
        manager.edges[etype].data[name] = (ids % 2 == 0).to(dtype)
    option: dict[str, Any] = {"mask": name} if how == "mask" else {"prob": name}
    sampler = NeighborSampler([-1], edge_dir=edge_dir, **option)
    seeds = {t: manager.partition_book.partid2nids(rank, t) for t in manager.ntypes}
    loader = DataLoader(manager, seeds, sampler, 1000, transport=transport, edge_ids=True)  # type: ignore[arg-type]
    drawn = []
    for turn, odd_ranks in enumerate(ODD_RANKS):
        for etype, ids in own.items() if turn < 3 else ():
            manager.edges[etype].data[name].data.copy_(ids % 2 == int(rank in odd_ranks))
        if how == "alone":
            blocks = sampler.sample(manager, seeds, draw_seed=DrawSeed(0))[2]
        else:
            (blocks,) = [list(batch) for batch in loader]
        names = [etype[1] for etype in own]
        drawn.append({n: blocks[0].edges[n].data[EID].long() for n in names})
    loader.close()
    return drawn, {etype[1]: ids for etype, ids in own.items()}


@pytest.mark.parametrize("graph", ["plain", "typed"])
@pytest.mark.parametrize(
    ("how", "edge_dir", "transport"),
    [
        ("loader", "in", "collective"),
        ("loader", "out", "collective"),
        ("loader", "in", "replicated"),
        ("loader", "out", "replicated"),
        ("mask", "in", "replicated"),
        ("alone", "in", "collective"),
        ("alone", "out", "collective"),
    ],
)
def test_a_pass_begins_with_what_is_there(
    tmp_path: Path, graph: str, how: str, edge_dir: str, transport: str
) -> None:
    whole = plain_graph() if graph == "plain" else typed_graph()
    parts = write_parts(tmp_path, whole, 2, "random")
    of_ranks = run_ranks(draws, 2, parts, how, edge_dir, transport)
    for turn, odd_ranks in enumerate(ODD_RANKS):
        for name in of_ranks[0][1]:
            drawn = torch.cat([passes[turn][name] for passes, _ in of_ranks]).sort().values
            allowed = [own[name] % 2 == int(r in odd_ranks) for r, (_, own) in enumerate(of_ranks)]
            assert torch.equal(drawn, torch.cat(allowed).nonzero().view(-1))
