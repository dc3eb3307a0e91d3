# SPDX-License-Identifier: Apache-2.0
"""A worker is killed in the middle of a run. Real worker processes of the launcher, two gloo ranks.

The others exit by themselves, well within the timeout, and name it; resuming gives the undisturbed
result, bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from train_cases import (
    as_values,
    config_of,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    write_parts,
)

from graphshard import RankError
from graphshard.testing import run_ranks
from graphshard.train import EpochReport, FullBatchConfig, SampledConfig, launch_training

TIMEOUT = 60.0


def start_and_kill(config: FullBatchConfig | SampledConfig, after: int) -> None:
    """Launch two workers; kill the second as soon as the first reports an epoch."""
    pids: list[int] = []

    def watch(report: EpochReport) -> None:
        if report.epoch == after and report.note is None:
            os.kill(pids[1], signal.SIGKILL)

    launch_training(config, 2, progress=watch, on_start=pids.extend)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["full", "sample"])
def test_a_killed_worker_is_named_by_the_others_and_the_run_resumes_exactly(
    mode: str, tmp_path: Path
) -> None:
    data = write_parts(tmp_path, "typed", 2)
    values = {"model": "rgcn", "dropout": 0.5, "epochs": 10, "timeout": TIMEOUT}
    config: FullBatchConfig | SampledConfig = config_of(data, **values)
    work = train_on_rank
    if mode == "sample":
        config = sampled_config_of(data, **values, fanouts=(2, 2), batch_size=2)
        work = train_sampled_on_rank
    undisturbed = run_ranks(work, 2, as_values(config))

    saving = dataclasses.replace(config, save_every=2, checkpoint_dir=str(tmp_path / "c"))
    start = time.monotonic()
    with pytest.raises(RankError) as failed:
        start_and_kill(saving, after=5)
    assert time.monotonic() - start < TIMEOUT / 2
    report = str(failed.value).splitlines()
    assert failed.value.ranks == (1,)
    assert report[0] == "rank 1 ended with signal SIGKILL"
    assert report[-1].startswith("then rank 0 ended with exit code 3: error: rank 0:")
    assert "rank 1" in report[-1].removeprefix("then rank 0")

    resuming = dataclasses.replace(saving, resume=True)
    resumed = run_ranks(work, 2, as_values(resuming))
    for found, expected in zip(resumed, undisturbed, strict=True):
        assert found["result"]["resumed_from"] in (4, 6)  # the victim may have gone on a little
        assert found["result"]["losses"] == expected["result"]["losses"]
        assert found["result"]["best"] == expected["result"]["best"]
        for part in ("shared", "local"):
            for name, value in expected[part].items():
                assert torch.equal(found[part][name], value), name
