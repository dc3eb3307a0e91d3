# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.dataloading``: samplers and loaders for mini-batches of one graph."""

from ...sampling.loader import EdgeDataLoader as EdgeDataLoader
from ...sampling.loader import LocalDataLoader as DataLoader
from ...sampling.loader import NodeDataLoader as NodeDataLoader
from ...sampling.sampler import BlockSampler as BlockSampler
from ...sampling.sampler import EdgePredictionSampler as EdgePredictionSampler
from ...sampling.sampler import LaborSampler as LaborSampler
from ...sampling.sampler import MultiLayerFullNeighborSampler as MultiLayerFullNeighborSampler
from ...sampling.sampler import MultiLayerNeighborSampler as MultiLayerNeighborSampler
from ...sampling.sampler import NeighborSampler as NeighborSampler
from ...sampling.sampler import Sampler as Sampler
from ...sampling.sampler import as_edge_prediction_sampler as as_edge_prediction_sampler
from ...sampling.sampler import find_exclude_eids as find_exclude_eids
from ...servers import DistDataLoader as DistDataLoader
from ...servers import DistEdgeDataLoader as DistEdgeDataLoader
from ...servers import DistNodeDataLoader as DistNodeDataLoader
from . import negative_sampler as negative_sampler
from ._collators import EdgeCollator as EdgeCollator
from ._collators import NodeCollator as NodeCollator
from ._graph_loader import GraphCollator as GraphCollator
from ._graph_loader import GraphDataLoader as GraphDataLoader
from ._spot_target import SpotTarget as SpotTarget
from .subgraph_samplers import ClusterGCNSampler as ClusterGCNSampler
from .subgraph_samplers import SAINTSampler as SAINTSampler
from .subgraph_samplers import ShaDowKHopSampler as ShaDowKHopSampler
