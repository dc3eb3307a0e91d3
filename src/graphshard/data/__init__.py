# SPDX-License-Identifier: Apache-2.0
"""Graphs to train on: real ones from folders and other libraries, made-up ones by seed.

`load_dataset` reads a data set with a node classification task; `from_pyg`, `from_dgl` and
`from_ogb` take what other libraries have; `random_graph` and its like make graphs of any size. Edge
lists in CSV and Parquet, SciPy and NetworkX graphs are read by ``graphshard.graph``.
"""

from ..graph import from_dgl, to_dgl
from ..graph.dgl_files import load_graphs, save_graphs
from ._ogb import from_ogb
from ._pyg import from_pyg, to_pyg
from ._synthetic import community_graph, random_graph, random_typed_graph
from .dataset import NodeDataset, load_dataset

__all__ = [
    "NodeDataset",
    "community_graph",
    "from_dgl",
    "from_ogb",
    "from_pyg",
    "load_dataset",
    "load_graphs",
    "random_graph",
    "random_typed_graph",
    "save_graphs",
    "to_dgl",
    "to_pyg",
]
