# SPDX-License-Identifier: Apache-2.0
"""ReplicatedGraphStore: every host maps the whole graph once, and draws send nothing."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm import agree, all_reduce, share_error
from ...comm.collectives import all_gather
from ...comm.group import group_state
from ...comm.wire import Hosts, SharedArray, share_arrays
from ...fullbatch import GraphShardManager
from .._ownership import Ownership, same_ranks
from ._collective import ShardedGraphStore
from ._edges import (
    LACKS_LABOR_IDS,
    LACKS_OUT_EDGES,
    LACKS_WEIGHTS,
    EdgeLists,
    ListKey,
    OwnEdges,
    WeightKey,
    weight_key,
)
from ._graph_store import DrawOptions, NeighborRequest, SampledNeighbors


class ReplicatedGraphStore(ShardedGraphStore):
    """A graph that each host holds whole, in memory that its ranks share; made by `of`.

    The parts follow one another as one compressed structure over global ids, so a draw is what
    it is on a graph in one process. In-edges are there from the start. What else a draw may need
    (out-edges, weights by position, original ids of neighbours for LABOR) is put beside them by the
    first draw that needs it, which is therefore collective; so is the first draw after edge weights
    were set anew, which every rank must then do.

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
        self._lists: dict[ListKey, EdgeLists] = {}
        self._labor_ids: dict[ListKey, Tensor] = {}
        self._weights: dict[WeightKey, Tensor] = {}
        ids = [
            SharedArray(edges.original_ids[t], self.ownership.ranges[t].starts) for t in self.ntypes
        ]
        self._original_ids = dict(zip(self.ntypes, self._share(ids), strict=True))
        self._share_lists([(etype, "in") for etype in self.canonical_etypes])

    @classmethod
    def of(
        cls,
        manager: GraphShardManager,
        group: dist.ProcessGroup | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
    ) -> ReplicatedGraphStore:
        """The store of a sharded graph; every rank must call.

        Args:
            manager: This rank's part of a full graph.
            group: Who takes part; by default the ranks that share the graph.
            directory: Where shared files have a name for a moment; by default in shared memory, or
                where temporary files go if that is too small.

        Raises:
            ValueError: The graph is a message flow graph.
            OSError: Some host has no room for it; on all ranks.
        """
        state = group_state(manager.group if group is None else group)
        ownership = Ownership.of(manager, state.group)
        hosts = Hosts.find(state, directory)
        return cls(OwnEdges(manager, ownership, state), hosts, directory, manager.idtype)

    def on(self, group: dist.ProcessGroup | None) -> ReplicatedGraphStore:
        """The same store; what a first draw must exchange goes over another group.

        Raises:
            ValueError: The group has other ranks.
        """
        new = copy.copy(self)
        new._state = same_ranks(self._state, group)
        new._edges = self._edges.on(new._state)
        for name in ("_lists", "_labor_ids", "_weights"):
            setattr(new, name, dict(getattr(self, name)))
        return new

    @property
    def num_bytes(self) -> int:
        """Bytes that one host holds."""
        arrays = [*self._original_ids.values(), *self._labor_ids.values(), *self._weights.values()]
        for lists in self._lists.values():
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
        return [self._draw(request, options, excluded or {}) for request in requests]

    def _draw(
        self,
        request: NeighborRequest,
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
    ) -> SampledNeighbors:
        etype = request.etype
        key = etype, options.edge_dir
        lists = self._lists[key]
        near = etype[2] if options.edge_dir == "in" else etype[0]
        weighted = options.weights is not None
        counts, positions, picked = lists.draw(
            request,
            request.nodes,
            self._original_ids[near].index_select(0, request.nodes),
            options,
            weights=self._weights[weight_key(etype, options)] if weighted else None,
            labor_ids=self._labor_ids[key] if options.labor else None,
            excluded=excluded.get(etype),
        )
        eids = lists.eids_at(positions).to(self.idtype) if options.with_eids else None
        return SampledNeighbors(counts, picked.to(self.idtype), eids)

    # -- what all ranks make together ----------------------------------------------------------

    def _prepare(self, etypes: Sequence[CanonicalEType], options: DrawOptions) -> None:
        error = None
        lacking = LACKS_WEIGHTS
        try:
            lacking = self._edges.lacking(etypes, options)
        except ValueError as caught:
            error = caught
        if not lacking:
            return
        share_error(error, self._state.group)
        dtypes = [self._edges.weight_dtype(etype, options) for etype in etypes]
        agree(f"{options} {dtypes}", "what sampling needs first", self._state.group)
        keys: list[ListKey] = [(etype, options.edge_dir) for etype in etypes]
        if lacking & LACKS_OUT_EDGES:
            self._edges.prepare(etypes, options, LACKS_OUT_EDGES)
            self._share_lists(keys)
        if lacking & LACKS_LABOR_IDS:
            ids = {key: self._far_original_ids(key) for key in keys}
            for key, whole, own in self._share_columns(ids):
                self._labor_ids[key], self._edges.labor_ids[key] = whole, own
        if lacking & LACKS_WEIGHTS:
            self._edges.prepare(etypes, options, LACKS_WEIGHTS)
            placed = {key: self._edges.weights(key[0], options) for key in keys}
            weights = {key: w for key, w in placed.items() if w is not None}
            for (etype, _), whole, own in self._share_columns(weights):
                self._weights[weight_key(etype, options)] = whole
                self._edges.keep_weights(etype, options, own)

    def _share(self, arrays: Sequence[SharedArray]) -> list[Tensor]:
        return share_arrays(self._state, self._hosts, arrays, whole=True, directory=self._directory)

    def _edge_starts(self, key: ListKey) -> tuple[int, ...]:
        """First position of each rank's edges, in the order of the parts."""
        etype, edge_dir = key
        if edge_dir == "in":
            return self.ownership.ranges[etype].starts
        own = self._edges.lists[key].neighbors.numel()
        starts = [0]
        for size in all_gather(self._state, torch.tensor([own])):
            starts.append(starts[-1] + int(size))
        return tuple(starts)

    def _own(self, array: SharedArray) -> slice:
        """This rank's rows of a shared array."""
        return slice(*array.starts[self._state.rank : self._state.rank + 2])

    def _share_lists(self, keys: Sequence[ListKey]) -> None:
        rank, wire = self._state.rank, self.ownership.wire_dtype
        have_eids = torch.tensor([int(self._edges.lists[key].eids is not None) for key in keys])
        have_eids = all_reduce(have_eids, "max", self._state.group)
        arrays = []
        for key, has_eids in zip(keys, have_eids.tolist(), strict=True):
            etype, edge_dir = key
            lists = self._edges.lists[key]
            begin = self._edge_starts(key)
            near = self.ownership.ranges[etype[2] if edge_dir == "in" else etype[0]]
            # The pointer has one entry more than there are rows: rank 0 writes the leading 0.
            pointer = lists.indptr if rank == 0 else lists.indptr[1:]
            pointer_starts = [0, *(start + 1 for start in near.starts[1:])]
            arrays.append(SharedArray((pointer + begin[rank]).to(wire), pointer_starts))
            arrays.append(SharedArray(lists.neighbors, begin))
            if has_eids:
                all_eids = lists.eids_at(torch.arange(lists.neighbors.numel()))
                arrays.append(SharedArray(all_eids, begin))
        shared = iter(zip(arrays, self._share(arrays), strict=True))
        for key, has_eids in zip(keys, have_eids.tolist(), strict=True):
            (_, indptr), (array, neighbors) = next(shared), next(shared)
            eids = next(shared)[1] if has_eids else None
            own, at = self._edges.lists[key], self._own(array)
            self._lists[key] = EdgeLists(indptr, neighbors, eids, 0, own.max_degree)
            # What this rank has itself is read from the shared memory too, so its copy is freed.
            if eids is not None:
                own = replace(own, eids=eids[at], first_eid=0)
            self._edges.lists[key] = replace(own, neighbors=neighbors[at])

    def _far_original_ids(self, key: ListKey) -> Tensor:
        etype, edge_dir = key
        far = self._original_ids[etype[0] if edge_dir == "in" else etype[2]]
        return far.index_select(0, self._edges.lists[key].neighbors)

    def _share_columns(
        self, columns: Mapping[ListKey, Tensor]
    ) -> Iterator[tuple[ListKey, Tensor, Tensor]]:
        """Columns by position: the key, the column of all edges, and this rank's part of that."""
        arrays = [SharedArray(own, self._edge_starts(key)) for key, own in columns.items()]
        for key, array, whole in zip(columns, arrays, self._share(arrays), strict=True):
            yield key, whole, whole[self._own(array)]
