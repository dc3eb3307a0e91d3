# SPDX-License-Identifier: Apache-2.0
"""Exact full-batch training on a graph that spans all ranks."""

from ._construct import construct_full_graph, construct_mfgs
from ._graph_shard_manager import DistributedBlock, GraphShardManager
from ._homogenised import GraphShard
from ._partition_data import (
    PartitionData,
    load_dgl_partition_data,
    suffix_key_lookup,
)
from ._stored_edges import ExtendedEdges, StoredEdges
from .aggregation_mode import AggregationMode
from .lazy import DeferredEdges, message_has_parameters
from .topology import RelationEdges

__all__ = [
    "AggregationMode",
    "DeferredEdges",
    "DistributedBlock",
    "ExtendedEdges",
    "GraphShard",
    "GraphShardManager",
    "PartitionData",
    "RelationEdges",
    "StoredEdges",
    "construct_full_graph",
    "construct_mfgs",
    "load_dgl_partition_data",
    "message_has_parameters",
    "suffix_key_lookup",
]
