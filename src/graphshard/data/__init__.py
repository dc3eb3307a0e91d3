# SPDX-License-Identifier: Apache-2.0
"""Graphs to train on: real ones from folders and other libraries, made-up ones by seed.

`load_dataset` reads a data set with a node classification task; `from_pyg`, `from_dgl` and
`from_ogb` take what other libraries have; `random_graph` and its like make graphs of any size. Edge
lists in CSV and Parquet, SciPy and NetworkX graphs are read by ``graphshard.graph``.
"""

import sys

from ..graph import from_dgl, to_dgl
from . import utils
from ._load import load_dataset
from ._ogb import from_ogb
from ._ogb_dataset import DglNodePropPredDataset
from ._pyg import from_pyg, to_pyg
from ._synthetic import community_graph, random_graph, random_typed_graph
from .dataset import NodeDataset
from .datasets import (
    AIFBDataset,
    AMDataset,
    BGSDataset,
    CitationGraphDataset,
    CiteseerGraphDataset,
    CoraGraphDataset,
    DGLBuiltinDataset,
    DGLDataset,
    KarateClubDataset,
    MiniGCDataset,
    MUTAGDataset,
    PubmedGraphDataset,
    RDFGraphDataset,
    RedditDataset,
)
from .utils import Subset, load_graphs, load_info, save_graphs, save_info, split_dataset

__all__ = [
    "AIFBDataset",
    "AMDataset",
    "BGSDataset",
    "CitationGraphDataset",
    "CiteseerGraphDataset",
    "CoraGraphDataset",
    "DGLBuiltinDataset",
    "DGLDataset",
    "DglNodePropPredDataset",
    "KarateClubDataset",
    "MUTAGDataset",
    "MiniGCDataset",
    "NodeDataset",
    "PubmedGraphDataset",
    "RDFGraphDataset",
    "RedditDataset",
    "Subset",
    "community_graph",
    "from_dgl",
    "from_ogb",
    "from_pyg",
    "load_dataset",
    "load_graphs",
    "load_info",
    "random_graph",
    "random_typed_graph",
    "save_graphs",
    "save_info",
    "split_dataset",
    "to_dgl",
    "to_pyg",
    "utils",
]

_LOADERS = ("MultiLayerNeighborSampler", "NodeDataLoader")


def __getattr__(name: str) -> object:
    """Names that DGL had here before it had ``dgl.dataloading``, which is where they are.

    Data sets do not need loaders, so that these are looked up when they are asked for.
    """
    if name in _LOADERS:
        found: object = getattr(sys.modules["graphshard"].dataloading, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
