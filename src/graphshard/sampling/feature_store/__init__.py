# SPDX-License-Identifier: Apache-2.0
"""Where rows of features come from: own files, other ranks, shared memory, a cache."""

from ._access_counts import AccessCounts
from ._cache import CachedRows
from ._feature_plan import FeaturePlan
from ._features import CollectiveRows, LocalRows, RowRequest, Rows, RowSource, same_ranks
from ._freed_memory import keep_freed_memory
from ._hosts import Hosts
from ._mapped import MappedRows
from ._shared_memory import SharedArray, share_arrays
