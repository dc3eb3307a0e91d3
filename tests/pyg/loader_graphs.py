# SPDX-License-Identifier: Apache-2.0
"""Graphs, loaders and comparisons for the tests of PyG's loaders; no test in here."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

import graphshard.pyg
from graphshard.sampling import DrawSeed

NUM_NODES, NUM_EDGES = 60, 400
SIZES = {"a": 40, "b": 25}
ETYPES = [("a", "to", "b"), ("b", "rev_to", "a"), ("a", "self", "a")]


def plain_data() -> Data:
    """Parallel edges, self loops, a node without edges; the last node has most in-edges."""
    generator = torch.Generator().manual_seed(5)
    ends = torch.randint(0, NUM_NODES - 1, (2, NUM_EDGES), generator=generator)
    ends[1, :80] = NUM_NODES - 2
    data = Data(
        x=torch.randn(NUM_NODES, 3, generator=generator),
        y=torch.arange(NUM_NODES),
        time=torch.randint(0, 50, (NUM_NODES,), generator=generator),
        edge_index=ends,
        edge_attr=torch.randn(NUM_EDGES, 2, generator=generator, dtype=torch.float64),
        edge_weight=torch.rand(NUM_EDGES, generator=generator),
        train_mask=torch.arange(NUM_NODES) % 3 == 0,
    )
    data.edge_weight[::7] = 0
    return data


def typed_data() -> HeteroData:
    generator = torch.Generator().manual_seed(6)
    data = HeteroData()
    for ntype, count in SIZES.items():
        data[ntype].x = torch.randn(count, 3, generator=generator)
        data[ntype].time = torch.randint(0, 50, (count,), generator=generator)
    for etype in ETYPES:
        ends = [torch.randint(0, SIZES[t], (150,), generator=generator) for t in etype[::2]]
        data[etype].edge_index = torch.stack(ends)
        data[etype].edge_attr = torch.arange(150.0).view(-1, 1)
    data["a"].y = torch.arange(SIZES["a"])
    return data


def owners(count: int, world_size: int) -> torch.Tensor:
    """The rank of each node; the last rank of several has none."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, max(1, world_size - 1), (count,), generator=generator)


def node_sample(sampler: Any, ids: torch.Tensor, step: int, ntype: str | None = None) -> Any:
    """What a sampler of the whole graph draws for some seeds at a step of the first pass."""
    inputs = NodeSamplerInput(None, ids, None, ntype)
    return sampler.sample_from_nodes(inputs, draw_seed=DrawSeed(sampler.seed, 0, step))


def link_sample(sampler: Any, ends: torch.Tensor, step: int, etype: Any, negative: Any) -> Any:
    inputs = EdgeSamplerInput(None, *ends, None, None, etype)
    seed = DrawSeed(sampler.seed, 0, step)
    return sampler.sample_from_edges(inputs, negative, draw_seed=seed)


def assert_is_sample(batch: Any, expected: Any, whole: Any) -> None:
    """A batch of data has the nodes and edges of a sample, in its order, and rows of the graph."""
    if isinstance(whole, HeteroData):
        for ntype in whole.node_types:
            assert torch.equal(batch[ntype].n_id, expected.node[ntype])
            assert torch.equal(batch[ntype].x, whole[ntype].x[expected.node[ntype]])
        for etype in whole.edge_types:
            assert_edges(batch[etype], expected.row[etype], expected.col[etype], whole[etype])
            assert torch.equal(batch[etype].e_id, expected.edge[etype])
        if expected.num_sampled_nodes is not None:
            assert batch.num_sampled_nodes_dict == expected.num_sampled_nodes
            assert batch.num_sampled_edges_dict == expected.num_sampled_edges
        if expected.batch is not None:
            assert all(torch.equal(batch[t].batch, of) for t, of in expected.batch.items())
        return
    assert torch.equal(batch.n_id, expected.node)
    assert torch.equal(batch.x, whole.x[expected.node])
    assert torch.equal(batch.y, expected.node)
    assert torch.equal(batch.e_id, expected.edge)
    assert batch.get("num_sampled_nodes") == expected.num_sampled_nodes
    assert batch.get("num_sampled_edges") == expected.num_sampled_edges
    assert (batch.batch is None) == (expected.batch is None)
    if expected.batch is not None:
        assert torch.equal(batch.batch, expected.batch)
    assert_edges(batch, expected.row, expected.col, whole)
    ends = whole.edge_index[:, batch.e_id]
    if expected.num_sampled_edges is not None:
        assert torch.equal(ends, batch.n_id[batch.edge_index])


def assert_edges(store: Any, row: torch.Tensor, col: torch.Tensor, whole: Any) -> None:
    assert torch.equal(store.edge_index, torch.stack([row, col]))
    assert store.edge_attr.dtype == whole.edge_attr.dtype
    assert torch.equal(store.edge_attr, whole.edge_attr[store.e_id])


NODE_CASES: dict[str, dict[str, Any]] = {
    "plain": {"num_neighbors": [4, 3]},
    "all": {"num_neighbors": [-1, -1]},
    "none": {"num_neighbors": [3, 0, 2]},
    "replace": {"num_neighbors": [4, -1, 2], "replace": True},
    "disjoint": {"num_neighbors": [4, 3], "disjoint": True},
    "induced": {"num_neighbors": [3, 2], "subgraph_type": "induced"},
    "weighted": {"num_neighbors": [4, 3], "weight_attr": "edge_weight"},
    "in time": {"num_neighbors": [4, 3], "time_attr": "time"},
    "latest": {"num_neighbors": [4, 3], "time_attr": "time", "temporal_strategy": "last"},
}


def samplers_of(whole: Any, case: dict[str, Any]) -> Any:
    return graphshard.pyg.HopSampler(whole, **case, seed=11)
