# SPDX-License-Identifier: Apache-2.0
"""Dividing a graph into parts, on disk and back: assignment, new ids, files, partition books."""

from ._book import PartitionBook, RangePartitionBook
from ._convert import convert_partition
from ._metis import UndirectedGraph, metis_available, metis_partition
from ._ranks import PartitionRanks
from ._stats import Balance, PartitionStats, PartSizes
from ._verify import verify_partition
from .assign import BalanceWarning
from .graph_files import GraphFiles
from .load import (
    load_partition,
    load_partition_book,
    load_partition_feats,
    load_partition_stats,
)
from .save import partition_graph

__all__ = [
    "Balance",
    "BalanceWarning",
    "GraphFiles",
    "PartSizes",
    "PartitionBook",
    "PartitionRanks",
    "PartitionStats",
    "RangePartitionBook",
    "UndirectedGraph",
    "convert_partition",
    "load_partition",
    "load_partition_book",
    "load_partition_feats",
    "load_partition_stats",
    "metis_available",
    "metis_partition",
    "partition_graph",
    "verify_partition",
]
