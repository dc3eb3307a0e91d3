# SPDX-License-Identifier: Apache-2.0
"""The names of SAR: ``import graphshard.sar as sar``.

What exists only because SAR has it is written here; all else is the package's own, under SAR's
names. Nothing outside imports this package.
"""

from .. import __version__ as __version__
from ..dgl import patch_dgl as patch_dgl
from ..dgl import patched_edge_softmax as patched_edge_softmax
from ..dgl import unpatch_dgl as unpatch_dgl
from ..fullbatch import DistributedBlock as DistributedBlock
from ..fullbatch import GraphShard as GraphShard
from ..fullbatch import GraphShardManager as GraphShardManager
from ..fullbatch import PartitionData as PartitionData
from ..fullbatch import construct_full_graph as construct_full_graph
from ..fullbatch import construct_mfgs as construct_mfgs
from ..fullbatch import load_dgl_partition_data as load_dgl_partition_data
from ..fullbatch import message_has_parameters as message_has_parameters
from ..fullbatch import suffix_key_lookup as suffix_key_lookup
from ..nn import DistributedBN1D as DistributedBN1D
from ..nn import RelGraphConv as RelGraphConv
from ..sampling import DataLoader as DataLoader
from ..sampling import DistNeighborSampler as DistNeighborSampler
from ..servers import convert_dist_graph as convert_dist_graph
from . import comm as comm
from . import config as config
from . import core as core
from ._logging import logger as logger
from ._logging import logging_setup as logging_setup
from .comm import comm_device as comm_device
from .comm import gather_grads as gather_grads
from .comm import initialize_comms as initialize_comms
from .comm import nfs_ip_init as nfs_ip_init
from .comm import rank as rank
from .comm import shutdown_comms as shutdown_comms
from .comm import sync_params as sync_params
from .comm import world_size as world_size
from .config import Config as Config
