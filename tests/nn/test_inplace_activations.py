# SPDX-License-Identifier: Apache-2.0
"""Results of layers that the caller changes in place, against DGL, which is changed the same way.

With the compiled kernels and without them. One process; see tests/fullbatch/test_changed_results.py
for ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dgl_oracle import BLOCKS, GRAPHS, HETERO, HETERO_NODES, compare, dgl, dgl_nn
from nn_layer_cases import IN_FEATS, LayerCase, nn_layer_cases
from torch import Tensor, nn

from graphshard._base.kernels import force_extension
from graphshard.graph import heterograph
from graphshard.ops import Adjacency, Attention, attend

PLAIN, TYPED = nn_layer_cases("plain"), nn_layer_cases("typed")


def dropped(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.3, inplace=True)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.5, inplace=True),
    "mul": lambda x: x.mul_(1.5).add_(0.25),
    "dropout": dropped,
}


@pytest.fixture(autouse=True)
def _double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[pytest.param("kernels", marks=pytest.mark.compiled), "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with force_extension(request.param == "kernels"):
        yield


class Activated(nn.Module):
    """A layer, and what is done in place to its results."""

    def __init__(self, layer: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.activation = layer, activation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.layer(*args, **kwargs)
        if isinstance(found, Tensor):
            return self.activation(found)
        return {key: self.activation(rows) for key, rows in found.items()}


def both(
    case: LayerCase, activation: Callable[[Tensor], Tensor], relations: Any = ()
) -> tuple[Activated, Activated]:
    """(ours, DGL's) from one seed."""
    made = []
    for namespace in ((), (dgl_nn,)):
        torch.manual_seed(0)
        made.append(Activated(case.make(relations, *namespace).double(), activation))
    return made[0], made[1]


def features(num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, IN_FEATS, dtype=torch.float64, generator=generator)


def dgl_runs(layer: Activated, graph: Any, rows: Any, keywords: Any) -> bool:
    """Whether DGL's gradients survive the change; of tanh, which torch keeps, none do."""
    leaves = rows if isinstance(rows, dict) else {"_N": rows}
    leaves = {key: x.clone().requires_grad_() for key, x in leaves.items()}
    out = layer(graph, leaves if isinstance(rows, dict) else leaves["_N"], **keywords)
    try:
        sum(x.sum() for x in (out.values() if isinstance(out, dict) else [out])).backward()  # type: ignore[union-attr]
    except RuntimeError as error:
        assert "inplace operation" in str(error)
        return False
    return True


@pytest.mark.parametrize(
    ("case", "activation"),
    [  # each case with one of the activations; with all, with ``--all``
        pytest.param(
            case,
            activation,
            id=f"{case.name}-{activation}",
            marks=[] if (i + j) % len(ACTIVATIONS) == 0 else pytest.mark.exhaustive,
        )
        for i, case in enumerate(PLAIN)
        for j, activation in enumerate(ACTIVATIONS)
    ],
)
def test_graphs_and_blocks(case: LayerCase, activation: str, way: None) -> None:
    ours, theirs = both(case, ACTIVATIONS[activation])
    kinds = [GRAPHS["full"].graphs(), *([BLOCKS["full"].blocks()] if case.block else [])]
    for edges, graphs in zip((GRAPHS["full"], BLOCKS["full"]), kinds, strict=False):
        rows, keywords = features(edges.num_src), case.keywords(edges.eids())
        if dgl_runs(theirs, graphs[1], rows, keywords):
            compare(ours, theirs, graphs, rows, keywords)
        else:
            assert torch.tanh in vars(theirs.layer).values()


@pytest.mark.parametrize("case", TYPED, ids=[case.name for case in TYPED])
def test_typed_graphs(case: LayerCase) -> None:
    ends = {etype: edges.ends() for etype, edges in HETERO.items()}
    graphs = heterograph(ends, HETERO_NODES), dgl.heterograph(ends, HETERO_NODES)
    ours, theirs = both(case, ACTIVATIONS["relu"], list(HETERO))
    keywords = case.keywords({etype: edges.eids() for etype, edges in HETERO.items()})
    rows = {ntype: features(count) for ntype, count in HETERO_NODES.items()}
    if dgl_runs(theirs, graphs[1], rows, keywords):
        compare(ours, theirs, graphs, rows, keywords)


def test_a_result_is_changed_often_and_differentiated_twice(way: None) -> None:
    """Fused ReLU and bias, 16-bit operands, retain_graph; against plain torch on a dense matrix."""
    generator = torch.Generator().manual_seed(1)
    num, heads, dim = 40, 2, 3
    adj = Adjacency(*torch.randint(0, num, (2, 300), generator=generator), num, num)
    src, dst = adj.coo()
    values = torch.randn(num, heads, dim, generator=generator, dtype=torch.float64)
    left, right = torch.randn(2, num, heads, generator=generator, dtype=torch.float64)
    bias = torch.randn(heads, dim, generator=generator, dtype=torch.float64)
    counts = torch.zeros(num, num, dtype=torch.float64).index_put(
        (dst.long(), src.long()), torch.ones(300, dtype=torch.float64), accumulate=True
    )

    def run(fused: bool) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (values, left, right, bias)]
        v, el, er, b = leaves
        if fused:
            out = attend(adj, Attention.additive(v, el, er).finished(b, True)).mul_(2.0)
        else:
            scores = F.leaky_relu(el.unsqueeze(0) + er.unsqueeze(1), 0.2)
            weights = counts.unsqueeze(-1) * (scores - scores.amax(1, keepdim=True)).exp()
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
            out = (torch.einsum("vuh,uhd->vhd", weights, v) + b).relu() * 2.0
        loss = out.sin().sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss, leaves)
        return [*first, *second]

    for mine, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_change_leaves_the_same_bits(dtype: torch.dtype, way: None) -> None:
    adj = GRAPHS["full"].graphs()[0].adjacency()

    def grads(in_place: bool) -> list[Tensor]:
        torch.manual_seed(0)
        rows = [torch.randn(8, 2, 4), torch.randn(8, 2), torch.randn(8, 2)]
        leaves = [t.to(dtype).requires_grad_() for t in rows]
        out = F.relu(attend(adj, Attention.additive(*leaves)), inplace=in_place)
        return list(torch.autograd.grad(out.square().sum(), leaves))

    for mine, other in zip(grads(True), grads(False), strict=True):
        assert torch.equal(mine, other)
