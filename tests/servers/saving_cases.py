# SPDX-License-Identifier: Apache-2.0
"""Partitions, servers and models of the tests of saving."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import graphshard
from graphshard.comm import barrier
from graphshard.data import random_graph
from graphshard.partition import partition_graph
from graphshard.servers import DistGraph, GraphServer, exit_client, initialize
from type_name_cases import named

TOKEN = "a token that is for tests alone"
NUM_NODES, WIDTH = 90, 3


def plain() -> Any:
    graph = random_graph(num_nodes=NUM_NODES, num_edges=500, seed=1)
    graph.ndata["feat"] = torch.arange(NUM_NODES * 2.0).view(-1, 2)
    graph.ndata["unchanged"] = torch.ones(NUM_NODES)
    return graph


def typed() -> Any:
    ids = torch.Generator().manual_seed(0)
    sizes = {"user": 40, "item": 70}
    edges = {}
    for src, relation, dst, count in (
        ("user", "rates", "item", 200),
        ("item", "rated", "user", 150),
        ("user", "knows", "user", 0),
    ):
        edges[src, relation, dst] = tuple(
            torch.randint(0, sizes[t], (count,), generator=ids) for t in (src, dst)
        )
    graph: Any = graphshard.heterograph(edges, sizes)
    graph.nodes["item"].data["feat"] = torch.arange(140.0).view(-1, 2)
    return graph


def write_parts(folder: Path) -> dict[str, str]:
    """JSONs by kind and number of parts; the 5 parts have another order, and one is empty."""
    found = {}
    for kind, make in (("plain", plain), ("typed", typed), ("named", named)):
        graph = make()
        for num_parts in (2, 5):
            owner: Any = "random"
            if num_parts == 5:
                owner = {
                    t: torch.tensor([0, 3, 1, 4])[torch.randint(0, 4, (graph.num_nodes(t),))]
                    for t in graph.ntypes
                }
                owner = owner["_N"] if kind == "plain" else owner
            path = folder / f"{kind}-{num_parts}"
            partition_graph(graph, "g", num_parts, path, part_method=owner, quiet=True)
            found[f"{kind} {num_parts}"] = str(path / "g.json")
    other = random_graph(num_nodes=NUM_NODES, num_edges=500, seed=2)
    partition_graph(other, "g", 2, folder / "other", part_method="random", quiet=True)
    found["other"] = str(folder / "other" / "g.json")
    return found


class Hosts:
    """Servers of a partition, for the time of a test, and the file that lists them."""

    def __init__(
        self, stack: ExitStack, part_config: str, num_hosts: int, folder: Path, **options: Any
    ) -> None:
        self.servers = [
            GraphServer(host, num_hosts, part_config, TOKEN, **options) for host in range(num_hosts)
        ]
        for server in self.servers:
            stack.callback(server.stop)
        stack.callback(exit_client)
        self.path = folder / f"hosts-{len(os.listdir(folder))}"
        self.path.write_text("".join(s.address.replace(":", " ") + "\n" for s in self.servers))


def opened(rank: int, world_size: int, where: str, num_hosts: int) -> DistGraph:
    """The graph, on servers that a file lists, or alone from a partition's JSON."""
    exit_client()
    if num_hosts == 0:
        os.environ.pop("GRAPHSHARD_HOST", None)
        return DistGraph("g", part_config=where)
    host = rank * num_hosts // world_size
    os.environ |= {"GRAPHSHARD_HOST": str(host), "GRAPHSHARD_TOKEN": TOKEN}
    initialize(where)
    return DistGraph("g")


def closed() -> None:
    barrier()
    exit_client()


def model_of(seed: int) -> tuple[Any, Any]:
    """A model and its optimizer, after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * seed)
    model(torch.randn(5, 3)).pow(2).sum().backward()
    optimizer.step()
    return model, optimizer


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 4
    path.write_bytes(content)
