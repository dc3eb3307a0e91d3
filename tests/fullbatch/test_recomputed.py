# SPDX-License-Identifier: Apache-2.0
"""Projected rows of attention layers are computed again in a sequential backward, not kept."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shards import own_nodes, write_parts

import graphshard
from emulated_gpu import emulated_gpu
from graphshard._base.kernels import kernels_for
from graphshard.dgl.nn import DotGatConv
from graphshard.nn import GATConv, GATv2Conv
from graphshard.nn.recompute import Projections
from graphshard.testing import run_ranks

NODES, WIDTH = 40_000, 64
KINDS = {"gat": GATConv, "gatv2": GATv2Conv, "dotgat": DotGatConv}


def some_graph() -> graphshard.Graph:
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(NODES, (2 * NODES,), generator=generator)
    return graphshard.graph((src, torch.arange(NODES).repeat(2)), num_nodes=NODES)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_parts(Path(tmp_path_factory.mktemp("parts")), some_graph(), 2, "metis")


def one_layer(parts: str, rank: int, kind: str, rematerialize: bool) -> Any:
    """(layer, its input, its output, bytes in use after the forward)."""
    torch.manual_seed(0)
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential", rematerialize=rematerialize)
    layer = KINDS[kind](WIDTH, WIDTH // 4, 4)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NODES, WIDTH, generator=generator)[own_nodes(data)["_N"]].requires_grad_()
    kernels = kernels_for(torch.device("cpu"))
    assert kernels is not None
    gc.collect()
    before = kernels.block_counts()[0]
    out = layer(graph, x)
    return layer, x, out, kernels.block_counts()[0] - before


def measure(rank: int, world_size: int, parts: str, kind: str) -> list[Any]:
    found = []
    for rematerialize in (True, False):
        layer, x, out, used = one_layer(parts, rank, kind, rematerialize)
        out.square().sum().backward()
        found += [used, x.grad, *(p.grad for p in layer.parameters())]
        del layer, x, out
    return found


@pytest.mark.compiled
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_let_go_and_gradients_stay(parts: str, kind: str) -> None:
    for found in run_ranks(measure, 2, parts, kind):
        half = len(found) // 2
        (used, *grads), (used_if_kept, *kept_grads) = found[:half], found[half:]
        assert used_if_kept - used >= NODES // 2 * WIDTH * 4 * 0.9
        for grad, kept in zip(grads, kept_grads, strict=True):
            assert torch.equal(grad, kept)


def test_rows_on_a_gpu_are_computed_again_as_autocast_computed_them() -> None:
    with emulated_gpu():
        projections = Projections(SimpleNamespace(rematerializes=True))  # type: ignore[arg-type]
        x, layer = torch.randn(5, 3).to("cuda"), torch.nn.Linear(3, 4).to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            rows = projections.project(x, layer, (4,))
        (made,) = projections._projections
        again = made.rows()
        assert again.dtype == rows.dtype == torch.bfloat16
        assert torch.equal(again, rows)


def change_between(rank: int, world_size: int, parts: str, what: str) -> str:
    layer, x, out, _ = one_layer(parts, rank, "gat", True)
    with torch.no_grad():
        (layer.fc.weight if what == "weight" else x).add_(1)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.compiled
@pytest.mark.parametrize("what", ["weight", "input"])
def test_what_rows_are_computed_from_may_not_change(parts: str, what: str) -> None:
    for message in run_ranks(change_between, 2, parts, what):
        assert "modified by an inplace operation" in message


def given_weights(rank: int, world_size: int, parts: str, kind: str) -> bool:
    """Whether gradients are those of a layer that has the weights which are given to another."""
    layer, x, _, _ = one_layer(parts, rank, kind, rematerialize=True)
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential", rematerialize=True)
    given = {name: (2 * p.detach() + 0.1).requires_grad_() for name, p in layer.named_parameters()}
    out = torch.func.functional_call(layer, given, (graph, x))
    found = torch.autograd.grad(out.square().sum(), [x, *given.values()])
    with torch.no_grad():
        for p, value in zip(layer.parameters(), given.values(), strict=True):
            p.copy_(value)
    out = layer(graph, x)
    expected = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_given_for_one_call(tmp_path: Path, kind: str) -> None:
    src, dst = (ids[:400] % 200 for ids in some_graph().edges())
    nodes = torch.arange(200)
    graph = graphshard.graph((torch.cat([src, nodes]), torch.cat([dst, nodes])), num_nodes=200)
    parts = write_parts(tmp_path, graph, 2, "random")
    assert run_ranks(given_weights, 2, parts, kind) == [True, True]
