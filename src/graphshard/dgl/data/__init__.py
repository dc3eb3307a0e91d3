# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.data``: data sets, read from local files, and what they are built on."""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import GraphValueError
from ...graph import load_graphs as load_graphs
from ...graph import save_graphs as save_graphs
from ..dataloading import MultiLayerNeighborSampler as MultiLayerNeighborSampler
from ..dataloading import NodeDataLoader as NodeDataLoader
from . import citation_graph as citation_graph
from . import utils as utils
from .adapter import *  # noqa: F403
from .citation_graph import CitationGraphDataset as CitationGraphDataset
from .citation_graph import CiteseerGraphDataset as CiteseerGraphDataset
from .citation_graph import CoraGraphDataset as CoraGraphDataset
from .citation_graph import PubmedGraphDataset as PubmedGraphDataset
from .citation_graph import load_citeseer as load_citeseer
from .citation_graph import load_cora as load_cora
from .citation_graph import load_pubmed as load_pubmed
from .dgl_dataset import DGLBuiltinDataset as DGLBuiltinDataset
from .dgl_dataset import DGLDataset as DGLDataset
from .generated import BACommunityDataset as BACommunityDataset
from .generated import BAShapeDataset as BAShapeDataset
from .generated import KarateClubDataset as KarateClubDataset
from .generated import MiniGCDataset as MiniGCDataset
from .generated import SBMMixtureDataset as SBMMixtureDataset
from .generated import TreeCycleDataset as TreeCycleDataset
from .generated import TreeGridDataset as TreeGridDataset
from .many_graphs import GINDataset as GINDataset
from .many_graphs import LegacyPPIDataset as LegacyPPIDataset
from .many_graphs import LegacyTUDataset as LegacyTUDataset
from .many_graphs import PPIDataset as PPIDataset
from .many_graphs import QM9Dataset as QM9Dataset
from .many_graphs import QM9EdgeDataset as QM9EdgeDataset
from .many_graphs import SSTDataset as SSTDataset
from .many_graphs import TUDataset as TUDataset
from .one_graph import AmazonCoBuyComputerDataset as AmazonCoBuyComputerDataset
from .one_graph import AmazonCoBuyPhotoDataset as AmazonCoBuyPhotoDataset
from .one_graph import CoauthorCSDataset as CoauthorCSDataset
from .one_graph import CoauthorPhysicsDataset as CoauthorPhysicsDataset
from .one_graph import CoraFullDataset as CoraFullDataset
from .one_graph import DglNodePropPredDataset as DglNodePropPredDataset
from .one_graph import FB15k237Dataset as FB15k237Dataset
from .one_graph import FB15kDataset as FB15kDataset
from .one_graph import FlickrDataset as FlickrDataset
from .one_graph import FraudAmazonDataset as FraudAmazonDataset
from .one_graph import FraudDataset as FraudDataset
from .one_graph import FraudYelpDataset as FraudYelpDataset
from .one_graph import RedditDataset as RedditDataset
from .one_graph import WikiCSDataset as WikiCSDataset
from .one_graph import WN18Dataset as WN18Dataset
from .one_graph import YelpDataset as YelpDataset
from .rdf import AIFBDataset as AIFBDataset
from .rdf import AMDataset as AMDataset
from .rdf import BGSDataset as BGSDataset
from .rdf import MUTAGDataset as MUTAGDataset
from .rdf import RDFGraphDataset as RDFGraphDataset
from .utils import Subset as Subset
from .utils import add_nodepred_split as add_nodepred_split
from .utils import check_sha1 as check_sha1
from .utils import download as download
from .utils import extract_archive as extract_archive
from .utils import get_download_dir as get_download_dir
from .utils import load_info as load_info
from .utils import load_labels as load_labels
from .utils import load_tensors as load_tensors
from .utils import loadtxt as loadtxt
from .utils import save_info as save_info
from .utils import save_tensors as save_tensors
from .utils import split_dataset as split_dataset

citegrh = citation_graph
KarateClub = KarateClubDataset
QM9 = QM9Dataset
QM9Edge = QM9EdgeDataset
SBMMixture = SBMMixtureDataset
SST = SSTDataset
CoraFull = CoraFullDataset


def register_data_args(parser: argparse.ArgumentParser) -> None:
    """Give a parser of arguments the option ``--dataset``, which `load_data` reads."""
    parser.add_argument(
        "--dataset", help="the data set: cora, citeseer, pubmed, reddit or reddit-self-loop"
    )


def load_data(args: Any) -> DGLBuiltinDataset:
    """The data set that ``args.dataset`` names, from local files.

    Raises:
        ValueError: An unknown name.
        FileNotFoundError: Its files are not there; the error says what belongs where.
    """
    loaders = {"cora": load_cora, "citeseer": load_citeseer, "pubmed": load_pubmed}
    if args.dataset in loaders:
        return loaders[args.dataset]()
    if args.dataset is not None and args.dataset.startswith("reddit"):
        return RedditDataset(self_loop="self-loop" in args.dataset)
    raise GraphValueError(
        f"--dataset must be cora, citeseer, pubmed, reddit or reddit-self-loop (got {args.dataset})"
    )
