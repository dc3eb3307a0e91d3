# SPDX-License-Identifier: Apache-2.0
"""Guides for those who come from another library: their diffs run, the names in their tables exist.

A diff is a whole program. What it becomes runs on ranks; what it was is run, where its library is
here, and prints the same; otherwise it is compiled. Up to 2 gloo ranks.
"""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from scripts_on_ranks import run_script_on_ranks

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("migrating_from_*.md"))
# Has several diffs, of scripts in part, and the table.
PYG = ROOT / "docs" / "guides" / "pyg.md"
DIFF = re.compile(
    r"^<!-- diff: runs (?:on 1 before and )?on (?P<ranks>\d) after(?P<same>, same output)? -->\n"
    r"```diff\n(?P<text>.*?)^```",
    re.M | re.S,
)
TABLE = re.compile(
    r"^## Call there, call here\n\n\| there \| here \| difference \|\n.*?\n((?:\|.*\n)+)", re.M
)

# Libraries that cannot be installed here: their names are in files.
LISTED = {"sar": "names_of_sar.txt", "dgl.graphbolt": "names_of_graphbolt.txt"}


def sides(diff: str) -> tuple[str, str]:
    """The programs before and after."""
    lines = diff.splitlines()
    assert all(line[:1] in (" ", "-", "+") for line in lines)
    return tuple(
        "\n".join(line[1:] for line in lines if line[0] in (" ", sign)) + "\n" for sign in "-+"
    )  # type: ignore[return-value]


def diff_of(page: Path) -> re.Match[str]:
    (found,) = DIFF.finditer(page.read_text(encoding="utf-8"))
    return found


def exists(name: str) -> bool:
    """Whether a dotted name can be imported, or is listed."""
    for library, file in LISTED.items():
        if name.startswith(f"{library}."):
            listed = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
            return name in listed
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            for part in parts[count:]:
                value = getattr(value, part)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_its_diff_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    found = diff_of(page)
    before, after = sides(found["text"])
    script = tmp_path / "after.py"
    script.write_text(after, encoding="utf-8")
    run_script_on_ranks(shlex.quote(str(script)), int(found["ranks"]))
    printed = re.findall(r"loss [\d.]+", capsys.readouterr().out)
    compile(before, f"{page.stem} before", "exec")
    if found["same"]:
        pytest.importorskip(
            "dgl" if "import dgl" in before else "torch_geometric",
            reason="the library that the page comes from is not installed",
        )
        old = tmp_path / "before.py"
        old.write_text(before, encoding="utf-8")
        runpy.run_path(str(old), run_name="__main__")
        losses = re.findall(r"loss [\d.]+", capsys.readouterr().out)
        assert losses
        assert sorted(printed) == sorted(losses * int(found["ranks"]))


@pytest.mark.parametrize("page", [*GUIDES, PYG], ids=lambda page: page.stem)
def test_it_ends_with_a_table_of_names_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (table,) = TABLE.findall(text)
    assert text.endswith(table)
    wrong = []
    for row in table.splitlines():
        there, here, difference = (cell.strip() for cell in row.strip("|").split(" | "))
        assert difference, row
        for cell in (there, here):
            names = re.findall(r"`([\w.]+\.[\w.]+)`", cell)
            assert names or "the same" in cell or cell == "nothing", row
            wrong += [name for name in names if not exists(name)]
    assert not wrong, wrong
