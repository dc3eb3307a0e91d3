# SPDX-License-Identifier: Apache-2.0
"""``graphshard partition``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ...data.prepare import Preparation, read_dataset
from ...data.task import partition_dataset, warn_of_task
from ...partition.assign import Objective
from ._options import options_of


@options_of(Preparation)
def partition(
    *,
    data: Annotated[
        str,
        typer.Option(
            help="A data set: 'cora', a folder, the name of a folder in $GRAPHSHARD_DATASETS, an "
            "edge list that ends in .csv or .parquet (columns src and dst), or a graph of DGL's "
            "save_graphs that ends in .bin or .dgl.",
        ),
    ],
    parts: Annotated[int, typer.Option(help="Number of parts.")],
    out: Annotated[Path, typer.Option(help="Folder to write; made if need be.")],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the graph and of the JSON.", show_default="the data set's"),
    ] = None,
    method: Annotated[
        Literal["metis", "random"], typer.Option(help="How to assign nodes.")
    ] = "metis",
    objective: Annotated[
        Objective | None,
        typer.Option(
            help="What METIS minimises: edges between parts, or the halo.", show_default="cut"
        ),
    ] = None,
    balance_edges: Annotated[
        bool, typer.Option("--balance-edges", help="Balance in-edges too.")
    ] = False,
    balance_split: Annotated[
        bool, typer.Option("--balance-split", help="Balance training, validation and test nodes.")
    ] = False,
    balance_ntypes: Annotated[
        str | None,
        typer.Option(
            help="Balance the nodes of every value of this node feature, e.g. label.",
            show_default="the nodes of every type",
        ),
    ] = None,
    hops: Annotated[int, typer.Option(help="Reach of the halo that a part keeps.")] = 1,
    tolerance: Annotated[
        float, typer.Option(help="Heaviest part over the mean, under every constraint.")
    ] = 1.05,
    seed: Annotated[int, typer.Option(help="Seed of METIS or of the random assignment.")] = 0,
    reorder: Annotated[
        bool | None,
        typer.Option(
            "--reorder/--no-reorder",
            help="Order nodes for locality inside each part.",
            show_default="yes for several parts",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    **preparation: Any,
) -> None:
    """Divide a graph into parts, one for each worker, and write them to a folder."""
    if parts < 1:
        raise ValueError(f"parts must be at least 1 (got {parts})")
    if objective is not None and method != "metis":
        raise ValueError(
            f"objective is for the method metis (got objective={objective}, {method}); leave it out"
        )
    dataset = read_dataset(data, Preparation(**preparation))
    warn_of_task(dataset)
    written = partition_dataset(
        dataset,
        parts,
        out,
        name=name,
        balance_field=balance_ntypes,
        options={"data": Path(data).name, **preparation},
        num_hops=hops,
        part_method=method,
        objtype=objective or "cut",
        balance_edges=balance_edges,
        balance_split=balance_split or None,
        tolerance=tolerance,
        seed=seed,
        reorder=reorder,
        quiet=quiet,
    )
    if not quiet:
        console = Console(markup=False, emoji=False)
        console.print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)
