# SPDX-License-Identifier: Apache-2.0
"""New ids for the nodes and edges of a graph, and the local graph of each part.

Nodes are ordered by (part, type, place in the part), edges by (part, type, destination, original
id), so that a relation's edges are grouped by destination: one pointer array per relation is all
that random access needs.

*Inner* nodes are those that a part owns, *inner* edges all their in-edges. Around them lie *halo*
nodes, which other parts own, and *outer* edges. With ``num_hops`` from 1 up these are the edges
from an inner node to a foreign one, and from 2 up the in-edges of the halo nodes so far, ``num_hops
- 1`` times. Local ids: inner nodes in the order of their new ids, then halo nodes in the order of
theirs; edges likewise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._base.kernels import num_threads
from .._base.typing import DEFAULT_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..graph import Graph
from ..ops import Adjacency
from ._book import RangePartitionBook
from ._edge_files import kernels
from ._metis import IntArray
from .checked_files import PiecewiseRows, Rows, RowSource, etype_key, identity_of
from .structure import PartStructure, id_dtype

STRUCTURE_FIELDS = frozenset({"_ID", "_TYPE", "inner_node", "inner_edge"})
"""Fields that describe where a graph came from; as DGL does, they are not taken for features."""


IdArray = npt.NDArray[np.int64]

BATCH_EDGES = 1 << 21


class GraphSource:
    """A graph to be partitioned; nothing is copied and the graph is never written to."""

    def __init__(self, graph: Graph) -> None:
        if not isinstance(graph, Graph):
            raise TypeError(
                f"g must be a graphshard Graph (got {type(graph).__name__}); build one with "
                "graphshard.graph or graphshard.heterograph"
            )
        self.graph = graph
        self.ntypes: list[str] = list(graph.ntypes)
        self.canonical_etypes: list[CanonicalEType] = list(graph.canonical_etypes)
        check_type_names(self.ntypes, self.canonical_etypes)
        self.node_counts = [graph.num_nodes(ntype) for ntype in self.ntypes]
        self.edge_counts = [graph.num_edges(etype) for etype in self.canonical_etypes]
        self.src_type = [self.ntypes.index(src) for src, _, _ in self.canonical_etypes]
        self.dst_type = [self.ntypes.index(dst) for _, _, dst in self.canonical_etypes]
        self.idtype: torch.dtype = graph.idtype
        self.num_nodes, self.num_edges = sum(self.node_counts), sum(self.edge_counts)
        #: First homogenised id of each node type, and the number of nodes at the end.
        self.offsets = list(itertools.accumulate(self.node_counts, initial=0))

    def edges(self, relation: int) -> tuple[Tensor, Tensor]:
        """(source, destination) of each edge, per-type ids, on the CPU, in edge id order."""
        src, dst = self.graph.adjacency(self.canonical_etypes[relation]).coo()
        return src.cpu(), dst.cpu()

    def edge_batches(self, relation: int) -> Iterator[tuple[IdArray, IdArray]]:
        """The same as arrays, some edges at a time."""
        src, dst = self.edges(relation)
        for first in range(0, len(src), BATCH_EDGES):
            some = slice(first, first + BATCH_EDGES)
            yield src[some].numpy(), dst[some].numpy()

    def identity(self) -> dict[str, Any]:
        """Numbers that depend on every edge, in order, and on features; needs compiled kernels."""
        numbers = []
        for relation in range(len(self.canonical_etypes)):
            done, total = 0, 0
            for src, dst in self.edge_batches(relation):
                total += kernels().hash_edges(dst, src, 0, 0, done, num_threads())[0]
                done += len(src)
            numbers.append(total % 2**64)
        frames = [self.node_features(type_id) for type_id in range(len(self.ntypes))]
        frames += [self.edge_features(relation) for relation in range(len(self.canonical_etypes))]
        features = [[name, *identity_of(frame[name])] for frame in frames for name in sorted(frame)]
        return {"edges": numbers, "features": features}

    def homogenised_edges(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same for every relation, with ids that count all nodes, type after type."""
        for relation, types in enumerate(zip(self.src_type, self.dst_type, strict=True)):
            src, dst = self.edges(relation)
            first, second = self.offsets[types[0]], self.offsets[types[1]]
            yield (src.long() + first if first else src, dst.long() + second if second else dst)

    def in_degrees(self) -> Tensor:
        """Number of edges, of any relation, into each node: int64, in homogenised order."""
        degrees = torch.zeros(self.num_nodes, dtype=torch.int64)
        for relation, type_id in enumerate(self.dst_type):
            _, dst = self.edges(relation)
            counts = torch.bincount(dst, minlength=self.node_counts[type_id])
            degrees[self.offsets[type_id] : self.offsets[type_id + 1]] += counts
        return degrees

    def node_features(self, type_id: int) -> dict[str, Tensor]:
        data = self.graph.nodes[self.ntypes[type_id]].data
        return {name: data[name] for name in data.keys() if name not in STRUCTURE_FIELDS}  # noqa: SIM118

    def edge_features(self, relation: int) -> dict[str, Tensor]:
        data = self.graph.edges[self.canonical_etypes[relation]].data
        return {name: data[name] for name in data.keys() if name not in STRUCTURE_FIELDS}  # noqa: SIM118

    def node_feature_rows(self, type_id: int, ids: Tensor) -> Mapping[str, RowSource]:
        """Features of some nodes of a type, gathered when they are written."""
        return {name: Rows(item, ids) for name, item in self.node_features(type_id).items()}

    def edge_feature_rows(
        self, relation: int, ids: Callable[[], Iterator[Tensor]], count: int
    ) -> Mapping[str, RowSource]:
        """Likewise of some edges of a relation, whose ids come piece by piece."""
        features = self.edge_features(relation)
        return {name: PiecewiseRows(item, ids, count) for name, item in features.items()}


def check_type_names(ntypes: list[str], canonical_etypes: list[CanonicalEType]) -> None:
    """Raise unless files can name the types apart."""
    by_key: dict[str, CanonicalEType] = {}
    for etype in canonical_etypes:
        other = by_key.setdefault(etype_key(etype), etype)
        if other != etype:
            raise ValueError(
                f"two relations must differ in source:relation:destination, as files name them "
                f"(got {other} and {etype}); rename one"
            )
    if len(ntypes) > 1 and DEFAULT_NTYPE in ntypes:
        raise ValueError(
            f"'{DEFAULT_NTYPE}' is reserved for the only node type of a graph, because partition "
            f"books take it for all types at once (got {ntypes}); rename it"
        )
    if len(canonical_etypes) > 1 and DEFAULT_ETYPE in (name for _, name, _ in canonical_etypes):
        raise ValueError(
            f"'{DEFAULT_ETYPE}' is reserved for the only relation of a graph, because partition "
            f"books take it for all relations at once (got {canonical_etypes}); rename it"
        )


@dataclass(frozen=True)
class Relation:
    """The edges of one relation in their new order.

    Args:
        old_ids: Tensor ``[num_edges]``: the original id of each new per-type edge id.
        sources: ``[num_edges]``: the new homogenised id of each edge's source.
        indptr: ``[num_dst + 1]``: where the in-edges of each new per-type destination begin.
    """

    old_ids: Tensor
    sources: IntArray
    indptr: IdArray


@dataclass(frozen=True)
class Relabeling:
    """Old and new ids of a graph.

    Args:
        node_sizes: Nodes ``[part][type]``.
        edge_sizes: Edges ``[part][relation]``.
        old_node_ids: Per type, tensor ``[num_nodes]``: original id of each new per-type id.
        book: The partition book (of part 0; the maps are the same for all).
    """

    source: GraphSource
    node_sizes: list[list[int]]
    edge_sizes: list[list[int]]
    old_node_ids: list[Tensor]
    relations: list[Relation]
    book: RangePartitionBook

    @property
    def num_parts(self) -> int:
        return len(self.node_sizes)

    def node_range(self, part: int) -> tuple[int, int]:
        """Homogenised ids of the nodes that a part owns: ``[start, stop)``."""
        before = sum(map(sum, self.node_sizes[:part]))
        return before, before + sum(self.node_sizes[part])

    def edge_range(self, part: int, relation: int) -> tuple[int, int]:
        """Per-type ids of the edges of one relation that a part owns: ``[start, stop)``."""
        before = sum(map(itemgetter(relation), self.edge_sizes[:part]))
        return before, before + self.edge_sizes[part][relation]


def relabel(source: GraphSource, parts: IntArray, order: IdArray, num_parts: int) -> Relabeling:
    """Number nodes and edges anew.

    Args:
        parts: ``[num_nodes]``, part of each node, in homogenised order.
        order: ``[num_nodes]``: the old homogenised id of each new one; by part, then by type.
    """
    num_types = len(source.ntypes)
    offsets = source.offsets
    node_sizes = np.zeros((num_parts, num_types), dtype=np.int64)
    for type_id in range(num_types):
        mine = parts[offsets[type_id] : offsets[type_id + 1]]
        node_sizes[:, type_id] = np.bincount(mine, minlength=num_parts)
    # First homogenised id of each block [part, type].
    starts = np.cumsum(node_sizes.reshape(-1)).reshape(node_sizes.shape) - node_sizes
    old_node_ids = []
    for type_id in range(num_types):
        blocks = [
            order[starts[part, type_id] : starts[part, type_id] + node_sizes[part, type_id]]
            for part in range(num_parts)
        ]
        old_node_ids.append(torch.from_numpy(np.concatenate(blocks) - offsets[type_id]))
    # 32 bits where they do: half the memory, and twice as many ids in a cache.
    largest = max(source.num_nodes, source.num_edges)
    dtype = torch.int32 if largest < 2**31 else torch.int64
    new_of_old = torch.empty(source.num_nodes, dtype=dtype)
    new_of_old[torch.from_numpy(order)] = torch.arange(source.num_nodes, dtype=dtype)
    edge_sizes = np.zeros((num_parts, len(source.canonical_etypes)), dtype=np.int64)
    relations = []
    for relation, type_id in enumerate(source.dst_type):
        per_type = torch.empty(source.node_counts[type_id], dtype=dtype)
        per_type[old_node_ids[type_id]] = torch.arange(per_type.shape[0], dtype=dtype)
        src, dst = source.edges(relation)
        new_src = new_of_old[offsets[source.src_type[relation]] :][src]
        new_dst, counts = per_type[dst], (source.num_nodes, per_type.shape[0])
        # By new destination, by original id within one; linear in nodes and edges.
        indptr, sources, old_ids = Adjacency(new_src, new_dst, *counts, check=False).csc()
        if old_ids is None:
            old_ids = torch.arange(new_src.shape[0], dtype=dtype)
        made = Relation(old_ids, sources.numpy(), indptr.numpy().astype(np.int64))
        del src, dst, new_src, new_dst
        ends = np.cumsum(node_sizes[:, type_id])
        edge_sizes[:, relation] = np.diff(made.indptr[ends], prepend=0)
        relations.append(made)
    sizes = node_sizes.tolist(), edge_sizes.tolist()
    book = RangePartitionBook.of_sizes(0, source.ntypes, source.canonical_etypes, *sizes)
    return Relabeling(source, *sizes, old_node_ids, relations, book)


_NO_IDS: IdArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class CutEdges:
    """The edges of one relation whose ends lie in different parts, by the part of their source.

    Args:
        positions: Their per-type ids, the edges from part 0 first, ascending within each part.
        starts: ``[num_parts + 1]``: where the edges from each part begin.
    """

    positions: IdArray
    starts: IdArray

    def leaving(self, part: int) -> IdArray:
        return self.positions[self.starts[part] : self.starts[part + 1]]


def find_cut_edges(relabeling: Relabeling) -> tuple[list[CutEdges], npt.NDArray[np.int64]]:
    """Cut edges of every relation; and how many enter each part."""
    num_parts = relabeling.num_parts
    entering = np.zeros(num_parts, dtype=np.int64)
    ends = np.asarray(relabeling.node_sizes).sum(axis=1).cumsum()
    cuts = []
    for relation in range(len(relabeling.relations)):
        positions, owners = [], []
        for part in range(num_parts):
            start, stop = relabeling.edge_range(part, relation)
            src = relabeling.relations[relation].sources[start:stop]
            first, last = relabeling.node_range(part)
            foreign = np.flatnonzero((src < first) | (src >= last))
            entering[part] += foreign.shape[0]
            positions.append(foreign + start)
            # Sorting numbers of 16 bits takes linear time.
            small = np.int16 if num_parts < 2**15 else np.int64
            owners.append(np.searchsorted(ends, src[foreign], side="right").astype(small))
        all_owners = np.concatenate(owners)
        order = np.argsort(all_owners, kind="stable")
        counts = np.bincount(all_owners, minlength=num_parts)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        cuts.append(CutEdges(np.concatenate(positions)[order], starts))
    return cuts, entering


def cut_part(
    relabeling: Relabeling, part: int, num_hops: int, cut_edges: list[CutEdges]
) -> PartStructure:
    """Build the local graph of one part; see the note on the module."""
    sizes = relabeling.node_sizes, relabeling.edge_sizes
    source = relabeling.source
    book = RangePartitionBook.of_sizes(part, source.ntypes, source.canonical_etypes, *sizes)
    num_relations = len(relabeling.relations)
    first, last = relabeling.node_range(part)
    inner = [slice(*relabeling.edge_range(part, relation)) for relation in range(num_relations)]
    sources = [edges.sources[own] for edges, own in zip(relabeling.relations, inner, strict=True)]
    halo_mark = np.zeros(source.num_nodes, dtype=bool)
    frontier = _mark_new(halo_mark, sources, first, last)
    outer = [_NO_IDS] * num_relations
    if num_hops >= 1:
        outer = [cut.leaving(part) for cut in cut_edges]
        for _ in range(num_hops - 1):
            reached = _in_edges(relabeling, frontier)
            sources_of_reached = [_sources(relabeling, r, reached[r]) for r in range(num_relations)]
            outer = [_union(outer[r], reached[r]) for r in range(num_relations)]
            frontier = _mark_new(halo_mark, sources_of_reached, first, last)
    outer_src = [_sources(relabeling, r, outer[r]) for r in range(num_relations)]
    outer_dst = [_destinations(relabeling, r, outer[r]) for r in range(num_relations)]
    _mark_new(halo_mark, outer_src + outer_dst, first, last)
    halo = np.flatnonzero(halo_mark)
    num_nodes = last - first + len(halo)
    dtype = id_dtype(num_nodes)
    local = torch.empty(source.num_nodes, dtype=dtype)
    torch.arange(last - first, out=local[first:last])
    local[torch.from_numpy(halo)] = torch.arange(last - first, num_nodes, dtype=dtype)

    outer_ids = _join(
        [
            book.map_to_homo_eid(ids, etype).numpy()
            for ids, etype in zip(outer, source.canonical_etypes, strict=True)
        ]
    )
    order = np.argsort(outer_ids, kind="stable")
    num_inner_edges = sum(ids.shape[0] for ids in sources)
    num_edges = num_inner_edges + order.shape[0]
    src, dst = torch.empty(num_edges, dtype=dtype), torch.empty(num_edges, dtype=dtype)
    # Both are as large as all else together, so they are filled in place.
    stop = 0
    for relation, ids in enumerate(sources):
        span = slice(stop, stop := stop + ids.shape[0])
        torch.index_select(local, 0, torch.from_numpy(ids), out=src[span])
        dst[span] = _inner_destinations(relabeling, part, relation, dtype)
    for column, ends in ((src, outer_src), (dst, outer_dst)):
        column[num_inner_edges:] = local[torch.from_numpy(_join(ends)[order])]
    adjacency = Adjacency(src, dst, num_nodes, num_nodes, check=False)
    outer_in_order = torch.from_numpy(outer_ids[order])
    return PartStructure(book, adjacency, torch.from_numpy(halo), outer_in_order, source.idtype)


def _join(pieces: list[IdArray]) -> IdArray:
    return np.concatenate([_NO_IDS, *pieces])


def _sources(relabeling: Relabeling, relation: int, positions: IdArray) -> IdArray:
    """New homogenised source of edges given by new per-type id."""
    return relabeling.relations[relation].sources[positions].astype(np.int64)


def _inner_destinations(
    relabeling: Relabeling, part: int, relation: int, dtype: torch.dtype
) -> Tensor:
    """Local id of the destination of each edge of one relation that a part owns."""
    sizes, type_id = relabeling.node_sizes, relabeling.source.dst_type[relation]
    start = sum(row[type_id] for row in sizes[:part])
    stop = start + sizes[part][type_id]
    before = sum(sizes[part][:type_id])
    in_degrees = np.diff(relabeling.relations[relation].indptr[start : stop + 1])
    local = torch.arange(before, before + stop - start, dtype=dtype)
    return local.repeat_interleave(torch.from_numpy(in_degrees))


def _destinations(relabeling: Relabeling, relation: int, positions: IdArray) -> IdArray:
    """New homogenised destination of edges given by new per-type id."""
    source = relabeling.source
    per_type = np.searchsorted(relabeling.relations[relation].indptr, positions, side="right") - 1
    ntype = source.ntypes[source.dst_type[relation]]
    return relabeling.book.map_to_homo_nid(per_type, ntype).numpy()


def _in_edges(relabeling: Relabeling, nodes: IdArray) -> list[IdArray]:
    """Per relation, the new per-type ids of the edges into ``nodes`` (homogenised, ascending)."""
    types, per_type = (ids.numpy() for ids in relabeling.book.map_to_per_ntype(nodes))
    positions = []
    for relation, type_id in zip(relabeling.relations, relabeling.source.dst_type, strict=True):
        mine = per_type[types == type_id]
        begins, counts = relation.indptr[mine], np.diff(relation.indptr)[mine]
        skipped = np.cumsum(counts) - counts
        positions.append(np.arange(counts.sum()) + np.repeat(begins - skipped, counts))
    return positions


def _mark_new(
    mark: npt.NDArray[np.bool_], ids: Sequence[IntArray], first: int, last: int
) -> IdArray:
    """Mark ids outside ``[first, last)``; those that were not marked before, ascending."""
    is_new = np.zeros_like(mark)
    for some in ids:
        is_new[some] = True
    is_new[first:last] = False
    is_new &= ~mark
    mark |= is_new
    return np.flatnonzero(is_new)


def _union(some: IdArray, others: IdArray) -> IdArray:
    """Ids of either, each once, ascending."""
    joined = np.sort(np.concatenate([some, others]))
    return joined[np.diff(joined, prepend=-1) > 0]
