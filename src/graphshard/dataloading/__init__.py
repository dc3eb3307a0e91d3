# SPDX-License-Identifier: Apache-2.0
"""Samplers and loaders for mini-batch training on one graph, under the names that DGL gives them.

What they draw with is in ``graphshard.sampling``, which also has the loader for graphs that span
ranks.
"""

import sys

from ..sampling.loader import (
    EdgeCollator,
    EdgeDataLoader,
    GraphCollator,
    GraphDataLoader,
    LocalDataLoader,
    NodeCollator,
    NodeDataLoader,
)
from ..sampling.sampler import (
    BlockSampler,
    EdgePredictionSampler,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    MultiLayerNeighborSampler,
    NeighborSampler,
    Sampler,
    SpotTarget,
    as_edge_prediction_sampler,
    find_exclude_eids,
)
from ..sampling.subgraphs import ClusterGCNSampler, SAINTSampler, ShaDowKHopSampler
from . import negative_sampler

DataLoader = LocalDataLoader

__all__ = [
    "BlockSampler",
    "ClusterGCNSampler",
    "DataLoader",
    "EdgeCollator",
    "EdgeDataLoader",
    "EdgePredictionSampler",
    "GraphCollator",
    "GraphDataLoader",
    "LaborSampler",
    "MultiLayerFullNeighborSampler",
    "MultiLayerNeighborSampler",
    "NeighborSampler",
    "NodeCollator",
    "NodeDataLoader",
    "SAINTSampler",
    "Sampler",
    "ShaDowKHopSampler",
    "SpotTarget",
    "as_edge_prediction_sampler",
    "find_exclude_eids",
    "negative_sampler",
]

_DISTRIBUTED = ("DistDataLoader", "DistEdgeDataLoader", "DistNodeDataLoader")


def __getattr__(name: str) -> object:
    """Names that DGL has here too, of what works on a `graphshard.distributed.DistGraph`.

    They are looked up when they are asked for: they are built on what is here.
    """
    if name in _DISTRIBUTED:
        found: object = getattr(sys.modules["graphshard"].distributed, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
