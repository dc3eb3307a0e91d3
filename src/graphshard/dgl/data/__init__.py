# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.data``: data sets, read from local files, and what they are built on."""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import GraphValueError
from ..dataloading import MultiLayerNeighborSampler as MultiLayerNeighborSampler
from ..dataloading import NodeDataLoader as NodeDataLoader
from . import citation_graph as citation_graph
from . import utils as utils
from .adapter import *  # noqa: F403
from .citation_graph import *  # noqa: F403
from .dgl_dataset import DGLBuiltinDataset as DGLBuiltinDataset
from .dgl_dataset import DGLDataset as DGLDataset
from .generated import *  # noqa: F403
from .many_graphs import *  # noqa: F403
from .one_graph import *  # noqa: F403
from .one_graph import RedditDataset as RedditDataset
from .rdf import *  # noqa: F403
from .utils import *  # noqa: F403

citegrh = citation_graph


def register_data_args(parser: argparse.ArgumentParser) -> None:
    """Give a parser of arguments the option ``--dataset``, which `load_data` reads."""
    parser.add_argument(
        "--dataset", help="the data set: cora, citeseer, pubmed, reddit or reddit-self-loop"
    )


def load_data(args: Any) -> DGLBuiltinDataset:
    """The data set that ``args.dataset`` names, from local files."""
    if args.dataset in ("cora", "citeseer", "pubmed"):
        return getattr(citation_graph, f"load_{args.dataset}")()
    if args.dataset is not None and args.dataset.startswith("reddit"):
        return RedditDataset(self_loop="self-loop" in args.dataset)
    raise GraphValueError(
        f"--dataset must be cora, citeseer, pubmed, reddit or reddit-self-loop (got {args.dataset})"
    )
