# SPDX-License-Identifier: Apache-2.0
"""Which order of the nodes inside a part makes aggregation fastest, and what does it cost to make?

Sums over in-edges are timed in one process, the orders in turn, several rounds of it, in CPU
seconds of one thread; so is making each order. Once on the graph as it comes, once with the
numbers of its nodes shuffled, as a graph from a hash table or a database would come.

    python benchmarks/locality.py --write

writes benchmarks/results/locality_cpu_<date>.md.
"""

from __future__ import annotations

import argparse
import statistics
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


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=Path, default=Path(tempfile.gettempdir()) / "bench")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="drawn pairs")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the results file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.load(community_graph(args.graphs, args.nodes, args.edges)) as arrays:
        src, dst = torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])
    shuffled = torch.randperm(args.nodes)
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
