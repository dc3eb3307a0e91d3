# SPDX-License-Identifier: Apache-2.0
"""DGL's partition of a graph: seconds, CPU seconds, peak memory, and the edges that it cuts.

usage: dgl_partition.py GRAPH.npz PARTS FOLDER
"""

import json
import sys
import time

import dgl
import numpy as np
import torch
from _peak import peak_mb

arrays = np.load(sys.argv[1])
graph = dgl.graph(
    (torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])), num_nodes=len(arrays["y"])
)
for name in ("x", "y", "train"):
    graph.ndata[name] = torch.from_numpy(arrays[name])
start = time.perf_counter()
dgl.distributed.partition_graph(
    graph, "g", int(sys.argv[2]), sys.argv[3], part_method="metis", balance_edges=True
)
result = {
    "seconds": time.perf_counter() - start,
    "cpu": time.process_time(),
    "peak_mb": peak_mb(),
}
del graph, arrays
cut = 0
for number in range(int(sys.argv[2])):
    part = dgl.distributed.load_partition(f"{sys.argv[3]}/g.json", number, load_feats=False)[0]
    src, _ = part.edges()
    cut += int((part.edata["inner_edge"].bool() & ~part.ndata["inner_node"].bool()[src]).sum())
print(json.dumps({**result, "cut": cut}))
