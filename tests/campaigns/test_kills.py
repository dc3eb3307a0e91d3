# SPDX-License-Identifier: Apache-2.0
"""Training jobs whose processes are killed, stopped or silent: see kill_cases.py. Real jobs.

Two cases of 2 ranks by default, 300 with ``--all``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_cases import EXPECTED, Campaign, Case, run_cases

SAMPLE = (
    Case(0, "torchrun", "sampled", 2, "kill", -1, 4, 0.2),
    Case(1, "graphshard", "oneshot", 2, "strangers", 0, 0, 0.1),
)
NUM_ALL = 300


@pytest.mark.timeout(6 * 3600)
def test_jobs_end_and_resume_as_they_should(run_all: bool, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    cases = [Case.draw(number, campaign.seed) for number in range(NUM_ALL)] if run_all else SAMPLE
    findings = list(run_cases(campaign, cases, side_by_side=2))
    wrong = [finding for finding in findings if finding.outcome not in EXPECTED]
    assert not wrong, "\n".join(f"{f.outcome}: {f.case}\n{f.text}" for f in wrong)
