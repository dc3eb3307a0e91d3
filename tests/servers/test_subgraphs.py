# SPDX-License-Identifier: Apache-2.0
"""Subgraphs of a `DistGraph` against DGL's of the whole graph; what opening graphs gives.

Servers are in threads of the test.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dgl_peer import dgl
from graphshard.data import to_dgl
from graphshard.graph import EID, NID
from graphshard.partition import load_partition
from graphshard.servers import (
    DistGraph,
    DistTensor,
    exit_client,
    find_edges,
    in_subgraph,
    node_split,
)


def edges_of(sub: Any, etype: Any, relabelled: bool) -> list[tuple[int, int, int]]:
    """(source, destination, id) of a subgraph's edges in the graph it is from, in order."""
    src, dst = sub.edges(etype=etype)
    if relabelled:
        src = sub.nodes[etype[0]].data[NID][src]
        dst = sub.nodes[etype[2]].data[NID][dst]
    columns = src.tolist(), dst.tolist(), sub.edges[etype].data[EID].tolist()
    return list(zip(*columns, strict=True))


def same(g: Any, ours: Any, theirs: Any, relabelled: bool) -> None:
    for etype in g.canonical_etypes:
        expected = edges_of(theirs, etype, relabelled)
        assert sorted(edges_of(ours, etype, relabelled)) == sorted(expected)
    for ntype in g.ntypes:
        assert ours.num_nodes(ntype) == theirs.num_nodes(ntype)
        if relabelled:
            kept = ours.nodes[ntype].data[NID]
            assert sorted(kept.tolist()) == sorted(theirs.nodes[ntype].data[NID].tolist())


@pytest.mark.parametrize("relabel", [False, True])
def test_as_dgl(opened: tuple[DistGraph, Any], relabel: bool) -> None:
    g, graph = opened
    of_dgl = to_dgl(graph)
    nodes = {t: torch.randperm(graph.num_nodes(t))[:17] for t in graph.ntypes}
    theirs = dgl.in_subgraph(of_dgl, nodes, relabel_nodes=relabel)
    same(g, g.in_subgraph(nodes, relabel_nodes=relabel), theirs, relabel)
    eids = {t: torch.randperm(graph.num_edges(t))[:40] for t in graph.canonical_etypes[:2]}
    theirs = dgl.edge_subgraph(of_dgl, eids, relabel_nodes=relabel)
    ours = g.edge_subgraph(eids, relabel_nodes=relabel)
    same(g, ours, theirs, relabel)
    for etype, ids in eids.items():  # in the order given
        assert torch.equal(ours.edges[etype].data[EID], ids)
    empty = g.edge_subgraph({graph.canonical_etypes[0]: []}, relabel_nodes=relabel)
    assert empty.num_edges() == 0
    assert empty.num_nodes() == (0 if relabel else graph.num_nodes())
    bare = g.edge_subgraph(eids, relabel_nodes=relabel, store_ids=False)
    assert EID not in bare.edges[graph.canonical_etypes[0]].data
    if len(g.ntypes) == 1:
        same(g, in_subgraph(g, nodes["_N"]), dgl.in_subgraph(of_dgl, nodes["_N"]), False)
        for one, other in zip(
            find_edges(g, eids["_N", "_E", "_N"]),
            of_dgl.find_edges(eids["_N", "_E", "_N"]),
            strict=True,
        ):
            assert torch.equal(one, other)
        assert g.in_degrees(3) == of_dgl.in_degrees(3)
        assert g.out_degrees(3) == of_dgl.out_degrees(3)
        pairs = torch.randint(0, 400, (2, 300))
        pairs[:, :40] = torch.stack(graph.find_edges(torch.arange(40)))
        assert torch.equal(g.has_edges_between(*pairs), of_dgl.has_edges_between(*pairs))


def test_wrong_requests(opened: tuple[DistGraph, Any]) -> None:
    g, graph = opened
    etype, ntype = graph.canonical_etypes[0], graph.ntypes[0]
    count = graph.num_edges(etype)
    with pytest.raises(IndexError, match=rf"must be in \[0, {count}\) \(got {count}\)"):
        g.edge_subgraph({etype: [0, count]})
    with pytest.raises(IndexError, match=r"must be in .* \(got -1\)"):
        g.in_subgraph({ntype: [-1]})
    for wrong in (torch.ones(count, dtype=torch.bool), torch.zeros(3), "all"):
        with pytest.raises(TypeError, match="must be integers"):
            g.find_edges(wrong, etype)
    with pytest.raises(ValueError, match="no node type 'other'"):
        g.in_subgraph({"other": [0]})
    with pytest.raises(ValueError, match="must be as many as"):
        g.has_edges_between([0, 1], [0], etype)


def test_local_partition_is_what_the_host_has(
    opened: tuple[DistGraph, Any], where: str, parts: dict[str, Any]
) -> None:
    g, graph = opened
    book, local = g.get_partition_book(), g.local_partition
    assert local is not None
    assert g.local_partition is local
    num_parts = 1 if where == "three hosts" else 3
    ids, types = local.ndata[NID], local.ndata["_TYPE"]
    inner = local.ndata["inner_node"]
    assert torch.equal(local.ndata["part_id"], book.nid2partid(ids))
    assert torch.equal(inner, local.ndata["part_id"] < num_parts)
    assert len(set(ids.tolist())) == len(ids)
    expected = set()
    for number, etype in enumerate(g.canonical_etypes):
        src, dst = graph.edges(etype=etype)
        eids = torch.arange(len(src))
        mine = book.nid2partid(dst, etype[2]) < num_parts
        columns = (
            book.map_to_homo_nid(src[mine], etype[0]).tolist(),
            book.map_to_homo_nid(dst[mine], etype[2]).tolist(),
            book.map_to_homo_eid(eids[mine], etype).tolist(),
        )
        expected |= {(*edge, number) for edge in zip(*columns, strict=True)}
    src, dst = local.edges()
    assert int(inner.sum()) > 0
    assert bool(inner[dst].all())
    found = torch.stack([ids[src], ids[dst], local.edata[EID], local.edata["_TYPE"].long()], 1)
    assert {tuple(edge) for edge in found.tolist()} == expected
    assert len(found) == len(expected)
    for number, ntype in enumerate(g.ntypes):  # rows of tensors stand in the same order
        rows = (inner & (types == number)).nonzero().view(-1)
        if len(rows):
            of_type = book.map_to_per_ntype(ids[rows])[1]
            assert bool((of_type.diff() == 1).all())
            count = graph.num_nodes(ntype) if num_parts == 3 else len(book.partid2nids(0, ntype))
            assert len(of_type) == count
    if where == "three hosts":
        kind = "plain" if len(g.ntypes) == 1 else "typed"
        of_file = load_partition(parts[kind][0], 0)[0]
        count = int(inner.sum())
        assert torch.equal(of_file.ndata["_ID"][:count], ids[:count])
        assert set(ids.tolist()) <= set(of_file.ndata["_ID"].tolist())


# ---------------------------------------------------------------------------- opening graphs


def test_a_process_may_open_several_graphs(parts: dict[str, Any], tmp_path: Path) -> None:
    exit_client()
    first = DistGraph("plain", part_config=parts["plain"][0])
    hidden = DistTensor((400, 2), torch.float32, "hidden")
    again = DistGraph("plain", part_config=parts["plain"][0])  # the same data
    again.ndata["feat"][0:1] = torch.full((1, 5), 7.0)
    assert torch.equal(first.ndata["feat"][0:1], torch.full((1, 5), 7.0))
    assert DistGraph("plain").num_nodes() == 400
    typed = DistGraph("typed", part_config=parts["typed"][0])
    assert (typed.num_nodes(), first.num_nodes()) == (180, 400)
    assert torch.equal(first.ndata["feat"][0:1], torch.full((1, 5), 7.0))
    assert first.sample_neighbors([0], -1).num_edges() == first.in_degrees(0)
    hidden[0:2] = torch.ones(2, 2)
    policy = typed.get_node_partition_policy("user")
    assert DistTensor((120,), torch.int64, "seen", part_policy=policy).shape == (120,)
    users = node_split(typed.nodes["user"].data["train_mask"])
    assert torch.equal(users, parts["typed"][1].nodes["user"].data["train_mask"].nonzero().view(-1))
    assert hidden[:].sum() == 4
    # Another partition of that name is another graph.
    copy = tmp_path / "copy"
    shutil.copytree(Path(parts["plain"][0]).parent, copy)
    other = DistGraph("plain", part_config=copy / "plain.json")
    assert torch.equal(other.ndata["feat"][:], parts["plain"][1].ndata["feat"])
    with pytest.raises(ValueError, match=r"'plain' \(asked for 'typed'\)"):
        DistGraph("typed")
    exit_client()
