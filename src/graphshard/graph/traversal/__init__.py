# SPDX-License-Identifier: Apache-2.0
"""Orders in which nodes and edges are visited, and message passing along them."""

from ._orders import (
    bfs_edges_generator,
    bfs_nodes_generator,
    dfs_edges_generator,
    dfs_labeled_edges_generator,
    topological_nodes_generator,
)
from ._propagate import (
    prop_edges,
    prop_edges_dfs,
    prop_nodes,
    prop_nodes_bfs,
    prop_nodes_topo,
)
