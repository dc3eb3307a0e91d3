# SPDX-License-Identifier: Apache-2.0
"""DGL's message passing protocol, and one relation's part in it where its edges are local."""

from ._protocol import (
    AggregationStep,
    ApplyFunction,
    EdgeFunction,
    MessagePassingGraph,
    NodeFunction,
    Steps,
    SumOverEdges,
    attend,
    checked_functions,
    edge_softmax,
    frames_of,
    run_steps,
    run_together,
)
from ._relation import EdgeBatch, NodeBatch, RelationData, edge_values, reduce_messages, run_apply
