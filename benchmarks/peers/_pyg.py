# SPDX-License-Identifier: Apache-2.0
"""What the programs on PyG share: a limit on memory, and layers with the initial weights of DGL's.

Each layer here draws random numbers as the layer of the same name in `dgl.nn` does, in the same
order, so that after the same `torch.manual_seed` both sides begin with the same parameters. What
PyG's own layer draws when it is made is taken from a copy of the generator.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from torch import nn
from torch_geometric.nn import AGNNConv, GATConv, GATv2Conv, SAGEConv

GAIN = nn.init.calculate_gain("relu")


def limit_memory() -> None:
    """Let an allocation above what is free now raise an error that says so.

    Messages on edges are stored one by one: what does not fit would otherwise end this process, or
    another one, without a word.
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        free = min(free, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (free, hard))


def sage(width: int, out: int) -> SAGEConv:
    """GraphSAGE with the mean of the neighbours, as `dgl.nn.SAGEConv(width, out, "mean")`."""
    neighbours, itself = nn.Linear(width, out, bias=False), nn.Linear(width, out)
    nn.init.xavier_uniform_(itself.weight, gain=GAIN)
    nn.init.xavier_uniform_(neighbours.weight, gain=GAIN)
    with torch.random.fork_rng(devices=[]):
        layer = SAGEConv(width, out, aggr="mean")
    # The bias stands beside the other matrix here; the sum of both is the same.
    layer.lin_l.weight, layer.lin_l.bias = neighbours.weight, itself.bias
    layer.lin_r.weight = itself.weight
    return layer


def gat(width: int, out: int, heads: int) -> GATConv:
    """Graph attention, as `dgl.nn.GATConv(width, out, heads)`; heads lie side by side."""
    projection = nn.Linear(width, out * heads, bias=False)
    of_source = nn.Parameter(torch.empty(1, heads, out))
    of_target = nn.Parameter(torch.empty(1, heads, out))
    for weight in (projection.weight, of_source, of_target):
        nn.init.xavier_normal_(weight, gain=GAIN)
    with torch.random.fork_rng(devices=[]):
        layer = GATConv(width, out, heads, add_self_loops=False)  # DGL adds none
    layer.lin.weight, layer.att_src, layer.att_dst = projection.weight, of_source, of_target
    return layer


def gatv2(width: int, out: int, heads: int) -> GATv2Conv:
    """Graph attention, as `dgl.nn.GATv2Conv(width, out, heads)`; heads lie side by side."""
    of_source, of_target = nn.Linear(width, out * heads), nn.Linear(width, out * heads)
    attention = nn.Parameter(torch.empty(1, heads, out))
    for weight in (of_source.weight, of_target.weight, attention):
        nn.init.xavier_normal_(weight, gain=GAIN)
    nn.init.zeros_(of_source.bias)
    nn.init.zeros_(of_target.bias)
    with torch.random.fork_rng(devices=[]):
        layer = GATv2Conv(width, out, heads, add_self_loops=False)
    layer.lin_l.weight, layer.lin_l.bias = of_source.weight, of_source.bias
    layer.lin_r.weight, layer.lin_r.bias = of_target.weight, of_target.bias
    layer.att, layer.bias = attention, None  # DGL's has no bias after the sum
    return layer


def agnn() -> AGNNConv:
    """Attention by cosines, as `dgl.nn.AGNNConv()`: one number, 1 at first."""
    return AGNNConv(add_self_loops=False)
