# SPDX-License-Identifier: Apache-2.0
"""DistGraph on two hosts against torch RPC and DistDGL: row reads, embedding steps, an epoch.

    python benchmarks/graph_servers.py --question rows     # 10,000 rows of 128 float32, torch RPC
    python benchmarks/graph_servers.py --question steps    # sparse Adagrad, 1 M x 128, DistDGL
    python benchmarks/graph_servers.py --question epoch    # sampled GraphSAGE, DistDGL
    python benchmarks/graph_servers.py --question zeros --rate 200   # rows without their zeros
    python benchmarks/graph_servers.py --write             # all of them, and a file of results

The hosts are two network namespaces of this machine, each with its own /dev/shm and process ids, a
server and a trainer (peers/two_hosts.sh; needs root and iproute2). All processes have one thread,
unless the environment variable THREADS says otherwise; both sides the same parts: those of DGL.
DGL 1.1.3 runs in the environment that GRAPHSHARD_PEER_PYTHON names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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

from sampling import BATCH, FANOUTS, Sage

HERE = str(Path(__file__).resolve())
TOKEN = "a token that is for benchmarks alone"
COLUMNS, IDS = 128, 10_000
KINDS_OF_ROWS = {  # columns, rows at a time, share of zeros
    "dense": (256, 10_000, 0.0),
    "of a ReLU": (256, 10_000, 0.5),
    "of a ReLU and a dropout": (256, 10_000, 0.75),
    "bags of words": (8415, 1000, 0.996),
}


def on_two_hosts(name: str, python: str, script: str, *arguments: Any) -> Side:
    """A program as a server and a trainer on each of two hosts."""
    command = ["bash", str(PEERS / "two_hosts.sh"), python, script, *map(str, arguments)]
    return Side(name, command, timeout=360.0)


# ---------------------------------------------------------------------------- this package's side


def work(task: str, parts: str, arguments: list[int]) -> None:
    """This process's share of a run: a server, or a trainer."""
    from graphshard.servers import DistGraph, GraphServer, exit_client, initialize

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if task == "zeros":
        leave_out_zeros(is_left_out=bool(arguments[0]))
    host = int(os.environ["HOST"])
    if os.environ["ROLE"] == "server":
        GraphServer(host, 2, parts, TOKEN, f"10.77.0.{host + 1}", 30050)
        threading.Event().wait()
    os.environ |= {"GRAPHSHARD_HOST": str(host), "GRAPHSHARD_TOKEN": TOKEN}
    dist.init_process_group("gloo")
    initialize(os.environ["IP_CONFIG"])
    tasks = {"rows": read_rows, "steps": take_steps, "epoch": train, "zeros": move_zeros}
    result = tasks[task](DistGraph("g"), *arguments)
    if host == 0:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    dist.barrier()
    exit_client()


def read_rows(graph: Any, columns: int, batch: int, reads: int, compare: int) -> dict[str, Any]:
    """Seconds of each read from the other host, and from this one."""
    from graphshard.servers import DistTensor

    table = DistTensor((graph.num_nodes(), columns), torch.float32, "rows")
    starts = [*graph.get_partition_book().partid2nids(1)[:1].tolist(), graph.num_nodes()]
    places = {"near": (0, starts[0]), "far": (starts[0], starts[1])}
    result: dict[str, Any] = {}
    if graph.rank() == 0:
        for where, (begin, end) in places.items():
            rows = torch.randn(end - begin, columns, generator=torch.Generator().manual_seed(1))
            table[begin:end] = rows
            generator, seconds = torch.Generator().manual_seed(0), []
            for _ in range(reads):
                ids = torch.randint(end - begin, (batch,), generator=generator)
                start = time.perf_counter()
                found = table[ids + begin]
                seconds.append(time.perf_counter() - start)
                if compare:
                    assert torch.equal(found, rows[ids])
            assert torch.equal(found, rows[ids])
            result[where] = seconds
    graph.barrier()
    return result


def leave_out_zeros(*, is_left_out: bool) -> None:
    """Have all messages of this process go without their zeros, on one host as well, or none."""
    from graphshard.servers import _message_stream

    if is_left_out:
        _message_stream.joins_one_host = lambda _: False
    else:
        _message_stream.without_zeros = lambda *_: None


def move_zeros(graph: Any, _: int, reads: int) -> dict[str, Any]:
    """Seconds of reads and writes of several kinds of rows, and MB that this host sends, receives.

    Those of the own host go over a socket, too, which `DistTensor` does not need.
    """
    from graphshard.servers import DistTensor, MessageClient, WireMessage

    book = graph.get_partition_book()
    middle = int(book.partid2nids(1)[0])
    ends = {"other host": (middle, graph.num_nodes()), "same host": (0, middle)}
    own = MessageClient("10.77.0.1:30050", TOKEN, 0)
    result: dict[str, Any] = {}
    for kind, (columns, batch, zeros) in KINDS_OF_ROWS.items():
        table = DistTensor((graph.num_nodes(), columns), torch.float32, kind.replace(" ", "_"))
        if graph.rank() == 0:
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(batch, columns, generator=generator)
            rows[torch.rand(rows.shape, generator=generator) < zeros] = 0
            for where, (begin, end) in ends.items():
                of_table = {"name": table.name} if where == "same host" else {}
                seconds: dict[str, list[float]] = {"write": [], "read": []}
                before = link_bytes()
                for _ in range(reads):
                    ids = begin + torch.randperm(end - begin, generator=generator)[:batch]
                    start = time.perf_counter()
                    if of_table:
                        own.call(WireMessage("write", of_table, [ids - begin, rows]))
                    else:
                        table[ids] = rows
                    middle_time = time.perf_counter()
                    if of_table:
                        names = {"names": [[table.name]]}
                        found = own.call(WireMessage("read", names, [ids - begin])).tensors[0]
                    else:
                        found = table[ids]
                    seconds["read"].append(time.perf_counter() - middle_time)
                    seconds["write"].append(middle_time - start)
                    assert torch.equal(found, rows)
                sent, received = (
                    (after - first) / reads / 1e6
                    for first, after in zip(before, link_bytes(), strict=True)
                )
                result[f"{kind}/{where}"] = seconds | {"MB": [sent, received]}
        graph.barrier()
    return result


def link_bytes() -> tuple[int, int]:
    """Bytes that this host has sent to the other, and received."""
    folder = Path("/sys/class/net/host/statistics")
    sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received


def take_steps(graph: Any, columns: int, batch: int, steps: int) -> dict[str, Any]:
    """Seconds of lookups, of losses with their gradients, and of steps of the optimizer."""
    from graphshard.servers import DistEmbedding, SparseAdagrad

    embedding = DistEmbedding(graph.num_nodes(), columns, "embedding")
    optimizer = SparseAdagrad([embedding], lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    phases: dict[str, list[float]] = {"lookup": [], "loss": [], "step": []}
    losses, cpu = [], time.process_time()
    for _ in range(steps):
        ids = torch.randint(graph.num_nodes(), (batch,), generator=generator)
        dist.barrier()
        times = [time.perf_counter()]
        optimizer.zero_grad()
        rows = embedding(ids)
        times.append(time.perf_counter())
        loss = (rows - 1).square().sum()
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        for phase, (begin, end) in zip(phases.values(), pairwise(times), strict=True):
            phase.append(end - begin)
        losses.append(float(loss.detach()))
    cpu = (time.process_time() - cpu) / steps
    return {"phases": phases, "losses": losses[-3:], "cpu": cpu}


def train(graph: Any, hidden: int, epochs: int) -> dict[str, Any]:
    """Seconds of the best epoch."""
    from graphshard.dgl.dataloading import NeighborSampler
    from graphshard.servers import DistNodeDataLoader, node_split

    nodes = node_split(graph.ndata["train"], graph.get_partition_book(), force_even=True)
    labels = graph.ndata["y"][torch.arange(graph.num_nodes())]
    sampler = NeighborSampler(FANOUTS, prefetch_node_feats=["x"])
    loader = DistNodeDataLoader(graph, nodes, sampler, batch_size=BATCH, shuffle=True)
    torch.manual_seed(0)
    width, classes = graph.ndata["x"].shape[1], int(labels.max()) + 1
    model = None
    if hidden:
        model = torch.nn.parallel.DistributedDataParallel(Sage(width, hidden, classes))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seconds, waits, edges, loss = [], [], 0, torch.tensor(0.0)
    for _ in range(epochs):
        dist.barrier()
        start, edges = time.perf_counter(), 0
        batches = iter(loader)
        for _, outputs, blocks in batches:
            edges += sum(block.num_edges() for block in blocks)
            if model is not None:
                loss = F.cross_entropy(model(blocks, blocks[0].srcdata["x"]), labels[outputs])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        waits.append(batches.delivered.seconds_waited)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    best = int(np.argmin(seconds))
    total = torch.tensor([edges])
    dist.all_reduce(total)
    return {
        "epoch_s": seconds[best],
        "wait": waits[best] / seconds[best],
        "edges": int(total),
        "loss": float(loss.detach()),
    }


# ---------------------------------------------------------------------------- partitions


def both_parts(graph: Path, method: str) -> tuple[str, str]:
    """DGL's partition of a graph into two, and the same parts in this package's files."""
    import graphshard
    from graphshard.partition import partition_graph

    theirs, ours = graph.with_suffix(".dgl-parts"), graph.with_suffix(".same-parts")
    if not (theirs / "parts.npy").exists():
        command = [PEER_PYTHON, str(PEERS / "dgl_partition.py"), str(graph), "2", str(theirs)]
        run_side(Side("DGL partition", [*command, method]))
    if not (ours / "g.json").exists():
        arrays = np.load(graph)
        whole = graphshard.graph(
            (torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])),
            num_nodes=len(arrays["y"]),
        )
        for name in {"x", "y", "train"} & set(arrays):
            whole.ndata[name] = torch.from_numpy(arrays[name])
        of_node = torch.from_numpy(np.load(theirs / "parts.npy"))
        partition_graph(whole, "g", 2, str(ours), part_method=of_node, quiet=True)
    return str(theirs / "g.json"), str(ours / "g.json")


def rows_graph(folder: Path, nodes: int) -> Path:
    """A graph of which the nodes alone matter."""
    path = folder / f"nodes-{nodes}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        src, dst = np.random.default_rng(0).integers(0, nodes, (2, nodes // 2))
        np.savez(path, src=src, dst=dst, y=np.zeros(nodes, dtype=np.int64))
    return path


def random_parts(folder: Path, nodes: int) -> str:
    """Two parts of a graph of which the nodes alone matter."""
    import graphshard
    from graphshard.partition import partition_graph

    parts = folder / f"nodes-{nodes}.parts"
    if not (parts / "g.json").exists():
        src, dst = torch.randint(nodes, (2, nodes // 2), generator=torch.Generator().manual_seed(0))
        whole = graphshard.graph((src, dst), num_nodes=nodes)
        partition_graph(whole, "g", 2, str(parts), part_method="random", quiet=True)
    return str(parts / "g.json")


# ---------------------------------------------------------------------------- questions


def spread(values: list[float], unit: float = 1.0, digits: int = 2) -> str:
    """Median, and least to most."""
    low, mid, high = (v * unit for v in (min(values), statistics.median(values), max(values)))
    return f"{mid:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def compared(results: dict[str, list[dict[str, Any]]], key: str, base: str) -> list[list[str]]:
    """A row for each side: seconds, and the base's over them, by round and in the median."""
    rows = []
    for name, runs in results.items():
        seconds = [float(run[key]) for run in runs]
        ratios = [float(run[key]) / s for run, s in zip(results[base], seconds, strict=True)]
        rows.append([name, spread(seconds, 1e3 if max(seconds) < 1 else 1.0), spread(ratios)])
    return rows


def rows(folder: Path, args: argparse.Namespace) -> list[str]:
    """Reads of rows, from the other host and from the same one."""
    graph = rows_graph(folder, args.rows)
    _, parts = both_parts(graph, "random")
    numbers = [COLUMNS, IDS, args.reads, int(args.compare)]
    here = on_two_hosts("ours", sys.executable, HERE, "--work", "rows", parts, *numbers)
    peer = [sys.executable, str(PEERS / "rpc_rows.py"), args.rows // 2, *numbers]
    rpc = {
        "torch RPC, other host": ("far", "tcp"),
        "torch RPC, same host, TCP": ("near", "tcp"),
        "torch RPC, same host, its choice": ("near", "any"),
    }
    sides = [on_two_hosts(name, *peer, *how) for name, how in rpc.items()]
    flight = [sys.executable, str(PEERS / "flight_rows.py"), args.rows // 2, *numbers[:3]]
    sides.append(on_two_hosts("Arrow Flight, other host", *flight))
    found = run_in_turn([here, *sides], args.rounds)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for name in (side.name for side in sides):
        by_name[name] = [{"s": statistics.median(run["seconds"])} for run in found[name]]
    for name, key in (("graphshard, other host", "far"), ("graphshard, same host", "near")):
        by_name[name] = [{"s": statistics.median(run[key])} for run in found["ours"]]
    best_near = min(list(rpc)[1:], key=lambda name: median(by_name[name], "s"))
    text = [f"## Reads of {IDS:,} rows of {COLUMNS} float32", ""]
    for base, *others in (
        ("torch RPC, other host", "Arrow Flight, other host", "graphshard, other host"),
        (best_near, "graphshard, same host"),
        ("torch RPC, other host", "graphshard, same host"),
    ):
        both = {name: by_name[name] for name in (base, *others)}
        text += [*markdown_table(["", "ms a read", "throughput"], compared(both, "s", base)), ""]
    return text


def steps(folder: Path, args: argparse.Namespace) -> list[str]:
    """Lookup, backward and step of an embedding."""
    theirs, ours = both_parts(rows_graph(folder, args.rows), "random")
    numbers = [COLUMNS, IDS, args.steps]
    peer = [PEER_PYTHON, str(PEERS / "distdgl_steps.py"), theirs, *numbers]
    sides = [
        on_two_hosts("DistDGL", *peer),
        on_two_hosts("graphshard", sys.executable, HERE, "--work", "steps", ours, *numbers),
    ]
    found = run_in_turn(sides, args.rounds)
    losses = [runs[0]["losses"] for runs in found.values()]
    text = [f"## SparseAdagrad, {args.rows:,} x {COLUMNS}, {IDS:,} ids a trainer", ""]
    for title, phases in (
        ("ms, step() of the optimizer", ["step"]),
        ("ms, lookup and step()", ["lookup", "step"]),
        ("ms, with the user's loss and its backward", ["lookup", "loss", "step"]),
    ):
        medians = {
            name: [{"s": _median_of_sums([run["phases"][p] for p in phases])} for run in runs]
            for name, runs in found.items()
        }
        text += [*markdown_table(["", title, "speed"], compared(medians, "s", "DistDGL")), ""]
    shown = " / ".join(str([round(x) for x in some]) for some in losses)
    return [*text, f"Last losses of trainer 0: {shown}", ""]


def _median_of_sums(phases: list[list[float]]) -> float:
    return statistics.median(map(sum, zip(*phases, strict=True)))


def epoch(folder: Path, args: argparse.Namespace) -> list[str]:
    """Sampled training."""
    theirs, ours = both_parts(community_graph(folder, args.nodes, args.edges), "metis")
    peer = [PEER_PYTHON, str(PEERS / "distdgl_sampled.py"), theirs, args.hidden, args.epochs]
    numbers = [args.hidden, args.epochs]
    sides = [
        on_two_hosts("DistDGL", *peer),
        on_two_hosts("graphshard", sys.executable, HERE, "--work", "epoch", ours, *numbers),
    ]
    found = run_in_turn(sides, args.rounds)
    key = "epoch_s" if args.hidden else "sample_s"
    for run in found["graphshard"]:
        run["sample_s"] = run["epoch_s"]
    of_rounds = [
        ours[key] / theirs[key]
        for theirs, ours in zip(found["DistDGL"], found["graphshard"], strict=True)
    ]
    wait = 100 * median(found["graphshard"], "wait")
    return [
        f"## Training epoch, hidden {args.hidden}" if args.hidden else "## Sampling and features",
        "",
        *markdown_table(["", "s per epoch", "speed"], compared(found, key, "DistDGL")),
        "",
        f"Time of graphshard over DistDGL's: {spread(of_rounds)}; {wait:.1f} % of it waiting for "
        "data.",
        "",
    ]


def zeros(folder: Path, args: argparse.Namespace) -> list[str]:
    """Reads and writes of rows with and without their zeros."""
    parts = random_parts(folder, 20_000)
    sides = [
        on_two_hosts(name, sys.executable, HERE, "--work", "zeros", parts, number, 7)
        for number, name in enumerate(("all", "without zeros"))
    ]
    found = run_in_turn(sides, args.rounds)
    table = []
    for key in found["all"][0]:
        kind, where = key.split("/")
        columns, batch, share = KINDS_OF_ROWS[kind]
        for way, number in (("read", 1), ("write", 0)):
            shown, ms, mb = [], [], []
            for runs in found.values():
                values = [statistics.median(run[key][way]) for run in runs]
                ms.append(statistics.median(values))
                mb.append(statistics.median(run[key]["MB"][number] for run in runs))
                shown.append(spread(values, 1e3, 1))
            moved = [f"{each:.2f}" for each in mb] if where == "other host" else ["", ""]
            name = f"{batch:,} x {columns:,} {kind}, {share:.1%} zero"
            table.append([name, where, way, *moved, *shown, f"{ms[1] / ms[0]:.2f}"])
    titles = ["rows", "of", "", "MB, all", "MB, without zeros", "ms, all", "ms, without zeros"]
    return [
        "## Rows without their zeros",
        "",
        *markdown_table([*titles, "ratio of ms"], table),
        "",
    ]


def main() -> None:
    """Read the arguments; run as the benchmark, or as one of its processes."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], [int(number) for number in sys.argv[4:]])
        return
    questions = {"rows": rows, "steps": steps, "epoch": epoch, "zeros": zeros}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--question", choices=list(questions), action="append")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--reads", type=int, default=200)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="graphshard and RPC compare each read with the right rows, which empties the caches",
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="pairs drawn")
    parser.add_argument("--hidden", type=int, default=256, help="0: sampling and features alone")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=int, help="of the link in Mbit/s; not shaped without it")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    args = parser.parse_args()
    if args.rate:
        os.environ["RATE"] = str(args.rate)
    load, link = os.getloadavg()[0], f", {args.rate} Mbit/s" if args.rate else ""
    body = [
        f"Two hosts{link}; {args.rounds} rounds in which the sides run in turn; median (least to "
        f"most) of the rounds' medians. Load before the first: {load:.1f}.",
        "",
    ]
    for question in args.question or questions:
        body += questions[question](args.folder, args)
    if args.write:
        name = "_".join(["graph_servers", *(args.question or [])])
        write_result(name, "DistGraph against torch RPC and DistDGL", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
