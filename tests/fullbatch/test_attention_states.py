# SPDX-License-Identifier: Apache-2.0
"""Attention: states of destinations in place of rows. 1, 2, 3 and 5 gloo ranks.

The oracle is a softmax over a dense matrix of scores in plain torch, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shards import graph_of, own_nodes, write_parts
from torch import Tensor, nn

import graphshard
from graphshard import comm
from graphshard.fullbatch import row_transport
from graphshard.fullbatch.softmax import PartialStates
from graphshard.graph import attend
from graphshard.nn import GATConv
from graphshard.ops import Attention, EdgeMask
from graphshard.testing import run_ranks

HEADS, DIM, SCORE_DIM = 3, 4, 5


@contextmanager
def saving_at_least(num_bytes: int) -> Iterator[None]:
    """States travel where a rank saves so many bytes. Processes of ranks serve many tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_transport, "LEAST_SAVED", num_bytes)
        yield


WHEREVER = -(1 << 40)  # states can travel


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def operands_of(score: str, num_src: int, num_dst: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the whole graph, rounded to a dtype."""
    rows = {"values": random(num_src, HEADS, DIM)}
    if score == "additive":
        rows |= {"src": 3 * random(num_src, HEADS, seed=1), "dst": random(num_dst, HEADS, seed=2)}
    elif score == "dot":
        rows |= {"src": random(num_src, HEADS, SCORE_DIM, seed=1)}
        rows |= {"dst": random(num_dst, HEADS, SCORE_DIM, seed=2)}
    else:
        rows |= {"dst": random(num_dst, HEADS, DIM, seed=2), "vector": random(HEADS, DIM, seed=3)}
    return {name: value.to(dtype) for name, value in rows.items()}


def dense(score: str, rows: dict[str, Tensor], src: Tensor, dst: Tensor) -> Tensor:
    """The attention, by a softmax over dense columns, an entry for each edge."""
    values, of_dst = rows["values"], rows["dst"]
    if score == "additive":
        scores = F.leaky_relu(rows["src"][src] + of_dst[dst], 0.2)
    elif score == "dot":
        scores = (rows["src"][src] * of_dst[dst]).sum(-1)
    else:
        scores = (F.leaky_relu(values[src] + of_dst[dst], 0.2) * rows["vector"]).sum(-1)
    table = scores.new_full((of_dst.shape[0], src.numel(), HEADS), -torch.inf)
    edges = torch.arange(src.numel())
    table = table.index_put((dst, edges), scores)
    weights = table.softmax(1).nan_to_num(0.0) if src.numel() else table
    return torch.einsum("neh,ehd->nhd", weights, values[src])


def attention_of(score: str, rows: dict[str, Tensor], **options: Any) -> Attention:
    make: Any = getattr(Attention, score)
    return make(**rows, **options)


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


def total_bytes(trace: comm.Trace) -> int:
    return int(comm.all_reduce(torch.tensor([trace.total_bytes])))


def run_once(
    view: Any, score: str, rows: dict[str, Tensor], cotangent: Tensor
) -> tuple[list[Tensor], int]:
    """The result and the gradients, and what all ranks sent."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in rows.items()}
    with comm.trace() as trace:
        result = attend(view, attention_of(score, leaves))
        assert result is not None
        (result * cotangent).sum().backward()
    grads = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
    assert len(grads) == len(leaves)
    return [result.detach(), *grads], total_bytes(trace)


def check_everywhere(rank: int, world_size: int, parts: str, kind: str) -> None:
    with saving_at_least(WHEREVER):
        check(rank, world_size, parts, kind)


def check(rank: int, world_size: int, parts: str, kind: str) -> None:
    whole, saved = graph_of(kind), 0
    data = graphshard.load_dgl_partition_data(parts, rank)
    nodes = own_nodes(data)
    graphs = [
        graphshard.construct_full_graph(data, mode="oneshot", partial_sums=sums)
        for sums in (True, False)
    ]
    for etype in data.canonical_etypes:
        src, dst = (ids.long() for ids in whole.edges(etype=etype))
        own_src, own_dst = nodes[etype[0]], nodes[etype[2]]
        counts = whole.num_nodes(etype[0]), whole.num_nodes(etype[2])
        cases = [(score, torch.float64) for score in ("additive", "dot", "joint")]
        for score, dtype in [*cases, ("additive", torch.float32), ("additive", torch.bfloat16)]:
            bound = {torch.float64: 1e-9, torch.float32: 2e-5}.get(dtype, 0.05)
            rows = operands_of(score, *counts, dtype)
            cotangent = random(counts[1], HEADS, DIM, seed=4).to(dtype)
            exact = {name: value.double().requires_grad_() for name, value in rows.items()}
            expected = dense(score, exact, src, dst)
            (expected * cotangent.double()).sum().backward()
            own = dict(rows)
            for name in rows.keys() - {"vector"}:
                own[name] = rows[name][own_dst if name == "dst" else own_src]
            sent = []
            for graph in graphs:
                view = graph[etype] if len(graph.canonical_etypes) > 1 else graph
                run_once(view, score, own, cotangent[own_dst])  # the first builds
                found, num_bytes = run_once(view, score, own, cotangent[own_dst])
                again, _ = run_once(view, score, own, cotangent[own_dst])
                assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
                sent.append(num_bytes)
                result, *grads = found
                close(result, expected.detach()[own_dst], bound)
                for (name, leaf), grad in zip(exact.items(), grads, strict=True):
                    assert leaf.grad is not None
                    if name == "vector":
                        close(comm.all_reduce(grad.clone()), leaf.grad, bound)
                        continue
                    close(grad, leaf.grad[own_dst if name == "dst" else own_src], bound)
            saved += score == "additive" and dtype == torch.float64 and sent[0] < sent[1]
    assert saved or world_size == 1  # it says something


CASES = [
    (1, "metis", "plain"),
    (2, "random", "typed"),
    (3, "random", "plain"),
    (5, "empty_part", "plain"),
    pytest.param(2, "random", "plain", marks=pytest.mark.exhaustive),
    pytest.param(3, "metis", "typed", marks=pytest.mark.exhaustive),
    pytest.param(5, "empty_part", "typed", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("num_ranks", "how", "kind"), CASES)
def test_attention_is_that_of_a_dense_softmax(
    tmp_path: Path, num_ranks: int, how: str, kind: str
) -> None:
    run_ranks(
        check_everywhere, num_ranks, write_parts(tmp_path, graph_of(kind), num_ranks, how), kind
    )


class Network(nn.Module):
    """Two layers of attention, a ReLU in each, whose results are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"activation": F.relu, "allow_zero_in_degree": True}
        self.first = GATConv(DIM, 6, 2, **options)
        self.second = GATConv(12, 6, 2, residual=True, **options)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = self.first(graph, x).flatten(1).mul_(1.5)
        result: Tensor = self.second(graph, h).sin()
        return result


def trained_everywhere(rank: int, world_size: int, parts: str) -> None:
    with saving_at_least(WHEREVER):
        trained(rank, world_size, parts)


def trained(rank: int, world_size: int, parts: str) -> None:
    """Losses and weights of steps are those of one process; derivatives of gradients, too."""
    whole = graph_of("plain")
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    ((_, nodes),) = own_nodes(data).items()
    x, found = random(whole.num_nodes(), DIM), []
    for view, rows in ((whole, x), (graph, x[nodes])):
        torch.manual_seed(0)
        network, losses = Network().double(), []
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        for _ in range(3):
            loss = network(view, rows.requires_grad_()).square().sum()
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.detach())
            if view is graph:
                graphshard.gather_grads(network)
            optimizer.step()
        layer = GATConv(DIM, 3, 2, allow_zero_in_degree=True).double()
        (grad,) = torch.autograd.grad(
            layer(view, rows).sin().sum(), rows, create_graph=True, retain_graph=True
        )
        (again,) = torch.autograd.grad(grad.square().sum(), rows)
        found.append((torch.stack(losses), list(network.parameters()), grad.detach(), again))
    (losses, weights, grad, again), (own_losses, own_weights, own_grad, own_again) = found
    close(comm.all_reduce(own_losses), losses, 1e-9)
    for own, expected in zip(own_weights, weights, strict=True):
        close(own.detach(), expected.detach(), 1e-9)
    close(own_grad, grad[nodes], 1e-9)
    close(own_again, again[nodes], 1e-9)


def narrowed_everywhere(rank: int, world_size: int, parts: str) -> None:
    with saving_at_least(WHEREVER):
        narrowed(rank, world_size, parts)


def narrowed(rank: int, world_size: int, parts: str) -> None:
    """Rows and values of states are rounded on their way, scores are not."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    rows = operands_of("additive", data.num_owned(), data.num_owned(), torch.float32)
    rows["dst"] = rows["dst"] + 300.0
    cotangent = random(data.num_owned(), HEADS, DIM, seed=4 + rank).float()
    exact, sent = [], []
    for dtype, bound in ((None, 0.0), (torch.bfloat16, 0.05), (torch.int8, 0.15)):
        graph = graphshard.construct_full_graph(data, mode="oneshot", halo_dtype=dtype)
        run_once(graph, "additive", rows, cotangent)
        found, num_bytes = run_once(graph, "additive", rows, cotangent)
        exact, sent = exact or found, [*sent, num_bytes]
        result, of_values, *_ = found
        close(result, exact[0].double(), bound)
        close(of_values, exact[1].double(), bound)
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) == 3


def dropped_everywhere(rank: int, world_size: int, parts: str) -> None:
    with saving_at_least(WHEREVER):
        dropped(rank, world_size, parts)


def dropped(rank: int, world_size: int, parts: str) -> None:
    """Dropout is one of the whole graph where seeds are equal, and consistent where they are not.

    The oracle of a first derivative is that of one process; or the one that is found by autograd.
    """
    whole = graph_of("plain")
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    ((_, nodes),) = own_nodes(data).items()
    num_nodes = whole.num_nodes()
    rows = operands_of("additive", num_nodes, num_nodes, torch.float64)
    cotangent = random(num_nodes, HEADS, DIM, seed=4)
    own = {name: value[nodes] for name, value in rows.items()}
    for seed, is_equal in ((3, True), (3 + rank, False)):
        mask = EdgeMask(0.4, seed)
        leaves = {name: value.clone().requires_grad_() for name, value in own.items()}
        result = attend(graph, attention_of("additive", leaves, mask=mask))
        assert result is not None
        loss = (result * cotangent[nodes]).sum()
        recorded = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        found = torch.autograd.grad(loss, list(leaves.values()))
        for one, other in zip(found, recorded, strict=True):
            close(one, other.detach(), 1e-9)
        if is_equal:
            whole_leaves = {name: value.clone().requires_grad_() for name, value in rows.items()}
            expected = attend(whole, attention_of("additive", whole_leaves, mask=mask))
            assert expected is not None
            (expected * cotangent).sum().backward()
            close(result.detach(), expected.detach()[nodes], 1e-9)
            for grad, leaf in zip(found, whole_leaves.values(), strict=True):
                assert leaf.grad is not None
                close(grad, leaf.grad[nodes], 1e-9)


def where_rows_travel(rank: int, world_size: int, parts: str) -> None:
    """What belongs to edges, constant rows, and little to save: no states are made."""
    made: list[int] = []
    make = PartialStates.make

    def noted(self: PartialStates, attention: Attention) -> None:
        made.append(rank)
        make(self, attention)

    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    num_rows, num_edges = data.num_owned(), graph.num_edges()
    rows = operands_of("additive", num_rows, num_rows, torch.float64)
    cotangent = random(num_rows, HEADS, DIM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialStates, "make", noted)
        run_once(graph, "additive", rows, cotangent)  # a round is dearer than these few bytes
        assert not made
        with saving_at_least(1):
            run_once(graph, "additive", rows, cotangent)
            assert made
            made.clear()
            weighted = attention_of("additive", rows, factor=torch.ones(num_edges))
            assert attend(graph, weighted) is not None
            graph.mark_constant(rows["values"])
            assert attend(graph, attention_of("additive", rows)) is not None
            alone = graphshard.construct_full_graph(data, mode="oneshot", partial_sums=False)
            run_once(alone, "additive", rows, cotangent)
            assert not made


def errors_everywhere(rank: int, world_size: int, parts: str) -> None:
    with saving_at_least(WHEREVER):
        errors_in_the_middle(rank, world_size, parts)


def errors_in_the_middle(rank: int, world_size: int, parts: str) -> None:
    """What is on its way is waited for, so that the next pass gets what is its own."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    rows = operands_of("additive", data.num_owned(), data.num_owned(), torch.float64)
    cotangent = random(data.num_owned(), HEADS, DIM, seed=rank)
    expected, _ = run_once(graph, "additive", rows, cotangent)
    for name in ("make", "merge", "gradients", "add_to"):

        def fail(*args: Any) -> Any:
            raise ValueError("in the middle")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartialStates, name, fail)
            with pytest.raises(ValueError, match="in the middle"):
                run_once(graph, "additive", rows, cotangent)
        found, _ = run_once(graph, "additive", rows, cotangent)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_training_rounding_refusing_and_failing(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 3, "random")
    for program in (
        trained_everywhere,
        narrowed_everywhere,
        dropped_everywhere,
        where_rows_travel,
        errors_everywhere,
    ):
        run_ranks(program, 3, parts)
