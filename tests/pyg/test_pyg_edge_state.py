# SPDX-License-Identifier: Apache-2.0
"""Edge masks of PyG's explainers, and what layers cache of their edges. Uses 1, 2 and 3 ranks.

The oracle is PyG on the whole graph in one process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.explain import AttentionExplainer, Explainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

import graphshard
import graphshard.pyg
from graphshard.comm import share_error
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from layer_zoo import WIDTH, gap, owners, whole_graph

MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: pyg_nn.GCN(WIDTH, 8, 2, 3),  # adds self loops
    "GAT": lambda: pyg_nn.GAT(WIDTH, 8, 2, 3, heads=2),
    "GraphSAGE": lambda: pyg_nn.GraphSAGE(WIDTH, 8, 2, 3),  # does not
    "PNA": lambda: pyg_nn.GraphSAGE(WIDTH, 8, 2, 3, aggr=["max", "std"]),
    "a layer": lambda: pyg_nn.GATv2Conv(WIDTH, 3),
}


def masked(model: nn.Module, x: Tensor, edge_index: Tensor, mask: Tensor, sigmoid: bool) -> Tensor:
    set_masks(model, mask, edge_index, apply_sigmoid=sigmoid)
    out = model(x, edge_index)
    clear_masks(model)
    return out


def unordered_graph() -> Data:
    """Edges that do not come by destination, as those of a rank do."""
    whole = whole_graph(torch.float64)
    order = torch.randperm(whole.edge_index.shape[1], generator=torch.Generator().manual_seed(3))
    return Data(x=whole.x, edge_index=whole.edge_index[:, order])


def compare_masks(rank: int, world_size: int, cut: str, mode: str) -> dict[str, float]:
    whole, found = unordered_graph(), {}
    for name, make in MODELS.items():
        for is_parameter in (True, False):
            torch.manual_seed(1)
            reference = make().double()
            layer, parallel = copy.deepcopy(reference), copy.deepcopy(reference)
            values = torch.randn(whole.edge_index.shape[1]).double()
            weight = torch.randn(whole.num_nodes, 3).double()

            kind = nn.Parameter if is_parameter else Tensor.requires_grad_
            mask = kind(values.clone())
            expected = masked(reference, whole.x, whole.edge_index, mask, is_parameter)
            (expected * weight).sum().backward()

            part = graphshard.pyg.shard(whole, owners(cut, world_size), mode=mode)
            mine = kind(values[part.e_id])
            out = masked(layer, part.x, part.edge_index, mine, is_parameter)
            (out * weight[part.n_id]).sum().backward()
            gaps = [gap(out.detach(), expected.detach(), part.n_id)]
            gaps.append(gap(mine.grad, mask.grad, part.e_id))

            model: Any = graphshard.pyg.parallelize(
                parallel, whole, owners(cut, world_size), mode=mode
            )
            theirs = kind(values.clone())
            out = masked(model, whole.x, whole.edge_index, theirs, is_parameter)
            (out * weight).sum().backward()
            gaps += [gap(out.detach(), expected.detach()), gap(theirs.grad, mask.grad)]
            # Without masks it is the model that it was.
            gaps.append(
                gap(
                    model(whole.x, whole.edge_index).detach(),
                    reference(whole.x, whole.edge_index).detach(),
                )
            )
            found[f"{name}, {'parameter' if is_parameter else 'tensor'}"] = max(gaps)
    return found


@pytest.mark.parametrize(
    ("world_size", "cut", "mode"),
    [
        pytest.param(1, "random", "sequential", marks=pytest.mark.exhaustive),
        (2, "random", "oneshot"),
        (3, "empty", "sequential"),
        pytest.param(2, "empty", "oneshot", marks=pytest.mark.exhaustive),
        pytest.param(5, "random", "oneshot", marks=pytest.mark.exhaustive),
    ],
)
def test_edge_masks(world_size: int, cut: str, mode: str) -> None:
    for found in run_ranks(compare_masks, world_size, cut, mode):
        assert {name: x for name, x in found.items() if not x <= 1e-10} == {}


def loops_of_one_rank(rank: int, world_size: int) -> float:
    """All nodes of rank 0 have a self loop, and no other node: nobody may guess from the counts."""
    whole = whole_graph(torch.float64)
    owner = torch.arange(whole.num_nodes) % world_size
    plain = whole.edge_index[:, whole.edge_index[0] != whole.edge_index[1]]
    loops = (owner == 0).nonzero().view(-1).expand(2, -1)
    whole.edge_index = torch.cat([loops, plain], 1)
    whole = type(whole)(x=whole.x, edge_index=whole.edge_index)
    model: Any = pyg_nn.GCNConv(WIDTH, 3).double()
    reference = copy.deepcopy(model)
    mask = torch.randn(whole.edge_index.shape[1]).double()
    model = graphshard.pyg.parallelize(model, whole, owner)
    reference.load_state_dict(model.state_dict())
    expected = masked(reference, whole.x, whole.edge_index, mask, True)
    return gap(masked(model, whole.x, whole.edge_index, mask, True).detach(), expected.detach())


def test_masks_where_one_rank_has_all_self_loops() -> None:
    assert max(run_ranks(loops_of_one_rank, 2)) <= 1e-10


def wrong_masks(rank: int, world_size: int) -> list[str]:
    whole, errors = whole_graph(torch.float64), []
    part = graphshard.pyg.shard(whole, "random")
    conv = pyg_nn.SAGEConv(WIDTH, 3).double()
    own = part.edge_index.size(1)
    for size in (own + (rank == 1), whole.edge_index.size(1)):
        with pytest.raises(ValueError, match="needs an entry for each edge of this rank") as caught:
            masked(conv, part.x, part.edge_index, torch.ones(size).double(), True)
        share_error(None)
        errors.append(str(caught.value))
    model: Any = graphshard.pyg.parallelize(copy.deepcopy(conv), whole, "random")
    with pytest.raises(ValueError, match="needs an entry for each edge of the data object"):
        masked(model, whole.x, whole.edge_index, torch.ones(own).double(), True)
    share_error(None)
    turned = pyg_nn.DirGNNConv(pyg_nn.SAGEConv(WIDTH, 3)).double()
    with pytest.raises(NotImplementedError, match="do not move with them"):
        masked(turned, part.x, part.edge_index, torch.ones(own).double(), True)
    share_error(None)
    return errors


def test_wrong_masks_are_refused_on_every_rank() -> None:
    for errors in run_ranks(wrong_masks, 2):
        assert len(errors) == 2


def caches(rank: int, world_size: int) -> dict[str, float]:
    """A layer that was called with the whole graph, with shards, and with the whole graph again."""
    whole = whole_graph(torch.float64)
    part = graphshard.pyg.shard(whole, owners("random", world_size))
    other = graphshard.pyg.shard(whole, "metis")
    n, found = pyg_nn, {}
    for name, make in {
        "GCNConv": lambda: n.GCNConv(WIDTH, 3, cached=True),
        "SGConv": lambda: n.SGConv(WIDTH, 3, K=2, cached=True),
        "SSGConv": lambda: n.SSGConv(WIDTH, 3, 0.1, K=2, cached=True),
        "APPNP": lambda: n.APPNP(2, 0.1, cached=True),
        "EGConv": lambda: n.EGConv(WIDTH, 8, cached=True),
    }.items():
        layer: Any = make().double()
        expected = copy.deepcopy(layer)(whole.x, whole.edge_index).detach()
        gaps = []
        for data in (whole, part, part, other, whole):
            rows = data.n_id if data is not whole else None
            gaps.append(gap(layer(data.x, data.edge_index).detach(), expected, rows))
        model: Any = graphshard.pyg.parallelize(layer, whole, owners("random", world_size))
        gaps += [gap(model(whole.x, whole.edge_index).detach(), expected) for _ in range(2)]
        found[name] = max(gaps)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_layers_cache_of_edges(world_size: int) -> None:
    for found in run_ranks(caches, world_size):
        assert {name: x for name, x in found.items() if not x <= 1e-10} == {}


def explained(model: Any, data: Data) -> Tensor:
    explainer = Explainer(
        model,
        AttentionExplainer(),
        explanation_type="model",
        edge_mask_type="object",
        model_config={
            "mode": "multiclass_classification",
            "task_level": "node",
            "return_type": "raw",
        },
    )
    return explainer(data.x, data.edge_index, index=3).edge_mask


def hooks(rank: int, world_size: int) -> str:
    """An explainer that hooks messages: PyG's result on one rank, an error with a cure on two."""
    data = unordered_graph()
    torch.manual_seed(1)
    model: Any = pyg_nn.GAT(WIDTH, 8, 2, 3, heads=2).double()
    expected = explained(copy.deepcopy(model), data)
    model = graphshard.pyg.parallelize(model, data, "random")
    try:
        torch.testing.assert_close(explained(model, data), expected)
    except NotImplementedError as error:
        share_error(None)
        return str(error)
    return ""


def test_hooks_on_messages() -> None:
    assert run_ranks(hooks, 1) == [""]
    for text in run_ranks(hooks, 2):
        assert "use them with graphshard.pyg.shard, where data.e_id names the edges" in text
