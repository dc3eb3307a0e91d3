# SPDX-License-Identifier: Apache-2.0
"""Layers and models of PyG, each with what it is called with, and the comparison with one process.

The oracle is PyG itself, on the whole graph in one process. Used by the tests of this folder and by
``docs/make_pyg_table.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch_geometric.data import Data

import graphshard
import graphshard.pyg
from graphshard.comm import share_error
from graphshard.pyg import _propagate

needs_to_hetero = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="torch.fx of torch 2.6 fails in PyG's to_hetero"
)

WIDTH, NUM_TYPES, EDGE_WIDTH = 8, 3, 4
NUM_NODES, NUM_EDGES = 45, 260


@dataclass(frozen=True)
class ZooLayer:
    """A layer and the arguments of its call.

    Args:
        name: As in the table.
        make: Makes it, given the histogram of in-degrees.
        takes: Names of the columns of the graph that it is called with.
        refused: Part of the error on shards, of a layer that has no exact result there.
        fails: Why PyG itself cannot run it here; empty where it can.
        why: The reason of the error, for the table.
        rounds: Why float32 results of PyG itself are less exact than others; empty where they
            are not.
    """

    name: str
    make: Callable[[Tensor], nn.Module]
    takes: tuple[str, ...] = ()
    refused: str = ""
    fails: str = ""
    why: str = ""
    rounds: str = ""


def mlp(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, out), nn.ReLU(), nn.Linear(out, out))


def with_batch_norm(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))


def zoo() -> list[ZooLayer]:
    """The layers, in the order of the table."""
    n, f, r, d = pyg_nn, WIDTH, NUM_TYPES, EDGE_WIDTH
    weight, attr, kind = ("edge_weight",), ("edge_attr",), ("edge_type",)
    scalers = ["identity", "amplification", "attenuation"]
    rows: list[tuple[Any, ...]] = [
        ("SAGEConv(mean)", lambda _: n.SAGEConv(f, f)),
        ("SAGEConv(max,project)", lambda _: n.SAGEConv(f, f, aggr="max", project=True)),
        ("SAGEConv(median)", lambda _: n.SAGEConv(f, f, aggr="median")),
        ("SAGEConv(lstm)", lambda _: n.SAGEConv(f, f, aggr="lstm")),
        ("SAGEConv(gru)", lambda _: n.SAGEConv(f, f, aggr=n.GRUAggregation(f, f))),
        ("SAGEConv(lcm)", lambda _: n.SAGEConv(f, f, aggr=n.LCMAggregation(f, f))),
        (
            "SAGEConv(softmax aggr)",
            lambda _: n.SAGEConv(f, f, aggr=n.SoftmaxAggregation(learn=True)),
        ),
        ("SAGEConv([mean,max,std])", lambda _: n.SAGEConv(f, f, aggr=["mean", "max", "std"])),
        ("GCNConv", lambda _: n.GCNConv(f, f)),
        ("GCNConv(edge_weight)", lambda _: n.GCNConv(f, f), weight),
        ("GCNConv(improved,cached)", lambda _: n.GCNConv(f, f, improved=True, cached=True)),
        ("GCNConv(normalize=False)", lambda _: n.GCNConv(f, f, normalize=False)),
        ("GATConv", lambda _: n.GATConv(f, 4, heads=2)),
        (
            "GATConv(edge_attr,fill=mean)",
            lambda _: n.GATConv(f, 4, heads=2, edge_dim=d, residual=True),
            attr,
        ),
        ("GATConv(no self loops)", lambda _: n.GATConv(f, 4, heads=2, add_self_loops=False)),
        ("GATv2Conv", lambda _: n.GATv2Conv(f, 4, heads=2)),
        ("GATv2Conv(edge_attr)", lambda _: n.GATv2Conv(f, 4, heads=2, edge_dim=d), attr),
        ("TransformerConv", lambda _: n.TransformerConv(f, 4, heads=2, beta=True)),
        (
            "TransformerConv(edge_attr)",
            lambda _: n.TransformerConv(f, 4, heads=2, edge_dim=d),
            attr,
        ),
        ("GINConv(train_eps)", lambda _: n.GINConv(mlp(f, f), train_eps=True)),
        ("GINConv(BatchNorm in a list)", lambda _: n.GINConv(n.MLP([f, f, f], norm="batch_norm"))),
        ("GINConv(BatchNorm mlp)", lambda _: n.GINConv(with_batch_norm(f))),
        ("GENConv(softmax)", lambda _: n.GENConv(f, f, learn_t=True)),
        ("GENConv(powermean)", lambda _: n.GENConv(f, f, aggr="powermean", learn_p=True)),
        ("GINEConv", lambda _: n.GINEConv(mlp(f, f), edge_dim=d), attr),
        ("RGCNConv", lambda _: n.RGCNConv(f, f, r), kind),
        ("RGCNConv(bases)", lambda _: n.RGCNConv(f, f, r, num_bases=2), kind),
        ("RGCNConv(blocks)", lambda _: n.RGCNConv(f, f, r, num_blocks=2), kind),
        ("FastRGCNConv", lambda _: n.FastRGCNConv(f, f, r), kind),
        (
            "PNAConv(towers,edge_attr)",
            lambda deg: n.PNAConv(
                f, f, ["mean", "min", "max", "std"], scalers, deg, edge_dim=d, towers=2
            ),
            attr,
        ),
        ("GraphConv", lambda _: n.GraphConv(f, f), weight),
        ("SimpleConv", lambda _: n.SimpleConv(aggr="mean")),
        ("ChebConv(K=3)", lambda _: n.ChebConv(f, f, K=3)),
        ("GatedGraphConv", lambda _: n.GatedGraphConv(f, 2)),
        ("ResGatedGraphConv", lambda _: n.ResGatedGraphConv(f, f)),
        ("AGNNConv", lambda _: n.AGNNConv()),
        ("TAGConv", lambda _: n.TAGConv(f, f)),
        ("ARMAConv", lambda _: n.ARMAConv(f, f, num_stacks=2, num_layers=2)),
        ("SGConv", lambda _: n.SGConv(f, f, K=2)),
        ("SSGConv", lambda _: n.SSGConv(f, f, 0.1, K=2)),
        ("APPNP", lambda _: n.APPNP(3, 0.1)),
        ("APPNP(K=2, teleport .2)", lambda _: n.APPNP(2, 0.2)),
        ("MFConv", lambda _: n.MFConv(f, f)),
        ("RGATConv", lambda _: n.RGATConv(f, f, r), kind),
        ("NNConv", lambda _: n.NNConv(f, f, nn.Linear(d, f * f)), attr),
        ("CGConv", lambda _: n.CGConv(f, d), attr),
        ("EdgeConv", lambda _: n.EdgeConv(mlp(2 * f, f))),
        ("FeaStConv", lambda _: n.FeaStConv(f, f, heads=2)),
        ("LEConv", lambda _: n.LEConv(f, f), weight),
        ("ClusterGCNConv", lambda _: n.ClusterGCNConv(f, f, diag_lambda=0.5)),
        ("GCN2Conv", lambda _: n.GCN2Conv(f, 0.1, 0.5, 1), ("x_0",)),
        ("FAConv", lambda _: n.FAConv(f), ("x_0",)),
        ("FiLMConv", lambda _: n.FiLMConv(f, f, r), kind),
        ("SuperGATConv(eval)", lambda _: n.SuperGATConv(f, 4, heads=2).eval()),
        (
            "EGConv",
            lambda _: n.EGConv(f, f, aggregators=["sum", "max", "symnorm"], num_heads=2),
        ),
        ("PDNConv", lambda _: n.PDNConv(f, f, d, 8), attr),
        ("GeneralConv(attn)", lambda _: n.GeneralConv(f, f, attention=True, heads=2)),
        ("LGConv", lambda _: n.LGConv()),
        ("AntiSymmetricConv", lambda _: n.AntiSymmetricConv(f)),
        ("MixHopConv", lambda _: n.MixHopConv(f, f)),
        ("DirGNNConv(SAGE)", lambda _: n.DirGNNConv(n.SAGEConv(f, f))),
        (
            "GPSConv(SAGE + multihead attention)",
            lambda _: n.GPSConv(f, n.SAGEConv(f, f), heads=2),
            (),
            "attention over all nodes",
            "",
            "attention over all nodes, of which a rank has some",
        ),
        ("PANConv", lambda _: n.PANConv(f, f, 2), (), "", "PyG runs it with torch-sparse alone"),
        (
            "HypergraphConv",
            lambda _: n.HypergraphConv(f, f),
            (),
            "hyperedges",
            "",
            "hyperedges are no nodes of a rank",
        ),
        ("GMMConv", lambda _: n.GMMConv(f, f, d, 3), attr),
        ("WLConvContinuous", lambda _: n.WLConvContinuous()),
        (
            "HEATConv",
            lambda _: n.HEATConv(f, f, r, r, 4, d, 4, heads=2),
            ("node_type", "edge_type", "edge_attr"),
        ),
        (
            "SAGEConv(quantile)",
            lambda _: n.SAGEConv(f, f, aggr=n.QuantileAggregation(0.3)),
            (),
            "",
            "",
            "",
            "PyG interpolates between positions in the list of all messages",
        ),
        (
            "SAGEConv(powermean)",
            lambda _: n.SAGEConv(f, f, aggr=n.PowerMeanAggregation(), project=True),
        ),
        (
            "SAGEConv(SetTransformer)",
            lambda _: n.SAGEConv(f, f, aggr=n.SetTransformerAggregation(f, heads=2)),
        ),
        (
            "SAGEConv(DegreeScaler)",
            lambda deg: n.SAGEConv(
                f, f, aggr=n.DegreeScalerAggregation(["mean"], ["identity"], deg)
            ),
        ),
        ("model GCN(3 layers, jk=cat)", lambda _: n.GCN(f, 16, 3, 5, jk="cat")),
        ("model GAT(v2)", lambda _: n.GAT(f, 16, 2, 5, v2=True, heads=2)),
        ("model GraphSAGE(BatchNorm)", lambda _: n.GraphSAGE(f, 16, 3, 5, norm="batch_norm")),
        (
            "model PNA",
            lambda deg: n.PNA(
                f, 16, 2, 5, aggregators=["mean", "max", "std"], scalers=scalers[:2], deg=deg
            ),
        ),
        ("model GIN", lambda _: n.GIN(f, 16, 2, 5, norm=None)),
        ("model LayerNorm(graph mode)", lambda _: n.GCN(f, 16, 3, 5, norm="layer_norm")),
        ("model GraphNorm", lambda _: n.GCN(f, 16, 3, 5, norm="graph_norm")),
        ("model PairNorm", lambda _: n.GCN(f, 16, 3, 5, norm="pair_norm")),
        (
            "model MessageNorm/LayerNorm(node)",
            lambda _: n.GCN(f, 16, 3, 5, norm="layer_norm", norm_kwargs={"mode": "node"}),
        ),
    ]
    return [ZooLayer(*row) for row in rows]


def limit(case: ZooLayer, dtype: torch.dtype) -> float:
    """The largest relative difference that counts as equal."""
    if dtype == torch.float64:
        return 1e-10
    return 2e-5 if case.rounds else 1e-6


def ways(case: ZooLayer, mode: str) -> str:
    """How a layer is computed: fused, by PyG, in pieces."""
    names = {"_attention": "fused", "_weighted_sum": "fused", "_in_pieces": "pieces"}
    found: set[str] = set()

    def watched(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = function(*args)
            if result is not None:
                found.add(way)
            return result

        return call

    with mock.patch.multiple(
        _propagate, **{name: watched(way, getattr(_propagate, name)) for name, way in names.items()}
    ):
        compare(case, torch.float64, "metis", {"mode": mode}, 1)
    return " and ".join(sorted(found)) or "PyG"


def whole_graph(dtype: torch.dtype) -> Data:
    """Sorted, with self loops and isolated nodes, without parallel edges."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_NODES, WIDTH, generator=g, dtype=torch.float64)
    ends = torch.randint(0, NUM_NODES - 2, (2, NUM_EDGES), generator=g)
    both = torch.unique(ends[1] * NUM_NODES + ends[0])
    edge_index = torch.stack([both % NUM_NODES, both // NUM_NODES])
    num_edges = edge_index.shape[1]
    return Data(
        x=x.to(dtype),
        edge_index=edge_index,
        edge_weight=(torch.rand(num_edges, generator=g, dtype=torch.float64) + 0.1).to(dtype),
        edge_attr=torch.randn(num_edges, EDGE_WIDTH, generator=g, dtype=torch.float64).to(dtype),
        edge_type=torch.randint(0, NUM_TYPES, (num_edges,), generator=g),
        x_0=torch.randn(NUM_NODES, WIDTH, generator=g, dtype=torch.float64).to(dtype),
        node_type=torch.randint(0, NUM_TYPES, (NUM_NODES,), generator=g),
    )


def owners(cut: str, world_size: int) -> str | Tensor:
    """What to pass as ``part_method``."""
    if cut == "metis":
        return cut
    g = torch.Generator().manual_seed(world_size)
    used = max(world_size - 1, 1) if cut == "empty" else world_size
    return torch.randint(0, used, (NUM_NODES,), generator=g)


def call(layer: nn.Module, case: ZooLayer, x: Tensor, data: Data) -> Tensor:
    names = case.takes
    if "x_0" in names:
        out = layer(x, data.x_0, data.edge_index)
    elif "node_type" in names:
        out = layer(x, data.edge_index, data.node_type, data.edge_type, data.edge_attr)
    else:
        out = layer(x, data.edge_index, **{name: data[name] for name in names})
    return out[0] if isinstance(out, tuple) else out


def gap(mine: Tensor, reference: Tensor, rows: Tensor | None = None) -> float:
    """The largest difference, as a share of the largest number of the reference."""
    scale = float(reference.abs().max()) if reference.numel() else 1.0
    reference = reference if rows is None else reference[rows]
    assert mine.shape == reference.shape, (mine.shape, reference.shape)
    return float((mine - reference).abs().max()) / max(scale, 1e-6) if mine.numel() else 0.0


def compare(
    case: ZooLayer,
    dtype: torch.dtype,
    cut: str,
    options: dict[str, Any],
    world_size: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """One layer on all ranks, on a device, against one process on the CPU; every rank must call.

    Returns:
        ``gap``: the largest relative difference on any rank, of outputs, input gradients and
        parameter gradients; or ``error``: the text, if all ranks raised it. On a device in float32
        it is the difference from PyG in float64, and ``gap_of_pyg`` that of PyG itself in one
        process in float32 there.
    """
    data = whole_graph(dtype)
    degrees = torch.bincount(torch.bincount(data.edge_index[1], minlength=NUM_NODES))
    rounds_there = device != "cpu" and dtype == torch.float32
    exact = torch.float64 if rounds_there else dtype
    torch.manual_seed(1)
    reference = case.make(degrees).to(exact)
    x = data.x.to(exact).clone().requires_grad_()
    expected = call(reference, case, x, _in_type(data, exact))
    weights = torch.randn(expected.shape, dtype=dtype, generator=torch.Generator().manual_seed(5))
    (expected * weights).sum().backward()
    gap_of_pyg = 0.0
    if rounds_there:
        torch.manual_seed(1)
        alone = case.make(degrees).to(device, dtype)
        own = data.x.to(device).requires_grad_()
        out = call(alone, case, own, whole_graph(dtype).to(device))
        (out * weights.to(device)).sum().backward()
        gap_of_pyg = _largest_gap((out, own, alone), (expected, x, reference))

    torch.manual_seed(1)
    layer = graphshard.pyg.convert_sync_norm(case.make(degrees).to(device, dtype))
    part = graphshard.pyg.shard(data.to(device), owners(cut, world_size), **options)
    mine = part.x.clone().requires_grad_()
    try:
        out = call(layer, case, mine, part)
    except (NotImplementedError, ValueError) as error:
        share_error(None)  # nobody is left behind in an exchange
        return {"gap": -1.0, "error": f"{type(error).__name__}: {error}"}
    rows = part.n_id.cpu()
    (out * weights[rows].to(device)).sum().backward()
    graphshard.gather_grads(layer)
    share_error(None)
    found = _largest_gap((out, mine, layer), (expected, x, reference), rows)
    worst = torch.tensor(found, dtype=torch.float64)
    if world_size > 1:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"gap": float(worst), "gap_of_pyg": gap_of_pyg, "error": ""}


def _in_type(data: Data, dtype: torch.dtype) -> Data:
    """The same graph with its numbers in another type."""
    return data.clone().apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def _largest_gap(
    found: tuple[Tensor, Tensor, nn.Module],
    expected: tuple[Tensor, Tensor, nn.Module],
    rows: Tensor | None = None,
) -> float:
    """The largest relative difference of results, gradients of inputs and of parameters."""
    (out, mine, layer), (reference, x, oracle) = found, expected
    gaps = [gap(out.detach().cpu(), reference.detach(), rows)]
    if x.grad is not None:
        assert mine.grad is not None
        gaps.append(gap(mine.grad.cpu(), x.grad, rows))
    pairs = list(zip(layer.parameters(), oracle.parameters(), strict=True))
    largest = max((float(b.grad.abs().max()) for _, b in pairs if b.grad is not None), default=0)
    for a, b in pairs:
        if b.grad is not None:
            difference = b.grad if a.grad is None else a.grad.cpu() - b.grad
            gaps.append(float(difference.abs().max()) / max(largest, 1e-6))
    return max(gaps)
