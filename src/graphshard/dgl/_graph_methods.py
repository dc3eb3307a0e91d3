# SPDX-License-Identifier: Apache-2.0
"""add_methods: functions on graphs that are methods of DGL's graphs, too.

The graphs of this package have the methods that training needs. Importing `graphshard.dgl` gives
them the others: each is one of DGL's functions, with the graph as its first argument.
"""

from __future__ import annotations

from ..graph import Block, Graph
from . import sampling
from .graphs import _neighborhoods
from .graphs._matrices import adj, adj_external, inc, metagraph
from .graphs._order import reorder_graph
from .graphs._products import line_graph
from .graphs._propagate import prop_edges, prop_nodes

_METHODS = {
    "adj": adj,
    "adj_external": adj_external,
    "adjacency_matrix": adj,
    "global_uniform_negative_sampling": sampling.global_uniform_negative_sampling,
    "inc": inc,
    "incidence_matrix": inc,
    "line_graph": line_graph,
    "metagraph": metagraph,
    "prop_edges": prop_edges,
    "prop_nodes": prop_nodes,
    "reorder_graph": reorder_graph,
}
for _module in (_neighborhoods, sampling.frontiers):
    _METHODS |= {name: getattr(_module, name) for name in _module.__all__}


def add_methods() -> None:
    """Give `Graph` and `Block` the methods that only DGL's users look for."""
    for kind in (Graph, Block):
        for name, function in _METHODS.items():
            setattr(kind, name, function)
