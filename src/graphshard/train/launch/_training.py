# SPDX-License-Identifier: Apache-2.0
"""launch_training: a training run on N local workers, seen from outside; and seen from inside."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from ..._base.device import choose_device
from ...comm import barrier, rank, shutdown_comms
from ...partition.format import read_config
from .._config import FullBatchConfig, SampledConfig
from .._result import EpochReport, Evaluation, TrainResult
from .._run import FullBatchRun, Progress, SampledRun, TrainingRun
from .._training_shard import check_num_workers
from ._local_workers import launch_workers
from ._worker import join_ranks, send_event

_MOST_RELATIONS = 1000


def launch_training(
    config: FullBatchConfig | SampledConfig,
    num_workers: int,
    *,
    progress: Progress | None = None,
    on_stderr: Callable[[str], None] | None = None,
    on_start: Callable[[list[int]], None] | None = None,
    on_result: Callable[[TrainResult], None] | None = None,
) -> TrainResult:
    """Train on local worker processes that are started, watched and ended here.

    Args:
        num_workers: Number of workers; as many as ``config.data`` has parts.
        progress: Called after every epoch, and in longer ones during it.
        on_stderr: Called with each line that worker 0 prints.
        on_start: Called with the process ids of the workers, by rank.
        on_result: Called with the result as soon as it is there: also in a run that fails after
            that, because a worker does not end as it should.

    Raises:
        ValueError: The configuration is wrong, or does not fit the graph.
        RankError: A worker failed; the message starts with the first cause.
        KeyboardInterrupt: Ctrl-C; all workers have been ended.
    """
    check_num_workers(config, read_config(config.data).num_parts, num_workers)
    choose_device(config.device)  # workers would say the same, later
    results: list[TrainResult] = []

    def on_event(event: dict[str, Any]) -> None:
        if "result" in event:
            results.append(TrainResult.from_dict(event["result"]))
            if on_result is not None:
                on_result(results[0])
        elif progress is not None:
            progress(report_from_dict(event["progress"]))

    outcome = launch_workers(
        [sys.executable, "-m", "graphshard.train.launch", config.to_json()],
        num_workers,
        timeout=config.timeout,
        on_event=on_event,
        on_stderr=on_stderr,
        on_start=on_start,
    )
    outcome.check()
    return results[0]


def start_run(
    config: FullBatchConfig | SampledConfig, progress: Progress | None = None
) -> TrainingRun:
    """Set up the run that a configuration describes; collective."""
    if isinstance(config, SampledConfig):
        return SampledRun(config, progress=progress)
    return FullBatchRun(config, progress=progress)


def rank_work(
    config: FullBatchConfig | SampledConfig,
    progress: Progress | None = None,
    on_result: Callable[[TrainResult], None] | None = None,
) -> Callable[[], None]:
    """Set up this process, one rank of a launcher's or torchrun's, and return its work.

    Args:
        progress: Called on rank 0 with each report; by default the launcher is told.
        on_result: Called on rank 0 at the end; by default the launcher is told.
    """
    config.resolved()
    join_ranks(config.device, config.timeout)
    first = rank() == 0
    run = start_run(config, (progress or _send_progress) if first else None)

    def work() -> None:
        result = run.train()
        if first and on_result is not None:
            on_result(result)
        elif first:
            send_event({"result": _sent(result.as_dict())})
        # A rank that gets no further than this fails the run, also where torchrun started it, which
        # waits without end for a process that is stopped after all others have ended well.
        barrier()
        shutdown_comms()

    return work


def _send_progress(report: EpochReport) -> None:
    values = dataclasses.asdict(report)
    if report.evaluation is not None:
        values["evaluation"]["by_relation"] = {}
    send_event({"progress": values})


def _sent(result: dict[str, Any]) -> dict[str, Any]:
    """A result that fits into an event: metrics of very many relations stay in history.jsonl."""
    for name in ("best", "last"):
        if len(result[name]["by_relation"]) > _MOST_RELATIONS:
            result[name]["by_relation"] = {}
    return result


def report_from_dict(values: dict[str, Any]) -> EpochReport:
    """Inverse of ``dataclasses.asdict``."""
    evaluation = values["evaluation"]
    made = None if evaluation is None else Evaluation(**evaluation)
    return EpochReport(**{**values, "evaluation": made})
