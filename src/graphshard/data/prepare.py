# SPDX-License-Identifier: Apache-2.0
"""A data set by name, folder or file, prepared as its published results were made."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._base.typing import CanonicalEType
from ..graph import Graph, load_graphs, save_graphs
from ..graph.dgl_files import StoredRelation, StoredTensor, open_graphs, reading, stored_graph
from ._array_graph import (
    ArrayGraph,
    Arrays,
    EndArrays,
    FieldArrays,
    both_directions,
    check_ends,
    check_node_count,
    folder_of_arrays,
    with_inverses,
    with_self_loops,
)
from ._folder import is_of_facts
from ._ogb import ogb_name, read_ogb_arrays, read_ogb_folder
from ._read_tables import read_tables
from ._table_files import TABLE_ENDINGS
from .dataset import MASKS, DatasetArrays, NodeDataset, read_dataset_arrays
from .edge_tables import from_table, to_csv, to_parquet
from .settings import Preparation as Preparation  # where users look for it
from .splits import split_by_fractions
from .tables import Tables
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
_DGL_GRAPHS = (".bin", ".dgl")
_WRITTEN_TABLES = (".csv", ".parquet")


def read_dataset(name: str, preparation: Preparation = _AS_PUBLISHED) -> NodeDataset:
    """Read a data set by name, folder or file, and prepare it.

    Args:
        name: ``"cora"``; a folder of arrays, or the name of one in the folder that the environment
            variable GRAPHSHARD_DATASETS names; a folder of OGB's files (``dataset/ogbn_arxiv``), or
            ``"ogbn-arxiv"``, which may be downloaded; a table of edges, as `Tables.from_files`
            takes it; or a file of one graph that ``dgl.save_graphs`` wrote and that ends in
            ``.bin`` or ``.dgl``.

    Raises:
        FileNotFoundError: There is no such data set.
        ValueError: The data set is damaged, or the preparation does not fit it.
    """
    if is_table(name):
        from ._partition_tables import prepared_tables  # no other data needs it

        tables = Tables.from_files(edges=[name])
        title = next(iter(tables.edges))[1]
        content, _ = prepared_tables(read_tables(tables, name=title), preparation)
        return NodeDataset.from_graph(content.graph(), name=title)
    return _read_arrays(name, preparation, Arrays()).dataset()


def partition_by_name(
    name: str,
    num_parts: int,
    out: str | os.PathLike[str],
    *,
    preparation: Preparation = _AS_PUBLISHED,
    title: str | None = None,
    has_links: bool = False,
    warns: bool = True,
    **arguments: Any,
) -> Path:
    """Read a data set as `read_dataset` does, and partition it as `partition_dataset`.

    A table of edges is partitioned as `partition_tables` does, with the ids that it has. With
    ``part_method="multilevel"``, or ``memory``, edges and dense features are never whole in memory.

    Args:
        title: Name of the graph and of the JSON; None: the data set's.
        has_links: Its edges are to be predicted, as `with_links` makes them; not of edges on disk.
        warns: Whether labels and splits are looked at, as `warn_of_task` does; training does, too.
        **arguments: More for `partition_dataset`.

    Returns:
        The path of the JSON.

    Raises:
        FileNotFoundError: There is no such data set.
        ValueError: The data set is damaged, or an argument does not fit it.
    """
    if is_table(name):
        from ._partition_tables import partition_tables  # no other data needs it

        tables = Tables.from_files(edges=[name], split=LINK_FRACTIONS if has_links else None)
        return partition_tables(
            tables, num_parts, out, name=title, preparation=preparation, **arguments
        )
    with folder_of_arrays(Path(out), arguments) as folder:
        read = _read_arrays(name, preparation, Arrays(folder))
        dataset = read.dataset() if folder is None else read
        if has_links:
            if not isinstance(dataset, NodeDataset):
                raise ValueError(
                    "has_links is for edges in memory (got memory or the method multilevel); leave "
                    "these out, or give tables with a split"
                )
            dataset = with_links(dataset)
        elif warns:
            warn_of_task(dataset)
        return partition_dataset(dataset, num_parts, out, name=title, **arguments)


def is_table(name: str) -> bool:
    """Whether a data set is a table of edges, by its ending; or a folder of Parquet files."""
    path, has_ending = Path(name), TABLE_ENDINGS.fullmatch(name) is not None
    if path.is_dir():
        return not any(path.glob("*.npy")) and (has_ending or any(path.glob("*.parquet")))
    return has_ending


def _read_arrays(name: str, preparation: Preparation, arrays: Arrays) -> DatasetArrays:
    path = Path(name)
    if path.suffix in _DGL_GRAPHS:
        content = _read_dgl_arrays(path, arrays)
        for ntype, fields in content.nodes.items():
            num_values = num_ends = 0
            for rows in fields.values():
                num_values += math.prod(rows.shape)
            for etype, (src, _) in content.ends.items():
                num_ends += len(src) * etype[::2].count(ntype)
            if not num_values:
                check_node_count(path, ntype, content.num_nodes[ntype], num_ends)
            for mask in MASKS:
                if mask in fields and str(fields[mask].dtype).endswith("uint8"):
                    fields[mask] = _truth(arrays, fields[mask])  # DGL's files know no bool
        return _prepared(DatasetArrays.of_content(content, path.stem), path, preparation)
    folder = Path(_folder(name))
    if (title := ogb_name(folder)) is not None:
        return _prepared(read_ogb_folder(title, folder, arrays), folder, preparation, True)
    if name.startswith("ogbn-") and not folder.is_dir():
        root = os.environ.get(DATASETS_VARIABLE) or "dataset"
        return _prepared(read_ogb_arrays(name, root, arrays), Path(root), preparation, True)
    return _read_folder(name, preparation, arrays)


# ---------------------------------------------------------------------- files of DGL's save_graphs


def _read_dgl_arrays(path: Path, arrays: Arrays) -> ArrayGraph:
    """Read the one graph of a file.

    Args:
        arrays: If they are on disk, no tensor of the file is ever whole in memory.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or has another number of graphs.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    with reading(path) as reader:
        _, offsets = open_graphs(reader)
        if len(offsets) != 2:
            raise ValueError(
                f"{path} must hold one graph (got {len(offsets) - 1}); save the wanted one on its "
                "own"
            )
        stored = stored_graph(reader, offsets, 0)
        num_nodes = dict(zip(stored.ntypes, stored.num_nodes, strict=True))
        graph = ArrayGraph(arrays=arrays, num_nodes=num_nodes, ends={}, nodes={}, edges={})
        for ntype, fields in zip(stored.ntypes, stored.ndata, strict=True):
            graph.nodes[ntype] = _dgl_fields(path, fields, arrays)
        for etype, relation, fields in zip(
            stored.canonical_etypes, stored.relations, stored.edata, strict=True
        ):
            graph.ends[etype] = _dgl_ends(path, relation, arrays)
            graph.edges[etype] = _dgl_fields(path, fields, arrays)
    if arrays.folder is not None:  # in memory it was seen as edges were read
        check_ends(graph, path)
    return graph


def _dgl_fields(path: Path, fields: dict[str, StoredTensor], arrays: Arrays) -> FieldArrays:
    if arrays.folder is None:
        read: FieldArrays = {}
        for name, tensor in fields.items():
            rows = tensor.read()
            read[name] = rows if rows.dtype == torch.bfloat16 else rows.numpy()
        return read
    return {
        name: _mapped_bfloat16(path, tensor, arrays)
        if tensor.dtype == torch.bfloat16
        else _mapped_tensor(path, tensor, arrays)
        for name, tensor in fields.items()
    }


def _mapped_bfloat16(path: Path, stored: StoredTensor, arrays: Arrays) -> torch.Tensor:
    """The same of a dtype that NumPy does not have."""
    made = _mapped_tensor(path, stored, arrays, torch.int16)
    return torch.from_numpy(made).view(torch.bfloat16)


def _mapped_tensor(
    path: Path, stored: StoredTensor, arrays: Arrays, view: torch.dtype | None = None
) -> NDArray[Any]:
    """A tensor of the file, mapped, or a copy on disk where numbers begin between two of them.

    Args:
        view: What its bits are read as; None: what it is stored as.
    """
    read_as = stored.dtype if view is None else view
    dtype, shape = torch.empty(0, dtype=read_as).numpy().dtype, tuple(stored.shape)
    if not stored.num_bytes:
        return np.zeros(shape, dtype)
    if stored.offset % dtype.itemsize == 0:
        # What is made a tensor must be writable: no more than these pages are then.
        mode: Any = "r" if view is None else "c"
        return np.memmap(path, dtype, mode, stored.offset, shape)
    made, done = arrays.empty(shape, dtype), 0
    for rows in stored.slices():
        made[done : done + len(rows)] = rows.view(read_as).numpy()
        done += len(rows)
        arrays.release(made)
    return made


def _dgl_ends(path: Path, relation: StoredRelation, arrays: Arrays) -> EndArrays:
    """Sources and destinations in the order of the edges' ids."""
    if arrays.folder is None:
        src, dst = relation.adjacency().coo()
        return src.numpy(), dst.numpy()
    if "coo" in relation.arrays:
        of_src, of_dst, _ = relation.arrays["coo"]
        return _mapped_tensor(path, of_src, arrays), _mapped_tensor(path, of_dst, arrays)
    name = "csc" if "csc" in relation.arrays else "csr"
    pointer, stored_others, stored_ids = relation.arrays[name]
    indptr, others = pointer.read().numpy(), _mapped_tensor(path, stored_others, arrays)
    num_edges = len(others)
    if indptr[0] != 0 or indptr[-1] != num_edges or (np.diff(indptr) < 0).any():
        raise ValueError(
            f"{path}: a pointer of rows must ascend from 0 to {num_edges}; write it again"
        )
    ids = None if stored_ids is None else _mapped_tensor(path, stored_ids, arrays)
    made = arrays.empty(num_edges, others.dtype), arrays.empty(num_edges, others.dtype)
    is_written = arrays.zeros(num_edges, bool)
    for block in arrays.blocks(others, *made, is_written):
        first, last = block.start, min(block.stop, num_edges)
        rows = np.searchsorted(indptr, np.arange(first, last), side="right") - 1
        places: Any = block
        if ids is not None:
            places = np.asarray(ids[block])
            arrays.release(ids)
            if places.min() < 0 or places.max() >= num_edges:
                raise ValueError(
                    f"{path}: ids of edges must be in [0, {num_edges}) (got {places.min()} to "
                    f"{places.max()}); write it again"
                )
        made[0][places], made[1][places] = rows, others[block]
        is_written[places] = True
    for block in arrays.blocks(is_written):
        if not is_written[block].all():
            raise ValueError(f"{path}: the ids of two edges are the same; write it again")
    return (made[1], made[0]) if name == "csc" else made


# ---------------------------------------------------------------------- preparation


def _truth(arrays: Arrays, mask: Any) -> Any:
    """A mask that is stored in bytes."""
    made = arrays.empty(len(mask), bool)
    for rows in arrays.blocks(made):
        made[rows] = np.asarray(mask[rows]) != 0
    return made


def _prepared(
    dataset: DatasetArrays, source: Path, preparation: Preparation, adds_inverses: bool = False
) -> DatasetArrays:
    """A data set with the edges that were asked for.

    Args:
        adds_inverses: Whether relations have inverses where nothing is said of them.
    """
    content = dataset.content
    if preparation.row_normalize:
        raise ValueError(
            f"row_normalize is for folders of arrays (got {source}); change the features before "
            "they are saved"
        )
    is_plain = len(content.ntypes) == len(content.etypes) == 1
    if preparation.inverse and is_plain:
        raise ValueError(
            f"inverse is for graphs with relations, and {source} has none; bidirected adds the "
            "reverse of every edge"
        )
    if not is_plain and (preparation.self_loops or preparation.bidirected):
        raise ValueError(
            f"self_loops and bidirected are for graphs without relations, and {source} has "
            "relations; inverse adds the inverse of every relation"
        )
    is_changed = preparation.self_loops or preparation.bidirected
    for etype, fields in content.edges.items() if is_changed else ():
        if name := next((n for n, rows in fields.items() if rows.dtype == torch.bfloat16), None):
            raise ValueError(
                f"{source}: features of edges that are added to must be of a dtype that NumPy has "
                f"(got bfloat16 of {name!r} of {etype}); store it as float32"
            )
    is_added = adds_inverses and not is_plain
    if is_added if preparation.inverse is None else preparation.inverse:
        content, _ = with_inverses(content, ())
    if preparation.bidirected:
        content = both_directions(content)
    if preparation.self_loops:
        content = with_self_loops(content)
    return replace(dataset, content=content)


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
    is_typed |= (path / "raw" / "triplet-type-list.csv.gz").exists()
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


def read_graph(source: str | os.PathLike[str]) -> Graph:
    """A graph as it is: that of a file, or of a data set as its published results had it.

    Args:
        source: As for `read_dataset`.
    """
    path = Path(source)
    if is_table(os.fspath(source)):
        return from_table(os.fspath(source))
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
    if path.suffix not in _WRITTEN_TABLES:
        raise ValueError(
            f"a graph goes to a file in {(*_DGL_GRAPHS, *_WRITTEN_TABLES)} (got {path})"
        )
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
