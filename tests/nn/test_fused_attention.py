# SPDX-License-Identifier: Apache-2.0
"""Attention layers go by the fused kernel where they can, and by edges where they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphshard.dgl.nn import AGNNConv, DotGatConv
from graphshard.graph import Graph, attend, create_block, graph, heterograph
from graphshard.nn import GATConv, GATv2Conv
from graphshard.ops import Attention

LAYERS: dict[str, Callable[[], Any]] = {
    "gat": lambda: GATConv(6, 4, 3, attn_drop=0.5, residual=True),
    "gat-activation": lambda: GATConv(6, 4, 3, bias=False, activation=torch.tanh),
    "gatv2": lambda: GATv2Conv(6, 4, 3, attn_drop=0.5, residual=True),
    "dotgat": lambda: DotGatConv(6, 4, 3),
    "agnn": lambda: AGNNConv(0.7),
}
ANY = pytest.mark.parametrize("layer", LAYERS)


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def some_graph() -> Graph:
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, 20, (90,), generator=generator)
    dst = torch.cat([torch.arange(20), torch.randint(0, 20, (70,), generator=generator)])
    return graph((src, dst), num_nodes=20)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def watch(monkeypatch: pytest.MonkeyPatch, g: Any) -> list[str]:
    """Notes each step of message passing on ``g``."""
    seen: list[str] = []
    for hook in ("_attend", "_edge_values", "_edge_softmax", "_reduce"):
        before = getattr(type(g), hook)

        def noted(self: Any, *args: Any, _hook: str = hook, _before: Any = before) -> Any:
            seen.append(_hook)
            return _before(self, *args)

        monkeypatch.setattr(type(g), hook, noted)
    return seen


def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "_attend", lambda self, relation, attention: None)


@ANY
def test_one_step_instead_of_three(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = some_graph()
    seen = watch(monkeypatch, g)
    made = LAYERS[layer]()
    made(g, rows(20, 6))
    assert seen == ["_attend"]


@ANY
def test_the_same_by_edges(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, for inputs with more dimensions too."""
    g, made = some_graph(), LAYERS[layer]().eval()
    for shape in ((20, 6), (20, 2, 6)):
        found = []
        for fused in (True, False):
            with monkeypatch.context() as patch:
                if not fused:
                    without_kernel(patch)
                x = rows(*shape).requires_grad_()
                out = made(g, x)
                inputs = [x, *made.parameters()]
                found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", ["gat", "gatv2", "dotgat"])
def test_attention_weights_are_those_of_the_output(layer: str) -> None:
    g, made = some_graph(), LAYERS[layer]().eval()
    if layer != "dotgat":
        made.res_fc = None
    out, weights = made(g, rows(20, 6), get_attention=True)
    torch.testing.assert_close(made(g, rows(20, 6)), out, rtol=1e-10, atol=1e-10)
    assert weights.shape == (90, 3, 1)


def test_what_the_kernel_does_not_know_goes_by_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    g, x = some_graph(), rows(20, 6)
    seen = watch(monkeypatch, g)
    for make in (GATConv, GATv2Conv):
        layer = make(6, 4, 3).eval()
        whole = layer(g, x)
        assert seen == ["_attend"]
        layer.attn_drop = Half()
        torch.testing.assert_close(layer(g, x), whole / 2)
        layer.attn_drop, layer.leaky_relu = nn.Identity(), nn.Tanh()
        layer(g, x)
        assert "_attend" not in seen[1:]
        seen.clear()
    by_column = 1.0 + rows(90, 3, 4) ** 2
    layer = GATConv(6, 4, 3)
    expected = layer(g, x, edge_weight=by_column)
    assert "_attend" not in seen
    same = layer(g, x, edge_weight=by_column[:, :, :1].expand(-1, -1, 4))
    assert not torch.allclose(same, expected)
    seen.clear()
    torch.testing.assert_close(layer(g, x, edge_weight=by_column[:, :, :1]), same)
    assert seen == ["_attend"]


@pytest.mark.parametrize("layer", ["gat", "gatv2"])
def test_dropout(layer: str) -> None:
    """Seeded by torch, another one each time, right on average, and its gradient is its own."""
    g, made = some_graph(), LAYERS[layer]()
    x = rows(20, 6).requires_grad_()
    torch.manual_seed(3)
    one, other = made(g, x), made(g, x)
    torch.manual_seed(3)
    assert torch.equal(made(g, x), one)
    assert not torch.equal(one, other)
    src, dst = g.edges()
    starts = 20 * torch.arange(200).view(
        -1, 1
    )  # of 200 copies side by side, with draws of their own
    many = graph(((src + starts).flatten(), (dst + starts).flatten()), num_nodes=4000)
    with torch.no_grad():
        outs = [made(many, x.repeat(200, 1)).unflatten(0, (200, 20)) for _ in range(40)]
        mean = torch.cat(outs).mean(0)
    gap = (mean - made.eval()(g, x).detach()).abs().max()
    assert float(gap) < 0.1
    made.train()

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(4)
        return made(g, x)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(seeded, [x])


def test_edge_weights_get_gradients() -> None:
    g, layer = some_graph(), GATConv(6, 4, 3)
    for shape in ((90,), (90, 1, 1), (90, 3, 1), (1, 3, 1)):
        weight = (1.0 + rows(*shape) ** 2).requires_grad_()
        if shape[0] != 90:
            with pytest.raises(ValueError, match="one row per edge"):
                layer(g, rows(20, 6), edge_weight=weight)
            continue
        out = layer(g, rows(20, 6), edge_weight=weight)
        expected, _ = layer(g, rows(20, 6), edge_weight=weight, get_attention=True)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        grads = [torch.autograd.grad(o.square().sum(), weight)[0] for o in (out, expected)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@ANY
def test_blocks_and_autocast(layer: str) -> None:
    block = create_block(([0, 1, 2, 3, 3], [0, 0, 1, 1, 2]), 4, 3)
    made = LAYERS[layer]().eval()
    x = rows(4, 6)
    out = made(block, x)
    assert out.shape[0] == 3
    with torch.autocast("cpu", torch.bfloat16):
        half = made.float()(block, x.float())
    torch.testing.assert_close(half.double(), out, rtol=0.05, atol=0.05)


def test_one_relation_at_a_time() -> None:
    g = heterograph({("a", "to", "b"): ([0], [0]), ("b", "to", "a"): ([0], [0])})
    with pytest.raises(TypeError, match=r"one relation at a time.*graph\[etype\]"):
        attend(g, Attention.additive(rows(1, 1, 1), rows(1, 1), rows(1, 1)))
