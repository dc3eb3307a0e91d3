# SPDX-License-Identifier: Apache-2.0
"""A pass over shards: rows fetched ahead, gradients sent back."""

from ._row_cache import HaloRowCache
from ._shard_pass import ShardPass
from ._transports import CollectiveTransport, PairwiseTransport, RowTransport
