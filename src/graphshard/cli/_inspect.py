# SPDX-License-Identifier: Apache-2.0
"""``graphshard inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..partition import PartitionStats, load_partition_stats
from ..partition.format import PartitionConfig, etype_key, read_config
from ..train import TaskInfo, read_task
from ._paths import partition_json
from ._plot import plot_partition


def inspect(
    partition: Annotated[Path, typer.Argument(help="The partition's JSON.", metavar="PARTS.json")],
    plot: Annotated[
        Path | None, typer.Option(help="Also draw balance, cut and halo per part to this PNG.")
    ] = None,
) -> None:
    """Show what is in a partition and how good it is."""
    path = partition_json(partition)
    config, stats, task = read_config(path), load_partition_stats(path), read_task(path)
    if plot is not None:
        plot_partition(stats, plot)
    console = Console()
    console.print(_types_table(config))
    console.print(stats.table())
    console.print(_balance_table(stats))
    for line in _facts(task):
        console.print(line, markup=False, highlight=False)
    if plot is not None:
        console.print(f"wrote {plot}", markup=False, highlight=False, soft_wrap=True)


def _types_table(config: PartitionConfig) -> Table:
    """Node types and relations, and how many of each every part owns."""
    table = Table(title="types", title_justify="left")
    table.add_column("type")
    table.add_column("total", justify="right")
    for part in range(config.num_parts):
        table.add_column(f"part {part}", justify="right")
    rows = {name: config.node_map[name] for name in config.ntypes}
    rows |= {etype_key(etype): config.edge_map[etype] for etype in config.etypes}
    for name, blocks in rows.items():
        sizes = [stop - start for start, stop in blocks]
        table.add_row(name, f"{sum(sizes):,}", *(f"{size:,}" for size in sizes))
    return table


def _balance_table(stats: PartitionStats) -> Table:
    table = Table(title=f"balance (tolerance {stats.tolerance:g})", title_justify="left")
    table.add_column("constraint")
    for heading in ("total", "lightest", "heaviest", "max/mean"):
        table.add_column(heading, justify="right")
    for item in stats.balances:
        loads = item.loads
        table.add_row(
            item.name,
            f"{sum(loads):,}",
            f"{min(loads):,}",
            f"{max(loads):,}",
            f"{item.ratio:.3f}",
        )
    return table


def _facts(task: TaskInfo) -> list[str]:
    if task.target is None:
        return []
    facts = [f"task: classify nodes of type {task.target} into {task.num_classes} classes"]
    if task.num_relations:
        facts.append(f"relations: {task.num_relations}, as the edge feature etype")
    return facts
