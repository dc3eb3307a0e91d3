# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.distributed``."""

from ..partition import (
    BalanceWarning,
    PartitionBook,
    PartitionStats,
    RangePartitionBook,
    load_partition,
    load_partition_book,
    load_partition_feats,
    load_partition_stats,
    partition_graph,
    verify_partition,
)

__all__ = [
    "BalanceWarning",
    "PartitionBook",
    "PartitionStats",
    "RangePartitionBook",
    "load_partition",
    "load_partition_book",
    "load_partition_feats",
    "load_partition_stats",
    "partition_graph",
    "verify_partition",
]
