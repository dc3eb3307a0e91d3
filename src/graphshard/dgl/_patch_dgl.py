# SPDX-License-Identifier: Apache-2.0
"""patch_dgl: let DGL's own layers, and what they call, run on graphs of this package.

The layers of `graphshard.nn` need none of it.

[Note: one function, many names]
    A function of DGL has a name in every module that imported it: DGL's own, the program's, and
    those that will be imported later. So the function itself changes, not its names: its code is
    exchanged for one that looks at the graph, and calls the old code for DGL's graphs. The old
    function is kept as ``__wrapped__`` of the changed one, which is how a second call finds that
    there is nothing to do, and how `unpatch_dgl` finds what to put back.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..fullbatch import GraphShardManager
from ..graph import (
    MessagePassingGraph,
    add_self_loop,
    edge_softmax,
    from_dgl,
    remove_self_loop,
    reverse,
)
from ..nn import RelGraphConv
from . import nn
from .graphs._bipartite import block_to_graph
from .graphs._encodings import laplacian_lambda_max
from .graphs._readout import broadcast_nodes
from .nn.edge_convs import gated_graph_conv

_LAYERS = "dgl.nn.pytorch.conv"
_OUR_LAYERS = "graphshard.dgl.nn.pytorch.conv"  # modules of the same names

# Functions on graphs that DGL's layers, and the texts of their errors, send users to: DGL's module,
# and what they are on a `Graph` or a `Block`.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "ops": (edge_softmax,),
    "transforms.functional": (add_self_loop, laplacian_lambda_max, remove_self_loop, reverse),
    "convert": (block_to_graph,),
    "readout": (broadcast_nodes,),
}


# Forwards of layers whose own code asks a graph of several ranks what one rank cannot answer.


def edge_weight_norm(layer: Any, graph: Any, edge_weight: Tensor) -> Tensor:
    """``EdgeWeightNorm`` of DGL: weighted out-degrees without a reversed graph."""
    return nn.EdgeWeightNorm(layer._norm, layer._eps)(graph, edge_weight)


def pna_tower(layer: Any, graph: Any, node_feat: Tensor, edge_feat: Tensor | None = None) -> Tensor:
    """A tower of ``PNAConv`` and ``DGNConv``: divided by the root of the number of all nodes."""
    if layer.edge_feat_size > 0 and edge_feat is None:
        raise ValueError("the layer was made with edge_feat_size, so it needs edge features")
    with graph.local_scope():
        graph.ndata["h"] = node_feat
        if layer.edge_feat_size > 0:
            graph.edata["a"] = edge_feat
        graph.update_all(layer.message, layer.reduce_func)
        out = layer.U(torch.cat([node_feat, graph.ndata["h_neigh"]], dim=-1))
    return layer.dropout(layer.batchnorm(out / graph.num_nodes_global() ** 0.5))


def broadcast_to_own_nodes(graph: Any, graph_feat: Tensor, *, ntype: str | None = None) -> Tensor:
    """A row of a sharded graph, which is one graph, for each node of this rank."""
    return graph_feat.repeat_interleave(graph.num_nodes(ntype), 0)


def rel_graph_conv(layer: Any, g: Any, *args: Any, **kwargs: Any) -> Tensor:
    """`RelGraphConv` of this package on a graph of DGL.

    SAR puts a class of its own in the place of DGL's, and so does `patch_dgl`.
    """
    return nn.RelGraphConv.forward(layer, from_dgl(g), *args, **kwargs)


_FORWARDS: tuple[tuple[str, type[Any], Callable[..., Any]], ...] = (
    ("graphconv.EdgeWeightNorm", MessagePassingGraph, edge_weight_norm),
    ("gatedgraphconv.GatedGraphConv", GraphShardManager, gated_graph_conv),
    ("pnaconv.PNAConvTower", GraphShardManager, pna_tower),
)


def patched_edge_softmax(graph: Any, *args: Any, **kwargs: Any) -> Any:
    """`edge_softmax` on a graph of this package, DGL's own on a graph of DGL."""
    if isinstance(graph, MessagePassingGraph):
        return edge_softmax(graph, *args, **kwargs)
    return sys.modules["dgl"].nn.functional.edge_softmax(graph, *args, **kwargs)


class DglPatch:
    """What `patch_dgl` did, for ``with``: leaving it puts DGL back, if this call had changed it."""

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first

    def __enter__(self) -> DglPatch:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._is_first:
            unpatch_dgl()


def patch_dgl() -> DglPatch:
    """Let the layers of ``dgl.nn`` run on a `Graph`, a `Block` and a `GraphShardManager` too.

    DGL's ``edge_softmax`` and the other functions of graphs that its layers call are redirected,
    wherever they are called from: in modules that imported them before, and in modules that are
    imported later. On DGL's graphs they compute what they did before. ``dgl.nn.RelGraphConv`` is
    the one of this package from then on, as SAR has it; it takes graphs of DGL too. In a program
    that has not imported DGL yet, all of this happens when it does. A second call changes nothing.

    Returns:
        For ``with``: DGL is as it was again after it. `unpatch_dgl` does the same at any time.
    """
    if any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        return DglPatch(is_first=False)
    _swap(_modules_in(_OUR_LAYERS), "edge_softmax", edge_softmax, patched_edge_softmax)
    if _is_dgl_itself():
        return DglPatch(is_first=True)
    if _LAYERS in sys.modules:
        return DglPatch(_patch())
    sys.meta_path.insert(0, _WhenImported())
    return DglPatch(is_first=True)


def unpatch_dgl() -> None:
    """Put DGL back as it was before `patch_dgl`; nothing happens if it is."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _WhenImported)]
    _swap(_modules_in(_OUR_LAYERS), "edge_softmax", patched_edge_softmax, edge_softmax)
    if _is_dgl_itself() or _LAYERS not in sys.modules:
        return
    for function in _functions():
        original = vars(function).pop("__wrapped__", None)
        if original is not None:
            _become(function, original)
    for owner, *_ in _forwards():
        original = getattr(owner.forward, "__wrapped__", None)
        if original is not None:
            owner.forward = original
    _swap_names(back=True)


def _is_dgl_itself() -> bool:
    """Whether ``import dgl`` is this package, as in ``python -m graphshard.dgl``."""
    return sys.modules.get("dgl") is sys.modules["graphshard.dgl"]


def _patch() -> bool:
    """Change DGL, which is imported; returns whether it was not changed before."""
    is_first = False
    for function in _functions():
        if hasattr(function, "__wrapped__"):
            continue
        is_first = True
        original = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        _become(function, _redirect)
        function.__kwdefaults__ = {"_answer": functools.partial(_answer, original)}
        function.__wrapped__ = original
    for owner, kind, is_for, ours in _forwards():
        if not hasattr(owner.forward, "__wrapped__"):
            owner.forward = _forward_of(owner.forward, kind, is_for, ours)
    _swap_names()
    return is_first


def _become(function: Any, other: Any) -> None:
    """Give a function the code of another. See [Note: one function, many names]."""
    function.__code__ = other.__code__
    function.__defaults__, function.__kwdefaults__ = other.__defaults__, other.__kwdefaults__


def _redirect(*args: Any, _answer: Any, **kwargs: Any) -> Any:
    return _answer(*args, **kwargs)


def _answer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function of DGL says of a graph, its own or one of this package."""
    graph = args[0] if args else kwargs.get("graph", kwargs.get("g"))
    if not isinstance(graph, MessagePassingGraph):
        return original(*args, **kwargs)
    name = original.__name__
    if isinstance(graph, GraphShardManager) and name != "edge_softmax":
        if name == "broadcast_nodes":
            return broadcast_to_own_nodes(*args, **kwargs)
        return getattr(graph, name)(*args[1:], **kwargs)
    ours = next(f for group in _FUNCTIONS.values() for f in group if f.__name__ == name)
    return ours(*args, **kwargs)


def _forward_of(original: Any, kind: type[Any], is_for: bool, ours: Callable[..., Any]) -> Any:
    """A ``forward`` that is ``ours`` for graphs of a kind, or for all but those."""

    @functools.wraps(original)
    def forward(layer: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = ours if isinstance(graph, kind) == is_for else original
        return chosen(layer, graph, *args, **kwargs)

    return forward


def _functions() -> Iterator[Any]:
    for module, ours in _FUNCTIONS.items():
        for function in ours:
            yield getattr(_dgl(module), function.__name__)


def _forwards() -> Iterator[tuple[Any, type[Any], bool, Callable[..., Any]]]:
    """Classes whose ``forward`` changes; for a kind of graph, or all but it; and into what."""
    for path, kind, ours in _FORWARDS:
        module, name = path.split(".")
        owner = getattr(_dgl(f"nn.pytorch.conv.{module}"), name)
        yield owner, kind, True, ours
    yield RelGraphConv, MessagePassingGraph, False, rel_graph_conv


def _swap_names(back: bool = False) -> None:
    """As SAR has it: DGL's layers call a function of its own, and its layer takes DGL's place."""
    theirs = _dgl("nn.pytorch.conv.relgraphconv").RelGraphConv
    softmax = _dgl("nn.functional").edge_softmax, patched_edge_softmax
    layer = theirs, RelGraphConv
    _swap(_modules_in(_LAYERS), "edge_softmax", *(softmax[::-1] if back else softmax))
    packages = [_dgl("nn"), _dgl("nn.pytorch"), sys.modules[_LAYERS]]
    _swap(packages, "RelGraphConv", *(layer[::-1] if back else layer))


def _swap(modules: Sequence[ModuleType], name: str, old: Any, new: Any) -> None:
    """Let a name stand for something else, in the modules where it stands for ``old``."""
    for module in modules:
        if vars(module).get(name) is old:
            vars(module)[name] = new


def _modules_in(package: str) -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]


def _dgl(module: str) -> ModuleType:
    return sys.modules[f"dgl.{module}"]


class _WhenImported(importlib.abc.MetaPathFinder):
    """Patches DGL right after it is imported for the first time."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "dgl":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _patch()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
