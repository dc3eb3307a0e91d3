# SPDX-License-Identifier: Apache-2.0
"""Graphs, their features, and the message-passing protocol that every layer is written against."""

from ._block import Block, create_block, to_block
from ._graph import Graph, graph, heterograph
from .convert import (
    from_csv,
    from_edge_index,
    from_networkx,
    from_parquet,
    from_scipy,
    to_csv,
    to_edge_index,
    to_networkx,
    to_parquet,
    to_scipy,
)
from .dgl_files import load_graphs, load_labels, load_tensors, save_graphs, save_tensors
from .frame import Frame, Scheme
from .message_passing import EdgeBatch, MessagePassingGraph, NodeBatch, attend, edge_softmax
from .structure import ALL, EID, ETYPE, NID, NTYPE
from .transforms import (
    add_reverse_edges,
    add_self_loop,
    edge_subgraph,
    in_subgraph,
    node_subgraph,
    out_subgraph,
    remove_self_loop,
    reverse,
    to_bidirected,
    to_heterogeneous,
    to_homogeneous,
)

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
    "load_graphs",
    "load_labels",
    "load_tensors",
    "node_subgraph",
    "out_subgraph",
    "remove_self_loop",
    "reverse",
    "save_graphs",
    "save_tensors",
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
