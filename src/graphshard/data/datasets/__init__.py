# SPDX-License-Identifier: Apache-2.0
"""Data sets under the names of ``dgl.data``, read from local files, and what they are built on."""

from ._base import DGLBuiltinDataset, DGLDataset
from ._citation import (
    CitationGraphDataset,
    CiteseerGraphDataset,
    CoraGraphDataset,
    PubmedGraphDataset,
)
from ._rdf import AIFBDataset, AMDataset, BGSDataset, MUTAGDataset, RDFGraphDataset
from ._reddit import RedditDataset
from ._small import KarateClubDataset, MiniGCDataset
