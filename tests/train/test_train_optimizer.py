# SPDX-License-Identifier: Apache-2.0
"""Optimizers, schedules, clipping, class weights and autocast, beside plain torch. Up to 3 ranks.

The oracle is a GCN of two matrix products on a dense matrix, with torch's own optimizers,
schedulers and `clip_grad_norm_`, which starts from the run's first weights.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from train_cases import (
    GRAPHS,
    NUM_CLASSES,
    as_values,
    config_of,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    write_parts,
)

from graphshard.data import load_dataset
from graphshard.data.task import partition_dataset
from graphshard.testing import run_ranks
from graphshard.train import FullBatchConfig, FullBatchRun, SampledRun

EPOCHS = 8
WEIGHTS = {"0": 0.5, "1": 2.0, "2": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "cosine": {"schedule": "cosine", "lr": 0.1},
    "warmup": {"warmup": 3, "lr": 0.1},
    "warmup_cosine": {"schedule": "cosine", "warmup": 3, "optimizer": "adamw"},
    "clipped": {"clip_norm": 0.05},
    "balanced": {"class_weights": "balanced"},
    "weighted": {"class_weights": WEIGHTS, "clip_norm": 0.1, "schedule": "cosine"},
}


def run(folder: Path, kind: str, world_size: int, **more: Any) -> list[dict[str, Any]]:
    data = write_parts(folder, kind, world_size)
    values = {"model": "gcn", "dropout": 0.0, "epochs": EPOCHS, **more}
    found: list[dict[str, Any]] = run_ranks(
        train_on_rank, world_size, as_values(config_of(data, **values))
    )
    return found


@cache
def dense(kind: str) -> tuple[torch.Tensor, Any]:
    """The normalised matrix of the graph, and its node features."""
    graph = GRAPHS[kind]()
    src, dst = graph.edges()
    num_nodes = graph.num_nodes()
    matrix = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    matrix.index_put_((dst, src), torch.ones(src.numel(), dtype=torch.float64), accumulate=True)
    scale = (matrix.sum(1)[:, None] * matrix.sum(0)[None, :]).clamp(min=1).rsqrt()
    return matrix * scale, graph.ndata


def expected_losses(folder: Path, kind: str, **more: Any) -> list[float]:
    """What torch makes of the same run, on one process."""
    data = write_parts(folder, kind, 1)
    values = {"model": "gcn", "dropout": 0.0, "epochs": EPOCHS, **more}
    config = config_of(data, **values)
    learner = FullBatchRun(config)._learner
    matrix, ndata = dense(kind)
    names = dict(learner.model.named_parameters())
    w1, b1, w2, b2 = (
        names[f"layers.{i}.{what}"].detach().clone().requires_grad_()
        for i in range(2)
        for what in ("weight", "bias")
    )
    tables = []
    if kind == "knowledge":
        order = torch.argsort(learner.embeddings.ids_0)
        tables = [learner.embeddings.rows[0].detach()[order].clone().requires_grad_()]
    x = tables[0] if tables else ndata["feat"]
    decay = config.resolved().weight_decay
    groups = [{"params": [w1, b1, *tables], "weight_decay": decay}, {"params": [w2, b2]}]
    kind_of = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    optimizer = kind_of(groups, lr=config.resolved().lr, weight_decay=0.0)
    steps: list[Any] = []
    if config.warmup:
        steps.append(LinearLR(optimizer, 1 / (config.warmup + 1), 1.0, config.warmup))
    if config.schedule == "cosine":
        steps.append(CosineAnnealingLR(optimizer, EPOCHS - config.warmup))
    scheduler = steps[0] if len(steps) == 1 else None
    if len(steps) == 2:
        scheduler = SequentialLR(optimizer, steps, [config.warmup])
    train = ndata["train_mask"] & (ndata["label"] >= 0)
    labels = ndata["label"][train]
    weights = None
    if config.class_weights == "balanced":  # sklearn's compute_class_weight
        counts = torch.bincount(labels, minlength=NUM_CLASSES).double()
        weights = labels.numel() / (NUM_CLASSES * counts)
    elif config.class_weights is not None:
        weights = torch.tensor([WEIGHTS[str(c)] for c in range(NUM_CLASSES)]).double()
    losses = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        scores = matrix @ torch.relu(matrix @ x @ w1 + b1) @ w2 + b2
        loss = F.cross_entropy(scores[train], labels, weights)
        loss.backward()
        if config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([w1, b1, w2, b2, *tables], config.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_run_makes_the_steps_of_torch(name: str, tmp_path: Path) -> None:
    """With rows of embeddings, too, whose gradients lie on the ranks that own them."""
    kind = "knowledge" if name in ("clipped", "weighted", "adamw") else "plain"
    expected = expected_losses(tmp_path, kind, **SETTINGS[name])
    three = run(tmp_path, kind, 3, **SETTINGS[name])
    torch.testing.assert_close(three[2]["result"]["losses"], expected, rtol=0, atol=1e-10)


RATES = [("cosine", 2), ("constant", 2), ("cosine", 0), ("constant", 0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("schedule", "warmup"),
    [
        pytest.param(*rates, marks=pytest.mark.exhaustive if rates != RATES[0] else [])
        for rates in RATES
    ],
)
@pytest.mark.parametrize(("model", "kind"), [("gcn", "plain"), ("hgt", "typed")])
def test_rates_that_a_run_shows_are_those_of_torch(
    model: str, kind: str, schedule: str, warmup: int, tmp_path: Path
) -> None:
    """GCN in full batch, a step an epoch; HGT in samples, several."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data, folder, board = write_parts(tmp_path, kind, 1), tmp_path / "run", tmp_path / "board"
    values = {"model": model, "epochs": 6, "lr": 0.02, "schedule": schedule, "warmup": warmup}
    values |= {"run": str(folder), "tensorboard": str(board)}
    num_steps = 1
    if model == "gcn":
        FullBatchRun(config_of(data, **values)).train()
    else:
        SampledRun(sampled_config_of(data, **values, heads=2, batch_size=3)).train()
        fields = GRAPHS[kind]().nodes["paper"].data
        num_steps = -(-int((fields["train_mask"] & (fields["label"] >= 0)).sum()) // 3)
        assert num_steps > 1
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.02)
    steps: list[Any] = []
    if warmup:
        rising = warmup * num_steps
        steps.append(LinearLR(optimizer, 1 / (rising + 1), 1.0, rising))
    if schedule == "cosine":
        steps.append(CosineAnnealingLR(optimizer, (6 - warmup) * num_steps))
    milestones = [warmup * num_steps] if len(steps) == 2 else []
    scheduler = SequentialLR(optimizer, steps, milestones) if steps else None
    expected = []
    for _ in range(6):
        for _ in range(num_steps):
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        expected.append(rate)
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in history] == pytest.approx(expected, rel=1e-9)
    events = EventAccumulator(str(board))
    events.Reload()
    shown = [event.value for event in events.Scalars("learning rate")]
    assert shown == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_resumed_run_goes_on_with_its_schedule(is_sampled: bool, tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 2)
    make = sampled_config_of if is_sampled else config_of
    train = train_sampled_on_rank if is_sampled else train_on_rank
    values = {"model": "gcn", **SETTINGS["warmup_cosine"], "clip_norm": 0.1, "epochs": 6}
    if is_sampled:
        values["batch_size"] = 2
    whole = run_ranks(train, 2, as_values(make(data, **values)))
    folder = str(tmp_path / "run")
    killed = make(data, **values, run=folder, save_every=3)
    run_ranks(train_until, 2, as_values(killed), is_sampled)
    resumed = run_ranks(train, 2, as_values(make(data, **values, run=folder, resume=True)))
    assert resumed[0]["result"]["resumed_from"] == 3
    for one, other in zip(whole, resumed, strict=True):
        assert one["result"]["losses"] == other["result"]["losses"]
        for name, value in one["shared"].items():
            assert torch.equal(value, other["shared"][name])
    with pytest.raises(Exception, match="epochs was 6 and is 7"):
        run_ranks(
            train, 2, as_values(make(data, **{**values, "epochs": 7}, run=folder, resume=True))
        )


def train_until(rank: int, world_size: int, values: dict[str, Any], is_sampled: bool) -> None:
    """Train, and stop at the first checkpoint."""
    from graphshard.train import SampledConfig, SampledRun

    run = (
        SampledRun(SampledConfig(**values))
        if is_sampled
        else FullBatchRun(FullBatchConfig(**values))
    )
    save = run._save

    def save_and_stop() -> None:
        save()
        if run._history.epoch == 3:
            raise StopIteration

    run._save = save_and_stop  # type: ignore[method-assign]
    with pytest.raises(StopIteration):
        run.train()


def test_autocast_computes_in_bfloat16_and_trains_nearly_the_same(
    tmp_path: Path, run_all: bool
) -> None:
    for model, kind in (("gcn", "plain"), ("gat", "plain"), ("rgcn", "typed"), ("hgt", "typed")):
        if model in ("gcn", "hgt") and not run_all:
            continue
        values = {"model": model, "dtype": "float32", "lr": 0.01, "epochs": 3}
        exact = run(tmp_path / model, kind, 2, **values)[0]
        cast = run(tmp_path / model, kind, 2, **values, autocast=True)[0]
        losses, wide = cast["result"]["losses"], exact["result"]["losses"]
        assert losses != wide
        torch.testing.assert_close(losses, wide, rtol=0.03, atol=0)
        assert all(
            value.dtype == torch.float32
            for name, value in cast["shared"].items()
            if name.startswith("model/")
        )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"class_weights": {"0": 1.0, "1": 1.0}}, "a weight for each class.*none for '2'"),
        ({"class_weights": {**WEIGHTS, "x": 1.0}}, "got 'x', which is none"),
        ({"class_weights": "even"}, "must be 'balanced', or a weight by class name"),
        ({"class_weights": dict.fromkeys("012", 0.0)}, "must not be 0 for all"),
        ({"clip_norm": 0.0}, "clip_norm must be a number above 0"),
        ({"autocast": True, "dtype": "float64"}, "autocast is for weights in float32"),
        ({"model": "gct"}, "did you mean"),
        ({"model_args": {"a": 1}}, "model_args is for a model of your own"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    values: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=text):
        FullBatchRun(config_of(write_parts(tmp_path, "plain", 1), **values))


@pytest.mark.exhaustive
def test_cora_with_all_of_these_settings_is_as_with_torch(tmp_path: Path) -> None:
    """On two ranks; class weights are those of scikit-learn."""
    from sklearn.utils.class_weight import compute_class_weight

    cora = load_dataset("cora", row_normalize=True, add_self_loop=True, dtype=torch.float64)
    values: dict[str, Any] = {
        "optimizer": "adamw",
        "schedule": "cosine",
        "warmup": 2,
        "clip_norm": 0.05,
        "class_weights": "balanced",
        "weight_decay": 0.1,
        "lr": 0.05,
        "epochs": EPOCHS,
        "model": "gcn",
        "hidden": 8,
        "dropout": 0.0,
        "eval_every": EPOCHS,
    }
    for parts in (1, 2):
        partition_dataset(cora, parts, tmp_path / str(parts), part_method="random")
    config = config_of(str(tmp_path / "1" / "cora.json"), **values)
    start = dict(FullBatchRun(config)._learner.model.named_parameters())
    names = [f"layers.{i}.{what}" for i in range(2) for what in ("weight", "bias")]
    w1, b1, w2, b2 = weights = [start[name].detach().clone().requires_grad_() for name in names]

    ndata = cora.graph.ndata
    src, dst = cora.graph.edges()
    scale = cora.graph.in_degrees().double().rsqrt()
    matrix = torch.zeros((cora.graph.num_nodes(),) * 2, dtype=torch.float64)
    matrix[dst, src] = scale[dst] * scale[src]
    groups = [{"params": [w1, b1], "weight_decay": 0.1}, {"params": [w2, b2]}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0)
    steps = [LinearLR(optimizer, 1 / 3, 1.0, 2), CosineAnnealingLR(optimizer, EPOCHS - 2)]
    scheduler = SequentialLR(optimizer, steps, [2])
    train = ndata["train_mask"]
    labels = ndata["label"][train]
    balanced = compute_class_weight("balanced", classes=np.arange(7), y=labels.numpy())
    expected = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        hidden = torch.relu(matrix @ (ndata["feat"] @ w1) + b1)
        scores = matrix @ (hidden @ w2) + b2
        loss = F.cross_entropy(scores[train], labels, torch.from_numpy(balanced))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.05)
        optimizer.step()
        scheduler.step()
        expected.append(float(loss.detach()))
    config = config_of(str(tmp_path / "2" / "cora.json"), **values)
    for rank in run_ranks(train_on_rank, 2, as_values(config)):
        torch.testing.assert_close(rank["result"]["losses"], expected, rtol=0, atol=1e-9)
