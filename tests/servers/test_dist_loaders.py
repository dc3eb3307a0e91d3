# SPDX-License-Identifier: Apache-2.0
"""Loaders of edges, and of anything by ids, on a `DistGraph`. Servers in threads, gloo ranks.

What a batch of edges holds is compared with DGL's on the graph before it was partitioned, where all
neighbours are taken; negatives are drawn by edge, and compared between numbers of trainers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_graph_cases import TOKEN, Original, Servers, join, plain
from torch import Tensor

import graphshard
import graphshard.dgl
from dgl_peer import dgl
from graphshard.comm import barrier, rank
from graphshard.dgl.dataloading import (
    DataLoader,
    EdgeCollator,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    NodeCollator,
    as_edge_prediction_sampler,
    negative_sampler,
)
from graphshard.errors import ServerError
from graphshard.graph import EID, NID
from graphshard.servers import (
    DistDataLoader,
    DistEdgeDataLoader,
    DistGraph,
    DistNodeDataLoader,
    DistTensor,
    edge_split,
    exit_client,
    initialize,
)
from graphshard.testing import run_ranks

BUYS, BOUGHT_BY = ("user", "buys", "item"), ("item", "bought_by", "user")


def shop() -> Any:
    """Users who buy items, with every purchase in both directions under one id."""
    user, item = torch.randint(0, 90, (600,)), torch.randint(0, 50, (600,))
    follows = torch.randint(0, 90, (200,)), torch.randint(0, 90, (200,))
    edges = {BUYS: (user, item), BOUGHT_BY: (item, user), ("user", "follows", "user"): follows}
    graph = graphshard.heterograph(edges, {"user": 90, "item": 50})
    graph.nodes["item"].data["feat"] = torch.randn(50, 3)
    graph.edges["buys"].data["price"] = torch.rand(600)
    return graph


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    folder = tmp_path_factory.mktemp("originals")
    torch.manual_seed(1)
    graphs = {"plain": plain(), "shop": shop()}
    return {kind: Original(kind, folder / kind, graph=graph) for kind, graph in graphs.items()}


@pytest.fixture(params=[0, 5], ids=["alone", "five hosts"])
def num_hosts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def open_graph(
    originals: dict[str, Original],
    num_hosts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """From a kind to its DistGraph."""
    exit_client()
    with ExitStack() as stack:
        stack.callback(exit_client)
        monkeypatch.delenv("GRAPHSHARD_HOST", raising=False)

        def opened(kind: str) -> DistGraph:
            if num_hosts == 0:
                return DistGraph(kind, part_config=originals[kind].part_config)
            servers = Servers(stack, originals[kind].part_config, num_hosts, tmp_path)
            stack.callback(exit_client)
            monkeypatch.setenv("GRAPHSHARD_HOST", "1")
            monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
            initialize(servers.ip_config)
            return DistGraph(kind)

        yield opened


def of_dgl(graph: Any) -> Any:
    relations = {t: graph.edges(etype=t) for t in graph.canonical_etypes}
    return dgl.heterograph(relations, {t: graph.num_nodes(t) for t in graph.ntypes})


def edges_of(graph: Any, etype: Any, old: Any) -> list[tuple[int, int, int]]:
    """(source, destination, id) of the edges of a sampled graph, as ``old`` names them, sorted."""
    src, dst = graph.edges(etype=etype)
    if graph.is_block:
        src = graph.srcnodes[etype[0]].data[NID][src]
        dst = graph.dstnodes[etype[2]].data[NID][dst]
    else:
        src = graph.nodes[etype[0]].data[NID][src]
        dst = graph.nodes[etype[2]].data[NID][dst]
    eids = graph.edges[etype].data.get(EID, torch.full_like(src, -1))
    if EID in graph.edges[etype].data:
        eids = old(etype, eids)
    columns = old(etype[0], src), old(etype[2], dst), eids
    return sorted(zip(*(c.tolist() for c in columns), strict=True))


def as_they_are(kind: Any, ids: Tensor) -> Tensor:
    return ids


EXCLUDES = {
    "plain": [None, "self", "reverse_id"],
    "shop": [None, "self", "reverse_types"],
}


@pytest.mark.parametrize(
    ("kind", "exclude"), [(kind, exclude) for kind, all_ in EXCLUDES.items() for exclude in all_]
)
def test_batches_of_edges_are_dgls(
    originals: dict[str, Original], open_graph: Any, kind: str, exclude: Any
) -> None:
    original, g = originals[kind], open_graph(kind)
    graph = original.graph
    etypes = graph.canonical_etypes[:2]
    reverse_etypes = {BUYS: BOUGHT_BY, BOUGHT_BY: BUYS}
    back = torch.randperm(3000)  # any edge may serve as the reverse of another
    old_eids = {t: torch.randperm(graph.num_edges(t))[:70] for t in etypes}
    new_eids = {t: torch.argsort(original.edges[t])[eids] for t, eids in old_eids.items()}
    reverse_eids = None
    if kind == "plain":
        (etype,) = etypes
        moved = torch.argsort(original.edges[etype])[back[original.edges[etype]]]
        policy = g.get_edge_partition_policy(etype)
        reverse_eids = DistTensor((3000,), torch.int64, None, None, policy)
        reverse_eids[:] = moved
        old_eids, new_eids = old_eids[etype], new_eids[etype]  # type: ignore[assignment]

    def negatives(over: Any, eids: Any, node: Any, edge: Any) -> Any:
        """Pairs that are named alike under original and new ids."""
        found = {}
        for etype, ids in eids.items() if isinstance(eids, dict) else [(etypes[0], eids)]:
            src, _ = over.find_edges(ids, etype=etype)
            far = edge(etype, ids) % graph.num_nodes(etype[2])
            found[etype] = src, far if node is None else node[etype[2]][far]
        return found if isinstance(eids, dict) else next(iter(found.values()))

    new_nodes = {t: torch.argsort(ids) for t, ids in original.nodes.items()}
    theirs = dgl.dataloading.as_edge_prediction_sampler(
        # Its fused sampler gives wrong edge ids where edges are excluded.
        dgl.dataloading.NeighborSampler([-1, -1], fused=False),
        exclude=exclude,
        reverse_eids=back,
        reverse_etypes=reverse_etypes,
        negative_sampler=lambda over, ids: negatives(over, ids, None, as_they_are),
    )
    loader = DistEdgeDataLoader(
        g,
        new_eids,
        MultiLayerFullNeighborSampler(2),
        exclude=exclude,
        reverse_eids=reverse_eids,
        reverse_etypes=reverse_etypes,
        negative_sampler=lambda over, ids: negatives(over, ids, new_nodes, original.old),
        batch_size=40,
    )
    assert len(loader) == (2 if kind == "plain" else 4)
    whole = of_dgl(graph)
    for batch in loader:
        inputs, pair_graph, negative_graph, blocks = batch
        seeds = {t: original.old(t, pair_graph.edges[t].data[EID]) for t in etypes}
        seeds = {t: eids for t, eids in seeds.items() if len(eids)}
        expected = theirs.sample(whole, seeds[etypes[0]] if kind == "plain" else seeds)
        for ntype, ids in (inputs if isinstance(inputs, dict) else {"_N": inputs}).items():
            found = expected[0][ntype] if isinstance(inputs, dict) else expected[0]
            assert sorted(original.old(ntype, ids).tolist()) == sorted(found.tolist())
        graphs = (pair_graph, negative_graph, *blocks), (*expected[1:3], *expected[3])
        for number, (one, other) in enumerate(zip(*graphs, strict=True)):
            for etype in graph.canonical_etypes:
                ours = edges_of(one, etype, original.old)
                expected_edges = edges_of(other, etype, as_they_are)
                if number < 2:  # excluding, DGL gives the edges of pair graphs other ids
                    ours, expected_edges = (
                        [e[:2] for e in edges] for edges in (ours, expected_edges)
                    )
                assert ours == expected_edges
        for etype, eids in seeds.items():
            ends = [e[:2] for e in edges_of(pair_graph, etype, original.old)]
            assert ends == sorted(
                zip(*(s.tolist() for s in whole.find_edges(eids, etype=etype)), strict=True)
            )
        assert negative_graph.num_edges() == pair_graph.num_edges()


def test_features_come_with_edges(originals: dict[str, Original], open_graph: Any) -> None:
    g = open_graph("shop")
    sampler = as_edge_prediction_sampler(
        NeighborSampler([3], prefetch_node_feats={"item": ["feat"]}), prefetch_labels=["price"]
    )
    for _, pair_graph, blocks in DataLoader(g, {BUYS: torch.arange(90)}, sampler, batch_size=40):
        eids, items = pair_graph.edges[BUYS].data[EID], blocks[0].srcnodes["item"].data
        price = pair_graph.edges[BUYS].data["price"]
        assert torch.equal(price, g.edges[BUYS].data["price"][eids])
        assert torch.equal(items["feat"], g.nodes["item"].data["feat"][items[NID]])
    with pytest.raises(ValueError, match="prefetch_labels names 'cost'"):
        DistEdgeDataLoader(g, {BUYS: [0]}, NeighborSampler([3]), prefetch_labels=["cost"])
    with pytest.raises(ValueError, match="needs an edge feature of that name on relation"):
        DistEdgeDataLoader(g, {BUYS: [0]}, NeighborSampler([3], prob="cost"))
    with pytest.raises(ValueError, match="needs an edge feature of that name on relation"):
        DataLoader(g, {"user": [0]}, NeighborSampler([3], mask="cost"))
    with pytest.raises(TypeError, match="must be a DistGraph"):
        DistEdgeDataLoader(originals["shop"].graph, {BUYS: [0]}, sampler)
    other = DistEdgeDataLoader(
        g, {BUYS: [0, 1]}, NeighborSampler([3]), exclude="self", g_sampling=g, batch_size=2
    )
    assert len(list(other)) == 1


def test_features_of_another_name_are_those_of_the_graph(open_graph: Any) -> None:
    g = open_graph("shop")
    items, count = g.nodes["item"].data, g.num_nodes("item")
    policy = g.get_node_partition_policy("item")
    tensor = DistTensor((count, 2), torch.float64, "other", part_policy=policy)
    tensor[:] = torch.randn(count, 2, dtype=torch.float64)
    items["feat"] = items["more"] = tensor  # one in the place of the partition's
    sampler = NeighborSampler([3], prefetch_node_feats={"item": ["feat", "more"]})
    for inputs, _, blocks in DataLoader(g, {"item": torch.arange(9)}, sampler, batch_size=4):
        for name in ("feat", "more"):
            assert torch.equal(blocks[0].srcnodes["item"].data[name], tensor[inputs["item"]])


def test_global_negatives_are_no_edges(originals: dict[str, Original], open_graph: Any) -> None:
    g = open_graph("shop")
    negatives = negative_sampler.GlobalUniform(3)
    loader = DistEdgeDataLoader(
        g, {BUYS: torch.arange(60)}, NeighborSampler([2]), negative_sampler=negatives, batch_size=60
    )
    ((_, _, pairs, _),) = loader
    src, dst = pairs.edges(etype=BUYS)
    src, dst = pairs.nodes["user"].data[NID][src], pairs.nodes["item"].data[NID][dst]
    original = originals["shop"]
    there = set(zip(*(s.tolist() for s in original.graph.edges(etype=BUYS)), strict=True))
    found = zip(original.old("user", src).tolist(), original.old("item", dst).tolist(), strict=True)
    assert len(src) == 180
    assert not there & set(found)


def test_reverses_that_are_not_there(originals: dict[str, Original], open_graph: Any) -> None:
    g = open_graph("shop")
    eids = torch.arange(0, 600, 7)
    back = g.reverse_edges(eids, "buys", "bought_by")
    src, dst = g.find_edges(eids, "buys")
    assert torch.equal(torch.stack(g.find_edges(back, "bought_by")), torch.stack([dst, src]))
    original = originals["shop"]
    assert torch.equal(original.old(BOUGHT_BY, back), original.old(BUYS, eids))
    assert g.reverse_edges([], "buys", "bought_by").numel() == 0
    with pytest.raises(ValueError, match="has no reverse in"):
        g.reverse_edges([3], "follows", "bought_by")


# ---------------------------------------------------------------------------- several trainers


def batches(g: DistGraph, batch_size: int) -> list[dict[str, Tensor]]:
    """What each step of two epochs has, where all trainers have all edges."""
    loader = DistEdgeDataLoader(
        g,
        torch.arange(0, 1200),
        NeighborSampler([4, 3]),
        negative_sampler=negative_sampler.Uniform(2),
        batch_size=batch_size,
        shuffle=True,
        seed=3,
        use_ddp=True,
    )
    found = []
    for _ in range(2):
        for _, pair_graph, negatives, blocks in loader:
            ends = torch.stack([pair_graph.ndata[NID][side] for side in negatives.edges()])
            # Which node drew which edge, as one number.
            drew = blocks[-1].dstdata[NID][blocks[-1].edges()[1]] * g.num_edges()
            drawn = torch.unique(drew + blocks[-1].edata[EID])
            found.append({"edges": pair_graph.edata[EID], "negatives": ends.t(), "drawn": drawn})
    return found


def trainer(rank: int, world_size: int, ip_config: str, num_hosts: int) -> dict[str, Any]:
    join(ip_config, rank * num_hosts // world_size)
    g = DistGraph("plain")
    found: dict[str, Any] = {"batches": batches(g, 400 // world_size)}
    # Trainers with different numbers of edges, one with none.
    own = edge_split(torch.ones(3000, dtype=torch.bool), g.get_partition_book())[: 50 * rank]
    etype = g.canonical_etypes[0]
    for eids in (own, {etype: own}):
        loader = DistEdgeDataLoader(
            g,
            eids,
            NeighborSampler([2]),
            negative_sampler=negative_sampler.Uniform(1),
            batch_size=9,
        )
        sizes = [pair_graph.num_edges() for _, pair_graph, *_ in loader]
        found.setdefault("sizes", []).append(sizes)
    # What is wrong on one trainer is an error on all.
    try:
        DistEdgeDataLoader(g, own, NeighborSampler([2], prob="no" if rank == 1 else None))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    barrier()
    exit_client()
    return found


def test_batches_do_not_depend_on_hosts_and_trainers(
    originals: dict[str, Original], tmp_path: Path, run_all: bool
) -> None:
    part_config = originals["plain"].part_config
    exit_client()
    expected = batches(DistGraph("plain", part_config=part_config), 400)
    exit_client()
    assert len(expected) == 6
    for num_hosts, world_size in ((2, 4), (1, 2), (5, 5)) if run_all else ((2, 4),):
        with ExitStack() as stack:
            servers = Servers(stack, part_config, num_hosts, tmp_path)
            found = run_ranks(trainer, world_size, str(servers.ip_config), num_hosts, timeout=120)
        for step, whole in enumerate(expected):
            shares = [one["batches"][step] for one in found]
            for what in ("edges", "negatives"):
                assert torch.equal(torch.cat([share[what] for share in shares]), whole[what])
            drawn = torch.unique(torch.cat([share["drawn"] for share in shares]))
            assert torch.equal(drawn, whole["drawn"])
        for number in range(2):
            sizes = [one["sizes"][number] for one in found]
            assert len({len(of_rank) for of_rank in sizes}) == 1
            assert [sum(of_rank) for of_rank in sizes] == [50 * r for r in range(world_size)]
        assert all("needs an edge feature" in one["error"] for one in found)


# ---------------------------------------------------------------------------- faults


def num_loader_threads() -> int:
    names = ("graphshard-sample", "graphshard-fetch", "graphshard-collate")
    return sum(thread.name in names for thread in threading.enumerate())


def test_errors_arrive_and_threads_end(open_graph: Any) -> None:
    g = open_graph("plain")
    calls = []

    def failing(over: Any, eids: Tensor) -> Any:
        calls.append(len(eids))
        if len(calls) == 3:
            raise ZeroDivisionError("of the sampler")
        return over.find_edges(eids)

    def loader(**options: Any) -> DistEdgeDataLoader:
        return DistEdgeDataLoader(
            g, torch.arange(100), NeighborSampler([3]), batch_size=10, queue_size=4, **options
        )

    seen = []
    with pytest.raises(ZeroDivisionError, match="of the sampler"):
        for batch in loader(negative_sampler=failing):
            seen.append(len(batch))
    assert seen == [4, 4]
    for _ in loader():
        break
    collated: DistDataLoader = DistDataLoader(torch.arange(100), 10, collate_fn=len)
    for _ in collated:
        break
    deadline = time.monotonic() + 30
    while num_loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_loader_threads() == 0


def test_a_server_that_is_gone_ends_the_loop(
    originals: dict[str, Original], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exit_client()
    with ExitStack() as stack:
        servers = Servers(stack, originals["plain"].part_config, 2, tmp_path)
        monkeypatch.setenv("GRAPHSHARD_HOST", "1")
        monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
        initialize(servers.ip_config)
        g = DistGraph("plain")
        loader = DistEdgeDataLoader(g, torch.arange(2000), NeighborSampler([3, 3]), batch_size=20)
        with pytest.raises(ServerError, match="host 0"):
            for step, _ in enumerate(loader):
                if step == 1:
                    stack.close()
        exit_client()


# ---------------------------------------------------------------------------- items of any kind


@pytest.mark.parametrize("queue_size", [None, 0, 2])
def test_dist_data_loader(queue_size: int | None) -> None:
    ids = torch.arange(100, 110)
    loader = DistDataLoader(ids, 4, collate_fn=tuple, queue_size=queue_size)
    assert len(loader) == 3
    for _ in range(2):
        assert list(loader) == [(100, 101, 102, 103), (104, 105, 106, 107), (108, 109)]
    full = DistDataLoader(ids, 4, drop_last=True, queue_size=queue_size)
    assert (len(full), list(full)) == (2, [[100, 101, 102, 103], [104, 105, 106, 107]])
    mixed = DistDataLoader(ids, 4, shuffle=True, queue_size=queue_size)
    first, second = (list(chain.from_iterable(mixed)) for _ in range(2))
    assert sorted(first) == sorted(second) == ids.tolist()
    assert first != second
    pairs = [("a", torch.tensor(3)), ("b", torch.tensor(4)), ("b", torch.tensor(5))]
    assert list(DistDataLoader(pairs, 2, queue_size=queue_size)) == [
        [("a", 3), ("b", 4)],
        [("b", 5)],
    ]
    assert list(DistDataLoader([], 2, queue_size=queue_size)) == []

    def failing(items: list[int]) -> Any:
        if 105 in items:
            raise LookupError("item 105")
        return items

    seen = []
    with pytest.raises(LookupError, match="item 105"):
        for batch in DistDataLoader(ids, 4, collate_fn=failing, queue_size=queue_size):
            seen.append(batch)
    assert len(seen) == 1


def test_wrong_arguments_of_dist_data_loader() -> None:
    with pytest.raises(ValueError, match="batch_size must be a positive number"):
        DistDataLoader([1], 0)
    with pytest.raises(TypeError, match="collate_fn must be a function"):
        DistDataLoader([1], 1, collate_fn=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetch must be a number of batches"):
        DistDataLoader([1], 1, queue_size=-1)


def test_collators(open_graph: Any) -> None:
    g = open_graph("shop")
    sampler = NeighborSampler([-1])
    nodes = {"user": torch.arange(5, 9), "item": torch.arange(3)}
    collator = NodeCollator(g, nodes, sampler)
    assert [collator.dataset[i] for i in (0, 3, 4, 6)] == [
        ("user", 5),
        ("user", 8),
        ("item", 0),
        ("item", 2),
    ]
    seen = []
    for _, outputs, blocks in DistDataLoader(collator.dataset, 4, collate_fn=collator.collate):
        seen.append({t: ids.tolist() for t, ids in outputs.items()})
        degrees = g.in_degrees(outputs.get("item", torch.arange(0)), BUYS)
        assert torch.equal(blocks[0].in_degrees(etype=BUYS), degrees)
    assert seen == [{"user": [5, 6, 7, 8]}, {"item": [0, 1, 2]}]  # the types that were seeded
    edges = EdgeCollator(
        g,
        {"buys": torch.arange(10)},
        sampler,
        exclude="self",
        negative_sampler=negative_sampler.Uniform(2),
    )
    loader = torch.utils.data.DataLoader(edges.dataset, batch_size=5, collate_fn=edges.collate)
    for number, (_, pair_graph, negatives, _) in enumerate(loader):
        assert pair_graph.edges[BUYS].data[EID].tolist() == list(range(5 * number, 5 * number + 5))
        assert negatives.num_edges(BUYS) == 10
    with pytest.raises(TypeError, match="must be a dictionary from type to ids"):
        NodeCollator(g, torch.arange(3), sampler)
    with pytest.raises(IndexError, match=r"must be in \[0, 7\) \(got 7\)"):
        collator.dataset[7]


def test_loaders_on_the_distributed_names() -> None:
    assert issubclass(DistNodeDataLoader, graphshard.dgl.dataloading.NodeDataLoader)
    assert graphshard.dgl.dataloading.NodeCollator is NodeCollator
    assert rank() == 0
