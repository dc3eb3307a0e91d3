# SPDX-License-Identifier: Apache-2.0
"""What shows how a run went, beside its history: a picture, and TensorBoard's files.

Both are made from the lines of ``history.jsonl``, one an evaluation; see `HistoryFile`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._base.files import writing

PICTURE = "run.png"

_COLOURS = {"train": "#1f77b4", "val": "#ff7f0e", "test": "#2ca02c"}
_MOST_PANELS = 4
_MARKED_UP_TO = 30  # evaluations that are shown as points, too


def check_extras(*, plot: bool, tensorboard: str | None) -> None:
    """Whether what a run will need at its end is installed, before it begins.

    Raises:
        ImportError: A package is missing; names the extra.
    """
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise ImportError('plot needs matplotlib; install it with: pip install "graphshard[plot]"')
    if tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise ImportError(
            "tensorboard needs the package tensorboard; install it with: "
            'pip install "graphshard[tensorboard]"'
        )


def scalars_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of an evaluation, by name: ``"loss/train"``, ``"accuracy/val"``."""
    for split, value in line.get("losses", {}).items():
        yield f"loss/{split}", value
    if line.get("loss") is not None:
        yield "loss/epoch", line["loss"]
    if "learning_rate" in line:  # older histories are without
        yield "learning rate", line["learning_rate"]
    for metric, by_split in line.get("metrics", {}).items():
        for split, value in by_split.items():
            yield f"{metric}/{split}", value
    for what, value in line.get("seconds", {}).items():
        yield f"seconds/{what}", value
    for what in ("bytes", "memory", "device_memory"):
        if line.get(what):
            yield f"{what}/most of a rank", max(line[what])


class TensorBoard:
    """Writes the evaluations of a run for TensorBoard. Not collective: of rank 0.

    Args:
        folder: Where; several runs beside each other are compared.
        epoch: From which a run resumes: what there is of later ones is not shown.
    """

    def __init__(self, folder: str | os.PathLike[str], epoch: int = 0) -> None:
        check_extras(plot=False, tensorboard=os.fspath(folder))
        from torch.utils.tensorboard import SummaryWriter

        with writing(Path(folder)):
            self._writer = SummaryWriter(os.fspath(folder), purge_step=epoch + 1 if epoch else None)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of the history in."""
        for name, value in scalars_of(line):
            if value is not None:
                self._writer.add_scalar(name, value, line["epoch"])
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def read_history(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a ``history.jsonl``, in the order of epochs."""
    text = Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def draw_history(
    history: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draw losses and metrics over the epochs to a PNG, which is there whole or not at all.

    Args:
        history: Lines of ``history.jsonl``; at least one.
        title: Above the picture.

    Raises:
        ImportError: matplotlib is missing; names the extra.
    """
    check_extras(plot=True, tensorboard=None)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = _panels(history)
    figure = Figure(figsize=(8, 0.8 + 2.4 * len(panels)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    marker = "." if len(history) <= _MARKED_UP_TO else ""
    lines: dict[str, Any] = {}
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        for split, (epochs, values) in curves.items():
            (lines[split],) = axis.plot(
                epochs, values, color=_COLOURS.get(split, "#7f7f7f"), marker=marker, linewidth=1.2
            )
        axis.set_ylabel(name.replace("_", " "))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("epoch")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if lines:  # beside the axes, where no curve can be
        shown = {"train": "training", "val": "validation", "test": "test"}
        names = [shown.get(split, split) for split in lines]
        figure.legend(list(lines.values()), names, loc="outside right upper", frameon=False)
    if title:
        figure.suptitle(title.replace("$", r"\$"), fontsize="medium")
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            canvas.print_png(str(partial))
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


_Curves = dict[str, tuple[list[int], list[float]]]


def _panels(history: Sequence[Mapping[str, Any]]) -> dict[str, _Curves]:
    """What is drawn: name to curves, by split, without what is no number."""
    panels: dict[str, _Curves] = {"loss": {}}
    for line in history:
        named = {"loss": line.get("losses") or {"train": line.get("loss")}, **line["metrics"]}
        for name, by_split in named.items():
            for split, value in by_split.items():
                if value is not None and math.isfinite(value):
                    epochs, values = panels.setdefault(name, {}).setdefault(split, ([], []))
                    epochs.append(line["epoch"])
                    values.append(value)
    return dict(list(panels.items())[:_MOST_PANELS])
