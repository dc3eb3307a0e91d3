# SPDX-License-Identifier: Apache-2.0
"""Dividing a graph into parts, on disk and back: assignment, new ids, files, partition books."""

from ._assign import BalanceWarning
from ._book import PartitionBook, RangePartitionBook
from ._load import (
    load_partition,
    load_partition_book,
    load_partition_feats,
    load_partition_stats,
)
from ._metis import metis_available, metis_partition
from ._save import partition_graph
from ._stats import Balance, PartitionStats, PartSizes
from ._undirected import UndirectedGraph
from ._verify import verify_partition

__all__ = [
    "Balance",
    "BalanceWarning",
    "PartSizes",
    "PartitionBook",
    "PartitionStats",
    "RangePartitionBook",
    "UndirectedGraph",
    "load_partition",
    "load_partition_book",
    "load_partition_feats",
    "load_partition_stats",
    "metis_available",
    "metis_partition",
    "partition_graph",
    "verify_partition",
]
