# SPDX-License-Identifier: Apache-2.0
"""ReplicatedGraphStore: every host maps the whole graph once, and draws send nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..._base.ranges import RangeMap
from ..._base.typing import CanonicalEType
from ...comm import agree, share_error
from ...comm.collectives import all_gather
from ...comm.transport import Hosts, SharedArray, share_arrays
from ...fullbatch import GraphShardManager
from ._collective import ShardedGraphStore
from ._edges import (
    LACKS_LABOR_IDS,
    LACKS_OUT_EDGES,
    LACKS_WEIGHTS,
    EdgeLists,
    ListKey,
    OwnEdges,
    ends,
    sampled,
)
from ._graph_store import DrawOptions, NeighborRequest, SampledNeighbors


class ReplicatedGraphStore(ShardedGraphStore):
    """A graph that each host holds whole, in memory that its ranks share; made by `of`.

    The parts follow one another as one compressed structure over global ids, so a draw is what
    it is on a graph in one process. In-edges are there from the start. What else a draw may need
    (out-edges, weights by position, original ids of neighbours for LABOR) is put beside them by the
    first draw that needs it, which is therefore collective; so is the first draw after edge weights
    were set anew, which every rank must then do.

    What the ranks know of their own edges is replaced, as soon as it is shared, by what the host
    has of all edges.

    Args:
        edges: Edges of this rank's nodes.
        hosts: Which ranks share memory.
        directory: As for `of`.
        idtype: Type of the ids that it takes and gives.
    """

    def __init__(
        self,
        edges: OwnEdges,
        hosts: Hosts,
        directory: str | os.PathLike[str] | None,
        idtype: torch.dtype,
    ) -> None:
        super().__init__(edges, idtype)
        self._hosts, self._directory = hosts, directory
        ranges, own_ids = self.ownership.ranges, edges.original_ids
        ids = [SharedArray(own_ids[t], ranges[t].starts) for t in self.ntypes]
        edges.original_ids = dict(zip(self.ntypes, self._share(ids), strict=True))
        self._share_lists(list(edges.lists))

    @classmethod
    def of(
        cls, manager: GraphShardManager, *, directory: str | os.PathLike[str] | None = None
    ) -> ReplicatedGraphStore:
        """The store of a sharded graph; every rank must call.

        Args:
            manager: This rank's part of a full graph.
            directory: Where shared files have a name for a moment; by default in shared memory, or
                where temporary files go if that is too small.

        Raises:
            ValueError: The graph is a message flow graph.
            OSError: Some host has no room for it; on all ranks.
        """
        edges = OwnEdges(manager)
        return cls(edges, Hosts.find(edges.state, directory), directory, manager.idtype)

    @property
    def num_bytes(self) -> int:
        """Bytes that one host holds."""
        edges = self._edges
        arrays = [*edges.original_ids.values(), *edges.labor_ids.values(), *edges.weights.placed()]
        for lists in edges.lists.values():
            arrays += [a for a in (lists.indptr, lists.neighbors, lists.eids) if a is not None]
        return sum(array.numel() * array.element_size() for array in arrays)

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        """Draw for each request; sends nothing but on first use.

        See `GraphStore.sample_neighbors`.

        Raises:
            ValueError: Weights that are missing, or no weights; on all ranks, where it is found
                on first use.
        """
        self._prepare([request.etype for request in requests], options)
        draw, absent = self._edges.draw, excluded or {}
        return [
            sampled(draw(request, request.nodes, options, absent.get(request.etype)), self.idtype)
            for request in requests
        ]

    def _prepare(self, etypes: Sequence[CanonicalEType], options: DrawOptions) -> None:
        """Put what some draw needs for the first time where all ranks of a host read it."""
        edges, edge_dir = self._edges, options.edge_dir
        lacking, error = edges.lacking(etypes, options)
        if not lacking:
            return
        share_error(error, self.group)
        dtypes = [edges.weights.dtype(etype, options) for etype in etypes]
        agree(f"{options} {dtypes}", "what sampling needs first", self.group)
        keys: list[ListKey] = [(etype, edge_dir) for etype in etypes]
        if lacking & LACKS_OUT_EDGES:
            edges.prepare(etypes, options, LACKS_OUT_EDGES)
            self._share_lists(keys)
        own = {key: slice(*self._edge_starts(key)[edges.state.rank :][:2]) for key in keys}
        if lacking & LACKS_LABOR_IDS:
            ids = [
                edges.original_ids[ends(*key)[1]].index_select(0, edges.lists[key].neighbors[at])
                for key, at in own.items()
            ]
            edges.labor_ids.update(zip(keys, self._share_columns(keys, ids), strict=True))
        if lacking & LACKS_WEIGHTS:
            weights = []
            for key, at in own.items():
                eids = edges.lists[key].eids
                own_eids = None if eids is None else eids[at]
                weights.append(edges.placed_weights(key[0], options, own_eids))
            for etype, placed in zip(etypes, self._share_columns(keys, weights), strict=True):
                edges.keep_weights(etype, options, placed)

    def _share(self, arrays: Sequence[SharedArray]) -> list[Tensor]:
        return share_arrays(self._state, self._hosts, arrays, whole=True, directory=self._directory)

    def _share_columns(self, keys: Sequence[ListKey], own: Sequence[Tensor]) -> list[Tensor]:
        """Columns of all edges by position, from those of this rank's edges."""
        starts = map(self._edge_starts, keys)
        return self._share([SharedArray(c, s) for c, s in zip(own, starts, strict=True)])

    def _edge_starts(self, key: ListKey) -> list[int]:
        """First position of each rank's edges, and the number of edges."""
        near = self.ownership.ranges[ends(*key)[0]]
        starts: list[int] = self._edges.lists[key].indptr[list(near.starts)].tolist()
        return starts

    def _share_lists(self, keys: Sequence[ListKey]) -> None:
        """Replace lists of this rank's edges by those of all."""
        rank, wire = self._state.rank, self.ownership.wire_dtype
        own = [self._edges.lists[key] for key in keys]
        sizes = torch.tensor([(one.neighbors.numel(), one.eids is not None) for one in own])
        by_rank = torch.stack(all_gather(self._state, sizes.view(-1, 2).to(torch.int64)))
        has_eids = by_rank[:, :, 1].any(0).tolist()
        arrays = []
        for number, (key, lists) in enumerate(zip(keys, own, strict=True)):
            begin = RangeMap.from_sizes(by_rank[:, number, 0].tolist()).starts
            near = self.ownership.ranges[ends(*key)[0]]
            # The pointer has one entry more than there are rows: rank 0 writes the leading 0.
            pointer = lists.indptr if rank == 0 else lists.indptr[1:]
            pointer_starts = [0, *(start + 1 for start in near.starts[1:])]
            arrays.append(SharedArray((pointer + begin[rank]).to(wire), pointer_starts))
            arrays.append(SharedArray(lists.neighbors, begin))
            if has_eids[number]:
                all_eids = lists.eids_at(torch.arange(lists.neighbors.numel()))
                arrays.append(SharedArray(all_eids, begin))
        shared = iter(self._share(arrays))
        for key, lists, with_eids in zip(keys, own, has_eids, strict=True):
            indptr, neighbors = next(shared), next(shared)
            eids = next(shared) if with_eids else None
            self._edges.lists[key] = EdgeLists(indptr, neighbors, eids, 0, lists.max_degree)
