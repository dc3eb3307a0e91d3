# SPDX-License-Identifier: Apache-2.0
"""shard and parallelize see what is written to tensors of the user, however it is written.

The oracle is PyG in one process. Uses 1 and 2 gloo ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor
from torch_geometric.data import Data

import graphshard
import graphshard.pyg
from graphshard import comm
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks

MODES = ("sequential", "oneshot")


def whole_data() -> Data:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, 30, (2, 150), generator=generator)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    weight = torch.rand(150, generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=edge_index, edge_weight=weight)


def layer() -> pyg_nn.GraphConv:
    torch.manual_seed(0)
    return pyg_nn.GraphConv(4, 3, aggr="add").double()


def change(data: Data, step: int) -> None:
    """Write where torch does not count it."""
    if step == 1:
        data.x.data.mul_(2.0)
    elif step == 2:
        data.x.numpy()[:] += 1.0
    elif step == 3:
        data.edge_weight.data.neg_()
    elif step == 4:
        data.edge_index.data.copy_(data.edge_index.flip(0).clone())


def gaps(rank: int, world_size: int) -> float:
    found = [0.0]
    for mode in MODES:
        whole, here = whole_data(), whole_data()
        parallel = graphshard.pyg.parallelize(layer(), here, mode=mode)
        shards = graphshard.pyg.shard(whole_data(), mode=mode)
        mine = Data(x=shards.x.clone(), edge_weight=shards.edge_weight.clone())
        for step in range(5):
            change(whole, step)
            change(here, step)
            expected = layer()(whole.x, whole.edge_index, whole.edge_weight)
            out = parallel(here.x, here.edge_index, here.edge_weight)
            found.append(float((out - expected).detach().abs().max()))
            if step < 4:
                change(mine, step)
                rows = layer()(mine.x, shards.edge_index, mine.edge_weight)
                found.append(float((rows - expected[shards.n_id]).detach().abs().max()))
    return max(found)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_writes_through_data_are_seen(num_ranks: int) -> None:
    assert max(run_ranks(gaps, num_ranks)) < 1e-10


def sent(rank: int, world_size: int, parts: str, mode: str) -> list[int]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    x: Tensor = torch.ones(data.num_owned(), 4, dtype=torch.float64)
    data = replace(data, node_features={**data.node_features, "_N/x": x})
    shards = graphshard.pyg.shard(data, mode=mode)
    conv, found = layer(), []
    for _ in range(2):
        with comm.trace() as trace:
            conv(shards.x, shards.edge_index).sum().backward()
        found.append(trace.total_bytes)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_features_of_a_shard_travel_once(tmp_path: Path, mode: str) -> None:
    src, dst = whole_data().edge_index
    graph = graphshard.graph((src, dst), num_nodes=30)
    partition_graph(graph, "g", 2, str(tmp_path), part_method="random", quiet=True)
    for first, second in run_ranks(sent, 2, str(tmp_path / "g.json"), mode):
        assert first > 0
        assert second == 0
