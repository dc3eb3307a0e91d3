# SPDX-License-Identifier: Apache-2.0
"""DistDGL: one server or trainer of a sampled GraphSAGE run; started by two_hosts.sh.

usage: distdgl_sampled.py PARTS.json HIDDEN EPOCHS
Trainer 0 prints one line of JSON.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _distdgl import start as start_distdgl

hidden, epochs = int(sys.argv[2]), int(sys.argv[3])
dgl = start_distdgl(sys.argv[1])
graph = dgl.distributed.DistGraph("g", part_config=sys.argv[1])
train = dgl.distributed.node_split(
    graph.ndata["train"], graph.get_partition_book(), force_even=True
)
labels = graph.ndata["y"][torch.arange(graph.num_nodes())]
loader = dgl.dataloading.DistNodeDataLoader(
    graph, train, dgl.dataloading.NeighborSampler([15, 10, 5]), batch_size=1000, shuffle=True
)
torch.manual_seed(0)
widths = [graph.ndata["x"].shape[1], max(hidden, 1), max(hidden, 1), int(labels.max()) + 1]
pairs = list(zip(widths, widths[1:], strict=False))


class Net(torch.nn.Module):
    """Three layers of GraphSAGE."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in pairs)

    def forward(self, blocks, h):
        for i, layer in enumerate(self.layers):
            h = layer(blocks[i], h)
            h = F.relu(h) if i < 2 else h
        return h


net = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
epoch_seconds, sample_seconds, edges, loss = [], [], 0, torch.tensor(0.0)
for _ in range(epochs):
    dist.barrier()
    start = time.perf_counter()
    if hidden:
        with net.join():
            for inputs, outputs, blocks in loader:
                x = graph.ndata["x"][inputs]
                loss = F.cross_entropy(net(blocks, x), labels[outputs])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        dist.barrier()
        epoch_seconds.append(time.perf_counter() - start)
    else:
        edges = 0
        for inputs, _, blocks in loader:
            x = graph.ndata["x"][inputs]
            edges += sum(block.num_edges() for block in blocks)
        dist.barrier()
        sample_seconds.append(time.perf_counter() - start)
total = torch.tensor([edges])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(
        json.dumps(
            {
                "epoch_s": min(epoch_seconds, default=0.0),
                "sample_s": min(sample_seconds, default=0.0),
                "edges": int(total),
                "loss": float(loss),
            }
        ),
        flush=True,
    )
dist.barrier()
