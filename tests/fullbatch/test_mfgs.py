# SPDX-License-Identifier: Apache-2.0
"""Message flow graphs: only what the seeds depend on, same results. 1 to 3 gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shards import features, graph_of, own_nodes, write_parts
from torch import Tensor, nn

import graphshard
from graphshard.nn import GATConv, HeteroGraphConv, SAGEConv
from graphshard.testing import RanksFailed, run_ranks

NUM_LAYERS = 3
Rows = dict[str, Tensor]


def plain_model() -> nn.ModuleList:
    return nn.ModuleList(
        [
            SAGEConv(6, 8, "mean"),
            GATConv(8, 4, 2, allow_zero_in_degree=True),
            SAGEConv(8, 3, "pool"),
        ]
    )


def typed_model() -> nn.ModuleList:
    etypes = graph_of("typed").etypes
    return nn.ModuleList(
        [HeteroGraphConv({e: SAGEConv(6, 6, "mean") for e in etypes}) for _ in range(NUM_LAYERS)]
    )


def run_plain(model: Any, graphs: list[Any], inputs: Tensor) -> Tensor:
    h = inputs
    for layer, graph in zip(model, graphs, strict=True):
        h = layer(graph, h).flatten(1).tanh()
    return h


def run_typed(model: Any, graphs: list[Any], inputs: Rows) -> Rows:
    h = inputs
    for layer, graph in zip(model, graphs, strict=True):
        found = layer(graph, h)
        kept = {t: h[t][: graph.num_dst_nodes(t)] for t in h}
        h = {t: found.get(t, kept[t]).tanh() for t in kept}
    return h


def grads_of(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def seeds_of(data: graphshard.PartitionData, ntype: str) -> Tensor:
    """Global ids of this rank's nodes whose original id is a multiple of 4."""
    start = data.node_map(ntype).starts[data.rank]
    return (own_nodes(data)[ntype] % 4 == 0).nonzero().view(-1) + start


def compare_plain(
    rank: int, world_size: int, parts: str, mode: str, some_without: bool
) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    whole = graph_of("plain")
    data = graphshard.load_dgl_partition_data(parts, rank)
    nodes = own_nodes(data)["_N"]
    inputs = features(whole, 6, ties=False)["_N"]
    seeds = seeds_of(data, "_N")
    if some_without and rank == 0:
        seeds = seeds[:0]
    mfgs = graphshard.construct_mfgs(data, seeds, NUM_LAYERS, mode=mode)
    torch.manual_seed(0)
    model = plain_model()
    my_inputs = inputs[nodes].clone().requires_grad_()
    found = run_plain(model, mfgs, my_inputs[mfgs[0].input_nodes])
    (found**2).sum().backward()
    graphshard.gather_grads(model)
    my_grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    wanted = torch.zeros(whole.num_nodes())
    wanted[nodes[mfgs[-1].seeds]] = 1
    dist.all_reduce(wanted)
    all_inputs = inputs.clone().requires_grad_()
    expected = run_plain(model, [whole] * NUM_LAYERS, all_inputs)
    (expected[wanted > 0] ** 2).sum().backward()
    pairs = [
        (found, expected[nodes[mfgs[-1].seeds]]),
        (my_inputs.grad, all_inputs.grad[nodes]),
        *zip(my_grads, (p.grad for p in model.parameters()), strict=True),
    ]
    torch.set_default_dtype(torch.float32)
    return {
        "errors": [float((a - b).detach().abs().max()) if a.numel() else 0.0 for a, b in pairs],
        "rows": [m.num_src_nodes() for m in mfgs] + [mfgs[-1].num_dst_nodes()],
        "chained": [
            torch.equal(a.seeds, b.input_nodes) for a, b in zip(mfgs, mfgs[1:], strict=False)
        ],
        "seeds": torch.equal(mfgs[-1].seeds + data.node_map("_N").starts[rank], seeds),
        "blocks": all(m.is_block for m in mfgs),
    }


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
@pytest.mark.parametrize(
    ("num_ranks", "how", "some_without"),
    [(1, "metis", False), (2, "random", True), (3, "empty_part", False), (3, "random", False)],
)
def test_mfgs_give_the_full_graphs_results(
    tmp_path: Path, num_ranks: int, how: str, mode: str, some_without: bool
) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), num_ranks, how)
    for found in run_ranks(compare_plain, num_ranks, parts, mode, some_without):
        assert max(found["errors"]) < 1e-10
        assert found["rows"] == sorted(found["rows"], reverse=True)
        assert all(found["chained"])
        assert found["seeds"]
        assert found["blocks"]


def compare_typed(rank: int, world_size: int, parts: str, mode: str) -> list[float]:
    torch.set_default_dtype(torch.float64)
    whole = graph_of("typed")
    data = graphshard.load_dgl_partition_data(parts, rank)
    nodes = own_nodes(data)
    inputs = features(whole, 6, ties=False)
    seeds = {"b": seeds_of(data, "b")}
    mfgs = graphshard.construct_mfgs(data, seeds, NUM_LAYERS, mode=mode)
    torch.manual_seed(0)
    model = typed_model()
    mine = {t: inputs[t][nodes[t]][mfgs[0].input_nodes[t]] for t in data.node_type_names}
    found = run_typed(model, mfgs, mine)["b"]
    (found**2).sum().backward()
    graphshard.gather_grads(model)
    my_grads = grads_of(model)
    model.zero_grad()
    expected = run_typed(model, [whole] * NUM_LAYERS, inputs)["b"]
    (expected[torch.arange(whole.num_nodes("b")) % 4 == 0] ** 2).sum().backward()
    grads = grads_of(model)
    pairs = [(found, expected[nodes["b"][mfgs[-1].seeds["b"]]]), *zip(my_grads, grads, strict=True)]
    torch.set_default_dtype(torch.float32)
    return [float((a - b).detach().abs().max()) if a.numel() else 0.0 for a, b in pairs]


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_typed_mfgs_give_the_full_graphs_results(tmp_path: Path, num_ranks: int, mode: str) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), num_ranks, "random")
    for errors in run_ranks(compare_typed, num_ranks, parts, mode):
        assert max(errors) < 1e-10


def without_seed_rows(rank: int, world_size: int, parts: str) -> list[bool]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    seeds = seeds_of(data, "_N")
    (mfg,) = graphshard.construct_mfgs(data, seeds, 1, keep_seed_nodes=False)
    whole = graph_of("plain")
    src, _ = whole.edges()
    nodes = own_nodes(data)["_N"]
    seed_ids = torch.arange(0, whole.num_nodes(), 4)
    read = torch.isin(nodes, src[torch.isin(whole.edges()[1], seed_ids)]).nonzero().view(-1)
    return [torch.equal(mfg.input_nodes.sort().values, read)]


def test_seed_rows_can_be_left_out_of_the_sources(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    assert all(all(found) for found in run_ranks(without_seed_rows, 2, parts))


def foreign_seeds(rank: int, world_size: int, parts: str) -> None:
    data = graphshard.load_dgl_partition_data(parts, rank)
    other = 1 - rank if rank == 0 else rank
    graphshard.construct_mfgs(data, torch.tensor([data.node_map().starts[other]]), 2)


def test_seeds_of_another_rank_are_an_error_on_every_rank(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(foreign_seeds, 2, parts)
    assert set(caught.value.errors) == {0, 1}
    for text in caught.value.errors.values():
        assert "may only name its own nodes" in text
