# SPDX-License-Identifier: Apache-2.0
"""Rows and graphs on the hosts of a cluster: servers, and what trainers see of them.

Tables of rows, their optimizers and the messages that carry them know no graph; `DistGraph`, its
samplers, splits and checkpoints are built on them.
"""

from ._cluster import Cluster, LocalHost, RowsRequest, ServedHost
from ._convert_dist_graph import convert_dist_graph, load_dgl_partition_data_from_graph
from ._dist_graph import DistGraph
from ._dist_loaders import DistDataLoader, DistEdgeDataLoader, DistNodeDataLoader
from ._dist_tensor import DistEmbedding, DistTensor
from ._graph_server import GraphServer
from ._host_tables import HostTables, TableInfo, TableServer
from ._ip_config import HostAddress, parts_of_host, read_ip_config, starts_of_hosts
from ._job import (
    Job,
    client_barrier,
    current_job,
    exit_client,
    get_num_clients,
    get_rank,
    has_job,
    initialize,
    set_job,
)
from ._message_stream import WireMessage
from ._policies import (
    EdgePartitionPolicy,
    HeteroDataName,
    NodePartitionPolicy,
    PartitionPolicy,
    edge_split,
    node_split,
)
from ._sparse_optimizers import SparseAdagrad, SparseAdam, SparseOptimizer, SparseSGD
from ._subgraphs import find_edges, in_subgraph, sample_etype_neighbors, sample_neighbors
from .rpc import MessageClient, MessageServer
from .saving import ClusterCheckpoint, load_checkpoint, save_checkpoint

__all__ = [
    "Cluster",
    "ClusterCheckpoint",
    "DistDataLoader",
    "DistEdgeDataLoader",
    "DistEmbedding",
    "DistGraph",
    "DistNodeDataLoader",
    "DistTensor",
    "EdgePartitionPolicy",
    "GraphServer",
    "HeteroDataName",
    "HostAddress",
    "HostTables",
    "Job",
    "LocalHost",
    "MessageClient",
    "MessageServer",
    "NodePartitionPolicy",
    "PartitionPolicy",
    "RowsRequest",
    "ServedHost",
    "SparseAdagrad",
    "SparseAdam",
    "SparseOptimizer",
    "SparseSGD",
    "TableInfo",
    "TableServer",
    "WireMessage",
    "client_barrier",
    "convert_dist_graph",
    "current_job",
    "edge_split",
    "exit_client",
    "find_edges",
    "get_num_clients",
    "get_rank",
    "has_job",
    "in_subgraph",
    "initialize",
    "load_checkpoint",
    "load_dgl_partition_data_from_graph",
    "node_split",
    "parts_of_host",
    "read_ip_config",
    "sample_etype_neighbors",
    "sample_neighbors",
    "save_checkpoint",
    "set_job",
    "starts_of_hosts",
]
