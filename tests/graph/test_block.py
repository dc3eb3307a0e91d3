# SPDX-License-Identifier: Apache-2.0
"""Blocks against DGL's. One process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_oracle import (
    TYPED,
    TYPED_NODES,
    assert_same_data,
    dgl,
    dgl_fn,
    fn,
    gs,
    plain_pair,
    rand,
    typed_pair,
)


def assert_same_block(ours: gs.Block, theirs: Any) -> None:
    assert ours.is_block
    assert not ours.is_homogeneous
    assert ours.ntypes == theirs.ntypes
    assert ours.srctypes == theirs.srctypes
    assert ours.dsttypes == theirs.dsttypes
    assert ours.canonical_etypes == theirs.canonical_etypes
    assert ours.num_nodes() == theirs.num_nodes()
    assert ours.num_edges() == theirs.num_edges()
    for ntype in theirs.srctypes:
        assert ours.num_src_nodes(ntype) == theirs.num_src_nodes(ntype)
        assert ours.num_nodes(ntype) == theirs.num_nodes(ntype)
        assert_same_data(ours.srcnodes[ntype].data, theirs.srcnodes[ntype].data)
    for ntype in theirs.dsttypes:
        assert ours.num_dst_nodes(ntype) == theirs.num_dst_nodes(ntype)
        assert_same_data(ours.dstnodes[ntype].data, theirs.dstnodes[ntype].data)
    for etype in theirs.canonical_etypes:
        for mine, expected in zip(
            ours.edges("all", etype=etype), theirs.edges("all", etype=etype), strict=True
        ):
            assert torch.equal(mine, expected)
        assert_same_data(ours.edges[etype].data, theirs.edges[etype].data)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("dst", [None, [0, 1, 2, 4], [4, 2, 6, 1, 0]])
@pytest.mark.parametrize("include", [True, False])
def test_to_block_equals_dgl(idtype: torch.dtype, dst: Any, include: bool) -> None:
    ours, theirs = plain_pair(idtype=idtype)
    nodes = None if dst is None else torch.tensor(dst, dtype=idtype)
    made = gs.to_block(ours, nodes, include_dst_in_src=include)
    assert made.idtype == idtype
    assert_same_block(made, dgl.to_block(theirs, nodes, include_dst_in_src=include))
    if include:
        num_dst = made.num_dst_nodes()
        assert torch.equal(made.srcdata[gs.NID][:num_dst], made.dstdata[gs.NID])


def test_to_block_with_source_nodes() -> None:
    # DGL 1.1.3 makes a block without source nodes out of this.
    g, _ = plain_pair()
    dst, src = torch.tensor([0, 1, 2, 4]), torch.tensor([0, 1, 2, 4, 6, 3])
    block = gs.to_block(g, dst, src_nodes=src)
    assert torch.equal(block.srcdata[gs.NID], src)
    assert torch.equal(block.srcdata["h"], g.ndata["h"][src])
    for mine, ids, original in zip(block.edges(), (src, dst), g.edges(), strict=True):
        assert torch.equal(ids[mine], original)


@pytest.mark.parametrize("include", [True, False])
def test_typed_to_block_equals_dgl(include: bool) -> None:
    ours, theirs = typed_pair()
    nodes = {"user": torch.tensor([3, 0, 2, 1]), "game": torch.tensor([2, 1, 0])}
    assert_same_block(
        gs.to_block(ours, nodes, include_dst_in_src=include),
        dgl.to_block(theirs, nodes, include_dst_in_src=include),
    )
    assert_same_block(gs.to_block(ours), dgl.to_block(theirs))


def test_to_block_of_a_graph_without_edges() -> None:
    block = gs.to_block(gs.graph(([], []), num_nodes=4), torch.tensor([3, 1]))
    assert block.srcdata[gs.NID].tolist() == block.dstdata[gs.NID].tolist() == [3, 1]
    assert block.num_edges() == 0
    assert gs.to_block(gs.graph(([], []))).num_nodes() == 0


def test_to_block_carries_gradients() -> None:
    g = gs.graph(([0, 1], [1, 2]))
    x = torch.ones(3, requires_grad=True)
    g.ndata["x"] = x
    gs.to_block(g).srcdata["x"].sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("order", [[0, 1, 2, 4, 4], [4, 0, 4, 1, 2, 0], [2, 2, 0, 1, 4, 2]])
def test_to_block_of_nodes_given_several_times_equals_dgl(include: bool, order: list[int]) -> None:
    ours, theirs = plain_pair()
    nodes = torch.tensor(order)
    assert_same_block(gs.to_block(ours, nodes, include), dgl.to_block(theirs, nodes, include))


def test_to_block_of_sources_and_types_given_several_times_equals_dgl() -> None:
    edges = ([0, 1, 2, 3, 0], [1, 2, 0, 0, 2])
    ours, theirs = gs.graph(edges), dgl.graph(edges)
    for dst, src in (([0, 1, 2], [0, 1, 2, 3, 3]), ([0, 1, 2, 2], [0, 1, 2, 2, 3, 3])):
        args = torch.tensor(dst), True, torch.tensor(src)
        mine, other = gs.to_block(ours, *args), dgl.to_block(theirs, *args)
        assert torch.equal(mine.srcdata[gs.NID], other.srcdata[dgl.NID])
        assert torch.equal(mine.dstdata[gs.NID], other.dstdata[dgl.NID])
        assert torch.equal(torch.stack(mine.edges()), torch.stack(other.edges()))
    relations = {("u", "f", "u"): ([0, 1], [1, 0]), ("u", "p", "v"): ([0, 1, 1], [0, 0, 1])}
    nodes = {"u": torch.tensor([1, 1, 0]), "v": torch.tensor([1, 0, 1])}
    block, other = (
        library.to_block(library.heterograph(relations), nodes) for library in (gs, dgl)
    )
    for ntype in ("u", "v"):
        for side in ("srcnodes", "dstnodes"):
            ids = getattr(other, side)[ntype].data[dgl.NID]
            assert torch.equal(getattr(block, side)[ntype].data[gs.NID], ids)
    for etype in relations:
        assert torch.equal(
            torch.stack(block.edges(etype=etype)), torch.stack(other.edges(etype=etype))
        )


def test_ndata_of_a_block_is_dgl_s() -> None:
    edges = {("a", "r", "b"): ([0, 1], [0, 0]), ("b", "s", "b"): ([0, 2], [0, 1])}
    ours, theirs = (
        library.create_block(edges, {"a": 2, "b": 3}, {"b": 2}) for library in (gs, dgl)
    )
    for block in (ours, theirs):
        block.srcdata["x"] = {"a": torch.zeros(2), "b": torch.ones(3)}
        block.dstdata["x"] = torch.full((2,), 7.0)
        block.dstdata["y"] = torch.full((2,), 9.0)
        with block.local_scope():
            block.ndata["q"] = {"b": torch.arange(3.0)}
            assert block.srcnodes["b"].data["q"].tolist() == [0, 1, 2]
            assert "q" not in block.dstdata
        assert list(block.ndata) == ["x"]
        assert "x" in block.ndata
        assert {t: v.tolist() for t, v in block.ndata["x"].items()} == {"a": [0, 0], "b": [1] * 3}
        assert block.ndata["y"] == {}
        assert block.ndata.pop("x").keys() == {"a", "b"}
        assert "x" in block.dstdata
    edges = {("a", "r", "b"): ([0, 1], [0, 0])}
    for library in (gs, dgl):
        block = library.create_block(edges, {"a": 2}, {"b": 1})
        block.srcdata["x"], block.dstdata["y"] = torch.zeros(2), torch.ones(1)
        values = {name: list(of_type) for name, of_type in block.ndata.items()}
        assert values == {"x": ["a"], "y": ["b"]}
        block = library.to_block(library.graph(([0, 3], [1, 1])))
        assert block.ndata[library.NID]["_N"].tolist() == [1, 0, 3]


def test_mistakes_with_to_block() -> None:
    g, _ = plain_pair()
    with pytest.raises(ValueError, match=r"dst_nodes must hold every node that an edge enters .*4"):
        gs.to_block(g, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"src_nodes must hold every node that an edge leaves .*3"):
        gs.to_block(g, torch.tensor([0, 1, 2, 4]), src_nodes=torch.tensor([0, 1, 2, 4]))
    with pytest.raises(ValueError, match=r"an id in dst_nodes must be in \[0, 7\).*got 7"):
        gs.to_block(g, torch.tensor([0, 7]))
    with pytest.raises(ValueError, match="must begin with dst_nodes"):
        gs.to_block(g, torch.tensor([0, 1, 2, 4]), src_nodes=torch.tensor([1, 0, 2, 4, 3]))
    with pytest.raises(ValueError, match=r"idtype torch.int64 \(got torch.int32\)"):
        gs.to_block(g, torch.tensor([0, 1], dtype=torch.int32))
    typed, _ = typed_pair()
    with pytest.raises(TypeError, match="dst_nodes must be a dictionary from node type"):
        gs.to_block(typed, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"unknown node types \['robot'\]"):
        gs.to_block(typed, {"robot": torch.tensor([0])})
    with pytest.raises(TypeError, match="is a block already"):
        gs.to_block(gs.to_block(g))  # type: ignore[arg-type]


def test_create_block_equals_dgl() -> None:
    edges = ([0, 1, 2, 2], [1, 0, 0, 0])
    assert_same_block(gs.create_block(edges), dgl.create_block(edges))
    assert_same_block(
        gs.create_block(edges, num_src_nodes=5, num_dst_nodes=3),
        dgl.create_block(edges, num_src_nodes=5, num_dst_nodes=3),
    )
    counts = {"num_src_nodes": TYPED_NODES, "num_dst_nodes": {"user": 6, "game": 4}}
    assert_same_block(gs.create_block(TYPED), dgl.create_block(TYPED))
    assert_same_block(gs.create_block(TYPED, **counts), dgl.create_block(TYPED, **counts))
    csc = ("csc", ([0, 2, 2, 3], [4, 1, 1], []))
    assert_same_block(gs.create_block(csc), dgl.create_block(csc))


def test_mistakes_with_create_block() -> None:
    with pytest.raises(
        ValueError, match=r"source nodes of type '_N' must be larger .*got 2, .*id 2"
    ):
        gs.create_block(([0, 2], [0, 0]), num_src_nodes=2, num_dst_nodes=1)
    with pytest.raises(TypeError, match="must be dictionaries from type to number"):
        gs.create_block(TYPED, num_src_nodes=3, num_dst_nodes=3)
    with pytest.raises(ValueError, match=r"missing \['user'\]"):
        gs.create_block(TYPED, {"game": 3}, {"game": 3, "user": 3})


def block_pair() -> tuple[gs.Block, Any]:
    edges = ([0, 1, 4, 4, 2, 3], [0, 0, 1, 1, 1, 3])
    ours, theirs = gs.create_block(edges, 5, 4), dgl.create_block(edges, 5, 4)
    for block in (ours, theirs):
        block.srcdata["h"] = rand(5, 3)
        block.dstdata["h"] = rand(4, 3, seed=1)
        block.edata["w"] = rand(6, 3, seed=2)
    return ours, theirs


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_message_passing_on_blocks(reduce: str) -> None:
    ours, theirs = block_pair()
    for block, module in ((ours, fn), (theirs, dgl_fn)):
        for name, message in {
            "a": module.copy_u("h", "m"),
            "b": module.u_mul_e("h", "w", "m"),
            "c": module.u_sub_v("h", "h", "m"),
        }.items():
            block.update_all(message, getattr(module, reduce)("m", name))
        block.update_all(
            lambda edges: {"m": edges.src["h"] - edges.dst["h"] * edges.data["w"]},
            lambda nodes: {"d": nodes.mailbox["m"].cumsum(1)[:, -1] + nodes.data["h"]},
        )
        block.apply_edges(module.v_sub_u("h", "h", "z"))
        block["_E"].apply_edges(module.u_dot_v("h", "h", "y"))
    assert_same_block(ours, theirs)
    assert set(ours.srcdata) == {"h"}


def test_typed_blocks() -> None:
    ours, theirs = gs.create_block(TYPED), dgl.create_block(TYPED)
    for block, module in ((ours, fn), (theirs, dgl_fn)):
        for i, ntype in enumerate(block.srctypes):
            block.srcnodes[ntype].data["h"] = rand(block.num_src_nodes(ntype), 2, seed=i)
        functions = (module.copy_u("h", "m"), module.sum("m", "o"))
        block.multi_update_all(dict.fromkeys(["follows", "liked", "plays"], functions), "sum")
        block["rates"].update_all(module.copy_u("h", "m"), module.mean("m", "q"))
        block.update_all(module.copy_u("h", "m"), module.max("m", "p"), etype="liked")
    assert_same_block(ours, theirs)
    view = ours["user", "rates", "game"]
    assert isinstance(view, gs.Block)
    assert view.is_block
    assert view.srctypes == ["user"]
    assert view.dsttypes == ["game"]
    assert ours.srcdata["h"].keys() == {"game", "user"}
    assert ours.nodes["SRC/user"].data["h"] is ours.srcnodes["user"].data["h"]
    assert ours.nodes["DST/user"].data["o"] is ours.dstnodes["user"].data["o"]


def test_a_block_sliced_by_wildcard() -> None:
    ours, theirs = gs.create_block(TYPED), dgl.create_block(TYPED)
    mine, expected = ours["user", :, "game"], theirs["user", :, "game"]
    assert isinstance(mine, gs.Block)
    assert mine.canonical_etypes == expected.canonical_etypes
    assert all(map(torch.equal, mine.edges("all"), expected.edges("all")))


def test_a_block_numbers_its_sides_separately() -> None:
    ours, _ = block_pair()
    with pytest.raises(TypeError, match="must be set with a dictionary from type to tensor"):
        ours.ndata["h"] = torch.ones(5)
    assert ours.srcnodes().tolist() == [0, 1, 2, 3, 4]
    assert ours.dstnodes("_N").tolist() == [0, 1, 2, 3]
    assert ours.num_src_nodes() == 5
    assert ours.number_of_dst_nodes() == 4


def test_block_repr_and_moves() -> None:
    ours, theirs = block_pair()
    assert repr(ours) == repr(theirs) == "Block(num_src_nodes=5, num_dst_nodes=4, num_edges=6)"
    typed = repr(gs.create_block(TYPED))
    assert "num_src_nodes={'game': 3, 'user': 4}" in typed
    assert "('user', 'plays', 'game'): 4" in typed
    assert ours.int().idtype == torch.int32
    assert ours.int().edges()[0].dtype == torch.int32
    moved = ours.to("meta")
    assert moved.device == torch.device("meta")
    assert moved.srcdata["h"].device == torch.device("meta")
    assert moved.dstdata["h"].shape == (4, 3)
    assert ours.in_degrees().tolist() == theirs.in_degrees().tolist()
    assert ours.out_degrees().tolist() == theirs.out_degrees().tolist()
    assert ours.any_zero_in_degree()
    assert ours.has_edges()


def test_scope_on_blocks() -> None:
    ours, _ = block_pair()
    with ours.local_scope():
        ours.srcdata["x"] = torch.zeros(5)
        ours.dstdata["x"] = torch.zeros(4)
        assert ours._src_frames[0].scope_fields() == ours._dst_frames[0].scope_fields() == ["x"]
    assert "x" not in ours.srcdata
    assert "x" not in ours.dstdata


def test_constructor_checks() -> None:
    from graphshard.ops import Adjacency

    adj = Adjacency(torch.tensor([0]), torch.tensor([0]), 2, 1)
    block = gs.Block({"a": 2}, {"a": 1}, {("a", "r", "a"): adj})
    assert block.num_src_nodes("a") == 2
    with pytest.raises(ValueError, match="between 3 and 1 nodes"):
        gs.Block({"a": 3}, {"a": 1}, {("a", "r", "a"): adj})
    with pytest.raises(ValueError, match="names a node type whose number"):
        gs.Block({"a": 2}, {"b": 1}, {("a", "r", "a"): adj})
    with pytest.raises(ValueError, match="at least one relation"):
        gs.Block({"a": 2}, {"b": 1}, {})


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("dst_type", ["user", "game"])
def test_types_without_destinations_lose_their_edges_as_dgls(dst_type: str, include: bool) -> None:
    ours, theirs = typed_pair()
    nodes = {dst_type: torch.tensor([3, 1, 0, 2])}
    mine = gs.to_block(ours, nodes, include_dst_in_src=include)
    its = dgl.to_block(theirs, nodes, include_dst_in_src=include)
    assert_same_block(mine, its)
