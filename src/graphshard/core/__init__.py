# SPDX-License-Identifier: Apache-2.0
"""Names at SAR's places: ``sar.core``; and what its scripts call that nothing else here needs."""

from ..fullbatch import DistributedBlock, GraphShard, GraphShardManager, message_has_parameters
from . import sampling
from ._logging import logger, logging_setup
from ._patch_dgl import DglPatch, patch_dgl, patched_edge_softmax, unpatch_dgl
from .sampling import DataLoader, DistNeighborSampler

__all__ = [
    "DataLoader",
    "DglPatch",
    "DistNeighborSampler",
    "DistributedBlock",
    "GraphShard",
    "GraphShardManager",
    "logger",
    "logging_setup",
    "message_has_parameters",
    "patch_dgl",
    "patched_edge_softmax",
    "sampling",
    "unpatch_dgl",
]
