# SPDX-License-Identifier: Apache-2.0
"""A worker is killed in the middle of a run. The launcher's workers, forked; two gloo ranks.

The others exit by themselves, well within the timeout, and name it; resuming gives the undisturbed
result, bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

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
from graphshard.train.launch import rank_work

TIMEOUT = 60.0


def start_and_kill(config: FullBatchConfig | SampledConfig, after: int) -> tuple[RankError, float]:
    """Launch two workers; kill the second as soon as the first reports an epoch.

    Returns:
        The error, and how many seconds after that it came.
    """
    pids: list[int] = []
    killed: list[float] = []

    def watch(report: EpochReport) -> None:
        if report.epoch == after and report.note is None:
            os.kill(pids[1], signal.SIGKILL)
            killed.append(time.monotonic())

    with pytest.raises(RankError) as failed:
        launch_training(config, 2, progress=watch, on_start=pids.extend)
    return failed.value, time.monotonic() - killed[0]


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("forked_interpreters")
@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.exhaustive), "sample"])
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
    error, seconds = start_and_kill(saving, after=5)
    assert seconds < TIMEOUT / 2
    report = str(error).splitlines()
    assert error.ranks == (1,)
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


def test_no_rank_ends_well_before_all_have(tmp_path: Path) -> None:
    """Under torchrun nobody would end a rank that hangs after the others have ended with 0."""
    values = as_values(config_of(write_parts(tmp_path, "plain", 2), model="sage", timeout=5.0))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    texts = run_ranks(end_late, 2, values, port, group=False)
    assert "rank 1: barrier with rank 0 failed" in texts[1]


def end_late(rank: int, world_size: int, values: dict[str, Any], port: int) -> str:
    """Rank 0 is busy with the result for longer than the timeout; returns the error."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_PORT=str(port))
    work = rank_work(
        FullBatchConfig(**values),
        progress=lambda report: None,
        on_result=lambda result: time.sleep(values["timeout"] + 2.0),
    )
    try:
        work()
    except RankError as error:
        return str(error)
    return "ended well"
