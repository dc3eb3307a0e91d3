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
from graphshard.distributed import GraphServer, initialize
from graphshard.graph import EID, NID

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
