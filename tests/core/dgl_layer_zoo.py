# SPDX-License-Identifier: Apache-2.0
"""The layers of ``dgl.nn.pytorch.conv``, each with how it is called, and comparisons with DGL.

The oracle is the same layer of DGL 1.1.3 on DGL's own graph, in one process. Used by the tests of
this folder and by ``docs/make_dgl_table.py``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import graphshard
import graphshard.sar
from graphshard.comm import share_error
from graphshard.errors import GraphShardError
from graphshard.pyg import convert_sync_norm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import dgl
    import dgl.nn.pytorch.conv as conv

NUM_NODES, NUM_EDGES, WIDTH, NUM_TYPES = 40, 200, 8, 3
NAME = "zoo"

Columns = Mapping[str, Tensor]
Call = Callable[[Any, Any, Columns], Any]


@dataclass(frozen=True)
class DglLayer:
    """A layer and the arguments of its call.

    Args:
        name: As in the table; begins with the name of the class.
        make: Makes it.
        call: Calls it with a graph and the columns of that graph's nodes and edges.
        sequential: Part of the error of a sharded graph in sequential mode; empty: none.
        fails: Why DGL itself cannot run it on a graph here; empty where it can.
        block: Whether DGL itself runs it on a block.
        empty: Whether DGL's own code runs for a rank without nodes.
    """

    name: str
    make: Callable[[], nn.Module] = nn.Identity
    call: Call = lambda layer, graph, c: layer(graph, c["x"])
    sequential: str = ""
    fails: str = ""
    block: bool = True
    empty: bool = True


_USER_REDUCE = "sequential aggregation takes the reductions sum, mean, max and min"
_CUGRAPH = "needs pylibcugraphops and a GPU"
_DENSE = "takes a dense adjacency matrix, no graph"


def zoo() -> list[DglLayer]:
    """The layers, in the order of the table."""
    d = WIDTH
    pna = ["mean", "max", "min", "sum", "std", "var"], ["identity", "amplification"], 2.5
    dgn = ["dir1-av", "dir1-dx", "sum"], ["identity", "amplification"], 2.5
    layer = DglLayer
    cases = [
        layer("AGNNConv", conv.AGNNConv),
        layer("APPNPConv", lambda: conv.APPNPConv(3, 0.1)),
        layer("APPNPConv(edge_weight)", lambda: conv.APPNPConv(3, 0.1), _with("weight")),
        layer(
            "AtomicConv",
            _atomic,
            lambda m, g, c: m(g, c["atom"], c["weight"][:, None]),
            _USER_REDUCE,
        ),
        layer("CFConv", lambda: conv.CFConv(d, d, d, d), _with("edge")),
        layer("ChebConv", lambda: conv.ChebConv(d, d, 3)),
        layer("ChebConv(lambda_max)", lambda: conv.ChebConv(d, d, 3), _cheb),
        layer("CuGraphGATConv", fails=_CUGRAPH),
        layer("CuGraphRelGraphConv", fails=_CUGRAPH),
        layer("CuGraphSAGEConv", fails=_CUGRAPH),
        layer("DenseChebConv", fails=_DENSE),
        layer("DenseGraphConv", fails=_DENSE),
        layer("DenseSAGEConv", fails=_DENSE),
        layer(
            "DGNConv",
            lambda: conv.DGNConv(d, d, *dgn, edge_feat_size=d),
            lambda m, g, c: m(g, c["x"], c["edge"], c["eig"]),
            _USER_REDUCE,
        ),
        layer("DotGatConv", lambda: conv.DotGatConv(d, d, 2)),
        layer("EdgeConv", lambda: conv.EdgeConv(d, d)),
        layer("EdgeConv(batch_norm)", lambda: conv.EdgeConv(d, d, batch_norm=True)),
        layer("EdgeGATConv", lambda: conv.EdgeGATConv(d, d, d, 2), _with("edge")),
        layer("EdgeWeightNorm", conv.EdgeWeightNorm, lambda m, g, c: m(g, c["weight"])),
        layer(
            "EdgeWeightNorm(right)",
            lambda: conv.EdgeWeightNorm("right", 0.1),
            lambda m, g, c: m(g, c["weight"]),
        ),
        layer("EGATConv", lambda: conv.EGATConv(d, d, d, d, 2), _with("edge")),
        layer("EGNNConv", lambda: conv.EGNNConv(d, d, d, d), _with("place", "edge")),
        layer("GATConv", lambda: conv.GATConv(d, d, 2, residual=True)),
        layer(
            "GATConv(attention)",
            lambda: conv.GATConv(d, d, 2),
            lambda m, g, c: m(g, c["x"], get_attention=True),
        ),
        layer(
            "GATConv(edge_weight)",
            lambda: conv.GATConv(d, d, 2),
            lambda m, g, c: m(g, c["x"], edge_weight=c["weight"]),
        ),
        layer("GatedGraphConv", lambda: conv.GatedGraphConv(d, d + 1, 2, NUM_TYPES), _with("type")),
        layer("GatedGraphConv(one type)", lambda: conv.GatedGraphConv(d, d, 2, 1)),
        layer("GATv2Conv", lambda: conv.GATv2Conv(d, d, 2)),
        layer(
            "GATv2Conv(attention, share_weights)",
            lambda: conv.GATv2Conv(d, d, 2, share_weights=True, residual=True),
            lambda m, g, c: m(g, c["x"], get_attention=True),
        ),
        layer("GCN2Conv", lambda: conv.GCN2Conv(d, 1), lambda m, g, c: m(g, c["x"], c["x"])),
        layer("GINConv", lambda: conv.GINConv(nn.Linear(d, d), "sum", learn_eps=True)),
        layer("GINConv(max)", lambda: conv.GINConv(nn.Linear(d, d), "max")),
        layer("GINConv(mean)", lambda: conv.GINConv(None, "mean")),
        layer("GINEConv", lambda: conv.GINEConv(nn.Linear(d, d)), _with("edge")),
        layer("GMMConv", lambda: conv.GMMConv(d, d, 2, 3, "sum"), _pseudo),
        layer("GMMConv(max)", lambda: conv.GMMConv(d, d, 2, 3, "max"), _pseudo),
        layer("GraphConv", lambda: conv.GraphConv(d, d)),
        layer("GraphConv(right, fewer columns)", lambda: conv.GraphConv(d, 3, norm="right")),
        layer("GraphConv(left)", lambda: conv.GraphConv(d, d, norm="left")),
        layer(
            "GraphConv(edge_weight)",
            lambda: conv.GraphConv(d, d, norm="none"),
            lambda m, g, c: m(g, c["x"], edge_weight=c["weight"]),
        ),
        layer(
            "GroupRevRes",
            lambda: conv.GroupRevRes(conv.GraphConv(d // 2, d // 2), 2),
            lambda m, g, c: m(g, c["x"] * 1),  # it frees the storage of its input
        ),
        layer("HGTConv", lambda: conv.HGTConv(d, 4, 2, 2, NUM_TYPES, 0.0), _with("kind", "type")),
        layer("NNConv", lambda: conv.NNConv(d, d, nn.Linear(d, d * d), "mean"), _with("edge")),
        layer("NNConv(max)", lambda: conv.NNConv(d, d, nn.Linear(d, d * d), "max"), _with("edge")),
        layer(
            "PNAConv",
            lambda: conv.PNAConv(d, d, *pna, num_towers=2, edge_feat_size=d),
            _with("edge"),
            _USER_REDUCE,
        ),
        layer("RelGraphConv", lambda: conv.RelGraphConv(d, d, NUM_TYPES), _with("type")),
        layer(
            "RelGraphConv(basis)",
            lambda: conv.RelGraphConv(d, d, NUM_TYPES, "basis", 2, layer_norm=True),
            lambda m, g, c: m(g, c["x"], c["type"], c["weight"][:, None]),
        ),
        layer(
            "RelGraphConv(bdd)", lambda: conv.RelGraphConv(d, d, NUM_TYPES, "bdd", 2), _with("type")
        ),
        layer("SAGEConv(mean)", lambda: conv.SAGEConv(d, d, "mean")),
        layer("SAGEConv(gcn)", lambda: conv.SAGEConv(d, d, "gcn")),
        layer("SAGEConv(pool)", lambda: conv.SAGEConv(d, d, "pool")),
        layer("SAGEConv(lstm)", lambda: conv.SAGEConv(d, d, "lstm"), sequential=_USER_REDUCE),
        layer("SAGEConv(edge_weight)", lambda: conv.SAGEConv(d, d, "mean"), _with("weight")),
        layer("SGConv", lambda: conv.SGConv(d, d, 2)),
        layer("SGConv(edge_weight)", lambda: conv.SGConv(d, d, 2), _sgc),
        layer("TAGConv", lambda: conv.TAGConv(d, d, 2)),
        layer("TAGConv(edge_weight)", lambda: conv.TAGConv(d, d, 2), _with("weight")),
        layer("TWIRLSConv", lambda: conv.TWIRLSConv(d, d, d, 2)),
        layer("TWIRLSConv(attention)", lambda: conv.TWIRLSConv(d, d, d, 2, attention=True)),
        layer(
            "TWIRLSUnfoldingAndAttention",
            lambda: conv.TWIRLSUnfoldingAndAttention(d, 1.0, 1.0, 2, attn_aft=1, tau=0.2),
        ),
    ]
    return [
        replace(
            case, block=case.name not in _NOT_ON_BLOCKS, empty=case.name not in _NOT_WITHOUT_NODES
        )
        for case in cases
    ]


# What DGL 1.1.3 itself refuses: the layers read or write fields of all nodes, or of both sides.
_NOT_ON_BLOCKS = {
    "APPNPConv",
    "APPNPConv(edge_weight)",
    "AtomicConv",
    "ChebConv",
    "ChebConv(lambda_max)",
    "DGNConv",
    "EGATConv",
    "EGNNConv",
    "GatedGraphConv",
    "GatedGraphConv(one type)",
    "GCN2Conv",
    "GroupRevRes",
    "PNAConv",
    "SGConv",
    "SGConv(edge_weight)",
    "TAGConv",
    "TAGConv(edge_weight)",
    "TWIRLSConv",
    "TWIRLSConv(attention)",
    "TWIRLSUnfoldingAndAttention",
}

# What DGL 1.1.3 itself fails on where there are no nodes: it reshapes to a number of columns of -1.
_NOT_WITHOUT_NODES = {
    "AtomicConv",
    "EdgeGATConv",
    "GATConv",
    "GATv2Conv(attention, share_weights)",
}


def _with(*names: str) -> Call:
    """Calls a layer with ``x`` and further columns, in this order."""
    return lambda layer, graph, c: layer(graph, c["x"], *(c[name] for name in names))


def _atomic() -> nn.Module:
    cutoffs, means, scaling = (torch.tensor(v) for v in ([1.0, 2.0], [0.3, 0.6], [0.5, 1.5]))
    return conv.AtomicConv(cutoffs, means, scaling, torch.tensor([1.0, 2.0]))


def _distances(layer: Any, graph: Any, c: Columns) -> Any:
    return layer(graph, c["atom"], c["weight"][:, None])


def _cheb(layer: Any, graph: Any, c: Columns) -> Any:
    return layer(graph, c["x"], [1.7])


def _sgc(layer: Any, graph: Any, c: Columns) -> Any:
    return layer(graph, c["x"], edge_weight=c["weight"])


def _pseudo(layer: Any, graph: Any, c: Columns) -> Any:
    return layer(graph, c["x"], c["edge"][:, :2])


# ------------------------------------------------------------------ graphs and their columns


def edges(num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """Random edges, and one into every destination; parallel edges and self loops among them."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(num_src, (NUM_EDGES,), generator=generator)
    dst = torch.randint(num_dst, (NUM_EDGES,), generator=generator)
    every = torch.arange(num_dst)
    return torch.cat([src, every]), torch.cat([dst, every])


def columns(num_nodes: int, num_edges: int, dtype: torch.dtype) -> tuple[Columns, Columns]:
    """Of nodes and of edges."""
    generator = torch.Generator().manual_seed(2)

    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)

    nodes = {
        "x": normal(num_nodes, WIDTH),
        "eig": normal(num_nodes, WIDTH),
        "place": normal(num_nodes, 3),
        "atom": torch.randint(1, 3, (num_nodes, 1), generator=generator).to(dtype),
        "kind": torch.randint(2, (num_nodes,), generator=generator),
    }
    return nodes, {
        "edge": normal(num_edges, WIDTH),
        "weight": torch.rand(num_edges, generator=generator, dtype=torch.float64).to(dtype) + 0.1,
        "type": torch.randint(NUM_TYPES, (num_edges,), generator=generator),
    }


def leaves(given: Columns) -> dict[str, Tensor]:
    """Copies; those that layers differentiate ask for gradients."""
    wanted = ("x", "edge", "weight", "place")
    return {k: v.clone().requires_grad_(k in wanted) for k, v in given.items()}


def made(case: DglLayer, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return case.make().to(dtype)


@dataclass
class Outcome:
    """Outputs of a layer, and gradients of a weighted sum of them."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor | None]


def run(
    case: DglLayer, layer: nn.Module, graph: Any, given: Columns, rows: Sequence[Tensor] | None
) -> Outcome:
    """Call a layer, and differentiate.

    Args:
        case: How to call it.
        layer: The layer.
        graph: DGL's, or one of this package.
        given: Columns of the nodes and edges of the graph.
        rows: Nodes and edges of the whole graph that this rank has; None for all of them.
    """
    c = leaves(given)
    found = case.call(layer, graph, c)
    outputs = [_whole(value) for value in (found if isinstance(found, tuple) else (found,))]
    total = outputs[0].new_zeros(())
    for output in outputs:
        index = torch.arange(len(output))
        if rows is not None:
            index = next(r for r in rows if len(r) == len(output))
        width = max(output[:1].numel(), 1)
        weights = torch.cos(index[:, None] * 1.7 + torch.arange(width) * 0.3).to(output)
        total = total + (output * weights.reshape(output.shape)).sum()
    kept = [output.detach().clone() for output in outputs]  # GroupRevRes frees its own
    total.backward()
    return Outcome(
        kept,
        {name: value.grad for name, value in c.items() if value.requires_grad},
        {name: value.grad for name, value in layer.named_parameters()},
    )


def _whole(value: Any) -> Tensor:
    rows: Tensor = value if isinstance(value, Tensor) else value.materialize()
    return rows


def gap(ours: Tensor | None, theirs: Tensor | None, scale: float | None = None) -> float:
    """Largest difference, relative to ``scale`` or the largest number; None stands for zeros."""
    if ours is None or theirs is None:
        known = ours if theirs is None else theirs
        return 0.0 if known is None or not known.numel() else float(known.abs().max())
    if ours.shape != theirs.shape:
        return float("inf")
    undefined = theirs.isnan()  # DGL's EGNNConv has no gradient at a self loop
    if not torch.equal(ours.isnan(), undefined):
        return float("inf")
    ours, theirs = ours[~undefined], theirs[~undefined]
    if not ours.numel():
        return 0.0
    return float((ours - theirs).abs().max()) / max(scale or float(theirs.abs().max()), 1e-6)


# ------------------------------------------------------------------ comparisons


def compare_local(case: DglLayer, dtype: torch.dtype, is_block: bool) -> str:
    """A layer on a `Graph` or a `Block`, with ``patch_dgl``; what differs, or nothing.

    Returns:
        Empty, ``"DGL: ..."`` where DGL's own graph is refused, or what is wrong.
    """
    num_dst = NUM_NODES // 2 if is_block else NUM_NODES
    ends = edges(NUM_NODES, num_dst)
    if is_block:
        theirs = dgl.create_block(ends, NUM_NODES, num_dst)
        ours: Any = graphshard.create_block(ends, NUM_NODES, num_dst)
    else:
        theirs, ours = dgl.graph(ends, num_nodes=NUM_NODES), graphshard.graph(ends, NUM_NODES)
    nodes, of_edges = columns(NUM_NODES, len(ends[0]), dtype)
    given = {**nodes, **of_edges}
    try:
        expected = run(case, made(case, dtype), theirs, given, None)
    except Exception as error:
        return f"DGL: {type(error).__name__}"
    found = run(case, made(case, dtype), ours, given, None)
    return differences(found, expected, dtype)


def differences(found: Outcome, expected: Outcome, dtype: torch.dtype) -> str:
    """What of an outcome is not as expected."""
    allowed = 1e-10 if dtype == torch.float64 else 2e-5
    pairs = zip(found.outputs, expected.outputs, strict=True)
    gaps = {f"output {i}": gap(*pair) for i, pair in enumerate(pairs)}
    gaps |= {f"grad of {k}": gap(found.gradients[k], v) for k, v in expected.gradients.items()}
    known = [value for value in expected.parameters.values() if value is not None]
    largest = max((float(value.abs().max()) for value in known), default=0.0)
    for name, value in expected.parameters.items():
        gaps[f"grad of {name}"] = gap(found.parameters[name], value, largest)
    return ", ".join(f"{name}: {size:.1e}" for name, size in gaps.items() if not size <= allowed)


def write_parts(folder: str, world_size: int, method: str) -> None:
    """Cut the graph of the zoo; its nodes and edges keep their numbers as a feature."""
    whole = graphshard.graph(edges(NUM_NODES, NUM_NODES), NUM_NODES)
    whole.ndata["number"] = torch.arange(whole.num_nodes())
    whole.edata["number"] = torch.arange(whole.num_edges())
    assignment: Any = method
    if method == "empty":  # the last rank has no nodes
        assignment = torch.arange(NUM_NODES) % max(world_size - 1, 1)
    graphshard.partition.partition_graph(
        whole, NAME, world_size, folder, part_method=assignment, quiet=True
    )


def compare_sharded(case: DglLayer, folder: str, rank: int, dtype: torch.dtype, mode: Any) -> str:
    """A layer on the shards of all ranks; every rank must call. The same text on all ranks."""
    whole = dgl.graph(edges(NUM_NODES, NUM_NODES), num_nodes=NUM_NODES)
    nodes, of_edges = columns(NUM_NODES, whole.num_edges(), dtype)
    reference = made(case, dtype)
    expected = run(case, reference, whole, {**nodes, **of_edges}, None)
    part = graphshard.load_dgl_partition_data(f"{folder}/{NAME}.json", rank, "cpu")
    own = graphshard.sar.suffix_key_lookup(part.node_features, "number")
    own_edges = graphshard.sar.suffix_key_lookup(part.edge_features, "number")
    graph = graphshard.construct_full_graph(part, mode=mode)
    layer = convert_sync_norm(copy.deepcopy(made(case, dtype)))
    given = {k: v[own] for k, v in nodes.items()} | {k: v[own_edges] for k, v in of_edges.items()}
    try:
        found = run(case, layer, graph, given, (own, own_edges))
    except (GraphShardError, NotImplementedError) as error:
        share_error(None)  # nobody is left behind in an exchange
        return f"{type(error).__name__}: {error}"
    graphshard.gather_grads(layer)
    found.parameters = {name: value.grad for name, value in layer.named_parameters()}
    rows = [next(r for r in (own, own_edges) if len(r) == len(o)) for o in found.outputs]
    here = Outcome(
        [value[r] for value, r in zip(expected.outputs, rows, strict=True)],
        {
            name: value if value is None else value[own if name in nodes else own_edges]
            for name, value in expected.gradients.items()
        },
        expected.parameters,
    )
    share_error(None)
    return differences(found, here, dtype)
