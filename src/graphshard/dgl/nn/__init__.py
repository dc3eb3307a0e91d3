# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn``: the layers of `graphshard.nn`, and those that DGL alone has.

Constructor arguments and names of parameters are DGL's, so that a ``state_dict`` moves both ways.
"""

from ...graph import edge_softmax as edge_softmax
from ...nn import DistributedBN1D as DistributedBN1D
from ...nn import GATConv as GATConv
from ...nn import GATv2Conv as GATv2Conv
from ...nn import GINConv as GINConv
from ...nn import GraphConv as GraphConv
from ...nn import HeteroEmbedding as HeteroEmbedding
from ...nn import HeteroGraphConv as HeteroGraphConv
from ...nn import HeteroLinear as HeteroLinear
from ...nn import RelGraphConv as RelGraphConv
from ...nn import SAGEConv as SAGEConv
from ...nn import TypedLinear as TypedLinear
from ..graphs._points import knn_graph as knn_graph
from ..graphs._points import radius_graph as radius_graph
from ..graphs._points import segmented_knn_graph as segmented_knn_graph
from ._agnn_conv import AGNNConv as AGNNConv
from ._appnp_conv import APPNPConv as APPNPConv
from ._dot_gat_conv import DotGatConv as DotGatConv
from ._edge_weight_norm import EdgeWeightNorm as EdgeWeightNorm
from ._of_dgl import layers_of_dgl
from ._point_graphs import KNNGraph as KNNGraph
from ._point_graphs import RadiusGraph as RadiusGraph
from ._point_graphs import SegmentedKNNGraph as SegmentedKNNGraph
from ._pooling import AvgPooling as AvgPooling
from ._pooling import GlobalAttentionPooling as GlobalAttentionPooling
from ._pooling import MaxPooling as MaxPooling
from ._pooling import Set2Set as Set2Set
from ._pooling import SortPooling as SortPooling
from ._pooling import SumPooling as SumPooling
from ._pooling import WeightAndSum as WeightAndSum
from ._scores import EdgePredictor as EdgePredictor
from ._scores import TransE as TransE
from ._scores import TransR as TransR
from ._sg_conv import SGConv as SGConv
from ._stacks import JumpingKnowledge as JumpingKnowledge
from ._stacks import Sequential as Sequential

__getattr__ = layers_of_dgl(__name__)
from . import pytorch as pytorch
