# SPDX-License-Identifier: Apache-2.0
"""What layers do apart from their numbers: errors, dropout, caching, dtypes, odd graphs, docs."""

from __future__ import annotations

import copy
import doctest
import importlib
import pkgutil
from typing import Any

import pytest
import torch
from nn_layer_cases import IN_FEATS, NUM_RELS, LayerCase, nn_layer_cases
from torch import Tensor

import graphshard.dgl
import graphshard.nn
from graphshard.dgl.nn import AGNNConv, APPNPConv, DotGatConv, EdgeWeightNorm, SGConv
from graphshard.graph import Graph, create_block, graph, heterograph
from graphshard.nn import (
    GATConv,
    GATv2Conv,
    GINConv,
    GraphConv,
    HeteroEmbedding,
    HeteroGraphConv,
    HeteroLinear,
    RelGraphConv,
    SAGEConv,
    TypedLinear,
)

PLAIN = nn_layer_cases("plain")
REFUSING = [
    GraphConv(IN_FEATS, 3),
    GATConv(IN_FEATS, 3, 2),
    GATv2Conv(IN_FEATS, 3, 2),
    DotGatConv(IN_FEATS, 3, 2),
    AGNNConv(),
    SGConv(IN_FEATS, 3),
]


def ring(num_nodes: int = 4, extra: int = 0) -> Graph:
    """A ring, and ``extra`` nodes without edges."""
    nodes = torch.arange(num_nodes)
    return graph((nodes, (nodes + 1) % max(num_nodes, 1)), num_nodes=num_nodes + extra)


@pytest.mark.parametrize(
    "module",
    [name for _, name, _ in pkgutil.walk_packages(graphshard.nn.__path__, "graphshard.nn.")],
)
def test_examples_in_the_docs_run(module: str) -> None:
    found = importlib.import_module(module)
    result = doctest.testmod(found)
    assert result.failed == 0
    layers = [
        v for v in vars(found).values() if isinstance(v, type) and v.__module__ == found.__name__
    ]
    if any(layer.__name__ in graphshard.nn.__all__ for layer in layers):
        assert result.attempted > 0


def test_every_layer_is_in_the_list_of_cases() -> None:
    names = {type(m).__name__ for c in PLAIN for m in c.make().modules()} | {"HeteroGraphConv"}
    others = {"DistributedBN1D", "HeteroEmbedding", "HeteroLinear", "TypedHGTConv"}
    assert set(graphshard.nn.__all__) - names == others
    assert len({case.name for case in nn_layer_cases()}) == len(nn_layer_cases())


@pytest.mark.parametrize("layer", REFUSING, ids=lambda layer: type(layer).__name__)
def test_nodes_without_in_edges_are_refused_unless_allowed(layer: Any) -> None:
    layer = copy.deepcopy(layer)
    g, x = ring(4, extra=1), torch.ones(5, IN_FEATS)
    with pytest.raises(
        ValueError, match=r"at least one in-edge per node.*add_self_loop.*allow_zero"
    ):
        layer(g, x)
    layer.set_allow_zero_in_degree(True)
    assert torch.isfinite(layer(g, x)).all()
    layer.set_allow_zero_in_degree(False)
    with pytest.raises(ValueError, match=type(layer).__name__):
        layer(g, x)


def nodes_and_edges_of(case: LayerCase, g: Graph, dtype: torch.dtype) -> tuple[Tensor, Any]:
    x = torch.randn(g.num_nodes(), IN_FEATS, generator=torch.manual_seed(0)).to(dtype)
    return x, case.keywords(torch.arange(g.num_edges()), dtype)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_bfloat16_comes_out_as_bfloat16_and_near_float32(case: LayerCase) -> None:
    g = ring(6, extra=1)
    layer = case.make()
    half = copy.deepcopy(layer).bfloat16()
    x, keywords = nodes_and_edges_of(case, g, torch.bfloat16)
    out = half(g, x, **keywords)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward() if out.requires_grad else None
    assert all(p.grad is None or p.grad.isfinite().all() for p in half.parameters())
    full = {k: v.float() if v.is_floating_point() else v for k, v in keywords.items()}
    torch.testing.assert_close(out.float(), layer(g, x.float(), **full), rtol=0.1, atol=0.15)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_no_nodes_at_all(case: LayerCase) -> None:
    g = graph((torch.tensor([], dtype=torch.int64),) * 2, num_nodes=0)
    x, keywords = nodes_and_edges_of(case, g, torch.float32)
    out = case.make()(g, x, **keywords)
    assert out.shape[0] == 0
    assert (
        out.shape[1:]
        == case.make()(
            ring(), torch.ones(4, IN_FEATS), **case.keywords(torch.arange(4), torch.float32)
        ).shape[1:]
    )


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_nodes_without_edges_come_out_alike_in_any_graph(case: LayerCase) -> None:
    x = torch.randn(7, IN_FEATS, generator=torch.manual_seed(0), requires_grad=True)
    layer = case.make().eval()
    whole = layer(ring(4, extra=3), x, **case.keywords(torch.arange(4), torch.float32))[4:]
    alone = graph((torch.tensor([], dtype=torch.int64),) * 2, num_nodes=3)
    keywords = case.keywords(torch.arange(0), torch.float32)
    out = layer(alone, x[4:], **keywords)
    torch.testing.assert_close(out, whole)
    expected = torch.autograd.grad(whole.sum(), x, allow_unused=True)[0]
    (grad,) = torch.autograd.grad(out.sum(), x, allow_unused=True)
    if grad is None or expected is None:
        assert not any(g is not None and g.any() for g in (grad, expected))
    else:
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_the_graph_is_left_as_it_was(case: LayerCase) -> None:
    g = ring()
    g.ndata["h"], g.edata["w"] = torch.zeros(4), torch.zeros(4)
    x, keywords = nodes_and_edges_of(case, g, torch.float32)
    case.make()(g, x, **keywords)
    assert set(g.ndata) == {"h"}
    assert set(g.edata) == {"w"}
    assert not g.ndata["h"].any()


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_a_layer_can_be_copied_printed_and_run_without_gradients(case: LayerCase) -> None:
    g = ring()
    x, keywords = nodes_and_edges_of(case, g, torch.float32)
    layer = case.make()
    out = layer(g, x, **keywords)
    assert torch.equal(copy.deepcopy(layer)(g, x, **keywords), out)
    # Without gradients, torch's recurrent modules take another kernel on some processors, whose
    # sums have another order. All else gives the same bits.
    is_recurrent = any(isinstance(module, torch.nn.RNNBase) for module in layer.modules())
    tolerance = {} if is_recurrent else {"rtol": 0, "atol": 0}
    with torch.no_grad():
        torch.testing.assert_close(layer(g, x, **keywords), out, **tolerance)
    with torch.inference_mode():
        torch.testing.assert_close(layer(g, x, **keywords), out, **tolerance)
    assert type(layer).__name__ in repr(layer)


def test_unknown_options() -> None:
    with pytest.raises(ValueError, match=r"aggregator_type must be one of mean.*got 'median'"):
        SAGEConv(2, 2, "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm must be one of none.*got 'up'"):
        GraphConv(2, 2, norm="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm must be one of none, both, right .*got 'left'"):
        EdgeWeightNorm("left")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"aggregator_type must be one of sum.*got 'min'"):
        GINConv(None, "min")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"aggregate must be a function or one of.*got 'median'"):
        HeteroGraphConv({}, "median")


@pytest.mark.parametrize(
    "layer",
    [
        SAGEConv(IN_FEATS, 3, "mean"),
        GraphConv(IN_FEATS, 3),
        GATConv(IN_FEATS, 3, 2),
        GINConv(),
        SGConv(IN_FEATS, 3),
        APPNPConv(2, 0.5),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_wrong_number_of_edge_weights(layer: Any) -> None:
    with pytest.raises(ValueError, match=r"edge_weight .* per edge.*4.*got .*3"):
        layer(ring(), torch.ones(4, IN_FEATS), edge_weight=torch.ones(3))


def test_edge_weight_norm_errors() -> None:
    g = ring()
    with pytest.raises(ValueError, match=r"one number per edge, shape \(4,\) \(got \(4, 2\)\)"):
        EdgeWeightNorm()(g, torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"every edge weight must be positive \(got -2.0\)"):
        EdgeWeightNorm()(g, torch.tensor([1.0, -2.0, 3.0, 0.0]))
    with pytest.raises(ValueError, match=r"every edge weight must be positive \(got 0.0\)"):
        EdgeWeightNorm()(g, torch.tensor([1.0, 2.0, 3.0, 0.0]))
    with pytest.raises(ValueError, match=r"must be positive \(got nan\)"):
        EdgeWeightNorm()(g, torch.tensor([1.0, torch.nan, 3.0, 1.0]))
    assert EdgeWeightNorm("none")(g, torch.zeros(4)).tolist() == [0.0] * 4


def test_one_number_per_edge_may_be_a_column() -> None:
    g, x, weight = ring(), torch.randn(4, IN_FEATS), torch.rand(4)
    for layer in (SAGEConv(IN_FEATS, 3, "mean"), GraphConv(IN_FEATS, 3), GINConv()):
        expected = layer(g, x, edge_weight=weight)
        torch.testing.assert_close(layer(g, x, edge_weight=weight.unsqueeze(1)), expected)
    etypes = torch.tensor([0, 1, 1, 0])
    for regularizer in (None, "basis"):
        relational = RelGraphConv(IN_FEATS, 3, 2, regularizer)  # type: ignore[arg-type]
        expected = relational(g, x, etypes, weight)
        torch.testing.assert_close(relational(g, x, [0, 1, 1, 0], weight.unsqueeze(1)), expected)


def test_weight_given_twice() -> None:
    with pytest.raises(
        ValueError, match=r"not from both \(got a weight of shape \(6, 3\)\).*=False"
    ):
        GraphConv(IN_FEATS, 3)(ring(), torch.ones(4, IN_FEATS), weight=torch.ones(IN_FEATS, 3))


def test_gcn_aggregator_needs_equal_widths() -> None:
    block = create_block(([0, 1], [0, 0]), num_src_nodes=2, num_dst_nodes=1)
    with pytest.raises(ValueError, match=r"'gcn'.*one width \(got \(2, 4\) and \(1, 3\)\)"):
        SAGEConv((4, 3), 2, "gcn")(block, (torch.ones(2, 4), torch.ones(1, 3)))


@pytest.mark.parametrize("layer", [GATConv((4, 3), 2, 2), DotGatConv((4, 3), 2, 2)])
def test_two_widths_need_a_pair(layer: Any) -> None:
    with pytest.raises(ValueError, match=r"needs a pair of inputs.*shape \(4, 4\)"):
        layer(ring(), torch.ones(4, 4))


@pytest.mark.parametrize("layer_type", [GATConv, DotGatConv])
def test_one_width_takes_a_pair_with_one_projection(layer_type: Any) -> None:
    g, x = ring(), torch.randn(4, IN_FEATS)
    layer = layer_type(IN_FEATS, 3, 2)
    torch.testing.assert_close(layer(g, (x, x)), layer(g, x))


@pytest.mark.parametrize("layer_type", [GATv2Conv, DotGatConv])
def test_a_pair_on_one_node_type_keeps_its_sides_apart(layer_type: Any) -> None:
    """Source and destination fields share a frame here, so their names must differ."""
    nodes = torch.arange(4)
    ends = (nodes, (nodes * 3 + 1) % 4)
    layer = layer_type((IN_FEATS, IN_FEATS), 3, 2)
    pair = torch.randn(2, 4, IN_FEATS).unbind(0)
    block = create_block(ends, num_src_nodes=4, num_dst_nodes=4)
    torch.testing.assert_close(layer(graph(ends), pair), layer(block, pair))


def test_sgc_caches_the_first_result() -> None:
    g, x = ring(), torch.randn(4, IN_FEATS)
    layer = SGConv(IN_FEATS, 3, k=2, cached=True)
    first = layer(g, x)
    assert torch.equal(layer(g, torch.zeros_like(x)), first)
    assert torch.equal(layer(g, x, edge_weight=torch.ones(4)), first)
    fresh = SGConv(IN_FEATS, 3, k=2)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(g, x), first)
    assert not torch.equal(fresh(g, torch.zeros_like(x)), first)


def test_dropout_acts_while_training_only() -> None:
    g, x = ring(), torch.randn(4, IN_FEATS)
    layers: list[tuple[Any, tuple[Any, ...]]] = [
        (SAGEConv(IN_FEATS, 3, "mean", feat_drop=0.5), ()),
        (GATConv(IN_FEATS, 3, 2, feat_drop=0.5), ()),
        (GATConv(IN_FEATS, 3, 2, attn_drop=0.5), ()),
        (GATv2Conv(IN_FEATS, 3, 2, feat_drop=0.5), ()),
        (GATv2Conv(IN_FEATS, 3, 2, attn_drop=0.5), ()),
        (APPNPConv(2, 0.5, edge_drop=0.5), ()),
        (RelGraphConv(IN_FEATS, 3, NUM_RELS, dropout=0.5), (torch.tensor([0, 1, 2, 0]),)),
    ]
    for layer, args in layers:
        torch.manual_seed(0)
        assert not torch.equal(layer(g, x, *args), layer(g, x, *args)), layer
        layer.eval()
        assert torch.equal(layer(g, x, *args), layer(g, x, *args)), layer


def test_appnp_drops_whole_edges_and_rescales() -> None:
    g = ring()
    torch.manual_seed(0)
    out = APPNPConv(1, 0.0, edge_drop=0.5)(g, torch.ones(4, 3))
    assert set(out.flatten().tolist()) == {0.0, 2.0}
    assert (out == out[:, :1]).all()


# ---------------------------------------------------------------- TypedLinear and RelGraphConv


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_typed_linear_multiplies_by_the_matrix_of_the_type(
    regularizer: Any, dtype: torch.dtype, in_order: bool
) -> None:
    layer = TypedLinear(6, 4, 5, regularizer, 2).double()
    types = torch.tensor([3, 0, 0, 4, 1, 3], dtype=dtype)  # no row of type 2
    types = types.sort().values if in_order else types
    x = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    weight = layer.get_weight()
    if regularizer == "bdd":
        weight = torch.stack([torch.block_diag(*w.view(2, 3, 2)) for w in weight])
    y = layer(x, types, sorted_by_type=in_order)
    expected = torch.einsum("ni,nio->no", x, weight[types.long()])
    torch.testing.assert_close(y, expected)
    inputs = [x, *layer.parameters()]
    seed = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, inputs, seed), torch.autograd.grad(expected, inputs, seed)
    )


def test_typed_linear_never_builds_a_matrix_per_row() -> None:
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                o.numel()
                for o in (out if isinstance(out, tuple) else (out,))
                if isinstance(o, Tensor)
            )
            return out

    layer = TypedLinear(16, 16, 3, "bdd", 4)
    with Watch():
        layer(torch.randn(100, 16), torch.arange(100) % 3).sum().backward()
    assert max(sizes) == 100 * 16


@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_typed_linear_without_rows(regularizer: Any) -> None:
    layer = TypedLinear(6, 4, 3, regularizer, 2)
    y = layer(torch.empty(0, 6), torch.empty(0, dtype=torch.int64))
    assert y.shape == (0, 4)
    y.sum().backward()
    assert layer.W.grad is not None
    assert not layer.W.grad.any()


def test_typed_linear_errors() -> None:
    with pytest.raises(
        ValueError, match=r"regularizer must be None, 'basis' or 'bdd' \(got 'l2'\)"
    ):
        TypedLinear(4, 4, 2, "l2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'basis' needs num_bases, at least 1 \(got None\)"):
        TypedLinear(4, 4, 2, "basis")
    with pytest.raises(ValueError, match=r"must divide .*num_bases=3, in_size=4, out_size=6"):
        TypedLinear(4, 6, 2, "bdd", 3)
    layer = TypedLinear(4, 4, 2)
    with pytest.raises(ValueError, match=r"one type per row: shape \(3,\) \(got \(2,\)\)"):
        layer(torch.ones(3, 4), torch.tensor([0, 1]))
    for bad in (2, -1):
        with pytest.raises(ValueError, match=rf"must lie in \[0, 2\) \(got {bad}\)"):
            layer(torch.ones(2, 4), torch.tensor([0, bad]))


def test_rel_graph_conv_errors() -> None:
    layer = RelGraphConv(IN_FEATS, 3, 2, "basis")
    x = torch.ones(4, IN_FEATS)
    with pytest.raises(
        ValueError, match=r"etypes needs one entry per edge.*4 edges \(got shape \(3,\)"
    ):
        layer(ring(), x, torch.tensor([0, 1, 0]))
    with pytest.raises(
        ValueError, match=r"norm needs one entry per edge.*4 edges \(got shape \(2,\)"
    ):
        layer(ring(), x, torch.tensor([0, 1, 0, 1]), torch.ones(2))
    with pytest.raises(ValueError, match=r"must lie in \[0, 2\) \(got 5\)"):
        layer(ring(), x, torch.tensor([0, 1, 5, 1]))


# ---------------------------------------------------------------- HeteroGraphConv

RELATIONS = {
    ("user", "knows", "user"): ([0, 1, 2], [1, 2, 0]),
    ("user", "plays", "game"): ([0, 1, 1], [0, 0, 1]),
    ("shop", "sells", "game"): ([0], [1]),
}


def typed_graph() -> Any:
    data = {key: tuple(torch.tensor(end) for end in ends) for key, ends in RELATIONS.items()}
    return heterograph(data, num_nodes_dict={"user": 3, "game": 2, "shop": 1})


def typed_features() -> dict[str, Tensor]:
    sizes = {"user": 3, "game": 2, "shop": 1}
    return {k: torch.randn(n, IN_FEATS, generator=torch.manual_seed(n)) for k, n in sizes.items()}


def gcn(names: list[Any]) -> dict[Any, torch.nn.Module]:
    return {name: GraphConv(IN_FEATS, 3, norm="right") for name in names}


def test_hetero_aggregate_may_be_a_function() -> None:
    seen = []

    def join(tensors: list[Tensor], ntype: str) -> Tensor:
        seen.append((ntype, len(tensors)))
        return torch.stack(tensors).prod(0)

    layer = HeteroGraphConv(gcn(["knows", "plays", "sells"]), join)
    out = layer(typed_graph(), typed_features())
    assert sorted(seen) == [("game", 2), ("user", 1)]
    assert out["game"].shape == (2, 3)


def test_hetero_layers_may_be_named_by_triple() -> None:
    by_name = gcn([r[1] for r in RELATIONS])
    by_triple = {relation: by_name[relation[1]] for relation in RELATIONS}
    g, x = typed_graph(), typed_features()
    expected = HeteroGraphConv(by_name)(g, x)
    out = HeteroGraphConv(by_triple)(g, x)
    assert all(torch.equal(out[k], expected[k]) for k in expected)


@pytest.mark.parametrize("by_triple", [False, True])
def test_hetero_layers_of_any_name(by_triple: bool) -> None:
    """Torch refuses modules with a dot in their name, and one called type or items."""
    names = ["a.b", "a%2Eb", "a%b", "type", "items", "training", "%type", "/x/y.", "http://z/#w.v"]
    draw = torch.manual_seed(0)
    edges = {("n", name, "n"): tuple(torch.randint(0, 5, (2, 9), generator=draw)) for name in names}
    g, x = heterograph(edges, {"n": 5}), torch.randn(5, IN_FEATS, generator=draw)
    layers = {
        name: GraphConv(IN_FEATS, 3, norm="none", bias=False, allow_zero_in_degree=True)
        for name in names
    }
    keys = {name: ("n", name, "n") if by_triple else name for name in names}
    layer = HeteroGraphConv({keys[name]: layers[name] for name in names})
    expected = torch.zeros(5, 3)
    for name in names:
        src, dst = edges["n", name, "n"]
        expected.index_add_(0, dst, x[src] @ layers[name].weight)
    assert torch.allclose(layer(g, {"n": x})["n"], expected, atol=1e-5)
    assert len(list(layer.parameters())) == len(names)
    again = HeteroGraphConv(
        {keys[name]: GraphConv(IN_FEATS, 3, norm="none", bias=False) for name in names}
    )
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(g, {"n": x})["n"], layer(g, {"n": x})["n"])
    kinds = {keys[name]: number + 1 for number, name in enumerate(names)}
    linear, tables = HeteroLinear(kinds, 2), HeteroEmbedding(kinds, 2)
    for kind, width in kinds.items():
        assert linear({kind: torch.ones(4, width)})[kind].shape == (4, 2)
        assert torch.equal(
            tables({kind: torch.tensor([width - 1])})[kind], tables.weight[kind][-1:]
        )


def test_hetero_arguments_by_name_or_triple() -> None:
    g, x = typed_graph(), typed_features()
    mods = {r[1]: GraphConv(IN_FEATS, 3, weight=r[1] != "plays") for r in RELATIONS}
    layer = HeteroGraphConv(mods)
    weight = torch.randn(IN_FEATS, 3)
    expected = layer(g, x, mod_args={"plays": (weight,)})
    for keywords in (
        {"plays": {"weight": weight}},
        {("user", "plays", "game"): {"weight": weight}},
    ):
        out = layer(g, x, mod_kwargs=keywords)
        assert all(torch.equal(out[k], expected[k]) for k in expected)


def test_hetero_missing_inputs_and_layers() -> None:
    g, x = typed_graph(), typed_features()
    layer = HeteroGraphConv(gcn(["knows", "plays", "sells"]))
    only_users = layer(g, {"user": x["user"]})  # a GraphConv reads no destination features
    assert sorted(only_users) == ["game", "user"]
    assert sorted(layer(g, {"shop": x["shop"]})) == ["game"]
    assert sorted(layer(g, ({"user": x["user"]}, {"user": x["user"]}))) == ["user"]
    sage = HeteroGraphConv({r[1]: SAGEConv(IN_FEATS, 3, "mean") for r in RELATIONS})
    with pytest.raises(ValueError, match=r"destination nodes too.*add the destination node type"):
        sage(g, {"user": x["user"]})
    partial = HeteroGraphConv(gcn(["knows"]))
    with pytest.raises(
        ValueError, match=r"\('shop', 'sells', 'game'\) has none \(mods has \['knows'\]\)"
    ):
        partial(g, x)


def test_hetero_localizes_used_sources_once() -> None:
    g, x = typed_graph(), typed_features()
    calls = []

    class Spy(type(g)):  # type: ignore[misc]
        def localize(self, inputs: dict[str, Tensor], **options: Any) -> Any:
            calls.append(sorted(inputs))
            return super().localize(inputs, **options)

    g.__class__ = Spy
    HeteroGraphConv(gcn(["knows", "plays", "sells"]))(g, x)
    assert calls == [["shop", "user"]]  # no relation starts at a game
