# SPDX-License-Identifier: Apache-2.0
"""Programs that hand a model its graph in other ways than edge_index: adj_t, or not at all.

The oracle is PyG in one process, on the same matrix. Uses no process group, and 2 and 3 gloo ranks,
of which the last has no node.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
import torch_geometric.transforms as T
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import graphshard
import graphshard.pyg
from graphshard.comm import share_error
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from layer_zoo import needs_to_hetero

NUM_NODES, WIDTH = 31, 6


def without_parallel_edges(loops: bool = False) -> Data:
    g = torch.Generator().manual_seed(0)
    ends = torch.randint(0, NUM_NODES, (2, 160), generator=g)
    ends = ends[:, ends[0] != ends[1]].unique(dim=1)
    if loops:
        ends = torch.cat([ends, torch.tensor([[3, 5], [3, 5]])], 1)
    data = Data(x=torch.randn(NUM_NODES, WIDTH, generator=g, dtype=torch.float64), edge_index=ends)
    data.edge_weight = torch.rand(ends.shape[1], generator=g, dtype=torch.float64) + 0.5
    data.train_mask = torch.arange(NUM_NODES) % 2 == 0
    return data


def owners(world_size: int) -> Tensor:
    return torch.arange(NUM_NODES) * 7 % 5 % max(1, world_size - 1)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


class TwoLayers(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.first, self.second = make(WIDTH, 8), make(8, 3)

    def forward(self, x: Tensor, adj_t: Any) -> Tensor:
        return self.second(self.first(x, adj_t).relu(), adj_t)


class SumGraphConv(pyg_nn.GraphConv):
    """A class of its own, as the next one; see there."""


class OwnGCNConv(pyg_nn.GCNConv):
    """Of a user's module."""


class MeanSAGEConv(pyg_nn.SAGEConv):
    """A class of its own: PyG decides once per class whether ``propagate`` takes sparse matrices.

    It does so by the first layer made; one with another aggregation, such as a median, does not.
    """


LAYERS: dict[str, Any] = {
    "GCN": pyg_nn.GCNConv,
    "GraphConv": SumGraphConv,
    "SAGE": MeanSAGEConv,
    "GAT": pyg_nn.GATConv,
    "SG": lambda a, b: pyg_nn.SGConv(a, b, K=2),
}
WEIGHTED = ("GCN", "GraphConv", "SG")


def sparse_data(attr: str | None, loops: bool = False) -> Data:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the format beta
        data: Data = T.ToSparseTensor(attr=attr)(without_parallel_edges(loops))
    if attr is None:  # PyG makes ones of another dtype than the features
        data.adj_t = data.adj_t.double()
    assert "edge_index" not in data
    return data


def check_matrices(rank: int, world_size: int, mode: str) -> None:
    options: dict[str, Any] = {"part_method": owners(world_size), "mode": mode}
    for attr in (None, "edge_weight"):
        whole = sparse_data(attr)
        part = graphshard.pyg.shard(whole, **options).to("cpu")  # a copy of edges with their values
        for name in LAYERS if attr is None else WEIGHTED:
            torch.manual_seed(1)
            reference = TwoLayers(LAYERS[name]).double()
            sharded, parallel = copy.deepcopy(reference), copy.deepcopy(reference)
            expected = reference(whole.x, whole.adj_t)
            expected[whole.train_mask].square().sum().backward()
            out = sharded(part.x, part.adj_t)
            close(out, expected[part.n_id])
            out[part.train_mask].square().sum().backward()
            graphshard.gather_grads(sharded)
            close(grads_of(sharded), grads_of(reference))
            parallel = graphshard.pyg.parallelize(parallel, whole, **options)
            out = parallel(whole.x, whole.adj_t)
            close(out, expected)
            out[whole.train_mask].square().sum().backward()
            close(grads_of(parallel), grads_of(reference))
    with pytest.raises(NotImplementedError, match=r"SAGEConv takes no edge_weight"):
        pyg_nn.SAGEConv(WIDTH, 3).double()(part.x, part.adj_t)
    loader = graphshard.pyg.NeighborLoader(part, [-1], batch_size=4)
    for batch in loader:
        ends = without_parallel_edges().edge_index
        by_destination = ends[:, (ends[1] * NUM_NODES + ends[0]).argsort()]
        assert torch.equal(batch.n_id[batch.edge_index], by_destination[:, batch.e_id])
    with_loops = sparse_data("edge_weight", loops=True)
    part = graphshard.pyg.shard(with_loops, **options)
    for normalized in (
        lambda: pyg_nn.GCNConv(WIDTH, 3).double()(part.x, part.adj_t),
        lambda: OwnGCNConv(WIDTH, 3).double()(part.x, part.adj_t.clone()),
        lambda: gcn_norm(part.adj_t),
    ):
        with pytest.raises(NotImplementedError, match="have RemoveSelfLoops before ToSparseTenso"):
            normalized()
    index, norm = gcn_norm(part.adj_t, add_self_loops=False)
    edges = without_parallel_edges(loops=True)
    ends, whole_norm = gcn_norm(edges.edge_index, edges.edge_weight, add_self_loops=False)
    sums = torch.zeros(part.num_nodes, dtype=norm.dtype).index_add(0, index[1], norm)
    whole_sums = torch.zeros(NUM_NODES, dtype=norm.dtype).index_add(0, ends[1], whole_norm)
    close(sums, whole_sums[part.n_id])
    layer = SumGraphConv(WIDTH, 3).double()
    close(layer(part.x, part.adj_t), layer(with_loops.x, with_loops.adj_t)[part.n_id])
    share_error(None)


def check_typed_matrices(rank: int, world_size: int, mode: str) -> None:
    g = torch.Generator().manual_seed(3)
    whole = HeteroData()
    whole["user"].x = torch.randn(7, 4, generator=g, dtype=torch.float64)
    whole["item"].x = torch.randn(NUM_NODES, 4, generator=g, dtype=torch.float64)
    buys = torch.randint(0, 7 * NUM_NODES, (40,), generator=g).unique()
    ends = torch.stack([buys % 7, buys // 7])
    whole["user", "buys", "item"].edge_index = ends
    whole["item", "rev", "user"].edge_index = ends.flip(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = T.ToSparseTensor()(whole)
    for store in whole.edge_stores:
        store.adj_t = store.adj_t.double()
    convs = {t: MeanSAGEConv((4, 4), 3) for t in whole.edge_types}
    reference = pyg_nn.HeteroConv(convs).double()
    expected = reference(whole.x_dict, whole.adj_t_dict)
    cuts = {"user": torch.arange(7) % max(1, world_size - 1), "item": owners(world_size)}
    part = graphshard.pyg.shard(whole, cuts, mode=mode)
    out = reference(part.x_dict, part.adj_t_dict)
    for ntype, rows in out.items():
        close(rows, expected[ntype][part[ntype].n_id])
    model = graphshard.pyg.parallelize(copy.deepcopy(reference), whole, cuts, mode=mode)
    close(model(whole.x_dict, whole.adj_t_dict), expected)


class OfGlobals(nn.Module):
    """As PyG's examples for ARMA, AGNN, SGC and TAG write it, with ``data`` of their module."""

    def __init__(self, data: Any, encodes: bool = False) -> None:
        super().__init__()
        self.data, self.encodes = data, encodes
        self.conv1, self.conv2 = pyg_nn.GCNConv(WIDTH, 8), pyg_nn.GATConv(8, 3)

    def encode(self) -> Tensor:
        x, edge_index = self.data.x, self.data.edge_index
        return self.conv1(x, edge_index, self.data.edge_weight).relu()

    def forward(self) -> Tensor:
        return self.conv2(self.encode(), self.data.edge_index)


class KeepsEdges(nn.Module):
    """Edges that are not among its arguments."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.edges, self.conv = edges, pyg_nn.GCNConv(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, self.edges)


def check_globals(rank: int, world_size: int, mode: str) -> None:
    options: dict[str, Any] = {"part_method": owners(world_size), "mode": mode}
    for methods in (("forward",), ("forward", "encode")):
        data = without_parallel_edges()
        data.names = [str(i) for i in range(NUM_NODES)]
        data.train_idx = torch.tensor([5, 2, 30])  # which the model does not read
        before = {name: data[name] for name in data.keys()}  # noqa: SIM118
        torch.manual_seed(2)
        reference = OfGlobals(data).double()
        expected = reference()
        expected[data.train_mask].square().mean().backward()
        torch.manual_seed(2)
        model = graphshard.pyg.parallelize(
            OfGlobals(data).double(), data, methods=methods, **options
        )
        out: Any = model()
        close(out, expected)
        out[data.train_mask].square().mean().backward()
        close(grads_of(model), grads_of(reference))
        assert set(data.keys()) == set(before)
        assert all(data[name] is value for name, value in before.items())
        if "encode" in methods:
            encoded: Any = model.encode()
            close(encoded, reference.encode())
        data.x = data.x * 2  # what a call reads is what is there then
        close(model(), reference())
    torch.manual_seed(4)
    reference = KeepsEdges(data.edge_index.clone()).double()
    expected = reference(data.x)
    model = graphshard.pyg.parallelize(copy.deepcopy(reference), data, **options)
    close(model(data.x), expected)
    model = graphshard.pyg.parallelize(KeepsEdges(data.edge_index[:, 1:]).double(), data, **options)
    with pytest.raises(NotImplementedError, match="pass them to the model"):
        model(data.x)
    share_error(None)


class Remembers(nn.Module):
    """As VGAE does: what a loss needs is kept by ``encode``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg_nn.GCNConv(WIDTH, 8), pyg_nn.GCNConv(8, 3)
        self.mean: Any = None

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        before = 0 if self.mean is None else self.mean.detach()
        self.mean = self.conv1(x, edge_index)
        return self.conv2(self.mean, edge_index) + torch.as_tensor(before).sum(-1, keepdim=True)

    def loss(self) -> Tensor:
        return self.mean.square().mean()


def check_state_of_models(rank: int, world_size: int, mode: str) -> None:
    options: dict[str, Any] = {"part_method": owners(world_size), "mode": mode}
    data = without_parallel_edges()
    torch.manual_seed(5)
    reference = Remembers().double()
    model: Any = copy.deepcopy(reference)
    model = graphshard.pyg.parallelize(model, data, methods=("encode",), **options)
    for _ in range(2):
        found = model.encode(data.x, data.edge_index)
        expected = reference.encode(data.x, data.edge_index)
        close(found, expected)
        close(model.mean, reference.mean)
        (found.square().mean() + model.loss()).backward()
        (expected.square().mean() + reference.loss()).backward()
        close(grads_of(model), grads_of(reference))

    # Nodes by their numbers: a mask is one, an order of nodes is none.
    labels = torch.arange(NUM_NODES) % 3
    chosen = torch.tensor([30, 2, 11, 5])
    spread = pyg_nn.LabelPropagation(2, 0.7)
    expected = spread(labels, data.edge_index, mask=chosen)
    parallel: Any = graphshard.pyg.parallelize(copy.deepcopy(spread), data, **options)
    found = parallel(labels, data.edge_index, mask=chosen)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # PyG makes float32 of labels

    class Chooses(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, train_idx: Tensor) -> Tensor:
            return x[train_idx]

    choosing: Any = graphshard.pyg.parallelize(Chooses(), data, **options)
    with pytest.raises(NotImplementedError, match="train_idx of shape .4,. has numbers of nodes"):
        choosing(data.x, data.edge_index, chosen)

    # Parameters that get their shapes in the first call are those that one process draws.
    torch.manual_seed(6)
    lazy: Any = pyg_nn.SAGEConv((-1, -1), 4).double()
    expected = lazy(data.x, data.edge_index)
    drawn = torch.rand(3)
    torch.manual_seed(6)
    lazy = graphshard.pyg.parallelize(pyg_nn.SAGEConv((-1, -1), 4).double(), data, **options)
    found = lazy(data.x, data.edge_index)
    close(found, expected)
    close(torch.rand(3), drawn)
    found.sum().backward()
    share_error(None)


def check_bases(rank: int, world_size: int, mode: str) -> None:
    g = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["a"].x, data["b"].x = (
        torch.randn(7, 4, generator=g),
        torch.randn(NUM_NODES, 4, generator=g),
    )
    ends = torch.stack([torch.randint(0, n, (40,), generator=g) for n in (7, NUM_NODES)])
    data["a", "to", "b"].edge_index = ends
    data["b", "rev", "a"].edge_index = ends.flip(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg_nn.SAGEConv((4, 4), 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    cuts = {"a": torch.arange(7) % max(1, world_size - 1), "b": owners(world_size)}
    part = graphshard.pyg.shard(data, cuts, mode=mode)
    model = pyg_nn.to_hetero_with_bases(Net(), data.metadata(), 2, in_channels={"x": 4})
    parallel = graphshard.pyg.parallelize(copy.deepcopy(model), data, cuts, mode=mode)
    for call in (
        lambda: model(part.x_dict, part.edge_index_dict),
        lambda: parallel(data.x_dict, data.edge_index_dict),
    ):
        with pytest.raises(NotImplementedError, match="use to_hetero or HeteroConv"):
            call()
        share_error(None)


class TypedLinks(nn.Module):
    """As PyG's examples for MovieLens: the model decodes pairs of two types."""

    def __init__(self) -> None:
        super().__init__()
        types = [("user", "buys", "item"), ("item", "rev", "user")]
        self.conv = pyg_nn.HeteroConv({t: pyg_nn.SAGEConv((4, 4), 3) for t in types})

    def forward(self, x_dict: Any, edge_index_dict: Any, edge_label_index: Tensor) -> Tensor:
        z = self.conv(x_dict, edge_index_dict)
        row, col = edge_label_index
        return (z["user"][row] * z["item"][col]).sum(-1)


def check_typed_links(rank: int, world_size: int, mode: str) -> None:
    g = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["user"].x = torch.randn(7, 4, generator=g, dtype=torch.float64)
    data["item"].x = torch.randn(NUM_NODES, 4, generator=g, dtype=torch.float64)
    ends = torch.stack([torch.randint(0, n, (40,), generator=g) for n in (7, NUM_NODES)])
    data["user", "buys", "item"].edge_index = ends
    data["item", "rev", "user"].edge_index = ends.flip(0)
    pairs = ends[:, ::3].clone()
    data["user", "buys", "item"].edge_label_index = pairs
    reference = TypedLinks().double()
    expected = reference(data.x_dict, data.edge_index_dict, pairs)
    cuts = {"user": torch.arange(7) % max(1, world_size - 1), "item": owners(world_size)}
    model = graphshard.pyg.parallelize(copy.deepcopy(reference), data, cuts, mode=mode)
    for chosen in (pairs, pairs[:, 2:]):
        close(model(data.x_dict, data.edge_index_dict, chosen), expected[-chosen.shape[1] :])
    model(data.x_dict, data.edge_index_dict, pairs).square().sum().backward()
    expected.square().sum().backward()
    close(grads_of(model), grads_of(reference))


@pytest.mark.parametrize(
    ("world_size", "mode"),
    [
        (1, "oneshot"),
        pytest.param(2, "sequential", marks=pytest.mark.exhaustive),
        (3, "oneshot"),
    ],
)
@pytest.mark.parametrize(
    "check",
    [
        check_matrices,
        check_typed_matrices,
        check_globals,
        check_state_of_models,
        check_typed_links,
        pytest.param(check_bases, marks=needs_to_hetero),
    ],
    ids=lambda check: check.__name__,
)
def test_a_program(check: Any, world_size: int, mode: str) -> None:
    if world_size == 1:
        check(0, 1, mode)
    else:
        run_ranks(check, world_size, mode)
