# SPDX-License-Identifier: Apache-2.0
"""``graphshard convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...data.prepare import read_graph, write_graph
from ...data.task import read_task, write_task
from ...partition import convert_partition
from ._paths import is_partition, partition_json


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A partition's JSON, or the folder that PyG's Partitioner wrote; or a graph: a "
            "data set as for partition, or a file of DGL's save_graphs (.bin, .dgl).",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Of a partition: folder to write, made if need be. Of a graph: file to write, "
            "whose ending says how (.bin and .dgl as DGL has it; .csv, .parquet)."
        ),
    ],
    to: Annotated[
        Literal["dgl", "graphshard"] | None,
        typer.Option(
            help="Whose partition files to write.",
            show_default="dgl for ours, ours for DGL's and PyG's",
        ),
    ] = None,
) -> None:
    """Write a partition, or a graph, in the files of DGL, or in ours again; needs no DGL or PyG."""
    if not is_partition(source):
        if to is not None:
            raise ValueError(f"--to is for partitions, and {source} is none; end --out as wanted")
        write_graph(read_graph(source), out)
        print(f"wrote {out}")
        return
    path = partition_json(source)
    task = read_task(path)
    written = convert_partition(path, out, to)
    if task.target is not None:
        write_task(written, task)
    print(f"wrote {written}")
