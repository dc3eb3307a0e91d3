# SPDX-License-Identifier: Apache-2.0
r"""Sampled training of GraphSAGE on graph servers, in DistDGL's style.

    python examples/distributed_sage.py                  # standalone: one process, no servers

    graphshard partition --data cora --parts 2 --out build/examples/cora
    graphshard launch --local 2 --num-trainers 2 --part-config build/examples/cora/cora.json \
        "examples/distributed_sage.py --part-config build/examples/cora/cora.json"

The second way starts two hosts on this machine, each with a server that has one part of the graph
and with two trainers; with ``--ip-config`` instead of ``--local`` they are hosts of a cluster. The
code is the same, and so are its batches: a global batch has `BATCH_SIZE` nodes, of which each
trainer takes its share.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard as gs
import graphshard.dgl as dgl

HIDDEN, FANOUTS, BATCH_SIZE, LEARNING_RATE, EPOCHS = 16, [10, 25], 140, 0.02, 30


class GraphSAGE(nn.Module):
    """Two GraphSAGE layers that average over the neighbours."""

    def __init__(self, in_feats: int, num_classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(in_feats, HIDDEN, "mean")
        self.second = dgl.nn.SAGEConv(HIDDEN, num_classes, "mean")

    def forward(self, blocks: list[dgl.Block], h: Tensor) -> Tensor:
        """Scores ``[num_seeds, num_classes]``."""
        h = F.dropout(F.relu(self.first(blocks[0], h)), 0.5, self.training)
        scores: Tensor = self.second(blocks[1], h)
        return scores


def share_of(g: dgl.distributed.DistGraph, split: str) -> Tensor:
    """This trainer's nodes of a split."""
    return dgl.distributed.node_split(g.ndata[f"{split}_mask"], g.get_partition_book())


def main() -> None:
    """Connect, train on samples, evaluate with all neighbours."""
    parser = argparse.ArgumentParser(description="GraphSAGE on graph servers.")
    parser.add_argument("--ip-config", help="the hosts, where launch does not say it")
    parser.add_argument("--part-config", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N, or auto")
    parser.add_argument("--out", type=Path, default=Path("build/examples/distributed_sage"))
    args = parser.parse_args()
    device = gs.choose_device(args.device)
    if args.part_config is None:  # standalone
        cora = gs.data.load_dataset("cora", row_normalize=True)
        args.part_config = args.out / "cora.json"
        dgl.distributed.partition_graph(cora.graph, "cora", 2, args.out, quiet=True)

    # 1. Servers first, then the trainers' process group. Standalone, both have nothing to do.
    dgl.distributed.initialize(args.ip_config)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
    num_trainers = dgl.distributed.get_num_clients()
    g = dgl.distributed.DistGraph(args.part_config.stem, part_config=args.part_config)

    # 2. Each trainer takes a share of the training nodes, mostly of its own host.
    sampler = dgl.dataloading.NeighborSampler(FANOUTS)
    loader = dgl.distributed.DistNodeDataLoader(
        g,
        share_of(g, "train"),
        sampler,
        batch_size=BATCH_SIZE // num_trainers,
        shuffle=True,
        device=device,
    )
    torch.manual_seed(0)
    num_classes = int(g.ndata["label"][:].max()) + 1
    model: nn.Module = GraphSAGE(g.ndata["feat"].shape[1], num_classes).to(device)
    if num_trainers > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=5e-4)

    # 3. Rows are read by id, wherever they are. They come to the CPU.
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for input_nodes, seeds, blocks in loader:
            scores = model(blocks, g.ndata["feat"][input_nodes].to(device))
            loss = F.cross_entropy(scores, g.ndata["label"][seeds].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 10 == 0 and g.rank() == 0:
            print(f"epoch {epoch:3d}: loss {float(loss.detach()):.4f}", flush=True)

    # 4. All neighbours of the test nodes: exact.
    model.eval()
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    loader = dgl.distributed.DistNodeDataLoader(
        g, share_of(g, "test"), sampler, batch_size=250, device=device
    )
    found = torch.zeros(2)
    for input_nodes, seeds, blocks in loader:
        with torch.no_grad():
            scores = model(blocks, g.ndata["feat"][input_nodes].to(device))
        right = scores.argmax(1).cpu() == g.ndata["label"][seeds]
        found += torch.tensor([float(right.sum()), len(seeds)])
    if num_trainers > 1:
        torch.distributed.all_reduce(found)
    if g.rank() == 0:
        print(f"test accuracy {100 * found[0] / found[1]:.1f} % on {found[1]:.0f} nodes")
    dgl.distributed.exit_client()


if __name__ == "__main__":
    main()
