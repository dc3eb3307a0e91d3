# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.distributed.partition``."""

import torch
from torch import Tensor

from ...graph import EID, ETYPE, NID, NTYPE, Graph
from ...partition import load_partition, load_partition_book, load_partition_feats, partition_graph

__all__ = [
    "RESERVED_FIELD_DTYPE", "load_partition", "load_partition_book", "load_partition_feats",
    "partition_graph",
]  # fmt: skip

RESERVED_FIELD_DTYPE = {
    "inner_node": torch.bool,
    "inner_edge": torch.bool,
    NID: torch.int64,
    EID: torch.int64,
    NTYPE: torch.int32,
    ETYPE: torch.int32,
}
"""Dtypes of what `load_partition` puts into the graph of a part."""


def _get_inner_node_mask(graph: Graph, ntype_id: int) -> Tensor:
    """Which nodes of a part's graph are its own, and of a type."""
    return graph.ndata["inner_node"] & (graph.ndata[NTYPE] == ntype_id)


def _get_inner_edge_mask(graph: Graph, etype_id: int) -> Tensor:
    """Which edges of a part's graph are its own, and of a relation."""
    return graph.edata["inner_edge"] & (graph.edata[ETYPE] == etype_id)
