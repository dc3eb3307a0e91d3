# SPDX-License-Identifier: Apache-2.0
"""Rows of named tensors on the hosts of a cluster: servers, and what trainers see of them."""

from ._cluster import Cluster, LocalHost, RowsRequest, ServedHost
from ._dist_tensor import DistTensor
from ._embedding import DistEmbedding
from ._ip_config import HostAddress, parts_of_host, read_ip_config, starts_of_hosts
from ._job import Job, current_job, has_job, set_job
from ._sparse_optimizers import SparseAdagrad, SparseAdam, SparseOptimizer, SparseSGD
from ._table_server import TableServer
from ._tables import HostTables, TableInfo
from .wire import MessageClient, MessageServer, WireMessage

__all__ = [
    "Cluster",
    "DistEmbedding",
    "DistTensor",
    "HostAddress",
    "HostTables",
    "Job",
    "LocalHost",
    "MessageClient",
    "MessageServer",
    "RowsRequest",
    "ServedHost",
    "SparseAdagrad",
    "SparseAdam",
    "SparseOptimizer",
    "SparseSGD",
    "TableInfo",
    "TableServer",
    "WireMessage",
    "current_job",
    "has_job",
    "parts_of_host",
    "read_ip_config",
    "set_job",
    "starts_of_hosts",
]
