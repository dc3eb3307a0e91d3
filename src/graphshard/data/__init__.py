# SPDX-License-Identifier: Apache-2.0
"""Graphs to train on: real ones from folders and other libraries, made-up ones by seed.

`load_dataset` reads a data set with a node classification task; `from_pyg`, `from_dgl` and
`from_ogb` take what other libraries have; `random_graph` and its like make graphs of any size.
`from_csv` and `from_parquet` read an edge list; SciPy's and NetworkX's graphs are read by
``graphshard.graph``. `Tables` are your own: nodes and edges with ids, features and labels in files;
`partition_tables` makes a partition of them, and `user_ids` gives your ids back.
"""

from typing import TYPE_CHECKING, Any

from .._base.lazy import lazy_name

if TYPE_CHECKING:
    from ..graph import from_dgl, to_dgl
    from ..graph.dgl_files import load_graphs, save_graphs
    from ._ogb import from_ogb
    from ._partition_tables import partition_tables
    from ._pyg import from_pyg, to_pyg
    from ._synthetic import community_graph, random_graph, random_typed_graph
    from ._table_files import FileOptions
    from .dataset import NodeDataset, load_dataset
    from .edge_tables import from_csv, from_parquet, to_csv, to_parquet
    from .id_files import user_ids
    from .tables import EdgeTable, JoinedTable, NodeTable, Tables

_MODULES = (
    *(".graph", "_table_files", "dataset", "tables", "id_files", "_synthetic", "_pyg", "_ogb"),
    *("edge_tables", "_partition_tables"),
)

__all__ = [
    "EdgeTable",
    "FileOptions",
    "JoinedTable",
    "NodeDataset",
    "NodeTable",
    "Tables",
    "community_graph",
    "from_csv",
    "from_dgl",
    "from_ogb",
    "from_parquet",
    "from_pyg",
    "load_dataset",
    "load_graphs",
    "partition_tables",
    "random_graph",
    "random_typed_graph",
    "save_graphs",
    "to_csv",
    "to_dgl",
    "to_parquet",
    "to_pyg",
    "user_ids",
]


def __getattr__(name: str) -> Any:
    return lazy_name(__name__, _MODULES, __all__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
