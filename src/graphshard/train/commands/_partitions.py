# SPDX-License-Identifier: Apache-2.0
"""``graphshard partition``, ``inspect``, ``verify`` and ``convert``: files of partitions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..._base.files import writing
from ..._base.typing import Unset
from ...data.prepare import Preparation, read_dataset, read_graph, write_graph
from ...data.task import partition_dataset, read_task, warn_of_task, write_task
from ...errors import PartitionFormatError
from ...partition import (
    PartitionStats,
    convert_partition,
    load_partition_stats,
    verify_partition,
)
from ...partition.assign import Objective
from ...partition.format import PartitionConfig, etype_key, read_config, read_content
from ._options import PartitionPath, is_partition, options_of, partition_json


@options_of(Preparation)
def partition(
    *,
    data: Annotated[
        str,
        "A data set: 'cora', a folder, the name of a folder in $GRAPHSHARD_DATASETS, an edge list "
        "that ends in .csv or .parquet (columns src and dst), or a graph of DGL's save_graphs that "
        "ends in .bin or .dgl.",
    ],
    parts: Annotated[int, "Number of parts."],
    out: Annotated[Path, "Folder to write; made if need be."],
    name: Annotated[
        str | None, "Name of the graph and of the JSON.", Unset("the data set's")
    ] = None,
    method: Annotated[Literal["metis", "random"], "How to assign nodes."] = "metis",
    objective: Annotated[
        Objective | None,
        "What METIS minimises: edges between parts, or the halo.",
        Unset("cut"),
    ] = None,
    balance_edges: Annotated[bool, "Balance in-edges too."] = False,
    balance_split: Annotated[bool, "Balance training, validation and test nodes."] = False,
    balance_ntypes: Annotated[
        str | None,
        "Balance the nodes of every value of this node feature, e.g. label.",
        Unset("the nodes of every type"),
    ] = None,
    hops: Annotated[int, "Reach of the halo that a part keeps."] = 1,
    tolerance: Annotated[float, "Heaviest part over the mean, under every constraint."] = 1.05,
    seed: Annotated[int, "Seed of METIS or of the random assignment."] = 0,
    reorder: Annotated[
        bool | None,
        "Order nodes for locality inside each part.",
        Unset("yes for several parts"),
    ] = None,
    quiet: Annotated[bool, "Print nothing but errors."] = False,
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


@options_of()
def inspect(
    partition: PartitionPath,
    plot: Annotated[
        Path | None,
        "Also draw balance, cut and halo per part to this PNG.",
        Unset("no picture"),
    ] = None,
) -> None:
    """Show what is in a partition and how good it is."""
    path = partition_json(partition)
    config, task = read_config(path), read_task(path)
    config.check_format()
    if plot is not None:
        plot_partition(load_partition_stats(path), plot)
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(_types_table(config))
    if config.stats is not None:
        console.print(config.stats.table())
        console.print(_balance_table(config.stats))
    else:
        console.print("DGL wrote it: it has no statistics until graphshard convert")
    if task.target is not None:
        classes = f"{task.num_classes} classes"
        console.print(f"task: classify nodes of type {task.target} into {classes}")
        if task.num_relations:
            console.print(f"relations: {task.num_relations}, as the edge feature etype")
    if plot is not None:
        console.print(f"wrote {plot}", soft_wrap=True)


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


def plot_partition(stats: PartitionStats, path: Path) -> None:
    """Draw three panels over the parts: load over the mean, cut edges, halo nodes.

    Args:
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


@options_of()
def verify(
    partition: PartitionPath,
    checksums: Annotated[bool, "Compute checksums, which reads every byte."] = True,
) -> None:
    """Check a partition from end to end; exit code 1 if anything is wrong with it."""
    path = partition_json(partition)
    read_content(path)  # a wrong path is wrong input, not a damaged partition
    problems = verify_partition(path, checksums=checksums)
    try:
        read_task(path)  # the description of the task, which verify_partition knows nothing of
    except PartitionFormatError as error:
        if str(error) not in problems:  # that of the partition, told already
            problems.append(str(error))
    for problem in problems:
        print(problem)
    if problems:
        print(f"{path}: {len(problems)} problem(s)")
        raise typer.Exit(1)
    print(f"{path}: whole")


@options_of()
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
        "Of a partition: folder to write, made if need be. Of a graph: file to write, whose ending "
        "says how (.bin and .dgl as DGL has it; .csv, .parquet).",
    ],
    to: Annotated[
        Literal["dgl", "graphshard"] | None,
        "Whose partition files to write.",
        Unset("dgl for ours, ours for DGL's and PyG's"),
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
