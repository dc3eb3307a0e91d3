# SPDX-License-Identifier: Apache-2.0
"""What a run is made of: configuration, embeddings, input dropout, evaluations. No process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_cases import knowledge_graph, plain_graph, typed_graph

from graphshard import EID, NID, heterograph, in_subgraph, to_block
from graphshard.nn import RelGraphConv
from graphshard.train import (
    GAT,
    GCN,
    RGCN,
    SAGE,
    Evaluation,
    FullBatchConfig,
    NodeEmbeddings,
    SampledConfig,
    TypedRGCN,
)
from graphshard.train._config import config_from_json
from graphshard.train._defaults import MODEL_DEFAULTS
from graphshard.train._embeddings import OneHotRelGraphConv, Table, uniform_rows
from graphshard.train._models import InputDropout

WRONG_FIELDS: dict[str, dict[str, Any]] = {
    "or the module and class of your own (got 'mlp')": {"model": "mlp"},
    "aggregation must be one of": {"aggregation": "both"},
    "dtype must be one of": {"dtype": "float16"},
    "hidden must be at least 1 (got 0)": {"hidden": 0},
    "epochs must be at least 1 (got 0)": {"epochs": 0},
    "patience must be at least 0 (got -1)": {"patience": -1},
    "dropout must be in [0, 1) (got 1.0)": {"dropout": 1.0},
    "lr must be a number, at least 0 (got nan)": {"lr": float("nan")},
    "weight_decay must be a number, at least 0 (got -1)": {"weight_decay": -1},
    "timeout must be a positive number of seconds (got 0)": {"timeout": 0},
    "seed must be at least 0 (got -3)": {"seed": -3},
    "seed must be below 2^63": {"seed": 2**63},
    "prefetch must be at least 0 (got -1)": {"prefetch": -1},
    "halo_dtype must be one of bfloat16, float16, int8 (got 'float8')": {"halo_dtype": "float8"},
    "heads is for the model gat": {"heads": 2},
    "num_bases is for the model rgcn": {"num_bases": 2},
    "aggregator must be one of mean, gcn, pool (got 'max')": {"aggregator": "max"},
    "aggregator is for the model sage (got aggregator='pool', gcn)": {"aggregator": "pool"},
    "save_every needs checkpoint_dir": {"save_every": 1},
    "resume needs checkpoint_dir": {"resume": True},
}


@pytest.mark.parametrize("message", list(WRONG_FIELDS))
def test_wrong_fields_are_refused(message: str) -> None:
    with pytest.raises(ValueError) as error:
        FullBatchConfig(data="g.json", **WRONG_FIELDS[message])
    assert message in str(error.value)


WRONG_SAMPLED_FIELDS: dict[str, dict[str, Any]] = {
    "model must be one of": {"model": "mlp"},
    "sampler must be one of neighbor, labor (got 'walk')": {"sampler": "walk"},
    "transport must be one of": {"transport": "mail"},
    "batch_size must be at least 0 (got -1)": {"batch_size": -1},
    "prefetch must be at least 0 (got -1)": {"prefetch": -1},
    "cache_bytes must be at least 0 (got -1)": {"cache_bytes": -1},
    "fanouts must hold one number per layer (got none)": {"fanouts": ()},
    "a fanout must be at least -1 (got -2)": {"fanouts": (3, -2)},
    "(got 2 for layers=3)": {"fanouts": (3, 3), "layers": 3},
    "(-1) cannot be drawn with replacement": {"fanouts": (3, -1), "replace": True},
    "replace is for the sampler neighbor": {"sampler": "labor", "replace": True},
}


@pytest.mark.parametrize("message", list(WRONG_SAMPLED_FIELDS))
def test_wrong_fields_of_a_sampled_run_are_refused(message: str) -> None:
    with pytest.raises(ValueError) as error:
        SampledConfig(data="g.json", **WRONG_SAMPLED_FIELDS[message])
    assert message in str(error.value)


def test_fanouts_and_layers_follow_from_each_other() -> None:
    config = SampledConfig(data="g.json", fanouts=(5, 4, 3)).resolved()
    assert (config.fanouts, config.layers) == ((5, 4, 3), 3)
    config = SampledConfig(data="g.json", layers=3).resolved()
    assert (config.fanouts, config.layers) == ((10, 10, 10), 3)
    assert SampledConfig(data="g.json").resolved().fanouts == (10, 10)


@pytest.mark.parametrize(
    "config",
    [
        FullBatchConfig(data="g.json", rematerialize=False, lr=0.5),
        SampledConfig(data="g.json", model="sage", fanouts=(5, -1), sampler="labor"),
    ],
)
def test_workers_read_the_configuration_that_was_sent(config: Any) -> None:
    assert config_from_json(config.to_json()) == config


def test_runs_of_two_modes_never_agree() -> None:
    full = FullBatchConfig(data="g.json").resolved()
    sampled = SampledConfig(data="g.json").resolved()
    assert full.to_json() != sampled.to_json()
    free = {"transport", "map_features", "cache_bytes", "prefetch"}
    assert not free & set(sampled.fixed_fields())
    assert set(sampled.fixed_fields()) >= {"fanouts", "batch_size", "sampler", "replace"}
    assert full.graph_options()["rematerialize"] is True
    assert full.graph_options()["prefetch"] == 1
    assert full.graph_options()["halo_dtype"] is None
    narrow = FullBatchConfig(data="g.json", halo_dtype="bfloat16", prefetch=3).resolved()
    assert narrow.graph_options()["halo_dtype"] is torch.bfloat16
    assert narrow.fixed_fields() != full.fixed_fields()


@pytest.mark.parametrize("model", list(MODEL_DEFAULTS))
def test_open_fields_take_the_model_s_values(model: str) -> None:
    config = FullBatchConfig(data="g.json", model=model, lr=0.0).resolved()
    assert config.hidden == MODEL_DEFAULTS[model]["hidden"]
    assert config.lr == 0.0
    assert None not in (config.layers, config.heads, config.dropout, config.epochs, config.patience)


def test_embedding_rows_depend_on_seed_type_and_id_alone() -> None:
    ids = torch.tensor([7, 0, 123456789012, 3])
    rows = uniform_rows(5, "paper", ids, 33)
    assert torch.equal(uniform_rows(5, "paper", ids[[2]], 33), rows[[2]])
    assert torch.equal(uniform_rows(5, "paper", ids, 8), rows[:, :8])
    for other in (uniform_rows(6, "paper", ids, 33), uniform_rows(5, "author", ids, 33)):
        assert not bool((other == rows).any())


def test_embedding_rows_look_uniform() -> None:
    rows = uniform_rows(0, "x", torch.arange(4000), 16)
    assert rows.min() >= 0
    assert rows.max() < 1
    assert abs(float(rows.mean()) - 0.5) < 0.005
    assert abs(float(rows.var()) - 1 / 12) < 0.001
    correlation = torch.corrcoef(torch.cat([rows.T, rows.roll(1, 0).T]))
    assert float((correlation - torch.eye(32)).abs().max()) < 0.08


def test_embeddings_are_scaled_by_the_nodes_of_all_ranks() -> None:
    embeddings = NodeEmbeddings({"a.b": Table(torch.arange(3), 94, 6)}, 0, torch.float32)
    (rows,) = embeddings().values()
    assert rows.shape == (3, 6)
    assert rows.dtype == torch.float32
    assert float(rows.detach().abs().max()) <= (6 / 100) ** 0.5
    empty = NodeEmbeddings({"a": Table(torch.arange(0), 5, 6)}, 0, torch.float64)
    assert empty()["a"].shape == (0, 6)


@pytest.mark.parametrize("is_constant", [False, True])
def test_input_dropout_keeps_the_places_and_the_mean(is_constant: bool) -> None:
    x = torch.zeros(400, 50)
    x[::3, ::7] = 2.0
    dropout = InputDropout(0.25)
    if is_constant:
        dropout.mark_constant(x)
    total = torch.zeros_like(x)
    for _ in range(40):
        out = dropout(x)
        assert out[x != 0].unique().tolist() == pytest.approx([0.0, 2.0 / 0.75])
        assert not bool(out[x == 0].any())
        total += out
    assert abs(float(total[x != 0].mean()) / 40 - 2.0) < 0.02
    x[0, 1] = 5.0  # a change is noticed
    assert any(bool(dropout(x)[0, 1] != 0) for _ in range(40))
    if not is_constant:
        x.data[0, 2] = 5.0
        assert any(bool(dropout(x)[0, 2] != 0) for _ in range(40))
    assert torch.equal(dropout.eval()(x), x)


@pytest.mark.parametrize("kind", ["dense", "gradient", "strided", "p=0"])
def test_input_dropout_is_plain_dropout_elsewhere(kind: str) -> None:
    x = torch.zeros(20, 10)
    x[0] = 1.0
    if kind == "dense":
        x = torch.rand(20, 10)
    elif kind == "gradient":
        x.requires_grad_()
    elif kind == "strided":
        x = x.T
    p = 0.0 if kind == "p=0" else 0.5
    torch.manual_seed(1)
    expected = F.dropout(x, p)
    torch.manual_seed(1)
    assert torch.equal(InputDropout(p)(x), expected)


def evaluation(epoch: int, accuracy: float, loss: float | None) -> Evaluation:
    return Evaluation(epoch=epoch, accuracy={"val": accuracy}, val_loss=loss)


def test_the_better_model_is_the_one_with_more_right_then_with_less_loss() -> None:
    first = evaluation(1, 0.5, 1.0)
    assert first.is_better_than(None)
    assert evaluation(2, 0.6, 2.0).is_better_than(first)
    assert evaluation(2, 0.5, 0.9).is_better_than(first)
    assert not evaluation(2, 0.5, 1.0).is_better_than(first)
    assert not evaluation(2, 0.4, 0.1).is_better_than(first)
    assert evaluation(2, 0.0, None).is_better_than(evaluation(1, 0.0, None))


def models() -> dict[str, nn.Module]:
    return {
        "gcn": GCN(20, 5, 3, dropout=0.0),
        "sage": SAGE(20, 5, 3, dropout=0.0),
        "gat": GAT(20, 4, 3, heads=2, dropout=0.0),
        "rgcn": RGCN(20, 5, 3, num_rels=4),
        "one_hot": RGCN(None, 5, 3, num_rels=4, num_bases=2),
    }


# GraphConv with norm "both" divides by out-degrees, of which a block knows only its own edges'.
@pytest.mark.parametrize("name", [name for name in models() if name != "gcn"])
@pytest.mark.parametrize("num_seeds", [6, 0])
def test_models_run_on_blocks_as_on_the_graph(name: str, num_seeds: int) -> None:
    graph = plain_graph()
    model = models()[name].double().eval()
    features: Tensor = graph.ndata["feat"]
    loops = torch.rand(graph.num_nodes(), 5, dtype=torch.float64)
    if name == "one_hot":
        features = torch.rand(graph.num_nodes(), 10, dtype=torch.float64)
    seeds = torch.arange(graph.num_nodes())[3 : 3 + num_seeds]
    blocks: list[Any] = []
    wanted = seeds
    for _ in range(2):
        part = in_subgraph(graph, wanted)
        block = to_block(part, wanted)
        block.edata["etype"] = graph.edata["etype"][part.edata[EID][block.edata[EID]]]
        blocks.insert(0, block)
        wanted = block.srcdata[NID]
    if name == "one_hot":
        expected = model([graph, graph], (features, loops))[seeds]
        found = model(blocks, (features[wanted], loops[wanted]))
    else:
        expected = model([graph, graph], features)[seeds]
        found = model(blocks, features[wanted])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("num_bases", [0, 2])
def test_the_one_hot_layer_is_rel_graph_conv_on_one_hot_rows(num_bases: int) -> None:
    """The oracle: RelGraphConv fed with the identity, and the rows as its matrices."""
    graph = knowledge_graph()
    count, width, etypes = graph.num_nodes(), 3, graph.edata["etype"]
    norm = torch.rand(graph.num_edges(), 1, dtype=torch.float64)
    matrices = torch.rand(num_bases or 4, count, width, dtype=torch.float64)
    loops = torch.rand(count, width, dtype=torch.float64)
    layer = OneHotRelGraphConv(width, 4, num_bases).double()
    oracle = RelGraphConv(
        count, width, 4, "basis" if num_bases else None, num_bases or None
    ).double()
    with torch.no_grad():
        layer.h_bias.fill_(0.5)
        oracle.h_bias.fill_(0.5)
        oracle.linear_r.W.copy_(matrices)
        oracle.loop_weight.copy_(loops)
        if num_bases:
            oracle.linear_r.coeff.copy_(layer.coeff)
    if num_bases:
        rows, seen = matrices.transpose(0, 1).flatten(1), graph
    else:
        src, dst = graph.edges()
        codes, place = torch.unique(src * 4 + etypes, return_inverse=True)
        rows = matrices[codes % 4, codes // 4]
        seen = heterograph(
            {("pair", "to", "node"): (place, dst)}, {"pair": len(codes), "node": count}
        )
    one_hot = torch.eye(count, dtype=torch.float64)
    expected = oracle(graph, one_hot, etypes, norm)
    torch.testing.assert_close(layer(seen, (rows, loops), etypes, norm), expected)
    expected = oracle(graph, one_hot, etypes)
    torch.testing.assert_close(layer(seen, (rows, loops), etypes), expected)


def test_the_typed_model_is_its_formula() -> None:
    graph = typed_graph()
    etypes, ntypes = graph.canonical_etypes, graph.ntypes
    model = TypedRGCN({"author": 7}, etypes, ntypes, "paper", 5, 3, layers=1).double()
    features = {
        "author": graph.nodes["author"].data["feat"],
        "paper": torch.rand(40, 5, dtype=torch.float64),
        "place": torch.rand(4, 5, dtype=torch.float64),
    }
    h = {**features, "author": features["author"] @ model.projections[0].weight.T}
    layer = model.layers[0]
    paper = ntypes.index("paper")
    expected = h["paper"] @ layer.loop_weight[paper] + layer.bias[paper]
    for number, etype in enumerate(etypes):
        if etype[2] != "paper":
            continue
        src, dst = graph[etype].edges()
        adjacency = torch.zeros(40, h[etype[0]].shape[0], dtype=torch.float64)
        adjacency.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)
        mean = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
        expected = expected + mean @ h[etype[0]] @ layer.weight[number]
    torch.testing.assert_close(model([graph], features), expected)


def test_a_model_needs_a_graph_for_each_layer() -> None:
    graph = plain_graph()
    with pytest.raises(ValueError, match="a model of 2 layers needs 2 graphs"):
        GCN(20, 5, 3)([graph], graph.ndata["feat"].float())
