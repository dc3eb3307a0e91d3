# SPDX-License-Identifier: Apache-2.0
"""A job that makes and drops tensors ends where it began: see soak_cases.py. 1 and 3 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak_cases import soak, wrong

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the system has no /proc with its memory"
)


@pytest.mark.parametrize(("num_hosts", "num_trainers"), [(1, 1), (2, 3)])
def test_a_short_job_ends_where_it_began(num_hosts: int, num_trainers: int) -> None:
    results = soak(num_hosts, num_trainers, 0.0, 20)
    assert [wrong(result, num_hosts) for result in results] == [[]] * num_trainers


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_job_of_ten_minutes_ends_where_it_began() -> None:
    results = soak(2, 3, 600.0, 20)
    assert [wrong(result, 2) for result in results] == [[]] * 3
