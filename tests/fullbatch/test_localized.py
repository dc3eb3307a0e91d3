# SPDX-License-Identifier: Apache-2.0
"""Typed layers in one-shot mode: the halo is fetched in one exchange, and layers see tensors.

Against layers on the whole graph. 2 and 3 gloo ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shards import graph_of, own_nodes, write_parts
from torch import Tensor, nn

import graphshard
from graphshard import comm
from graphshard.graph import local_graph as local
from graphshard.nn import GATConv, GINConv, GraphConv, HeteroGraphConv, SAGEConv
from graphshard.testing import run_ranks


class Foreign(nn.Module):
    """A layer that aggregates by itself, not in steps."""

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
    "gcn-right": lambda: GraphConv(4, 6, norm="right", allow_zero_in_degree=True),
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


def typed_calls(rank: int, world_size: int, parts: str) -> dict[str, int]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    layer = typed_layer("sage-narrow", graph.etypes)
    inputs = {t: x.requires_grad_() for t, x in inputs_of(graph).items()}
    sum(x.sum() for x in layer(graph, inputs).values()).backward()  # what is checked on first use
    with comm.trace() as trace:
        sum(x.sum() for x in layer(graph, inputs).values()).backward()
    return dict(trace.calls)


def test_all_relations_share_one_exchange(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), 3, "random")
    assert run_ranks(typed_calls, 3, parts) == [{"all_to_all": 2}] * 3


def typed_bytes(
    rank: int, world_size: int, parts: str, name: str
) -> list[tuple[int, list[Tensor]]]:
    """Bytes that are sent, outputs and gradients; with partial sums, and without."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    found = []
    for sums in (True, False):
        graph = graphshard.construct_full_graph(data, mode="oneshot", partial_sums=sums)
        layer = typed_layer(name, graph.etypes)
        for _ in range(2):  # the first time finds what travels
            inputs = {t: x.double().requires_grad_() for t, x in inputs_of(graph).items()}
            with comm.trace() as trace:
                out = layer.double()(graph, inputs)
                sum(x.sin().sum() for x in out.values()).backward()
        results = [x.detach() for x in out.values()] + [x.grad for x in inputs.values()]
        found.append((trace.total_bytes, results))
    return found


@pytest.mark.parametrize("name", ["sage-wide", "gcn-right", "gin"])
@pytest.mark.parametrize(("num_ranks", "how"), [(3, "empty_part"), (5, "random")])
def test_layers_that_sum_send_partial_sums(
    tmp_path: Path, name: str, num_ranks: int, how: str
) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), num_ranks, how)
    sent = [0, 0]
    for found in run_ranks(typed_bytes, num_ranks, parts, name):
        for i, (num_bytes, _) in enumerate(found):
            sent[i] += num_bytes
        for one, other in zip(found[0][1], found[1][1], strict=True):
            torch.testing.assert_close(one, other)
    assert sent[0] < (0.95 if num_ranks == 5 else 1.01) * sent[1]


class Broken(Exception):
    pass


def fails(rank: int, world_size: int, parts: str, where: str) -> bool:
    """Whether the layer works again after an error behind the exchange."""
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
            patch.setattr(SAGEConv, "_finish", fail)
        else:
            patch.setattr(local, "reduce_messages", fail)
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
    """Layers of others that localize get tensors."""
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
