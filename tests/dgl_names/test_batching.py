# SPDX-License-Identifier: Apache-2.0
"""Batches of graphs, values per graph and pooling layers, against DGL. No process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_oracle import assert_same_graph, dgl, rand, typed_pair

import graphshard
import graphshard.dgl
import graphshard.dgl as gs
from graphshard.dgl.nn import glob
from graphshard.errors import DGLError

EDGES: list[tuple[list[int], list[int], int]] = [
    ([0, 1, 1, 2], [1, 2, 2, 2], 3),
    ([], [], 2),
    ([0, 1], [1, 0], 4),
    ([], [], 0),
    ([0], [0], 1),
]


def plain_batches(edges: list[Any] = EDGES) -> tuple[Any, Any]:
    made = []
    for library in (graphshard.dgl, dgl):
        graphs = []
        for seed, (src, dst, count) in enumerate(edges):
            g = library.graph((torch.tensor(src).long(), torch.tensor(dst).long()), num_nodes=count)
            g.ndata["h"] = rand(count, 3, seed=seed)
            g.ndata["w"] = rand(count, 1, seed=seed + 5)
            g.edata["h"] = rand(len(src), 2, seed=seed)
            g.edata["w"] = rand(len(src), 1, seed=seed)
            graphs.append(g)
        made.append(library.batch(graphs))
    return made[0], made[1]


def typed_batches() -> tuple[Any, Any]:
    pairs = [typed_pair(), typed_pair(), typed_pair()]
    for g in pairs[1]:
        g.add_edges([4, 4], [3, 6], etype="plays")
    return gs.batch([ours for ours, _ in pairs]), dgl.batch([theirs for _, theirs in pairs])


def test_batches_and_their_graphs_are_dgls() -> None:
    for ours, theirs in (plain_batches(), typed_batches()):
        assert_same_graph(ours, theirs)
        assert ours.batch_size == theirs.batch_size
        for mine, its in zip(gs.unbatch(ours), dgl.unbatch(theirs), strict=True):
            assert_same_graph(mine, its)
        for store in (False, True):
            assert_same_graph(gs.slice_batch(ours, 1, store), dgl.slice_batch(theirs, 1, store))
        again = gs.batch([ours, gs.slice_batch(ours, 0)])
        assert_same_graph(again, dgl.batch([theirs, dgl.slice_batch(theirs, 0)]))
        assert_same_graph(again.int().long(), dgl.batch([theirs, dgl.slice_batch(theirs, 0)]))


def test_what_a_change_does_to_the_numbers_per_graph() -> None:
    for ours, theirs in (plain_batches(), typed_batches()):
        for change in (
            lambda g: g.remove_nodes([0, 2, 4], ntype=g.ntypes[-1]),
            lambda g: g.remove_edges([1], etype=g.canonical_etypes[0]),
            lambda g: g.add_nodes(1, ntype=g.ntypes[0]),
        ):
            mine, its = ours.clone(), theirs.clone()
            change(mine)
            change(its)
            assert_same_graph(mine, its)
    ours, theirs = plain_batches()
    assert_same_graph(gs.remove_self_loop(ours), dgl.remove_self_loop(theirs))
    assert gs.add_self_loop(ours).batch_size == dgl.add_self_loop(theirs).batch_size == 1


def test_numbers_per_graph_can_be_given() -> None:
    ours, theirs = plain_batches()
    for library, g in ((gs, ours), (dgl, theirs)):
        halves = library.unbatch(g, torch.tensor([5, 5]), torch.tensor([4, 3]))
        assert [(half.num_nodes(), half.num_edges()) for half in halves] == [(5, 4), (5, 3)]
        g.set_batch_num_nodes(torch.tensor([5, 5]))
        g.set_batch_num_edges({g.canonical_etypes[0]: torch.tensor([4, 3])})
    assert_same_graph(ours, theirs)
    with pytest.raises(DGLError, match="must be a dictionary from type to tensor"):
        typed_batches()[0].set_batch_num_nodes(torch.tensor([1]))
    with pytest.raises(DGLError, match="joins two graphs of the batch"):
        gs.unbatch(ours, torch.tensor([2, 8]), torch.tensor([4, 3]))
    with pytest.raises(DGLError, match="must add up to 10"):
        gs.unbatch(ours, torch.tensor([2, 7]), torch.tensor([4, 3]))


def test_graphs_that_do_not_fit_together_are_refused() -> None:
    one, other = gs.graph(([0], [1])), gs.graph(([0], [1]))
    one.ndata["x"] = torch.ones(2, 3)
    with pytest.raises(DGLError, match="must have the same features on nodes"):
        gs.batch([one, other])
    assert "x" not in gs.batch([one, other], ndata=None).ndata
    other.ndata["x"] = torch.ones(2, 4)
    with pytest.raises(DGLError, match="one row shape and dtype in all graphs"):
        gs.batch([one, other])
    with pytest.raises(DGLError, match="same idtype"):
        gs.batch([one, gs.graph(([0], [1])).int()])
    with pytest.raises(DGLError, match="at least one graph"):
        gs.batch([])
    with pytest.raises(DGLError, match="batch takes graphs"):
        gs.batch([one, gs.create_block(([0], [0]))])


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("weight", [None, "w"])
def test_readout_is_dgls(op: str, weight: str | None) -> None:
    ours, theirs = plain_batches()
    for what in ("nodes", "edges"):
        results = []
        for library, g in ((graphshard.dgl, ours), (dgl, theirs)):
            data = g.ndata if what == "nodes" else g.edata
            data["h"] = data["h"].detach().requires_grad_()
            value = getattr(library, f"{op}_{what}")(g, "h", weight)
            assert torch.equal(value, getattr(library, f"readout_{what}")(g, "h", weight, op=op))
            value.square().sum().backward()
            results.append((value, data["h"].grad))
        for mine, its in zip(*results, strict=True):
            torch.testing.assert_close(mine, its)


def test_readout_of_a_type_is_dgls() -> None:
    ours, theirs = typed_batches()
    mine = gs.mean_nodes(ours, "h", ntype="user")
    torch.testing.assert_close(mine, dgl.mean_nodes(theirs, "h", ntype="user"))
    mine = gs.max_edges(ours, "w", etype="plays")
    torch.testing.assert_close(mine, dgl.max_edges(theirs, "w", etype="plays"))
    rows = rand(3, 2)
    mine = gs.broadcast_nodes(ours, rows, ntype="game")
    torch.testing.assert_close(mine, dgl.broadcast_nodes(theirs, rows, ntype="game"))
    mine = gs.softmax_edges(ours, "w", etype="follows")
    torch.testing.assert_close(mine, dgl.softmax_edges(theirs, "w", etype="follows"))
    with pytest.raises(DGLError, match="one row for each of the 3 graphs"):
        gs.broadcast_nodes(ours, rand(2, 2), ntype="game")
    with pytest.raises(DGLError, match="op must be one of"):
        gs.readout_nodes(ours, "h", op="prod", ntype="game")


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("sortby", [None, -1, 0])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_topk_is_dgls(descending: bool, sortby: int | None, k: int) -> None:
    ours, theirs = plain_batches([e for e in EDGES if e[0]])
    for what in ("nodes", "edges"):
        asked = {"descending": descending, "sortby": sortby}
        mine, places = getattr(gs, f"topk_{what}")(ours, "h", k, **asked)
        its, their_places = getattr(dgl, f"topk_{what}")(theirs, "h", k, **asked)
        torch.testing.assert_close(mine, its)
        counts = getattr(ours, f"batch_num_{what}")()
        for row, count in enumerate(counts.tolist()):  # the others have no meaning
            assert torch.equal(places[row, :count], their_places[row, :count])


def layers() -> list[Any]:
    linear = torch.nn.Linear(3, 1)
    return [
        ("SumPooling", lambda m: m.SumPooling()),
        ("AvgPooling", lambda m: m.AvgPooling()),
        ("MaxPooling", lambda m: m.MaxPooling()),
        ("SortPooling", lambda m: m.SortPooling(2)),
        ("GlobalAttentionPooling", lambda m: m.GlobalAttentionPooling(linear)),
        ("Set2Set", lambda m: m.Set2Set(3, 2, 1)),
        ("WeightAndSum", lambda m: m.WeightAndSum(3)),
    ]


@pytest.mark.parametrize("make", [make for _, make in layers()], ids=[n for n, _ in layers()])
def test_pooling_layers_are_dgls(make: Any) -> None:
    ours, theirs = plain_batches([e for e in EDGES if e[2]])
    mine, its = make(glob), make(dgl.nn.pytorch.glob)
    mine.load_state_dict(its.state_dict())
    rows = ours.ndata["h"].float()
    torch.testing.assert_close(mine(ours, rows), its(theirs, rows))


def test_merge_is_dgls() -> None:
    pairs = [typed_pair(), typed_pair()]
    for g in pairs[1]:
        g.add_nodes(2, ntype="game")
        g.nodes["user"].data["h"] = rand(5, 2, seed=9)
    ours, theirs = gs.merge([a for a, _ in pairs]), dgl.merge([b for _, b in pairs])
    assert_same_graph(ours, theirs)
