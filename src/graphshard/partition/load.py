# SPDX-License-Identifier: Apache-2.0
"""Reading a partition, and finding out whether it is whole.

Tensors are mapped from the files, and read when touched.

[Note: nothing is believed]
Kernels believe their input: a pointer that points past the end, or an id that is none, would have
them read or write anywhere. So whatever a file says is held against the partition book and against
itself before a graph is made of it; a contradiction is a ValueError. It takes a pass over the ids,
in vector operations; what costs more than that is left to `verify_partition`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from .._base.typing import (
    DEFAULT_CANONICAL_ETYPE,
    DEFAULT_NTYPE,
    INDEX_DTYPES,
    CanonicalEType,
    TensorDict,
)
from ..errors import PartitionFormatError
from ..graph import Graph
from ..ops import Adjacency
from ._book import RangePartitionBook
from ._local_part import IdArray
from ._stats import PartitionStats
from .checked_files import TensorFile, digest_of
from .dgl_folder import DGLPartFile, owned_rows
from .format import PART_FILES, PartitionConfig, etype_key, read_config

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
    return file


def _load_features(
    config: PartitionConfig, book: RangePartitionBook, kind: str, checksums: bool
) -> TensorDict:
    file = open_features(config, book, kind)
    if checksums:
        file.check_digest()
    features = file.read()
    for owner in owned_rows(kind, book):
        ids = features.get(f"{owner}/orig_id")
        if ids is None or ids.dtype != torch.int64 or ids.dim() != 1:
            form = "none" if ids is None else f"{ids.dtype} of shape {tuple(ids.shape)}"
            what = "nodes of type" if kind == "node_feats" else "edges of"
            raise PartitionFormatError(
                f"file {file.path} must hold orig_id, one int64 for each of the {what} {owner} "
                f"(got {form}); partition again"
            )
    return features


_COLUMNS = {
    "node": {
        "_ID": torch.int64,
        "_TYPE": torch.int32,
        "part_id": torch.int64,
        "inner_node": torch.bool,
    },
    "edge": {"_ID": torch.int64, "_TYPE": torch.int32, "inner_edge": torch.bool},
}


def checked_adjacency(tensors: Mapping[str, Tensor], book: RangePartitionBook) -> Adjacency:
    """The edges of a part, after checking all that the file of its structure holds.

    They come from the stored format that would cost most to make from the others.

    Args:
        book: Who owns what, seen from the part.
    """
    counts = {what: _count(tensors, what) for what in _COLUMNS}
    adjacency = _adjacency(tensors, counts["node"])
    if adjacency.num_edges != counts["edge"]:
        raise ValueError(f"it holds {adjacency.num_edges} edges and {counts['edge']} ids of edges")
    for sentence in _contradictions(tensors, book, counts):
        raise ValueError(sentence)
    return adjacency


def check_formats_agree(tensors: Mapping[str, Tensor], adjacency: Adjacency) -> None:
    """Check that all formats in which a file holds the edges of a part hold the same ones."""
    expected = adjacency.coo()
    for name in ("csc", "csr", "coo"):
        alone = {k: v for k, v in tensors.items() if k.startswith(f"{name}/")}
        if alone:
            other = _adjacency(alone, adjacency.num_dst).coo()
            if not all(torch.equal(a, b) for a, b in zip(expected, other, strict=True)):
                raise ValueError(f"its edges in the format {name} are others than its edges")


def _count(tensors: Mapping[str, Tensor], what: str) -> int:
    """Number of local nodes or edges, after checking the columns."""
    count: int | None = None
    for name, dtype in _COLUMNS[what].items():
        key = f"{what}/{name}"
        if key not in tensors:
            raise ValueError(f"'{key}' is missing")
        column = tensors[key]
        if column.dtype != dtype or column.dim() != 1:
            raise ValueError(
                f"'{key}' must be {dtype} with one dimension (got {column.dtype} of shape "
                f"{tuple(column.shape)})"
            )
        if count not in (None, column.numel()):
            raise ValueError(f"'{key}' has {column.numel()} rows and another column has {count}")
        count = column.numel()
    assert count is not None
    return count


def _adjacency(tensors: Mapping[str, Tensor], num_nodes: int) -> Adjacency:
    for name in ("csc", "csr"):
        if f"{name}/indptr" in tensors:
            if f"{name}/indices" not in tensors:
                raise ValueError(f"'{name}/indices' is missing")
            adjacency = Adjacency.from_csc(
                tensors[f"{name}/indptr"],
                tensors[f"{name}/indices"],
                tensors.get(f"{name}/eids"),
                num_nodes,
                num_nodes,
            )
            return adjacency if name == "csc" else adjacency.reverse()
    ends = []
    for name in ("coo/src", "coo/dst"):
        if name not in tensors:
            raise ValueError(f"'{name}' is missing, and there is no other format")
        ids = tensors[name]
        if ids.dtype not in INDEX_DTYPES or ids.dim() != 1:
            raise ValueError(f"'{name}' must be int32 or int64 with one dimension")
        if not _is_within(ids, num_nodes):
            raise ValueError("an edge ends outside the part")
        ends.append(ids)
    if ends[0].dtype != ends[1].dtype or ends[0].shape != ends[1].shape:
        raise ValueError("'coo/src' and 'coo/dst' must be alike")
    return Adjacency(ends[0], ends[1], num_nodes, num_nodes, check=False)


def _contradictions(
    tensors: Mapping[str, Tensor], book: RangePartitionBook, counts: Mapping[str, int]
) -> Iterator[str]:
    sizes = book.metadata()[book.partid]
    spaces = {"node": book.local_ntype_offset, "edge": book.local_etype_offset}
    totals = {"node": book.num_nodes(), "edge": book.num_edges()}
    for what, num_ids in totals.items():
        inner, count = sizes[f"num_{what}s"], counts[what]
        if count < inner:
            yield f"it holds {count} {what}s, fewer than the {inner} that the part owns"
        flags = tensors[f"{what}/inner_{what}"]
        if not bool(flags[:inner].all()) or bool(flags[inner:].any()):
            yield f"inner_{what} does not mark exactly the first {inner} {what}s"
        ids = tensors[f"{what}/_ID"]
        if not _is_within(ids, num_ids):
            yield f"a global {what} id is not in [0, {num_ids})"
        if not _are_distinct(ids[inner:]):
            yield f"a foreign {what} is there twice"
        start = sum(before[f"num_{what}s"] for before in book.metadata()[: book.partid])
        if not torch.equal(ids[:inner], torch.arange(start, start + inner)):
            yield f"its inner {what}s are not those of {what}_map"
        foreign = ids[inner:]
        if bool(((foreign >= start) & (foreign < start + inner)).any()):
            yield f"a halo {what} belongs to the part"
        if not _types_agree(tensors[f"{what}/_TYPE"], foreign, spaces[what], book, what):
            yield f"{what} types contradict {what}_map"
    inner, owners = sizes["num_nodes"], tensors["node/part_id"]
    halo = book.nid2partid(tensors["node/_ID"][inner:])
    if bool((owners[:inner] != book.partid).any()) or not torch.equal(owners[inner:], halo):
        yield "part_id contradicts node_map"


def _types_agree(
    types: Tensor, foreign: Tensor, offsets: list[int], book: RangePartitionBook, what: str
) -> bool:
    """Whether types of local nodes or edges are those of their ids; inner ones lie in blocks."""
    for type_id, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if bool((types[start:stop] != type_id).any()):
            return False
    per_type = book.map_to_per_ntype if what == "node" else book.map_to_per_etype
    return bool((types[offsets[-1] :] == per_type(foreign)[0]).all())


def _are_distinct(ids: Tensor) -> bool:
    """Ours ascend; those of DGL's parts come as they were found."""
    ascends = bool((ids[1:] > ids[:-1]).all())
    return ascends or torch.unique(ids).numel() == ids.numel()


def _is_within(ids: Tensor, end: int) -> bool:
    low, high = torch.aminmax(ids) if ids.numel() else (0, -1)
    return int(low) >= 0 and int(high) < end


def verify_partition(part_config: str | os.PathLike[str], *, checksums: bool = True) -> list[str]:
    """Check a partition thoroughly.

    Loading checks the JSON and the structure of a part; this reads every byte of every file.
    Checked are the JSON against itself, the checksum of every file, that every part holds the
    nodes and edges that the maps say, each edge of the graph once as an inner edge, that copies of
    foreign nodes and edges agree with their owners', that the original ids are a permutation, and
    the statistics. ``graphshard verify`` also checks the description of the task beside the JSON.

    Of a partition that DGL wrote there are neither checksums nor statistics to compare with, and
    edges that leave a part need not be in it.

    Args:
        part_config: Path of the JSON that `partition_graph`, ours or DGL's, wrote.
        checksums: False skips the checksums, which need a pass over the features.

    Returns:
        What is wrong, one sentence each; empty if nothing is.
    """
    problems: list[str] = []
    try:
        config = read_config(part_config)
        config.check_format()
    except PartitionFormatError as error:
        return [str(error)]
    if checksums:
        problems += _check_digests(config)
    check = _Checker(config, problems)
    for part in range(config.num_parts):
        try:
            graph, node_feats, edge_feats, book, *_ = load_part(
                config, part, structure_digest=False
            )
            tensors = config.open_part(part, "part_graph").read()
            check_formats_agree(tensors, graph.adjacency())
        except ValueError as error:  # of which PartitionFormatError is one
            problems.append(f"part {part}: {error}")
            continue
        check.part(graph, book, node_feats, edge_feats)
    if not problems:  # these compare parts, so every part must make sense by itself
        check.copies()
        check.whole()
    return problems


def _check_digests(config: PartitionConfig) -> list[str]:
    problems = []
    for part in range(config.num_parts):
        for kind in PART_FILES:
            try:
                file = config.open_part(part, kind)
            except PartitionFormatError:
                continue  # reported when the part is loaded
            if file.blake2b is not None and digest_of(file.path) != file.blake2b:
                problems.append(f"part {part}: file {file.path} is damaged (its checksum differs)")
    return problems


class _Checker:
    """Collects problems, and what must be compared across parts."""

    def __init__(self, config: PartitionConfig, problems: list[str]) -> None:
        self.config = config
        self.problems = problems
        self.orig_ids: dict[str, list[IdArray]] = {}
        self.cut_edges = 0

    def _expect(self, part: int, condition: object, sentence: str) -> None:
        if not condition:
            self.problems.append(f"part {part}: {sentence}")

    def part(
        self, graph: Graph, book: RangePartitionBook, node_feats: TensorDict, edge_feats: TensorDict
    ) -> None:
        """Check one part by itself."""
        nodes, edges = _columns(graph.ndata), _columns(graph.edata)
        src, dst = (ids.numpy().astype(np.int64) for ids in graph.edges())
        self._check_edges(book, nodes, edges, src, dst)
        self._check_sizes(book.partid, nodes, edges)
        for kind, names, feats in (
            ("nodes of type", book.ntypes, node_feats),
            ("edges of", [etype_key(etype) for etype in book.canonical_etypes], edge_feats),
        ):
            for name in names:
                ids = feats[f"{name}/orig_id"].numpy()
                self.orig_ids.setdefault(f"{kind} {name}", []).append(ids)

    def _check_sizes(self, part: int, nodes: dict[str, IdArray], edges: dict[str, IdArray]) -> None:
        if self.config.stats is None:
            return
        said = self.config.stats.parts[part]
        inner_nodes, inner_edges = int(nodes["inner_node"].sum()), int(edges["inner_edge"].sum())
        num_bytes = sum(file.bytes or 0 for file in self.config.files[part].values())
        for what, number, actual in (
            ("inner nodes", said.inner_nodes, inner_nodes),
            ("halo nodes", said.halo_nodes, nodes["_ID"].size - inner_nodes),
            ("inner edges", said.inner_edges, inner_edges),
            ("outer edges", said.outer_edges, edges["_ID"].size - inner_edges),
            ("bytes", said.bytes, num_bytes),
        ):
            sentence = f"the statistics say {number} {what}, but it has {actual}"
            self._expect(part, number == actual, sentence)

    def _check_edges(
        self,
        book: RangePartitionBook,
        nodes: dict[str, IdArray],
        edges: dict[str, IdArray],
        src: IdArray,
        dst: IdArray,
    ) -> None:
        part, owners = book.partid, nodes["part_id"]
        ntypes = book.ntypes
        ends = np.array([(ntypes.index(s), ntypes.index(d)) for s, _, d in book.canonical_etypes])
        actual = np.stack([nodes["_TYPE"][src], nodes["_TYPE"][dst]], axis=1)
        same = np.array_equal(ends[edges["_TYPE"]], actual)
        self._expect(part, same, "the ends of an edge have other types than its own")
        edge_owners = book.eid2partid(torch.from_numpy(edges["_ID"])).numpy()
        same = np.array_equal(edge_owners, owners[dst])
        self._expect(part, same, "an edge is not owned by the part of its destination")
        inner = int(edges["inner_edge"].sum())
        order = np.stack([edges["_TYPE"][:inner], dst[:inner]])
        ordered = np.array_equal(np.lexsort(order[::-1]), np.arange(inner))
        ordered |= not self.config.edges_by_destination
        self._expect(part, ordered, "inner edges are not ordered by type and destination")
        self.cut_edges += int((owners[src[:inner]] != part).sum())

    def copies(self) -> None:
        """Check that outer edges join the nodes that their owner says, and that none is missing."""
        num_edges = self.config.book(0).num_edges()
        src_of = np.full(num_edges, -1, dtype=np.int64)
        dst_of = np.full(num_edges, -1, dtype=np.int64)
        leaving = np.zeros(self.config.num_parts, dtype=np.int64)
        for inner in (True, False):
            for part in range(self.config.num_parts):
                graph, *_ = load_part(self.config, part, load_feats=False, structure_digest=False)
                nodes, edges = _columns(graph.ndata), _columns(graph.edata)
                mine = (edges["inner_edge"] == 1) == inner
                ends = [ids.numpy()[mine] for ids in graph.edges()]
                src, dst = (nodes["_ID"][ids] for ids in ends)
                ids = edges["_ID"][mine]
                owners = nodes["part_id"][ends[0]]
                if inner:
                    src_of[ids], dst_of[ids] = src, dst
                    leaving += np.bincount(owners[owners != part], minlength=leaving.shape[0])
                    continue
                same = np.array_equal(src_of[ids], src) and np.array_equal(dst_of[ids], dst)
                self._expect(part, same, "an outer edge joins other nodes than at its owner")
                if same and self.config.stats is not None and self.config.halo_hops:
                    complete = (owners == part).sum() == leaving[part]
                    self._expect(part, complete, "an edge that leaves it is missing")

    def whole(self) -> None:
        """Check what only all parts together can show."""
        for what, pieces in self.orig_ids.items():
            ids = np.concatenate(pieces)
            in_range = bool(((ids >= 0) & (ids < ids.shape[0])).all())
            if not in_range or bool((np.bincount(ids, minlength=ids.shape[0]) != 1).any()):
                self.problems.append(f"the original ids of the {what} are not a permutation")
        stats = self.config.stats
        if stats is not None and stats.edge_cut != self.cut_edges:
            self.problems.append(
                f"the statistics say that {stats.edge_cut} edges are cut, but {self.cut_edges} are"
            )


def _columns(data: Mapping[str, Tensor]) -> dict[str, IdArray]:
    return {name: data[name].numpy().astype(np.int64) for name in data.keys()}  # noqa: SIM118
