# SPDX-License-Identifier: Apache-2.0
"""DGL: forward and backward of one attention layer, 128 features, 4 heads of 32.

usage: dgl_attention.py GRAPH.npz gat|gatv2|dotgat|agnn THREADS REPEATS
Prints one line of JSON: median CPU seconds, peak of memory above the graph.
"""

import json
import statistics
import sys
import time

import dgl
import numpy as np
import torch
from _peak import peak_mb

path, layer, threads, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(threads)
arrays = np.load(path)
ends = torch.from_numpy(arrays["src"]).int(), torch.from_numpy(arrays["dst"]).int()
graph = dgl.graph(ends, num_nodes=len(arrays["y"]))
graph.create_formats_()
x = torch.from_numpy(arrays["x"]).requires_grad_()
torch.manual_seed(0)
made = {
    "gat": lambda: dgl.nn.GATConv(128, 32, 4, allow_zero_in_degree=True),
    "gatv2": lambda: dgl.nn.GATv2Conv(128, 32, 4, allow_zero_in_degree=True),
    "dotgat": lambda: dgl.nn.DotGatConv(128, 32, 4, allow_zero_in_degree=True),
    "agnn": lambda: dgl.nn.AGNNConv(allow_zero_in_degree=True),
}[layer]()
before = peak_mb()
seconds = []
for _ in range(repeats + 1):
    start = time.process_time()
    out = made(graph, x)
    out.backward(torch.ones_like(out))
    seconds.append(time.process_time() - start)
peak = peak_mb()
result = {"seconds": statistics.median(seconds[1:]), "peak_mb": peak - before}
print(json.dumps(result | {"sum": float(out.detach().double().abs().sum())}))
