# SPDX-License-Identifier: Apache-2.0
"""What `graphshard partition --data` takes of memory at most, by the number of edges.

    python benchmarks/data_memory.py                                 # 5 and 20 million edges
    python benchmarks/data_memory.py --edges 500000 --kinds csv bin

A table of edges (CSV, Parquet), a folder of OGB's files and a file of DGL's `save_graphs`, each
with the same random edges between a million nodes, and the last two with 16 features a node, are
partitioned at random into 4 parts with ``memory`` of 128 MiB. Each is a process of its own: its
peak above that of imports, and its CPU time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from _common import markdown_table
from tables import peak_bytes, write_table

import graphshard
from graphshard.data.prepare import partition_by_name

NUM_NODES, WIDTH = 1_000_000, 16
_AT_ONCE = 1 << 20
KINDS = ("csv", "parquet", "ogb", "bin")


def edges_of(num_edges: int) -> Iterator[np.ndarray]:
    """Random edges, some rows at a time."""
    rng = np.random.default_rng(0)
    for first in range(0, num_edges, _AT_ONCE):
        yield rng.integers(0, NUM_NODES, (min(_AT_ONCE, num_edges - first), 2))


def write_csv(path: Path, num_edges: int, header: bool) -> None:
    """Edges as CSV, compressed if the name says so."""
    import pyarrow as pa
    from pyarrow import csv

    is_packed = path.suffix == ".gz"
    with gzip.open(path, "wb", compresslevel=1) if is_packed else path.open("wb") as file:
        for number, block in enumerate(edges_of(num_edges)):
            table = pa.table({"src": block[:, 0], "dst": block[:, 1]})
            csv.write_csv(table, file, csv.WriteOptions(include_header=header and number == 0))


def write_data(kind: str, folder: Path, num_edges: int) -> Path:
    """A data set in its form; what `graphshard partition --data` names."""
    import pyarrow as pa

    if kind == "csv":
        write_csv(folder / "edges.csv", num_edges, header=True)
        return folder / "edges.csv"
    if kind == "parquet":
        tables = (pa.table({"src": b[:, 0], "dst": b[:, 1]}) for b in edges_of(num_edges))
        write_table(folder / "edges.parquet", tables)
        return folder / "edges.parquet"
    features = np.random.default_rng(1).random((NUM_NODES, WIDTH), np.float32).round(3)
    if kind == "bin":
        src, dst = (
            torch.from_numpy(end) for end in np.concatenate([*edges_of(num_edges)]).T.copy()
        )
        graph = graphshard.graph((src, dst), num_nodes=NUM_NODES)
        graph.ndata["feat"] = torch.from_numpy(features)
        graphshard.save_graphs(folder / "graph.bin", graph)
        return folder / "graph.bin"
    raw, split = folder / "ogbn_made" / "raw", folder / "ogbn_made" / "split" / "time"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    write_csv(raw / "edge.csv.gz", num_edges, header=False)
    with gzip.open(raw / "node-feat.csv.gz", "wb", compresslevel=1) as file:
        np.savetxt(file, features, "%.3f", ",")
    labels = np.random.default_rng(2).integers(0, 9, NUM_NODES)
    tables_of_numbers = {raw / "num-node-list": [NUM_NODES], raw / "node-label": labels}
    tables_of_numbers |= {split / name: [n] for n, name in enumerate(("train", "valid", "test"))}
    for path, numbers in tables_of_numbers.items():
        with gzip.open(path.with_suffix(".csv.gz"), "wb") as file:
            np.savetxt(file, numbers, "%d")
    return folder / "ogbn_made"


def run(kind: str, num_edges: int, parent: Path | None) -> dict[str, float]:
    """Write a data set, and partition it in another process."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        source = write_data(kind, Path(folder), num_edges)
        command = [sys.executable, __file__, "--partition", str(source)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        taken: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return taken


def partition(source: Path) -> None:
    """Partition once, and print what it took."""
    before, start = peak_bytes(), time.process_time()
    partition_by_name(str(source), 4, source.parent / "parts", part_method="random", memory=1 << 27)
    taken = {"peak": peak_bytes() - before, "seconds": time.process_time() - start}
    sys.stdout.write(json.dumps(taken) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, and measure each kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--edges", type=int, nargs="+", default=[5_000_000, 20_000_000])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--folder", type=Path, help="where files are made")
    parser.add_argument("--partition", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.partition is not None:
        partition(args.partition)
        return
    rows = []
    for kind in args.kinds:
        for num_edges in args.edges:
            taken = run(kind, num_edges, args.folder)
            rows.append(
                [kind, f"{num_edges:,}", f"{taken['peak'] / 1e6:.0f}", f"{taken['seconds']:.1f}"]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    print(markdown_table(["data", "edges", "MB at most", "CPU s"], rows))


if __name__ == "__main__":
    main()
