# SPDX-License-Identifier: Apache-2.0
"""The shape of the source tree: import arrows, exports, forbidden calls. No process group.

Most tests here only read the sources; the last ones import graphshard in a fresh interpreter.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "graphshard"

BASE = {"_base", "errors"}
KERNELS = {"_kernels"}

# What each part of the package may import, besides itself. This is the picture in the design notes:
# a name that is missing here is a part whose place has not been decided.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "_base": {"errors"} | KERNELS,
    "function": {"errors"},
    "ops": BASE | KERNELS,
    "graph": BASE | {"function", "ops"},
    "comm": BASE,
    "nn": BASE | {"function", "ops", "graph", "comm"},
    "partition": BASE | {"function", "ops", "graph", "comm"},
    "fullbatch": BASE | {"function", "ops", "graph", "comm", "partition"},
    "sampling": BASE | {"function", "ops", "graph", "comm", "partition", "fullbatch"},
    "data": BASE | {"function", "ops", "graph", "partition"},
    "plan": BASE,
}
for part in ("fullbatch", "sampling"):
    ARROWS[part] |= {"plan"}
ARROWS["servers"] = ARROWS["sampling"] | {"sampling"}
ARROWS["pyg"] = ARROWS["servers"] | {"nn", "servers"}
ARROWS["train"] = set(ARROWS) - {"pyg"}
ARROWS["__init__"] = set(ARROWS)
ARROWS["__main__"] = {"train"}
ARROWS["testing"] = set(ARROWS) - {"pyg"}
# The names of others: nothing imports these two.
ARROWS["dgl"] = set(ARROWS) - {"pyg", "testing", "__main__"}
ARROWS["sar"] = ARROWS["dgl"] | {"dgl"}

# Narrower than a whole part: the only files that may take the arrow.
ONLY_FILES = {
    ("nn", "comm"): {"nn/_distributed_bn.py"},
    ("pyg", "servers"): {"pyg/loader/_inputs.py"},
}

# Packages, optional or large, that importing graphshard must not load, and the parts that may load
# them when used.
OPTIONAL: dict[str, set[str]] = {
    "dgl": {"dgl", "graph"},
    "torch_geometric": {"data", "pyg"},
    "ogb": {"data"},
    "networkx": {"data", "dgl", "graph"},
    "pandas": set(),
    "pymetis": {"partition"},
    "pyarrow": {"data", "train"},
    "scipy": {"data", "dgl", "graph", "partition"},
    "matplotlib": {"train"},
    "tensorboard": {"train"},
    "ray": {"train"},
}

# Folders that are imported when a name in them is first used, by a function of another folder. They
# have classes of an optional package among their bases, so they import it at module level.
ON_USE = {"pyg/loader"}

# Functions whose first argument is the name of a module to import.
IMPORTERS = {"import_module", "require", "__import__"}

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_BUILTINS = {"eval", "exec"}
FORBIDDEN_CALLS = {
    "torch.load",
    "torch.save",
    "yaml.load",
    # the object collectives pickle what they send
    "torch.distributed.all_gather_object",
    "torch.distributed.gather_object",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.scatter_object_list",
    "torch.distributed.send_object_list",
    "torch.distributed.recv_object_list",
}


class Import(NamedTuple):
    """One import, its target written out in full."""

    file: Path
    line: int
    target: str
    in_function: bool

    def where(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: imports {self.target}"


def python_files(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def part_of(file: Path) -> str:
    """The name in ARROWS that a file belongs to: its first folder, or its own stem."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def module_name(file: Path) -> str:
    parts = ["graphshard", *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_imported(target: str) -> str | None:
    """The part of graphshard that an import reaches, or None for another package's module."""
    names = target.split(".")
    if names[0] != "graphshard":
        return None
    if len(names) > 1 and (names[1] in ARROWS or names[1] in KERNELS):
        return names[1]
    return "__init__"


@functools.cache
def syntax_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@functools.cache
def imports_of(file: Path) -> tuple[Import, ...]:
    """Every import in a file, by statement or by name: ``from a import b`` is given as ``a.b``."""
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]

    imports: list[Import] = []

    def visit(node: ast.AST, in_function: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                imports.append(Import(file, node.lineno, alias.name, in_function))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                target = ".".join([*base, *filter(None, [node.module]), alias.name])
                imports.append(Import(file, node.lineno, target, in_function))
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in IMPORTERS:
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    imports.append(Import(file, node.lineno, argument.value, in_function))
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(syntax_of(file), False)
    return tuple(imports)


def dotted(node: ast.expr) -> str:
    """``torch.load`` for the expression torch.load; an empty string for anything less plain."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")


@functools.cache
def lines_under_type_checking(file: Path) -> set[int]:
    """Lines of imports that only the type checker sees."""
    guarded = [node for node in ast.walk(syntax_of(file)) if is_type_checking(node)]
    return {
        inner.lineno
        for node in guarded
        if isinstance(node, ast.If)
        for statement in node.body
        for inner in ast.walk(statement)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }


def test_every_part_has_a_place_in_the_picture() -> None:
    unknown = {part_of(file) for file in python_files()} - set(ARROWS)
    assert not unknown, f"decide what these parts may import, in ARROWS: {sorted(unknown)}"


def test_no_import_arrow_points_back() -> None:
    bad = []
    for file in python_files():
        part = part_of(file)
        for found in imports_of(file):
            reached = part_imported(found.target)
            if reached is None or reached == part:
                continue
            only = ONLY_FILES.get((part, reached))
            if reached not in ARROWS.get(part, set()):
                bad.append(f"{found.where()}; {part} may import {sorted(ARROWS.get(part, set()))}")
            elif only is not None and str(file.relative_to(PACKAGE)) not in only:
                bad.append(f"{found.where()}; only {sorted(only)} may")
    assert not bad, "\n" + "\n".join(bad)


def test_the_picture_has_no_cycle() -> None:
    """Guards ARROWS itself: an arrow added to both sides would allow anything."""
    done = set(KERNELS)
    remaining = dict(ARROWS)
    while remaining:
        ready = {part for part, below in remaining.items() if below <= done}
        assert ready, f"these parts import each other: {sorted(remaining)}"
        done |= ready
        remaining = {part: below for part, below in remaining.items() if part not in ready}


def test_comm_knows_no_graph() -> None:
    """Said on its own, since comm is what a graph is sent through."""
    for file in python_files(PACKAGE / "comm"):
        for found in imports_of(file):
            reached = part_imported(found.target)
            assert reached is None or reached in BASE | {"comm"}, found.where()


def test_optional_packages_are_imported_only_where_and_when_they_are_used() -> None:
    bad = []
    for file in python_files():
        unseen = lines_under_type_checking(file)
        folder = str(file.parent.relative_to(PACKAGE))
        for found in imports_of(file):
            package = found.target.split(".")[0]
            is_seen = not found.in_function and found.line not in unseen and folder not in ON_USE
            reached = "/".join(found.target.split(".")[1:3])
            if reached in ON_USE and is_seen:
                bad.append(f"{found.where()} at module level; import it in the function")
            if package not in OPTIONAL:
                continue
            if part_of(file) not in OPTIONAL[package]:
                bad.append(f"{found.where()}; only {sorted(OPTIONAL[package])} may")
            elif is_seen:
                bad.append(f"{found.where()} at module level; import it in the function")
    assert not bad, "\n" + "\n".join(bad)


def test_nothing_unpickles_or_evaluates() -> None:
    bad = []
    for file in python_files():
        for found in imports_of(file):
            if found.target.split(".")[0] in FORBIDDEN_MODULES or found.target in FORBIDDEN_CALLS:
                bad.append(found.where())
        for node in ast.walk(syntax_of(file)):
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func).replace("dist.", "torch.distributed.", 1)
            if name in FORBIDDEN_BUILTINS or name in FORBIDDEN_CALLS:
                bad.append(f"{file.relative_to(ROOT)}:{node.lineno}: calls {name}")
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True):
                    bad.append(f"{file.relative_to(ROOT)}:{node.lineno}: passes allow_pickle")
    assert not bad, "\n" + "\n".join(bad)


def test_errors_name_extras_that_exist() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = pyproject.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    assert "pyg" in extras
    for file in python_files():
        named = set(re.findall(r"graphshard\[(\w+)\]", file.read_text(encoding="utf-8")))
        assert named <= extras, f"{file.relative_to(ROOT)} names extras {sorted(named - extras)}"


def source_files() -> list[Path]:
    """Everything that people write: Python and C++ files of the library, and its tests."""
    found = [*python_files(), *python_files(ROOT / "tests")]
    for folder in ("csrc", "benchmarks", "examples"):
        found += [p for p in (ROOT / folder).rglob("*") if p.suffix in {".cpp", ".h", ".py"}]
    return sorted(found)


def test_each_file_opens_with_its_licence() -> None:
    bad = []
    for file in source_files():
        lines = file.read_text(encoding="utf-8").splitlines()[:2]
        head = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
        if not head or head[0].lstrip("#/ ") != "SPDX-License-Identifier: Apache-2.0":
            bad.append(str(file.relative_to(ROOT)))
    assert not bad, f"first line must be the SPDX identifier: {bad}"


def owner_of(target: str) -> list[str] | None:
    """The package in which a private name of an import's target lies; None for a public target."""
    names = target.split(".")
    for number, name in enumerate(names):
        if name.startswith("_") and not name.startswith("__"):
            return names[:number]
    return None


def test_private_names_stay_in_their_package() -> None:
    """A name with an underscore is for its own package: a folder of graphshard.

    The base is for all. What another package needs has a name without an underscore.
    """
    bad = []
    for file in python_files():
        package = list(file.relative_to(PACKAGE.parent).parent.parts)
        for found in imports_of(file):
            owner = owner_of(found.target) if found.target.startswith("graphshard") else None
            if owner is not None and package[:2] != owner[:2] and owner != ["graphshard"]:
                bad.append(found.where())
    assert not bad, "\n" + "\n".join(bad)


def wing_of(file: Path) -> str:
    """Package and folder in it of a file, or its package alone."""
    return ".".join(file.relative_to(PACKAGE).parent.parts[:2])


def test_wings_of_a_package_do_not_import_each_other() -> None:
    """Between the folders of one package imports point one way, too."""
    below: dict[str, set[str]] = {wing_of(file): set() for file in python_files()}
    for file in python_files():
        unseen = lines_under_type_checking(file)
        for found in imports_of(file):
            reached = ".".join(found.target.split(".")[1:3])
            if reached not in below or found.line in unseen or found.in_function:
                continue
            is_sibling = reached.split(".")[0] == part_of(file) and "." in wing_of(file)
            if is_sibling and reached != wing_of(file):
                below[wing_of(file)].add(reached)
    done: set[str] = set()
    while remaining := {wing: needs for wing, needs in below.items() if wing not in done}:
        ready = {wing for wing, needs in remaining.items() if needs <= done}
        assert ready, (
            f"these import each other: { {w: sorted(n - done) for w, n in remaining.items()} }"
        )
        done |= ready


def type_names(file: Path) -> Iterator[str]:
    """Classes and type aliases that a file defines, without a leading underscore."""
    tree = syntax_of(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if dotted(statement.annotation).endswith("TypeAlias"):
                yield statement.target.id.lstrip("_")
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id.lstrip("_")
            is_type = isinstance(statement.value, ast.Subscript | ast.BinOp)
            if is_type and re.fullmatch(r"[A-Z][a-z]\w*", name):
                yield name


def test_a_type_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for file in python_files():
        for name in type_names(file):
            places.setdefault(name, []).append(str(file.relative_to(PACKAGE)))
    bad = {name: found for name, found in places.items() if len(found) > 1}
    assert not bad, f"one type name, several meanings: {bad}"


# Words that are nobody's but this project's, or say nothing; the field has its own.
PRIVATE_WORDS = re.compile(
    r"\b(whoever|whomever|somebody|nobody|strangers?|let go|lets go|told of|under way|stand-?ins?"
    r"|passengers?|portions?|at home|goes? home|winners?)\b",
    re.IGNORECASE,
)


def test_words_are_those_of_the_field() -> None:
    bad = []
    for file in [*python_files(), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if found := PRIVATE_WORDS.search(line):
                bad.append(f"{file.relative_to(ROOT)}:{number}: {found.group()}")
    assert not bad, "\n" + "\n".join(bad)


def packages() -> list[str]:
    """What users import, but for the names of others, which have tables of their own."""
    files = [PACKAGE / "__init__.py", *PACKAGE.glob("*/__init__.py")]
    names = {"graphshard._base", "graphshard.dgl", "graphshard.sar"}
    return sorted({module_name(file) for file in files} - names)


def is_exported(module: Any, public: str) -> bool:
    """Whether a module has a name, or would have it if the package that it needs were installed."""
    try:
        return hasattr(module, public)
    except ImportError as error:
        return "pip install" in str(error)


@pytest.mark.parametrize("name", packages())
def test_exports_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert hasattr(module, "__all__"), f"{name} must list its public names in __all__"
    missing = [public for public in module.__all__ if not is_exported(module, public)]
    assert not missing, f"{name}.__all__ names what is not there: {missing}"
    assert len(set(module.__all__)) == len(module.__all__), f"{name}.__all__ repeats a name"


@pytest.mark.parametrize("name", ["graphshard", "graphshard.data", "graphshard.train"])
def test_lazy_names_are_what_type_checkers_see(name: str) -> None:
    """The modules of a package are searched in turn for a name, and the first has it."""
    module = importlib.import_module(name)
    file = Path(str(module.__file__))
    unseen = lines_under_type_checking(file)
    for found in imports_of(file):
        owner, _, public = found.target.rpartition(".")
        if found.line not in unseen:
            continue
        assert public in dir(module)
        assert public in module.__all__
        if owner == "graphshard":
            assert getattr(module, public) is sys.modules[found.target]
        else:
            there = getattr(importlib.import_module(owner), public)
            assert getattr(module, public) is there


def test_a_function_hides_the_folder_of_its_name() -> None:
    import graphshard

    importlib.import_module("graphshard.graph.frame")
    assert graphshard.graph is sys.modules["graphshard.graph"].graph
    assert not hasattr(graphshard, "no_such_name")


# Notes each variable whose name holds "graphshard" that is looked up while the import runs.
IMPORT_AND_REPORT = """
import json, os, sys, threading
looked_up = []
plain_get = os._Environ.__getitem__
def noting_get(self, key):
    if "graphshard" in str(key).lower():
        looked_up.append(key)
    return plain_get(self, key)
os._Environ.__getitem__ = noting_get
from graphshard import *
import torch.distributed
tasks = "/proc/self/task"
print(json.dumps({
    "modules": sorted(sys.modules),
    "threads": [t.name for t in threading.enumerate()],
    "native_threads": len(os.listdir(tasks)) if os.path.isdir(tasks) else 1,
    "process_group": torch.distributed.is_initialized(),
    "looked_up": looked_up,
}))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, object]:
    """What a fresh interpreter reports after ``import graphshard``, warnings being errors."""
    search = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # None of ours is set, so a copy of the whole environment is not taken for a look-up; one thread
    # each, so that a library's own pool is not taken for ours.
    kept = {key: value for key, value in os.environ.items() if "GRAPHSHARD" not in key}
    environ = kept | {
        "PYTHONPATH": search.rstrip(os.pathsep),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_AND_REPORT],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report: dict[str, object] = json.loads(done.stdout)
    return report


def test_import_starts_no_thread(fresh_import: dict[str, object]) -> None:
    assert fresh_import["threads"] == ["MainThread"]
    assert fresh_import["native_threads"] == 1


def test_import_reads_none_of_our_environment_variables(fresh_import: dict[str, object]) -> None:
    assert fresh_import["looked_up"] == []


def test_import_needs_no_process_group(fresh_import: dict[str, object]) -> None:
    assert fresh_import["process_group"] is False


@pytest.mark.parametrize("package", sorted(OPTIONAL))
def test_import_loads_no_optional_package(package: str, fresh_import: dict[str, object]) -> None:
    modules = fresh_import["modules"]
    assert isinstance(modules, list)
    assert package not in modules
