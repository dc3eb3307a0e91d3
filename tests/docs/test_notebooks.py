# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom, and their text states the numbers that they compute.

What is committed has its outputs; the script that is made of one differs from it as its page says,
and runs. Up to 4 gloo ranks, started by the notebooks.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="notebooks are run by nbclient, which is not installed")
pytest.importorskip("ipykernel", reason="notebooks run in ipykernel, which is not installed")
pytest.importorskip("matplotlib", reason="notebooks draw with matplotlib, which is not installed")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SCRIPT = FOLDER / "distributed_graphsage.py"
PAGE = ROOT / "docs" / "guides" / "notebook_to_cluster.md"


def run(command: list[str], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


@pytest.mark.timeout(320)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_computes_what_it_says(path: Path, tmp_path: Path) -> None:
    # Copied, so that what it prints now is not written over what is committed.
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "run_notebooks.py", tmp_path / "docs")
    shutil.copytree(FOLDER, tmp_path / "docs" / "notebooks")
    done = run(["docs/run_notebooks.py", path.stem], tmp_path, 300)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_as_it_ran(path: Path) -> None:
    numbers = [cell["execution_count"] for cell in cells(path, "code")]
    assert numbers == list(range(1, len(numbers) + 1))
    outputs = [output for cell in cells(path, "code") for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    streams = {output.get("name") for output in outputs} - {None}
    assert streams <= {"stdout"}, f"{path.name} writes to {streams}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(source(cell) for cell in cells(path, "markdown"))
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert targets
    assert not [t for t in targets if "://" not in t and not (path.parent / t).exists()]


def test_the_script_differs_from_the_notebook_as_the_page_says() -> None:
    (notebook,) = [path for path in NOTEBOOKS if path.stem == "3_distributed_graphsage"]
    code = [source(cell) for cell in cells(notebook, "code")]
    last = next(i for i, text in enumerate(code) if text.startswith("def train("))
    whole = "\n\n\n".join(code[1 : last + 1]).splitlines()
    script = SCRIPT.read_text(encoding="utf-8").splitlines()
    lines = list(difflib.unified_diff(whole, script, "cells", SCRIPT.name, n=1, lineterm=""))
    (shown,) = re.findall(r"^```diff\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert shown.splitlines() == [line.rstrip() for line in lines]


@pytest.mark.timeout(200)
def test_the_script_runs_as_the_page_says(tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) if "--local" in b)
    for line in block.replace("\\\n", "").splitlines():
        words = re.findall(r'"[^"]*"|\S+', line)
        done = run(["-m", "graphshard", *(w.strip('"') for w in words[1:])], tmp_path, 150)
        assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(r"\[host 0 rank 0\] test accuracy ([\d.]+) %", done.stdout)
    assert float(accuracy) > 70.0
