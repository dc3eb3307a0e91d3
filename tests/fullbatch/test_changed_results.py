# SPDX-License-Identifier: Apache-2.0
"""Results of layers that the caller changes in place, on ranks; the oracle changes copies.

The oracle is the layer in one process, whose result goes through operations of torch that make new
tensors. Uses 1, 2 and 3 gloo ranks; one start for many checks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphshard.dgl.nn.functional import edge_softmax
from torch import Tensor, nn

import graphshard
from graphshard import function as fn
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))

from nn_layer_cases import IN_FEATS, LayerCase, allow_zero_in_degree, nn_layer_cases
from shards import PLAIN, features, graph_of, own_edges, own_nodes, write_parts

MODES = ("oneshot", "sequential", "sequential-kept")


class OwnAttention(nn.Module):
    """Attention as a user writes it; deferred, where the graph is sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(IN_FEATS, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            h = self.project(x)
            graph.srcdata["h"], graph.srcdata["l"] = h, self.score(h)
            graph.dstdata["r"] = self.score(h)
            graph.apply_edges(fn.u_add_v("l", "r", "e"))
            graph.edata["a"] = edge_softmax(graph, F.leaky_relu(graph.edata["e"]))
            graph.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "o"))
            out: Tensor = graph.dstdata["o"]
            return out


def own_cases() -> list[LayerCase]:
    gat = (IN_FEATS, 3, 2)
    relu: dict[str, Any] = {"activation": F.relu}
    return [
        LayerCase("own-attention", lambda lib, _: OwnAttention()),
        LayerCase("gat-relu", lambda lib, _: lib.GATConv(*gat, **relu)),
        LayerCase("gat-dropout", lambda lib, _: lib.GATConv(*gat, attn_drop=0.4)),
        LayerCase("gat-wide", lambda lib, _: lib.GATConv(IN_FEATS, 64, 2)),
    ]


def cases(kind: Any) -> list[LayerCase]:
    """Of attention, of the largest of messages, and of relations with both."""
    words = ("gat", "agnn", "pool", "max", "sage-mean-9")
    found = [
        case
        for case in nn_layer_cases(kind)
        if any(word in case.name for word in words)
        # Torch keeps the result of tanh itself, here and in DGL.
        and not ("no-bias" in case.name or "weighted" in case.name)
    ]
    return found + (own_cases() if kind == "plain" else [])


CHANGES: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda x: F.relu(x, inplace=True), F.relu),
    (lambda x: x.mul_(-1.5).add_(0.25), lambda x: x * -1.5 + 0.25),
]


def run(
    layer: nn.Module, graph: Any, rows: dict[str, Tensor], keywords: Any, change: Any, twice: bool
) -> list[dict[str, Tensor]]:
    """Outputs, and gradients of the rows; those of parameters are left on the layer."""
    leaves = {t: x.clone().requires_grad_() for t, x in rows.items()}
    torch.manual_seed(7)  # the mask of dropout is by edge ids
    found = layer(graph, leaves if len(rows) > 1 else leaves["_N"], **keywords)
    outputs = found if isinstance(found, dict) else {"_N": found}
    outputs = {t: change(out) for t, out in outputs.items()}
    loss = torch.stack([out.sin().sum() for out in outputs.values()]).sum()
    if twice:
        loss.backward(retain_graph=True)
    loss.backward()
    grads = {t: torch.zeros_like(x) if x.grad is None else x.grad for t, x in leaves.items()}
    return [{t: out.detach() for t, out in outputs.items()}, grads]


def check(rank: int, world_size: int, parts: str, kind: str) -> list[str]:
    torch.set_default_dtype(torch.float64)
    try:
        whole, data = graph_of(kind), graphshard.load_dgl_partition_data(parts, rank)
        nodes, problems = own_nodes(data), []
        graphs = {}
        for mode in MODES:
            name, _, kept = mode.partition("-")
            graphs[mode] = graphshard.construct_full_graph(data, name, rematerialize=not kept)
        everything = features(whole, IN_FEATS, ties=False)
        rows = {t: x[nodes[t]] for t, x in everything.items()}
        edges: Any = {t: torch.arange(whole.num_edges(t)) for t in whole.canonical_etypes}
        mine: Any = own_edges(data)
        if kind == "plain":
            edges, mine = edges[PLAIN], mine[PLAIN]
        for case in cases(kind):
            for number, (in_place, copies) in enumerate(CHANGES):
                layers = []
                for _ in range(1 + len(MODES)):
                    torch.manual_seed(0)
                    layers.append(case.make(whole.canonical_etypes))
                    allow_zero_in_degree(layers[-1])
                given = whole, everything, case.keywords(edges)
                expected = run(layers[0], *given, copies, number > 0)
                for mode, layer in zip(MODES, layers[1:], strict=True):
                    if case.oneshot_only and mode != "oneshot":
                        continue
                    keywords = case.keywords(mine)
                    found = run(layer, graphs[mode], rows, keywords, in_place, number > 0)
                    graphshard.gather_grads(layer)
                    pairs = [
                        (one[t], other[t][nodes[t]])
                        for one, other in zip(found, expected, strict=True)
                        for t in other
                    ]
                    both = zip(layer.parameters(), layers[0].parameters(), strict=True)
                    pairs += [(p.grad, q.grad) for p, q in both if q.grad is not None]
                    gaps = [float((a - b).abs().max()) for a, b in pairs if a.numel()]
                    gap = max(gaps, default=0.0)
                    if not gap < 1e-10:
                        problems.append(f"{case.name}, {mode}, change {number}: {gap}")
        return problems
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["plain", "typed"])
@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        (1, "metis"),
        pytest.param(2, "random", marks=pytest.mark.exhaustive),
        (3, "empty_part"),
    ],
)
def test_changed_results_have_exact_gradients(
    tmp_path: Path, num_ranks: int, how: str, kind: str
) -> None:
    parts = write_parts(tmp_path, graph_of(kind), num_ranks, how)
    for problems in run_ranks(check, num_ranks, parts, kind, timeout=280.0):
        assert problems == []
