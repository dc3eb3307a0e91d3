# SPDX-License-Identifier: Apache-2.0
"""Neighbour sampling: on one graph, and on a graph that spans ranks.

`graphshard.dataloading` offers the same samplers with loaders named and shaped as DGL's.
"""

from .inference import inference
from .loader import DataLoader, LoaderStats, MiniBatch, global_mean
from .sampler import (
    BlockSampler,
    DistNeighborSampler,
    DrawSeed,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    MultiLayerNeighborSampler,
    NeighborSampler,
    Sampler,
)

__all__ = [
    "BlockSampler",
    "DataLoader",
    "DistNeighborSampler",
    "DrawSeed",
    "LaborSampler",
    "LoaderStats",
    "MiniBatch",
    "MultiLayerFullNeighborSampler",
    "MultiLayerNeighborSampler",
    "NeighborSampler",
    "Sampler",
    "global_mean",
    "inference",
]
