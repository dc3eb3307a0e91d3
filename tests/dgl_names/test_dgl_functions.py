# SPDX-License-Identifier: Apache-2.0
"""Parts in memory, orders by tag and METIS, pairs of neighbours, random rows: against DGL.

No process.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from graph_oracle import dgl

import graphshard
import graphshard.dgl
from graphshard.dgl import backend, transforms
from graphshard.dgl.graphs._compaction import neighbor_matching
from graphshard.dgl.graphs._points import farthest_point_sampler
from graphshard.dgl.graphs._random import choice
from graphshard.errors import DGLError, DGLWarning


def random_pair(num_nodes: int = 60, num_edges: int = 150, seed: int = 0) -> tuple[Any, Any, Any]:
    """The same graph here and in DGL; and a part for each node."""
    rng = np.random.default_rng(seed)
    edges = tuple(torch.from_numpy(rng.integers(0, num_nodes, num_edges)) for _ in range(2))
    part = torch.from_numpy(rng.integers(0, 3, num_nodes))
    mine = graphshard.graph(edges, num_nodes=num_nodes)
    return mine, dgl.graph(edges, num_nodes=num_nodes), part


def rows(*columns: torch.Tensor) -> list[tuple[Any, ...]]:
    """Rows of several columns, in order."""
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def content(g: Any, field: str) -> tuple[list[Any], list[Any]]:
    """Nodes and edges of a part in the ids of a field, with what is stored about them."""
    nodes, src, dst = g.ndata[field], *g.edges()
    return (
        rows(nodes, g.ndata["inner_node"], g.ndata["part_id"]),
        rows(nodes[src], nodes[dst], g.edata[field], g.edata["inner_edge"]),
    )


@pytest.mark.parametrize("hops", [0, 1, 2, 3])
def test_parts_in_memory_are_dgls(hops: int) -> None:
    mine, theirs, part = random_pair()
    for reshuffle, field in ((False, "_ID"), (True, "orig_id")):
        ours, nodes, edges = transforms.partition_graph_with_halo(mine, part, hops, reshuffle)
        its = dgl.transforms.partition_graph_with_halo(theirs, part, hops, reshuffle)[0]
        assert list(ours) == list(its)
        for number in ours:
            assert content(ours[number], field) == content(its[number], field)
            if reshuffle:  # inner nodes and edges are consecutive, and stand first
                for ids, inner in (
                    (ours[number].ndata["_ID"], ours[number].ndata["inner_node"]),
                    (ours[number].edata["_ID"], ours[number].edata["inner_edge"]),
                ):
                    own = ids[: int(inner.sum())]
                    assert inner[: len(own)].all()
                    if hops or inner is ours[number].ndata["inner_node"]:
                        assert torch.equal(own, torch.arange(len(own)) + own[0])
        assert reshuffle == (nodes is not None and edges is not None)


def test_metis_divides_evenly_and_by_kind() -> None:
    g, _, _ = random_pair(300, 1500)
    kinds = torch.arange(300) % 2
    for weights in (
        {},
        {"balance_ntypes": kinds},
        {"balance_ntypes": kinds, "balance_edges": True},
    ):
        parts = transforms.metis_partition_assignment(g, 3, **weights)
        assert torch.bincount(parts, minlength=3).min() > 60
    made = transforms.metis_partition(g, 3, extra_cached_hops=1)
    assert sum(int(sub.ndata["inner_node"].sum()) for sub in made.values()) == 300
    new = graphshard.dgl.reorder_graph(g, "metis", permute_config={"k": 3})
    parts = transforms.metis_partition_assignment(g, 3)
    assert bool((parts[new.ndata["_ID"]].diff() >= 0).all())
    for call in (
        lambda: g.reorder_graph("metis", permute_config={"k": 3}),
        lambda: transforms.metis_partition_assignment(g.int(), 3),
        lambda: transforms.metis_partition_assignment(g, 3, mode="other"),
        lambda: transforms.partition_graph_with_halo(g, parts[1:], 1),
        lambda: transforms.reorder_nodes(g, torch.zeros(300)),
    ):
        with pytest.raises(DGLError):
            call()


def test_new_ids_are_dgls() -> None:
    mine, theirs, _ = random_pair()
    new_ids = torch.randperm(60)
    new, its = transforms.reorder_nodes(mine, new_ids), dgl.partition.reorder_nodes(theirs, new_ids)
    assert torch.equal(new.ndata["orig_id"], its.ndata["orig_id"])
    assert rows(*new.edges()) == rows(*its.edges())


@pytest.mark.parametrize("by", ["csr", "csc"])
@pytest.mark.parametrize("tag_type", ["node", "edge"])
def test_order_by_tag_is_dgls(by: str, tag_type: str) -> None:
    rng = np.random.default_rng(1)
    pairs = rng.permutation(20 * 30)[:200]
    edges = torch.from_numpy(pairs // 30), torch.from_numpy(pairs % 30)
    mine, theirs = (
        library.heterograph({("u", "r", "v"): edges}, {"u": 20, "v": 30})
        for library in (graphshard.dgl, dgl)
    )
    count = 200 if tag_type == "edge" else {"csr": 30, "csc": 20}[by]
    tag = torch.from_numpy(rng.integers(0, 4, count))
    name = f"sort_{by}_by_tag"
    new = getattr(graphshard.dgl, name)(mine, tag, tag_type=tag_type)
    its = getattr(dgl, name)(theirs, tag, tag_type=tag_type)
    node = "srcdata" if by == "csr" else "dstdata"
    assert torch.equal(getattr(new, node)["_TAG_OFFSET"], getattr(its, node)["_TAG_OFFSET"])
    if tag_type == "node":
        order = new.adj_external(transpose=by == "csc", scipy_fmt="csr").indices
        other = its.adj_external(transpose=by == "csc", scipy_fmt="csr").indices
        assert tag[order].tolist() == tag[other].tolist()
    old = mine.edges()
    assert all(torch.equal(x, y[new.edata["_ID"]]) for x, y in zip(new.edges(), old, strict=True))
    with pytest.raises(DGLError, match="there must be"):
        getattr(graphshard.dgl, name)(mine, tag[1:], tag_type=tag_type)


@pytest.mark.parametrize("weighed", [False, True])
def test_pairs_are_of_neighbours(weighed: bool) -> None:
    g = graphshard.dgl.to_bidirected(random_pair()[0])
    weights = torch.rand(g.num_edges()) if weighed else None
    pair = neighbor_matching(g, weights, relabel_idx=False)
    for low in torch.unique(pair):
        members = (pair == low).nonzero().squeeze(1).tolist()
        assert members[0] == low
        assert len(members) <= 2
        assert len(members) == 1 or g.has_edges_between(*members)
    alone = [node for node in range(60) if int((pair == pair[node]).sum()) == 1]
    assert not any(g.has_edges_between(a, b) for a in alone for b in alone if a != b)


def test_far_points_and_few_neighbours() -> None:
    x = torch.rand(2, 30, 3)
    theirs = importlib.import_module("dgl.geometry").farthest_point_sampler(x, 8, start_idx=0)
    assert torch.equal(farthest_point_sampler(x, 8, start_idx=0), theirs)
    with pytest.warns(DGLWarning, match="a set has 4 points"):
        assert graphshard.dgl.knn_graph(torch.rand(4, 2), 6).num_edges() == 16


def test_rows_drawn_at_random() -> None:
    assert sorted(choice(5, 5, replace=False).tolist()) == list(range(5))
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0])
    assert sorted(choice(torch.tensor([7, 8, 9, 6]), 2, False, weights).tolist()) == [6, 8]
    assert set(choice(4, (50, 2), prob=weights).unique().tolist()) <= {1, 3}
    with pytest.raises(DGLError, match="without replacement"):
        choice(4, 3, False, weights)


def test_types_share_their_features_and_compressed_arrays_their_ids() -> None:
    g = graphshard.dgl.heterograph({("u", "r", "u"): ([0], [1]), ("u", "s", "v"): ([0], [0])})
    sub = g.edge_type_subgraph(["r"])
    g.nodes["u"].data["h"] = torch.ones(2)
    sub.edges["r"].data["w"] = torch.ones(1)
    assert "h" in sub.ndata
    assert "w" in g.edges["r"].data
    indptr, indices = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2])
    for library in (graphshard.dgl, dgl):
        made = library.graph(("csr", (indptr, indices, [])))
        assert [len(made.adj_tensors(name)[2]) for name in ("csr", "csc")] == [0, 2]


def test_backend_is_dgls() -> None:
    x, ids = torch.rand(4, 3), torch.tensor([2, 0])
    for call in (
        lambda F: F.pad_packed_tensor(x, [1, 3], -1.0),
        lambda F: F.pack_padded_tensor(x.reshape(2, 2, 3), [1, 2]),
        lambda F: F.scatter_row(x, ids, torch.zeros(2, 3)),
        lambda F: F.sum(x, 1, keepdims=True),
        lambda F: F.argsort(x, 1, True),
        lambda F: F.unique(ids, return_inverse=True)[1],
        lambda F: F.take(x, ids, 0),
        lambda F: F.grad(gradient(F)),
    ):
        assert torch.equal(call(backend), call(dgl.backend))


def gradient(library: Any) -> torch.Tensor:
    x = library.attach_grad(torch.ones(3))
    with library.record_grad():
        library.backward(library.reduce_sum(x * 2), torch.tensor([1.0]))
    assert not library.is_no_grad(x)
    return x
