# SPDX-License-Identifier: Apache-2.0
"""``graphshard train``, and how a run shows: a bar on a terminal, a table at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from ..._base.settings import Unset
from ...data.settings import Preparation
from .._config import BALANCED, NEED_IN_EDGES, FullBatchConfig, SampledConfig
from ..launch import run_as_worker
from ._options import is_partition, options_of, partition_json

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from .._result import EpochReport, SamplingReport, TrainResult

AnyConfig = FullBatchConfig | SampledConfig

_MOST_RELATIONS = 8  # that have lines of their own in the table
_LINES, _SILENCE = 10, 30.0  # lines of a run that is piped, and seconds after which one comes

SPLIT_NAMES = {"train": "train", "val": "valid", "test": "test"}


@options_of(FullBatchConfig, SampledConfig)
def train(
    *,
    data: Annotated[
        str,
        "The JSON of a partition; or what 'graphshard partition --data' takes, to be partitioned "
        "into a temporary folder first.",
    ],
    workers: Annotated[
        int | None,
        "Number of workers.",
        Unset("one for each part, and one for a data set; under torchrun all"),
    ] = None,
    mode: Annotated[
        Literal["full", "sample"] | None,
        "full: the whole graph in every step. sample: sampled blocks.",
        Unset("sample for link prediction, else full"),
    ] = None,
    quiet: Annotated[bool, "Print the final table alone, and errors and warnings."] = False,
    **settings: Any,
) -> None:
    """Train a graph neural network in full batch or on samples, by local workers or torchrun's."""
    config = configured(data, mode, settings)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1 (got {workers})")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _run_rank(config, workers, quiet)
        return
    from ..._base.device import choose_device
    from .._run_folder import check_run_folder
    from ..launch import launch_training

    check_run_folder(config)
    choose_device(config.device)  # before a data set is partitioned for it
    results: list[TrainResult] = []
    try:
        with (
            _partitioned(config, workers, quiet) as (ready, num_workers),
            ProgressDisplay(quiet) as display,
        ):
            launch_training(
                ready,
                num_workers,
                progress=display.show,
                on_stderr=display.line,
                on_start=lambda processes: display.started(len(processes)),
                on_result=results.append,
            )
    finally:  # a worker that fails after the result spoils the run, but not the result
        if results:
            _show(results[0], config)


def configured(data: str | None, mode: str | None, settings: Mapping[str, Any]) -> AnyConfig:
    """The configuration of a run, from what was given; values are None where it was not.

    Args:
        data: None where nothing but numbers is known of it.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    settings["data"] = data or "numbers"
    if data is None:
        mode = mode or FullBatchConfig.mode
    elif mode is None or "model" not in settings:
        is_of_links, has_numbers = _known_of(data, settings.get("task"))
        mode = mode or (SampledConfig.mode if is_of_links else FullBatchConfig.mode)
        if has_numbers:
            settings.setdefault("model", "rgcn")
    if "fanouts" in settings:
        settings["fanouts"] = _numbers(settings["fanouts"])
    for name in ("class_weights", "model_args"):
        if name in settings and settings[name] != BALANCED:
            settings[name] = _named_values(name, settings[name])
    kinds: dict[str, type[AnyConfig]] = {k.mode: k for k in (FullBatchConfig, SampledConfig)}
    kind = kinds.pop(mode)
    (other,) = kinds
    own = {field.name for field in dataclasses.fields(kind)}
    for name in (name for name in settings if name not in own):
        raise ValueError(
            f"{name} is for mode {other} (got {name}={settings[name]}, {mode}); give --mode "
            f"{other}, or leave out {name}"
        )
    config = kind(**settings)
    config.check_given(settings)  # also of those that were given their defaults
    return config


def _known_of(data: str, task: str | None) -> tuple[bool, bool]:
    """Whether links are to be predicted, and whether edges carry relation numbers."""
    from ...data.prepare import has_facts, has_relation_numbers
    from ...data.task import read_task
    from .._tasks import LINK_PREDICTION

    path = Path(data)
    if is_partition(path):
        info = read_task(partition_json(path))
        return (task or info.kind) == LINK_PREDICTION, bool(info.num_relations)
    is_of_links = has_facts(data) if task is None else task == LINK_PREDICTION
    return is_of_links, has_relation_numbers(data)


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"fanouts must be whole numbers between commas, such as 15,10 (got {text!r})"
        ) from None


def _named_values(option: str, text: str) -> dict[str, Any]:
    """The values of "name=value,...", or of a JSON object, by name; numbers as numbers."""
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            values = json.loads(text)
            if isinstance(values, dict):
                return values
    values = {}
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(
                f"{option} must be name=value between commas, or a JSON object (got {text!r}); "
                "names and values may hold no comma, but in JSON"
            )
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    if option == "class_weights":
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(
                    f"class_weights must have numbers (got {value!r} for {name}); write "
                    "name=weight,..."
                )
    return values


def _run_rank(config: AnyConfig, workers: int | None, quiet: bool) -> None:
    """This process is one rank of torchrun's."""
    from ..launch import rank_work

    world_size = int(os.environ["WORLD_SIZE"])
    path = Path(config.data)
    if workers not in (None, world_size):
        raise ValueError(
            f"torchrun started {world_size} workers, and workers says {workers}; leave workers out"
        )
    if not is_partition(path):
        raise ValueError(
            f"under torchrun, data must be the JSON of a partition (got {config.data}); run "
            "graphshard partition first"
        )
    config = _with_data(config, partition_json(path))
    display = ProgressDisplay(quiet)

    def on_result(result: TrainResult) -> None:
        display.__exit__()
        _show(result, config)

    if os.environ["RANK"] == "0":
        display.__enter__().started(world_size)
    run_as_worker(lambda: rank_work(config, display.show, on_result))


@contextlib.contextmanager
def _partitioned(
    config: AnyConfig, workers: int | None, quiet: bool
) -> Iterator[tuple[AnyConfig, int]]:
    """The run on a partition, and its number of workers; a data set is partitioned for it."""
    from ..._base.files import TemporaryFolder
    from ...data.prepare import has_relations, partition_by_name
    from ...partition.format import read_config
    from .._tasks import LINK_PREDICTION

    path = Path(config.data)
    if is_partition(path):
        json_path = partition_json(path)
        yield _with_data(config, json_path), workers or read_config(json_path).num_parts
        return
    wants_loops = config.model in NEED_IN_EDGES and not has_relations(config.data)
    num_workers = workers or 1
    with TemporaryFolder() if config.run is None else contextlib.nullcontext(config.run) as folder:
        json_path = partition_json(Path(folder) / "parts")
        if not (config.resume and is_partition(json_path)):
            json_path = partition_by_name(
                config.data,
                num_workers,
                Path(folder) / "parts",
                preparation=Preparation(self_loops=True if wants_loops else None),
                has_links=config.task == LINK_PREDICTION,
                warns=False,
            )
            if not quiet:
                where = "" if config.run is None else f", in {json_path.parent}"
                Console(stderr=True, markup=False, emoji=False).print(
                    f"partitioned {json_path.stem} into {num_workers}{where}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
        yield _with_data(config, json_path), num_workers


def _with_data(config: AnyConfig, path: Path) -> AnyConfig:
    return dataclasses.replace(config, data=str(path))


def _show(result: TrainResult, config: AnyConfig) -> None:
    console = Console(markup=False, emoji=False)
    console.print(result_table(result, config.model, draws=console.encoding.startswith("utf")))


class ProgressDisplay:
    """Shows `EpochReport` on standard error: a bar on a terminal, else a line now and then.

    Steps inside an epoch move the bar by fractions.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, markup=False, emoji=False)
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._state, self._last_line = "no epoch has ended yet", time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal and not self._quiet:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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

    def started(self, num_workers: int) -> None:
        """Workers have been started: say so where there is no bar, and from now on show life."""
        if self._bar is None and not self._quiet:
            self._write(f"training on {num_workers} worker(s)")
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Show life where nothing else has for long."""
        start = time.monotonic()
        while not self._ended.wait(max(0.1, self._last_line + _SILENCE - time.monotonic())):
            if time.monotonic() - self._last_line >= _SILENCE:
                self._write(f"{time.monotonic() - start:.0f} s: {self._state}")

    def _write(self, line: str) -> None:
        self._last_line = time.monotonic()
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()

    def show(self, report: EpochReport) -> None:
        """Take one report in."""
        if report.note is not None and (report.is_warning or not self._quiet):
            self._console.print(report.note, markup=False, highlight=False, soft_wrap=True)
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
            return
        self._state = f"epoch {report.epoch}/{report.epochs} {_summary(report)}"
        is_due = report.epoch % max(1, report.epochs // _LINES) == 0
        if report.step is None and (is_due or report.epoch == report.epochs):
            self._write(self._state)

    def line(self, text: str) -> None:
        """Show a line that a worker printed."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _summary(report: EpochReport) -> str:
    from .._tasks import ACCURACY

    words = [] if report.loss is None else [f"loss {report.loss:.4f}"]
    if report.step is not None:
        words.append(f"step {report.step}/{report.steps}")
    if report.evaluation is not None:
        main = report.evaluation.main
        words += [f"{main}:"] * (main != ACCURACY)
        words += [
            f"{SPLIT_NAMES[split]} {_number(main, value, 1)}"
            for split, value in report.evaluation.values().get(main, {}).items()
        ]
    return "  ".join(words)


def _number(metric: str, value: float, digits: int) -> str:
    """Accuracy in percent, other metrics as they are."""
    from .._tasks import ACCURACY

    return f"{100 * value:.{digits}f}" if metric == ACCURACY else f"{value:.4f}"


def result_table(result: TrainResult, model: str, draws: bool = False) -> Table:
    """The end of a run: accuracy per split, then time, memory and bytes.

    Args:
        draws: Whether to show how the loss fell, in block elements.
    """
    from .._tasks import ACCURACY

    best, last = result.best, result.last
    how = f"{result.aggregation} aggregation" if result.sampling is None else "sampled"
    table = Table(title=f"{model}, {result.world_size} worker(s), {how}", title_justify="left")
    table.add_column("")
    for heading in (result.rows, f"epoch {best.epoch} (chosen)", f"epoch {last.epoch} (last)"):
        table.add_column(heading, justify="right")
    last_values = last.values()
    for metric, by_split in best.values().items():
        for split, number in by_split.items():
            unit = " %" if metric == ACCURACY else ""
            table.add_row(
                f"{SPLIT_NAMES[split]} {metric.replace('_', ' ')}",
                f"{result.num_nodes[split]:,}",
                f"{_number(metric, number, 2)}{unit}",
                f"{_number(metric, last_values[metric][split], 2)}{unit}",
            )
    if 0 < len(best.by_relation) <= _MOST_RELATIONS:
        table.add_section()
        for relation, values in best.by_relation.items():
            last_of = last.by_relation.get(relation, {})
            for split, number in values.get(best.main, {}).items():
                name = f"{SPLIT_NAMES[split]} {best.main} of {relation}"
                latest = last_of.get(best.main, {}).get(split)
                shown = "" if latest is None else _number(best.main, latest, 2)
                table.add_row(name, "", _number(best.main, number, 2), shown)
    table.add_section()
    facts = {
        "training loss": sparkline(result.losses) if draws and len(result.losses) > 1 else "",
        "training loss, last epoch": f"{result.losses[-1]:.4f}",
        "seconds per epoch": f"{result.seconds_per_epoch:.4f}",
        "seconds per evaluation": f"{result.seconds_per_evaluation:.4f}",
        "peak memory per worker": _mebibytes(result.peak_memory),
        "peak device memory per worker": _mebibytes(result.peak_device_memory or ()),
        "bytes sent per epoch": " ".join(f"{n:,}" for n in result.bytes_per_epoch),
        "parameters": f"{result.num_parameters:,}",
    }
    if not facts["training loss"]:
        del facts["training loss"]
    if result.peak_device_memory is None:
        del facts["peak device memory per worker"]
    if result.sampling is not None:
        facts |= _sampling_facts(result.sampling)
    if result.num_embedding_parameters:
        facts["embedding parameters"] = f"{result.num_embedding_parameters:,}"
    if result.stopped_early:
        facts["stopped"] = "no better validation result for the patience given"
    if result.resumed_from is not None:
        facts["resumed from epoch"] = str(result.resumed_from)
    for name, value in facts.items():
        table.add_row(name, "", value, "")
    return table


_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKLINE = 16  # characters


def sparkline(values: Sequence[float]) -> str:
    """A line of block elements, as high as means of consecutive values; blank where not finite."""
    width = min(_SPARKLINE, len(values))
    bounds = [len(values) * place // width for place in range(width + 1)]
    means = [math.fsum(values[start:stop]) / (stop - start) for start, stop in pairwise(bounds)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)

    def block(mean: float) -> str:
        if not math.isfinite(mean):
            return " "
        share = (mean - low) / span if span else 0.0
        return _BLOCKS[round(share * (len(_BLOCKS) - 1))]

    return "".join(map(block, means))


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
