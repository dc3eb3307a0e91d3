# SPDX-License-Identifier: Apache-2.0
"""User-defined message functions on a sharded graph: parameters, dropout, errors. 1 to 3 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shards import own_edges, own_nodes, plain_graph, write_parts
from torch import Tensor, nn

import graphshard
from graphshard import function as fn
from graphshard.testing import RanksFailed, run_ranks

PLAIN = ("_N", "_E", "_N")
MODES = ("oneshot", "sequential", "sequential-kept")


def construct(data: graphshard.PartitionData, mode: str) -> graphshard.GraphShardManager:
    name, _, kept = mode.partition("-")
    return graphshard.construct_full_graph(data, mode=name, rematerialize=not kept)


class EdgeNetwork(nn.Module):
    """A message function with parameters of its own, told to nobody."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.reduce = reduce

    def message(self, edges: Any) -> dict[str, Tensor]:
        both = torch.cat([edges.src["h"] - edges.dst["h"], edges.data["w"]], dim=1)
        return {"m": torch.tanh(self.inner(both)) * self.scale}

    def forward(self, graph: Any, h: Tensor, w: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = h
            graph.edata["w"] = w
            graph.update_all(self.message, getattr(fn, self.reduce)("m", "out"))
            result: Tensor = graph.dstdata["out"]
            return result


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    whole = plain_graph()
    nodes = torch.randn(whole.num_nodes(), 6, generator=generator, dtype=torch.float64)
    edges = torch.randn(whole.num_edges(), 1, generator=generator, dtype=torch.float64)
    return nodes, edges


def compare_with_one_process(
    rank: int, world_size: int, parts: str, mode: str, reduce: str
) -> list[float]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    mine, my_edges = own_nodes(data)["_N"], own_edges(data)[PLAIN]
    nodes, edges = inputs()
    torch.manual_seed(0)
    model = EdgeNetwork(reduce).double()
    whole_nodes, whole_edges = nodes.clone().requires_grad_(), edges.clone().requires_grad_()
    expected = model(plain_graph(), whole_nodes, whole_edges)
    (expected**2).sum().backward()
    expected_grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    my_nodes = nodes[mine].clone().requires_grad_()
    my_weights = edges[my_edges].clone().requires_grad_()
    found = model(construct(data, mode), my_nodes, my_weights)
    (found**2).sum().backward()
    graphshard.gather_grads(model)
    pairs = [
        (found, expected[mine]),
        (my_nodes.grad, whole_nodes.grad[mine]),
        (my_weights.grad, whole_edges.grad[my_edges]),
        *zip((p.grad for p in model.parameters()), expected_grads, strict=True),
    ]
    return [float((a - b).detach().abs().max()) if a.numel() else 0.0 for a, b in pairs]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_ranks", "how"), [(1, "metis"), (2, "empty_part"), (3, "random")])
def test_parameters_of_messages_get_their_gradients(
    tmp_path: Path, num_ranks: int, how: str, mode: str, reduce: str
) -> None:
    parts = write_parts(tmp_path, plain_graph(), num_ranks, how)
    for errors in run_ranks(compare_with_one_process, num_ranks, parts, mode, reduce):
        assert max(errors) < 1e-10


def apply_edges_and_compare(rank: int, world_size: int, parts: str, mode: str) -> list[float]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    mine, my_edges = own_nodes(data)["_N"], own_edges(data)[PLAIN]
    nodes, edges = inputs()
    whole = plain_graph()

    def product(batch: Any) -> dict[str, Tensor]:
        return {"p": batch.src["h"] * batch.dst["h"] * batch.data["w"]}

    results, grads = [], []
    for graph, rows, weights in (
        (whole, nodes, edges),
        (construct(data, mode), nodes[mine], edges[my_edges]),
    ):
        rows = rows.clone().requires_grad_()
        graph.ndata["h"], graph.edata["w"] = rows, weights
        graph.apply_edges(product)
        (graph.edata["p"] ** 2).sum().backward()
        results.append(graph.edata["p"].detach())
        grads.append(rows.grad)
    pairs = [(results[1], results[0][my_edges]), (grads[1], grads[0][mine])]
    return [float((a - b).detach().abs().max()) if a.numel() else 0.0 for a, b in pairs]


@pytest.mark.parametrize("mode", MODES)
def test_apply_edges_with_a_user_function(tmp_path: Path, mode: str) -> None:
    parts = write_parts(tmp_path, plain_graph(), 3, "random")
    for errors in run_ranks(apply_edges_and_compare, 3, parts, mode):
        assert max(errors) < 1e-10


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.inner = nn.Linear(6, 4)

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        with graph.local_scope():
            graph.srcdata["h"] = h
            graph.update_all(
                lambda edges: {"m": self.drop(self.inner(edges.src["h"]))}, fn.sum("m", "out")
            )
            result: Tensor = graph.dstdata["out"]
            return result


def gradients_under_dropout(rank: int, world_size: int, parts: str, what: str) -> list[Tensor]:
    """Results of a run with rematerialization and of one without, from the same seed."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    found = []
    for rematerialize in (True, False):
        graph = graphshard.construct_full_graph(
            data, mode="sequential", rematerialize=rematerialize
        )
        torch.manual_seed(7)
        if what == "message":
            model: nn.Module = Noisy()
        else:
            model = graphshard.nn.GATConv(6, 4, 2, attn_drop=0.5, allow_zero_in_degree=True)
        h = torch.randn(data.num_owned(), 6, requires_grad=True)
        torch.manual_seed(8 + rank)
        out = model(graph, h)
        (out**2).sum().backward()
        found += [out.detach(), h.grad, *(p.grad for p in model.parameters())]
        found.append(torch.rand(1))
    return found


@pytest.mark.parametrize("what", ["message", "attention"])
def test_dropout_is_the_same_when_computed_again(tmp_path: Path, what: str) -> None:
    """Bit for bit, and the random state afterwards is that of the forward."""
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for found in run_ranks(gradients_under_dropout, 2, parts, what):
        half = len(found) // 2
        for a, b in zip(found[:half], found[half:], strict=True):
            assert torch.equal(a, b)


def dropout_gradient_by_difference(rank: int, world_size: int, parts: str) -> float:
    """The gradient under attention dropout against a difference quotient with the same masks."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    torch.manual_seed(1)
    layer = graphshard.nn.GATConv(6, 4, 2, attn_drop=0.5, allow_zero_in_degree=True).double()
    h = torch.randn(data.num_owned(), 6, dtype=torch.float64)

    def loss() -> Tensor:
        torch.manual_seed(5)
        return (layer(graph, h) ** 2).sum()

    loss().backward()
    graphshard.gather_grads(layer)
    parameter, step = layer.attn_l, 1e-6
    worst = 0.0
    for index in range(parameter.numel()):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.view(-1)[index] += sign * step
                value = loss()
                parameter.view(-1)[index] -= sign * step
            dist.all_reduce(value)
            values.append(float(value))
        estimate = (values[0] - values[1]) / (2 * step)
        worst = max(worst, abs(estimate - float(parameter.grad.view(-1)[index])))
    return worst


def test_gradient_under_attention_dropout(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    assert max(run_ranks(dropout_gradient_by_difference, 2, parts)) < 1e-5


def in_autocast(rank: int, world_size: int, parts: str) -> dict[str, float]:
    """The largest gap to one process, over the largest number, by mode."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    mine, my_edges = own_nodes(data)["_N"], own_edges(data)[PLAIN]
    nodes, edges = (rows.float() for rows in inputs())
    torch.manual_seed(0)
    model = EdgeNetwork("sum")

    def results(graph: Any, h: Tensor, w: Tensor) -> list[Tensor]:
        model.zero_grad()
        h = h.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(graph, h, w)
        out.square().sum().backward()
        if graph is not whole:
            graphshard.gather_grads(model)
        assert h.grad is not None
        return [out.detach(), h.grad, *(p.grad.clone() for p in model.parameters())]

    whole = plain_graph()
    out, grad, *expected = results(whole, nodes, edges)
    expected = [out[mine], grad[mine], *expected]
    gaps = {}
    for mode in MODES:
        found = results(construct(data, mode), nodes[mine], edges[my_edges])
        gaps[mode] = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)
        )
    return gaps


def test_parameters_are_cast_by_autocast_for_every_shard(tmp_path: Path) -> None:
    """What autocast keeps of a parameter is no tensor that was computed before the function ran."""
    parts = write_parts(tmp_path, plain_graph(), 3, "random")
    for gaps in run_ranks(in_autocast, 3, parts):
        assert set(gaps) == set(MODES)
        assert max(gaps.values()) < 0.02, gaps  # bfloat16 has 8 bits


def use_a_computed_tensor(rank: int, world_size: int, parts: str, mode: str) -> str:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = construct(data, mode)
    weight = nn.Parameter(torch.ones(6))
    doubled = weight * 2
    graph.ndata["h"] = torch.ones(data.num_owned(), 6)
    try:
        graph.update_all(lambda edges: {"m": edges.src["h"] * doubled}, fn.sum("m", "out"))
    except RuntimeError as error:
        return str(error)
    graph.dstdata["out"].sum().backward()
    return f"gradient {float(weight.grad.sum())}"


def test_a_captured_result_is_refused_not_ignored(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for text in run_ranks(use_a_computed_tensor, 2, parts, "sequential"):
        assert "computed before it ran and needs a gradient" in text
        assert "mode='oneshot'" in text
    found = run_ranks(use_a_computed_tensor, 2, parts, "oneshot")
    assert all(text.startswith("gradient ") for text in found)


def reduce_by_a_function(rank: int, world_size: int, parts: str, mode: str) -> list[Tensor]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = construct(data, mode)
    nodes = own_nodes(data)["_N"]
    graph.ndata["h"] = inputs()[0][nodes]
    graph.update_all(
        fn.copy_u("h", "m"), lambda batch: {"out": batch.mailbox["m"].median(dim=1).values}
    )
    return [nodes, graph.dstdata["out"]]


def test_any_reduction_works_in_one_shot_mode(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 3, "random")
    whole = plain_graph()
    whole.ndata["h"] = inputs()[0]
    whole.update_all(
        fn.copy_u("h", "m"), lambda batch: {"out": batch.mailbox["m"].median(dim=1).values}
    )
    for nodes, out in run_ranks(reduce_by_a_function, 3, parts, "oneshot"):
        assert torch.equal(out, whole.ndata["out"][nodes])


def test_a_user_reduction_names_one_shot_mode(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    with pytest.raises(RanksFailed, match=r"mode='oneshot'.*any reduction works"):
        run_ranks(reduce_by_a_function, 2, parts, "sequential")


def with_given_parameters(rank: int, world_size: int, parts: str, frozen: bool) -> str:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph, network = construct(data, "sequential"), EdgeNetwork("sum").double()
    given = {name: (2 * p.detach()).requires_grad_() for name, p in network.named_parameters()}
    network.requires_grad_(not frozen)
    nodes, edges = inputs()
    operands = graph, nodes[own_nodes(data)["_N"]], edges[own_edges(data)[PLAIN]]
    out = torch.func.functional_call(network, given, operands)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_are_given_for_one_call_are_refused(tmp_path: Path, frozen: bool) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for error in run_ranks(with_given_parameters, 2, parts, frozen):
        assert "used other parameters there than in the forward" in error
        assert "mode='oneshot'" in error
