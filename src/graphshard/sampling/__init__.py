# SPDX-License-Identifier: Apache-2.0
"""Neighbour sampling: on one graph, on a graph that spans ranks, or from stores of your own.

`graphshard.dgl.dataloading` offers the same samplers with loaders named and shaped as DGL's.
"""

from ._dist_loader import DataLoader, LoaderStats, MiniBatch, global_mean
from .feature_store import FeatureRequest, FeatureStore
from .file_store import FileFeatureStore
from .graph_store import DrawOptions, GraphStore, NeighborRequest, SampledNeighbors
from .inference import inference
from .lazy_features import (
    set_dst_lazy_features,
    set_edge_lazy_features,
    set_node_lazy_features,
    set_src_lazy_features,
)
from .sampler import (
    BlockSampler,
    DistNeighborSampler,
    DrawSeed,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    MultiLayerNeighborSampler,
    NeighborSampler,
    Sampler,
    global_uniform_negative_sampling,
)

__all__ = [
    "BlockSampler",
    "DataLoader",
    "DistNeighborSampler",
    "DrawOptions",
    "DrawSeed",
    "FeatureRequest",
    "FeatureStore",
    "FileFeatureStore",
    "GraphStore",
    "LaborSampler",
    "LoaderStats",
    "MiniBatch",
    "MultiLayerFullNeighborSampler",
    "MultiLayerNeighborSampler",
    "NeighborRequest",
    "NeighborSampler",
    "SampledNeighbors",
    "Sampler",
    "global_mean",
    "global_uniform_negative_sampling",
    "inference",
    "set_dst_lazy_features",
    "set_edge_lazy_features",
    "set_node_lazy_features",
    "set_src_lazy_features",
]
