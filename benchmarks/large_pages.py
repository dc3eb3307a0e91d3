# SPDX-License-Identifier: Apache-2.0
"""Draws of edges and reads of rows in shared memory, with small pages and with large ones.

    python benchmarks/large_pages.py --write

A graph of random edges, with edge ids, and a table of rows, twice in memory that processes share:
once as Linux maps it, and once moved into large pages, as graph servers and shared arrays are. The
two are used in turn; medians, with quartiles, of all turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from _common import markdown_table, write_result
from torch import Tensor

from graphshard._base.files import MappedFile
from graphshard.ops import copy_rows, draw_neighbors

SEEDS = 20_000
ROWS, COLUMNS = 10_000, 128


def shared(values: Tensor, is_large: bool) -> tuple[Tensor, float]:
    """A copy in shared memory, and the seconds that large pages took."""
    num_bytes = values.numel() * values.element_size()
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(num_bytes)
        memory = MappedFile(file.fileno(), num_bytes)
    copy = torch.frombuffer(memory.buffer, dtype=values.dtype).view(values.shape)
    copy.copy_(values)
    start = time.perf_counter()
    if is_large and not memory.use_large_pages(num_bytes):
        sys.exit("this system moves no shared memory into large pages")
    return copy, time.perf_counter() - start if is_large else 0.0


def in_turn(sides: list[Callable[[int], object]], turns: int) -> list[str]:
    """Milliseconds of each side, and the second's share of the first's."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(turns):
        for side, kept in zip(sides, seconds, strict=True):
            start = time.perf_counter()
            side(turn)
            kept.append(1e3 * (time.perf_counter() - start))
    quartiles = [statistics.quantiles(kept, n=4) for kept in seconds]
    shown = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in quartiles]
    return [*shown, f"{quartiles[1][1] / quartiles[0][1]:.2f}"]


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=25_000_000)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    torch.manual_seed(0)
    degrees = torch.bincount(torch.randint(args.nodes, (args.edges,)), minlength=args.nodes)
    arrays = {
        "indptr": torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)]),
        "indices": torch.randint(args.nodes, (args.edges,)),
        "eids": torch.randperm(args.edges),
        "table": torch.randn(args.nodes, COLUMNS),
    }
    both: list[dict[str, Tensor]] = []
    moving = num_bytes = 0.0
    for is_large in (False, True):
        copies = {name: shared(values, is_large) for name, values in arrays.items()}
        both.append({name: copy for name, (copy, _) in copies.items()})
        moving = sum(seconds for _, seconds in copies.values())
        num_bytes = sum(copy.nbytes for copy, _ in copies.values())
    seeds = [torch.randint(args.nodes, (SEEDS,)) for _ in range(args.turns)]
    ids = [torch.randint(args.nodes, (ROWS,)) for _ in range(args.turns)]
    out = torch.empty(ROWS, COLUMNS)

    def draw(memory: dict[str, Tensor], fanout: int) -> Callable[[int], object]:
        indptr, indices, eids = memory["indptr"], memory["indices"], memory["eids"]
        return lambda turn: draw_neighbors(
            indptr, seeds[turn], fanout, turn, seeds[turn], indices=indices, eids=eids
        )

    def read(memory: dict[str, Tensor]) -> Callable[[int], object]:
        return lambda turn: copy_rows(out, None, memory["table"], ids[turn])

    lines = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for fanout in (5, 15):
            name = f"draw {fanout} edges of each of {SEEDS:,} nodes"
            sides = [draw(memory, fanout) for memory in both]
            lines.append([name, threads, *in_turn(sides, args.turns)])
        sides = [read(memory) for memory in both]
        lines.append([f"read {ROWS:,} rows of {COLUMNS}", threads, *in_turn(sides, args.turns)])
    header = ["", "threads", "ms, small pages", "ms, large pages", "ratio"]
    body = [
        f"{args.nodes:,} nodes, {args.edges:,} edges; median (quartiles) of {args.turns} turns.",
        "",
        *markdown_table(header, lines),
        "",
        f"Moving {num_bytes / 2**30:.2f} GiB into large pages took {moving:.2f} s, once.",
    ]
    if args.write:
        write_result("large_pages", "Shared memory in large pages", body)
    else:
        sys.stdout.write("\n".join([*body, ""]))


if __name__ == "__main__":
    main()
