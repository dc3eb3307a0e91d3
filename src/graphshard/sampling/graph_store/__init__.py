# SPDX-License-Identifier: Apache-2.0
"""Where neighbours come from: a local graph, the ranks that own them, shared memory, your own."""

from ._choose import SamplingTransport, graph_store_of
from ._collective import CollectiveGraphStore
from ._edges import CheckedWeights, EdgeLists, checked_weights, ends
from ._graph_store import DrawOptions, EdgeDir, GraphStore, NeighborRequest, SampledNeighbors
from ._local import LocalGraphStore
from ._replicated import ReplicatedGraphStore
