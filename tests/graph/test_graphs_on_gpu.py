# SPDX-License-Identifier: Apache-2.0
"""What is asked of a graph on a GPU, and what is made of it, is what it is on the CPU, and there.

On the emulated GPU (`emulated_gpu`), and (marked ``gpu``) on a real one. One process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graphshard.dgl as dgl
from emulated_gpu import emulated_gpu
from graphshard import function as fn
from graphshard.ops import Adjacency

REAL = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
Call = Callable[[dgl.Graph, Tensor], Any]

CALLS: dict[str, Call] = {
    "in_degrees": lambda g, ids: g.in_degrees(ids),
    "edges": lambda g, ids: [*g.edges("all"), *g.out_edges(ids, "all"), *g.in_edges(ids, "all")],
    "find_edges": lambda g, ids: g.find_edges(ids),
    "edge_ids": lambda g, ids: g.edge_ids(*g.find_edges(ids)),
    "has_edges_between": lambda g, ids: g.has_edges_between(ids, ids.flip(0)),
    "successors": lambda g, ids: [g.successors(0), g.predecessors(0)],
    "subgraph": lambda g, ids: [g.subgraph(ids), g.edge_subgraph(ids), dgl.in_subgraph(g, ids)],
    "khop_in_subgraph": lambda g, ids: dgl.khop_in_subgraph(g, ids, 1)[0],
    "add_edges": lambda g, ids: dgl.add_edges(g, ids, ids),
    "remove_edges": lambda g, ids: dgl.remove_edges(g, ids),
    "add_nodes": lambda g, ids: dgl.add_nodes(g, 3),
    "remove_nodes": lambda g, ids: dgl.remove_nodes(g, ids),
    "add_self_loop": lambda g, ids: dgl.remove_self_loop(dgl.add_self_loop(g)),
    "reverse": lambda g, ids: dgl.reverse(g, copy_ndata=True),
    "to_simple": lambda g, ids: dgl.to_simple(g),
    "line_graph": lambda g, ids: dgl.line_graph(g),
    "compact_graphs": lambda g, ids: dgl.compact_graphs(dgl.in_subgraph(g, ids)),
    "to_block": lambda g, ids: dgl.to_block(dgl.in_subgraph(g, ids), ids),
    "batch": lambda g, ids: [dgl.batch([g, g]), *dgl.unbatch(dgl.batch([g, g]))],
    "to_homogeneous": lambda g, ids: dgl.to_homogeneous(g),
    "int": lambda g, ids: [g.int(), g.clone(), g.cpu()],
    "formats": lambda g, ids: [*g.adj_tensors("csr"), *g.adj_tensors("csc")],
    "readout": lambda g, ids: [
        *(reduce(g, "x") for reduce in (dgl.sum_nodes, dgl.mean_nodes, dgl.max_nodes)),
        dgl.softmax_nodes(g, "x"),
        dgl.topk_nodes(g, "x", 2)[0],
        dgl.broadcast_nodes(g, g.ndata["x"][:1]),
    ],
    "message passing": lambda g, ids: [
        *passed(g, fn.u_mul_e("x", "w", "m"), fn.sum("m", "y")),
        *passed(g, fn.u_sub_v("x", "x", "m"), fn.max("m", "y")),
        *passed(g, lambda edges: {"m": edges.src["x"] * edges.data["w"]}, fn.mean("m", "y")),
        *passed(g, fn.copy_u("x", "m"), lambda nodes: {"y": nodes.mailbox["m"].sum(1)}),
    ],
    "softmax of edges": lambda g, ids: dgl.nn.functional.edge_softmax(g, g.edata["w"]),
}


def passed(g: dgl.Graph, message: Any, reduce: Any) -> list[Tensor]:
    with g.local_scope():
        g.update_all(message, reduce)
        return [g.ndata["y"]]


def on(device: str, call: Call) -> list[Tensor]:
    """What a call gives, in tensors; graphs as their edges and columns."""
    generator = torch.Generator().manual_seed(3)
    ends = torch.randint(8, (2, 20), generator=generator)
    g = dgl.graph((ends[0], ends[1]), num_nodes=9).to(device)
    g.ndata["x"] = torch.arange(18.0, device=device).view(9, 2)
    g.edata["w"] = torch.arange(20.0, device=device).view(20, 1)
    return tensors(call(g, torch.tensor([5, 2, 7], device=device)), g.device)


def tensors(found: Any, device: torch.device) -> list[Tensor]:
    if isinstance(found, Tensor):
        assert found.device == device
        return [found.cpu()]
    if isinstance(found, dgl.Graph | dgl.Block):
        frames = [found.edges[t].data for t in found.canonical_etypes]
        frames += [found.srcnodes[t].data for t in found.srctypes]
        columns = [frame[name] for frame in frames for name in sorted(frame)]
        ends = [array for t in found.canonical_etypes for array in found.edges(etype=t)]
        return [t for value in [*ends, *columns] for t in tensors(value, found.device)]
    return [t for value in found for t in tensors(value, device)]


@pytest.mark.parametrize("where", ["emulated", pytest.param("real", marks=REAL)])
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, where: str) -> None:
    expected = on("cpu", CALLS[name])
    with emulated_gpu() if where == "emulated" else contextlib.nullcontext():
        found = on("cuda", CALLS[name])
    assert len(found) == len(expected) > 0
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its)


def test_what_the_host_knows_of_rows_that_went_to_a_gpu() -> None:
    """Formats that were built on the CPU say how long their rows are; others have to be asked."""
    src, dst = torch.tensor([0, 1, 2, 2, 2, 0]), torch.tensor([1, 1, 1, 0, 3, 1])
    with emulated_gpu():
        adj = Adjacency(src, dst, 3, 4)
        adj.csc()
        there = adj.to("cuda")
        assert there.longest_row("csc") == there.reverse().longest_row("csr") == 4
        assert there.longest_row("csr") is None
        for found, expected in zip(there.csr(), adj.csr(), strict=True):
            assert torch.equal(found.cpu(), expected)
        adj.csr()
        assert adj.to("cuda").longest_row("csr") == 3
        assert adj.longest_row("csc") is None  # on the CPU it is a look at the array


def test_edges_sorted_by_one_end_are_grouped_by_the_other_without_a_question() -> None:
    """On a GPU; edges that are sorted by both ends, too."""
    for ends in ([0, 1, 2, 3], [0, 0, 2, 3]):
        src, dst = torch.tensor(ends), torch.tensor([0, 1, 1, 3])
        expected = Adjacency(src, dst, 4, 4).csr()
        indptr, indices, _ = Adjacency(src, dst, 4, 4).csc()
        with emulated_gpu():
            given = (array.to("cuda") for array in (indptr, indices))
            indptr, others, eids = Adjacency.from_csc(*given, None, 4, 4).csr()
            eids = torch.arange(4, device="cuda") if eids is None else eids
            places = torch.arange(4) if expected[2] is None else expected[2]
            for found, its in zip((indptr, others, eids), (*expected[:2], places), strict=True):
                assert torch.equal(found.cpu(), its)
