# SPDX-License-Identifier: Apache-2.0
"""Small odd graphs, cut into parts in awkward ways, and how a rank finds its rows in them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import graphshard
from graphshard._base.typing import CanonicalEType
from graphshard.fullbatch import PartitionData
from graphshard.partition import partition_graph

PLAIN: CanonicalEType = ("_N", "_E", "_N")
ASSIGNMENTS = ("metis", "random", "empty_part", "one_node_per_part")


def plain_graph() -> graphshard.Graph:
    """Isolated nodes, self loops, parallel edges, a node without in-edges, a hub."""
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, 22, (80,), generator=generator)
    dst = torch.randint(1, 22, (80,), generator=generator)
    src = torch.cat([src, torch.tensor([3, 3, 3, 5]), torch.arange(12)])
    dst = torch.cat([dst, torch.tensor([4, 4, 3, 5]), torch.full((12,), 7)])
    return graphshard.graph((src, dst), num_nodes=25)


def typed_graph() -> graphshard.Graph:
    """Three node types and five relations: two in parallel, one within a type, a rare one."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"a": 17, "b": 11, "c": 5}

    def edges(source: str, target: str, count: int) -> tuple[Tensor, Tensor]:
        return (
            torch.randint(0, sizes[source], (count,), generator=generator),
            torch.randint(0, sizes[target], (count,), generator=generator),
        )

    return graphshard.heterograph(
        {
            ("a", "likes", "b"): edges("a", "b", 40),
            ("b", "back", "a"): edges("b", "a", 30),
            ("a", "knows", "a"): edges("a", "a", 50),
            ("a", "sells", "b"): edges("a", "b", 10),
            ("c", "owns", "a"): edges("c", "a", 3),
        },
        sizes,
    )


def graph_of(kind: str) -> graphshard.Graph:
    return plain_graph() if kind == "plain" else typed_graph()


def assignment(graph: graphshard.Graph, num_parts: int, how: str) -> str | dict[str, Tensor]:
    """What to pass as ``part_method``."""
    if how == "metis" or num_parts == 1:
        return "metis"
    generator = torch.Generator().manual_seed(5)
    parts = {}
    for ntype in graph.ntypes:
        count = graph.num_nodes(ntype)
        if how == "one_node_per_part":
            first = torch.arange(num_parts)[:count]
            parts[ntype] = torch.cat([first, torch.zeros(count - first.numel(), dtype=torch.int64)])
        else:
            used = num_parts - 1 if how == "empty_part" else num_parts
            parts[ntype] = torch.randint(0, used, (count,), generator=generator)
    return parts


def write_parts(folder: Path, graph: graphshard.Graph, num_parts: int, how: str) -> str:
    """Partition ``graph`` under ``folder``; returns the path of the JSON."""
    method = assignment(graph, num_parts, how)
    if isinstance(method, dict) and len(method) == 1:
        method = next(iter(method.values()))
    partition_graph(graph, "g", num_parts, str(folder), part_method=method, quiet=True)
    return str(folder / "g.json")


def own_nodes(data: PartitionData) -> dict[str, Tensor]:
    """Original ids of this rank's nodes, by type."""
    return {t: data.node_features[f"{t}/orig_id"] for t in data.node_type_names}


def own_edges(data: PartitionData) -> dict[CanonicalEType, Tensor]:
    """Original ids of this rank's edges, by relation."""
    return {t: data.edge_features[f"{':'.join(t)}/orig_id"] for t in data.canonical_etypes}


def features(graph: graphshard.Graph, width: int, ties: bool) -> dict[str, Tensor]:
    """float64 rows by node type; whole numbers from a small range where ties are wanted."""
    generator = torch.Generator().manual_seed(3)
    result = {}
    for ntype in graph.ntypes:
        shape = (graph.num_nodes(ntype), width)
        whole = torch.randint(-2, 3, shape, generator=generator).double()
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        result[ntype] = whole if ties else whole + 0.1 * noise
    return result
