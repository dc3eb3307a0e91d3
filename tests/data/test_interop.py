# SPDX-License-Identifier: Apache-2.0
"""Graphs of PyG and DGL, there and back, with the real libraries. No process."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch

from graphshard.data import from_dgl, from_pyg, random_typed_graph, to_dgl, to_pyg
from graphshard.graph import Block, Graph, graph, heterograph, reverse

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torch_geometric.data as pyg
    except ImportError:
        pyg = None
    try:
        import dgl
    except ImportError:
        dgl = None

needs_pyg = pytest.mark.skipif(pyg is None, reason="torch_geometric is not installed")
needs_dgl = pytest.mark.skipif(dgl is None, reason="DGL has no release for this Python")


def plain() -> Graph:
    g = graph(([3, 0, 0, 2], [1, 1, 1, 2]), num_nodes=6)
    g.ndata["feat"] = torch.rand(6, 3)
    g.ndata["label"] = torch.arange(6)
    g.ndata["train_mask"] = torch.arange(6) < 2
    g.edata["edge_weight"] = torch.rand(4)
    return g


def typed() -> Graph:
    relations = {("a", "to", "b"): 12, ("b", "to", "a"): 7, ("a", "knows", "a"): 0}
    g = random_typed_graph({"a": 6, "b": 5}, relations, feat_dim=2, num_classes=3)
    g.edges["a", "to", "b"].data["w"] = torch.rand(12, 2)
    return g


def assert_same(a: Graph, b: Graph) -> None:
    assert a.ntypes == b.ntypes
    assert a.canonical_etypes == b.canonical_etypes
    assert a.idtype == b.idtype
    for ntype in a.ntypes:
        assert a.num_nodes(ntype) == b.num_nodes(ntype)
        assert set(a.nodes[ntype].data) == set(b.nodes[ntype].data)
        for name, value in a.nodes[ntype].data.items():
            assert torch.equal(value, b.nodes[ntype].data[name])
    for etype in a.canonical_etypes:
        for side, other in zip(a.edges(etype=etype), b.edges(etype=etype), strict=True):
            assert torch.equal(side, other)
        assert set(a.edges[etype].data) == set(b.edges[etype].data)
        for name, value in a.edges[etype].data.items():
            assert torch.equal(value, b.edges[etype].data[name])


@needs_pyg
def test_pyg_data() -> None:
    data = pyg.Data(
        x=torch.rand(5, 2),
        y=torch.tensor([0, 1, 0, 1, 1]),
        edge_index=torch.tensor([[0, 4, 4], [1, 2, 2]]),
        edge_attr=torch.rand(3, 2),
        train_mask=torch.tensor([True, False, True, False, False]),
        name="ignored",
        level=torch.tensor(3.0),
    )
    g = from_pyg(data, idtype=torch.int32)
    assert (g.num_nodes(), g.num_edges(), g.idtype) == (5, 3, torch.int32)
    assert g.ndata["feat"] is data.x
    assert set(g.ndata) == {"feat", "label", "train_mask"}
    assert set(g.edata) == {"edge_attr"}
    assert [side.tolist() for side in g.edges()] == data.edge_index.tolist()


@needs_pyg
def test_pyg_round_trips() -> None:
    for g in (plain(), typed(), graph(([], []), 3)):
        data = to_pyg(g)
        assert data.validate()
        assert_same(from_pyg(data), g)
    data = to_pyg(plain())
    assert torch.equal(data.y, torch.arange(6))
    assert data.num_nodes == 6
    assert data.edge_index.dtype == torch.int64
    hetero = to_pyg(typed())
    assert isinstance(hetero, pyg.HeteroData)
    assert hetero["b"].x.shape == (5, 2)
    assert hetero["a", "knows", "a"].edge_index.shape == (2, 0)


@needs_pyg
def test_pyg_features_of_another_length_stay_behind() -> None:
    g = typed()
    data = to_pyg(g)
    data["a"].extra = torch.rand(9)
    data["a", "to", "b"].extra = torch.tensor(1.0)
    assert_same(from_pyg(data), g)


@needs_pyg
def test_pyg_errors() -> None:
    with pytest.raises(ValueError, match="has no edge_index"):
        from_pyg(pyg.Data(x=torch.rand(3, 1)))
    data = pyg.HeteroData()
    data["a", "r", "b"].edge_index = torch.zeros(2, 0, dtype=torch.int64)
    data["a"].num_nodes = 2
    with pytest.raises(ValueError, match=r"node type 'b' .* set data\['b'\].num_nodes"):
        from_pyg(data)


@needs_dgl
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_dgl_round_trips(idtype: torch.dtype) -> None:
    for g in (plain(), typed(), graph(([], []), 3), heterograph({("a", "r", "a"): ([0], [1])})):
        ours = g.astype(idtype)
        theirs = to_dgl(ours)
        assert theirs.idtype == idtype
        assert_same(from_dgl(theirs), ours)


@needs_dgl
def test_dgl_graphs() -> None:
    theirs = dgl.heterograph(
        {("u", "r", "v"): ([0, 1, 1], [2, 0, 0]), ("u", "s", "v"): ([1], [1])},
        num_nodes_dict={"u": 3, "v": 4},
    )
    theirs.nodes["v"].data["x"] = torch.rand(4, 2)
    theirs.edges["r"].data["w"] = torch.rand(3)
    ours = from_dgl(theirs)
    assert torch.equal(ours.nodes["v"].data["x"], theirs.nodes["v"].data["x"])
    assert torch.equal(ours.edges["r"].data["w"], theirs.edges["r"].data["w"])
    assert ours.in_degrees(etype="r").tolist() == theirs.in_degrees(etype="r").tolist()
    assert_same(from_dgl(to_dgl(ours)), ours)
    turned = from_dgl(dgl.reverse(theirs))
    assert sorted(turned.canonical_etypes) == sorted(reverse(ours).canonical_etypes)


@needs_dgl
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_dgl_blocks(idtype: torch.dtype) -> None:
    edges = {("u", "r", "v"): ([0, 1, 1], [2, 0, 0]), ("u", "s", "u"): ([1], [0])}
    whole = dgl.heterograph(edges, idtype=idtype)
    seeds = {"v": torch.tensor([2, 0], dtype=idtype), "u": torch.tensor([0], dtype=idtype)}
    theirs = dgl.to_block(whole, seeds)
    theirs.srcnodes["u"].data["x"] = torch.rand(theirs.num_src_nodes("u"), 2)
    theirs.edges["r"].data["w"] = torch.rand(3)
    ours = from_dgl(theirs)
    assert isinstance(ours, Block)
    back = ours.to_dgl()
    assert back.is_block
    assert back.idtype == ours.idtype == idtype
    for found in (ours, back):
        assert found.canonical_etypes == theirs.canonical_etypes
        for etype in theirs.canonical_etypes:
            for mine, other in zip(
                found.edges(etype=etype, form="all"),
                theirs.edges(etype=etype, form="all"),
                strict=True,
            ):
                assert torch.equal(mine, other)
            assert_same_rows(found.edges[etype].data, theirs.edges[etype].data)
        for ntype in theirs.srctypes:
            assert_same_rows(found.srcnodes[ntype].data, theirs.srcnodes[ntype].data)
        for ntype in theirs.dsttypes:
            assert_same_rows(found.dstnodes[ntype].data, theirs.dstnodes[ntype].data)


def assert_same_rows(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, value in dict(theirs).items():
        assert torch.equal(ours[name], value), name


@needs_dgl
def test_dgl_batches_keep_what_they_are_made_of() -> None:
    theirs = dgl.batch([dgl.graph(([0], [1])), dgl.graph(([0, 1, 2], [2, 2, 0]))])
    ours = from_dgl(theirs)
    assert ours.batch_num_nodes().tolist() == ours.to_dgl().batch_num_nodes().tolist() == [2, 3]
    assert ours.batch_num_edges().tolist() == ours.to_dgl().batch_num_edges().tolist() == [1, 3]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_geometric", "torch_geometric.data", "dgl"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "graphshard\[pyg\]"'):
        to_pyg(plain())
    with pytest.raises(ImportError, match=r'pip install "graphshard\[dgl\]"'):
        to_dgl(plain())
