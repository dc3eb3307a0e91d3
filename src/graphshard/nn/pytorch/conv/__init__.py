# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.pytorch.conv``, and of its modules, each of which has a layer."""

import sys
from types import ModuleType

from ....graph import edge_softmax
from ..._edge_weight_norm import EdgeWeightNorm
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


def _modules() -> None:
    """Make the modules, such as ``gatconv`` with `GATConv`."""
    for name in __all__:
        layer = globals()[name]
        file = "graphconv" if layer is EdgeWeightNorm else name.lower()
        full_name = f"{__name__}.{file}"
        module = sys.modules.setdefault(full_name, ModuleType(full_name, f"DGL's place of {name}."))
        vars(module).update({name: layer, "edge_softmax": edge_softmax})
        globals()[file] = module


_modules()
