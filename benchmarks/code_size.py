# SPDX-License-Identifier: Apache-2.0
"""Lines of code, files per folder and public names of graphshard, compared with another commit.

    python benchmarks/code_size.py                      # of this tree
    python benchmarks/code_size.py --before COMMIT      # and of a commit, side by side

A line counts unless it is blank or a comment; docstrings count. Public names are those of the
``__all__`` of each package that users import, with the parameters of what can be called, as the
pages of the API list them. Ends with 1 if a public name of the other commit is missing here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def code_lines(source: Path) -> Counter[str]:
    """Lines of code per package; the files at the root count as one."""
    lines: Counter[str] = Counter()
    for file in (source / "graphshard").rglob("*.py"):
        parts = file.relative_to(source / "graphshard").parts
        text = file.read_text(encoding="utf-8").splitlines()
        code = [line for line in text if line.strip() and not line.strip().startswith("#")]
        lines[parts[0] if len(parts) > 1 else "(root)"] += len(code)
    return lines


def files(source: Path) -> list[int]:
    """Files in each folder that holds any, the package's own ``__init__.py`` aside."""
    found = [file for file in (source / "graphshard").rglob("*.py") if file.stem != "__init__"]
    return sorted(Counter(file.parent for file in found).values())


def public_names(tree: Path) -> dict[str, str]:
    """``package.name`` (and ``.member``) to its parameters, of a tree as its pages list them.

    Trees from before the site have a page that lists them; others are imported by a process.
    """
    if (tree / "docs" / "reference.md").exists():
        return names_of_page(tree / "docs" / "reference.md")
    program = (
        "import json, sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        f"sys.path[:0] = {[str(tree / 'src'), str(tree / 'docs' / 'site')]!r}\n"
        "import api_pages\n"
        "print(json.dumps(api_pages.parameters_by_name()))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def names_of_page(reference: Path) -> dict[str, str]:
    """Names and parameters as docs/reference.md listed them."""
    names: dict[str, str] = {}
    section = owner = ""
    for line in reference.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        found = re.match(r"( *)- (?:class |module )?`([\w.]+)(\(.*?\))?[^`]*`", line)
        if not found or not section:
            continue
        indent, name, parameters = found.groups()
        owner = owner if indent else f"{section}.{name}"
        names[f"{owner}.{name}" if indent else owner] = parameters or ""
    return names


def is_there(name: str) -> bool:
    """Whether a name that the reference does not list is inherited, or another name's alias."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--before", help="a commit to compare with")
    before = parser.parse_args().before
    with tempfile.TemporaryDirectory() as folder:
        trees = {"now": ROOT}
        if before:
            archive = subprocess.run(
                ["git", "archive", before, "src", "docs"], cwd=ROOT, capture_output=True, check=True
            )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            trees = {before: Path(folder), **trees}
        counts = {name: code_lines(tree / "src") for name, tree in trees.items()}
        print(f"{'lines of code':16}", *(f"{name:>12}" for name in trees))
        for package in sorted(set().union(*counts.values())):
            print(f"{package:16}", *(f"{counts[name][package]:12}" for name in trees))
        print(f"{'all':16}", *(f"{counts[name].total():12}" for name in trees))
        for name, tree in trees.items():
            found = files(tree / "src")
            print(
                f"{name}: {sum(found)} files in {len(found)} folders, median "
                f"{statistics.median(found):g} and most {found[-1]} in one"
            )
        names = {n: public_names(tree) for n, tree in trees.items()}
    missing = []
    if before:
        gone = names[before].keys() - names["now"].keys()
        missing = sorted(name for name in gone if not is_there(name))
        print(f"public names: {len(names[before])} before, {len(names['now'])} now")
        for name in missing:
            print(f"  missing: {name}{names[before][name]}")
        for name in sorted(names[before].keys() & names["now"].keys()):
            if names[before][name] != names["now"][name]:
                print(f"  {name}{names[before][name]} is now {names['now'][name]}")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
