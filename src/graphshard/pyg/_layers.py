# SPDX-License-Identifier: Apache-2.0
"""What happens when a layer of PyG is called with an ``edge_index`` that spans ranks.

`MessagePassing` gets a ``__call__`` of its own, once, by the first call of
`graphshard.pyg.shard`. A call without a `ShardedEdgeIndex` goes straight through it. With one, the
model is checked for what has no exact result on shards, and the layer runs with its remote rows
fetched at most once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..graph.convert import require
from ._edge_index import ShardedEdgeIndex
from ._inexact import check_model


def install() -> None:
    """Give PyG's `MessagePassing` the call that knows sharded edges; again is the same as once."""
    conv = require("torch_geometric.nn.conv", "graphshard[pyg]", "graphshard.pyg")
    conv.MessagePassing.__call__ = call_layer


def call_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """``layer(*args, **kwargs)``."""
    sharded = list(_sharded_in((args, kwargs)))
    if not sharded:
        return nn.Module.__call__(layer, *args, **kwargs)
    if sharded[0].halo.world_size > 1:
        check_model(layer)
    try:
        return nn.Module.__call__(layer, *args, **kwargs)
    finally:
        for index in sharded:
            index.halo.forget()


def _sharded_in(value: Any) -> Iterator[ShardedEdgeIndex]:
    if isinstance(value, ShardedEdgeIndex):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _sharded_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sharded_in(item)
