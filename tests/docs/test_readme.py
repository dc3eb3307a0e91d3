# SPDX-License-Identifier: Apache-2.0
"""The README keeps its word: its commands, run as written. Two gloo ranks, by torchrun.

The commands are forked, the ranks that torchrun starts are interpreters.
"""

from __future__ import annotations

import csv
import os
import random
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
    run(command("graphshard partition --data"), tmp_path)
    printed = run(command("torchrun"), tmp_path)
    shares = dict(re.findall(r"worker (\d) of 2: its share of the loss is ([\d.]+)", printed))
    assert sorted(shares) == ["0", "1"], printed
    # It starts at log(7) = 1.95, the loss of guessing.
    assert sum(map(float, shares.values())) < 1.0


@pytest.mark.timeout(2 * DEADLINE + 20)
@pytest.mark.usefixtures("forked_interpreters")
def test_two_tables_become_predictions_by_their_ids(tmp_path: Path) -> None:
    """Users follow those of their own segment, of which the number in their id tells nothing."""
    segments = ["gold", "silver", "new"]
    draw = random.Random(0)
    of_user = {f"u_{number:04x}": draw.choice(segments) for number in range(300)}
    members = {s: [user for user, segment in of_user.items() if segment == s] for s in segments}
    with open(tmp_path / "users.csv", "w", encoding="utf-8") as users:
        users.write("user_id,age,segment\n")
        for user, segment in of_user.items():
            known = segment if draw.random() < 0.4 else ""
            users.write(f"{user},{draw.choice(['', 20, 70])},{known}\n")
    with open(tmp_path / "follows.csv", "w", encoding="utf-8") as follows:
        follows.write("follower,followee\n")
        for user, segment in of_user.items():
            follows.writelines(f"{user},{draw.choice(members[segment])}\n" for _ in range(9))
    for name in ("partition --nodes", "train --data parts", "predict"):
        run(command(f"graphshard {name}"), tmp_path)
    with open(tmp_path / "predictions.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == list(of_user)
    assert list(rows[0]) == ["id", "prediction", *(f"p_{s}" for s in sorted(segments))]
    assert {row["prediction"] for row in rows} <= set(segments)


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
