# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.data``: data sets, read from local files, and what they are built on."""

from ...graph import load_graphs as load_graphs
from ...graph import save_graphs as save_graphs
from ..dataloading import MultiLayerNeighborSampler as MultiLayerNeighborSampler
from ..dataloading import NodeDataLoader as NodeDataLoader
from . import utils as utils
from ._base import DGLBuiltinDataset as DGLBuiltinDataset
from ._base import DGLDataset as DGLDataset
from ._citation import CitationGraphDataset as CitationGraphDataset
from ._citation import CiteseerGraphDataset as CiteseerGraphDataset
from ._citation import CoraGraphDataset as CoraGraphDataset
from ._citation import PubmedGraphDataset as PubmedGraphDataset
from ._ogb_dataset import DglNodePropPredDataset as DglNodePropPredDataset
from ._rdf import AIFBDataset as AIFBDataset
from ._rdf import AMDataset as AMDataset
from ._rdf import BGSDataset as BGSDataset
from ._rdf import MUTAGDataset as MUTAGDataset
from ._rdf import RDFGraphDataset as RDFGraphDataset
from ._reddit import RedditDataset as RedditDataset
from ._small import KarateClubDataset as KarateClubDataset
from ._small import MiniGCDataset as MiniGCDataset
from .utils import Subset as Subset
from .utils import load_info as load_info
from .utils import save_info as save_info
from .utils import split_dataset as split_dataset
