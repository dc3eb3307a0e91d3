# SPDX-License-Identifier: Apache-2.0
"""DGL's message passing protocol, and its implementation for edges in this process."""

from ._local import LocalGraph, check_relations, edge_frame, flattened, parts_to_send
from ._protocol import (
    AggregationStep,
    MessagePassingGraph,
    Steps,
    attend,
    checked_functions,
    edge_softmax,
    frames_of,
    run_steps,
    run_together,
)
from ._relation import EdgeBatch, NodeBatch, RelationData, edge_values, reduce_messages
