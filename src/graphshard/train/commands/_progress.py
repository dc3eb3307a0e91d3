# SPDX-License-Identifier: Apache-2.0
"""How a training run shows on a terminal: a bar while it runs, a table at its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from .._result import EpochReport, SamplingReport, TrainResult

_LINES = 10

SPLIT_NAMES = {"train": "train", "val": "valid", "test": "test"}


class ProgressDisplay:
    """Shows `EpochReport` on standard error: a bar on a terminal, else a line now and then.

    Steps inside an epoch move the bar by fractions.

    Args:
        quiet: Show notes alone.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, markup=False, emoji=False)
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal and not self._quiet:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                TextColumn("{task.fields[epoch]}/{task.total}"),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, report: EpochReport) -> None:
        """Take one report in."""
        if report.note is not None:
            self._console.print(report.note, markup=False, highlight=False)
            return
        if self._quiet:
            return
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("", total=report.epochs, epoch=0)
            part = report.step / report.steps if report.step and report.steps else 0.0
            self._bar.update(
                self._task,
                completed=report.epoch + part,
                description=_summary(report),
                epoch=report.epoch,
            )
        elif report.step is not None:
            return
        elif report.epoch % max(1, report.epochs // _LINES) == 0 or report.epoch == report.epochs:
            sys.stderr.write(f"epoch {report.epoch}/{report.epochs} {_summary(report)}\n")

    def line(self, text: str) -> None:
        """Show a line that a worker printed."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _summary(report: EpochReport) -> str:
    words = [] if report.loss is None else [f"loss {report.loss:.4f}"]
    if report.step is not None:
        words.append(f"step {report.step}/{report.steps}")
    if report.evaluation is not None:
        words += [
            f"{SPLIT_NAMES[split]} {100 * value:.1f}"
            for split, value in report.evaluation.accuracy.items()
        ]
    return "  ".join(words)


def result_table(result: TrainResult, model: str) -> Table:
    """The end of a run: accuracy per split, then time, memory and bytes."""
    best, last = result.best, result.last
    how = f"{result.aggregation} aggregation" if result.sampling is None else "sampled"
    table = Table(title=f"{model}, {result.world_size} worker(s), {how}", title_justify="left")
    table.add_column("")
    table.add_column("nodes", justify="right")
    table.add_column(f"epoch {best.epoch} (chosen)", justify="right")
    table.add_column(f"epoch {last.epoch} (last)", justify="right")
    for split, accuracy in best.accuracy.items():
        table.add_row(
            f"{SPLIT_NAMES[split]} accuracy",
            f"{result.num_nodes[split]:,}",
            f"{100 * accuracy:.2f} %",
            f"{100 * last.accuracy[split]:.2f} %",
        )
    table.add_section()
    facts = {
        "training loss, last epoch": f"{result.losses[-1]:.4f}",
        "seconds per epoch": f"{result.seconds_per_epoch:.4f}",
        "seconds per evaluation": f"{result.seconds_per_evaluation:.4f}",
        "peak memory per worker": _mebibytes(result.peak_memory),
        **_device_facts(result),
        "bytes sent per epoch": " ".join(f"{n:,}" for n in result.bytes_per_epoch),
        "parameters": f"{result.num_parameters:,}",
    }
    if result.sampling is not None:
        facts.update(_sampling_facts(result.sampling))
    if result.num_embedding_parameters:
        facts["embedding parameters"] = f"{result.num_embedding_parameters:,}"
    if result.stopped_early:
        facts["stopped"] = "no better validation result for the patience given"
    if result.resumed_from is not None:
        facts["resumed from epoch"] = str(result.resumed_from)
    for name, value in facts.items():
        table.add_row(name, "", value, "")
    return table


def _device_facts(result: TrainResult) -> dict[str, str]:
    if result.peak_device_memory is None:
        return {}
    return {"peak device memory per worker": _mebibytes(result.peak_device_memory)}


def _mebibytes(counts: Sequence[int]) -> str:
    return " ".join(f"{count / 2**20:.1f} MiB" for count in counts)


def _sampling_facts(sampling: SamplingReport) -> dict[str, str]:
    hit_rate = sampling.cache_hit_rate
    return {
        "steps per epoch": f"{sampling.steps_per_epoch:,}",
        "seconds waiting for data": f"{sampling.seconds_waiting:.4f}",
        "edges sampled per second": f"{sampling.edges_per_second:,.0f}",
        "cache hit rate": "no cache" if hit_rate is None else f"{100 * hit_rate:.1f} %",
    }
