# SPDX-License-Identifier: Apache-2.0
"""Small graphs for the tests of loaders, in graphshard and in DGL, and sampled graphs as sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import graphshard.dgl
from dgl_peer import dgl
from graphshard.graph import EID, NID

__all__ = ["BOTH", "RELATIONS", "block_edges", "dgl", "ends", "plain", "typed"]

BOTH = (graphshard.dgl, dgl)

NUM_NODES = {"item": 9, "user": 12}
RELATIONS = {
    ("item", "bought_by", "user"): 30,
    ("user", "buys", "item"): 30,
    ("user", "knows", "user"): 25,
}


def plain(module: Any = graphshard, idtype: torch.dtype = torch.int64, num_nodes: int = 20) -> Any:
    """60 random edges, then the same reversed, among 20 nodes; the last node has none."""
    generator = torch.Generator().manual_seed(3)
    src, dst = torch.randint(num_nodes - 1, (2, 60), generator=generator)
    edges = torch.cat([src, dst]), torch.cat([dst, src])
    g = module.graph(tuple(e.to(idtype) for e in edges), num_nodes=num_nodes)
    g.ndata["feat"] = torch.randn(num_nodes, 3, generator=generator)
    g.ndata["label"] = torch.arange(num_nodes)
    g.edata["weight"] = torch.rand(120, generator=generator)
    return g


def typed(module: Any = graphshard, idtype: torch.dtype = torch.int64) -> Any:
    """Three relations between two node types; ``bought_by`` is ``buys`` reversed."""
    generator = torch.Generator().manual_seed(4)
    edges: dict[tuple[str, str, str], tuple[Tensor, Tensor]] = {}
    for (source, name, target), count in RELATIONS.items():
        src = torch.randint(NUM_NODES[source], (count,), generator=generator)
        dst = torch.randint(NUM_NODES[target], (count,), generator=generator)
        edges[source, name, target] = src.to(idtype), dst.to(idtype)
    edges["user", "buys", "item"] = edges["item", "bought_by", "user"][::-1]
    g = module.heterograph(edges, NUM_NODES)
    for ntype, count in NUM_NODES.items():
        g.nodes[ntype].data["feat"] = torch.randn(count, 3, generator=generator)
    g.nodes["user"].data["label"] = torch.arange(NUM_NODES["user"])
    g.edges["buys"].data["weight"] = torch.rand(30, generator=generator)
    return g


def ends(g: Any, etype: Any = None) -> list[tuple[int, int]]:
    """Ids that the ends of a sampled graph's edges have in the graph it is from, edge by edge."""
    etype = g.canonical_etypes[0] if etype is None else etype
    src, dst = g.edges(etype=etype)
    if g.is_block:
        src = g.srcnodes[etype[0]].data[NID][src.long()]
        dst = g.dstnodes[etype[2]].data[NID][dst.long()]
    else:
        src = g.nodes[etype[0]].data[NID][src.long()]
        dst = g.nodes[etype[2]].data[NID][dst.long()]
    return list(zip(src.tolist(), dst.tolist(), strict=True))


def block_edges(block: Any) -> dict[Any, list[tuple[int, int, int]]]:
    """(source, destination, id) of a block's edges in the graph it is from, sorted."""
    return {
        etype: sorted(
            (*pair, eid)
            for pair, eid in zip(
                ends(block, etype), block.edges[etype].data[EID].tolist(), strict=True
            )
        )
        for etype in block.canonical_etypes
        if block.num_edges(etype)
    }
