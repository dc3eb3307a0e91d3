# SPDX-License-Identifier: Apache-2.0
"""PyG in one process: full-batch epochs of a 3-layer GraphSAGE or GAT, hidden 128.

GraphSAGE gets the transposed adjacency matrix as a CSR tensor, for which PyG aggregates without a
message per edge, forward and backward. GAT has no such path in PyG: it gets the edges sorted by
destination, the fastest form for it.

usage: pyg_full.py GRAPH.npz sage|gat THREADS EPOCHS [idle]
Prints one line of JSON.
"""

import json
import sys
import time

import _pyg
import numpy as np
import torch
import torch.nn.functional as F
from _peak import peak_mb
from torch_geometric.utils import sort_edge_index, to_torch_csr_tensor

path, model, threads, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
idle = "idle" in sys.argv
_pyg.limit_memory()
torch.set_num_threads(threads)
arrays = np.load(path)
src, dst = torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])
if idle:
    src, dst = src[:1], dst[:1]
num_nodes = len(arrays["y"])
if model == "sage":
    graph = to_torch_csr_tensor(torch.stack([dst, src]), size=(num_nodes, num_nodes))
else:
    graph = sort_edge_index(torch.stack([src, dst]), num_nodes=num_nodes, sort_by_row=False)
del src, dst
features, labels = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
train = torch.from_numpy(arrays["train"]).nonzero().view(-1)
torch.manual_seed(0)
widths = [features.shape[1], 128, 128, int(labels.max()) + 1]
pairs = list(zip(widths, widths[1:], [True, True, False], strict=False))
if model == "sage":
    layers = torch.nn.ModuleList(_pyg.sage(a, b) for a, b, _ in pairs)
else:
    layers = torch.nn.ModuleList(_pyg.gat(a, b // 4 if hidden else b, 4) for a, b, hidden in pairs)
optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
seconds, losses = [], []
for _ in range(0 if idle else epochs):
    start = time.perf_counter()
    h = features
    for i, layer in enumerate(layers):
        h = layer(h, graph)
        if i < 2:
            h = F.relu(h)
        elif model == "gat":
            h = h.view(num_nodes, 4, -1).mean(1)
    loss = F.cross_entropy(h[train], labels[train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - start)
    losses.append(float(loss.detach()))
print(
    json.dumps(
        {
            "seconds": sorted(seconds)[len(seconds) // 2] if seconds else 0.0,
            "peak_mb": peak_mb(),
            "losses": losses,
        }
    )
)
