# SPDX-License-Identifier: Apache-2.0
"""Programs as DGL's users write them, run with DGL and with graphshard in its place.

Each function below is such a program; its argument is what it imports as ``dgl``. With all
neighbours instead of some, and negatives that are not random, both must give the same losses.
No process group.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loader_cases import BOTH, RELATIONS, plain, typed
from torch import nn

import graphshard.dgl.dataloading

assert graphshard.dgl.dataloading is not None


@pytest.fixture(autouse=True)
def _quiet_dgl() -> Any:
    """DGL's loader advises on CPU affinity."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def node_classification(dgl: Any, sampler: Any) -> list[float]:
    g = plain(dgl)
    train_nids = torch.arange(16)
    dataloader = dgl.dataloading.DataLoader(
        g, train_nids, sampler, batch_size=5, shuffle=False, drop_last=False, num_workers=0
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = dgl.nn.SAGEConv(3, 8, aggregator_type="mean")
            self.conv2 = dgl.nn.SAGEConv(8, 4, aggregator_type="mean")

        def forward(self, mfgs: Any, x: Any) -> Any:
            h = F.relu(self.conv1(mfgs[0], (x, x[: mfgs[0].num_dst_nodes()])))
            return self.conv2(mfgs[1], (h, h[: mfgs[1].num_dst_nodes()]))

    torch.manual_seed(0)
    model = Model()
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        for input_nodes, output_nodes, mfgs in dataloader:
            inputs = mfgs[0].srcdata["feat"]
            labels = mfgs[-1].dstdata["label"] % 4
            assert inputs.shape == (input_nodes.shape[0], 3)
            assert torch.equal(labels, output_nodes % 4)
            loss = F.cross_entropy(model(mfgs, inputs), labels)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


def link_prediction(dgl: Any, sampler: Any, negative_sampler: Any) -> list[float]:
    g = plain(dgl)
    reverse_eids = torch.cat([torch.arange(60, 120), torch.arange(60)])
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        sampler,
        exclude="reverse_id",
        reverse_eids=reverse_eids,
        negative_sampler=negative_sampler,
    )
    dataloader = dgl.dataloading.DataLoader(
        g, torch.arange(60), sampler, batch_size=16, shuffle=False, drop_last=True, num_workers=0
    )

    class DotPredictor(nn.Module):
        def forward(self, g: Any, h: Any) -> Any:
            with g.local_scope():
                g.ndata["h"] = h
                g.apply_edges(dgl.function.u_dot_v("h", "h", "score"))
                return g.edata["score"][:, 0]

    torch.manual_seed(0)
    convs = nn.ModuleList([dgl.nn.SAGEConv(3, 8, "mean"), dgl.nn.SAGEConv(8, 8, "mean")])
    predictor = DotPredictor()
    opt = torch.optim.Adam(convs.parameters(), lr=0.02)
    losses = []
    for _ in range(2):
        for input_nodes, pos_graph, neg_graph, mfgs in dataloader:
            h = mfgs[0].srcdata["feat"]
            assert len(h) == len(input_nodes)
            for conv, mfg in zip(convs, mfgs, strict=True):
                h = conv(mfg, (h, h[: mfg.num_dst_nodes()]))
            assert torch.equal(mfgs[-1].dstdata[dgl.NID], pos_graph.ndata[dgl.NID])
            assert torch.equal(neg_graph.ndata[dgl.NID], pos_graph.ndata[dgl.NID])
            score = torch.cat([predictor(pos_graph, h), predictor(neg_graph, h)])
            label = torch.cat(
                [torch.ones(pos_graph.num_edges()), torch.zeros(neg_graph.num_edges())]
            )
            loss = F.binary_cross_entropy_with_logits(score, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


def typed_link_prediction(dgl: Any, sampler: Any, negative_sampler: Any) -> list[float]:
    g = typed(dgl)
    train_eid_dict = {etype: torch.arange(20) for etype in g.canonical_etypes}
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        sampler,
        exclude="reverse_types",
        reverse_etypes={"buys": "bought_by", "bought_by": "buys"},
        negative_sampler=negative_sampler,
    )
    dataloader = dgl.dataloading.DataLoader(g, train_eid_dict, sampler, batch_size=24)

    def layer(width: int) -> Any:
        convs = {name: dgl.nn.SAGEConv(width, 6, "mean") for _, name, _ in sorted(RELATIONS)}
        return dgl.nn.HeteroGraphConv(convs, aggregate="sum")

    torch.manual_seed(0)
    layers = nn.ModuleList([layer(3), layer(6)])
    opt = torch.optim.Adam(layers.parameters(), lr=0.02)
    losses = []
    for _ in range(2):
        for _, positive_graph, negative_graph, blocks in dataloader:
            h = blocks[0].srcdata["feat"]
            for conv, block in zip(layers, blocks, strict=True):
                h = conv(block, h)
            loss = 0.0
            for graph, sign in ((positive_graph, 1.0), (negative_graph, -1.0)):
                with graph.local_scope():
                    graph.ndata["x"] = h
                    for etype in graph.canonical_etypes:
                        if graph.num_edges(etype):
                            graph.apply_edges(dgl.function.u_dot_v("x", "x", "s"), etype=etype)
                            loss = loss - F.logsigmoid(sign * graph.edges[etype].data["s"]).sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


def fixed_negatives(g: Any, eids: Any) -> Any:
    """Sources as they are, destinations turned round among the batch's; for any graph."""
    if not isinstance(eids, dict):
        source, destination = g.find_edges(eids)
        return source.repeat_interleave(2), torch.cat([destination.flip(0), destination])
    return {
        etype: (g.find_edges(ids, etype=etype)[0], g.find_edges(ids, etype=etype)[1].flip(0))
        for etype, ids in eids.items()
    }


def test_node_classification() -> None:
    losses = [
        node_classification(module, module.dataloading.MultiLayerFullNeighborSampler(2))
        for module in BOTH
    ]
    assert len(losses[0]) == 12
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    for module in BOTH:
        sampler = module.dataloading.NeighborSampler(
            [4, 2], prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        assert len(node_classification(module, sampler)) == 12


def test_link_prediction() -> None:
    losses = [
        link_prediction(
            module, module.dataloading.MultiLayerFullNeighborSampler(2), fixed_negatives
        )
        for module in BOTH
    ]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    for module in BOTH:
        samplers = module.dataloading.negative_sampler
        for negative in (samplers.Uniform(2), samplers.GlobalUniform(2, replace=True)):
            sampler = module.dataloading.NeighborSampler([4, 2])
            assert len(link_prediction(module, sampler, negative)) == 6


def test_typed_link_prediction() -> None:
    losses = [
        typed_link_prediction(
            module, module.dataloading.MultiLayerFullNeighborSampler(2), fixed_negatives
        )
        for module in BOTH
    ]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    for module in BOTH:
        sampler = module.dataloading.NeighborSampler([4, 2])
        negative = module.dataloading.negative_sampler.Uniform(2)
        assert len(typed_link_prediction(module, sampler, negative)) == 6
