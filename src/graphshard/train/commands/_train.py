# SPDX-License-Identifier: Apache-2.0
"""``graphshard train``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ..._base.device import choose_device
from ..._base.files import TemporaryFolder
from ...data.prepare import Preparation, has_relations, read_dataset
from ...data.task import partition_dataset
from ...partition.format import read_config
from .._config import FullBatchConfig, SampledConfig
from .._result import TrainResult
from ..launch import rank_work
from ..launch._training import launch_training
from ..launch._worker import run_as_worker
from ._options import options_of
from ._paths import is_partition, partition_json
from ._progress import ProgressDisplay, result_table

AnyConfig = FullBatchConfig | SampledConfig


@options_of(FullBatchConfig, SampledConfig)
def train(
    *,
    data: Annotated[
        str,
        typer.Option(
            help="The JSON of a partition; or what 'graphshard partition --data' takes, to be "
            "partitioned into a temporary folder first."
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of workers.",
            show_default="one for each part, and one for a data set; under torchrun all",
        ),
    ] = None,
    mode: Annotated[
        Literal["full", "sample"],
        typer.Option(help="full: the whole graph in every step. sample: sampled blocks."),
    ] = "full",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the final table alone.")] = False,
    **settings: Any,
) -> None:
    """Train a graph neural network in full batch or on samples, by local workers or torchrun's."""
    config = _configured(mode, data=data, **settings)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1 (got {workers})")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _run_rank(config, workers, quiet)
        return
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
                on_result=results.append,
            )
    finally:  # a worker that fails after the result spoils the run, but not the result
        if results:
            _show(results[0], config)


def _configured(mode: str, **settings: Any) -> AnyConfig:
    """The configuration of a mode, from what was given; None where it was not.

    Raises:
        ValueError: A setting is out of range, or of another mode.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if "fanouts" in settings:
        settings["fanouts"] = _numbers(settings["fanouts"])
    kinds: dict[str, type[AnyConfig]] = {k.mode: k for k in (FullBatchConfig, SampledConfig)}
    kind = kinds.pop(mode)
    (other,) = kinds
    own = {field.name for field in dataclasses.fields(kind)}
    for name in (name for name in settings if name not in own):
        raise ValueError(f"{name} is for mode {other} (got {name}={settings[name]}, {mode})")
    config = kind(**settings)
    config.check_given(settings)  # also of those that were given their defaults
    return config


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"fanouts must be whole numbers between commas, such as 15,10 (got {text!r})"
        ) from None


def _run_rank(config: AnyConfig, workers: int | None, quiet: bool) -> None:
    """This process is one rank of torchrun's."""
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
        display.__exit__(None, None, None)
        _show(result, config)

    if os.environ["RANK"] == "0":
        display.__enter__()
    run_as_worker(lambda: rank_work(config, display.show, on_result))


@contextlib.contextmanager
def _partitioned(
    config: AnyConfig, workers: int | None, quiet: bool
) -> Iterator[tuple[AnyConfig, int]]:
    """The run on a partition, and its number of workers; a data set is partitioned for it."""
    path = Path(config.data)
    if is_partition(path):
        json_path = partition_json(path)
        yield _with_data(config, json_path), workers or read_config(json_path).num_parts
        return
    wants_loops = config.model in ("gcn", "gat") and not has_relations(config.data)
    dataset = read_dataset(config.data, Preparation(self_loops=True if wants_loops else None))
    num_workers = workers or 1
    with TemporaryFolder() as folder:
        json_path = partition_dataset(dataset, num_workers, folder / "parts")
        if not quiet:
            Console(stderr=True, markup=False, emoji=False).print(
                f"partitioned {dataset.name} into {num_workers}", markup=False, highlight=False
            )
        yield _with_data(config, json_path), num_workers


def _with_data(config: AnyConfig, path: Path) -> AnyConfig:
    return dataclasses.replace(config, data=str(path))


def _show(result: TrainResult, config: AnyConfig) -> None:
    Console(markup=False, emoji=False).print(result_table(result, config.model))
