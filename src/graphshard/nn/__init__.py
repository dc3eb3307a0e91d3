# SPDX-License-Identifier: Apache-2.0
"""Layers, written once against the message-passing protocol.

The same layer runs on a whole graph, on a sampled block and on a graph that spans many ranks. The
constructor arguments and the names of parameters and buffers are those of ``dgl.nn``, so that a
``state_dict`` moves both ways.
"""

from __future__ import annotations

from ._distributed_bn import DistributedBN1D
from ._gat_conv import GATConv
from ._gatv2_conv import GATv2Conv
from ._gin_conv import GINConv
from ._graph_conv import GraphConv
from ._hetero_graph_conv import HeteroGraphConv
from ._rel_graph_conv import RelGraphConv
from ._sage_conv import SAGEConv
from ._typed import HeteroEmbedding, HeteroLinear, TypedLinear
from ._typed_hgt_conv import TypedHGTConv

__all__ = [
    "DistributedBN1D",
    "GATConv",
    "GATv2Conv",
    "GINConv",
    "GraphConv",
    "HeteroEmbedding",
    "HeteroGraphConv",
    "HeteroLinear",
    "RelGraphConv",
    "SAGEConv",
    "TypedHGTConv",
    "TypedLinear",
]
