# SPDX-License-Identifier: Apache-2.0
"""Examples print what they say: on the CPU, on an emulated GPU and (marked ``gpu``) on a real one.

Uses 2 gloo ranks; one of the examples is started by torchrun in test_readme.py, and those on graph
servers are run on servers in tests/train/launch.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts_on_ranks import program_on_emulated_gpu, run_script_on_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ON_CPU = ["distributed_embeddings", "own_message_function", "own_tables"]
DBLP = ROOT.parent / "shared" / "datasets" / "dblp-heco"


def check_accuracy(printed: str, least: float, papers: str = "1000 nodes") -> None:
    (accuracy,) = re.findall(rf"^test accuracy ([\d.]+) % on {papers}$", printed, re.M)
    assert float(accuracy) > least


def check_losses(printed: str, number: int, what: str = "loss") -> None:
    losses = [float(x) for x in re.findall(rf"^epoch +\d+: {what} ([\d.]+)$", printed, re.M)]
    assert len(losses) == number
    assert number == 1 or losses[-1] < losses[0]


def check_full_batch(printed: str) -> None:
    # Workers share one pipe, so that a line of one may begin behind a line of the other.
    assert sorted(re.findall(r"worker (\d) of 2: \d+ of 2708 nodes", printed)) == ["0", "1"]
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) % on 1000 nodes", printed)
    assert float(accuracy) > 75.0


def check_sampled(printed: str) -> None:
    assert re.findall(r"^epoch +\d+: (\d) steps, loss [\d.]+$", printed, re.M) == ["3", "3"]
    check_accuracy(printed, 75.0)


def check_pyg_full_batch(printed: str) -> None:
    check_losses(printed, 2, "training loss")
    check_accuracy(printed, 77.0)


def check_pyg_sampled(printed: str) -> None:
    check_losses(printed, 2)
    check_accuracy(printed, 77.0)


def check_link_prediction(printed: str) -> None:
    losses = [float(x) for x in re.findall(r"^epoch \d+: loss ([\d.]+),", printed, re.M)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1
    (rank,) = re.findall(r"^test, filtered: MRR ([\d.]+), Hits@1 [\d.]+, ", printed, re.M)
    assert float(rank) > 0.07  # of 2708 papers; by chance it is 0.003


def check_typed_graph(printed: str) -> None:
    (calls,) = re.findall(r"^(\d+) exchanges in an epoch, for 4 relations", printed, re.M)
    assert 2 <= int(calls) <= 3
    check_accuracy(printed, 75.0, r"\d+ papers")


def check_own_message_function(printed: str) -> None:
    gaps = re.findall(r"^largest difference from one process: \w+ ([\de.-]+)$", printed, re.M)
    assert len(gaps) == 2
    assert max(map(float, gaps)) < 1e-10


def check_distributed_sage(printed: str) -> None:
    check_losses(printed, 3)
    check_accuracy(printed, 75.0)


def check_distributed_embeddings(printed: str) -> None:
    check_losses(printed, 1)
    check_accuracy(printed, 55.0)  # of seven classes; 67.2 is published for DeepWalk, after more


def check_own_tables(printed: str) -> None:
    (accuracy,) = re.findall(r"^test accuracy ([\d.]+) % on 1000 authors$", printed, re.M)
    assert float(accuracy) > 82.0


CHECKS: dict[str, Callable[[str], None]] = {
    "distributed_embeddings": check_distributed_embeddings,
    "distributed_sage": check_distributed_sage,
    "full_batch": check_full_batch,
    "link_prediction": check_link_prediction,
    "own_tables": check_own_tables,
    "own_message_function": check_own_message_function,
    "pyg_full_batch": check_pyg_full_batch,
    "pyg_sampled": check_pyg_sampled,
    "sampled": check_sampled,
    "typed_graph": check_typed_graph,
}


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
USUAL = ["distributed_sage"]  # on the emulated GPU in every run; all with --all


def on_devices() -> list[Any]:
    """Each example on each device that it can be told to use."""
    found = []
    for example in EXAMPLES:
        name = example.stem
        marks = [pytest.mark.exhaustive] if name == "own_tables" else []  # three programs, 20 s
        found.append(pytest.param(example, "cpu", id=f"{name}-cpu", marks=marks))
        if name not in ON_CPU:
            marks = [] if name in USUAL else [pytest.mark.exhaustive]
            found.append(pytest.param(example, "emulated", id=f"{name}-emulated", marks=marks))
            marks = [pytest.mark.gpu, needs_gpu]
            found.append(pytest.param(example, "cuda", id=f"{name}-cuda", marks=marks))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "device"), on_devices())
def test_examples_print_what_they_claim(
    example: Path,
    device: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, arguments = example.stem, [str(example)]
    if name == "link_prediction":
        arguments += ["--epochs", "6", "--lr", "0.01"]
    elif not name.startswith("pyg_"):
        arguments += ["--out", str(tmp_path)]
    if name == "own_tables":
        if not DBLP.is_dir():
            pytest.skip("the data sets of ../shared are not here")
        arguments += ["--data", str(DBLP), "--epochs", "10"]
    if name == "distributed_embeddings":
        arguments += ["--epochs", "5"]
    if device != "cpu":
        arguments += ["--device", "cuda"]
    emulated = device == "emulated"
    if name in ("link_prediction", "own_tables") or name.startswith("distributed_"):
        monkeypatch.setattr(sys, "argv", arguments)
        with program_on_emulated_gpu() if emulated else nullcontext():
            runpy.run_path(str(example), run_name="__main__")
    else:
        run_script_on_ranks(shlex.join(arguments), 2, emulated)
    CHECKS[name](capsys.readouterr().out)


def test_every_example_is_listed() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (ROOT / "examples" / "README.md").read_text())
    assert sorted(listed) == [example.name for example in EXAMPLES]
