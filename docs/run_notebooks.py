# SPDX-License-Identifier: Apache-2.0
"""Run the notebooks of docs/notebooks from top to bottom, and check the numbers in their text.

    python docs/run_notebooks.py                      # all: run, check, write the outputs into them
    python docs/run_notebooks.py 1_partitioning       # one

A number in the text is followed by a comment, which no reader sees, with what computes it::

    METIS cuts 36<!--= cut_metis --> edges        the text is what the expression prints
    and reaches 79<!--~ accuracy, 3 --> %         the number is within 3 of the expression

The expressions are evaluated where the notebook has ended. A cell that warns, or prints a path of
this machine, is an error; so is a notebook that takes more than `SECONDS`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STATED = re.compile(r"([\w.,]*\w)<!--([=~]) (.*?) -->", re.DOTALL)
PATHS = [
    str(Path(__file__).resolve().parents[1]),
    str(Path.home()),
    sys.prefix,
    tempfile.gettempdir(),
]
UNWANTED = ["Warning:", "WARNING", "[W", *(path + os.sep for path in PATHS)]
SECONDS = 300  # that a notebook may take, on two cores


def run_notebook(path: Path) -> Any:
    """A notebook with the outputs of a run in a folder of its own.

    Raises:
        AssertionError: A number in the text is not what was computed, an output is unwanted, or it
            took too long.
        nbclient.exceptions.CellExecutionError: A cell has failed.
    """
    notebook = nbformat.read(path, 4)
    stated = [
        match.groups()
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for match in STATED.finditer(cell.source)
    ]
    own = len(notebook.cells)
    for _, kind, expression in stated:
        value = f"str({expression})" if kind == "=" else f"[float(x) for x in ({expression})]"
        notebook.cells.append(nbformat.v4.new_code_cell(f"print({value})"))
    # Commands in cells are those of the interpreter that runs this. Where no name server answers,
    # torch would warn that it cannot name the host of a socket.
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environ = {**os.environ, "PATH": programs, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=SECONDS,
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],  # it warns of its own ports
            coalesce_streams=True,  # whatever pieces a program's output came in
        )
        client.execute(env=environ)
    seconds = time.monotonic() - began
    assert seconds < SECONDS, f"{path.name} took {seconds:.0f} s, and may take {SECONDS}"
    computed = ["".join(o.text for o in cell.outputs).strip() for cell in notebook.cells[own:]]
    del notebook.cells[own:]
    for (text, kind, expression), printed in zip(stated, computed, strict=True):
        if kind == "=":
            is_right = text.replace(",", "") == printed
        else:
            value, within = (float(x) for x in printed.strip("[]").split(","))
            is_right = abs(float(text.replace(",", "")) - value) <= within
        assert is_right, f"{path.name} says {text} where {expression} is {printed}"
    print(f"{path.name} took {seconds:.0f} s of {SECONDS}", flush=True)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ from run to run
        for output in cell.get("outputs", []):
            text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
            assert not any(word in text for word in UNWANTED), f"{path.name} prints: {text}"
    return notebook


def main() -> None:
    """Run those that are named, or all, and write what they print into them."""
    for path in NOTEBOOKS:
        if len(sys.argv) == 1 or path.stem in sys.argv[1:]:
            nbformat.write(run_notebook(path), path)


if __name__ == "__main__":
    main()
