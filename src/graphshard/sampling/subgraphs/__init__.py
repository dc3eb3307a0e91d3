# SPDX-License-Identifier: Apache-2.0
"""Samplers whose batches are graphs of some nodes and all edges between them."""

from ._cluster_gcn import ClusterGCNSampler
from ._induced import SubgraphSampler
from ._saint import SAINTSampler
from ._shadow import ShaDowKHopSampler
