# SPDX-License-Identifier: Apache-2.0
"""Reading tables: time and memory, beside what pyarrow.dataset alone takes for the same columns.

    python benchmarks/tables.py                                   # 4 million edges, all kinds
    python benchmarks/tables.py --edges 32000000 --nodes 2000000 --write
    python benchmarks/tables.py --formats csv --kinds text        # some of it

A table of nodes has the column ``id``, one of edges ``src`` and ``dst``, and with ``--features``
both have columns of numbers, and columns that nobody asks for. ``graphshard`` makes a graph of
them: ids become numbers, dangling ends, repeated edges and self loops are counted. ``pyarrow``
reads the same columns batch by batch and drops them. ``look-ups`` is what lies between, of Parquet:
it reads as pyarrow does, finds the number of each id on two threads, and keeps nothing. Each is a
process of its own with two threads; files are in the page cache. The peak of memory is that of the
process above what imports take.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from _common import ROOT, Side, markdown_table, median, run_in_turn, write_result

import graphshard.data
from graphshard.data._read_tables import read_tables
from graphshard.data._row_ids import IdColumn, RowIds

KINDS = ("dense", "hashes", "text")
FORMATS = ("parquet", "csv")
#: At most so many times the wall time of pyarrow.dataset, as the issue has it.
LIMITS = {"dense": 2.0, "hashes": 2.0, "text": 4.0}

_SELF = resource.RUSAGE_SELF


def ids_of(kind: str, numbers: np.ndarray) -> Any:
    """Ids of nodes as a pyarrow array: 0 to n, hashes of uint64, or text of some 14 letters."""
    import pyarrow
    from pyarrow import compute

    if kind == "dense":
        return pyarrow.array(numbers)
    hashes = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
    hashes ^= hashes >> np.uint64(31)
    if kind == "hashes":
        return pyarrow.array(hashes)
    digits = pyarrow.array(hashes % np.uint64(100_000)).cast(pyarrow.string())
    return compute.binary_join_element_wise("u", digits, pyarrow.array(numbers).cast("string"), "_")


def write_table(path: Path, batches: Any) -> None:
    """Write batches as the ending of the path says."""
    from pyarrow import csv, parquet

    partial = path.with_name(f".{path.name}")
    writer: Any = None
    for batch in batches:
        if writer is None:
            kind = parquet.ParquetWriter if path.suffix == ".parquet" else csv.CSVWriter
            writer = kind(os.fspath(partial), batch.schema)
        writer.write(batch)
    writer.close()
    partial.rename(path)


def make_files(folder: Path, kind: str, form: str, args: argparse.Namespace) -> dict[str, str]:
    """The tables of nodes and edges, written once."""
    import pyarrow

    folder.mkdir(parents=True, exist_ok=True)
    name = f"tables-{kind}-{args.nodes}-{args.edges}-{args.features}"
    paths = {what: folder / f"{name}-{what}.{form}" for what in ("nodes", "edges")}
    at_once = 1 << 20

    def numbers(rng: Any, count: int) -> dict[str, Any]:
        made = {f"x{i}": pyarrow.array(rng.standard_normal(count)) for i in range(args.features)}
        return made | {f"unused{i}": pyarrow.array(rng.random(count)) for i in range(args.features)}

    def nodes() -> Any:
        rng = np.random.default_rng(0)
        order = rng.permutation(args.nodes)
        for begin in range(0, args.nodes, at_once):
            ids = ids_of(kind, order[begin : begin + at_once])
            yield pyarrow.table({"id": ids} | numbers(rng, len(ids)))

    def edges() -> Any:
        rng = np.random.default_rng(1)
        for begin in range(0, args.edges, at_once):
            count = min(at_once, args.edges - begin)
            ends = [ids_of(kind, rng.integers(0, args.nodes, count)) for _ in range(2)]
            yield pyarrow.table({"src": ends[0], "dst": ends[1]} | numbers(rng, count))

    for what, batches in (("nodes", nodes), ("edges", edges)):
        if not paths[what].exists():
            write_table(paths[what], batches())
    return {what: os.fspath(path) for what, path in paths.items()}


# ---------------------------------------------------------------------- the sides


def read_by_pyarrow(files: dict[str, str], num_features: int) -> int:
    """Read the columns in batches, and drop them."""
    from pyarrow import dataset

    rows = 0
    for what, ids in (("nodes", ["id"]), ("edges", ["src", "dst"])):
        form = Path(files[what]).suffix[1:]
        columns = ids + [f"x{i}" for i in range(num_features)]
        for batch in dataset.dataset(files[what], format=form).to_batches(columns=columns):
            rows += len(batch)
    return rows


def read_by_graphshard(files: dict[str, str], num_features: int) -> int:
    """Read the tables into a graph."""
    features = [f"x{i}" for i in range(num_features)]
    tables = graphshard.data.Tables(
        nodes={"node": graphshard.data.NodeTable(files=files["nodes"], id="id", features=features)},
        edges={
            ("node", "edge", "node"): graphshard.data.EdgeTable(
                files=files["edges"], source="src", target="dst", features=features
            )
        },
    )
    content = read_tables(tables).content
    graph = content.graph(content.least_idtype)  # as `partition_tables` does
    return int(graph.num_nodes() + graph.num_edges())


def read_and_look_up(files: dict[str, str], num_features: int) -> int:
    """Read the columns of ids in batches, and find the number of each; no features are read."""
    from pyarrow import dataset

    def batches(what: str, columns: list[str]) -> Any:
        form = Path(files[what]).suffix[1:]
        return dataset.dataset(files[what], format=form).to_batches(columns=columns)

    ids, column, rows = RowIds("node"), IdColumn("a table", False), 0
    for batch in batches("nodes", ["id"]):
        ids.add(batch.column("id"), column)
        rows += len(batch)
    found = [np.empty(1 << 20, np.int64) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        for batch in batches("edges", ["src", "dst"]):
            ends = [out[: len(batch)] for out in found]
            other = pool.submit(ids.find, batch.column("src"), column, ends[0])
            ids.find(batch.column("dst"), column, ends[1])
            other.result()
            rows += len(batch)
    return rows


READERS = {
    "pyarrow": read_by_pyarrow,
    "look-ups": read_and_look_up,
    "graphshard": read_by_graphshard,
}


def peak_bytes() -> int:
    """The most memory that this process has held, since it began to run this program."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def run_reader(name: str, files: dict[str, str], num_features: int) -> None:
    """Read once and print what it took."""
    import pyarrow
    from pyarrow import csv, dataset  # noqa: F401

    pyarrow.set_cpu_count(2)
    gc.collect()  # what imports left behind would be collected by whoever makes an object next
    before, start, used = peak_bytes(), time.perf_counter(), resource.getrusage(_SELF)
    rows = READERS[name](files, num_features)
    usage = resource.getrusage(_SELF)
    user, system = usage.ru_utime - used.ru_utime, usage.ru_stime - used.ru_stime
    result = {
        "rows": rows,
        "wall": time.perf_counter() - start,
        "cpu": user + system,
        "system": system,
        "peak": peak_bytes() - before,
    }
    print(json.dumps(result))


def compare(form: str, kind: str, args: argparse.Namespace) -> list[str]:
    """A row of the result."""
    files = make_files(args.folder, kind, form, args)
    command = [sys.executable, __file__, "--files", json.dumps(files)]
    command += ["--features", str(args.features)]
    # Of CSV, pyarrow alone makes text or doubles of some ids.
    names = [name for name in READERS if name != "look-ups" or form == "parquet"]
    sides = [Side(name=name, command=[*command, "--reader", name]) for name in names]
    results = run_in_turn(sides, args.rounds)
    for path in files.values():
        if not args.keep:
            os.unlink(path)
    rows = {run["rows"] for runs in results.values() for run in runs}
    assert rows == {args.nodes + args.edges}, f"rows are lost: {rows}"
    cells = [form, kind]
    for key in ("wall", "cpu", "peak"):
        for name in READERS:
            if name not in results:
                cells.append("-")
            elif key == "peak":
                cells.append(f"{median(results[name], key) / (1 << 20):.0f}")
            else:
                more = f" ({median(results[name], 'system'):.1f})" if key == "cpu" else ""
                cells.append(f"{median(results[name], key):.1f}{more}")
        if key != "peak":
            ratio = median(results["graphshard"], key) / median(results["pyarrow"], key)
            cells.append(f"{ratio:.2f}")
    cells.append(f"{LIMITS[kind]:.0f}")
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, write files, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=250_000)
    parser.add_argument("--edges", type=int, default=4_000_000)
    parser.add_argument("--features", type=int, default=0, help="columns of numbers, read and not")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--keep", action="store_true", help="keep the tables for another run")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--reader", choices=list(READERS), help=argparse.SUPPRESS)
    parser.add_argument("--files", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.reader is not None:
        run_reader(args.reader, args.files, args.features)
        return
    header = ["format", "ids"]
    header += [*(f"s {name}" for name in READERS), "ratio"]
    header += [*(f"CPU s {name}" for name in READERS), "ratio of CPU"]
    header += [*(f"MB {name}" for name in READERS), "limit of ratio"]
    rows = [compare(form, kind, args) for form in args.formats for kind in args.kinds]
    body = [
        f"{args.nodes:,} nodes, {args.edges:,} edges, {args.features} columns of features; medians "
        f"of {args.rounds} rounds, two threads, files in the page cache. CPU seconds, in brackets "
        "those of the system, which clears new pages. MB is the peak of memory above what imports "
        "take. Look-ups: reading, and finding the number of each id, alone.",
        "",
        *markdown_table(header, rows),
    ]
    if args.write:
        write_result("tables", "What it costs to read tables into a graph", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
