# SPDX-License-Identifier: Apache-2.0
"""Rows that travel between parts for a sum, with partial sums and without.

    python benchmarks/halo_rows.py --write
    python benchmarks/halo_rows.py --question attention

Of each graph, divided by METIS and at random: distinct remote sources, which travel for attention
or max; and the rows and partial sums that serve the same edges, a minimum vertex cover for each
pair of parts. Counts, not times: the same on any machine. Edges are taken in both directions where
the graph has them so. Without ``--data`` the synthetic graphs alone: Chung-Lu graphs with an
exponent of 2.2, at random and in 16 communities with 90 or 97 % of the edges inside.

``attention`` counts what GAT saves where states of what a destination gets from a part, made there,
travel in place of rows. A row costs its columns and a score for each head, and as much backward;
such a state its columns and the logarithm of a sum for each head, the destination's score before
it, and backward its gradient, two numbers for each head, and the gradient of its score: ``2 *
columns + 5 * heads`` in place of ``2 * (columns + heads)`` numbers. ``--community`` adds the graph
of `full_batch.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from _common import community_graph, markdown_table, write_result
from torch import Tensor

from graphshard.fullbatch.fewest_rows import count_fewest_rows
from graphshard.fullbatch.topology import LocalEdges
from graphshard.partition import UndirectedGraph, metis_partition
from graphshard.partition.vertex_cover import minimum_vertex_cover

NUM_NODES = 20_000
COLUMNS, HEADS = 128, 4  # of attention
ABOUT_ATTENTION = [
    f"What a layer of GAT ({COLUMNS} columns, {HEADS} heads) sends, of what it sends with rows,",
    "where states of what a destination gets from a part travel in place of rows. Forward and",
    "backward together a state weighs 1.05 of a row. The share of the pairs of parts for which",
    "states alone weigh less; the better of both for each pair; the fewest of both for each pair;",
    "and of the latter what the busiest part sends or receives, whichever is more. Counts.",
]


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


def graphs(data: Path | None, with_community: bool) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Name, nodes, sources and destinations of each graph."""
    rng = np.random.default_rng(0)
    for degree, inside in ((8, 0.0), (30, 0.0), (8, 0.9), (30, 0.9), (30, 0.97)):
        name = f"Chung-Lu, {degree} pairs a node" + (f", {inside:.0%} inside" if inside else "")
        yield name, *drawn(degree, inside, rng)
    if with_community:
        with tempfile.TemporaryDirectory() as folder:
            arrays = np.load(community_graph(Path(folder), 100_000, 1_050_000))
            ends = torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])
            yield "200 communities, 100,000 nodes", len(arrays["y"]), *ends
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


def attention_numbers(part: Tensor, src: Tensor, dst: Tensor, num_parts: int) -> list[float]:
    """What GAT sends with states, of what it sends with rows, and for how many pairs these pay.

    Returns:
        The share of pairs of parts with fewer numbers in states alone; with the better of both for
        each pair; with the fewest rows and states for each pair; and with the latter what the
        busiest direction of any part's link carries, step after step.
    """
    of_row, of_state = 2 * (COLUMNS + HEADS), 2 * COLUMNS + 5 * HEADS
    by_rows = by_pair = by_cover = pairs = better = 0
    counts = torch.zeros(3, num_parts, num_parts, dtype=torch.int64)  # of owners, for readers
    for number in range(num_parts):
        is_cut = (part[dst] == number) & (part[src] != number)
        owners = part[src[is_cut]]
        rows, place_of_row = torch.unique(src[is_cut], return_inverse=True)
        keys = dst[is_cut] * num_parts + owners
        states, place_of_state = torch.unique(keys, return_inverse=True)
        num_rows = torch.bincount(part[rows], minlength=num_parts)
        num_states = torch.bincount(states % num_parts, minlength=num_parts)
        costs = torch.stack([num_rows * of_row, num_states * of_state])
        by_rows, by_pair = by_rows + int(costs[0].sum()), by_pair + int(costs.amin(0).sum())
        pairs, better = pairs + int((num_rows > 0).sum()), better + int((costs[1] < costs[0]).sum())
        ends = place_of_row, place_of_state
        sends_row, sends_state = minimum_vertex_cover(*ends, rows.numel(), states.numel())
        by_cover += int(sends_row.sum()) * of_row + int(sends_state.sum()) * of_state
        counts[0, :, number] = num_rows
        counts[1, :, number] = torch.bincount(part[rows[sends_row]], minlength=num_parts)
        sums = torch.bincount(states[sends_state] % num_parts, minlength=num_parts)
        counts[2, :, number] = sums
    read, sent, made = counts
    with_rows = 2 * _busiest(read * (COLUMNS + HEADS))
    there = _busiest((sent + made) * (COLUMNS + HEADS) + made.t() * HEADS)
    back = _busiest((sent + made) * (COLUMNS + HEADS) + made * HEADS + made.t() * HEADS)
    return [better / pairs, by_pair / by_rows, by_cover / by_rows, (there + back) / with_rows]


def _busiest(numbers: Tensor) -> int:
    """The most that a part sends or receives, given what each sends to each."""
    return max(int(numbers.sum(0).max()), int(numbers.sum(1).max()))


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder of folders with edge_index.npy")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--question", choices=["sums", "attention"], default="sums")
    parser.add_argument("--community", action="store_true", help="the graph of full_batch.py, too")
    args = parser.parse_args()
    rows, ratios = [], []
    of_attention: list[list[float]] = []
    for name, num_nodes, src, dst in graphs(args.data, args.community):
        for method in ("metis", "random"):
            for num_parts in args.parts:
                part = assigned(method, num_nodes, src, dst, num_parts)
                if args.question == "attention":
                    of_attention.append(attention_numbers(part, src, dst, num_parts))
                    cells = of_attention[-1]
                    rows.append([name, method, num_parts, *(f"{cell:.2f}" for cell in cells)])
                    print(*rows[-1], file=sys.stderr, flush=True)
                    continue
                start = time.process_time()
                read, sent = rows_sent(part, src, dst, num_parts)
                seconds = time.process_time() - start
                ratio = sent / read if read else 1.0
                ratios.append(ratio)
                cells = [read / num_nodes, sent / num_nodes, ratio, seconds]
                rows.append([name, method, num_parts, *(f"{cell:.2f}" for cell in cells)])
                print(*rows[-1], file=sys.stderr, flush=True)
    heads = ["graph", "parts by", "parts"]
    if of_attention:
        heads += ["pairs that states suit", "the better for each pair", "fewest of both"]
        heads += ["busiest direction"]
        columns = zip(*of_attention, strict=True)
        middle = ", ".join(f"{statistics.median(column):.2f}" for column in columns)
    else:
        heads += ["sources, per node", "rows and sums", "ratio", "CPU, s"]
        middle = f"{statistics.median(ratios):.2f}"
    body = [*markdown_table(heads, rows), "", f"In the middle: {middle}."]
    if args.write and of_attention:
        title = "Attention between parts: rows, or states of destinations"
        write_result("attention_rows", title, [*ABOUT_ATTENTION, "", *body])
    elif args.write:
        write_result("halo_rows", "Rows between parts for a sum", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
