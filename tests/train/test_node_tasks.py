# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of tasks on nodes: against scikit-learn and plain torch; gloo ranks."""

from __future__ import annotations

import json
import math
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train_cases import (
    GRAPHS,
    as_values,
    config_of,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    write_parts,
)

from graphshard.testing import run_ranks
from graphshard.train import Evaluation, FullBatchConfig, FullBatchRun
from graphshard.train._result import History, HistoryFile
from graphshard.train._tasks import Classes, SeveralLabels, Values

sklearn_metrics = pytest.importorskip("sklearn.metrics")

VALUES: dict[str, Any] = {"task": "node regression"}
CLASS_METRICS = "macro_f1,accuracy,auroc,average_precision"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "classes": ("plain", {"model": "gcn", "dropout": 0.0, "metrics": CLASS_METRICS}),
    "several labels": ("several_labels", {"model": "gcn", "dropout": 0.0}),
    "values": ("values", {"model": "gcn", "dropout": 0.0, **VALUES}),
    "absolute errors": ("values", {"model": "sage", "dropout": 0.0, "loss": "l1", **VALUES}),
    "typed values": ("typed_values", {"model": "rgcn", **VALUES}),
}


def scores_and_labels(case: str, tmp_path: Path) -> tuple[Any, dict[str, tuple[Tensor, Tensor]]]:
    """Evaluation of a run's last model, and scores and labels of every split."""
    kind, values = CASES[case]
    run = FullBatchRun(config_of(write_parts(tmp_path, kind, 1), epochs=2, **values))
    result = run.train()
    scores = run._learner.evaluation_scores()
    shard = run._shard
    return result.last, {s: (scores[r], shard.label[r]) for s, r in shard.rows.items()}


@pytest.mark.parametrize("case", ["classes", "several labels"])
def test_metrics_of_classes_are_scikit_learn_s(case: str, tmp_path: Path) -> None:
    last, splits = scores_and_labels(case, tmp_path)
    assert last.main == ("macro_f1" if case == "classes" else "auroc")
    for split, (scores, label) in splits.items():
        if case == "classes":
            shares, predicted = scores.softmax(1).numpy(), scores.argmax(1).numpy()
            one_hot = F.one_hot(label, 3).numpy()
            expected = {"accuracy": np.mean(predicted == label.numpy())}
        else:
            shares, predicted = scores.sigmoid().numpy(), (scores > 0).long().numpy()
            one_hot = label.numpy()
            expected = {"accuracy": np.mean(predicted == one_hot)}
        # scikit-learn counts labels that are nowhere as 0, and classes that are nowhere not at all
        labels = None if case == "classes" else np.flatnonzero(one_hot.any(0) | predicted.any(0))
        expected["macro_f1"] = sklearn_metrics.f1_score(
            label.numpy(), predicted, average="macro", labels=labels
        )
        there = [c for c in range(one_hot.shape[1]) if 0 < one_hot[:, c].sum() < len(one_hot)]
        expected["auroc"] = np.mean(
            [sklearn_metrics.roc_auc_score(one_hot[:, c], shares[:, c]) for c in there]
        )
        with_rows = [c for c in range(one_hot.shape[1]) if one_hot[:, c].any()]
        expected["average_precision"] = np.mean(
            [
                sklearn_metrics.average_precision_score(one_hot[:, c], shares[:, c])
                for c in with_rows
            ]
        )
        found = {name: values[split] for name, values in last.values().items()}
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("case", ["values", "absolute errors", "typed values"])
def test_errors_of_values_are_in_their_own_units(case: str, tmp_path: Path) -> None:
    last, splits = scores_and_labels(case, tmp_path)
    train = splits["train"][1].numpy()
    mean, deviation = train.mean(0), train.std(0)
    assert last.accuracy == {}
    assert last.main == ("mae" if case == "absolute errors" else "rmse")
    for split, (scores, label) in splits.items():
        predicted = scores.numpy() * deviation + mean
        mae = sklearn_metrics.mean_absolute_error(label.numpy(), predicted)
        squared = sklearn_metrics.mean_squared_error(label.numpy().ravel(), predicted.ravel())
        assert last.metrics["mae"][split] == pytest.approx(mae, abs=1e-9)
        assert last.metrics["rmse"][split] == pytest.approx(math.sqrt(squared), abs=1e-9)
    if case == "values":
        difference = (splits["val"][1].numpy() - mean) / deviation - splits["val"][0].numpy()
        assert last.val_loss == pytest.approx(np.square(difference).mean())


@pytest.mark.parametrize("case", ["several labels", "values"])
def test_training_is_that_of_plain_torch(case: str, tmp_path: Path) -> None:
    """Two graph convolutions by a dense matrix, with the first weights of the run."""
    kind, values = CASES[case]
    run = FullBatchRun(config_of(write_parts(tmp_path, kind, 1), epochs=4, **values))
    weights = [p.detach().clone().requires_grad_() for p in run._learner.model.parameters()]
    graph = GRAPHS[kind]()
    src, dst = graph.edges()
    dense = torch.zeros(40, 40, dtype=torch.float64)
    dense.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)
    dense /= (dense.sum(1, keepdim=True) * dense.sum(0, keepdim=True)).sqrt()
    label, mask = graph.ndata["label"], graph.ndata["train_mask"].clone()
    mask[5] = False
    label = label[mask].double()
    if case == "values":
        label = (label - label.mean(0)) / label.std(0, correction=0)
    of = F.binary_cross_entropy_with_logits if case == "several labels" else F.mse_loss
    first = {"params": weights[:2], "weight_decay": 5e-4}
    optimizer = torch.optim.Adam([first, {"params": weights[2:]}], lr=0.01)
    losses = []
    for _ in range(4):
        hidden = F.relu(dense @ (graph.ndata["feat"] @ weights[0]) + weights[1])
        loss = of((dense @ (hidden @ weights[2]) + weights[3])[mask], label)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert run.train().losses == pytest.approx(losses, abs=1e-10)


@pytest.mark.parametrize(
    ("case", "num_parts", "how"),
    [
        ("classes", 3, "no_train"),
        pytest.param("several labels", 2, "random", marks=pytest.mark.exhaustive),
        ("values", 3, "empty_part"),
        pytest.param("absolute errors", 2, "no_train", marks=pytest.mark.exhaustive),
        ("typed values", 5, "no_train"),
    ],
)
def test_workers_learn_and_measure_as_one_does(
    case: str, num_parts: int, how: str, tmp_path: Path
) -> None:
    kind, values = CASES[case]
    one = FullBatchRun(config_of(write_parts(tmp_path, kind, 1), epochs=3, **values)).train()
    config = config_of(write_parts(tmp_path, kind, num_parts, how), epochs=3, **values)
    for found in run_ranks(train_on_rank, num_parts, as_values(config)):
        result = found["result"]
        torch.testing.assert_close(result["losses"], one.losses, rtol=0, atol=1e-10)
        for which in ("best", "last"):
            expected = one.as_dict()[which]
            # torchmetrics divides in float32
            assert flat(result[which]) == pytest.approx(flat(expected), abs=1e-8, rel=1e-10)


def flat(evaluation: dict[str, Any]) -> dict[str, float]:
    """Numbers of an evaluation by name."""
    by_name = {"accuracy": evaluation["accuracy"], **evaluation["metrics"]}
    numbers = {f"{m} {split}": x for m, values in by_name.items() for split, x in values.items()}
    return {**numbers, "epoch": evaluation["epoch"], "loss": evaluation["val_loss"]}


@pytest.mark.parametrize(
    "case", ["typed values", pytest.param("several labels", marks=pytest.mark.exhaustive)]
)
def test_samples_of_all_neighbours_learn_the_same(case: str, tmp_path: Path) -> None:
    kind, values = CASES[case]
    data = write_parts(tmp_path, kind, 1)
    full = FullBatchRun(config_of(data, epochs=3, **values)).train()
    sampled = {**values, "fanouts": (-1, -1), "epochs": 3}
    config = sampled_config_of(write_parts(tmp_path, kind, 2, "no_train"), **sampled)
    for found in run_ranks(train_sampled_on_rank, 2, as_values(config)):
        torch.testing.assert_close(found["result"]["losses"], full.losses, rtol=0, atol=1e-10)
        assert flat(found["result"]["last"]) == pytest.approx(flat(full.as_dict()["last"]))


def test_two_classes_are_told_apart_by_the_second() -> None:
    scores, label = torch.tensor([[0.0, 9.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 0, 0])
    task = Classes(2, ("auroc", "average_precision"))
    assert task.of_all(scores, label) == {"auroc": 1.0, "average_precision": 1.0}


def test_of_one_class_there_is_nothing_to_rank() -> None:
    task = Classes(1, ("auroc", "average_precision"))
    found = task.of_all(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long))
    assert math.isnan(found["auroc"])
    assert found["average_precision"] == 1.0


def test_a_class_of_no_row_has_no_say() -> None:
    task = SeveralLabels(2)
    scores = torch.tensor([[1.0, 2.0], [-1.0, 1.0]])
    label = torch.tensor([[1, 0], [0, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert task.of_all(scores, label)["auroc"] == 1.0
        nothing = task.of_all(scores, torch.zeros_like(label))
    assert nothing.keys() == {"auroc", "average_precision"}


def test_predictions_are_probabilities_or_values() -> None:
    scores = torch.tensor([[0.0, 0.0]])
    assert Classes(2).predictions(scores).tolist() == [[0.5, 0.5]]
    assert SeveralLabels(2).predictions(scores).tolist() == [[0.5, 0.5]]
    values = Values(2, mean=(1.0, 2.0), deviation=(3.0, 4.0))
    assert values.predictions(scores + 1).tolist() == [[4.0, 6.0]]


def of_errors(epoch: int, rmse: float, loss: float) -> Evaluation:
    metrics = {"rmse": {"val": rmse}}
    return Evaluation(epoch=epoch, accuracy={}, val_loss=loss, metrics=metrics, main="rmse")


def test_the_least_error_is_the_best_and_patience_waits_for_it() -> None:
    assert of_errors(2, 3.0, 9.0).is_better_than(of_errors(1, 4.0, 1.0))
    assert not of_errors(2, 4.0, 1.0).is_better_than(of_errors(1, 3.0, 9.0))
    assert of_errors(2, 3.0, 1.0).is_better_than(of_errors(1, float("nan"), 0.0))
    assert not of_errors(2, float("nan"), 0.0).is_better_than(of_errors(1, 3.0, 1.0))
    history = History()
    for epoch, rmse in enumerate((5.0, 4.0, 4.5, 4.5)):
        history.epoch += 1
        history.losses.append(1.0)
        history.note_evaluation(of_errors(epoch + 1, rmse, rmse), patience=2)
    assert history.stopped
    assert history.best == of_errors(2, 4.0, 4.0)
    assert History.from_dict(json.loads(json.dumps(history.as_dict()))) == history


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "to predict values give task 'node regression'": ("values", {}),
    "metrics must be of rmse, mae for this task (got 'auroc')": (
        "values",
        {**VALUES, "metrics": "auroc"},
    ),
    "loss must be left out for node classification (got 'l1')": ("plain", {"loss": "l1"}),
    "task must be one of": ("plain", {"task": "clustering"}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_the_task_is_refused(message: str, tmp_path: Path) -> None:
    kind, values = WRONG[message]
    with pytest.raises(ValueError) as error:
        FullBatchRun(config_of(write_parts(tmp_path, kind, 1), **values))
    assert message in str(error.value)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_history_has_a_line_for_each_evaluation_also_of_a_resumed_run(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "values", 2)
    folder = tmp_path / "run"
    common = {"model": "gcn", "eval_every": 2, "run": str(folder), **VALUES}
    saved = {"checkpoint_dir": str(tmp_path / "c"), "save_every": 3}
    (first, _) = run_ranks(
        train_on_rank, 2, as_values(config_of(data, epochs=5, **common, **saved))
    )
    lines = lines_of(folder)
    assert [line["epoch"] for line in lines] == [2, 4, 5]
    last = first["result"]["last"]
    assert lines[-1]["metrics"] == last["metrics"]
    assert lines[-1]["losses"]["val"] == last["val_loss"]
    assert [line["loss"] for line in lines] == [first["result"]["losses"][i] for i in (1, 3, 4)]
    assert all(len(line["bytes"]) == len(line["memory"]) == 2 for line in lines)
    assert all(line["seconds"]["epoch"] > 0 for line in lines)
    # killed after a line, and in the middle of the next
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"epoch": 6, "loss": 1}\n{"epoch": 7, "lo')
    resumed = config_of(data, epochs=8, resume=True, **common, **saved)
    run_ranks(train_on_rank, 2, as_values(resumed))
    assert [line["epoch"] for line in lines_of(folder)] == [2, 4, 5, 6, 8]
    run_ranks(train_on_rank, 2, as_values(resumed))  # there is nothing left to train
    assert [line["epoch"] for line in lines_of(folder)] == [2, 4, 5, 6, 8]


def test_a_number_that_is_none_is_null_in_the_history(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path / "new")
    file.start(0)
    file.add({"epoch": 1, "loss": float("nan")})
    assert lines_of(tmp_path / "new") == [{"epoch": 1, "loss": None}]


def test_a_history_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path)
    file.start(0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match=r"history.jsonl cannot be written .*; raise the limit"):
            file.add({"epoch": 1, "memory": list(range(10**4))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_piped_run_that_is_silent_shows_life(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphshard.train import EpochReport
    from graphshard.train.commands import _train

    monkeypatch.setattr(_train, "_SILENCE", 0.2)
    with _train.ProgressDisplay() as display:
        display.started(3)
        display.show(EpochReport(epoch=1, epochs=1000, loss=0.5))
        time.sleep(1.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training on 3 worker(s)"
    assert len(lines) > 2
    assert all(line.endswith("s: epoch 1/1000 loss 0.5000") for line in lines[1:])


def test_the_command_prints_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from graphshard.train.commands._train import ProgressDisplay, result_table

    data = write_parts(tmp_path, "values", 1)
    display = ProgressDisplay()
    display.started(1)
    config = FullBatchConfig(**as_values(config_of(data, epochs=2, **VALUES)))
    result = FullBatchRun(config, progress=display.show).train()
    display.__exit__()
    Console(width=120).print(result_table(result, "gcn"))
    printed = capsys.readouterr()
    assert printed.err.startswith("training on 1 worker(s)\n")
    assert "\nepoch 1/2 loss " in printed.err
    assert "rmse:  train" in printed.err
    assert "valid rmse" in printed.out
    assert f"{result.best.metrics['mae']['test']:.4f}" in printed.out
