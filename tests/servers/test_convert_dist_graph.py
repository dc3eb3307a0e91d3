# SPDX-License-Identifier: Apache-2.0
"""convert_dist_graph: a `DistGraph` as a sharded graph. Alone, and on ranks with servers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_graph_cases import NUM_PARTS, Servers, join, plain
from torch import Tensor

import graphshard
import graphshard.function as fn
import graphshard.sar
from graphshard.partition import partition_graph
from graphshard.servers import (
    DistGraph,
    convert_dist_graph,
    exit_client,
    initialize,
    load_dgl_partition_data_from_graph,
)
from graphshard.testing import run_ranks


def summed(graph: Any, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per relation, the sum over in-edges of a number of each source."""
    found = {}
    for etype in graph.canonical_etypes:
        piece = graph[etype]
        with piece.local_scope():
            piece.srcdata["h"] = rows[etype[0]].double().view(-1, 1)
            piece.update_all(fn.copy_u("h", "m"), fn.sum("m", "s"))
            found[":".join(etype)] = piece.dstdata["s"]
    return found


def converted(
    rank: int, world_size: int, ip_config: str, num_hosts: int, kind: str, part_config: str
) -> dict[str, Tensor]:
    join(ip_config, rank * num_hosts // world_size)
    dist_graph = DistGraph(kind)
    data = load_dgl_partition_data_from_graph(dist_graph)
    read = graphshard.load_dgl_partition_data(part_config, rank)
    assert data.edges.keys() == read.edges.keys()
    for etype, edges in read.edges.items():
        assert torch.equal(data.edges[etype].src_part, edges.src_part.int())
        assert torch.equal(data.edges[etype].src, edges.src.long())
        assert torch.equal(data.edges[etype].dst, edges.dst.long())
    for ours, theirs in (
        (data.node_features, read.node_features),
        (data.edge_features, read.edge_features),
    ):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    graph = convert_dist_graph(dist_graph, mode="sequential")
    assert graph.node_ranges == read.node_ranges
    sums = summed(graph, {t: graph.nodes[t].data[graphshard.NID] for t in graph.ntypes})
    exit_client()
    return sums


@pytest.mark.parametrize(("kind", "num_hosts"), [("plain", 1), ("typed", NUM_PARTS)])
def test_parts_are_those_on_disk(
    parts: dict[str, Any], tmp_path: Path, kind: str, num_hosts: int
) -> None:
    part_config, whole = parts[kind]  # in the ids of the partition
    with ExitStack() as stack:
        servers = Servers(stack, part_config, num_hosts, tmp_path)
        args = str(servers.ip_config), num_hosts, kind, part_config
        found = run_ranks(converted, NUM_PARTS, *args, timeout=120)
    expected = summed(whole, {t: torch.arange(whole.num_nodes(t)) for t in whole.ntypes})
    for name, want in expected.items():
        assert torch.equal(torch.cat([one[name] for one in found]), want)


def test_alone(tmp_path: Path) -> None:
    graph = plain()
    partition_graph(graph, "plain", 1, tmp_path, quiet=True)
    exit_client()
    initialize()
    try:
        dist_graph = DistGraph("plain", part_config=tmp_path / "plain.json")
        found = graphshard.sar.convert_dist_graph(dist_graph)
    finally:
        exit_client()
    assert len(found.graph_shard_managers[0].graph_shards) == 1
    assert found.num_edges() == found.num_edges_global() == graph.num_edges()
    assert found.num_nodes() == found.num_nodes_global() == graph.num_nodes()
    assert (found.ntypes, found.etypes) == (dist_graph.ntypes, dist_graph.etypes)


def test_parts_must_be_as_many_as_ranks(parts: dict[str, Any]) -> None:
    exit_client()
    initialize()
    try:
        dist_graph = DistGraph("plain", part_config=parts["plain"][0])
        with pytest.raises(ValueError, match=rf"of {NUM_PARTS} parts is .* as many ranks .got 1"):
            convert_dist_graph(dist_graph)
    finally:
        exit_client()


OF_DGL = """
import sys, warnings
warnings.simplefilter("ignore")
import dgl, torch, graphshard
folder, name = sys.argv[1], "plain"
part_config = f"{folder}/{name}.json"
graph = dgl.rand_graph(40, 90)
graph.ndata["feat"] = torch.rand(40, 3)
dgl.distributed.partition_graph(graph, name, 1, folder, num_hops=1)
dgl.distributed.initialize("no_such_file")
theirs = dgl.distributed.DistGraph(name, part_config=part_config)
found = graphshard.servers.load_dgl_partition_data_from_graph(theirs)
read = graphshard.load_dgl_partition_data(part_config, 0)
assert found.partition_book.node_map() == read.partition_book.node_map()
assert found.partition_book.edge_map() == read.partition_book.edge_map()
assert found.edges.keys() == read.edges.keys()
for etype, edges in read.edges.items():
    assert torch.equal(found.edges[etype].src, edges.src.long())
    assert torch.equal(found.edges[etype].dst, edges.dst.long())
for name in ("_N/feat", dgl.NTYPE):
    assert torch.equal(found.node_features[name], read.node_features[name]), name
graph = graphshard.servers.convert_dist_graph(theirs)
assert graph.num_edges() == theirs.num_edges() and graph.num_nodes() == theirs.num_nodes()
assert graph.ntypes == theirs.ntypes and graph.etypes == theirs.etypes
"""


@pytest.mark.exhaustive  # starts DGL's distributed context, in a program of its own
def test_dist_graph_of_dgl(tmp_path: Path) -> None:
    if importlib.util.find_spec("dgl") is None:
        pytest.skip("DGL has no release for this Python")
    command = [sys.executable, "-W", "ignore", "-c", OF_DGL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
