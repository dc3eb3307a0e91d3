# SPDX-License-Identifier: Apache-2.0
"""Samplers and loaders for mini-batch training on one graph, under the names that DGL gives them.

What they draw with is in ``graphshard.sampling``, which also has the loader for graphs that span
ranks.
"""

from ..sampling.loader import EdgeDataLoader, LocalDataLoader, NodeDataLoader
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
    "EdgeDataLoader",
    "EdgePredictionSampler",
    "LaborSampler",
    "MultiLayerFullNeighborSampler",
    "MultiLayerNeighborSampler",
    "NeighborSampler",
    "NodeDataLoader",
    "Sampler",
    "as_edge_prediction_sampler",
    "negative_sampler",
]
