# SPDX-License-Identifier: Apache-2.0
"""Frontiers: graphs of all nodes and of those edges that some nodes drew, or chose by weight."""

from ._draw import sample_labors, sample_neighbors
from ._tagged import sample_etype_neighbors, sample_neighbors_biased
from ._topk import select_topk
