# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.pytorch.conv``, and of its modules, each of which has a layer."""

from ..._edge_weight_norm import EdgeWeightNorm
from ..._of_dgl import layers_of_dgl
from ...conv import (
    AGNNConv,
    APPNPConv,
    DotGatConv,
    GATConv,
    GATv2Conv,
    GINConv,
    GraphConv,
    RelGraphConv,
    SAGEConv,
    SGConv,
)

__all__ = [
    "AGNNConv",
    "APPNPConv",
    "DotGatConv",
    "EdgeWeightNorm",
    "GATConv",
    "GATv2Conv",
    "GINConv",
    "GraphConv",
    "RelGraphConv",
    "SAGEConv",
    "SGConv",
]

__getattr__ = layers_of_dgl(__name__)
