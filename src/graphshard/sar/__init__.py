# SPDX-License-Identifier: Apache-2.0
"""The names of SAR: ``import graphshard.sar as sar``.

Each module of SAR is a module here and says what its names are in this package: ``sar.comm``,
``sar.data_loading``, ``sar.core.graphshard``. This one has those that SAR exports, and `INSTEAD`
those that are not here. Nothing outside imports this package.
"""

from .. import __version__ as __version__
from ..dgl import load_ipython_extension as load_ipython_extension
from . import core as core
from .comm import comm_device as comm_device
from .comm import gather_grads as gather_grads
from .comm import initialize_comms as initialize_comms
from .comm import nfs_ip_init as nfs_ip_init
from .comm import rank as rank
from .comm import shutdown_comms as shutdown_comms
from .comm import sync_params as sync_params
from .comm import world_size as world_size
from .common_tuples import PartitionData as PartitionData
from .config import Config as Config
from .construct_shard_manager import *  # noqa: F403
from .core import DataLoader as DataLoader
from .core import DistNeighborSampler as DistNeighborSampler
from .core import DistributedBlock as DistributedBlock
from .core import GraphShard as GraphShard
from .core import GraphShardManager as GraphShardManager
from .core import HeteroGraphShardManager as HeteroGraphShardManager
from .core import message_has_parameters as message_has_parameters
from .data_loading import load_dgl_partition_data as load_dgl_partition_data
from .data_loading import suffix_key_lookup as suffix_key_lookup
from .distributed_bn import DistributedBN1D as DistributedBN1D
from .edge_softmax import edge_softmax as edge_softmax
from .logging_setup import logger as logger
from .logging_setup import logging_setup as logging_setup
from .patch_dgl import *  # noqa: F403

INSTEAD = {
    "comm": "initialize_comms takes the address and the port, chooses the interface (or "
    "GLOO_SOCKET_IFNAME does), and keeps the threads that send",
    "common_tuples": "the edges of a part are PartitionData.edges, its shards graph_shards of "
    "construct_full_graph(partition_data)",
    "construct_shard_manager": "construct_full_graph and construct_mfgs make all of it",
    "core.full_partition_block": "get_full_partition_graph() of a sharded graph is one-shot "
    "aggregation",
    "core.graphshard": "columns are ndata, srcdata, dstdata and edata of the sharded graph",
    "core.sampling": "DataLoader collates, and puts batches in order itself",
    "core.sar_aggregation": "update_all and apply_edges of the sharded graph do it; see "
    "docs/design/full_batch.md",
    "data_loading": "load_dgl_partition_data and load_dgl_partition_data_from_graph make all of it",
    "distributed_bn": "mean_op and var_op are functions that autograd differentiates",
}
"""What does the work of SAR's own parts, by SAR's module: what errors name."""
