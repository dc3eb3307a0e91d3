# SPDX-License-Identifier: Apache-2.0
"""DistGraph against the graph that was partitioned: alone, and on servers with several trainers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_graph_cases import NUM_PARTS, Servers, blocks_of, equal, join

from graphshard.comm import barrier
from graphshard.dgl.dataloading import NeighborSampler, NodeDataLoader
from graphshard.graph import EID
from graphshard.servers import (
    DistGraph,
    DistNodeDataLoader,
    DistTensor,
    edge_split,
    exit_client,
    get_num_clients,
    node_split,
)
from graphshard.testing import run_ranks


def test_it_has_what_the_graph_has(opened: tuple[DistGraph, Any]) -> None:
    g, graph = opened
    assert g.ntypes == graph.ntypes
    assert g.canonical_etypes == graph.canonical_etypes
    assert g.etypes == graph.etypes
    assert (g.num_nodes(), g.num_edges()) == (graph.num_nodes(), graph.num_edges())
    for ntype in graph.ntypes:
        assert g.num_nodes(ntype) == graph.num_nodes(ntype)
        for name, rows in graph.nodes[ntype].data.items():
            assert torch.equal(g.nodes[ntype].data[name][:], rows)
    for etype in graph.canonical_etypes:
        assert g.num_edges(etype) == graph.num_edges(etype)
        for name, rows in graph.edges[etype].data.items():
            assert torch.equal(g.edges[etype].data[name][:], rows)
        assert torch.equal(g.in_degrees(etype=etype), graph.in_degrees(etype=etype))
        assert torch.equal(g.out_degrees(etype=etype), graph.out_degrees(etype=etype))
        ids = torch.randint(0, graph.num_edges(etype), (40,))
        for one, other in zip(
            g.find_edges(ids, etype), graph.find_edges(ids, etype=etype), strict=True
        ):
            assert torch.equal(one, other)
        some = torch.randint(0, graph.num_nodes(etype[2]), (9,))
        assert torch.equal(g.in_degrees(some, etype), graph.in_degrees(some, etype=etype))
    assert g.get_partition_book().num_partitions() == NUM_PARTS


def test_all_neighbours_are_those_of_the_graph(opened: tuple[DistGraph, Any]) -> None:
    g, graph = opened
    ntype = graph.ntypes[-1]
    nodes = torch.randperm(graph.num_nodes(ntype))[:20]
    found = g.sample_neighbors({ntype: nodes}, -1)
    for etype in graph.canonical_etypes:
        expected = torch.empty(0, dtype=torch.int64)
        if etype[2] == ntype:
            expected = graph.in_edges(nodes, form="eid", etype=etype)
        eids = found.edges[etype].data[EID]
        assert torch.equal(eids.sort().values, expected.sort().values)
        src, dst = found.find_edges(torch.arange(eids.numel()), etype=etype)
        for one, other in zip((src, dst), graph.find_edges(eids, etype=etype), strict=True):
            assert torch.equal(one, other)
    without = g.sample_neighbors(
        {ntype: nodes},
        -1,
        exclude_edges={t: found.edges[t].data[EID][::2] for t in g.canonical_etypes},
    )
    for etype in graph.canonical_etypes:
        kept = found.edges[etype].data[EID][1::2]
        assert torch.equal(without.edges[etype].data[EID].sort().values, kept.sort().values)


@pytest.mark.parametrize("opened", ["named"], indirect=True)
def test_types_of_any_name(opened: tuple[DistGraph, Any]) -> None:
    g, graph = opened
    test_it_has_what_the_graph_has(opened)
    test_all_neighbours_are_those_of_the_graph(opened)
    for policy in [g.get_node_partition_policy(t) for t in g.ntypes] + [
        g.get_edge_partition_policy(t) for t in g.canonical_etypes
    ]:
        tensor = DistTensor((policy.get_size(),), torch.int64, "own", part_policy=policy)
        assert (tensor.part_policy, tensor.tensor_name) == (policy.policy_str, "own")
        assert policy.get_data_name("own").policy_str == policy.policy_str
        tensor[:] = torch.arange(len(tensor))
        view = g.nodes if policy.is_node else g.edges
        data = view[policy.type_name].data
        data["own"] = tensor
        assert torch.equal(data["own"][:], torch.arange(len(tensor)))
    ntype = "http://ex.org/ns#Person"
    seeds = {ntype: torch.arange(graph.num_nodes(ntype))}
    loader = DistNodeDataLoader(g, seeds, NeighborSampler([-1]), batch_size=16)
    found = [block.num_edges() for _, _, (block,) in loader]
    assert sum(found) == sum(graph.num_edges(e) for e in graph.canonical_etypes if e[2] == ntype)


def load(g: Any, ntype: str, weighted: bool) -> list[Any]:
    sampler = NeighborSampler(
        [4, 3], prob="weight" if weighted else None, prefetch_node_feats=["feat"]
    )
    ids: Any = torch.arange(0, g.num_nodes(ntype), 3)
    nids = ids if len(g.ntypes) == 1 else {ntype: ids}
    kind = DistNodeDataLoader if isinstance(g, DistGraph) else NodeDataLoader
    return blocks_of(kind(g, nids, sampler, batch_size=30, shuffle=True, seed=5))


@pytest.fixture(scope="module")
def drawn_alone(parts: dict[str, Any]) -> dict[tuple[str, bool], list[Any]]:
    """What a process without servers draws: what all others must draw."""
    found = {}
    for kind, (part_config, graph) in parts.items():
        for weighted in (False, True)[: 2 if kind == "plain" else 1]:
            found[kind, weighted] = load(
                DistGraph(kind, part_config=part_config), graph.ntypes[0], weighted
            )
            exit_client()
    return found


@pytest.mark.parametrize("weighted", [False, True])
def test_draws_do_not_depend_on_hosts(
    opened: tuple[DistGraph, Any], drawn_alone: Any, weighted: bool
) -> None:
    g, graph = opened
    kind = "plain" if len(g.ntypes) == 1 else "typed"
    if (kind, weighted) not in drawn_alone:
        assert weighted
        return
    found = load(g, graph.ntypes[0], weighted)
    assert len(found) > 10
    assert equal(found, drawn_alone[kind, weighted])


def test_wrong_requests_are_errors(opened: tuple[DistGraph, Any]) -> None:
    g, graph = opened
    ntype, etype = graph.ntypes[0], graph.canonical_etypes[0]
    with pytest.raises(IndexError, match="must be in"):
        g.sample_neighbors({ntype: [graph.num_nodes(ntype)]}, 2)
    with pytest.raises(IndexError, match="must be in"):
        g.find_edges([graph.num_edges(etype)], etype)
    with pytest.raises(IndexError, match="must be in"):
        g.in_degrees([-1], etype)
    with pytest.raises(ValueError, match="no node type"):
        _ = g.nodes["other"].data
    with pytest.raises(ValueError, match="no relation"):
        _ = g.edges["other"].data
    with pytest.raises(KeyError, match="no feature"):
        g.nodes[ntype].data["other"]
    with pytest.raises(ValueError, match="needs an edge feature of that name"):
        g.sample_neighbors({etype[2]: [0, 1, 2]}, 2, prob="other")
    with pytest.raises(ValueError, match="must be 'in' or 'out'"):
        g.sample_neighbors({ntype: [0]}, 2, edge_dir="both")
    with pytest.raises(TypeError, match="must be a DistTensor"):
        g.nodes[ntype].data["new"] = torch.zeros(3)  # type: ignore[assignment]


def test_tensors_can_be_features(opened: tuple[DistGraph, Any]) -> None:
    g, graph = opened
    ntype = graph.ntypes[0]
    policy = g.get_node_partition_policy(ntype)
    tensor = DistTensor((g.num_nodes(ntype), 2), torch.float32, "h", part_policy=policy)
    before = set(g.nodes[ntype].data)
    g.nodes[ntype].data["h"] = tensor
    assert set(g.nodes[ntype].data) == before | {"h"}
    g.nodes[ntype].data["h"][0] = torch.ones(2)
    assert tensor[0].tolist() == [[1, 1]]
    edges = g.get_edge_partition_policy(graph.canonical_etypes[0])
    size = g.num_edges(graph.canonical_etypes[0])
    assert DistTensor((size,), torch.int32, "e", part_policy=edges).shape == (size,)


def test_without_servers_the_parts_must_be_named() -> None:
    exit_client()
    with pytest.raises(ValueError, match="part_config must be given"):
        DistGraph("plain")


def test_another_name_is_an_error(parts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"have the graph 'plain' \(asked for 'other'\)"):
        DistGraph("other", part_config=parts["plain"][0])
    exit_client()


# ---------------------------------------------------------------------------- several trainers


def split(rank: int, world_size: int, ip_config: str, num_hosts: int) -> dict[str, Any]:
    join(ip_config, rank * num_hosts // world_size)
    g = DistGraph("plain")
    assert get_num_clients() == world_size
    mask = g.ndata["train_mask"]
    even = node_split(mask, g.get_partition_book())
    own = node_split(mask[:], g.get_partition_book(), force_even=False)
    by_id = node_split(mask, node_trainer_ids=torch.arange(g.num_nodes()) % world_size)
    edges = edge_split(torch.ones(g.num_edges(), dtype=torch.bool), g.get_partition_book())
    neighbour = (rank + 1) % world_size  # every trainer may ask for the share of another one
    evens = node_split(mask, rank=neighbour)
    owns = node_split(mask, rank=neighbour, force_even=False)
    with pytest.raises(ValueError, match=rf"number of a trainer, in \[0, {world_size}\)"):
        node_split(mask, rank=world_size)
    few = even[: 10 + 7 * rank]  # trainers with different numbers of nodes
    loader = DistNodeDataLoader(g, few, NeighborSampler([3]), batch_size=8)
    sizes = [len(outputs) for _, outputs, _ in loader]
    barrier()
    exit_client()
    others = {"evens": evens, "owns": owns}
    return {"even": even, "own": own, "by_id": by_id, "edges": edges, "sizes": sizes, **others}


@pytest.mark.parametrize(("num_hosts", "world_size"), [(1, 2), (3, 3), (3, 4)])
def test_splits_hold_each_once(
    parts: dict[str, Any], tmp_path: Path, num_hosts: int, world_size: int
) -> None:
    part_config, graph = parts["plain"]
    with ExitStack() as stack:
        servers = Servers(stack, part_config, num_hosts, tmp_path)
        found = run_ranks(split, world_size, str(servers.ip_config), num_hosts, timeout=120)
    expected = graph.ndata["train_mask"].nonzero().view(-1)
    for name in ("even", "own", "by_id"):
        assert torch.equal(torch.cat([f[name] for f in found]).sort().values, expected)
        assert all(f[name].dtype == torch.int64 for f in found)
    for rank, mine in enumerate(found):
        other = found[(rank + 1) % world_size]
        assert torch.equal(mine["evens"], other["even"])
        assert torch.equal(mine["owns"], other["own"])
    lengths = [len(f["even"]) for f in found]
    assert max(lengths) - min(lengths) <= 1
    assert sum(len(f["edges"]) for f in found) == graph.num_edges()
    assert all(
        torch.equal(f["by_id"] % world_size, f["by_id"] * 0 + r) for r, f in enumerate(found)
    )
    assert len({len(f["sizes"]) for f in found}) == 1
    assert [sum(f["sizes"]) for f in found] == [10 + 7 * rank for rank in range(world_size)]
    assert min(min(f["sizes"]) for f in found) > 0


def several_without_servers(rank: int, world_size: int, part_config: str) -> str:
    try:
        DistGraph("plain", part_config=part_config)
    except RuntimeError as error:
        return str(error)
    return ""


def test_several_trainers_need_servers(parts: dict[str, Any]) -> None:
    for text in run_ranks(several_without_servers, 2, parts["plain"][0]):
        assert "start servers" in text
