# SPDX-License-Identifier: Apache-2.0
"""Samplers and loaders for mini-batch training on one graph, under the names that DGL gives them.

What they draw with is in ``graphshard.sampling``, which also has the loader for graphs that span
ranks.
"""

from ..sampling.loader import (
    EdgeCollator,
    EdgeDataLoader,
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
    as_edge_prediction_sampler,
)
from . import negative_sampler

DataLoader = LocalDataLoader

__all__ = [
    "BlockSampler",
    "DataLoader",
    "EdgeCollator",
    "EdgeDataLoader",
    "EdgePredictionSampler",
    "LaborSampler",
    "MultiLayerFullNeighborSampler",
    "MultiLayerNeighborSampler",
    "NeighborSampler",
    "NodeCollator",
    "NodeDataLoader",
    "Sampler",
    "as_edge_prediction_sampler",
    "negative_sampler",
]
