# SPDX-License-Identifier: Apache-2.0
"""Which order of the nodes inside a part makes aggregation fastest, and what does it cost to make?

Sums over in-edges are timed in one process, the orders in turn, several rounds of it, in CPU
seconds of one thread; so is making each order. Once on the graph as it comes, once with the
numbers of its nodes shuffled, as a graph from a hash table or a database would come.

    python benchmarks/locality.py --write
    python benchmarks/locality.py --question parts --nodes 100000 --edges 1000000 --write

write benchmarks/results/locality_cpu_<date>.md and locality_parts_cpu_<date>.md. The second asks
what random parts lose that are not ordered: CPU seconds of all ranks together for an epoch of SAGE
(2 layers, hidden 64), in full batch and sampled, on four random parts of the same graph with and
without ``reorder=True``, in turn; and of making them.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from _common import community_graph, markdown_table, write_result
from scipy.sparse import csgraph
from torch import Tensor

from graphshard.ops import Adjacency, gspmm
from graphshard.partition._metis import UndirectedGraph
from graphshard.partition._node_order import breadth_first_order, clustered_order, mean_log_gap

Order = npt.NDArray[np.integer[Any]]


def reverse_cuthill_mckee(matrix: scipy.sparse.csr_array) -> Order:
    """The usual order for a small bandwidth."""
    order: Order = csgraph.reverse_cuthill_mckee(scipy.sparse.csr_matrix(matrix), True)
    return order


#: The old number of each new node, from a symmetric matrix.
ORDERS: dict[str, Callable[[scipy.sparse.csr_array], Order]] = {
    "as it comes": lambda matrix: np.arange(matrix.shape[0]),
    "degree, falling": lambda matrix: np.argsort(-np.diff(matrix.indptr), kind="stable"),
    "breadth first": breadth_first_order,
    "reverse Cuthill-McKee": reverse_cuthill_mckee,
    "METIS clusters (default)": clustered_order,
}


def reordered(src: Tensor, dst: Tensor, order: Order) -> Adjacency:
    """The edges by destination, in the new numbers."""
    new = torch.empty(len(order), dtype=torch.int64)
    new[torch.from_numpy(order.astype(np.int64))] = torch.arange(len(order))
    src, dst = new[src], new[dst]
    by_destination = torch.sort(dst, stable=True).indices
    adjacency = Adjacency(src[by_destination], dst[by_destination], len(order), len(order))
    adjacency.csc()
    return adjacency


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this thread, and the result."""
    start = time.thread_time()
    result = run()
    return time.thread_time() - start, result


def compare(src: Tensor, dst: Tensor, args: argparse.Namespace) -> list[str]:
    """Lines of a table with a row per order."""
    matrix = UndirectedGraph.from_edges([(src, dst)], args.nodes).matrix()
    nodes = np.arange(args.nodes)
    cells: dict[str, list[str]] = {}
    adjacencies: dict[str, Adjacency] = {}
    for name, make in ORDERS.items():
        made = [seconds_of(partial(make, matrix)) for _ in range(3)]
        order = made[0][1].astype(np.int64)
        seconds = statistics.median(s for s, _ in made)
        cells[name] = [name, f"{seconds:.2f}", f"{mean_log_gap(matrix, order, nodes):.1f}"]
        adjacencies[name] = reordered(src, dst, order)
    for width in args.widths:
        rows = torch.randn(args.nodes, width)
        times: dict[str, list[float]] = {name: [] for name in ORDERS}
        for number in range(args.rounds + 1):
            for name, adjacency in adjacencies.items():
                taken, _ = seconds_of(partial(gspmm, adjacency, "copy_lhs", "sum", rows))
                if number:  # the first touches pages
                    times[name].append(taken)
        medians = {name: statistics.median(values) for name, values in times.items()}
        base = medians["as it comes"]
        for name, taken in medians.items():
            cells[name].append(f"{taken * 1e3:.0f} ms ({taken / base:.2f})")
            sys.stderr.write(f"{width} {cells[name][0]}: {cells[name][-1]}\n")
    header = ["order", "s to make", "log2 gap", *(f"sum of {width}" for width in args.widths)]
    return markdown_table(header, list(cells.values()))


def train_in_turn(folders: list[str], rounds: int) -> None:
    """One rank: epochs on each of some partitions; rank 0 prints their CPU seconds by round."""
    from graphshard.comm import barrier, initialize_comms, rank, shutdown_comms
    from graphshard.comm.collectives import reduce_floats
    from graphshard.train import FullBatchConfig, SampledConfig
    from graphshard.train._run import FullBatchRun, SampledRun

    torch.set_num_threads(1)
    initialize_comms()
    usual: dict[str, Any] = {"model": "sage", "layers": 2, "hidden": 64, "epochs": 1}
    found: dict[str, dict[str, list[float]]] = {"full batch": {}, "sampled": {}}
    for mode, of_folder in found.items():
        runs: dict[str, FullBatchRun | SampledRun] = {}
        for folder in folders:
            data = f"{folder}/g.json"
            if mode == "sampled":
                config = SampledConfig(data=data, fanouts=(10, 10), batch_size=1000, **usual)
                runs[folder] = SampledRun(config)
            else:
                runs[folder] = FullBatchRun(FullBatchConfig(data=data, **usual))
            runs[folder]._learner.descent.start_at(0, runs[folder]._steps_per_epoch())
        for number in range(rounds + 1):
            for folder, run in runs.items():
                barrier()
                start = time.process_time()
                run._train_epoch(number)
                (seconds,) = reduce_floats([time.process_time() - start])
                if number:
                    of_folder.setdefault(folder, []).append(seconds)
        for run in runs.values():
            run._close()
    if rank() == 0:
        print(json.dumps(found), flush=True)
    barrier()
    shutdown_comms()


def compare_parts(src: Tensor, dst: Tensor, args: argparse.Namespace) -> list[str]:
    """Lines of a table: random parts, ordered and not."""
    from graphshard import graph
    from graphshard.partition import partition_graph

    g = graph((src, dst), num_nodes=args.nodes)
    g.ndata["feat"] = torch.randn(args.nodes, 128)
    g.ndata["label"] = torch.randint(40, (args.nodes,))
    for number, name in enumerate(("train", "val", "test")):
        g.ndata[f"{name}_mask"] = torch.arange(args.nodes) % 10 == number
    with tempfile.TemporaryDirectory() as top:
        folders = {"as they come": f"{top}/plain", "ordered": f"{top}/ordered"}
        make = []
        for folder in folders.values():
            start = time.process_time()
            partition_graph(
                g, "g", 4, folder,
                part_method="random", reorder=folder.endswith("ordered"), quiet=True,
            )  # fmt: skip
            make.append(time.process_time() - start)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "4", __file__, "--rounds", str(args.rounds)),
                *("--work", *folders.values()),
            ],
            capture_output=True, text=True, timeout=1200, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr[-4000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found: dict[str, dict[str, list[float]]] = json.loads(line)
    rows = []
    for mode, of_folder in found.items():
        plain, ordered = of_folder.values()
        ratio = statistics.median(b / a for a, b in zip(plain, ordered, strict=True))
        rows.append([mode, f"{min(plain):.2f}", f"{min(ordered):.2f}", f"{ratio:.2f}"])
    rows.append(["making them", *(f"{s:.2f}" for s in make), f"{make[1] / make[0]:.2f}"])
    return markdown_table(["CPU s", *folders, "ordered / as they come"], rows)


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--question", choices=("orders", "parts"), default="orders")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--graphs", type=Path, default=Path(tempfile.gettempdir()) / "bench")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="drawn pairs")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the results file")
    args = parser.parse_args()
    if args.work:
        train_in_turn(args.work, args.rounds)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.load(community_graph(args.graphs, args.nodes, args.edges)) as arrays:
        src, dst = torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])
    shuffled = torch.randperm(args.nodes)
    if args.question == "parts":
        body = [
            f"{args.nodes:,} nodes, {src.shape[0]:,} edges, four random parts; least of "
            f"{args.rounds} epochs in turn, and the median of their ratios.",
            *["", "## As it comes", "", *compare_parts(src, dst, args)],
            *["", "## Node numbers shuffled", ""],
            *compare_parts(shuffled[src], shuffled[dst], args),
        ]
        if args.write:
            write_result("locality_parts", "What random parts lose that are not ordered", body)
        else:
            sys.stdout.write("\n".join(body) + "\n")
        return
    body = [
        f"{args.nodes:,} nodes, {src.shape[0]:,} edges, one thread, float32; median CPU time, and "
        "in brackets that over the time of the order in which the graph comes. The gap is the mean "
        "over edges of log2 of the distance between their ends.",
        "",
        "## As it comes",
        "",
        *compare(src, dst, args),
        "",
        "## Node numbers shuffled",
        "",
        *compare(shuffled[src], shuffled[dst], args),
    ]
    if args.write:
        write_result("locality", "Order of the nodes inside a part", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
