# SPDX-License-Identifier: Apache-2.0
"""Models of the user's own, by module and class, on 1 to 3 ranks and by commands."""

from __future__ import annotations

import shutil
import subprocess
import sys
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

from graphshard.testing import run_ranks
from graphshard.train import FullBatchConfig, FullBatchRun, SampledConfig, SampledRun
from graphshard.train.commands import run as run_command


def losses(folder: Path, kind: str, world_size: int, is_sampled: bool = False, **more: Any) -> Any:
    data = write_parts(folder, kind, world_size)
    values = {"dropout": 0.0, "epochs": 3, **more}
    config: FullBatchConfig | SampledConfig
    if is_sampled:
        config = sampled_config_of(data, fanouts=(-1, -1), **values)
    else:
        config = config_of(data, **values)
    train = train_sampled_on_rank if is_sampled else train_on_rank
    return run_ranks(train, world_size, as_values(config))[0]["result"]["losses"]


@pytest.mark.parametrize("kind", ["plain", "typed", "knowledge"])
def test_ranks_and_samples_train_as_one_process_does(kind: str, tmp_path: Path) -> None:
    """One class for graphs with and without types, features and samples."""
    own = {"model": "own_models:Net", "model_args": {"aggregator": "pool"}}
    one = losses(tmp_path, kind, 1, **own)
    torch.testing.assert_close(losses(tmp_path, kind, 3, **own), one, rtol=0, atol=1e-10)
    sampled = losses(tmp_path, kind, 2, is_sampled=True, **own)
    torch.testing.assert_close(sampled, one, rtol=0, atol=1e-10)
    assert losses(tmp_path, kind, 1, model="own_models:Net") != one


@pytest.mark.parametrize(
    "kind",
    [
        "typed_links",
        pytest.param("plain_links", marks=pytest.mark.exhaustive),
        pytest.param("edge_classes", marks=pytest.mark.exhaustive),
        pytest.param("edge_values", marks=pytest.mark.exhaustive),
        pytest.param("several_edge_classes", marks=pytest.mark.exhaustive),
    ],
)
def test_tasks_on_edges_are_trained_as_by_one_process(kind: str, tmp_path: Path) -> None:
    tasks = {"edge_values": "edge regression", "edge_classes": "edge classification"}
    tasks["several_edge_classes"] = "edge classification"
    own = {"model": "own_models:Net", "task": tasks.get(kind, "link prediction")}
    if kind == "typed_links":
        own["loss"] = "bce"
    one = losses(tmp_path, kind, 1, **own)
    torch.testing.assert_close(losses(tmp_path, kind, 2, **own), one, rtol=0, atol=1e-10)
    more = {"exclude_targets": False} if "links" in kind else {}
    sampled = losses(tmp_path, kind, 2, is_sampled=True, **own, **more)
    torch.testing.assert_close(sampled, one, rtol=0, atol=1e-10)


LINKS = {"task": "link prediction"}
MISFITS: dict[tuple[str, str], str] = {
    ("plain", "wide"): r"must give a tensor of \[\d+, 3\] .* \(got float64 \[\d+, 6\]\); return",
    (
        "plain",
        "few",
    ): r"tensor of \[\d+, 3\] numbers for '_N', its dest.* \(got float64 \[\d+, 3\]\)",
    ("plain", "tuple"): r"forward of model own_models:Misfit must give .* \(got a tuple\)",
    ("plain", "array"): r"\(got a ndarray\)",
    ("plain", "detached"): r"must depend on its parameters .* look for detach\(\)",
    ("typed", "by type"): r"the rows of 'paper' alone, as a tensor \(got a dict\); return rows\['p",
    ("typed_links", "one type"): r"rows of author and paper, by type \(got none of paper\); return",
}


@pytest.mark.parametrize(("kind", "gives"), MISFITS)
@pytest.mark.parametrize("is_sampled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_what_a_model_gives_is_looked_at(
    kind: str, gives: str, is_sampled: bool, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"model": "own_models:Misfit", "model_args": {"gives": gives}}
    values = {**own, **(LINKS if kind == "typed_links" else {}), "epochs": 1}
    data = write_parts(tmp_path, kind, 1)
    with pytest.raises(ValueError, match=MISFITS[kind, gives]):
        if is_sampled:
            SampledRun(sampled_config_of(data, fanouts=(-1, -1), **values)).train()
        else:
            FullBatchRun(config_of(data, **values)).train()


def test_an_own_gcn_is_the_gcn(tmp_path: Path) -> None:
    own = losses(tmp_path, "plain", 2, model="own_models:OwnGCN", weight_decay=0.0)
    usual = losses(tmp_path, "plain", 1, model="gcn", weight_decay=0.0)
    torch.testing.assert_close(own, usual, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("own_model:Net", "there is no module own_model in .* or among the installed packages"),
        ("own_models:Nett", "own_models has no 'Nett'; did you mean own_models:Net?"),
        ("own_models:NOT_A_CLASS", "it is no torch.nn.Module"),
        ("own_models:Stranger", r"must take \(schema, hidden=6, .*missing|unexpected"),
        ("own_models:WithoutForward", r"must have forward\(self, graphs, features\), and does not"),
        ("no_such.package:Net", "there is no module no_such in"),
        ("lacks_one:Net", "it needs the module not_installed_here, which is not there"),
    ],
)
def test_what_is_missing_is_named(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_one.py").write_text("import not_installed_here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=text):
        FullBatchRun(config_of(write_parts(tmp_path, "plain", 1), model=model))


@pytest.mark.usefixtures("nested_forks")
def test_modules_of_the_current_folder_are_there_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By spawned workers and by torchrun; arguments from a TOML file and from the line."""
    data = write_parts(tmp_path, "plain", 2)
    (tmp_path / "mine").mkdir()
    shutil.copy(Path(__file__).parent / "own_models.py", tmp_path / "mine" / "networks.py")
    (tmp_path / "run.toml").write_text(
        f"[train]\ndata = '{data}'\nmodel = 'mine.networks:Net'\nepochs = 2\n"
        "model-args = {aggregator = 'pool'}\nquiet = true\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert run_command(["train", "--config", "run.toml"]) == 0
    spawned = capfd.readouterr().out
    assert "mine.networks:Net, 2 worker(s)" in spawned
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "graphshard", "train", "--config", "run.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

    def shown(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if "accuracy" in line or "loss" in line]
        return [" ".join(line.split()) for line in lines]  # columns are as wide as memory says

    assert shown(done.stdout) == shown(spawned)
    assert run_command(["train", "--config", "run.toml", "--model-args", "aggregator=gcm"]) == 2
    assert "aggregator_type must be one of" in capfd.readouterr().err
