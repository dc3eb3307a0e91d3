# SPDX-License-Identifier: Apache-2.0
"""To a cluster and onto it: copying parts to hosts, starting servers and trainers there."""

from ._copy import FileToCopy, HostCopy, copy_partition, files_of_host
from ._hosts import JobHosts, of_slurm_job, on_this_machine, over_ssh
from ._launch import LaunchConfig, launch
from ._run import JobFailure, JobOutcome
from ._shell import RemoteShell

__all__ = [
    "FileToCopy",
    "HostCopy",
    "JobFailure",
    "JobHosts",
    "JobOutcome",
    "LaunchConfig",
    "RemoteShell",
    "copy_partition",
    "files_of_host",
    "launch",
    "of_slurm_job",
    "on_this_machine",
    "over_ssh",
]
