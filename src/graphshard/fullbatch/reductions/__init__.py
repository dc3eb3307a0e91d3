# SPDX-License-Identifier: Apache-2.0
"""How partial results of shards become one."""

from ._attention import AttentionSum
from ._cuts import find_chunks
from ._edge_softmax import softmax_over_in_edges, softmax_over_out_edges
from ._reduction import (
    CompanionRows,
    EdgeValues,
    Extremum,
    Reduction,
    Sum,
    accumulation_dtype,
    is_graph_kept,
)
from ._softmax import SoftmaxSum, holds_softmax, proportional_softmax
