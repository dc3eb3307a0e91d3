# SPDX-License-Identifier: Apache-2.0
"""Full-batch epochs against DGL and PyG in one process, and against other numbers of workers.

    python benchmarks/full_batch.py --model sage
    python benchmarks/full_batch.py --write             # SAGE and GAT, and a file of results

200,000 nodes, 4.07 million edges, 3 layers, hidden 128, float32; all sides start from the same
weights, and the losses are compared. DGL 1.1.3 and PyG run in the environment that
GRAPHSHARD_PEER_PYTHON names; without PyG its row is left out. PyG's GAT stores a message per edge
and layer: on the large graph that takes some 16 GB, and where they are missing its row says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
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


def make_layers(model: str, width: int, classes: int) -> torch.nn.ModuleList:
    """Three layers of one kind; initial weights depend on torch's seed alone."""
    from graphshard.nn import GATConv, SAGEConv

    widths = [width, 128, 128, classes]
    pairs = list(zip(widths, widths[1:], [F.relu, F.relu, None], strict=False))
    if model == "sage":
        return torch.nn.ModuleList(SAGEConv(a, b, "mean", activation=act) for a, b, act in pairs)
    return torch.nn.ModuleList(
        GATConv(a, b // 4 if act else b, 4, activation=act, allow_zero_in_degree=True)
        for a, b, act in pairs
    )


def forward(model: str, layers: Any, graph: Any, h: torch.Tensor) -> torch.Tensor:
    """Output of the network on every node."""
    for i, layer in enumerate(layers):
        h = layer(graph, h)
        if model == "gat":
            h = h.flatten(1) if i < 2 else h.mean(1)
    return h


def work(parts: str, model: str, mode: str, threads: int, epochs: int, bfloat16: bool) -> None:
    """One worker; rank 0 prints a line of JSON."""
    import graphshard as gs

    torch.set_num_threads(threads)
    gs.initialize_comms()
    data = gs.load_dgl_partition_data(parts, gs.rank())
    graph = gs.construct_full_graph(data, mode=mode)  # type: ignore[arg-type]
    x, y = data.node_features["_N/x"].clone(), data.node_features["_N/y"]
    train = data.node_features["_N/train"].nonzero().view(-1)
    num_train = int(gs.comm.all_reduce(torch.tensor([train.numel()])))
    classes = int(gs.comm.all_reduce(y.max().view(1), "max")) + 1
    torch.manual_seed(0)
    layers = make_layers(model, x.shape[1], classes)
    gs.sync_params(layers)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    low = torch.autocast("cpu", torch.bfloat16) if bfloat16 else contextlib.nullcontext()
    seconds, losses = [], []
    for _ in range(epochs):
        start = time.perf_counter()
        with low:
            h = forward(model, layers, graph, x)
            loss = F.cross_entropy(h[train].float(), y[train], reduction="sum") / num_train
        optimizer.zero_grad()
        loss.backward()
        gs.gather_grads(layers)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(float(gs.comm.all_reduce(loss.detach().view(1))))
    peak = torch.tensor([peak_mb()])
    middle = torch.tensor([sorted(seconds)[len(seconds) // 2] if seconds else 0.0])
    peak, middle = gs.comm.all_reduce(peak, "max"), gs.comm.all_reduce(middle, "max")
    if gs.rank() == 0:
        result = {"seconds": float(middle), "peak_mb": float(peak), "losses": losses}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    gs.shutdown_comms()


def our_parts(graph: Path, num_parts: int) -> str:
    """This package's partition of the graph, made once."""
    import graphshard
    from graphshard.partition import partition_graph

    folder = graph.with_suffix(f".parts-{num_parts}")
    if not (folder / "g.json").exists():
        arrays = np.load(graph)
        whole = graphshard.graph(
            (torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])),
            num_nodes=len(arrays["y"]),
        )
        for name in ("x", "y", "train"):
            whole.ndata[name] = torch.from_numpy(arrays[name])
        partition_graph(whole, "g", num_parts, str(folder), balance_edges=True, quiet=True)
    return str(folder / "g.json")


def ours(
    graph: Path,
    model: str,
    workers: int,
    threads: int,
    epochs: int,
    mode: str = "auto",
    bfloat16: bool = False,
) -> Side:
    """This package with some workers."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--work", our_parts(graph, workers), "--model", model, "--mode", mode]
    options += ["--threads", str(threads), "--epochs", str(epochs)]
    kind = (", bfloat16 autocast" if bfloat16 else "") + ("" if mode == "auto" else f", {mode}")
    return Side(
        f"graphshard, {workers} x {threads} thread(s){kind}{'' if epochs else ', idle'}",
        [*launch, f"--nproc-per-node={workers}", HERE, *options, *["--bfloat16"] * bfloat16],
        {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
    )


def dgl(graph: Path, model: str, epochs: int) -> Side:
    """DGL, one process with two threads; without epochs, an idle one."""
    command = [PEER_PYTHON, str(PEERS / "dgl_full.py"), str(graph), model, "2", str(epochs)]
    name = "DGL, 1 x 2 threads" if epochs else "DGL, idle"
    return Side(name, command + ([] if epochs else ["idle"]), {"OMP_NUM_THREADS": "2"})


def pyg(graph: Path, model: str, epochs: int) -> Side:
    """PyG, likewise; it may lack the memory for a message per edge."""
    command = [PEER_PYTHON, str(PEERS / "pyg_full.py"), str(graph), model, "2", str(epochs)]
    name = "PyG, 1 x 2 threads" if epochs else "PyG, idle"
    more = [] if epochs else ["idle"]
    is_slow = model == "gat" and epochs > 0
    return Side(name, command + more, {"OMP_NUM_THREADS": "2"}, may_fail=True, once=is_slow)


def compare(graph: Path, model: str, rounds: int, epochs: int) -> list[str]:
    """All sides of one model."""
    peer, alone = dgl(graph, model, epochs), ours(graph, model, 1, 2, epochs)
    two, eight = ours(graph, model, 2, 1, epochs), ours(graph, model, 8, 1, epochs)
    low = ours(graph, model, 2, 1, epochs, bfloat16=True)
    thrifty = ours(graph, model, 2, 1, epochs, mode="sequential")
    no_dgl, no_two = dgl(graph, model, 0), ours(graph, model, 2, 1, 0)
    sides, idle = [peer, alone, two, eight, low, thrifty], [no_dgl, no_two]
    others = [(peer, no_dgl)]
    have_pyg = peer_has("torch_geometric")
    if have_pyg:
        others.append((pyg(graph, model, epochs), pyg(graph, model, 0)))
        # Last: after 16 GB of it the system has few large pages for who comes next.
        sides.append(others[1][0])
        idle.append(others[1][1])
    done, failed = split_failed(run_in_turn([*idle, *sides], rounds))
    seconds = {s.name: median(done[s.name], "seconds") for s in sides if s.name in done}
    peak = {name: median(runs, "peak_mb") for name, runs in done.items()}
    base, ours_two = seconds[peer.name], seconds[two.name]
    rows = [
        [
            s.name,
            f"{seconds[s.name]:.2f}",
            f"{seconds[s.name] / base:.2f}x",
            f"{seconds[s.name] / ours_two:.2f}x",
            f"{peak[s.name]:.0f}",
            f"{done[s.name][0]['losses'][-1]:.4f}",
        ]
        if s.name in done
        else [s.name, "cannot run", "", "", "", ""]
        for s in sides
    ]
    header = ["", "s per epoch", "of DGL", "of 2 workers", "peak MB of a process", "last loss"]
    ours_above = [peak[side.name] - peak[no_two.name] for side in (two, thrifty)]
    notes = []
    for side, no_side in others:
        if side.name in peak and no_side.name in peak:
            above = peak[side.name] - peak[no_side.name]
            notes.append(
                f"Peak memory above an idle process, one of 2 workers against {side.name[:3]} "
                f"({above:.0f} MB): {ours_above[0] / above:.2f}x ({ours_above[0]:.0f} MB), in "
                f"sequential mode {ours_above[1] / above:.2f}x ({ours_above[1]:.0f} MB)."
            )
    cost = ours_two / seconds[alone.name]
    notes.append(f"2 workers cost {cost:.2f}x of one process with 2 threads.")
    notes += [f"{name} cannot run: {why}" for name, why in failed.items()]
    notes += [f"{side.name} ran once." for side in sides if side.once and side.name in done]
    if not have_pyg:
        notes.append(NO_PYG)
    lines = [f"## {model}", "", *markdown_table(header, rows), ""]
    return lines + [line for note in notes for line in (note, "")]


def main() -> None:
    """Read the arguments; run as the benchmark, or as one of its workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=["sage", "gat"])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="pairs drawn")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--bfloat16", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.model, args.mode, args.threads, args.epochs, args.bfloat16)
        return
    graph = community_graph(args.folder, args.nodes, args.edges)
    body = [
        f"{args.nodes:,} nodes; medians of {args.rounds} rounds in which the sides run in turn.",
        "",
    ]
    for model in [args.model] if args.model else ["sage", "gat"]:
        body += compare(graph, model, args.rounds, args.epochs)
    if args.write:
        write_result("full_batch", "Full-batch epochs against DGL and PyG", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
