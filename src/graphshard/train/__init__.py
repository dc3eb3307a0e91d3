# SPDX-License-Identifier: Apache-2.0
"""Training runs, full-batch and sampled: models, loops, checkpoints, workers on this machine.

Most names are loaded when one of them is first used: commands that train nothing need none.
"""

from typing import TYPE_CHECKING, Any

from .._base.lazy import lazy_name

if TYPE_CHECKING:
    from ..data.task import TaskInfo, read_task, write_task
    from ._checkpoint import load_model_state
    from ._config import MODELS, FullBatchConfig, RunConfig, SampledConfig
    from ._embeddings import NodeEmbeddings
    from ._export import ModelCard, read_card
    from ._models import GAT, GCN, HGT, RGCN, SAGE, GATv2, TypedNetwork, TypedRGCN
    from ._own_model import LayeredNetwork, ModelSchema
    from ._predict import predict
    from ._result import EpochReport, Evaluation, SamplingReport, TrainResult
    from ._run import FullBatchRun, SampledRun, TrainingRun, train, train_full_batch, train_sampled
    from ._training_shard import TrainingShard, load_shard
    from .launch import (
        LaunchOutcome,
        WorkerExit,
        launch_training,
        launch_workers,
        run_as_worker,
        send_event,
        start_run,
    )

_MODULES = (
    *(
        "_config",
        "_result",
        "launch",
        ".data.task",
        "_checkpoint",
        "_embeddings",
        "_export",
        "_models",
    ),
    *("_own_model", "_predict", "_run", "_training_shard"),
)

__all__ = [
    "GAT",
    "GCN",
    "HGT",
    "MODELS",
    "RGCN",
    "SAGE",
    "EpochReport",
    "Evaluation",
    "FullBatchConfig",
    "FullBatchRun",
    "GATv2",
    "LaunchOutcome",
    "LayeredNetwork",
    "ModelCard",
    "ModelSchema",
    "NodeEmbeddings",
    "RunConfig",
    "SampledConfig",
    "SampledRun",
    "SamplingReport",
    "TaskInfo",
    "TrainResult",
    "TrainingRun",
    "TrainingShard",
    "TypedNetwork",
    "TypedRGCN",
    "WorkerExit",
    "launch_training",
    "launch_workers",
    "load_model_state",
    "load_shard",
    "predict",
    "read_card",
    "read_task",
    "run_as_worker",
    "send_event",
    "start_run",
    "train",
    "train_full_batch",
    "train_sampled",
    "write_task",
]


def __getattr__(name: str) -> Any:
    return lazy_name(__name__, _MODULES, __all__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
