# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn``: the layers of `graphshard.nn`, and those that DGL alone has.

Constructor arguments and names of parameters are DGL's, so that a ``state_dict`` moves both ways.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

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
from .attention_convs import AGNNConv as AGNNConv
from .attention_convs import DotGatConv as DotGatConv
from .edge_convs import EdgeConv as EdgeConv
from .edge_convs import GatedGraphConv as GatedGraphConv
from .edge_convs import GINEConv as GINEConv
from .edge_convs import GMMConv as GMMConv
from .edge_convs import NNConv as NNConv
from .explain import GNNExplainer as GNNExplainer
from .propagation import APPNPConv as APPNPConv
from .propagation import ChebConv as ChebConv
from .propagation import EdgeWeightNorm as EdgeWeightNorm
from .propagation import LabelPropagation as LabelPropagation
from .propagation import SGConv as SGConv
from .propagation import TAGConv as TAGConv
from .small_modules import EdgePredictor as EdgePredictor
from .small_modules import Identity as Identity
from .small_modules import JumpingKnowledge as JumpingKnowledge
from .small_modules import Sequential as Sequential
from .small_modules import TransE as TransE
from .small_modules import TransR as TransR
from .small_modules import WeightBasis as WeightBasis
from .whole_graphs import AvgPooling as AvgPooling
from .whole_graphs import GlobalAttentionPooling as GlobalAttentionPooling
from .whole_graphs import KNNGraph as KNNGraph
from .whole_graphs import MaxPooling as MaxPooling
from .whole_graphs import RadiusGraph as RadiusGraph
from .whole_graphs import SegmentedKNNGraph as SegmentedKNNGraph
from .whole_graphs import Set2Set as Set2Set
from .whole_graphs import SortPooling as SortPooling
from .whole_graphs import SumPooling as SumPooling
from .whole_graphs import WeightAndSum as WeightAndSum


def layers_of_dgl(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module of layers: a name that it lacks is looked up in DGL."""

    def find(name: str) -> Any:
        if name[:1].isupper() and not _stands_for_dgl():
            try:
                from dgl.nn import pytorch as layers
            except (ImportError, OSError):
                layers = None
            found = getattr(layers, name, None)
            if isinstance(found, type) and issubclass(found, torch.nn.Module):
                return found
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}; layers that DGL alone has are there "
            "where DGL is installed"
        )

    return find


def _stands_for_dgl() -> bool:
    """Whether this package is itself imported by the name dgl."""
    return getattr(sys.modules.get("dgl"), "__name__", "dgl") != "dgl"


__getattr__ = layers_of_dgl(__name__)
from . import pytorch as pytorch  # noqa: E402 (it has the names above)
