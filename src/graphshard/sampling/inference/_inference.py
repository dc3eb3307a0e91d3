# SPDX-License-Identifier: Apache-2.0
"""inference: a model's outputs for all nodes, layer by layer, in bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from ...comm import share_error
from ...fullbatch import DeferredEdges, GraphShardManager
from ...graph import Graph, MessagePassingGraph
from ._batched_graphs import BatchedGraph, BatchedShards

_MOST_LAYERS = 1000


def inference(
    model: Callable[..., Any],
    graph: Graph | GraphShardManager,
    features: Any,
    batch_size: int,
    *,
    num_layers: int | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Run a model on all nodes of a graph: what ``model([graph] * num_layers, features)`` gives.

    Each layer is computed for all nodes before the next one begins, so no neighbour is computed
    twice. Inside a layer messages are passed to ``batch_size`` nodes at a time, over all of their
    in-edges: tensors with a row per node are whole, but nothing with a row per edge exists for
    more edges than a batch has. (Exceptions: edge tensors that are passed in, and a softmax over
    the *out*-edges of nodes of scores that the model computes.) No gradients; the model is in
    evaluation mode meanwhile, and then in the mode that it was in.

    On a sharded graph this is collective: every rank must call it and gets the rows of its own
    nodes. A batch fetches the rows that it reads of other ranks, so memory is bounded there too,
    whatever the graph's mode; ``batch_size`` counts each rank's own nodes.

    Args:
        model: Called with a sequence of graphs, one for each layer, and ``features``. A layer may
            be any that runs on a graph: of `graphshard.nn`, of DGL, with user-defined messages.
        graph: The graph, plain or typed; its features can be read by the model.
        features: Passed on to the model: a tensor ``[num_nodes, ...]``, or node type to tensor.
        batch_size: Nodes whose in-edges are worked on at once.
        num_layers: Length of the sequence of graphs. None: the model gets as many graphs as it
            asks for by index or by zipping; it cannot ask for ``len``.
        device: Where to compute; the model must be there. By default where the graph is.

    Returns:
        What the model returns, on the device of ``features``.

    Raises:
        TypeError: ``graph`` is neither a `Graph` nor a `GraphShardManager`.
        ValueError: ``batch_size`` or ``num_layers`` is below 1, or ``graph`` is a block.
        NotImplementedError: ``device`` is not where a sharded graph is.

    Example:
        >>> from graphshard.data import load_dataset
        >>> from graphshard.nn import SAGEConv
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.convs = nn.ModuleList([SAGEConv(1433, 8, "mean"), SAGEConv(8, 7, "mean")])
        ...     def forward(self, blocks, features):
        ...         for i, conv in enumerate(self.convs):
        ...             features = conv(blocks[i], features)
        ...         return features
        >>> graph = load_dataset("cora").graph
        >>> inference(Model(), graph, graph.ndata["feat"], batch_size=500).shape
        torch.Size([2708, 7])
    """
    _check(graph, batch_size, num_layers)
    origin = _first_device(features)
    if device is not None:
        graph, features = graph.to(device), _moved(features, torch.device(device))
    batched: MessagePassingGraph
    if isinstance(graph, GraphShardManager):
        batched = BatchedShards(graph, batch_size)
    else:
        batched = BatchedGraph(graph, batch_size)
    layers = SameGraph(batched) if num_layers is None else [batched] * num_layers
    with torch.no_grad(), _evaluating(model):
        result = _whole(model(layers, features))
    return result if origin is None else _moved(result, origin)


class SameGraph(Sequence[MessagePassingGraph]):
    """One graph for as many layers as a model asks for."""

    def __init__(self, graph: MessagePassingGraph) -> None:
        self._graph = graph

    @overload
    def __getitem__(self, index: int) -> MessagePassingGraph: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[MessagePassingGraph]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            if index.stop is None or index.stop < 0 or (index.start or 0) < 0:
                len(self)
            return [self._graph] * len(range(*index.indices(index.stop)))
        return self._graph

    def __len__(self) -> int:
        raise TypeError(
            "the model asks how many graphs there are, and it can have as many as it wants; give "
            "inference(..., num_layers=...)"
        )

    def __iter__(self) -> Iterator[MessagePassingGraph]:
        for _ in range(_MOST_LAYERS):
            yield self._graph
        raise RuntimeError(
            f"the model has gone through {_MOST_LAYERS} graphs and asks for more; give "
            "inference(..., num_layers=...)"
        )


def _check(graph: Any, batch_size: int, num_layers: int | None) -> None:
    """Raise what is wrong with the arguments; on every rank, if the graph is sharded."""
    if not isinstance(graph, Graph | GraphShardManager):
        raise TypeError(
            f"inference runs on a Graph or a GraphShardManager (got {type(graph).__name__})"
        )
    error = None
    if batch_size < 1:
        error = ValueError(f"batch_size must be at least 1 (got {batch_size})")
    elif num_layers is not None and num_layers < 1:
        error = ValueError(f"num_layers must be at least 1 (got {num_layers})")
    elif graph.is_block:
        error = ValueError(
            "inference is for all nodes of a graph, and this is one layer of a message flow graph; "
            "pass the graph of construct_full_graph, or call the model on the list of MFGs"
        )
    if isinstance(graph, GraphShardManager):
        share_error(error, graph._structure.group)
    elif error is not None:
        raise error


@contextlib.contextmanager
def _evaluating(model: Callable[..., Any]) -> Iterator[None]:
    """Evaluation mode for all modules of the model; afterwards each is as it was."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [module.training for module in modules]
    try:
        if isinstance(model, nn.Module):
            model.eval()
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    """``values`` with each leaf of its lists, tuples and dictionaries changed."""
    if isinstance(values, Mapping):
        return {key: _mapped(value, change) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_mapped(value, change) for value in values)
    return change(values)


def _moved(values: Any, device: torch.device) -> Any:
    return _mapped(values, lambda v: v.to(device) if isinstance(v, Tensor) else v)


def _whole(values: Any) -> Any:
    return _mapped(values, lambda v: v.materialize() if isinstance(v, DeferredEdges) else v)


def _first_device(values: Any) -> torch.device | None:
    found: list[torch.device] = []
    _mapped(values, lambda v: found.append(v.device) if isinstance(v, Tensor) else None)
    return found[0] if found else None
