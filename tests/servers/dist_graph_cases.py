# SPDX-License-Identifier: Apache-2.0
"""Small partitioned graphs for the tests of servers, and servers in threads of the test."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graphshard
from graphshard.data import random_graph
from graphshard.graph import EID, NID
from graphshard.partition import partition_graph
from graphshard.servers import GraphServer, initialize

TOKEN = "a token that is for tests alone"
NUM_PARTS = 3


def plain() -> Any:
    graph = random_graph(num_nodes=400, num_edges=3000, seed=1)
    graph.ndata["feat"] = torch.randn(400, 5)
    graph.ndata["train_mask"] = torch.rand(400) < 0.4
    graph.ndata["double"] = torch.randn(400, 2, 3, dtype=torch.float64)
    graph.edata["weight"] = torch.rand(3000) + 0.1
    return graph


def typed() -> Any:
    graph = graphshard.heterograph(
        {
            ("user", "rates", "item"): (
                torch.randint(0, 120, (900,)),
                torch.randint(0, 60, (900,)),
            ),
            ("item", "rated", "user"): (
                torch.randint(0, 60, (700,)),
                torch.randint(0, 120, (700,)),
            ),
            ("user", "knows", "user"): (torch.randint(0, 120, (50,)), torch.randint(0, 120, (50,))),
        },
        {"user": 120, "item": 60},
    )
    graph.nodes["user"].data["feat"] = torch.randn(120, 4)
    graph.nodes["item"].data["feat"] = torch.randn(60, 7)
    graph.nodes["user"].data["train_mask"] = torch.rand(120) < 0.5
    graph.edges["rates"].data["stars"] = torch.randint(0, 5, (900,))
    return graph


def relabelled(graph: Any, node_map: Any, edge_map: Any) -> Any:
    """The graph under its new ids: nodes and edges of a type in the order that the maps give."""
    if not isinstance(node_map, dict):
        node_map = {graph.ntypes[0]: node_map}
        edge_map = {graph.canonical_etypes[0]: edge_map}
    new = {}
    for ntype, old in node_map.items():
        new[ntype] = torch.empty_like(old)
        new[ntype][old] = torch.arange(len(old))
    edges = {}
    for etype, old in edge_map.items():
        src, dst = graph.find_edges(old, etype=etype)
        edges[etype] = new[etype[0]][src], new[etype[2]][dst]
    result = graphshard.heterograph(edges, {t: len(ids) for t, ids in node_map.items()})
    for ntype, old in node_map.items():
        for name, rows in graph.nodes[ntype].data.items():
            result.nodes[ntype].data[name] = rows[old]
    for etype, old in edge_map.items():
        for name, rows in graph.edges[etype].data.items():
            result.edges[etype].data[name] = rows[old]
    return result


class Servers:
    """One for each host, in threads of the test, and their ip_config."""

    def __init__(self, stack: ExitStack, part_config: str, num_hosts: int, folder: Path) -> None:
        lines = []
        for host in range(num_hosts):
            server = GraphServer(host, num_hosts, part_config, TOKEN)
            stack.callback(server.stop)
            lines.append(server.address.replace(":", " "))
        self.ip_config = folder / "ip_config.txt"
        self.ip_config.write_text("\n".join(lines) + "\n")


def join(ip_config: str, host: int) -> None:
    os.environ |= {"GRAPHSHARD_HOST": str(host), "GRAPHSHARD_TOKEN": TOKEN}
    initialize(ip_config, num_workers=2)


def blocks_of(loader: Any) -> list[Any]:
    """What a loader gives, as plain tensors in a fixed order."""
    found = []
    for inputs, outputs, blocks in loader:
        found.append((inputs, outputs))
        for block in blocks:
            for etype in block.canonical_etypes:
                found.append(block.edges[etype].data[EID])
            for ntype in block.srctypes:
                found.append(block.srcnodes[ntype].data[NID])
                found += [block.srcnodes[ntype].data.get("feat", torch.zeros(0))]
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))


class Original:
    """A graph, its partition, and the original ids of new ones.

    There are five parts, one of them empty and one without nodes of the type "item".
    """

    def __init__(self, kind: str, folder: Path, num_hops: int = 1, graph: Any = None) -> None:
        torch.manual_seed(4)
        if graph is None:
            graph = plain() if kind == "plain" else typed()
        self.kind, self.graph = kind, graph
        owner = {}
        for ntype in self.graph.ntypes:
            count = self.graph.num_nodes(ntype)
            part = torch.tensor([0, 1, 3, 4])[torch.randint(0, 4, (count,))]
            owner[ntype] = torch.where(part == 4, 1, part) if ntype == "item" else part
        for etype in self.graph.canonical_etypes:
            data, count = self.graph.edges[etype].data, self.graph.num_edges(etype)
            data["weight"] = torch.rand(count, 1) * (torch.rand(count, 1) < 0.8)
            data["open"] = torch.rand(count) < 0.6
            data["half"] = torch.rand(count).to(torch.float16)
        nodes, edges = partition_graph(  # type: ignore[misc]
            self.graph,
            kind,
            5,
            folder,
            num_hops,
            part_method=owner.get("_N", owner),
            return_mapping=True,
            quiet=True,
        )
        self.part_config = str(folder / f"{kind}.json")
        self.nodes: dict[str, Tensor] = nodes if isinstance(nodes, dict) else {"_N": nodes}
        etype = self.graph.canonical_etypes[0]
        self.edges: dict[Any, Tensor] = edges if isinstance(edges, dict) else {etype: edges}

    def new(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """New ids of original nodes."""
        return {t: torch.argsort(self.nodes[t])[i] for t, i in ids.items()}

    def old(self, kind: Any, ids: Tensor) -> Tensor:
        """Original ids of nodes of a type, or of edges of a relation."""
        return (self.nodes[kind] if isinstance(kind, str) else self.edges[kind])[ids]
