# SPDX-License-Identifier: Apache-2.0
"""What happens when a layer of PyG is called with an ``edge_index`` that spans ranks.

`MessagePassing` gets a ``__call__`` of its own, once, by the first call of
`graphshard.pyg.shard`. A call without a `ShardedEdgeIndex` goes straight through it. With one, the
model is checked for what has no exact result on shards, and the layer runs with its remote rows
fetched at most once. In this order here:

[Note: what is inexact]
    What has no exact result when each rank has a part of the nodes is found before anything is
    sent. The whole model is looked at, not the layer that is called first: a normalisation between
    two layers gets plain tensors, and cannot know that they are one rank's rows. The model is the
    outermost module whose call leads here. What is found depends on the model alone, which is the
    same on every rank, so all ranks raise or none.

[Note: what layers keep of edges]
    Between calls a layer keeps two kinds: masks of edges, which an explainer gives to each layer
    (``_edge_mask``, ``_loop_mask``), and what a layer made with ``cached=True`` computed from the
    edges of its first call.

[Note: numbers of nodes]
    Functions of ``torch_geometric.utils`` take a number of nodes, or give a verdict over all edges.
    What they are given as a number of nodes is mostly the number of rows of a tensor, which is one
    rank's on a graph that spans ranks, and where nothing is given they look for the largest number
    among this rank's edges. So with an ``edge_index`` that spans ranks they are the functions of
    this module; with any other argument they are PyG's.

Last, the layers that do more with ``edge_index`` than read sources and sum at destinations, and
the call itself.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import update_wrapper, wraps
from types import FrameType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..comm import anchor
from ..comm.collectives import all_reduce_alike
from ..graph.convert import require
from ._edge_index import (
    DestinationIndex,
    NodeIndex,
    NodeValues,
    ShardedEdgeIndex,
    check_matrix,
    largest_number,
    node_values_in,
    num_nodes_of,
    plain,
)
from ._norms import unsynchronized
from ._propagate import bound, computed
from ._source_halo import PieceEnd, SourceHalo

_LAYERS = {
    "GPSConv": "its attention over all nodes would see this rank's alone; use its local layer",
    "HypergraphConv": "its hyperedges are no nodes of a rank; run it on one process",
    "DynamicEdgeConv": "it looks for neighbours among this rank's nodes alone",
    "GravNetConv": "it looks for neighbours among this rank's nodes alone",
    "XConv": "it looks for neighbours among this rank's nodes alone",
    "Polynormer": "its attention over all nodes would see this rank's alone",
    "SGFormer": "its attention over all nodes would see this rank's alone",
    "GraphUNet": "it keeps the best of all nodes, and would choose among this rank's alone",
}
_AGGREGATIONS = {"EquilibriumAggregation": "it iterates over the nodes of one rank"}
_checked: weakref.WeakKeyDictionary[nn.Module, tuple[int, int, bool]] = weakref.WeakKeyDictionary()
_POOLS = ("torch_geometric.nn.pool.", "torch_geometric.nn.unpool.")

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
LayerCall: TypeAlias = tuple[Arguments, Keywords]

_HOOKS_OF_EDGES = (
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "_aggregate_forward_pre_hooks",
    "_edge_update_forward_pre_hooks",
    "_edge_update_forward_hooks",
)

#: Layers that are explained now, and the relation that they are called with.
_explained_on: weakref.WeakKeyDictionary[nn.Module, SourceHalo] = weakref.WeakKeyDictionary()

#: The ``k_lin`` of each ``HANConv`` that is called now, and a relation that it is called with.
_weighed_on: weakref.WeakKeyDictionary[nn.Module, SourceHalo] = weakref.WeakKeyDictionary()

#: Layers to the nodes whose edges their caches are of.
_cached_for: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

WHOLE_EDGES = "_graphshard_whole_edges"
"""Where a layer has, within a call of a parallel model, the function that puts this rank's edges in
the place of the whole graph's."""


def check_model(layer: nn.Module, world_size: int) -> None:
    """Raise if the model that calls ``layer`` holds what is not exact on shards.

    On one rank what looks at all nodes is exact; how edges are stored is the same as on several.
    """
    model = _outermost(layer)
    modes = [module.training for module in model.modules()]
    # Statistics are not taken in eval mode.
    state = len(modes), sum(modes), world_size > 1
    if _checked.get(model) == state:
        return
    for name, module in model.named_modules():
        reason = _reason(module) if world_size > 1 else _reason_always(module)
        if reason is not None:
            where = f"{name!r} of {type(model).__name__}" if name else "the model"
            raise NotImplementedError(
                f"{type(module).__name__} ({where}) has no exact result on a graph that spans "
                f"ranks: {reason}"
            )
    _checked[model] = state


def _reason_always(module: nn.Module) -> str | None:
    if getattr(module, "flow", None) == "target_to_source":
        return (
            "messages that flow from targets to sources end on other ranks; make it with "
            "flow='source_to_target' and pass edge_index.flip([0])"
        )
    if any(base.__name__ == "HypergraphConv" for base in type(module).__mro__):
        return _LAYERS["HypergraphConv"]
    return None


def _reason(module: nn.Module) -> str | None:
    if unsynchronized(module) is not None:
        return (
            "its statistics would be those of this rank's rows; call "
            "graphshard.pyg.convert_sync_norm(model) once, or eval() if it has running ones"
        )
    always = _reason_always(module)
    if always is not None:
        return always
    for base in type(module).__mro__:
        name, defined_in = base.__name__, base.__module__
        if not defined_in.startswith("torch_geometric.nn."):
            continue
        if name == "GPSConv" and getattr(module, "attn", None) is None:
            return None
        if name == "SuperGATConv" and module.training:
            return "it draws negative edges among this rank's nodes; call eval(), or use GATConv"
        if name in _AGGREGATIONS:
            return f"{_AGGREGATIONS[name]}; use sum, mean, max, median, std or softmax"
        if name in _LAYERS:
            return _LAYERS[name]
        if defined_in.startswith(_POOLS) and name.endswith("Pooling"):
            return "it chooses among all nodes, of which this rank has some"
    return None


def _outermost(layer: nn.Module) -> nn.Module:
    """The module whose call is the outermost on this thread's stack."""
    code = nn.Module._call_impl.__code__
    outermost: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            outermost = frame
        frame = frame.f_back
    model: object = None if outermost is None else outermost.f_locals.get("self")
    return model if isinstance(model, nn.Module) else layer


@contextmanager
def own_masks(layer: Any, halo: SourceHalo) -> Iterator[list[Tensor]]:
    """Context in which the edge masks of a layer are those of this rank's edges.

    With `graphshard.pyg.parallelize` they have an entry for each edge of the whole graph, in its
    order; with `graphshard.pyg.shard` one for each edge of this rank. Yields the masks that the
    result depends on. Collective for a layer that is explained; errors are raised on every rank.
    """
    masks = {name: getattr(layer, name, None) for name in ("_edge_mask", "_loop_mask")}
    given = {name: mask for name, mask in masks.items() if isinstance(mask, Tensor)}
    if not layer.explain or not given:
        yield []
        return
    if halo.is_turned:
        raise NotImplementedError(
            "edges that span ranks and are turned round move to the rank where they end, and "
            "values per edge, as edge masks are, do not move with them"
        )
    own = {name: mask.as_subclass(Tensor) for name, mask in given.items()}
    kind, needed = "edge of this rank", halo.edge_index.shape[1]
    if halo.own_edges is not None:
        kind, needed = "edge of the data object", halo.structure.global_num_edges(halo.etype)
    fits = torch.tensor([int(all(mask.shape[0] == needed for mask in own.values()))])
    if not bool(all_reduce_alike(fits, "min", group=halo.structure.group)):
        sizes = ", ".join(f"{name} of shape {tuple(mask.shape)}" for name, mask in given.items())
        raise ValueError(
            f"an edge mask of {type(layer).__name__} needs an entry for each {kind}, {needed} here "
            f"(got {sizes}); set the masks with the edge_index that the model is called with"
        )
    if halo.own_edges is not None:
        own = {name: halo.own_edges(mask) for name, mask in own.items()}
    for name, mask in own.items():
        vars(layer)[name] = mask  # in front of a parameter of this name
    _explained_on[layer] = halo
    try:
        yield [mask for mask in own.values() if mask.requires_grad]
    finally:
        del _explained_on[layer]
        for name in own:
            vars(layer).pop(name, None)
            if name not in layer._parameters:
                vars(layer)[name] = given[name]


def check_hooks(layer: Any, halo: SourceHalo) -> None:
    """Raise if hooks of a program that knows nothing of ranks see the messages of one."""
    if halo.own_edges is None or halo.world_size == 1:
        return
    if any(vars(layer).get(name) for name in _HOOKS_OF_EDGES):
        raise NotImplementedError(
            f"hooks on the messages of {type(layer).__name__} (AttentionExplainer sets some) see "
            "the edges of one rank, and a parallel model's program those of the whole graph; use "
            "them with graphshard.pyg.shard, where data.e_id names the edges, or in one process"
        )


def of_all_ranks(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``MessagePassing.explain_message``, where all ranks find together whether loops were added.

    PyG tells it from the number of messages, which says so of this rank's edges alone.
    """

    @wraps(whole)
    def explain_message(layer: Any, inputs: Tensor, dim_size: int | None) -> Tensor:
        halo, mask = _explained_on.get(layer), layer._edge_mask
        if halo is None or mask is None or halo.world_size == 1:
            return whole(layer, inputs, dim_size)
        more = inputs.size(layer.node_dim) - mask.size(0)
        sums = all_reduce_alike(
            torch.tensor([more, abs(more)]), group=halo.structure.group
        ).tolist()
        if sums == [0, 0]:
            return whole(layer, inputs, dim_size)
        mask = mask.sigmoid() if layer._apply_sigmoid else mask
        mask = torch.cat([mask[layer._loop_mask], mask.new_ones(dim_size or 0)])
        other = torch.tensor([int(inputs.size(layer.node_dim) != mask.size(0))])
        if sums[0] == 0 or bool(all_reduce_alike(other, "max", group=halo.structure.group)):
            raise ValueError(
                f"{type(layer).__name__} is explained with edges that are neither those of the "
                "edge mask nor these with a self loop at each node; set the masks with the "
                "edge_index that the layer is called with"
            )
        size = [1] * inputs.dim()
        size[layer.node_dim] = -1
        return inputs * mask.view(size)

    return explain_message


@contextmanager
def caches_of_nodes(layer: Any, halo: SourceHalo | None) -> Iterator[None]:
    """Context in which a layer has no cache but one of the same nodes.

    A layer that was first called with the whole graph would otherwise use its edges as a rank's.
    ``halo`` is None for edges that do not span ranks.
    """
    if not getattr(layer, "cached", False):
        yield
        return
    nodes = None if halo is None else halo.destinations.numbering
    if _cached_for.get(layer) is not nodes:
        for name in vars(layer):
            if name.startswith("_cached_"):
                setattr(layer, name, None)
    _cached_for[layer] = nodes
    yield


@contextmanager
def weighing_on(layer: Any, halo: SourceHalo) -> Iterator[None]:
    """Context in which a ``HANConv`` weighs its relations by means over the nodes of all ranks."""
    _weighed_on[layer.k_lin] = halo
    try:
        yield
    finally:
        del _weighed_on[layer.k_lin]


def by_means_of_all_ranks(whole: Callable[..., Any]) -> Callable[..., Any]:
    """``group`` of PyG's ``HANConv``: the weighted sum of what relations give, per destination.

    Weights are https://arxiv.org/abs/1903.07293, equations 7 and 8. Their means are over all
    nodes, of which this rank has some.
    """

    @wraps(whole)
    def group(xs: list[Tensor], q: Tensor, k_lin: nn.Module) -> Any:
        halo = _weighed_on.get(k_lin)
        if halo is None or not xs or halo.world_size == 1:
            return whole(xs, q, k_lin)
        rows = torch.stack(xs)
        sums = torch.tanh(k_lin(rows)).sum(1)
        counts = sums.new_full((len(xs), 1), rows.shape[1])
        total = all_reduce_alike(torch.cat([sums, counts], 1), group=halo.structure.group)
        means = total[:, :-1] / total[:, -1:].detach().clamp(min=1)
        weights = (q * means).sum(-1).softmax(0)
        return (weights.view(-1, 1, 1) * rows).sum(0), weights

    return group


def install_functions() -> None:
    """Have PyG's functions know edges that span ranks, wherever they have been imported to."""
    wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}
    for file, name, sharded in (
        ("nn.conv.gcn_conv", "gcn_norm", _gcn_norm),
        ("utils.loop", "add_self_loops", _add_self_loops),
        ("utils.loop", "add_remaining_self_loops", _add_self_loops),
        ("utils.loop", "contains_self_loops", _contains_self_loops),
        ("utils.loop", "remove_self_loops", _remove_self_loops),
        ("utils.num_nodes", "maybe_num_nodes", _maybe_num_nodes),
        ("utils._coalesce", "coalesce", _by_numbers),
        ("utils._sort_edge_index", "sort_edge_index", _by_numbers),
        ("utils._unbatch", "unbatch_edge_index", _no_unbatch),
        ("utils._scatter", "scatter", _scatter),
        ("utils.sparse", "to_torch_coo_tensor", _matrix),
        ("utils.sparse", "to_torch_csr_tensor", _matrix),
        ("utils.sparse", "to_torch_csc_tensor", _matrix),
        ("utils.convert", "to_scipy_sparse_matrix", _matrix),
        ("utils._to_dense_batch", "to_dense_batch", _to_dense_batch),
        ("utils._negative_sampling", "negative_sampling", _no_negatives),
        ("utils._negative_sampling", "batched_negative_sampling", _no_negatives),
        ("utils._negative_sampling", "structured_negative_sampling", _no_negatives),
    ):
        module = require(f"torch_geometric.{file}", "graphshard[pyg]", "graphshard.pyg")
        whole = getattr(module, name)
        wrapped[whole] = _either_function(whole, sharded)
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is FunctionType and value in wrapped:
                setattr(module, name, wrapped[value])


def _either_function(whole: Callable[..., Any], sharded: Callable[..., Any]) -> Callable[..., Any]:
    nodes_in = node_values_in

    def function(*args: Any, **kwargs: Any) -> Any:
        for _ in nodes_in((args[:2], kwargs)):
            return sharded(whole, *args, **kwargs)
        return whole(*args, **kwargs)

    # torch.jit.script compiles PyG's function in its place, and looks for names where this one is.
    made = FunctionType(function.__code__, whole.__globals__, closure=function.__closure__)
    update_wrapper(made, whole)
    made.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
    made.__original_fn = whole  # type: ignore[attr-defined]
    return made


def _maybe_num_nodes(whole: Any, edge_index: Any, num_nodes: int | None = None) -> int:
    """PyG asks the largest number only of ranks that have an edge; here all ranks take part."""
    if num_nodes is not None:
        return num_nodes
    ends = edge_index if isinstance(edge_index, tuple) else (edge_index,)
    return max(num_nodes_of(end) for end in ends)


def _scatter(
    whole: Any,
    src: Tensor,
    index: Any,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    if dim_size is None and isinstance(index, NodeValues):
        dim_size = num_nodes_of(index)
    return whole(src, index, dim, dim_size, reduce)


def _to_dense_batch(
    whole: Any,
    x: Tensor,
    batch: Any = None,
    fill_value: float = 0.0,
    max_num_nodes: int | None = None,
    batch_size: int | None = None,
) -> Any:
    """The messages of each of this rank's destinations, as long as the longest list of any rank."""
    if isinstance(batch, DestinationIndex) and batch_size == batch.end.num_rows:
        rows, end = batch.local(), batch.end
        if max_num_nodes is None and not isinstance(end, PieceEnd):
            longest = torch.bincount(rows, minlength=1).max().view(1)
            max_num_nodes = int(all_reduce_alike(longest, "max", group=end.group))
        batch = rows
    return whole(x, batch, fill_value, max_num_nodes, batch_size)


def _by_numbers(whole: Any, *args: Any, **kwargs: Any) -> Any:
    """PyG tells edges apart by ``source * num_nodes + destination``, both of the whole graph.

    ``num_nodes``, where it is given, may be the number of nodes of this rank, with which different
    edges have the same number; the largest node of all ranks takes its place.
    """
    given = inspect.signature(whole).bind(*args, **kwargs)
    given.arguments["num_nodes"] = None
    return whole(*given.args, **given.kwargs)


def _refused(what: str) -> Callable[..., Any]:
    """In the place of a function of PyG that needs all edges; ``what`` says why, with a cure."""

    def function(whole: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(edge_index, NodeValues) and edge_index.halo.world_size == 1:
            return whole(plain(edge_index), *args, **kwargs)
        raise NotImplementedError(f"{whole.__name__} of edges that span ranks {what}")

    return function


_no_unbatch = _refused(
    "would number the nodes of each graph, of which this rank has some; take the edges of each "
    "graph from the whole data object"
)
_no_negatives = _refused(
    "would draw among the nodes of the whole graph, of which this rank has some rows; draw "
    "negative edges from the whole data object"
)


def _matrix(whole: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(edge_index, NodeValues):
        check_matrix(whole.__name__, edge_index.halo)
    return whole(plain(edge_index), *args, **kwargs)


def _contains_self_loops(whole: Any, edge_index: Any) -> bool:
    mask = edge_index[0] == edge_index[1]
    if not isinstance(edge_index, ShardedEdgeIndex):
        return bool(mask.any())
    has_loops = torch.tensor([int(mask.any())])
    return bool(all_reduce_alike(has_loops, "max", group=edge_index.halo.structure.group))


def _remove_self_loops(
    whole: Callable[..., Any], edge_index: Any, edge_attr: Tensor | None = None
) -> tuple[Any, Tensor | None]:
    others, edge_attr = whole(edge_index, edge_attr)
    if isinstance(edge_index, ShardedEdgeIndex) and edge_index.halo.is_square:
        others.has_whole_cut = edge_index.has_whole_cut  # loops are edges within a rank
    return others, edge_attr


def _add_self_loops(
    whole: Callable[..., Any],
    edge_index: Any,
    edge_attr: Tensor | None = None,
    fill_value: Any = None,
    num_nodes: int | tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(edge_index, ShardedEdgeIndex):
        return whole(edge_index, edge_attr, fill_value, num_nodes)
    limit, edges = _loop_limit(edge_index, num_nodes), edge_index
    if whole.__name__ == "add_remaining_self_loops":
        mask = edge_index[0] != edge_index[1]
        edges = edge_index[:, mask]  # type: ignore[assignment]
    joined, rows = _with_loops(edges, limit)
    # Loops are edges within a rank.
    joined.has_whole_cut = edge_index.has_whole_cut and edge_index.halo.is_square
    if edge_attr is None:
        return joined, None
    loop = require("torch_geometric.utils.loop", "graphshard[pyg]", "add_self_loops")
    size = edge_index.halo.num_dst  # a row for a loop at each of this rank's destinations
    of_loops = loop.compute_loop_attr(edge_index, edge_attr, size, False, fill_value)
    if edges is not edge_index:
        of_loops[edge_index.local()[1][~mask]] = edge_attr[~mask]
        edge_attr = edge_attr[mask]
    return joined, torch.cat([edge_attr, of_loops[rows]])


def _loop_limit(edge_index: ShardedEdgeIndex, num_nodes: Any) -> int | None:
    """End of the numbers that get a loop, in the whole graph; None for all nodes of one type.

    A number of nodes is that of this rank's rows on each rank, or that of the whole graph on all.
    """
    halo = edge_index.halo
    if num_nodes is None:
        return largest_number(edge_index) + 1
    given = min(num_nodes) if isinstance(num_nodes, tuple | list) else int(num_nodes)
    sources, destinations = halo.sources.numbering, halo.destinations.numbering
    if halo.is_square:
        if halo.sources.owns(given):
            return None
        if not halo.sources.largest < given <= sources.num_whole:
            raise ValueError(
                f"self loops need a number of nodes that is this rank's ({halo.num_owned}), or "
                f"that of the whole graph, {sources.num_whole} (got {given})"
            )
        return given
    rows = [
        (min(halo.num_owned, halo.num_dst), min(sources.num_whole, destinations.num_whole)),
        (halo.num_owned, sources.num_whole),
        (halo.num_dst, destinations.num_whole),
    ]
    shares = torch.tensor([given, -given, *(-int(given == own) for own, _ in rows)])
    most, least, *others = all_reduce_alike(shares, "max", group=halo.structure.group).tolist()
    largest = rows[0][1]  # a loop needs a node of each type
    for is_other, (_, whole) in zip(others, rows, strict=True):
        if is_other == -1 and whole <= largest:
            return whole
    if most != -least or most > largest:
        raise ValueError(
            f"self loops of {halo.etype} need a number of nodes that is the fewer of this rank's "
            f"sources and destinations on each rank ({rows[0][0]} here), or one number up to "
            f"{largest} on all (got {given} here, {-least} to {most} on all)"
        )
    return given


def _with_loops(edge_index: ShardedEdgeIndex, limit: int | None) -> tuple[ShardedEdgeIndex, Tensor]:
    """The edges and then the loops, and the destination of each loop."""
    halo, edges = edge_index.halo, edge_index.local()
    if halo.is_square:
        rows = torch.arange(halo.num_dst, device=edges.device)
        if limit is not None:
            rows = rows[halo.destinations.own_ids < limit]
        loops = rows.expand(2, -1)
        return ShardedEdgeIndex.make(torch.cat([edges, loops], 1), halo), rows
    assert limit is not None
    looped = halo.with_self_loops(limit)
    num_edges = halo.edge_index.shape[1]
    renumbered = edges.new_empty(halo.num_extended)
    renumbered[halo.edge_index[0]] = looped.edge_index[0, :num_edges]
    loops = looped.edge_index[:, num_edges:]
    joined = torch.stack([renumbered[edges[0]], edges[1]])
    return ShardedEdgeIndex.make(torch.cat([joined, loops], 1), looped), loops[1]


def call_on_extended_rows(
    layer: Any,
    run: Callable[..., Any],
    x_dict: dict[str, Tensor],
    edge_index_dict: dict[Any, Any],
) -> dict[str, Any]:
    """``HGTConv``, which joins all relations to one graph: it gets own and halo rows of each type.

    So what it computes of each node it computes of the halo, too, and the results of the halo are
    dropped. Rows of each type come in an exchange of their own.
    """
    rows = dict(x_dict)
    for etype, index in edge_index_dict.items():
        if isinstance(index, ShardedEdgeIndex) and rows[etype[0]] is x_dict[etype[0]]:
            (rows[etype[0]],) = index.halo.extended(x_dict[etype[0]])
    local = {
        etype: index.local() if isinstance(index, ShardedEdgeIndex) else index
        for etype, index in edge_index_dict.items()
    }
    out = run(layer, rows, local)
    return {
        ntype: value if value is None else value[: x_dict[ntype].shape[0]]
        for ntype, value in out.items()
    }


def with_largest_eigenvalue(layer: Any, args: Arguments, kwargs: Keywords) -> LayerCall:
    """Arguments of ``ChebConv``, with ``lambda_max`` also where it was not given.

    PyG takes twice the largest weight of the Laplacian of all edges, of which this rank has some.
    """
    given = _by_name(layer, args, kwargs)
    if given.get("lambda_max") is not None:
        return args, kwargs
    x, index, weight = given["x"], given["edge_index"], given.get("edge_weight")
    if weight is not None and weight.requires_grad:
        raise NotImplementedError(
            "ChebConv takes lambda_max from the weights of all edges, and this has no gradient on "
            "a graph that spans ranks; pass lambda_max"
        )
    utils = require("torch_geometric.utils", "graphshard[pyg]", "ChebConv")
    with torch.no_grad():
        _, values = utils.get_laplacian(index, weight, layer.normalization, x.dtype, x.shape[0])
        largest = _largest(values, float("-inf"), index.halo)
    return args, {**kwargs, "lambda_max": 2.0 * largest[0]}


def with_own_nodes(layer: Any, args: Arguments, kwargs: Keywords) -> LayerCall:
    """Arguments of ``RGCNConv`` for nodes without features: numbers of own and of halo nodes.

    PyG takes all numbers up to ``in_channels``. Every rank has all rows of the weights, so nothing
    but these numbers travels, and they do once.
    """
    given = _by_name(layer, args, kwargs)
    index = given.get("edge_index")
    if given.get("x") is not None or not isinstance(index, ShardedEdgeIndex):
        return args, kwargs
    ids = index.halo.own_ids
    if ids is None:
        raise ValueError(
            f"{type(layer).__name__} without features needs the numbers of the nodes in the whole "
            "graph, which this partition folder does not have; pass x"
        )
    needed = int(_largest(ids, -1, index.halo)) + 1
    if needed > layer.in_channels_l:
        raise ValueError(
            f"{type(layer).__name__} without features needs in_channels for the nodes of all "
            f"ranks, {needed} at least (got {layer.in_channels_l}); make it with the whole graph's "
            "number of nodes"
        )
    if type(layer).__name__ == "FastRGCNConv":  # reads edge_index as numbers
        return (), {**given, "x": (torch.arange(layer.in_channels_l, device=ids.device), ids)}
    (extended,) = index.halo.extended(ids)
    return (), {**given, "x": (extended, ids), "edge_index": index.local()}


def with_matrix_values(layer: Any, args: Arguments, kwargs: Keywords) -> LayerCall:
    """Arguments of a layer, with the values of a matrix as ``edge_weight`` or ``edge_attr``."""
    given = _by_name(layer, args, kwargs)
    matrices = [v for v in given.values() if isinstance(v, ShardedEdgeIndex)]
    values = matrices[0].matrix_values if matrices else None
    makes_loops = getattr(layer, "add_self_loops", False) and getattr(layer, "normalize", True)
    if makes_loops and any(m.is_matrix_with_loops for m in matrices):
        modules = [sys.modules.get(base.__module__) for base in type(layer).__mro__]
        if any(hasattr(module, "gcn_norm") for module in modules):
            raise _added_to_loops(type(layer).__name__)
    if values is None:
        return args, kwargs
    name = "edge_weight" if values.dim() == 1 else "edge_attr"
    if name in inspect.signature(type(layer).forward).parameters:
        return args, kwargs if given.get(name) is not None else {**kwargs, name: values}
    if values.dim() == 1 and not layer.inspector.implements("message_and_aggregate"):
        return args, kwargs  # PyG hands them to messages alone, which do not ask
    raise NotImplementedError(
        f"{type(layer).__name__} takes no {name} besides edge_index, so that it cannot be given "
        "the values of an adjacency matrix on edges that span ranks; make adj_t without them "
        "(ToSparseTensor(attr=None)), or use GraphConv, which has edge_weight"
    )


def _added_to_loops(name: str) -> NotImplementedError:
    """Of a matrix PyG adds 1 to its self loops, or sets them to 1; those of edges it leaves."""
    return NotImplementedError(
        f"adj_t has self loops, to which {name} adds others; pass edge_index, or have "
        "RemoveSelfLoops before ToSparseTensor"
    )


def _gcn_norm(
    whole: Callable[..., Any],
    edge_index: Any,
    edge_weight: Tensor | None = None,
    *rest: Any,
    **kw: Any,
) -> Any:
    given = inspect.signature(whole).bind(edge_index, edge_weight, *rest, **kw)
    given.apply_defaults()
    is_matrix = isinstance(edge_index, ShardedEdgeIndex)
    if is_matrix and edge_index.is_matrix_with_loops and given.arguments["add_self_loops"]:
        raise _added_to_loops("gcn_norm")
    if is_matrix and edge_weight is None:
        given.arguments["edge_weight"] = edge_index.matrix_values
    return whole(**given.arguments)


def with_one_hot_labels(layer: Any, args: Arguments, kwargs: Keywords) -> LayerCall:
    """Arguments of ``LabelPropagation`` with a column for each class that any rank has.

    PyG takes as many as the largest label says, and this rank has some of the labels.
    """
    given = _by_name(layer, args, kwargs)
    y, index = given["y"], given["edge_index"]
    if y.dtype != torch.int64 or y.shape[0] != y.numel():
        return args, kwargs
    count = int(_largest(y, -1, index.halo)) + 1
    columns = nn.functional.one_hot(y.view(-1), count).to(torch.get_default_dtype())
    return ((columns, *args[1:]), kwargs) if args else (args, {**kwargs, "y": columns})


#: Layers whose arguments are completed or replaced by what all ranks know of the graph.
_ARGUMENTS: dict[str, Callable[[Any, Arguments, Keywords], LayerCall]] = {
    "ChebConv": with_largest_eigenvalue,
    "FastRGCNConv": with_own_nodes,
    "LabelPropagation": with_one_hot_labels,
    "RGCNConv": with_own_nodes,
}


def _by_name(layer: Any, args: Arguments, kwargs: Keywords) -> dict[str, Any]:
    """The arguments of a call by the names that ``forward`` gives them."""
    _, *names = inspect.signature(type(layer).forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _largest(values: Tensor, least: float, halo: SourceHalo) -> Tensor:
    """``[1]``, the largest value on any rank, or ``least`` where there are none; collective."""
    largest = values.max().view(1) if values.numel() else values.new_full((1,), least)
    return all_reduce_alike(largest, "max", group=halo.structure.group)


def corrected(
    model: Any,
    y_soft: Tensor,
    y_true: Tensor,
    mask: Tensor,
    edge_index: ShardedEdgeIndex,
    edge_weight: Tensor | None = None,
) -> Tensor:
    """``CorrectAndSmooth.correct`` with the mean error of the training nodes of all ranks.

    Predictions are ``[num_owned, classes]``, as is the result. Source:
    https://arxiv.org/abs/2010.13993, equation 4.
    """
    if y_true.dtype == torch.int64 and y_true.shape[0] == y_true.numel():
        y_true = nn.functional.one_hot(y_true.view(-1), y_soft.shape[-1]).to(y_soft.dtype)
    error = torch.zeros_like(y_soft)
    error[mask] = y_true - y_soft[mask]
    if not model.autoscale:

        def fixed(x: Tensor) -> Tensor:
            x[mask] = error[mask]
            return x

        spread = model.prop1(error, edge_index, edge_weight=edge_weight, post_step=fixed)
        return y_soft + model.scale * spread
    spread = model.prop1(
        error, edge_index, edge_weight=edge_weight, post_step=lambda x: x.clamp_(-1.0, 1.0)
    )
    count = torch.tensor(y_true.shape[0], dtype=y_soft.dtype, device=y_soft.device)
    sums = torch.stack([error[mask].abs().sum(), count])
    total, count = all_reduce_alike(sums, group=edge_index.halo.structure.group)
    scale = total / count / spread.abs().sum(dim=1, keepdim=True)
    scale[scale.isinf() | (scale > 1000)] = 1.0
    return y_soft + scale * spread


def own_embedding(
    model: Any, edge_index: ShardedEdgeIndex, edge_weight: Tensor | None = None
) -> Tensor:
    """``LightGCN.get_embedding`` of this rank's nodes, from a table with a row for every node.

    Source: https://arxiv.org/abs/2002.02126, equation 8.
    """
    rows: Tensor = edge_index.halo.own_rows(model.embedding.weight)
    total = rows * model.alpha[0]
    for conv, alpha in zip(model.convs, model.alpha[1:], strict=True):
        rows = conv(rows, edge_index, edge_weight)
        total = total + rows * alpha
    return total


def install() -> None:
    """Give PyG's `MessagePassing` the call that knows sharded edges; again is the same as once.

    So get two methods that are no calls: ``CorrectAndSmooth.correct``, which means over all
    training nodes, and ``LightGCN.get_embedding``, which has a row for all nodes.
    """
    need = "graphshard[pyg]", "graphshard.pyg"
    conv = require("torch_geometric.nn.conv", *need)
    if "__call__" in vars(conv.MessagePassing):
        return
    # torch.compile leaves such a call as it is: it cannot look into an exchange between ranks.
    uncompiled = torch.compiler.disable(call_sharded)

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        find_edges = vars(layer).get(WHOLE_EDGES)
        if find_edges is not None:
            args, kwargs = find_edges(args), find_edges(kwargs)
        for _ in sharded_in((args, kwargs)):
            return uncompiled(layer, args, kwargs, nn.Module.__call__)
        with caches_of_nodes(layer, None):
            return nn.Module.__call__(layer, *args, **kwargs)

    conv.MessagePassing.__call__ = call
    for name, kind in vars(require("torch_geometric.nn.pool", *need)).items():
        if name.endswith("Pooling") and isinstance(kind, type):
            kind.__call__ = _checked_call  # type: ignore[method-assign]
    aggr = require("torch_geometric.nn.aggr", *need)
    aggr.Aggregation.__call__ = _of_rows(aggr.Aggregation.__call__)
    conv.MessagePassing.explain_message = of_all_ranks(conv.MessagePassing.explain_message)
    han: Any = require("torch_geometric.nn.conv.han_conv", *need)
    han.group = by_means_of_all_ranks(han.group)
    install_functions()
    models = require("torch_geometric.nn.models", *need)
    smooth, light = models.CorrectAndSmooth, models.LightGCN
    smooth.correct = _either_method(smooth.correct, corrected)
    light.get_embedding = _either_method(light.get_embedding, own_embedding)


def _either_method(whole: Callable[..., Any], sharded: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is one function with edges that span ranks, and another without."""

    @wraps(whole)
    def method(*args: Any, **kwargs: Any) -> Any:
        for _ in sharded_in((args, kwargs)):
            return sharded(*args, **kwargs)
        return whole(*args, **kwargs)

    return method


def _checked_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    for index in sharded_in((args, kwargs)):
        check_model(module, index.halo.world_size)
    return nn.Module.__call__(module, *args, **kwargs)


def _of_rows(whole: Callable[..., Any]) -> Callable[..., Any]:
    """An aggregation of PyG, for which an index is the row of a result and nothing else."""

    @wraps(whole)
    def call(module: Any, x: Tensor, index: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(index, NodeIndex) and not index.end.has_remote_rows:
            size = args[1] if len(args) > 1 else kwargs.get("dim_size")
            is_pyg = type(module).__module__.startswith("torch_geometric.nn.aggr.")
            if is_pyg and size == index.end.num_rows:
                index = index.local()
        return whole(module, x, index, *args, **kwargs)

    return call


def call_sharded(layer: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
    """Call a layer with sharded edges: ``run``, with arguments that may be others."""
    sharded = list(sharded_in((args, kwargs)))
    halo = sharded[0].halo
    check_model(layer, halo.world_size)
    check_hooks(layer, halo)
    try:
        with caches_of_nodes(layer, halo), own_masks(layer, halo) as masks:
            return _anchored(_called(layer, args, kwargs, run), sharded, masks)
    finally:
        for index in sharded:
            index.halo.forget()


def _called(layer: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
    name, sharded = type(layer).__name__, list(sharded_in((args, kwargs)))
    if any(index.matrix_values is not None or index.is_matrix_with_loops for index in sharded):
        args, kwargs = with_matrix_values(layer, args, kwargs)
    if name in _ARGUMENTS:
        args, kwargs = _ARGUMENTS[name](layer, args, kwargs)
    if args:
        args = (sharded[0].halo.own_rows(args[0]), *args[1:])
    elif "x" in kwargs:
        kwargs = {**kwargs, "x": sharded[0].halo.own_rows(kwargs["x"])}
    if name == "HGTConv":
        return call_on_extended_rows(layer, run, *args, **kwargs)
    is_han = any(base.__name__ == "HANConv" for base in type(layer).__mro__)
    weighing = weighing_on(layer, sharded[0].halo) if is_han else nullcontext()
    with bound(layer, kwargs), weighing:
        return computed(run(layer, *args, **kwargs))


def _anchored(out: Any, sharded: Sequence[ShardedEdgeIndex], masks: Sequence[Tensor]) -> Any:
    """The result, made to depend on all that was fetched for it.

    A rank without nodes of some kind may leave out the branch that used them; the backward of
    every exchange must be reached on all ranks.
    """
    halos = {id(index.halo): index.halo for index in sharded}
    used = [*masks, *(t for halo in halos.values() for t in halo.fetched)]
    fetched = [t for t in used if t.requires_grad]
    if not fetched or not torch.is_grad_enabled():
        return out
    if isinstance(out, Tensor):
        return anchor(out, *fetched)
    if isinstance(out, tuple):
        return (_anchored(out[0], sharded, masks), *out[1:])
    if isinstance(out, dict):
        return {key: _anchored(value, sharded, masks) for key, value in out.items()}
    return out


def sharded_in(value: object) -> Iterator[ShardedEdgeIndex]:
    """Edges that span ranks among arguments."""
    return (item for item in node_values_in(value) if isinstance(item, ShardedEdgeIndex))
