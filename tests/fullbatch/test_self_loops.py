# SPDX-License-Identifier: Apache-2.0
"""Self loops of a sharded graph, and functions applied to some of its edges, as on a whole graph.

Uses 3 gloo ranks. The oracle is DGL on the whole graph in one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import graphshard
import graphshard.function as fn
import graphshard.sar
from dgl_peer import dgl
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks

NUM_NODES = 12
SRC = torch.tensor([0, 3, 3, 5, 7, 7, 2, 9, 11, 4, 4, 6, 1, 8, 10, 0])
DST = torch.tensor([1, 3, 3, 2, 7, 1, 2, 4, 11, 5, 4, 0, 0, 10, 8, 9])
X = torch.arange(float(NUM_NODES * 2), dtype=torch.float64).reshape(NUM_NODES, 2).sin()
W = torch.arange(float(len(SRC)), dtype=torch.float64).cos()
FILLS: dict[str, Any] = {"number": 2.0, "mean": "mean", "max": "max"}


def summed(lib: Any, graph: Any, x: Tensor) -> Tensor:
    with graph.local_scope():
        graph.srcdata["x"] = x
        graph.update_all(lib.u_mul_e("x", "w", "m"), lib.sum("m", "out"))
        out: Tensor = graph.dstdata["out"]
        return out


def apply_in_two(lib: Any, linear: Any, graph: Any, w: Tensor, x: Tensor) -> Tensor:
    """Edges with a large weight get one value, the others keep 0 or what they had."""
    with graph.local_scope():
        graph.srcdata["x"] = x
        for chosen, scale in ((w > 0.3, 1.0), (w < -0.3, -2.0), (w > 0.8, 3.0)):
            eids = chosen.nonzero().view(-1)
            graph.apply_edges(lambda edges, s=scale: {"v": linear(edges.src["x"]) * s}, eids)
        graph.update_all(lib.copy_e("v", "m"), lib.sum("m", "out"))
        out: Tensor = graph.dstdata["out"]
        return out


def work(rank: int, world_size: int, folder: str, mode: Any) -> dict[str, Any]:
    data = graphshard.load_dgl_partition_data(f"{folder}/g.json", rank)
    nodes = graphshard.sar.suffix_key_lookup(data.node_features, "number")
    edges = graphshard.sar.suffix_key_lookup(data.edge_features, "number")
    graph = graphshard.construct_full_graph(data, mode=mode)
    graph.edata["w"] = W[edges]
    found: dict[str, Any] = {"nodes": nodes, "edges": graph.global_num_edges()}
    bare = graph.remove_self_loop()
    assert graph.remove_self_loop()._structure is bare._structure  # made once
    found["dropped"] = summed(fn, bare, X[nodes])
    found["dropped edges"] = bare.num_edges_global()
    for name, fill in FILLS.items():
        looped = bare.add_self_loop(fill_data=fill)
        found[f"added {name}"] = summed(fn, looped, X[nodes])
        found["in degrees"], found["out degrees"] = looped.in_degrees(), looped.out_degrees()
    found["added edges"] = looped.num_edges_global()
    ids = looped.original_edge_ids["_N", "_E", "_N"]
    found["ids"] = ids
    torch.manual_seed(0)
    linear = torch.nn.Linear(2, 3).double()
    x = X[nodes].requires_grad_()
    found["some"] = apply_in_two(fn, linear, graph, W[edges], x)
    found["some"].square().sum().backward()
    graphshard.gather_grads(linear)
    found |= {"some grad": x.grad, "weight": linear.weight.grad, "some": found["some"].detach()}
    try:
        graph.apply_edges(fn.copy_e("w", "v"), torch.tensor([10_000]))
    except ValueError as error:
        found["error"] = str(error)
    return found


def test_like_dgl(tmp_path: Any) -> None:
    theirs = dgl.graph((SRC, DST), num_nodes=NUM_NODES)
    theirs.edata["w"] = W
    bare = theirs.remove_self_loop()
    whole = graphshard.graph((SRC, DST), NUM_NODES)
    whole.ndata["number"], whole.edata["number"] = torch.arange(NUM_NODES), torch.arange(len(SRC))
    partition_graph(whole, "g", 3, str(tmp_path), part_method="random", quiet=True)
    torch.manual_seed(0)
    linear = torch.nn.Linear(2, 3).double()
    x = X.clone().requires_grad_()
    some = apply_in_two(dgl.function, linear, theirs, W, x)
    some.square().sum().backward()
    for mode in ("oneshot", "sequential"):
        ranks = run_ranks(work, 3, str(tmp_path), mode, timeout=110)

        def together(name: str, ranks: Any = ranks) -> Tensor:
            rows = torch.cat([found[name] for found in ranks])
            out = torch.empty_like(rows)
            out[torch.cat([found["nodes"] for found in ranks])] = rows
            return out

        torch.testing.assert_close(together("dropped"), summed(dgl.function, bare, X))
        for name, fill in FILLS.items():
            looped = dgl.add_self_loop(bare, fill_data=fill)
            torch.testing.assert_close(together(f"added {name}"), summed(dgl.function, looped, X))
        assert torch.equal(together("in degrees"), looped.in_degrees())
        assert torch.equal(together("out degrees"), looped.out_degrees())
        torch.testing.assert_close(together("some"), some.detach())
        torch.testing.assert_close(together("some grad"), x.grad)
        ids = torch.cat([found["ids"] for found in ranks])
        assert ids.unique().numel() == looped.num_edges()  # masks of dropout go by them
        for found in ranks:
            assert found["edges"] == len(SRC)
            assert found["dropped edges"] == bare.num_edges()
            assert found["added edges"] == looped.num_edges()
            torch.testing.assert_close(found["weight"], linear.weight.grad)
            assert "10000" in found["error"]
