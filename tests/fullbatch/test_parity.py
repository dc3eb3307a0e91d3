# SPDX-License-Identifier: Apache-2.0
"""N ranks equal one process: every layer, mode, number of ranks and way of cutting the graph.

Each rank computes the single-process result on the whole graph and compares its own rows with it,
in float64, to 1e-10: outputs, loss, gradients of inputs and parameters, and the parameters after
steps of Adam. Uses 1, 2, 3 and 5 gloo ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))

from nn_layer_cases import IN_FEATS, LayerCase, nn_layer_cases
from shards import (
    ASSIGNMENTS,
    PLAIN,
    features,
    graph_of,
    own_edges,
    own_nodes,
    write_parts,
)

MODES = ("oneshot", "sequential", "sequential-kept")
TOLERANCE = 1e-10
NUM_STEPS = 5
# Where a gradient is 0 in exact arithmetic (a softmax over one edge), Adam turns the rounding error
# e of the computed one into a step of lr * e / 1e-8: a rate of 1e-3 keeps that below the tolerance.
LEARNING_RATE = 1e-3

Rows = dict[str, Tensor]


def construct(data: graphshard.PartitionData, mode: str) -> graphshard.GraphShardManager:
    name, _, kept = mode.partition("-")
    return graphshard.construct_full_graph(data, mode=name, rematerialize=not kept)


def forward(
    layer: nn.Module, graph: Any, kind: str, inputs: Rows, keywords: Mapping[str, Any]
) -> Rows:
    if kind == "plain":
        return {"_N": layer(graph, inputs["_N"], **keywords)}
    found: Rows = layer(graph, inputs, **keywords)
    return found


def weighted_sum(outputs: Rows, weights: Rows) -> Tensor:
    """A loss that every output entry takes part in, of the size of a mean over 100 nodes."""
    terms = [(outputs[t] * weights[t]).sum() + 0.1 * (outputs[t] ** 2).sum() for t in outputs]
    return torch.stack(terms).sum() / 100


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


def grad_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def summed_over_ranks(tensor: Tensor | None, like: Tensor) -> Tensor:
    total = torch.zeros_like(like) if tensor is None else tensor.detach().clone()
    dist.all_reduce(total)
    return total


def compare(
    case: LayerCase,
    whole: graphshard.Graph,
    sharded: graphshard.GraphShardManager,
    data: graphshard.PartitionData,
    num_steps: int,
) -> dict[str, float]:
    """Largest differences between this rank's rows and one process's."""
    nodes, edges = own_nodes(data), own_edges(data)
    ties = "max" in case.name or "pool" in case.name
    inputs = features(whole, IN_FEATS, ties)
    torch.manual_seed(0)
    reference = case.make(whole.canonical_etypes)
    torch.manual_seed(0)
    layer = case.make(whole.canonical_etypes)
    if case.kind == "plain":
        all_edges: Any = torch.arange(whole.num_edges())
        my_edges: Any = edges[PLAIN]
    else:
        all_edges = {t: torch.arange(whole.num_edges(t)) for t in whole.canonical_etypes}
        my_edges = edges
    all_keywords, my_keywords = case.keywords(all_edges), case.keywords(my_edges)
    all_inputs = {t: x.clone().requires_grad_() for t, x in inputs.items()}
    my_inputs = {t: x[nodes[t]].clone().requires_grad_() for t, x in inputs.items()}
    generator = torch.Generator().manual_seed(4)
    errors: dict[str, float] = {}
    optimizers = [
        torch.optim.Adam(list(m.parameters()), lr=LEARNING_RATE) if list(m.parameters()) else None
        for m in (reference, layer)
    ]
    for step in range(num_steps):
        expected = forward(reference, whole, case.kind, all_inputs, all_keywords)
        found = forward(layer, sharded, case.kind, my_inputs, my_keywords)
        if step == 0:
            weights = {
                t: torch.randn(out.shape, generator=generator) for t, out in expected.items()
            }
            my_weights = {t: w[nodes[t]] for t, w in weights.items()}
            errors["output"] = max(gap(found[t], expected[t][nodes[t]]) for t in expected)
        loss, my_loss = weighted_sum(expected, weights), weighted_sum(found, my_weights)
        loss.backward()
        my_loss.backward()
        graphshard.gather_grads(layer)
        if step == 0:
            errors["loss"] = gap(summed_over_ranks(my_loss, my_loss), loss.detach())
            errors["input gradient"] = max(
                gap(grad_of(my_inputs[t]), grad_of(x)[nodes[t]]) for t, x in all_inputs.items()
            )
            pairs = zip(reference.parameters(), layer.parameters(), strict=True)
            errors["parameter gradient"] = max(
                (gap(grad_of(q), grad_of(p)) for p, q in pairs), default=0.0
            )
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    pairs = zip(reference.parameters(), layer.parameters(), strict=True)
    errors["parameters after Adam"] = max((gap(q, p) for p, q in pairs), default=0.0)
    return errors


def check_all_layers(
    rank: int, world_size: int, parts: str, kind: str, mode: str, num_steps: int
) -> list[str]:
    """Names of layers that differ, with the differences."""
    torch.set_default_dtype(torch.float64)
    try:
        whole = graph_of(kind)
        data = graphshard.load_dgl_partition_data(parts, rank)
        sharded = construct(data, mode)
        problems = []
        for case in nn_layer_cases(kind):  # type: ignore[arg-type]
            if case.oneshot_only and mode != "oneshot":
                continue
            errors = compare(case, whole, sharded, data, num_steps)
            largest = torch.tensor(list(errors.values()))
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            wrong = {k: float(v) for k, v in zip(errors, largest, strict=True) if not v < TOLERANCE}
            if wrong:
                problems.append(f"{case.name}: {wrong}")
        return problems
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = [
    (num_ranks, how)
    for num_ranks in (1, 2, 3, 5)
    for how in (ASSIGNMENTS if num_ranks > 1 else ("metis",))
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "typed"])
@pytest.mark.parametrize(("num_ranks", "how"), SETTINGS)
@pytest.mark.timeout(300)
def test_n_ranks_equal_one_process(
    tmp_path: Path, num_ranks: int, how: str, kind: str, mode: str
) -> None:
    parts = write_parts(tmp_path, graph_of(kind), num_ranks, how)
    arguments = (parts, kind, mode, NUM_STEPS)
    for problems in run_ranks(check_all_layers, num_ranks, *arguments, timeout=280.0):
        assert problems == []


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """A wrong graph is noticed: the same parts against a graph with one edge moved."""
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    problems = run_ranks(check_against_a_changed_graph, 2, parts)
    assert all(largest > 1e-3 for largest in problems)


def check_against_a_changed_graph(rank: int, world_size: int, parts: str) -> float:
    torch.set_default_dtype(torch.float64)
    try:
        src, dst = graph_of("plain").edges()
        dst = dst.clone()
        dst[0] = (dst[0] + 1) % 20
        changed = graphshard.graph((src, dst), num_nodes=25)
        data = graphshard.load_dgl_partition_data(parts, rank)
        case = next(c for c in nn_layer_cases("plain") if c.name == "gcn-none-3")
        errors = compare(case, changed, construct(data, "oneshot"), data, 1)
        worst = torch.tensor(max(errors.values()))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)
    finally:
        torch.set_default_dtype(torch.float32)
