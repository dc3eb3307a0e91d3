# SPDX-License-Identifier: Apache-2.0
"""Train graph neural networks on graphs split across processes and machines.

The names of this package. Those of DGL and SAR, for scripts that were written for them, are in
`graphshard.dgl` and `graphshard.sar`. Importing starts nothing: no thread, no process group. Not
even torch is imported before the first name is used.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ._base.lazy import lazy_name

if TYPE_CHECKING:
    from . import comm, data, fullbatch, function, nn, ops, partition, pyg, sampling, servers
    from ._base.device import choose_device
    from .comm import gather_grads, initialize_comms, rank, shutdown_comms, sync_params, world_size
    from .data import from_csv, from_parquet, to_csv, to_parquet
    from .errors import (
        CheckpointError,
        DGLError,
        GraphShardError,
        MetisError,
        PartitionFormatError,
        RankError,
    )
    from .fullbatch import (
        GraphShardManager,
        PartitionData,
        construct_full_graph,
        construct_mfgs,
        load_dgl_partition_data,
        message_has_parameters,
        suffix_key_lookup,
    )
    from .graph import (
        EID,
        ETYPE,
        NID,
        NTYPE,
        Block,
        Graph,
        add_reverse_edges,
        add_self_loop,
        create_block,
        edge_softmax,
        edge_subgraph,
        from_dgl,
        from_edge_index,
        from_networkx,
        from_scipy,
        graph,
        heterograph,
        in_subgraph,
        load_graphs,
        node_subgraph,
        remove_self_loop,
        save_graphs,
        to_bidirected,
        to_block,
        to_dgl,
        to_edge_index,
        to_heterogeneous,
        to_homogeneous,
        to_networkx,
        to_scipy,
    )
    from .partition import partition_graph
    from .sampling import DataLoader, DistNeighborSampler
    from .sampling.inference import inference
    from .servers import DistEmbedding, DistGraph, DistTensor
    from .train import predict

    __version__: str

_MODULES = (
    *("errors", "_base.device", "comm", "graph", "partition", "data", "fullbatch", "sampling"),
    *("servers", "function", "nn", "ops", "pyg", "train"),
)

__all__ = [
    "EID",
    "ETYPE",
    "NID",
    "NTYPE",
    "Block",
    "CheckpointError",
    "DGLError",
    "DataLoader",
    "DistEmbedding",
    "DistGraph",
    "DistNeighborSampler",
    "DistTensor",
    "Graph",
    "GraphShardError",
    "GraphShardManager",
    "MetisError",
    "PartitionData",
    "PartitionFormatError",
    "RankError",
    "add_reverse_edges",
    "add_self_loop",
    "choose_device",
    "comm",
    "construct_full_graph",
    "construct_mfgs",
    "create_block",
    "data",
    "edge_softmax",
    "edge_subgraph",
    "from_csv",
    "from_dgl",
    "from_edge_index",
    "from_networkx",
    "from_parquet",
    "from_scipy",
    "fullbatch",
    "function",
    "gather_grads",
    "graph",
    "heterograph",
    "in_subgraph",
    "inference",
    "initialize_comms",
    "load_dgl_partition_data",
    "load_graphs",
    "message_has_parameters",
    "nn",
    "node_subgraph",
    "ops",
    "partition",
    "partition_graph",
    "predict",
    "pyg",
    "rank",
    "remove_self_loop",
    "sampling",
    "save_graphs",
    "servers",
    "shutdown_comms",
    "suffix_key_lookup",
    "sync_params",
    "to_bidirected",
    "to_block",
    "to_csv",
    "to_dgl",
    "to_edge_index",
    "to_heterogeneous",
    "to_homogeneous",
    "to_networkx",
    "to_parquet",
    "to_scipy",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """Names and modules, imported when one is first used."""
    if name == "__version__":
        from ._base.version import VERSION

        return VERSION
    return lazy_name(__name__, _MODULES, __all__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


class _Package(ModuleType):
    """This module, in which ``graph`` is the function, also after the folder has been imported."""

    @property
    def graph(self) -> Any:
        from .graph import graph

        return graph

    @graph.setter
    def graph(self, value: object) -> None:
        pass  # the import system gives every module to its package


sys.modules[__name__].__class__ = _Package
