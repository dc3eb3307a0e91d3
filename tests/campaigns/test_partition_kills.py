# SPDX-License-Identifier: Apache-2.0
"""Partitions whose process is killed or whose disk is full: see partition_kill_cases.py.

A full disk by default, 100 cases with ``--all``; in a process of its own, which is forked from.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import pytest
from partition_kill_cases import EXPECTED, Campaign, Case, run_cases

SAMPLE = (Case(0, "full disk", (0.5,)),)
NUM_ALL = 100


@pytest.mark.timeout(3600)
def test_partitions_go_on_to_the_same_bytes(run_all: bool, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:  # it changes what levels METIS gets
        code = 1
        try:
            cases = [Case.draw(number, 0) for number in range(NUM_ALL)] if run_all else SAMPLE
            found = run_cases(Campaign(tmp_path), cases)
            wrong = [f"{outcome}: {case}" for case, outcome in found if outcome not in EXPECTED]
            sys.stderr.write("\n".join(wrong))
            code = int(bool(wrong))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
