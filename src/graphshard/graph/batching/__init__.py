# SPDX-License-Identifier: Apache-2.0
"""Several graphs as one, and values per graph."""

from ._batch import batch, merge, slice_batch, unbatch
from ._readout import (
    broadcast_edges,
    broadcast_nodes,
    max_edges,
    max_nodes,
    mean_edges,
    mean_nodes,
    readout_edges,
    readout_nodes,
    softmax_edges,
    softmax_nodes,
    sum_edges,
    sum_nodes,
    topk_edges,
    topk_nodes,
)
