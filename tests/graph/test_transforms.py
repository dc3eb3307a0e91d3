# SPDX-License-Identifier: Apache-2.0
"""Transforms against DGL's: edges, their order, ids and features. No process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import graphshard
from dgl_peer import dgl
from graphshard.errors import DGLError
from graphshard.graph import (
    EID,
    ETYPE,
    NID,
    NTYPE,
    Graph,
    add_reverse_edges,
    add_self_loop,
    create_block,
    edge_subgraph,
    graph,
    heterograph,
    in_subgraph,
    node_subgraph,
    out_subgraph,
    remove_self_loop,
    reverse,
    to_bidirected,
    to_heterogeneous,
    to_homogeneous,
)

PLAIN = ("_N", "_E", "_N")
EDGES: dict[str, tuple[list[int], list[int], int]] = {
    "empty": ([], [], 0),
    "no_edges": ([], [], 4),
    "loops": ([0, 0, 2, 1], [0, 0, 2, 0], 4),
    "parallel": ([3, 0, 0, 2, 2, 1, 0, 3], [0, 1, 1, 0, 2, 0, 3, 3], 5),
    "random": (
        torch.randint(12, (60,), generator=torch.Generator().manual_seed(1)).tolist(),
        torch.randint(12, (60,), generator=torch.Generator().manual_seed(2)).tolist(),
        14,
    ),
}


def fill(g: Any) -> Any:
    """Give every type features, the same for both libraries."""
    for ntype in g.ntypes:
        n = g.num_nodes(ntype)
        g.nodes[ntype].data["x"] = torch.arange(n, dtype=torch.float32) + len(ntype)
        g.nodes[ntype].data["y"] = torch.arange(2 * n).reshape(n, 2)
    for i, etype in enumerate(g.canonical_etypes):
        n = g.num_edges(etype)
        g.edges[etype].data["w"] = torch.arange(n, dtype=torch.float64) * 0.5 + i
        g.edges[etype].data["z"] = torch.arange(3 * n, dtype=torch.float32).reshape(n, 3) - 4
    return g


def plain(name: str, idtype: torch.dtype = torch.int64) -> tuple[Graph, Any]:
    src, dst, n = EDGES[name]
    pair = torch.tensor(src, dtype=idtype), torch.tensor(dst, dtype=idtype)
    return fill(graph(pair, num_nodes=n)), fill(dgl.graph(pair, num_nodes=n))


def typed(seed: int = 0, both_ways: bool = True, alone: int = 2) -> tuple[Graph, Any]:
    """Both libraries' graph; ``alone`` nodes of a type without edges, if not 0."""
    generator = torch.Generator().manual_seed(seed)

    def draw(num_src: int, num_dst: int, num_edges: int) -> tuple[Tensor, Tensor]:
        src = torch.randint(num_src, (num_edges,), generator=generator)
        return src, torch.randint(num_dst, (num_edges,), generator=generator)

    data = {
        ("user", "follows", "user"): draw(6, 6, 15),
        ("user", "plays", "game"): draw(6, 4, 9),
        ("user", "likes", "game"): draw(6, 4, 0),
    }
    if both_ways:
        data["game", "follows", "user"] = draw(4, 6, 5)
    counts = {"user": 6, "game": 4} | ({"alone": alone} if alone else {})
    return fill(heterograph(data, counts)), fill(dgl.heterograph(data, counts))


def same_fields(ours: Any, theirs: Any, where: str) -> None:
    assert set(ours) == set(theirs), where
    for name, value in theirs.items():
        if name == EID:  # DGL has int64 ids even on some int32 graphs; ours are the graph's
            assert torch.equal(ours[name].long(), value.long()), where
        else:
            assert ours[name].dtype == value.dtype, (where, name)
            assert torch.equal(ours[name], value), (where, name)


def same(ours: Graph, theirs: Any) -> None:
    assert ours.ntypes == theirs.ntypes
    assert ours.canonical_etypes == theirs.canonical_etypes
    assert ours.idtype == theirs.idtype
    for ntype in theirs.ntypes:
        assert ours.num_nodes(ntype) == theirs.num_nodes(ntype)
        same_fields(ours.nodes[ntype].data, theirs.nodes[ntype].data, ntype)
    for etype in theirs.canonical_etypes:
        expected = theirs.edges(etype=etype, order="eid")
        for side, wanted in zip(ours.edges(etype=etype, order="eid"), expected, strict=True):
            assert torch.equal(side, wanted), etype
        same_fields(ours.edges[etype].data, theirs.edges[etype].data, str(etype))


def test_whole_graph_transforms_on_relations() -> None:
    ours, theirs = typed()
    etype = ("user", "follows", "user")
    same(add_self_loop(ours, etype=etype), dgl.add_self_loop(theirs, etype=etype))
    same(remove_self_loop(ours, etype), dgl.remove_self_loop(theirs, etype))
    same(reverse(ours, copy_edata=True), dgl.reverse(theirs, copy_edata=True))
    options = {"copy_edata": True, "ignore_bipartite": True}
    same(add_reverse_edges(ours, **options), dgl.add_reverse_edges(theirs, **options))


def test_bidirected_on_several_relations() -> None:
    data = {("a", "r", "a"): ([0, 1, 2, 2], [1, 1, 0, 0]), ("a", "s", "a"): ([0], [3])}
    same(to_bidirected(heterograph(data)), dgl.to_bidirected(dgl.heterograph(data)))


def test_features_are_shared_where_no_row_moves() -> None:
    ours, _ = plain("random")
    for new in (add_self_loop(ours), remove_self_loop(ours), reverse(ours, copy_edata=True)):
        assert new.ndata["x"].data_ptr() == ours.ndata["x"].data_ptr()
    assert reverse(ours, copy_edata=True).edata["z"] is ours.edata["z"]
    assert "_ID" not in ours.edata


CHOSEN = {"in": in_subgraph, "out": out_subgraph, "node": node_subgraph, "edge": edge_subgraph}
ORACLE = {
    "in": dgl.in_subgraph,
    "out": dgl.out_subgraph,
    "node": dgl.node_subgraph,
    "edge": dgl.edge_subgraph,
}
OPTIONS = [
    {"relabel_nodes": relabel, "store_ids": store}
    for relabel in (False, True)
    for store in (False, True)
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["in", "out", "node"])
def test_typed_subgraphs_by_nodes(kind: str, options: dict[str, bool]) -> None:
    for both_ways in (True, False):
        ours, theirs = typed(both_ways=both_ways, alone=0)  # DGL crashes on a type without edges
        for chosen in ({"user": [4, 1]}, {"user": [2, 5, 0], "game": [3, 1]}, {"game": [0]}):
            same(CHOSEN[kind](ours, chosen, **options), ORACLE[kind](theirs, chosen, **options))


@pytest.mark.parametrize("options", OPTIONS)
def test_typed_subgraphs_by_edges(options: dict[str, bool]) -> None:
    ours, theirs = typed(alone=0)  # DGL crashes on a type without edges
    for chosen in (
        {"plays": [8, 0, 3]},
        {("game", "follows", "user"): [4, 2], ("user", "follows", "user"): [1, 14], "plays": [0]},
    ):
        same(edge_subgraph(ours, chosen, **options), dgl.edge_subgraph(theirs, chosen, **options))


def test_type_without_edges_loses_its_nodes() -> None:
    ours, _ = typed()
    by_node = in_subgraph(ours, {"user": [1]}, relabel_nodes=True)
    for new in (by_node, edge_subgraph(ours, {"plays": [0]})):
        assert new.num_nodes("alone") == 0
        assert new.nodes["alone"].data[NID].shape == (0,)
        assert new.nodes["alone"].data["y"].shape == (0, 2)


def test_masks_choose_what_ids_do() -> None:
    ours, theirs = plain("random")
    nodes = torch.arange(14) % 3 == 0
    edges = torch.arange(60) % 4 == 1
    same(node_subgraph(ours, nodes), dgl.node_subgraph(theirs, nodes))
    same(edge_subgraph(ours, edges), dgl.edge_subgraph(theirs, edges))
    ids = nodes.nonzero().squeeze(1)
    same(in_subgraph(ours, nodes), dgl.in_subgraph(theirs, ids))
    same(out_subgraph(ours, nodes), dgl.out_subgraph(theirs, ids))


def test_node_given_twice() -> None:
    ours, theirs = plain("parallel")
    same(in_subgraph(ours, [0, 0]), dgl.in_subgraph(theirs, [0, 0]))
    for nodes in ([3, 0, 3], [0, 3, 3, 0], [1, 2, 0, 4, 4, 1]):  # repeats come last
        same(node_subgraph(ours, nodes), dgl.node_subgraph(theirs, nodes))
        same(
            node_subgraph(ours, nodes, relabel_nodes=False),
            dgl.node_subgraph(theirs, nodes, relabel_nodes=False),
        )


@pytest.mark.parametrize(
    ("nodes", "place", "new"),
    [([3, 3, 0, 1], 1, 0), ([1, 2, 1, 2, 5, 7], 2, 5), ([0, 1, 1, 3], 2, 3)],
)
def test_a_node_that_follows_a_repeated_one_is_refused(
    nodes: list[int], place: int, new: int
) -> None:
    """DGL's edges do not end where those ended that they are."""
    ours, theirs = plain("random")
    other = dgl.node_subgraph(theirs, nodes)
    ends = other.ndata[dgl.NID][other.edges()[1]]
    assert not torch.equal(ends, theirs.find_edges(other.edata[dgl.EID])[1])
    text = f"{nodes[place]} again at place {place}, before {new}"
    with pytest.raises(DGLError, match=f"'_N' that are given again .*{text}.*repeats at the end"):
        node_subgraph(ours, nodes)
    same(
        node_subgraph(ours, nodes, relabel_nodes=False),
        dgl.node_subgraph(theirs, nodes, relabel_nodes=False),
    )


def test_gradients_flow_into_a_subgraph() -> None:
    ours, _ = plain("parallel")
    ours.ndata["h"] = torch.ones(5, requires_grad=True)
    node_subgraph(ours, [3, 1]).ndata["h"].sum().backward()
    assert ours.ndata["h"].grad.tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("both_ways", [True, False])
def test_to_homogeneous_and_back(both_ways: bool) -> None:
    ours, theirs = typed(0, both_ways)
    same(to_homogeneous(ours), dgl.to_homogeneous(theirs))
    options = {"ndata": ["x", "y"], "edata": ["z"]}
    mine, oracle = to_homogeneous(ours, **options), dgl.to_homogeneous(theirs, **options)
    same(mine, oracle)
    back = to_heterogeneous(mine, ours.ntypes, ours.etypes)
    same(back, dgl.to_heterogeneous(oracle, theirs.ntypes, theirs.etypes))
    assert torch.equal(back.nodes["user"].data[NID], torch.arange(6, 12))


def test_to_homogeneous_options() -> None:
    ours, theirs = typed()
    mine = to_homogeneous(ours, store_type=False, return_count=True)
    oracle = dgl.to_homogeneous(theirs, store_type=False, return_count=True)
    same(mine[0], oracle[0])
    assert mine[1:] == oracle[1:] == ([2, 4, 6], [5, 15, 0, 9])
    ours = heterograph({("a", "r", "b"): ([0], [1])}, idtype=torch.int32)
    small = to_homogeneous(ours)
    assert small.ndata[NID].dtype == torch.int32
    assert small.ndata[NTYPE].dtype == torch.int64
    assert small.edata[ETYPE].tolist() == [0]


@pytest.mark.parametrize("given", ["absent", "another form"])
def test_to_homogeneous_asks_nothing_of_types_without_rows(given: str) -> None:
    found = []
    for module in (graphshard, dgl):
        none = torch.empty(0, dtype=torch.int64)
        g = module.heterograph(
            {("a", "r", "b"): ([0, 1], [0, 0]), ("c", "x", "a"): (none, none)},
            {"a": 2, "b": 1, "c": 0},
        )
        for ntype, count in (("a", 2), ("b", 1)):
            g.nodes[ntype].data["h"] = torch.arange(3.0 * count).view(count, 3)
        g.edges["r"].data["w"] = torch.ones(2)
        if given == "another form":
            g.nodes["c"].data["h"] = torch.ones(0, 5, 2)
            g.edges["x"].data["w"] = torch.ones(0, 4)
        found.append(module.to_homogeneous(g, ndata=["h"], edata=["w"]))
    same(*found)
    empty = heterograph({("a", "r", "b"): (none, none)}, {"a": 0, "b": 0})
    with pytest.raises(ValueError, match=r"'h' must be on every type that has any nodes or edges"):
        to_homogeneous(empty, ndata=["h"])
    empty.nodes["b"].data["h"] = torch.ones(0, 3)
    assert to_homogeneous(empty, ndata=["h"]).ndata["h"].shape == (0, 3)


def test_metagraph_keeps_relations_without_edges() -> None:
    ours, _ = typed()
    flat = to_homogeneous(ours, ndata=["x"])
    back = to_heterogeneous(flat, ours.ntypes, ours.etypes, metagraph=ours.canonical_etypes)
    assert back.canonical_etypes == ours.canonical_etypes
    assert back.num_edges("likes") == 0
    for etype in ours.canonical_etypes:
        for side, wanted in zip(back.edges(etype=etype), ours.edges(etype=etype), strict=True):
            assert torch.equal(side, wanted)
    assert torch.equal(back.nodes["game"].data["x"], ours.nodes["game"].data["x"])
    with pytest.raises(ValueError, match=r"no.* for \('game', 'follows', 'user'\)"):
        to_heterogeneous(flat, ours.ntypes, ours.etypes, metagraph=[("user", "follows", "user")])


def test_one_edge_type_between_several_node_types_becomes_several_relations() -> None:
    g = graph(([0, 2, 1], [1, 0, 2]))
    g.ndata[NTYPE] = torch.tensor([0, 0, 1])
    g.edata[ETYPE] = torch.tensor([0, 0, 0])
    split = to_heterogeneous(g, ["a", "b"], ["to"])
    assert split.canonical_etypes == [("a", "to", "a"), ("a", "to", "b"), ("b", "to", "a")]
    assert split.edges["b", "to", "a"].data[EID].tolist() == [1]


def test_errors_say_what_to_do() -> None:
    g, _ = typed()
    p, _ = plain("parallel")
    block = create_block(([0], [0]))
    with pytest.raises(ValueError, match="add_self_loop takes relations from a node type to it"):
        add_self_loop(g, etype="plays")
    with pytest.raises(ValueError, match=r"to_bidirected takes .* reverse\(\) gives"):
        to_bidirected(g)
    with pytest.raises(ValueError, match="ignore_bipartite=True"):
        add_reverse_edges(g)
    with pytest.raises(ValueError, match="got 'median'"):
        add_self_loop(p, fill_data="median")
    with pytest.raises(TypeError, match="fill_data must be a number"):
        add_self_loop(p, fill_data=torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no edge feature 'q'"):
        add_self_loop(p, ["q"])
    p.edata["votes"] = torch.ones(p.num_edges(), dtype=torch.int64)
    with pytest.raises(TypeError, match=r"got edge feature 'votes' of torch.int64\).*\.float\(\)"):
        add_self_loop(p, ["votes"], "sum")
    with pytest.raises(ValueError, match="got a block"):
        reverse(block)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a dict of node types"):
        in_subgraph(g, [0])
    with pytest.raises(TypeError, match="must be a dict of relations"):
        edge_subgraph(g, [0])
    with pytest.raises(ValueError, match=r"a node id must be in \[0, 5\)"):
        node_subgraph(p, [5])
    with pytest.raises(ValueError, match=r"an edge id must be in \[0, 8\)"):
        edge_subgraph(p, [-1])
    with pytest.raises(ValueError, match="must have 5 entries"):
        out_subgraph(p, torch.ones(4, dtype=torch.bool))
    g.nodes["user"].data["q"] = torch.ones(6)
    with pytest.raises(ValueError, match="feature 'q' must be on every type"):
        to_homogeneous(g, ndata=["q"])
    with pytest.raises(ValueError, match="one node type and one relation"):
        to_heterogeneous(g, ["a"], ["b"])
    flat = to_homogeneous(g)
    with pytest.raises(ValueError, match="got 1 names for numbers 0 to 2"):
        to_heterogeneous(flat, ["a"], g.etypes)
    with pytest.raises(ValueError, match="give metagraph"):
        to_heterogeneous(to_homogeneous(graph(([], []), 3)), ["a"], ["r"])
