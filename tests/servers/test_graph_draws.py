# SPDX-License-Identifier: Apache-2.0
"""Draws from a `DistGraph` against the graph before it was partitioned. Servers in threads.

The graphs have five parts, one of them empty and one without nodes of one type. What is drawn is
brought to original ids, and then has to be what one process draws from the original graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_graph_cases import TOKEN, Original, Servers, join
from torch import Tensor

import graphshard
from graphshard.comm import barrier
from graphshard.dgl.dataloading import LaborSampler, NeighborSampler
from graphshard.graph import EID, NID
from graphshard.ops import draw_neighbors
from graphshard.sampling import DrawOptions, DrawSeed, NeighborRequest
from graphshard.sampling.graph_store import graph_store_of
from graphshard.servers import (
    DistGraph,
    DistTensor,
    exit_client,
    initialize,
    sample_etype_neighbors,
    sample_neighbors,
    set_job,
)
from graphshard.testing import run_ranks


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    folder = tmp_path_factory.mktemp("originals")
    return {kind: Original(kind, folder / kind) for kind in ("plain", "typed")}


@pytest.fixture(scope="module", params=[0, 5], ids=["alone", "five hosts"])
def opened(
    request: pytest.FixtureRequest,
    originals: dict[str, Original],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[DistGraph, Original]]]:
    exit_client()
    found = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.delenv("GRAPHSHARD_HOST", raising=False)
        for kind, original in originals.items():
            if request.param == 0:
                found[kind] = DistGraph(kind, part_config=original.part_config), original
                continue
            folder = tmp_path_factory.mktemp("servers")
            servers = Servers(stack, original.part_config, request.param, folder)
            patch.setenv("GRAPHSHARD_HOST", str(request.param // 2))
            patch.setenv("GRAPHSHARD_TOKEN", TOKEN)
            exit_client()
            initialize(servers.ip_config)
            g = DistGraph(kind)
            found[kind] = g, original
            if kind == "plain":  # one process has one cluster; keep this one open besides
                stack.callback(g._job.cluster.close)
                set_job(None)
        yield found
        exit_client()


SAMPLERS = {
    "out": NeighborSampler([4, 3], edge_dir="out"),
    "out, weighted": NeighborSampler([3, 4], edge_dir="out", prob="weight"),
    "out, again": NeighborSampler([5, 2], edge_dir="out", replace=True),
    "in, mask": NeighborSampler([4, 3], mask="open"),
    "in, float16": NeighborSampler([4, 3], prob="half"),
    "in, weighted": NeighborSampler([4, 3], prob="weight"),
    "labor": LaborSampler([4, 3]),
    "labor, weighted": LaborSampler([3, 3], prob="weight", layer_dependency=True),
    "labor, out": LaborSampler([4, 3], edge_dir="out"),
}


@pytest.mark.parametrize("kind", ["plain", "typed"])
@pytest.mark.parametrize("how", SAMPLERS)
def test_blocks_are_those_of_the_graph_in_one_process(opened: Any, kind: str, how: str) -> None:
    g, original = opened[kind]
    sampler, graph = SAMPLERS[how], original.graph
    seeds = {t: torch.randperm(graph.num_nodes(t))[:25] for t in graph.ntypes}
    hidden = {t: torch.randperm(graph.num_edges(t))[:60] for t in graph.canonical_etypes}
    new_hidden = {t: torch.argsort(original.edges[t])[i] for t, i in hidden.items()}
    _, _, expected = sampler.sample(graph, seeds, hidden, draw_seed=DrawSeed(7, 1, 2))
    _, _, blocks = sampler.sample(g, original.new(seeds), new_hidden, draw_seed=DrawSeed(7, 1, 2))
    assert sum(block.num_edges(t) for block in expected for t in block.canonical_etypes) > 50
    for block, other in zip(blocks, expected, strict=True):
        assert block.canonical_etypes == other.canonical_etypes
        for ntype in graph.ntypes:
            sources = block.srcnodes[ntype].data[NID]
            assert torch.equal(original.nodes[ntype][sources], other.srcnodes[ntype].data[NID])
        for number, etype in enumerate(block.canonical_etypes):
            eids = block.edges[etype].data[EID]
            old = original.edges[graph.canonical_etypes[number]][eids]
            assert torch.equal(old, other.edges[etype].data[EID])
            for one, side in zip(block.edges(etype=etype), other.edges(etype=etype), strict=True):
                assert torch.equal(one, side)


@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_all_out_edges_are_those_of_the_graph(opened: Any, kind: str) -> None:
    g, original = opened[kind]
    ntype = original.graph.ntypes[-1]
    nodes = torch.randperm(original.graph.num_nodes(ntype))[:20]
    found = g.sample_neighbors(original.new({ntype: nodes}), -1, "out")
    for etype in original.graph.canonical_etypes:
        expected = torch.empty(0, dtype=torch.int64)
        if etype[0] == ntype:
            expected = original.graph.out_edges(nodes, form="eid", etype=etype)
        old = original.edges[etype][found.edges[etype].data[EID]]
        assert torch.equal(old.sort().values, expected.sort().values)
        src, dst = found.edges(etype=etype)
        ends = original.graph.find_edges(old, etype=etype)
        assert torch.equal(original.nodes[etype[0]][src], ends[0])
        assert torch.equal(original.nodes[etype[2]][dst], ends[1])


def edges_of_all(graph: Any, ntype: str, edge_dir: str) -> list[list[tuple[Any, int]]]:
    """For each node its edges of all relations, one relation after another, as (relation, id)."""
    found: list[list[tuple[Any, int]]] = [[] for _ in range(graph.num_nodes(ntype))]
    for etype in graph.canonical_etypes:
        if etype[2 if edge_dir == "in" else 0] == ntype:
            near = graph.edges(etype=etype)[1 if edge_dir == "in" else 0]
            for eid, node in enumerate(near.tolist()):
                found[node].append((etype, eid))
    return found


@pytest.mark.parametrize("edge_dir", ["in", "out"])
@pytest.mark.parametrize("prob", [None, "weight"])
def test_a_fanout_for_all_relations_together(opened: Any, edge_dir: str, prob: str | None) -> None:
    g, original = opened["typed"]
    nodes, fanout = torch.arange(120), 4
    hidden = torch.arange(0, original.graph.num_edges("knows"), 2)
    found = sample_neighbors(
        g,
        original.new({"user": nodes}),
        fanout,
        edge_dir,
        prob,
        exclude_edges={"knows": torch.argsort(original.edges["user", "knows", "user"])[hidden]},
        seed=5,
    )
    rows = edges_of_all(original.graph, "user", edge_dir)
    flat = [edge for row in rows for edge in row]
    weights = None
    if prob is not None:
        weights = torch.stack([original.graph.edges[t].data[prob][i, 0] for t, i in flat])
    counts, positions, _ = draw_neighbors(
        torch.tensor([0, *(len(row) for row in rows)]).cumsum(0),
        nodes,
        fanout,
        DrawSeed(5).key(0, g.ntypes.index("user")),
        nodes,
        indices=torch.zeros(len(flat), dtype=torch.int64),
        prob=weights,
        excluded=torch.tensor([t[1] == "knows" and i % 2 == 0 for t, i in flat]),
    )
    expected = [flat[position] for position in positions.tolist()]
    assert int(counts.max()) == fanout
    for etype in g.canonical_etypes:
        eids = found.edges[etype].data[EID]
        assert original.edges[etype][eids].tolist() == [i for t, i in expected if t == etype]
        for one, side in zip(found.edges(etype=etype), g.find_edges(eids, etype), strict=True):
            assert torch.equal(one, side)


def test_fanouts_by_relation(opened: Any) -> None:
    g, _ = opened["typed"]
    users = {"user": torch.arange(120)}
    with pytest.raises(TypeError, match="use sample_etype_neighbors"):
        sample_neighbors(g, users, {"rated": 3})  # type: ignore[arg-type]
    few = sample_etype_neighbors(g, users, dict.fromkeys(g.etypes, 0) | {"knows": 2})
    assert few.num_edges("rated") == 0 < few.num_edges("knows")


def collective(rank: int, world_size: int, part_config: str) -> list[Tensor]:
    """The edges that ranks draw together, by way of drawing."""
    data = graphshard.load_dgl_partition_data(part_config, rank)
    graph = graphshard.construct_full_graph(data)
    for name in ("weight", "open"):
        graph.edata[name] = data.edge_features[f"_N:_E:_N/{name}"]
    store = graph_store_of(graph, "collective")
    found = []
    for options in WAYS:
        request = NeighborRequest(store.canonical_etypes[0], torch.arange(0, 400, 7), 3, 99)
        (drawn,) = store.sample_neighbors([request], options)
        assert isinstance(drawn.eids, Tensor)
        found.append(drawn.eids.to(torch.int64))
    return found


WAYS = [
    DrawOptions(),
    DrawOptions(edge_dir="out", weights="weight"),
    DrawOptions(labor=True),
    DrawOptions(labor=True, edge_dir="out"),
    DrawOptions(weights="open", weights_are_mask=True),
]


def one_sided(rank: int, world_size: int, ip_config: str) -> list[Tensor]:
    """The same edges, drawn by each trainer for itself."""
    join(ip_config, rank)
    g = DistGraph("plain")
    found = []
    for options in WAYS:
        request = NeighborRequest(g.canonical_etypes[0], torch.arange(0, 400, 7), 3, 99)
        (drawn,) = g.graph_store.sample_neighbors([request], options)
        assert isinstance(drawn.eids, Tensor)
        found.append(drawn.eids)
    barrier()
    exit_client()
    return found


def test_draws_are_those_of_the_collective_sampler(
    originals: dict[str, Original], tmp_path: Path
) -> None:
    part_config = originals["plain"].part_config
    expected = run_ranks(collective, 5, part_config, timeout=120)[0]
    with ExitStack() as stack:
        servers = Servers(stack, part_config, 5, tmp_path)
        for found in run_ranks(one_sided, 2, str(servers.ip_config), timeout=120):
            for one, other in zip(found, expected, strict=True):
                assert len(one) > 20
                assert torch.equal(one, other)


def test_weights_may_be_a_tensor_that_was_made_later(opened: Any) -> None:
    g, _ = opened["typed"]
    etype = ("user", "rates", "item")
    items = {"item": torch.arange(60)}
    tensor = DistTensor(
        (g.num_edges(etype),), torch.float32, None, None, g.get_edge_partition_policy(etype)
    )
    g.edges[etype].data["mine"] = tensor
    none_else = dict.fromkeys(g.etypes, 0) | {"rates": -1}
    for chosen in (torch.arange(5), torch.arange(100, 107)):
        tensor[:] = torch.zeros(len(tensor))
        tensor[chosen] = torch.ones(len(chosen))
        with pytest.raises(ValueError, match="needs an edge feature of that name on relation"):
            g.sample_neighbors({"user": [0]}, none_else, prob="mine")
        found = g.sample_neighbors(items, none_else, prob="mine")
        assert torch.equal(found.edges[etype].data[EID].sort().values, chosen)
    tensor[torch.tensor([3])] = -torch.ones(1)
    with pytest.raises(ValueError, match=r"must hold finite weights of 0 or more .*got -1"):
        g.sample_neighbors(items, none_else, prob="mine")
    del g.edges[etype].data["mine"]


def test_wrong_requests(opened: Any) -> None:
    g, _ = opened["typed"]
    with pytest.raises(ValueError, match="needs an edge feature of that name"):
        g.sample_neighbors({"user": [0]}, 2, "out", prob="other")
    with pytest.raises(IndexError, match=r"nodes of type 'user' must be in \[0, 120\)"):
        g.sample_neighbors({"user": [120]}, 2, "out")
    with pytest.raises(IndexError, match=r"edges of .* must be in \[0, 50\) \(got 50\)"):
        g.sample_neighbors({"user": [0]}, 2, exclude_edges={"knows": [50]})
    with pytest.raises(ValueError, match=r"must name every relation \(missing"):
        g.sample_neighbors({"user": [0]}, {"knows": 2})
    with pytest.raises(ValueError, match="cannot be drawn with replacement"):
        g.sample_neighbors({"user": [0]}, -1, replace=True)
    with pytest.raises(ValueError, match="a fanout must be an integer of at least -1"):
        g.sample_neighbors({"user": [0]}, 2.5)
    with pytest.raises(TypeError, match="must be integers, not a mask"):
        g.sample_neighbors({"user": torch.ones(120, dtype=torch.bool)}, 2)
    with pytest.raises(ValueError, match="ids without a type need a graph of one type"):
        g.sample_neighbors([0], 2)


def test_without_halo_out_edges_are_an_error(tmp_path: Path) -> None:
    exit_client()
    original = Original("plain", tmp_path, num_hops=0)
    g = DistGraph("plain", part_config=original.part_config)
    for ask in (
        lambda: g.sample_neighbors([0], 2, "out"),
        lambda: g.out_degrees(),
        lambda: SAMPLERS["labor, out"].sample(g, torch.tensor([0])),
    ):
        with pytest.raises(ValueError, match=r"num_hops of at least 1; partition again"):
            ask()
    assert g.sample_neighbors([0], -1).num_edges() == g.in_degrees(0)
    exit_client()
