# SPDX-License-Identifier: Apache-2.0
"""Messages cut into blocks of heads or columns: where they can be, and that nothing changes.

The first half needs no process. The second trains layers with and without blocks on 2 and 3 gloo
ranks, and compares every layer that there is, in blocks, with one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shards import PLAIN, graph_of, own_edges, own_nodes, write_parts
from test_parity import check_layers, layers
from torch import Tensor

import graphshard
from graphshard import comm
from graphshard import function as fn
from graphshard.dgl.nn import AGNNConv, DotGatConv
from graphshard.fullbatch import column_blocks
from graphshard.fullbatch.lazy import DeferredEdges
from graphshard.fullbatch.reductions import (
    ColumnCut,
    CopySource,
    EdgeRows,
    Endpoint,
    Expression,
    LazySoftmax,
    PerEdge,
    Sddmm,
    ShiftedSoftmax,
    Weighted,
    find_cut,
)
from graphshard.graph import edge_softmax
from graphshard.nn import GATConv, GATv2Conv, GraphConv, HeteroGraphConv, SAGEConv
from graphshard.testing import run_ranks

NODES, EDGES = 5, 7


def source(*row: int) -> Tensor:
    return torch.zeros(NODES, *row)


def at(end: str, *row: int) -> Endpoint:
    return Endpoint(end, source(*row), EDGES)  # type: ignore[arg-type]


def applied(function: Callable[[Any], Any], to: Expression) -> Expression:
    """What a layer records when it calls torch functions on edge values."""
    value = DeferredEdges(to, lambda e: torch.zeros(e.shape), torch.device("cpu"))
    found: Expression = function(value).expression
    return found


def weights(scores: Expression) -> Expression:
    return ShiftedSoftmax(LazySoftmax(scores))


def additive(*row: int) -> Expression:
    return Sddmm("add", at("u", *row), at("v", *row))


@pytest.mark.parametrize(
    ("row", "axis", "most"), [((64,), 1, 4), ((4, 32), 2, 4), ((1, 48), 1, 3), ((2, 8, 8), 2, 4)]
)
def test_copied_rows_are_cut_where_it_makes_most_blocks(
    row: tuple[int, ...], axis: int, most: int
) -> None:
    cut = find_cut(CopySource(source(*row)))
    assert cut is not None
    assert (cut.axis, cut.most) == (axis, most)
    assert set(cut.leaves.values()) == {axis}


def test_narrow_rows_are_not_cut() -> None:
    assert find_cut(CopySource(source(20))) is None
    assert find_cut(CopySource(source())) is None


def of_weighted(tensor: Tensor, value: Expression) -> ColumnCut | None:
    return find_cut(Weighted("mul", tensor, value))


def test_rows_are_cut_where_weights_have_one_entry() -> None:
    scores = applied(F.leaky_relu, to=additive(4, 1))
    cut = of_weighted(source(4, 32), applied(lambda a: F.dropout(a, 0.5), to=weights(scores)))
    assert cut is not None
    assert (cut.axis, cut.most) == (1, 4)
    assert list(cut.leaves.values()) == [1, None, None]
    cut = of_weighted(source(1, 64), weights(additive(1, 1)))
    assert cut is not None
    assert (cut.axis, cut.most) == (1, 4)


def test_stored_weights_are_cut_with_the_rows() -> None:
    stored = EdgeRows(torch.zeros(EDGES, 4, 1))
    cut = of_weighted(source(4, 8), stored)
    assert cut is not None
    assert cut.axis == 2
    assert list(cut.leaves.values()) == [2, 2]
    assert of_weighted(source(4, 8), EdgeRows(torch.zeros(EDGES, 4, 8))) is not None


def test_scores_may_read_whole_what_the_message_does_not() -> None:
    unit = source(64)
    cosine = Sddmm("dot", Endpoint("u", unit, EDGES), at("v", 64))
    cut = of_weighted(source(64), weights(cosine))
    assert cut is not None
    assert list(cut.leaves.values()) == [1, None, None]
    assert of_weighted(unit, weights(cosine)) is None  # here the message is cut, its scores not


@pytest.mark.parametrize(
    "mixing",
    [
        lambda a: a.softmax(1),
        lambda a: a - a.mean(1, keepdim=True),
        lambda a: F.linear(a.squeeze(2), torch.eye(4)).unsqueeze(2),
        lambda a: a.view(-1, 1, 4).softmax(2).view(-1, 4, 1),
    ],
)
def test_functions_of_several_heads_are_not_cut(mixing: Callable[[Any], Any]) -> None:
    value = applied(mixing, to=additive(4, 1))
    assert value.shape == (EDGES, 4, 1)
    cut = find_cut(PerEdge(value))
    assert cut is None
    cut = of_weighted(source(4, 32), value)
    assert cut is None or cut.axis == 1  # columns: the weights are whole in every block


def test_too_few_columns_and_other_shapes_are_not_cut() -> None:
    assert of_weighted(source(4, 2), weights(additive(4, 1))) is None  # 8 numbers a row
    assert find_cut(PerEdge(additive(4, 8))) is None


@contextmanager
def many_blocks(use: bool) -> Iterator[None]:
    """Cut as finely as can be, or never."""
    before = column_blocks._SMALLEST_BLOCK, column_blocks._FEWEST_COLUMNS
    column_blocks._SMALLEST_BLOCK = 1 if use else 1 << 40
    column_blocks._FEWEST_COLUMNS = 1
    try:
        yield
    finally:
        column_blocks._SMALLEST_BLOCK, column_blocks._FEWEST_COLUMNS = before


WIDTH = 12
LAYERS: dict[str, tuple[str, int, Callable[[Any], Any]]] = {
    # name: kind of graph, messages that one becomes, layer
    "gat": ("plain", 4, lambda g: GATConv(WIDTH, 3, 4, attn_drop=0.4)),
    "gat-three-heads": ("plain", 4, lambda g: GATConv(WIDTH, 4, 3, residual=True)),
    "gat-one-head": ("plain", 4, lambda g: GATConv(WIDTH, 6, 1, attn_drop=0.4)),
    "gat-edge-weight": ("plain", 4, lambda g: GATConv(WIDTH, 3, 4)),
    "gatv2": ("plain", 4, lambda g: GATv2Conv(WIDTH, 3, 4, attn_drop=0.4)),
    "gatv2-shared": ("plain", 4, lambda g: GATv2Conv(WIDTH, 3, 4, share_weights=True)),
    "gatv2-one-head": ("plain", 1, lambda g: GATv2Conv(WIDTH, 8, 1)),
    "dot-gat": ("plain", 4, lambda g: DotGatConv(WIDTH, 3, 4)),
    "agnn": ("plain", 4, lambda g: AGNNConv(0.7)),
    "gcn-edge-weight": ("plain", 4, lambda g: GraphConv(WIDTH, 8, norm="none")),
    "sage-pool": ("plain", 4, lambda g: SAGEConv(WIDTH, 5, "pool")),
    "typed-gat": (
        "typed",
        4,
        lambda g: HeteroGraphConv({e: GATConv(WIDTH, 3, 4, attn_drop=0.3) for e in g.etypes}),
    ),
    "typed-mixed": (
        "typed",
        4,  # or 1: where two layers share a source type, and one of them cannot be cut
        lambda g: HeteroGraphConv(
            {
                e: (GATv2Conv(WIDTH, 8, 1), GATConv(WIDTH, 2, 4))[i % 2]
                for i, e in enumerate(g.etypes)
            },
            aggregate=lambda parts, _: sum(p.flatten(1) for p in parts),
        ),
    ),
}


def train_both_ways(
    rank: int, world_size: int, parts: str, names: list[str], dtype: str, mode: str
) -> dict[str, list[dict[str, Any]]]:
    """Of each layer what comes out without blocks, and with them."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    return {
        name: [train_once(data, name, dtype, mode, use) for use in (False, True)] for name in names
    }


def train_once(
    data: graphshard.PartitionData, name: str, dtype: str, mode: str, use: bool
) -> dict[str, Any]:
    """Outputs, gradients and traffic of one layer."""
    kind, _, make = LAYERS[name]
    with many_blocks(use):
        graph = graphshard.construct_full_graph(
            data, mode="sequential", rematerialize=mode == "again"
        )
        torch.manual_seed(0)
        layer = make(graph).to(getattr(torch, dtype))
        for module in layer.modules():
            module._allow_zero_in_degree = True
        inputs = {}
        for ntype, nodes in own_nodes(data).items():
            generator = torch.Generator().manual_seed(1)
            whole = torch.randn(30, WIDTH, generator=generator, dtype=torch.float64)
            inputs[ntype] = whole[nodes].to(getattr(torch, dtype)).requires_grad_()
        keywords = {}
        if name.endswith("edge-weight"):
            eids = own_edges(data)[PLAIN]
            weight = (0.5 + eids % 3).to(getattr(torch, dtype)).requires_grad_()
            keywords["edge_weight"] = weight
        with comm.trace() as trace:
            outputs = layer(graph, inputs if kind == "typed" else inputs["_N"], **keywords)
            outputs = outputs if kind == "typed" else {"_N": outputs}
            sum((out.double() ** 2).sum() for out in outputs.values()).backward()
        found = {f"out {t}": o.detach() for t, o in outputs.items()}
        given = {**inputs, **keywords, **dict(layer.named_parameters())}
        found |= {f"grad {t}": x.grad for t, x in given.items() if x.grad is not None}
        return {"rows": found, "bytes": dict(trace.bytes_sent), "calls": dict(trace.calls)}


def both_ways(
    tmp_path: Path, names: list[str], num_ranks: int, how: str, dtype: str, mode: str
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """By layer and rank, what comes out without and with blocks; the traffic is compared here."""
    for kind in ("plain", "typed"):
        of_kind = [name for name in names if LAYERS[name][0] == kind]
        if not of_kind:
            continue
        parts = write_parts(tmp_path / kind, graph_of(kind), num_ranks, how)
        results = run_ranks(train_both_ways, num_ranks, parts, of_kind, dtype, mode)
        for name in of_kind:
            times = LAYERS[name][1]
            for whole, blocks in (result[name] for result in results):
                assert whole["bytes"].get("send") == blocks["bytes"].get("send"), name
                few, many = (x["calls"].get("send", 0) for x in (whole, blocks))
                assert few * times == many or (name == "typed-mixed" and few <= many), name
                assert whole["rows"].keys() == blocks["rows"].keys(), name
                yield name, whole["rows"], blocks["rows"]


def check_close(name: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, rows in expected.items():
        torch.testing.assert_close(
            found[key], rows, atol=1e-11, rtol=1e-11, msg=lambda m, k=key: f"{name}, {k}: {m}"
        )


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [pytest.param(2, "random", marks=pytest.mark.exhaustive), (3, "empty_part")],
)
def test_blocks_change_messages_not_results(tmp_path: Path, num_ranks: int, how: str) -> None:
    runs = both_ways(tmp_path, list(LAYERS), num_ranks, how, "float64", "again")
    for name, whole, blocks in runs:
        check_close(name, blocks, whole)


def test_blocks_of_rows_that_are_kept(tmp_path: Path) -> None:
    names = ["gat", "gat-one-head", "agnn", "sage-pool", "typed-gat"]
    for name, whole, blocks in both_ways(tmp_path, names, 3, "random", "float64", "kept"):
        check_close(name, blocks, whole)


def test_heads_in_bfloat16_do_not_see_each_other(tmp_path: Path) -> None:
    names = ["gat", "gatv2", "dot-gat", "typed-gat"]
    for name, whole, blocks in both_ways(tmp_path, names, 2, "random", "bfloat16", "again"):
        for key, rows in whole.items():
            assert torch.equal(blocks[key], rows), (name, key)


def test_scores_of_all_columns_in_bfloat16(tmp_path: Path) -> None:
    """Their gradients are rounded block by block, and are as exact as without blocks."""
    names = ["gat-one-head", "agnn"]
    exact = both_ways(tmp_path / "exact", names, 2, "random", "float64", "again")
    rounded = both_ways(tmp_path / "rounded", names, 2, "random", "bfloat16", "again")
    for (name, truth, _), (_, whole, blocks) in zip(exact, rounded, strict=True):
        for key, rows in truth.items():
            size = 1 + float(rows.abs().max())
            errors = [float((found[key].double() - rows).abs().max()) for found in (whole, blocks)]
            assert errors[1] <= 2 * errors[0] + 0.01 * size, (name, key)


def check_layers_in_blocks(rank: int, world_size: int, parts: str, kind: str) -> list[str]:
    with many_blocks(True):
        return check_layers(
            rank, world_size, parts, kind, "sequential", 1, layers(kind, "sequential")
        )


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.exhaustive), "typed"])
@pytest.mark.timeout(300)
def test_every_layer_in_blocks_equals_one_process(tmp_path: Path, kind: str) -> None:
    parts = write_parts(tmp_path, graph_of(kind), 3, "random")
    for problems in run_ranks(check_layers_in_blocks, 3, parts, kind, timeout=280.0):
        assert problems == []


def attention_twice(rank: int, world_size: int, parts: str, use: bool) -> dict[str, Tensor]:
    """Attention of own making: weights per column, reshaped, and read again after the sum."""
    with many_blocks(use):
        data = graphshard.load_dgl_partition_data(parts, rank)
        graph = graphshard.construct_full_graph(data, mode="sequential")
        generator = torch.Generator().manual_seed(1)
        nodes = own_nodes(data)["_N"]
        x = torch.randn(30, 4, 6, generator=generator, dtype=torch.float64)[nodes].requires_grad_()
        scale = torch.linspace(0.5, 2, 24, dtype=torch.float64).view(4, 6).requires_grad_()
        graph.srcdata["x"], graph.dstdata["y"] = x, x.sum(2)
        graph.srcdata["s"] = x.mean(2)
        graph.apply_edges(fn.u_sub_v("s", "y", "e"))  # [edges, 4]
        weight = edge_softmax(graph, torch.tanh(graph.edata["e"])).unsqueeze(-1) * scale
        graph.edata["w"] = weight
        graph.update_all(fn.u_mul_e("x", "w", "m"), fn.mean("m", "out"))
        graph.update_all(fn.copy_e("w", "m"), fn.sum("m", "total"))
        out, total = graph.dstdata["out"], graph.dstdata["total"]
        rows = graph.edata["w"].materialize()
        ((out**2).sum() + (total**2 * out).sum() + (rows**2).sum()).backward()
        assert x.grad is not None
        assert scale.grad is not None
        return {"out": out.detach(), "x": x.grad, "scale": scale.grad, "rows": rows.detach()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_attention_that_no_layer_makes(tmp_path: Path, num_ranks: int) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), num_ranks, "random")
    whole = run_ranks(attention_twice, num_ranks, parts, False)
    for a, b in zip(whole, run_ranks(attention_twice, num_ranks, parts, True), strict=True):
        check_close("own attention", b, a)
