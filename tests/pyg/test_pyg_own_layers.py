# SPDX-License-Identifier: Apache-2.0
"""Layers that users write, and what they call on ``edge_index`` in them. Uses 2 and 3 gloo ranks.

The oracle is the same layer on the whole graph in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import utils
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import OptTensor

import graphshard
import graphshard.pyg
from graphshard.comm import share_error
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from layer_zoo import WIDTH, gap, owners, whole_graph


class Own(MessagePassing):
    """What the others share; the message is the source row."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.lin, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))


class Plain(Own):  # PyG writes code for the first class that is made; others would inherit it
    pass


class Updating(Own):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid(self.score(torch.cat([x_i, x_j], -1))) * x_j

    def update(self, aggr_out: Tensor, x: Tensor) -> Tensor:
        return aggr_out + x


class Aggregating(Own):
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        return 2 * utils.scatter(inputs, index, 0, dim_size=dim_size, reduce="sum")


class Attending(MessagePassing):
    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.score = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(
        self,
        x_i: Tensor,
        x_j: Tensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: int | None,
    ) -> Tensor:
        score = self.score(torch.cat([x_i, x_j], -1))
        return utils.softmax(score, index, ptr, size_i) * x_j


class EdgeUpdating(Own):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        return self.propagate(edge_index, x=x, alpha=self.edge_updater(edge_index, x=x))

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.tanh(self.score(torch.cat([x_i, x_j], -1)))

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha * x_j


class ReadsUpdates(EdgeUpdating):
    """What ``edge_updater`` gives is a tensor, whatever a layer does with it."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        both, alpha = self.edge_updater(edge_index, x=x)
        self.kept = alpha
        alpha = torch.relu(2 * alpha + both.view(-1, 1))
        out = self.propagate(edge_index, x=x, alpha=alpha)
        return out + utils.scatter(alpha, edge_index[1], 0, x.size(0), "max")

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> tuple[Tensor, Tensor]:
        return (x_i * x_j).sum(-1), torch.tanh(self.score(torch.cat([x_i, x_j], -1)))


class MayAskForIndex(Own):
    """An argument that ``propagate`` gives, and that the message could do without."""

    def message(self, x_j: Tensor, index: OptTensor = None) -> Tensor:
        return x_j if index is None else x_j * (1 + index.view(-1, 1) % 3)


class OneWeight(Own):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        is_later = edge_index[0] > edge_index[1]
        return self.propagate(edge_index, x=self.lin(x), weight=self.score.bias.view(1, 1)) + (
            self.propagate(edge_index, x=x, weight=is_later.view(-1, 1))
        )

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight * x_j


class KeepsEdgeRows(Own):
    """Messages read what ``forward`` has left in the layer, and in one of its modules."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        self.same = (edge_index[0] == edge_index[1]).to(x.dtype)
        self.score.rows = torch.sigmoid((x[edge_index[0]] * x[edge_index[1]]).sum(-1))
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return torch.tanh((self.same + self.score.rows).view(-1, 1) * x_j)


class GivesWhole(Own):
    """Tensors that messages read whole and that need a gradient, and are no parameters."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        factor = 2 * self.score.weight[0, :WIDTH]
        return self.propagate(edge_index, x=x, factor=factor, sums=x.sum(-1, keepdim=True))

    def message(self, x_j: Tensor, factor: Tensor, sums: Tensor, index: Tensor) -> Tensor:
        return torch.tanh(x_j * factor + sums[index])


class AggregatesRows(Own):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), own=x)

    def aggregate(
        self, inputs: Tensor, index: Tensor, own: Tensor, dim_size: int | None = None
    ) -> Tensor:
        return own + utils.scatter(inputs, index, 0, dim_size=dim_size, reduce="max")


class Checkpointed(nn.Module):
    """Computed again in the backward, by torch, which says of ``edge_index`` that it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg_nn.GATConv(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return checkpoint(self.conv, 1 * x, edge_index, use_reentrant=True)


class TutorialGCN(Own):
    """As PyG's tutorial writes it."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        deg_inv_sqrt = utils.degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=self.lin(x), norm=norm)

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class TwoSided(Own):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        size = (x.size(0), x.size(0))
        return self.propagate(edge_index, x=(self.lin(x), x), size=size)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i * x_j).relu()


class ByOutDegree(Own):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = utils.remove_self_loops(edge_index)
        degree = utils.degree(edge_index[0], x.size(0), dtype=x.dtype)
        return self.propagate(edge_index, x=self.lin(x) / (1 + degree).unsqueeze(-1))


class Calls(nn.Module):
    """A function of rows and edges, around which there are parameters."""

    def __init__(self, function: Callable[[Calls, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.lin = function, nn.Linear(WIDTH, WIDTH)
        self.conv = pyg_nn.GraphConv(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.function(self, self.lin(x), edge_index)


def add(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_add(0, index, values)


def with_laplacian(m: Calls, x: Tensor, index: Tensor) -> Tensor:
    found = utils.get_laplacian(index, None, "sym", x.dtype, x.shape[0])
    return m.conv(x, *found)


def with_softmax(m: Calls, x: Tensor, index: Tensor) -> Tensor:
    score = (x[index[0]] * x[index[1]]).sum(-1)
    weight = utils.softmax(score, index[1], num_nodes=x.size(0))
    return utils.scatter(x[index[0]] * weight.unsqueeze(-1), index[1], 0, dim_size=x.size(0))


EXACT: dict[str, Callable[[], nn.Module]] = {
    "max": lambda: Plain(aggr="max"),
    "mul": lambda: Plain(aggr="mul"),
    "mean, std, var": lambda: Plain(aggr=["mean", "std", "var"]),
    "update": lambda: Updating(aggr="mean"),
    "aggregate": Aggregating,
    "softmax": Attending,
    "edge_updater": lambda: EdgeUpdating(aggr="sum"),
    "edge_updater, read": lambda: ReadsUpdates(aggr="sum"),
    "an index with a default": lambda: MayAskForIndex(aggr="sum"),
    "one weight, and a mask": lambda: OneWeight(aggr="mean"),
    "rows of edges in the layer": lambda: KeepsEdgeRows(aggr="sum"),
    "tensors read whole": lambda: GivesWhole(aggr="max"),
    "aggregate with own rows": AggregatesRows,
    "checkpoint": Checkpointed,
    "tutorial": TutorialGCN,
    "two sides": lambda: TwoSided(aggr="mean"),
    "out-degree": lambda: ByOutDegree(aggr="max"),
    "EdgeCNN": lambda: pyg_nn.EdgeCNN(WIDTH, WIDTH, 2, 4),
    "DeepGCNLayer": lambda: pyg_nn.DeepGCNLayer(
        pyg_nn.GENConv(WIDTH, WIDTH, norm="layer"), nn.LayerNorm(WIDTH), nn.ReLU()
    ),
    "JumpingKnowledge": lambda: pyg_nn.GCN(WIDTH, WIDTH, 3, 4, jk="lstm"),
    "Sequential": lambda: pyg_nn.Sequential(
        "x, edge_index", [(pyg_nn.GCNConv(WIDTH, WIDTH), "x, edge_index -> x"), nn.ReLU()]
    ),
    "decomposed": lambda: pyg_nn.GCNConv(WIDTH, WIDTH, decomposed_layers=2),
    "coalesce with own nodes": lambda: Calls(
        lambda m, x, e: m.conv(
            x, *utils.coalesce(e, x.new_ones(e.size(1)), x.size(0), sort_by_row=False)
        )
    ),
    "gcn_norm": lambda: Calls(
        lambda m, x, e: m.conv(x, *gcn_norm(e, None, x.size(0), False, True, dtype=x.dtype))
    ),
    "get_laplacian": lambda: Calls(with_laplacian),
    "softmax of scores": lambda: Calls(with_softmax),
    "add_remaining_self_loops": lambda: Calls(
        lambda m, x, e: m.conv(x, utils.add_remaining_self_loops(e, num_nodes=x.size(0))[0])
    ),
    "coalesce": lambda: Calls(lambda m, x, e: m.conv(x, utils.coalesce(e))),
    "dropout_edge": lambda: Calls(lambda m, x, e: m.conv(x, utils.dropout_edge(e, p=0.0)[0])),
    "a mask": lambda: Calls(lambda m, x, e: m.conv(x, e[:, e[0] != e[1]])),
    "flip": lambda: Calls(lambda m, x, e: m.conv(x, e.flip([0]))),
    "rows exchanged": lambda: Calls(lambda m, x, e: m.conv(x, e[[1, 0]])),
    "sum at sources": lambda: Calls(lambda m, x, e: add(x[e[1]], e[0], x)),
    "embedding": lambda: Calls(lambda m, x, e: add(F.embedding(e[0], x), e[1], x)),
    "gather": lambda: Calls(
        lambda m, x, e: add(x.gather(0, e[0].view(-1, 1).expand(-1, WIDTH)), e[1], x)
    ),
    "some columns": lambda: Calls(lambda m, x, e: add(x[e[0], :4], e[1], x[:, :4])),
    "one column": lambda: Calls(lambda m, x, e: x * add(x[e[0], 0], e[1], x[:, 0])[:, None]),
}
RAISE: dict[str, tuple[Callable[[Calls, Tensor, Tensor], Tensor], str]] = {
    "to_undirected": (lambda m, x, e: m.conv(x, utils.to_undirected(e)), "flip([0])"),
    "to_dense_adj": (
        lambda m, x, e: utils.to_dense_adj(e, max_num_nodes=x.size(0))[0] @ x,
        "use scatter or MessagePassing",
    ),
    "to_torch_csr_tensor": (
        lambda m, x, e: utils.to_torch_csr_tensor(e, size=(x.size(0),) * 2) @ x,
        "would make a matrix of this rank's edges",
    ),
    "contains_isolated_nodes": (
        lambda m, x, e: x * utils.contains_isolated_nodes(e, x.size(0)),
        "take a row first",
    ),
    "k_hop_subgraph": (lambda m, x, e: x * len(utils.k_hop_subgraph(0, 1, e)), "of all edges"),
    "negative_sampling": (
        lambda m, x, e: x * utils.negative_sampling(e, (x.size(0), x.size(0))).shape[0],
        "draw negative edges from the whole data object",
    ),
    "unbatch_edge_index": (
        lambda m, x, e: x * len(utils.unbatch_edge_index(e, e.new_zeros(x.size(0)))),
        "take the edges of each graph from the whole data object",
    ),
    "both directions": (lambda m, x, e: m.conv(x, torch.cat([e, e.flip([0])], 1)), "HeteroConv"),
    "maximum at sources": (
        lambda m, x, e: utils.scatter(x[e[1]], e[0], 0, dim_size=x.size(0), reduce="max"),
        "no exact result",
    ),
    "a change of numbers": (lambda m, x, e: m.conv(x, e.add_(1)), "cannot be changed"),
}


def compared(make: Callable[[], nn.Module], cut: str, mode: str, world_size: int) -> float:
    """The largest relative difference of outputs and gradients."""
    whole = whole_graph(torch.float64)
    torch.manual_seed(1)
    reference, x = make().double(), whole.x.clone().requires_grad_()
    expected = reference(x, whole.edge_index)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    (expected * weight).sum().backward()
    torch.manual_seed(1)
    layer = make().double()
    part = graphshard.pyg.shard(whole, owners(cut, world_size), mode=mode)
    mine = part.x.clone().requires_grad_()
    out = layer(mine, part.edge_index)
    (out * weight[part.n_id]).sum().backward()
    graphshard.gather_grads(layer)
    found = [gap(out.detach(), expected.detach(), part.n_id), gap(mine.grad, x.grad, part.n_id)]
    pairs = list(zip(layer.parameters(), reference.parameters(), strict=True))
    largest = max(float(b.grad.abs().max()) for _, b in pairs if b.grad is not None)
    for a, b in pairs:
        if b.grad is not None:
            difference = b.grad if a.grad is None else a.grad - b.grad
            found.append(float(difference.abs().max()) / largest)
    return max(found)


def correct_and_smooth(cut: str, mode: str, world_size: int) -> float:
    """Neither a layer nor a call: two methods of PyG's model."""
    whole = whole_graph(torch.float64)
    part = graphshard.pyg.shard(whole, owners(cut, world_size), mode=mode)
    found = []
    for autoscale in (True, False):
        post = pyg_nn.CorrectAndSmooth(2, 0.8, 2, 0.7, autoscale=autoscale, scale=1.5)
        results = []
        for data in (part, whole):
            mask, soft = data.x[:, 0] > 0, data.x[:, :3].softmax(1)
            soft = post.correct(soft, data.node_type[mask], mask, data.edge_index)
            results.append(post.smooth(soft, data.node_type[mask], mask, data.edge_index))
        found.append(gap(results[0], results[1], part.n_id))
    return max(found)


def on_a_rank(
    rank: int, world_size: int, cut: str, mode: str
) -> tuple[dict[str, float], dict[str, str]]:
    from graphshard.pyg import _propagate

    _propagate.FEWEST_EDGES = 16
    exact = {name: compared(make, cut, mode, world_size) for name, make in EXACT.items()}
    exact["CorrectAndSmooth"] = correct_and_smooth(cut, mode, world_size)
    raised = {}
    part = graphshard.pyg.shard(whole_graph(torch.float64), owners(cut, world_size), mode=mode)
    for name, (function, _) in RAISE.items():
        with pytest.raises(NotImplementedError) as caught:
            Calls(function).double()(part.x, part.edge_index)
        share_error(None)
        raised[name] = str(caught.value)
    return exact, raised


@pytest.mark.parametrize(
    ("world_size", "cut", "mode"),
    [
        (3, "random", "sequential"),
        pytest.param(2, "metis", "oneshot", marks=pytest.mark.exhaustive),
        pytest.param(4, "random", "oneshot", marks=pytest.mark.exhaustive),
    ],
)
def test_layers_of_users(world_size: int, cut: str, mode: str) -> None:
    for exact, raised in run_ranks(on_a_rank, world_size, cut, mode, timeout=180.0):
        assert {name: x for name, x in exact.items() if not x <= 1e-10} == {}
        for name, (_, text) in RAISE.items():
            assert text in raised[name], name
