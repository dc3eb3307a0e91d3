# SPDX-License-Identifier: Apache-2.0
"""A picture of a partition: balance, cut and halo per part. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from .._written_files import writing
from ..partition import PartitionStats


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
        balance.plot(parts, loads, marker="o", label=f"{item.name} ({item.ratio:.3f})")
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
    figure.suptitle(f"{stats.graph_name}, {stats.num_parts} parts ({stats.part_method})")
    with writing(path):
        figure.savefig(path, dpi=120)
