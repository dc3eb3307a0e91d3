# SPDX-License-Identifier: Apache-2.0
"""Graph convolutions, with DGL's arguments and parameter names."""

from ._gat_conv import GATConv
from ._gatv2_conv import GATv2Conv
from ._gin_conv import GINConv
from ._graph_conv import GraphConv
from ._hetero_graph_conv import HeteroGraphConv
from ._rel_graph_conv import RelGraphConv
from ._sage_conv import SAGEConv
