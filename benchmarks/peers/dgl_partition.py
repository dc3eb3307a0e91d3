# SPDX-License-Identifier: Apache-2.0
"""DGL's partition of a graph: seconds and peak memory.

usage: dgl_partition.py GRAPH.npz PARTS FOLDER
"""

import json
import resource
import sys
import time

import dgl
import numpy as np
import torch

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
print(
    json.dumps(
        {
            "seconds": time.perf_counter() - start,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    )
)
