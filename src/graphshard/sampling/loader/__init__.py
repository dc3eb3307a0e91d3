# SPDX-License-Identifier: Apache-2.0
"""Data loaders: order of seeds, stages that work ahead, the batch that they pass on."""

from ._device_stream import DeviceStream, moved
from ._dist_loader import DataLoader, LoaderResources
from ._local_loader import EdgeDataLoader, LocalDataLoader, NodeDataLoader
from ._mini_batch import LoaderStats, MiniBatch, global_mean
from ._pipeline import Pipeline, Run, Stage
