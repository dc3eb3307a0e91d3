# SPDX-License-Identifier: Apache-2.0
"""Processes from start to end: workers on this machine, servers and trainers on many.

And what a cluster needs before: parts copied to its hosts.
"""

from typing import TYPE_CHECKING, Any

from ..._base.lazy import lazy_name
from ._worker import (
    WRONG_INPUT_ERRORS,
    ExitCode,
    end_with_launcher,
    join_ranks,
    run_as_worker,
    send_event,
    show_warning,
    stop_on_signals,
)

if TYPE_CHECKING:
    from ._copy import FileToCopy, HostCopy, copy_partition, files_of_host
    from ._hosts import JobHosts, RemoteShell, of_slurm_job, on_this_machine, over_ssh
    from ._job_on_hosts import JobFailure, JobOutcome, LaunchConfig, launch
    from ._local_workers import LaunchOutcome, WorkerExit, launch_workers
    from ._training import launch_training, rank_work, report_from_dict, start_run

_MODULES = "_local_workers", "_hosts", "_job_on_hosts", "_copy", "_training"

__all__ = [
    "WRONG_INPUT_ERRORS",
    "ExitCode",
    "FileToCopy",
    "HostCopy",
    "JobFailure",
    "JobHosts",
    "JobOutcome",
    "LaunchConfig",
    "LaunchOutcome",
    "RemoteShell",
    "WorkerExit",
    "copy_partition",
    "end_with_launcher",
    "files_of_host",
    "join_ranks",
    "launch",
    "launch_training",
    "launch_workers",
    "of_slurm_job",
    "on_this_machine",
    "over_ssh",
    "rank_work",
    "report_from_dict",
    "run_as_worker",
    "send_event",
    "show_warning",
    "start_run",
    "stop_on_signals",
]


def __getattr__(name: str) -> Any:
    return lazy_name(__name__, _MODULES, __all__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
