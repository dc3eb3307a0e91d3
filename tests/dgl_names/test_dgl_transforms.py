# SPDX-License-Identifier: Apache-2.0
"""Transforms and traversals beside DGL's, where `test_odd_graphs` says too little.

No process, and 3 gloo ranks. Where DGL leaves the order of edges open, graphs are compared as sets
of edges.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import networkx
import pytest
import torch
from graph_oracle import assert_same_graph, dgl, dgl_quiet, fn, plain_pair, rand, typed_pair

import graphshard
import graphshard.dgl
from graphshard.errors import DGLError
from graphshard.testing import run_ranks

Call = Callable[[Any, Any], Any]

PLAIN: dict[str, Call] = {
    "SVDPE": lambda lib, g: lib.SVDPE(2, random_flip=False)(g),
    **{
        f"SIGN {op}": lambda lib, g, op=op: lib.SIGNDiffusion(2, "h", diffuse_op=op)(
            lib.transforms.to_float(g)
        )
        for op in ("raw", "gcn", "ppr")
    },
}


@pytest.mark.parametrize("name", PLAIN)
def test_encodings_are_dgls(name: str) -> None:
    ours, theirs = plain_pair()
    with dgl_quiet():
        its = PLAIN[name](dgl, theirs)
    assert_same_graph(PLAIN[name](graphshard.dgl, ours), its, batch=False)


VALUES: dict[str, Call] = {
    "double_radius": lambda lib, g: lib.double_radius_node_labeling(g, 2, 0),
    "lap_pe": lambda lib, g: lib.lap_pe(
        lib.add_reverse_edges(lib.to_simple(lib.RemoveSelfLoop()(g))), 8, True, True
    )[1][:3],
    "bfs nodes": lambda lib, g: lib.bfs_nodes_generator(g, [2]),
    "bfs edges": lambda lib, g: lib.bfs_edges_generator(g, 2, reverse=True),
    "dfs edges": lambda lib, g: lib.dfs_edges_generator(g, [3, 4]),
    "dfs labels": lambda lib, g: lib.dfs_labeled_edges_generator(g, [3], False, True, True),
    "topological": lambda lib, g: lib.topological_nodes_generator(
        lib.remove_edges(g, [0, 1, 3, 5, 6, 8, 9])
    ),
}


def same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, equal_nan=True)
    elif isinstance(theirs, list | tuple):
        for mine, its in zip(ours, theirs, strict=True):
            same(mine, its)
    else:
        assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("name", VALUES)
def test_values_are_dgls(name: str) -> None:
    ours, theirs = plain_pair()
    with dgl_quiet():
        its = VALUES[name](dgl, theirs)
    same(VALUES[name](graphshard.dgl, ours), its)


def weighted_edges(g: Any, name: str) -> dict[tuple[int, int], float]:
    values = g.edata[name].tolist() if name else [0.0] * g.num_edges()
    ends = (end.tolist() for end in g.edges())
    return dict(zip(zip(*ends, strict=True), values, strict=True))


@pytest.mark.parametrize("name", ["product", "sum", "PPR", "HeatKernel", "GDC", "khop", "knn"])
def test_weighted_edges_are_dgls(name: str) -> None:
    calls: dict[str, Call] = {
        "product": lambda lib, g: lib.adj_product_graph(g, lib.reverse(g, copy_edata=True), "w"),
        "sum": lambda lib, g: lib.adj_sum_graph([g, lib.reverse(g, copy_edata=True)], "w"),
        "PPR": lambda lib, g: lib.PPR(avg_degree=2)(g),
        "HeatKernel": lambda lib, g: lib.HeatKernel(eps=0.2)(g),
        "GDC": lambda lib, g: lib.GDC([0.5, 0.3, 0.2], eps=0.1)(g),
        "khop": lambda lib, g: lib.to_simple(lib.khop_graph(g, 2), return_counts="w"),
        "knn": lambda lib, g: lib.knn_graph(g.ndata["h"], 3, exclude_self=True),
    }
    found = []
    for library in (graphshard.dgl, dgl):
        g = library.graph(([0, 1, 2, 3, 4, 2], [2, 3, 4, 0, 3, 0]))
        g.ndata["h"] = rand(5, 2).float()
        g.edata["w"] = rand(6).float()
        with dgl_quiet():
            found.append(weighted_edges(calls[name](library, g), "" if name == "knn" else "w"))
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_gradients_flow_to_the_weights_of_products_and_sums() -> None:
    g = graphshard.graph(([0, 1, 2], [1, 2, 0]))
    weights = rand(3).requires_grad_()
    g.edata["w"] = weights
    product = graphshard.dgl.adj_product_graph(g, g, "w")
    total = graphshard.dgl.adj_sum_graph([g, product], "w")
    total.edata["w"].sum().backward()
    dense = g.adj(eweight_name="w").to_dense().detach().requires_grad_()
    (dense + dense @ dense).sum().backward()
    torch.testing.assert_close(weights.grad, dense.grad[g.edges()])


def test_points_are_joined_as_dgls() -> None:
    x = rand(2, 6, 3).float()
    ours, theirs = graphshard.dgl.knn_graph(x, 3), dgl.knn_graph(x, 3)
    assert weighted_edges(ours, "").keys() == weighted_edges(theirs, "").keys()
    assert ours.batch_num_edges().tolist() == theirs.batch_num_edges().tolist() == [18, 18]
    flat, segs = x.reshape(-1, 3), [4, 8]
    ours = graphshard.dgl.segmented_knn_graph(flat, 2, segs)
    theirs = dgl.segmented_knn_graph(flat, 2, segs)
    assert weighted_edges(ours, "").keys() == weighted_edges(theirs, "").keys()
    ours, far = graphshard.dgl.radius_graph(flat, 1.5, get_distances=True)
    theirs, their_far = dgl.radius_graph(flat, 1.5, get_distances=True)
    assert_same_graph(ours, theirs)
    torch.testing.assert_close(far, their_far)


@pytest.mark.parametrize("edges", ["src", "dst"])
@pytest.mark.parametrize("nodes", [None, "rcmk"])
def test_another_order_is_the_same_graph(nodes: str | None, edges: str) -> None:
    g, theirs = plain_pair()
    new = graphshard.dgl.reorder_graph(g, nodes, edges)
    ends = new.edges()[0 if edges == "src" else 1]
    assert torch.equal(ends, ends.sort().values)
    for mine, its in zip(new.edges(), theirs.find_edges(new.edata["_ID"]), strict=True):
        assert torch.equal(new.ndata["_ID"][mine], its)
    assert torch.equal(new.ndata["h"], theirs.ndata["h"][new.ndata["_ID"]])
    with pytest.raises(DGLError, match="must hold the number of parts"):
        graphshard.dgl.reorder_graph(g, "metis")


def test_random_transforms_keep_what_they_promise() -> None:
    torch.manual_seed(0)
    g, _ = typed_pair()
    dropped = graphshard.dgl.DropEdge(0.5)(graphshard.dgl.DropNode(0.5)(g))
    assert dropped.num_nodes() < g.num_nodes()
    assert dropped.num_edges() < g.num_edges()
    more = graphshard.dgl.AddEdge(1.0)(g)
    assert [more.num_edges(e) for e in g.etypes] == [2 * g.num_edges(e) for e in g.etypes]
    rows = graphshard.dgl.NodeShuffle()(g).nodes["user"].data["h"]
    assert torch.equal(rows.sort(0).values, g.nodes["user"].data["h"].sort(0).values)
    with pytest.raises(DGLError, match="p must be a probability"):
        graphshard.dgl.DropEdge(2.0)
    made = graphshard.dgl.rand_graph(7, 40)
    assert (made.num_edges(), made.is_multigraph) == (40, False)
    made = graphshard.dgl.rand_bipartite("u", "r", "v", 50, 60, 30)
    assert (made.num_edges(), made.is_multigraph, made.ntypes) == (30, False, ["u", "v"])
    with pytest.raises(DGLError, match="there are 49 pairs"):
        graphshard.dgl.rand_graph(7, 50)


def test_messages_pass_along_orders_as_dgls() -> None:
    found = []
    for library in (graphshard.dgl, dgl):
        g = library.graph(([1, 2, 3, 4, 0], [0, 0, 2, 2, 5]))
        functions = fn if library is graphshard.dgl else dgl.function
        pair = functions.copy_u("x", "m"), functions.sum("m", "x")
        for call in (
            lambda lib, g, pair: lib.prop_nodes_topo(g, *pair),
            lambda lib, g, pair: lib.prop_nodes_bfs(g, 3, *pair),
            lambda lib, g, pair: lib.prop_edges_dfs(g, 3, *pair, has_reverse_edge=True),
            lambda lib, g, pair: g.prop_edges([([1, 2], [0, 0]), [4]], *pair),
            lambda lib, g, pair: g.prop_nodes([[2], [0]], *pair),
        ):
            g.ndata["x"] = torch.arange(6.0) + 1
            with dgl_quiet():
                call(library, g, pair)
            found.append((library is graphshard.dgl, g.ndata["x"]))
    for (_, mine), (_, its) in zip(found[:5], found[5:], strict=True):
        assert torch.equal(mine, its)
    with pytest.raises(DGLError, match="without cycles"):
        graphshard.dgl.topological_nodes_generator(graphshard.graph(([0, 1], [1, 0])))


def test_bipartite_graphs_and_typed_networkx_graphs() -> None:
    nx_graph = networkx.DiGraph()
    nx_graph.add_nodes_from([1, 3], bipartite=0, x=[1.0, 2.0])
    nx_graph.add_nodes_from([2, 4, 5], bipartite=1)
    nx_graph.add_edge(1, 4, w=0.5, eid=1)
    nx_graph.add_edge(3, 5, w=0.25, eid=0)
    options = {"u_attrs": ["x"], "e_attrs": ["w"], "edge_id_attr_name": "eid"}
    graphs = [
        library.bipartite_from_networkx(nx_graph, "u", "r", "v", **options)
        for library in (graphshard.dgl, dgl)
    ]
    for rows, name in ((graphs[0].nodes["u"].data, "x"), (graphs[0].edata, "w")):
        assert rows[name].dtype == torch.float64  # Python's reals, which DGL rounds to float32
        rows[name] = rows[name].float()
    assert_same_graph(*graphs)
    matrix = graphs[0].adj_external(scipy_fmt="coo") * 0.5
    graphs = [
        library.bipartite_from_scipy(matrix, "u", "r", "v", "w")
        for library in (graphshard.dgl, dgl)
    ]
    assert_same_graph(*graphs)
    blocks = [
        lib.create_block({("a", "r", "b"): ([0, 1], [1, 0])}) for lib in (graphshard.dgl, dgl)
    ]
    for block in blocks:
        block.srcdata["x"] = torch.ones(2)
    assert_same_graph(graphshard.dgl.block_to_graph(blocks[0]), dgl.block_to_graph(blocks[1]))
    g, _ = typed_pair()
    nodes = dict(g.to_networkx(["h"], ["w"]).nodes(data=True))
    assert [nodes[i]["label"] for i in range(9)] == ["game"] * 4 + ["user"] * 5
    assert torch.equal(nodes[5]["h"], g.nodes["user"].data["h"][1])
    edges = list(g.to_networkx().edges(data=True))
    assert {(u, v) for u, v, data in edges if data["triples"][1] == "liked"} == {
        (0, 7),
        (2, 4),
        (2, 5),
    }


def weighted(library: Any) -> Any:
    """Five nodes, one without in-edges, a self loop, and two parallel edges."""
    g = library.graph(([0, 1, 2, 3, 4, 2, 2, 3, 3], [2, 3, 4, 3, 3, 1, 4, 1, 4]))
    g.ndata["feat"] = rand(5, 3).float() - 0.5
    g.ndata["h"] = torch.arange(15.0).reshape(5, 3) / 10 - 0.2
    g.edata["w"] = rand(9).float() + 0.1
    return g


BOTH = (False, True)
TRANSFORMS: dict[str, Call] = {
    **{
        f"AddSelfLoop {twice} {new} {names} {fill}": lambda lib, g, a=(twice, new, names, fill): (
            lib.AddSelfLoop(*a)(g)
        )
        for twice in BOTH
        for new in BOTH
        for names in (None, ["w"])
        for fill in (2.0, "sum")
    },
    **{
        f"AddReverse {copied} {new}": lambda lib, g, a=(copied, new): lib.AddReverse(*a)(g)
        for copied in BOTH
        for new in BOTH
    },
    **{
        f"SIGN {op} {name}": lambda lib, g, a=(op, name): lib.SIGNDiffusion(
            3, eweight_name=a[1], diffuse_op=a[0]
        )(g)
        for op in ("raw", "rw", "gcn", "ppr")
        for name in (None, "w")
    },
    "AddSelfLoop": lambda lib, g: lib.AddSelfLoop()(g),
    "AddReverse": lambda lib, g: lib.AddReverse()(g),
    "AddMetaPaths": lambda lib, g: lib.AddMetaPaths({"both": [("_N", "_E", "_N")] * 2})(g),
    "SIGN alpha": lambda lib, g: lib.SIGNDiffusion(2, "h", "o", "w", "ppr", 0.7)(g),
    "GCNNorm": lambda lib, g: lib.GCNNorm()(g),
    "GCNNorm new": lambda lib, g: lib.GCNNorm("norm")(g),
    "normalized": lambda lib, g: lib.RowFeatNormalizer(False, ["h", "feat"])(g),
    "normalized as it comes": lambda lib, g: lib.RowFeatNormalizer(node_feat_names=["h", "feat"])(
        g
    ),
    "normalized from the least": lambda lib, g: lib.RowFeatNormalizer(True, ["h", "feat"])(g),
    "RandomWalkPE": lambda lib, g: lib.RandomWalkPE(4, "pe", "w")(g),
    "RandomWalkPE plain": lambda lib, g: lib.RandomWalkPE(3)(g),
    "KHopGraph": lambda lib, g: lib.KHopGraph(2)(g),
    "LineGraph": lambda lib, g: lib.LineGraph(False)(g),
    "LineGraph back": lambda lib, g: lib.LineGraph()(g),
    "ToSimple": lambda lib, g: lib.ToSimple("n", "sum")(g),
    "ToLevi": lambda lib, g: lib.ToLevi()(g),
    "FeatMask nothing": lambda lib, g: lib.FeatMask(0.0, ["h"], ["w"])(g),
    "DropEdge nothing": lambda lib, g: lib.DropEdge(0.0)(g),
    "DropNode nothing": lambda lib, g: lib.DropNode(0.0)(g),
    "DropEdge all": lambda lib, g: lib.DropEdge(1.0)(g),
    "AddEdge nothing": lambda lib, g: lib.AddEdge(0.1)(g),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_dgls(name: str) -> None:
    with dgl_quiet():
        its = TRANSFORMS[name](dgl, weighted(dgl))
    mine = TRANSFORMS[name](graphshard.dgl, weighted(graphshard.dgl))
    assert mine.canonical_etypes == its.canonical_etypes
    for ntype in its.ntypes:
        assert mine.num_nodes(ntype) == its.num_nodes(ntype)
        assert set(mine.nodes[ntype].data) == set(its.nodes[ntype].data)
        for field, rows in its.nodes[ntype].data.items():
            torch.testing.assert_close(mine.nodes[ntype].data[field], rows, equal_nan=True)
    for etype in its.canonical_etypes:
        rows = []
        for g in (mine, its):
            fields = g.edges[etype].data
            columns = [side.tolist() for side in g.edges(etype=etype)]
            columns += [fields[field].double().tolist() for field in sorted(fields)]
            rows.append((sorted(fields), sorted(zip(*columns, strict=True))))
        assert rows[0][0] == rows[1][0]
        assert len(rows[0][1]) == len(rows[1][1])
        for ours, theirs in zip(rows[0][1], rows[1][1], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("degree", [1, 3, 5, 6])
@pytest.mark.parametrize("name", ["PPR", "HeatKernel", "GDC", "powers"])
def test_how_many_edges_diffusion_leaves_is_dgls(name: str, degree: int) -> None:
    calls: dict[str, Call] = {
        "PPR": lambda lib, g: lib.PPR(avg_degree=degree)(g),
        "HeatKernel": lambda lib, g: lib.HeatKernel(avg_degree=degree)(g),
        "GDC": lambda lib, g: lib.GDC([0.5, 0.3, 0.2], avg_degree=degree)(g),
        "powers": lambda lib, g: lib.GDC([0.5, 0.25], "none", 0.25 * degree)(g),
    }
    edges = []
    for library in (graphshard.dgl, dgl):
        with dgl_quiet():
            g = calls[name](library, weighted(library))
        edges.append(weighted_edges(g, "none" if name == "powers" else "w"))
    assert edges[0] == pytest.approx(edges[1], abs=1e-5)


def test_metapaths_are_added_with_or_without_the_edges_that_there_were() -> None:
    for keep in (False, True):
        graphs = []
        for library in (graphshard.dgl, dgl):
            g = library.heterograph(
                {("a", "r", "b"): ([0, 1], [1, 0]), ("b", "s", "a"): ([0], [2])}
            )
            g.edges["r"].data["w"] = torch.tensor([1.0, 2.0])
            paths = {"both": [("a", "r", "b"), ("b", "s", "a")]}
            graphs.append(library.AddMetaPaths(paths, keep)(g))
        assert_same_graph(*graphs)


def test_a_mask_of_features_is_of_their_last_dimension() -> None:
    torch.manual_seed(0)
    g = graphshard.dgl.rand_graph(20, 40)
    g.ndata["h"] = torch.ones(20, 3, 200)
    rows = graphshard.dgl.FeatMask(0.5, ["h"])(g).ndata["h"]
    assert rows.shape == (20, 3, 200)
    assert bool((rows == rows[0, 0]).all())
    assert 60 < int(rows[0, 0].sum()) < 140


def test_eigenvalues_come_where_they_are_asked_for() -> None:
    ours, theirs = plain_pair()
    with dgl_quiet():
        its = dgl.lap_pe(dgl.add_reverse_edges(theirs), 3)
    mine = graphshard.dgl.lap_pe(graphshard.dgl.add_reverse_edges(ours), 3)
    assert isinstance(its, torch.Tensor)
    assert isinstance(mine, torch.Tensor)
    assert mine.shape == its.shape


def test_random_transforms_draw_with_the_probability_that_is_given() -> None:
    torch.manual_seed(0)
    g = graphshard.dgl.rand_graph(2000, 8000)
    g.ndata["h"], g.edata["w"] = torch.ones(2000, 1000), torch.ones(8000, 1000)
    for share in (0.1, 0.8):
        assert graphshard.dgl.DropEdge(share)(g).num_edges() / 8000 == pytest.approx(
            1 - share, abs=0.03
        )
        assert graphshard.dgl.DropNode(share)(g).num_nodes() / 2000 == pytest.approx(
            1 - share, abs=0.05
        )
        masked = graphshard.dgl.FeatMask(share, ["h"], ["w"])(g.clone())
        for rows in (masked.ndata["h"], masked.edata["w"]):
            assert float(rows.mean()) == pytest.approx(1 - share, abs=0.06)
            assert bool((rows == rows[0]).all())
    assert g.num_edges() == 8000
    added = graphshard.dgl.AddEdge()(g)
    assert added.num_edges() == 9600
    assert bool((added.edata["w"][8000:] == 0).all())
    shuffled = graphshard.dgl.NodeShuffle()(weighted(graphshard.dgl))
    before = weighted(graphshard.dgl)
    order = (shuffled.ndata["h"][:, None] == before.ndata["h"][None]).all(-1).int().argmax(1)
    assert torch.equal(shuffled.ndata["feat"], before.ndata["feat"][order])


def on_ranks(rank: int, world_size: int, folder: str) -> list[str]:
    part = graphshard.load_dgl_partition_data(f"{folder}/g.json", rank, "cpu")
    g = graphshard.construct_full_graph(part)
    own = g.original_ids["_N"]
    wrong = []
    for name, rows in ROWS.items():
        g.ndata["x"] = rows[own]
        graphshard.dgl.RowFeatNormalizer(subtract_min=True, node_feat_names=["x"])(g)
        expected = (rows - rows.min()) / (rows - rows.min()).sum(-1, keepdim=True).clamp(min=1.0)
        if not torch.equal(g.ndata["x"], expected[own]):
            wrong.append(f"rows of {name}")
    torch.manual_seed(rank)
    masks = torch.zeros(world_size, 64)
    for _ in range(2):  # a rank without nodes draws, too
        g.ndata["x"] = torch.ones(len(own), 64)
        graphshard.dgl.FeatMask(0.5, ["x"])(g)
        if len(own):
            masks[rank] += g.ndata["x"][0]
    masks = graphshard.comm.all_reduce(masks)
    if not torch.equal(masks[0], masks[1]) or not 0 < int((masks[0] == 2).sum()) < 64:
        wrong.append("columns that are masked")
    with pytest.raises(NotImplementedError, match="NodeShuffle does not take a GraphShardManager"):
        graphshard.dgl.NodeShuffle()(g)
    dgl = graphshard.dgl
    for add in (dgl.add_self_loop, dgl.AddSelfLoop()):
        with_loops = add(g)
        if with_loops.in_degrees().tolist() != [2] * len(own):
            wrong.append("self loops")
        if dgl.remove_self_loop(with_loops).num_edges() != g.num_edges():
            wrong.append("self loops that go")
    for call in (dgl.reverse, dgl.to_simple, dgl.DropEdge()):
        with pytest.raises(AttributeError, match="GraphShardManager does not offer .*; change, "):
            call(g)
    draws = dgl.sampling.sample_neighbors, dgl.sampling.node2vec_random_walk
    for draw, numbers in zip(draws, ([2], [1, 1, 2]), strict=True):
        with pytest.raises(TypeError, match="take a whole Graph"):
            draw(g, g.nodes()[:1], *numbers)
    assert not hasattr(g, "no_such_name")
    assert not hasattr(g, "remove_edges")
    return wrong


ROWS = {
    "reals": torch.linspace(-3, 5, 36, dtype=torch.float64).view(12, 3),
    "whole numbers": torch.arange(36).view(12, 3) - 7,
}


def test_transforms_of_a_sharded_graph_are_those_of_the_whole_or_refused() -> None:
    nodes = torch.arange(12)
    whole = graphshard.graph((nodes, nodes.roll(1)))
    with tempfile.TemporaryDirectory() as folder:
        parts = (nodes >= 9).long()  # the third rank has no nodes
        graphshard.partition.partition_graph(whole, "g", 3, folder, part_method=parts, quiet=True)
        assert run_ranks(on_ranks, 3, folder, timeout=60) == [[], [], []]
