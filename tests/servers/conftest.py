# SPDX-License-Identifier: Apache-2.0
"""Partitions, and a `DistGraph` of each: alone, and on servers in threads of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_graph_cases import NUM_PARTS, TOKEN, Servers, plain, relabelled, typed

from graphshard.partition import partition_graph
from graphshard.servers import DistGraph, exit_client, initialize
from type_name_cases import named


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Partitions by kind: the JSON, and the graph with the ids that it has there."""
    folder = tmp_path_factory.mktemp("parts")
    found = {}
    for kind, make in (("plain", plain), ("typed", typed), ("named", named)):
        torch.manual_seed(0)
        graph = make()
        method = "metis" if kind == "plain" else "random"
        maps = partition_graph(
            graph,
            kind,
            NUM_PARTS,
            folder / kind,
            part_method=method,
            return_mapping=True,
            quiet=True,
        )
        found[kind] = str(folder / kind / f"{kind}.json"), relabelled(graph, *maps)
    return found


@pytest.fixture(params=["alone", "one host", "three hosts"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["plain", "typed"])
def opened(
    request: pytest.FixtureRequest,
    where: str,
    parts: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[DistGraph, Any]]:
    part_config, graph = parts[request.param]
    exit_client()
    with ExitStack() as stack:
        stack.callback(exit_client)
        monkeypatch.delenv("GRAPHSHARD_HOST", raising=False)
        if where == "alone":
            initialize()
            yield DistGraph(request.param, part_config=part_config), graph
            return
        servers = Servers(stack, part_config, 1 if where == "one host" else 3, tmp_path)
        monkeypatch.setenv("GRAPHSHARD_HOST", "0")
        monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
        initialize(servers.ip_config)
        stack.callback(exit_client)
        yield DistGraph(request.param), graph
