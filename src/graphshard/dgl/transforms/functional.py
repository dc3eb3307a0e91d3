# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.transforms.functional``."""

from ...graph import (
    add_edges,
    add_nodes,
    add_reverse_edges,
    add_self_loop,
    remove_edges,
    remove_nodes,
    remove_self_loop,
    reverse,
    to_bidirected,
    to_block,
    to_simple,
)
from ..graphs._compaction import compact_graphs, to_simple_graph
from ..graphs._encodings import (
    double_radius_node_labeling,
    lap_pe,
    laplacian_lambda_max,
    laplacian_pe,
    random_walk_pe,
    shortest_dist,
    svd_pe,
)
from ..graphs._order import to_bfloat16, to_double, to_float, to_half
from ..graphs._points import knn_graph, radius_graph, segmented_knn_graph
from ..graphs._products import (
    adj_product_graph,
    adj_sum_graph,
    khop_adj,
    khop_graph,
    line_graph,
    metapath_reachable_graph,
    norm_by_dst,
)
from ..graphs._tags import sort_csc_by_tag, sort_csr_by_tag
from ._partition import (
    metis_partition,
    metis_partition_assignment,
    partition_graph_with_halo,
    reorder_graph,
    reorder_nodes,
)

__all__ = [
    "add_edges",
    "add_nodes",
    "add_reverse_edges",
    "add_self_loop",
    "adj_product_graph",
    "adj_sum_graph",
    "compact_graphs",
    "double_radius_node_labeling",
    "khop_adj",
    "khop_graph",
    "knn_graph",
    "lap_pe",
    "laplacian_lambda_max",
    "laplacian_pe",
    "line_graph",
    "metapath_reachable_graph",
    "metis_partition",
    "metis_partition_assignment",
    "norm_by_dst",
    "partition_graph_with_halo",
    "radius_graph",
    "random_walk_pe",
    "remove_edges",
    "remove_nodes",
    "remove_self_loop",
    "reorder_graph",
    "reorder_nodes",
    "reverse",
    "segmented_knn_graph",
    "shortest_dist",
    "sort_csc_by_tag",
    "sort_csr_by_tag",
    "svd_pe",
    "to_bfloat16",
    "to_bidirected",
    "to_block",
    "to_double",
    "to_float",
    "to_half",
    "to_simple",
    "to_simple_graph",
]
