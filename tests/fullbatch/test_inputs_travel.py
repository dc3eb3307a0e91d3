# SPDX-License-Identifier: Apache-2.0
"""Inputs in place of their projections, where they are less to send. 1, 2 and 5 gloo ranks.

The oracles are the formulas of the layers in dense algebra, in float64, and bytes by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shards import features, graph_of, own_nodes, write_parts
from torch import Tensor

import graphshard
from graphshard import comm
from graphshard.comm import transport
from graphshard.dgl.nn import DotGatConv
from graphshard.fullbatch import halo_rows
from graphshard.nn import GATConv, GATv2Conv, SAGEConv
from graphshard.testing import run_ranks

WIDTH, OUT, HEADS = 6, 3, 2
LAYERS = ("gat", "gatv2", "dotgat", "pool")
SENT = {"gat": HEADS * OUT, "gatv2": HEADS * OUT, "dotgat": HEADS * OUT, "pool": WIDTH}
"""Numbers of a row that travel, and come back, where inputs do not; of GAT scores, too."""


def make(name: str, dtype: torch.dtype = torch.float64, widths: Any = WIDTH) -> Any:
    """A layer with initial numbers of its own."""
    torch.manual_seed(LAYERS.index(name))
    if name == "pool":
        return SAGEConv(widths, OUT, "pool").to(dtype)
    if name == "dotgat":
        return DotGatConv(widths, OUT, HEADS, allow_zero_in_degree=True).to(dtype)
    kind = GATConv if name == "gat" else GATv2Conv
    layer = kind(widths, OUT, HEADS, residual=True, allow_zero_in_degree=True, activation=F.elu)
    return layer.to(dtype)


def dense(name: str, layer: Any, src: Tensor, dst: Tensor, x: Tensor, own: Tensor) -> Tensor:
    """What a layer makes of all nodes: sources ``x``, destinations ``own``."""
    incidence = torch.arange(own.shape[0])[:, None] == dst
    if name == "pool":
        rows = F.relu(layer.fc_pool(x))[src]
        most = rows.expand(own.shape[0], *rows.shape)
        most = most.masked_fill(~incidence[:, :, None], -torch.inf)
        most = most.amax(1) if src.numel() else rows.new_zeros(own.shape[0], WIDTH)
        most = torch.where(incidence.any(1, keepdim=True), most, 0.0)
        return layer.fc_self(own) + layer.fc_neigh(most)
    first, second = (layer.fc_src, layer.fc_dst) if hasattr(layer, "fc_src") else (layer.fc,) * 2
    values, query = first(x).view(-1, HEADS, OUT), second(own).view(-1, HEADS, OUT)
    if name == "gat":
        scores = (values * layer.attn_l).sum(-1)[src] + (query * layer.attn_r).sum(-1)[dst]
        scores = F.leaky_relu(scores, 0.2)
    elif name == "gatv2":
        scores = (F.leaky_relu(values[src] + query[dst], 0.2) * layer.attn).sum(-1)
    else:
        scores = (values[src] * query[dst]).sum(-1) * OUT**-0.5
    logits = scores.T[:, None, :].masked_fill(~incidence, -torch.inf)
    weights = torch.where(incidence, logits.softmax(-1), 0.0)  # NaN where there is no edge
    result = torch.einsum("hne,ehd->nhd", weights, values[src])
    if name == "dotgat":
        return result
    result = result + layer.res_fc(own).view(-1, HEADS, OUT)
    if isinstance(layer.bias, Tensor):
        result = result + layer.bias.view(HEADS, OUT)
    return F.elu(result)


def cotangent(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


def run(layer: Any, graph: Any, rows: Any, nodes: Tensor, count: int) -> tuple[Any, ...]:
    """Own rows of the result, gradients of parameters of all ranks, bytes that left here."""
    layer.zero_grad()
    with comm.trace() as sent:
        result = layer(graph, rows)
        whole = cotangent(result.new_empty((count, *result.shape[1:])))
        (result * whole[nodes].to(result.dtype)).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    num_bytes = sent.bytes_sent.get("all_to_all", 0)
    return result.detach(), [comm.all_reduce(g) for g in grads], num_bytes


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    gap = (found.double() - expected.double()).abs()
    assert not found.numel() or float(gap.max()) <= bound * (1 + float(expected.abs().max()))


def check(
    name: str, graph: Any, whole: Any, etype: Any, x: dict[str, Tensor], nodes: dict[str, Tensor]
) -> None:
    """One layer on one relation, with inputs that change and with constant ones."""
    src, dst = (ids.long() for ids in whole.edges(etype=etype))
    halo = graph._structure.halo([etype])
    num_sent, num_halo = sum(halo.plan.send_splits), halo.num_halo
    is_pair = etype[0] != etype[2]
    own, here = nodes[etype[2]], nodes[etype[0]]
    for dtype, bound in ((torch.float64, 1e-12), (torch.bfloat16, 0.06)):
        layer = make(name, dtype, (WIDTH, WIDTH) if is_pair else WIDTH)
        exact = make(name, torch.float64, (WIDTH, WIDTH) if is_pair else WIDTH)
        exact.load_state_dict(layer.state_dict())
        wide = {t: rows.to(dtype).double() for t, rows in x.items()}
        expected = dense(name, exact, src, dst, wide[etype[0]], wide[etype[2]])
        (expected * cotangent(expected)).sum().backward()
        source = x[etype[0]][here].to(dtype)
        rows = (source, x[etype[2]][own].to(dtype)) if is_pair else source
        of_row, of_input = SENT[name] * dtype.itemsize, WIDTH * dtype.itemsize
        of_row += HEADS * max(4, dtype.itemsize) if name == "gat" else 0
        count = whole.num_nodes(etype[2])
        first = run(layer, graph, rows, own, count)
        assert first[2] == num_sent * of_input
        graph.mark_constant(source)
        runs = [first, *(run(layer, graph, rows, own, count) for _ in range(2))]
        assert [sent for _, _, sent in runs[1:]] == [num_sent * of_input, 0]
        for result, grads, _ in runs:
            assert torch.equal(result, first[0])  # to the bit
            assert all(map(torch.equal, grads, first[1]))
            close(result, expected[own], bound)
            for grad, p in zip(grads, exact.parameters(), strict=True):
                close(grad, torch.zeros_like(p) if p.grad is None else p.grad, bound)
        # What needs a gradient is projected first, as it was.
        source = source.clone().requires_grad_()
        rows = (source, rows[1]) if is_pair else source
        result, _, sent = run(layer, graph, rows, own, count)
        assert sent == (num_sent + num_halo) * of_row, (name, dtype, etype)
        close(result, expected[own], bound)


def all_layers(rank: int, world_size: int, path: str, kind: str) -> None:
    data = graphshard.load_dgl_partition_data(path, rank)
    graph, whole = graphshard.construct_full_graph(data, mode="oneshot"), graph_of(kind)
    nodes, x = own_nodes(data), features(whole, WIDTH, ties=False)
    for etype in whole.canonical_etypes:
        view = graph[etype] if kind == "typed" else graph
        for name in LAYERS:
            check(name, view, whole, etype, x, nodes)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "cut"),
    [
        ("plain", 2, "random"),
        ("typed", 5, "empty_part"),
        pytest.param("plain", 1, "metis", marks=pytest.mark.exhaustive),
        pytest.param("plain", 5, "empty_part", marks=pytest.mark.exhaustive),
        pytest.param("plain", 5, "one_node_per_part", marks=pytest.mark.exhaustive),
        pytest.param("typed", 2, "random", marks=pytest.mark.exhaustive),
    ],
)
def test_results_and_gradients_are_those_of_dense_algebra(
    tmp_path: Path, kind: str, num_ranks: int, cut: str
) -> None:
    path = write_parts(tmp_path, graph_of(kind), num_ranks, cut)
    run_ranks(all_layers, num_ranks, path, kind)


def gradients_of_gradients(rank: int, world_size: int, path: str) -> None:
    """Of a penalty on the gradient of the layer's matrix, summed over all ranks."""
    data = graphshard.load_dgl_partition_data(path, rank)
    graph, whole = graphshard.construct_full_graph(data, mode="oneshot"), graph_of("plain")
    nodes, x = own_nodes(data)["_N"], features(whole, WIDTH, ties=False)["_N"]
    layer, exact = make("gat"), make("gat")
    weights = cotangent(layer.fc.weight)
    loss = layer(graph, x[nodes]).sin().sum()
    (of_matrix,) = torch.autograd.grad(loss, [layer.fc.weight], create_graph=True)
    (of_matrix * weights).sum().backward()
    src, dst = (ids.long() for ids in whole.edges())
    loss = dense("gat", exact, src, dst, x, x).sin().sum()
    (expected,) = torch.autograd.grad(loss, [exact.fc.weight], create_graph=True)
    (expected * weights).sum().backward()
    close(comm.all_reduce(of_matrix.detach()), expected, 1e-12)
    for p, q in zip(layer.parameters(), exact.parameters(), strict=True):
        if q.grad is not None:
            found = torch.zeros_like(p) if p.grad is None else p.grad
            close(comm.all_reduce(found), q.grad, 1e-11)


def test_gradients_have_gradients(tmp_path: Path) -> None:
    path = write_parts(tmp_path, graph_of("plain"), 2, "random")
    run_ranks(gradients_of_gradients, 2, path)


def choices(rank: int, world_size: int, path: str) -> dict[str, tuple[str, float]]:
    """Whether inputs travel, or products and their gradients; and the bytes of each row."""
    data = graphshard.load_dgl_partition_data(path, rank)
    nodes = own_nodes(data)["_N"]
    x = features(graph_of("plain"), 8, ties=False)["_N"][nodes].float()

    def sent(layer: Any, rows: Tensor, **options: Any) -> tuple[str, float]:
        graph = graphshard.construct_full_graph(data, mode="oneshot", **options)
        plan = graph._structure.halo([("_N", "_E", "_N")]).plan
        with comm.trace() as trace:
            layer(graph, rows).square().sum().backward()
        one_way = trace.calls["all_to_all"] == 1
        num_rows = sum(plan.send_splits) + (0 if one_way else plan.num_halo)
        way = "inputs" if one_way else "products"
        return way, trace.bytes_sent["all_to_all"] / num_rows

    def layer(width: int, out: int, drop: float = 0.0) -> GATConv:
        return GATConv(width, out, 1, feat_drop=drop, allow_zero_in_degree=True)

    found = {
        "as wide": sent(layer(8, 7), x),
        "dropped out": sent(layer(8, 7, 0.5), x),
        "more than twice as wide": sent(layer(8, 2), x),
        "bfloat16 on the way": sent(layer(8, 7), x, halo_dtype=torch.bfloat16),
    }
    with torch.autocast("cpu", torch.bfloat16):
        found["projections of two bytes a number"] = sent(layer(8, 6), x)
    hooked = layer(8, 7)
    hooked.fc.register_forward_hook(lambda module, given, result: result)
    found["hook"] = sent(hooked, x)
    fast, halo_rows.OPERATIONS_A_BYTE = halo_rows.OPERATIONS_A_BYTE, 7
    found["a faster link"] = sent(layer(8, 7), x)
    halo_rows.OPERATIONS_A_BYTE = fast
    before, transport.LARGE_BYTES = transport.LARGE_BYTES, 1
    found["shared memory"] = sent(layer(8, 7), x)
    transport.LARGE_BYTES = before
    return found


def test_what_is_less_to_send_travels(tmp_path: Path) -> None:
    path = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for found in run_ranks(choices, 2, path):
        projected = "products", 4 * 8  # of each a row of 7 numbers, and its score
        assert found == {
            "as wide": ("inputs", 4 * 8),
            "dropped out": ("inputs", 4 * 8),
            "more than twice as wide": ("products", 4 * 3),
            "bfloat16 on the way": ("inputs", 2 * 8),
            "projections of two bytes a number": ("products", 2 * 6 + 4),
            "hook": projected,
            "a faster link": projected,
            "shared memory": projected,
        }
