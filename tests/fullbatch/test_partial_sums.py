# SPDX-License-Identifier: Apache-2.0
"""Partial sums in place of rows, where fewer travel. 1, 2 and 5 gloo ranks.

The oracles are dense algebra in float64, and for the number of rows a matching of networkx.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from shards import graph_of, own_edges, own_nodes, write_parts
from torch import Tensor

import graphshard
from graphshard import comm
from graphshard import function as fn
from graphshard.partition.vertex_cover import minimum_vertex_cover
from graphshard.testing import run_ranks

WIDTH = 6


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def dense(graph: Any, etype: Any, weights: Tensor | None = None) -> Tensor:
    """``[num_dst, num_src]`` sums of the weights of the edges between two nodes."""
    src, dst = (ids.long() for ids in graph.edges(etype=etype))
    shape = graph.num_nodes(etype[2]), graph.num_nodes(etype[0])
    values = torch.ones(src.numel()).double() if weights is None else weights.double()
    return torch.zeros(shape).double().index_put((dst, src), values, accumulate=True)


def fewest(graph: Any, etypes: list[Any], owner: dict[str, Tensor], num_ranks: int) -> int:
    """Rows and partial sums that all ranks send, by a maximum matching for each pair."""
    total = 0
    for p in range(num_ranks):
        for q in set(range(num_ranks)) - {p}:
            pair, num_read = nx.Graph(), 0
            for number, etype in enumerate(etypes):
                src, dst = (ids.long() for ids in graph.edges(etype=etype))
                here = (owner[etype[0]][src] == p) & (owner[etype[2]][dst] == q)
                for u, v in zip(src[here].tolist(), dst[here].tolist(), strict=True):
                    pair.add_edge(("u", u), (number, v))
            left = {node for node in pair if node[0] == "u"}
            num_read = len(left)
            matching = nx.bipartite.maximum_matching(pair, left) if left else {}
            size = len(matching) // 2
            total += num_read if size > 0.95 * num_read else size
    return total


def owners(nodes: dict[str, Tensor], graph: Any) -> dict[str, Tensor]:
    found = {}
    for ntype, own in nodes.items():
        owner = torch.zeros(graph.num_nodes(ntype), dtype=torch.int64)
        owner[own] = graphshard.rank()
        found[ntype] = comm.all_reduce(owner)
    return found


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    gap = (found.double() - expected).abs().max() if found.numel() else torch.zeros(())
    assert float(gap) <= bound * (1 + float(expected.abs().max()) if expected.numel() else 1)


def check_relation(
    graph: Any, whole: Any, etype: Any, edge_ids: Tensor, nodes: Any, dtype: torch.dtype
) -> None:
    """Sum, mean and weighted sums of one relation, with their gradients."""
    bound = 1e-12 if dtype == torch.float64 else 0.03
    x = random(whole.num_nodes(etype[0]), WIDTH)
    weight = random(whole.num_edges(etype), seed=1).to(dtype)
    cotangent = random(whole.num_nodes(etype[2]), WIDTH, seed=2).to(dtype)
    degrees = dense(whole, etype).sum(1, keepdim=True).clamp(min=1)
    weighted = ("per call", "with gradient") if dtype == torch.float64 else ()
    for reduce in ("sum", "mean"):
        for kind in ("none", *weighted):
            own = x[nodes[etype[0]]].to(dtype).requires_grad_()
            local = weight[edge_ids].clone().view(-1, 1)
            local.requires_grad_(kind == "with gradient")
            view = graph[etype] if len(graph.canonical_etypes) > 1 else graph
            with view.local_scope():
                view.srcdata["x"] = own
                message = fn.copy_u("x", "m")
                if kind != "none":
                    view.edata["w"] = local
                    message = fn.u_mul_e("x", "w", "m")
                view.update_all(message, getattr(fn, reduce)("m", "y"))
                found = view.dstdata["y"]
            g = cotangent[nodes[etype[2]]]
            (found * g).sum().backward()
            matrix = dense(whole, etype, None if kind == "none" else weight)
            matrix = matrix / degrees if reduce == "mean" else matrix
            close(found.detach(), (matrix @ x.to(dtype).double())[nodes[etype[2]]], bound)
            close(own.grad, (matrix.T @ cotangent.double())[nodes[etype[0]]], bound)
            if kind == "with gradient":
                src, dst = (ids.long()[edge_ids] for ids in whole.edges(etype=etype))
                back = cotangent.double() / (degrees if reduce == "mean" else 1)
                expected = (x.to(dtype).double()[src] * back[dst]).sum(1, keepdim=True)
                close(local.grad, expected, bound)


def check_traffic(graph: Any, whole: Any, nodes: Any, mode: str, sums: bool) -> None:
    """Rows there and back, in one exchange, of all relations of a source type."""
    num_ranks, owner = graphshard.world_size(), owners(nodes, whole)
    by_source: dict[str, list[Any]] = {}
    for etype in graph.canonical_etypes:
        by_source.setdefault(etype[0], []).append(etype)
    for source, etypes in by_source.items():
        x = random(whole.num_nodes(source), WIDTH)[nodes[source]].requires_grad_()
        calls = {etype: (fn.copy_u("x", "m"), fn.sum("m", "y")) for etype in etypes}
        for _ in range(2):  # the first builds
            with graph.local_scope(), comm.trace() as trace:
                graph.nodes[source].data["x"] = x
                graph.multi_update_all(calls, "sum")
                results = {t: graph.nodes[t].data["y"] for t in {e[2] for e in etypes}}
                sum((rows**2).sum() for rows in results.values()).backward()
        sent = torch.tensor([sum(trace.bytes_sent.values())])
        rows = int(comm.all_reduce(sent)) // (8 * WIDTH) // 2
        cover = fewest(whole, etypes, owner, num_ranks)
        read = 0
        for q in range(num_ranks):
            pairs = set()
            for etype in etypes:
                src, dst = (ids.long() for ids in whole.edges(etype=etype))
                cut = (owner[etype[2]][dst] == q) & (owner[source][src] != q)
                pairs |= set(src[cut].tolist())
            read += len(pairs)
        assert rows == (cover if sums and cover <= 0.95 * read else read)
        assert cover < read or len(graph.canonical_etypes) > 1  # it says something


def check(rank: int, world_size: int, parts: str, kind: str) -> None:
    whole = graph_of(kind)
    data = graphshard.load_dgl_partition_data(parts, rank)
    nodes, edge_ids = own_nodes(data), own_edges(data)
    for mode in ("oneshot", "sequential"):
        for sums in (True, False):
            graph = graphshard.construct_full_graph(data, mode=mode, partial_sums=sums)
            if world_size > 1:
                check_traffic(graph, whole, nodes, mode, sums)
        for dtype in (torch.float64, torch.bfloat16):
            graph = graphshard.construct_full_graph(data, mode=mode)
            for etype in data.canonical_etypes:
                check_relation(graph, whole, etype, edge_ids[etype], nodes, dtype)


CASES = [
    (1, "metis", "plain"),
    (2, "random", "typed"),
    (5, "empty_part", "plain"),
    pytest.param(2, "random", "plain", marks=pytest.mark.exhaustive),
    pytest.param(5, "empty_part", "typed", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("num_ranks", "how", "kind"), CASES)
def test_sums_are_those_of_dense_algebra(
    tmp_path: Path, num_ranks: int, how: str, kind: str
) -> None:
    run_ranks(check, num_ranks, write_parts(tmp_path, graph_of(kind), num_ranks, how), kind)


@pytest.mark.parametrize("seed", range(20))
def test_a_cover_is_as_small_as_a_matching(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = int(torch.randint(1, 12, (), generator=generator)), 7
    count = int(torch.randint(0, 30, (), generator=generator))
    left, right = (torch.randint(0, size, (count,), generator=generator) for size in sizes)
    has_left, has_right = minimum_vertex_cover(left, right, *sizes)
    assert bool((has_left[left] | has_right[right]).all())
    pairs = nx.Graph()
    pairs.add_nodes_from(("u", u) for u in range(sizes[0]))
    pairs.add_edges_from(
        (("u", u), ("v", v)) for u, v in zip(left.tolist(), right.tolist(), strict=True)
    )
    matching = nx.bipartite.maximum_matching(pairs, [("u", u) for u in range(sizes[0])])
    assert int(has_left.sum() + has_right.sum()) == len(matching) // 2


def read_twice(rank: int, world_size: int, parts: str) -> None:
    """Where two calls of a scope read a field, its rows travel, once, from the second time on."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    sent = []
    for _ in range(3):
        h = random(data.num_owned(), WIDTH).requires_grad_()
        with comm.trace() as trace, graph.local_scope():
            graph.srcdata["h"] = h
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "a"))
            graph.update_all(fn.copy_u("h", "m"), fn.max("m", "b"))
        sent.append(int(comm.all_reduce(torch.tensor([trace.total_bytes]))))
    rows = int(comm.all_reduce(torch.tensor([graph.halo_rows()])))
    assert sent[0] > sent[1] == sent[2] == rows * WIDTH * 8


def second_derivatives(rank: int, world_size: int, parts: str) -> None:
    data = graphshard.load_dgl_partition_data(parts, rank)
    found = []
    for sums in (True, False):
        graph = graphshard.construct_full_graph(data, mode="oneshot", partial_sums=sums)
        h = random(data.num_owned(), WIDTH, seed=rank).requires_grad_()
        graph.srcdata["h"] = h
        graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "a"))
        loss = (graph.dstdata["a"] ** 3).sum()
        (grad,) = torch.autograd.grad(loss, h, create_graph=True)
        (grad**2).sum().backward()
        found.append(h.grad)
    close(found[0], found[1], 1e-12)


def refuse_two_kinds(rank: int, world_size: int, parts: str) -> None:
    data = graphshard.load_dgl_partition_data(parts, rank)
    with pytest.raises(ValueError, match="partial_sums=True"):
        graphshard.construct_full_graph(data, partial_sums=rank == 0)


def test_reading_twice_deriving_twice_and_agreeing(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for program in (read_twice, second_derivatives, refuse_two_kinds):
        run_ranks(program, 2, parts)
