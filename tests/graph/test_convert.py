# SPDX-License-Identifier: Apache-2.0
"""edge_index, SciPy and NetworkX, against SciPy, NetworkX, PyG and DGL. No process."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from graphshard.dgl import bipartite_from_networkx
from graphshard.graph import (
    Graph,
    create_block,
    from_edge_index,
    from_networkx,
    from_scipy,
    graph,
    to_bidirected,
    to_edge_index,
    to_networkx,
    to_scipy,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    networkx = pytest.importorskip("networkx", reason="NetworkX is not installed")
    scipy_sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")


def sample(idtype: torch.dtype = torch.int64) -> Graph:
    g = graph(([3, 0, 0, 2, 2, 1, 0], [0, 1, 1, 0, 2, 0, 3]), num_nodes=5, idtype=idtype)
    g.ndata["x"] = torch.arange(10.0).reshape(5, 2)
    g.edata["w"] = torch.arange(7, dtype=torch.float64) + 1
    return g


def same_edges(g: Graph, src: list[int], dst: list[int], etype: Any = None) -> None:
    ours = g.edges(etype=etype, order="eid")
    assert [side.tolist() for side in ours] == [src, dst]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_edge_index_and_back(idtype: torch.dtype) -> None:
    edge_index = torch.tensor([[3, 0, 0], [1, 1, 1]], dtype=idtype)
    weight = torch.rand(3, 2)
    g = from_edge_index(edge_index, num_nodes=6, edge_attr=weight)
    assert (g.idtype, g.num_nodes()) == (idtype, 6)
    assert g.edata["edge_attr"] is weight
    back = to_edge_index(g)
    assert isinstance(back, torch.Tensor)
    assert back.dtype == torch.int64
    assert torch.equal(back, edge_index.long())
    assert from_edge_index(edge_index).num_nodes() == 4


def test_edge_index_of_pyg() -> None:
    utils = pytest.importorskip("torch_geometric.utils", reason="torch_geometric is not installed")
    g = sample()
    edge_index = to_edge_index(g)
    mine = from_edge_index(edge_index, edge_attr={"w": g.edata["w"]})
    matrix = utils.to_scipy_sparse_matrix(edge_index, g.edata["w"], num_nodes=5)
    assert (to_scipy(mine, "w", fmt="csr").todense() == matrix.todense()[:4, :4]).all()
    undirected = utils.to_undirected(edge_index, num_nodes=5)
    assert torch.equal(to_edge_index(to_bidirected(g)), undirected)


def test_edge_index_of_typed_graph() -> None:
    data = {
        ("a", "r", "b"): torch.tensor([[0, 1], [2, 0]]),
        ("b", "s", "b"): torch.zeros(2, 0, dtype=torch.int64),
    }
    attributes = {("a", "r", "b"): {"w": torch.ones(2)}}
    g = from_edge_index(data, num_nodes={"a": 3, "b": 4}, edge_attr=attributes)
    assert (g.num_nodes("a"), g.num_nodes("b")) == (3, 4)
    assert g.edges["r"].data["w"].tolist() == [1, 1]
    back = to_edge_index(g)
    assert isinstance(back, dict)
    assert all(torch.equal(back[etype], index) for etype, index in data.items())
    assert torch.equal(to_edge_index(g, "r"), data["a", "r", "b"])


def test_edge_index_errors() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, num_edges\] \(got \(3, 2\)\)"):
        from_edge_index(torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="must be a dict of node types"):
        from_edge_index({("a", "r", "a"): torch.zeros(2, 0, dtype=torch.int64)}, num_nodes=3)
    with pytest.raises(TypeError, match="has no types"):
        from_edge_index(torch.zeros(2, 0, dtype=torch.int64), num_nodes={"a": 3})


FORMS = ["coo_matrix", "csr_matrix", "csc_matrix", "csr_array", "lil_matrix"]


@pytest.mark.parametrize("form", FORMS)
def test_scipy_and_back(form: str) -> None:
    dense = np.array([[0, 1.5, 0], [2.0, 0, 0], [0, 3.0, 4.0]], dtype=np.float32)
    matrix = getattr(scipy_sparse, form)(dense)
    g = from_scipy(matrix, eweight_name="w", idtype=torch.int32)
    assert g.idtype == torch.int32
    assert g.edata["w"].dtype == torch.float32
    assert (to_scipy(g, "w").todense() == dense).all()
    assert (to_scipy(g, "w", fmt="csc").todense() == dense).all()
    assert (to_scipy(g).todense() == (dense != 0)).all()
    assert "w" not in from_scipy(matrix).edata


def test_scipy_against_dgl() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dgl = pytest.importorskip("dgl", reason="DGL has no release for this Python")
    matrix = scipy_sparse.random(9, 9, 0.3, format="csr", random_state=3)
    ours, theirs = from_scipy(matrix, "w"), dgl.from_scipy(matrix, "w")
    same_edges(ours, theirs.edges()[0].tolist(), theirs.edges()[1].tolist())
    assert torch.equal(ours.edata["w"], theirs.edata["w"])
    g = sample()
    theirs = dgl.graph(g.edges(), num_nodes=5).adj_external(scipy_fmt="coo")
    mine = to_scipy(g)
    assert mine.shape == theirs.shape
    assert (mine.row == theirs.row).all()
    assert (mine.col == theirs.col).all()


def test_scipy_keeps_zeros_and_adds_parallel_edges_up() -> None:
    matrix = scipy_sparse.coo_matrix(([0.0, 1.0, 2.0], ([0, 1, 1], [1, 0, 0])), shape=(2, 2))
    g = from_scipy(matrix, "w")
    same_edges(g, [0, 1, 1], [1, 0, 0])
    assert to_scipy(g, "w").nnz == 3
    assert to_scipy(g, "w", fmt="csr")[1, 0] == 3.0


def test_scipy_typed() -> None:
    matrices = {
        ("a", "r", "b"): scipy_sparse.eye(3, 4, format="csr"),
        ("b", "s", "a"): scipy_sparse.csr_matrix((4, 3)),
    }
    g = from_scipy(matrices, "w")
    assert (g.num_nodes("a"), g.num_nodes("b")) == (3, 4)
    for etype, matrix in matrices.items():
        assert (to_scipy(g, "w", etype).todense() == matrix.todense()).all()


def test_scipy_does_not_follow_later_changes() -> None:
    matrix = scipy_sparse.coo_matrix(([1.0], ([0], [1])), shape=(2, 2))
    g = from_scipy(matrix, "w")
    matrix.data[0], matrix.col[0] = 5.0, 0
    same_edges(g, [0], [1])
    assert g.edata["w"].tolist() == [1.0]


def test_scipy_bfloat16_and_errors() -> None:
    g = sample()
    g.edata["b"] = torch.full((7,), 2.0, dtype=torch.bfloat16)
    assert to_scipy(g, "b").sum() == 14
    g.edata["two"] = torch.ones(7, 2)
    with pytest.raises(ValueError, match="must have one number per edge"):
        to_scipy(g, "two")
    with pytest.raises(ValueError, match=r"one row per source node .* shape \(2, 3\)"):
        from_scipy(scipy_sparse.eye(2, 3))
    with pytest.raises(TypeError, match="must be a SciPy sparse matrix"):
        from_scipy(np.eye(2))


def test_networkx_against_dgl() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dgl = pytest.importorskip("dgl", reason="DGL has no release for this Python")
    made = [
        networkx.karate_club_graph(),
        networkx.gnp_random_graph(12, 0.3, seed=1, directed=True),
        networkx.MultiDiGraph([(5, 2), (5, 2), (2, 9), (9, 9)]),
        networkx.Graph([("b", "a"), ("c", "b"), ("c", "c")]),
        networkx.empty_graph(3),
    ]
    for each in made:
        ours, theirs = from_networkx(each), dgl.from_networkx(each)
        assert ours.num_nodes() == theirs.num_nodes()
        src, dst = (side.tolist() for side in theirs.edges())
        if each.is_directed():
            same_edges(ours, src, dst)
        else:  # DGL: the order of edges can be arbitrary
            pairs = zip(*(side.tolist() for side in ours.edges()), strict=True)
            assert sorted(pairs) == sorted(zip(src, dst, strict=True))


def test_networkx_attributes() -> None:
    nx_graph = networkx.DiGraph()
    for label, number in (("b", 1.0), ("a", 2.0), ("c", 3.0)):
        nx_graph.add_node(label, x=np.array([number, -number]), n=int(number))
    nx_graph.add_edge("b", "c", w=0.5, id=1)
    nx_graph.add_edge("a", "c", w=1.5, id=0)
    g = from_networkx(nx_graph, ["x", "n"], ["w"], edge_id_attr_name="id")
    same_edges(g, [0, 1], [2, 2])
    assert g.edata["w"].tolist() == [1.5, 0.5]
    assert g.ndata["x"].tolist() == [[2, -2], [1, -1], [3, -3]]
    assert g.ndata["n"].dtype == torch.int64
    undirected = from_networkx(nx_graph.to_undirected(), edge_attrs=["w"])
    assert sorted(undirected.edata["w"].tolist()) == [0.5, 0.5, 1.5, 1.5]


def test_networkx_round_trip() -> None:
    g = sample()
    nx_graph = to_networkx(g, ["x"], ["w"])
    assert nx_graph.nodes[3]["x"].tolist() == [6.0, 7.0]
    assert [w.item() for *_, w in nx_graph.edges(data="w")] != []
    back = from_networkx(nx_graph, ["x"], ["w"], edge_id_attr_name="id")
    same_edges(back, *(side.tolist() for side in g.edges()))
    assert torch.equal(back.ndata["x"], g.ndata["x"])
    assert torch.equal(back.edata["w"], g.edata["w"])
    matrix = networkx.to_scipy_sparse_array(nx_graph, nodelist=range(5), weight=None)
    assert (to_scipy(g, fmt="csr").todense() == matrix.todense()).all()


def test_networkx_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    nx_graph = networkx.DiGraph([(0, 1), (1, 2)])
    with pytest.raises(ValueError, match=r"must have the attribute 'w' \(\(0, 1\) has not\)"):
        from_networkx(nx_graph, edge_attrs=["w"])
    networkx.set_node_attributes(nx_graph, {0: "red", 1: "blue", 2: "red"}, "colour")
    with pytest.raises(TypeError, match="node attribute 'colour' must be numbers"):
        from_networkx(nx_graph, node_attrs=["colour"])
    networkx.set_edge_attributes(nx_graph, 3, "id")
    with pytest.raises(ValueError, match="must number the edges 0 to 1"):
        from_networkx(nx_graph, edge_id_attr_name="id")
    with pytest.raises(ValueError, match="needs a directed graph"):
        from_networkx(nx_graph.to_undirected(), edge_id_attr_name="id")
    with pytest.raises(TypeError, match="convert_node_labels_to_integers"):
        from_networkx(networkx.Graph([(0, "a")]))
    with pytest.raises(ValueError, match="use block_to_graph first"):
        to_networkx(create_block(([0], [0])))
    with pytest.raises(KeyError, match="no node feature 'none' on any type"):
        to_networkx(sample(), node_attrs=["none"])
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ImportError, match=r"to_networkx needs the package 'networkx'"):
        to_networkx(sample())


LONG = [1600000000.0, 1600000000.25, 0.1, 1e300]


@pytest.mark.parametrize("directed", [False, True])
def test_numbers_of_networkx_are_not_rounded(directed: bool) -> None:
    kind = networkx.DiGraph if directed else networkx.Graph
    theirs = kind()
    for node, value in enumerate(LONG):
        theirs.add_node(node, real=value, id=2**62 + node, vector=[value, 0.5], flag=node > 1)
    theirs.add_edges_from(
        [(i, (i + 1) % 4, {"time": LONG[i], "id": 2**62 + i, "flag": i > 1}) for i in range(4)]
    )
    g = from_networkx(theirs, ["real", "id", "vector", "flag"], ["time", "id", "flag"])
    for name, dtype in (("real", torch.float64), ("id", torch.int64), ("flag", torch.bool)):
        assert g.ndata[name].dtype == dtype
        assert g.ndata[name].tolist() == [theirs.nodes[n][name] for n in range(4)]
    assert g.ndata["vector"].tolist() == [[value, 0.5] for value in LONG]
    for name in ("time", "id", "flag"):
        ends = zip(*(side.tolist() for side in g.edges()), strict=True)
        assert g.edata[name].tolist() == [theirs.edges[pair][name] for pair in ends]
    assert g.edata["time"].dtype == torch.float64


def test_numbers_of_bipartite_networkx_are_not_rounded() -> None:
    theirs = networkx.DiGraph()
    theirs.add_nodes_from(range(4), bipartite=0)
    theirs.add_nodes_from(range(4, 8), bipartite=1)
    theirs.add_edges_from([(i, i + 4, {"time": LONG[i]}) for i in range(4)])
    g = bipartite_from_networkx(theirs, "u", "r", "v", e_attrs=["time"])
    assert g.edata["time"].tolist() == LONG


@pytest.mark.parametrize("values", [LONG, [2**62 + 1, 2**62 + 2, -(2**62), 0]])
def test_numbers_of_scipy_are_not_rounded(values: list[float]) -> None:
    matrix = scipy_sparse.coo_matrix((np.array(values), ([0, 1, 2, 3], [1, 2, 3, 0])))
    g = from_scipy(matrix, eweight_name="w")
    assert g.edata["w"].tolist() == values
    assert to_scipy(g, "w").data.tolist() == values
