# SPDX-License-Identifier: Apache-2.0
"""Layers of PyG: sums travel as partial sums, attention computes meanwhile. 2 gloo ranks, and 5.

The oracle is PyG in one process, float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

import graphshard
import graphshard.pyg
from graphshard import comm
from graphshard.fullbatch import row_transport
from graphshard.fullbatch.reductions import Sum
from graphshard.fullbatch.row_transport import CollectiveTransport
from graphshard.fullbatch.softmax import AttentionSum
from graphshard.testing import run_ranks

NUM_NODES, WIDTH = 40, 24


def whole_data() -> Data:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, NUM_NODES, (2, 160), generator=generator)
    edge_index = torch.cat([edge_index, torch.tensor([[3, 7], [3, 7]])], 1)  # loops
    x = torch.randn(NUM_NODES, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.rand(edge_index.shape[1], generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=edge_index, edge_weight=weight, n=torch.arange(NUM_NODES))


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "sage": pyg_nn.SAGEConv(WIDTH, WIDTH),
        "gcn": pyg_nn.GCNConv(WIDTH, WIDTH),
        "gcn weighted": pyg_nn.GCNConv(WIDTH, WIDTH),
        "graph weighted": pyg_nn.GraphConv(WIDTH, WIDTH, aggr="mean"),
        "gin": pyg_nn.GINConv(nn.Linear(WIDTH, WIDTH)),
    }


def run(name: str, layer: nn.Module, data: Any, x: Tensor) -> Tensor:
    layer = layer.double()
    weights = [data.edge_weight] if "weighted" in name else []
    hidden = layer(x * 2, data.edge_index, *weights).relu()
    result: Tensor = layer(hidden, data.edge_index, *weights)
    return result


def check(rank: int, world_size: int) -> None:
    whole = whole_data()
    for mode in ("oneshot", "sequential"):
        for name, layer in layers().items():
            x = whole.x.clone().requires_grad_()
            expected = run(name, layer, whole, x)
            (expected**2).sum().backward()
            sent = []
            for sums in (True, False):
                data = graphshard.pyg.shard(
                    whole_data(), part_method="random", mode=mode, partial_sums=sums
                )
                own = data.x.clone().requires_grad_()
                for _ in range(2):  # the first builds
                    own.grad = None
                    with comm.trace() as trace:
                        found = run(name, layer, data, own)
                        (found**2).sum().backward()
                torch.testing.assert_close(found, expected[data.n].detach())
                torch.testing.assert_close(own.grad, x.grad[data.n])
                sent.append(int(comm.all_reduce(torch.tensor([trace.total_bytes]))))
            assert sent[0] < sent[1], (name, sent)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_layers_are_those_of_pyg_and_send_less(num_ranks: int) -> None:
    run_ranks(check, num_ranks)


def attention_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    half = WIDTH // 2
    return [
        pyg_nn.GATConv(WIDTH, half, heads=2).double(),
        pyg_nn.GATv2Conv(WIDTH, half, heads=2).double(),
        pyg_nn.TransformerConv(WIDTH, half, heads=2).double(),
    ]


def attended(layer: nn.Module, data: Any, x: Tensor) -> list[Tensor]:
    """Output, gradients, and gradients of their squares."""
    layer(layer(x, data.edge_index).sin(), data.edge_index).square().sum().backward()
    out = layer(layer(x, data.edge_index).sin(), data.edge_index)
    (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), x)
    assert x.grad is not None
    return [out.detach(), grad.detach(), again, x.grad]


def noted(method: Any, event: str, events: list[str]) -> Any:
    def call(*args: Any) -> Any:
        events.append(event)
        return method(*args)

    return call


def check_attention(rank: int, world_size: int) -> None:
    """Own edges are computed while rows travel, and gradients likewise."""
    whole = whole_data()
    data = graphshard.pyg.shard(whole_data(), part_method="random", mode="oneshot")
    for layer in attention_layers():
        expected = attended(layer, whole, whole.x.clone().requires_grad_())
        own = data.x.clone().requires_grad_()
        for found, oracle in zip(attended(layer, data, own), expected, strict=True):
            torch.testing.assert_close(found, oracle[data.n])
        events: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for kind, name, event in (
                (CollectiveTransport, "start_fetch", "rows"),
                (AttentionSum, "merge", "edges"),
                (CollectiveTransport, "start_return", "gradients"),
                (AttentionSum, "direct_gradients", "back"),
            ):
                patch.setattr(kind, name, noted(getattr(kind, name), event, events))
            layer(own, data.edge_index).sum().backward()
        assert events == ["rows", "edges", "edges", "back", "gradients", "back"]
    for name in ("sage", "graph weighted"):  # of these the product of own rows, too
        layer = layers()[name].double()
        own = data.x.clone().requires_grad_()
        events = []
        root: Any = layer.lin_r if name == "sage" else layer.lin_root
        kind = type(root)
        with pytest.MonkeyPatch.context() as patch:
            for owner, method, event in (
                (CollectiveTransport, "start_fetch", "rows"),
                (Sum, "merge", "edges"),
                (CollectiveTransport, "start_return", "gradients"),
                (Sum, "direct_gradients", "back"),
                (kind, "forward", "linear"),
            ):
                patch.setattr(owner, method, noted(getattr(owner, method), event, events))
            weights = [data.edge_weight] if "weighted" in name else []
            out = layer(own * 2, data.edge_index, *weights)
            root.weight.register_hook(lambda _, events=events: events.append("matrix"))
            out.sum().backward()
        forward = ["rows", "edges", "linear", "edges", "linear"]
        assert events == [*forward, "back", "gradients", "back", "matrix"]
        assert "lin_r" not in vars(layer)
        assert "lin_root" not in vars(layer)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_attention_computes_own_edges_while_rows_travel(num_ranks: int) -> None:
    run_ranks(check_attention, num_ranks)


def two_relations() -> HeteroData:
    """Of one type of nodes; the second relation has a third of the edges."""
    whole, data = whole_data(), HeteroData()
    data["a"].x, data["a"].n = whole.x, whole.n
    data["a", "r", "a"].edge_index = whole.edge_index
    data["a", "s", "a"].edge_index = whole.edge_index.flip(0)[:, ::3].contiguous()
    return data


def check_states_of_relations(rank: int, world_size: int) -> None:
    """Sources are numbered for all relations from their type, states for one."""
    whole = two_relations()
    data = graphshard.pyg.shard(two_relations(), part_method="random", mode="oneshot")
    torch.manual_seed(0)
    layer = pyg_nn.GATConv(WIDTH, 12, heads=2).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_transport, "LEAST_SAVED", -(1 << 40))
        for relation in ("r", "s"):
            found = []
            for shards in (whole, data):
                x = shards["a"].x.clone().requires_grad_()
                out = layer(x, shards["a", relation, "a"].edge_index)
                (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
                (again,) = torch.autograd.grad(grad.square().sum(), x)
                out = layer(x, shards["a", relation, "a"].edge_index)
                (alone,) = torch.autograd.grad(out.sin().sum(), x)
                found.append((out.detach(), alone, grad.detach(), again))
            for oracle, own in zip(*found, strict=True):
                torch.testing.assert_close(own, oracle[data["a"].n])


def check_states(rank: int, world_size: int) -> None:
    """States of destinations travel where they are fewer bytes, with added self loops, too."""
    whole = whole_data()
    data, alone = (
        graphshard.pyg.shard(
            whole_data(), part_method="random", mode="oneshot", partial_sums=with_sums
        )
        for with_sums in (True, False)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_transport, "LEAST_SAVED", -(1 << 40))
        for layer in attention_layers():
            expected = attended(layer, whole, whole.x.clone().requires_grad_())
            sent = []
            for shards in (data, alone):
                for _ in range(2):  # the first builds
                    with comm.trace() as trace:
                        out = layer(shards.x.clone().requires_grad_(), shards.edge_index)
                        out.sum().backward()
                sent.append(int(comm.all_reduce(torch.tensor([trace.total_bytes]))))
            found = attended(layer, data, data.x.clone().requires_grad_())
            for one, oracle in zip(found, expected, strict=True):
                torch.testing.assert_close(one, oracle[data.n])
            assert sent[0] < sent[1] or not isinstance(layer, pyg_nn.GATConv)
            assert sent[0] != sent[1]
        dropped = pyg_nn.GATConv(WIDTH, 12, heads=2, dropout=0.5).double()
        for seed in (0, rank):  # of each rank its own
            own = data.x.clone().requires_grad_()
            torch.manual_seed(seed)
            loss = dropped(own, data.edge_index).square().sum()
            (recorded,) = torch.autograd.grad(loss, own, create_graph=True)
            (grad,) = torch.autograd.grad(loss, own)
            torch.testing.assert_close(grad, recorded.detach())


@pytest.mark.parametrize("num_ranks", [2, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_attention_sends_states_of_destinations(num_ranks: int) -> None:
    run_ranks(check_states, num_ranks)
    run_ranks(check_states_of_relations, num_ranks)
