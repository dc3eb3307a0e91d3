# SPDX-License-Identifier: Apache-2.0
"""SAR: one rank of full-batch epochs of a 3-layer GraphSAGE or GAT, hidden 128.

usage: sar_full.py FOLDER PARTS.json sage|gat EPOCHS ADDRESS INTERFACE
FOLDER is a checkout of SAR (https://github.com/IntelLabs/SAR), which no package index has. RANK and
WORLD_SIZE say which rank this is. Rank 0 prints one line of JSON: seconds of each epoch, and the
bytes that the interface of the busiest rank sent or received in one.
"""

import json
import os
import sys
import time
from pathlib import Path

import dgl
import torch
import torch.distributed as dist
import torch.nn.functional as F

folder, parts, model, epochs, address, interface = sys.argv[1:]
os.environ["SAR_SOCKET_NAME"] = interface
sys.path.insert(0, folder)
import sar  # noqa: E402 (its folder is an argument)

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
sar.initialize_comms(rank, world_size, address, "gloo")
data = sar.load_dgl_partition_data(parts, rank, torch.device("cpu"))
masks = sar.suffix_key_lookup(data.node_features, "train").nonzero().view(-1)
labels = sar.suffix_key_lookup(data.node_features, "y").long()
features = sar.suffix_key_lookup(data.node_features, "x")
classes = labels.max() + 1
sar.comm.all_reduce(classes, dist.ReduceOp.MAX, move_to_comm_device=True)
graph = sar.construct_full_graph(data)
del data
torch.manual_seed(0)
widths = [features.shape[1], 128, 128, int(classes)]
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
sar.sync_params(layers)
optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)


def traffic() -> torch.Tensor:
    """Bytes that the interface has sent and received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == interface:
            fields = [int(number) for number in numbers.split()]
            return torch.tensor([fields[8], fields[0]])
    raise RuntimeError(f"there is no interface {interface}")


seconds, losses, moved = [], [], torch.zeros(2)
for number in range(int(epochs) + 1):
    dist.barrier()
    start, before = time.perf_counter(), traffic()
    h = features
    for i, layer in enumerate(layers):
        h = layer(graph, h)
        if model == "gat":
            h = h.flatten(1) if i < 2 else h.mean(1)
    loss = F.cross_entropy(h[masks], labels[masks], reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    sar.gather_grads(layers)
    optimizer.step()
    dist.barrier()
    if number:  # as for the other side, whose first epoch fetches what stays
        seconds.append(time.perf_counter() - start)
        moved += traffic() - before
    losses.append(float(loss.detach()))
most = moved.max() / int(epochs)
dist.all_reduce(most, dist.ReduceOp.MAX)
total = torch.tensor(losses)
dist.all_reduce(total)
if rank == 0:
    print(json.dumps({"bytes": float(most), "seconds": seconds, "losses": total.tolist()}))
