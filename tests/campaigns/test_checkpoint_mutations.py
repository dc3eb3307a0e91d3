# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: a resumed run ends as the undisturbed one, or says what is wrong.

Forked children; each resumes a run of one rank in its own process. Which checkpoint it resumes from
is no part of the result: after damage it is the one before.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from campaign_report import write_report
from trials import Campaign, digest, run_trials

from graphshard.train import FullBatchConfig, FullBatchRun, load_model_state

sys.path.append(str(Path(__file__).parents[1] / "train"))
from train_cases import config_of, write_parts

COMMAND = "pytest tests/campaigns/test_checkpoint_mutations.py --all"
NUMBERS = {"resume": (120, 3600), "load_model_state": (60, 400)}
"""Mutations of each target: of the sample, and of the whole campaign."""

EPOCHS = 5

pytestmark = pytest.mark.filterwarnings("ignore:patience=50 has no effect")  # it is in the state


def values_of(data: str, **more: Any) -> dict[str, Any]:
    return {
        "data": data,
        "model": "rgcn",
        "dropout": 0.4,
        "patience": 50,
        "epochs": EPOCHS,
        **more,
    }


def train(config: FullBatchConfig) -> str:
    """Digest of all that a run ends with."""
    run = FullBatchRun(config)
    result = run.train()
    return digest(
        {
            "losses": result.losses,
            "best": vars(result.best),
            "last": vars(result.last),
            "shared": run._learner.shared_state(),
            "local": run._learner.local_state(),
        }
    )


def make_checkpoints(folder: Path, data: str) -> Path:
    """A run's folder with the checkpoints of epochs 2 and 4."""
    train(config_of(**values_of(data, epochs=4, save_every=2, checkpoint_dir=str(folder))))
    return folder


@pytest.mark.timeout(7200)
def test_resume_from_damaged_checkpoints(
    tmp_path: Path, run_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A resumed run writes checkpoints; that they reach the disk takes most of the time.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    data = write_parts(tmp_path, "typed", 1)
    undisturbed = train(config_of(**values_of(data)))
    original = make_checkpoints(tmp_path / "checkpoints", data)

    def resume(folder: Path) -> str:
        found = train(
            config_of(**values_of(data, save_every=2, resume=True, checkpoint_dir=str(folder)))
        )
        return "the undisturbed run" if found == undisturbed else found

    def load(folder: Path) -> list[str]:
        """The models of both checkpoints; that of the damaged one is refused."""
        return [digest(load_model_state(path)) for path in sorted(folder.glob("epoch-*"))]

    (tmp_path / "scratch").mkdir()
    outcomes: dict[str, Counter[str]] = {}
    campaigns: list[Campaign] = []
    for name, use in (("resume", resume), ("load_model_state", load)):
        numbers = range(NUMBERS[name][run_all])
        campaign = run_trials(use, original, tmp_path / "scratch", numbers)
        outcomes[name] = campaign.outcomes
        campaigns.append(campaign)
    if run_all:
        write_report(
            "checkpoint_mutations",
            "A run resumed from damaged checkpoints, and models loaded from them",
            COMMAND,
            outcomes,
            [
                "Each try damages one thing in a folder of two checkpoints and resumes. The result "
                "counts as the same when losses, evaluations, weights, moments and generators are "
                "those of the run without interruption, bit for bit."
            ],
        )
    for campaign in campaigns:
        campaign.check()
