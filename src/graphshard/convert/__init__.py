# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.convert``.

``dgl.heterograph`` is a function, and to imports a module, which has the classes of graphs. So it
is here: ``from graphshard.heterograph import DGLGraph, DGLBlock``.
"""

import sys
from types import ModuleType

from ..graph import (
    Block,
    Graph,
    bipartite_from_networkx,
    bipartite_from_scipy,
    block_to_graph,
    create_block,
    from_networkx,
    from_scipy,
    graph,
    heterograph,
    to_heterogeneous,
    to_homogeneous,
    to_networkx,
)

__all__ = [
    "bipartite_from_networkx",
    "bipartite_from_scipy",
    "block_to_graph",
    "create_block",
    "from_networkx",
    "from_scipy",
    "graph",
    "heterograph",
    "to_heterogeneous",
    "to_homogeneous",
    "to_networkx",
]

_classes = ModuleType("graphshard.heterograph", "The classes of ``dgl.heterograph``.")
vars(_classes).update(DGLGraph=Graph, DGLBlock=Block, DGLHeteroGraph=Graph, heterograph=heterograph)
sys.modules.setdefault(_classes.__name__, _classes)
