# SPDX-License-Identifier: Apache-2.0
"""Training runs, full-batch and sampled: models, loops, checkpoints, workers on this machine."""

from ..data.task import TaskInfo, read_task, write_task
from ._checkpoint import load_model_state
from ._config import MODELS, FullBatchConfig, RunConfig, SampledConfig
from ._embeddings import NodeEmbeddings
from ._models import GAT, GCN, RGCN, SAGE, TypedRGCN
from ._result import EpochReport, Evaluation, SamplingReport, TrainResult
from ._run import FullBatchRun, SampledRun, TrainingRun, train_full_batch, train_sampled
from ._shard import TrainingShard, load_shard
from .launch import (
    LaunchOutcome,
    WorkerExit,
    launch_training,
    launch_workers,
    run_as_worker,
    send_event,
    start_run,
)

__all__ = [
    "GAT",
    "GCN",
    "MODELS",
    "RGCN",
    "SAGE",
    "EpochReport",
    "Evaluation",
    "FullBatchConfig",
    "FullBatchRun",
    "LaunchOutcome",
    "NodeEmbeddings",
    "RunConfig",
    "SampledConfig",
    "SampledRun",
    "SamplingReport",
    "TaskInfo",
    "TrainResult",
    "TrainingRun",
    "TrainingShard",
    "TypedRGCN",
    "WorkerExit",
    "launch_training",
    "launch_workers",
    "load_model_state",
    "load_shard",
    "read_task",
    "run_as_worker",
    "send_event",
    "start_run",
    "train_full_batch",
    "train_sampled",
    "write_task",
]
