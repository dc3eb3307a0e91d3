# SPDX-License-Identifier: Apache-2.0
"""Does the memory of a worker fall as 1/P? Full batch on a dense random graph, P = 1, 2, 4, 8.

Every worker is a process of its own. Its peak resident memory during training is taken above that
of an idle worker: one that imported everything, joined the group and ran one tiny epoch. The graph
is random and dense, so every worker needs every row of every other one: nothing is won by a good
cut, and only the order of work can keep memory down.

    python benchmarks/memory.py --nodes 100000 --degree 20 --write

writes benchmarks/results/memory_<model>_cpu_<date>.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

RESULTS = Path(__file__).parent / "results"
WORKERS = (1, 2, 4, 8)
ROUNDS = 2
# glibc keeps freed blocks of up to 32 MiB for later; a fixed threshold gives them back at once, so
# that resident memory is what is in use.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_model(model: str, width: int, hidden: int, classes: int) -> torch.nn.ModuleList:
    """Three layers of one kind."""
    from graphshard.nn import GATConv, SAGEConv

    widths = [width, hidden, hidden, classes]
    pairs = list(zip(widths, widths[1:], strict=False))
    if model == "sage":
        return torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in pairs)
    return torch.nn.ModuleList(
        GATConv(a, b // 4 if i < 2 else b, 4, allow_zero_in_degree=True)
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


def work(parts: str, tiny: str, model: str, mode: str, idle: bool) -> None:
    """One worker: prints a line of JSON with its peak above nothing, in bytes."""
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
    if not idle:
        train(parts, 2)
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
    from graphshard.distributed import partition_graph

    graph = random_graph(nodes, edges, seed=0, feat_dim=128, num_classes=40)
    partition_graph(
        graph, "g", num_parts, str(folder), part_method="random", reorder=False, quiet=True
    )
    return str(folder / "g.json")


def measure(nodes: int, degree: int, model: str, mode: str) -> list[dict[str, Any]]:
    """Peak of the largest worker for each number of workers."""
    rows = []
    for workers in WORKERS:
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
            for _ in range(ROUNDS):
                common = ["--work", parts, "--tiny", tiny, "--model", model, "--mode", mode]
                idle = launch(workers, [*common, "--idle"])
                busy = launch(workers, common)
                peaks.append(max(b - i for b, i in zip(busy, idle, strict=True)))
            rows.append({"workers": workers, "idle": max(idle), "peak": min(peaks)})
            sys.stderr.write(f"P={workers}: {rows[-1]['peak'] / 2**20:.0f} MiB above idle\n")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The result as Markdown."""
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
    return "\n".join(lines)


def main() -> None:
    """Read the arguments; run as the benchmark, or as one of its parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--model", choices=["sage", "gat"], default="sage")
    parser.add_argument("--mode", choices=["sequential", "oneshot"], default="sequential")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", help=argparse.SUPPRESS)
    parser.add_argument("--idle", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--partition", help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.partition:
        partition(args.nodes, args.nodes * args.degree, args.parts, Path(args.partition))
        return
    if args.work:
        work(args.work, args.tiny, args.model, args.mode, args.idle)
        return
    found = table(measure(args.nodes, args.degree, args.model, args.mode))
    settings = " ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
    text = "\n".join(
        [
            f"# Memory per worker, full batch, {args.model}, {args.mode} aggregation",
            "",
            f"Dense random graph, {args.nodes:,} nodes, {args.nodes * args.degree:,} edges, random "
            "parts, 128 features, 3 layers, hidden 128, float32. Smallest of "
            f"{ROUNDS} runs; the largest worker of each.",
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
        name = f"memory_{args.model}_{args.mode}_cpu_{datetime.date.today()}.md"
        (RESULTS / name).write_text(text)


if __name__ == "__main__":
    main()
