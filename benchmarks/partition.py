# SPDX-License-Identifier: Apache-2.0
"""A large graph in parts: time and memory of partitioning it beside DGL, then training on it.

    python benchmarks/partition.py                       # 24.7 million edges into 4 parts
    python benchmarks/partition.py --question train      # full batch, a worker for each part
    python benchmarks/partition.py --write               # both, and a file of results

Each side is a process of its own that reads the graph from a file, builds it, divides it with METIS
(nodes and in-edges balanced) and writes the parts with their features. DGL 1.1.3 runs in the
environment that GRAPHSHARD_PEER_PYTHON names. Graph and parts take 4 GB under ``--folder``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _common import (
    PEER_PYTHON,
    PEERS,
    ROOT,
    Side,
    community_graph,
    markdown_table,
    median,
    run_side,
    write_result,
)
from peers._peak import peak_mb

HERE = str(Path(__file__).resolve())
#: The layers of each model: hidden columns, and the heads that they are divided among.
MODELS = {"sage-64": (64, 0), "sage-128": (128, 0), "gat-4x16": (64, 4)}


def partition(graph: Path, num_parts: int, folder: str) -> None:
    """This package's partition of a graph; prints a line of JSON."""
    import graphshard
    from graphshard.partition import load_partition_stats, partition_graph

    with np.load(graph) as arrays:
        src, dst = torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])
        whole = graphshard.graph((src, dst), num_nodes=len(arrays["y"]))
        for name in ("x", "y", "train"):
            whole.ndata[name] = torch.from_numpy(arrays[name])
    start = time.perf_counter()
    partition_graph(whole, "g", num_parts, folder, balance_edges=True, quiet=True)
    result = {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time(),
        "peak_mb": peak_mb(),
        "cut": load_partition_stats(f"{folder}/g.json").edge_cut,
    }
    sys.stdout.write(json.dumps(result) + "\n")


def make_layers(model: str, width: int, classes: int) -> torch.nn.ModuleList:
    """Three layers; hidden ones as `MODELS` says."""
    from graphshard.nn import GATConv, SAGEConv

    hidden, heads = MODELS[model]
    widths = [width, hidden, hidden, classes]
    pairs = list(zip(widths, widths[1:], strict=False))
    if not heads:
        return torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in pairs)
    return torch.nn.ModuleList(
        GATConv(a, b // heads if i < 2 else b, heads, allow_zero_in_degree=True)
        for i, (a, b) in enumerate(pairs)
    )


def train(parts: str, model: str, epochs: int) -> None:
    """One worker; rank 0 prints a line of JSON."""
    import graphshard as gs

    torch.set_num_threads(1)
    gs.initialize_comms()
    start = time.perf_counter()
    data = gs.load_dgl_partition_data(parts, gs.rank())
    graph = gs.construct_full_graph(data)
    x, y = data.node_features["_N/x"], data.node_features["_N/y"]
    train = data.node_features["_N/train"].nonzero().view(-1)
    del data
    num_train = int(gs.comm.all_reduce(torch.tensor([train.numel()])))
    classes = int(gs.comm.all_reduce(y.max().view(1), "max")) + 1
    loading = time.perf_counter() - start
    torch.manual_seed(0)
    layers = make_layers(model, x.shape[1], classes)
    gs.sync_params(layers)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    seconds, losses = [], []
    for _ in range(epochs):
        start = time.perf_counter()
        h = x
        for i, layer in enumerate(layers):
            h = layer(graph, h)
            if h.dim() == 3:
                h = h.flatten(1) if i < 2 else h.mean(1)
            h = F.relu(h) if i < 2 else h
        loss = F.cross_entropy(h[train], y[train], reduction="sum") / num_train
        del h
        optimizer.zero_grad()
        loss.backward()
        gs.gather_grads(layers)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(float(gs.comm.all_reduce(loss.detach().view(1))))
    peak = peak_mb()
    mine = torch.tensor([peak, sorted(seconds)[len(seconds) // 2], loading, time.process_time()])
    largest = gs.comm.all_reduce(mine, "max").tolist()
    result = dict(zip(("peak_mb", "seconds", "loading", "cpu"), largest, strict=True))
    if gs.rank() == 0:
        sys.stdout.write(json.dumps({**result, "losses": losses}) + "\n")
        sys.stdout.flush()
    gs.shutdown_comms()


def our_environment(threads: int) -> dict[str, str]:
    """Variables of a process that runs this package as this one would."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def compare(graph: Path, args: argparse.Namespace) -> list[str]:
    """Both partitions in turn, a table and the ratios."""
    folders = {name: graph.with_suffix(f".{name}-{args.parts}") for name in ("ours", "dgl")}
    options = ["--parts", str(args.parts), "--input", str(graph), "--output", str(folders["ours"])]
    peer_options = [str(graph), str(args.parts), str(folders["dgl"])]
    sides = [
        Side(
            "DGL",
            [PEER_PYTHON, str(PEERS / "dgl_partition.py"), *peer_options],
            {"OMP_NUM_THREADS": str(args.threads)},
        ),
        Side(
            "graphshard",
            [sys.executable, HERE, "--work", "partition", *options],
            our_environment(args.threads),
        ),
    ]
    results: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for number in range(args.rounds):
        for side in sides:
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)
            results[side.name].append(run_side(side))
            sys.stderr.write(f"round {number + 1} {side.name}: {results[side.name][-1]}\n")
    columns = {"seconds": ".1f", "cpu": ".1f", "peak_mb": ".0f", "cut": ".0f"}
    medians = {name: {key: median(r, key) for key in columns} for name, r in results.items()}
    rows = [
        [name, *(f"{found[key]:{form}}" for key, form in columns.items())]
        for name, found in medians.items()
    ]
    peer, mine = medians["DGL"], medians["graphshard"]
    rows.append(["graphshard / DGL", *(f"{mine[key] / peer[key]:.2f}x" for key in columns)])
    header = ["", "s to partition and write", "CPU s of the process", "peak MB", "edges cut"]
    return ["## Partition", "", *markdown_table(header, rows), ""]


def training(graph: Path, args: argparse.Namespace) -> list[str]:
    """A worker per part, every model once."""
    parts = graph.with_suffix(f".ours-{args.parts}") / "g.json"
    if not parts.exists():
        work = ["--work", "partition", "--input", str(graph), "--output", str(parts.parent)]
        command = [sys.executable, HERE, *work, "--parts", str(args.parts)]
        run_side(Side("partition", command, our_environment(args.threads)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={args.parts}", HERE, "--work", "train", "--input", str(parts)]
    rows = []
    for model in args.models:
        options = ["--models", model, "--epochs", str(args.epochs)]
        side = Side(model, [*launch, *options], our_environment(1), timeout=7200)
        found = run_side(side)
        sys.stderr.write(f"{model}: {found}\n")
        rows.append(
            [
                model,
                f"{found['loading']:.1f}",
                f"{found['seconds']:.1f}",
                f"{found['peak_mb']:.0f}",
                " ".join(f"{loss:.4f}" for loss in found["losses"]),
            ]
        )
    header = ["3 layers", "s to load", "s per epoch", "peak MB of a worker", "losses"]
    title = f"## Full batch, {args.parts} workers of one thread"
    return [title, "", *markdown_table(header, rows), ""]


def main() -> None:
    """Read the arguments; run as the benchmark, or as one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--question", choices=["partition", "train"], help="by default both")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=12_500_000, help="pairs drawn")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of a partitioning process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--work", choices=["partition", "train"], help=argparse.SUPPRESS)
    parser.add_argument("--input", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work == "partition":
        partition(args.input, args.parts, args.output)
        return
    if args.work == "train":
        train(str(args.input), args.models[0], args.epochs)
        return
    graph = community_graph(args.folder, args.nodes, args.edges)
    with np.load(graph) as arrays:
        num_edges = len(arrays["src"])
    body = [
        f"{args.nodes:,} nodes, {num_edges:,} edges, 128 features, {args.parts} parts; medians of "
        f"{args.rounds} rounds in which the sides run in turn.",
        "",
    ]
    if args.question != "train":
        body += compare(graph, args)
    if args.question != "partition":
        body += training(graph, args)
    if args.write:
        write_result("partition", "A large graph in parts", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
