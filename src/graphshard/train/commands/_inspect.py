# SPDX-License-Identifier: Apache-2.0
"""``graphshard inspect``, and its picture of a partition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..._base.files import writing
from ...data.task import TaskInfo, read_task
from ...partition import PartitionStats, load_partition_stats
from ...partition.format import PartitionConfig, etype_key, read_config
from ._paths import partition_json


def inspect(
    partition: Annotated[Path, typer.Argument(help="The partition's JSON.", metavar="PARTS.json")],
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw balance, cut and halo per part to this PNG.", show_default="no picture"
        ),
    ] = None,
) -> None:
    """Show what is in a partition and how good it is."""
    path = partition_json(partition)
    config, task = read_config(path), read_task(path)
    config.check_format()
    if plot is not None:
        plot_partition(load_partition_stats(path), plot)
    console = Console(markup=False, emoji=False)
    console.print(_types_table(config))
    if config.stats is not None:
        console.print(config.stats.table())
        console.print(_balance_table(config.stats))
    else:
        console.print("DGL wrote it: it has no statistics until graphshard convert", markup=False)
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


def plot_partition(stats: PartitionStats, path: Path) -> None:
    """Draw three panels over the parts: load over the mean, cut edges, halo nodes.

    Args:
        stats: The partition's measures.
        path: The PNG to write; its folder must exist.

    Raises:
        ImportError: matplotlib is missing; names the extra.
        ValueError: ``path`` does not end in ``.png``, or its folder does not exist.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"plot must be a file that ends in .png (got {path})")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"plot must be in a folder that exists (got {path})")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ImportError(
            'drawing needs matplotlib; install it with: pip install "graphshard[plot]"'
        ) from None

    figure = Figure(figsize=(12, 4), layout="constrained")
    balance, cut, halo = figure.subplots(1, 3)
    FigureCanvasAgg(figure)
    parts = range(stats.num_parts)

    balance.axhline(1.0, color="0.6", linewidth=1)
    balance.axhline(stats.tolerance, color="0.6", linewidth=1, linestyle="--")
    for item in stats.balances:
        mean = sum(item.loads) / stats.num_parts
        loads = [load / mean if mean else 1.0 for load in item.loads]
        label = f"{_drawn(item.name)} ({item.ratio:.3f})"
        balance.plot(parts, loads, marker="o", label=label)
    balance.set(title="balance", ylabel="load / mean")
    if stats.balances:
        balance.legend(title="constraint (max/mean)", fontsize="small")

    cut.bar(parts, [part.inner_edges for part in stats.parts], color="0.85", label="in-edges")
    cut.bar(parts, [part.cut_edges for part in stats.parts], label="from other parts")
    cut.set(title=f"cut: {100 * stats.edge_cut_fraction:.2f} % of the edges", ylabel="edges")
    cut.legend(fontsize="small")

    halo.bar(parts, [part.inner_nodes for part in stats.parts], color="0.85", label="own nodes")
    halo.bar(parts, [part.halo_nodes for part in stats.parts], label="halo", width=0.5)
    halo.set(title=f"halo: {stats.halo_nodes:,} nodes", ylabel="nodes")
    halo.legend(fontsize="small")

    for axes in (balance, cut, halo):
        axes.set_xlabel("part")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"{_drawn(stats.graph_name)}, {stats.num_parts} parts ({stats.part_method})"
    figure.suptitle(title)
    with writing(path):
        figure.savefig(path, dpi=120)


def _drawn(name: str) -> str:
    """A name as matplotlib shows it: between two dollar signs it would be a formula."""
    return name.replace("$", r"\$")
