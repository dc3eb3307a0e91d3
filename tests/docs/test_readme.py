# SPDX-License-Identifier: Apache-2.0
"""The README keeps its word: its commands, run as written. Two gloo ranks, by torchrun.

The commands are forked, the ranks that torchrun starts are interpreters.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

DEADLINE = 110  # seconds for each command; a quiet machine needs five

# What a command of the README becomes, so that it runs whether or not the package is installed.
PROGRAMS = {
    "graphshard": [sys.executable, "-c", "from graphshard.train.commands import main; main()"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def command(start: str) -> list[str]:
    """The README's command that starts so, as an argument list."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    (found,) = [line for line in lines if line.startswith(start)]
    program, *arguments = shlex.split(found, comments=True)
    return [*PROGRAMS[program], *arguments]


def run(arguments: list[str], folder: Path) -> str:
    search = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PYTHONPATH": search.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        arguments,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(2 * DEADLINE + 20)
@pytest.mark.usefixtures("forked_interpreters")
def test_the_full_batch_example_learns(tmp_path: Path) -> None:
    (script,) = blocks("python")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    run(command("graphshard partition"), tmp_path)
    printed = run(command("torchrun"), tmp_path)
    shares = dict(re.findall(r"worker (\d) of 2: its share of the loss is ([\d.]+)", printed))
    assert sorted(shares) == ["0", "1"], printed
    # It starts at log(7) = 1.95, the loss of guessing.
    assert sum(map(float, shares.values())) < 1.0


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_are_named(target: str) -> None:
    assert any(f"make {target} " in block for block in blocks("sh"))


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    dead = []
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#]+)", text):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert not dead, dead
