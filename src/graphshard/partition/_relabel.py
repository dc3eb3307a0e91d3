# SPDX-License-Identifier: Apache-2.0
"""Relabelling: new ids under which every part owns one range of nodes and one of edges, per type.

Nodes are ordered by (part, type, place in the part). An edge goes where its destination goes;
edges are ordered by (part, type, destination, original id). So the in-edges of a node keep the
order they had in the original graph, and a relation's edges, in their new order, are already
grouped by destination: one pointer array per relation is all that random access needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..ops import Adjacency
from ._book import RangePartitionBook
from ._source import GraphSource

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Relation:
    """The edges of one relation in their new order.

    Args:
        old_ids: Tensor ``[num_edges]``: the original id of each new per-type edge id.
        sources: ``[num_edges]``: the new homogenised id of each edge's source.
        indptr: ``[num_dst + 1]``: where the in-edges of each new per-type destination begin.
    """

    old_ids: Tensor
    sources: npt.NDArray[np.integer[Any]]
    indptr: IdArray


@dataclass(frozen=True)
class Relabeling:
    """Old and new ids of a graph.

    Args:
        source: The graph.
        node_sizes: Nodes ``[part][type]``.
        edge_sizes: Edges ``[part][relation]``.
        old_node_ids: Per type, tensor ``[num_nodes]``: original id of each new per-type id.
        relations: The edges.
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
        before = sum(row[relation] for row in self.edge_sizes[:part])
        return before, before + self.edge_sizes[part][relation]


def relabel(
    source: GraphSource, parts: npt.NDArray[np.integer[Any]], order: IdArray, num_parts: int
) -> Relabeling:
    """Number nodes and edges anew.

    Args:
        source: The graph.
        parts: ``[num_nodes]``, part of each node, in homogenised order.
        order: ``[num_nodes]``: the old homogenised id of each new one; by part, then by type.
        num_parts: Number of parts.
    """
    num_types = len(source.ntypes)
    offsets = source.offsets
    node_sizes = np.zeros((num_parts, num_types), dtype=np.int64)
    for type_id in range(num_types):
        mine = parts[offsets[type_id] : offsets[type_id + 1]]
        node_sizes[:, type_id] = np.bincount(mine, minlength=num_parts)
    starts = _block_starts(node_sizes)
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
        made = _by_destination(new_src, per_type[dst], source.num_nodes, per_type.shape[0])
        del src, dst, new_src
        ends = np.cumsum(node_sizes[:, type_id])
        edge_sizes[:, relation] = np.diff(made.indptr[ends], prepend=0)
        relations.append(made)
    return Relabeling(
        source,
        node_sizes.tolist(),
        edge_sizes.tolist(),
        old_node_ids,
        relations,
        RangePartitionBook(
            0,
            num_parts,
            block_map(source.ntypes, node_sizes),
            block_map(source.canonical_etypes, edge_sizes),
            {name: place for place, name in enumerate(source.ntypes)},
            {name: place for place, name in enumerate(source.canonical_etypes)},
        ),
    )


def block_map(names: list[Any], sizes: npt.NDArray[np.int64]) -> dict[Any, list[list[int]]]:
    """``{type: [[start, stop] per part]}``, as partition books and files have it."""
    starts = _block_starts(sizes)
    return {
        name: np.stack([starts[:, place], starts[:, place] + sizes[:, place]], axis=1).tolist()
        for place, name in enumerate(names)
    }


def _block_starts(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """First homogenised id of each block [part, type]."""
    ends = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
    return ends - sizes


def _by_destination(src: Tensor, dst: Tensor, num_nodes: int, num_dst: int) -> Relation:
    """Group edges by new destination, by original id within one; linear in nodes and edges."""
    indptr, sources, old_ids = Adjacency(src, dst, num_nodes, num_dst, check=False).csc()
    if old_ids is None:
        old_ids = torch.arange(src.shape[0], dtype=src.dtype)
    return Relation(old_ids, sources.numpy(), indptr.numpy().astype(np.int64))
