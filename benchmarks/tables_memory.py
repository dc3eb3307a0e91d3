# SPDX-License-Identifier: Apache-2.0
"""What reading tables takes of memory at most, beside what is kept of them.

    python benchmarks/tables_memory.py                              # 5 million nodes and edges
    python benchmarks/tables_memory.py --rows 200000 --cases joined
    python benchmarks/tables_memory.py --on-disk --rows 1000000 --edges 20000000 --cases links

Tables of Parquet with hashes as ids are read in the ways that once held a column whole: joined
tables, lists of labels, weights and times, relations by name, splits of links, dropped edges. Each
is a process of its own. *Kept* are the fields, the ends of edges and the ids; 256 MB of columns may
wait in memory besides (``graphshard.data``), and pages of files on disk, which the system takes
back when it needs them, count in the peak, too. With ``--on-disk`` they are partitioned instead, at
random into 4 parts, with edges on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _common import ROOT, Side, markdown_table, run_side, write_result
from tables import ids_of, peak_bytes, write_table

from graphshard.data import EdgeTable, JoinedTable, NodeTable, Tables, partition_tables
from graphshard.data._read_tables import read_tables

_ROWS_AT_ONCE = 1 << 18
_GENRES = ("Action", "Drama", "Comedy", "Thriller", "War")
#: What nodes and edges are asked for; columns that are not named are ignored.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "labels": ({"label": "label", "split": [0.6, 0.2, 0.2]}, {}),
    "joined": ({"label": "label", "split": [0.6, 0.2, 0.2], "is_joined": True}, {}),
    "sets of labels": (
        {"label": {"column": "genres", "separator": "|"}, "split": [0.6, 0.2, 0.2]},
        {},
    ),
    "weights and times": ({}, {"weight": "w", "time": "t"}),
    "relations": ({}, {"relation_column": "rel"}),
    "links": ({}, {"split": [0.8, 0.1, 0.1]}),
    "dropped edges": ({}, {"is_simple": True}),
}


def make_files(folder: Path, rows: int, num_edges: int) -> dict[str, str]:
    """Tables of nodes, of more about them, and of edges, written once."""
    import pyarrow as pa
    from pyarrow import compute

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    classes = pa.array([f"class {i}" for i in range(10)])

    def drawn(values: Any, count: int) -> Any:
        return values.take(pa.array(rng.integers(0, len(values), count)))

    def nodes() -> Iterator[Any]:
        order = rng.permutation(rows)
        for begin in range(0, rows, _ROWS_AT_ONCE):
            numbers = order[begin : begin + _ROWS_AT_ONCE]
            genres = [drawn(pa.array(_GENRES), len(numbers)) for _ in range(2)]
            yield pa.table(
                {
                    "id": ids_of("hashes", numbers),
                    "label": drawn(classes, len(numbers)),
                    "genres": compute.binary_join_element_wise(*genres, "|"),
                    "x": rng.random(len(numbers)),
                }
            )

    def joined() -> Iterator[Any]:
        order = rng.permutation(rows)
        cities = pa.array([f"city number {i}" for i in range(1000)])
        for begin in range(0, rows, _ROWS_AT_ONCE):
            numbers = order[begin : begin + _ROWS_AT_ONCE]
            values = pa.array(rng.random(8 * len(numbers), dtype=np.float32))
            yield pa.table(
                {
                    "id": ids_of("hashes", numbers),
                    "vector": pa.FixedSizeListArray.from_arrays(values, 8),
                    "city": drawn(cities, len(numbers)),
                    "y": rng.random(len(numbers)),
                }
            )

    def edges() -> Iterator[Any]:
        for begin in range(0, num_edges, _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, num_edges - begin)
            ends = [ids_of("hashes", rng.integers(0, rows, count)) for _ in range(2)]
            times = pa.array(rng.integers(0, 10**9, count)).cast(pa.timestamp("s"))
            yield pa.table(
                {"src": ends[0], "dst": ends[1], "w": rng.random(count), "t": times}
                | {"rel": drawn(classes, count)}
            )

    paths = {}
    for name, batches in (("nodes", nodes), ("joined", joined), ("edges", edges)):
        path = folder / f"memory-{rows}-{num_edges}-{name}.parquet"
        if not path.exists():
            write_table(path, batches())
        paths[name] = os.fspath(path)
    return paths


def run_case(case: str, files: dict[str, str], is_on_disk: bool) -> None:
    """Read once, or partition, and print what it took."""
    of_nodes, of_edges = (dict(said) for said in CASES[case])
    more: dict[str, Any] = {}
    if of_nodes.pop("is_joined", False):
        more["join"] = [JoinedTable(files=files["joined"], id="id")]
    else:
        more["features"] = ["x"] if of_nodes else []
    is_simple = of_edges.pop("is_simple", False)
    if "join" in more:
        more["ignore"] = ["genres"]
    nodes = NodeTable(files=files["nodes"], id="id", **of_nodes, **more)
    edges = EdgeTable(files=files["edges"], source="src", target="dst", features=[], **of_edges)
    tables = Tables(
        nodes={"user": nodes},
        edges={("user", "knows", "user"): edges},
        parallel="drop" if is_simple else "keep",
    )
    before = peak_bytes()
    if is_on_disk:
        start = time.process_time()
        with tempfile.TemporaryDirectory(dir=Path(files["edges"]).parent) as folder:
            partition_tables(tables, 4, folder, part_method="random", memory=1 << 29)
        taken = {"peak": peak_bytes() - before, "seconds": time.process_time() - start}
        sys.stdout.write(json.dumps(taken) + "\n")
        return
    read = read_tables(tables)
    graph = read.graph
    fields = [*graph.ndata.values(), *graph.edata.values()]
    kept = sum(field.numel() * field.element_size() for field in fields)
    kept += 16 * graph.num_edges() + sum(ids.nbytes for ids in read.ids.values())
    sys.stdout.write(json.dumps({"peak": peak_bytes() - before, "kept": kept}) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, write files, read them in each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000, help="of each table")
    parser.add_argument("--edges", type=int, help="rows of the table of edges")
    parser.add_argument("--on-disk", action="store_true", help="partition, with edges on disk")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--files", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.case is not None:
        run_case(args.case, args.files, args.on_disk)
        return
    num_edges = args.rows if args.edges is None else args.edges
    files = make_files(args.folder, args.rows, num_edges)
    rows = []
    for case in args.cases:
        command = [sys.executable, __file__, "--files", json.dumps(files), "--case", case]
        if args.on_disk:
            run = run_side(Side(name=case, command=[*command, "--on-disk"]))
            rows.append([case, f"{run['peak'] / (1 << 20):.0f}", f"{run['seconds']:.1f}"])
            continue
        run = run_side(Side(name=case, command=command))
        rows.append([case, *(f"{run[key] / (1 << 20):.0f}" for key in ("kept", "peak"))])
    for path in files.values():
        os.unlink(path)
    body = [
        f"{args.rows:,} nodes and {num_edges:,} edges, Parquet, hashes as ids. MB is above what "
        "imports take.",
        "",
        *markdown_table(
            ["what is partitioned", "MB at most", "CPU s"]
            if args.on_disk
            else ["what is read", "MB kept", "MB at most"],
            rows,
        ),
    ]
    if args.write:
        write_result("tables_memory", "What reading tables takes of memory", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
