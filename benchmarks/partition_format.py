# SPDX-License-Identifier: Apache-2.0
"""What the files of a partition hold an edge, and what writing, loading and verifying them cost.

    python benchmarks/partition_format.py                        # a graph of 4 million edges
    python benchmarks/partition_format.py --datasets DIR --names cora,cnr-2000 --edges 0

Each step is a process of its own with one thread; its peak of memory is that above its start. Only
public names are called, so that the file can be run in a checkout that writes another format.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from _common import markdown_table, write_result
from safetensors import safe_open

import graphshard
from graphshard.data import load_dataset
from graphshard.partition import load_partition, partition_graph, verify_partition

NUM_PARTS = 4
STEPS = ("write", "stream", "load", "train", "verify")
WHAT = {
    "write": "`partition_graph`",
    "stream": "`partition_graph(memory=2**28)`",
    "load": "`load_partition`, a part",
    "train": "`load_dgl_partition_data`, a part",
    "verify": "`verify_partition`",
}


def shuffled_graph(num_edges: int) -> graphshard.Graph:
    """16 edges a node, 77 % of them inside groups of 200 nodes, ids and edges in random order."""
    rng, num_nodes = np.random.default_rng(0), num_edges // 16
    src = rng.integers(0, num_nodes, num_edges)
    near = np.minimum(src // 200 * 200 + rng.integers(0, 200, num_edges), num_nodes - 1)
    dst = np.where(rng.random(num_edges) < 0.77, near, rng.integers(0, num_nodes, num_edges))
    numbers = rng.permutation(num_nodes)
    ends = torch.from_numpy(numbers[src]), torch.from_numpy(numbers[dst])
    return graphshard.graph(ends, num_nodes=num_nodes)


def bytes_by_array(folder: Path) -> Counter[str]:
    """Bytes of structure and original ids of edges, in all parts; names of relations left out."""
    sizes: Counter[str] = Counter()
    for path in sorted(folder.glob("part*/*.safetensors")):
        if path.stem == "node_feats":
            continue
        total = path.stat().st_size
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                short = name.split("/")[-1] if path.stem == "edge_feats" else name
                sizes[short] += tensor.nbytes
                total -= tensor.nbytes
        sizes["headers"] += total
    return sizes


def peak() -> float:
    """The most memory that this process had, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM; run this on Linux")


def run_step(step: str, method: str, num_edges: int, folder: Path) -> None:
    """Print CPU s, and the peak above the start."""
    torch.set_num_threads(1)
    path = folder / method / "g.json"
    g = shuffled_graph(num_edges) if step in ("write", "stream") else graphshard.graph(([], []))
    before, start = peak(), time.process_time()
    if step == "write":
        partition_graph(g, "g", NUM_PARTS, path.parent, part_method=method, quiet=True)
    elif step == "stream":
        out = folder / "streamed"
        partition_graph(g, "g", NUM_PARTS, out, part_method="random", memory=1 << 28, quiet=True)
    elif step == "load":
        load_partition(path, 0)
    elif step == "train":
        graphshard.load_dgl_partition_data(path, 0)
    else:
        assert verify_partition(path) == []
    print(time.process_time() - start, peak() - before)


def measured(args: argparse.Namespace, folder: Path) -> list[list[str]]:
    """A row for each step and method: the least CPU s of some rounds, and the peak."""
    rows = []
    for method in ("metis", "random"):
        for step in STEPS:
            if step == "stream" and method == "metis":
                continue
            command = [sys.executable, __file__, "--step", step, "--method", method]
            command += ["--edges", str(args.edges), "--folder", str(folder)]
            alone = {**os.environ, "OMP_NUM_THREADS": "1"}
            runs = []
            for _ in range(args.rounds):
                done = subprocess.run(command, env=alone, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{step} of {method} failed: {done.stderr[-2000:]}")
                runs.append([float(word) for word in done.stdout.split()])
            cpu, mebibytes = (min(column) for column in zip(*runs, strict=True))
            rows.append([WHAT[step], method, f"{cpu:.2f}", f"{mebibytes:.0f}"])
    return rows


def sizes(names: list[str], args: argparse.Namespace, folder: Path) -> list[list[str]]:
    """A row for each graph and method: bytes an edge, and of what."""
    rows = []
    for name in names:
        if name:
            place = name if args.datasets is None else args.datasets / name
            g = load_dataset(place, features=False).graph
            for field in list(g.ndata.keys()):
                del g.ndata[field]
        else:
            g = shuffled_graph(args.edges)
        for method in ("metis", "random"):
            out = folder / f"sizes-{name}-{method}"
            partition_graph(g, "g", NUM_PARTS, out, part_method=method, quiet=True, seed=1)
            by_array, num_edges = bytes_by_array(out), g.num_edges()
            listed = ", ".join(f"{k} {v / num_edges:.2f}" for k, v in by_array.most_common(5))
            total = sum(by_array.values()) / num_edges
            counts = f"{g.num_nodes():,}", f"{num_edges:,}"
            rows.append([name or "shuffled", *counts, method, f"{total:.2f}", listed])
    return rows


def main() -> None:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--edges", type=int, default=4_000_000, help="0: data sets alone")
    parser.add_argument("--datasets", type=Path, help="folder of the folders of --names")
    parser.add_argument("--names", default="")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--method", default="random", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        run_step(args.step, args.method, args.edges, args.folder)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        names = [name for name in args.names.split(",") if name] + ([""] if args.edges else [])
        header = ["graph", "nodes", "edges", "parts by", "B/edge", "most of it"]
        body = markdown_table(header, sizes(names, args, folder))
        if args.edges:
            header = ["step", "parts by", "CPU s", "peak above start, MiB"]
            body += ["", *markdown_table(header, measured(args, folder))]
    if args.write:
        write_result("partition_format", "Bytes and costs of the files of a partition", body)
    else:
        print("\n".join(body))


if __name__ == "__main__":
    main()
