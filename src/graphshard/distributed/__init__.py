# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.distributed``."""

from ..partition import (
    PartitionBook,
    PartitionStats,
    RangePartitionBook,
    load_partition,
    load_partition_book,
    load_partition_feats,
    partition_graph,
    verify_partition,
)

__all__ = [
    "PartitionBook",
    "PartitionStats",
    "RangePartitionBook",
    "load_partition",
    "load_partition_book",
    "load_partition_feats",
    "partition_graph",
    "verify_partition",
]
