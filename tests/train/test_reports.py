# SPDX-License-Identifier: Apache-2.0
"""Pictures and TensorBoard's files say what the history says. Up to 2 gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_cases import as_values, config_of, train_on_rank, write_parts

from graphshard.testing import run_ranks
from graphshard.train import FullBatchRun, _reports
from graphshard.train._reports import draw_history, read_history, scalars_of


def shown_by_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in names}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_leaves_a_picture_and_what_tensorboard_reads(tmp_path: Path) -> None:
    data, run, board = write_parts(tmp_path, "plain", 2), tmp_path / "run", tmp_path / "board"
    config = config_of(
        data, epochs=4, eval_every=2, run=str(run), plot=True, tensorboard=str(board)
    )
    run_ranks(train_on_rank, 2, as_values(config))
    assert (run / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    history = read_history(run / "history.jsonl")
    shown = shown_by_tensorboard(board)
    assert {"loss/train", "loss/val", "accuracy/val", "seconds/epoch"} <= set(shown)
    for line in history:
        for name, value in scalars_of(line):
            assert shown[name][line["epoch"]] == pytest.approx(value, rel=1e-6)
    names = {path.name for path in run.iterdir()}
    assert names == {"config.toml", "history.jsonl", "model.json", "model.safetensors", "run.png"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_without_a_folder_has_a_board(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 1)
    FullBatchRun(config_of(data, epochs=2, tensorboard=str(tmp_path / "board"))).train()
    assert set(shown_by_tensorboard(tmp_path / "board")["loss/val"]) == {1, 2}


def test_curves_are_those_of_the_history_and_the_legend_is_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures: list[Any] = []
    plain_subplots = Figure.subplots

    def noting(self: Any, *args: Any, **values: Any) -> Any:
        figures.append(self)
        return plain_subplots(self, *args, **values)

    monkeypatch.setattr(Figure, "subplots", noting)
    history = [
        {
            "epoch": epoch,
            "loss": 1 / epoch,
            "losses": {"train": 1 / epoch, "val": 2 / epoch},
            "metrics": {"macro_f1": {"val": None if epoch == 2 else 0.1 * epoch}},
        }
        for epoch in (1, 2, 5)
    ]
    draw_history(history, tmp_path / "x.png", "a $name$")
    (figure,) = figures
    losses, scores = figure.axes
    assert [line.get_xydata().tolist() for line in losses.lines] == [
        [[1, 1], [2, 0.5], [5, 0.2]],
        [[1, 2], [2, 1], [5, 0.4]],
    ]
    assert [line.get_xydata().tolist() for line in scores.lines] == [[[1, 0.1], [5, 0.5]]]
    assert scores.get_ylabel() == "macro f1"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["training", "validation"]
    box = legend.get_window_extent()
    assert not any(box.overlaps(axis.get_window_extent()) for axis in figure.axes)


@pytest.mark.parametrize(
    ("values", "package"), [({"plot": True}, "plot"), ({"tensorboard": "x"}, "tensorboard")]
)
def test_what_is_not_installed_is_said_before_training(
    values: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reports.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf'pip install "graphshard\[{package}\]"'):
        config_of("g.json", run="r", **values)


def test_a_picture_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="plot needs run, the folder of the run"):
        config_of("g.json", plot=True)


def test_lines_that_were_cut_do_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps({"epoch": 1}) + "\n\n")
    assert read_history(path) == [{"epoch": 1}]
