# SPDX-License-Identifier: Apache-2.0
"""Graphs that change in place, against DGL: the same calls on both. No process."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_oracle import assert_same_graph, dgl, dgl_quiet, gs, plain_pair, rand, typed_pair

import graphshard
import graphshard.dgl
from graphshard.errors import DGLError

functions = importlib.import_module("graphshard.graph")

Change = Callable[[Any], Any]

TYPED: dict[str, Change] = {
    "nodes": lambda g: g.add_nodes(3, {"h": rand(3, 2)}, ntype="game"),
    "edges": lambda g: g.add_edges([6, 0], [1, 5], {"w": rand(2, 2)}, etype="plays"),
    "edges by triple": lambda g: g.add_edges(0, 0, etype=("game", "liked", "user")),
    "take edges": lambda g: g.remove_edges([1, 2], etype="follows"),
    "take edges, store ids": lambda g: g.remove_edges([1], etype="rates", store_ids=True),
    "take nodes": lambda g: g.remove_nodes([0, 3], ntype="user"),
    "take nodes, store ids": lambda g: g.remove_nodes([1], ntype="game", store_ids=True),
}


def both(change: Change, ours: Any, theirs: Any) -> None:
    assert change(ours) is None
    change(theirs)
    assert_same_graph(ours, theirs)


@pytest.mark.parametrize("change", TYPED)
def test_typed_graphs_change_as_dgls(change: str) -> None:
    both(TYPED[change], *typed_pair())


def test_a_graph_made_of_nothing_changes_as_dgls() -> None:
    graphs = graphshard.dgl.DGLGraph(), dgl.graph([])
    for g in graphs:
        g.add_nodes(4)
        g.add_edges([0, 1], [1, 2])
        g.ndata["x"] = torch.arange(4)
        g.add_edges(torch.tensor([3]), torch.tensor([3]), {"w": torch.ones(1)})
        g.remove_nodes(range(1, 2))
        g.remove_edges(0)
    assert_same_graph(*graphs)


def test_many_changes_at_random_as_dgls(run_all: bool) -> None:
    for seed in range(200 if run_all else 5):
        generator = torch.Generator().manual_seed(seed)
        ours, theirs = typed_pair()

        def draw(stop: int, size: int, generator: torch.Generator = generator) -> list[int]:
            return torch.randint(max(stop, 1), (size,), generator=generator).tolist()

        for _ in range(12):
            etype = ours.canonical_etypes[draw(4, 1)[0]]
            ntype = etype[0]
            kind = draw(4, 1)[0]
            if kind == 0:
                calls = ("add_nodes", (draw(3, 1)[0],), {"ntype": ntype})
            elif kind == 1:
                calls = ("add_edges", (draw(7, 3), draw(7, 3)), {"etype": etype})
            elif kind == 2 and ours.num_nodes(ntype):
                calls = ("remove_nodes", (draw(ours.num_nodes(ntype), 1),), {"ntype": ntype})
            elif ours.num_edges(etype):
                calls = ("remove_edges", (draw(ours.num_edges(etype), 2),), {"etype": etype})
            else:
                continue
            for g in (ours, theirs):
                getattr(g, calls[0])(*calls[1], **calls[2])
        assert_same_graph(ours, theirs)


def test_functions_leave_their_graph_as_it_is() -> None:
    g, theirs = plain_pair()
    made = [
        graphshard.dgl.add_nodes(g, 1),
        graphshard.dgl.add_edges(g, 0, 0),
        graphshard.dgl.remove_nodes(g, [0]),
        graphshard.dgl.remove_edges(g, {g.canonical_etypes[0]: [0]}),
    ]
    assert_same_graph(g, theirs)
    assert [(new.num_nodes(), new.num_edges()) for new in made] == [
        (8, 10),
        (7, 11),
        (6, 5),
        (7, 9),
    ]


def test_copies_and_scopes_do_not_change_with_a_graph() -> None:
    g, theirs = plain_pair()
    view, copy = g.local_var(), g.clone()
    with g.local_scope():
        g.add_edges(0, 0)
        assert (g.num_edges(), g.in_degrees(0)) == (11, 4)
    assert_same_graph(g, theirs)
    g.add_nodes(1)
    assert_same_graph(view, theirs)
    assert_same_graph(copy, theirs)


def test_initializers_make_the_rows_that_are_not_given() -> None:
    def ones(shape: Any, dtype: Any, ctx: Any, ids: slice) -> torch.Tensor:
        return torch.full(shape, float(ids.start), dtype=dtype, device=ctx)

    graphs = plain_pair()
    for g in graphs:
        g.set_n_initializer(ones, "h")
        g.set_e_initializer(graphshard.dgl.init.zero_initializer)
        g.set_e_initializer(ones, field="w")
        g.add_nodes(2)
        g.add_edges([0], [8], {"s": torch.ones(1, 1, dtype=torch.float64)})
        g.nodes[[1]].data["h2"] = torch.ones(1, 2)
    assert_same_graph(*graphs)
    typed = typed_pair()
    for g in typed:
        g.set_n_initializer(ones, ntype="user")
        g.add_nodes(1, ntype="user")
        g.add_nodes(1, ntype="game")
    assert_same_graph(*typed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.add_nodes(-1), "num must not be negative"),
        (lambda g: g.add_edges([-1], [0]), "ids in u must not be negative"),
        (lambda g: g.add_edges([0, 1], [0, 1, 2]), "equal lengths"),
        (lambda g: g.remove_edges([10]), r"an edge id must be in \[0, 10\)"),
        (lambda g: g.remove_nodes([7]), r"a node id must be in \[0, 7\)"),
        (lambda g: g.add_nodes(1, {"h": torch.ones(1, 4)}), "new rows of field 'h' must match"),
        (lambda g: g.add_nodes(1, {"h": torch.ones(2, 3)}), "must have one row for each of the"),
        (lambda g: g.add_edges(0.5, 1), "must be integers"),
        (lambda g: g.set_n_initializer(3), "must be a function of shape"),
    ],
)
def test_a_wrong_change_is_refused_and_loses_nothing(change: Change, message: str) -> None:
    g, theirs = plain_pair()
    with pytest.raises(DGLError, match=message):
        change(g)
    assert_same_graph(g, theirs)


def test_questions_that_functions_answer() -> None:
    ours, theirs = typed_pair()
    for g in (ours, theirs):
        g.nodes["user"].data["x"] = torch.arange(5)
        g.edges["follows"].data["x"] = torch.arange(5)
    for filtered in (
        lambda g: g.filter_nodes(lambda n: n.data["x"] > 1, ntype="user"),
        lambda g: g.filter_nodes(lambda n: n.data["x"] > 1, torch.tensor([4, 0, 2]), "user"),
        lambda g: g.filter_edges(lambda e: e.src["x"] >= e.data["x"], etype="follows"),
        lambda g: g.filter_edges(lambda e: e.data["x"] > 1, torch.tensor([4, 0]), "follows"),
    ):
        assert torch.equal(filtered(ours), filtered(theirs))
    assert list(ours.metagraph().edges(keys=True)) == list(theirs.metagraph().edges(keys=True))
    assert repr(ours) == repr(theirs)
    for etype in ours.canonical_etypes:
        for transpose in (False, True):
            mine = ours.adj_external(transpose, etype=etype).to_dense()
            with dgl_quiet():
                its = theirs.adj_external(transpose, etype=etype).to_dense()
            assert torch.equal(mine, its)
            mine = ours.adj_external(transpose, scipy_fmt="csr", etype=etype).toarray()
            its = theirs.adj_external(transpose, scipy_fmt="csr", etype=etype).toarray()
            assert (mine == its).all()
        for typestr in ("in", "out") + (("both",) if etype[0] == etype[2] else ()):
            mine = ours.inc(typestr, etype=etype).to_dense()
            with dgl_quiet():
                its = theirs.inc(typestr, etype=etype).to_dense()
            assert torch.equal(mine, its)
    with pytest.raises(ValueError, match="needs a relation from a node type to itself"):
        ours.inc("both", etype="plays")
    weighted = ours.adj("follows", "w").to_dense()
    assert weighted.shape == (5, 5, 2)
    assert torch.equal(weighted[0, 1], ours.edges["follows"].data["w"][0])


@pytest.mark.parametrize(
    "name",
    """reverse add_self_loop remove_self_loop to_simple subgraph edge_subgraph in_subgraph
    out_subgraph to_networkx to_dgl add_nodes add_edges remove_nodes remove_edges""".split(),
)
def test_methods_take_what_the_functions_take(name: str) -> None:
    function = getattr(functions, "node_subgraph" if name == "subgraph" else name)
    ours, its = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()][1:]
        for f in (getattr(gs.Graph, name), function)
    )
    assert ours == its


def test_methods_are_the_functions() -> None:
    g, _ = plain_pair()
    assert_same_graph(g.reverse(), functions.reverse(g))
    assert_same_graph(g.add_self_loop(), functions.add_self_loop(g))
    with pytest.raises(DGLError, match="takes a graph in which every node type is one set"):
        graphshard.create_block(([0], [0])).add_nodes(1)
