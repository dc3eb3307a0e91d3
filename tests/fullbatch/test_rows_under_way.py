# SPDX-License-Identifier: Apache-2.0
"""Rows of which some are still coming: what waits, what does not, and typed layers that use them.

Against plain torch on the whole tensor, and against layers on the whole graph. 2, 3 and 5 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import graph_of, own_nodes, write_parts
from torch import Tensor, nn

import graphshard
from graphshard import comm
from graphshard.comm import ExchangePlan, HaloUnderWay, fetch_halo
from graphshard.comm.halo import _exchange as exchange
from graphshard.fullbatch import _localized as localized
from graphshard.fullbatch._rows_under_way import RowsUnderWay
from graphshard.nn import GATConv, GINConv, GraphConv, HeteroGraphConv, SAGEConv
from graphshard.ops import affine, linear
from graphshard.testing import run_ranks

NUM_OWN, NUM_ROWS = 5, 8
LINEAR = nn.Linear(4, 3)
WIDE = torch.randn(NUM_ROWS, 1)
BY_ROWS: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda x: 2 * x + 1,
    "by column": lambda x: x * torch.arange(4.0),
    "by row": lambda x: x * WIDE,
    "one row for all": lambda x: x - torch.ones(1, 4),
    "with itself": lambda x: x * x.sigmoid() - x / 3,
    "relu": F.relu,
    "method": lambda x: x.relu().clamp(max=0.5),
    "linear": LINEAR,
    "matmul": lambda x: x @ LINEAR.weight.t(),
    "our linear": lambda x: linear(x, LINEAR),
    "affine": lambda x: affine([(x, LINEAR.weight.t()), (2 * x, LINEAR.weight.t())], relu=True),
    "no dropout": lambda x: F.dropout(x, 0.5, training=False),
    "half": lambda x: x.to(torch.bfloat16),
}
WHOLE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum over rows": lambda x: x.sum(0),
    "softmax over rows": lambda x: F.softmax(x, 0),
    "slice": lambda x: x[2:7],
    "reshape": lambda x: x.reshape(4, 8),
    "transposed": lambda x: x.t(),
    "on the right": lambda x: torch.ones(2, NUM_ROWS) @ x,
    "more dimensions": lambda x: x + torch.ones(2, NUM_ROWS, 4),
    "cat": lambda x: torch.cat([x, x]),
}


def both(needs_grad: bool = False) -> tuple[Tensor, RowsUnderWay, list[int]]:
    whole = torch.randn(NUM_ROWS, 4, requires_grad=needs_grad)
    waits: list[int] = []

    def arrive() -> Tensor:
        waits.append(1)
        return whole[NUM_OWN:]

    return whole, RowsUnderWay(whole[:NUM_OWN], NUM_ROWS - NUM_OWN, arrive), waits


@pytest.mark.parametrize("name", BY_ROWS)
def test_functions_of_rows_do_not_wait(name: str) -> None:
    whole, rows, waits = both(needs_grad=True)
    found, expected = BY_ROWS[name](rows), BY_ROWS[name](whole)
    assert isinstance(found, RowsUnderWay)
    assert not waits
    assert (found.shape, found.dtype, found.dim()) == (
        expected.shape,
        expected.dtype,
        expected.dim(),
    )
    torch.testing.assert_close(found.own, expected[:NUM_OWN])
    torch.testing.assert_close(found.whole(), expected)
    assert found.whole() is found.whole()
    assert waits == [1]
    (grad,) = torch.autograd.grad(found.whole().float().square().sum(), whole)
    (wanted,) = torch.autograd.grad(expected.float().square().sum(), whole)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("name", WHOLE)
def test_other_functions_wait(name: str) -> None:
    whole, rows, waits = both()
    found = WHOLE[name](rows)
    assert waits == [1]
    torch.testing.assert_close(found, WHOLE[name](whole))


def test_dropout_leaves_each_row_its_own_draws() -> None:
    _, rows, waits = both()
    torch.manual_seed(0)
    dropped = F.dropout(1 + 0 * rows, 0.5)
    assert isinstance(dropped, RowsUnderWay)
    assert not waits
    assert set(dropped.whole().unique().tolist()) == {0.0, 2.0}


def test_modes_are_those_of_the_call() -> None:
    whole, rows, _ = both(needs_grad=True)
    with torch.no_grad():
        frozen = rows * 2
    with torch.autocast("cpu", torch.bfloat16):
        low = LINEAR(rows)
    assert not frozen.remote.requires_grad
    assert low.remote.dtype == torch.bfloat16
    torch.testing.assert_close(frozen.whole(), 2 * whole.detach())


def test_a_first_look_without_gradients_loses_none() -> None:
    whole, rows, _ = both(needs_grad=True)
    twice = rows * 2
    with torch.no_grad():
        assert rows.whole().requires_grad
        assert twice.whole().requires_grad
    (grad,) = torch.autograd.grad(twice.whole().sum(), whole)
    assert torch.equal(grad, torch.full_like(whole, 2.0))


def plan_of(rank: int, world_size: int) -> ExchangePlan:
    wanted = [torch.arange(0, 6, 2 if o % 2 else 3) for o in range(world_size)]
    wanted[rank] = wanted[rank][:0]
    return ExchangePlan.build(wanted, 6)


def same_as_fetch(rank: int, world_size: int) -> None:
    """Values, gradients, and gradients of gradients; with an input that needs none."""
    plan = plan_of(rank, world_size)
    torch.manual_seed(rank)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    y, ids = torch.randn(6, 2, requires_grad=True), torch.arange(6) + 10 * rank
    requests = [(plan, x), (plan, ids), (plan, y)]
    found = []
    for wait in (lambda: HaloUnderWay(requests).wait(), lambda: fetch_halo(requests)):
        a, numbers, b = wait()
        loss = a.sin().sum() + (b**3).sum()
        first = torch.autograd.grad(loss, (x, y), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, y))
        a, _, b = wait()
        plain = torch.autograd.grad(a.sin().sum() + (b**3).sum(), (x, y))
        found.append([a, numbers, b, *first, *second, *plain])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert not HaloUnderWay(requests).wait()[0].requires_grad
    halo = HaloUnderWay(requests)
    with torch.no_grad():
        halo.wait()
    assert halo.wait()[0].requires_grad


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_halo_under_way_is_that_of_fetch_halo(world_size: int) -> None:
    run_ranks(same_as_fetch, world_size)


def order_of_backward(rank: int, world_size: int) -> list[str]:
    plan = plan_of(rank, world_size)
    x = torch.randn(6, 3, requires_grad=True)
    events: list[str] = []
    start = exchange._start_return

    def watched(*arguments: Any) -> Any:
        events.append("gradients leave")
        return start(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_start_return", watched)
        halo = HaloUnderWay([(plan, x)])
        own = x * 2
        own.register_hook(lambda grad: events.append("own rows"))
        (rows,) = halo.wait()
        remote = rows * 3
        remote.register_hook(lambda grad: events.append("remote rows"))
        x.register_hook(lambda grad: events.append("both"))
        (own.sum() + remote.sum()).backward()
    return events


def test_gradients_travel_while_those_of_own_rows_are_found() -> None:
    for events in run_ranks(order_of_backward, 2):
        assert events == ["remote rows", "gradients leave", "own rows", "both"]


class Foreign(nn.Module):
    """A layer that was not written for rows under way."""

    def forward(self, graph: Any, feat: tuple[Tensor, Tensor]) -> Tensor:
        assert type(feat[0]) is Tensor
        out: Tensor = SAGEConv.forward(self.conv, graph, feat)
        return out

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sage-wide": lambda: SAGEConv(4, 6, "mean"),
    "sage-narrow": lambda: SAGEConv(4, 3, "mean", feat_drop=0.0),
    "sage-gcn": lambda: SAGEConv(4, 3, "gcn"),
    "sage-pool": lambda: SAGEConv(4, 3, "pool"),
    "gcn-both": lambda: GraphConv(4, 3, norm="both"),
    "gcn-left": lambda: GraphConv(4, 6, norm="left"),
    "gat": lambda: GATConv((4, 4), 3, 2),
    "gin": lambda: GINConv(nn.Linear(4, 3), "sum"),
    "foreign": lambda: Foreign(SAGEConv(4, 3, "mean")),
}


def typed_layer(name: str, etypes: list[str]) -> HeteroGraphConv:
    torch.manual_seed(0)
    return HeteroGraphConv({etype: LAYERS[name]() for etype in etypes})


def inputs_of(graph: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {t: torch.randn(graph.num_nodes(t), 4, generator=generator) for t in graph.ntypes}


def typed_gap(rank: int, world_size: int, parts: str, name: str) -> float:
    """Outputs, gradients and second gradients against the layer on the whole graph."""
    torch.set_default_dtype(torch.float64)
    try:
        whole = graph_of("typed")
        data = graphshard.load_dgl_partition_data(parts, rank)
        graph = graphshard.construct_full_graph(data, mode="oneshot")
        nodes, results = own_nodes(data), []
        everything = inputs_of(whole)
        for where, rows in (
            (whole, everything),
            (graph, {t: everything[t][nodes[t]] for t in nodes}),
        ):
            inputs = {t: x.clone().requires_grad_() for t, x in rows.items()}
            layer = typed_layer(name, whole.etypes)
            out = layer(where, inputs)
            loss = sum(x.sin().sum() for x in out.values())
            first = torch.autograd.grad(loss, list(inputs.values()), create_graph=True)
            norm = sum(g.square().sum() for g in first)
            second = torch.autograd.grad(norm, list(inputs.values()), allow_unused=True)
            pairs = zip(inputs, first, second, strict=True)
            results.append(({t: x.detach() for t, x in out.items()}, {t: g for t, *g in pairs}))
        gaps = [torch.zeros(1)]
        (outs, grads), (own_outs, own_grads) = results
        for t, rows in nodes.items():
            if t in outs and rows.numel():
                gaps.append((own_outs[t] - outs[t][rows]).abs().max().view(1))
            for a, b in zip(grads[t], own_grads[t], strict=True):
                if rows.numel() and a is not None:
                    b = torch.zeros_like(a[rows]) if b is None else b
                    gaps.append((b - a[rows]).detach().abs().max().view(1))
        return float(torch.cat(gaps).max())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("num_ranks", "how"), [(2, "random"), (3, "empty_part")])
def test_typed_layers_compute_what_one_process_does(
    tmp_path: Path, name: str, num_ranks: int, how: str
) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), num_ranks, how)
    for gap in run_ranks(typed_gap, num_ranks, parts, name):
        assert gap < 1e-10


def typed_events(rank: int, world_size: int, parts: str) -> tuple[list[str], dict[str, int]]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    layer = typed_layer("sage-narrow", graph.etypes)
    inputs = {t: x.requires_grad_() for t, x in inputs_of(graph).items()}
    sum(x.sum() for x in layer(graph, inputs).values()).backward()  # what is checked on first use
    events: list[str] = []
    gspmm, wait = localized.gspmm, HaloUnderWay.wait

    def summed(*arguments: Any) -> Tensor:
        events.append("sum")
        return gspmm(*arguments)

    def waited(self: HaloUnderWay) -> list[Tensor]:
        events.append("wait")
        return wait(self)

    with pytest.MonkeyPatch.context() as patch, comm.trace() as trace:
        patch.setattr(localized, "gspmm", summed)
        patch.setattr(HaloUnderWay, "wait", waited)
        sum(x.sum() for x in layer(graph, inputs).values()).backward()
    return events, dict(trace.calls)


def test_own_rows_are_summed_before_others_are_waited_for(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), 3, "random")
    for events, calls in run_ranks(typed_events, 3, parts):
        assert events[:2] == ["sum", "wait"]
        assert events.count("sum") == 2 * len(graph_of("typed").etypes)
        assert calls == {"all_to_all": 2}


class Broken(Exception):
    pass


def fails(rank: int, world_size: int, parts: str, where: str) -> bool:
    """Whether the layer works again after an error while the halo was in flight."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    layer = typed_layer("sage-narrow", graph.etypes)
    inputs = {t: x.requires_grad_() for t, x in inputs_of(graph).items()}

    def run() -> Tensor:
        return torch.cat([x.flatten() for x in layer(graph, inputs).values()])

    expected = run()

    def fail(*_: Any) -> Any:
        raise Broken

    with pytest.MonkeyPatch.context() as patch:
        if where == "layer":
            patch.setattr(SAGEConv, "forward", fail)
        else:
            patch.setattr(localized, "gspmm", fail)
        with pytest.raises(Broken):
            run()
    dist.barrier()
    return torch.equal(run(), expected)


@pytest.mark.parametrize("where", ["layer", "sum"])
def test_an_error_leaves_no_message_behind(tmp_path: Path, where: str) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), 2, "random")
    assert run_ranks(fails, 2, parts, where) == [True, True]


def test_hooks_see_tensors(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), 2, "random")
    assert all(run_ranks(hooked, 2, parts))


def hooked(rank: int, world_size: int, parts: str) -> bool:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    layer, kinds = typed_layer("sage-wide", graph.etypes), []
    for module in layer.mods.values():
        module.register_forward_pre_hook(lambda _, given: kinds.append(type(given[1][0])))
    layer(graph, {t: x.requires_grad_() for t, x in inputs_of(graph).items()})
    return len(kinds) == len(graph.etypes) and set(kinds) == {Tensor}


def read_by_an_author(rank: int, world_size: int, parts: str) -> bool:
    """Layers of others that localize get tensors; nothing is left under way."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    inputs = {t: x.requires_grad_() for t, x in inputs_of(graph).items()}
    local, rows = graph.localize(inputs)
    assert set(rows) == set(inputs)
    for ntype, x in rows.items():
        assert type(x) is Tensor
        assert len(x) == local.num_src_nodes(ntype)
        assert torch.equal(x[: len(inputs[ntype])], inputs[ntype])
    torch.autograd.grad(sum(x.sum() for x in rows.values()), list(inputs.values()))
    return True


def test_localized_inputs_are_tensors(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), 3, "random")
    assert all(run_ranks(read_by_an_author, 3, parts))
