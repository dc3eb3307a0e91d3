# SPDX-License-Identifier: Apache-2.0
"""What has no exact result when each rank has a part of the nodes, found before anything is sent.

The whole model is looked at, not the layer that is called first: a normalisation between two layers
gets plain tensors, and cannot know that they are one rank's rows. The model is the outermost module
whose call leads here. What is found depends on the model alone, which is the same on every rank, so
all ranks raise or none.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from torch import nn

from ._norms import unsynchronized

_LAYERS = {
    "GPSConv": "its attention over all nodes would see this rank's alone; use its local layer",
    "HANConv": "it weighs relations by means over all nodes, of which this rank has some; use "
    "HeteroConv or HGTConv",
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


def check_model(layer: nn.Module, world_size: int) -> None:
    """Raise if the model that calls ``layer`` holds what is not exact on shards.

    Args:
        layer: The layer that is called now.
        world_size: Ranks. On one, what looks at all nodes does; how edges are kept is the same.

    Raises:
        NotImplementedError: It does; names the module, the reason and the alternative.
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
    found: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            found = frame
        frame = frame.f_back
    model: Any = layer if found is None else found.f_locals.get("self", layer)
    return model if isinstance(model, nn.Module) else layer
