# SPDX-License-Identifier: Apache-2.0
"""shard: typed graphs, folders, wrong input, and what users put around a model.

The oracle is PyG in one process. Uses 1, 2 and 3 gloo ranks; one start for many checks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import to_hetero

import graphshard
import graphshard.pyg
from graphshard.comm import share_error
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from layer_zoo import gap, needs_to_hetero, owners, whole_graph

WIDTH = 8
ETYPES = [("a", "r1", "b"), ("b", "r2", "a"), ("a", "r3", "a")]
SIZES = {"a": 30, "b": 25}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = pyg_nn.SAGEConv(WIDTH, 16)
        self.second = pyg_nn.GATv2Conv(16, 4, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def typed_models() -> dict[str, Any]:
    metadata = (list(SIZES), ETYPES)
    return {
        "HeteroConv": lambda: pyg_nn.HeteroConv(
            {
                ETYPES[0]: pyg_nn.GATConv((WIDTH, WIDTH), 4, add_self_loops=False),
                ETYPES[1]: pyg_nn.SAGEConv(WIDTH, 4),
                ETYPES[2]: pyg_nn.GCNConv(WIDTH, 4),
            }
        ),
        "HGTConv": lambda: pyg_nn.HGTConv(WIDTH, 8, metadata, heads=2),
        "to_hetero": lambda: to_hetero(_Net(), metadata),
        "HANConv": lambda: pyg_nn.HANConv(WIDTH, 8, metadata, heads=2),
    }


def typed_graph() -> HeteroData:
    g = torch.Generator().manual_seed(0)
    data = HeteroData()
    for ntype, count in SIZES.items():
        data[ntype].x = torch.randn(count, WIDTH, generator=g, dtype=torch.float64)
    for etype in ETYPES:
        ends = [torch.randint(0, SIZES[t], (120,), generator=g) for t in (etype[0], etype[2])]
        data[etype].edge_index = torch.stack(ends)
        data[etype].edge_attr = torch.randn(120, 2, generator=g)
    return data


def compare_typed(rank: int, world_size: int, cut: str, mode: str) -> dict[str, float]:
    data, found = typed_graph(), {}
    g = torch.Generator().manual_seed(world_size)
    used = max(world_size - 1, 1) if cut == "empty" else world_size
    method: Any = {t: torch.randint(0, used, (n,), generator=g) for t, n in SIZES.items()}
    part = graphshard.pyg.shard(data, "metis" if cut == "metis" else method, mode=mode)
    for etype in ETYPES:
        chosen = data[etype].edge_attr[part[etype].e_id]
        torch.testing.assert_close(part[etype].edge_attr, chosen, rtol=0, atol=0)
    for name, make in typed_models().items():
        torch.manual_seed(1)
        reference = make().double()
        torch.manual_seed(1)
        model = make().double()
        x = {t: data[t].x.clone().requires_grad_() for t in SIZES}
        expected = reference(x, data.edge_index_dict)
        sum(out.square().sum() for out in expected.values()).backward()
        mine = {t: part[t].x.clone().requires_grad_() for t in SIZES}
        out = model(mine, part.edge_index_dict)
        sum(value.square().sum() for value in out.values()).backward()
        graphshard.gather_grads(model)
        gaps = [gap(out[t].detach(), expected[t].detach(), part[t].n_id) for t in out]
        gaps += [gap(mine[t].grad, x[t].grad, part[t].n_id) for t in SIZES]
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            if b.grad is not None:
                gaps.append(gap(a.grad, b.grad))
        found[name] = max(gaps)
    return found


@pytest.mark.parametrize(
    ("world_size", "cut", "mode"),
    [(3, "random", "oneshot"), (2, "metis", "sequential")],
)
@needs_to_hetero
def test_typed_graphs(world_size: int, cut: str, mode: str) -> None:
    for found in run_ranks(compare_typed, world_size, cut, mode):
        assert all(value < 1e-10 for value in found.values()), found


def around_a_model(rank: int, world_size: int, json: str, compiles: bool) -> None:
    whole = whole_graph(torch.float64)
    x = whole.x
    part = graphshard.pyg.shard(whole, owners("random", world_size), mode="oneshot")
    assert part.num_nodes == part.x.shape[0] == part.n_id.shape[0]
    assert isinstance(part.edge_index, graphshard.pyg.ShardedEdgeIndex)
    torch.testing.assert_close(part.x, x[part.n_id], rtol=0, atol=0)

    # Attention weights: the same edges, with the same weights.
    torch.manual_seed(0)
    layer = pyg_nn.GATv2Conv(WIDTH, 4, heads=2).double()
    out, (index, weights) = layer(part.x, part.edge_index, return_attention_weights=True)
    expected, (whole_index, whole_weights) = layer(
        x, whole.edge_index, return_attention_weights=True
    )
    torch.testing.assert_close(out, expected[part.n_id])
    by_edge = torch.zeros(x.shape[0], x.shape[0], 2, dtype=torch.float64)
    by_edge[whole_index[0], whole_index[1]] = whole_weights
    own = index.local()[0] < part.num_nodes
    src, dst = part.n_id[index.local()[0][own]], part.n_id[index.local()[1][own]]
    torch.testing.assert_close(weights[own], by_edge[src, dst])

    # torch.compile, autocast, edge_index by name.
    model = pyg_nn.GCN(WIDTH, 16, 2, 5).double()
    expected = model(x, whole.edge_index)
    if compiles:
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(part.x, part.edge_index), expected[part.n_id])
    torch.testing.assert_close(model(x=part.x, edge_index=part.edge_index), expected[part.n_id])
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model.float()(part.x.float(), part.edge_index)
    torch.testing.assert_close(narrow.double(), expected[part.n_id], rtol=0.1, atol=0.1)

    # DistributedDataParallel, with the share of each rank weighed.
    torch.manual_seed(0)
    model = pyg_nn.GIN(WIDTH, 16, 2, 5).double()
    reference = pyg_nn.GIN(WIDTH, 16, 2, 5).double()
    reference.load_state_dict(model.state_dict())
    reference(x, whole.edge_index).square().mean().backward()
    model = graphshard.pyg.convert_sync_norm(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    scores = parallel(part.x, part.edge_index)
    (scores.square().sum() / (x.shape[0] * 5) * world_size).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)

    # A model that takes statistics of one rank's rows is refused on all ranks, and only then.
    model = pyg_nn.GraphSAGE(WIDTH, 16, 2, 5, norm="batch_norm").double()
    with pytest.raises(NotImplementedError, match="convert_sync_norm") as caught:
        model(part.x, part.edge_index)
    assert "BatchNorm1d ('norms.0.module' of GraphSAGE)" in str(caught.value)
    model.eval()(part.x, part.edge_index)
    with pytest.raises(NotImplementedError, match="flow='source_to_target'"):
        pyg_nn.GCNConv(WIDTH, 4, flow="target_to_source").double()(part.x, part.edge_index)
    with pytest.raises(NotImplementedError, match="cannot be changed"):
        part.edge_index[0] += 1
    with pytest.raises(ValueError, match="needs a row for each of this rank's"):
        x[:40][part.edge_index[0]]
    torch.testing.assert_close(x[part.edge_index[0]], x[whole.edge_index[0, part.e_id]])
    share_error(None)

    # A partition folder gives the same rows.
    folder = graphshard.pyg.shard(json)
    assert set(folder.keys()) >= {"x", "n_id", "e_id", "edge_attr"}
    conv = pyg_nn.TransformerConv(WIDTH, 4, heads=2, edge_dim=4).double()
    expected = conv(x, whole.edge_index, whole.edge_attr)
    mine = conv(folder.x, folder.edge_index, folder.edge_attr)
    torch.testing.assert_close(mine, expected[folder.n_id])


def test_norms_that_stand_at_several_places() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.ModuleList([norm, norm, nn.Sequential(norm), nn.Linear(WIDTH, WIDTH)])
    model.register_module("absent", None)
    converted = graphshard.pyg.convert_sync_norm(model)
    assert isinstance(converted[0], graphshard.nn.DistributedBN1D)
    assert converted[0] is converted[1] is converted[2][0]
    assert len(list(converted.parameters())) == 4


def test_what_is_put_around_a_model(tmp_path: Path, run_all: bool) -> None:
    whole = whole_graph(torch.float64)
    graph = graphshard.data.from_pyg(
        Data(x=whole.x, edge_index=whole.edge_index, edge_attr=whole.edge_attr)
    )
    partition_graph(graph, "g", 2, str(tmp_path), quiet=True)
    run_ranks(around_a_model, 2, str(tmp_path / "g.json"), run_all)


def shard_on_more_ranks(rank: int, world_size: int, json: str) -> list[str]:
    errors = []
    for load in (lambda: json, lambda: graphshard.load_dgl_partition_data(json, rank)):
        with pytest.raises(ValueError) as caught:
            graphshard.pyg.shard(load())
        errors.append(str(caught.value))
    return errors


def test_more_ranks_than_parts_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    graph = graphshard.data.random_graph(30, 90, seed=0)
    partition_graph(graph, "g", 2, str(tmp_path), quiet=True)
    first, *others = run_ranks(shard_on_more_ranks, 3, str(tmp_path / "g.json"))
    assert others == [first, first]
    assert "a graph of 2 parts needs 2 ranks (got 3)" in first[1]


def wrong_on_one_rank(rank: int, world_size: int) -> list[str]:
    errors = []

    def refused(data: Any, part_method: Any = "random", **options: Any) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            graphshard.pyg.shard(data, part_method, **options)
        errors.append(str(caught.value))

    whole = whole_graph(torch.float32)
    other = whole_graph(torch.float32)
    other.edge_index = other.edge_index[:, 1:]
    refused(other if rank else whole)
    refused("no graph" if rank else whole, mode="oneshot" if rank else "sequential")
    refused([] if rank else whole)
    refused(Data(x=whole.x) if rank else whole)
    refused(whole, torch.zeros(3, dtype=torch.int64))
    refused(whole, torch.full((whole.num_nodes,), 7))
    refused(whole, "alphabetical")
    beyond = whole_graph(torch.float32)
    beyond.edge_index = beyond.edge_index + 1000
    refused(beyond)
    return errors


def test_wrong_input_is_refused_on_every_rank() -> None:
    first, second = run_ranks(wrong_on_one_rank, 2)
    assert first == second
    for text, part in zip(
        first,
        (
            "the graph that is sharded must be the same on all ranks",
            "how remote rows are fetched must be the same",
            "takes PyG's Data or HeteroData",
            "has no edge_index",
            "an integer for each of the 45 nodes",
            "must have ranks in [0, 2) (got 7 to 7)",
            "'metis', 'random' or the rank of every node (got 'alphabetical')",
            "must be a node, in [0, 45) (got 1",
        ),
        strict=True,
    ):
        assert part in text


def test_without_pyg_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(ImportError, match="shard needs the package 'torch_geometric'") as caught:
        graphshard.pyg.shard(None)
    assert 'pip install "graphshard[pyg]"' in str(caught.value)
