# SPDX-License-Identifier: Apache-2.0
"""A model that was trained here gives the same scores in PyG's layers and in DGL's. No group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, HGTConv, RGCNConv, SAGEConv
from train_cases import config_of, plain_graph, typed_graph

import graphshard
from graphshard.partition import partition_graph
from graphshard.partition.format import digest_of_content
from graphshard.train import FullBatchRun, predict
from graphshard.train._export import read_card


@pytest.fixture(scope="module")
def graph() -> graphshard.Graph:
    """Both directions of each edge once, and a self loop at each node."""
    plain = plain_graph()
    src, dst = (end.long() for end in plain.edges())
    pairs = torch.unique(torch.cat([torch.stack([src, dst]), torch.stack([dst, src])], 1), dim=1)
    both = graphshard.graph((pairs[0], pairs[1]), num_nodes=plain.num_nodes())
    for name, value in plain.ndata.items():
        both.ndata[name] = value
    return both


def trained(folder: Path, graph: graphshard.Graph, model: str, **values: Any) -> np.ndarray:
    """Train into ``folder/run``; probabilities by node."""
    partition_graph(graph, "g", 1, str(folder / "parts"), quiet=True)
    data, run = str(folder / "parts" / "g.json"), str(folder / "run")
    FullBatchRun(config_of(data, model=model, epochs=3, run=run, **values)).train()
    table = predict(data, run, device="cpu").to_pandas()
    found: np.ndarray = table[["p_0", "p_1", "p_2"]].to_numpy()
    return found


def gcn_of(state: dict[str, Tensor], layer: str, shape: list[int]) -> torch.nn.Module:
    conv = GCNConv(shape[0], shape[1], add_self_loops=False).double()
    conv.load_state_dict({"lin.weight": state[f"{layer}.weight"].T, "bias": state[f"{layer}.bias"]})
    return conv


def sage_of(state: dict[str, Tensor], layer: str, shape: list[int]) -> torch.nn.Module:
    conv = SAGEConv(shape[0], shape[1]).double()
    conv.load_state_dict(
        {
            "lin_l.weight": state[f"{layer}.fc_neigh.weight"],
            "lin_l.bias": state[f"{layer}.fc_self.bias"],
            "lin_r.weight": state[f"{layer}.fc_self.weight"],
        }
    )
    return conv


def gat_of(state: dict[str, Tensor], layer: str, shape: list[int]) -> torch.nn.Module:
    conv = GATConv(shape[0], shape[1], heads=shape[2], add_self_loops=False).double()
    conv.load_state_dict(
        {
            "lin.weight": state[f"{layer}.fc.weight"],
            "att_src": state[f"{layer}.attn_l"],
            "att_dst": state[f"{layer}.attn_r"],
            "bias": state[f"{layer}.bias"],
        }
    )
    return conv


def gatv2_of(state: dict[str, Tensor], layer: str, shape: list[int]) -> torch.nn.Module:
    conv = GATv2Conv(shape[0], shape[1], heads=shape[2], add_self_loops=False).double()
    names = {"att": "attn"}
    for theirs, ours in (("lin_l", "fc_src"), ("lin_r", "fc_dst")):
        names |= {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}
    weights = {theirs: state[f"{layer}.{ours}"] for theirs, ours in names.items()}
    conv.load_state_dict({**weights, "bias": torch.zeros(shape[1] * shape[2])})
    return conv


@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "gatv2"])
def test_pyg_layers_give_the_same_scores(
    model: str, graph: graphshard.Graph, tmp_path: Path
) -> None:
    has_heads = model in ("gat", "gatv2")
    more: dict[str, Any] = {"heads": 2} if has_heads else {}
    expected = trained(tmp_path, graph, model, **more)
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    state = load_file(tmp_path / "run" / card["weights"]["file"])
    heads = card["config"]["heads"] if has_heads else 1
    width, hidden = card["feature_widths"]["_N"], card["config"]["hidden"]
    shapes = [[width, hidden, heads], [hidden * heads, card["num_classes"], 1]]
    make = {"gcn": gcn_of, "sage": sage_of, "gat": gat_of, "gatv2": gatv2_of}[model]
    layers = [make(state, f"layers.{i}", shape) for i, shape in enumerate(shapes)]
    edge_index = torch.stack([end.long() for end in graph.edges()])
    with torch.no_grad():
        h = layers[0](graph.ndata["feat"], edge_index)
        scores = layers[1](F.elu(h) if has_heads else F.relu(h), edge_index)
    np.testing.assert_allclose(scores.softmax(1).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "gatv2"])
def test_dgl_layers_take_the_weights_as_they_are(
    model: str, graph: graphshard.Graph, tmp_path: Path
) -> None:
    dgl_nn = pytest.importorskip("dgl.nn")
    has_heads = model in ("gat", "gatv2")
    more: dict[str, Any] = {"heads": 2} if has_heads else {}
    expected = trained(tmp_path, graph, model, **more)
    state = load_file(tmp_path / "run" / "model.safetensors")
    made = {
        "gcn": lambda: [dgl_nn.GraphConv(20, 6), dgl_nn.GraphConv(6, 3)],
        "sage": lambda: [dgl_nn.SAGEConv(20, 6, "mean"), dgl_nn.SAGEConv(6, 3, "mean")],
        "gat": lambda: [dgl_nn.GATConv(20, 6, 2), dgl_nn.GATConv(12, 3, 1)],
        "gatv2": lambda: [dgl_nn.GATv2Conv(20, 6, 2), dgl_nn.GATv2Conv(12, 3, 1)],
    }[model]()
    layers = torch.nn.ModuleList(made).double()
    torch.nn.ModuleDict({"layers": layers}).load_state_dict(state)
    theirs = graphshard.to_dgl(graph)
    with torch.no_grad():
        h = layers[0](theirs, graph.ndata["feat"]).flatten(1)
        h = F.elu(h) if has_heads else F.relu(h)
        scores = layers[1](theirs, h).flatten(1)
    np.testing.assert_allclose(scores.softmax(1).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("model", "hidden"), [("gcn", 64), ("gcn", 6), ("sage", 6)])
def test_sparse_features_in_pyg_and_dgl(
    model: str, hidden: int, graph: graphshard.Graph, tmp_path: Path
) -> None:
    dense = torch.rand(graph.num_nodes(), 9, dtype=torch.float64) * (torch.arange(9) % 3 == 0)
    dense[:, -1] = torch.arange(graph.num_nodes()) % 2
    sparse = graph.local_var()
    del sparse.ndata["feat"]
    sparse.ndata["feat_columns"] = torch.where(dense != 0, torch.arange(1, 10), 0).int()
    sparse.ndata["feat_values"] = dense
    expected = trained(tmp_path, sparse, model, hidden=hidden, encoder=False)
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    state = load_file(tmp_path / "run" / "model.safetensors")
    matrix = state["category_tables.matrices.0.weight"][1:]
    is_own = "weight=False" in card["layers"]["layers.0"]
    assert is_own == (hidden == 64)
    count = card["sparse_counts"]["_N"] - 1
    assert matrix.shape == (count, 64)
    rows = dense[:, :count] if is_own else dense[:, :count] @ matrix
    if is_own:
        state["layers.0.weight"] = matrix
    shapes = [[rows.shape[1], hidden], [hidden, 3]]
    make = {"gcn": gcn_of, "sage": sage_of}[model]
    layers = [make(state, f"layers.{i}", shape) for i, shape in enumerate(shapes)]
    edge_index = torch.stack([end.long() for end in graph.edges()])
    with torch.no_grad():
        scores = layers[1](F.relu(layers[0](rows, edge_index)), edge_index)
    np.testing.assert_allclose(scores.softmax(1).numpy(), expected, rtol=0, atol=1e-12)
    dgl_nn = pytest.importorskip("dgl.nn")
    theirs = {"gcn": dgl_nn.GraphConv, "sage": dgl_nn.SAGEConv}[model]
    more = ("mean",) if model == "sage" else ()
    in_dgl = torch.nn.ModuleList(theirs(*shape, *more) for shape in shapes).double()
    of_layers = {k: v for k, v in state.items() if k.startswith("layers.")}
    torch.nn.ModuleDict({"layers": in_dgl}).load_state_dict(of_layers)
    whole = graphshard.to_dgl(graph)
    with torch.no_grad():
        scores = in_dgl[1](whole, F.relu(in_dgl[0](whole, rows)))
    np.testing.assert_allclose(scores.softmax(1).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None, "odd": 1}, "graphshard 0.0.1 wrote it, and it lacks 'target'"),
        ({"odd": 1}, "graphshard 0.0.1 wrote it, and it has 'odd'"),
        ({"format_version": 7}, "its format is graphshard-model 7, and this version"),
    ],
)
def test_a_card_of_another_version_is_one_line(
    changes: dict[str, Any], message: str, graph: graphshard.Graph, tmp_path: Path
) -> None:
    trained(tmp_path, graph, "gcn")
    path = tmp_path / "run" / "model.json"
    content = {**json.loads(path.read_text()), **changes, "versions": {"graphshard": "0.0.1"}}
    if content["target"] is None:
        del content["target"]
    content["digest"] = digest_of_content(content, "digest")
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as caught:
        read_card(tmp_path / "run")
    assert message in str(caught.value)
    assert len(str(caught.value).removeprefix(str(path))) < 200


@pytest.mark.parametrize("num_bases", [0, 2])
def test_relations_by_number_in_pyg_and_dgl(num_bases: int, tmp_path: Path) -> None:
    plain = plain_graph()
    expected = trained(tmp_path, plain, "rgcn", num_bases=num_bases)
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    state = load_file(tmp_path / "run" / "model.safetensors")
    widths = [card["feature_widths"]["_N"], card["config"]["hidden"], card["num_classes"]]
    count = card["num_relations"]
    edge_index = torch.stack([end.long() for end in plain.edges()])
    etype = plain.edata["etype"]

    def pyg(layer: int, h: Tensor) -> Tensor:
        conv = RGCNConv(*widths[layer : layer + 2], count, num_bases=num_bases or None).double()
        names = {"weight": "linear_r.W", "root": "loop_weight", "bias": "h_bias"}
        names |= {"comp": "linear_r.coeff"} if num_bases else {}
        conv.load_state_dict({a: state[f"layers.{layer}.{b}"] for a, b in names.items()})
        return conv(h, edge_index, etype)

    with torch.no_grad():
        scores = pyg(1, F.relu(pyg(0, plain.ndata["feat"])))
    np.testing.assert_allclose(scores.softmax(1).numpy(), expected, rtol=0, atol=1e-12)

    dgl_nn = pytest.importorskip("dgl.nn")
    kind = ("basis", num_bases) if num_bases else (None, None)
    made = [dgl_nn.RelGraphConv(*widths[i : i + 2], count, *kind) for i in (0, 1)]
    layers = torch.nn.ModuleList(made).double()
    torch.nn.ModuleDict({"layers": layers}).load_state_dict(state)
    theirs = graphshard.to_dgl(plain)
    code = edge_index[1] * count + etype
    norm = 1 / torch.bincount(code)[code].double().unsqueeze(1)  # a mean for each relation
    with torch.no_grad():
        h = layers[0](theirs, plain.ndata["feat"], etype, norm)
        scores = layers[1](theirs, F.relu(h), etype, norm)
    np.testing.assert_allclose(scores.softmax(1).numpy(), expected, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def typed() -> graphshard.Graph:
    """Several types, all with features."""
    made = typed_graph()
    for seed, ntype in enumerate(("paper", "place")):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.rand(made.num_nodes(ntype), 4 + seed, generator=generator, dtype=torch.float64)
        made.nodes[ntype].data["feat"] = rows
    return made


def projected(state: dict[str, Tensor], card: Any, typed: graphshard.Graph) -> dict[str, Tensor]:
    """Rows of all types, in the width of the first layer."""
    return {
        ntype: typed.nodes[ntype].data["feat"] @ state[f"projections.{number}.weight"].T
        for number, ntype in enumerate(card["feature_widths"])
    }


def hgt_of(state: dict[str, Tensor], card: Any, layer: str) -> torch.nn.Module:
    ntypes, etypes = card["node_types"], [tuple(etype) for etype in card["relations"]]
    hidden, heads = card["config"]["hidden"], card["config"]["heads"]
    conv = HGTConv(dict.fromkeys(ntypes, hidden), hidden, (ntypes, etypes), heads).double()
    theirs = conv.state_dict()
    for number, ntype in enumerate(ntypes):
        for kind in ("weight", "bias"):
            rows = [
                state[f"{layer}.{name}.{number}.{kind}"] for name in ("keys", "queries", "values")
            ]
            theirs[f"kqv_lin.lins.{ntype}.{kind}"] = torch.cat(rows)
            theirs[f"out_lin.lins.{ntype}.{kind}"] = state[f"{layer}.outputs.{number}.{kind}"]
        theirs[f"skip.{ntype}"] = state[f"{layer}.skip"][number : number + 1]
    for name, of_theirs in (("attention", "k_rel"), ("message", "v_rel")):
        by_head = state[f"{layer}.{name}"].transpose(0, 1)  # PyG has heads before relations
        theirs[f"{of_theirs}.weight"] = by_head.flatten(0, 1)
    for number, etype in enumerate(etypes):
        theirs[f"p_rel.{'__'.join(etype)}"] = state[f"{layer}.priority"][number : number + 1]
    conv.load_state_dict(theirs)
    return conv


def edges_of(typed: graphshard.Graph) -> dict[Any, Tensor]:
    return {
        etype: torch.stack([end.long() for end in typed.edges(etype=etype)])
        for etype in typed.canonical_etypes
    }


def test_a_transformer_of_types_in_pyg(typed: graphshard.Graph, tmp_path: Path) -> None:
    expected = trained(tmp_path, typed, "hgt", heads=2)
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    state = load_file(tmp_path / "run" / "model.safetensors")
    with torch.no_grad():
        h = {t: F.relu(rows) for t, rows in projected(state, card, typed).items()}
        for number in range(card["config"]["layers"]):
            found = hgt_of(state, card, f"layers.{number}")(h, edges_of(typed))
            h = {t: rows for t, rows in found.items() if rows is not None}
        scores = h[card["target"]] @ state["output.weight"].T + state["output.bias"]
    np.testing.assert_allclose(scores.softmax(1).numpy(), expected, rtol=0, atol=1e-12)


def test_layers_of_relations_in_pyg_and_dgl(typed: graphshard.Graph, tmp_path: Path) -> None:
    """SAGE on a typed graph: a layer for each relation, and a matrix for the node's own row."""
    expected = trained(tmp_path, typed, "sage")
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    state = load_file(tmp_path / "run" / "model.safetensors")
    ntypes, etypes = card["node_types"], [tuple(etype) for etype in card["relations"]]
    hidden = card["config"]["hidden"]

    def pyg(layer: int, h: dict[str, Tensor]) -> dict[str, Tensor]:
        sums = {}
        for number, ntype in enumerate(ntypes):
            own = f"layers.{layer}.own.{number}"
            sums[ntype] = h[ntype] @ state[f"{own}.weight"].T + state[f"{own}.bias"]
        for etype, edge_index in edges_of(typed).items():
            name = f"layers.{layer}.relations.mods.{etype}"
            width = state[f"{name}.fc_self.weight"].shape[0]
            conv = SAGEConv((hidden, hidden), width).double()
            named = {"lin_l.weight": "fc_neigh.weight", "lin_l.bias": "fc_self.bias"}
            named["lin_r.weight"] = "fc_self.weight"
            conv.load_state_dict({a: state[f"{name}.{b}"] for a, b in named.items()})
            sums[etype[2]] = sums[etype[2]] + conv((h[etype[0]], h[etype[2]]), edge_index)
        return sums

    with torch.no_grad():
        h = pyg(0, projected(state, card, typed))
        scores = pyg(1, {t: F.relu(rows) for t, rows in h.items()})[card["target"]]
    np.testing.assert_allclose(scores.softmax(1).numpy(), expected, rtol=0, atol=1e-12)

    dgl_nn = pytest.importorskip("dgl.nn")
    h, theirs = projected(state, card, typed), graphshard.to_dgl(typed)
    with torch.no_grad():
        for layer, width in enumerate((hidden, card["num_classes"])):
            convs = {etype: dgl_nn.SAGEConv(hidden, width, "mean") for etype in etypes}
            conv = dgl_nn.HeteroGraphConv(convs, aggregate="sum").double()
            prefix = f"layers.{layer}.relations."
            of_conv = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
            conv.load_state_dict(of_conv)
            found, own = conv(theirs, h), {}
            for number, ntype in enumerate(ntypes):
                name = f"layers.{layer}.own.{number}"
                own[ntype] = h[ntype] @ state[f"{name}.weight"].T + state[f"{name}.bias"]
            h = {t: found.get(t, 0) + rows for t, rows in own.items()}
            h = {t: F.relu(rows) for t, rows in h.items()} if layer == 0 else h
    np.testing.assert_allclose(h[card["target"]].softmax(1).numpy(), expected, rtol=0, atol=1e-12)
