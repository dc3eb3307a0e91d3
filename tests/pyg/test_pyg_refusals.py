# SPDX-License-Identifier: Apache-2.0
"""What is refused on two ranks is refused, or exact, on one. Uses 1 and 2 gloo ranks.

The oracle is PyG on the whole graph in one process.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch_geometric import utils
from torch_geometric.data import Data

import graphshard
import graphshard.pyg
from graphshard.comm import share_error
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from layer_zoo import WIDTH, gap, owners, whole_graph


def pooled(pool: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    batch = torch.zeros(x.size(0), dtype=torch.int64)
    return pool(x, edge_index, batch=batch)[0].sum(0, keepdim=True)


class Pooled(nn.Module):
    """A layer, and one that chooses among all nodes."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.conv, self.pool = pyg_nn.GraphConv(WIDTH, WIDTH), pool

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return pooled(self.pool, self.conv(x, edge_index), edge_index)


class Unpooled(nn.Module):
    """The same without a layer before it."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return pooled(self.pool, x, edge_index)


class Narrow(nn.Module):
    """In float32, which is written into some of PyG's code."""

    def __init__(self, model: nn.Module, *, of_one_graph: bool = False) -> None:
        super().__init__()
        self.model, self.of_one_graph = model, of_one_graph

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        batch = [torch.zeros(x.size(0), dtype=torch.int64)] if self.of_one_graph else []
        return self.model.float()(x.float(), edge_index, *batch)


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x * self.function(x, edge_index)


class Messages(pyg_nn.MessagePassing):
    """An own layer, from targets to sources."""

    def __init__(self) -> None:
        super().__init__(aggr="max", flow="target_to_source")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


class WithNorm(pyg_nn.MessagePassing):
    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.norm(x_j)


def max_at_sources(x: Tensor, e: Tensor) -> Tensor:
    return utils.scatter(x[e[1]], e[0], 0, dim_size=x.size(0), reduce="max")


def added_edges(x: Tensor, e: Tensor) -> int:
    return utils.degree(torch.cat([e, torch.tensor([[0, 1], [2, 3]])], 1)[1], x.size(0))[:, None]


def weights_by_computed(x: Tensor, e: Tensor) -> Tensor:
    return utils.scatter(x[e[0] * 1], e[1], 0, dim_size=x.size(0))


BACKWARD = {"flow": "target_to_source"}
# Refused on two ranks.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCNConv backward": lambda: pyg_nn.GCNConv(WIDTH, 4, **BACKWARD),
    "SAGEConv backward": lambda: pyg_nn.SAGEConv(WIDTH, 4, **BACKWARD),
    "SAGEConv(max) backward": lambda: pyg_nn.SAGEConv(WIDTH, 4, aggr="max", **BACKWARD),
    "GATConv backward": lambda: pyg_nn.GATConv(WIDTH, 4, **BACKWARD),
    "TransformerConv backward": lambda: pyg_nn.TransformerConv(WIDTH, 4, **BACKWARD),
    "a model backward": lambda: nn.ModuleList([pyg_nn.GCN(WIDTH, 4, 2, flow=BACKWARD["flow"])])[0],
    "own layer backward": Messages,
    "HypergraphConv": lambda: pyg_nn.HypergraphConv(WIDTH, 4),
    "GPSConv": lambda: pyg_nn.GPSConv(WIDTH, pyg_nn.SAGEConv(WIDTH, WIDTH), heads=2),
    "SGFormer": lambda: Narrow(
        pyg_nn.SGFormer(WIDTH, 8, 4, gnn_dropout=0.0, trans_dropout=0.0).eval(), of_one_graph=True
    ),
    "GraphUNet": lambda: pyg_nn.GraphUNet(WIDTH, 8, 4, 2, 0.5),
    "TopKPooling": lambda: Pooled(pyg_nn.TopKPooling(WIDTH, 0.4)),
    "SAGPooling": lambda: Pooled(pyg_nn.SAGPooling(WIDTH, 0.4)),
    "ASAPooling": lambda: Narrow(Pooled(pyg_nn.ASAPooling(WIDTH, 0.4))),
    "EdgePooling": lambda: Pooled(pyg_nn.EdgePooling(WIDTH)),
    "TopKPooling alone": lambda: Unpooled(pyg_nn.TopKPooling(WIDTH, 0.4)),
    "EdgePooling alone": lambda: Unpooled(pyg_nn.EdgePooling(WIDTH)),
    "BatchNorm": lambda: pyg_nn.GCN(WIDTH, 8, 2, 4, norm="batch_norm"),
    "GraphNorm": lambda: pyg_nn.GCN(WIDTH, 8, 2, 4, norm="graph_norm"),
    "a norm of messages": WithNorm,
    "to_undirected": lambda: Calls(
        lambda x, e: utils.degree(utils.to_undirected(e)[1], x.size(0))[:, None]
    ),
    "to_dense_adj": lambda: Calls(
        lambda x, e: utils.to_dense_adj(e, max_num_nodes=x.size(0))[0].sum(1, keepdim=True)
    ),
    "to_torch_coo_tensor": lambda: Calls(
        lambda x, e: utils.to_torch_coo_tensor(e, size=x.size(0)).to_dense().sum(1, keepdim=True)
    ),
    "to_scipy_sparse_matrix": lambda: Calls(
        lambda x, e: float(utils.to_scipy_sparse_matrix(e, num_nodes=x.size(0)).sum())
    ),
    "structured_negative_sampling": lambda: Calls(
        lambda x, e: 1.0 + 0 * utils.structured_negative_sampling(e)[2].sum()
    ),
    "contains_isolated_nodes": lambda: Calls(
        lambda x, e: 1 + float(utils.contains_isolated_nodes(e, x.size(0)))
    ),
    "is_undirected": lambda: Calls(lambda x, e: 1 + float(utils.is_undirected(e))),
    "k_hop_subgraph": lambda: Calls(lambda x, e: len(utils.k_hop_subgraph(0, 1, e)[0])),
    "unique": lambda: Calls(lambda x, e: e[0].unique().sum()),
    "argmax": lambda: Calls(lambda x, e: 1.0 * e[0, e[0].argmax()]),
    "std": lambda: Calls(lambda x, e: e[1].to(torch.float64).std() * 0 + e[1].prod()),
    "both directions": lambda: Calls(
        lambda x, e: utils.degree(torch.cat([e, e.flip([0])], 1)[1], x.size(0))[:, None]
    ),
    "turned after a choice": lambda: Calls(
        lambda x, e: utils.degree(e[:, e[0] > 3].flip([0])[1], x.size(0))[:, None]
    ),
    "maxima at sources": lambda: Calls(max_at_sources),
    "appended edges": lambda: Calls(added_edges),
    "rows by computed numbers": lambda: Calls(weights_by_computed),
    "a change of numbers": lambda: Calls(
        lambda x, e: utils.degree(e.add_(0)[1], x.size(0))[:, None]
    ),
}


def outcomes(rank: int, world_size: int, mode: str) -> dict[str, Any]:
    """The difference to PyG, as a share of what counts as equal, or the error."""
    whole: Data = whole_graph(torch.float64)
    part = graphshard.pyg.shard(whole, owners("random", world_size), mode=mode)
    found: dict[str, Any] = {}
    warnings.filterwarnings("ignore", "Sparse")
    for name, make in MODELS.items():
        torch.manual_seed(1)
        model = make().double()
        reference = copy.deepcopy(model)
        try:
            out = model(part.x, part.edge_index).detach()
        except (NotImplementedError, ValueError) as error:
            found[name] = str(error)
        except Exception as error:  # a traceback of one tells nothing of the others
            found[name] = f"wrong kind: {type(error).__name__}: {error}"
        else:
            expected = reference(whole.x, whole.edge_index.clone()).detach()
            limit = 1e-10 if expected.dtype == torch.float64 else 1e-5
            found[name] = gap(out, expected) / limit if world_size == 1 else "not refused"
        share_error(None)
    return found


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
def test_one_rank_refuses_or_is_exact(mode: str) -> None:
    (found,) = run_ranks(outcomes, 1, mode)
    wrong = {
        name: x
        for name, x in found.items()
        if (x.startswith("wrong kind") if isinstance(x, str) else not x <= 1)
    }
    assert wrong == {}


def test_two_ranks_refuse_with_the_same_words() -> None:
    first, second = run_ranks(outcomes, 2, "sequential")
    assert first == second
    assert [name for name, text in first.items() if text == "not refused"] == []
    assert {n: t for n, t in first.items() if t.startswith("wrong kind") or len(t) < 40} == {}
