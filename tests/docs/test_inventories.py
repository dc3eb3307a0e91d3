# SPDX-License-Identifier: Apache-2.0
"""The addresses of other projects' documentation name what is in the installed packages.

Their pages cannot be fetched by a test: an address is ``page#name``, and the name is imported. No
process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import re
import typing
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

HERE = Path(__file__).resolve().parents[2] / "docs" / "site"

ROLES = {
    "py:class": lambda value: inspect.isclass(value) or value is typing.NamedTuple,
    "py:exception": lambda value: inspect.isclass(value) and issubclass(value, BaseException),
    "py:function": callable,
    "py:method": callable,
    "py:data": lambda value: True,
}

# Pages of torch that have many entries; another page is that of its one entry.
SHARED = r"(tensors|tensor_attributes|size|data|distributed|optim)\.html"
PAGES = {"python": r"library/\w+(\.\w+)*\.html", "numpy": r"reference/[\w./]+\.html"}


def imported(name: str) -> Any:
    """What a dotted name, or one of builtins, stands for."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[count:], module)
    return functools.reduce(getattr, parts, importlib.import_module("builtins"))


def fault_of(project: str, role: str, name: str, address: str) -> str:
    """What is wrong with a row of a table; "" if nothing is."""
    page, _, anchor = address.partition("#")
    if anchor in ("None", "True", "False"):
        return "" if name == anchor else "another constant"
    if anchor == "typing.Self" and not hasattr(typing, "Self"):  # of Python 3.11
        return ""
    try:
        value = imported(anchor)
    except AttributeError:
        return "the package has no such name"
    if not ROLES[role](value):
        return f"no {role}"
    try:
        is_same = imported(name) == value or name.endswith("RedOpType")  # an enum inside ReduceOp
    except AttributeError:  # as a signature writes it: Tensor, nn.Module, Path
        is_same = anchor.split(".")[-1] == name.split(".")[-1]
    if not is_same:
        return "another object"
    own = rf"generated/{re.escape(anchor.rsplit('.', 1)[0] if role == 'py:method' else anchor)}"
    pages = PAGES.get(project, rf"{own}\.html|{SHARED}")
    return "" if re.fullmatch(pages, page) else "another page"


def test_addresses_name_what_the_packages_have() -> None:
    pytest.importorskip("torch_geometric", reason="PyG, whose names are looked up, is not there")
    rows = [
        (file.stem, *line.split())
        for file in sorted((HERE / "inventories").glob("*.txt"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) > 90
    assert not {row: fault for row in rows if (fault := fault_of(*row))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("torch py:class torch.Tensr tensors.html#torch.Tensr", "the package has no such name"),
        ("torch py:class torch.Tensor tensors.html#torch.device", "another object"),
        ("torch py:class torch.Generator generated/torch.Gen.html#torch.Generator", "another page"),
        ("python py:exception int library/functions.html#int", "no py:exception"),
    ],
)
def test_faults_are_found(row: str, fault: str) -> None:
    assert fault_of(*row.split()) == fault


def test_projects_are_where_their_packages_say() -> None:
    text = (HERE / "conf.py").read_text(encoding="utf-8")
    addresses = dict(re.findall(r'^    "(\w+)": "(https://[^"]+)",$', text, re.M))
    assert set(addresses) == {file.stem for file in (HERE / "inventories").glob("*.txt")}
    for package in ("torch", "numpy", "torch_geometric"):
        try:
            told = importlib.metadata.metadata(package).get_all("Project-URL") or []
        except importlib.metadata.PackageNotFoundError:
            continue
        (documentation,) = (
            line.split(", ")[1] for line in told if line.lower().startswith("documentation")
        )
        here, there = urlparse(addresses[package]), urlparse(documentation)
        # pytorch.org/docs leads to docs.pytorch.org/docs
        assert here.netloc.removeprefix("docs.") == there.netloc
        assert here.path.startswith(there.path.rstrip("/"))
