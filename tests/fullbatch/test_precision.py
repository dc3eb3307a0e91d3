# SPDX-License-Identifier: Apache-2.0
"""Results large enough for kept blocks and in-place sums, against float64 in plain torch.

The oracle is one process without the compiled kernels: the operators in their simplest form. Ranks
compute in float32, float64 and under autocast to bfloat16.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import own_nodes, write_parts
from torch.nn import functional as F

import graphshard
from case_selection import sampled
from graphshard._base.kernels import LARGE_BYTES, force_extension
from graphshard.dgl.nn import DotGatConv
from graphshard.nn import GATConv, GATv2Conv, GraphConv, SAGEConv
from graphshard.testing import run_ranks

NODES, WIDTH, CLASSES = 20_000, 96, 5
# Of the largest entry of each result.
TOLERANCE = {"float32": 1e-4, "float64": 1e-11}

assert NODES // 2 * WIDTH * 4 > LARGE_BYTES * 0.9


def large_graph() -> graphshard.Graph:
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(NODES, (4 * NODES,), generator=generator)
    dst = torch.randint(NODES, (4 * NODES,), generator=generator)
    return graphshard.graph((src, dst), num_nodes=NODES)


def make_layers(model: str) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    last: tuple[int, int, Any] = (WIDTH, CLASSES, None)
    sizes = [(WIDTH, WIDTH, F.relu), last]
    if model == "sage":
        return torch.nn.ModuleList(SAGEConv(a, b, "mean", activation=c) for a, b, c in sizes)
    if model == "gcn":
        return torch.nn.ModuleList(
            GraphConv(a, b, activation=c, allow_zero_in_degree=True) for a, b, c in sizes
        )
    if model == "dotgat":
        return torch.nn.ModuleList(
            DotGatConv(a, b if c is None else b // 4, 4, allow_zero_in_degree=True)
            for a, b, c in sizes
        )
    kind = {"gat": GATConv, "gatv2": GATv2Conv}[model]
    return torch.nn.ModuleList(
        kind(a, b if c is None else b // 4, 4, activation=c, allow_zero_in_degree=True)
        for a, b, c in sizes
    )


def rows_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and what the output is multiplied with to make a loss."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NODES, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.randn(NODES, CLASSES, generator=generator, dtype=torch.float64)
    return x.to(dtype), weights.to(dtype)


def results(graph: Any, layers: Any, x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the input, and gradients of the parameters (this rank's share)."""
    h = x = x.clone().requires_grad_()
    for layer in layers:
        h = layer(graph, h)
        h = h.flatten(1) if h.dim() == 3 and layer is layers[0] else h
    h = h.mean(1) if h.dim() == 3 else h
    (h.to(weights.dtype) * weights).sum().backward()
    assert x.grad is not None
    return [h.detach(), x.grad, *(p.grad for p in layers.parameters())]


def share_of(parts: str, rank: int, model: str, mode: str, kind: str) -> Any:
    """(results of this rank, gradients of parameters summed; its original node ids)."""
    dtype = torch.float64 if kind == "float64" else torch.float32
    data = graphshard.load_dgl_partition_data(parts, rank)
    nodes = own_nodes(data)["_N"]
    graph = graphshard.construct_full_graph(data, mode=mode)  # type: ignore[arg-type]
    x, weights = rows_of(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bfloat16"):
        found = results(graph, make_layers(model).to(dtype), x[nodes], weights[nodes])
    for grad in found[2:]:
        torch.distributed.all_reduce(grad)
    return found, nodes


@lru_cache
def of_plain_torch(model: str, low: bool = False) -> list[torch.Tensor]:
    dtype = torch.float32 if low else torch.float64
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=low)
    with force_extension(False), autocast:
        return results(large_graph(), make_layers(model).to(dtype), *rows_of(dtype))


def gaps(found: Any, expected: Any, order: float) -> list[float]:
    norm = torch.linalg.vector_norm
    pairs = zip(found, expected, strict=True)
    return [float(norm(a.double() - b, order) / norm(b, order)) for a, b in pairs]


def own_share(expected: list[torch.Tensor], nodes: torch.Tensor) -> list[torch.Tensor]:
    output, of_input, *of_parameters = expected
    return [output[nodes], of_input[nodes], *of_parameters]


def compare(
    rank: int,
    world_size: int,
    parts: str,
    model: str,
    mode: str,
    kind: str,
    expected: list[torch.Tensor],
) -> float:
    found, nodes = share_of(parts, rank, model, mode, kind)
    return max(gaps(found, own_share(expected, nodes), torch.inf))


@pytest.mark.parametrize(
    ("model", "kind", "mode"),
    sampled(
        ["sage", "gcn", "gat", "gatv2", "dotgat"],
        ["float32", "float64"],
        ["oneshot", "sequential"],
    ),
)
def test_large_results_are_those_of_plain_torch(
    parts: str, model: str, kind: str, mode: str
) -> None:
    arguments = parts, model, mode, kind, of_plain_torch(model)
    for gap in run_ranks(compare, 2, *arguments, timeout=120.0):
        assert gap < TOLERANCE[kind]


def compare_low(
    rank: int,
    world_size: int,
    parts: str,
    model: str,
    mode: str,
    exact: list[torch.Tensor],
    plain: list[torch.Tensor],
) -> list[tuple[float, float]]:
    found, nodes = share_of(parts, rank, model, mode, "bfloat16")
    exact, plain = own_share(exact, nodes), own_share(plain, nodes)
    return list(zip(gaps(found, exact, 2), gaps(plain, exact, 2), strict=True))


# Modes differ in what moves, which layers share: of one-shot mode one of sums, one of attention.
@pytest.mark.parametrize(
    ("model", "mode"),
    [(model, "sequential") for model in ("sage", "gcn", "gat", "gatv2", "dotgat")]
    + [("sage", "oneshot"), ("gat", "oneshot")]
    + [
        pytest.param(model, "oneshot", marks=pytest.mark.exhaustive)
        for model in ("gcn", "gatv2", "dotgat")
    ],
)
def test_autocast_is_as_exact_as_in_plain_torch(parts: str, model: str, mode: str) -> None:
    """bfloat16 has 8 bits; what that costs depends on the layer, so plain torch is the measure."""
    arguments = parts, model, mode, of_plain_torch(model), of_plain_torch(model, low=True)
    for errors in run_ranks(compare_low, 2, *arguments, timeout=120.0):
        for ours, plain in errors:
            assert ours < 1.25 * plain + 2**-9


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_parts(Path(tmp_path_factory.mktemp("parts")), large_graph(), 2, "metis")
