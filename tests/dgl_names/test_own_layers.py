# SPDX-License-Identifier: Apache-2.0
"""The layers of graphshard.dgl.nn that DGL has too: equal DGL's, and N ranks equal one process.

One process, and 2 and 3 gloo ranks. The list of layers and how they are called is that of
dgl_layer_zoo.py; layers of `graphshard.nn` have tests of their own.
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("dgl", reason="DGL is the oracle, and has no release here")

from dgl_layer_zoo import _with, compare_local, conv, made, nn, replace, write_parts, zoo

import graphshard.dgl
from graphshard.comm import all_reduce
from graphshard.testing import run_ranks

ours = graphshard.dgl.nn
NAMES = ("ChebConv", "EdgeConv", "GINEConv", "GMMConv", "GatedGraphConv", "NNConv", "TAGConv")
D = 8


def cases() -> list[Any]:
    """Those of the zoo, and options that it has not."""
    import dgl_layer_zoo as z

    found = [case for case in zoo() if case.name.startswith(NAMES)]
    layer = found[0]
    pseudo = next(case.call for case in found if case.name == "GMMConv")
    more = {
        "GMMConv(mean, residual)": (
            lambda: z.conv.GMMConv(D, 3, 2, 3, "mean", residual=True, bias=False), pseudo),
        "GMMConv(residual as it is)": (
            lambda: z.conv.GMMConv(D, D, 2, 3, residual=True), pseudo),
        "NNConv(sum, residual)": (
            lambda: z.conv.NNConv(D, 3, nn.Linear(D, D * 3), "sum", residual=True), _with("edge")),
        "GINEConv(learn_eps)": (
            lambda: z.conv.GINEConv(None, 0.3, learn_eps=True), _with("edge")),
        "TAGConv(activation)": (
            lambda: z.conv.TAGConv(D, 3, 3, False, torch.tanh), layer.call),
        "ChebConv(1, no activation)": (
            lambda: z.conv.ChebConv(D, 3, 1, None, False), layer.call),
    }  # fmt: skip
    for name, (make, call) in more.items():
        block = not name.startswith(("TAG", "Cheb"))
        found.append(replace(layer, name=name, make=make, call=call, block=block, empty=True))
    return found


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_layers_are_dgls_with_dgls_parameters(case: Any) -> None:
    mine, theirs = made(case, torch.float64, ours), made(case, torch.float64)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[name], value), name
    theirs.load_state_dict(mine.state_dict())
    for dtype in (torch.float64, torch.float32):
        assert compare_local(case, dtype, False, ours) == ""
    if case.block:
        assert compare_local(case, torch.float64, True, ours) == ""


def compare_all(rank: int, world_size: int, folder: str) -> list[str]:
    from dgl_layer_zoo import compare_sharded

    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in ("oneshot", "sequential"):
            for case in cases():
                text = compare_sharded(case, folder, rank, torch.float64, mode, ours)
                if text:
                    wrong.append(f"{case.name}, {mode}: {text}")
    return wrong


@pytest.mark.parametrize(("world_size", "method"), [(2, "random"), (3, "empty")])
def test_ranks_equal_one_process(world_size: int, method: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_parts(folder, world_size, method)
        wrong = run_ranks(compare_all, world_size, folder, timeout=300)
    assert wrong == [[]] * world_size


def test_nodes_without_in_edges() -> None:
    import dgl

    edges = ([0, 1, 1, 2], [1, 2, 2, 1])
    x, u = torch.rand(4, D), torch.rand(4, 2)
    for name, arguments, more in (("EdgeConv", (D, 3), ()), ("GMMConv", (D, 3, 2, 2), (u,))):
        layer = getattr(ours, name)(*arguments)
        with pytest.raises(ValueError, match=f"{name} needs at least one in-edge"):
            layer(graphshard.graph(edges, num_nodes=4), x, *more)
        theirs = getattr(conv, name)(*arguments)
        theirs.load_state_dict(layer.state_dict())
        for each in (layer, theirs):
            each.set_allow_zero_in_degree(True)
        torch.testing.assert_close(
            layer(graphshard.graph(edges, num_nodes=4), x, *more),
            theirs(dgl.graph(edges, num_nodes=4), x, *more),
        )


def test_what_layers_refuse() -> None:
    g, x = graphshard.graph(([0, 1], [1, 0])), torch.rand(2, 4)
    with pytest.raises(ValueError, match="out_feats must be in_feats or more"):
        ours.GatedGraphConv(4, 3, 1, 1)
    with pytest.raises(ValueError, match="edge types must be from 0 to 1"):
        ours.GatedGraphConv(4, 4, 1, 2)(g, x, torch.tensor([0, 2]))
    with pytest.raises(KeyError, match="aggregator_type must be one of"):
        ours.NNConv(4, 4, nn.Linear(1, 16), "other")
    with pytest.raises(ValueError, match="norm_type must be"):
        ours.LabelPropagation(1, 0.5, "other")
    with pytest.raises(ValueError, match="reset needs a mask"):
        ours.LabelPropagation(1, 0.5, reset=True)(g, torch.tensor([0, 1]))


def test_cheb_conv_takes_a_number_for_each_graph_of_a_batch() -> None:
    import dgl

    layer, theirs = ours.ChebConv(4, 3, 3), conv.ChebConv(4, 3, 3)
    theirs.load_state_dict(layer.state_dict())
    x, largest = torch.rand(5, 4), [1.5, 2.0]
    edges = ([0, 1], [1, 0]), ([0, 1, 2], [1, 2, 0])
    results = [
        each(lib.batch([lib.graph(ends) for ends in edges]), x, largest)
        for each, lib in ((layer, graphshard.dgl), (theirs, dgl))
    ]
    torch.testing.assert_close(*results)


LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3])
MASK = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
ENDS = ([0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 4], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6, 1])
WAYS = [{}, {"norm_type": "row"}, {"clamp": False, "normalize": True}, {"reset": True}]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("mask", [None, MASK, MASK.nonzero().flatten()], ids=["all", "mask", "ids"])
def test_label_propagation_is_dgls(options: dict[str, Any], mask: Tensor | None) -> None:
    import dgl

    if options.get("reset") and mask is None:
        return
    for labels in (LABELS, LABELS[:, None], torch.nn.functional.one_hot(LABELS)):
        mine = ours.LabelPropagation(3, 0.7, **options)(graphshard.graph(ENDS), labels, mask)
        theirs = dgl.nn.LabelPropagation(3, 0.7, **options)(dgl.graph(ENDS), labels, mask)
        torch.testing.assert_close(mine, theirs)


def label_propagation_on_ranks(rank: int, world_size: int, folder: str) -> float:
    whole = graphshard.graph(ENDS)
    part = graphshard.load_dgl_partition_data(f"{folder}/labels.json", rank, "cpu")
    graph = graphshard.construct_full_graph(part)
    own = graph.original_ids["_N"]
    gap = 0.0
    for options in WAYS:
        layer = ours.LabelPropagation(3, 0.7, **options)
        expected = layer(whole, LABELS, MASK)[own]
        found = layer(graph, LABELS[own], MASK[own])
        assert found.shape == expected.shape
        gap = max(gap, float((found - expected).abs().max()))
    return float(all_reduce(torch.tensor(gap), "max"))


def test_label_propagation_on_ranks_equals_one_process() -> None:
    with tempfile.TemporaryDirectory() as folder:
        graphshard.partition.partition_graph(
            graphshard.graph(ENDS), "labels", 2, folder,
            part_method=torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]), quiet=True,
        )  # fmt: skip
        assert max(run_ranks(label_propagation_on_ranks, 2, folder)) < 1e-6


def test_weight_basis_and_identity_are_dgls() -> None:
    import dgl

    mine, theirs = ours.WeightBasis((3, 4), 2, 5), dgl.nn.WeightBasis((3, 4), 2, 5)
    theirs.load_state_dict(mine.state_dict())
    torch.testing.assert_close(mine(), theirs())
    with pytest.warns(graphshard.errors.DGLWarning, match="num_outputs should be larger"):
        ours.WeightBasis((3,), 2, 2)
    x = torch.rand(2)
    assert ours.Identity()(x) is x
