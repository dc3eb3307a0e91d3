# SPDX-License-Identifier: Apache-2.0
"""Graphs of drawn or chosen edges, beside DGL where nothing is random. No processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphshard
import graphshard.dgl
from dgl_peer import dgl
from graphshard.dgl import sampling
from graphshard.errors import DGLError
from graphshard.graph import EID, ETYPE, Graph, graph, to_homogeneous

RELATIONS = {
    ("user", "knows", "user"): ([1, 2, 3, 0, 2, 3, 0], [0, 0, 0, 1, 1, 1, 2]),
    ("user", "plays", "game"): ([0, 0, 1, 3], [0, 1, 2, 2]),
    ("game", "liked", "user"): ([2, 2, 2, 1, 1, 0], [0, 1, 2, 0, 3, 0]),
}


def typed(module: Any = graphshard.dgl) -> Any:
    g = module.heterograph(RELATIONS)
    g.nodes["user"].data["x"] = torch.arange(4.0)
    generator = torch.Generator().manual_seed(0)
    for etype in g.canonical_etypes:
        weights = torch.rand(g.num_edges(etype), generator=generator)
        g.edges[etype].data["w"] = weights * (weights > 0.3)
        g.edges[etype].data["mask"] = weights > 0.3
    return g


def edges_of(g: Any) -> dict[Any, list[tuple[int, ...]]]:
    """Relation to (source, destination, id) of its edges."""
    found = {}
    for etype in g.canonical_etypes:
        columns = [*g.edges(etype=etype), g.edges[etype].data["_ID"]]
        found[etype] = sorted(zip(*(c.tolist() for c in columns), strict=True))
    return found


@pytest.mark.parametrize("edge_dir", ["in", "out"])
@pytest.mark.parametrize("prob", [None, "w", "mask"])
def test_all_edges_are_those_that_dgl_draws(edge_dir: str, prob: str | None) -> None:
    nodes = {"user": torch.tensor([0, 2]), "game": torch.tensor([1])}
    knows, plays = list(RELATIONS)[:2]  # DGL skips shorter names
    excluded = {knows: torch.tensor([0, 5]), plays: torch.tensor([1])}
    found, wanted = (
        edges_of(
            module.sampling.sample_neighbors(
                typed(module), nodes, -1, edge_dir, prob, exclude_edges=excluded
            )
        )
        for module in (graphshard.dgl, dgl)
    )
    assert found == wanted


@pytest.mark.parametrize("copied", [False, True])
def test_blocks_of_all_edges_are_those_that_dgl_draws(copied: bool) -> None:
    nodes = {"user": torch.tensor([2, 0]), "game": torch.tensor([1])}
    blocks = [
        module.sampling.sample_neighbors_fused(
            typed(module), nodes, -1, copy_ndata=copied, copy_edata=copied
        )
        for module in (graphshard.dgl, dgl)
    ]
    edges: list[dict[Any, Any]] = []
    for block in blocks:
        edges.append({t: block.num_src_nodes(t) for t in block.srctypes})
        for etype in block.canonical_etypes:
            src, dst = block.edges(etype=etype)
            if copied:  # else DGL does not say which nodes they are
                src = block.srcnodes[etype[0]].data["_ID"][src]
                dst = block.dstnodes[etype[2]].data["_ID"][dst]
                assert {"w", "mask"} <= set(block.edges[etype].data)
                eids = block.edges[etype].data["_ID"]
                edges[-1][etype] = sorted(zip(*(c.tolist() for c in (src, dst, eids)), strict=True))
            else:
                assert not block.edges[etype].data
                edges[-1][etype] = sorted(dst.tolist())
    assert edges[0] == edges[1]
    with pytest.raises(NotImplementedError, match="reverse the graph"):
        typed().sample_neighbors_fused(nodes, 1, "out")


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("edge_dir", ["in", "out"])
def test_chosen_edges_are_those_that_dgl_chooses(edge_dir: str, ascending: bool) -> None:
    for k in (1, 2, -1, {"knows": 2, "plays": 0, "liked": -1}):
        for nodes in (None, {"user": torch.tensor([1, 0]), "game": torch.tensor([2])}):
            graphs = []
            for module in (graphshard.dgl, dgl):
                g = typed(module)
                for number, etype in enumerate(g.canonical_etypes):
                    order = torch.randperm(
                        g.num_edges(etype), generator=torch.Generator().manual_seed(number)
                    )
                    g.edges[etype].data["w"] = order.float()
                graphs.append(g)
            found, wanted = (
                edges_of(m.sampling.select_topk(g, k, "w", nodes, edge_dir, ascending))
                for m, g in zip((graphshard.dgl, dgl), graphs, strict=True)
            )
            assert found == wanted


def test_drawn_edges_have_the_features_that_are_asked_for() -> None:
    g = typed()
    frontier = g.sample_neighbors({"user": [0, 1], "game": 2}, 2, replace=True)
    assert [frontier.num_edges(t) for t in ("knows", "plays", "liked")] == [4, 2, 4]
    assert torch.equal(frontier.nodes["user"].data["x"], g.nodes["user"].data["x"])
    eids = frontier.edges["knows"].data[EID]
    assert torch.equal(frontier.edges["knows"].data["w"], g.edges["knows"].data["w"][eids])
    bare = sampling.sample_neighbors(g, {"user": [0]}, 1, copy_ndata=False, copy_edata=False)
    assert not bare.nodes["user"].data
    assert not bare.edges["knows"].data
    assert bare.num_nodes("user") == 4


def test_weights_may_be_given_and_decide() -> None:
    g = graph((list(range(5)), [5] * 5))
    weights = torch.tensor([0.0, 1, 3, 0, 6])
    counts = torch.zeros(5)
    graphshard.dgl.seed(0)
    for _ in range(40):
        frontier = sampling.sample_neighbors(g, [5], 50, prob=weights, replace=True)
        counts += torch.bincount(frontier.edges()[0], minlength=5)
    assert torch.allclose(counts / counts.sum(), weights / 10, atol=0.04)
    only = sampling.sample_neighbors(g, [5, 5], 5, prob={("_N", "_E", "_N"): weights})
    assert only.edges()[0].tolist() == [1, 2, 4] * 2


def test_labor_draws_near_the_fanout_and_repeats_from_a_seed() -> None:
    generator = torch.Generator().manual_seed(0)
    g = graph(tuple(torch.randint(0, 60, (2000,), generator=generator) for _ in range(2)))
    found = [
        sampling.sample_labors(g, g.nodes(), 5, random_seed=torch.tensor([number % 20]))[0]
        for number in range(40)
    ]
    assert edges_of(found[3]) == edges_of(found[23])
    sizes = torch.tensor([one.num_edges() for one in found[:20]]).double()
    assert abs(float(sizes.mean()) - 300) < 3 * float(sizes.std()) / 20**0.5
    assert [len(part) for part in sampling.sample_labors(g, [0], 2)[1]] == [0]
    with pytest.raises(NotImplementedError, match="LABOR-0"):
        sampling.sample_labors(g, [0], 2, importance_sampling=1)


def test_edges_are_drawn_by_type_of_a_homogenised_graph() -> None:
    g = to_homogeneous(typed())
    offsets = torch.cat([torch.zeros(1), torch.bincount(g.edata[ETYPE]).cumsum(0)]).long()
    fanouts = torch.tensor([1, 2, -1])
    frontier = sampling.sample_etype_neighbors(g, g.nodes(), offsets.tolist(), fanouts)
    for number, fanout in enumerate(fanouts.tolist()):
        of_type = frontier.edata[ETYPE] == number
        drawn = torch.bincount(frontier.edges()[1][of_type], minlength=g.num_nodes())
        degrees = torch.bincount(g.edges()[1][g.edata[ETYPE] == number], minlength=g.num_nodes())
        assert torch.equal(drawn, degrees if fanout < 0 else degrees.clamp(max=fanout))
    prob = [torch.zeros(n) for n in offsets.diff().tolist()]
    prob[1][2] = 1.0
    found = sampling.sample_etype_neighbors(g, g.nodes(), offsets, fanouts, prob=prob)
    assert found.edata[EID].tolist() == [int(offsets[1]) + 2]


def test_edges_are_drawn_by_tag() -> None:
    g: Graph = graph(([0, 1, 2, 3], [4, 4, 4, 4]))
    g.ndata["_TAG_OFFSET"] = torch.tensor([[0, 0, 0]] * 4 + [[0, 3, 4]])
    for bias, wanted in (([1, 0], [0, 1, 2]), ([0, 2.0], [3])):
        frontier = sampling.sample_neighbors_biased(g, [4], 3, torch.tensor(bias))
        assert frontier.edges()[0].tolist() == wanted
    with pytest.raises(DGLError, match="one number for each of 2 tags"):
        sampling.sample_neighbors_biased(g, [4], 3, [1.0])
    with pytest.raises(DGLError, match="sort_csr_by_tag"):
        sampling.sample_neighbors_biased(g, [4], 3, [1.0], "out", tag_offset_name="none")


def test_pairs_that_are_no_edges_are_drawn() -> None:
    g = typed()
    for etype in ("knows", "plays"):
        src, dst = g.global_uniform_negative_sampling(5, etype=etype)
        assert len(src) == len(dst) <= 5
        assert not bool(g.has_edges_between(src, dst, etype=etype).any())
        assert len(set(zip(src.tolist(), dst.tolist(), strict=True))) == len(src)
    empty = graph(([], []), num_nodes=0)
    assert [len(side) for side in sampling.global_uniform_negative_sampling(empty, 4)] == [0, 0]


def test_what_cannot_be_drawn_is_refused() -> None:
    g, sample = typed(), sampling.sample_neighbors
    cases: list[tuple[str, Any]] = [
        ("must be a dictionary", lambda: sample(g, [0], 1)),
        ("no node type 'film'", lambda: sample(g, {"film": [0]}, 1)),
        ("empty dictionary", lambda: sample(g, {}, 1)),
        ("an id must be in", lambda: sample(g, {"user": [7]}, 1)),
        ("at least -1", lambda: sample(g, {"user": [0]}, -2)),
        ("must name every relation", lambda: sample(g, {"user": [0]}, {"knows": 1})),
        ("edge_dir must be", lambda: sample(g, {"user": [0]}, 1, "both")),
        ("no relation has an edge feature", lambda: sample(g, {"user": [0]}, 1, prob="none")),
        ("one for each of 7 edges", lambda: sample(g, {"user": [0]}, 1, prob={"knows": [1.0]})),
        ("have no feature 'none'", lambda: sampling.select_topk(g, 1, "none")),
        (
            "takes a homogenised graph",
            lambda: sampling.sample_etype_neighbors(g, {"user": [0]}, [0], torch.tensor([1])),
        ),
    ]
    for words, call in cases:
        with pytest.raises(DGLError, match=words):
            call()


def test_graphs_that_are_changed_in_place_are_drawn_from_as_they_are() -> None:
    g = graph(([0, 1], [2, 2]), num_nodes=4)
    assert sampling.sample_neighbors(g, [2], -1).edges()[0].tolist() == [0, 1]
    g.add_edges([3], [2])
    g.edata["w"] = torch.tensor([0.0, 1.0, 1.0])
    assert g.sample_neighbors([2], -1, prob="w").edges()[0].tolist() == [1, 3]
    g.edata["w"][1] = 0
    assert g.sample_neighbors([2], -1, prob="w").edges()[0].tolist() == [3]
    g.remove_nodes([0])
    assert g.sample_neighbors([1], -1).edges()[0].tolist() == [0, 2]


def test_blocks_have_no_excluded_edges_and_none_of_weight_0() -> None:
    nodes = {"user": torch.tensor([2, 0]), "game": torch.tensor([1])}
    knows, plays = list(RELATIONS)[:2]
    excluded = {knows: torch.tensor([0, 5]), plays: torch.tensor([1])}
    for prob in (None, "w", "mask"):
        block = typed().sample_neighbors_fused(nodes, -1, prob=prob, exclude_edges=excluded)
        frontier = dgl.sampling.sample_neighbors(
            typed(dgl), nodes, -1, prob=prob, exclude_edges=excluded
        )  # DGL's fused one fails where relations have no excluded edges
        for etype in block.canonical_etypes:
            ours, theirs = (g.edges[etype].data["_ID"].tolist() for g in (block, frontier))
            assert sorted(ours) == sorted(theirs)
    block = typed().sample_neighbors_fused({"user": [0]}, 9, replace=True)
    assert block.num_edges("knows") == 9
    assert set(typed().sample_neighbors_fused({"user": [0]}, 9).edges["knows"].data) > {"w"}


@pytest.mark.parametrize("edge_dir", ["in", "out"])
def test_labor_draws_all_edges_that_it_may(edge_dir: str) -> None:
    nodes, excluded = {"user": [0, 2], "game": [1]}, {"knows": [0, 5], "plays": [1]}
    found = sampling.sample_labors(typed(), nodes, -1, edge_dir, exclude_edges=excluded)[0]
    plain = typed().sample_neighbors(nodes, -1, edge_dir, exclude_edges=excluded)
    assert edges_of(found) == edges_of(plain)
    assert "x" in found.nodes["user"].data
    bare = sampling.sample_labors(typed(), nodes, 1, copy_ndata=False, copy_edata=False)[0]
    assert not bare.nodes["user"].data
    assert not bare.edges["knows"].data
    with pytest.raises(NotImplementedError, match=r"LABOR-0 \(got 0 and 0.5\)"):
        sampling.sample_labors(typed(), nodes, 2, seed2_contribution=0.5)


def test_without_a_direction_edges_enter_the_nodes() -> None:
    for call in (
        lambda module: module.sampling.sample_neighbors(typed(module), {"user": [0, 3]}, -1),
        lambda module: module.sampling.select_topk(typed(module), 9, "w", {"user": [0, 3]}),
    ):
        assert edges_of(call(graphshard.dgl)) == edges_of(call(dgl))
    assert edges_of(sampling.sample_labors(typed(), {"user": [0, 3]}, -1)[0]) == edges_of(
        dgl.sampling.sample_neighbors(typed(dgl), {"user": [0, 3]}, -1)
    )


def test_fewer_edges_are_drawn_than_there_are() -> None:
    g = typed()
    for edge_dir, end in (("in", 1), ("out", 0)):
        frontier = sampling.sample_neighbors(g, {"user": [0, 1, 2, 3], "game": [2]}, 2, edge_dir)
        for etype in g.canonical_etypes:
            near = etype[2] if edge_dir == "in" else etype[0]
            nodes = [2] if near == "game" else [0, 1, 2, 3]
            drawn, there = (
                torch.bincount(graph.edges(etype=etype)[end], minlength=4)
                for graph in (frontier, g)
            )
            assert drawn[nodes].tolist() == there[nodes].clamp(max=2).tolist()
            assert int(drawn.sum()) == int(drawn[nodes].sum())
    assert sampling.sample_neighbors(g, {"user": [0, 0]}, 1).num_edges("knows") == 2


def test_numbers_that_edges_are_chosen_by() -> None:
    edges = ([0, 1, 2, 3, 4, 0, 1], [5, 5, 5, 5, 5, 4, 4])
    weights = torch.tensor([-1, 3, 3, -5, 0, -2, -2])
    g = graph(edges)
    g.edata["w"] = weights
    for k, ascending, chosen in (
        (2, False, [1, 2]),  # of equal weights the smaller id first
        (1, False, [1]),
        (1, True, [3]),
        (3, True, [3, 0, 4]),
        (5, False, [1, 2, 4, 0, 3]),
        (6, False, [1, 2, 4, 0, 3]),
        (0, False, []),
    ):
        frontier = sampling.select_topk(g, k, "w", [5], ascending=ascending)
        assert frontier.edata[EID].tolist() == chosen
    twice = sampling.select_topk(g, 1, "w", [4, 5, 4])
    assert twice.edata[EID].tolist() == [5, 1, 5]
    g.edata["w"] = weights.unsqueeze(1)
    with pytest.raises(DGLError, match=r"one number per edge \(got shape \(7, 1\)\)"):
        sampling.select_topk(g, 1, "w")


@pytest.mark.parametrize("edge_dir", ["in", "out"])
def test_tags_that_weigh_nothing_are_never_drawn(edge_dir: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = [torch.randint(0, 12, (80,), generator=generator) for _ in range(2)]
    tags = torch.randint(0, 3, (12,), generator=generator)
    for bias in ([1.0, 0.0, 2.0], [0.0, 3.0, 0.0], [1.0, 1.0, 1.0]):
        drawn = []
        for module in (graphshard.dgl, dgl):
            plain = module.graph(tuple(ends), num_nodes=12)
            by_tag = "sort_csc_by_tag" if edge_dir == "in" else "sort_csr_by_tag"
            g = getattr(module, by_tag)(plain, tags)
            frontier = module.sampling.sample_neighbors_biased(
                g, [1, 4, 7], 50, torch.tensor(bias), edge_dir
            )
            drawn.append(sorted(zip(*(side.tolist() for side in frontier.edges()), strict=True)))
        assert drawn[0] == drawn[1]
    ours = graphshard.dgl.sort_csc_by_tag(graph(tuple(ends), num_nodes=12), tags)
    for fanout, replace in ((2, False), (7, True)):
        frontier = sampling.sample_neighbors_biased(
            ours, [1, 4], fanout, [1, 1, 1], replace=replace
        )
        degrees = ours.in_degrees([1, 4])
        expected = torch.full((2,), 7) if replace else degrees.clamp(max=2)
        assert frontier.in_degrees([1, 4]).tolist() == expected.tolist()


def test_offsets_of_tags_and_types_are_checked() -> None:
    g: Graph = graph(([0, 1, 2, 3], [4, 4, 4, 4]))
    for last in ([0, 3, 3], [0, 5, 4]):  # one edge too few, and a number of edges below 0
        g.ndata["_TAG_OFFSET"] = torch.tensor([[0, 0, 0]] * 4 + [last])
        with pytest.raises(DGLError, match="must split the 4 edges"):
            sampling.sample_neighbors_biased(g, [4], 3, [1.0, 1.0])
    g.ndata["_TAG_OFFSET"] = torch.zeros(5)
    with pytest.raises(DGLError, match="bias must have one number"):
        sampling.sample_neighbors_biased(g, [4], 3, [1.0])
    with pytest.raises(DGLError, match="takes a graph of one relation"):
        sampling.sample_neighbors_biased(typed(), {"user": [0]}, 3, [1.0])
    sample, fanout = sampling.sample_etype_neighbors, torch.tensor([1, 1])
    for offsets, words in (
        ([0, 4], "one entry more than fanout's 2"),
        ([1, 2, 4], "must rise from 0"),
        ([0, 5, 4], "must rise from 0"),
        ([0, 2, 3], "must end with the number of edges, 4"),
    ):
        with pytest.raises(DGLError, match=words):
            sample(g, [4], offsets, fanout)
    with pytest.raises(TypeError, match="fanout must be a tensor"):
        sample(g, [4], [0, 2, 4], [1, 1])
    with pytest.raises(DGLError, match="no edge feature 'w' to draw by"):
        sample(g, [4], [0, 2, 4], fanout, prob="w")
    with pytest.raises(DGLError, match=r"of \[2, 2\] weights \(got \[2\]\)"):
        sample(g, [4], [0, 2, 4], fanout, prob=[torch.ones(2)])
    with pytest.raises(DGLError, match=r"of \[2, 2\] weights \(got \[3, None\]\)"):
        sample(g, [4], [0, 2, 4], fanout, prob=[torch.ones(3), None])


@pytest.mark.parametrize("edge_dir", ["in", "out"])
def test_types_of_a_homogenised_graph_are_drawn_from_apart(edge_dir: str) -> None:
    g = graph(([0, 1, 2, 3, 0, 1], [4, 4, 4, 4, 4, 4]), num_nodes=5)
    nodes = [4] if edge_dir == "in" else [0, 1, 2, 3]
    offsets = [0, 2, 4, 6]
    whole = sampling.sample_etype_neighbors(
        g, nodes, offsets, torch.tensor([-1, 0, -1]), edge_dir, output_device="cpu"
    )
    assert sorted(whole.edata[EID].tolist()) == [0, 1, 4, 5]
    g.edata["w"] = torch.tensor([0.0, 1, 1, 0, 0, 1])
    for prob in ("w", [g.edata["w"][:2], g.edata["w"][2:4], g.edata["w"][4:]]):
        fanouts = torch.tensor([3, 3, 3])
        weighted = sampling.sample_etype_neighbors(g, nodes, offsets, fanouts, edge_dir, prob)
        assert sorted(weighted.edata[EID].tolist()) == [1, 2, 5]
    prob = [None, torch.empty(0), torch.tensor([0.0, 2.0])]
    mixed = sampling.sample_etype_neighbors(
        g, nodes, offsets, torch.tensor([9, 9, 9]), edge_dir, prob
    )
    assert sorted(mixed.edata[EID].tolist()) == [0, 1, 2, 3, 5]
    again = sampling.sample_etype_neighbors(
        g, nodes, offsets, torch.tensor([4, 0, 0]), edge_dir, None, True
    )
    assert len(again.edata[EID]) == (4 if edge_dir == "in" else 8)
    assert set(again.edata[EID].tolist()) <= {0, 1}


def test_numbers_of_edges_are_whole() -> None:
    for fanout in (True, 1.5, "2", {"knows": -2, "plays": 1, "liked": 1}):
        with pytest.raises(DGLError, match="must be an integer of at least -1"):
            sampling.sample_neighbors(typed(), {"user": [0]}, fanout)
    none = sampling.sample_neighbors(typed(), {"user": [0, 1]}, 0)
    assert none.num_edges() == 0
    assert none.num_nodes("game") == 3


def test_edges_are_excluded_by_id_or_by_relation() -> None:
    g = graph(([0, 1, 2], [3, 3, 3]))
    for excluded in ([0, 2], torch.tensor([2, 0]), {"_E": [0, 2]}, {("_N", "_E", "_N"): [2, 0]}):
        frontier = sampling.sample_neighbors(g, [3], -1, exclude_edges=excluded)
        assert frontier.edges()[0].tolist() == [1]
    with pytest.raises(TypeError, match="exclude_edges must be a dictionary from relation"):
        sampling.sample_neighbors(typed(), {"user": [0]}, -1, exclude_edges=[0])
    with pytest.raises(DGLError, match=r"an id must be in \[0, 3\)"):
        sampling.sample_neighbors(g, [3], -1, exclude_edges=[3])
    with pytest.raises(DGLError, match=r"an id must be in \[0, 4\)"):
        sampling.sample_neighbors(g, [4], -1)


def test_what_is_not_said_is_copied_and_a_type_may_have_one_edge() -> None:
    blocks = [
        module.sampling.sample_neighbors_fused(typed(module), {"user": torch.tensor([0])}, -1)
        for module in (graphshard.dgl, dgl)
    ]
    ours, theirs = (block.srcnodes["user"].data for block in blocks)
    assert set(ours) == set(theirs) == {"x", "_ID"}
    g = graph(([0, 1, 2], [3, 3, 3]))
    found = sampling.sample_etype_neighbors(g, [3], [0, 1, 3], torch.tensor([1, 1]))
    assert found.edata[EID].tolist() in ([0, 1], [0, 2])


@pytest.mark.parametrize("edge_dir", ["in", "out"])
def test_tags_of_one_side_decide_for_the_other(edge_dir: str) -> None:
    by_tag = "sort_csc_by_tag" if edge_dir == "in" else "sort_csr_by_tag"
    drawn = []
    for module in (graphshard.dgl, dgl):
        plain = module.heterograph({("u", "r", "v"): ([0, 1, 2, 2, 0], [0, 0, 0, 1, 1])})
        g = getattr(module, by_tag)(plain, torch.tensor([0, 1, 1] if edge_dir == "in" else [0, 1]))
        nodes = torch.tensor([0, 1])
        frontier = module.sampling.sample_neighbors_biased(
            g, nodes, 9, torch.tensor([0.0, 1.0]), edge_dir
        )
        drawn.append(sorted(zip(*(side.tolist() for side in frontier.edges()), strict=True)))
    assert drawn[0] == drawn[1] == ([(1, 0), (2, 0), (2, 1)] if edge_dir == "in" else [(0, 1)])
