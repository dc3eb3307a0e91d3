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
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from train_cases import config_of, plain_graph

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


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_pyg_layers_give_the_same_scores(
    model: str, graph: graphshard.Graph, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"heads": 2} if model == "gat" else {}
    expected = trained(tmp_path, graph, model, **more)
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    state = load_file(tmp_path / "run" / card["weights"]["file"])
    heads = card["config"]["heads"] if model == "gat" else 1
    width, hidden = card["feature_widths"]["_N"], card["config"]["hidden"]
    shapes = [[width, hidden, heads], [hidden * heads, card["num_classes"], 1]]
    make = {"gcn": gcn_of, "sage": sage_of, "gat": gat_of}[model]
    layers = [make(state, f"layers.{i}", shape) for i, shape in enumerate(shapes)]
    edge_index = torch.stack([end.long() for end in graph.edges()])
    with torch.no_grad():
        h = layers[0](graph.ndata["feat"], edge_index)
        scores = layers[1](F.elu(h) if model == "gat" else F.relu(h), edge_index)
    np.testing.assert_allclose(scores.softmax(1).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_dgl_layers_take_the_weights_as_they_are(
    model: str, graph: graphshard.Graph, tmp_path: Path
) -> None:
    dgl_nn = pytest.importorskip("dgl.nn")
    more: dict[str, Any] = {"heads": 2} if model == "gat" else {}
    expected = trained(tmp_path, graph, model, **more)
    state = load_file(tmp_path / "run" / "model.safetensors")
    made = {
        "gcn": lambda: [dgl_nn.GraphConv(20, 6), dgl_nn.GraphConv(6, 3)],
        "sage": lambda: [dgl_nn.SAGEConv(20, 6, "mean"), dgl_nn.SAGEConv(6, 3, "mean")],
        "gat": lambda: [dgl_nn.GATConv(20, 6, 2), dgl_nn.GATConv(12, 3, 1)],
    }[model]()
    layers = torch.nn.ModuleList(made).double()
    torch.nn.ModuleDict({"layers": layers}).load_state_dict(state)
    theirs = graphshard.to_dgl(graph)
    with torch.no_grad():
        h = layers[0](theirs, graph.ndata["feat"]).flatten(1)
        h = F.elu(h) if model == "gat" else F.relu(h)
        scores = layers[1](theirs, h).flatten(1)
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
