# SPDX-License-Identifier: Apache-2.0
"""Layers of PyG on 2 ranks of one thread each, against plain PyG on two threads.

    python benchmarks/pyg_layers.py [--nodes 40000] [--edges 800000] [--width 64] [--repeat 3]

A step is forward and backward. For each layer: its time, the processor time of all threads and
ranks, and the memory that it adds at its peak on the busiest rank, in both modes. Results and
gradients of the input are compared with PyG's. Writes
``benchmarks/results/pyg_layers_cpu_<date>.md``, if all layers are measured.

Each side is started twice: for the times as users start it, and for the memory with an allocator
that returns what is freed at once, so that a peak is what the step asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric
import torch_geometric.nn as pyg_nn
from _common import markdown_table, write_result
from torch import Tensor, nn
from torch_geometric.data import Data

NUM_TYPES, EDGE_WIDTH, EVERY = 4, 8, 16
SCALERS = ["identity", "amplification", "attenuation"]


def mlp(before: int, after: int) -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Linear(after, after))


LAYERS: dict[str, tuple[Callable[[int, Tensor], nn.Module], str]] = {
    "GCN": (lambda w, _: pyg_nn.GCNConv(w, w), ""),
    "SAGE": (lambda w, _: pyg_nn.SAGEConv(w, w), ""),
    "GAT": (lambda w, _: pyg_nn.GATConv(w, w // 4, heads=4), ""),
    "GATv2": (lambda w, _: pyg_nn.GATv2Conv(w, w // 4, heads=4), ""),
    "GATv2(edge_attr)": (
        lambda w, _: pyg_nn.GATv2Conv(w, w // 4, heads=4, edge_dim=EDGE_WIDTH),
        "edge_attr",
    ),
    "GIN": (lambda w, _: pyg_nn.GINConv(mlp(w, w)), ""),
    "GINE": (lambda w, _: pyg_nn.GINEConv(mlp(w, w), edge_dim=EDGE_WIDTH), "edge_attr"),
    "RGCN": (lambda w, _: pyg_nn.RGCNConv(w, w, NUM_TYPES), "edge_type"),
    "Transformer": (lambda w, _: pyg_nn.TransformerConv(w, w // 4, heads=4), ""),
    "Transformer(edge_attr)": (
        lambda w, _: pyg_nn.TransformerConv(w, w // 4, heads=4, edge_dim=EDGE_WIDTH),
        "edge_attr",
    ),
    "SAGE(max)": (lambda w, _: pyg_nn.SAGEConv(w, w, aggr="max"), ""),
    "PNA": (
        lambda w, deg: pyg_nn.PNAConv(w, w, ["mean", "min", "max", "std"], SCALERS, deg),
        "",
    ),
    "GraphConv": (lambda w, _: pyg_nn.GraphConv(w, w), "edge_weight"),
    "APPNP": (lambda w, _: pyg_nn.APPNP(3, 0.1), ""),
    "Cheb": (lambda w, _: pyg_nn.ChebConv(w, w, K=3), ""),
    "ResGatedGraph": (lambda w, _: pyg_nn.ResGatedGraphConv(w, w), ""),
    "GEN": (lambda w, _: pyg_nn.GENConv(w, w), ""),
    "EdgeConv": (lambda w, _: pyg_nn.EdgeConv(nn.Linear(2 * w, w), aggr="max"), ""),
    "EG": (lambda w, _: pyg_nn.EGConv(w, w, aggregators=["sum", "max"], num_heads=4), ""),
    "FA": (lambda w, _: pyg_nn.FAConv(w), "x_0"),
}
TARGETS = {"GCN": 0.5, "SAGE": 0.5, "GAT": 0.5}
MODES = ("oneshot", "sequential")


def random_data(nodes: int, edges: int, width: int) -> tuple[Data, Tensor]:
    """Communities, so that METIS finds a cut; and the histogram of in-degrees."""
    g = torch.Generator().manual_seed(0)
    src = torch.randint(0, nodes, (edges,), generator=g)
    near = (src + torch.randint(-200, 200, (edges,), generator=g)) % nodes
    degrees = torch.bincount(torch.bincount(near, minlength=nodes))
    data = Data(
        x=torch.randn(nodes, width, generator=g),
        edge_index=torch.stack([src, near]),
        x_0=torch.randn(nodes, width, generator=g),
        edge_weight=torch.rand(edges, generator=g),
        edge_attr=torch.randn(edges, EDGE_WIDTH, generator=g),
        edge_type=torch.randint(0, NUM_TYPES, (edges,), generator=g),
    )
    return data, degrees


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


def call(layer: nn.Module, x: Tensor, data: Data, takes: str) -> Tensor:
    """Forward."""
    if takes == "x_0":
        return layer(x, data.x_0, data.edge_index)
    return layer(x, data.edge_index, **({takes: data[takes]} if takes else {}))


def measure_layer(
    name: str, width: int, degrees: Tensor, data: Data, repeat: int, convert: Callable[..., Any]
) -> dict[str, Any]:
    """Steps of one layer: seconds, bytes, and results at every so many nodes."""
    torch.manual_seed(0)
    make, takes = LAYERS[name]
    layer = convert(make(width, degrees))
    x = data.x.clone().requires_grad_()
    seconds, cpu, before = [], [], forget_peak()
    out: Any = None
    for step in range(repeat + 1):
        del out
        x.grad = None
        start, start_cpu = time.perf_counter(), time.process_time()
        out = call(layer, x, data, takes)
        out.square().sum().backward()
        if step or not repeat:
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
    return {
        "layer": name,
        "seconds": statistics.median(seconds),
        "cpu": statistics.median(cpu),
        "bytes": peak_bytes() - before,
        "results": (out.detach(), x.grad),
    }


def side(args: argparse.Namespace) -> None:
    """One process of a side: a line of JSON for each layer and mode."""
    whole, degrees = random_data(args.nodes, args.edges, args.width)
    torch.set_num_threads(2 if args.side == "plain" else 1)
    modes: tuple[str, ...] = ("plain",)
    convert: Callable[..., Any] = nn.Module.train
    if args.side == "ranks":
        import graphshard

        graphshard.initialize_comms()
        modes, convert = MODES, graphshard.pyg.convert_sync_norm
    folder = Path(args.results)
    for mode in modes:
        data, ids = whole, torch.arange(args.nodes)
        if mode != "plain":
            data = graphshard.pyg.shard(whole, mode=mode)
            ids = data.n_id
        for name in args.layer or LAYERS:
            found = measure_layer(name, args.width, degrees, data, args.repeat, convert)
            for what, rows in zip(("out", "grad"), found.pop("results"), strict=True):
                chosen = (ids % EVERY == 0).nonzero().view(-1)
                file = folder / f"{name.replace('(', '-')}-{what}.npy"
                if mode == "plain":
                    np.save(file, rows[chosen].numpy())
                    continue
                if file.exists():
                    expected = torch.from_numpy(np.load(file))
                    scale = float(expected.abs().max())
                    gap = (rows[chosen] - expected[ids[chosen] // EVERY]).abs() / scale
                    # Rounding may put a number beside the kink of an activation on its other side.
                    far = float((gap > 1e-5).float().mean())
                    assert far < 1e-2, f"{name} ({mode}): {far} of {what} differ, by {gap.max()}"
            sys.stdout.write(json.dumps({"mode": mode, **found}) + "\n")
            sys.stdout.flush()


def run(args: argparse.Namespace, which: str, repeat: int, folder: str) -> dict[Any, Any]:
    """The numbers of a side by layer and mode; of several ranks the most."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(ranks if which == "ranks" else []), __file__, "--side", which]
    for name in ("nodes", "edges", "width"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--repeat", str(repeat), "--results", folder]
    command += ["--layer", *args.layer] if args.layer else []
    environment = {**os.environ, "OMP_NUM_THREADS": "2" if which == "plain" else "1"}
    if not repeat:
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[Any, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            key = one["layer"], one["mode"]
            both = [one, *([found[key]] if key in found else [])]
            found[key] = {
                "seconds": max(x["seconds"] for x in both),
                "cpu": sum(x["cpu"] for x in both),
                "bytes": max(x["bytes"] for x in both),
            }
    return found


def main() -> None:
    """Both sides, twice, and the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--edges", type=int, default=800_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--layer", choices=list(LAYERS), nargs="*")
    parser.add_argument("--side", choices=["plain", "ranks"], help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    parser.add_argument("--no-memory", action="store_true", help="measure times alone")
    args = parser.parse_args()
    if args.side:
        side(args)
        return
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        times: dict[Any, Any] = {}
        for which in ("plain", "ranks"):
            times |= run(args, which, args.repeat, folder)
        peaks: dict[Any, Any] = {}
        for which in () if args.no_memory else ("plain", "ranks"):
            peaks |= run(args, which, 0, folder)
    rows = []
    for name in args.layer or LAYERS:
        plain, ours = times[name, "plain"], [times[name, mode] for mode in MODES]
        cells = [f"{plain['seconds']:.3f}"]
        cells += [f"{o['seconds']:.3f} ({o['seconds'] / plain['seconds']:.2f}x)" for o in ours]
        cells += [f"{plain['cpu']:.2f}"]
        cells += [f"{o['cpu']:.2f} ({o['cpu'] / plain['cpu']:.2f}x)" for o in ours]
        if peaks:
            own = peaks[name, "plain"]["bytes"]
            cells += [f"{own / 2**20:.0f}"]
            sizes = [peaks[name, mode]["bytes"] for mode in MODES]
            cells += [f"{size / 2**20:.0f} ({size / own:.2f}x)" for size in sizes]
        over = ours[0]["seconds"] / plain["seconds"] > TARGETS.get(name, 1.1)
        rows.append([name, *cells, "over" if over else "held"])
    header = ["layer"]
    for what in ("s", "processor s", *(["MiB"] if peaks else [])):
        header += [f"PyG, {what}", f"one-shot, {what}", f"sequential, {what}"]
    table = markdown_table([*header, "target"], rows)
    if args.layer:
        sys.stdout.write("\n".join(table) + "\n")
        return
    body = [
        f"{args.nodes:,} nodes, {args.edges:,} edges in communities, {args.width} columns; METIS. "
        f"PyG {torch_geometric.__version__} in one process of 2 threads; ours in 2 processes of "
        "1 thread. A step is forward and backward; the median of "
        f"{args.repeat} after one that is not counted, the slower rank; processor time is the sum "
        "of both ranks, memory what a step adds at the peak of the larger. Outputs and gradients "
        f"of the input equal PyG's to 1e-5. Target of one-shot mode: {TARGETS}, others 1.1 of "
        f"PyG's time. Took {time.perf_counter() - started:.0f} s.",
        "",
        *table,
    ]
    write_result("pyg_layers", "PyG's layers on 2 ranks, against plain PyG", body)


if __name__ == "__main__":
    main()
