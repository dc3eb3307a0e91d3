# SPDX-License-Identifier: Apache-2.0
"""Little graphs with every oddity, and helpers that several tests of partitioning use."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphshard._base.typing import CanonicalEType
from graphshard.graph import Graph, graph, heterograph
from graphshard.partition import load_partition

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
)


def random_ids(high: int, count: int, seed: int) -> Tensor:
    return torch.randint(high, (count,), generator=torch.Generator().manual_seed(seed))


def add_features(g: Graph) -> Graph:
    """Features of every dtype and of several shapes, on nodes and edges of every type."""
    generator = torch.Generator().manual_seed(3)

    def features(count: int) -> dict[str, Tensor]:
        made = {
            str(dtype).rsplit(".", 1)[1]: torch.randint(2, (count, 3), generator=generator).to(
                dtype
            )
            for dtype in DTYPES
        }
        made["wide"] = torch.randn(count, 4, 5, generator=generator)
        made["strided"] = torch.randn(6, count, generator=generator).t()
        made["flat"] = torch.arange(count)
        made["no_columns"] = torch.zeros(count, 0)
        made["trained"] = torch.ones(count, requires_grad=True)
        return made

    for ntype in g.ntypes:
        g.nodes[ntype].data.update(features(g.num_nodes(ntype)))
    for etype in g.canonical_etypes:
        g.edges[etype].data.update(features(g.num_edges(etype)))
    return g


def plain() -> Graph:
    """Loops, parallel edges (with other edges between), and nodes without edges."""
    src = torch.cat([random_ids(40, 150, 0), torch.tensor([3, 3, 7, 7, 3])])
    dst = torch.cat([random_ids(40, 150, 1), torch.tensor([5, 5, 7, 7, 5])])
    return graph((src, dst), num_nodes=50)


def typed() -> Graph:
    """Three types (one with two nodes), relations both ways, one without edges, one plain."""
    return heterograph(
        {
            ("author", "writes", "paper"): (random_ids(30, 90, 2), random_ids(40, 90, 3)),
            ("paper", "written-by", "author"): (random_ids(40, 90, 4), random_ids(30, 90, 5)),
            ("paper", "cites", "paper"): (random_ids(40, 120, 6), random_ids(40, 120, 7)),
            ("author", "cites", "paper"): (random_ids(30, 20, 8), random_ids(40, 20, 9)),
            ("venue", "awards", "author"): (torch.zeros(0).long(), torch.zeros(0).long()),
            ("paper", "at", "venue"): (random_ids(40, 30, 10), random_ids(2, 30, 11)),
        },
        {"author": 30, "paper": 45, "venue": 2},
    )


def int32() -> Graph:
    return plain().int()


def edgeless() -> Graph:
    return graph(([], []), num_nodes=7)


def empty() -> Graph:
    return graph(([], []), num_nodes=0)


def bipartite() -> Graph:
    """No type has both incoming and outgoing edges."""
    return heterograph(
        {("user", "buys", "item"): (random_ids(12, 40, 12), random_ids(9, 40, 13))},
        {"user": 12, "item": 9},
    )


def star() -> Graph:
    """One node with every edge."""
    leaves = torch.arange(1, 60)
    hub = torch.zeros_like(leaves)
    return graph((torch.cat([leaves, hub]), torch.cat([hub, leaves])), num_nodes=60)


GRAPHS: dict[str, Callable[[], Graph]] = {
    made.__name__: made for made in (plain, typed, int32, edgeless, empty, bipartite, star)
}


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call DGL without what it prints and warns of."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def etype_key(etype: CanonicalEType) -> str:
    return ":".join(etype)


def part_contents(
    part_config: Path,
    part: int,
    node_names: dict[str, Tensor],
    edge_names: dict[CanonicalEType, Tensor],
    load: Callable[..., Any] = load_partition,
) -> tuple[Counter[Any], Counter[Any]]:
    """What a part holds in original ids, from our loader or DGL's.

    Returns:
        (node type, original id, inner) of its nodes, and (relation, original id, original source,
        original destination, inner) of its edges; each with how often it is there.
    """
    local, _, _, book, _, ntypes, etypes = load(str(part_config), part)
    triples = [book.to_canonical_etype(etype) for etype in etypes]
    node_types, node_ids = book.map_to_per_ntype(local.ndata["_ID"])
    edge_types, edge_ids = book.map_to_per_etype(local.edata["_ID"])
    nodes = [
        (ntypes[t], int(node_names[ntypes[t]][i]))
        for t, i in zip(node_types.tolist(), node_ids.tolist(), strict=True)
    ]
    inner_node = local.ndata["inner_node"].tolist()
    inner_edge = local.edata["inner_edge"].tolist()
    src, dst = (ids.tolist() for ids in local.edges())
    edges = [
        (triples[t], int(edge_names[triples[t]][i]), nodes[u][1], nodes[v][1], bool(inner))
        for t, i, u, v, inner in zip(
            edge_types.tolist(), edge_ids.tolist(), src, dst, inner_edge, strict=True
        )
    ]
    node_counts = Counter(
        (*node, bool(inner)) for node, inner in zip(nodes, inner_node, strict=True)
    )
    return node_counts, Counter(edges)


def as_dicts(
    g: Graph, mapping: tuple[Any, Any]
) -> tuple[dict[str, Tensor], dict[CanonicalEType, Tensor]]:
    """A mapping from ``return_mapping=True`` as dicts, whatever the graph."""
    nodes, edges = mapping
    if isinstance(nodes, Tensor):
        return {g.ntypes[0]: nodes}, {g.canonical_etypes[0]: edges}
    return nodes, edges


def assignment_of(num_nodes: int, num_parts: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, num_parts, num_nodes)


def contents(folder: Path) -> dict[str, bytes]:
    """Path in a folder to what is in the file."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
