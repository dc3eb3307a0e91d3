# SPDX-License-Identifier: Apache-2.0
"""Where feature rows come from: tensors here, the ranks that own them, shared memory, a cache."""

from ._cache import CachedFeatureStore
from ._feature_store import FeatureRequest, FeatureStore
from ._tables import CollectiveFeatureStore, LocalFeatureStore, MappedFeatureStore, check_rows
