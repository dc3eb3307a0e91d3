# SPDX-License-Identifier: Apache-2.0
"""patch_dgl: what it redirects, in which modules, and that it can be undone. One process.

Some of it needs a program of its own, in which DGL is imported later.
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch

import graphshard
import graphshard.dgl
import graphshard.sar
from dgl_peer import dgl

ENDS = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([1, 0, 2, 2, 0])
LOGITS = torch.randn(5, 2, generator=torch.manual_seed(0))
LAYERS = ("gatconv", "dotgatconv", "agnnconv", "hgtconv")
FUNCTIONS = {
    "edge_softmax": lambda: dgl.nn.functional.edge_softmax,
    "reverse": lambda: dgl.reverse,
    "add_self_loop": lambda: dgl.add_self_loop,
    "remove_self_loop": lambda: dgl.remove_self_loop,
    "laplacian_lambda_max": lambda: dgl.laplacian_lambda_max,
    "block_to_graph": lambda: dgl.block_to_graph,
    "broadcast_nodes": lambda: dgl.broadcast_nodes,
}


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    graphshard.dgl.unpatch_dgl()
    yield
    graphshard.dgl.unpatch_dgl()


def graphs() -> tuple[graphshard.Graph, dgl.DGLGraph]:
    return graphshard.graph(ENDS), dgl.graph(ENDS)


def module_that_imports(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec("from dgl.nn.functional import edge_softmax", vars(module))  # noqa: S102
    return module


def state() -> dict[str, object]:
    """All that a patch changes."""
    conv = dgl.nn.pytorch.conv
    found: dict[str, object] = {name: get().__code__ for name, get in FUNCTIONS.items()}
    found |= {f"defaults of {name}": get().__defaults__ for name, get in FUNCTIONS.items()}
    found |= {name: vars(getattr(conv, name)).get("edge_softmax") for name in LAYERS}
    found |= {
        "RelGraphConv": (dgl.nn.RelGraphConv, conv.RelGraphConv),
        "EdgeWeightNorm": conv.EdgeWeightNorm.forward,
        "GatedGraphConv": conv.GatedGraphConv.forward,
        "PNAConv": conv.pnaconv.PNAConvTower.forward,
        "ours": graphshard.sar.RelGraphConv.forward,
        "finders": list(sys.meta_path),
    }
    return found


def test_every_module_that_has_the_function_is_redirected() -> None:
    ours, theirs = graphs()
    expected = dgl.nn.functional.edge_softmax(theirs, LOGITS)
    before = module_that_imports("before")
    with pytest.raises(AttributeError):
        before.edge_softmax(ours, LOGITS)
    graphshard.dgl.patch_dgl()
    after = module_that_imports("after")
    for function in (before.edge_softmax, after.edge_softmax, dgl.ops.edge_softmax):
        torch.testing.assert_close(function(ours, LOGITS), expected)
        assert torch.equal(function(theirs, LOGITS), expected)
        eids = torch.tensor([3, 1])
        torch.testing.assert_close(
            function(graph=ours, logits=LOGITS[:2], eids=eids, norm_by="src"),
            function(theirs, LOGITS[:2], eids, "src"),
        )


def test_functions_of_graphs_take_both_kinds() -> None:
    ours, theirs = graphs()
    graphshard.dgl.patch_dgl()
    for function in (dgl.reverse, dgl.add_self_loop, dgl.remove_self_loop):
        mine, other = function(ours), function(theirs)
        assert isinstance(mine, graphshard.Graph)
        assert isinstance(other, dgl.DGLGraph)
        for a, b in zip(mine.edges(), other.edges(), strict=True):
            assert torch.equal(a, b)
    assert dgl.laplacian_lambda_max(ours) == pytest.approx(dgl.laplacian_lambda_max(theirs))
    row = torch.randn(1, 2)
    assert torch.equal(dgl.broadcast_nodes(ours, row), dgl.broadcast_nodes(theirs, row))
    block = dgl.block_to_graph(graphshard.create_block(ENDS))
    assert block.num_edges() == 5
    assert isinstance(block, graphshard.Graph)


def test_a_second_call_changes_nothing_and_all_can_be_undone() -> None:
    first = state()
    graphshard.dgl.patch_dgl()
    patched = state()
    assert all(first[name] is not patched[name] for name in FUNCTIONS)
    with graphshard.dgl.patch_dgl():  # not the first: leaving it undoes nothing
        assert state() == patched
    assert state() == patched
    graphshard.dgl.unpatch_dgl()
    assert state() == first
    graphshard.dgl.unpatch_dgl()
    assert state() == first
    with graphshard.dgl.patch_dgl():
        assert state() != first
    assert state() == first


def test_names_are_those_that_sar_has() -> None:
    original = dgl.nn.functional.edge_softmax
    graphshard.dgl.patch_dgl()
    assert dgl.nn.functional.edge_softmax is original
    for name in LAYERS:
        module = getattr(dgl.nn.pytorch.conv, name)
        assert module.edge_softmax is graphshard.dgl.patched_edge_softmax
    assert dgl.nn.RelGraphConv is dgl.nn.pytorch.conv.RelGraphConv is graphshard.sar.RelGraphConv


def test_names_are_the_same_where_this_package_is_called_dgl() -> None:
    conv = graphshard.dgl.nn.pytorch.conv
    original = graphshard.dgl.nn.functional.edge_softmax
    assert conv.gatconv.edge_softmax is conv.agnnconv.edge_softmax is original
    with graphshard.dgl.patch_dgl():
        assert conv.gatconv.edge_softmax is graphshard.dgl.patched_edge_softmax
        assert graphshard.dgl.nn.functional.edge_softmax is original
    assert conv.gatconv.edge_softmax is original
    assert conv.relgraphconv.RelGraphConv is graphshard.nn.RelGraphConv
    assert conv.graphconv.EdgeWeightNorm is graphshard.dgl.nn.EdgeWeightNorm


def test_graphs_of_dgl_give_what_they_gave() -> None:
    _, theirs = graphs()
    x, etypes = torch.randn(3, 4), torch.tensor([0, 1, 1, 0, 1])
    weight = torch.rand(5) + 0.1
    calls = {
        "GATConv": lambda nn: nn.GATConv(4, 2, 2)(theirs, x),
        "EdgeWeightNorm": lambda nn: nn.EdgeWeightNorm()(theirs, weight),
        "GatedGraphConv": lambda nn: nn.GatedGraphConv(4, 4, 2, 2)(theirs, x, etypes),
        "PNAConv": lambda nn: nn.PNAConv(4, 4, ["mean"], ["identity"], 1.0)(theirs, x),
        "RelGraphConv": lambda nn: nn.RelGraphConv(4, 3, 2)(theirs, x, etypes),
    }

    def results() -> dict[str, torch.Tensor]:
        found = {}
        for name, call in calls.items():
            torch.manual_seed(0)
            found[name] = call(dgl.nn)
        return found

    before = results()
    graphshard.dgl.patch_dgl()
    after = results()
    torch.testing.assert_close(after.pop("RelGraphConv"), before.pop("RelGraphConv"))  # ours
    for name, value in before.items():
        assert torch.equal(after[name], value), name


PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import graphshard
patch = graphshard.dgl.patch_dgl()
assert "dgl" not in sys.modules
assert graphshard.dgl.patch_dgl()._is_first is False
if sys.argv[1] == "undone":
    graphshard.dgl.unpatch_dgl()
import dgl
from dgl.nn.functional import edge_softmax
assert not any(type(finder).__module__.startswith("graphshard") for finder in sys.meta_path)
import torch
graph = graphshard.graph(([0, 1], [1, 1]))
try:
    print(edge_softmax(graph, torch.zeros(2)).tolist())
except AttributeError:
    print("not patched")
graphshard.dgl.unpatch_dgl()
try:
    edge_softmax(graph, torch.zeros(2))
except AttributeError:
    print("not patched")
"""


@pytest.mark.parametrize("way", ["imported", pytest.param("undone", marks=pytest.mark.exhaustive)])
def test_dgl_may_be_imported_later(way: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("[", "not"))]
    assert lines == ["[0.5, 0.5]" if way == "imported" else "not patched", "not patched"]
