# SPDX-License-Identifier: Apache-2.0
"""DistDGL's walkthrough, as its slides have it, with only the import changed.

It runs alone and as several trainers on hosts with servers (in threads of the test), and has the
same loss curve wherever it runs. Gloo ranks.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch as th
import torch.nn.functional as F
from dist_graph_cases import TOKEN, Servers
from torch import nn, optim

import graphshard.dgl as dgl
from graphshard.data import community_graph
from graphshard.testing import run_ranks


class SAGE(nn.Module):
    def __init__(
        self, in_feats: int, n_hidden: int, n_classes: int, n_layers: int, act: Any, dropout: float
    ) -> None:
        super().__init__()
        sizes = [in_feats, *[n_hidden] * (n_layers - 1), n_classes]
        self.layers = nn.ModuleList(
            dgl.nn.SAGEConv(sizes[i], sizes[i + 1], "mean") for i in range(n_layers)
        )
        self.activation, self.dropout = act, nn.Dropout(dropout)

    def forward(self, blocks: Any, x: th.Tensor) -> th.Tensor:
        h = x
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = layer(block, h)
            if number != len(self.layers) - 1:
                h = self.dropout(self.activation(h))
        return h


def load_subtensor(g: Any, input_nodes: th.Tensor, seeds: th.Tensor) -> tuple[Any, Any]:
    return g.ndata["feat"][input_nodes], g.ndata["label"][seeds]


def train(args: Any) -> list[float]:
    """The slides' code. What they leave out is marked."""
    dgl.distributed.initialize(args.ip_config, num_workers=args.num_workers)
    # here: a rank of the test has done th.distributed.init_process_group(backend="gloo")
    assert th.distributed.get_backend() == "gloo"
    g = dgl.distributed.DistGraph("graph_name", part_config=args.part_config)
    train_nid = dgl.distributed.node_split(g.ndata["train_mask"], g.get_partition_book())
    sampler = dgl.data.MultiLayerNeighborSampler([10, 25])
    th.manual_seed(0)  # here: the same model and draws on all trainers, and in all runs
    data_loader = dgl.data.NodeDataLoader(
        g, train_nid, sampler, batch_size=1024, shuffle=True, drop_last=False
    )

    # Define model and optimizer
    in_feats, num_hidden, n_classes, num_layers, dropout = 8, 16, 4, 2, 0.0
    model = SAGE(in_feats, num_hidden, n_classes, num_layers, F.relu, dropout)
    model = th.nn.parallel.DistributedDataParallel(model)
    loss_fcn = nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)

    losses = []
    for epoch in range(args.num_epochs):  # noqa: B007 - as on the slide
        for step, (input_nodes, seeds, blocks) in enumerate(data_loader):  # noqa: B007
            batch_inputs, batch_labels = load_subtensor(
                g, blocks[0].srcdata[dgl.NID], blocks[-1].dstdata[dgl.NID]
            )
            batch_pred = model(blocks, batch_inputs)
            loss = loss_fcn(batch_pred, batch_labels)
            optimizer.zero_grad()
            loss.backward()

            # Aggregate gradients in multiple nodes.
            for param in model.parameters():
                if param.requires_grad and param.grad is not None:
                    th.distributed.all_reduce(param.grad.data, op=th.distributed.ReduceOp.SUM)
                    param.grad.data /= dgl.distributed.get_num_clients()
            optimizer.step()
            # here: what a test can compare
            assert th.equal(input_nodes, blocks[0].srcdata[dgl.NID])
            assert th.equal(seeds.sort().values, train_nid)
            mean = loss.detach().clone()
            th.distributed.all_reduce(mean)
            losses.append(float(mean) / dgl.distributed.get_num_clients())
    g.barrier()
    dgl.distributed.exit_client()
    return losses


def run(rank: int, world_size: int, part_config: str, ip_config: str, hosts: int) -> list[float]:
    os.environ.pop("GRAPHSHARD_HOST", None)  # of an earlier test
    if ip_config:
        here = rank * hosts // world_size
        os.environ |= {"GRAPHSHARD_HOST": str(here), "GRAPHSHARD_TOKEN": TOKEN}
        part_config = ""
    args = SimpleNamespace(
        ip_config=ip_config or None,
        part_config=part_config or None,
        num_workers=2,
        num_epochs=6,
        lr=0.01,
    )
    return train(args)


@pytest.fixture(scope="module")
def part_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    graph = community_graph(600, 4000, 4, feat_dim=8, num_classes=4, seed=1)
    graph.ndata["train_mask"] = torch.arange(600) % 5 < 2  # as many for each of four trainers
    folder = tmp_path_factory.mktemp("walkthrough")
    dgl.distributed.partition_graph(graph, "graph_name", 4, folder, quiet=True)
    return str(folder / "graph_name.json")


def test_losses_do_not_depend_on_hosts_and_trainers(
    part_config: str, tmp_path: Path, run_all: bool
) -> None:
    (expected,) = run_ranks(run, 1, part_config, "", 1, timeout=120)
    assert len(expected) == 6
    assert expected[-1] < 0.9 * expected[0]
    for hosts, world_size in ((2, 4), (1, 2), (4, 4)) if run_all else ((2, 4),):
        with ExitStack() as stack:
            servers = Servers(stack, part_config, hosts, tmp_path)
            ip_config = str(servers.ip_config)
            found = run_ranks(run, world_size, part_config, ip_config, hosts, timeout=120)
        for losses in found:
            torch.testing.assert_close(
                torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6
            )
