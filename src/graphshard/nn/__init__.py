# SPDX-License-Identifier: Apache-2.0
"""Layers, written once against the message-passing protocol.

The same layer runs on a whole graph, on a sampled block and on a graph that spans many ranks. The
constructor arguments and the names of parameters and buffers are those of ``dgl.nn``, so that a
``state_dict`` moves both ways.
"""

from __future__ import annotations

from . import functional, glob, pytorch
from ._distributed_bn import DistributedBN1D
from ._edge_weight_norm import EdgeWeightNorm
from ._hetero_embedding import HeteroEmbedding, HeteroLinear
from ._of_dgl import layers_of_dgl
from ._point_graphs import KNNGraph, RadiusGraph, SegmentedKNNGraph
from ._stacks import JumpingKnowledge, Sequential
from ._typed_linear import TypedLinear
from .conv import (
    AGNNConv,
    APPNPConv,
    DotGatConv,
    GATConv,
    GATv2Conv,
    GINConv,
    GraphConv,
    HeteroGraphConv,
    RelGraphConv,
    SAGEConv,
    SGConv,
)
from .glob import (
    AvgPooling,
    GlobalAttentionPooling,
    MaxPooling,
    Set2Set,
    SortPooling,
    SumPooling,
    WeightAndSum,
)
from .link import EdgePredictor, TransE, TransR

__all__ = [
    "AGNNConv",
    "APPNPConv",
    "AvgPooling",
    "DistributedBN1D",
    "DotGatConv",
    "EdgePredictor",
    "EdgeWeightNorm",
    "GATConv",
    "GATv2Conv",
    "GINConv",
    "GlobalAttentionPooling",
    "GraphConv",
    "HeteroEmbedding",
    "HeteroGraphConv",
    "HeteroLinear",
    "JumpingKnowledge",
    "KNNGraph",
    "MaxPooling",
    "RadiusGraph",
    "RelGraphConv",
    "SAGEConv",
    "SGConv",
    "SegmentedKNNGraph",
    "Sequential",
    "Set2Set",
    "SortPooling",
    "SumPooling",
    "TransE",
    "TransR",
    "TypedLinear",
    "WeightAndSum",
    "functional",
    "glob",
    "pytorch",
]

__getattr__ = layers_of_dgl(__name__)
