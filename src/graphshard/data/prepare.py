# SPDX-License-Identifier: Apache-2.0
"""A data set by name, folder or edge list, prepared as its published results were made."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._base.typing import CanonicalEType
from ..graph import (
    Graph,
    add_self_loop,
    load_graphs,
    remove_self_loop,
    save_graphs,
    to_bidirected,
)
from ._array_graph import Arrays, folder_of_arrays
from ._folder import check_node_count, is_of_facts
from .dataset import MASKS, DatasetArrays, NodeDataset, read_dataset_arrays
from .edge_tables import from_table, to_csv, to_parquet
from .settings import Preparation as Preparation  # where users look for it
from .splits import split_by_fractions
from .task import partition_dataset, warn_of_task

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
#: Of typed ones, the node types whose features count words.
NORMALIZED_TYPES = {"dblp-heco": ("author", "paper")}
LINK_FRACTIONS = (0.85, 0.05, 0.1)
"""Of the edges of a data set that has no split of its own, as the papers on Cora have it."""

_AS_PUBLISHED = Preparation()
_TABLES = (".csv", ".parquet")
_DGL_GRAPHS = (".bin", ".dgl")


def read_dataset(name: str, preparation: Preparation = _AS_PUBLISHED) -> NodeDataset:
    """Read a data set by name, folder or edge list, and prepare it.

    Args:
        name: ``"cora"``, a folder, the name of a folder in the one that the environment variable
            GRAPHSHARD_DATASETS names, an edge list that ends in ``.csv`` or ``.parquet``
            (columns ``src`` and ``dst``), or a file of one graph that ``dgl.save_graphs`` wrote
            and that ends in ``.bin`` or ``.dgl``.

    Raises:
        FileNotFoundError: There is no such data set.
        ValueError: The data set is damaged, or the preparation does not fit it.
    """
    path = Path(name)
    if path.suffix in _TABLES:
        return _read_table(path, preparation)
    if path.suffix in _DGL_GRAPHS:
        return _read_dgl_graph(path, preparation)
    return _read_folder(name, preparation, Arrays()).dataset()


def partition_by_name(
    name: str,
    num_parts: int,
    out: str | os.PathLike[str],
    *,
    preparation: Preparation = _AS_PUBLISHED,
    title: str | None = None,
    **arguments: Any,
) -> Path:
    """Read a data set as `read_dataset` does, and partition it as `partition_dataset`.

    With ``part_method="multilevel"``, or ``memory``, the edges of a folder of arrays, and dense
    features, are never whole in memory.

    Args:
        title: Name of the graph and of the JSON; None: the data set's.
        **arguments: More for `partition_dataset`.

    Returns:
        The path of the JSON.

    Raises:
        FileNotFoundError: There is no such data set.
        ValueError: The data set is damaged, or an argument does not fit it.
    """
    is_folder = Path(name).suffix not in (*_TABLES, *_DGL_GRAPHS)
    with folder_of_arrays(Path(out), arguments) if is_folder else nullcontext() as folder:
        dataset: NodeDataset | DatasetArrays
        if folder is None:
            dataset = read_dataset(name, preparation)
        else:
            dataset = _read_folder(name, preparation, Arrays(folder))
        warn_of_task(dataset)
        return partition_dataset(dataset, num_parts, out, name=title, **arguments)


def _read_folder(name: str, preparation: Preparation, arrays: Arrays) -> DatasetArrays:
    folder = _folder(name)
    title, relations = Path(folder).name, has_relations(folder)
    is_normalized = title in NORMALIZED_WITH_LOOPS
    self_loops = _default(preparation.self_loops, is_normalized and not relations)
    if relations and (self_loops or preparation.bidirected):
        raise ValueError(
            f"self_loops and bidirected are for graphs without relations, and {name} has relations;"
            " inverse adds the inverse of every relation"
        )
    return read_dataset_arrays(
        folder,
        arrays,
        row_normalize=(
            NORMALIZED_TYPES.get(title, is_normalized)
            if preparation.row_normalize is None
            else preparation.row_normalize
        ),
        to_bidirected=preparation.bidirected,
        add_inverse=_default(preparation.inverse, relations),
        add_self_loop=self_loops,
        keep_sparse=True,
    )


def has_relations(name: str) -> bool:
    """Whether a data set has relations: of edges, or by several node types."""
    path = Path(_folder(name))
    is_typed = (path / "edge_type.npy").exists() or any(path.glob("edge_index__*.npy"))
    return is_typed or is_of_facts(path)


def has_relation_numbers(name: str) -> bool:
    """Whether edges of a data set carry relation numbers, as those of a knowledge graph."""
    path = Path(_folder(name))
    return (path / "edge_type.npy").exists() or is_of_facts(path)


def has_facts(name: str) -> bool:
    """Whether a data set is a knowledge graph whose facts are to be predicted."""
    return is_of_facts(Path(_folder(name)))


def with_links(dataset: NodeDataset, seed: int = 0) -> NodeDataset:
    """A data set whose edges are to be predicted: those of it, or drawn by `LINK_FRACTIONS`.

    Edges between the same two nodes, in one relation, are in one split, whichever way they go; self
    loops are in none, nor are inverses that were added.

    Args:
        seed: Of the split.
    """
    if dataset.links:
        return dataset
    graph = dataset.graph.local_var()
    links: dict[CanonicalEType, CanonicalEType | None] = {}
    numbered = len(dataset.relation_names)
    for etype in graph.canonical_etypes:
        of_inverse = etype[2], etype[1].removeprefix("rev_"), etype[0]
        if of_inverse != etype and of_inverse in links:
            continue
        src, dst = (end.numpy().astype(np.int64) for end in graph.edges(etype=etype))
        takes_part = np.ones(len(src), bool)
        if etype[0] == etype[2]:
            takes_part = src != dst
            src, dst = np.minimum(src, dst), np.maximum(src, dst)
        number = np.zeros_like(src)
        if numbered:
            number = graph.edges[etype].data["etype"].numpy().astype(np.int64)
            has_inverse = dataset.relation_names[-1].startswith("rev_")
            takes_part &= number < (numbered // 2 if has_inverse else numbered)
        codes = (src * graph.num_nodes(etype[2]) + dst) * max(1, numbered) + number
        pairs, pair_of = np.unique(codes[takes_part], return_inverse=True)
        masks = split_by_fractions(len(pairs), LINK_FRACTIONS, seed=seed)
        for split, mask in masks.items():
            rows = np.zeros(len(src), bool)
            rows[takes_part] = mask[pair_of]
            graph.edges[etype].data[f"{split}_mask"] = torch.from_numpy(rows)
        back = etype[2], f"rev_{etype[1]}", etype[0]
        is_plain = len(graph.canonical_etypes) == 1
        links[etype] = etype if is_plain else (back if back in graph.canonical_etypes else None)
    return replace(dataset, graph=graph, links=tuple(links), reverse_of=tuple(links.values()))


def _folder(name: str) -> str:
    """A folder, or the name of a data set that comes with the package."""
    inside = os.path.join(os.environ.get(DATASETS_VARIABLE, ""), name)
    is_inside = os.sep not in name and not os.path.isdir(name) and os.path.isdir(inside)
    return inside if is_inside else name


def _read_table(path: Path, preparation: Preparation) -> NodeDataset:
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no edge list {path}")
    if preparation.inverse or preparation.row_normalize:
        raise ValueError(
            f"inverse and row_normalize need relations and features, and the edge list {path} has "
            "neither"
        )
    graph = read_graph(path)
    check_node_count(path, "_N", graph.num_nodes(), 2 * graph.num_edges())
    return NodeDataset.from_graph(_prepared(graph, preparation), name=path.stem)


def _prepared(graph: Graph, preparation: Preparation) -> Graph:
    if preparation.bidirected:
        graph = to_bidirected(graph)
    if preparation.self_loops:
        graph = add_self_loop(remove_self_loop(graph))
    return graph


def _read_dgl_graph(path: Path, preparation: Preparation) -> NodeDataset:
    if preparation.inverse or preparation.row_normalize:
        raise ValueError(
            f"inverse and row_normalize are for folders of arrays (got {path}); change the graph "
            "before it is saved"
        )
    graph = read_graph(path)
    is_plain = len(graph.ntypes) == len(graph.canonical_etypes) == 1
    if not is_plain and (preparation.self_loops or preparation.bidirected):
        raise ValueError(
            f"self_loops and bidirected are for graphs without relations, and {path} has relations"
        )
    for ntype in graph.ntypes:
        fields = graph.nodes[ntype].data
        if not any(rows.numel() for rows in fields.values()):
            num_ends = sum(graph.num_edges(e) * e[::2].count(ntype) for e in graph.canonical_etypes)
            check_node_count(path, ntype, graph.num_nodes(ntype), num_ends)
        for name in MASKS:
            if name in fields and fields[name].dtype == torch.uint8:  # DGL's files know no bool
                fields[name] = fields[name].to(torch.bool)
    return NodeDataset.from_graph(_prepared(graph, preparation), name=path.stem)


def read_graph(source: str | os.PathLike[str]) -> Graph:
    """A graph as it is: that of a file, or of a data set as its published results had it.

    Args:
        source: As for `read_dataset`.
    """
    path = Path(source)
    if path.suffix in _TABLES:
        return from_table(path)
    if path.suffix not in _DGL_GRAPHS:
        return read_dataset(os.fspath(source)).graph
    graphs, _ = load_graphs(path)
    if len(graphs) != 1:
        raise ValueError(
            f"{path} must hold one graph (got {len(graphs)}); save the wanted one on its own"
        )
    return graphs[0]


def write_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a file, whose ending says how.

    Args:
        path: ``.bin`` and ``.dgl`` for what ``dgl.load_graphs`` reads, with all features;
            ``.csv`` and ``.parquet`` for the edges of a graph with one relation and their features.

    Raises:
        TypeError: A feature has a dtype that the file cannot hold.
        ValueError: Another ending; or a table, which cannot hold several relations or features of
            nodes.
        OSError: The file cannot be written.
    """
    path = Path(path)
    if path.suffix in _DGL_GRAPHS:
        save_graphs(path, graph)
        return
    if path.suffix not in _TABLES:
        raise ValueError(f"a graph goes to a file in {(*_DGL_GRAPHS, *_TABLES)} (got {path})")
    if len(graph.canonical_etypes) != 1 or any(graph.nodes[t].data for t in graph.ntypes):
        raise ValueError(
            f"a table holds the edges of one relation, and no features of nodes (got "
            f"{len(graph.canonical_etypes)} relations, and {path}); write a .bin file"
        )
    (etype,) = graph.canonical_etypes
    write = to_csv if path.suffix == ".csv" else to_parquet
    write(graph, path, edge_columns=list(graph.edges[etype].data))


def _default(value: bool | None, otherwise: bool) -> bool:
    return otherwise if value is None else value
