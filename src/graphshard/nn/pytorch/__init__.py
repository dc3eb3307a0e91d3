# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.pytorch``: the layers of `graphshard.nn` at DGL's places."""

from ...graph import edge_softmax
from .._edge_weight_norm import EdgeWeightNorm
from .._hetero_embedding import HeteroEmbedding, HeteroLinear
from .._of_dgl import layers_of_dgl
from .._point_graphs import KNNGraph, RadiusGraph, SegmentedKNNGraph
from .._stacks import JumpingKnowledge, Sequential
from .._typed_linear import TypedLinear
from ..conv import (
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
from ..glob import (
    AvgPooling,
    GlobalAttentionPooling,
    MaxPooling,
    Set2Set,
    SortPooling,
    SumPooling,
    WeightAndSum,
)
from ..link import EdgePredictor, TransE, TransR
from . import conv, glob, hetero, linear, softmax

__all__ = [
    "AGNNConv",
    "APPNPConv",
    "AvgPooling",
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
    "conv",
    "edge_softmax",
    "glob",
    "hetero",
    "linear",
    "softmax",
]

__getattr__ = layers_of_dgl(__name__)
