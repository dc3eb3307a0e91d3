# SPDX-License-Identifier: Apache-2.0
"""Draws of neighbours where the files of a partition have them, and from one array in memory.

    python benchmarks/draws_in_files.py --write

A graph of communities in parts. The same draws are made from `SourcePieces` over the mapped files
of all parts (int32, in numbers of the parts) and from the ids of all sources in shared memory, in
large pages, as int32 and as int64: what ranks of a host shared before edges stayed in files. Drawn
for are nodes anywhere, and those of one part. All in turn; CPU nanoseconds for an edge that is
drawn, medians (quartiles) of all turns. What is drawn is compared, and equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from _common import markdown_table, write_result

import graphshard as gs
from graphshard.fullbatch import StoredEdges
from graphshard.ops import draw_neighbors
from graphshard.ops.sampling import SourcePieces
from graphshard.partition import partition_graph
from large_pages import shared

COMMUNITY, BATCH, FANOUT = 2000, 10_000, 10


def parts(folder: Path, num_nodes: int, num_edges: int, num_parts: int) -> str:
    """Partition a graph of which 90 % of the edges stay in communities; these are not cut."""
    src = torch.randint(num_nodes, (num_edges,))
    near = src // COMMUNITY * COMMUNITY + torch.randint(COMMUNITY, (num_edges,))
    is_near = torch.rand(num_edges) < 0.9
    dst = torch.where(is_near, near, torch.randint(num_nodes, (num_edges,)))
    graph = gs.graph((src, dst.clamp(max=num_nodes - 1)), num_nodes=num_nodes)
    number = torch.arange(num_nodes) * num_parts // num_nodes
    partition_graph(graph, "g", num_parts, str(folder), part_method=number, quiet=True)
    return str(folder / "g.json")


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=400_000)
    parser.add_argument("--edges", type=int, default=8_000_000)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="write a file of results")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = parts(Path(folder), args.nodes, args.edges, args.parts)
        pieces, ends, count, num_cut = [], [torch.zeros(1, dtype=torch.int64)], 0, 0
        for rank in range(args.parts):
            data = gs.load_dgl_partition_data(path, rank)
            (edges,) = data.edges.values()
            assert isinstance(edges, StoredEdges)
            pieces.append(edges.piece(data.node_map().starts[rank]))
            ends.append(edges.indptr[1:].to(torch.int64) + count)
            count, num_cut = count + edges.num_edges, num_cut + edges.num_cut(rank)
        indptr, in_files = torch.cat(ends), SourcePieces(pieces, torch.int32)
        ids = in_files[:]
        ways = {
            "int32, shared memory": (indptr.int(), shared(ids, True)[0]),
            "int64, shared memory": (indptr, shared(ids.long(), True)[0]),
            "int32 of the parts, mapped files": (indptr.int(), in_files),
        }
        rows = []
        for name, most in (("anywhere", args.nodes), ("of one part", args.nodes // args.parts)):
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(args.turns):
                nodes = torch.randint(most, (BATCH,))
                drawn = []
                for way, (pointer, sources) in ways.items():
                    given = pointer, nodes.to(pointer.dtype), FANOUT, turn, nodes
                    start = time.process_time()
                    picked = draw_neighbors(*given, indices=sources, check=False)[2]
                    taken[way].append((time.process_time() - start) / len(picked) * 1e9)
                    drawn.append(picked.long())
                assert all(torch.equal(drawn[0], other) for other in drawn[1:])
            for way, figures in taken.items():
                low, middle, high = statistics.quantiles(figures, n=4)
                rows.append([name, way, f"{middle:.1f} ({low:.1f} to {high:.1f})"])
    body = [
        f"{args.nodes:,} nodes, {args.edges:,} edges ({100 * num_cut / count:.1f} % cut), "
        f"{args.parts} parts; {FANOUT} neighbours of {BATCH:,} nodes, one thread, "
        f"{args.turns} turns.",
        "",
        *markdown_table(["nodes", "sources", "CPU ns for an edge that is drawn"], rows),
    ]
    if args.write:
        write_result("draws_in_files", "Draws where files have the edges", body)
    else:
        sys.stdout.write("\n".join([*body, ""]))


if __name__ == "__main__":
    main()
