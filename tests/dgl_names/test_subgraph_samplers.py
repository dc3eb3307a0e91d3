# SPDX-License-Identifier: Apache-2.0
"""ShaDow, GraphSAINT, Cluster-GCN, loaders of graphs, samplers of users. No processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphshard.data import load_dataset
from graphshard.dgl import dataloading
from graphshard.dgl.data import MiniGCDataset
from graphshard.errors import DGLError
from graphshard.graph import EID, NID, Graph, graph, heterograph, to_block
from graphshard.partition import UndirectedGraph, metis_partition
from graphshard.sampling import set_dst_lazy_features, set_src_lazy_features


def cora() -> Graph:
    return load_dataset("cora").graph


def is_induced(g: Graph, found: Graph, without: Any = ()) -> None:
    """The subgraph has exactly the edges of ``g`` between its nodes, and all features."""
    for ntype in g.ntypes:
        data = g.nodes[ntype].data
        for name in data:
            rows = found.nodes[ntype].data[NID]
            assert torch.equal(found.nodes[ntype].data[name], data[name][rows])
    for etype in g.canonical_etypes:
        src, dst = g.edges(etype=etype)
        ids = [found.nodes[etype[0]].data[NID], found.nodes[etype[2]].data[NID]]
        inside = torch.isin(src, ids[0]) & torch.isin(dst, ids[1])
        inside &= ~torch.isin(torch.arange(len(src)), torch.as_tensor(list(without)).long())
        eids = found.edges[etype].data[EID]
        assert sorted(eids.tolist()) == inside.nonzero().view(-1).tolist()
        ends = found.edges(etype=etype)
        assert torch.equal(ids[0][ends[0]], src[eids])
        assert torch.equal(ids[1][ends[1]], dst[eids])


def typed() -> Graph:
    generator = torch.Generator().manual_seed(0)

    def ends(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (60,)
        return torch.randint(a, shape, generator=generator), torch.randint(
            b, shape, generator=generator
        )

    g = heterograph({("a", "r", "b"): ends(9, 12), ("b", "s", "a"): ends(12, 9)})
    g.nodes["a"].data["x"] = torch.arange(9.0)
    return g


def test_shadow_gives_the_subgraph_around_seeds() -> None:
    g, sampler = cora(), dataloading.ShaDowKHopSampler([3, 2], prefetch_node_feats=["feat"])
    loader = dataloading.DataLoader(g, torch.arange(40), sampler, batch_size=20, seed=4)
    batches = list(loader)
    for inputs, outputs, subgraph in batches:
        assert torch.equal(subgraph.ndata[NID], inputs)
        assert torch.equal(inputs[:20], outputs)
        is_induced(g, subgraph)
    again = dataloading.DataLoader(g, torch.arange(40), sampler, batch_size=20, seed=4, prefetch=0)
    for (inputs, _, _), (others, _, _) in zip(batches, again, strict=True):
        assert torch.equal(inputs, others)
    inputs, outputs, subgraph = sampler.sample(g, [5, 6], exclude_eids=torch.arange(500))
    is_induced(g, subgraph, range(500))
    hetero = typed()
    inputs, outputs, subgraph = dataloading.ShaDowKHopSampler([2, 2]).sample(hetero, {"a": [3, 1]})
    assert {t: ids.tolist() for t, ids in outputs.items()} == {"a": [3, 1]}
    assert inputs["a"].tolist()[:2] == [3, 1]
    is_induced(hetero, subgraph)


def test_repeated_seeds_have_a_node_and_all_in_edges_each() -> None:
    g = graph(([1, 2, 0, 3], [0, 0, 1, 0]))
    sampler = dataloading.ShaDowKHopSampler([-1])
    inputs, outputs, subgraph = sampler.sample(g, torch.tensor([0, 1, 0]))
    assert inputs.tolist()[:3] == outputs.tolist() == [0, 1, 0]
    assert subgraph.in_degrees()[[0, 2]].tolist() == [3, 3]
    assert subgraph.out_degrees()[[0, 2]].tolist() == [1, 0]
    src, dst = subgraph.edges()
    assert torch.equal(inputs[src], g.find_edges(subgraph.edata[EID])[0])
    assert torch.equal(inputs[dst], g.find_edges(subgraph.edata[EID])[1])


@pytest.mark.parametrize(("mode", "budget"), [("node", 60), ("edge", 60), ("walk", (10, 5))])
def test_saint_draws_its_budget(mode: str, budget: Any) -> None:
    g = cora()
    sampler = dataloading.SAINTSampler(mode, budget, prefetch_ndata=["label"])
    loader = dataloading.DataLoader(g, torch.arange(6), sampler, seed=1)
    sizes, epoch = [], list(loader)
    for subgraph in epoch:
        sizes.append(subgraph.num_nodes())
        is_induced(g, subgraph)
    assert len(epoch) == 6
    assert 5 < min(sizes) <= max(sizes) <= (120 if mode == "edge" else 60)
    assert [s.num_nodes() for s in dataloading.DataLoader(g, torch.arange(6), sampler, seed=1)] == (
        sizes
    )


def test_saint_draws_in_proportion_to_degrees() -> None:
    g = graph(([0] * 6 + [1] * 3 + [2], [3] * 10))
    sampler, counts = dataloading.SAINTSampler("node", 1), torch.zeros(4)
    for _ in range(600):
        counts[sampler.sample(g).ndata[NID]] += 1
    assert torch.allclose(counts / 600, torch.tensor([6.0, 3, 1, 1]) / 11, atol=0.07)
    wrong = [("node", (2, 2)), ("walk", 3), ("paths", 2), ("node", 1.5), ("edge", -1)]
    for mode, budget in (*wrong, ("node", True), ("walk", (2, -1))):
        with pytest.raises(DGLError, match="must be"):
            dataloading.SAINTSampler(mode, budget)
    with pytest.raises(DGLError, match="a graph of one relation"):
        sampler.sample(typed())
    for mode, budget in (("node", 3), ("edge", 3), ("walk", (2, 2))):
        empty = dataloading.SAINTSampler(mode, budget).sample(graph(([], []), num_nodes=0))
        assert empty.num_nodes() == 0


def test_saint_draws_edges_by_both_of_their_ends() -> None:
    ends = torch.tensor([0, 1, 2, 3, 3, 3, 3]), torch.tensor([7, 7, 7, 4, 5, 6, 7])
    in_degrees, out_degrees = (np.bincount(side.numpy(), minlength=8) for side in ends[::-1])
    weights = 1 / in_degrees[ends[1]] + 1 / out_degrees[ends[0]]  # of DGL and of the paper
    sampler, counts = dataloading.SAINTSampler("edge", 1), np.zeros(7)
    pairs = [tuple(sorted(pair)) for pair in zip(*(side.tolist() for side in ends), strict=True)]
    torch.manual_seed(0)
    for _ in range(900):
        nodes = sampler.sample(graph(ends)).ndata[NID]
        counts[pairs.index(tuple(nodes.tolist()))] += 1
    np.testing.assert_allclose(counts / 900, weights / weights.sum(), atol=0.06)


def test_saint_walks_pass_node_0() -> None:
    cycle = graph(([0, 1, 2], [1, 2, 0]))
    subgraph = dataloading.SAINTSampler("walk", (1, 2)).sample(cycle)
    assert subgraph.ndata[NID].tolist() == [0, 1, 2]
    assert subgraph.num_edges() == 3


def test_shadow_returns_seeds_as_they_were_given() -> None:
    g = graph(([1, 2, 0, 3], [0, 0, 1, 0]))
    sampler = dataloading.ShaDowKHopSampler([1])
    assert sampler.sample(g, torch.tensor([1]))[1].tolist() == [1]
    seeds = sampler.sample(g, {"_N": torch.tensor([1])})[1]
    assert {ntype: ids.tolist() for ntype, ids in seeds.items()} == {"_N": [1]}


@pytest.mark.parametrize(("mode", "method"), [("k-way", "kway"), ("recursive", "recursive")])
def test_clusters_are_those_of_metis(mode: str, method: Any, tmp_path: Path) -> None:
    g = cora()
    undirected = UndirectedGraph.from_edges([g.edges()], g.num_nodes())
    parts = metis_partition(undirected, 8, method=method)
    sampler = dataloading.ClusterGCNSampler(g, 8, None, mode=mode)
    members = [sampler.sample(g, [number]).ndata[NID] for number in range(8)]
    assert [ids.tolist() for ids in members] == [
        np.flatnonzero(parts == number).tolist() for number in range(8)
    ]
    whole = dataloading.ClusterGCNSampler(g, 1, None, mode=mode)
    assert whole.sample(g, [0]).num_edges() == g.num_edges()


def test_clusters_cover_the_graph_and_are_kept(tmp_path: Path) -> None:
    g, path = cora(), tmp_path / "clusters"
    sampler = dataloading.ClusterGCNSampler(g, 8, path, balance_edges=True)
    seen = []
    for subgraph in dataloading.DataLoader(g, torch.arange(8), sampler, batch_size=3):
        is_induced(g, subgraph)
        seen.append(subgraph.ndata[NID])
    assert torch.cat(seen).sort().values.tolist() == list(range(g.num_nodes()))
    again = dataloading.ClusterGCNSampler(g, 8, path, balance_ntypes=g.ndata["label"])
    assert torch.equal(again.partition_node_ids, sampler.partition_node_ids)
    with pytest.raises(DGLError, match="8 clusters and not k=9"):
        dataloading.ClusterGCNSampler(g, 9, path)
    with pytest.raises(DGLError, match="the graph has 4"):
        dataloading.ClusterGCNSampler(graph(([0], [3])), 8, path)
    with pytest.raises(DGLError, match=r"clusters must be in \[0, 8\)"):
        sampler.sample(g, [8])
    path.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(DGLError, match="cannot be read"):
        dataloading.ClusterGCNSampler(g, 8, path)


def test_edges_are_kept_out_of_subgraphs_too() -> None:
    g = cora()
    sampler = dataloading.as_edge_prediction_sampler(
        dataloading.ShaDowKHopSampler([4]), exclude="self"
    )
    for _, pair_graph, subgraph in dataloading.DataLoader(
        g, torch.arange(90), sampler, batch_size=30
    ):
        assert not bool(torch.isin(subgraph.edata[EID], pair_graph.edata[EID]).any())


def test_spot_target_excludes_by_degree() -> None:
    g = graph(([0, 1, 2, 3, 0], [4, 4, 4, 0, 1]))
    spot = dataloading.SpotTarget(g, exclude="self", degree_threshold=2)
    assert spot(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]
    dense = graph(([0, 1, 1, 0], [1, 0, 0, 1]))
    assert dataloading.SpotTarget(dense, "self", 2)(torch.arange(4)).tolist() == []
    back = dataloading.SpotTarget(g, "reverse_id", 2, reverse_eids=torch.arange(5).flip(0))
    assert sorted(back(torch.tensor([0])).tolist()) == [0, 4]


def test_graphs_are_batched_with_their_labels() -> None:
    dataset = MiniGCDataset(17, 8, 12)
    loader = dataloading.GraphDataLoader(dataset, batch_size=4, shuffle=False, drop_last=False)
    sizes, labels = [], []
    for graphs, of_batch in loader:
        sizes.append(graphs.batch_size)
        labels.append(of_batch)
    assert sizes == [4, 4, 4, 4, 1]
    assert torch.equal(torch.cat(labels), dataset.labels)
    counted = dataloading.GraphDataLoader(dataset, collate_fn=len, batch_size=5)
    assert list(counted) == [5, 5, 5, 2]
    items = dataloading.GraphDataLoader(dataset, batch_size=None)
    assert next(iter(items))[1].dim() == 0
    collate = dataloading.GraphCollator().collate
    found = collate([{"a": 1.5, "b": (np.ones(2), "s")}, {"a": 2.5, "b": (np.zeros(2), "t")}])
    assert found["a"].dtype == torch.float64
    assert found["b"][0].tolist() == [[1, 1], [0, 0]]
    assert found["b"][1] == ("s", "t")
    with pytest.raises(DGLError, match="give a collate_fn"):
        collate([object()])
    with pytest.raises(DGLError, match="use_ddp=True"):
        loader.set_epoch(1)


class OwnSampler(dataloading.BlockSampler):
    """As DGL's guide writes one."""

    def __init__(self, fanouts: list[int], **options: Any) -> None:
        super().__init__(**options)
        self.fanouts = fanouts

    def sample_blocks(
        self, g: Any, seed_nodes: Any, exclude_eids: Any = None
    ) -> tuple[Any, Any, list[Any]]:
        output_nodes, blocks = seed_nodes, []
        for fanout in reversed(self.fanouts):
            frontier = g.sample_neighbors(seed_nodes, fanout, exclude_edges=exclude_eids)
            eids = frontier.edata[EID]
            block = to_block(frontier, seed_nodes)
            block.edata[EID] = eids
            seed_nodes = block.srcdata[NID]
            blocks.insert(0, block)
        return seed_nodes, output_nodes, blocks


def test_samplers_of_users_draw_from_graphs() -> None:
    g, sampler = cora(), OwnSampler([4, 3], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = dataloading.DataLoader(g, torch.arange(30), sampler, batch_size=10)
    for inputs, outputs, blocks in loader:
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
        assert torch.equal(blocks[-1].dstdata["label"], g.ndata["label"][outputs])
        assert int(blocks[-1].in_degrees().max()) <= 3
        set_src_lazy_features(blocks[0], ["feat"])
        set_dst_lazy_features(blocks[-1], {"_N": ["label"]})
        with pytest.raises(ValueError, match="does not have"):
            set_src_lazy_features(blocks[0], ["none"])
    edges = dataloading.as_edge_prediction_sampler(sampler, exclude="self")
    for _, pairs, blocks in dataloading.DataLoader(g, torch.arange(20), edges, batch_size=10):
        assert not bool(torch.isin(blocks[0].edata[EID], pairs.edata[EID]).any())
    with pytest.raises(NotImplementedError, match="must define sample_blocks"):
        dataloading.BlockSampler().sample(g, torch.tensor([0]))
    with pytest.raises(NotImplementedError, match="must define sample"):
        dataloading.Sampler().sample(g, torch.tensor([0]))
