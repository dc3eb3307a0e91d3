# SPDX-License-Identifier: Apache-2.0
"""PyG's loaders over a `DistGraph`: what one process samples of the graph before partitioning.

Alone, and on 2 ranks with 3 servers in threads of the test.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.sampler import NegativeSampling

import graphshard
import graphshard.pyg
from graphshard.partition import partition_graph
from graphshard.servers import DistGraph, exit_client, initialize
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "servers"))

import loader_graphs as lg
from dist_graph_cases import Servers, join

KINDS = ("plain", "typed")


@pytest.fixture(scope="module")
def part_configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pyg-served")
    for kind, data in (("plain", lg.plain_data()), ("typed", lg.typed_data())):
        graph = graphshard.data.from_pyg(data)
        partition_graph(graph, kind, 3, folder / kind, part_method="random", quiet=True)
    return {kind: str(folder / kind / f"{kind}.json") for kind in KINDS}


def check_plain(graph: DistGraph, rank: int, world_size: int) -> None:
    whole = lg.plain_data()
    names = ["plain", "all", "weighted", "in time", "induced"]
    for number, name in enumerate(names):
        case = lg.NODE_CASES[name]
        loader = graphshard.pyg.NeighborLoader(
            graph,
            **case,
            input_nodes=graph.ndata["train_mask"],
            batch_size=4,
            seed=11,
            num_workers=number % 2,
        )
        sampler = lg.samplers_of(whole, case)
        mine = []
        for step, batch in enumerate(loader):
            seeds = batch.n_id[: batch.batch_size]
            assert torch.equal(batch.input_id, seeds)
            lg.assert_is_sample(batch, lg.node_sample(sampler, seeds, step), whole)
            mine.append(seeds)
        masked = whole.train_mask.nonzero().view(-1)
        assert abs(len(torch.cat(mine)) - len(masked) / world_size) < 1
        assert torch.isin(torch.cat(mine), masked).all()
        assert len(torch.cat(mine).unique()) == len(torch.cat(mine))

    ends = whole.edge_index[:, rank::9]
    negative = NegativeSampling("binary")
    loader = graphshard.pyg.LinkNeighborLoader(
        graph, [3], ends, batch_size=20, neg_sampling=negative, seed=11
    )
    sampler = lg.samplers_of(whole, {"num_neighbors": [3]})
    for step, batch in enumerate(loader):
        of_batch = ends[:, batch.input_id]
        lg.assert_is_sample(batch, lg.link_sample(sampler, of_batch, step, None, negative), whole)

    stores = graphshard.pyg.RemoteFeatureStore(graph), graphshard.pyg.RemoteGraphStore(graph)
    assert torch.equal(torch.stack(stores[1].coo()[:2]), whole.edge_index)
    sampler = graphshard.pyg.HopSampler(stores, [2, 2])
    for made in (NodeLoader, NeighborLoader):
        given = {"num_neighbors": [2], "neighbor_sampler": sampler}
        given = {"node_sampler": sampler} if made is NodeLoader else given
        for batch in made(stores, **given, input_nodes=torch.arange(0, 60, 9), batch_size=4):
            assert torch.equal(batch.x, whole.x[batch.n_id])
            ends = batch.n_id[batch.edge_index]
            assert torch.equal(ends, whole.edge_index[:, batch.e_id])

    class Custom(Data):
        pass

    (batch,) = graphshard.pyg.NeighborLoader(
        graph, [1], torch.arange(3), batch_size=3, custom_cls=Custom
    )
    assert type(batch) is Custom
    with pytest.raises(ValueError, match=r"in \[0, 60\)"):
        graphshard.pyg.NeighborLoader(graph, [2], torch.tensor([60] if rank == 0 else [1]))


def check_typed(graph: DistGraph, rank: int, world_size: int) -> None:
    whole = lg.typed_data()
    case: dict[str, Any] = {"num_neighbors": {etype: [2, 2] for etype in lg.ETYPES}}
    nodes = ("a", torch.arange(rank, 40, world_size))
    loader = graphshard.pyg.NeighborLoader(
        graph, **case, input_nodes=nodes, batch_size=7, seed=11, num_workers=1
    )
    sampler = lg.samplers_of(whole, case)
    for step, batch in enumerate(loader):
        seeds = batch["a"].n_id[: batch["a"].batch_size]
        assert torch.equal(seeds, nodes[1][batch["a"].input_id])
        lg.assert_is_sample(batch, lg.node_sample(sampler, seeds, step, "a"), whole)
    loader = graphshard.pyg.HGTLoader(graph, [3], nodes, batch_size=7, seed=11)
    sampler = graphshard.pyg.HGTSampler(whole, [3], seed=11)
    for step, batch in enumerate(loader):
        seeds = batch["a"].n_id[: batch["a"].batch_size]
        lg.assert_is_sample(batch, lg.node_sample(sampler, seeds, step, "a"), whole)
    etype = lg.ETYPES[1]
    ends = whole[etype].edge_index[:, :9]
    for batch in graphshard.pyg.LinkNeighborLoader(graph, [2], (etype, ends), batch_size=9):
        index = batch[etype].edge_label_index
        found = torch.stack([batch["b"].n_id[index[0]], batch["a"].n_id[index[1]]])
        assert torch.equal(found, ends[:, batch[etype].input_id])


CHECKS = {"plain": check_plain, "typed": check_typed}


@pytest.mark.parametrize("kind", KINDS)
def test_alone(part_configs: dict[str, str], kind: str) -> None:
    exit_client()
    initialize()
    try:
        CHECKS[kind](DistGraph(kind, part_config=part_configs[kind]), 0, 1)
    finally:
        exit_client()


def on_servers(rank: int, world_size: int, ip_config: str, kind: str) -> None:
    join(ip_config, rank)
    CHECKS[kind](DistGraph(kind), rank, world_size)
    exit_client()


@pytest.mark.parametrize("kind", KINDS)
def test_on_servers(part_configs: dict[str, str], tmp_path: Path, kind: str) -> None:
    with ExitStack() as stack:
        servers = Servers(stack, part_configs[kind], 3, tmp_path)
        run_ranks(on_servers, 2, str(servers.ip_config), kind, timeout=120)
