# SPDX-License-Identifier: Apache-2.0
"""Graph: construction, counts, questions about nodes and edges, moves; DGL is the oracle."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch
from graph_oracle import (
    PLAIN_GRAPHS,
    TYPED,
    TYPED_NODES,
    assert_same_data,
    dgl,
    fn,
    gs,
    plain_pair,
    rand,
    typed_pair,
)

from graphshard.ops import Adjacency


def assert_same_edges(ours: Any, theirs: Any, **where: Any) -> None:
    mine, expected = ours.edges("all", **where), theirs.edges("all", **where)
    for a, b in zip(mine, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    "data",
    [
        ([0, 1, 2], [1, 2, 2]),
        ((0, 1, 2), (1, 2, 2)),
        (range(3), [1, 2, 2]),
        (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 2])),
        (np.array([0, 1, 2]), np.array([1, 2, 2])),
        (np.array([0, 1, 2], dtype=np.uint8), [1, 2, 2]),
        [(0, 1), (1, 2), [2, 2]],
        ("coo", ([0, 1, 2], [1, 2, 2])),
        ("csr", ([0, 1, 2, 3], [1, 2, 2], [])),
        ("csr", ([0, 1, 2, 3], [1, 2, 2], [0, 1, 2])),
        ("csc", (torch.tensor([0, 0, 1, 3]), [0, 1, 2], [])),
        scipy.sparse.coo_matrix((np.ones(3), ([0, 1, 2], [1, 2, 2])), shape=(3, 3)),
        scipy.sparse.csr_matrix((np.ones(3), ([0, 1, 2], [1, 2, 2])), shape=(3, 3)),
        nx.DiGraph([(0, 1), (1, 2), (2, 2)]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_all_forms_of_edges(data: Any) -> None:
    g = gs.graph(data)
    assert isinstance(g, gs.Graph)
    assert [ids.tolist() for ids in g.edges()] == [[0, 1, 2], [1, 2, 2]]
    assert g.num_nodes() == 3
    assert g.idtype == torch.int64
    assert g.device == torch.device("cpu")
    assert gs.graph(data, num_nodes=None, idtype=torch.int32).edges()[0].dtype == torch.int32


def test_compressed_forms_keep_edge_ids() -> None:
    for form in ("csr", "csc"):
        arrays = ([0, 2, 2, 4], [1, 2, 0, 0], [3, 1, 0, 2])
        assert_same_edges(gs.graph((form, arrays)), dgl.graph((form, arrays)))
        wide = gs.graph((form, arrays), num_nodes=6)
        assert wide.num_nodes() == 6
        assert_same_edges(wide, gs.graph((form, arrays)))


@pytest.mark.parametrize("graph_name", sorted(PLAIN_GRAPHS))
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_plain_graphs_equal_dgl(graph_name: str, idtype: torch.dtype) -> None:
    ours, theirs = plain_pair(graph_name, idtype)
    assert ours.ntypes == ours.srctypes == ours.dsttypes == theirs.ntypes == ["_N"]
    assert ours.etypes == theirs.etypes == ["_E"]
    assert ours.canonical_etypes == theirs.canonical_etypes
    assert ours.is_homogeneous
    assert not ours.is_block
    assert not ours.is_unibipartite
    assert ours.idtype == theirs.idtype == idtype
    assert ours.num_nodes() == ours.number_of_nodes("_N") == theirs.num_nodes()
    assert ours.num_edges() == ours.number_of_edges("_E") == theirs.num_edges()
    assert ours.is_multigraph == theirs.is_multigraph
    assert torch.equal(ours.nodes(), theirs.nodes())
    assert torch.equal(ours.in_degrees(), theirs.in_degrees())
    assert torch.equal(ours.out_degrees(), theirs.out_degrees())
    assert_same_edges(ours, theirs)
    assert repr(ours) == repr(theirs)


def test_empty_graphs() -> None:
    for g in (gs.graph(([], [])), gs.graph([]), gs.graph(("csr", ([0], [], [])))):
        assert g.num_nodes() == g.num_edges() == 0
        assert g.idtype == torch.int64
        assert not g.has_edges()
        assert not g.any_zero_in_degree()
        g.ndata["h"] = torch.zeros(0, 3)
        g.update_all(fn.copy_u("h", "m"), fn.mean("m", "o"))
        assert g.ndata["o"].shape == (0, 3)
    assert gs.graph(([], []), num_nodes=2).any_zero_in_degree()


def test_typed_graphs_equal_dgl() -> None:
    ours, theirs = typed_pair()
    assert ours.ntypes == theirs.ntypes
    assert ours.etypes == theirs.etypes
    assert ours.canonical_etypes == theirs.canonical_etypes
    assert ours.srctypes == theirs.srctypes
    assert ours.dsttypes == theirs.dsttypes
    assert ours.num_nodes() == theirs.num_nodes() == 9
    assert ours.num_edges() == theirs.num_edges()
    assert not ours.is_homogeneous
    for ntype in theirs.ntypes:
        assert ours.num_nodes(ntype) == theirs.num_nodes(ntype)
        assert ours.num_src_nodes(ntype) == theirs.num_src_nodes(ntype)
        assert ours.get_ntype_id(ntype) == theirs.get_ntype_id(ntype)
        assert torch.equal(ours.nodes(ntype), theirs.nodes(ntype))
    for etype in theirs.canonical_etypes:
        assert ours.to_canonical_etype(etype[1]) == etype
        assert ours.to_canonical_etype(etype) == etype
        assert ours.get_etype_id(etype) == theirs.get_etype_id(etype)
        assert ours.num_edges(etype) == ours.num_edges(etype[1]) == theirs.num_edges(etype)
        assert torch.equal(ours.in_degrees(etype=etype), theirs.in_degrees(etype=etype))
        assert torch.equal(ours.out_degrees(etype=etype[1]), theirs.out_degrees(etype=etype))
        assert_same_edges(ours, theirs, etype=etype)
        assert_same_edges(ours, theirs, etype=etype, order="srcdst")


def test_a_type_that_only_sends_makes_the_sides_separate_as_in_dgl() -> None:
    data = {("user", "buys", "item"): ([0, 1], [0, 1])}
    counts = {"user": 3, "item": 4, "alone": 2}
    ours, theirs = gs.heterograph(data, counts), dgl.heterograph(data, counts)
    assert ours.ntypes == theirs.ntypes == ["alone", "item", "user"]
    assert ours.srctypes == theirs.srctypes == ["alone", "user"]
    assert ours.dsttypes == theirs.dsttypes == ["item"]
    assert ours.num_src_nodes() == theirs.num_src_nodes()
    assert ours.num_dst_nodes() == theirs.num_dst_nodes()
    assert ours.num_nodes() == theirs.num_nodes()
    assert ours.is_unibipartite
    assert not ours.is_block
    for g in (ours, theirs):
        g.nodes["item"].data["x"] = torch.ones(4)
        g.ndata["y"] = {"alone": torch.ones(2), "item": torch.ones(4)}
    assert_same_data(dict(ours.dstdata), dict(theirs.dstdata))
    assert ours.ndata["y"].keys() == theirs.ndata["y"].keys()


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (([0, 1], [0]), {}, ValueError, r"as many sources as destinations \(got 2 and 1\)"),
        (
            ([0, -1], [0, 1]),
            {},
            ValueError,
            r"sources of the graph must not be negative \(got -1\)",
        ),
        (([0.0], [1.0]), {}, TypeError, r"must be integers \(got torch.float32\); convert"),
        ((torch.tensor([True]), [1]), {}, TypeError, "not a mask of bools"),
        (([[0]], [[1]]), {}, ValueError, r"one dimension \(got shape \(1, 1\)\)"),
        ((["a"], ["b"]), {}, TypeError, "must be integers in a tensor, an array or a flat list"),
        (([0, 3], [1, 2]), {"num_nodes": 3}, ValueError, r"\(got 3, and an edge with id 3\); give"),
        (([0], [1]), {"num_nodes": -1}, ValueError, "must not be negative"),
        (([0], [1]), {"num_nodes": 2.0}, TypeError, "must be an integer"),
        (([0], [1]), {"idtype": torch.int16}, TypeError, "idtype must be torch.int32 or torch.i"),
        (([2**31], [1]), {"idtype": torch.int32}, ValueError, r"int32 ids reach 2147483647"),
        (([0], [1], [2]), {}, ValueError, r"must be \(sources, destinations\) \(got 3 entries\)"),
        ([[0, 1, 2], [1, 2, 2]], {}, ValueError, "put them in a tuple"),
        (torch.tensor([[0, 1], [1, 2]]), {}, TypeError, "use from_edge_index"),
        ("edges", {}, TypeError, r"a list of pairs, a SciPy sparse matrix .*got str"),
        (("ell", ([0], [1])), {}, ValueError, r"must be 'coo', 'csr' or 'csc' \(got 'ell'\)"),
        (("csr", ([0], [1])), {}, ValueError, r"takes the arrays \(indptr, indices, edge ids\)"),
        (("csr", ([1, 1], [0], [])), {}, ValueError, "must ascend from 0 to the number of indices"),
        (("csr", ([0, 2, 1], [0], [])), {}, ValueError, "must ascend from 0"),
        (("csc", ([0, 2], [0, 1], [0])), {}, ValueError, r"one per index, 2 \(got 1\)"),
        (("csc", ([0, 2], [0, 1], [0, 0])), {}, ValueError, "must differ"),
        (("csc", ([0, 2], [0, 1], [0, 2])), {}, ValueError, r"an edge id .* in \[0, 2\)"),
        (
            (torch.tensor([0]), torch.tensor([1], dtype=torch.int32)),
            {},
            ValueError,
            r"must have one dtype .*; convert them, or give idtype",
        ),
        (
            (torch.tensor([0]), torch.tensor([1], device="meta")),
            {},
            ValueError,
            "must be on one device",
        ),
    ],
)
def test_mistakes_in_edges(data: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        gs.graph(data, **options)


def test_a_graph_is_no_data_for_a_graph() -> None:
    with pytest.raises(TypeError, match="data is a graph already"):
        gs.graph(gs.graph(([0], [1])))
    with pytest.raises(ValueError, match="num_nodes must be left out"):
        gs.graph(nx.DiGraph([(0, 1)]), num_nodes=5)


@pytest.mark.parametrize(
    ("data", "counts", "error", "message"),
    [
        ({}, None, ValueError, "at least one relation"),
        ([("a", "r", "b")], None, TypeError, "must be a dictionary from"),
        ({"r": ([0], [0])}, None, TypeError, r"must be named by \(source type, name, .*'r'"),
        ({("a", "r"): ([0], [0])}, None, TypeError, "must be named by"),
        ({("a", 1, "b"): ([0], [0])}, None, TypeError, "a relation name must be a string"),
        ({("a\nb", "r", "b"): ([0], [0])}, None, ValueError, "control characters .*'a\\\\nb'"),
        ({("a", "r" * 2000, "b"): ([0], [0])}, None, ValueError, "a relation name .* 1024 bytes"),
        (
            {("a", "r", "\ud800"): ([0], [0])},
            None,
            ValueError,
            "a node type must be text",
        ),
        ({("a", "r", ""): ([0], [0])}, None, ValueError, "non-empty line of text"),
        (TYPED, {"user": 5}, ValueError, r"name every type .*missing \['game'\]"),
        (TYPED, {"user": 2, "game": 9}, ValueError, r"nodes of type 'user' .*got 2, .*id 3"),
        (TYPED, 5, TypeError, "dictionary from type to number"),
        (
            {
                ("a", "r", "b"): (torch.tensor([0]), torch.tensor([0])),
                ("a", "s", "b"): (torch.tensor([0]).int(), torch.tensor([0]).int()),
            },
            None,
            ValueError,
            "one idtype .*; give idtype",
        ),
        ({("a", "r", "b"): ([0], [-2])}, None, ValueError, r"destinations of relation \('a', 'r'"),
    ],
)
def test_mistakes_in_relations(data: Any, counts: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        gs.heterograph(data, counts)


def test_constructor_keeps_the_given_order_and_checks() -> None:
    adj = Adjacency(torch.tensor([0]), torch.tensor([0]), 2, 1)
    g = gs.Graph({"b": 2, "a": 1}, {("b", "r", "a"): adj})
    assert g.ntypes == ["b", "a"]
    assert g.adjacency() is adj
    assert g.adjacency("r") is adj
    with pytest.raises(ValueError, match="between 2 and 2 nodes"):
        gs.Graph({"b": 2, "a": 2}, {("b", "r", "a"): adj})
    with pytest.raises(ValueError, match="one idtype and one device"):
        gs.Graph({"b": 2, "a": 1}, {("b", "r", "a"): adj, ("b", "s", "a"): adj.astype(torch.int32)})


# ---------------------------------------------------------------------------------- questions


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_questions_about_nodes_and_edges(idtype: torch.dtype) -> None:
    ours, theirs = plain_pair(idtype=idtype)

    def same(ask: Any) -> None:
        mine, expected = ask(ours), ask(theirs)
        if not isinstance(mine, tuple):
            mine, expected = (mine,), (expected,)
        for a, b in zip(mine, expected, strict=True):
            assert type(a) is type(b)
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype
                assert a.tolist() == b.tolist()
            else:
                assert a == b

    def ids(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=idtype)

    for form in ("uv", "eid", "all"):
        for order in ("eid", "srcdst", None):
            same(lambda g, form=form, order=order: g.all_edges(form, order))
        same(lambda g, form=form: g.in_edges([2, 0, 5], form))
        same(lambda g, form=form: g.in_edges(0, form))
        same(lambda g, form=form: g.out_edges(ids(4, 6, 2), form))
    for v in (0, [1, 5], (0, 1), ids(2), ids(), np.array([4])):
        same(lambda g, v=v: g.in_degrees(v))
        same(lambda g, v=v: g.out_degrees(v))
    for eid in (3, [0, 9], ids(1, 1), []):
        same(lambda g, eid=eid: g.find_edges(eid))
    for u, v in ((2, 0), ([2, 4, 0], [0, 4, 1]), (ids(0, 1), ids(2, 4)), (2, [0, 1])):
        same(lambda g, u=u, v=v: g.edge_ids(u, v))
        same(lambda g, u=u, v=v: g.edge_ids(u, v, return_uv=True))
    for u, v in ((2, 0), (0, 0), ([2, 0, 6], [0, 6, 6]), ([0, 1, 2], [2])):
        same(lambda g, u=u, v=v: g.has_edges_between(u, v))
    for node in range(7):
        same(lambda g, node=node: g.successors(node))
        same(lambda g, node=node: g.predecessors(node))
    for vid in (3, 7, [0, 7, 100], ids(6)):
        same(lambda g, vid=vid: g.has_nodes(vid))
    for fmt in ("coo", "csc"):
        same(lambda g, fmt=fmt: g.adj_tensors(fmt))


def test_questions_about_typed_graphs() -> None:
    ours, theirs = typed_pair()
    for etype in ("plays", "rates"):
        for ask in (
            lambda g, e=etype: g.in_edges([1, 0], "all", e),
            lambda g, e=etype: g.out_edges([0, 2], "all", etype=e),
            lambda g, e=etype: g.has_edges_between([0, 2, 2], [0, 1, 3], e),
            lambda g, e=etype: g.find_edges([2, 0], e),
            lambda g, e=etype: g.in_degrees([2, 0], e),
        ):
            mine, expected = ask(ours), ask(theirs)
            for a, b in zip(mine, expected, strict=True):
                assert torch.equal(a, b)
    assert ours.edge_ids([2, 2], [1, 0], etype="rates").tolist() == [0, 1]
    assert ours.has_nodes([3, 4], "game").tolist() == [True, False]


def test_csr_tensors_are_in_ascending_edge_id() -> None:
    g, _ = plain_pair()
    indptr, indices, eids = g.adj_tensors("csr")
    src, dst = g.edges()
    assert torch.equal(dst[eids], indices)
    assert torch.equal(src[eids].bincount(minlength=7).cumsum(0), indptr[1:])
    assert all(sorted(part.tolist()) == part.tolist() for part in eids.tensor_split(indptr[1:-1]))


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda g: g.in_degrees(7), ValueError, r"a node id must be in \[0, 7\) because .*got 7"),
        (lambda g: g.out_edges([0, -1]), ValueError, r"a node id must be .*got -1"),
        (lambda g: g.find_edges(10), ValueError, r"an edge id must be in \[0, 10\)"),
        (lambda g: g.edge_ids(0, 0), ValueError, r"none from 0 to 0\); ask has_edges_between"),
        (lambda g: g.edge_ids([0, 1], [0, 1, 2]), ValueError, r"equal lengths.*got 2 and 3"),
        (lambda g: g.has_nodes(-1), ValueError, "must not be negative"),
        (lambda g: g.in_degrees([0.5]), TypeError, "node ids must be integers"),
        (lambda g: g.in_degrees(torch.tensor([[0]])), ValueError, "one dimension"),
        (lambda g: g.in_degrees(torch.ones(7).bool()), TypeError, "mask.nonzero"),
        (
            lambda g: g.in_degrees(torch.tensor([0], dtype=torch.int32)),
            ValueError,
            r"graph's idtype torch.int64 \(got torch.int32\); convert",
        ),
        (
            lambda g: g.in_degrees(torch.tensor([0], device="meta")),
            ValueError,
            "graph's device cpu",
        ),
        (lambda g: g.successors([0, 1]), TypeError, "v must be one node id"),
        (lambda g: g.all_edges("vu"), ValueError, "form must be 'uv', 'eid' or 'all'"),
        (lambda g: g.all_edges(order="dst"), ValueError, "order must be 'eid' or 'srcdst'"),
        (lambda g: g.adj_tensors("ell"), ValueError, "fmt must be"),
        (lambda g: g.formats("ell"), ValueError, "formats must be among"),
        (lambda g: g.num_nodes("user"), ValueError, r"no node type 'user'; the graph has \['_N'\]"),
        (lambda g: g.num_edges("likes"), ValueError, "no relation 'likes'"),
        (lambda g: g.num_src_nodes("x"), ValueError, "no source node type 'x'"),
        (lambda g: g.num_dst_nodes("x"), ValueError, "no destination node type 'x'"),
    ],
)
def test_mistakes_in_questions(ask: Any, error: Any, message: str) -> None:
    g, _ = plain_pair()
    with pytest.raises(error, match=message):
        ask(g)


def test_ambiguous_names() -> None:
    g = gs.heterograph({("a", "r", "b"): ([0], [0]), ("b", "r", "a"): ([0], [0])})
    with pytest.raises(ValueError, match=r"'r' is ambiguous, 2 relations .*\('a', 'r', 'b'\)"):
        g.num_edges("r")
    with pytest.raises(ValueError, match="etype must be given because the graph has 2"):
        g.in_degrees()
    assert g.num_edges(("a", "r", "b")) == 1
    assert g.num_edges() == 2


def test_zero_in_degree_and_edges() -> None:
    ours, _ = plain_pair()
    assert ours.any_zero_in_degree()
    assert not gs.graph(([0, 1], [1, 0])).any_zero_in_degree()
    typed = gs.heterograph(
        {("a", "r", "b"): ([0, 1], [0, 1]), ("b", "s", "b"): ([], [])}, {"a": 2, "b": 2}
    )
    assert not typed.any_zero_in_degree("r")
    assert typed.any_zero_in_degree("s")
    assert typed.any_zero_in_degree()
    assert typed.has_edges()
    assert typed.has_edges("r")
    assert not typed.has_edges("s")
    assert not typed["s"].has_edges()


def test_zero_in_degree_is_found_once() -> None:
    g, _ = typed_pair()
    g.any_zero_in_degree("plays")
    assert g["plays"]._facts[0].zero_in_degree is True
    g["follows"].any_zero_in_degree()
    assert g._facts[g.get_etype_id("follows")].zero_in_degree is not None
    assert g.int()._facts[g.get_etype_id("plays")].zero_in_degree is True


# ---------------------------------------------------------------------------------- slices


def test_slices_share_features() -> None:
    g, _ = typed_pair()
    view = g["plays"]
    assert isinstance(view, gs.Graph)
    assert view.canonical_etypes == [("user", "plays", "game")]
    assert view.ntypes == ["user", "game"]
    assert view.srcdata["h"] is g.nodes["user"].data["h"]
    assert view.dstdata["h"] is g.nodes["game"].data["h"]
    view.dstdata["new"] = torch.ones(4)
    view.edata["e"] = torch.ones(4)
    assert torch.equal(g.nodes["game"].data["new"], torch.ones(4))
    assert "e" in g.edges["plays"].data
    loop = g["user", "follows", "user"]
    assert loop.is_homogeneous
    assert loop.srcdata["h"] is loop.dstdata["h"] is loop.ndata["h"]
    with view.local_scope():
        view.dstdata["inner"] = torch.ones(4)
        assert "inner" not in g.nodes["game"].data
    with g.local_scope():
        g["plays"].dstdata["inner"] = torch.ones(4)
        assert "inner" in g.nodes["game"].data
    assert "inner" not in view.dstdata


@pytest.mark.parametrize(
    "key",
    [
        ("user", slice(None), "game"),
        (slice(None), slice(None), "user"),
        ("user", slice(None), slice(None)),
        slice(None),
        (slice(None), "plays", slice(None)),
        (slice(None), slice(None), slice(None)),
    ],
    ids=str,
)
def test_wildcards_equal_dgl(key: Any) -> None:
    ours, theirs = typed_pair()
    mine, expected = ours[key], theirs[key]
    assert mine.ntypes == expected.ntypes
    assert mine.canonical_etypes == expected.canonical_etypes
    assert_same_edges(mine, expected)
    for side in ("srcdata", "dstdata", "edata"):
        assert_same_data(dict(getattr(mine, side)), dict(getattr(expected, side)))


def test_underscore_is_a_wildcard_unless_it_is_a_name() -> None:
    g, _ = typed_pair()
    assert g["user", "_", "game"].etypes == ["plays+rates"]
    assert g["_"].num_edges() == g.num_edges()
    named = gs.heterograph({("a", "_", "b"): ([0], [0]), ("a", "r", "b"): ([0], [0])})
    assert named["_"].etypes == ["_"]


def test_joined_fields_must_agree() -> None:
    g, _ = typed_pair()
    g.edges["plays"].data["w"] = torch.ones(4, 9)
    with pytest.raises(ValueError, match="field 'w' must have one row shape and dtype"):
        g["user", :, "game"]
    del g.edges["rates"].data["w"]
    assert "w" not in g["user", :, "game"].edata


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("walks", ValueError, "no relation matches 'walks'"),
        (("user", "plays", "user"), ValueError, "no relation matches"),
        (("user", "plays"), TypeError, r"sliced as g\['etype'\]"),
        (("user", 1, "game"), TypeError, "a graph is sliced"),
        (slice(0, 1), TypeError, "a graph is sliced"),
    ],
)
def test_mistakes_in_slices(key: Any, error: Any, message: str) -> None:
    g, _ = typed_pair()
    with pytest.raises(error, match=message):
        g[key]


# ---------------------------------------------------------------------------------- moves, copies


def test_id_types() -> None:
    ours, _ = plain_pair()
    small = ours.int()
    assert small.idtype == torch.int32
    assert small.edges("all")[2].dtype == torch.int32
    assert small.nodes().dtype == small.in_degrees().dtype == torch.int32
    assert small.ndata["h"] is ours.ndata["h"]
    assert small.long().idtype == torch.int64
    assert small.int() is small
    assert ours.idtype == torch.int64
    small.ndata["x"] = torch.zeros(7)
    assert "x" not in ours.ndata
    with pytest.raises(TypeError, match=r"idtype must be torch.int32 or torch.int64"):
        ours.astype(torch.float32)


def test_devices() -> None:
    ours, _ = typed_pair()
    moved = ours.to("meta")
    assert moved.device == torch.device("meta")
    assert moved.nodes["user"].data["h"].device == torch.device("meta")
    assert moved.edges["plays"].data["w"].device == torch.device("meta")
    assert moved.adjacency("plays").device == torch.device("meta")
    assert moved["follows"].srcdata["h"] is moved["follows"].dstdata["h"]
    assert ours.to("cpu") is ours
    assert ours.cpu() is ours
    assert ours.to(None) is ours
    assert gs.graph(([0], [1]), device="meta").device == torch.device("meta")
    with pytest.raises(ValueError, match="on device cpu, but the graph is on meta"):
        moved.nodes["user"].data["x"] = torch.zeros(5)


def test_formats() -> None:
    g = gs.graph(([0, 2, 1], [1, 2, 0]))
    assert g.formats() == {"created": ["coo"], "not created": ["csr", "csc"]}
    only = g.formats("csc")
    assert only.formats() == {"created": ["csc"], "not created": []}
    assert torch.equal(only.edges()[0], g.edges()[0])
    assert g.formats() == {"created": ["coo"], "not created": ["csr", "csc"]}
    g.create_formats_()
    assert g.formats() == {"created": ["coo", "csr", "csc"], "not created": []}


def test_copies_have_their_own_dictionaries() -> None:
    g, _ = plain_pair()
    for twin in (g.local_var(), g.clone()):
        assert isinstance(twin, gs.Graph)
        twin.ndata["x"] = torch.zeros(7)
        assert "x" not in g.ndata
        assert twin.ndata["h"] is g.ndata["h"]
        assert twin.srcdata["x"] is twin.dstdata["x"]
    shallow = copy.copy(g)
    shallow.ndata["y"] = torch.zeros(7)
    assert "y" in g.ndata
    deep = copy.deepcopy(g)
    deep.ndata["h"].zero_()
    assert g.ndata["h"].any()
    assert deep.srcdata["h"] is deep.dstdata["h"]
    assert_same_edges(deep, g)


def test_no_pickle() -> None:
    g, _ = plain_pair()
    with pytest.raises(TypeError, match=r"a Graph cannot be pickled, .*no pickle; .*to_parquet"):
        pickle.dumps(g)


def test_repr_of_typed_graphs() -> None:
    text = repr(gs.heterograph(TYPED, TYPED_NODES))
    assert text.startswith("Graph(num_nodes={'game': 4, 'user': 5}")
    assert "('user', 'follows', 'user'): 5" in text


def test_schemes() -> None:
    ours, theirs = typed_pair()
    assert ours.node_attr_schemes("user") == theirs.node_attr_schemes("user")
    assert ours.edge_attr_schemes("plays") == theirs.edge_attr_schemes("plays")
    assert ours.node_attr_schemes("user")["h"].shape == (2,)


def test_graphs_work_where_an_adjacency_is_asked_for() -> None:
    from graphshard.ops import gspmm

    g, _ = plain_pair()
    x = rand(7, 2)
    torch.testing.assert_close(
        gspmm(g, "copy_lhs", "sum", x, None), gspmm(g.adjacency(), "copy_lhs", "sum", x, None)
    )
    typed, _ = typed_pair()
    with pytest.raises(ValueError, match="etype must be given"):
        gspmm(typed, "copy_lhs", "sum", x, None)
