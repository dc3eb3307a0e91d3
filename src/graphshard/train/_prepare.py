# SPDX-License-Identifier: Apache-2.0
"""From a data set's name, folder or edge list to a partition that can be trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..data import NodeDataset, load_dataset
from ..data._folder import check_node_count
from ..graph import add_self_loop, from_csv, from_parquet, remove_self_loop, to_bidirected
from ..partition import partition_graph
from ._task import TaskInfo, write_task

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
    """What is done to a graph before it is partitioned. None: what its published results did.

    Args:
        row_normalize: Divide each feature row by its sum.
        self_loops: Give every node exactly one self loop. Only for a graph without relations.
        bidirected: Add the reverse of every edge, once. Only for a graph without relations.
        inverse: Add the inverse of every relation. Only for a graph with relations; None: yes.
    """

    row_normalize: bool | None = None
    self_loops: bool | None = None
    bidirected: bool = False
    inverse: bool | None = None


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


def partition_dataset(
    dataset: NodeDataset,
    num_parts: int,
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    balance_field: str | None = None,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Path:
    """Partition a data set into a folder, with the description of its task beside the JSON.

    Args:
        dataset: The data set.
        num_parts: Number of parts.
        out: The folder.
        name: Name of the graph and of the JSON; None: the data set's.
        balance_field: Node feature of the target type whose values are to be spread evenly.
        options: How the graph was prepared, to be noted beside the partition.
        **arguments: More for `graphshard.distributed.partition_graph`.

    Returns:
        The path of the JSON.
    """
    name = dataset.name if name is None else name
    if balance_field is not None:
        arguments["balance_ntypes"] = _balance_classes(dataset, balance_field)
    partition_graph(dataset.graph, name, num_parts, out, quiet=True, **arguments)
    json_path = Path(out) / f"{name}.json"
    write_task(json_path, TaskInfo.of_dataset(dataset, dict(options or {})))
    return json_path


def _balance_classes(dataset: NodeDataset, field: str) -> Any:
    """Whole numbers from 0 for the values of a node feature, as ``balance_ntypes`` wants them."""
    graph = dataset.graph
    fields = graph.nodes[dataset.target].data
    if field not in fields:
        raise ValueError(
            f"balance_ntypes must name a node feature of type '{dataset.target}' (got {field!r}; "
            f"there are {', '.join(sorted(fields))})"
        )
    values = fields[field]
    if values.ndim != 1:
        raise ValueError(
            f"balance_ntypes needs one value per node (got {field!r} of shape "
            f"{tuple(values.shape)})"
        )
    classes = torch.unique(values, return_inverse=True)[1]
    if len(graph.ntypes) == 1:
        return classes
    zeros = {t: torch.zeros(graph.num_nodes(t), dtype=torch.int64) for t in graph.ntypes}
    return {**zeros, dataset.target: classes}
