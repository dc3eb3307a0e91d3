# SPDX-License-Identifier: Apache-2.0
"""How long a rank takes to start, and reads from graph servers to come: sides of two_trees.py.

    torchrun --nproc-per-node 2 benchmarks/start_and_reads.py start
    python benchmarks/start_and_reads.py reads build/bench

``start``: seconds from the start of the process until its group is there. ``reads``: seconds of
one read of 10,000 random rows of 64 float32, half of them on a server that the trainer reaches by a
socket; the median of 200 reads, the larger of two trainers. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

import graphshard
from graphshard.data import random_graph
from graphshard.partition import partition_graph
from graphshard.servers import DistGraph, exit_client, initialize
from graphshard.testing import LocalServers, run_ranks

NODES, EDGES, WIDTH, IDS, READS = 200_000, 400_000, 64, 10_000, 200


def seconds_alive() -> float:
    """How long ago this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def read(rank: int, world_size: int) -> float:
    """Median seconds of a read."""
    initialize()
    graph = DistGraph("g")
    rows, seconds = graph.ndata["feat"], []
    order = torch.Generator().manual_seed(rank)
    for _ in range(READS):
        ids = torch.randint(0, NODES, (IDS,), generator=order)
        begin = time.perf_counter()
        rows[ids]
        seconds.append(time.perf_counter() - begin)
    exit_client()
    return statistics.median(seconds)


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("start", "reads"))
    parser.add_argument("folder", type=Path, nargs="?", help="for the partition that is read")
    args = parser.parse_args()
    if args.what == "start":
        graphshard.initialize_comms()
        seconds = seconds_alive()
        graphshard.shutdown_comms()
    else:
        torch.set_num_threads(1)
        config = args.folder / "reads" / "g.json"
        if not config.exists():
            graph = random_graph(NODES, EDGES)
            graph.ndata["feat"] = torch.randn(NODES, WIDTH)
            partition_graph(graph, "g", 2, config.parent, part_method="random", quiet=True)
        with LocalServers(config, num_hosts=2) as servers:
            seconds = max(run_ranks(read, 2, servers=servers))
    sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
