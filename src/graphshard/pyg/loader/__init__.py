# SPDX-License-Identifier: Apache-2.0
"""Sampled training of PyG's shape; imported when one of its names is first used, as PyG is then."""

from ._loaders import HGTLoader, LinkNeighborLoader, NeighborLoader
from ._passes import PrefetchLoader
from ._samplers import HGTSampler, HopSampler
from ._stores import RemoteFeatureStore, RemoteGraphStore

__all__ = [
    "HGTLoader",
    "HGTSampler",
    "HopSampler",
    "LinkNeighborLoader",
    "NeighborLoader",
    "PrefetchLoader",
    "RemoteFeatureStore",
    "RemoteGraphStore",
]
