# SPDX-License-Identifier: Apache-2.0
"""DGL in one process: full-batch epochs of a 3-layer GraphSAGE or GAT, hidden 128.

usage: dgl_full.py GRAPH.npz sage|gat THREADS EPOCHS [idle]
Prints one line of JSON.
"""

import json
import sys
import time

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from _peak import peak_mb

path, model, threads, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
idle = "idle" in sys.argv
torch.set_num_threads(threads)
arrays = np.load(path)
src, dst = torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])
if idle:
    src, dst = src[:1], dst[:1]
graph = dgl.graph((src, dst), num_nodes=len(arrays["y"]))
graph.create_formats_()
features, labels = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
train = torch.from_numpy(arrays["train"]).nonzero().view(-1)
torch.manual_seed(0)
widths = [features.shape[1], 128, 128, int(labels.max()) + 1]
pairs = list(zip(widths, widths[1:], [F.relu, F.relu, None], strict=False))
if model == "sage":
    layers = torch.nn.ModuleList(
        dgl.nn.SAGEConv(a, b, "mean", activation=act) for a, b, act in pairs
    )
else:
    layers = torch.nn.ModuleList(
        dgl.nn.GATConv(a, b // 4 if act else b, 4, activation=act, allow_zero_in_degree=True)
        for a, b, act in pairs
    )
optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
seconds, losses = [], []
for _ in range(0 if idle else epochs):
    start = time.perf_counter()
    h = features
    for i, layer in enumerate(layers):
        h = layer(graph, h)
        if model == "gat":
            h = h.flatten(1) if i < 2 else h.mean(1)
    loss = F.cross_entropy(h[train], labels[train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - start)
    losses.append(float(loss))
print(
    json.dumps(
        {
            "seconds": sorted(seconds)[len(seconds) // 2] if seconds else 0.0,
            "peak_mb": peak_mb(),
            "losses": losses,
        }
    )
)
