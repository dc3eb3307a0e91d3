# SPDX-License-Identifier: Apache-2.0
"""How much of the package one steady call enters: what a reader follows to know what happens.

    python benchmarks/files_entered.py                          # all cases
    python benchmarks/files_entered.py --case oneshot --list    # with the functions of each file

Counted with ``sys.setprofile``, from the third call on:

files      source files of the package with a function that is entered
functions  functions that are entered, by qualified name; lambdas count, and comprehensions where
           they are functions: in Python before 3.12
switches   calls that go from one of these files to another

Files and functions are those of all ranks together, switches those of the rank that has most.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import graphshard
from graphshard import function as fn
from graphshard.data import random_graph
from graphshard.partition import partition_graph
from graphshard.sampling import DataLoader, DistNeighborSampler
from graphshard.servers import DistGraph, DistTensor, initialize
from graphshard.testing import LocalServers, run_ranks
from graphshard.train.commands import run

PACKAGE = str(Path(graphshard.__file__).resolve().parent) + "/"
NUM_RANKS, NUM_NODES, NUM_EDGES, WIDTH = 3, 300, 3000, 16

Entered = tuple[Counter[tuple[str, str]], int]
"""Number of calls by (file, function), and of calls between files."""


def entered(call: Callable[[], Any]) -> Entered:
    """What a call enters of the package."""
    calls: Counter[CodeType] = Counter()
    switches = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal switches
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        calls[code] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            switches += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    functions: Counter[tuple[str, str]] = Counter()
    for code, count in calls.items():
        functions[code.co_filename.removeprefix(PACKAGE), code.co_qualname] += count
    return functions, switches


def aggregation(rank: int, world_size: int, parts: str, mode: str) -> list[Entered]:
    """``update_all`` with the mean of source rows that need a gradient, and its backward."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph: Any = graphshard.construct_full_graph(data, mode=mode)
    rows = torch.randn(data.num_owned(), WIDTH, requires_grad=True)
    copy, mean = fn.copy_u("h", "m"), fn.mean("m", "out")
    for _ in range(3):
        with graph.local_scope():
            graph.srcdata["h"] = rows
            forward = entered(partial(graph.update_all, copy, mean))
            loss = graph.dstdata["out"].sum()
        backward = entered(loss.backward)
    return [forward, backward]


def batch(rank: int, world_size: int, parts: str) -> list[Entered]:
    """One batch that all ranks draw and fetch together."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph: Any = graphshard.construct_full_graph(data)
    start, stop = data.node_ranges[rank]
    features = {"feat": torch.randn(data.num_owned(), WIDTH)}
    loader = DataLoader(
        graph,
        torch.arange(start, stop),
        DistNeighborSampler([5, 5], input_node_features=features),
        batch_size=4,
        transport="collective",
        prefetch=0,
        seed=0,
    )
    batches = iter(loader)
    for _ in range(3):
        steady = entered(lambda: next(batches))
    for _ in batches:
        pass
    return [steady]


def command(rank: int, world_size: int, parts: str) -> list[Entered]:
    """The command that partitions a graph of a file, in this process."""
    graph_file = Path(parts).parent / "graph.bin"
    graphshard.save_graphs(str(graph_file), [random_graph(NUM_NODES, NUM_EDGES)])
    for attempt in range(3):
        out = Path(parts).parent / f"command-{attempt}"
        arguments = ["partition", "--data", str(graph_file), "--parts", "2", "--out", str(out)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            steady = entered(partial(run, arguments))
    return [steady]


def table_read(rank: int, world_size: int, parts: str) -> list[Entered]:
    """Rows of a named tensor: own ones and those of other hosts."""
    initialize()
    graph = DistGraph("g")
    table = DistTensor(
        (NUM_NODES, WIDTH), torch.float32, "rows", part_policy=graph.get_node_partition_policy("_N")
    )
    ids = torch.arange(0, NUM_NODES, 7)
    for _ in range(3):
        steady = entered(lambda: table[ids])
    return [steady]


CASES: dict[str, tuple[Callable[..., list[Entered]], tuple[Any, ...], Sequence[str]]] = {
    "sequential": (
        aggregation,
        ("sequential",),
        ["update_all, sequential: forward", "update_all, sequential: backward"],
    ),
    "oneshot": (
        aggregation,
        ("oneshot",),
        ["update_all, oneshot: forward", "update_all, oneshot: backward"],
    ),
    "batch": (batch, (), ["next(loader), collective"]),
    "partition": (command, (), ["graphshard partition"]),
    "read": (table_read, (), ["DistTensor read"]),
}


def report(name: str, by_rank: Sequence[Entered], lists: bool) -> None:
    """Print the counts of one case, and what is behind them."""
    calls: Counter[tuple[str, str]] = Counter()
    for functions, _ in by_rank:
        calls |= functions
    files = sorted({file for file, _ in calls})
    switches = max(number for _, number in by_rank)
    print(f"{name:34} {len(files):3} files {len(calls):4} functions {switches:5} switches")
    if not lists:
        return
    for file in files:
        print(f"    {file}")
        for _, function in sorted(key for key in calls if key[0] == file):
            print(f"        {calls[file, function]:4} {function}")


def main() -> None:
    """Print the counts, with ``--list`` the functions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--list", action="store_true", help="name files and functions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        graph = random_graph(num_nodes=NUM_NODES, num_edges=NUM_EDGES)
        partition_graph(graph, "g", NUM_RANKS, folder, part_method="random", quiet=True)
        parts = str(Path(folder) / "g.json")
        for case in args.case or CASES:
            measure, arguments, names = CASES[case]
            if case == "read":
                with LocalServers(parts, num_hosts=NUM_RANKS) as servers:
                    by_rank = run_ranks(measure, NUM_RANKS, parts, *arguments, servers=servers)
            elif case == "partition":
                by_rank = [measure(0, 1, parts)]
            else:
                by_rank = run_ranks(measure, NUM_RANKS, parts, *arguments)
            for i, name in enumerate(names):
                report(name, [entered_by[i] for entered_by in by_rank], args.list)


if __name__ == "__main__":
    main()
