# SPDX-License-Identifier: Apache-2.0
"""The protocol itself: scopes, and what a graph of another kind gets from filling the hooks."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from graph_oracle import dgl, fn, gs, plain_pair, rand, typed_pair

from graphshard.graph.frame import Frame
from graphshard.graph.structure import Schema

# ---------------------------------------------------------------------------------- scopes


def change_everything(g: Any) -> None:
    g.ndata["new"] = torch.zeros(7)
    g.ndata["h"] = torch.zeros(7, 3)
    g.edata["new"] = torch.zeros(10)
    del g.edata["w"]
    g.ndata["kept"].add_(1)
    g.apply_edges(lambda edges: {"z": edges.src["h"]})


@pytest.mark.parametrize("kind", ["ours", "dgl"])
def test_changes_in_a_scope_are_undone_but_not_those_inside_tensors(kind: str) -> None:
    g: Any = dict(zip(["ours", "dgl"], plain_pair(), strict=True))[kind]
    g.ndata["kept"] = torch.zeros(7)
    before = g.ndata["h"]
    with g.local_scope():
        change_everything(g)
        assert "z" in g.edata
    assert set(g.ndata) == {"h", "kept"}
    assert set(g.edata) == {"w", "s"}
    assert torch.equal(g.ndata["h"], before)
    assert torch.equal(g.ndata["kept"], torch.ones(7))


def test_an_error_leaves_the_scope_too() -> None:
    g, _ = plain_pair()
    g.ndata["kept"] = torch.zeros(7)

    def fail() -> None:
        with g.local_scope():
            change_everything(g)
            g.update_all(fn.copy_u("absent", "m"), fn.sum("m", "o"))

    with pytest.raises(KeyError, match="absent"):
        fail()
    assert set(g.ndata) == {"h", "kept"}
    assert set(g.edata) == {"w", "s"}


def test_nested_scopes() -> None:
    g, _ = plain_pair()
    with g.local_scope():
        g.ndata["a"] = torch.zeros(7)
        with g.local_scope():
            assert g._src_frames[0].scope_fields() == []
            g.srcdata["b"] = torch.zeros(7)
            assert g._src_frames[0].scope_fields() == ["b"]
            assert g._dst_frames is g._src_frames
        assert set(g.ndata) == {"h", "a"}
        assert g._src_frames[0].scope_fields() == ["a"]
    assert set(g.ndata) == {"h"}


def test_results_are_recorded_as_destination_fields() -> None:
    g, _ = plain_pair()
    with g.local_scope():
        g.srcdata["x"] = g.ndata["h"]
        g.update_all(fn.copy_u("x", "m"), fn.sum("m", "o"))
        g.apply_nodes(lambda nodes: {"p": nodes.data["o"]})
        frame = g._src_frames[0]
        assert frame.scope_fields() == ["x", "o", "p"]
        assert [frame.view_of(name) for name in ("x", "o", "p")] == ["src", "dst", "node"]


# ---------------------------------------------------------------------------------- another kind


class HalfGraph(gs.MessagePassingGraph):
    """Fills three hooks: what the base class makes of them is under test."""

    def __init__(self, num_nodes: int, num_edges: int) -> None:
        frames = [Frame(num_nodes)]
        edge_frames = [Frame(num_edges, default_view="edge")]
        schema = Schema.of_graph(["n"], [("n", "e", "n")])
        device = torch.device("cpu")
        self._init_protocol(schema, frames, frames, edge_frames, False, device, torch.int64)
        self.calls: list[Any] = []

    def _reduce(self, relation: int, message_func: Any, reduce_func: Any) -> dict[str, Any]:
        self.calls.append((relation, message_func, reduce_func))
        return {reduce_func.out_field: torch.full((self.num_nodes(), 1), 2.0)}

    def _edge_values(self, relation: int, func: Any) -> dict[str, Any]:
        self.calls.append((relation, func))
        return {func.out_field: Deferred(self.num_edges())}

    def _edge_softmax(self, relation: int, logits: Any, norm_by: str) -> Any:
        self.calls.append((relation, logits, norm_by))
        return logits


class Deferred:
    def __init__(self, num_rows: int) -> None:
        self.shape = torch.Size([num_rows, 1])
        self.device = torch.device("cpu")


def test_the_base_class_does_the_rest() -> None:
    g = HalfGraph(3, 5)
    assert g.is_homogeneous
    assert g.num_nodes() == g.num_src_nodes() == 3
    assert g.num_edges() == 5
    assert g.nodes().tolist() == [0, 1, 2]
    message, reduce = fn.copy_u("h", "m"), fn.sum("m", "o")
    with g.local_scope():
        g.update_all(message, reduce, lambda nodes: {"p": nodes.data["o"] + nodes.nodes()[:, None]})
        assert g.calls.pop() == (0, message, reduce)
        assert g.ndata["p"].flatten().tolist() == [2.0, 3.0, 4.0]
        g.multi_update_all({"e": (message, reduce)}, "stack")
        assert g.ndata["o"].shape == (3, 1, 1)
        g.apply_edges(fn.u_add_v("h", "h", "z"))
        deferred = g.edata["z"]
        assert isinstance(deferred, Deferred)
        assert gs.edge_softmax(g, deferred) is deferred  # type: ignore[call-overload]
        assert g.calls.pop() == (0, deferred, "dst")
    assert set(g.ndata) == set(g.edata) == set()
    inputs = {"n": torch.zeros(3)}
    assert g.localize(inputs) == (g, inputs)
    assert g.together([lambda: 1, lambda: "two"]) == [1, "two"]
    assert g.local_var().num_nodes() == 3
    assert g.clone().calls is g.calls


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda g: g.pull([0], None, None), "HalfGraph does not offer pull; use update_all"),
        (lambda g: g.push([0], None, None), "push; use update_all"),
        (lambda g: g.send_and_recv([0], None, None), "send_and_recv; use update_all"),
        (lambda g: g.in_degrees(), "does not offer in_degrees"),
        (lambda g: g.out_degrees(), "does not offer out_degrees"),
        (lambda g: g.edges(), "does not offer all_edges"),
        (lambda g: g.any_zero_in_degree(), "any_zero_in_degree"),
        (lambda g: g.has_edges(), "has_edges"),
        (lambda g: g["e"], "slicing by relation"),
        (lambda g: g.nodes[[0]].data, "naming single nodes; use all nodes"),
        (lambda g: g.edges[[0]].data, "naming single edges; use all edges"),
        (lambda g: g._edge_values_at(0, None, None), "apply_edges on some edges"),
        (lambda g: g._edge_softmax_joint([0], [], "dst"), "edge_softmax over several relations"),
    ],
)
def test_hooks_left_out_say_what_to_do(ask: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        ask(HalfGraph(2, 2))


def test_bare_protocol() -> None:
    class Bare(HalfGraph):
        _reduce = gs.MessagePassingGraph._reduce
        _edge_values = gs.MessagePassingGraph._edge_values
        _edge_softmax = gs.MessagePassingGraph._edge_softmax

    g = Bare(2, 2)
    for ask in (
        lambda: g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o")),
        lambda: g.apply_edges(fn.copy_u("h", "m")),
        lambda: gs.edge_softmax(g, torch.zeros(2)),
    ):
        with pytest.raises(NotImplementedError, match="Bare does not offer"):
            ask()


def test_separate_sides() -> None:
    class Sides(gs.MessagePassingGraph):
        def __init__(self) -> None:
            self._init_protocol(
                Schema.of_block(["a"], ["a", "b"], [("a", "r", "a"), ("a", "r", "b")]),
                [Frame(4)],
                [Frame(2), Frame(3)],
                [Frame(5), Frame(6)],
                True,
                torch.device("cpu"),
                torch.int32,
            )

    g = Sides()
    assert g.ntypes == ["a", "a", "b"]
    assert g.num_src_nodes("a") == 4
    assert g.num_dst_nodes("a") == 2
    assert g.num_nodes() == 9
    assert g.srcnodes("a").dtype == torch.int32
    g.srcdata["h"] = torch.zeros(4)
    g.dstdata["h"] = {"b": torch.zeros(3)}
    g.edata["w"] = {("a", "r", "b"): torch.zeros(6)}
    assert g.dstdata["h"].keys() == {"b"}
    with pytest.raises(ValueError, match="the destination node type must be given"):
        g.dstnodes()


# ---------------------------------------------------------------------------------- DGL's layers


@pytest.mark.parametrize(
    "make",
    [
        lambda nn: nn.GraphConv(3, 2, norm="both", allow_zero_in_degree=True),
        lambda nn: nn.SAGEConv(3, 2, "mean"),
        lambda nn: nn.SAGEConv(3, 2, "pool"),
        lambda nn: nn.SAGEConv(3, 2, "lstm"),
        lambda nn: nn.GINConv(torch.nn.Linear(3, 2), "max"),
        lambda nn: nn.TAGConv(3, 2, k=2),
        lambda nn: nn.APPNPConv(2, 0.5),
        lambda nn: nn.NNConv(3, 2, torch.nn.Linear(1, 6), "mean"),
        lambda nn: nn.EdgeConv(3, 2, allow_zero_in_degree=True),
        lambda nn: nn.GatedGraphConv(3, 3, 2, 1),
    ],
    ids=["GCN", "mean", "pool", "lstm", "GIN", "TAG", "APPNP", "NN", "Edge", "Gated"],
)
def test_layers_of_dgl_run_on_our_graphs(make: Any) -> None:
    torch.manual_seed(0)
    layer = make(dgl.nn)
    results = []
    for g in plain_pair():
        x = g.ndata["h"].float().requires_grad_()
        extra = (g.edata["s"].float(),) if isinstance(layer, dgl.nn.NNConv) else ()
        out = layer(g, x, *extra)
        layer.zero_grad()
        (out**2).sum().backward()
        results.append([out, x.grad, *(p.grad for p in layer.parameters())])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_typed_layer_of_dgl_runs_on_our_graphs() -> None:
    torch.manual_seed(0)
    layer = dgl.nn.HeteroGraphConv(
        {name: dgl.nn.SAGEConv(2, 3, "mean") for name in ("follows", "plays", "rates", "liked")},
        aggregate="sum",
    )
    ours, theirs = (
        layer(g, {ntype: g.nodes[ntype].data["h"].float() for ntype in g.ntypes})
        for g in typed_pair()
    )
    assert ours.keys() == theirs.keys()
    for ntype in ours:
        torch.testing.assert_close(ours[ntype], theirs[ntype])


# ---------------------------------------------------------------------------------- cost


def test_fused_pairs_make_nothing_per_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    # 64 edges into one node: any tensor of a row per edge is larger than what is allowed here.
    g = gs.graph((torch.arange(64), torch.zeros(64, dtype=torch.int64)), num_nodes=64)
    g.ndata["h"] = rand(64, 8)
    g.edata["w"] = rand(64, 1)
    seen: list[str] = []
    relation = importlib.import_module("graphshard.graph.message_passing._relation")
    original = relation.gsddmm
    monkeypatch.setattr(relation, "gsddmm", lambda *args: seen.append(args[1]) or original(*args))
    for message in (
        fn.copy_u("h", "m"),
        fn.copy_e("w", "m"),
        fn.u_mul_e("h", "w", "m"),
        fn.e_sub_u("w", "h", "m"),
        fn.e_mul_u("w", "h", "m"),
    ):
        for reducer in (fn.sum, fn.mean, fn.max, fn.min):
            g.update_all(message, reducer("m", "o"))
    assert seen == []
    g.update_all(fn.u_add_v("h", "h", "m"), fn.sum("m", "o"))
    assert seen == ["add"]


def test_typed_graph_of_one_type_is_no_special_case() -> None:
    ours, theirs = typed_pair({("n", "a", "n"): ([0, 1], [1, 2])}, {"n": 3})
    assert ours.is_homogeneous
    assert ours.ndata["h"].shape == theirs.ndata["h"].shape
    assert ours["a"].is_homogeneous
    assert dgl.graph(([0], [1])).is_homogeneous
