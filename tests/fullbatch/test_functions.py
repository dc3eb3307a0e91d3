# SPDX-License-Identifier: Apache-2.0
"""Every built-in function and reduction on a sharded graph, against plain torch edge by edge.

Results and gradients, in both modes, with 1, 3 and 5 ranks, in float64. Every pair of message,
reduction, mode and cut is tried; the whole product in ``make test-all``.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import PLAIN, graph_of, own_edges, own_nodes, write_parts
from torch import Tensor

import graphshard
from case_selection import pairwise
from graphshard import comm
from graphshard import function as fn
from graphshard.testing import run_ranks

OPS = ("add", "sub", "mul", "div", "dot")
SIDES = ("u", "v", "e")
MESSAGES = [f"copy_{side}" for side in ("u", "e")] + [
    f"{a}_{op}_{b}" for a, b in itertools.permutations(SIDES, 2) for op in OPS
]
REDUCES = ("sum", "mean", "max", "min")
MODES = ("oneshot", "sequential")
CUTS = ((1, "random"), (3, "empty_part"), (5, "random"))
WIDTH = 3


def values(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fields of the whole graph; no two entries are equal, and none is near 0."""
    whole = graph_of("plain")
    found = {}
    for side, rows in (
        ("u", whole.num_nodes()),
        ("v", whole.num_nodes()),
        ("e", whole.num_edges()),
    ):
        generator = torch.Generator().manual_seed(ord(side))
        drawn = torch.rand(rows, WIDTH, generator=generator, dtype=torch.float64) + 0.5
        found[side] = drawn.to(dtype)
    return found


def by_hand(name: str, reduce: str, fields: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(message of each edge, result at each node), in float64."""
    src, dst = graph_of("plain").edges()
    wide = {side: rows.double() for side, rows in fields.items()}
    at = {"u": wide["u"][src], "v": wide["v"][dst], "e": wide["e"]}
    if name.startswith("copy"):
        message = at[name[-1]]
    else:
        left, op, right = name.split("_")
        a, b = at[left], at[right]
        message = {
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "mul": lambda: a * b,
            "div": lambda: a / b,
            "dot": lambda: (a * b).sum(-1, keepdim=True),
        }[op]()
    kind = f"a{reduce}" if reduce in ("max", "min") else reduce
    zeros = message.new_zeros(graph_of("plain").num_nodes(), *message.shape[1:])
    index = dst.view(-1, 1).expand_as(message)
    return message, zeros.scatter_reduce(0, index, message, kind, include_self=False)


@cache
def all_pairs() -> list[tuple[Any, ...]]:
    return pairwise(list(itertools.product(MODES, CUTS, MESSAGES, REDUCES)))


def gaps(
    rank: int, world_size: int, parts: str, mode: str, functions: list[tuple[str, str]]
) -> dict[str, float]:
    """Largest relative difference of each function's results and gradients."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode)
    nodes, edges = own_nodes(data)["_N"], own_edges(data)[PLAIN]
    whole, worst = values("plain", torch.float64), {}
    for name, reduce in functions:
        full = {side: rows.clone().requires_grad_() for side, rows in whole.items()}
        message, expected = by_hand(name, reduce, full)
        (expected.sin().sum() + (message * message).sum()).backward()
        rows = {"u": nodes, "v": nodes, "e": edges}
        mine = {side: whole[side][rows[side]].clone().requires_grad_() for side in SIDES}
        with graph.local_scope():
            graph.srcdata["x"], graph.edata["x"] = mine["u"], mine["e"]
            graph.dstdata["y"] = mine["v"]
            names = ["y" if side == "v" else "x" for side in name.split("_") if side in SIDES]
            function = getattr(fn, name)
            graph.update_all(function(*names, "m"), getattr(fn, reduce)("m", "out"))
            graph.apply_edges(function(*names, "e"))
            out, on_edges = graph.dstdata["out"], graph.edata["e"]
            if not isinstance(on_edges, Tensor):
                on_edges = on_edges.materialize()
        loss = out.double().sin().sum() + (on_edges.double() ** 2).sum()
        loss.backward()
        pairs = [(out, expected[nodes]), (on_edges, message[edges])]
        for side in SIDES:
            wanted = full[side].grad
            found = mine[side].grad
            if wanted is not None:
                found = torch.zeros_like(mine[side]) if found is None else found
                pairs.append((found, wanted[rows[side]]))
        found_gaps = [
            float(((a.double() - b).abs() / (1 + b.abs())).detach().max())
            for a, b in pairs
            if a.numel()
        ]
        worst[f"{name} {reduce}"] = max(found_gaps, default=0.0)
    return worst


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", CUTS)
def test_every_function_and_reduction(
    tmp_path: Path, mode: str, cut: tuple[int, str], run_all: bool
) -> None:
    num_ranks, how = cut
    functions = list(itertools.product(MESSAGES, REDUCES))
    if not run_all:
        functions = [(name, by) for m, c, name, by in all_pairs() if (m, c) == (mode, cut)]
    parts = write_parts(tmp_path, graph_of("plain"), num_ranks, how)
    for worst in run_ranks(gaps, num_ranks, parts, mode, functions):
        assert len(worst) == len(functions)
        assert not {name: gap for name, gap in worst.items() if not gap < 1e-10}


def several(rank: int, world_size: int, parts: str) -> tuple[float, dict[str, int]]:
    """One call for all relations, of which two read one source type."""
    whole, data = graph_of("typed"), graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    nodes = own_nodes(data)
    rows = {t: (torch.arange(whole.num_nodes(t) * 2.0).view(-1, 2) * 0.7).sin() for t in nodes}

    def run(where: Any, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        given = {t: x.double().requires_grad_() for t, x in inputs.items()}
        with where.local_scope():
            for t, x in given.items():
                where.nodes[t].data["h"] = x
            functions = {
                etype: (fn.copy_u("h", "m"), getattr(fn, reduce)("m", "out"))
                for etype, reduce in zip(where.etypes, itertools.cycle(REDUCES), strict=False)
            }
            where.multi_update_all(functions, "sum")
            out = {t: where.nodes[t].data["out"] for t in ("a", "b")}
        loss = sum(x.square().sum() for x in out.values())
        return out, list(torch.autograd.grad(loss, list(given.values()), allow_unused=True))

    expected, wanted = run(whole, rows)
    mine = {t: rows[t][nodes[t]] for t in rows}
    run(graph, mine)
    with comm.trace() as trace:
        out, grads = run(graph, mine)
    worst = [0.0]
    for t, found in out.items():
        gap = (found - expected[t][nodes[t]]).detach().abs()
        worst += [float(gap.max())] if len(found) else []
    for t, a, b in zip(rows, wanted, grads, strict=True):
        gap = (b - a[nodes[t]]).abs()
        worst += [float(gap.max())] if len(gap) else []
    return max(worst), dict(trace.calls)


@pytest.mark.parametrize(("num_ranks", "how"), [(2, "random"), (3, "empty_part")])
def test_relations_of_one_call_share_an_exchange(tmp_path: Path, num_ranks: int, how: str) -> None:
    """Each of three source types travels once forward and once back."""
    parts = write_parts(tmp_path, graph_of("typed"), num_ranks, how)
    for gap, calls in run_ranks(several, num_ranks, parts):
        assert gap < 1e-10
        assert calls == {"all_to_all": 6}
