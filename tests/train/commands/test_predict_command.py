# SPDX-License-Identifier: Apache-2.0
"""``graphshard predict``, called in this process; it starts two workers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

import graphshard
from graphshard.partition import partition_graph
from graphshard.train import FullBatchConfig, train_full_batch
from graphshard.train.commands import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one part, and the same graph in two."""
    folder = tmp_path_factory.mktemp("predict")
    ring = torch.arange(12)
    graph = graphshard.graph((ring, (ring + 1) % 12))
    graph.ndata["feat"] = torch.eye(12)[:, :5] + 0.1
    graph.ndata["label"] = ring % 3
    for split, numbers in (("train", ring < 6), ("val", ring > 8)):
        graph.ndata[f"{split}_mask"] = numbers
    for parts in (1, 2):
        partition_graph(graph, "g", parts, str(folder / str(parts)), quiet=True)
    data, place = str(folder / "1" / "g.json"), str(folder / "run")
    train_full_batch(FullBatchConfig(data=data, run=place, epochs=2, device="cpu", model="sage"))
    return folder


@pytest.mark.usefixtures("forked_interpreters")
def test_workers_write_one_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "new folder" / "p.csv"
    words = ["--data", str(folder / "2"), "--run", str(folder / "run"), "--device", "cpu"]
    assert run(["predict", *words, "--out", str(out), "--nodes", "train"]) == 0
    said = capsys.readouterr().err
    assert "wrote 6 rows to" in said
    assert pd.read_csv(out)["id"].tolist() == list(range(6))
    assert [path.name for path in out.parent.iterdir()] == ["p.csv"]
    expected = graphshard.predict(folder / "1" / "g.json", folder / "run", nodes="train")
    pd.testing.assert_frame_equal(
        pd.read_csv(out), expected.to_pandas(), check_dtype=False, atol=1e-6
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--data cora --run RUN --out p.csv", "data must be the JSON of a partition (got cora)"),
        ("--data PARTS --run PARTS --out p.csv", "no run has ended there; train with --run"),
        ("--data PARTS --run RUN --out p.txt", "out must end in .parquet, .csv or .csv.gz"),
        ("--data PARTS --run RUN --out p.csv --nodes some", "or a file of ids (got 'some'"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words.replace("PARTS", str(folder / "2")).replace("RUN", str(folder / "run"))
    assert run(["predict", *words.split()]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1
