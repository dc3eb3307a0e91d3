# SPDX-License-Identifier: Apache-2.0
"""Structure of parts, and partition books, against DGL's own. No process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from partition_cases import as_dicts, bipartite, part_contents, plain, quietly, typed
from torch import Tensor

from dgl_peer import dgl
from graphshard._base.typing import CanonicalEType
from graphshard.errors import PartitionFormatError
from graphshard.graph import Graph, heterograph
from graphshard.partition import (
    load_partition,
    load_partition_book,
    partition_graph,
    verify_partition,
)


def in_dgl(g: Graph) -> Any:
    if g.is_homogeneous:
        return dgl.graph(g.edges(), num_nodes=g.num_nodes())
    return dgl.heterograph(
        {etype: g.edges(etype=etype) for etype in g.canonical_etypes},
        {ntype: g.num_nodes(ntype) for ntype in g.ntypes},
    )


def dgl_partition(
    g: Graph, path: Path, num_parts: int, num_hops: int
) -> tuple[tuple[dict[str, Tensor], dict[CanonicalEType, Tensor]], dict[str, Tensor]]:
    """Let DGL partition at random; returns its mapping and the part of every node."""
    torch.manual_seed(0)
    dgl.seed(0)
    mapping = quietly(
        dgl.distributed.partition_graph,
        in_dgl(g),
        "theirs",
        num_parts,
        str(path),
        num_hops=num_hops,
        part_method="random",
        return_mapping=True,
    )
    nodes, edges = as_dicts(g, mapping)
    book, *_ = dgl.distributed.load_partition_book(str(path / "theirs.json"), 0)
    parts = {}
    for ntype, old_ids in nodes.items():
        parts[ntype] = torch.empty_like(old_ids)
        parts[ntype][old_ids] = book.nid2partid(torch.arange(len(old_ids)), ntype)
    return (nodes, edges), parts


def drop_empty_types(g: Graph) -> Graph:
    """DGL cannot partition a relation without edges, or a type that a part has no node of."""
    keep = [e for e in g.canonical_etypes if g.num_edges(e) and "venue" not in e]
    return heterograph(
        {etype: g.edges(etype=etype) for etype in keep},
        {ntype: g.num_nodes(ntype) for ntype in g.ntypes if ntype != "venue"},
    )


@pytest.mark.parametrize("num_hops", [1, 2, 3])
@pytest.mark.parametrize("make", [plain, typed, bipartite])
def test_parts_hold_what_dgls_hold(make: Any, num_hops: int, tmp_path: Path) -> None:
    g = make()
    if not g.is_homogeneous:
        g = drop_empty_types(g)
    theirs, parts = dgl_partition(g, tmp_path / "theirs", 3, num_hops)
    ours = as_dicts(
        g,
        partition_graph(
            g,
            "ours",
            3,
            tmp_path / "ours",
            num_hops=num_hops,
            part_method=parts,
            return_mapping=True,
            quiet=True,
        ),
    )
    load = dgl.distributed.load_partition
    for part in range(3):
        our_nodes, our_edges = part_contents(tmp_path / "ours/ours.json", part, *ours)
        their_nodes, their_edges = part_contents(
            tmp_path / "theirs/theirs.json", part, *theirs, load=load
        )
        assert our_nodes == their_nodes
        assert our_edges == their_edges


@pytest.mark.parametrize("make", [plain, typed])
def test_inner_nodes_show_their_true_degrees(make: Any, tmp_path: Path) -> None:
    g = make()
    nodes, _ = as_dicts(g, partition_graph(g, "g", 3, tmp_path, return_mapping=True, quiet=True))
    for part in range(3):
        local, _, _, book, *_ = load_partition(tmp_path / "g.json", part)
        types, ids = book.map_to_per_ntype(local.ndata["_ID"])
        src, dst = local.edges()
        for number, etype in enumerate(g.canonical_etypes):
            mine = local.edata["_TYPE"] == number
            for ends, ntype, true_degrees in (
                (src, etype[0], g.out_degrees(etype=etype)),
                (dst, etype[2], g.in_degrees(etype=etype)),
            ):
                degrees = torch.bincount(ends[mine], minlength=local.num_nodes())
                chosen = (types == g.ntypes.index(ntype)) & local.ndata["inner_node"]
                assert torch.equal(degrees[chosen], true_degrees[nodes[ntype][ids[chosen]]])


def book_json(seed: int, num_parts: int) -> dict[str, Any]:
    """Maps of two node types and three relations, some blocks empty."""
    generator = torch.Generator().manual_seed(seed)

    def blocks(num_types: int) -> list[list[list[int]]]:
        sizes = torch.randint(0, 6, (num_parts, num_types), generator=generator)
        sizes[sizes == 5] = 0
        ends = sizes.flatten().cumsum(0).reshape(sizes.shape)
        return torch.stack([ends - sizes, ends], dim=-1).transpose(0, 1).tolist()

    node_map = dict(zip(("u", "v"), blocks(2), strict=True))
    etypes = ("u:likes:v", "v:likes:u", "u:knows:u")
    edge_map = dict(zip(etypes, blocks(3), strict=True))
    return {
        "graph_name": "g",
        "num_parts": num_parts,
        "num_nodes": node_map["v"][-1][1],
        "num_edges": edge_map["u:knows:u"][-1][1],
        "halo_hops": 1,
        "part_method": "metis",
        "node_map": node_map,
        "edge_map": edge_map,
        "ntypes": {"u": 0, "v": 1},
        "etypes": {name: number for number, name in enumerate(etypes)},
        **{f"part-{part}": {} for part in range(num_parts)},
    }


@pytest.mark.parametrize("seed", range(5))
def test_book_answers_as_dgls_does(seed: int, tmp_path: Path) -> None:
    content = book_json(seed, 4)
    path = tmp_path / "g.json"
    path.write_text(json.dumps(content))
    for part in range(4):
        ours, *our_rest = load_partition_book(path, part)
        theirs, *their_rest = dgl.distributed.load_partition_book(str(path), part)
        assert our_rest == their_rest
        for name in (
            "ntypes",
            "etypes",
            "canonical_etypes",
            "partid",
            "is_homogeneous",
            "local_ntype_offset",
            "local_etype_offset",
        ):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.num_partitions() == theirs.num_partitions()
        assert ours.metadata() == theirs.metadata()
        assert ours.to_canonical_etype("knows") == theirs.to_canonical_etype("knows")
        nodes, edges = torch.arange(content["num_nodes"]), torch.arange(content["num_edges"])
        for one, two in zip(
            *(book.map_to_per_ntype(nodes) for book in (ours, theirs)), strict=True
        ):
            assert torch.equal(one, two)
        for one, two in zip(
            *(book.map_to_per_etype(edges) for book in (ours, theirs)), strict=True
        ):
            assert torch.equal(one, two)
        assert torch.equal(ours.nid2partid(nodes), theirs.nid2partid(nodes))
        assert torch.equal(ours.eid2partid(edges), theirs.eid2partid(edges))
        assert torch.equal(ours.partid2nids(part), theirs.partid2nids(part))
        assert torch.equal(ours.partid2eids(part), theirs.partid2eids(part))
        for ntype in ("u", "v"):
            assert ours.num_nodes(ntype) == theirs._num_nodes(ntype)
            nodes = torch.arange(ours.num_nodes(ntype))
            assert torch.equal(
                ours.map_to_homo_nid(nodes, ntype), theirs.map_to_homo_nid(nodes, ntype)
            )
            assert torch.equal(ours.nid2partid(nodes, ntype), theirs.nid2partid(nodes, ntype))
            mine = ours.partid2nids(part, ntype)
            assert torch.equal(mine, theirs.partid2nids(part, ntype))
            assert torch.equal(
                ours.nid2localnid(mine, part, ntype), theirs.nid2localnid(mine, part, ntype)
            )
        for etype in ("knows", ("u", "likes", "v"), ("v", "likes", "u")):
            assert ours.num_edges(etype) == theirs._num_edges(etype)
            edges = torch.arange(ours.num_edges(etype))
            assert torch.equal(
                ours.map_to_homo_eid(edges, etype), theirs.map_to_homo_eid(edges, etype)
            )
            assert torch.equal(ours.eid2partid(edges, etype), theirs.eid2partid(edges, etype))
            mine = ours.partid2eids(part, etype)
            assert torch.equal(mine, theirs.partid2eids(part, etype))
            assert torch.equal(
                ours.eid2localeid(mine, part, etype), theirs.eid2localeid(mine, part, etype)
            )


@pytest.mark.parametrize("make", [plain, typed])
def test_dgl_reads_the_maps_that_we_write(make: Any, tmp_path: Path) -> None:
    partition_graph(make(), "g", 3, tmp_path, quiet=True)
    ours, *our_rest = load_partition_book(tmp_path / "g.json", 1)
    theirs, *their_rest = dgl.distributed.load_partition_book(str(tmp_path / "g.json"), 1)
    assert our_rest == their_rest
    assert ours.metadata() == theirs.metadata()
    nodes = torch.arange(ours.num_nodes())
    assert torch.equal(ours.map_to_per_ntype(nodes)[1], theirs.map_to_per_ntype(nodes)[1])


def test_a_json_of_another_program_gives_a_book_and_no_parts(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps({**book_json(0, 4), "format": "another"}))
    book, name, ntypes, _ = load_partition_book(path, 2)
    assert (name, ntypes, book.partid) == ("g", {"u": 0, "v": 1}, 2)
    with pytest.raises(PartitionFormatError, match="neither a graphshard partition nor one of"):
        load_partition(path, 2)
    (problem,) = verify_partition(path)
    assert "neither a graphshard partition nor one of DGL's" in problem


def test_a_type_with_two_nodes_works_where_dgl_gives_up(tmp_path: Path) -> None:
    g = heterograph(
        {
            ("u", "r", "v"): (torch.arange(100), torch.arange(100) % 2),
            ("v", "s", "u"): (torch.arange(100) % 2, torch.arange(100)),
        },
        {"u": 100, "v": 2},
    )
    with pytest.raises(Exception):  # noqa: B017  (DGL's own test expects any)
        quietly(dgl.distributed.partition_graph, in_dgl(g), "g", 4, str(tmp_path / "theirs"))
    partition_graph(g, "g", 4, tmp_path / "ours", quiet=True)
    assert verify_partition(tmp_path / "ours/g.json") == []
    book, *_ = load_partition_book(tmp_path / "ours/g.json", 0)
    assert sorted(book.partid2nids(part, "v").numel() for part in range(4)) == [0, 0, 1, 1]
