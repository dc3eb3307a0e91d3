# SPDX-License-Identifier: Apache-2.0
"""PyG's layers and models on a graph that spans all ranks, unmodified and exact; and its loaders.

::

    graphshard.initialize_comms()
    model = graphshard.pyg.parallelize(model, data)  # the rest of the script stays as it is

`shard` gives each rank its own rows, for graphs that no rank holds whole::

    data = graphshard.pyg.shard("parts/graph.json")
    out = model(data.x, data.edge_index)  # any torch_geometric.nn layer or model
    loader = graphshard.pyg.NeighborLoader(data, [10, 5], data.train_mask, batch_size=64)

Needs the extra ``graphshard[pyg]``; nothing of PyG is imported before a name here is used.
"""

from typing import TYPE_CHECKING, Any

from ..graph.convert import require
from ._edge_index import DestinationIndex, ShardedEdgeIndex, SourceIndex
from ._norms import convert_sync_norm
from ._shard import shard
from .parallel import parallelize

if TYPE_CHECKING:
    from .loader import (
        HGTLoader,
        HGTSampler,
        HopSampler,
        LinkNeighborLoader,
        NeighborLoader,
        PrefetchLoader,
        RemoteFeatureStore,
        RemoteGraphStore,
    )

__all__ = [
    "DestinationIndex",
    "HGTLoader",
    "HGTSampler",
    "HopSampler",
    "LinkNeighborLoader",
    "NeighborLoader",
    "PrefetchLoader",
    "RemoteFeatureStore",
    "RemoteGraphStore",
    "ShardedEdgeIndex",
    "SourceIndex",
    "convert_sync_norm",
    "parallelize",
    "shard",
]


def __getattr__(name: str) -> Any:
    """Names whose classes are subclasses of PyG's, made when one is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("torch_geometric.loader", "graphshard[pyg]", f"{__name__}.{name}")
    from . import loader

    return getattr(loader, name)
