# SPDX-License-Identifier: Apache-2.0
"""The documentation keeps its word: code runs and prints what it says, links lead somewhere.

Each page of docs/ becomes one script, in which a block of code has the line numbers that it has on
the page. A comment before a block says how it runs::

    <!-- ranks: 2 -->   on two gloo ranks, which share the page's folder with the blocks before
    <!-- run -->        a block of shell commands: those of graphshard, in this process
    <!-- test -->       a file of tests of its own

What stands in an ``output`` block is what the block before it prints; where it ends with "...",
what that begins with. The README has a test of its
own. Uses 2 gloo ranks; programs of a page are forked.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts_on_ranks import run_script_on_ranks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

MARK = "block of line "
"""Printed before each block, so that its output is known from that of others."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the comment before it, its first line, and its text."""

    language: str
    comment: str
    line: int
    lines: tuple[str, ...]

    @property
    def ranks(self) -> int:
        found = re.fullmatch(r"<!-- ranks: (\d+) -->", self.comment)
        return int(found[1]) if found else 1

    @property
    def runs(self) -> bool:
        return self.language == "python" or self.comment == "<!-- run -->"

    @property
    def is_test(self) -> bool:
        return self.comment == "<!-- test -->"


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    comment = ""
    start, language, inside = 0, "", False
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if inside:
                found.append(Block(language, comment, start, tuple(lines[start + 1 : number])))
                comment = ""
            else:
                start, language = number, line[3:].strip()
            inside = not inside
        elif not inside and line.strip():
            comment = line.strip()
    assert not inside, f"{page}: a block is not closed"
    return found


def commands_of(block: Block) -> list[str]:
    """The commands of a block, each in the place of its first line; other lines are empty."""
    commands, start = [""] * len(block.lines), 0
    for number, line in enumerate(block.lines):
        commands[start] += line.removesuffix("\\")
        if not line.endswith("\\"):
            start = number + 1
    return commands


IMPORTED = "assert __import__('graphshard.train.commands').train.commands"


def script_of(blocks: list[Block], ranks: int) -> str:
    """One program of the blocks for so many ranks, each line where it stands on the page."""
    lines: list[str] = []
    for block in blocks:
        if not block.runs or block.is_test or block.ranks != ranks:
            continue
        code = block.lines
        if block.language != "python":
            code = tuple(
                f"{IMPORTED}.run({shlex.split(line)[1:]!r}) == 0"
                if line.startswith("graphshard ")
                else ""
                for line in commands_of(block)
            )
        lines += [""] * (block.line - len(lines))
        lines += [f"print({MARK + str(block.line)!r})", *code]
    return "\n".join(lines) + "\n"


def outputs_by_block(printed: str) -> dict[int, list[str]]:
    """What was printed, by the line of the block that printed it; ranks one after another."""
    found: dict[int, list[str]] = {}
    current = -1
    for line in printed.splitlines():
        if line.startswith(MARK):
            current = int(line[len(MARK) :])
        else:
            found.setdefault(current, []).append(line.rstrip())
    return found


def check_outputs(page: Path, blocks: list[Block], printed: dict[int, list[str]]) -> None:
    for block, following in zip(blocks, blocks[1:], strict=False):
        if following.language == "output":
            got, promised = printed.get(block.line, []), list(following.lines)
            if promised[-1:] == ["..."]:
                got, promised = got[: len(promised) - 1], promised[:-1]
            if block.ranks > 1:  # which rank prints first is not promised
                got, promised = sorted(got), sorted(promised)
            assert got == promised, f"{page}:{following.line + 1}"


def run_tests_of(block: Block, file: Path) -> None:
    file.write_text("\n" * (block.line + 1) + "\n".join(block.lines) + "\n", encoding="utf-8")
    module = load(file)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def load(file: Path) -> Any:
    """The module in a file that is on no path."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WITH_CODE = [
    pytest.param(page, id=str(page.relative_to(DOCS)))
    for page in PAGES
    if any(block.runs for block in blocks_of(page))
]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_interpreters")
@pytest.mark.parametrize("page", WITH_CODE)
def test_code_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    blocks = blocks_of(page)
    printed: dict[int, list[str]] = {}
    for num_ranks in sorted({b.ranks for b in blocks}):
        script = tmp_path / f"{page.stem}_on_{num_ranks}.py"
        script.write_text(script_of(blocks, num_ranks), encoding="utf-8")
        if num_ranks == 1:
            runpy.run_path(str(script), run_name=page.stem)
        else:
            run_script_on_ranks(shlex.quote(str(script)), num_ranks)
        printed |= outputs_by_block(capsys.readouterr().out)
    check_outputs(page, blocks, printed)
    for block in blocks:
        if block.is_test:
            run_tests_of(block, tmp_path / f"test_block_{block.line}.py")


def anchors_of(page: Path) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = sum(a == anchor or re.fullmatch(rf"{anchor}-\d+", a) is not None for a in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def test_links_lead_somewhere() -> None:
    dead = []
    for page in [*PAGES, ROOT / "README.md", ROOT / "examples" / "README.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            path, _, fragment = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            if not other.exists() or (fragment and fragment not in anchors_of(other)):
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert not dead, dead


def test_files_that_are_named_exist() -> None:
    missing = []
    for page in PAGES:
        for name in re.findall(r"`([\w/]+/[\w/]*\w\.(?:py|h|cpp))`", page.read_text("utf-8")):
            if not any((base / name).exists() for base in (ROOT, ROOT / "src" / "graphshard")):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert not missing, missing


def test_every_page_is_on_a_shelf() -> None:
    shelves = [page for page in PAGES if page.name == "index.md"]
    linked = set()
    for shelf in shelves:
        for target in re.findall(
            r"\]\(([^)#\s]+\.(?:md|ipynb))\)", shelf.read_text(encoding="utf-8")
        ):
            linked.add((shelf.parent / target).resolve())
        for entry in re.findall(r"<([\w/]+)>$", shelf.read_text(encoding="utf-8"), re.M):
            linked.add((shelf.parent / f"{entry}.md").resolve())
    pages = {*PAGES, *DOCS.rglob("*.ipynb")} - {DOCS / "index.md"}
    assert not pages - linked, (
        f"link in the index.md of a shelf: {sorted(map(str, pages - linked))}"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_are_read_without_scrolling(page: Path) -> None:
    commands = [block for block in blocks_of(page) if block.language in ("sh", "bash")]
    lines = [line.split("  #")[0].rstrip() for block in commands for line in block.lines]
    assert not [line for line in lines if len(line) > 100]
