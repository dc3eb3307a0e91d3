# SPDX-License-Identifier: Apache-2.0
"""Loading a part: tensors are mapped from the files, and read when touched."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .._typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..errors import PartitionFormatError
from ..graph import Graph
from ..ops import Adjacency
from ._book import RangePartitionBook
from ._files import TensorFile
from ._stats import PartitionStats
from .format import PartitionConfig, etype_key, read_config

Path = str | os.PathLike[str]
Features = dict[str, Tensor]


def load_partition(
    part_config: Path, part_id: int, load_feats: bool = True
) -> tuple[Graph, Features, Features, RangePartitionBook, str, list[str], list[CanonicalEType]]:
    """Load one part. Needs no process group.

    The graph has one node type and one relation; types are numbers in its data, and ids are local:
    inner nodes come first, by type, then halo nodes; inner edges first, by (relation,
    destination, original id), then outer edges. What is loaded is the process's own: writing to a
    tensor never changes a file.

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
        part_config: Path of the JSON that `partition_graph` wrote.
        part_id: The part.
        load_feats: False leaves the two dicts of features empty.

    Returns:
        ``(graph, node_feats, edge_feats, book, graph_name, ntypes, etypes)``. Features are keyed
        "type/name" and "source:relation:destination/name"; their rows are the inner nodes or edges
        of the type in local order. ``etypes`` are canonical.

    Raises:
        PartitionFormatError: A file is missing, truncated, or belongs to another partition.
        ValueError: There is no such part.
    """
    return load_part(read_config(part_config), part_id, load_feats)


def load_part(
    config: PartitionConfig, part_id: int, load_feats: bool = True
) -> tuple[Graph, Features, Features, RangePartitionBook, str, list[str], list[CanonicalEType]]:
    """`load_partition` from a JSON that has been read."""
    book = _book(config, config.check_part(part_id))
    graph = _load_graph(config.open_part(part_id, "part_graph"), book)
    node_feats, edge_feats = {}, {}
    if load_feats:
        node_feats = _load_features(config, book, "node_feats")
        edge_feats = _load_features(config, book, "edge_feats")
    names = config.graph_name, book.ntypes, book.canonical_etypes
    return graph, node_feats, edge_feats, book, *names


def load_partition_feats(
    part_config: Path, part_id: int, load_nodes: bool = True, load_edges: bool = True
) -> tuple[Features | None, Features | None]:
    """Load the features of one part alone.

    Args:
        part_config: Path of the JSON that `partition_graph` wrote.
        part_id: The part.
        load_nodes: Whether to load node features; None is returned instead.
        load_edges: Whether to load edge features; None is returned instead.

    Returns:
        Node features by "type/name" and edge features by "source:relation:destination/name".

    Raises:
        PartitionFormatError: A file is missing, truncated, or belongs to another partition.
        ValueError: There is no such part.
    """
    config = read_config(part_config)
    book = _book(config, config.check_part(part_id))
    return (
        _load_features(config, book, "node_feats") if load_nodes else None,
        _load_features(config, book, "edge_feats") if load_edges else None,
    )


def load_partition_book(
    part_config: Path, part_id: int
) -> tuple[RangePartitionBook, str, dict[str, int], dict[CanonicalEType, int]]:
    """Load who owns what; reads the JSON only, ours or one that DGL wrote.

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
    book = _book(config, config.check_part(part_id))
    return book, config.graph_name, config.ntypes, config.etypes


def load_partition_stats(part_config: Path) -> PartitionStats:
    """Load the statistics of a partition; reads the JSON only.

    Raises:
        PartitionFormatError: The JSON is missing, inconsistent, or DGL's.
    """
    config = read_config(part_config)
    config.check_format()
    try:
        return PartitionStats.from_dict(config.content["stats"])
    except (KeyError, TypeError) as error:
        raise PartitionFormatError(
            f"the statistics in {config.path} are incomplete ({error!r}); partition again"
        ) from None


def _book(config: PartitionConfig, part_id: int) -> RangePartitionBook:
    try:
        book = RangePartitionBook(
            part_id,
            config.num_parts,
            config.node_map,
            config.edge_map,
            config.ntypes,
            config.etypes,
        )
        for what, count in (("nodes", book.num_nodes()), ("edges", book.num_edges())):
            if count != config.content.get(f"num_{what}", count):
                raise ValueError(
                    f"its maps hold {count} {what}, not {config.content[f'num_{what}']}"
                )
    except ValueError as error:
        raise PartitionFormatError(
            f"partition config {config.path} is inconsistent: {error}; copy it again, or "
            "partition the graph again"
        ) from None
    return book


def _load_graph(file: TensorFile, book: RangePartitionBook) -> Graph:
    tensors = file.read()
    try:
        num_nodes = tensors["node/_ID"].shape[0]
        adjacency = _adjacency(tensors, num_nodes)
        graph = Graph({DEFAULT_NTYPE: num_nodes}, {DEFAULT_CANONICAL_ETYPE: adjacency})
        for name in ("_ID", "_TYPE", "part_id", "inner_node"):
            graph.ndata[name] = tensors[f"node/{name}"]
        for name in ("_ID", "_TYPE", "inner_edge"):
            graph.edata[name] = tensors[f"edge/{name}"]
    except (KeyError, ValueError) as error:
        raise PartitionFormatError(
            f"file {file.path} is not the structure of a part ({error}); partition again"
        ) from None
    expected = book.metadata()[book.partid]["num_nodes"]
    if num_nodes < expected:
        raise PartitionFormatError(
            f"file {file.path} holds {num_nodes} nodes, fewer than the {expected} that part "
            f"{book.partid} owns; partition again"
        )
    return graph


def _adjacency(tensors: Features, num_nodes: int) -> Adjacency:
    """The edges, from the stored format that would cost most to make from the others."""
    for name in ("csc", "csr"):
        if f"{name}/indptr" in tensors:
            adjacency = Adjacency.from_csc(
                tensors[f"{name}/indptr"],
                tensors[f"{name}/indices"],
                tensors.get(f"{name}/eids"),
                num_nodes,
                num_nodes,
                check=False,
            )
            return adjacency if name == "csc" else adjacency.reverse()
    return Adjacency(tensors["coo/src"], tensors["coo/dst"], num_nodes, num_nodes, check=False)


def _load_features(config: PartitionConfig, book: RangePartitionBook, kind: str) -> Features:
    file = config.open_part(book.partid, kind)
    offsets = book.local_ntype_offset if kind == "node_feats" else book.local_etype_offset
    names = book.ntypes
    if kind == "edge_feats":
        names = [etype_key(etype) for etype in book.canonical_etypes]
    rows = dict(zip(names, torch.tensor(offsets).diff().tolist(), strict=True))
    for key, shape in file.shapes.items():
        owner = key.rsplit("/", 1)[0]
        if owner not in rows or not shape or shape[0] != rows[owner]:
            raise PartitionFormatError(
                f"feature '{key}' in {file.path} has shape {shape}, but part {book.partid} owns "
                f"{rows.get(owner, 'nothing')} of that type; partition again"
            )
    return file.read()
