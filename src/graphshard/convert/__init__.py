# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.convert``."""

from ..graph import (
    bipartite_from_networkx,
    bipartite_from_scipy,
    block_to_graph,
    create_block,
    from_networkx,
    from_scipy,
    graph,
    heterograph,
    to_heterogeneous,
    to_homogeneous,
    to_networkx,
)

__all__ = [
    "bipartite_from_networkx",
    "bipartite_from_scipy",
    "block_to_graph",
    "create_block",
    "from_networkx",
    "from_scipy",
    "graph",
    "heterograph",
    "to_heterogeneous",
    "to_homogeneous",
    "to_networkx",
]
