# SPDX-License-Identifier: Apache-2.0
"""Graphs, their features, and the message-passing protocol that every layer is written against."""

from ._attend import attend
from ._block import Block, create_block, to_block
from ._convert import (
    from_edge_index,
    from_networkx,
    from_scipy,
    to_edge_index,
    to_networkx,
    to_scipy,
)
from ._edge_softmax import edge_softmax
from ._frame import Frame, Scheme
from ._graph import Graph, graph, heterograph
from ._protocol import MessagePassingGraph
from ._schema import ALL, EID, ETYPE, NID, NTYPE
from ._tables import from_csv, from_parquet, to_csv, to_parquet
from ._transforms import (
    add_reverse_edges,
    add_self_loop,
    remove_self_loop,
    reverse,
    to_bidirected,
)
from ._transforms_subgraph import edge_subgraph, in_subgraph, node_subgraph, out_subgraph
from ._transforms_types import to_heterogeneous, to_homogeneous
from ._udf import EdgeBatch, NodeBatch

__all__ = [
    "ALL",
    "EID",
    "ETYPE",
    "NID",
    "NTYPE",
    "Block",
    "EdgeBatch",
    "Frame",
    "Graph",
    "MessagePassingGraph",
    "NodeBatch",
    "Scheme",
    "add_reverse_edges",
    "add_self_loop",
    "attend",
    "create_block",
    "edge_softmax",
    "edge_subgraph",
    "from_csv",
    "from_edge_index",
    "from_networkx",
    "from_parquet",
    "from_scipy",
    "graph",
    "heterograph",
    "in_subgraph",
    "node_subgraph",
    "out_subgraph",
    "remove_self_loop",
    "reverse",
    "to_bidirected",
    "to_block",
    "to_csv",
    "to_edge_index",
    "to_heterogeneous",
    "to_homogeneous",
    "to_networkx",
    "to_parquet",
    "to_scipy",
]
