# SPDX-License-Identifier: Apache-2.0
"""One attention layer, forward and backward, against DGL on the same graph: time and memory.

    python benchmarks/attention.py                    # gat, gatv2, dotgat, agnn; prints a table
    python benchmarks/attention.py --layer gat --rounds 5
    python benchmarks/attention.py --write            # and a file of results

200,000 nodes, 4.07 million edges, 128 features, 4 heads of 32 (AGNN: one of 128), projections
included. Both sides have the same parameters, and their outputs are compared. Times are those of
the processor, which other programs on the machine disturb less. DGL 1.1.3 runs in the environment
that GRAPHSHARD_PEER_PYTHON names.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import (
    PEER_PYTHON,
    PEERS,
    ROOT,
    Side,
    community_graph,
    markdown_table,
    median,
    run_in_turn,
    write_result,
)

HERE = str(Path(__file__).resolve())
LAYERS = ("gat", "gatv2", "dotgat", "agnn")


def work(path: str, layer: str, threads: int, repeats: int, dtype: str, by_edges: bool) -> None:
    """This package: print one line of JSON, as peers/dgl_attention.py does."""
    import graphshard
    from graphshard import nn

    torch.set_num_threads(threads)
    arrays = np.load(path)
    ends = torch.from_numpy(arrays["src"]).int(), torch.from_numpy(arrays["dst"]).int()
    graph = graphshard.graph(ends, num_nodes=len(arrays["y"]))
    adjacency = graph.adjacency()
    adjacency.csc(), adjacency.csr()
    x = torch.from_numpy(arrays["x"]).requires_grad_()
    torch.manual_seed(0)
    options: dict[str, Any] = {"allow_zero_in_degree": True}
    made = {
        "gat": lambda: nn.GATConv(128, 32, 4, **options),
        "gatv2": lambda: nn.GATv2Conv(128, 32, 4, **options),
        "dotgat": lambda: nn.DotGatConv(128, 32, 4, **options),
        "agnn": lambda: nn.AGNNConv(**options),
    }[layer]()
    if by_edges:
        graph._attend = lambda relation, attention: None  # type: ignore[method-assign]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, total = [], 0.0
    for _ in range(repeats + 1):
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            out = made(graph, x)
        out.backward(torch.ones_like(out))
        seconds.append(time.process_time() - start)
        total = float(out.detach().double().abs().sum())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {"seconds": statistics.median(seconds[1:]), "peak_mb": (peak - before) / 1024}
    sys.stdout.write(json.dumps(result | {"sum": total}) + "\n")


def compare(path: str, layer: str, threads: int, rounds: int, repeats: int) -> list[list[Any]]:
    """Rows of the table for one layer."""
    ours = [sys.executable, HERE, "--work", path, "--layer", layer]
    ours += ["--threads", str(threads), "--repeats", str(repeats)]
    peer = [PEER_PYTHON, str(PEERS / "dgl_attention.py"), path, layer, str(threads), str(repeats)]
    environment = {"OMP_NUM_THREADS": str(threads)}
    sides = [
        Side("DGL", peer, environment),
        Side("graphshard", ours, environment),
        Side("graphshard, by edges", [*ours, "--by-edges"], environment),
        Side("graphshard, autocast bfloat16", [*ours, "--dtype", "bfloat16"], environment),
    ]
    results = run_in_turn(sides, rounds)
    sums = [median(results[side.name], "sum") for side in sides[:3]]
    if max(sums) > 1.001 * min(sums):
        raise RuntimeError(f"the sides compute different outputs of {layer}: {sums}")
    seconds = {side.name: median(results[side.name], "seconds") for side in sides}
    peaks = {side.name: median(results[side.name], "peak_mb") for side in sides}
    return [
        [
            layer,
            name,
            f"{seconds[name]:.2f}",
            f"{seconds[name] / seconds['DGL']:.3f}x",
            f"{peaks[name]:.0f}",
            f"{peaks[name] / peaks['DGL']:.2f}x",
        ]
        for name in seconds
    ]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layer", action="append", choices=LAYERS, help="default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs in each process")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="pairs drawn")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--by-edges", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.layer[0], args.threads, args.repeats, args.dtype, args.by_edges)
        return
    path = str(community_graph(args.folder, args.nodes, args.edges))
    rows = []
    for layer in args.layer or LAYERS:
        rows += compare(path, layer, args.threads, args.rounds, args.repeats)
    header = ["layer", "side", "CPU seconds", "against DGL", "peak MB", "against DGL"]
    body = [
        f"Forward and backward of one layer, {args.nodes:,} nodes, 128 features, "
        f"4 heads of 32, {args.threads} thread(s); medians of {args.rounds} rounds in which the "
        "sides run in turn. Peaks are above graph and input.",
        "",
        *markdown_table(header, rows),
    ]
    if args.write:
        write_result("attention", "Attention layers against DGL 1.1.3", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
