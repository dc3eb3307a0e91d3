# SPDX-License-Identifier: Apache-2.0
"""Writes docs/guides/pyg_layers.md: every layer of the zoo, on shards against one process.

    python docs/make_pyg_table.py

Runs all layers of ``tests/pyg/layer_zoo.py`` on 2, 3 and 4 ranks, with METIS and random parts, in
both modes, in float64 and float32: about a quarter of an hour. A test compares a sample of the rows
with the page.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from graphshard.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "pyg"))

from layer_zoo import ZooLayer, limit, ways, zoo  # noqa: E402
from test_pyg_layers import compare_all  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "pyg_layers.md"
RANKS, CUTS, MODES = (2, 3, 4), ("metis", "random"), ("oneshot", "sequential")
HEAD = """# PyG's layers on a sharded graph

Written by `docs/make_pyg_table.py` with torch-geometric {version}. "Exact": outputs, gradients of
the input and gradients of all parameters equal those of PyG in one process on the whole graph,
relative to their largest number, to 1e-10 in float64 and to 1e-6 in float32; on {ranks} ranks, with
METIS and with random parts, in both modes. {works} of {total} are.

How a layer is computed in each mode: *fused*, by a kernel, without a message per edge; *PyG*, by
PyG's own code on own and fetched rows; *pieces*, by PyG's own code on some destinations at a time,
computed again in the backward.

| layer | result | one-shot | sequential |
| --- | --- | --- | --- |
"""


def row(case: ZooLayer) -> str:
    """The line of a layer."""
    if case.fails:
        return f"| {case.name} | not run: {case.fails} | | |"
    if case.refused:
        return f"| {case.name} | refused on every rank: {case.why} | | |"
    result = "exact"
    if limit(case, torch.float32) > 1e-6:
        result = f"exact; float32 to {limit(case, torch.float32):.0e}: {case.rounds}"
    return f"| {case.name} | {result} | {ways(case, 'oneshot')} | {ways(case, 'sequential')} |"


def check() -> None:
    """Raise unless every row holds."""
    cases = {case.name: case for case in zoo() if not case.fails}
    dtypes = (torch.float64, torch.float32)
    for world_size, cut, mode, dtype in itertools.product(RANKS, CUTS, MODES, dtypes):
        arguments: tuple[Any, ...] = (list(cases), dtype, cut, {"mode": mode})
        for found in run_ranks(compare_all, world_size, *arguments, timeout=600):
            for name, result in found.items():
                case = cases[name]
                if case.refused:
                    assert case.refused in result["error"], (name, result)
                else:
                    good = not result["error"] and result["gap"] <= limit(case, dtype)
                    assert good, (name, world_size, cut, mode, dtype, result)
        sys.stdout.write(f"{world_size} ranks, {cut}, {mode}, {dtype}: holds\n")


def main() -> None:
    """Check every row, then write the page."""
    import torch_geometric

    check()
    cases = zoo()
    head = HEAD.format(
        version=torch_geometric.__version__,
        ranks=", ".join(map(str, RANKS)),
        works=sum(not case.refused and not case.fails for case in cases),
        total=len(cases),
    )
    PAGE.write_text(head + "\n".join(map(row, cases)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
