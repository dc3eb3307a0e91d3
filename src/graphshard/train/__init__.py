# SPDX-License-Identifier: Apache-2.0
"""Training runs: models, the full-batch loop, checkpoints, and workers on this machine."""

from ._checkpoint import load_model_state
from ._config import MODELS, FullBatchConfig
from ._embeddings import NodeEmbeddings
from ._full_batch import FullBatchRun, train_full_batch
from ._launch import LaunchOutcome, WorkerExit, launch_workers
from ._local import launch_full_batch
from ._models import GAT, GCN, RGCN, SAGE, TypedRGCN
from ._result import EpochReport, Evaluation, TrainResult
from ._shard import TrainingShard, load_shard
from ._task import TaskInfo, read_task, write_task
from ._worker import run_as_worker, send_event

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
    "TaskInfo",
    "TrainResult",
    "TrainingShard",
    "TypedRGCN",
    "WorkerExit",
    "launch_full_batch",
    "launch_workers",
    "load_model_state",
    "load_shard",
    "read_task",
    "run_as_worker",
    "send_event",
    "train_full_batch",
    "write_task",
]
