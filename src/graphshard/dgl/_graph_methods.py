# SPDX-License-Identifier: Apache-2.0
"""add_methods: functions on graphs that are methods of DGL's graphs, too.

The graphs of this package have the methods that training needs. Importing `graphshard.dgl` gives
them the others: each is one of DGL's functions, with the graph as its first argument.
"""

from __future__ import annotations

from ..graph import Block, Graph
from . import sampling
from .graphs._matrices import adj, adj_external, inc, metagraph
from .graphs._neighborhoods import (
    edge_type_subgraph,
    khop_in_subgraph,
    khop_out_subgraph,
    node_type_subgraph,
)
from .graphs._order import reorder_graph
from .graphs._products import line_graph
from .graphs._propagate import prop_edges, prop_nodes

_METHODS = {
    "adj": adj,
    "adj_external": adj_external,
    "adjacency_matrix": adj,
    "edge_type_subgraph": edge_type_subgraph,
    "global_uniform_negative_sampling": sampling.global_uniform_negative_sampling,
    "inc": inc,
    "incidence_matrix": inc,
    "khop_in_subgraph": khop_in_subgraph,
    "khop_out_subgraph": khop_out_subgraph,
    "line_graph": line_graph,
    "metagraph": metagraph,
    "node_type_subgraph": node_type_subgraph,
    "prop_edges": prop_edges,
    "prop_nodes": prop_nodes,
    "reorder_graph": reorder_graph,
    "sample_etype_neighbors": sampling.sample_etype_neighbors,
    "sample_labors": sampling.sample_labors,
    "sample_neighbors": sampling.sample_neighbors,
    "sample_neighbors_biased": sampling.sample_neighbors_biased,
    "sample_neighbors_fused": sampling.sample_neighbors_fused,
    "select_topk": sampling.select_topk,
}


def add_methods() -> None:
    """Give `Graph` and `Block` the methods that only DGL's users look for."""
    for kind in (Graph, Block):
        for name, function in _METHODS.items():
            setattr(kind, name, function)
