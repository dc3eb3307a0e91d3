# SPDX-License-Identifier: Apache-2.0
"""DGL's own layers on our graphs equal DGL on its graphs. One process, and 2 to 4 gloo ranks.

Every layer on a graph and a block, and a sample on shards, run always; all of them on shards, in
both modes and dtypes, with METIS and random parts and with a rank without nodes, in
``make test-all``.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphshard
import graphshard.dgl
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("dgl", reason="DGL is the oracle, and has no release here")

from dgl_layer_zoo import DglLayer, compare_local, conv, write_parts, zoo

ROOT = Path(__file__).parents[2]
SAMPLE = (
    "ChebConv",
    "EdgeConv(batch_norm)",
    "EdgeWeightNorm",
    "EGATConv",
    "GATConv(attention)",
    "GatedGraphConv",
    "HGTConv",
    "PNAConv",
    "RelGraphConv",
    "SAGEConv(lstm)",
    "TWIRLSConv(attention)",
)
RUNS = [case for case in zoo() if not case.fails]


@pytest.fixture(autouse=True)
def _double_by_default() -> Iterator[None]:
    """DGL's APPNPConv makes its edge weights in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_local(cases: list[DglLayer], dtype: torch.dtype) -> list[str]:
    wrong = []
    with warnings.catch_warnings(), graphshard.dgl.patch_dgl():
        warnings.simplefilter("ignore")
        for case in cases:
            for is_block in (False, True):
                found = compare_local(case, dtype, is_block)
                if is_block and not case.block:
                    found = "" if found.startswith("DGL: ") else f"DGL takes a block ({found})"
                if found:
                    wrong.append(f"{case.name} on a {'block' if is_block else 'graph'}: {found}")
    return wrong


def compare_all(
    rank: int, world_size: int, names: list[str], folder: str, dtype: torch.dtype, modes: list[Any]
) -> dict[tuple[str, str], str]:
    from dgl_layer_zoo import compare_sharded, zoo

    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings(), graphshard.dgl.patch_dgl():
            warnings.simplefilter("ignore")
            return {
                (case.name, mode): compare_sharded(case, folder, rank, dtype, mode)
                for mode in modes
                for case in zoo()
                if case.name in names
            }
    finally:
        torch.set_default_dtype(torch.float32)


def check_sharded(
    names: list[str], world_size: int, method: str, dtype: torch.dtype, modes: list[str]
) -> list[str]:
    cases = {case.name: case for case in zoo()}
    with tempfile.TemporaryDirectory() as folder:
        write_parts(folder, world_size, method)
        ranks = run_ranks(compare_all, world_size, names, folder, dtype, modes, timeout=300)
    wrong = []
    for name, mode in ranks[0]:
        texts = [found[name, mode] for found in ranks]
        refused = cases[name].sequential if mode == "sequential" else ""
        if refused:
            if not all(t.startswith("NotImplementedError") and refused in t for t in texts):
                wrong.append(f"{name}, {mode}: should be refused (got {texts})")
            elif len(set(texts)) > 1:
                wrong.append(f"{name}, {mode}: ranks disagree: {texts}")
        elif any(texts):
            wrong.append(f"{name}, {mode}: {texts}")
    return wrong


def test_every_layer_on_a_graph_and_on_a_block() -> None:
    wrong = check_local(RUNS, torch.float64)
    assert not wrong, "\n".join(wrong)


def test_sample_of_layers_on_shards() -> None:
    modes = ["oneshot", "sequential"]
    wrong = check_sharded(list(SAMPLE), 2, "random", torch.float64, modes)
    assert not wrong, "\n".join(wrong)


def test_zoo_has_every_layer_of_dgl() -> None:
    layers = {name for name, kind in vars(conv).items() if isinstance(kind, type)}
    assert {case.name.split("(")[0] for case in zoo()} == layers


def test_table_of_the_documentation() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    from make_dgl_table import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run python docs/make_dgl_table.py"
    exact = [case for case in RUNS if not case.sequential]
    assert len(exact) >= 0.9 * len(RUNS)  # the others are exact in one-shot mode


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", ["metis", "random", "empty"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_layers_on_shards(world_size: int, method: str, dtype: torch.dtype) -> None:
    names = [case.name for case in RUNS if case.empty or method != "empty"]
    wrong = check_sharded(names, world_size, method, dtype, ["oneshot", "sequential"])
    assert not wrong, "\n".join(wrong)


@pytest.mark.exhaustive
def test_every_layer_in_float32() -> None:
    torch.set_default_dtype(torch.float32)
    wrong = check_local(RUNS, torch.float32)
    assert not wrong, "\n".join(wrong)
