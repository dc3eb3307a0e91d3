# SPDX-License-Identifier: Apache-2.0
"""PyG: forward and backward of one attention layer, 128 features, 4 heads of 32.

Edges come sorted by destination. There is no `dotgat`: `TransformerConv`, the nearest that PyG has,
projects with three matrices where that layer has one.

usage: pyg_attention.py GRAPH.npz gat|gatv2|agnn THREADS REPEATS
Prints one line of JSON: median CPU seconds, peak of memory above the graph.
"""

import json
import statistics
import sys
import time

import _pyg
import numpy as np
import torch
from _peak import peak_mb
from torch_geometric.utils import sort_edge_index

path, layer, threads, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
_pyg.limit_memory()
torch.set_num_threads(threads)
arrays = np.load(path)
ends = torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])
graph = sort_edge_index(torch.stack(ends), num_nodes=len(arrays["y"]), sort_by_row=False)
x = torch.from_numpy(arrays["x"]).requires_grad_()
torch.manual_seed(0)
made = {
    "gat": lambda: _pyg.gat(128, 32, 4),
    "gatv2": lambda: _pyg.gatv2(128, 32, 4),
    "agnn": lambda: _pyg.agnn(),
}[layer]()
before = peak_mb()
seconds = []
for _ in range(repeats + 1):
    start = time.process_time()
    out = made(x, graph)
    out.backward(torch.ones_like(out))
    seconds.append(time.process_time() - start)
peak = peak_mb()
result = {"seconds": statistics.median(seconds[1:]), "peak_mb": peak - before}
print(json.dumps(result | {"sum": float(out.detach().double().abs().sum())}))
