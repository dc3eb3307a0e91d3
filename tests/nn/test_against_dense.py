# SPDX-License-Identifier: Apache-2.0
"""Layers against the formulas of their papers in dense linear algebra. One process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphshard.dgl.nn import APPNPConv, DotGatConv, SGConv
from graphshard.graph import Graph, graph
from graphshard.nn import GATConv, GATv2Conv, GINConv, GraphConv, RelGraphConv, SAGEConv

NUM_NODES, WIDTH = 7, 4
SRC = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 0, 2, 5, 5])
DST = torch.tensor([1, 2, 3, 4, 5, 6, 0, 1, 3, 2, 1, 1])


@pytest.fixture
def g() -> Graph:
    return graph((SRC, DST), num_nodes=NUM_NODES)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(NUM_NODES, WIDTH, dtype=torch.float64, generator=torch.manual_seed(0))


def edge_values() -> Tensor:
    return 0.5 + torch.rand(len(SRC), dtype=torch.float64, generator=torch.manual_seed(1))


def dense(values: Tensor | None = None) -> Tensor:
    """``A[i, j]``: sum of the values of the edges from j to i."""
    values = torch.ones(len(SRC), dtype=torch.float64) if values is None else values
    matrix = torch.zeros(NUM_NODES, NUM_NODES, dtype=torch.float64)
    return matrix.index_put((DST, SRC), values, accumulate=True)


def check(layer: Any, expected: Tensor, *args: Any, **keywords: Any) -> None:
    torch.testing.assert_close(layer(*args, **keywords), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("out", [2, 9])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", ["none", "both", "right", "left"])
def test_graph_conv(g: Graph, x: Tensor, norm: Any, weighted: bool, out: int) -> None:
    layer = GraphConv(WIDTH, out, norm=norm).double()
    values = edge_values() if weighted else None
    counts = dense()
    into, outof = counts.sum(1).clamp(min=1), counts.sum(0).clamp(min=1)
    left = {"both": outof**-0.5, "left": 1 / outof}.get(norm, torch.ones(NUM_NODES).double())
    right = {"both": into**-0.5, "right": 1 / into}.get(norm, torch.ones(NUM_NODES).double())
    expected = right[:, None] * (dense(values) * left) @ x @ layer.weight + layer.bias
    check(layer, expected, g, x, edge_weight=values)


@pytest.mark.parametrize("out", [2, 9])
@pytest.mark.parametrize("weighted", [False, True])
def test_sage_mean_and_gcn(g: Graph, x: Tensor, weighted: bool, out: int) -> None:
    values = edge_values() if weighted else None
    sums = dense(values) @ x
    degrees = dense().sum(1, keepdim=True)
    mean = SAGEConv(WIDTH, out, "mean").double()
    expected = (sums / degrees) @ mean.fc_neigh.weight.T
    expected = expected + x @ mean.fc_self.weight.T + mean.fc_self.bias
    check(mean, expected, g, x, edge_weight=values)
    gcn = SAGEConv(WIDTH, out, "gcn").double()
    expected = (sums + x) / (degrees + 1) @ gcn.fc_neigh.weight.T + gcn.bias
    check(gcn, expected, g, x, edge_weight=values)


def dense_attention(scores: Tensor, values: Tensor) -> Tensor:
    """Attention over the in-edges: scores ``[E, heads]``, values ``[nodes, heads, out]``."""
    incidence = torch.arange(NUM_NODES)[:, None] == DST  # [nodes, E]
    logits = scores.T[:, None, :].masked_fill(~incidence, -torch.inf)  # [heads, nodes, E]
    weights = logits.softmax(-1)
    return torch.einsum("hne,ehd->nhd", weights, values[SRC])


def test_gat(g: Graph, x: Tensor) -> None:
    layer = GATConv(WIDTH, 3, 2).double()
    projected = (x @ layer.fc.weight.T).view(-1, 2, 3)
    source = torch.einsum("nhd,hd->nh", projected, layer.attn_l[0])
    destination = torch.einsum("nhd,hd->nh", projected, layer.attn_r[0])
    scores = torch.nn.functional.leaky_relu(source[SRC] + destination[DST], 0.2)
    check(layer, dense_attention(scores, projected) + layer.bias.view(2, 3), g, x)


def test_gatv2(g: Graph, x: Tensor) -> None:
    layer = GATv2Conv(WIDTH, 3, 2).double()
    source = layer.fc_src(x).view(-1, 2, 3)
    destination = layer.fc_dst(x).view(-1, 2, 3)
    joint = torch.nn.functional.leaky_relu(source[SRC] + destination[DST], 0.2)
    scores = torch.einsum("ehd,hd->eh", joint, layer.attn[0])
    check(layer, dense_attention(scores, source), g, x)


def test_dot_gat(g: Graph, x: Tensor) -> None:
    layer = DotGatConv(WIDTH, 3, 2).double()
    projected = layer.fc(x).view(-1, 2, 3)
    scores = torch.einsum("ehd,ehd->eh", projected[SRC], projected[DST]) / 3**0.5
    check(layer, dense_attention(scores, projected), g, x)


@pytest.mark.parametrize("weighted", [False, True])
def test_gin(g: Graph, x: Tensor, weighted: bool) -> None:
    layer = GINConv(torch.nn.Linear(WIDTH, 2), init_eps=0.25).double()
    values = edge_values() if weighted else None
    check(layer, layer.apply_func(1.25 * x + dense(values) @ x), g, x, edge_weight=values)


def normalized(values: Tensor | None) -> Tensor:
    matrix = dense(values)
    into, outof = matrix.sum(1), matrix.sum(0)
    if values is None:
        into, outof = into.clamp(min=1), outof.clamp(min=1)
    return into[:, None] ** -0.5 * matrix * outof**-0.5


@pytest.mark.parametrize("weighted", [False, True])
def test_appnp(g: Graph, x: Tensor, weighted: bool) -> None:
    values = edge_values() if weighted else None
    expected = x
    for _ in range(4):
        expected = 0.7 * normalized(values) @ expected + 0.3 * x
    check(APPNPConv(4, 0.3), expected, g, x, edge_weight=values)


@pytest.mark.parametrize("weighted", [False, True])
def test_sgc(g: Graph, x: Tensor, weighted: bool) -> None:
    layer = SGConv(WIDTH, 2, k=3).double()
    if weighted:
        step = normalized(edge_values())
    else:
        scale = dense().sum(1).clamp(min=1) ** -0.5
        step = scale[:, None] * dense() * scale
    expected = layer.fc(step @ step @ step @ x)
    check(layer, expected, g, x, edge_weight=edge_values() if weighted else None)


@pytest.mark.parametrize("num_bases", [2, 12])
@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_rel_graph_conv(g: Graph, x: Tensor, regularizer: Any, num_bases: int) -> None:
    if regularizer == "bdd":
        num_bases = 2
    layer = RelGraphConv(WIDTH, 6, 3, regularizer, num_bases).double()
    etypes = torch.arange(len(SRC)) % 3
    values = edge_values()
    linear = layer.linear_r
    expected = x @ layer.loop_weight + layer.h_bias
    for t in range(3):
        if regularizer == "basis":
            weight = torch.einsum("b,bio->io", linear.coeff[t], linear.W)
        elif regularizer == "bdd":
            weight = torch.block_diag(*linear.W[t].view(num_bases, 2, 3))
        else:
            weight = linear.W[t]
        expected = expected + dense(values * (etypes == t)) @ x @ weight
    check(layer, expected, g, x, etypes, values)
