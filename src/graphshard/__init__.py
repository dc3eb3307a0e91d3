# SPDX-License-Identifier: Apache-2.0
"""Train graph neural networks on graphs split across processes and machines.

``import graphshard as sar`` and ``import graphshard as dgl`` offer the names that users of SAR and
of DGL's distributed training know. Importing starts nothing: no thread, no process group.
"""

from importlib.metadata import PackageNotFoundError, version

from . import data, dataloading, distributed, function, nn, ops, sampling
from .comm import (
    gather_grads,
    initialize_comms,
    nfs_ip_init,
    rank,
    shutdown_comms,
    sync_params,
    world_size,
)
from .errors import (
    CheckpointError,
    GraphShardError,
    MetisError,
    PartitionFormatError,
    RankError,
)
from .fullbatch import (
    GraphShardManager,
    PartitionData,
    construct_full_graph,
    construct_mfgs,
    load_dgl_partition_data,
    message_has_parameters,
    suffix_key_lookup,
)
from .graph import (
    ALL,
    EID,
    ETYPE,
    NID,
    NTYPE,
    Block,
    Graph,
    add_reverse_edges,
    add_self_loop,
    create_block,
    edge_softmax,
    edge_subgraph,
    from_csv,
    from_edge_index,
    from_networkx,
    from_parquet,
    from_scipy,
    graph,
    heterograph,
    in_subgraph,
    node_subgraph,
    out_subgraph,
    remove_self_loop,
    reverse,
    to_bidirected,
    to_block,
    to_csv,
    to_edge_index,
    to_heterogeneous,
    to_homogeneous,
    to_networkx,
    to_parquet,
    to_scipy,
)
from .nn import DistributedBN1D
from .sampling import DataLoader, DistNeighborSampler, global_mean, inference

try:
    __version__ = version("graphshard")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "ALL",
    "EID",
    "ETYPE",
    "NID",
    "NTYPE",
    "Block",
    "CheckpointError",
    "DataLoader",
    "DistNeighborSampler",
    "DistributedBN1D",
    "Graph",
    "GraphShardError",
    "GraphShardManager",
    "MetisError",
    "PartitionData",
    "PartitionFormatError",
    "RankError",
    "add_reverse_edges",
    "add_self_loop",
    "construct_full_graph",
    "construct_mfgs",
    "create_block",
    "data",
    "dataloading",
    "distributed",
    "edge_softmax",
    "edge_subgraph",
    "from_csv",
    "from_edge_index",
    "from_networkx",
    "from_parquet",
    "from_scipy",
    "function",
    "gather_grads",
    "global_mean",
    "graph",
    "heterograph",
    "in_subgraph",
    "inference",
    "initialize_comms",
    "load_dgl_partition_data",
    "message_has_parameters",
    "nfs_ip_init",
    "nn",
    "node_subgraph",
    "ops",
    "out_subgraph",
    "rank",
    "remove_self_loop",
    "reverse",
    "sampling",
    "shutdown_comms",
    "suffix_key_lookup",
    "sync_params",
    "to_bidirected",
    "to_block",
    "to_csv",
    "to_edge_index",
    "to_heterogeneous",
    "to_homogeneous",
    "to_networkx",
    "to_parquet",
    "to_scipy",
    "world_size",
]
