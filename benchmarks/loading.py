# SPDX-License-Identifier: Apache-2.0
"""Loading a part: what its checks cost, one added to the other.

    python benchmarks/loading.py                         # 4 million edges in one part
    python benchmarks/loading.py --write                 # and a file of results

The files are in the page cache, as after a copy: reading them from a disk comes to every row alike,
except that features are else read only when touched.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from _common import ROOT, community_graph, markdown_table, write_result
from torch import Tensor

import graphshard
from graphshard.fullbatch import _partition_data
from graphshard.ops import Adjacency
from graphshard.partition import load as loading
from graphshard.partition import partition_graph
from graphshard.partition.format import PartitionConfig, read_config


def unchecked(tensors: Mapping[str, Tensor], book: object) -> Adjacency:
    """The structure as it was loaded before it was checked."""
    count = tensors["node/_ID"].shape[0]
    if "coo/src" in tensors:
        return Adjacency(tensors["coo/src"], tensors["coo/dst"], count, count, check=False)
    name = "csc" if "csc/indptr" in tensors else "csr"
    arrays = [tensors.get(f"{name}/{key}") for key in ("indptr", "indices", "eids")]
    pointer, indices, ids = arrays
    assert pointer is not None
    assert indices is not None
    adjacency = Adjacency.from_csc(pointer, indices, ids, count, count, check=False)
    return adjacency if name == "csc" else adjacency.reverse()


@contextlib.contextmanager
def nothing_checked() -> Iterator[None]:
    """Neither when a file is read, nor when edges are sorted by relation."""
    with (
        mock.patch.object(loading, "checked_adjacency", unchecked),
        mock.patch.object(_partition_data, "_check_ends"),
    ):
        yield


def load(config: PartitionConfig, **digests: bool) -> None:
    """What `load_partition` does after reading the JSON."""
    loading.load_part(config, 0, **digests)


def load_for_training(config: PartitionConfig, **digests: bool) -> None:
    """What `load_dgl_partition_data` does after reading the JSON."""

    def load_part(config: Any, part: int, **_: bool) -> Any:
        return loading.load_part(config, part, **digests)

    with mock.patch.object(_partition_data, "load_part", load_part):
        graphshard.load_dgl_partition_data(config.path, 0)


def seconds(work: Callable[[], None], rounds: int) -> float:
    """Median time of a call, the first left out."""
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


WAYS: list[tuple[str, bool, dict[str, bool]]] = [
    ("nothing", False, {"structure_digest": False}),
    ("structure", True, {"structure_digest": False}),
    ("structure and its digest: as loaded", True, {}),
    ("also digests of features: as trained", True, {"feature_digests": True}),
]


def measure(path: Path, rounds: int) -> list[list[str]]:
    """A row for each way of loading the only part of a partition."""
    config = read_config(path)
    times: dict[str, list[float]] = {}
    for name, checked, digests in WAYS:
        with contextlib.nullcontext() if checked else nothing_checked():
            times[name] = [
                seconds(lambda work=work, digests=digests: work(config, **digests), rounds)  # type: ignore[misc]
                for work in (load, load_for_training)
            ]
    least = times["nothing"]
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
    body: list[str] = []
    header = ["checked", "ms of load_partition", "ms of load_dgl_partition_data"]
    for form in ("coo", "csc"):
        folder = args.folder / f"loading-{args.nodes}-{args.edges}-{form}"
        partition_graph(whole, "g", 1, folder, graph_formats=form, quiet=True)
        sizes = {f.name: f.stat().st_size / 1e6 for f in (folder / "part0").iterdir()}
        listed = ", ".join(f"{name} {size:.0f} MB" for name, size in sorted(sizes.items()))
        body += [
            f"Stored as {form}: {listed}.",
            "",
            *markdown_table(header, measure(folder / "g.json", args.rounds)),
            "",
        ]
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
