# SPDX-License-Identifier: Apache-2.0
"""Samplers and loaders for mini-batch training on one graph, under the names that DGL gives them.

What they draw with is in ``graphshard.sampling``, which also has the loader for graphs that span
ranks.
"""

from ..sampling._block_sampler import BlockSampler, Sampler
from ..sampling._edge_loader import EdgeDataLoader
from ..sampling._edge_sampler import EdgePredictionSampler, as_edge_prediction_sampler
from ..sampling._node_loader import DataLoader, NodeDataLoader
from ..sampling._samplers import (
    LaborSampler,
    MultiLayerFullNeighborSampler,
    MultiLayerNeighborSampler,
    NeighborSampler,
)
from . import negative_sampler

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
