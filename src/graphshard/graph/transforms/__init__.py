# SPDX-License-Identifier: Apache-2.0
"""Graphs made from graphs."""

from ._mutations import add_edges, add_nodes, remove_edges, remove_nodes
from ._simple import compact_graphs, neighbor_matching, to_simple, to_simple_graph
from ._subgraph import edge_subgraph, in_subgraph, node_subgraph, out_subgraph
from ._transforms import (
    add_reverse_edges,
    add_self_loop,
    check_plain,
    remove_self_loop,
    reverse,
    to_bidirected,
)
from ._types import to_heterogeneous, to_homogeneous
