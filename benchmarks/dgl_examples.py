# SPDX-License-Identifier: Apache-2.0
"""Which of DGL's example programs find every name of DGL that they use in `graphshard.dgl`.

    git clone --branch v1.1.3 https://github.com/dmlc/dgl
    python benchmarks/dgl_examples.py dgl/examples/pytorch [--list]

Each file is parsed, not run. A name is what the file imports from a module of DGL, or a chain of
attributes that begins at such a module, up to the first that is no module. It is looked up in
`graphshard.dgl`, with DGL hidden, and in DGL, where it is installed. Methods of graphs and layers
are not looked at. ``--list`` prints the table and writes nothing; without it the table goes to
``benchmarks/results/dgl_examples_cpu_<date>.md``.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import importlib
import multiprocessing
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from _common import markdown_table, write_result

_MISSING = object()


def names_used(tree: ast.Module) -> set[str]:
    """Dotted names of DGL that a program uses, such as ``dgl.nn.pytorch.GraphConv``."""
    names: set[str] = set()
    modules: dict[str, str] = {}  # what the program calls a module: the module
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "dgl":
                    names.add(alias.name)
                    modules[alias.asname or "dgl"] = alias.name if alias.asname else "dgl"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            for alias in node.names if module.split(".")[0] == "dgl" else ():
                full = f"{module}.{alias.name}" if alias.name != "*" else module
                names.add(full)
                modules[alias.asname or alias.name] = full
    inner = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }  # the chain goes on
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            chain: list[str] = []
            value: ast.expr = node
            while isinstance(value, ast.Attribute):
                chain.insert(0, value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in modules:
                names.add(".".join([modules[value.id], *chain]))
    return names


def lacking(names: set[str], package: str) -> set[str]:
    """Those of the names that a package has not, each up to where it ends.

    Args:
        names: Names that begin with ``dgl``.
        package: The package that stands for it.
    """
    if package != "dgl":
        sys.modules["dgl"] = None  # type: ignore[assignment]
    missing = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            value: Any = importlib.import_module(package)
            path = package
            for part in name.split(".")[1:]:
                if not isinstance(value, ModuleType):
                    break
                path = f"{path}.{part}"
                value = _member(value, part, path)
                if value is _MISSING:
                    missing.add(path.replace(package, "dgl", 1))
                    break
    return missing


def _member(module: ModuleType, name: str, path: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        try:
            return importlib.import_module(path)
        except (ImportError, OSError):
            return _MISSING


def _in_another_process(names: set[str], package: str) -> set[str]:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(lacking, names, package).result()


def main() -> None:
    """Look at all programs, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", type=Path, help="the folder examples/pytorch of DGL")
    parser.add_argument("--list", action="store_true", help="print the table, write nothing")
    options = parser.parse_args()
    used = {
        str(path.relative_to(options.examples)): names
        for path in sorted(options.examples.rglob("*.py"))
        if (names := names_used(ast.parse(path.read_text(encoding="utf-8"))))
    }
    if not used:
        sys.exit(f"no program in {options.examples} imports dgl")
    every = set().union(*used.values())
    absent = _in_another_process(every, "graphshard.dgl")
    absent_in_dgl = _in_another_process(every, "dgl")

    def stops(path: str, missing: set[str]) -> list[str]:
        return sorted(
            m for m in missing if any(n == m or n.startswith(f"{m}.") for n in used[path])
        )

    ours = {path: stops(path, absent) for path in used}
    theirs = {path: stops(path, absent_in_dgl) for path in used}
    whole, whole_in_dgl = (sum(not names for names in each.values()) for each in (ours, theirs))
    counts = Counter(name for names in ours.values() for name in names)
    body = [
        f"Of {len(used)} programs that import dgl, {whole} find every name in `graphshard.dgl` "
        f"({whole_in_dgl} in DGL 1.1.3 itself). They use {len(every)} names; {len(absent)} are not "
        f"here, {len(absent - absent_in_dgl)} of these are in DGL.",
        "",
        "## Names that are not here",
        "",
        *markdown_table(
            ["name", "programs", "in DGL 1.1.3"],
            [
                (f"`{name}`", count, "no" if name in absent_in_dgl else "yes")
                for name, count in counts.most_common()
            ],
        ),
        "",
        "## Programs that lack a name",
        "",
        *markdown_table(
            ["program", "not in graphshard.dgl", "not in DGL 1.1.3"],
            [
                (path, _code(ours[path]), _code(theirs[path]))
                for path in used
                if ours[path] or theirs[path]
            ],
        ),
    ]
    title = "DGL's example programs: do they find the names they use?"
    if options.list:
        print("\n".join(body))
    else:
        write_result("dgl_examples", title, body)


def _code(names: list[str]) -> str:
    return " ".join(f"`{name}`" for name in names) or "-"


if __name__ == "__main__":
    main()
