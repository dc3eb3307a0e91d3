# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.distributed.graph_partition_book``."""

from ..._base.typing import DEFAULT_CANONICAL_ETYPE as DEFAULT_ETYPE
from ..._base.typing import DEFAULT_NTYPE
from ...partition import PartitionBook, RangePartitionBook
from ...partition.format import etype_key as _etype_tuple_to_str
from ...servers import (
    EdgePartitionPolicy,
    HeteroDataName,
    NodePartitionPolicy,
    PartitionPolicy,
)

GraphPartitionBook = PartitionBook

__all__ = [
    "DEFAULT_ETYPE",
    "DEFAULT_NTYPE",
    "EdgePartitionPolicy",
    "GraphPartitionBook",
    "HeteroDataName",
    "NodePartitionPolicy",
    "PartitionPolicy",
    "RangePartitionBook",
    "_etype_tuple_to_str",
]
