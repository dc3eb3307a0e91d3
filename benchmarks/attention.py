# SPDX-License-Identifier: Apache-2.0
"""One attention layer, forward and backward, against DGL and PyG on one graph: time and memory.

    python benchmarks/attention.py                    # gat, gatv2, dotgat, agnn; prints a table
    python benchmarks/attention.py --layer gat --rounds 5
    python benchmarks/attention.py --write            # and a file of results

200,000 nodes, 4.07 million edges, 128 features, 4 heads of 32 (AGNN: one of 128), projections
included. All sides have the same parameters, and their outputs are compared. Times are those of
the processor, which other programs on the machine disturb less. DGL 1.1.3 and PyG run in the
environment that GRAPHSHARD_PEER_PYTHON names; without PyG its rows are left out. PyG has no layer
of dotgat's mathematics: its TransformerConv projects three times. It stores messages edge by edge,
up to 13 GB of them here, and where they are missing its row says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import (
    NO_PYG,
    PEER_PYTHON,
    PEERS,
    ROOT,
    Side,
    community_graph,
    markdown_table,
    median,
    peer_has,
    run_in_turn,
    split_failed,
    write_result,
)
from peers._peak import peak_mb

HERE = str(Path(__file__).resolve())
LAYERS = ("gat", "gatv2", "dotgat", "agnn")
#: Layers that PyG has, too.
IN_PYG = ("gat", "gatv2", "agnn")


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
    before = peak_mb()
    seconds, total = [], 0.0
    for _ in range(repeats + 1):
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            out = made(graph, x)
        out.backward(torch.ones_like(out))
        seconds.append(time.process_time() - start)
        total = float(out.detach().double().abs().sum())
    peak = peak_mb()
    result = {"seconds": statistics.median(seconds[1:]), "peak_mb": peak - before}
    sys.stdout.write(json.dumps(result | {"sum": total}) + "\n")


def compare(
    path: str, layer: str, threads: int, rounds: int, repeats: int, have_pyg: bool
) -> tuple[list[list[Any]], list[str]]:
    """Rows of the table for one layer, and what to say of those without numbers.

    Raises:
        RuntimeError: The sides compute different outputs.
    """
    ours = [sys.executable, HERE, "--work", path, "--layer", layer]
    ours += ["--threads", str(threads), "--repeats", str(repeats)]
    numbers = [path, layer, str(threads), str(repeats)]
    environment = {"OMP_NUM_THREADS": str(threads)}
    sides = [
        Side("DGL", [PEER_PYTHON, str(PEERS / "dgl_attention.py"), *numbers], environment),
        Side("graphshard", ours, environment),
        Side("graphshard, by edges", [*ours, "--by-edges"], environment),
        Side("graphshard, autocast bfloat16", [*ours, "--dtype", "bfloat16"], environment),
    ]
    if have_pyg and layer in IN_PYG:
        command = [PEER_PYTHON, str(PEERS / "pyg_attention.py"), *numbers]
        sides.insert(1, Side("PyG", command, environment, may_fail=True))
    results = run_in_turn(sides, rounds)
    done, failed = split_failed(results)
    sums = [median(runs, "sum") for name, runs in done.items() if "bfloat16" not in name]
    if max(sums) > 1.001 * min(sums):
        raise RuntimeError(f"the sides compute different outputs of {layer}: {sums}")
    seconds = {name: median(runs, "seconds") for name, runs in done.items()}
    peaks = {name: median(runs, "peak_mb") for name, runs in done.items()}
    rows = [
        [
            layer,
            name,
            f"{seconds[name]:.2f}",
            f"{seconds[name] / seconds['DGL']:.3f}x",
            f"{peaks[name]:.0f}",
            f"{peaks[name] / peaks['DGL']:.2f}x",
        ]
        if name in done
        else [layer, name, "cannot run", "", "", ""]
        for name in results
    ]
    return rows, [f"{name} cannot run {layer}: {why}" for name, why in failed.items()]


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
    have_pyg = peer_has("torch_geometric")
    rows, notes = [], []
    for layer in args.layer or LAYERS:
        found = compare(path, layer, args.threads, args.rounds, args.repeats, have_pyg)
        rows += found[0]
        notes += found[1]
    if not have_pyg:
        notes.append(NO_PYG)
    header = ["layer", "side", "CPU seconds", "against DGL", "peak MB", "against DGL"]
    body = [
        f"Forward and backward of one layer, {args.nodes:,} nodes, 128 features, "
        f"4 heads of 32, {args.threads} thread(s); medians of {args.rounds} rounds in which the "
        "sides run in turn. Peaks are above graph and input.",
        "",
        *markdown_table(header, rows),
        *(line for note in notes for line in ("", note)),
    ]
    if args.write:
        write_result("attention", "Attention layers against DGL 1.1.3 and PyG", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
