# SPDX-License-Identifier: Apache-2.0
"""The picture of traced steps: what ranks do when, how long, and what they send to whom."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ._reports import check_extras

if TYPE_CHECKING:
    from ._step_trace import RankSteps

_COLOURS = {
    "forward": "#1f77b4",
    "backward": "#2ca02c",
    "optimizer": "#9467bd",
    "inputs": "#8c8c8c",
    "other": "#dddddd",
    "waiting": "#d62728",
}
_NUMBERED_RANKS = 8
# As a layer of HeteroGraphConv is called: layers.0.relations.mods.('user', 'buys', 'item').
_OF_RELATION = re.compile(r"\.relations\.mods\.\('([^']*)', '([^']*)', '([^']*)'\)")
_LETTERS = 32


def draw_steps(ranks: Sequence[RankSteps], path: Path, title: str) -> None:
    """Draw a timeline, seconds by kind, bytes by layer, and bytes between ranks, to a PNG.

    Raises:
        ImportError: matplotlib is missing; names the extra.
    """
    check_extras(plot=True, tensorboard=None)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.2 + 0.5 * len(ranks)
    rows = {(layer, direction) for each in ranks for layer, direction, _, _ in each.bytes}
    lower = max(4.5, min(1.5 + 0.2 * len(rows), 40.0))
    figure = Figure(figsize=(14, height + lower), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=[height, lower])
    _draw_timeline(figure.add_subplot(grid[0, :]), ranks)
    _draw_seconds(figure.add_subplot(grid[1, 0]), ranks)
    _draw_layers(figure.add_subplot(grid[1, 1]), ranks)
    _draw_pairs(figure.add_subplot(grid[1, 2]), ranks)
    figure.suptitle(title.replace("$", r"\$"))
    canvas.print_png(str(path))


def _short(name: str) -> str:
    """A layer's name in few letters, with nothing that matplotlib would take for a formula."""
    name = _OF_RELATION.sub(r" \1:\2:\3", name)
    if len(name) > _LETTERS:
        name = f"{name[: _LETTERS // 3]}…{name[-2 * _LETTERS // 3 :]}"
    return name.replace("$", r"\$")


def _draw_timeline(axes: Any, ranks: Sequence[RankSteps]) -> None:
    """A row for each rank: what its training thread does, and above it, in red, when it waits."""
    start = min(each.begin for each in ranks)
    for each in ranks:
        names: list[tuple[float, float, str]] = []
        for kind, color in _COLOURS.items():
            wanted = "wait" if kind == "waiting" else kind
            bars = [
                ((begin - start) / 1e6, (end - begin) / 1e6, name)
                for name, of_kind, begin, end, thread in each.spans
                if of_kind == wanted and thread == 0
            ]
            height = (each.rank - 0.4, 0.25) if kind == "waiting" else (each.rank - 0.15, 0.55)
            axes.broken_barh(
                [bar[:2] for bar in bars], height, facecolor=color, edgecolor="white", linewidth=0.3
            )
            if kind in ("forward", "backward"):
                names += bars
        whole = (max(other.end for other in ranks) - start) / 1e6
        labelled: list[tuple[float, float]] = []
        for begin, length, name in sorted(names, key=lambda bar: -bar[1]):
            label, middle = _short(name), begin + length / 2
            half = 0.0055 * len(label) * whole
            is_free = all(middle + half < left or middle - half > right for left, right in labelled)
            if length > 2 * half and is_free:  # a layer inside another one has its place
                labelled.append((middle - half, middle + half))
                place = middle, each.rank + 0.125
                centre = {"ha": "center", "va": "center"}
                axes.text(*place, label, color="white", fontsize=8, clip_on=True, **centre)
    axes.set(xlabel="milliseconds", ylim=(len(ranks) - 0.4, -0.5))
    axes.set_yticks(range(len(ranks)), [f"rank {each.rank}" for each in ranks])
    axes.spines[["top", "right"]].set_visible(False)


def _draw_seconds(axes: Any, ranks: Sequence[RankSteps]) -> None:
    seconds = [each.seconds() for each in ranks]
    left = np.zeros(len(ranks))
    for kind, color in _COLOURS.items():
        values = np.array([1e3 * of_rank[kind] for of_rank in seconds])
        axes.barh(range(len(ranks)), values, left=left, color=color, label=kind)
        left += values
    axes.set(title="time of the training thread", xlabel="milliseconds", ylabel="rank")
    axes.set_yticks(range(len(ranks)))
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, fontsize="small")


def _draw_layers(axes: Any, ranks: Sequence[RankSteps]) -> None:
    """A bar for each layer and direction: bytes that all ranks send, by sender."""
    from matplotlib import colormaps

    rows: dict[tuple[str, str], dict[int, int]] = {}
    for each in ranks:
        for layer, direction, _, number in each.bytes:
            of_row = rows.setdefault((layer, direction), {})
            of_row[each.rank] = of_row.get(each.rank, 0) + number
    order = sorted(rows, key=lambda row: (not row[0], row[0], row[1] == "backward"))
    left = np.zeros(len(order))
    # None of the colours that stand for a kind of time.
    colors = colormaps["YlOrBr"](np.linspace(0.2, 0.9, len(ranks)))
    for each, color in zip(ranks, colors, strict=True):
        values = np.array([rows[row].get(each.rank, 0) / 1e3 for row in order])
        axes.barh(range(len(order)), values, left=left, color=color, label=f"rank {each.rank}")
        left += values
    names = [
        f"{_short(layer)}, {direction}" if layer else "gradients, checks"
        for layer, direction in order
    ]
    axes.set_yticks(range(len(order)), names, fontsize="small")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.set(title="sent, by layer", xlabel="kB")
    if order:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, fontsize="small")


def _draw_pairs(axes: Any, ranks: Sequence[RankSteps]) -> None:
    """A heat map: bytes from each rank to each other one, and to all."""
    kilobytes = np.zeros((len(ranks), len(ranks) + 1))
    for row, each in enumerate(ranks):
        for _, _, to, number in each.bytes:
            kilobytes[row, to] += number / 1e3  # -1, to all, is the last column
    image = axes.imshow(np.ma.masked_equal(kilobytes, 0), cmap="Blues", vmin=0, aspect="auto")
    axes.figure.colorbar(image, ax=axes, label="kB", format="{x:,.10g}")
    if len(ranks) <= _NUMBERED_RANKS:
        for row, column in np.argwhere(kilobytes):
            value = kilobytes[row, column]
            color = "white" if value > 0.6 * kilobytes.max() else "black"
            text = f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
    axes.set(title="sent, by receiver", xlabel="to rank", ylabel="from rank")
    axes.set_yticks(range(len(ranks)))
    axes.set_xticks(range(len(ranks) + 1), [*map(str, range(len(ranks))), "all"])
