# SPDX-License-Identifier: Apache-2.0
"""What DGL has and this package has not: DGL's public names, and the page that lists the gaps."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "dgl_names.md"
ROW = re.compile(r"^\| `(?P<place>[\w.]+)` \| (?P<names>.*?) \| (?P<why>.+) \|$")

#: What is compared. Data sets, loaders, samplers and DistDGL's names have pages of their own.
MODULES = (
    "dgl DGLGraph dgl.backend dgl.base dgl.batch dgl.convert dgl.function dgl.generators "
    "dgl.geometry dgl.heterograph dgl.homophily dgl.init dgl.merge dgl.mpops dgl.multiprocessing "
    "dgl.nn.functional dgl.nn.pytorch dgl.nn.pytorch.conv dgl.nn.pytorch.glob dgl.ops "
    "dgl.partition dgl.propagate dgl.random dgl.readout dgl.subgraph dgl.transforms "
    "dgl.transforms.functional dgl.transforms.module dgl.traversal dgl.udf dgl.utils"
).split()


def listed() -> dict[str, set[str]]:
    """Place -> names that the page says are not here."""
    found: dict[str, set[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = ROW.match(line)
        if row:
            found.setdefault(row["place"], set()).update(re.findall(r"`(\w+)`", row["names"]))
    return found


def missing(place: str) -> set[str]:
    """Names that a place has in DGL and not here."""
    import dgl

    import graphshard.dgl

    if place == "DGLGraph":
        theirs = {name for name in dir(dgl.DGLGraph) if not name.startswith("_")}
        graph = graphshard.graph(([0], [1]))
        return {name for name in theirs if not hasattr(graph, name)} - _elsewhere(dgl)
    theirs = _public(importlib.import_module(place))
    mine: Any = importlib.import_module(place.replace("dgl", "graphshard.dgl", 1))
    lacking = {name for name in theirs if name not in vars(mine)}
    return lacking - (_elsewhere(dgl) if place == "dgl" else set())


def _public(module: ModuleType) -> set[str]:
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    return {
        name
        for name in names
        if not inspect.ismodule(getattr(module, name))
        and str(getattr(getattr(module, name), "__module__", "dgl")).startswith("dgl")
    }


def _elsewhere(dgl: Any) -> set[str]:
    """Names of sampling and loading, which are also at the top and methods of graphs."""
    lazy = {name for name in dir(dgl) if "lazy" in name.lower()}
    return (
        lazy
        | set(dgl.sampling.__all__ if hasattr(dgl.sampling, "__all__") else ())
        | {name for name in dir(dgl.sampling) if name.startswith(("sample_", "select_", "global_"))}
    )
