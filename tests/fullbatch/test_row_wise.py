# SPDX-License-Identifier: Apache-2.0
"""Operands whose first dimension happens to be the number of rows: no size is taken for a meaning.

Against plain torch on the whole graph. 1-3 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from graphshard import function as fn
from graphshard.fullbatch import DeferredEdges
from graphshard.ops import affine
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks

NUM_EDGES = 12  # and NUM_EDGES / num_ranks of them on every rank

# name -> function of (edge values [E, k], stored edge values [E, k], parameters of k rows)
# where k is the number of edges of each rank.
Function = Callable[[Any, Tensor, dict[str, Tensor]], Any]
DEFERRED: dict[str, Function] = {
    "linear": lambda e, w, p: F.linear(e, p["matrix"]),
    "linear by name": lambda e, w, p: F.linear(input=e, weight=p["matrix"], bias=p["vector"]),
    "linear with a bias": lambda e, w, p: F.linear(e, p["matrix"], p["vector"]),
    "matmul": lambda e, w, p: e @ p["matrix"],
    "matmul of a vector": lambda e, w, p: torch.matmul(e, p["vector"]),
    "one row": lambda e, w, p: e * p["row"],
    "one row first": lambda e, w, p: p["row"] - e,
    "a bias": lambda e, w, p: e + p["vector"],
    "stored values": lambda e, w, p: e * w,
    "where": lambda e, w, p: torch.where(w > 0, e, p["row"]),
    "where of stored values": lambda e, w, p: torch.where(w > 0, e, w),
    "type of another": lambda e, w, p: e.type_as(p["matrix"][:, :2]),
    "sum by name": lambda e, w, p: torch.sum(input=e, dim=-1),
    "batches with a matrix": lambda e, w, p: e.unsqueeze(1) @ p["matrix"],
    "batches with batches": lambda e, w, p: e.unsqueeze(1) @ (w.unsqueeze(2) * p["row"]),
    "batches with one batch": lambda e, w, p: e.unsqueeze(1) @ p["matrix"].unsqueeze(0),
    "matrix with batches": lambda e, w, p: p["matrix"] @ e.unsqueeze(2),
    "edges with edges": lambda e, w, p: e.unsqueeze(1) @ e.unsqueeze(2),
}
WHOLE: dict[str, Function] = {
    "addmm": lambda e, w, p: torch.addmm(p["vector"], e, p["matrix"]),
    "layer norm": lambda e, w, p: F.layer_norm(e, e.shape[1:], p["vector"], p["vector"]),
    "embedding": lambda e, w, p: F.embedding(
        (e.detach().sum(1) * 0 + w[:, 0].abs() * e.shape[1]).long(), p["matrix"]
    ),
    "cat": lambda e, w, p: torch.cat([e, w, p["row"].expand_as(w)], 1),
    "stack": lambda e, w, p: torch.stack([e, w], 1),
    "affine": lambda e, w, p: affine([(e, p["matrix"])], p["vector"]),
    "einsum": lambda e, w, p: torch.einsum("ek,kl->el", e, p["matrix"]),
    "bilinear": lambda e, w, p: F.bilinear(e, w, p["matrix"].unsqueeze(0)),
    "rows by number": lambda e, w, p: e[torch.arange(e.shape[0])],
    "scaled in place": lambda e, w, p: w.clone().mul_(e),
}


def whole_graph(num_ranks: int) -> tuple[graphshard.Graph, Tensor]:
    """Every rank owns two nodes and NUM_EDGES / num_ranks edges."""
    owner = torch.arange(2 * num_ranks) // 2
    dst = torch.arange(NUM_EDGES) % (2 * num_ranks)
    src = (5 * torch.arange(NUM_EDGES) + 1) % (2 * num_ranks)
    return graphshard.graph((src, dst), num_nodes=2 * num_ranks), owner


def errors_of(rank: int, num_ranks: int, parts: str) -> dict[str, tuple[bool, float]]:
    """By function: whether it was deferred, and the largest difference to the whole graph."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    sharded = graphshard.construct_full_graph(data, mode="sequential")
    mine, my_edges = data.node_features["_N/orig_id"], data.edge_features["_N:_E:_N/orig_id"]
    k = sharded.num_edges()
    assert k == NUM_EDGES // num_ranks
    torch.manual_seed(0)
    graph, _ = whole_graph(num_ranks)
    nodes = torch.randn(graph.num_nodes(), k, dtype=torch.float64)
    stored = torch.randn(NUM_EDGES, k, dtype=torch.float64).clamp(-0.9, 0.9)
    parameters = {
        "matrix": torch.randn(k, k, dtype=torch.float64),
        "vector": torch.randn(k, dtype=torch.float64),
        "row": torch.randn(1, k, dtype=torch.float64),
    }
    found = {}
    for name, function in {**DEFERRED, **WHOLE}.items():
        values, grads, deferred = [], [], False
        for g, rows, w in ((graph, nodes, stored), (sharded, nodes[mine], stored[my_edges])):
            rows = rows.clone().requires_grad_()
            leaves = {key: p.clone().requires_grad_() for key, p in parameters.items()}
            g.ndata["h"] = rows
            g.edata["w"] = w
            g.apply_edges(fn.u_sub_v("h", "h", "e"))
            value = function(g.edata["e"], g.edata["w"], leaves)
            if isinstance(value, DeferredEdges):
                deferred, value = True, value.materialize()
            (value**2).sum().backward()
            values.append(value.detach())
            used = (rows, *leaves.values())
            grads.append([torch.zeros_like(p) if p.grad is None else p.grad for p in used])
        for p in grads[1][1:]:
            torch.distributed.all_reduce(p)
        differences = [values[0][my_edges] - values[1], grads[0][0][mine] - grads[1][0]]
        differences += [a - b for a, b in zip(grads[0][1:], grads[1][1:], strict=True)]
        found[name] = deferred, max(float(d.abs().max()) for d in differences)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_as_many_rows_as_edges(tmp_path: Path, num_ranks: int) -> None:
    graph, owner = whole_graph(num_ranks)
    partition_graph(graph, "g", num_ranks, str(tmp_path), part_method=owner, quiet=True)
    for found in run_ranks(errors_of, num_ranks, str(tmp_path / "g.json")):
        assert {name: error for name, (_, error) in found.items() if error > 1e-10} == {}
        assert {name for name, (deferred, _) in found.items() if deferred} == set(DEFERRED)


def two_by_two(rank: int, num_ranks: int, parts: str) -> list[str]:
    """Shapes that only agree with the two sample rows by which a function is tried out."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    g = graphshard.construct_full_graph(data, mode="sequential")
    g.ndata["h"] = torch.randn(g.num_nodes(), 2)
    g.apply_edges(fn.u_add_v("h", "h", "e"))
    e = g.edata["e"]
    outcomes = []
    for function in (
        lambda: torch.ones(2, 2) * e,  # two rows for NUM_EDGES edges
        lambda: e.sum(-1) * e,  # a number for each edge beside two columns
    ):
        try:
            outcomes.append(f"{tuple(function().shape)}")
        except (ValueError, RuntimeError) as error:
            outcomes.append(type(error).__name__ + ": " + str(error))
    outcomes.append(f"{tuple((torch.ones(2, e.shape[0], 2) * e).shape)}")
    return outcomes


def test_sizes_of_the_sample_mean_nothing(tmp_path: Path) -> None:
    graph, owner = whole_graph(1)
    partition_graph(graph, "g", 1, str(tmp_path), part_method=owner, quiet=True)
    ((too_few, mixed, batched),) = run_ranks(two_by_two, 1, str(tmp_path / "g.json"))
    assert too_few.startswith("ValueError: a tensor that is combined with deferred edge values of")
    assert "(12, 2) needs as many rows, or one (got shape (2, 2))" in too_few
    assert mixed.startswith("RuntimeError: The size of tensor a (12) must match")
    assert batched == "(2, 12, 2)"


def test_layers_of_edges_as_wide_as_edges_are_many(tmp_path: Path) -> None:
    """The reported call: a linear layer of torch whose weight has a row for each local edge."""
    graph, owner = whole_graph(3)
    partition_graph(graph, "g", 3, str(tmp_path), part_method=owner, quiet=True)
    assert run_ranks(through_a_module, 3, str(tmp_path / "g.json")) == [0.0] * 3


def through_a_module(rank: int, num_ranks: int, parts: str) -> float:
    data = graphshard.load_dgl_partition_data(parts, rank)
    torch.manual_seed(0)
    layer = nn.Linear(8, 4)
    rows = torch.randn(6, 8)
    found = []
    for g, h in (
        (whole_graph(3)[0], rows),
        (graphshard.construct_full_graph(data, mode="sequential"), rows),
    ):
        ids = torch.arange(6) if g.num_nodes() == 6 else data.node_features["_N/orig_id"]
        g.ndata["h"] = h[ids]
        g.apply_edges(fn.u_mul_v("h", "h", "t"))
        g.edata["t"] = layer(g.edata["t"])
        g.update_all(fn.copy_e("t", "m"), fn.sum("m", "out"))
        found.append(g.dstdata["out"])
    mine = data.node_features["_N/orig_id"]
    return float((found[0][mine] - found[1]).detach().abs().max().round(decimals=5))
