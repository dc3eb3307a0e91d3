# SPDX-License-Identifier: Apache-2.0
"""Every layer and option against DGL 1.1.3: outputs and all gradients. One process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dgl_oracle import BLOCKS, GRAPHS, HETERO, HETERO_NODES, Edges, compare, dgl, dgl_nn
from nn_layer_cases import IN_FEATS, LayerCase, nn_layer_cases
from torch import Tensor

import graphshard.dgl.nn
import graphshard.nn
from graphshard.graph import create_block, heterograph

PLAIN = nn_layer_cases("plain")
BLOCK = [case for case in PLAIN if case.block]
PAIR = [case for case in BLOCK if case.pair]
TYPED = nn_layer_cases("typed")


@pytest.fixture(autouse=True)
def _double_by_default() -> Iterator[None]:
    """DGL's APPNPConv makes its edge weights in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def features(num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, IN_FEATS, dtype=torch.float64, generator=generator)


def layers(case: LayerCase, relations: Any = ()) -> tuple[Any, Any]:
    """(ours, DGL's), built from the same seed."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    ours = case.make(relations).double()
    torch.manual_seed(0)
    theirs = case.make(relations, dgl_nn).double()
    torch.set_default_dtype(torch.float64)
    return ours, theirs


def ids(cases: list[LayerCase]) -> list[str]:
    return [case.name for case in cases]


@pytest.mark.parametrize("case", [*PLAIN, *TYPED], ids=ids([*PLAIN, *TYPED]))
def test_state_dict_moves_both_ways_and_a_seed_gives_the_same_parameters(case: LayerCase) -> None:
    ours, theirs = layers(case, list(HETERO))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


def each(cases: list[LayerCase], graphs: dict[str, Any]) -> pytest.MarkDecorator:
    """Every case on every graph, but for what DGL gets wrong.

    Its maximum over no edges at all sends the gradient to node 0, or fails.
    """
    pairs = [
        pytest.param(case, edges, id=f"{case.name}-{name}")
        for case in cases
        for name, edges in graphs.items()
        if name != "empty" or not ("pool" in case.name or "max" in case.name)
    ]
    return pytest.mark.parametrize(("case", "edges"), pairs)


@each(PLAIN, GRAPHS)
def test_graph(case: LayerCase, edges: Edges) -> None:
    compare(*layers(case), edges.graphs(), features(edges.num_src), case.keywords(edges.eids()))


@each(BLOCK, BLOCKS)
def test_block(case: LayerCase, edges: Edges) -> None:
    compare(*layers(case), edges.blocks(), features(edges.num_src), case.keywords(edges.eids()))


@each(PAIR, BLOCKS)
def test_pair_on_a_block(case: LayerCase, edges: Edges) -> None:
    pair = (features(edges.num_src), features(edges.num_dst, seed=1))
    compare(*layers(case), edges.blocks(), pair, case.keywords(edges.eids()))


@pytest.mark.parametrize("graph", ["full", "isolated"])
@pytest.mark.parametrize("case", [c for c in PLAIN if c.attention], ids=lambda case: case.name)
def test_attention_is_returned(case: LayerCase, graph: str) -> None:
    edges = GRAPHS[graph]
    keywords = {**case.keywords(edges.eids()), "get_attention": True}
    compare(*layers(case), edges.graphs(), features(edges.num_src), keywords)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("SAGEConv", ((IN_FEATS, 2), 4, "mean")),
        ("SAGEConv", ((IN_FEATS, 2), 9, "pool")),
        ("SAGEConv", ((IN_FEATS, 2), 3, "lstm")),
        ("GATConv", ((IN_FEATS, 2), 3, 2)),
        ("GATConv", ((IN_FEATS, 2), 3, 2, 0.0, 0.0, 0.2, True)),
        ("GATv2Conv", ((IN_FEATS, 2), 3, 2)),
        ("GATv2Conv", ((IN_FEATS, 6), 3, 2, 0.0, 0.0, 0.2, True)),
        ("DotGatConv", ((IN_FEATS, 2), 3, 2)),
    ],
)
def test_two_widths(name: str, args: tuple[Any, ...]) -> None:
    case = LayerCase(name, lambda lib, _: getattr(lib, name)(*args))
    edges = BLOCKS["full"]
    pair = (features(edges.num_src), features(edges.num_dst, seed=1)[:, : args[0][1]])
    ours, theirs = layers(case)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    compare(ours, theirs, edges.blocks(), pair, {})


def test_gat_takes_more_dimensions() -> None:
    case = next(c for c in PLAIN if c.name == "gat-residual")
    edges = GRAPHS["full"]
    x = torch.stack([features(8, seed) for seed in range(3)], dim=1)
    compare(*layers(case), edges.graphs(), x, {})


@pytest.mark.parametrize("name", ["gcn-both-3", "gcn-left-9", "gin-sum-weighted", "appnp", "agnn"])
def test_more_dimensions(name: str) -> None:
    case = next(c for c in PLAIN if c.name == name)
    edges = GRAPHS["full"]
    x = torch.stack([features(8, seed) for seed in range(3)], dim=1)
    keywords = case.keywords(edges.eids())
    if keywords:  # DGL pads a one-dimensional weight on the wrong side here
        keywords = {"edge_weight": keywords["edge_weight"].reshape(-1, 1, 1)}
    compare(*layers(case), edges.graphs(), x, keywords)


def test_external_weight() -> None:
    edges = GRAPHS["full"]
    weight = torch.randn(IN_FEATS, 3, dtype=torch.float64, generator=torch.manual_seed(3))
    case = LayerCase("gcn", lambda lib, _: lib.GraphConv(IN_FEATS, 3, weight=False))
    compare(*layers(case), edges.graphs(), features(8), {"weight": weight})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("norm", ["none", "both", "right"])
@pytest.mark.parametrize("bipartite", [False, True])
def test_edge_weight_norm(norm: Any, eps: float, dtype: torch.dtype, bipartite: bool) -> None:
    for edges in (BLOCKS if bipartite else GRAPHS).values():
        weight = 0.5 + torch.rand(len(edges.src), dtype=dtype, generator=torch.manual_seed(0))
        results = []
        graphs = edges.blocks() if bipartite else edges.graphs()
        for lib, graph in zip((graphshard.dgl.nn, dgl_nn), graphs, strict=True):
            leaf = weight.clone().requires_grad_()
            with warnings.catch_warnings():
                if lib is dgl_nn:  # it warns when a user-defined function meets no edges
                    warnings.simplefilter("ignore")
                normalized = lib.EdgeWeightNorm(norm, eps)(graph, leaf)
            (normalized * torch.arange(len(edges.src))).sum().backward()
            results.append((normalized, leaf.grad))
        torch.testing.assert_close(results[0], results[1])


def test_presorted_types() -> None:
    edges = GRAPHS["full"]
    etypes = torch.sort(edges.eids() % 3).values
    for regularizer in (None, "basis", "bdd"):
        case = LayerCase(
            "rgcn", lambda lib, _, r=regularizer: lib.RelGraphConv(IN_FEATS, 9, 3, r, 3)
        )
        compare(*layers(case), edges.graphs(), features(8), {"etypes": etypes, "presorted": True})


def hetero_graphs() -> tuple[Any, Any]:
    data = {relation: edges.ends() for relation, edges in HETERO.items()}
    ours = heterograph(data, num_nodes_dict=HETERO_NODES)
    return ours, dgl.heterograph(data, num_nodes_dict=HETERO_NODES)


def hetero_features() -> dict[str, Tensor]:
    return {name: features(size, seed) for seed, (name, size) in enumerate(HETERO_NODES.items())}


@pytest.mark.parametrize("case", TYPED, ids=ids(TYPED))
def test_typed_graph(case: LayerCase) -> None:
    graphs = hetero_graphs()
    relations = graphs[0].canonical_etypes
    assert relations == graphs[1].canonical_etypes
    keywords = case.keywords({relation: HETERO[relation].eids() for relation in relations})
    compare(*layers(case, relations), graphs, hetero_features(), keywords)


@pytest.mark.parametrize("case", TYPED, ids=ids(TYPED))
def test_typed_graph_with_a_pair_of_dictionaries(case: LayerCase) -> None:
    graphs = hetero_graphs()
    relations = graphs[0].canonical_etypes
    keywords = case.keywords({relation: HETERO[relation].eids() for relation in relations})
    x = hetero_features()
    inputs = ({"user": x["user"], "game": x["game"]}, {"user": x["user"] + 1, "game": x["game"]})
    if "gat" not in case.name and "gatv2" not in case.name:
        compare(*layers(case, relations), graphs, inputs, keywords)
        return
    # DGL keeps source and destination fields of one node type under one name when they agree
    inputs = (inputs[0], {"game": x["game"] - 1})
    compare(*layers(case, relations), graphs, inputs, keywords)


@pytest.mark.parametrize("case", TYPED, ids=ids(TYPED))
def test_typed_block(case: LayerCase) -> None:
    sizes = {"user": 2, "game": 3, "shop": 0}
    data: dict[Any, Any] = {
        ("user", "knows", "user"): ([0, 2, 3, 3], [0, 0, 1, 1]),
        ("user", "plays", "game"): ([1, 1, 4], [0, 2, 2]),
        ("shop", "sells", "game"): ([0, 1], [2, 2]),
        ("game", "never", "user"): ([], []),
    }
    ends = {
        relation: tuple(torch.tensor(nodes, dtype=torch.int64) for nodes in pair)
        for relation, pair in data.items()
    }
    ours = create_block(ends, HETERO_NODES, sizes)
    theirs = dgl.create_block(ends, HETERO_NODES, sizes)
    relations = ours.canonical_etypes
    assert relations == theirs.canonical_etypes
    eids = {relation: torch.arange(len(data[relation][0])) for relation in relations}
    graphs = (ours, theirs)
    compare(*layers(case, relations), graphs, hetero_features(), case.keywords(eids))


def test_hetero_embedding() -> None:
    sizes = {"user": 3, ("user", "likes", "item"): torch.tensor(4), "none": 0}
    made = []
    for of in (graphshard.nn, dgl_nn):
        torch.manual_seed(0)
        made.append(of.HeteroEmbedding(sizes, 5))
    ours, theirs = made
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ids = {"user": torch.tensor([2, 2, 0]), ("user", "likes", "item"): torch.tensor([[3], [1]])}
    for kind, rows in theirs(ids).items():
        assert torch.equal(ours(ids)[kind], rows)
        assert torch.equal(ours.weight[kind], theirs.weight[kind])
    ours.reset_parameters()
    bound = (6 / (3 + 5)) ** 0.5
    assert 0 < float(ours.weight["user"].detach().abs().max()) <= bound
    with pytest.raises(ValueError, match=r"0 rows or more \(got -1 for user\)"):
        graphshard.nn.HeteroEmbedding({"user": -1}, 2)
