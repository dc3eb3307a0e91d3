# SPDX-License-Identifier: Apache-2.0
"""Training on GPUs: the numbers of the CPU, on the emulated GPU and (marked ``gpu``) on a real one.

Uses 2 gloo ranks (3 with ``--all``), which share one GPU.
"""

from __future__ import annotations

import contextlib
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

from emulated_gpu import OnGpu, emulated_gpu
from graphshard import choose_device
from graphshard.testing import run_ranks
from graphshard.train import FullBatchConfig, SampledConfig, TrainResult, launch_training
from graphshard.train.commands._train import result_table

# The first of each in every run; all with ``--all``, and on a real GPU.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"model": "gat", "heads": 2, "aggregation": "sequential"}),
    ("plain", {"model": "gat", "heads": 2, "aggregation": "oneshot"}),
    ("plain", {"model": "sage", "aggregation": "sequential", "rematerialize": False}),
    ("plain", {"model": "gcn", "aggregation": "oneshot", "halo_dtype": "bfloat16"}),
    ("knowledge", {"model": "rgcn", "aggregation": "sequential"}),
    ("typed", {"model": "rgcn", "num_bases": 2, "aggregation": "oneshot"}),
]
SAMPLED: list[tuple[str, dict[str, Any]]] = [
    ("knowledge", {"model": "rgcn", "fanouts": (2, 3)}),
    ("plain", {"model": "gcn", "fanouts": (2, 3)}),
    ("typed", {"model": "rgcn", "fanouts": (2, 3), "map_features": False}),
]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICES = ["emulated", pytest.param("real", marks=[pytest.mark.gpu, needs_gpu])]


def train_all(rank: int, size: int, jobs: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Each job on the CPU and then on the GPU."""
    found = []
    for job in jobs:
        train = train_sampled_on_rank if "fanouts" in job else train_on_rank
        for device in ("cpu", "cuda"):
            emulates = device == "cuda" and where == "emulated"
            with emulated_gpu() if emulates else contextlib.nullcontext():
                found.append(train(rank, size, {**job, "device": device}))
    return found


@pytest.mark.parametrize("where", DEVICES)
def test_ranks_that_share_a_gpu_train_as_on_the_cpu(
    where: str, tmp_path: Path, run_all: bool
) -> None:
    chosen = slice(None) if run_all or where == "real" else slice(None, 1)
    num_ranks = 3 if run_all else 2
    common: dict[str, Any] = {"epochs": 2, "eval_every": 2, "dropout": 0.0}
    jobs = []
    for kind, values in CASES[chosen]:
        data = write_parts(tmp_path, kind, num_ranks)
        jobs.append(as_values(config_of(data, **common, **values)))
    for kind, values in SAMPLED[chosen]:
        data = write_parts(tmp_path, kind, num_ranks)
        # The emulated GPU is of one thread, so the loader must have no others.
        jobs.append(as_values(sampled_config_of(data, prefetch=0, **common, **values)))
    for of_rank in run_ranks(train_all, num_ranks, jobs, where, timeout=240.0):
        for job, here, there in zip(jobs, of_rank[::2], of_rank[1::2], strict=True):
            assert here["result"]["losses"] == pytest.approx(there["result"]["losses"], abs=1e-9), (
                job
            )
            assert here["result"]["peak_device_memory"] is None
            assert min(there["result"]["peak_device_memory"]) > 0
            for part in ("shared", "local"):
                for name, value in here[part].items():
                    if name != "random":
                        torch.testing.assert_close(there[part][name], value, rtol=1e-6, atol=1e-8)


def test_a_checkpoint_of_either_device_goes_on_on_the_other(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "knowledge", 1)
    short = {"model": "rgcn", "epochs": 3, "hidden": 2}
    whole = train_on_rank(0, 1, as_values(config_of(data, device="cpu", **short)))
    for first in ("cpu", "cuda"):
        folder = str(tmp_path / first)
        values = as_values(
            config_of(data, device=first, checkpoint_dir=folder, save_every=2, **short)
        )
        second = {"cpu": "cuda", "cuda": "cpu"}[first]
        with emulated_gpu():
            half = train_on_rank(0, 1, {**values, "epochs": 2})
            rest = train_on_rank(0, 1, {**values, "device": second, "resume": True})
        assert rest["result"]["resumed_from"] == 2
        assert half["result"]["losses"] + rest["result"]["losses"][2:] == pytest.approx(
            whole["result"]["losses"]
        )
        assert not any(isinstance(value, OnGpu) for value in half["local"].values())


def test_local_ranks_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_gpu(count=2):
        for rank, index in enumerate((0, 1, 0)):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            for name in ("auto", "cuda"):
                assert choose_device(name) == torch.device("cuda", index)
            assert choose_device("cuda:1") == torch.device("cuda", 1)
            assert choose_device("cpu") == torch.device("cpu")
        with pytest.raises(ValueError, match=r"cuda:0 to cuda:1 \(got cuda:2\)"):
            choose_device("cuda:2")


def test_a_device_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    config = config_of(write_parts(tmp_path, "plain", 1), device="cuda")
    with pytest.raises(ValueError, match=r"device must be one that torch sees \(got cuda, and"):
        launch_training(config, 1)
    with pytest.raises(ValueError, match=r"device must be one that torch sees \(got cuda, and"):
        train_on_rank(0, 1, as_values(config))
    for kind in (FullBatchConfig, SampledConfig):
        with pytest.raises(ValueError, match=r"device must be auto, cpu, cuda or cuda:N"):
            kind(data="x", device="cuda:first")


def test_the_table_has_the_memory_of_gpus(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 1)
    with emulated_gpu():
        values = train_on_rank(0, 1, as_values(config_of(data, epochs=1, device="auto")))["result"]
    table = result_table(TrainResult.from_dict(values), "gcn")
    rows = dict(zip(table.columns[0].cells, table.columns[2].cells, strict=True))
    assert rows["peak device memory per worker"] == "123.0 MiB"
