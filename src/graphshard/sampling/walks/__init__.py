# SPDX-License-Identifier: Apache-2.0
"""Random walks on a graph of this process, and neighbours that walks find often."""

from ._node2vec import node2vec_random_walk
from ._pinsage import PinSAGESampler, RandomWalkNeighborSampler
from ._random_walk import ONE_OUT_EDGE, pack_traces, random_walk, walks_along
