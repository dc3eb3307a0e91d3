# SPDX-License-Identifier: Apache-2.0
"""Layers of PyG on ranks of one thread each, against plain PyG on as many threads.

    python benchmarks/pyg_layers.py [--nodes 40000] [--edges 800000] [--width 64] [--repeat 3]

Prints, for each layer, the time of a forward and backward step, and the memory that steps add at
their peak on the busiest rank. Each case runs in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg_nn
from torch import nn
from torch_geometric.data import Data

LAYERS: dict[str, Callable[[int, torch.Tensor], nn.Module]] = {
    "GCN": lambda w, _: pyg_nn.GCNConv(w, w),
    "SAGE": lambda w, _: pyg_nn.SAGEConv(w, w),
    "GAT": lambda w, _: pyg_nn.GATConv(w, w // 4, heads=4),
    "GATv2": lambda w, _: pyg_nn.GATv2Conv(w, w // 4, heads=4),
    "GIN": lambda w, _: pyg_nn.GINConv(nn.Linear(w, w)),
    "Transformer": lambda w, _: pyg_nn.TransformerConv(w, w // 4, heads=4),
    "SAGE(max)": lambda w, _: pyg_nn.SAGEConv(w, w, aggr="max"),
    "PNA": lambda w, deg: pyg_nn.PNAConv(
        w, w, ["mean", "min", "max", "std"], ["identity", "amplification"], deg
    ),
}


def random_data(nodes: int, edges: int, width: int) -> tuple[Data, torch.Tensor]:
    """Communities, so that METIS finds a cut; and the histogram of in-degrees."""
    g = torch.Generator().manual_seed(0)
    src = torch.randint(0, nodes, (edges,), generator=g)
    near = (src + torch.randint(-200, 200, (edges,), generator=g)) % nodes
    edge_index = torch.stack([src, near])
    degrees = torch.bincount(torch.bincount(near, minlength=nodes))
    return Data(x=torch.randn(nodes, width, generator=g), edge_index=edge_index), degrees


def peak_bytes() -> int:
    """The most memory that this process has had since `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Start to count the peak again; returns what is in memory now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
        control.write("5")
    return peak_bytes()


def measure(args: argparse.Namespace) -> None:
    """One case, in this process: prints seconds and bytes."""
    data, degrees = random_data(args.nodes, args.edges, args.width)
    torch.manual_seed(0)
    layer = LAYERS[args.layer](args.width, degrees)
    if args.mode == "plain":
        torch.set_num_threads(2)
    else:
        import graphshard

        torch.set_num_threads(1)
        graphshard.initialize_comms()
        data = graphshard.pyg.shard(data, mode=args.mode)
    x = data.x.clone().requires_grad_()
    seconds, before = [], forget_peak()
    for step in range(args.repeat + 2):
        start = time.perf_counter()
        out: Any = layer(x, data.edge_index)
        out.square().sum().backward()
        if step >= 2:
            seconds.append(time.perf_counter() - start)
        del out
    sys.stdout.write(f"RESULT {statistics.median(seconds)} {peak_bytes() - before}\n")


def run(args: argparse.Namespace, layer: str, mode: str) -> tuple[float, float]:
    """Median seconds of a step, and the MiB that it adds on the busiest rank."""
    sizes = ["--nodes", args.nodes, "--edges", args.edges, "--width", args.width]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(ranks if mode != "plain" else []), __file__, "--layer", layer]
    command += ["--mode", mode, "--repeat", str(args.repeat), *map(str, sizes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2" if mode == "plain" else "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = [line.split()[1:] for line in done.stdout.splitlines() if "RESULT" in line]
    return max(float(s) for s, _ in found), max(float(b) for _, b in found) / 2**20


def main() -> None:
    """The table, or one case of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--edges", type=int, default=800_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--layer", choices=sorted(LAYERS))
    parser.add_argument("--mode", choices=["plain", "oneshot", "sequential"])
    args = parser.parse_args()
    if args.layer and args.mode:
        measure(args)
        return
    print("| layer | PyG, s | one-shot, s | sequential, s | ", end="")
    print("PyG, MiB | one-shot, MiB | sequential, MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layer in [args.layer] if args.layer else LAYERS:
        found = [run(args, layer, mode) for mode in ("plain", "oneshot", "sequential")]
        times = " | ".join(f"{s:.3f} ({s / found[0][0]:.2f}x)" for s, _ in found)
        sizes = " | ".join(f"{b:.0f} ({b / found[0][1]:.2f}x)" for _, b in found)
        print(f"| {layer} | {times} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
