# SPDX-License-Identifier: Apache-2.0
"""The picture of a partition: who owns how much, who reads from whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..._base.files import writing
from ...partition.format import PartitionConfig
from ...partition.load import load_structure

if TYPE_CHECKING:
    from ...partition import PartitionStats

Counts = npt.NDArray[np.int64]

# Up to here a cell of the heat map has room for its number.
_NUMBERED_PARTS = 8
# Up to here every part has a tick of its own.
_TICKED_PARTS = 16


@dataclass(frozen=True)
class PairCounts:
    """What parts have to do with each other.

    Args:
        edges: int64 [P, P]; ``edges[p, q]`` edges lead from a node of part q into one of part p.
        rows: int64 [P, P]; ``rows[p, q]`` nodes of part q are sources of such edges: what a worker
            that holds part p fetches from the one with part q. The diagonal is zero.
    """

    edges: Counts
    rows: Counts


def count_pairs(config: PartitionConfig) -> PairCounts:
    """Count edges and rows between any two parts; holds the structure of one part at a time.

    Raises:
        PartitionFormatError: A file of a part is missing or damaged.
    """
    num_parts = config.num_parts
    edges = np.zeros((num_parts, num_parts), dtype=np.int64)
    rows = np.zeros_like(edges)
    for part in range(num_parts):
        structure = load_structure(config, part)
        owners = structure.node_parts().numpy()
        sources = structure.adjacency.coo()[0][: structure.num_inner_edges].numpy()
        edges[part] = np.bincount(owners[sources], minlength=num_parts)
        rows[part] = np.bincount(owners[np.unique(sources)], minlength=num_parts)
        rows[part, part] = 0
    return PairCounts(edges, rows)


def plot_partition(config: PartitionConfig, stats: PartitionStats, path: Path) -> None:
    """Draw a partition: balance, nodes and rows per part, the graph of parts, rows between parts.

    Args:
        path: The PNG to write; its folder must exist.

    Raises:
        ImportError: matplotlib is missing; names the extra.
        ValueError: ``path`` does not end in ``.png``, or its folder does not exist.
        PartitionFormatError: A file of a part is missing or damaged.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"plot must be a file that ends in .png (got {path})")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"plot must be in a folder that exists (got {path})")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            'drawing needs matplotlib; install it with: pip install "graphshard[plot]"'
        ) from None

    pairs = count_pairs(config)
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    balance, nodes, quotient, halo = figure.subplots(2, 2).flat
    _draw_balance(balance, stats)
    _draw_nodes(nodes, stats, pairs)
    _draw_quotient(quotient, stats, pairs)
    _draw_rows(halo, pairs)
    figure.suptitle(f"{_drawn(stats.graph_name)}, {stats.num_parts} parts ({stats.part_method})")
    with writing(path):
        figure.savefig(path, dpi=120)


def _draw_balance(axes: Any, stats: PartitionStats) -> None:
    """A group of bars for each part, a bar for each constraint: its load over the mean."""
    parts = np.arange(stats.num_parts)
    width = 0.8 / max(len(stats.balances), 1)
    for place, item in enumerate(stats.balances):
        mean = sum(item.loads) / stats.num_parts
        loads = [load / mean if mean else 1.0 for load in item.loads]
        offset = (place - (len(stats.balances) - 1) / 2) * width
        axes.bar(parts + offset, loads, width, label=f"{_drawn(item.name)} ({item.ratio:.3f})")
    axes.axhline(1.0, color="0.4", linewidth=1)
    tolerance = axes.axhline(stats.tolerance, color="0.4", linewidth=1, linestyle="--")
    tolerance.set_label(f"tolerance ({stats.tolerance:g})")
    axes.set(title="balance: load / mean, by constraint (max/mean)", ylabel="load / mean")
    axes.set_ylim(top=1.05 * max(stats.tolerance, *(item.ratio for item in stats.balances), 1.0))
    _by_part(axes, stats.num_parts)


def _draw_nodes(axes: Any, stats: PartitionStats, pairs: PairCounts) -> None:
    """A bar for each part: its nodes, and on them the rows that it fetches."""
    parts = np.arange(stats.num_parts)
    own = np.array([part.inner_nodes for part in stats.parts])
    fetched = pairs.rows.sum(axis=1)
    axes.bar(parts, own, 0.8, color="0.75", label=f"own nodes ({own.sum():,})")
    axes.bar(parts, fetched, 0.8, bottom=own, label=f"rows of other parts ({fetched.sum():,})")
    axes.set(title="what a worker holds in a layer", ylabel="rows")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _by_part(axes, stats.num_parts)


def _draw_quotient(axes: Any, stats: PartitionStats, pairs: PairCounts) -> None:
    """The graph whose nodes are parts: areas by nodes, widths of lines by cut edges."""
    num_parts = stats.num_parts
    angles = math.pi / 2 - 2 * math.pi * np.arange(num_parts) / num_parts
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1) * (num_parts > 1)
    cut = pairs.edges + pairs.edges.T
    np.fill_diagonal(cut, 0)
    for first, second in np.argwhere(np.triu(cut)):
        share = cut[first, second] / cut.max()
        ends = places[[first, second]].T
        width, alpha = 0.5 + 7.5 * share, 0.1 + 0.65 * share
        axes.plot(*ends, color="C1", linewidth=width, alpha=alpha, zorder=1)
    own = np.array([part.inner_nodes for part in stats.parts])
    # Circles of the largest area do not touch: neighbours are 2 sin(pi / P) apart, and an inch is
    # about 0.75 here.
    largest = (60 * min(2 * math.sin(math.pi / max(num_parts, 2)), 0.9)) ** 2
    sizes = largest * own / max(own.max(), 1)
    axes.scatter(*places.T, s=sizes, color="C0", zorder=2)
    for part, place in enumerate(places):
        is_wide = sizes[part] > 15**2
        axes.annotate(
            str(part),
            place,
            xytext=(0, 0) if is_wide else tuple(12 * place),
            textcoords="offset points",
            ha="center",
            va="center",
            color="white" if is_wide else "black",
            fontsize=9,
            zorder=3,
        )
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.3, 1.3), aspect="equal")
    axes.set_axis_off()
    axes.set_title(
        f"parts by nodes, lines by cut edges: {stats.edge_cut:,} of {stats.num_edges:,} "
        f"({100 * stats.edge_cut_fraction:.2f} %)"
    )


def _draw_rows(axes: Any, pairs: PairCounts) -> None:
    """A heat map: rows that the worker of a part fetches from each other."""
    num_parts = len(pairs.rows)
    shown = np.ma.masked_equal(pairs.rows, 0)
    image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=max(int(pairs.rows.max()), 1))
    axes.figure.colorbar(image, ax=axes, label="rows", format="{x:,.0f}")
    if num_parts <= _NUMBERED_PARTS:
        for part, owner in np.argwhere(pairs.rows):
            number = int(pairs.rows[part, owner])
            color = "white" if number > 0.6 * pairs.rows.max() else "black"
            axes.text(owner, part, f"{number:,}", ha="center", va="center", color=color, fontsize=9)
    axes.set(title="rows fetched in a layer", xlabel="from part", ylabel="by part")
    if num_parts <= _TICKED_PARTS:
        axes.set(xticks=range(num_parts), yticks=range(num_parts))


def _by_part(axes: Any, num_parts: int) -> None:
    axes.set_xlabel("part")
    if num_parts <= _TICKED_PARTS:
        axes.set_xticks(range(num_parts))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize="small")


def _drawn(name: str) -> str:
    """A name as matplotlib shows it: between two dollar signs it would be a formula."""
    return name.replace("$", r"\$")
