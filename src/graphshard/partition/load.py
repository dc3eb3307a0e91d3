# SPDX-License-Identifier: Apache-2.0
"""Reading a partition.

Tensors are mapped from the files, and read when touched. Of the structure `PartStructure` keeps
what the file holds; what follows from that is made when a graph is asked for.

[Note: nothing is believed]
Kernels believe their input: a pointer that points past the end, or an id that is none, would have
them read or write anywhere. So whatever a file says is held against the partition book and against
itself before a graph is made of it; a contradiction is a ValueError. It takes a pass over the ids,
in vector operations; what costs more than that is left to `verify_partition`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial

import torch

from .._base.file_rows import RowsInFiles
from .._base.lazy_columns import LazyColumns
from .._base.typing import INDEX_DTYPES, CanonicalEType, TensorDict, TensorMapping
from ..errors import PartitionFormatError
from ..graph import Graph
from ._book import RangePartitionBook
from ._format_1 import read_columns
from ._stats import PartitionStats
from .checked_files import TensorFile
from .dgl_folder import DGLPartFile, owned_rows
from .format import PartitionConfig, etype_key, read_config
from .structure import PartStructure, original_ids, read_structure

Path = str | os.PathLike[str]


def load_partition(
    part_config: Path, part_id: int, load_feats: bool = True, *, checksums: bool = False
) -> tuple[Graph, TensorDict, TensorDict, RangePartitionBook, str, list[str], list[CanonicalEType]]:
    """Load one part, of a partition that `partition_graph` wrote, or DGL's. Needs no process group.

    The JSON and the structure are read and checked as a whole, digest and all, before anything
    computes with them. Features are mapped; their digest, which needs all their bytes, is computed
    only if asked for.

    The graph has one node type and one relation; types are numbers in its data, and ids are local:
    inner nodes come first, by type, then halo nodes; inner edges first, by (relation,
    destination, original id), then outer edges. In a part that DGL wrote, foreign nodes and edges,
    and edges of one relation, come as DGL has them. The formats that the partition was made with
    are built. What is loaded is the process's own: writing to a tensor never changes a file.

    ==============  ================================================================
    field           of ``graph.ndata``
    ==============  ================================================================
    ``_ID``         int64, homogenised id, see `RangePartitionBook`
    ``_TYPE``       int32, number of the node type
    ``part_id``     int64, the part that owns the node
    ``inner_node``  bool, whether that is this part
    ==============  ================================================================

    ==============  ================================================================
    field           of ``graph.edata``
    ==============  ================================================================
    ``_ID``         int64, homogenised id
    ``_TYPE``       int32, number of the relation
    ``inner_edge``  bool, whether this part owns the edge
    ==============  ================================================================

    Args:
        part_config: Path of the JSON that `partition_graph`, ours or DGL's, wrote.
        load_feats: False leaves the two dicts of features empty.
        checksums: Read every byte of the features, too, and compare their digests.

    Returns:
        ``(graph, node_feats, edge_feats, book, graph_name, ntypes, etypes)``. Features are keyed
        "type/name" and "source:relation:destination/name"; their rows are the inner nodes or edges
        of the type in local order. ``etypes`` are canonical. Where DGL did not keep "orig_id",
        it holds the ids of the partition itself.

    Raises:
        PartitionFormatError: A file is missing, damaged, or belongs to another partition.
        ValueError: There is no such part.
    """
    config = read_config(part_config)
    part = load_part(config, part_id, load_feats, feature_digests=checksums)
    if config.layout == "graphshard":
        for name in config.graph_formats:
            getattr(part[0].relations[0], name)()
    return part


def load_part(
    config: PartitionConfig, part_id: int, load_feats: bool = True, *, feature_digests: bool = False
) -> tuple[Graph, TensorDict, TensorDict, RangePartitionBook, str, list[str], list[CanonicalEType]]:
    """`load_partition` from a JSON that has been read."""
    structure = load_structure(config, part_id)
    node_feats, edge_feats = {}, {}
    if load_feats:
        node_feats = dict(load_features(config, part_id, "node_feats", checksums=feature_digests))
        edge_feats = dict(load_features(config, part_id, "edge_feats", checksums=feature_digests))
    book = structure.book
    names = config.graph_name, book.ntypes, book.canonical_etypes
    return structure.graph(), node_feats, edge_feats, book, *names


def load_structure(
    config: PartitionConfig, part_id: int, *, checksum: bool = True, as_stored: bool = False
) -> PartStructure:
    """The structure of a part, checked, with its digest or without.

    Args:
        as_stored: What is mapped takes no memory of the process's own, however that is limited,
            and must not be written to.

    Raises:
        PartitionFormatError: The file is missing, damaged, or belongs to another partition.
        ValueError: There is no such part.
    """
    book = config.book(part_id)
    file = config.open_part(part_id, "part_graph")
    if checksum:
        file.check_digest()
    left = tuple(file.shapes) if as_stored and config.version > 1 else ()
    tensors = file.read(left) if isinstance(file, TensorFile) else file.read()
    if config.version > 1:  # so that there are as many nodes as the JSON says
        open_features(config, book, "node_feats")
    try:
        if config.version < 2:
            return read_columns(tensors, book)
        assert config.idtype is not None
        return read_structure(tensors, book, config.idtype)
    except (ValueError, TypeError) as error:
        raise PartitionFormatError(
            f"file {file.path} is not the structure of a part ({error}); copy part {part_id} "
            "again, or partition the graph again"
        ) from None


def load_partition_feats(
    part_config: Path,
    part_id: int,
    load_nodes: bool = True,
    load_edges: bool = True,
    *,
    checksums: bool = False,
) -> tuple[TensorDict | None, TensorDict | None]:
    """Load the features of one part alone.

    Args:
        part_config: Path of the JSON that `partition_graph` wrote.
        load_nodes: Whether to load node features; None is returned instead.
        load_edges: Whether to load edge features; None is returned instead.
        checksums: Read every byte and compare digests.

    Returns:
        Node features by "type/name" and edge features by "source:relation:destination/name".

    Raises:
        PartitionFormatError: A file is missing, damaged, or belongs to another partition.
        ValueError: There is no such part.
    """
    config = read_config(part_config)
    config.book(part_id)
    return (
        dict(load_features(config, part_id, "node_feats", checksums=checksums))
        if load_nodes
        else None,
        dict(load_features(config, part_id, "edge_feats", checksums=checksums))
        if load_edges
        else None,
    )


def load_partition_book(
    part_config: Path, part_id: int
) -> tuple[RangePartitionBook, str, dict[str, int], dict[CanonicalEType, int]]:
    """Load the ranges of ids of each part; reads the JSON only, ours or one that DGL wrote.

    Args:
        part_id: The part that the book shall call its own.

    Returns:
        ``(book, graph_name, ntypes, etypes)``; the types with their numbers.

    Raises:
        PartitionFormatError: The JSON is missing or inconsistent.
        ValueError: There is no such part.
    """
    config = read_config(part_config)
    book = config.book(part_id)
    return book, config.graph_name, config.ntypes, config.etypes


def load_partition_stats(part_config: Path) -> PartitionStats:
    """Load the statistics of a partition; reads the JSON only.

    Raises:
        PartitionFormatError: The JSON is missing, inconsistent, or DGL's.
    """
    config = read_config(part_config)
    config.check_format()
    if config.stats is None:
        raise PartitionFormatError(
            f"{config.path} has no statistics, because DGL wrote it; graphshard convert makes a "
            "partition of it that has them"
        )
    return config.stats


def open_features(
    config: PartitionConfig, book: RangePartitionBook, kind: str
) -> TensorFile | DGLPartFile:
    """The file of a part's features, whose shapes are those of the part."""
    file = config.open_part(book.partid, kind)
    rows = owned_rows(kind, book)
    for key, shape in file.shapes.items():
        owner = key.rsplit("/", 1)[0]
        if owner not in rows or not shape or shape[0] != rows[owner]:
            raise PartitionFormatError(
                f"feature '{key}' in {file.path} has shape {shape}, but part {book.partid} owns "
                f"{rows.get(owner, 'nothing')} of that type; partition again"
            )
    for owner in rows:
        if f"{owner}/orig_id" not in file.shapes:
            raise _without_original_ids(file, kind, owner, "none")
    return file


def load_features(
    config: PartitionConfig,
    part_id: int,
    kind: str,
    *,
    checksums: bool = False,
    as_stored: bool = False,
    left: Collection[str] = (),
) -> TensorMapping:
    """The features of a part's nodes or edges, by "type/name".

    Args:
        kind: "node_feats" or "edge_feats".
        left: Of a partition of ours, what is to take no memory; see `TensorFile.read`.
        checksums: Read every byte and compare the digest.
        as_stored: Leave original ids as the file has them, see `structure.stored_dtype`; they are
            else made int64 when they are first asked for.

    Raises:
        PartitionFormatError: The file is missing, damaged, or belongs to another partition.
    """
    book = config.book(part_id)
    file = open_features(config, book, kind)
    if checksums:
        file.check_digest()
    features = file.read(left) if isinstance(file, TensorFile) else file.read()
    totals = num_ids(kind, book)
    dtypes = INDEX_DTYPES if config.version > 1 else (torch.int64,)
    makers: dict[str, Callable[[], torch.Tensor]] = {}
    for owner in owned_rows(kind, book):
        name = f"{owner}/orig_id"
        ids = features[name]
        if ids.dtype not in dtypes or ids.dim() != 1:
            raise _without_original_ids(
                file, kind, owner, f"{ids.dtype} of shape {tuple(ids.shape)}"
            )
        if not as_stored:
            makers[name] = partial(original_ids, ids, totals[owner])
            del features[name]
    return LazyColumns(features, makers) if makers else features


def features_in_files(config: PartitionConfig, part_id: int, kind: str) -> dict[str, RowsInFiles]:
    """The features named "feat" of a part's nodes or edges, by "type/name", left in their file.

    Raises:
        PartitionFormatError: The file is missing, damaged, or belongs to another partition; or the
            folder is none of ours.
    """
    file = open_features(config, config.book(part_id), kind)
    if not isinstance(file, TensorFile):
        raise PartitionFormatError(
            f"features can be left in the files of a partition that graphshard wrote alone (got "
            f"{config.path}, which DGL wrote); graphshard convert makes one of it"
        )
    return {name: rows for name, rows in file.rows().items() if name.endswith("/feat")}


def _without_original_ids(
    file: TensorFile | DGLPartFile, kind: str, owner: str, form: str
) -> PartitionFormatError:
    what = "nodes of type" if kind == "node_feats" else "edges of"
    return PartitionFormatError(
        f"file {file.path} must hold orig_id, one whole number for each of the {what} {owner} "
        f"(got {form}); partition again"
    )


def num_ids(kind: str, book: RangePartitionBook) -> dict[str, int]:
    """How many nodes or edges of each type the graph has, by the names of types in files."""
    if kind == "node_feats":
        return {ntype: book.num_nodes(ntype) for ntype in book.ntypes}
    return {etype_key(etype): book.num_edges(etype) for etype in book.canonical_etypes}
