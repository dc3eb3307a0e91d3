# SPDX-License-Identifier: Apache-2.0
"""``graphshard trace``: a step of a run, seen on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..._base.settings import Unset
from ..launch import run_as_worker
from ._options import options_of

RunPath = Annotated[
    Path,
    typer.Argument(help="The folder that graphshard train --run made.", metavar="RUN"),
]


@options_of()
def trace(
    run: RunPath,
    out: Annotated[
        Path | None,
        "Folder for trace.json, for ui.perfetto.dev or chrome://tracing, and trace.png.",
        Unset("the folder of the run"),
    ] = None,
    steps: Annotated[int, "Steps that are traced."] = 1,
    warm_up: Annotated[int, "Steps before them, in which memory and caches are filled."] = 2,
    operators: Annotated[
        bool, "Also trace operators and kernels, by torch's profiler, which takes time itself."
    ] = False,
    plot: Annotated[bool, "Draw the picture."] = True,
) -> None:
    """Make a step of a run again, and show on all ranks what it computes, waits for and sends."""
    from ...partition.format import read_config
    from .._step_trace import PICTURE, TRACE, TraceRequest, launch_trace, trace_work

    folder = run if out is None else out
    request = TraceRequest(
        run=str(run),
        out=str(folder),
        steps=steps,
        warm_up=warm_up,
        operators=operators,
        plot=plot,
    )
    config = request.config()

    def show(seconds: list[dict[str, float]]) -> None:
        console = Console(markup=False, emoji=False, highlight=False)
        console.print(_table(seconds, steps))
        names = [TRACE, *[PICTURE] * plot]
        console.print(f"wrote {' and '.join(str(folder / n) for n in names)}", soft_wrap=True)

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        run_as_worker(lambda: trace_work(request, show))
        return
    errors = Console(stderr=True, markup=False, emoji=False)
    show(
        launch_trace(
            request,
            read_config(config.data).num_parts,
            on_stderr=lambda line: errors.print(line, highlight=False, soft_wrap=True),
        )
    )


def _table(seconds: list[dict[str, float]], steps: int) -> Table:
    """Milliseconds by rank and kind."""
    title = "milliseconds of a step" if steps == 1 else f"milliseconds of {steps} steps"
    table = Table(title=title, title_justify="left")
    table.add_column("rank", justify="right")
    for kind in [*seconds[0], "all"]:
        table.add_column(kind, justify="right")
    for rank, of_rank in enumerate(seconds):
        values = [*of_rank.values(), sum(of_rank.values())]
        table.add_row(str(rank), *(f"{1e3 * value:,.2f}" for value in values))
    return table
