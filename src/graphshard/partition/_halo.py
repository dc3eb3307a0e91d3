# SPDX-License-Identifier: Apache-2.0
"""The local graph of one part: its own nodes and edges, and a rim of foreign ones.

[Note: what a part holds]
*Inner* nodes are those the part owns, *inner* edges all in-edges of inner nodes. Around them lie
*halo* nodes, which other parts own, and *outer* edges:

* the source of every inner edge is there (an edge needs both ends);
* with ``num_hops`` from 1 up, every edge from an inner node to a foreign one, so that inner nodes
  show their true out-degree;
* with ``num_hops`` from 2 up, the in-edges of the halo nodes found so far, ``num_hops - 1`` times.

``num_hops=0`` keeps inner edges and their sources, nothing else. Local ids: inner nodes in the
order of their new ids, then halo nodes in the order of theirs; edges likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ._relabel import IdArray, Relabeling

_NO_IDS: IdArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class LocalPart:
    """Structure of one part, in local ids.

    Args:
        node_ids: Homogenised id of each local node.
        node_types: Type number of each local node.
        node_parts: Owner of each local node.
        num_inner_nodes: The first so many local nodes are inner.
        edge_ids: Homogenised id of each local edge.
        edge_types: Relation number of each local edge.
        num_inner_edges: The first so many local edges are inner.
        src: Local id of each edge's source.
        dst: Local id of each edge's destination.
    """

    node_ids: Tensor
    node_types: Tensor
    node_parts: Tensor
    num_inner_nodes: int
    edge_ids: Tensor
    edge_types: Tensor
    num_inner_edges: int
    src: Tensor
    dst: Tensor

    @property
    def num_nodes(self) -> int:
        return len(self.node_ids)

    @property
    def num_edges(self) -> int:
        return len(self.edge_ids)


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
    """Cut edges of every relation; and how many enter each part.

    Returns:
        One `CutEdges` per relation, and ``[num_parts]`` the cut edges into each part.
    """
    num_parts = relabeling.num_parts
    entering = np.zeros(num_parts, dtype=np.int64)
    ends = np.array([relabeling.node_range(part)[1] for part in range(num_parts)])
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
) -> LocalPart:
    """Build the local graph of one part; see the note on the module.

    Args:
        relabeling: New ids.
        part: The part.
        num_hops: How far the halo reaches, from 0 up.
        cut_edges: From `find_cut_edges`.
    """
    book = relabeling.book
    num_relations = len(relabeling.relations)
    first, last = relabeling.node_range(part)
    inner = [slice(*relabeling.edge_range(part, relation)) for relation in range(num_relations)]
    sources = [edges.sources[own] for edges, own in zip(relabeling.relations, inner, strict=True)]
    halo_mark = np.zeros(relabeling.source.num_nodes, dtype=bool)
    frontier = _mark_new(halo_mark, sources, first, last)
    outer = [_NO_IDS] * num_relations
    if num_hops >= 1:
        outer = [cut.leaving(part) for cut in cut_edges]
        for _ in range(num_hops - 1):
            reached = _in_edges(relabeling, frontier)
            found = [_sources(relabeling, r, reached[r]) for r in range(num_relations)]
            outer = [_union(outer[r], reached[r]) for r in range(num_relations)]
            frontier = _mark_new(halo_mark, found, first, last)
    outer_src = [_sources(relabeling, r, outer[r]) for r in range(num_relations)]
    outer_dst = [_destinations(relabeling, r, outer[r]) for r in range(num_relations)]
    _mark_new(halo_mark, outer_src + outer_dst, first, last)
    node_ids = np.concatenate([np.arange(first, last), np.flatnonzero(halo_mark)])
    local = torch.empty(relabeling.source.num_nodes, dtype=torch.int64)
    local[torch.from_numpy(node_ids)] = torch.arange(node_ids.shape[0])

    outer_ids = [_homogenised_edges(relabeling, r, outer[r]) for r in range(num_relations)]
    order = np.argsort(_join(outer_ids), kind="stable")
    num_inner_edges = sum(ids.shape[0] for ids in sources)
    num_edges = num_inner_edges + order.shape[0]
    edge_ids, edge_types, src, dst = (
        torch.empty(num_edges, dtype=dtype)
        for dtype in (torch.int64, torch.int32, torch.int64, torch.int64)
    )
    # Each column of the edges is as large as all else together, so it is filled in place.
    edge_start = sum(map(sum, relabeling.edge_sizes[:part]))
    torch.arange(edge_start, edge_start + num_inner_edges, out=edge_ids[:num_inner_edges])
    stop = 0
    for relation, ids in enumerate(sources):
        place = slice(stop, stop := stop + ids.shape[0])
        edge_types[place] = relation
        torch.index_select(local, 0, torch.from_numpy(ids), out=src[place])
        dst[place] = _inner_destinations(relabeling, part, relation)
    outer_types = np.repeat(np.arange(num_relations), [ids.shape[0] for ids in outer])
    for column, outer_column in (
        (edge_ids, _join(outer_ids)),
        (edge_types, outer_types),
        (src, local.numpy()[_join(outer_src)]),
        (dst, local.numpy()[_join(outer_dst)]),
    ):
        column[num_inner_edges:] = torch.from_numpy(outer_column[order])
    node_types, _ = book.map_to_per_ntype(node_ids)
    return LocalPart(
        node_ids=torch.from_numpy(node_ids),
        node_types=node_types.to(torch.int32),
        node_parts=book.nid2partid(node_ids),
        num_inner_nodes=last - first,
        edge_ids=edge_ids,
        edge_types=edge_types,
        num_inner_edges=num_inner_edges,
        src=src,
        dst=dst,
    )


def _join(pieces: list[IdArray]) -> IdArray:
    return np.concatenate([_NO_IDS, *pieces])


def _sources(relabeling: Relabeling, relation: int, positions: IdArray) -> IdArray:
    """New homogenised source of edges given by new per-type id."""
    ids: IdArray = relabeling.relations[relation].sources[positions].astype(np.int64)
    return ids


def _inner_destinations(relabeling: Relabeling, part: int, relation: int) -> Tensor:
    """Local id of the destination of each edge of one relation that a part owns."""
    sizes, type_id = relabeling.node_sizes, relabeling.source.dst_type[relation]
    start = sum(row[type_id] for row in sizes[:part])
    stop = start + sizes[part][type_id]
    before = sum(sizes[part][:type_id])
    in_degrees = np.diff(relabeling.relations[relation].indptr[start : stop + 1])
    local = torch.arange(before, before + stop - start)
    return local.repeat_interleave(torch.from_numpy(in_degrees))


def _destinations(relabeling: Relabeling, relation: int, positions: IdArray) -> IdArray:
    """New homogenised destination of edges given by new per-type id."""
    source = relabeling.source
    per_type = np.searchsorted(relabeling.relations[relation].indptr, positions, side="right") - 1
    ntype = source.ntypes[source.dst_type[relation]]
    homogenised: IdArray = relabeling.book.map_to_homo_nid(per_type, ntype).numpy()
    return homogenised


def _homogenised_edges(relabeling: Relabeling, relation: int, positions: IdArray) -> IdArray:
    etype = relabeling.source.canonical_etypes[relation]
    ids: IdArray = relabeling.book.map_to_homo_eid(positions, etype).numpy()
    return ids


def _in_edges(relabeling: Relabeling, nodes: IdArray) -> list[IdArray]:
    """Per relation, the new per-type ids of the edges into ``nodes`` (homogenised, ascending)."""
    types, per_type = (ids.numpy() for ids in relabeling.book.map_to_per_ntype(nodes))
    found = []
    for relation, type_id in zip(relabeling.relations, relabeling.source.dst_type, strict=True):
        mine = per_type[types == type_id]
        begins, counts = relation.indptr[mine], np.diff(relation.indptr)[mine]
        skipped = np.cumsum(counts) - counts
        found.append(np.arange(counts.sum()) + np.repeat(begins - skipped, counts))
    return found


def _mark_new(
    mark: npt.NDArray[np.bool_], ids: Sequence[npt.NDArray[np.integer[Any]]], first: int, last: int
) -> IdArray:
    """Mark ids outside ``[first, last)``; those that were not marked before, ascending."""
    found = np.zeros_like(mark)
    for some in ids:
        found[some] = True
    found[first:last] = False
    found &= ~mark
    mark |= found
    return np.flatnonzero(found)


def _union(some: IdArray, others: IdArray) -> IdArray:
    """IdArray of either, each once, ascending."""
    joined = np.sort(np.concatenate([some, others]))
    return joined[np.diff(joined, prepend=-1) > 0]
