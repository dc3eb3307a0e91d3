# SPDX-License-Identifier: Apache-2.0
"""What is drawn for a batch of seeds: neighbours, negatives, edges to leave out; the blocks."""

from ._block_sampler import BlockSampler, Sampler, takes
from ._edge_sampler import EdgePredictionSampler, as_edge_prediction_sampler
from ._exclude import Exclude, find_exclude_eids
from ._ids import by_relation, by_type, only_if_plain, per_kind, refuse_unnamed
from ._negative import (
    GlobalUniform,
    NegativeSampler,
    PerSourceUniform,
    Uniform,
    global_uniform_negative_sampling,
)
from ._neighbor_sampler import (
    DrawSeed,
    IdTables,
    LayerFanout,
    MultiLayerNeighborSampler,
    NeighborSampler,
)
from ._samplers import DistNeighborSampler, LaborSampler, MultiLayerFullNeighborSampler
