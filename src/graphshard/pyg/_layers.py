# SPDX-License-Identifier: Apache-2.0
"""What happens when a layer of PyG is called with an ``edge_index`` that spans ranks.

`MessagePassing` gets a ``__call__`` of its own, once, by the first call of
`graphshard.pyg.shard`. A call without a `ShardedEdgeIndex` goes straight through it. With one, the
model is checked for what has no exact result on shards, and the layer runs with its remote rows
fetched at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import anchor
from ..graph.convert import require
from ._adapters import (
    call_on_extended_rows,
    corrected,
    own_embedding,
    with_largest_eigenvalue,
    with_matrix_values,
    with_one_hot_labels,
    with_own_nodes,
)
from ._edge_index import NodeIndex, ShardedEdgeIndex
from ._edge_state import caches_of_nodes, check_hooks, of_all_ranks, own_masks
from ._graph_functions import install_functions
from ._inexact import check_model
from ._propagate import bound

WHOLE_EDGES = "_graphshard_whole_edges"
"""Where a layer has, within a call of a parallel model, the function that puts this rank's edges in
the place of the whole graph's."""


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
        for _ in _sharded_in((args, kwargs)):
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
    install_functions()
    models = require("torch_geometric.nn.models", *need)
    for model, name, sharded in (
        (models.CorrectAndSmooth, "correct", corrected),
        (models.LightGCN, "get_embedding", own_embedding),
    ):
        setattr(model, name, _either(getattr(model, name), sharded))


def _either(whole: Callable[..., Any], sharded: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is one function with edges that span ranks, and another without."""

    @wraps(whole)
    def method(*args: Any, **kwargs: Any) -> Any:
        for _ in _sharded_in((args, kwargs)):
            return sharded(*args, **kwargs)
        return whole(*args, **kwargs)

    return method


def _checked_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    for index in _sharded_in((args, kwargs)):
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
    """Call a layer with sharded edges.

    Args:
        layer: A `MessagePassing`.
        args: Of the call.
        kwargs: Of the call.
        run: What is called in the end, with the layer and arguments that may be others.
    """
    sharded = list(_sharded_in((args, kwargs)))
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
    name, sharded = type(layer).__name__, list(_sharded_in((args, kwargs)))
    if any(index.matrix_values is not None or index.is_matrix_with_loops for index in sharded):
        kwargs = with_matrix_values(layer, args, kwargs)
    if name == "ChebConv":
        kwargs = with_largest_eigenvalue(layer, args, kwargs)
    if name in ("RGCNConv", "FastRGCNConv"):
        args, kwargs = with_own_nodes(layer, args, kwargs)
    if name == "LabelPropagation":
        args, kwargs = with_one_hot_labels(layer, args, kwargs)
    if args:
        args = (sharded[0].halo.own_rows(args[0]), *args[1:])
    elif "x" in kwargs:
        kwargs = {**kwargs, "x": sharded[0].halo.own_rows(kwargs["x"])}
    if name == "HGTConv":
        return call_on_extended_rows(layer, run, *args, **kwargs)
    with bound(layer, kwargs):
        return run(layer, *args, **kwargs)


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


def _sharded_in(value: Any) -> Iterator[ShardedEdgeIndex]:
    if isinstance(value, ShardedEdgeIndex):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _sharded_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sharded_in(item)
