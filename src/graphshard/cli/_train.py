# SPDX-License-Identifier: Apache-2.0
"""``graphshard train``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .._temporary import TemporaryFolder
from ..partition.format import read_config
from ..train import FullBatchConfig, SampledConfig, TrainResult, launch_training, run_as_worker
from ..train._local import rank_work
from ..train._prepare import Preparation, has_relations, partition_dataset, read_dataset
from ._paths import is_partition, partition_json
from ._progress import ProgressDisplay, result_table

Config = FullBatchConfig | SampledConfig


class Model(str, Enum):
    """Values of ``--model``."""

    gcn = "gcn"
    sage = "sage"
    gat = "gat"
    rgcn = "rgcn"


class Mode(str, Enum):
    """Values of ``--mode``."""

    full = "full"
    sample = "sample"


class Sampler(str, Enum):
    """Values of ``--sampler``."""

    neighbor = "neighbor"
    labor = "labor"


class Transport(str, Enum):
    """Values of ``--transport``."""

    auto = "auto"
    collective = "collective"
    replicated = "replicated"


class Aggregator(str, Enum):
    """Values of ``--aggregator``."""

    mean = "mean"
    gcn = "gcn"
    pool = "pool"


class Aggregation(str, Enum):
    """Values of ``--aggregation``."""

    auto = "auto"
    sequential = "sequential"
    oneshot = "oneshot"


class HaloDType(str, Enum):
    """Values of ``--halo-dtype``."""

    bfloat16 = "bfloat16"
    float16 = "float16"


class DType(str, Enum):
    """Values of ``--dtype``."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


def train(
    data: Annotated[
        str,
        typer.Option(
            help="The JSON of a partition; or what 'graphshard partition --data' takes, to be "
            "partitioned into a temporary folder first."
        ),
    ],
    model: Annotated[Model, typer.Option(help="Which network.")] = Model.gcn,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of workers; default: one for each part, or under torchrun all."),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(help="full: the whole graph in every step. sample: sampled blocks."),
    ] = Mode.full,
    aggregator: Annotated[
        Aggregator, typer.Option(help="sage: how neighbours are put together.")
    ] = Aggregator.mean,
    aggregation: Annotated[
        Aggregation, typer.Option(help="How rows of other workers are fetched.")
    ] = Aggregation.auto,
    rematerialize: Annotated[
        bool | None,
        typer.Option(
            "--rematerialize/--no-rematerialize",
            help="full, with sequential aggregation: fetch rows again in the backward.",
        ),
    ] = None,
    halo_dtype: Annotated[
        HaloDType | None,
        typer.Option(help="full: rows of other workers travel in it, rounded; default: as is."),
    ] = None,
    fanouts: Annotated[
        str | None,
        typer.Option(
            help="sample: neighbours drawn per node and relation, one number per layer, the last "
            "for the training nodes, such as 15,10; -1: all. Default: 10 in each."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="sample: training nodes of a worker in a step; 0: all.")
    ] = None,
    sampler: Annotated[Sampler | None, typer.Option(help="sample: how to draw.")] = None,
    replace: Annotated[
        bool | None, typer.Option("--replace", help="sample: draw with replacement.")
    ] = None,
    transport: Annotated[
        Transport | None,
        typer.Option(
            help="sample: where neighbours are drawn: at their owners, or everywhere from a copy "
            "of the structure."
        ),
    ] = None,
    map_features: Annotated[
        bool | None,
        typer.Option(
            "--map-features/--no-map-features",
            help="sample: workers on one host share the memory of features.",
        ),
    ] = None,
    cache_bytes: Annotated[
        int | None,
        typer.Option(help="sample: memory of a worker for often used rows of others."),
    ] = None,
    prefetch: Annotated[
        int | None,
        typer.Option(
            help="sample: batches made ready ahead; full: parts of other workers whose rows are "
            "under way while one is computed; 0: none."
        ),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Width of hidden layers; gat: of one head.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="gat: heads of the hidden layers.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Probability of dropout.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of Adam.")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="L2 penalty, where the model's paper puts it.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Number of epochs.")] = None,
    patience: Annotated[
        int | None,
        typer.Option(help="Stop after so many evaluations without a better one; 0: never."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, embeddings and dropout.")] = 0,
    num_bases: Annotated[
        int | None, typer.Option(help="rgcn: matrices that relations share; 0: one each.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Of features and weights.")] = DType.float32,
    eval_every: Annotated[int, typer.Option(help="Evaluate after every so many epochs.")] = 1,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a wait for another worker may take.")
    ] = 300.0,
    save_every: Annotated[
        int, typer.Option(help="Write a checkpoint after every so many epochs; 0: none.")
    ] = 0,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Folder of the checkpoints.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the final table alone.")] = False,
) -> None:
    """Train a graph neural network in full batch or on samples, by local workers or torchrun's."""
    common: dict[str, Any] = {
        "data": data,
        "model": model.value,
        "aggregator": aggregator.value,
        "aggregation": aggregation.value,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "dropout": dropout,
        "lr": lr,
        "weight_decay": weight_decay,
        "epochs": epochs,
        "patience": patience,
        "seed": seed,
        "num_bases": num_bases,
        "dtype": dtype.value,
        "eval_every": eval_every,
        "timeout": timeout,
        "save_every": save_every,
        "checkpoint_dir": None if checkpoint_dir is None else str(checkpoint_dir),
        "resume": resume,
    }
    full = {
        "rematerialize": rematerialize,
        "prefetch": prefetch,
        "halo_dtype": None if halo_dtype is None else halo_dtype.value,
    }
    sample = {
        "fanouts": None if fanouts is None else _numbers(fanouts),
        "batch_size": batch_size,
        "sampler": None if sampler is None else sampler.value,
        "replace": replace,
        "transport": None if transport is None else transport.value,
        "map_features": map_features,
        "cache_bytes": cache_bytes,
        "prefetch": prefetch,
    }
    config: Config
    if mode is Mode.full:
        config = FullBatchConfig(**common, **_given(full, sample, mode))
    else:
        config = SampledConfig(**common, **_given(sample, full, mode))
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1 (got {workers})")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _run_rank(config, workers, quiet)
        return
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


def _given(own: dict[str, Any], others: dict[str, Any], mode: Mode) -> dict[str, Any]:
    """What was given of a mode's own settings.

    Raises:
        ValueError: A setting of another mode was given.
    """
    for name, value in others.items():
        if value is not None and name not in own:
            other = Mode.sample if mode is Mode.full else Mode.full
            raise ValueError(f"{name} is for mode {other.value} (got {name}={value}, {mode.value})")
    return {name: value for name, value in own.items() if value is not None}


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"fanouts must be whole numbers between commas, such as 15,10 (got {text!r})"
        ) from None


def _run_rank(config: Config, workers: int | None, quiet: bool) -> None:
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
def _partitioned(config: Config, workers: int | None, quiet: bool) -> Iterator[tuple[Config, int]]:
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
            Console(stderr=True).print(
                f"partitioned {dataset.name} into {num_workers}", markup=False, highlight=False
            )
        yield _with_data(config, json_path), num_workers


def _with_data(config: Config, path: Path) -> Config:
    return dataclasses.replace(config, data=str(path))


def _show(result: TrainResult, config: Config) -> None:
    Console().print(result_table(result, config.model))
