# SPDX-License-Identifier: Apache-2.0
"""Partitions made while edges pass by: what they cost, and their cut beside METIS's.

    python benchmarks/partition_stream.py                       # 20 million edges, three methods
    python benchmarks/partition_stream.py --question cut --datasets DIR
    python benchmarks/partition_stream.py --question cut --graphs skewed,mesh --counts 2,3,5,16
    python benchmarks/partition_stream.py --question all --datasets DIR --write

*cost*: a graph of communities is written to a file in shuffled order, both directions of every
edge, ids at random; each method is a process of its own that partitions it into ``--parts`` with
``--threads``, from the file, with original ids and without features. CPU seconds are those of the
process after its start, and wall that of the clock, which wants a quiet machine; memory is its peak
above what it had then. METIS reads the graph first. The last column is the least wall that stages
allow with so many threads: of each the CPU seconds of the first thread, or an even share of all.

*cut*: assignments alone, of the graphs of ``--datasets`` or generated ones (`GENERATED`), and with
``--seeds`` how both vary, least to most, as ratios to METIS's of the first seed. The streamed
assignment gets no level of more than half of the nodes and of the edges for METIS, so that it
clusters at least once, as a graph that does not fit must; one that fits is given to METIS as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import Side, markdown_table, run_side, write_result
from peers._peak import peak_mb

HERE = str(Path(__file__).resolve())
METHODS = ("multilevel", "random", "metis")
GRAPHS = (*("cnr-2000", "coauthor-physics", "amazon-computers", "nell", "tolokers", "fb15k-237"),)
#: Of the generated graph: nodes of a community, and communities of a neighbourhood.
COMMUNITY, NEIGHBOURS = 2000, 16


def write_graph(path: Path, num_nodes: int, num_edges: int) -> None:
    """[2, num_edges] int32: 75 % of edges inside a community, 20 % near it, 5 % anywhere."""
    generator = np.random.default_rng(0)
    half = num_edges // 2
    src, anywhere = generator.integers(0, num_nodes, (2, half))
    inside = src // COMMUNITY * COMMUNITY + generator.integers(0, COMMUNITY, half)
    wide = COMMUNITY * NEIGHBOURS
    near = src // wide * wide + generator.integers(0, wide, half)
    draw = generator.random(half)
    dst = np.where(draw < 0.75, inside, np.where(draw < 0.95, near, anywhere))
    numbers = generator.permutation(num_nodes).astype(np.int32)
    src, dst = numbers[src], numbers[np.minimum(dst, num_nodes - 1)]
    order = generator.permutation(2 * half)
    np.save(path, np.stack([np.concatenate(ends)[order] for ends in ((src, dst), (dst, src))]))


def partition(
    graph: Path, num_nodes: int, num_parts: int, method: str, out: str, threads: int
) -> None:
    """One partition; prints a line of JSON."""
    from graphshard.partition import GraphFiles, _streamed, load_partition_stats, partition_graph

    torch.set_num_threads(threads)
    files = GraphFiles(num_nodes=num_nodes, edges=graph)
    clock = time.pthread_getcpuclockid(threading.get_ident())
    #: CPU seconds of all threads and of the first, at the beginning of each stage.
    marks: list[tuple[float, float]] = []

    def mark(_: str = "") -> None:
        marks.append((time.process_time(), time.clock_gettime(clock)))

    class MarkedStages(_streamed.Stages):
        def __init__(self, source: Any, journal: Any, asked: Any, progress: Any = None) -> None:
            super().__init__(source, journal, asked, mark)

    _streamed.Stages = MarkedStages  # type: ignore[misc]
    start, cpu, idle = time.perf_counter(), time.process_time(), peak_mb()
    mark()
    memory = None if method == "metis" else 1 << 29
    partition_graph(files, "g", num_parts, out, part_method=method, memory=memory, quiet=True)
    mark()
    stats = load_partition_stats(f"{out}/g.json")
    least = sum(
        max(first - before_first, (total - before) / threads)
        for (before, before_first), (total, first) in itertools.pairwise(marks)
    )
    result = {
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - start,
        "least": least,
        "peak_mb": peak_mb() - idle,
        "cut": 100 * stats.edge_cut_fraction,
        "halo": max(part.halo_nodes for part in stats.parts),
        "num_edges": stats.num_edges,
    }
    sys.stdout.write(json.dumps(result) + "\n")


def cost(args: argparse.Namespace) -> list[str]:
    """The table of what methods cost."""
    num_nodes = int(args.edges / 16)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        graph = Path(folder) / "edges.npy"
        write_graph(graph, num_nodes, int(args.edges))
        for method in args.methods.split(","):
            options = [str(graph), str(num_nodes), str(args.parts), method, f"{folder}/{method}"]
            options.append(str(args.threads))
            side = Side(
                method,
                [sys.executable, HERE, "--work", *options],
                {"OMP_NUM_THREADS": str(args.threads)},
                timeout=3600.0,
            )
            run = run_side(side)
            sys.stderr.write(f"{method}: {run}\n")
            rows.append(
                [
                    method,
                    f"{run['cpu']:.1f}",
                    f"{run['cpu'] / run['num_edges'] * 1e8:.1f}",
                    f"{run['wall']:.1f}",
                    f"{run['wall'] / run['cpu']:.2f}",
                    f"{run['least'] / run['cpu']:.2f}",
                    f"{run['peak_mb']:.0f}",
                    f"{1024 + 20 * num_nodes / 2**20:.0f}",
                    f"{run['cut']:.2f}",
                    f"{run['halo']:,}",
                ]
            )
    head = [
        *("method", "CPU s", "CPU s per 100 M edges", "wall, s", "wall / CPU"),
        *("least wall / CPU", "peak above start, MiB"),
        *("1 GiB + 20 B a node, MiB", "cut, %", "largest halo (with targets)"),
    ]
    title = f"{int(args.edges):,} edges of {num_nodes:,} nodes, shuffled, {args.parts} parts"
    title += f", {args.threads} thread" + "s" * (args.threads > 1)
    return [f"## Cost: {title}", "", *markdown_table(head, rows)]


def skewed(share: float) -> np.ndarray:
    """Degrees by a power law; so large a share of the edges is inside groups of 100 nodes."""
    generator, num_nodes, num_edges = np.random.default_rng(3), 30_000, 300_000
    weights = (np.arange(num_nodes) + 10.0) ** -0.8
    drawn = generator.choice(num_nodes, (2, num_edges), p=weights / weights.sum())
    src, anywhere = generator.permutation(num_nodes)[drawn]
    inside = src // 100 * 100 + generator.integers(0, 100, num_edges)
    return np.stack([src, np.where(generator.random(num_edges) < share, inside, anywhere)])


def communities() -> np.ndarray:
    """Groups of 50 nodes with four fifths of the edges inside."""
    generator = np.random.default_rng(3)
    src, anywhere = generator.integers(0, 20_000, (2, 120_000))
    inside = src // 50 * 50 + generator.integers(0, 50, 120_000)
    return np.stack([src, np.where(generator.random(120_000) < 0.8, inside, anywhere)])


def grid(*shape: int) -> np.ndarray:
    """Nodes numbered row by row, each with an edge to the next in each direction."""
    ids = np.arange(np.prod(shape)).reshape(shape)
    pairs = []
    for axis in range(len(shape)):
        lines = np.moveaxis(ids, axis, 0)
        pairs.append(np.stack([lines[:-1].ravel(), lines[1:].ravel()]))
    return np.concatenate(pairs, axis=1)


def shuffled(edges: np.ndarray) -> np.ndarray:
    """With other numbers for nodes."""
    return np.random.default_rng(1).permutation(int(edges.max()) + 1)[edges]


def points(num_nodes: int, dim: int) -> np.ndarray:
    """Places of nodes in the unit square or cube."""
    return np.random.default_rng(0).random((num_nodes, dim))


def triangulation(num_nodes: int, dim: int) -> np.ndarray:
    """Delaunay's, of points at random."""
    from scipy.spatial import Delaunay

    simplices = Delaunay(points(num_nodes, dim)).simplices
    pairs = np.concatenate([simplices[:, p] for p in itertools.combinations(range(dim + 1), 2)])
    return np.unique(np.sort(pairs, axis=1), axis=0).T.astype(np.int64)


def geometric(num_nodes: int) -> np.ndarray:
    """Points of a square, so near each other that they have 10 neighbours on average."""
    from scipy.spatial import cKDTree

    tree = cKDTree(points(num_nodes, 2))
    return tree.query_pairs((10 / np.pi / num_nodes) ** 0.5, output_type="ndarray").T


def nearest(num_nodes: int) -> np.ndarray:
    """Points of a cube, with the 8 that are nearest to each."""
    from scipy.spatial import cKDTree

    places = points(num_nodes, 3)
    near = cKDTree(places).query(places, 9)[1][:, 1:]
    return np.stack([np.repeat(np.arange(num_nodes), 8), near.ravel()])


def roads(side: int) -> np.ndarray:
    """A grid without a third of its streets, and a node in the middle of most others."""
    generator = np.random.default_rng(0)
    edges = grid(side, side)
    edges = edges[:, generator.random(edges.shape[1]) < 0.65]
    has_middle = generator.random(edges.shape[1]) < 0.7
    (src, dst), middle = edges[:, has_middle], side**2 + np.arange(has_middle.sum())
    halves = np.stack([src, middle]), np.stack([middle, dst])
    return np.concatenate([edges[:, ~has_middle], *halves], axis=1)


def tree(num_nodes: int) -> np.ndarray:
    """Every node below one at random of those before it."""
    nodes = np.arange(1, num_nodes)
    return np.stack([(np.random.default_rng(0).random(num_nodes - 1) * nodes).astype(int), nodes])


def binary_tree(num_nodes: int) -> np.ndarray:
    """Every node below the one of half its number."""
    nodes = np.arange(1, num_nodes)
    return np.stack([(nodes - 1) // 2, nodes])


GENERATED = {
    "skewed": lambda: skewed(0.6),
    "skewed-random": lambda: skewed(0.0),
    "communities": communities,
    "mesh": lambda: grid(200, 200),
    "mesh-shuffled": lambda: shuffled(grid(200, 200)),
    "grid-3d": lambda: grid(34, 34, 34),
    "delaunay": lambda: triangulation(40_000, 2),
    "delaunay-3d": lambda: triangulation(30_000, 3),
    "geometric": lambda: geometric(40_000),
    "nearest": lambda: nearest(40_000),
    "ring": lambda: np.stack([np.arange(40_000), (np.arange(40_000) + 1) % 40_000]),
    "tree": lambda: tree(40_000),
    "binary-tree": lambda: binary_tree(40_000),
    "roads": lambda: roads(141),
    "mesh-large": lambda: grid(2000, 2000),
    "mesh-large-shuffled": lambda: shuffled(grid(2000, 2000)),
    "grid-3d-large": lambda: grid(100, 100, 100),
    "nearest-large": lambda: nearest(500_000),
    "roads-large": lambda: roads(1000),
}


def read_edges(folder: Path) -> np.ndarray:
    """[2, num_edges] int64 of a folder of arrays, or generated."""
    if folder.name in GENERATED:
        return np.ascontiguousarray(GENERATED[folder.name](), dtype=np.int64)
    if (folder / "edge_index.npy").exists():
        return np.load(folder / "edge_index.npy").astype(np.int64)
    return np.load(folder / "train.npy")[:, [0, 2]].T.astype(np.int64).copy()


def measure(src: Any, dst: Any, num_nodes: int, parts: Any, num_parts: int) -> tuple[float, int]:
    """Share of edges that are cut, in %, and the most distinct remote sources of a part."""
    is_cut = parts[src] != parts[dst]
    pairs = np.unique(parts[dst[is_cut]].astype(np.int64) * num_nodes + src[is_cut])
    return 100 * float(is_cut.mean()), int(np.bincount(pairs // num_nodes, minlength=1).max())


def cut(args: argparse.Namespace) -> list[str]:
    """The table of cuts."""
    from graphshard.partition import UndirectedGraph
    from graphshard.partition._edge_files import EdgeSorter, kernels
    from graphshard.partition._multilevel import (
        _COARSE_EDGES,
        _COARSE_NODES,
        Level,
        multilevel_partition,
    )
    from graphshard.partition.assign import Constraint, metis_assignment

    torch.set_num_threads(1)
    rows = []
    for name in args.graphs.split(","):
        src, dst = read_edges(Path(args.datasets or ".") / name)
        num_nodes = int(max(src.max(), dst.max())) + 1
        ends = [(torch.from_numpy(src), torch.from_numpy(dst))]
        for num_parts in map(int, args.counts.split(",")):
            start = time.process_time()
            undirected = UndirectedGraph.from_edges(ends, num_nodes)
            nodes = [Constraint("nodes", np.ones(num_nodes, dtype=np.int64))]
            of_metis = metis_assignment(undirected, num_parts, nodes)
            middle = time.process_time()
            # METIS's own generator gives the same for 0 and 1.
            others = range(2, args.seeds + 1)
            all_metis = [of_metis]
            for seed in others:
                all_metis.append(metis_assignment(undirected, num_parts, nodes, seed=seed))
            begin = time.process_time()
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                level, inside = Path(folder) / "level", Path(folder) / "levels"
                level.mkdir()
                inside.mkdir()
                memory: dict[str, Any] = {"memory": 1 << 28, "num_threads": 1}
                sorter = EdgeSorter(level, num_nodes, 2 * len(src), value_dtype=None, **memory)
                sorter.add(dst, src, drops_loops=True)
                if kernels().hash_edges(dst, src, 0, 0, 0, 1)[1]:
                    sorter.split()
                    sorter.add(src, dst, drops_loops=True)
                edges = sorter.finish()
                all_streamed = []
                for seed in (0, *others):
                    all_streamed.append(
                        multilevel_partition(
                            Level(edges, None),
                            num_parts,
                            None,
                            folder=inside,
                            coarse_nodes=min(num_nodes // 2, _COARSE_NODES),
                            coarse_edges=min(edges.num_edges // 2, _COARSE_EDGES),
                            seed=seed,
                            **memory,
                        ).parts
                    )
                    if seed == 0:
                        end = time.process_time()
                    shutil.rmtree(inside)
                    inside.mkdir()
            streamed = all_streamed[0]
            measures = [
                [measure(src, dst, num_nodes, parts, num_parts) for parts in side]
                for side in (all_metis, all_streamed)
            ]
            (cut_metis, halo_metis), (cut_ours, halo_ours) = (side[0] for side in measures)
            spreads = [
                [
                    f"{min(ratios):.2f} to {max(ratios):.2f}"
                    for ratios in (
                        [cut / cut_metis for cut, _ in side],
                        [halo / max(halo_metis, 1) for _, halo in side],
                    )
                ]
                for side in measures
            ]
            largest = np.bincount(streamed, minlength=num_parts).max() * num_parts / num_nodes
            rows.append(
                [
                    name,
                    str(num_parts),
                    f"{cut_metis:.3f}",
                    f"{cut_ours:.3f}",
                    f"{cut_ours / cut_metis:.3f}",
                    *(spreads[0][0], spreads[1][0]),
                    f"{halo_metis:,}",
                    f"{halo_ours:,}",
                    f"{halo_ours / max(halo_metis, 1):.3f}",
                    *(spreads[0][1], spreads[1][1]),
                    f"{largest:.3f}",
                    f"{middle - start:.2f}",
                    f"{end - begin:.2f}",
                ]
            )
            sys.stderr.write(f"{rows[-1]}\n")
    head = [
        *("graph", "parts", "cut METIS, %", "streamed, %", "ratio"),
        *(f"METIS, {args.seeds} seeds", "streamed", "largest halo METIS", "streamed", "ratio"),
        *(f"METIS, {args.seeds} seeds", "streamed", "nodes, max/mean", "CPU s METIS", "streamed"),
    ]
    return [
        "## Cut: the streamed assignment beside METIS on the whole graph",
        "",
        *markdown_table(head, rows),
    ]


def main() -> None:
    """Answer a question."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--question", choices=("cost", "cut", "all"), default="cost")
    parser.add_argument("--edges", type=float, default=2e7)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--datasets", help="folder of data sets, for cut")
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument("--counts", default="4,8", help="numbers of parts")
    parser.add_argument("--seeds", type=int, default=1, help="of both")
    parser.add_argument("--folder", help="where graphs and parts go, 100 bytes an edge")
    parser.add_argument("--write", action="store_true", help="write a file of results")
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        graph, num_nodes, num_parts, method, out, threads = args.work
        partition(Path(graph), int(num_nodes), int(num_parts), method, out, int(threads))
        return
    body: list[str] = []
    if args.question in ("cost", "all"):
        body += [*cost(args), ""]
    if args.question in ("cut", "all"):
        if not args.datasets and not set(args.graphs.split(",")) <= set(GENERATED):
            parser.error("--question cut needs --datasets")
        body += [*cut(args), ""]
    if args.write:
        write_result("partition_stream", "Partitions made while edges pass by", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
