# SPDX-License-Identifier: Apache-2.0
"""The diffs of docs/development/extending.md apply to the library as it is, and their tests pass.

A copy of the library and of its tests gets all of them; one pytest in it runs the tests that stand
in the comment above each diff. Up to 3 gloo ranks, of that pytest.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "development" / "extending.md"

LAYOUT = "tests/test_layout.py"
OF_SOURCES = ("arrow_points_back", "private_names", "exports_exist", "words_are", "licence")

# Before the finder of an editable install, which would be asked first; ranks start with it, too.
SITE = """\
import sys
from importlib.machinery import PathFinder
from pathlib import Path

class OfTheCopy:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "graphshard":
            return PathFinder.find_spec(name, [str(Path(__file__).parent / "src")])
        return PathFinder.find_spec(name, path) if name.startswith("graphshard.") else None

sys.meta_path.insert(0, OfTheCopy)
"""


@dataclass(frozen=True)
class Change:
    """A diff of the page, and the tests that prove it."""

    tests: tuple[str, ...]
    diff: str

    @property
    def files(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(\S+)$", self.diff, re.M)


CHANGES = {
    heading.lower(): Change(tuple(tests.split()), diff)
    for heading, tests, diff in re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?^<!-- tests: (.+?) -->\n```diff\n(.+?)^```$",
        PAGE.read_text(encoding="utf-8"),
        re.M | re.S,
    )
}


def copy_library(folder: Path) -> None:
    """Sources, the compiled kernels of this environment, and tests."""
    without = shutil.ignore_patterns("__pycache__", "*.so", "campaigns", "docs")
    shutil.copytree(ROOT / "src", folder / "src", ignore=without)
    for file in (ROOT / "tests").rglob("*.py"):
        copy = folder / file.relative_to(ROOT)
        if not {"campaigns", "docs"} & set(copy.parts):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    shutil.copy(ROOT / "pyproject.toml", folder)
    kernels = importlib.util.find_spec("graphshard._kernels")
    if kernels is not None and kernels.origin is not None:
        shutil.copy(kernels.origin, folder / "src" / "graphshard")
    (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")


def apply(change: Change, folder: Path, *options: str) -> str:
    """Apply a diff as it is, without a line of its context missing; returns what git says."""
    done = subprocess.run(
        ["git", "apply", "--verbose", *options, "-"],
        cwd=folder,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent), "LC_ALL": "C"},
        input=change.diff,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr


def outcomes(folder: Path) -> tuple[dict[str, tuple[int, int]], str]:
    """(passed, not passed) of each file that the changes name, and what pytest printed."""
    report = folder / "report.xml"
    tests = [test for change in CHANGES.values() for test in change.tests]
    names = re.findall(r"^def (test_\w+)", (folder / LAYOUT).read_text(encoding="utf-8"), re.M)
    tests += [f"{LAYOUT}::{name}" for name in names if any(word in name for word in OF_SOURCES)]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    options += ["--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if "PYTEST" not in k}
        | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    found: dict[str, tuple[int, int]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname") or case.get("name", "")  # of a file that is not imported
        file = name.replace(".", "/") + ".py"
        passed, others = found.get(file, (0, 0))
        is_passed = len(case) == 0
        found[file] = passed + is_passed, others + (not is_passed)
    return found, done.stdout + done.stderr


def test_every_kind_of_change_is_on_the_page() -> None:
    assert list(CHANGES) == ["a layer", "a reduction", "a store", "a command", "an encoding"]
    assert PAGE.read_text(encoding="utf-8").count("```diff") == len(CHANGES)
    for change in CHANGES.values():
        new = set(re.findall(r"^--- /dev/null\n\+\+\+ b/(tests/\S+)$", change.diff, re.M))
        assert new <= {test.partition("::")[0] for test in change.tests}
        assert new


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diffs")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of a library with all changes, and git's words on those that do not apply."""
    folder = tmp_path_factory.mktemp("library")
    copy_library(folder)
    return folder, {name: apply(change, folder) for name, change in CHANGES.items()}


@pytest.fixture(scope="module")
def found(copy: tuple[Path, dict[str, str]]) -> tuple[dict[str, tuple[int, int]], str]:
    return outcomes(copy[0])


@needs_git
@pytest.mark.parametrize("name", CHANGES)
def test_a_diff_applies(name: str, copy: tuple[Path, dict[str, str]]) -> None:
    assert not copy[1][name], f"{PAGE.relative_to(ROOT)}, {name}:\n{copy[1][name]}"


@needs_git
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CHANGES)
def test_its_tests_pass(name: str, found: tuple[dict[str, tuple[int, int]], str]) -> None:
    by_file, printed = found
    for test in CHANGES[name].tests:
        passed, others = by_file.get(test.partition("::")[0], (0, 0))
        assert passed > 0, printed
        assert others == 0, printed


@needs_git
@pytest.mark.timeout(600)
def test_the_layout_of_the_sources_holds(found: tuple[dict[str, tuple[int, int]], str]) -> None:
    passed, others = found[0][LAYOUT]
    assert passed >= len(OF_SOURCES), found[1]
    assert others == 0, found[1]


@needs_git
def test_its_lines_are_in_the_house_style(copy: tuple[Path, dict[str, str]]) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed here; it comes with the dev extra")
    files = sorted({file for change in CHANGES.values() for file in change.files})
    for words in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run(
            [ruff, *words, *files],
            cwd=copy[0],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_git
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_its_tests_fail_without_its_source(tmp_path: Path) -> None:
    copy_library(tmp_path)
    for change in CHANGES.values():
        assert not apply(change, tmp_path, "--include=tests/*")
    by_file, printed = outcomes(tmp_path)
    for change in CHANGES.values():
        for test in change.tests:
            assert by_file[test.partition("::")[0]][1] > 0, f"{test}\n{printed}"
