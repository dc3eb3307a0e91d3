# SPDX-License-Identifier: Apache-2.0
"""Layers whose parts were changed: hooks, adapters, parametrizations, methods of a subclass.

A kernel that computes in place of a module must not when the module was changed. Against DGL's
layers with the same change; the way of the computation is that of one process, or of two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl_oracle import GRAPHS, compare, dgl_nn
from nn_layer_cases import IN_FEATS, LayerCase, nn_layer_cases
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as spectral_norm_by_hook

import graphshard
import graphshard.nn
from graphshard.dgl.nn import APPNPConv
from graphshard.nn import GATConv, HeteroGraphConv, RelGraphConv, SAGEConv
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks


@pytest.fixture(autouse=True)
def _double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Adapted(nn.Module):
    """A layer with something beside it, as adapters of low rank are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 1.5 * self.inner(*args, **kwargs)


def with_hook(layer: nn.Module, name: str) -> None:
    getattr(layer, name).register_forward_hook(lambda module, args, out: 2 * out)


def with_pre_hook(layer: nn.Module, name: str) -> None:
    getattr(layer, name).register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))


def replaced(layer: nn.Module, name: str) -> None:
    setattr(layer, name, Adapted(getattr(layer, name)))


def with_forward(layer: nn.Module, name: str) -> None:
    part = getattr(layer, name)
    before = part.forward
    part.forward = lambda *args, **kwargs: 3 * before(*args, **kwargs)


def parametrized(layer: nn.Module, name: str) -> None:
    torch.manual_seed(0)
    parametrizations.spectral_norm(getattr(layer, name))


def normalized_by_hook(layer: nn.Module, name: str) -> None:
    torch.manual_seed(0)
    spectral_norm_by_hook(getattr(layer, name))


def with_bias(layer: nn.Module, name: str) -> None:
    part = getattr(layer, name)
    torch.manual_seed(1)
    setattr(layer, name, nn.Linear(part.in_features, part.out_features))


CHANGES: dict[str, Callable[[nn.Module, str], None]] = {
    "hook": with_hook,
    "pre-hook": with_pre_hook,
    "adapter": replaced,
    "forward": with_forward,
}
OF_LINEAR = {
    "parametrization": parametrized,
    "norm by hook": normalized_by_hook,
    "bias": with_bias,
}


def changes() -> Iterator[Any]:
    """Each part with every second change, and the next layer with the others; all with --all."""
    for number, case in enumerate(nn_layer_cases("plain")):
        for name, part in case.make().named_children():
            if isinstance(part, nn.LSTM) or "weighted" in case.name:
                continue
            of_part = CHANGES | (OF_LINEAR if type(part) is nn.Linear else {})
            for i, (change, function) in enumerate(of_part.items()):
                marks = [] if (number + i) % 2 == 0 else pytest.mark.exhaustive
                label = f"{case.name}-{name}-{change}"
                yield pytest.param(case, name, function, id=label, marks=marks)


@pytest.mark.parametrize(("case", "part", "change"), list(changes()))
def test_a_changed_part(
    case: LayerCase, part: str, change: Callable[[nn.Module, str], None]
) -> None:
    torch.manual_seed(0)
    layers = case.make(), case.make((), dgl_nn)
    for layer in layers:
        change(layer.double(), part)
        layer.eval()  # spectral norms would go on with their iteration
    edges = GRAPHS["full"]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(edges.num_src, IN_FEATS, generator=generator)
    compare(*layers, edges.graphs(), inputs, case.keywords(edges.eids()))


def scaled(messages: dict[str, Tensor], edges: Any) -> dict[str, Tensor]:
    return {"m": messages["m"] * edges.src["h"].sum(-1, keepdim=True)}


@pytest.mark.parametrize("on", ["class", "instance"])
@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_own_messages(regularizer: str | None, on: str) -> None:
    layers = []
    for base in (RelGraphConv, dgl_nn.RelGraphConv):

        class Own(base):  # type: ignore[misc, valid-type]
            def message(self, edges: Any) -> dict[str, Tensor]:
                return scaled(super().message(edges), edges)

        torch.manual_seed(0)
        layer = (Own if on == "class" else base)(IN_FEATS, IN_FEATS, 3, regularizer, 1)
        if on == "instance":
            before = layer.message
            layer.message = lambda edges, before=before: scaled(before(edges), edges)
        layers.append(layer)
    edges = GRAPHS["full"]
    inputs = torch.randn(edges.num_src, IN_FEATS)
    keywords = {"etypes": edges.eids() % 3, "norm": torch.rand(len(edges.src), 1)}
    compare(*layers, edges.graphs(), inputs, keywords)


def test_own_messages_are_still_summed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RelGraphConv(4, 4, 3, "basis", 2)
    monkeypatch.setattr(graphshard.nn.TypedLinear, "forward", None)
    layer(GRAPHS["full"].graphs()[0], torch.randn(8, 4), GRAPHS["full"].eids() % 3)


def test_hooks_on_all_modules() -> None:
    """As profilers and feature extractors set them."""
    seen: list[str] = []
    layer, graph = SAGEConv(4, 4, "pool"), GRAPHS["full"].graphs()[0]
    handle = register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        layer(graph, torch.randn(8, 4))
    finally:
        handle.remove()
    assert seen.count("Linear") == 3


def test_dropout_of_edges_listens_to_its_own_mode() -> None:
    """Monte Carlo dropout: the layer is in eval, the dropout in train mode."""
    layer, graph = APPNPConv(1, 0.0, edge_drop=0.5).eval(), GRAPHS["full"].graphs()[0]
    x = torch.ones(8, 2)
    still = layer(graph, x)
    assert torch.equal(layer(graph, x), still)
    layer.edge_drop.train()
    assert not torch.equal(layer(graph, x), still)
    layer.edge_drop = nn.Identity()
    torch.testing.assert_close(layer.train()(graph, x), still)


def calls_in_backward(rank: int, num_ranks: int, parts: str) -> tuple[int, bool]:
    """How often a hook on a projection runs, and whether gradients are those of one-shot mode."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    count, grads = 0, []

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return 2 * out

    for mode in ("sequential", "oneshot"):
        graph = graphshard.construct_full_graph(data, mode=mode)
        torch.manual_seed(0)
        layer = GATConv(5, 3, 2, allow_zero_in_degree=True)
        layer.fc.register_forward_hook(hook)
        x = torch.randn(12, 5)[data.node_features["_N/orig_id"]].requires_grad_()
        layer(graph, x).square().sum().backward()
        grads.append(x.grad)
    return count, bool((grads[0] - grads[1]).abs().max() < 1e-4)


def test_a_hook_runs_once_where_projections_are_computed_again(tmp_path: Path) -> None:
    graph = graphshard.graph((torch.arange(40) % 12, torch.arange(40) * 5 % 12), num_nodes=12)
    partition_graph(graph, "g", 2, str(tmp_path), part_method="random", quiet=True)
    assert run_ranks(calls_in_backward, 2, str(tmp_path / "g.json")) == [(2, True)] * 2


def kinds_seen(rank: int, num_ranks: int, parts: str) -> list[str]:
    """What parts of layers inside `HeteroGraphConv` are given."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    kinds: set[str] = set()

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kinds.add(type(x).__name__)
            return super().forward(x)

    def note(module: nn.Module, args: Any) -> None:
        kinds.add(type(args[0]).__name__)

    sage, gat = SAGEConv(4, 2, "mean"), GATConv(4, 2, 1, allow_zero_in_degree=True)
    sage.fc_neigh = Own(4, 2)
    gat.fc.register_forward_pre_hook(note)
    layer = HeteroGraphConv({"a": sage, "b": gat}, lambda parts, _: parts[0].flatten(1))
    x = torch.randn(data.num_owned(), 4, requires_grad=True)
    layer(graph, {"_N": x})["_N"].sum().backward()
    return sorted(kinds)


def test_changed_parts_see_tensors(tmp_path: Path) -> None:
    ends = torch.arange(40) % 12, torch.arange(40) * 5 % 12
    graph = graphshard.heterograph({("_N", "a", "_N"): ends, ("_N", "b", "_N"): ends}, {"_N": 12})
    partition_graph(graph, "g", 2, str(tmp_path), part_method="random", quiet=True)
    assert run_ranks(kinds_seen, 2, str(tmp_path / "g.json")) == [["Tensor"]] * 2
