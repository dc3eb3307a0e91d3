# SPDX-License-Identifier: Apache-2.0
"""Fused attention across ranks: dropout and edge values, nothing per edge and head, refusals.

Every rank has the seed of the single process, so dropout has to drop the same entries of the same
edges, however the graph is cut. Uses 1, 2, 3 and 5 gloo ranks; the last test forks programs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shards import PLAIN, features, graph_of, own_edges, own_nodes, write_parts
from test_parity import MODES, construct
from torch import Tensor, nn

import graphshard
from case_selection import sampled
from forked_programs import run_program
from graphshard.dgl.nn import AGNNConv, DotGatConv
from graphshard.fullbatch._compile import Compiler
from graphshard.graph import attend
from graphshard.nn import GATConv, GATv2Conv, HeteroGraphConv
from graphshard.ops import Attention, EdgeMask
from graphshard.testing import run_ranks

WIDTH = 6


class Operands(nn.Module):
    """An attention with every operand that its score may have, edge terms included."""

    def __init__(self, score: str, heads: int = 3, dim: int = 8) -> None:
        super().__init__()
        self.score, self.row = score, (heads, dim)
        self.source = nn.Linear(WIDTH, heads * dim)
        self.target = nn.Linear(WIDTH, heads * dim)
        self.edge = nn.Linear(1, heads * dim)
        self.vector = nn.Parameter(torch.randn(heads, dim))

    def forward(self, graph: Any, x: Tensor, edge_weight: Tensor) -> Tensor:
        values, dst = (f(x).unflatten(1, self.row) for f in (self.source, self.target))
        edge = self.edge(edge_weight.unsqueeze(1)).unflatten(1, self.row)
        options: Any = {"factor": edge_weight, "mask": EdgeMask(0.3, 77)}
        if self.score == "additive":
            ends = values.sum(-1), dst.mean(-1)
            attention = Attention.additive(values, *ends, edge.sum(-1), **options)
        elif self.score == "joint":
            attention = Attention.joint(values, dst, self.vector, edge, **options)
        else:
            attention = Attention.dot(values, values.tanh(), dst, edge.sum(-1), **options)
        result = attend(graph, attention)
        assert result is not None
        return result


LAYERS: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "gat": ("plain", lambda g: GATConv(WIDTH, 8, 3, attn_drop=0.4)),
    "gat-weighted": ("plain", lambda g: GATConv(WIDTH, 8, 1, attn_drop=0.4)),
    "gatv2": ("plain", lambda g: GATv2Conv(WIDTH, 8, 2, attn_drop=0.4)),
    "additive-weighted": ("plain", lambda g: Operands("additive")),
    "joint-weighted": ("plain", lambda g: Operands("joint")),
    "dot-weighted": ("plain", lambda g: Operands("dot")),
    "dotgat": ("plain", lambda g: DotGatConv(WIDTH, 8, 4)),
    "agnn": ("plain", lambda g: AGNNConv(0.7)),
    "typed": (
        "typed",
        lambda g: HeteroGraphConv({e: GATConv(WIDTH, 4, 2) for e in g.etypes}),
    ),
}


def results(
    name: str,
    graph: Any,
    inputs: dict[str, Tensor],
    weights: Tensor | None,
) -> dict[str, Tensor]:
    """Outputs and gradients of one layer under a fixed seed."""
    kind, make = LAYERS[name]
    torch.manual_seed(0)
    layer = make(graph)
    for module in layer.modules():
        module._allow_zero_in_degree = True  # type: ignore[assignment]
    leaves = {t: x.clone().requires_grad_() for t, x in inputs.items()}
    keywords = {}
    if name.endswith("weighted"):
        assert weights is not None
        keywords["edge_weight"] = weights.clone().requires_grad_()
    torch.manual_seed(5)
    out = layer(graph, leaves if kind == "typed" else leaves["_N"], **keywords)
    outputs = out if kind == "typed" else {"_N": out}
    sum((o * o.sin()).sum() for o in outputs.values()).backward()
    found = {f"out {t}": o.detach() for t, o in outputs.items()}
    found |= {f"node grad {t}": x.grad for t, x in leaves.items() if x.grad is not None}
    found |= {f"edge grad {t}": x.grad for t, x in keywords.items() if x.grad is not None}
    parameters = {t: p.grad for t, p in layer.named_parameters() if p.grad is not None}
    return found | {f"parameter {t}": grad for t, grad in parameters.items()}


def edge_weights(eids: Tensor) -> Tensor:
    return 0.5 + (eids.double() * 0.6180339887498949) % 1.0


def largest_gap(rank: int, world_size: int, path: str, name: str, mode: str) -> float:
    """Between this rank's rows and the single process's; parameters are summed over ranks."""
    torch.set_default_dtype(torch.float64)
    try:
        kind = LAYERS[name][0]
        whole = graph_of(kind)
        data = graphshard.load_dgl_partition_data(path, rank)
        nodes, edges = own_nodes(data), own_edges(data)
        inputs = features(whole, WIDTH, ties=False)
        mine = {t: x[nodes[t]] for t, x in inputs.items()}
        weights = edge_weights(torch.arange(whole.num_edges())) if kind == "plain" else None
        my_weights = edge_weights(edges[PLAIN]) if kind == "plain" else None
        expected = results(name, whole, inputs, weights)
        found = results(name, construct(data, mode), mine, my_weights)
        gaps = [0.0]
        for key, rows in expected.items():
            what, _, ntype = key.rpartition(" ")
            ours = found.get(key)
            if what == "parameter":
                ours = torch.zeros_like(rows) if ours is None else ours
                torch.distributed.all_reduce(ours)
            else:
                rows = rows[edges[PLAIN] if what == "edge grad" else nodes[ntype]]
            if ours is None:
                assert not rows.any(), key
            elif rows.numel():
                gaps.append(float((ours - rows).abs().max()))
        return max(gaps)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("name", "mode", "cut"),
    sampled(list(LAYERS), MODES, [(1, "metis"), (2, "random"), (3, "empty_part"), (5, "random")]),
)
@pytest.mark.timeout(300)
def test_dropout_does_not_depend_on_the_number_of_ranks(
    tmp_path: Path, name: str, mode: str, cut: tuple[int, str]
) -> None:
    num_ranks, how = cut
    path = write_parts(tmp_path, graph_of(LAYERS[name][0]), num_ranks, how)
    for gap in run_ranks(largest_gap, num_ranks, path, name, mode, timeout=140.0):
        assert gap < 1e-10


def fused_layers(rank: int, world_size: int, path: str, mode: str) -> list[str]:
    """Layers that went by edges, though nothing asked for it."""
    data = graphshard.load_dgl_partition_data(path, rank)
    graph = construct(data, mode)

    def refuse(*_: Any) -> None:
        raise AssertionError("went by edges")

    graph._edge_values = refuse  # type: ignore[assignment, method-assign]
    planned, Compiler._built_in = Compiler._built_in, refuse  # type: ignore[assignment, method-assign]
    by_edges = []
    try:
        for layer in (
            GATConv(4, 8, 2, attn_drop=0.5, allow_zero_in_degree=True),
            GATv2Conv(4, 8, 2, allow_zero_in_degree=True),
            DotGatConv(4, 8, 2, allow_zero_in_degree=True),
            AGNNConv(allow_zero_in_degree=True),
        ):
            try:
                layer(graph, torch.ones(graph.num_nodes(), 4)).sum().backward()
            except AssertionError:
                by_edges.append(type(layer).__name__)
    finally:
        Compiler._built_in = planned  # type: ignore[method-assign]
    return by_edges


@pytest.mark.parametrize("mode", MODES)
def test_layers_choose_the_fused_way(tmp_path: Path, mode: str) -> None:
    path = write_parts(tmp_path, graph_of("plain"), 2, "random")
    assert run_ranks(fused_layers, 2, path, mode) == [[], []]


def changed_in_place(rank: int, world_size: int, path: str) -> str:
    graph = construct(graphshard.load_dgl_partition_data(path, rank), "oneshot")
    x = torch.ones(graph.num_nodes(), 4, requires_grad=True)
    layer = GATConv(4, 8, 2, activation=F.relu, allow_zero_in_degree=True)
    loss = layer(graph, x).mul_(2.0).square().sum()
    try:
        torch.autograd.grad(loss, x, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_gradients_of_gradients_refuse_an_activated_result_that_was_changed(tmp_path: Path) -> None:
    path = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for text in run_ranks(changed_in_place, 2, path):
        assert "changed in place" in text
        assert "use an operation that makes a new tensor" in text


def without_gradients(rank: int, world_size: int, path: str, mode: str) -> bool:
    graph = construct(graphshard.load_dgl_partition_data(path, rank), mode)
    layer = GATConv(4, 8, 2, attn_drop=0.5, allow_zero_in_degree=True).eval()
    x = torch.ones(graph.num_nodes(), 4)
    with torch.inference_mode():
        found = layer(graph, x)
    return torch.equal(found, layer(graph, x))


@pytest.mark.parametrize("mode", MODES)
def test_inference_mode(tmp_path: Path, mode: str) -> None:
    path = write_parts(tmp_path, graph_of("plain"), 2, "random")
    assert run_ranks(without_gradients, 2, path, mode) == [True, True]


PEAK = """
    import sys
    import torch
    import graphshard
    from graphshard import nn
    from graphshard.dgl.nn import DotGatConv

    torch.set_num_threads(1)
    num_nodes, num_edges, heads, dim = 3000, int(sys.argv[1]), 16, 4
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, num_nodes, (2, num_edges), generator=generator, dtype=torch.int32)
    graph = graphshard.graph((src, dst), num_nodes=num_nodes)
    graph.relations[0].csc(), graph.relations[0].csr()
    x = torch.randn(num_nodes, heads, dim, requires_grad=True)
    layers = [
        nn.GATConv(heads * dim, dim, heads, attn_drop=0.3, allow_zero_in_degree=True),
        nn.GATv2Conv(heads * dim, dim, heads, attn_drop=0.3, allow_zero_in_degree=True),
        DotGatConv(heads * dim, dim, heads, allow_zero_in_degree=True),
    ]

    def peak():  # kilobytes; unlike ru_maxrss not that of the process that started this one
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    before = peak()
    for layer in layers:
        layer(graph, x.flatten(1)).sum().backward()
    print(peak() - before)
"""


def test_the_peak_of_a_process_does_not_grow_with_edges_times_heads() -> None:
    """Twice the edges, the same nodes: each tensor of edges x heads would take 16 MB more."""
    if not graphshard.ops.extension_available():
        pytest.skip("plain torch takes edges in portions of a fixed size, larger than this graph")
    if not Path("/proc/self/status").exists():
        pytest.skip("peaks of memory are read from /proc")
    peaks = [int(run_program(PEAK, edges)) / 1024 for edges in ("250000", "500000")]
    assert peaks[1] < peaks[0] + 6.0
