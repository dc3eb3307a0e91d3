# SPDX-License-Identifier: Apache-2.0
"""Data loaders: order of seeds, stages that work ahead, the batch that they pass on."""

from ._dist_loader import DataLoader
from ._edge_loader import EdgeDataLoader
from ._mini_batch import MiniBatch, global_mean
from ._node_loader import LocalDataLoader, NodeDataLoader
from ._stages import LoaderStats
