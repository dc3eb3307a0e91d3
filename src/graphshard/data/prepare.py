# SPDX-License-Identifier: Apache-2.0
"""A data set by name, folder or edge list, prepared as its published results were made."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ..graph import add_self_loop, from_csv, from_parquet, remove_self_loop, to_bidirected
from ._folder import check_node_count
from ._load import load_dataset
from .dataset import NodeDataset

DATASETS_VARIABLE = "GRAPHSHARD_DATASETS"

#: Data sets whose published results are with row-normalised features and self loops.
NORMALIZED_WITH_LOOPS = (
    "amazon-computers",
    "citeseer",
    "coauthor-physics",
    "cora",
    "nell",
    "pubmed-partial",
)
_TABLES = (".csv", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to a graph before it is partitioned. None: what its published results did."""

    row_normalize: Annotated[
        bool | None, "Divide each feature row by its sum; default: yes for citation data sets."
    ] = None
    self_loops: Annotated[
        bool | None,
        "Give every node exactly one self loop, as GCN and GAT need; default: yes for citation "
        "data sets.",
    ] = None
    bidirected: Annotated[bool, "Add the reverse of every edge."] = False
    inverse: Annotated[
        bool | None,
        "Add the inverse of every relation; default: yes where there are relations.",
    ] = None


def read_dataset(name: str, preparation: Preparation = Preparation()) -> NodeDataset:
    """Read a data set by name, folder or edge list, and prepare it.

    Args:
        name: ``"cora"``, a folder, the name of a folder in the one that the environment variable
            GRAPHSHARD_DATASETS names, or an edge list that ends in ``.csv`` or ``.parquet``
            (columns ``src`` and ``dst``).
        preparation: What to do to the graph.

    Raises:
        FileNotFoundError: There is no such data set.
        ValueError: The data set is damaged, or the preparation does not fit it.
    """
    path = Path(name)
    if path.suffix in _TABLES:
        return _read_table(path, preparation)
    folder = _folder(name)
    known = Path(folder).name in NORMALIZED_WITH_LOOPS
    relations = has_relations(folder)
    filled = replace(
        preparation,
        row_normalize=_default(preparation.row_normalize, known),
        self_loops=_default(preparation.self_loops, known and not relations),
        inverse=_default(preparation.inverse, relations),
    )
    if relations and (filled.self_loops or filled.bidirected):
        raise ValueError(
            f"self_loops and bidirected are for graphs without relations, and {name} has relations;"
            " inverse adds the inverse of every relation"
        )
    return load_dataset(
        folder,
        row_normalize=bool(filled.row_normalize),
        to_bidirected=filled.bidirected,
        add_inverse=bool(filled.inverse),
        add_self_loop=bool(filled.self_loops),
    )


def has_relations(name: str) -> bool:
    """Whether a data set has relations: of edges, or by several node types."""
    path = Path(_folder(name))
    return (path / "edge_type.npy").exists() or any(path.glob("edge_index__*.npy"))


def _folder(name: str) -> str:
    """A folder, or the name of a data set that comes with the package."""
    collection = os.environ.get(DATASETS_VARIABLE)
    if not Path(name).is_dir() and collection and os.sep not in name:
        inside = Path(collection) / name
        if inside.is_dir():
            return str(inside)
    return name


def _read_table(path: Path, preparation: Preparation) -> NodeDataset:
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no edge list {path}")
    if preparation.inverse or preparation.row_normalize:
        raise ValueError(
            f"inverse and row_normalize need relations and features, and the edge list {path} has "
            "neither"
        )
    graph = from_csv(path) if path.suffix == ".csv" else from_parquet(path)
    check_node_count(path, "_N", graph.num_nodes(), 2 * graph.num_edges())
    if preparation.bidirected:
        graph = to_bidirected(graph)
    if preparation.self_loops:
        graph = add_self_loop(remove_self_loop(graph))
    return NodeDataset.from_graph(graph, name=path.stem)


def _default(value: bool | None, otherwise: bool) -> bool:
    return otherwise if value is None else value
