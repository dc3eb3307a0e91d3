# SPDX-License-Identifier: Apache-2.0
"""TypedHGTConv beside PyG's HGTConv: on a whole graph, on a block, on 2 and 3 gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphshard import construct_full_graph, load_dgl_partition_data
from graphshard.graph import create_block, heterograph
from graphshard.nn import TypedHGTConv
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks

NODES = {"author": 7, "paper": 9, "place": 3}
RELATIONS = [
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "of", "author"),
    ("place", "near", "place"),
]
WIDTHS = {"author": 4, "paper": 8, "place": 8}


def edges() -> dict[tuple[str, str, str], tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    counts = {"writes": 20, "cites": 25, "of": 12, "near": 0}
    return {
        (s, r, d): (
            torch.randint(0, NODES[s], (counts[r],), generator=draw),
            torch.randint(0, NODES[d], (counts[r],), generator=draw),
        )
        for s, r, d in RELATIONS
    }


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {t: torch.randn(n, WIDTHS[t], generator=draw).double() for t, n in NODES.items()}


def layer() -> TypedHGTConv:
    torch.manual_seed(3)
    made = TypedHGTConv(WIDTHS, 8, 2, RELATIONS).double()
    torch.nn.init.normal_(made.skip)
    torch.nn.init.normal_(made.priority)
    return made


def pyg_output(ours: TypedHGTConv) -> dict[str, Tensor]:
    from torch_geometric.nn import HGTConv as Theirs

    theirs = Theirs(WIDTHS, 8, (list(NODES), RELATIONS), heads=2).double()
    with torch.no_grad():
        for number, ntype in enumerate(NODES):
            parts = [made[number] for made in (ours.keys, ours.queries, ours.values)]
            kqv = theirs.kqv_lin.lins[ntype]
            kqv.weight.copy_(torch.cat([part.weight for part in parts]))
            kqv.bias.copy_(torch.cat([part.bias for part in parts]))
            out = theirs.out_lin.lins[ntype]
            out.weight.copy_(ours.outputs[number].weight)
            out.bias.copy_(ours.outputs[number].bias)
            theirs.skip[ntype].fill_(float(ours.skip[number]))
        for index, etype in enumerate(RELATIONS):
            theirs.p_rel["__".join(etype)].copy_(ours.priority[index][None])
        num = len(RELATIONS)
        for head in range(2):
            for index in range(num):
                place = theirs.edge_types_map[RELATIONS[index]] + num * head
                theirs.k_rel.weight[place].copy_(ours.attention[index, head])
                theirs.v_rel.weight[place].copy_(ours.message[index, head])
        index = {etype: torch.stack(ends) for etype, ends in edges().items()}
        found: dict[str, Tensor] = theirs(inputs(), index)
    return found


def test_the_layer_is_pygs() -> None:
    ours = layer()
    graph = heterograph(edges(), NODES)
    expected, found = pyg_output(ours), ours(graph, inputs())
    assert sorted(found) == sorted(expected)
    for ntype, rows in expected.items():
        torch.testing.assert_close(found[ntype], rows, rtol=0, atol=1e-12)


def test_on_a_block_the_first_sources_are_the_destinations() -> None:
    ours, counts = layer(), {"author": 5, "paper": 6, "place": 3}
    kept = {
        etype: tuple(end[dst < counts[etype[2]]] for end in (src, dst))
        for etype, (src, dst) in edges().items()
    }
    block = create_block(kept, NODES, counts)
    whole = ours(heterograph(edges(), NODES), inputs())
    for ntype, rows in ours(block, inputs()).items():
        torch.testing.assert_close(rows, whole[ntype][: counts[ntype]], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("world_size", "mode"), [(2, "sequential"), (3, "oneshot")])
def test_ranks_compute_what_one_does(world_size: int, mode: str, tmp_path: Path) -> None:
    graph = heterograph(edges(), NODES)
    for ntype, rows in inputs().items():
        graph.nodes[ntype].data["x"] = rows
    partition_graph(graph, "g", world_size, str(tmp_path), part_method="random", quiet=True)
    ours = layer()
    whole = ours(graph, inputs())
    sum(rows.square().sum() for rows in whole.values()).backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    ranks = run_ranks(on_rank, world_size, str(tmp_path / "g.json"), mode)
    for ntype, rows in whole.items():
        ids = torch.cat([rank["ids"][ntype] for rank in ranks])
        found = torch.cat([rank["rows"][ntype] for rank in ranks])[torch.argsort(ids)]
        torch.testing.assert_close(found, rows.detach(), rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        total = sum(rank["gradients"][name] for rank in ranks)
        torch.testing.assert_close(total, gradient, rtol=0, atol=1e-10)


def on_rank(rank: int, world_size: int, path: str, mode: str) -> dict[str, Any]:
    data = load_dgl_partition_data(path, rank)
    graph = construct_full_graph(data, mode)  # type: ignore[arg-type]
    ours = layer()
    rows = ours(graph, {t: data.node_features[f"{t}/x"] for t in NODES})
    sum(each.square().sum() for each in rows.values()).backward()
    return {
        "ids": {t: data.node_features[f"{t}/orig_id"] for t in NODES},
        "rows": {t: each.detach() for t, each in rows.items()},
        "gradients": {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in ours.named_parameters()
        },
    }
