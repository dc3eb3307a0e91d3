# SPDX-License-Identifier: Apache-2.0
"""How many source files one steady call enters: what a reader follows to know what happens.

    python benchmarks/files_entered.py                  # all cases
    python benchmarks/files_entered.py --case oneshot --list

Counted with ``sys.setprofile`` on every rank: files of the package whose Python functions are
entered, once each. Cases: a forward of ``nn.SAGEConv`` (mean) on a sharded graph in either mode,
from the second call on, and the part of it below ``graph.update_all``; and one batch of a
`DataLoader` with ``transport="collective"`` and ``prefetch=0``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import graphshard
from graphshard.data import random_graph
from graphshard.nn import SAGEConv
from graphshard.partition import partition_graph
from graphshard.sampling import DataLoader, DistNeighborSampler
from graphshard.testing import run_ranks

PACKAGE = str(Path(graphshard.__file__).resolve().parent)
CASES = ("sequential", "oneshot", "collective batch")
NUM_RANKS, WIDTH = 3, 16


def entered(call: Callable[[], Any]) -> list[str]:
    """Files of the package that a call enters, by path inside it."""
    found: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(f[len(PACKAGE) + 1 :] for f in found if f.startswith(PACKAGE))


def aggregation(rank: int, world_size: int, parts: str, mode: str) -> list[list[str]]:
    """Files of a layer's forward, and of ``update_all`` inside it."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph: Any = graphshard.construct_full_graph(data, mode=mode)
    layer = SAGEConv(WIDTH, WIDTH, "mean")
    h = torch.randn(data.num_owned(), WIDTH, requires_grad=True)
    inner: list[list[str]] = []

    def run() -> torch.Tensor:
        out: torch.Tensor = layer(graph, h)
        return out

    for _ in range(2):
        run().sum().backward()
    whole = entered(run)
    update_all = type(graph).update_all

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        inner.append(entered(lambda: update_all(self, *args, **kwargs)))

    type(graph).update_all = watched
    try:
        run()
    finally:
        type(graph).update_all = update_all
    return [whole, inner[0]]


def batch(rank: int, world_size: int, parts: str) -> list[list[str]]:
    """Files of one batch that all ranks draw and fetch together."""
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
    for _ in range(2):
        next(batches)
    found = entered(lambda: next(batches))
    for _ in batches:
        pass
    return [found]


def main() -> None:
    """Print the counts, with ``--list`` the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--list", action="store_true", help="name the files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        graph = random_graph(num_nodes=300, num_edges=3000)
        partition_graph(graph, "g", NUM_RANKS, folder, part_method="random", quiet=True)
        parts = str(Path(folder) / "g.json")
        for case in args.case or CASES:
            if case == "collective batch":
                by_rank, names = run_ranks(batch, NUM_RANKS, parts), [case]
            else:
                by_rank = run_ranks(aggregation, NUM_RANKS, parts, case)
                names = [f"{case}: SAGEConv forward", f"{case}: update_all"]
            for i, name in enumerate(names):
                files = sorted({file for rank in by_rank for file in rank[i]})
                sys.stdout.write(f"{name}: {len(files)} files\n")
                if args.list:
                    sys.stdout.writelines(f"    {file}\n" for file in files)


if __name__ == "__main__":
    main()
