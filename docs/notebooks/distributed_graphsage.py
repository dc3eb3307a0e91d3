# SPDX-License-Identifier: Apache-2.0
"""Notebook 3 as a script: GraphSAGE on graph servers, for `graphshard launch`."""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

import graphshard as gs
from graphshard.servers import DistGraph, DistNodeDataLoader, exit_client, initialize, node_split

PART_CONFIG = "parts/cora.json"
EPOCHS, BATCH_SIZE, HIDDEN, FANOUTS = 30, 140, 16, [10, 25]
STAGES = ["sample", "features", "forward", "backward", "update"]


class GraphSAGE(nn.Module):
    """Two GraphSAGE layers that average over the neighbours."""

    def __init__(self, in_feats, num_classes):
        super().__init__()
        self.first = gs.nn.SAGEConv(in_feats, HIDDEN, "mean")
        self.second = gs.nn.SAGEConv(HIDDEN, num_classes, "mean")

    def forward(self, graphs, h):
        h = F.relu(self.first(graphs[0], F.dropout(h, 0.5, self.training)))
        h = F.dropout(h, 0.5, self.training)
        return self.second(graphs[1], h)


def share_of(g, split):
    """This trainer's nodes of a split."""
    return node_split(g.ndata[f"{split}_mask"], g.get_partition_book())


def evaluate(g, model, split):
    """Accuracy on a split, with all neighbours."""
    loader = DistNodeDataLoader(
        g, share_of(g, split), gs.sampling.MultiLayerFullNeighborSampler(2), batch_size=250
    )
    counts = torch.zeros(2)
    model.eval()
    for input_nodes, seeds, blocks in loader:
        with torch.no_grad():
            scores = model(blocks, g.ndata["feat"][input_nodes])
        counts += torch.tensor(
            [float((scores.argmax(1) == g.ndata["label"][seeds]).sum()), len(seeds)]
        )
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)
    return float(counts[0] / counts[1])


def train(rank, world_size):
    """Train; losses and accuracies by epoch, seconds by what they went to, and the weights."""
    initialize()
    g = DistGraph("cora", part_config=PART_CONFIG)
    loader = DistNodeDataLoader(
        g,
        share_of(g, "train"),
        gs.sampling.NeighborSampler(FANOUTS),
        batch_size=BATCH_SIZE // world_size,
        shuffle=True,
    )
    torch.manual_seed(0)
    model = GraphSAGE(g.ndata["feat"].shape[1], int(g.ndata["label"][:].max()) + 1)
    parallel = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    losses, accuracies, seconds = [], [], dict.fromkeys(STAGES, 0.0)

    def count(what, since):
        now = time.perf_counter()
        seconds[what] += now - since
        return now

    for epoch in range(EPOCHS):
        model.train()
        clock = time.perf_counter()
        for input_nodes, seeds, blocks in loader:
            clock = count("sample", clock)
            rows, labels = g.ndata["feat"][input_nodes], g.ndata["label"][seeds]
            clock = count("features", clock)
            loss = F.cross_entropy(parallel(blocks, rows), labels)
            clock = count("forward", clock)
            optimizer.zero_grad()
            loss.backward()
            clock = count("backward", clock)
            optimizer.step()
            clock = count("update", clock)
        losses.append(float(loss.detach()))
        accuracies.append(evaluate(g, model, "val"))
        if rank == 0 and epoch % 10 == 9:
            percent = 100 * accuracies[-1]
            print(f"epoch {epoch + 1:2d}: loss {losses[-1]:.3f}, validation {percent:.1f} %")
    test = evaluate(g, model, "test")
    exit_client()
    return losses, accuracies, seconds, test, dict(model.state_dict())


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    *_, test_accuracy, weights = train(rank, world_size)
    if rank == 0:
        print(f"test accuracy {100 * test_accuracy:.1f} %")
    torch.distributed.destroy_process_group()
