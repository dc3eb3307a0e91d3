# SPDX-License-Identifier: Apache-2.0
"""A pass over shards: rows fetched ahead, gradients sent back."""

from ._shard_pass import RandomState, ShardPass
from ._source_rows import CollectiveTransport, HaloRowCache, PairwiseTransport, RowTransport
