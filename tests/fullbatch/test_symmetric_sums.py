# SPDX-License-Identifier: Apache-2.0
"""Layers on symmetric graphs, which send gradients of their results. 1, 2, 3 and 5 gloo ranks.

The oracles are dense algebra in float64 and scipy.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from shards import own_nodes
from torch import Tensor, nn

import graphshard as gs
from graphshard import comm
from graphshard.fullbatch import _graph_shard_manager
from graphshard.nn import GATConv, GraphConv, SAGEConv
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks

NUM_NODES, WIDTH, CLASSES = 1200, 48, 5
Manager = _graph_shard_manager.GraphShardManager
LAYERS = ("mean", "both", "right", "left", "none")


def symmetric_graph(is_symmetric: bool = True) -> gs.Graph:
    """Parallel edges, self loops, a hub, isolated nodes; perhaps one edge without its reverse."""
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, NUM_NODES - 9, (5000,), generator=generator)
    dst = torch.randint(0, NUM_NODES - 9, (5000,), generator=generator)
    src = torch.cat([src, torch.arange(300), torch.tensor([4, 4])])
    dst = torch.cat([dst, torch.full((300,), 7), torch.tensor([9, 9])])
    both = torch.cat([src, dst]), torch.cat([dst, src])
    loops = torch.arange(5)
    src, dst = torch.cat([both[0], loops]), torch.cat([both[1], loops])
    if not is_symmetric:
        src, dst = src[1:], dst[1:]
    return gs.graph((src, dst), num_nodes=NUM_NODES)


def layers_of(kind: str, dtype: torch.dtype) -> nn.ModuleList:
    """As wide as the input, narrower, and wider than it; with a ReLU inside, and without."""
    torch.manual_seed(1)
    widths = [WIDTH, WIDTH, WIDTH, WIDTH // 2, WIDTH, CLASSES]
    acts = [F.relu, None, F.relu, None, None]
    pairs = list(zip(widths, widths[1:], acts, strict=False))
    made: list[nn.Module] = []
    for a, b, act in pairs:
        if kind == "mean":
            made.append(SAGEConv(a, b, "mean", activation=act))
        else:
            made.append(GraphConv(a, b, kind, activation=act, allow_zero_in_degree=True))
    for layer in made:
        for p in layer.parameters():
            p.data += 0.1 * torch.randn(p.shape)  # biases, too
    return nn.ModuleList(made).to(dtype)


def network(layers: nn.ModuleList, call: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        x = call(layer, x)
        x = F.relu(x) if i == 1 else x
    return x


def dense_layer(kind: str, matrix: Tensor, layer: Any, x: Tensor) -> Tensor:
    degrees = matrix.sum(1, keepdim=True).clamp(min=1)
    if kind == "mean":
        y = F.linear((matrix @ x) / degrees, layer.fc_neigh.weight) + layer.fc_self(x)
        return y if layer.activation is None else layer.activation(y)
    power = -0.5 if kind == "both" else -1.0
    x = x * degrees**power if kind in ("left", "both") else x
    y = matrix @ x
    y = y * degrees**power if kind in ("right", "both") else y
    y = y @ layer.weight + layer.bias
    return y if layer._activation is None else layer._activation(y)


def dense_of(graph: gs.Graph) -> Tensor:
    src, dst = (ids.long() for ids in graph.edges())
    out = torch.zeros(NUM_NODES, NUM_NODES, dtype=torch.float64)
    return out.index_put((dst, src), torch.ones(src.numel()).double(), accumulate=True)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_NODES, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (NUM_NODES,), generator=generator)


def loss_of(out: Tensor, y: Tensor, train: Tensor) -> Tensor:
    return F.cross_entropy(out[train], y[train], reduction="sum") / 300


def expected_of(kind: str, graph: gs.Graph, penalty: bool) -> tuple[Tensor, list[Tensor]]:
    """Loss, and gradients of the input and of all parameters."""
    layers, matrix = layers_of(kind, torch.float64), dense_of(graph)
    x, y = inputs()
    x.requires_grad_()
    out = network(layers, lambda layer, h: dense_layer(kind, matrix, layer, h), x)
    loss = loss_of(out, y, torch.arange(300))
    if penalty:
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + (grad**2).sum() * 100
    loss.backward()
    return loss.detach(), [x.grad, *(p.grad for p in layers.parameters())]


def counting() -> list[bool]:
    """Whether each layer sends gradients of its result, from here on."""
    said: list[bool] = []
    original = Manager.__dict__["sums_of_gradients"]

    def recording(self: Any, rows: Tensor, *, is_wanted: bool) -> Any:
        found = original(self, rows, is_wanted=is_wanted)
        said.append(found is not None)
        return found

    Manager.sums_of_gradients = recording  # type: ignore[method-assign]
    said_by[:] = [original]
    return said


said_by: list[Any] = []


def on_ranks(
    rank: int, world_size: int, parts: str, kind: str, mode: str, dtype: torch.dtype, penalty: bool
) -> tuple[Tensor, list[Tensor], Tensor, list[bool]]:
    """The same on one rank: loss, gradients of own inputs and of parameters, own nodes."""
    data = gs.load_dgl_partition_data(parts, rank)
    graph = gs.construct_full_graph(data, mode=mode)
    (own,) = own_nodes(data).values()
    said = counting()
    try:
        layers, (x, y) = layers_of(kind, dtype), inputs()
        x = x[own].to(dtype).requires_grad_()
        out = network(layers, lambda layer, h: layer(graph, h), x)
        loss = loss_of(out, y[own], own < 300)
        if penalty:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + (grad**2).sum() * 100
        loss.backward()
        gs.gather_grads(layers)
    finally:
        Manager.sums_of_gradients = said_by[0]  # type: ignore[method-assign]
    total = comm.all_reduce(loss.detach())
    return total, [x.grad, *(p.grad for p in layers.parameters())], own, said


def parts_of(folder: Path, graph: gs.Graph, num_parts: int, empty: bool = False) -> str:
    generator = torch.Generator().manual_seed(2)
    assigned = torch.randint(0, num_parts - empty, (NUM_NODES,), generator=generator)
    partition_graph(graph, "g", num_parts, str(folder), part_method=assigned, quiet=True)
    return str(folder / "g.json")


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    if found.numel():
        gap = (found.double() - expected).abs().max()
        assert float(gap) <= bound * float(expected.abs().max())


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_layers(tmp_path: Path, num_ranks: int, kind: str, mode: str) -> None:
    graph = symmetric_graph()
    loss, grads = expected_of(kind, graph, penalty=False)
    parts = parts_of(tmp_path, graph, num_ranks, empty=num_ranks == 5)
    for total, found, own, said in run_ranks(
        on_ranks, num_ranks, parts, kind, mode, torch.float64, False
    ):
        close(total, loss, 1e-12)
        close(found[0], grads[0][own], 1e-11)
        for a, b in zip(found[1:], grads[1:], strict=True):
            close(a, b, 1e-11)
        # All but the one that is wider than its input, which is not asked; that of 5 columns has
        # too little to send where there are few rows.
        assert said == [num_ranks > 1] * 3 + [False] if num_ranks < 5 else said[:3] == [True] * 3


@pytest.mark.parametrize("kind", ["mean", "both"])
def test_bfloat16(tmp_path: Path, kind: str) -> None:
    graph = symmetric_graph()
    loss, grads = expected_of(kind, graph, penalty=False)
    parts = parts_of(tmp_path, graph, 3)
    for total, found, own, said in run_ranks(
        on_ranks, 3, parts, kind, "oneshot", torch.bfloat16, False
    ):
        assert said[0]
        close(total, loss, 0.02)
        close(found[0], grads[0][own], 0.2)
        for a, b in zip(found[1:], grads[1:], strict=True):
            close(a, b, 0.1)


@pytest.mark.parametrize("kind", ["mean", pytest.param("both", marks=pytest.mark.exhaustive)])
def test_gradients_of_gradients(tmp_path: Path, kind: str) -> None:
    graph = symmetric_graph()
    loss, grads = expected_of(kind, graph, penalty=True)
    parts = parts_of(tmp_path, graph, 2)
    for total, found, own, said in run_ranks(
        on_ranks, 2, parts, kind, "oneshot", torch.float64, True
    ):
        assert said[0]
        close(total, loss, 1e-12)
        close(found[0], grads[0][own], 1e-10)
        for a, b in zip(found[1:], grads[1:], strict=True):
            close(a, b, 1e-10)


def test_a_graph_that_is_not_symmetric(tmp_path: Path) -> None:
    graph = symmetric_graph(is_symmetric=False)
    _, grads = expected_of("mean", graph, penalty=False)
    parts = parts_of(tmp_path, graph, 2)
    for _, found, own, said in run_ranks(
        on_ranks, 2, parts, "mean", "oneshot", torch.float64, False
    ):
        assert said
        assert not any(said)
        close(found[0], grads[0][own], 1e-11)


def symmetries(rank: int, world_size: int, parts: list[str]) -> list[bool]:
    found = []
    for path in parts:
        graph = gs.construct_full_graph(gs.load_dgl_partition_data(path, rank))
        found.append(graph._structure.is_symmetric(("_N", "_E", "_N")))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_whether_a_graph_is_symmetric(tmp_path: Path, num_ranks: int) -> None:
    graphs = [symmetric_graph(), symmetric_graph(is_symmetric=False)]
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        src = torch.randint(0, NUM_NODES, (3000,), generator=generator)
        dst = (
            src.roll(1) if seed == 3 else torch.randint(0, NUM_NODES, (3000,), generator=generator)
        )
        if seed % 2:
            src, dst = torch.cat([src, dst]), torch.cat([dst, src])
        if seed == 1:  # one edge is there twice, and its reverse once
            src, dst = torch.cat([src, src[:1]]), torch.cat([dst, dst[:1]])
        graphs.append(gs.graph((src, dst), num_nodes=NUM_NODES))
    expected = []
    for graph in graphs:
        src, dst = graph.edges()
        ones = torch.ones(src.numel()).numpy()
        matrix = scipy.sparse.coo_matrix((ones, (dst.numpy(), src.numpy())), (NUM_NODES,) * 2)
        expected.append((matrix.tocsr() != matrix.T.tocsr()).nnz == 0)
    assert sorted(set(expected)) == [False, True]
    folders = [tmp_path / str(i) for i in range(len(graphs))]
    parts = [parts_of(f, g, num_ranks) for f, g in zip(folders, graphs, strict=True)]
    assert run_ranks(symmetries, num_ranks, parts) == [expected] * num_ranks


def released(rank: int, world_size: int, parts: str) -> tuple[bool, bool]:
    """A result that is stored on its graph, and changed in place."""
    graph = gs.construct_full_graph(gs.load_dgl_partition_data(parts, rank), mode="oneshot")
    said = counting()
    layer = layers_of("mean", torch.float64)[1]
    x = torch.randn(graph.num_nodes(), WIDTH, dtype=torch.float64, requires_grad=True)
    gc.disable()
    try:
        graph.ndata["y"] = layer(graph, x)
        plain = layer(graph, x)
        changed = F.relu(layer(graph, x), inplace=True)
        a = torch.autograd.grad((plain.relu() ** 2).sum(), x)[0]
        b = torch.autograd.grad((changed**2).sum(), x)[0]
        last = weakref.ref(graph)
        del graph, plain, changed
        is_gone = last() is None
    finally:
        gc.enable()
        Manager.sums_of_gradients = said_by[0]  # type: ignore[method-assign]
    assert all(said)
    return torch.equal(a, b), is_gone


def test_a_result_is_changed_in_place_and_a_graph_is_released(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, symmetric_graph(), 2)
    assert run_ranks(released, 2, parts) == [(True, True)] * 2


def disagreeing(rank: int, world_size: int, parts: str, kind: str, how: str) -> str:
    graph = gs.construct_full_graph(gs.load_dgl_partition_data(parts, rank), mode="oneshot")
    layer = layers_of("mean", torch.float64)[1]
    if kind == "gat":
        layer = GATConv(WIDTH, 12, 4, allow_zero_in_degree=True).double()
    x = torch.randn(graph.num_nodes(), WIDTH, dtype=torch.float64)
    x.requires_grad_(rank == 0 or how == "mode")
    with torch.set_grad_enabled(rank == 0 or how == "tensor"):
        try:
            layer(graph, x)
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["mean", "gat"])
@pytest.mark.parametrize("how", ["tensor", "mode"])
def test_ranks_disagree_on_gradients(tmp_path: Path, kind: str, how: str) -> None:
    parts = parts_of(tmp_path, symmetric_graph(), 2)
    for said in run_ranks(disagreeing, 2, parts, kind, how):
        assert "must be the same on all ranks" in said
        assert "rank 0 has 'a layer: plan 0 float64[rows, 48] with gradient', rank 1 has" in said
