# SPDX-License-Identifier: Apache-2.0
"""Deferred edge values: row-wise functions stay deferred, others make the tensor. 1-3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shards import own_edges, own_nodes, plain_graph, write_parts
from torch import Tensor

import graphshard
from graphshard import function as fn
from graphshard.fullbatch import DeferredEdges
from graphshard.testing import run_ranks

PLAIN = ("_N", "_E", "_N")
Function = Callable[[Any, Tensor, Tensor], Any]

# name -> function of (edge values [E, 2, 3], edge weights [E, 1, 1], a parameter [3, 4])
ROW_WISE: dict[str, Function] = {
    "leaky_relu": lambda e, w, p: F.leaky_relu(e, 0.1),
    "elu method chain": lambda e, w, p: e.tanh().exp(),
    "arithmetic": lambda e, w, p: 2.0 * e - e / 3 + 1,
    "reflected": lambda e, w, p: 1.0 - e,
    "edge tensor": lambda e, w, p: e * w,
    "edge tensor first": lambda e, w, p: w * e,
    "per head": lambda e, w, p: e * p[:, :2].t().reshape(1, 2, 3),
    "linear": lambda e, w, p: F.linear(e, p.t()),
    "matmul": lambda e, w, p: e @ p,
    "sum of the last dimension": lambda e, w, p: e.sum(-1),
    "sum kept": lambda e, w, p: e.sum(dim=-1, keepdim=True),
    "reshapes": lambda e, w, p: e.unsqueeze(-1).flatten(1).view(e.shape[0], 3, 2),
    "softmax of a row": lambda e, w, p: e.softmax(dim=-1),
    "no-op dropout": lambda e, w, p: F.dropout(e, 0.5, training=False),
    "in-place flag": lambda e, w, p: F.leaky_relu(e, 0.1, inplace=True),
}
WHOLE: dict[str, Function] = {
    "sum over edges": lambda e, w, p: e.sum(),
    "first rows": lambda e, w, p: e[:, 0],
    "transposed": lambda e, w, p: e.transpose(1, 2),
    "largest": lambda e, w, p: e.amax(),
    "stacked": lambda e, w, p: torch.stack([w * e, w * e]),
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = plain_graph()
    return (
        torch.randn(whole.num_nodes(), 2, 3, generator=generator, dtype=torch.float64),
        torch.rand(whole.num_edges(), 1, 1, generator=generator, dtype=torch.float64) + 0.5,
        torch.randn(3, 4, generator=generator, dtype=torch.float64),
    )


def evaluate(rank: int, world_size: int, parts: str, names: list[str]) -> list[dict[str, Any]]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    mine, my_edges = own_nodes(data)["_N"], own_edges(data)[PLAIN]
    nodes, weights, parameter = inputs()
    found = []
    for name in names:
        function = {**ROW_WISE, **WHOLE}[name]
        grads, values, deferred = [], [], False
        for g, rows, w in (
            (plain_graph(), nodes, weights),
            (graph, nodes[mine], weights[my_edges]),
        ):
            h, p = rows.clone().requires_grad_(), parameter.clone().requires_grad_()
            g.ndata["h"] = h
            g.apply_edges(fn.u_sub_v("h", "h", "e"))
            out = function(g.edata["e"], w, p)
            if isinstance(out, DeferredEdges):
                deferred, out = True, out.materialize()
            (out**2).sum().backward()
            grads.append([h.grad, torch.zeros_like(p) if p.grad is None else p.grad])
            values.append(out.detach())
        torch.distributed.all_reduce(grads[1][1])
        found.append(
            {
                "deferred": deferred,
                "value": float((values[0][my_edges] - values[1]).abs().max())
                if values[0].dim() and values[0].shape[0] == weights.shape[0]
                else 0.0,
                "input": float((grads[0][0][mine] - grads[1][0]).abs().max()),
                "parameter": float((grads[0][1] - grads[1][1]).abs().max()),
            }
        )
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_row_wise_functions_stay_deferred(tmp_path: Path, num_ranks: int) -> None:
    parts = write_parts(tmp_path, plain_graph(), num_ranks, "random")
    for results in run_ranks(evaluate, num_ranks, parts, list(ROW_WISE)):
        for name, found in zip(ROW_WISE, results, strict=True):
            assert found["deferred"], name
            assert max(found["value"], found["input"], found["parameter"]) < 1e-10, name


def test_other_functions_see_the_whole_tensor(tmp_path: Path) -> None:
    """With one rank the whole tensor is every edge, so results can be compared."""
    parts = write_parts(tmp_path, plain_graph(), 1, "random")
    for results in run_ranks(evaluate, 1, parts, list(WHOLE)):
        for name, found in zip(WHOLE, results, strict=True):
            assert not found["deferred"], name
            assert max(found["value"], found["input"], found["parameter"]) < 1e-10, name


def attention_variants(rank: int, world_size: int, parts: str) -> dict[str, float]:
    """Softmax weights used in ways that one pass cannot carry along, and in both directions."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    mine, my_edges = own_nodes(data)["_N"], own_edges(data)[PLAIN]
    nodes, weights, _ = inputs()
    errors = {}
    for mode in ("sequential", "oneshot"):
        sharded = graphshard.construct_full_graph(data, mode=mode)
        for name, weigh, reduce, norm_by in (
            ("proportional", lambda a, w: a * w, "sum", "dst"),
            ("mean", lambda a, w: a, "mean", "dst"),
            ("squared", lambda a, w: a**2, "sum", "dst"),
            ("shifted", lambda a, w: a + w, "sum", "dst"),
            ("max", lambda a, w: a * w, "max", "dst"),
            ("nested", None, "sum", "dst"),
            ("by source", lambda a, w: a * w, "sum", "src"),
        ):
            outputs, grads = [], []
            for g, rows, w in (
                (plain_graph(), nodes, weights),
                (sharded, nodes[mine], weights[my_edges]),
            ):
                h = rows.clone().requires_grad_()
                with g.local_scope():
                    g.ndata["h"] = h
                    g.apply_edges(fn.u_mul_v("h", "h", "e"))
                    scores = g.edata.pop("e").sum(-1, keepdim=True)
                    a = graphshard.edge_softmax(g, scores, norm_by=norm_by)
                    if weigh is None:
                        a = graphshard.edge_softmax(g, a * w * 3)
                    else:
                        a = weigh(a, w)
                    g.edata["a"] = a
                    g.update_all(fn.u_mul_e("h", "a", "m"), getattr(fn, reduce)("m", "out"))
                    out = g.dstdata["out"]
                (out**2).sum().backward()
                outputs.append(out.detach())
                grads.append(h.grad)
            errors[f"{mode} {name}"] = max(
                float((outputs[0][mine] - outputs[1]).abs().max()),
                float((grads[0][mine] - grads[1]).abs().max()),
            )
    return errors


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_softmax_weights_in_every_use(tmp_path: Path, num_ranks: int) -> None:
    parts = write_parts(tmp_path, plain_graph(), num_ranks, "random")
    for errors in run_ranks(attention_variants, num_ranks, parts):
        assert {name: e for name, e in errors.items() if e > 1e-10} == {}


def change_in_place(rank: int, world_size: int, parts: str) -> str:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    graph.ndata["h"] = torch.ones(data.num_owned(), 2)
    graph.apply_edges(fn.u_add_v("h", "h", "e"))
    try:
        graph.edata["e"].relu_()
    except NotImplementedError as error:
        return str(error)
    return "accepted"


def test_in_place_changes_are_refused(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for text in run_ranks(change_in_place, 2, parts):
        assert "use 'relu'" in text


def nothing_of_edge_size_is_kept(rank: int, world_size: int, parts: str) -> list[int]:
    """Sizes of the tensors that autograd holds after the forward of a GAT layer."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    layer = graphshard.nn.GATConv(6, 4, 2, attn_drop=0.3, allow_zero_in_degree=True)
    sizes: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        sizes.append(tensor.shape[0] if tensor.dim() else 0)
        return tensor

    h = torch.randn(data.num_owned(), 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        out = layer(graph, h)
    out.sum().backward()
    return [*sizes, -graph.num_edges()]


def test_attention_keeps_nothing_of_edge_size(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for sizes in run_ranks(nothing_of_edge_size_is_kept, 2, parts):
        num_edges = -sizes.pop()
        assert num_edges > 26  # more edges than nodes, so that the sizes tell
        assert max(sizes) <= 25


def mean_of_weighted(rank: int, world_size: int, parts: str) -> Tensor:
    """At node 0, the mean of messages that attention weighs."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    graph.ndata["h"] = torch.ones(data.num_owned(), 1, dtype=torch.bfloat16)
    graph.apply_edges(fn.u_sub_v("h", "h", "score"))
    graph.edata["a"] = graphshard.edge_softmax(graph, graph.edata["score"])
    graph.update_all(fn.u_mul_e("h", "a", "m"), fn.mean("m", "out"))
    return graph.ndata["out"][own_nodes(data)["_N"] == 0]


def test_means_of_more_messages_than_16_bits_count(tmp_path: Path) -> None:
    """bfloat16 holds 256 and 258, and not 257."""
    whole = graphshard.graph((torch.arange(257), torch.zeros(257, dtype=torch.int64)))
    parts = write_parts(tmp_path, whole, 2, "random")
    mean = torch.cat(run_ranks(mean_of_weighted, 2, parts))
    assert torch.equal(mean, torch.full((1, 1), 1 / 257).bfloat16())


def made_without_gradients(rank: int, world_size: int, parts: str) -> list[Tensor]:
    """Gradients of source rows through weights of edges that were made while autograd was off."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    mine, (nodes, _, _) = own_nodes(data)["_N"], inputs()
    h = nodes[mine].clone().requires_grad_()
    found = []
    for normalised in (False, True):
        with graph.local_scope():
            graph.ndata["h"] = h
            with torch.no_grad():
                graph.apply_edges(fn.u_sub_v("h", "h", "e"))
                weights = graph.edata["e"].sum(-1, keepdim=True).tanh()
                weights = graphshard.edge_softmax(graph, weights) if normalised else weights
            assert isinstance(weights, DeferredEdges)
            graph.edata["w"] = weights
            graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "y"))
            (grad,) = torch.autograd.grad((graph.ndata["y"] ** 2).sum(), h)
            assert not weights.materialize().requires_grad
            found.append(grad)
    graph.ndata["h"] = h
    graph.apply_edges(fn.u_sub_v("h", "h", "e"))
    with torch.no_grad():
        assert not graph.edata["e"].materialize().requires_grad
    assert graph.edata["e"].materialize().requires_grad
    return [mine, *found]


def test_what_is_made_without_gradients_has_none(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    src, dst = (ids.long() for ids in plain_graph().edges())
    nodes, _, _ = inputs()
    expected = []
    for normalised in (False, True):
        h = nodes.clone().requires_grad_()
        weights = (nodes[src] - nodes[dst]).sum(-1, keepdim=True).tanh()
        if normalised:
            totals = torch.zeros(nodes.shape[0], 2, 1).double().index_add(0, dst, weights.exp())
            weights = weights.exp() / totals[dst]
        out = torch.zeros_like(nodes).index_add(0, dst, h[src] * weights)
        expected.append(torch.autograd.grad((out**2).sum(), h)[0])
    for mine, *found in run_ranks(made_without_gradients, 2, parts):
        for grad, of_all in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, of_all[mine], rtol=1e-12, atol=1e-12)


def used_later(rank: int, world_size: int, parts: str) -> tuple[str, bool, Tensor]:
    """The error where rows were changed before, and a sum of what autocast was on for."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    mine, (nodes, _, parameter) = own_nodes(data)["_N"], inputs()
    h = nodes[mine].clone()
    graph.ndata["h"] = h
    graph.apply_edges(fn.u_add_v("h", "h", "e"))
    h.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place before") as error:
        graph.update_all(fn.copy_e("e", "m"), fn.sum("m", "y"))
    graph.ndata["h"] = nodes[mine].float()
    graph.apply_edges(fn.u_add_v("h", "h", "e"))
    with torch.autocast("cpu", torch.bfloat16):
        products = F.linear(graph.edata["e"], parameter.t().float())
    graph.edata["p"] = products
    rows = products.materialize()
    return str(error.value), products.dtype == rows.dtype, rows


def test_tensors_and_autocast_of_values_that_are_used_later(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for error, are_alike, rows in run_ranks(used_later, 2, parts):
        assert "clone()" in error
        assert are_alike
        assert rows.dtype == torch.bfloat16
