# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.sampling``: frontiers, random walks, and neighbours that walks find often."""

from ...sampling import global_uniform_negative_sampling as global_uniform_negative_sampling
from .frontiers import sample_etype_neighbors as sample_etype_neighbors
from .frontiers import sample_labors as sample_labors
from .frontiers import sample_neighbors as sample_neighbors
from .frontiers import sample_neighbors_biased as sample_neighbors_biased
from .frontiers import sample_neighbors_fused as sample_neighbors_fused
from .frontiers import select_topk as select_topk
from .walks import PinSAGESampler as PinSAGESampler
from .walks import RandomWalkNeighborSampler as RandomWalkNeighborSampler
from .walks import node2vec_random_walk as node2vec_random_walk
from .walks import pack_traces as pack_traces
from .walks import random_walk as random_walk
