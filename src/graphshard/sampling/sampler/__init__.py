# SPDX-License-Identifier: Apache-2.0
"""What is drawn for a batch of seeds: neighbours, negatives, edges to leave out; the blocks."""

from ._block_sampler import BlockSampler, Sampler, takes
from ._edge_sampler import EdgePredictionSampler, as_edge_prediction_sampler
from ._exclude import Exclude
from ._ids import by_type, per_kind, refuse_unnamed
from ._negative import GlobalUniform, NegativeSampler, PerSourceUniform, Uniform
from ._neighbor_sampler import DrawSeed, IdTables, MultiLayerNeighborSampler, NeighborSampler
from ._samplers import (
    DistNeighborSampler,
    LaborSampler,
    MultiLayerFullNeighborSampler,
)
