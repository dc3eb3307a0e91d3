# SPDX-License-Identifier: Apache-2.0
"""PyG's layers and models on a graph that spans all ranks, unmodified and exact.

::

    graphshard.initialize_comms()
    model = graphshard.pyg.parallelize(model, data)  # the rest of the script stays as it is

`shard` gives each rank its own rows, for graphs that no rank holds whole::

    data = graphshard.pyg.shard("parts/graph.json")
    out = model(data.x, data.edge_index)  # any torch_geometric.nn layer or model

Needs the extra ``graphshard[pyg]``; nothing of PyG is imported before `shard` is called.
"""

from ._edge_index import ShardedEdgeIndex, SourceIndex
from ._norms import convert_sync_norm
from ._shard import shard
from .parallel import parallelize

__all__ = ["ShardedEdgeIndex", "SourceIndex", "convert_sync_norm", "parallelize", "shard"]
