# SPDX-License-Identifier: Apache-2.0
"""DGL in one process: GraphSAGE with sampled mini-batches, and sampling alone.

usage: dgl_sampled.py GRAPH.npz HIDDEN THREADS EPOCHS
HIDDEN 0 samples only. Prints one line of JSON.
"""

import json
import sys
import time

import dgl
import numpy as np
import torch
import torch.nn.functional as F

arrays = np.load(sys.argv[1])
hidden, threads, epochs = (int(a) for a in sys.argv[2:5])
torch.set_num_threads(threads)
graph = dgl.graph(
    (torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])), num_nodes=len(arrays["y"])
)
graph.create_formats_()
features, labels = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
train = torch.from_numpy(arrays["train"]).nonzero().view(-1)
loader = dgl.dataloading.DataLoader(
    graph, train, dgl.dataloading.NeighborSampler([15, 10, 5]), batch_size=1000, shuffle=True
)
torch.manual_seed(0)
widths = [features.shape[1], hidden, hidden, int(labels.max()) + 1]
pairs = list(zip(widths, widths[1:], strict=False))
layers = torch.nn.ModuleList()
if hidden:
    layers = torch.nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in pairs)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
epoch_seconds, sample_seconds, edges, loss = [], [], 0, torch.tensor(0.0)
for _ in range(epochs):
    if hidden:
        start = time.perf_counter()
        for inputs, outputs, blocks in loader:
            h = features[inputs]
            for i, layer in enumerate(layers):
                h = layer(blocks[i], h)
                h = F.relu(h) if i < 2 else h
            loss = F.cross_entropy(h, labels[outputs])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch_seconds.append(time.perf_counter() - start)
    else:
        start, edges = time.perf_counter(), 0
        for _, _, blocks in loader:
            edges += sum(block.num_edges() for block in blocks)
        sample_seconds.append(time.perf_counter() - start)
print(
    json.dumps(
        {
            "epoch_s": min(epoch_seconds, default=0.0),
            "sample_s": min(sample_seconds, default=0.0),
            "edges": edges,
            "loss": float(loss),
        }
    )
)
