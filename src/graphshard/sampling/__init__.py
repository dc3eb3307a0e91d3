# SPDX-License-Identifier: Apache-2.0
"""Neighbour sampling: on one graph, and on a graph that spans ranks.

`graphshard.dataloading` offers the same samplers with loaders named and shaped as DGL's.
"""

from ._block_sampler import BlockSampler, Sampler
from ._dist_loader import DataLoader
from ._dist_sampler import DistNeighborSampler
from ._inference import inference
from ._keys import DrawSeed
from ._loader_stages import LoaderStats
from ._mini_batch import MiniBatch, global_mean
from ._samplers import (
    LaborSampler,
    MultiLayerFullNeighborSampler,
    MultiLayerNeighborSampler,
    NeighborSampler,
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
