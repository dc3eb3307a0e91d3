# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.sampling``: frontiers, random walks, and neighbours that walks find often."""

from ...sampling import global_uniform_negative_sampling as global_uniform_negative_sampling
from ._draw import sample_labors as sample_labors
from ._draw import sample_neighbors as sample_neighbors
from ._node2vec import node2vec_random_walk as node2vec_random_walk
from ._pinsage import PinSAGESampler as PinSAGESampler
from ._pinsage import RandomWalkNeighborSampler as RandomWalkNeighborSampler
from ._random_walk import pack_traces as pack_traces
from ._random_walk import random_walk as random_walk
from ._tagged import sample_etype_neighbors as sample_etype_neighbors
from ._tagged import sample_neighbors_biased as sample_neighbors_biased
from ._topk import select_topk as select_topk
