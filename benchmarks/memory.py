# SPDX-License-Identifier: Apache-2.0
"""Does the memory of a worker fall as 1/P? Full batch on a dense random graph, P = 1, 2, 4, 8.

Every worker is a process of its own. Its peak resident memory during training is taken above that
of an idle worker: one that imported everything, joined the group and ran one tiny epoch. The graph
is random and dense, so every worker needs every row of every other one: nothing is won by a good
cut, and only the order of work can keep memory down.

    python benchmarks/memory.py --nodes 100000 --degree 20 --write

writes benchmarks/results/memory_<model>_cpu_<date>.md. And does it depend on edges x heads?

    python benchmarks/memory.py --question edges --model gat --write

trains 2 workers on graphs of as many nodes and more and more edges. What a worker takes there above
one that has the same graph and does not train must not grow by a number per edge and head.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers._peak import peak_mb

HEADS = 4
RESULTS = Path(__file__).parent / "results"
WORKERS = (1, 2, 4, 8)
ROUNDS = 2
# glibc keeps freed blocks of up to 32 MiB for later, and this package large ones; so that resident
# memory is what is in use, both give them back at once here.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
    "GRAPHSHARD_KEEP_MEMORY": "0",
}


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return int(peak_mb() * 2**20)


def make_model(model: str, width: int, hidden: int, classes: int) -> torch.nn.ModuleList:
    """Three layers of one kind."""
    from graphshard.nn import GATConv, SAGEConv

    widths = [width, hidden, hidden, classes]
    pairs = list(zip(widths, widths[1:], strict=False))
    if model == "sage":
        return torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in pairs)
    return torch.nn.ModuleList(
        GATConv(a, b // HEADS if i < 2 else b, HEADS, allow_zero_in_degree=True)
        for i, (a, b) in enumerate(pairs)
    )


def epoch(graph: Any, layers: Any, x: torch.Tensor, y: torch.Tensor, model: str) -> float:
    """One step of training on all nodes; returns the loss."""
    import graphshard

    h = x
    for i, layer in enumerate(layers):
        h = layer(graph, h)
        if model == "gat":
            h = h.flatten(1) if i < 2 else h.mean(1)
        if i < 2:
            h = F.relu(h)
    loss = F.cross_entropy(h, y, reduction="sum") / max(int(graph.world_size * y.numel()), 1)
    layers.zero_grad()
    loss.backward()
    graphshard.gather_grads(layers)
    with torch.no_grad():
        for p in layers.parameters():
            p -= 0.01 * p.grad
    return float(loss.detach())


def work(parts: str, tiny: str, model: str, mode: str, epochs: int) -> None:
    """One worker: prints a line of JSON with its peak above nothing, in bytes.

    Args:
        parts: The graph; "" for none.
        tiny: A small graph, that is trained on first.
        model: Kind of layers.
        mode: Kind of aggregation.
        epochs: On the graph.
    """
    import graphshard

    torch.set_num_threads(1)
    graphshard.initialize_comms()
    rank = graphshard.rank()
    torch.manual_seed(0)

    def train(path: str, epochs: int) -> None:
        data = graphshard.load_dgl_partition_data(path, rank)
        graph = graphshard.construct_full_graph(data, mode=mode)
        x, y = data.node_features["_N/feat"], data.node_features["_N/label"]
        layers = make_model(model, x.shape[1], 128, 40)
        for _ in range(epochs):
            epoch(graph, layers, x, y, model)

    train(tiny, 1)
    if parts:
        train(parts, epochs)
    sys.stdout.write(json.dumps({"rank": rank, "peak": peak_bytes()}) + "\n")
    sys.stdout.flush()
    graphshard.shutdown_comms()


def launch(num_workers: int, arguments: list[str]) -> list[int]:
    """Peaks of ``num_workers`` workers, by rank."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(num_workers), __file__, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1800, env=environment, check=False
    )
    lines = [json.loads(s) for s in done.stdout.splitlines() if s.startswith('{"rank"')]
    if done.returncode or len(lines) != num_workers:
        raise RuntimeError(f"workers failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [line["peak"] for line in sorted(lines, key=lambda line: line["rank"])]


def partition(nodes: int, edges: int, num_parts: int, folder: Path) -> str:
    """Write a random graph in random parts; returns the path of the JSON."""
    from graphshard.data import random_graph
    from graphshard.partition import partition_graph

    graph = random_graph(nodes, edges, seed=0, feat_dim=128, num_classes=40)
    partition_graph(
        graph, "g", num_parts, str(folder), part_method="random", reorder=False, quiet=True
    )
    return str(folder / "g.json")


def measure(
    nodes: int, degree: int, model: str, mode: str, workers: int, has_graph: bool
) -> tuple[int, int]:
    """Peak of an idle worker, and of the largest busy one above an idle one.

    Args:
        nodes: In the graph.
        degree: Edges, by node.
        model: Kind of layers.
        mode: Kind of aggregation.
        workers: How many.
        has_graph: Whether idle workers have the graph, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        # In processes of their own, so that partitioning leaves nothing behind here.
        parts = str(Path(folder) / "parts" / "g.json")
        tiny = str(Path(folder) / "tiny" / "g.json")
        for path, n in ((parts, nodes), (tiny, 64)):
            subprocess.run(
                [sys.executable, __file__, "--partition", str(Path(path).parent),
                 "--nodes", str(n), "--degree", str(degree), "--parts", str(workers)],
                check=True, timeout=1800,
            )  # fmt: skip
        peaks = []
        common = ["--tiny", tiny, "--model", model, "--mode", mode, "--work"]
        for _ in range(ROUNDS):
            idle = launch(workers, [*common, parts if has_graph else "", "--epochs", "0"])
            busy = launch(workers, [*common, parts, "--epochs", "2"])
            peaks.append(max(b - i for b, i in zip(busy, idle, strict=True)))
    sys.stderr.write(f"P={workers}, degree {degree}: {min(peaks) / 2**20:.0f} MiB above idle\n")
    return max(idle), min(peaks)


def by_edges(args: argparse.Namespace) -> list[str]:
    """Lines of a table: peaks for more and more edges."""
    lines = [
        "| edges | peak above idle, MiB | more than with half of them | "
        f"a number per edge and each of {HEADS} heads would be |",
        "| --- | --- | --- | --- |",
    ]
    before = 0
    for degree in (args.degree, 2 * args.degree, 4 * args.degree):
        _, peak = measure(args.nodes, degree, args.model, args.mode, 2, True)
        more = f"{(peak - before) / 2**20:.0f}" if before else ""
        added = args.nodes * degree // 2 // 2 * HEADS * 4 / 2**20  # those of one of two workers
        lines.append(
            f"| {args.nodes * degree:,} | {peak / 2**20:.0f} | {more} | "
            f"{f'{added:.0f} more' if before else ''} |"
        )
        before = peak
    return lines


def by_workers(args: argparse.Namespace) -> list[str]:
    """Lines of a table: peaks for more and more workers."""
    rows = []
    for workers in WORKERS:
        idle, peak = measure(args.nodes, args.degree, args.model, args.mode, workers, False)
        rows.append({"workers": workers, "idle": idle, "peak": peak})
    first = rows[0]["peak"]
    lines = [
        "| workers | idle worker, MiB | peak above idle, MiB | times P, against P = 1 |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r['workers']} | {r['idle'] / 2**20:.0f} | {r['peak'] / 2**20:.0f} | "
        f"{r['peak'] * r['workers'] / first:.2f} |"
        for r in rows
    ]
    return lines


def main() -> None:
    """Read the arguments; run as the benchmark, or as one of its parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--model", choices=["sage", "gat"], default="sage")
    parser.add_argument("--mode", choices=["sequential", "oneshot"], default="sequential")
    parser.add_argument("--question", choices=["workers", "edges"], default="workers")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--partition", help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.partition:
        partition(args.nodes, args.nodes * args.degree, args.parts, Path(args.partition))
        return
    if args.work is not None:
        work(args.work, args.tiny, args.model, args.mode, args.epochs)
        return
    found = "\n".join(by_edges(args) if args.question == "edges" else by_workers(args))
    by_edge = args.question == "edges"
    size = (
        "2 workers, which have the graph when idle, too"
        if by_edge
        else (f"{args.nodes * args.degree:,} edges")
    )
    settings = " ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
    text = "\n".join(
        [
            f"# Memory per worker, full batch, {args.model}, {args.mode} aggregation",
            "",
            f"Dense random graph, {args.nodes:,} nodes, {size}, random parts, 128 features, 3 "
            f"layers, hidden 128, float32. Smallest of {ROUNDS} runs; the largest worker of each.",
            "",
            found,
            "",
            f"Freed blocks go back to the system at once: {settings}.",
            "",
            f"Command: `python {' '.join(['benchmarks/memory.py', *sys.argv[1:]])}`  ",
            f"{datetime.date.today()}, Python {platform.python_version()}, torch "
            f"{torch.__version__}, {os.cpu_count()} cores, one thread per worker.",
            "",
        ]
    )
    sys.stdout.write(text)
    if args.write:
        name = f"memory_{args.model}_{args.mode}{'_edges' if by_edge else ''}_cpu"
        name = f"{name}_{datetime.date.today()}.md"
        (RESULTS / name).write_text(text)


if __name__ == "__main__":
    main()
