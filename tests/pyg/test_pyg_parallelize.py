# SPDX-License-Identifier: Apache-2.0
"""parallelize: a program around a model that does not know of ranks. Uses 1, 2 and 3 gloo ranks.

The oracle is PyG in one process, on the same data. Every rank runs the program and compares.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch_geometric import utils
from torch_geometric.data import Data

import graphshard
import graphshard.pyg
from graphshard.comm import share_error
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from layer_zoo import NUM_NODES, WIDTH, needs_to_hetero, owners, whole_graph
from test_pyg_shard import ETYPES, SIZES, typed_graph, typed_models


class LinkModel(nn.Module):
    """As PyG's examples of link prediction: encode, then decode pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg_nn.GCNConv(WIDTH, 16), pyg_nn.GATConv(16, 8)

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    def decode(self, z: Tensor, edge_label_index: Tensor) -> Tensor:
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)


class Everything(nn.Module):
    """Values per edge, a tuple, a row per edge in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg_nn.GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=4)

    def forward(self, data: Data, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        out = self.conv(data.x, data.edge_index, data.edge_attr) * scale
        row, col = data.edge_index
        return out, {"pairs": out[row] - out[col]}


class OfData(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, data: Any) -> Any:
        return self.model(data.x_dict, data.edge_index_dict)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def link_prediction(data: Data, options: dict[str, Any] | None) -> list[Tensor]:
    torch.manual_seed(3)
    embedding = nn.Embedding(NUM_NODES, WIDTH).double()  # outside of the model
    model: Any = LinkModel().double()
    if options is not None:
        methods = ("encode", "decode")
        model = graphshard.pyg.parallelize(model, data, methods=methods, **options)
    pairs = torch.randint(0, NUM_NODES, (2, 30), generator=torch.Generator().manual_seed(4))
    for _ in range(2):  # gradients of the second are added to those of the first
        z = model.encode(data.x + embedding.weight, data.edge_index)
        scores = model.decode(z, pairs)
        penalty = sum(p.square().sum() for p in model.parameters())  # counts once
        (F.softplus(-scores).mean() + 0.1 * penalty + z.abs().mean()).backward()
    return [z.detach(), scores.detach(), embedding.weight.grad, *grads_of(model)]


def on_a_rank(rank: int, world_size: int, cut: str, mode: str) -> list[float]:
    data = whole_graph(torch.float64)
    options = {"part_method": owners(cut, world_size), "mode": mode}
    close(link_prediction(data, options), link_prediction(data, None))

    # Data objects, constants, results in tuples and dictionaries with rows per node and per edge.
    torch.manual_seed(5)
    model = Everything().double()
    expected = model(data, 2.0)
    model = graphshard.pyg.parallelize(model, data, **options)
    close(model(data, scale=2.0), expected)
    close(copy.deepcopy(model)(data, 2.0), expected)

    # Normalisation, an edge_index that is not the data object's, eval, autocast.
    torch.manual_seed(6)
    model = pyg_nn.GraphSAGE(WIDTH, 16, 2, 5, norm="batch_norm").double()
    reference = copy.deepcopy(model)
    model = graphshard.pyg.parallelize(model, data, **options)
    fewer = data.edge_index[:, ::2]
    out, expected = model(data.x, fewer), reference(data.x, fewer)
    close(out, expected)
    loss = F.cross_entropy(out[:20], data.node_type[:20])
    loss.backward()
    F.cross_entropy(expected[:20], data.node_type[:20]).backward()
    close(grads_of(model), grads_of(reference))
    close(model.state_dict(), reference.state_dict())
    model.eval(), reference.eval()
    close(model(data.x, edge_index=fewer), reference(data.x, fewer))
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model.float()(data.x.float(), fewer)
    reference.float()
    torch.testing.assert_close(narrow.float(), reference(data.x.float(), fewer), rtol=0.1, atol=0.1)

    # A learned row per node within the model.
    for name, make, arguments in (
        ("forward", lambda: pyg_nn.LINKX(NUM_NODES, WIDTH, 8, 3, 2), (data.x, data.edge_index)),
        ("get_embedding", lambda: pyg_nn.LightGCN(NUM_NODES, WIDTH, 2), (data.edge_index,)),
    ):
        torch.manual_seed(8)
        reference = make().double()
        expected = getattr(reference, name)(*arguments)
        model = graphshard.pyg.parallelize(
            copy.deepcopy(reference), data, methods=(name,), **options
        )
        out = getattr(model, name)(*arguments)
        close(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        close(grads_of(model), grads_of(reference))

    # Labels, nodes without features, and typed graphs, also before parameters have shapes.
    labels = data.node_type.clone()
    spread = pyg_nn.LabelPropagation(2, 0.7)
    expected = spread(labels, data.edge_index, mask=labels > 0)
    spread = graphshard.pyg.parallelize(spread, data, **options)
    found = spread(labels, data.edge_index, mask=labels > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    typed = typed_graph()
    cuts: dict[str, Any] = {"mode": mode}
    for make in typed_models().values():
        torch.manual_seed(7)
        reference = make().double()
        expected = reference(typed.x_dict, typed.edge_index_dict)
        model = graphshard.pyg.parallelize(copy.deepcopy(reference), typed, "random", **cuts)
        out = model(typed.x_dict, typed.edge_index_dict)
        close(out, expected)
        sum(value.square().sum() for value in out.values()).backward()
        sum(value.square().sum() for value in expected.values()).backward()
        close(grads_of(model), grads_of(reference))
    of_data = graphshard.pyg.parallelize(OfData(reference), typed, "random", **cuts)
    close(of_data(typed), expected)
    lazy: Any = pyg_nn.HeteroConv({t: pyg_nn.SAGEConv((-1, -1), 4) for t in ETYPES}).double()
    reference = copy.deepcopy(lazy)
    lazy = graphshard.pyg.parallelize(lazy, typed, "random", **cuts)
    out = lazy(typed.x_dict, typed.edge_index_dict)
    reference.load_state_dict(lazy.state_dict())
    close(out, reference(typed.x_dict, typed.edge_index_dict))
    share_error(None)

    # What the program draws outside of the model is the same everywhere, within it is not.
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    dropout = nn.Dropout(0.5)

    class Drops(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return dropout(x)

    drops = graphshard.pyg.parallelize(Drops(), data, **options)
    ones = torch.ones(NUM_NODES, 50, dtype=torch.float64)
    dropped = drops(ones, data.edge_index)
    if world_size > 1:
        assert len({tuple(row.tolist()) for row in dropped}) > NUM_NODES - 3
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


@pytest.mark.parametrize(
    ("world_size", "cut", "mode"),
    [
        (3, "empty", "oneshot"),
        pytest.param(2, "random", "sequential", marks=pytest.mark.exhaustive),
    ],
)
@needs_to_hetero
def test_a_program_of_one_process(world_size: int, cut: str, mode: str) -> None:
    first, *others = run_ranks(on_a_rank, world_size, cut, mode)
    assert all(drawn == first for drawn in others)


def compiled_before(rank: int, world_size: int) -> None:
    data = whole_graph(torch.float64)
    reference = pyg_nn.GCN(WIDTH, 8, 2, 3).double()
    expected = reference(data.x, data.edge_index)
    expected.square().sum().backward()
    model = torch.compile(copy.deepcopy(reference), backend="eager")
    model.zero_grad()
    model = graphshard.pyg.parallelize(model, data, part_method="random")
    out = model(data.x, data.edge_index)
    out.square().sum().backward()
    close(out, expected)
    close(grads_of(model), grads_of(reference))


@pytest.mark.exhaustive
def test_a_compiled_model() -> None:
    run_ranks(compiled_before, 2)


@needs_to_hetero
def test_one_process_without_a_group() -> None:
    on_a_rank(0, 1, "metis", "sequential")


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg_nn.GCNConv(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        return self.conv(x, edge_index).sum(0) if edge_index is not None else x


class AddsPooled(nn.Module):
    """What it gives has a row for each node, in which there is something of all nodes."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = pyg_nn.GCNConv(WIDTH, 4), pyg_nn.GraphNorm(4), pool

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.norm(self.conv(x, edge_index))
        return rows + self.pool(rows, torch.zeros(rows.shape[0], dtype=torch.int64))


POOLS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, batch: x.mean(0),
    lambda x, batch: x.std(),
    lambda x, batch: F.softmax(x, dim=0),
    lambda x, batch: torch.max(x, dim=-2, keepdim=True).values,
    lambda x, batch: pyg_nn.global_add_pool(x, None),
    lambda x, batch: pyg_nn.global_mean_pool(x, batch)[batch],
    lambda x, batch: pyg_nn.global_max_pool(x, batch)[batch],
    lambda x, batch: pyg_nn.aggr.MeanAggregation()(x, batch)[batch],
    lambda x, batch: utils.softmax(x, batch),
]


def refusals_of_pools(rank: int, world_size: int) -> list[str]:
    data, found = whole_graph(torch.float32), []
    for pool in POOLS:
        model = graphshard.pyg.parallelize(AddsPooled(pool), data, "random")
        with pytest.raises(NotImplementedError) as caught:
            model(data.x, data.edge_index)
        share_error(None)
        found.append(str(caught.value))
    within_rows = AddsPooled(lambda x, batch: x.mean(1, keepdim=True) + x.sum(-1, keepdim=True))
    graphshard.pyg.parallelize(within_rows, data, "random")(
        data.x, data.edge_index
    ).sum().backward()
    return found


def test_what_combines_the_rows_of_one_rank_is_refused() -> None:
    first, second = run_ranks(refusals_of_pools, 2)
    assert first == second
    assert all("over the rows of a tensor within a call of a parallel model" in t for t in first)


def wrong(rank: int, world_size: int) -> list[str]:
    data, found = whole_graph(torch.float32), []
    other = whole_graph(torch.float32)
    other.x = other.x + 1

    def refused(kind: type[Exception], function: Any) -> None:
        with pytest.raises(kind) as caught:
            function()
        share_error(None)
        found.append(str(caught.value))

    refused(ValueError, lambda: graphshard.pyg.parallelize(Pooled(), other if rank else data))
    refused(TypeError, lambda: graphshard.pyg.parallelize(Pooled(), None))  # type: ignore[arg-type]
    model = graphshard.pyg.parallelize(Pooled(), data, "random")
    refused(NotImplementedError, lambda: model(data.x, data.edge_index))
    gone = whole_graph(torch.float32)
    without_data: Any = graphshard.pyg.parallelize(Pooled(), gone, "random")
    del gone
    refused(ValueError, lambda: without_data(data.x))
    refused(ValueError, lambda: model(data.x, data.edge_index.float().to_sparse()))
    refused(ValueError, lambda: model(data.x, data.edge_index + 1000))
    sharded = graphshard.pyg.shard(data, "random").edge_index
    refused(ValueError, lambda: model(data.x, sharded))
    refused(ValueError, lambda: graphshard.pyg.parallelize(model, data))
    refused(AttributeError, lambda: graphshard.pyg.parallelize(Pooled(), data, methods=("encode",)))
    without = graphshard.pyg.parallelize(pyg_nn.RGCNConv(9, 4, 3), data, "random")
    refused(ValueError, lambda: without(None, data.edge_index, data.edge_type))
    return found


def test_wrong_input_is_refused_on_every_rank() -> None:
    first, second = run_ranks(wrong, 2)
    assert first == second
    for text, part in zip(
        first,
        (
            "seed what makes it",
            "takes PyG's Data or HeteroData",
            "compute pooled results and losses from the rows",
            "needs edges among its arguments (got x, edge_index)",
            "is a sparse matrix",
            "must be nodes, in [0, 45) (got 10",
            "takes the whole graph, and shards it",
            "is parallel already",
            "has no attribute 'encode'",
            "needs in_channels for the nodes of all ranks, 45 at least (got 9)",
        ),
        strict=True,
    ):
        assert part in text


def test_typed_sizes_are_those_of_the_graph() -> None:
    assert set(SIZES) == set(typed_graph().node_types)
