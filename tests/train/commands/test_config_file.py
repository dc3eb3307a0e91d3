# SPDX-License-Identifier: Apache-2.0
"""``--config FILE.toml`` of all commands, and the config.toml that a run leaves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from graphshard._base.toml import read_toml, toml_text
from graphshard.train import FullBatchConfig, SampledConfig
from graphshard.train._run_folder import config_text
from graphshard.train.commands import app, run
from graphshard.train.commands._options import options_of


def shown(text: str, line: str, folder: Path) -> dict[str, object]:
    """What a command gets of a file and a line."""
    got: dict[str, object] = {}
    path = folder / "run.toml"
    path.write_text(text)
    small = typer.Typer()

    @small.command()
    @options_of(FullBatchConfig, SampledConfig)
    def train(**values: object) -> None:
        got.update({name: value for name, value in values.items() if value is not None})

    @small.command()
    def other() -> None:
        pass

    result = CliRunner().invoke(small, ["train", "--config", str(path), *line.split()])
    if result.exception is not None:
        raise result.exception
    return got


def test_values_are_those_of_the_options_and_flags_win(tmp_path: Path) -> None:
    text = """
        epochs = 7                      # for every command that reads it
        weight-decay = 0.25
        [train]
        data = "parts"
        batch_size = 20
        fanouts = [15, 10]
        map-features = false
        autocast = true
        class-weights = {"a, b" = 2, c = 0.5}
        checkpoint-dir = "here"
        lr = 1
    """
    got = shown(text, "--epochs 9 --lr 0.5", tmp_path)
    assert got["epochs"] == 9
    assert got["lr"] == 0.5
    assert got["weight_decay"] == 0.25
    assert got["batch_size"] == 20
    assert got["fanouts"] == "15,10"
    assert got["map_features"] is False
    assert got["autocast"] is True
    assert got["class_weights"] == '{"a, b": 2, "c": 0.5}'
    assert got["checkpoint_dir"] == Path("here")


WRONG = {
    "epcohs = 3": "(got 'epcohs'); did you mean epochs?",
    "[train]\nweight-dekay = 3": "(got 'weight-dekay' in [train]); did you mean weight-decay?",
    "[trains]\nepochs = 3": "(got 'trains'); did you mean train?",
    "parts = 3": "(got 'parts'), which is one of partition; put it into the table [partition]",
    "[partition]\nprats = 3": "options of graphshard partition alone (got 'prats' in [partition])",
    "epochs = 'many'": "'--epochs': Input should be a valid integer",
    "epochs = true": "epochs in {path} must not be true or false",
    "resume = 'yes'": "resume in {path} must be true or false (got 'yes')",
    "lr = inf": "lr in {path} must be finite",
    "seed = 1979-05-27": "must be a text, a number, a list or a table",
    "epochs = ": "is not TOML (",
}


@pytest.mark.parametrize("text", list(WRONG))
def test_what_is_wrong_with_a_file_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert run(["train", "--data", "x", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert WRONG[text].format(path=path) in error
    assert error.count("\n") == 1


def test_a_file_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--config", "none.toml"]) == 2
    assert "there is no file of options none.toml" in capsys.readouterr().err
    for command in ("plan --tables", "partition --parts 1 --out out --tables"):
        assert run([*command.split(), "none.toml"]) == 2
        assert capsys.readouterr().err == "error: there is no file none.toml\n"


def test_every_command_takes_a_file() -> None:
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        assert any("--config" in parameter.opts for parameter in command.params)


@pytest.mark.usefixtures("forked_interpreters")
def test_one_file_partitions_verifies_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Arguments, too; and a run leaves a file that makes the same run."""
    monkeypatch.chdir(tmp_path)
    Path("all.toml").write_text(
        "quiet = true\n"
        "[partition]\ndata = 'cora'\nparts = 1\nout = 'parts'\n"
        "[verify]\npartition = 'parts'\nchecksums = false\n"
        "[train]\ndata = 'parts'\nepochs = 2\nmodel = 'sage'\nrun = 'runs/1'\n"
    )
    Path("verify.toml").write_text("[verify]\npartition = 'parts'\nchecksums = false\n")
    assert run(["partition", "--config", "all.toml"]) == 0
    assert run(["verify", "--config", "verify.toml"]) == 0
    assert "whole" in capfd.readouterr().out
    assert run(["train", "--config", "all.toml"]) == 0
    first = capfd.readouterr().out
    left = read_toml("runs/1/config.toml")["train"]
    assert (left["hidden"], left["epochs"], left["data"]) == (16, 2, "parts/cora.json")
    assert not {"heads", "resume", "fanouts"} & set(left)
    assert run(["train", "--config", "runs/1/config.toml"]) == 2
    assert "runs/1 holds an earlier run" in capfd.readouterr().err
    again = ["train", "--config", "runs/1/config.toml", "--run", "runs/2", "--quiet"]
    assert run(again) == 0
    assert [line for line in capfd.readouterr().out.splitlines() if "accuracy" in line] == [
        line for line in first.splitlines() if "accuracy" in line
    ]


def test_what_is_written_is_read_again() -> None:
    values = {
        "text": 'a "quoted"\n\\ line \x7f é',
        "number": -3,
        "small": 1e-300,
        "flag": False,
        "list": [1, 2.5, "x"],
        "left out": None,
        "table": {"a b": 1, "empty": {}, "deep": {"ü": "."}},
    }
    expected = {name: value for name, value in values.items() if value is not None}
    if sys.version_info >= (3, 11):
        import tomllib

        assert tomllib.loads(toml_text(values)) == expected
    config = SampledConfig(data="g.json", fanouts=(3, -1), class_weights={"a": 1.0}).resolved()
    assert "fanouts = [3, -1]" in config_text(config)
