# SPDX-License-Identifier: Apache-2.0
"""DistGraph on a partition that DGL wrote, against the graph under DGL's own mapping of ids.

Alone, and on servers in threads of the test. DGL does not keep edges by destination.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_graph_cases import NUM_PARTS, TOKEN, Servers, equal, plain, relabelled, typed
from test_dist_graph import (
    load,
    test_all_neighbours_are_those_of_the_graph,
    test_it_has_what_the_graph_has,
)

from dgl_peer import dgl
from graphshard.data import to_dgl
from graphshard.graph import EID
from graphshard.partition import convert_partition
from graphshard.servers import DistGraph, exit_client, initialize

# Collected here, too, and so run with this file's fixture.
__all__ = ["test_all_neighbours_are_those_of_the_graph", "test_it_has_what_the_graph_has"]


@pytest.fixture(scope="module")
def dgl_parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By kind: DGL's JSON, that of the same in our files, and the graph with the ids there."""
    folder = tmp_path_factory.mktemp("theirs")
    found = {}
    for kind, make in (("plain", plain), ("typed", typed)):
        torch.manual_seed(0)
        dgl.seed(0)
        graph = make()
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            maps = dgl.distributed.partition_graph(
                to_dgl(graph),
                kind,
                NUM_PARTS,
                str(folder / kind),
                part_method="random",
                return_mapping=True,
            )
        theirs = folder / kind / f"{kind}.json"
        ours = convert_partition(theirs, folder / f"our {kind}")
        for ntype in graph.ntypes:  # DGL's files know no bool
            data = graph.nodes[ntype].data
            if "train_mask" in data:
                data["train_mask"] = data["train_mask"].to(torch.uint8)
        found[kind] = theirs, ours, relabelled(graph, *maps)
    return found


@contextlib.contextmanager
def graph_of(
    kind: str, part_config: Path, num_hosts: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DistGraph]:
    """Without hosts in this process alone."""
    exit_client()
    with ExitStack() as stack:
        stack.callback(exit_client)
        monkeypatch.delenv("GRAPHSHARD_HOST", raising=False)
        if not num_hosts:
            initialize()
            yield DistGraph(kind, part_config=str(part_config))
            return
        servers = Servers(stack, str(part_config), num_hosts, folder)
        monkeypatch.setenv("GRAPHSHARD_HOST", "0")
        monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
        initialize(servers.ip_config)
        stack.callback(exit_client)
        yield DistGraph(kind)
        monkeypatch.delenv("GRAPHSHARD_HOST")


@pytest.fixture(params=["plain alone", "plain on 3", "typed on 2", "typed alone"])
def opened(
    request: pytest.FixtureRequest,
    dgl_parts: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[DistGraph, Any]]:
    kind, last = request.param.split(" ", 1)[0], request.param[-1]
    theirs, ours, graph = dgl_parts[kind]
    num_hosts = int(last) if last.isdigit() else 0
    config = ours if request.param == "typed alone" else theirs
    with graph_of(kind, config, num_hosts, tmp_path, monkeypatch) as g:
        yield g, graph


def test_more_of_it_is_that_of_the_graph(opened: tuple[DistGraph, Any]) -> None:
    """Subgraphs, edges between nodes, out-edges, and what the host itself has."""
    g, graph = opened
    for etype in graph.canonical_etypes:
        eids = torch.randperm(graph.num_edges(etype))[:30]
        src, dst = graph.find_edges(eids, etype=etype)
        assert bool(g.has_edges_between(src, dst, etype).all())
        found = g.edge_subgraph({etype: eids}, relabel_nodes=False)
        for one, other in zip(found.edges(etype=etype), (src, dst), strict=True):
            assert torch.equal(one, other)
        nodes = torch.unique(src)[:10]
        leaving = g.sample_neighbors({etype[0]: nodes}, -1, edge_dir="out")
        expected = graph.out_edges(nodes, form="eid", etype=etype)
        assert torch.equal(
            leaving.edges[etype].data[EID].sort().values, torch.as_tensor(expected).sort().values
        )
    local = g.local_partition
    assert local is not None
    book = g.get_partition_book()
    src, dst = (local.ndata["_ID"][ids] for ids in local.edges())
    types, eids = book.map_to_per_etype(local.edata["_ID"])
    for number, etype in enumerate(graph.canonical_etypes):
        here = types == number
        ends = graph.find_edges(eids[here], etype=etype)
        for one, other in zip((src, dst), ends, strict=True):
            assert torch.equal(book.map_to_per_ntype(one[here])[1], other)


def test_weights_are_those_of_the_edges(opened: tuple[DistGraph, Any]) -> None:
    """Edges of weight 0 are never drawn."""
    g, graph = opened
    if len(g.ntypes) > 1:
        return
    (etype,) = graph.canonical_etypes
    weights = g.edges[etype].data["weight"]
    before = weights[torch.arange(g.num_edges())].clone()
    absent = torch.randperm(g.num_edges())[:2500]
    weights[absent] = torch.zeros(2500)
    nodes = torch.arange(200)
    found = g.sample_neighbors(nodes, 3, prob="weight")
    drawn = found.edata[EID]
    kept = torch.ones(g.num_edges(), dtype=torch.bool)
    kept[absent] = False
    assert bool(kept[drawn].all())
    into = graph.in_edges(nodes, form="eid")
    per_node = torch.bincount(graph.find_edges(into[kept[into]])[1], minlength=200)
    assert torch.equal(found.in_degrees()[:200], per_node.clamp(max=3))
    weights[torch.arange(g.num_edges())] = before


def test_draws_do_not_depend_on_hosts_or_files(
    dgl_parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, (theirs, ours, graph) in dgl_parts.items():
        found = []
        for config, num_hosts in ((theirs, 0), (ours, 0), (theirs, 2)):
            with graph_of(kind, config, num_hosts, tmp_path, monkeypatch) as g:
                found.append(load(g, graph.ntypes[0], weighted=kind == "plain"))
        assert len(found[0]) > 10
        assert equal(found[0], found[1])
        assert equal(found[0], found[2])
