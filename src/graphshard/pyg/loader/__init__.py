# SPDX-License-Identifier: Apache-2.0
"""Sampled training of PyG's shape; imported when one of its names is first used, as PyG is then."""

from ._inputs import RemoteFeatureStore, RemoteGraphStore
from ._loaders import HGTLoader, LinkNeighborLoader, NeighborLoader, PrefetchLoader
from ._samplers import HGTSampler, HopSampler
