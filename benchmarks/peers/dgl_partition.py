# SPDX-License-Identifier: Apache-2.0
"""DGL's partition of a graph: seconds, CPU seconds, peak memory, and the edges that it cuts.

usage: dgl_partition.py GRAPH.npz PARTS FOLDER [METHOD]
FOLDER/parts.npy has the part of each node.
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
for name in {"x", "y", "train"} & set(arrays):
    graph.ndata[name] = torch.from_numpy(arrays[name])
method = sys.argv[4] if len(sys.argv) > 4 else "metis"
start = time.perf_counter()
original, _ = dgl.distributed.partition_graph(
    graph,
    "g",
    int(sys.argv[2]),
    sys.argv[3],
    part_method=method,
    balance_edges=True,
    return_mapping=True,
)
result = {
    "seconds": time.perf_counter() - start,
    "cpu": time.process_time(),
    "peak_mb": peak_mb(),
}
of_node = torch.empty(graph.num_nodes(), dtype=torch.int64)
del graph, arrays
cut = 0
for number in range(int(sys.argv[2])):
    part = dgl.distributed.load_partition(f"{sys.argv[3]}/g.json", number, load_feats=False)[0]
    src, _ = part.edges()
    is_inner = part.ndata["inner_node"].bool()
    of_node[original[part.ndata["_ID"][is_inner]]] = number
    cut += int((part.edata["inner_edge"].bool() & ~is_inner[src]).sum())
np.save(f"{sys.argv[3]}/parts.npy", of_node.numpy())
print(json.dumps({**result, "cut": cut}))
