# SPDX-License-Identifier: Apache-2.0
"""Sampled GraphSAGE against DGL in one process and against DistDGL, on the same graph.

    python benchmarks/sampling.py --question draw          # sampling and blocks, one process
    python benchmarks/sampling.py --question fetch         # and features, 2 workers, vs DistDGL
    python benchmarks/sampling.py --question epoch         # the whole training epoch
    python benchmarks/sampling.py --question growth        # drawing alone, as graphs grow
    python benchmarks/sampling.py --write                  # the first three, and a file of results

Fanouts 15, 10, 5 (15 on the input side on both sides), 1000 seeds per worker and step, 200,000
nodes, 4.07 million edges, 128 features. DGL 1.1.3 runs in the environment that
GRAPHSHARD_PEER_PYTHON names; DistDGL runs as two network namespaces and needs root and iproute2.

``growth`` has graphs of 0.5, 2 and 8 million edges between nodes that are drawn evenly, 16 a node:
no order of the nodes helps, as in a graph that was shuffled. It counts CPU seconds of one thread;
``--before PYTHON``, of an environment with an older version, runs in turn.
"""

from __future__ import annotations

import argparse
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
    PEER_PYTHON,
    PEERS,
    ROOT,
    Side,
    community_graph,
    markdown_table,
    median,
    run_in_turn,
    run_side,
    write_result,
)

HERE = str(Path(__file__).resolve())
FANOUTS = [15, 10, 5]
BATCH = 1000
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Sage(torch.nn.Module):
    """Three layers of GraphSAGE; ``hidden`` 0 stands for no model."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        from graphshard.nn import SAGEConv

        widths = [width, hidden, hidden, classes]
        self.layers = torch.nn.ModuleList(
            SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:], strict=False)
        )

    def forward(self, blocks: Any, h: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            h = layer(blocks[i], h)
            h = F.relu(h) if i < 2 else h
        return h


def work_alone(path: str, hidden: int, threads: int, epochs: int) -> dict[str, Any]:
    """This package in one process, on the graph as it is."""
    import graphshard
    from graphshard.dgl.dataloading import DataLoader, NeighborSampler

    torch.set_num_threads(threads)
    arrays = np.load(path)
    graph = graphshard.graph(
        (torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])),
        num_nodes=len(arrays["y"]),
    )
    x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    train = torch.from_numpy(arrays["train"]).nonzero().view(-1)
    loader = DataLoader(graph, train, NeighborSampler(FANOUTS), batch_size=BATCH, shuffle=True)
    torch.manual_seed(0)
    model, seconds, edges, loss = None, [], 0, torch.tensor(0.0)
    if hidden:
        model = Sage(x.shape[1], hidden, int(y.max()) + 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        start, edges = time.perf_counter(), 0
        for inputs, outputs, blocks in loader:
            edges += sum(block.num_edges() for block in blocks)
            if model is not None:
                loss = F.cross_entropy(model(blocks, x[inputs]), y[outputs])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "edges": edges, "loss": float(loss.detach())}


def work_growing(num_edges: int, epochs: int) -> dict[str, Any]:
    """CPU seconds of 20 batches from an evenly drawn graph; the least of some epochs."""
    import graphshard
    from graphshard.dgl.dataloading import DataLoader, NeighborSampler

    torch.set_num_threads(1)
    num_nodes = num_edges // 16
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    graph = graphshard.graph((ends[0], ends[1]), num_nodes=num_nodes)
    seeds = torch.randperm(num_nodes, generator=generator)[: 20 * BATCH]
    torch.manual_seed(0)
    loader = DataLoader(graph, seeds, NeighborSampler(FANOUTS), batch_size=BATCH)
    seconds, edges = [], 0
    for _ in range(epochs + 1):
        start, edges = time.process_time(), 0
        for _, _, blocks in loader:
            edges += sum(block.num_edges() for block in blocks)
        seconds.append(time.process_time() - start)
    return {"cpu": min(seconds[1:]), "edges": edges}


def work_shared(parts: str, hidden: int, transport: str, epochs: int) -> dict[str, Any]:
    """This package on one rank of several."""
    import graphshard as gs

    torch.set_num_threads(1)
    gs.initialize_comms()
    data = gs.load_dgl_partition_data(parts, gs.rank())
    graph = gs.construct_full_graph(data)
    x, y = data.node_features["_N/x"], data.node_features["_N/y"]
    first = data.node_ranges[data.rank][0]
    train = data.node_features["_N/train"].nonzero().view(-1) + first
    loader = gs.DataLoader(
        graph,
        train,
        gs.DistNeighborSampler(
            FANOUTS, input_node_features={"x": x}, output_node_features={"y": y}
        ),
        BATCH,
        shuffle=True,
        transport=transport,
        map_features=transport == "replicated",
    )
    torch.manual_seed(0)
    classes = int(y.max()) + 1
    model, seconds, waits, edges, loss = None, [], [], 0, torch.tensor(0.0)
    if hidden:
        model = Sage(x.shape[1], hidden, classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        gs.sync_params(model)
    for _ in range(epochs):
        start, edges = time.perf_counter(), 0
        for blocks in loader:
            edges += sum(block.num_edges() for block in blocks)
            if model is not None:
                out = model(blocks, blocks[0].srcdata["x"])
                total = F.cross_entropy(out, blocks[-1].dstdata["y"], reduction="sum")
                loss = total / blocks.num_global_seeds
                optimizer.zero_grad()
                loss.backward()
                gs.gather_grads(model)
                optimizer.step()
        seconds.append(time.perf_counter() - start)
        waits.append(loader.stats().wait_seconds)
    best = int(np.argmin(seconds))
    all_edges = int(gs.comm.all_reduce(torch.tensor([edges])))
    slowest = float(gs.comm.all_reduce(torch.tensor([seconds[best]]), "max"))
    result = {
        "seconds": slowest,
        "edges": all_edges,
        "wait": waits[best] / seconds[best],
        "loss": float(loss.detach()),
    }
    gs.shutdown_comms()
    return result if data.rank == 0 else {}


def our_parts(graph: Path) -> str:
    """This package's partition of the graph into two, made once."""
    import graphshard
    from graphshard.partition import partition_graph

    folder = graph.with_suffix(".parts")
    if not (folder / "g.json").exists():
        arrays = np.load(graph)
        whole = graphshard.graph(
            (torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])),
            num_nodes=len(arrays["y"]),
        )
        for name in ("x", "y", "train"):
            whole.ndata[name] = torch.from_numpy(arrays[name])
        partition_graph(whole, "g", 2, str(folder), balance_edges=True, quiet=True)
    return str(folder / "g.json")


def dgl_parts(graph: Path) -> str:
    """DGL's partition of the graph into two, made once."""
    folder = graph.with_suffix(".dgl-parts")
    if not (folder / "g.json").exists():
        command = [PEER_PYTHON, str(PEERS / "dgl_partition.py"), str(graph), "2", str(folder)]
        run_side(Side("DGL partition", command))
    return str(folder / "g.json")


def dgl_alone(graph: Path, hidden: int, threads: int, epochs: int) -> Side:
    """DGL in one process."""
    command = [PEER_PYTHON, str(PEERS / "dgl_sampled.py"), str(graph)]
    numbers = [str(hidden), str(threads), str(epochs)]
    return Side("DGL, one process", command + numbers, {"OMP_NUM_THREADS": str(threads)})


def distdgl(graph: Path, hidden: int, epochs: int) -> Side:
    """DistDGL, two machines."""
    command = ["bash", str(PEERS / "two_hosts.sh"), PEER_PYTHON, str(PEERS / "distdgl_sampled.py")]
    return Side("DistDGL, 2 + 2 processes", [*command, dgl_parts(graph), str(hidden), str(epochs)])


def ours_alone(graph: Path, hidden: int, threads: int, epochs: int) -> Side:
    """This package in one process."""
    options = ["--work", str(graph), "--hidden", str(hidden), "--threads", str(threads)]
    return Side(
        "graphshard, one process",
        [sys.executable, HERE, *options, "--epochs", str(epochs)],
        {"OMP_NUM_THREADS": str(threads)},
    )


def ours_shared(graph: Path, hidden: int, transport: str, epochs: int) -> Side:
    """This package, two workers over gloo."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--work", our_parts(graph), "--hidden", str(hidden), "--transport", transport]
    return Side(
        f"graphshard, 2 workers, {transport}",
        [*launch, HERE, *options, "--epochs", str(epochs)],
        {**ONE_THREAD, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )


def _edges_per_second(results: list[dict[str, Any]]) -> float:
    rates = [{"rate": r["edges"] / r.get("seconds", r.get("sample_s", 0.0))} for r in results]
    return median(rates, "rate") / 1e6


def draw(graph: Path, rounds: int) -> list[str]:
    """Sampling and block building alone, in one process."""
    rows = []
    for threads in (1, 2):
        peer, ours = dgl_alone(graph, 0, threads, 2), ours_alone(graph, 0, threads, 3)
        results = run_in_turn([peer, ours], rounds)
        theirs, mine = (_edges_per_second(results[side.name]) for side in (peer, ours))
        counts = " / ".join(f"{results[s.name][0]['edges']:,}" for s in (peer, ours))
        rows.append([threads, f"{theirs:.1f}", f"{mine:.1f}", f"{mine / theirs:.2f}x", counts])
    header = ["threads", "DGL, M edges/s", "graphshard, M edges/s", "ratio", "edges per epoch"]
    return ["## Sampling and blocks, one process", "", *markdown_table(header, rows), ""]


def growth(rounds: int, before: str | None) -> list[str]:
    """Drawing alone from graphs of three sizes, and what is left of the rate."""
    sizes = [500_000, 2_000_000, 8_000_000]
    pythons = {"": sys.executable} if before is None else {"before": before, "": sys.executable}
    sides = {
        (name, size): Side(
            f"{name} {size:,}",
            [python, HERE, "--work", "growth", "--edges", str(size), "--epochs", "3"],
            ONE_THREAD,
        )
        for size in sizes
        for name, python in pythons.items()
    }
    results = run_in_turn(list(sides.values()), rounds)
    rows = []
    for name in pythons:
        rates = [
            median([{"rate": r["edges"] / r["cpu"] / 1e6} for r in results[side.name]], "rate")
            for (of, _), side in sides.items()
            if of == name
        ]
        rows += [
            [name or "now", f"{size / 1e6:g}", f"{rate:.1f}", f"{rate / rates[0]:.2f}x"]
            for size, rate in zip(sizes, rates, strict=True)
        ]
    header = ["", "M edges in the graph", "M edges drawn a CPU second", "of the first"]
    return ["## As graphs grow, one thread", "", *markdown_table(header, rows), ""]


def fetch(graph: Path, rounds: int) -> list[str]:
    """Sampling and feature fetch by two workers."""
    sides = [distdgl(graph, 0, 2)]
    sides += [ours_shared(graph, 0, transport, 3) for transport in ("collective", "replicated")]
    results = run_in_turn(sides, rounds)
    rates = {side.name: _edges_per_second(results[side.name]) for side in sides}
    base = rates[sides[0].name]
    rows = [
        [name, f"{rate:.1f}", f"{rate / base:.2f}x", f"{results[name][0]['edges']:,}"]
        for name, rate in rates.items()
    ]
    header = ["", "M edges/s", "against DistDGL", "edges per epoch"]
    note = "collective: no shared memory; replicated: structure and features mapped by both."
    return [
        "## Sampling and features, two workers",
        "",
        *markdown_table(header, rows),
        "",
        note,
        "",
    ]


def epoch(graph: Path, rounds: int, hidden: int) -> list[str]:
    """The whole training epoch."""
    sides = [dgl_alone(graph, hidden, 2, 1), distdgl(graph, hidden, 1)]
    sides += [ours_shared(graph, hidden, how, 1) for how in ("collective", "replicated")]
    results = run_in_turn(sides, rounds)
    seconds = {
        name: median(runs, "seconds" if "seconds" in runs[0] else "epoch_s")
        for name, runs in results.items()
    }
    alone, shared = seconds[sides[0].name], seconds[sides[1].name]
    rows = [
        [
            name,
            f"{value:.1f}",
            f"{value / alone:.2f}x",
            f"{value / shared:.2f}x",
            f"{100 * median(results[name], 'wait'):.1f} %" if "wait" in results[name][0] else "",
        ]
        for name, value in seconds.items()
    ]
    header = ["", "s per epoch", "against DGL", "against DistDGL", "waiting for data"]
    note = (
        "The loaders of graphshard let glibc keep freed memory (GRAPHSHARD_KEEP_MEMORY=0 does "
        "not); the peers run as they come."
    )
    title = f"## Training epoch, hidden {hidden}"
    return [title, "", *markdown_table(header, rows), "", note, ""]


def main() -> None:
    """Read the arguments; run as the benchmark, or as one of its sides."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--question", choices=["draw", "fetch", "epoch", "growth"], action="append")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="pairs drawn")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--before", help="growth: the interpreter of an older version")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--transport", default="", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        if args.work == "growth":
            result = work_growing(args.edges, args.epochs)
        elif args.transport:
            result = work_shared(args.work, args.hidden, args.transport, args.epochs)
        else:
            result = work_alone(args.work, args.hidden, args.threads, args.epochs)
        if result:
            sys.stdout.write(json.dumps(result) + "\n")
        return
    questions = args.question or ["draw", "fetch", "epoch"]
    if questions == ["growth"]:
        body = growth(args.rounds, args.before)
        if args.write:
            write_result("sampling_growth", "Sampling as graphs grow", body)
        else:
            sys.stdout.write("\n".join(body) + "\n")
        return
    graph = community_graph(args.folder, args.nodes, args.edges)
    body = [
        f"{args.nodes:,} nodes; medians of {args.rounds} rounds in which the sides run in turn.",
        "",
    ]
    if "draw" in questions:
        body += draw(graph, args.rounds)
    if "fetch" in questions:
        body += fetch(graph, args.rounds)
    if "epoch" in questions:
        body += epoch(graph, args.rounds, args.hidden)
    if args.write:
        write_result("sampling", "Sampled training against DGL and DistDGL", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
