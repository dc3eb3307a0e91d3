# SPDX-License-Identifier: Apache-2.0
"""PyG's loaders over data that is whole here. No process group.

PyG's own need pyg-lib or torch-sparse, which are not here. So the oracles are functions of PyG on
whole graphs (k_hop_subgraph, subgraph, models on all of the data), plain torch and SciPy.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scipy.stats
import torch
import torch_geometric.loader as pyg_loader
import torch_geometric.nn as pyg_nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import to_hetero
from torch_geometric.sampler import NegativeSampling
from torch_geometric.utils import k_hop_subgraph, subgraph, to_undirected, trim_to_layer

import graphshard.pyg
from graphshard.pyg.loader import (
    HGTLoader,
    HopSampler,
    LinkNeighborLoader,
    NeighborLoader,
    PrefetchLoader,
)

sys.path.insert(0, str(Path(__file__).parent))

import loader_graphs as lg
from layer_zoo import needs_to_hetero


def pairs(edge_index: torch.Tensor) -> set[tuple[int, int]]:
    return set(map(tuple, edge_index.t().tolist()))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_all_neighbours_are_the_hops_of_pyg(num_workers: int) -> None:
    data = lg.plain_data()
    loader = NeighborLoader(
        data, [-1, -1], data.train_mask, batch_size=4, shuffle=True, num_workers=num_workers
    )
    model = pyg_nn.GraphSAGE(3, 8, 2, 5).double().eval()
    data.x = data.x.double()
    expected = model(data.x, data.edge_index)
    seen = []
    for batch in loader:
        seeds = batch.n_id[: batch.batch_size]
        assert torch.equal(batch.input_id, seeds)
        nodes, _, _, _ = k_hop_subgraph(seeds, 2, data.edge_index, num_nodes=lg.NUM_NODES)
        assert torch.equal(batch.n_id.sort().values, nodes)
        one_hop, _, _, _ = k_hop_subgraph(seeds, 1, data.edge_index, num_nodes=lg.NUM_NODES)
        mask = torch.zeros(lg.NUM_NODES, dtype=torch.bool)
        mask[one_hop] = True
        into = mask[data.edge_index[1]].nonzero().view(-1)
        assert torch.equal(batch.e_id.sort().values, into)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        assert batch.num_sampled_nodes == [
            len(seeds),
            len(one_hop) - len(seeds),
            len(nodes) - len(one_hop),
        ]
        for counts in ({}, _counts(batch)):
            out = model(batch.x, batch.edge_index, **counts)[: batch.batch_size]
            torch.testing.assert_close(out, expected[seeds], rtol=0, atol=1e-12)
        seen.append(seeds)
    assert torch.equal(torch.cat(seen).sort().values, data.train_mask.nonzero().view(-1))


@pytest.mark.parametrize("device", ["cpu", "late", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_a_device(
    device: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, "late" stands for one: the device "meta", and streams that write down."""
    data = lg.typed_data()
    options = {"num_neighbors": [3, 2], "input_nodes": ("a", None), "batch_size": 4}

    def loader() -> Any:
        return NeighborLoader(data, num_workers=num_workers, seed=3, pin_memory=True, **options)

    log: list[str] = []
    if device == "late":
        stream_on_meta(monkeypatch, log)
    ours = PrefetchLoader(loader(), "meta" if device == "late" else device)
    expected = list(loader())
    assert len(ours) == len(expected) > 1
    for batch, of_cpu in zip(ours, expected, strict=True):
        found, wanted = _tensors(batch), _tensors(of_cpu)
        assert {t.device.type for t in found} == {"meta" if device == "late" else device}
        assert [t.shape for t in found] == [t.shape for t in wanted]
        if device != "late":
            assert all(map(torch.equal, [t.cpu() for t in found], wanted))
    if device == "late":
        assert log.count("wait") == len(expected)
        assert log.count("record") >= sum(len(_tensors(b)) for b in expected)
        assert log.count("pin") >= log.count("record")


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [v for store in batch.stores for v in store.values() if isinstance(v, torch.Tensor)]


def stream_on_meta(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    place = "graphshard.sampling._pipeline._STREAMED"
    monkeypatch.setattr(place, ("cuda", "meta"))
    event = SimpleNamespace(
        record=lambda stream: None,
        query=lambda: True,
        synchronize=lambda: None,
        elapsed_time=lambda other: 0.0,
    )
    stream = SimpleNamespace(
        wait_stream=lambda other: None, wait_event=lambda event: log.append("wait")
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: log.append("record"))

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        log.append("pin")
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)


def _counts(batch: Any) -> dict[str, Any]:
    return {
        "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
        "num_sampled_edges_per_hop": batch.num_sampled_edges,
    }


def test_trimmed_layers_keep_what_seeds_need() -> None:
    data = lg.plain_data()
    (batch,) = NeighborLoader(data, [4, 3, 2], torch.arange(10), batch_size=10)
    x, edges = batch.x, batch.edge_index
    sums = batch.x
    for layer in range(3):
        x, edges, _ = trim_to_layer(
            layer, batch.num_sampled_nodes, batch.num_sampled_edges, x, edges
        )
        x = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        sums = torch.zeros_like(sums).index_add(0, batch.edge_index[1], sums[batch.edge_index[0]])
    torch.testing.assert_close(x[:10], sums[:10])


@pytest.mark.parametrize("case", ["plain", "replace", "weighted"])
def test_frequencies_are_right(case: str) -> None:
    """Every edge of a row is drawn as often as it should be, by a chi-squared test."""
    data = lg.plain_data()
    hub = lg.NUM_NODES - 2
    degree = int((data.edge_index[1] == hub).sum())
    sampler = HopSampler(data, **{**lg.NODE_CASES[case], "num_neighbors": [5]}, seed=3)
    counts, num_draws = torch.zeros(lg.NUM_EDGES), 20 if case == "weighted" else 500
    for step in range(num_draws):
        sample = lg.node_sample(sampler, torch.tensor([hub]), step)
        assert sample.edge.numel() == 5
        assert case == "replace" or sample.edge.unique().numel() == 5
        counts.index_add_(0, sample.edge, torch.ones(5))
    into = (data.edge_index[1] == hub).nonzero().view(-1)
    counts = counts[into]
    weight = data.edge_weight[into] if case == "weighted" else torch.ones(degree)
    assert not counts[weight == 0].any()
    if (
        case == "weighted"
    ):  # without replacement there is no formula: the first of each draw has one
        one = HopSampler(data, [1], weight_attr="edge_weight", seed=3)
        counts = torch.zeros(lg.NUM_EDGES)
        for step in range(1000):
            counts[lg.node_sample(one, torch.tensor([hub]), step).edge] += 1
        counts = counts[into]
    kept = weight > 0
    expected = counts.sum() * weight[kept] / weight.sum()
    assert scipy.stats.chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-3


def test_induced_and_bidirectional() -> None:
    data = lg.plain_data()
    (batch,) = NeighborLoader(data, [3, 2], torch.arange(6), batch_size=6, subgraph_type="induced")
    expected, _ = subgraph(batch.n_id, data.edge_index)
    assert sorted(map(tuple, batch.n_id[batch.edge_index].t().tolist())) == sorted(
        map(tuple, expected.t().tolist())
    )
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert batch.get("num_sampled_edges") is None

    directed = HopSampler(data, [3, 2], seed=1)
    both = HopSampler(data, [3, 2], "bidirectional", seed=1)
    one, other = (lg.node_sample(s, torch.arange(6), 0) for s in (directed, both))
    assert torch.equal(one.node, other.node)
    expected = to_undirected(torch.stack([one.row, one.col]))
    assert pairs(torch.stack([other.row, other.col])) == pairs(expected)


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("given", [False, True])
def test_neighbours_are_in_time(strategy: str, given: bool) -> None:
    data = lg.plain_data()
    seeds = torch.arange(0, lg.NUM_NODES, 5)
    times = torch.full((len(seeds),), 20) if given else data.time[seeds]
    loader = NeighborLoader(
        data,
        [4, -1],
        seeds,
        times if given else None,
        time_attr="time",
        temporal_strategy=strategy,
        batch_size=len(seeds),
    )
    (batch,) = loader
    until = times[batch.batch]
    assert (data.time[batch.n_id] <= until)[len(seeds) :].all()
    dst = batch.edge_index[1]
    for row in range(sum(batch.num_sampled_nodes[:2])):
        node = int(batch.n_id[row])
        there = (data.edge_index[1] == node) & (data.time[data.edge_index[0]] <= until[row])
        drawn = batch.e_id[dst == row]
        is_seed = row < len(seeds)
        assert len(drawn) == min(int(there.sum()), 4 if is_seed else lg.NUM_EDGES)
        assert there[drawn].all()
        if strategy == "last" and is_seed:
            latest = data.time[data.edge_index[0]][there].sort(descending=True).values[:4]
            found = data.time[data.edge_index[0]][drawn].sort(descending=True).values
            assert torch.equal(found, latest)
    assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[dst])

    data.stamp = data.edge_weight * 100
    (batch,) = NeighborLoader(data, [3], seeds, times, time_attr="stamp", batch_size=len(seeds))
    assert (batch.stamp <= times[batch.batch[batch.edge_index[1]]]).all()


def test_disjoint_subgraphs_are_those_of_seeds_alone() -> None:
    data = lg.plain_data()
    sampler = HopSampler(data, [4, 3], disjoint=True, seed=5)
    alone = HopSampler(data, [4, 3], seed=5)
    seeds = torch.tensor([3, 9, 3])
    together = lg.node_sample(sampler, seeds, 0)
    for number, seed in enumerate(seeds):
        one = lg.node_sample(alone, seed.view(1), 0)
        nodes = together.batch == number
        edges = nodes[together.col]
        assert torch.equal(together.node[nodes].sort().values, one.node.sort().values)
        assert torch.equal(together.edge[edges].sort().values, one.edge.sort().values)


def test_repeated_seeds_have_rows_of_their_own() -> None:
    data = lg.plain_data()
    model = pyg_nn.GraphSAGE(3, 8, 2, 5).eval()
    expected = model(data.x, data.edge_index)
    seeds = torch.tensor([7, 58, 7, 7, 59])
    (batch,) = NeighborLoader(data, [-1, -1], seeds, batch_size=5)
    assert torch.equal(batch.n_id[:5], seeds)
    assert batch.num_sampled_nodes[0] == 5
    for counts in ({}, _counts(batch)):
        out = model(batch.x, batch.edge_index, **counts)[:5]
        torch.testing.assert_close(out, expected[seeds])


def test_inference_and_calls_of_pyg() -> None:
    data = lg.plain_data()
    model = pyg_nn.GraphSAGE(3, 8, 2, 5).eval()
    expected = model(data.x, data.edge_index)
    loader = NeighborLoader(data, [-1], None, batch_size=16)
    torch.testing.assert_close(model.inference(loader), expected)
    batch = loader(torch.tensor([5, 6]))
    assert torch.equal(batch.n_id[:2], torch.tensor([5, 6]))
    assert isinstance(loader, pyg_loader.NeighborLoader)
    changed = NeighborLoader(
        data,
        [2],
        [1, 2, 3],
        batch_size=2,
        transform=lambda batch: batch.n_id,
        transform_sampler_output=lambda out: out,
        filter_per_worker=False,
        drop_last=True,
    )
    (only,) = changed
    assert torch.equal(only[:2], torch.tensor([1, 2]))
    weighted = torch.utils.data.WeightedRandomSampler(torch.tensor([0.0, 1.0, 0.0]), 4)
    batches = list(NeighborLoader(data, [2], [1, 2, 3], batch_size=2, sampler=weighted))
    assert [b.n_id[:2].tolist() for b in batches] == [[2, 2], [2, 2]]


def test_passes_over_one_loader_side_by_side() -> None:
    loader = NeighborLoader(lg.plain_data(), [2], torch.arange(9), batch_size=3, num_workers=1)
    both = [(a.n_id[0].item(), b.n_id[0].item()) for a in loader for b in loader]
    assert both == [(a, b) for a in (0, 3, 6) for b in (0, 3, 6)]
    for batch in loader:
        assert batch.batch_size == 3
        break
    with loader.enable_cpu_affinity():
        assert len(list(loader)) == len(loader) == 3


def test_runs_repeat() -> None:
    data = lg.plain_data()

    def drawn(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loader = NeighborLoader(
            data, [2, 2], data.train_mask, batch_size=4, shuffle=True, **options
        )
        return [batch.e_id for _ in range(2) for batch in loader]

    first, again = drawn(), drawn(num_workers=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], drawn(seed=9)[0])


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg_nn.SAGEConv((-1, -1), 8), pyg_nn.SAGEConv((-1, -1), 4)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.second(self.first(x, edge_index).relu(), edge_index)


@needs_to_hetero
def test_typed_batches_feed_models_of_to_hetero() -> None:
    data = lg.typed_data()
    model = to_hetero(_Net(), data.metadata())
    with torch.no_grad():
        expected = model(data.x_dict, data.edge_index_dict)["a"]
    loader = NeighborLoader(data, [-1, -1], ("a", data["a"].y % 2 == 0), batch_size=7)
    for batch in loader:
        assert isinstance(batch, HeteroData)
        count = batch["a"].batch_size
        with torch.no_grad():
            out = model(batch.x_dict, batch.edge_index_dict)["a"][:count]
        torch.testing.assert_close(out, expected[batch["a"].n_id[:count]])
        for etype in data.edge_types:
            index = batch[etype].edge_index
            ends = torch.stack([batch[etype[0]].n_id[index[0]], batch[etype[2]].n_id[index[1]]])
            assert torch.equal(ends, data[etype].edge_index[:, batch[etype].e_id])
            assert torch.equal(batch[etype].edge_attr, data[etype].edge_attr[batch[etype].e_id])
        for ntype in data.node_types:
            assert sum(batch[ntype].num_sampled_nodes) == batch[ntype].num_nodes


def test_hgt_takes_as_many_nodes_as_it_is_told() -> None:
    data = lg.typed_data()
    loader = HGTLoader(data, {"a": [4, 3], "b": [5, 0]}, ("a", torch.arange(8)), batch_size=8)
    (batch,) = loader
    assert (batch["a"].num_nodes, batch["b"].num_nodes) == (8 + 4 + 3, 5)
    assert torch.equal(batch["a"].n_id[:8], torch.arange(8))
    for etype in data.edge_types:
        src, dst = data[etype].edge_index
        inside = torch.isin(src, batch[etype[0]].n_id) & torch.isin(dst, batch[etype[2]].n_id)
        assert torch.equal(batch[etype].e_id.sort().values, inside.nonzero().view(-1))


def test_hgt_draws_by_squared_budgets() -> None:
    """A star: two candidates of budgets 1 and 1/4 under one hop, so that odds are 16 to 1."""
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 2, 5
    ends = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 1, 1, 1]])
    data["b", "to", "a"].edge_index = ends
    sampler = graphshard.pyg.HGTSampler(data, {"a": [], "b": [1]}, seed=2)
    first = [
        int(lg.node_sample(sampler, torch.tensor([0, 1]), step, "a").node["b"][0])
        for step in range(500)
    ]
    counts = torch.bincount(torch.tensor(first), minlength=5)
    expected = torch.tensor([16, 1, 1, 1, 1]) * 500 / 20
    assert scipy.stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("mode", ["none", "binary", "triplet"])
@pytest.mark.parametrize("disjoint", [False, True])
def test_links(mode: str, disjoint: bool) -> None:
    data = lg.plain_data()
    negative = None if mode == "none" else NegativeSampling(mode, 2)
    loader = LinkNeighborLoader(
        data, [3, 2], batch_size=64, neg_sampling=negative, disjoint=disjoint, shuffle=True
    )
    for batch in loader:
        ends, count = data.edge_index[:, batch.input_id], len(batch.input_id)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        if mode == "triplet":
            assert torch.equal(batch.n_id[batch.src_index], ends[0])
            assert torch.equal(batch.n_id[batch.dst_pos_index], ends[1])
            assert batch.dst_neg_index.shape == (count, 2)
            continue
        assert torch.equal(batch.n_id[batch.edge_label_index[:, :count]], ends)
        assert batch.edge_label_index.shape[1] == count * (1 if mode == "none" else 3)
        if mode == "binary":
            assert batch.edge_label.tolist() == [1.0] * count + [0.0] * 2 * count


@pytest.mark.parametrize("amount", [0.5, 1, 1.5])
@pytest.mark.parametrize("is_typed", [False, True])
def test_subgraphs_are_those_of_edges(amount: float, is_typed: bool) -> None:
    ends = torch.randint(20, (2, 30), generator=torch.Generator().manual_seed(0))
    data: Any = Data(num_nodes=20, edge_index=ends)
    given: Any = ends[:, :11]
    if is_typed:
        data = HeteroData()
        data["a"].num_nodes = data["b"].num_nodes = 20
        data["a", "to", "b"].edge_index = ends
        given = ("a", "to", "b"), given
    negatives = NegativeSampling("binary", amount)
    loader = LinkNeighborLoader(
        data, [2, 2], given, neg_sampling=negatives, disjoint=True, batch_size=4, seed=0
    )
    for batch in loader:
        pair = batch["a", "to", "b"].edge_label_index if is_typed else batch.edge_label_index
        of = (batch["a"].batch, batch["b"].batch) if is_typed else (batch.batch, batch.batch)
        num_edges = (batch["a", "to", "b"] if is_typed else batch).input_id.numel()
        assert torch.equal(of[0][pair[0]], torch.arange(pair.shape[1]) % num_edges)
        assert torch.equal(of[1][pair[1]], torch.arange(pair.shape[1]) % num_edges)


def test_negatives_are_uniform_and_in_time() -> None:
    data = lg.plain_data()
    ends = torch.tensor([[0], [1]]).repeat(1, 1000)
    loader = LinkNeighborLoader(data, [0], ends, batch_size=1000, neg_sampling="binary")
    (batch,) = loader
    nodes = batch.n_id[batch.edge_label_index[:, 1000:]]
    counts = torch.bincount(nodes.view(-1), minlength=lg.NUM_NODES)
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-3
    weights = torch.arange(lg.NUM_NODES).float()
    loader = LinkNeighborLoader(
        data,
        [0],
        ends,
        batch_size=1000,
        neg_sampling=NegativeSampling("triplet", 3, dst_weight=weights),
    )
    (batch,) = loader
    counts = torch.bincount(batch.n_id[batch.dst_neg_index].view(-1), minlength=lg.NUM_NODES)
    expected = weights[1:] * 3000 / weights.sum()
    assert counts[0] == 0
    assert scipy.stats.chisquare(counts[1:].numpy(), expected.numpy()).pvalue > 1e-3
    times = torch.full((1000,), int(data.time.min()))
    loader = LinkNeighborLoader(
        data,
        [2],
        ends,
        edge_label_time=times,
        time_attr="time",
        batch_size=1000,
        neg_sampling="binary",
    )
    (batch,) = loader
    assert (data.time[batch.n_id[batch.edge_label_index[:, 1000:]]] <= times[0]).all()


def test_stores_of_others_are_read() -> None:
    """PyG's Data is a pair of stores itself."""
    data = lg.typed_data()
    loader = NeighborLoader((data, data), [2, 2], ("a", torch.arange(9)), batch_size=9, seed=4)
    (batch,) = loader
    (expected,) = NeighborLoader(data, [2, 2], ("a", torch.arange(9)), batch_size=9, seed=4)
    for ntype in data.node_types:
        assert torch.equal(batch[ntype].n_id, expected[ntype].n_id)
        assert torch.equal(batch[ntype].x, expected[ntype].x)
    for etype in data.edge_types:
        assert torch.equal(batch[etype].edge_index, expected[etype].edge_index)


def test_odd_graphs() -> None:
    empty = Data(x=torch.ones(3, 2), edge_index=torch.empty(2, 0, dtype=torch.int64))
    (batch,) = NeighborLoader(empty, [2, 2], None, batch_size=3)
    assert (batch.num_nodes, batch.num_edges, batch.num_sampled_edges) == (3, 0, [0, 0])
    assert list(NeighborLoader(empty, [2], torch.empty(0, dtype=torch.int64), batch_size=2)) == []
    wide = lg.plain_data()
    wide.x = wide.x.bfloat16()
    (batch,) = NeighborLoader(wide, [2], torch.arange(4), batch_size=4)
    assert batch.x.dtype == torch.bfloat16


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "direction": ({"num_neighbors": [-2]}, ValueError, "at least -1"),
    "types": ({"num_neighbors": {("a", "b", "c"): [1]}}, ValueError, "has no types"),
    "time": ({"input_time": torch.ones(3)}, ValueError, "give both"),
    "strategy": ({"temporal_strategy": "first"}, ValueError, "'uniform' or 'last'"),
    "last with replacement": (
        {"time_attr": "time", "temporal_strategy": "last", "replace": True},
        ValueError,
        "leave replace out",
    ),
    "induced": ({"disjoint": True, "subgraph_type": "induced"}, ValueError, "one subgraph for"),
    "weights": ({"weight_attr": "w"}, ValueError, "must be a feature of edges"),
    "no column": ({"time_attr": "when"}, ValueError, "neither have it"),
    "worker": ({"worker_init_fn": print}, NotImplementedError, "worker processes"),
    "batches": ({"batch_size": None}, ValueError, "must be a number of seeds"),
    "sampler": ({"neighbor_sampler": object()}, TypeError, "must be a graphshard.pyg.HopSampler"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        NeighborLoader(lg.plain_data(), **{"num_neighbors": [2], **options})


def test_errors_of_data() -> None:
    with pytest.raises(TypeError, match="a loader takes Data"):
        NeighborLoader([1, 2, 3], [2])
    with pytest.raises(ValueError, match="no edge_index"):
        NeighborLoader(Data(x=torch.ones(3, 1)), [2])
    with pytest.raises(ValueError, match="a graph with types"):
        HGTLoader(lg.plain_data(), [2], torch.arange(3))
    with pytest.raises(ValueError, match="in .0, 60."):
        next(iter(NeighborLoader(lg.plain_data(), [2], torch.tensor([60]))))
