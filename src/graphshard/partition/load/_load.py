# SPDX-License-Identifier: Apache-2.0
"""Loading a part: tensors are mapped from the files, and read when touched."""

from __future__ import annotations

import os

import torch

from ..._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType, TensorDict
from ...errors import PartitionFormatError
from ...graph import Graph
from .._book import RangePartitionBook
from .._stats import PartitionStats
from ..dgl_folder import DGLPartFile
from ..files import TensorFile
from ..format import PartitionConfig, etype_key, read_config
from ._part_check import checked_adjacency

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

    ============  ==================================================================
    graph.ndata
    ``_ID``       int64, homogenised id, see `RangePartitionBook`
    ``_TYPE``     int32, number of the node type
    ``part_id``   int64, the part that owns the node
    ``inner_node``  bool, whether that is this part
    graph.edata
    ``_ID``       int64, homogenised id
    ``_TYPE``     int32, number of the relation
    ``inner_edge``  bool, whether this part owns the edge
    ============  ==================================================================

    Args:
        part_config: Path of the JSON that `partition_graph`, ours or DGL's, wrote.
        part_id: The part.
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
    config: PartitionConfig,
    part_id: int,
    load_feats: bool = True,
    *,
    feature_digests: bool = False,
    structure_digest: bool = True,
) -> tuple[Graph, TensorDict, TensorDict, RangePartitionBook, str, list[str], list[CanonicalEType]]:
    """`load_partition` from a JSON that has been read; ``*_digest`` says which digests to check."""
    book = config.book(part_id)
    file = config.open_part(part_id, "part_graph")
    if structure_digest:
        file.check_digest()
    graph = _load_graph(file, book)
    node_feats, edge_feats = {}, {}
    if load_feats:
        node_feats = _load_features(config, book, "node_feats", feature_digests)
        edge_feats = _load_features(config, book, "edge_feats", feature_digests)
    names = config.graph_name, book.ntypes, book.canonical_etypes
    return graph, node_feats, edge_feats, book, *names


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
        part_id: The part.
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
    book = config.book(part_id)
    return (
        _load_features(config, book, "node_feats", checksums) if load_nodes else None,
        _load_features(config, book, "edge_feats", checksums) if load_edges else None,
    )


def load_partition_book(
    part_config: Path, part_id: int
) -> tuple[RangePartitionBook, str, dict[str, int], dict[CanonicalEType, int]]:
    """Load the ranges of ids of each part; reads the JSON only, ours or one that DGL wrote.

    Args:
        part_config: Path of the JSON.
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


def _load_graph(file: TensorFile | DGLPartFile, book: RangePartitionBook) -> Graph:
    tensors = file.read()
    try:
        adjacency = checked_adjacency(tensors, book)
    except (ValueError, TypeError) as error:
        raise PartitionFormatError(
            f"file {file.path} is not the structure of a part ({error}); copy part {book.partid} "
            "again, or partition the graph again"
        ) from None
    graph = Graph({DEFAULT_NTYPE: adjacency.num_dst}, {DEFAULT_CANONICAL_ETYPE: adjacency})
    for name in ("_ID", "_TYPE", "part_id", "inner_node"):
        graph.ndata[name] = tensors[f"node/{name}"]
    for name in ("_ID", "_TYPE", "inner_edge"):
        graph.edata[name] = tensors[f"edge/{name}"]
    return graph


def open_features(
    config: PartitionConfig, book: RangePartitionBook, kind: str
) -> TensorFile | DGLPartFile:
    """The file of a part's features, whose shapes are those of the part.

    Raises:
        PartitionFormatError: They are not; or as for `PartitionConfig.open_part`.
    """
    file = config.open_part(book.partid, kind)
    rows = _owned_rows(book, kind)
    for key, shape in file.shapes.items():
        owner = key.rsplit("/", 1)[0]
        if owner not in rows or not shape or shape[0] != rows[owner]:
            raise PartitionFormatError(
                f"feature '{key}' in {file.path} has shape {shape}, but part {book.partid} owns "
                f"{rows.get(owner, 'nothing')} of that type; partition again"
            )
    return file


def _owned_rows(book: RangePartitionBook, kind: str) -> dict[str, int]:
    """How many nodes or edges the part owns, by the names of types in files."""
    offsets = book.local_ntype_offset if kind == "node_feats" else book.local_etype_offset
    names = book.ntypes
    if kind == "edge_feats":
        names = [etype_key(etype) for etype in book.canonical_etypes]
    return dict(zip(names, torch.tensor(offsets).diff().tolist(), strict=True))


def _load_features(
    config: PartitionConfig, book: RangePartitionBook, kind: str, checksums: bool
) -> TensorDict:
    file = open_features(config, book, kind)
    if checksums:
        file.check_digest()
    features = file.read()
    for owner in _owned_rows(book, kind):
        ids = features.get(f"{owner}/orig_id")
        if ids is None or ids.dtype != torch.int64 or ids.dim() != 1:
            found = "none" if ids is None else f"{ids.dtype} of shape {tuple(ids.shape)}"
            what = "nodes of type" if kind == "node_feats" else "edges of"
            raise PartitionFormatError(
                f"file {file.path} must hold orig_id, one int64 for each of the {what} {owner} "
                f"(got {found}); partition again"
            )
    return features
