# SPDX-License-Identifier: Apache-2.0
"""DistDGL: steps of an embedding's sparse optimizer; started by two_hosts.sh.

usage: distdgl_steps.py PARTS.json COLUMNS BATCH STEPS
Trainer 0 prints one line of JSON.
"""

import json
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from _distdgl import start as start_distdgl

columns, batch, steps = map(int, sys.argv[2:5])
dgl = start_distdgl(sys.argv[1])
graph = dgl.distributed.DistGraph("g", part_config=sys.argv[1])
embedding = dgl.distributed.DistEmbedding(graph.num_nodes(), columns, "embedding")
optimizer = dgl.distributed.optim.SparseAdagrad([embedding], lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
phases, losses, cpu = {"lookup": [], "loss": [], "step": []}, [], time.process_time()
for _ in range(steps):
    ids = torch.randint(graph.num_nodes(), (batch,), generator=generator)
    dist.barrier()
    times = [time.perf_counter()]
    optimizer.zero_grad()
    rows = embedding(ids)
    times.append(time.perf_counter())
    loss = (rows - 1).square().sum()
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    times.append(time.perf_counter())
    for phase, (begin, end) in zip(phases.values(), pairwise(times), strict=True):
        phase.append(end - begin)
    losses.append(float(loss.detach()))
cpu = (time.process_time() - cpu) / steps
if dist.get_rank() == 0:
    print(json.dumps({"phases": phases, "losses": losses[-3:], "cpu": cpu}), flush=True)
dist.barrier()
