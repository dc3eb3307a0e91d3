# SPDX-License-Identifier: Apache-2.0
"""Graphs made from graphs."""

from ._encodings import (
    double_radius_node_labeling,
    lap_pe,
    laplacian_lambda_max,
    laplacian_pe,
    random_walk_pe,
    shortest_dist,
    svd_pe,
)
from ._mutations import add_edges, add_nodes, remove_edges, remove_nodes
from ._neighborhoods import (
    edge_type_subgraph,
    khop_in_subgraph,
    khop_out_subgraph,
    node_type_subgraph,
)
from ._order import (
    reorder_graph,
    to_bfloat16,
    to_double,
    to_float,
    to_half,
)
from ._points import farthest_point_sampler, knn_graph, radius_graph, segmented_knn_graph
from ._products import (
    adj_product_graph,
    adj_sum_graph,
    khop_adj,
    khop_graph,
    line_graph,
    metapath_reachable_graph,
    norm_by_dst,
)
from ._simple import compact_graphs, neighbor_matching, to_simple, to_simple_graph
from ._subgraph import edge_subgraph, in_subgraph, node_subgraph, out_subgraph
from ._tags import sort_csc_by_tag, sort_csr_by_tag
from ._transforms import add_reverse_edges, add_self_loop, remove_self_loop, reverse, to_bidirected
from ._types import to_heterogeneous, to_homogeneous
