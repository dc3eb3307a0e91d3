# SPDX-License-Identifier: Apache-2.0
"""Who reads which rows: shards, halos, and what stays the same while a graph lives."""

from ._chunks import WHOLE, ColumnBlock, column_blocks, most_blocks
from ._constants import ConstantCache
from ._shards import Halo, LocalEdges, Shard, narrow, needed_rows
from ._structure import OriginalIds, ShardStructure, agree_on_build
