# SPDX-License-Identifier: Apache-2.0
"""Frames and the views over them. No process group."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from graph_oracle import gs, typed_pair

from graphshard.graph.frame import Frame, OverlayView, RowsView, Scheme


def frame() -> Frame:
    made = Frame(3, "cpu", "nodes of type 'user'")
    made["a"] = torch.arange(3.0)
    made["b"] = torch.ones(3, 2)
    return made


def test_a_frame_is_a_dictionary() -> None:
    made = frame()
    assert list(made) == ["a", "b"]
    assert len(made) == 2
    assert "a" in made
    assert "c" not in made
    assert made.get("c") is None
    assert torch.equal(made.pop("a"), torch.arange(3.0))
    assert list(made) == ["b"]
    made.update({"c": torch.zeros(3)})
    assert made.schemes == {"b": Scheme((2,), torch.float32), "c": Scheme((), torch.float32)}
    with pytest.raises(KeyError, match=r"no field 'x' on nodes of type 'user'; there are"):
        made["x"]
    with pytest.raises(KeyError, match="no field 'x'"):
        del made["x"]
    assert "tensor" in repr(made)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (1, torch.zeros(3), TypeError, r"a field name must be a string \(got 1\)"),
        ("x", [1, 2, 3], TypeError, r"must be a torch tensor \(got list\); convert"),
        ("x", np.zeros(3), TypeError, r"must be a torch tensor \(got ndarray\)"),
        ("x", torch.zeros(4, 2), ValueError, r"each of the 3 nodes of type 'user' .*\(4, 2\)"),
        ("x", torch.tensor(1.0), ValueError, r"one row for each of the 3"),
        ("x", torch.zeros(3, device="meta"), ValueError, r"on device meta.*\.to\(device\)"),
    ],
)
def test_what_a_frame_refuses(name: Any, value: Any, error: Any, message: str) -> None:
    made = frame()
    with pytest.raises(error, match=message):
        made[name] = value
    assert list(made) == ["a", "b"]


class Deferred:
    """A value that is not there yet, as a sharded graph stores."""

    shape = torch.Size([3, 2])
    device = torch.device("cpu")
    dtype = torch.float32


def test_deferred_values_are_held() -> None:
    made = frame()
    value = Deferred()
    made["d"] = value
    assert made["d"] is value
    assert made.scope()["d"] is value
    assert made.schemes["d"] == Scheme((2,), torch.float32)
    with pytest.raises(TypeError, match="'d' is not a tensor yet and cannot move to meta"):
        made.to("meta")
    value.shape = torch.Size([2, 2])
    with pytest.raises(ValueError, match="'d' must have one row for each"):
        made["d"] = value


def test_views_are_recorded() -> None:
    made = frame()
    made.set("s", torch.zeros(3), "src")
    made.set("d", torch.zeros(3), "dst")
    made.set_rows("d2", torch.tensor([1]), torch.ones(1), "dst")
    assert [made.view_of(name) for name in ("a", "s", "d", "d2")] == ["node", "src", "dst", "dst"]
    made["s"] = torch.zeros(3)
    assert made.view_of("s") == "node"
    with pytest.raises(KeyError, match="no field 'gone'"):
        made.view_of("gone")


def test_scope_fields_are_those_since_the_innermost_scope() -> None:
    made = frame()
    assert made.scope_fields() == ["a", "b"]
    inner = made.scope()
    assert inner.scope_fields() == []
    inner.set("x", torch.zeros(3), "src")
    inner["a"] = torch.zeros(3)
    inner["x"] = torch.ones(3)
    assert inner.scope_fields() == ["x", "a"]
    assert inner.scope().scope_fields() == []
    del inner["x"]
    assert inner.scope_fields() == ["a"]
    assert made.scope_fields() == ["a", "b"]
    assert "x" not in made
    assert torch.equal(made["a"], torch.arange(3.0))


def test_rows_are_replaced_and_not_written_into() -> None:
    made = frame()
    before = made["b"]
    made.set_rows("b", torch.tensor([2, 0]), torch.tensor([[5.0, 6.0], [7.0, 8.0]]), "node")
    assert torch.equal(made["b"], torch.tensor([[7.0, 8.0], [1.0, 1.0], [5.0, 6.0]]))
    assert torch.equal(before, torch.ones(3, 2))
    made.set_rows("new", torch.tensor([1], dtype=torch.int32), torch.tensor([4]), "node")
    assert made["new"].tolist() == [0, 4, 0]
    with pytest.raises(ValueError, match=r"match the column, rows of shape \(2,\) .*delete the"):
        made.set_rows("b", torch.tensor([0]), torch.zeros(1, 3), "node")
    with pytest.raises(ValueError, match=r"torch.float32 \(got \(2,\) and torch.float64\)"):
        made.set_rows("b", torch.tensor([0]), torch.zeros(1, 2, dtype=torch.float64), "node")


def test_moving_a_frame() -> None:
    moved = frame().to("meta")
    assert moved.device == torch.device("meta")
    assert moved["b"].device == torch.device("meta")
    assert moved.scope_fields() == []
    same = frame()
    assert same.to("cpu")["a"] is same["a"]


def test_rows_view_gathers_once_and_on_demand() -> None:
    source = frame()
    view = RowsView(source, torch.tensor([2, 2, 0]))
    assert view["a"].tolist() == [2.0, 2.0, 0.0]
    assert view["a"] is view["a"]
    assert list(view) == ["a", "b"]
    assert len(view) == 2
    assert "b" in view
    assert "x" not in view
    assert RowsView(source, None)["a"] is source["a"]
    assert "2." in repr(view)
    with pytest.raises(KeyError, match="no field 'x'"):
        view["x"]


def test_overlay_view() -> None:
    view = OverlayView({"a": 1, "c": 3}, {"a": 0, "b": 2})
    assert dict(view) == {"a": 1, "c": 3, "b": 2}
    assert len(view) == 3
    assert "b" in view
    assert "x" not in view
    assert repr(view) == "{'a': 1, 'c': 3, 'b': 2}"


def test_a_frame_can_be_copied_deeply() -> None:
    made = frame()
    twin = copy.deepcopy(made)
    twin["a"].add_(1)
    assert made["a"].tolist() == [0.0, 1.0, 2.0]
    assert twin.view_of("a") == "node"


# ---------------------------------------------------------------------------------- views of graphs


def test_plain_views_share_one_frame() -> None:
    g = gs.graph(([0, 1], [1, 2]))
    g.srcdata["s"] = torch.zeros(3)
    g.dstdata["d"] = torch.ones(3)
    g.ndata["n"] = torch.ones(3)
    g.edata["e"] = torch.ones(2)
    g.nodes["_N"].data["t"] = torch.ones(3)
    assert set(g.ndata) == set(g.srcdata) == set(g.dstdata) == {"s", "d", "n", "t"}
    node_frame = g._src_frames[0]
    views = {name: node_frame.view_of(name) for name in node_frame}
    assert views == {"s": "src", "d": "dst", "n": "node", "t": "node"}
    assert g._edge_frames[0].view_of("e") == "edge"
    assert len(g.ndata) == 4
    assert "s" in g.ndata
    del g.ndata["s"]
    assert "s" not in g.srcdata
    assert "d" in repr(g.ndata)
    with pytest.raises(KeyError, match="no field 's' on nodes of type '_N'"):
        g.ndata["s"]


def test_a_view_follows_the_scope() -> None:
    g = gs.graph(([0], [1]))
    view = g.ndata
    with g.local_scope():
        view["x"] = torch.zeros(2)
        assert "x" in g.ndata
    assert "x" not in view


def test_some_rows() -> None:
    g = gs.graph(([0, 1, 1], [1, 2, 2]))
    g.ndata["x"] = torch.arange(3.0)
    assert g.nodes[[2, 0]].data["x"].tolist() == [2.0, 0.0]
    assert g.nodes[torch.tensor([1])].data["x"].tolist() == [1.0]
    assert g.nodes[[0], "_N"].data["x"].tolist() == [0.0]
    assert g.nodes[:].data["x"].tolist() == [0.0, 1.0, 2.0]
    g.nodes[[2]].data["x"] = torch.tensor([9.0])
    assert g.ndata["x"].tolist() == [0.0, 1.0, 9.0]
    g.edges[[1, 2]].data["w"] = torch.tensor([3.0, 4.0])
    assert g.edata["w"].tolist() == [0.0, 3.0, 4.0]
    assert g.edges[[0], [1]].data["w"].tolist() == [0.0]
    assert g.edges[:].data["w"] is g.edges[None].data["w"]
    assert "tensor" in repr(g.nodes[[0]].data)
    with pytest.raises(ValueError, match="deleted only for all rows"):
        del g.nodes[[0]].data["x"]
    with pytest.raises(ValueError, match="only the full slice"):
        g.nodes[0:1]
    with pytest.raises(ValueError, match="only the full slice"):
        g.edges[0:1]
    with pytest.raises(ValueError, match=r"a node id must be in \[0, 3\).*got 3"):
        g.nodes[[3]]
    with pytest.raises(ValueError, match=r"an edge id must be in \[0, 3\).*got -1"):
        g.edges[[-1]]


def test_typed_views_equal_dgl() -> None:
    ours, theirs = typed_pair()
    for g in (ours, theirs):
        g.ndata["x"] = {"game": torch.zeros(4, 1)}
        g.edata["y"] = {("user", "plays", "game"): torch.ones(4), "liked": torch.ones(3)}
        g.nodes["user"].data["z"] = torch.ones(5)
    for field in ("h", "x", "z", "absent"):
        mine, expected = ours.ndata[field], theirs.ndata[field]
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[key], expected[key]) for key in mine)
        assert ours.srcdata[field].keys() == theirs.srcdata[field].keys()
        assert ours.dstdata[field].keys() == theirs.dstdata[field].keys()
    assert set(ours.ndata) == set(theirs.ndata) == {"h", "x", "z"}
    mine, expected = ours.edata["y"], theirs.edata["y"]
    assert set(mine) == {("user", "plays", "game"), ("game", "liked", "user")}
    assert mine[("user", "plays", "game")].tolist() == [1.0] * 4
    assert set(ours.edata) == {"w", "y"}
    assert len(ours.edata) == 2
    assert "game" in repr(ours.ndata)
    del ours.ndata["h"]
    assert "h" not in ours.nodes["user"].data
    assert "h" not in ours.ndata
    with pytest.raises(KeyError, match="no field 'h' on any type"):
        del ours.ndata["h"]


def test_mistakes_with_typed_views() -> None:
    g, _ = typed_pair()
    with pytest.raises(TypeError, match=r"dictionary from type to tensor .*\.nodes\[type\]\.data"):
        g.ndata["x"] = torch.zeros(5)
    with pytest.raises(ValueError, match="no node type 'robot'"):
        g.ndata["x"] = {"robot": torch.zeros(5)}
    with pytest.raises(ValueError, match="no node type 'robot'"):
        g.nodes["robot"]
    with pytest.raises(ValueError, match="ntype must be given"):
        g.nodes()
    with pytest.raises(ValueError, match="no relation 'walks'"):
        g.edges["walks"]
    with pytest.raises(ValueError, match="etype must be given"):
        g.edges[[0]]
    with pytest.raises(ValueError, match=r"each of the 4 edges of relation \('user', 'plays'"):
        g.edges["plays"].data["w"] = torch.zeros(3)
