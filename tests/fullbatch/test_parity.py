# SPDX-License-Identifier: Apache-2.0
"""N ranks equal one process: every layer, mode, number of ranks and way of cutting the graph.

Each rank computes the single-process result on the whole graph once, and compares its own rows with
it, in float64, to 1e-10: outputs, loss, gradients of inputs and parameters, and the parameters
after steps of Adam. Uses 1, 2, 3 and 5 gloo ranks. Every pair of layer, mode, number of ranks and
cut runs always, with two steps; the whole product with five in ``make test-all``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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

from case_selection import pairwise

MODES = ("oneshot", "sequential", "sequential-kept")
TOLERANCE = 1e-10
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


def prepare(
    case: LayerCase, whole: graphshard.Graph
) -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer | None]:
    """The layer, the input rows of all nodes, and the optimizer; the same whenever it is called."""
    torch.manual_seed(0)
    layer = case.make(whole.canonical_etypes)
    ties = "max" in case.name or "pool" in case.name
    parameters = list(layer.parameters())
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE) if parameters else None
    return layer, features(whole, IN_FEATS, ties), optimizer


def advance(optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@dataclass
class Expected:
    """What one process finds: of the first step, and the parameters after all of them."""

    outputs: Rows
    weights: Rows
    loss: Tensor
    input_gradients: Rows
    parameter_gradients: list[Tensor]
    parameters: list[Tensor]


def expect(case: LayerCase, whole: graphshard.Graph, num_steps: int) -> Expected:
    layer, rows, optimizer = prepare(case, whole)
    if case.kind == "plain":
        edges: Any = torch.arange(whole.num_edges())
    else:
        edges = {t: torch.arange(whole.num_edges(t)) for t in whole.canonical_etypes}
    keywords = case.keywords(edges)
    inputs = {t: x.requires_grad_() for t, x in rows.items()}
    generator = torch.Generator().manual_seed(4)
    for step in range(num_steps):
        outputs = forward(layer, whole, case.kind, inputs, keywords)
        if step == 0:
            weights = {t: torch.randn(out.shape, generator=generator) for t, out in outputs.items()}
        loss = weighted_sum(outputs, weights)
        loss.backward()
        if step == 0:
            first = Expected(
                {t: out.detach() for t, out in outputs.items()},
                weights,
                loss.detach(),
                {t: grad_of(x).clone() for t, x in inputs.items()},
                [grad_of(p).clone() for p in layer.parameters()],
                [],
            )
        advance(optimizer)
    first.parameters = [p.detach() for p in layer.parameters()]
    return first


@cache
def expected_of(kind: str, name: str, num_steps: int) -> Expected:
    """`expect`, once in the life of a rank."""
    case = next(c for c in nn_layer_cases(kind) if c.name == name)  # type: ignore[arg-type]
    return expect(case, graph_of(kind), num_steps)


class Trial:
    """A layer on this rank's part, beside what one process finds."""

    def __init__(
        self,
        case: LayerCase,
        expected: Expected,
        whole: graphshard.Graph,
        data: graphshard.PartitionData,
    ) -> None:
        self.case, self.expected = case, expected
        self.nodes, edges = own_nodes(data), own_edges(data)
        self.layer, rows, self.optimizer = prepare(case, whole)
        self.keywords = case.keywords(edges[PLAIN] if case.kind == "plain" else edges)
        self.inputs = {t: x[self.nodes[t]].requires_grad_() for t, x in rows.items()}
        self.weights = {t: w[self.nodes[t]] for t, w in expected.weights.items()}
        self.loss = torch.zeros(())
        self.errors: dict[str, float] = {}

    def differentiate(self, sharded: graphshard.GraphShardManager, step: int) -> None:
        found = forward(self.layer, sharded, self.case.kind, self.inputs, self.keywords)
        loss = weighted_sum(found, self.weights)
        loss.backward()
        if step == 0:
            self.loss = loss.detach()
            outputs = self.expected.outputs
            self.errors["output"] = max(gap(found[t], outputs[t][self.nodes[t]]) for t in outputs)
            self.errors["input gradient"] = max(
                gap(grad_of(self.inputs[t]), x[self.nodes[t]])
                for t, x in self.expected.input_gradients.items()
            )

    def advance(self, step: int) -> None:
        """With the gradients of all ranks."""
        if step == 0:
            pairs = zip(self.expected.parameter_gradients, self.layer.parameters(), strict=True)
            self.errors["parameter gradient"] = max(
                (gap(grad_of(q), p) for p, q in pairs), default=0.0
            )
        advance(self.optimizer)

    def finish(self, total_loss: Tensor) -> None:
        pairs = zip(self.expected.parameters, self.layer.parameters(), strict=True)
        self.errors["parameters after Adam"] = max((gap(q, p) for p, q in pairs), default=0.0)
        self.errors["loss"] = gap(total_loss, self.expected.loss)


def compare(trials: list[Trial], sharded: graphshard.GraphShardManager, num_steps: int) -> Tensor:
    """Largest differences on any rank, a row per layer; the layers take their steps together."""
    layers = nn.ModuleList(trial.layer for trial in trials)
    for step in range(num_steps):
        for trial in trials:
            trial.differentiate(sharded, step)
        graphshard.gather_grads(layers)
        for trial in trials:
            trial.advance(step)
    losses = torch.stack([trial.loss for trial in trials])
    dist.all_reduce(losses)
    for trial, loss in zip(trials, losses, strict=True):
        trial.finish(loss)
    largest = torch.tensor([list(trial.errors.values()) for trial in trials])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def check_layers(
    rank: int,
    world_size: int,
    parts: str,
    kind: str,
    mode: str,
    num_steps: int,
    names: Sequence[str],
) -> list[str]:
    """Names of layers that differ, with the differences."""
    torch.set_default_dtype(torch.float64)
    try:
        whole = graph_of(kind)
        data = graphshard.load_dgl_partition_data(parts, rank)
        trials = [
            Trial(case, expected_of(kind, case.name, num_steps), whole, data)
            for case in nn_layer_cases(kind)  # type: ignore[arg-type]
            if case.name in names
        ]
        assert len(trials) == len(names)
        problems = []
        largest = compare(trials, construct(data, mode), num_steps)
        for trial, errors in zip(trials, largest.tolist(), strict=True):
            wrong = {k: v for k, v in zip(trial.errors, errors, strict=True) if not v < TOLERANCE}
            if wrong:
                problems.append(f"{trial.case.name}: {wrong}")
        return problems
    finally:
        torch.set_default_dtype(torch.float32)


def layers(kind: Any, mode: str) -> list[str]:
    return [c.name for c in nn_layer_cases(kind) if mode == "oneshot" or not c.oneshot_only]


PRODUCT = [
    case
    for case in itertools.product((1, 2, 3, 5), ASSIGNMENTS, ("plain", "typed"), MODES)
    if case[0] > 1 or case[1] == "metis"
]
# Pairs with "plain and oneshot", too: some layers run there alone.
ALWAYS = {c[:4] for c in pairwise([(*case, case[2:] == ("plain", "oneshot")) for case in PRODUCT])}
CASES = [
    pytest.param(*case, marks=[] if case in ALWAYS else pytest.mark.exhaustive) for case in PRODUCT
]


@cache
def all_pairs() -> list[tuple[Any, ...]]:
    """Of the cases that run always: layers such that each meets every value of the other axes."""
    return pairwise([(*case, name) for case in sorted(ALWAYS) for name in layers(*case[2:])])


@pytest.mark.parametrize(("num_ranks", "how", "kind", "mode"), CASES)
@pytest.mark.timeout(300)
def test_n_ranks_equal_one_process(
    tmp_path: Path, num_ranks: int, how: str, kind: str, mode: str, run_all: bool
) -> None:
    case = (num_ranks, how, kind, mode)
    names = layers(kind, mode) if run_all else [c[4] for c in all_pairs() if c[:4] == case]
    parts = write_parts(tmp_path, graph_of(kind), num_ranks, how)
    arguments = (parts, kind, mode, 5 if run_all else 2, names)
    for problems in run_ranks(check_layers, num_ranks, *arguments, timeout=280.0):
        assert problems == []


def test_every_layer_meets_every_number_of_ranks_cut_and_mode() -> None:
    met = set()
    for num_ranks, how, _, mode, name in all_pairs():
        met |= {(name, num_ranks), (name, how), (name, mode)}
    for kind in ("plain", "typed"):
        for mode in MODES:
            for name in layers(kind, mode):
                assert {(name, value) for value in (1, 2, 3, 5, *ASSIGNMENTS, mode)} <= met


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
        trial = Trial(case, expect(case, changed, 1), changed, data)
        return float(compare([trial], construct(data, "oneshot"), 1).max())
    finally:
        torch.set_default_dtype(torch.float32)
