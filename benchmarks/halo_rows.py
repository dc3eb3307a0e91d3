# SPDX-License-Identifier: Apache-2.0
"""Rows that travel between parts for a sum, with partial sums and without.

    python benchmarks/halo_rows.py --write

Of each graph, divided by METIS and at random: distinct remote sources, which travel for attention
or max; and the rows and partial sums that serve the same edges, a minimum vertex cover for each
pair of parts. Counts, not times: the same on any machine. Edges are taken in both directions where
the graph has them so. Without ``--data`` the synthetic graphs alone: Chung-Lu graphs with an
exponent of 2.2, at random and in 16 communities with 90 or 97 % of the edges inside.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from _common import markdown_table, write_result
from torch import Tensor

from graphshard.fullbatch.topology import LocalEdges, count_fewest_rows
from graphshard.partition import UndirectedGraph, metis_partition

NUM_NODES = 20_000


def drawn(degree: int, inside: float, rng: np.random.Generator) -> tuple[int, Tensor, Tensor]:
    """A Chung-Lu graph, both directions; ``inside`` of its pairs within one of 16 communities."""
    weights = np.arange(1, NUM_NODES + 1) ** (-1 / 1.2)
    weights /= weights.sum()
    community = rng.integers(0, 16, NUM_NODES)
    count = NUM_NODES * degree // 2
    first, second = (rng.choice(NUM_NODES, count, p=weights) for _ in range(2))
    order = np.argsort(community, kind="stable")
    starts = np.searchsorted(community[order], np.arange(17))
    moved = np.flatnonzero(rng.random(count) < inside)
    group = community[first[moved]]
    sizes = starts[group + 1] - starts[group]
    second[moved] = order[starts[group] + (rng.random(moved.size) ** 3 * sizes).astype(np.int64)]
    return NUM_NODES, *both_ways(first, second, NUM_NODES)


def both_ways(src: np.ndarray, dst: np.ndarray, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The distinct edges between two nodes, in both directions."""
    apart = src != dst
    pairs = np.concatenate(
        [src[apart] * num_nodes + dst[apart], dst[apart] * num_nodes + src[apart]]
    )
    pairs = np.unique(pairs)
    return torch.from_numpy(pairs // num_nodes), torch.from_numpy(pairs % num_nodes)


def graphs(data: Path | None) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Name, nodes, sources and destinations of each graph."""
    rng = np.random.default_rng(0)
    for degree, inside in ((8, 0.0), (30, 0.0), (8, 0.9), (30, 0.9), (30, 0.97)):
        name = f"Chung-Lu, {degree} pairs a node" + (f", {inside:.0%} inside" if inside else "")
        yield name, *drawn(degree, inside, rng)
    if data is None:
        return
    for folder in sorted(data.iterdir()):
        if (folder / "edge_index.npy").exists() and not (folder / "edge_type.npy").exists():
            src, dst = np.load(folder / "edge_index.npy").astype(np.int64)
            num_nodes = int(max(src.max(), dst.max())) + 1
            if folder.name == "cnr-2000":  # of links between pages, as it is and both ways
                yield "cnr-2000, as directed", num_nodes, *map(torch.from_numpy, (src, dst))
            yield folder.name, num_nodes, *both_ways(src, dst, num_nodes)


def assigned(method: str, num_nodes: int, src: Tensor, dst: Tensor, num_parts: int) -> Tensor:
    """The part of each node."""
    if method == "random":
        return torch.from_numpy(np.random.default_rng(1).integers(0, num_parts, num_nodes))
    graph = UndirectedGraph.from_edges([(src, dst)], num_nodes)
    return torch.from_numpy(np.asarray(metis_partition(graph, num_parts))).long()


def rows_sent(part: Tensor, src: Tensor, dst: Tensor, num_parts: int) -> tuple[int, int]:
    """Distinct remote sources, and rows and sums, of all parts."""
    local = torch.empty_like(part)
    for number in range(num_parts):
        mine = (part == number).nonzero().view(-1)
        local[mine] = torch.arange(mine.numel())
    read = sent = 0
    for number in range(num_parts):
        here = part[dst] == number
        edges = LocalEdges(
            part[src[here]], local[src[here]], local[dst[here]], int((part == number).sum())
        )
        counts = count_fewest_rows([edges], number, num_parts).sum(1).tolist()
        read, sent = read + counts[0], sent + counts[1]
    return read, sent


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder of folders with edge_index.npy")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    args = parser.parse_args()
    rows, ratios = [], []
    for name, num_nodes, src, dst in graphs(args.data):
        for method in ("metis", "random"):
            for num_parts in args.parts:
                part = assigned(method, num_nodes, src, dst, num_parts)
                start = time.process_time()
                read, sent = rows_sent(part, src, dst, num_parts)
                seconds = time.process_time() - start
                ratio = sent / read if read else 1.0
                ratios.append(ratio)
                cells = [read / num_nodes, sent / num_nodes, ratio, seconds]
                rows.append([name, method, num_parts, *(f"{cell:.2f}" for cell in cells)])
                print(*rows[-1], file=sys.stderr, flush=True)
    heads = ["graph", "parts by", "parts", "sources, per node", "rows and sums", "ratio", "CPU, s"]
    body = markdown_table(heads, rows)
    body += ["", f"In the middle: {statistics.median(ratios):.2f}."]
    if args.write:
        write_result("halo_rows", "Rows between parts for a sum", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
