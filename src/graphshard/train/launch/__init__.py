# SPDX-License-Identifier: Apache-2.0
"""Local workers: one process for each rank, from start to end; and the training that they do."""

from ._launcher import LaunchOutcome, WorkerExit, launch_workers, stop_on_signals
from ._training import launch_training, rank_work, report_from_dict, start_run
from ._worker import (
    WRONG_INPUT_ERRORS,
    ExitCode,
    end_with_launcher,
    run_as_worker,
    send_event,
    show_warning,
)
