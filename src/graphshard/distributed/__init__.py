# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.distributed``: partitions, servers, and the graph that trainers see."""

from ..dataloading import EdgeCollator, NodeCollator
from ..partition import (
    BalanceWarning,
    PartitionBook,
    PartitionStats,
    RangePartitionBook,
    convert_partition,
    load_partition,
    load_partition_book,
    load_partition_feats,
    load_partition_stats,
    partition_graph,
    verify_partition,
)
from ..store import DistEmbedding, DistTensor, SparseAdagrad, SparseAdam, SparseSGD
from ._convert import convert_dist_graph, load_dgl_partition_data_from_graph
from ._dist_graph import DistGraph
from ._graph_server import GraphServer
from ._initialize import (
    client_barrier,
    exit_client,
    get_num_clients,
    get_rank,
    initialize,
)
from ._loaders import DistDataLoader, DistEdgeDataLoader, DistNodeDataLoader
from ._policies import EdgePartitionPolicy, NodePartitionPolicy, PartitionPolicy
from ._splits import edge_split, node_split
from ._subgraphs import find_edges, in_subgraph, sample_etype_neighbors, sample_neighbors
from .saving import ClusterCheckpoint, load_checkpoint, save_checkpoint

__all__ = [
    "BalanceWarning",
    "ClusterCheckpoint",
    "DistDataLoader",
    "DistEdgeDataLoader",
    "DistEmbedding",
    "DistGraph",
    "DistNodeDataLoader",
    "DistTensor",
    "EdgeCollator",
    "EdgePartitionPolicy",
    "GraphServer",
    "NodeCollator",
    "NodePartitionPolicy",
    "PartitionBook",
    "PartitionPolicy",
    "PartitionStats",
    "RangePartitionBook",
    "SparseAdagrad",
    "SparseAdam",
    "SparseSGD",
    "client_barrier",
    "convert_dist_graph",
    "convert_partition",
    "edge_split",
    "exit_client",
    "find_edges",
    "get_num_clients",
    "get_rank",
    "in_subgraph",
    "initialize",
    "load_checkpoint",
    "load_dgl_partition_data_from_graph",
    "load_partition",
    "load_partition_book",
    "load_partition_feats",
    "load_partition_stats",
    "node_split",
    "partition_graph",
    "sample_etype_neighbors",
    "sample_neighbors",
    "save_checkpoint",
    "verify_partition",
]
