# SPDX-License-Identifier: Apache-2.0
"""What a layer of PyG keeps between calls about the edges it is called with.

Two kinds: masks of edges, which an explainer gives to each layer (``_edge_mask``, ``_loop_mask``),
and what a layer made with ``cached=True`` computed from the edges of its first call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import all_reduce
from ._source_halo import SourceHalo

_HOOKS_OF_EDGES = (
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "_aggregate_forward_pre_hooks",
    "_edge_update_forward_pre_hooks",
    "_edge_update_forward_hooks",
)
#: Layers that are explained now, and the relation that they are called with.
_explained_on: weakref.WeakKeyDictionary[nn.Module, SourceHalo] = weakref.WeakKeyDictionary()
#: Layers to the nodes whose edges their caches are of.
_cached_for: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


@contextmanager
def own_masks(layer: Any, halo: SourceHalo) -> Iterator[list[Tensor]]:
    """Context in which the edge masks of a layer are those of this rank's edges.

    With `graphshard.pyg.parallelize` they have an entry for each edge of the whole graph, in its
    order; with `graphshard.pyg.shard` one for each edge of this rank. Collective for a layer that
    is explained.

    Args:
        layer: A `MessagePassing`.
        halo: The relation that it is called with.

    Yields:
        The masks that the result depends on.

    Raises:
        ValueError: On every rank, if a mask has another number of entries on any.
        NotImplementedError: The edges are turned round.
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
    if not bool(all_reduce(fits, "min", group=halo.structure.group)):
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
    """Raise if hooks see the messages of a program that knows nothing of ranks.

    Args:
        layer: A `MessagePassing`.
        halo: The relation that it is called with.

    Raises:
        NotImplementedError: They would take values of this rank's edges for those of all.
    """
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

    PyG finds it from the number of messages, which says so of this rank's edges alone.

    Args:
        whole: PyG's method.
    """

    @wraps(whole)
    def explain_message(layer: Any, inputs: Tensor, dim_size: int | None) -> Tensor:
        halo, mask = _explained_on.get(layer), layer._edge_mask
        if halo is None or mask is None or halo.world_size == 1:
            return whole(layer, inputs, dim_size)
        more = inputs.size(layer.node_dim) - mask.size(0)
        sums = all_reduce(torch.tensor([more, abs(more)]), group=halo.structure.group).tolist()
        if sums == [0, 0]:
            return whole(layer, inputs, dim_size)
        mask = mask.sigmoid() if layer._apply_sigmoid else mask
        mask = torch.cat([mask[layer._loop_mask], mask.new_ones(dim_size or 0)])
        other = torch.tensor([int(inputs.size(layer.node_dim) != mask.size(0))])
        if sums[0] == 0 or bool(all_reduce(other, "max", group=halo.structure.group)):
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

    A layer that was first called with the whole graph would else take its whole edges for a rank's.

    Args:
        layer: A `MessagePassing`.
        halo: The relation that it is called with; None for edges that do not span ranks.
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
