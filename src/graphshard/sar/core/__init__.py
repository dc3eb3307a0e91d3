# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.core``."""

from .full_partition_block import DistributedBlock as DistributedBlock
from .graphshard import GraphShard as GraphShard
from .graphshard import GraphShardManager as GraphShardManager
from .graphshard import HeteroGraphShardManager as HeteroGraphShardManager
from .sampling import DataLoader as DataLoader
from .sampling import DistNeighborSampler as DistNeighborSampler
from .sar_aggregation import message_has_parameters as message_has_parameters
