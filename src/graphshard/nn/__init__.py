# SPDX-License-Identifier: Apache-2.0
"""Layers, written once against the message-passing protocol.

The same layer runs on a whole graph, on a sampled block and on a graph that spans many ranks. The
constructor arguments and the names of parameters and buffers are those of ``dgl.nn``, so that a
``state_dict`` moves both ways.
"""

from __future__ import annotations

from ._distributed_bn import DistributedBN1D
from ._hetero_embedding import HeteroEmbedding, HeteroLinear
from ._typed_linear import TypedLinear
from .conv import GATConv, GATv2Conv, GINConv, GraphConv, HeteroGraphConv, RelGraphConv, SAGEConv

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
    "TypedLinear",
]
