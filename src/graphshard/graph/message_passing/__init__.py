# SPDX-License-Identifier: Apache-2.0
"""DGL's message passing protocol, and its implementation for edges in this process."""

from ._attend import attend
from ._edge_softmax import edge_softmax
from ._flatten import flattened
from ._local import LocalGraph, check_relations, edge_frame
from ._protocol import (
    AggregationStep,
    MessagePassingGraph,
    Steps,
    checked_functions,
    run_steps,
    run_together,
)
from ._relation import RelationData, edge_values, reduce_messages
from ._typed import TypedGraph, frames_of
from ._udf import EdgeBatch, NodeBatch
