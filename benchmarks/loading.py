# SPDX-License-Identifier: Apache-2.0
"""Loading a part: what its checks cost, one added to the other.

    python benchmarks/loading.py                         # 4 million edges in one part
    python benchmarks/loading.py --write                 # and a file of results

The files are in the page cache, as after a copy: reading them from a disk comes to every row alike,
except that features are else read only when touched.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from _common import ROOT, community_graph, markdown_table, write_result

import graphshard
from graphshard.fullbatch import _partition_data
from graphshard.partition import load as loading
from graphshard.partition import partition_graph
from graphshard.partition.format import PartitionConfig, read_config


def load(config: PartitionConfig, structure: bool, features: bool) -> None:
    """What `load_partition` does after reading the JSON."""
    loading.load_structure(config, 0, checksum=structure).graph()
    for kind in ("node_feats", "edge_feats"):
        loading.load_features(config, 0, kind, checksums=features)


def load_for_training(config: PartitionConfig, structure: bool, features: bool) -> None:
    """What `load_dgl_partition_data` does."""
    read = partial(loading.load_structure, checksum=structure)
    with mock.patch.object(_partition_data, "load_structure", read):
        graphshard.load_dgl_partition_data(config.path, 0, checksums=features)


def seconds(work: Callable[[], None], rounds: int) -> float:
    """Median time of a call, the first left out."""
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


WAYS = [
    ("structure", False, False),
    ("structure and its digest: as loaded", True, False),
    ("also digests of features: as trained", True, True),
]


def measure(path: Path, rounds: int) -> list[list[str]]:
    """A row for each way of loading the only part of a partition."""
    config = read_config(path)
    times: dict[str, list[float]] = {}
    for name, *digests in WAYS:
        times[name] = [
            seconds(partial(work, config, *digests), rounds) for work in (load, load_for_training)
        ]
    least = times["structure"]
    return [
        [
            name,
            *(f"{t * 1000:.0f} (+{(t - t0) * 1000:.0f})" for t, t0 in zip(row, least, strict=True)),
        ]
        for name, row in times.items()
    ]


def main() -> None:
    """Read the arguments, partition, measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="pairs drawn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with np.load(community_graph(args.folder, args.nodes, args.edges)) as arrays:
        src, dst = torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])
        whole = graphshard.graph((src, dst), num_nodes=args.nodes)
        whole.ndata["x"] = torch.from_numpy(arrays["x"])
    header = ["checked", "ms of load_partition", "ms of load_dgl_partition_data"]
    folder = args.folder / f"loading-{args.nodes}-{args.edges}"
    partition_graph(whole, "g", 1, folder, quiet=True)
    sizes = {f.name: f.stat().st_size / 1e6 for f in (folder / "part0").iterdir()}
    listed = ", ".join(f"{name} {size:.0f} MB" for name, size in sorted(sizes.items()))
    table = markdown_table(header, measure(folder / "g.json", args.rounds))
    body = [f"Files: {listed}.", "", *table, ""]
    intro = (
        f"{args.nodes:,} nodes, {whole.num_edges():,} edges, 128 features, one part, one thread; "
        f"medians of {args.rounds}, files in the page cache."
    )
    if args.write:
        write_result(
            "loading", "What the checks of a part cost when it is loaded", [intro, "", *body]
        )
    else:
        sys.stdout.write("\n".join([intro, "", *body]) + "\n")


if __name__ == "__main__":
    main()
