# SPDX-License-Identifier: Apache-2.0
"""Layers computed in pieces and again in the backward, in one process, without a group.

The oracle of a gradient is the difference quotient, or PyG on a plain ``edge_index``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch_geometric.data import Data

import graphshard.pyg
from graphshard.pyg import _propagate

sys.path.insert(0, str(Path(__file__).parent))

from layer_zoo import EDGE_WIDTH, WIDTH, whole_graph


@pytest.fixture(autouse=True)
def _several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_propagate, "FEWEST_EDGES", 16)


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg_nn.GATConv(WIDTH, 4, heads=2, dropout=0.5),
        lambda: pyg_nn.TransformerConv(WIDTH, 4, heads=2, dropout=0.5, edge_dim=EDGE_WIDTH),
    ],
)
def test_dropout_is_the_same_in_the_backward(make: Callable[[], Any], mode: str) -> None:
    data = graphshard.pyg.shard(whole_graph(torch.float64), mode=mode)
    layer = make().double()
    keywords = {"edge_attr": data.edge_attr} if layer.edge_dim else {}

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        found: Tensor = layer(x, data.edge_index, **keywords).square().sum()
        return found

    x = data.x.clone().requires_grad_()
    loss(x).backward()
    assert x.grad is not None
    direction, step = torch.randn_like(data.x), 1e-6
    difference = loss(data.x + step * direction) - loss(data.x - step * direction)
    torch.testing.assert_close((x.grad * direction).sum(), difference / (2 * step))


class Captured(pyg_nn.MessagePassing):
    """Its message uses a tensor that `propagate` does not get."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.lin = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.scale = self.lin(x).mean()
        found: Tensor = self.propagate(edge_index, x=x)
        return found

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j - x_i) * self.scale


def test_a_captured_tensor_is_refused_where_its_gradient_would_be_lost() -> None:
    whole = whole_graph(torch.float64)
    layer, x = Captured().double(), whole.x.clone().requires_grad_()
    data = graphshard.pyg.shard(whole, mode="sequential")
    with pytest.raises(NotImplementedError, match="pass it to propagate"):
        layer(x, data.edge_index)
    data = graphshard.pyg.shard(whole, mode="oneshot")
    torch.testing.assert_close(layer(x, data.edge_index), layer(x, whole.edge_index))


def test_nothing_but_own_rows_is_kept_for_the_backward() -> None:
    whole = whole_graph(torch.float32)
    num_edges = whole.edge_index.shape[1]
    layer = pyg_nn.ResGatedGraphConv(WIDTH, WIDTH)

    def largest_saved(mode: str) -> int:
        data = graphshard.pyg.shard(whole, mode=mode)
        rows: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            rows.append(tensor.shape[0] if tensor.dim() > 1 else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(data.x, data.edge_index)
        return max(rows)

    assert largest_saved("oneshot") == num_edges
    assert largest_saved("sequential") <= whole.x.shape[0]


def test_a_plain_graph_runs_as_before() -> None:
    whole = whole_graph(torch.float64)
    graphshard.pyg.shard(Data(x=whole.x, edge_index=whole.edge_index))
    layer = pyg_nn.GATv2Conv(WIDTH, 4).double()
    out = layer(whole.x, whole.edge_index)
    assert set(vars(layer)) == set(vars(pyg_nn.GATv2Conv(WIDTH, 4)))
    data = graphshard.pyg.shard(whole)
    torch.testing.assert_close(layer(data.x, data.edge_index), out)
    assert set(vars(layer)) == set(vars(pyg_nn.GATv2Conv(WIDTH, 4)))
