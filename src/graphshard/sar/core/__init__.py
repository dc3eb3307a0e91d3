# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.core``."""

from ...dgl import patch_dgl as patch_dgl
from ...dgl import patched_edge_softmax as patched_edge_softmax
from ...dgl import unpatch_dgl as unpatch_dgl
from ...fullbatch import DistributedBlock as DistributedBlock
from ...fullbatch import GraphShard as GraphShard
from ...fullbatch import GraphShardManager as GraphShardManager
from ...fullbatch import message_has_parameters as message_has_parameters
from ...sampling import DataLoader as DataLoader
from ...sampling import DistNeighborSampler as DistNeighborSampler
from .._logging import logger as logger
from .._logging import logging_setup as logging_setup
from . import sampling as sampling
