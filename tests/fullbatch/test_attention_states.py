# SPDX-License-Identifier: Apache-2.0
"""Attention: states of destinations in place of rows. 1, 2, 3 and 5 gloo ranks.

The oracle is a softmax over a dense matrix of scores in plain torch, in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shards import graph_of, own_nodes, write_parts
from torch import Tensor

import graphshard
from graphshard import comm
from graphshard.fullbatch import execution
from graphshard.graph import attend
from graphshard.ops import Attention
from graphshard.testing import run_ranks

HEADS, DIM, SCORE_DIM = 3, 4, 5


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def operands_of(score: str, num_src: int, num_dst: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the whole graph, rounded to a dtype."""
    rows = {"values": random(num_src, HEADS, DIM)}
    if score == "additive":
        rows |= {"src": 3 * random(num_src, HEADS, seed=1), "dst": random(num_dst, HEADS, seed=2)}
    elif score == "dot":
        rows |= {"src": random(num_src, HEADS, SCORE_DIM, seed=1)}
        rows |= {"dst": random(num_dst, HEADS, SCORE_DIM, seed=2)}
    else:
        rows |= {"dst": random(num_dst, HEADS, DIM, seed=2), "vector": random(HEADS, DIM, seed=3)}
    return {name: value.to(dtype) for name, value in rows.items()}


def dense(score: str, rows: dict[str, Tensor], src: Tensor, dst: Tensor) -> Tensor:
    """The attention, by a softmax over dense columns, an entry for each edge."""
    values, of_dst = rows["values"], rows["dst"]
    if score == "additive":
        scores = F.leaky_relu(rows["src"][src] + of_dst[dst], 0.2)
    elif score == "dot":
        scores = (rows["src"][src] * of_dst[dst]).sum(-1)
    else:
        scores = (F.leaky_relu(values[src] + of_dst[dst], 0.2) * rows["vector"]).sum(-1)
    table = scores.new_full((of_dst.shape[0], src.numel(), HEADS), -torch.inf)
    edges = torch.arange(src.numel())
    table = table.index_put((dst, edges), scores)
    weights = table.softmax(1).nan_to_num(0.0) if src.numel() else table
    return torch.einsum("neh,ehd->nhd", weights, values[src])


def attention_of(score: str, rows: dict[str, Tensor], **options: Any) -> Attention:
    make: Any = getattr(Attention, score)
    return make(**rows, **options)


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


def total_bytes(trace: comm.Trace) -> int:
    return int(comm.all_reduce(torch.tensor([trace.total_bytes])))


def run_once(
    view: Any, score: str, rows: dict[str, Tensor], cotangent: Tensor
) -> tuple[list[Tensor], int]:
    """The result and the gradients, and what all ranks sent."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in rows.items()}
    with comm.trace() as trace:
        result = attend(view, attention_of(score, leaves))
        assert result is not None
        (result * cotangent).sum().backward()
    grads = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
    assert len(grads) == len(leaves)
    return [result.detach(), *grads], total_bytes(trace)


def check(rank: int, world_size: int, parts: str, kind: str) -> None:
    execution.LEAST_SAVED = -(1 << 40)  # wherever states can travel
    whole, saved = graph_of(kind), 0
    data = graphshard.load_dgl_partition_data(parts, rank)
    nodes = own_nodes(data)
    graphs = [
        graphshard.construct_full_graph(data, mode="oneshot", partial_sums=sums)
        for sums in (True, False)
    ]
    for etype in data.canonical_etypes:
        src, dst = (ids.long() for ids in whole.edges(etype=etype))
        own_src, own_dst = nodes[etype[0]], nodes[etype[2]]
        counts = whole.num_nodes(etype[0]), whole.num_nodes(etype[2])
        cases = [(score, torch.float64) for score in ("additive", "dot", "joint")]
        for score, dtype in [*cases, ("additive", torch.float32), ("additive", torch.bfloat16)]:
            bound = {torch.float64: 1e-9, torch.float32: 2e-5}.get(dtype, 0.05)
            rows = operands_of(score, *counts, dtype)
            cotangent = random(counts[1], HEADS, DIM, seed=4).to(dtype)
            exact = {name: value.double().requires_grad_() for name, value in rows.items()}
            expected = dense(score, exact, src, dst)
            (expected * cotangent.double()).sum().backward()
            own = dict(rows)
            for name in rows.keys() - {"vector"}:
                own[name] = rows[name][own_dst if name == "dst" else own_src]
            sent = []
            for graph in graphs:
                view = graph[etype] if len(graph.canonical_etypes) > 1 else graph
                run_once(view, score, own, cotangent[own_dst])  # the first builds
                found, num_bytes = run_once(view, score, own, cotangent[own_dst])
                again, _ = run_once(view, score, own, cotangent[own_dst])
                assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
                sent.append(num_bytes)
                result, *grads = found
                close(result, expected.detach()[own_dst], bound)
                for (name, leaf), grad in zip(exact.items(), grads, strict=True):
                    assert leaf.grad is not None
                    if name == "vector":
                        close(comm.all_reduce(grad.clone()), leaf.grad, bound)
                        continue
                    close(grad, leaf.grad[own_dst if name == "dst" else own_src], bound)
            saved += score == "additive" and dtype == torch.float64 and sent[0] < sent[1]
    assert saved or world_size == 1  # it says something


CASES = [
    (1, "metis", "plain"),
    (2, "random", "typed"),
    (3, "random", "plain"),
    (5, "empty_part", "plain"),
    pytest.param(2, "random", "plain", marks=pytest.mark.exhaustive),
    pytest.param(3, "metis", "typed", marks=pytest.mark.exhaustive),
    pytest.param(5, "empty_part", "typed", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("num_ranks", "how", "kind"), CASES)
def test_attention_is_that_of_a_dense_softmax(
    tmp_path: Path, num_ranks: int, how: str, kind: str
) -> None:
    run_ranks(check, num_ranks, write_parts(tmp_path, graph_of(kind), num_ranks, how), kind)
