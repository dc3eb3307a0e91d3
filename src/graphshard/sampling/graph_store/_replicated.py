# SPDX-License-Identifier: Apache-2.0
"""ReplicatedStructure: every host maps the whole graph once, and draws send nothing."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm import agree, all_reduce, share_error
from ...comm.collectives import all_gather
from ...comm.group import GroupState, group_state
from ...fullbatch import GraphShardManager
from ...ops import draw_neighbors
from .._ownership import Ownership
from ..feature_store import Hosts, SharedArray, same_ranks, share_arrays
from ._own_edges import LACKS_LABOR_IDS, LACKS_OUT_EDGES, LACKS_WEIGHTS, OwnEdges, Side
from ._sharded_structure import ShardedStructure
from ._structure import Drawn, DrawOptions, EdgeDir, HopRequest

_Key = tuple[CanonicalEType, EdgeDir]


class ReplicatedStructure(ShardedStructure):
    """A graph that each host holds whole, in memory that its ranks share; made by `of`.

    The parts lie one after another as one compressed structure over global ids, so a draw is what
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
        self._sides: dict[_Key, Side] = {}
        self._labor_ids: dict[_Key, Tensor] = {}
        self._weights: dict[tuple[_Key, str, bool], Tensor] = {}
        ids = [
            SharedArray.like(edges.original_ids[t], self.ownership.ranges[t].starts)
            for t in self._ntypes
        ]
        self._original_ids = dict(zip(self._ntypes, self._share(ids), strict=True))
        self._share_sides([(etype, "in") for etype in self._etypes])

    @classmethod
    def of(
        cls,
        manager: GraphShardManager,
        group: dist.ProcessGroup | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
    ) -> ReplicatedStructure:
        """The structure of a sharded graph; every rank must call.

        Args:
            manager: This rank's part of a full graph.
            group: Who takes part; by default the ranks that share the graph.
            directory: Where shared files lie for the moment that they have a name; by default in
                shared memory, or where temporary files go if that is too small.

        Raises:
            ValueError: The graph is a message flow graph.
            OSError: Some host has no room for it; on all ranks.
        """
        state = group_state(manager.group if group is None else group)
        ownership = Ownership.of(manager, state.group)
        hosts = Hosts.find(state, directory)
        return cls(OwnEdges(manager, ownership, state), hosts, directory, manager.idtype)

    def on(self, group: dist.ProcessGroup | None) -> ReplicatedStructure:
        """The same structure; what a first draw must exchange goes over another group.

        Raises:
            ValueError: The group has other ranks.
        """
        new = copy.copy(self)
        new._edges = self._edges.on(same_ranks(self._state, group))
        for name in ("_sides", "_labor_ids", "_weights"):
            setattr(new, name, dict(getattr(self, name)))
        return new

    @property
    def num_bytes(self) -> int:
        """Bytes that one host holds."""
        arrays = [*self._original_ids.values(), *self._labor_ids.values(), *self._weights.values()]
        for side in self._sides.values():
            arrays += [a for a in (side.indptr, side.neighbors, side.eids) if a is not None]
        return sum(array.numel() * array.element_size() for array in arrays)

    # -- drawing -------------------------------------------------------------------------------

    def draw(
        self,
        requests: Sequence[HopRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[Drawn]:
        """Draw for each request; sends nothing but on first use. See `Structure.draw`.

        Raises:
            ValueError: Weights that are missing, or no weights; on all ranks, where it is found
                on first use.
        """
        self._prepare([request.etype for request in requests], options)
        return [self._draw(request, options, excluded or {}) for request in requests]

    def prepare(self, options: DrawOptions) -> None:
        """Make now what draws of a kind need first, so that copies have it; every rank must call.

        Raises:
            ValueError: As `draw`.
        """
        self._prepare(self._etypes, options)

    def _draw(
        self,
        request: HopRequest,
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
    ) -> Drawn:
        etype = request.etype
        key = etype, options.edge_dir
        side = self._sides[key]
        near = etype[2] if options.edge_dir == "in" else etype[0]
        absent = excluded.get(etype)
        counts, positions, picked = draw_neighbors(
            side.indptr,
            request.rows,
            request.fanout,
            request.key,
            self._original_ids[near].index_select(0, request.rows),
            indices=side.neighbors,
            replace=options.replace,
            prob=None if options.weights is None else self._weights[_weight_key(key, options)],
            labor_ids=self._labor_ids[key] if options.labor else None,
            excluded=None if absent is None else side.positions_of(absent),
        )
        eids = side.eids_at(positions) if options.with_eids else None
        return Drawn(counts, picked.to(self.idtype), self._as_ids(eids))

    # -- what all ranks make together ----------------------------------------------------------

    def _prepare(self, etypes: Sequence[CanonicalEType], options: DrawOptions) -> None:
        error = None
        lacking = LACKS_WEIGHTS
        try:
            self._edges.check_weights(etypes, options)
            lacking = self._edges.lacking(etypes, options)
        except ValueError as caught:
            error = caught
        if not lacking:
            return
        share_error(error, self._state.group)
        dtypes = [self._edges.weight_dtype(etype, options) for etype in etypes]
        agree(f"{options} {dtypes}", "what sampling needs first", self._state.group)
        keys: list[_Key] = [(etype, options.edge_dir) for etype in etypes]
        if lacking & LACKS_OUT_EDGES:
            self._edges.prepare(etypes, options, LACKS_OUT_EDGES)
            self._share_sides(keys)
        if lacking & LACKS_LABOR_IDS:
            self._share_labor_ids(keys, options)
        if lacking & LACKS_WEIGHTS:
            self._edges.prepare(etypes, options, LACKS_WEIGHTS)
            self._share_weights(keys, options)

    def _share(self, arrays: Sequence[SharedArray]) -> list[Tensor]:
        return share_arrays(self._state, self._hosts, arrays, whole=True, directory=self._directory)

    def _edge_starts(self, key: _Key) -> tuple[int, ...]:
        """First position of each rank's edges, in the order in which the parts lie."""
        etype, edge_dir = key
        if edge_dir == "in":
            return self.ownership.ranges[etype].starts
        own = self._edges.side(etype, edge_dir).neighbors.numel()
        starts = [0]
        for size in all_gather(self._state, torch.tensor([own])):
            starts.append(starts[-1] + int(size))
        return tuple(starts)

    def _share_sides(self, keys: Sequence[_Key]) -> None:
        rank, wire = self._state.rank, self.ownership.wire_dtype
        have_eids = torch.tensor([int(self._edges.side(*key).eids is not None) for key in keys])
        have_eids = all_reduce(have_eids, "max", self._state.group)
        arrays, starts = [], []
        for key, has_eids in zip(keys, have_eids.tolist(), strict=True):
            etype, edge_dir = key
            side = self._edges.side(etype, edge_dir)
            begin = self._edge_starts(key)
            starts.append(begin)
            near = self.ownership.ranges[etype[2] if edge_dir == "in" else etype[0]]
            # The pointer has one entry more than there are rows: rank 0 writes the leading 0.
            pointer = side.indptr if rank == 0 else side.indptr[1:]
            pointer_starts = [0, *(start + 1 for start in near.starts[1:])]
            arrays.append(SharedArray.like((pointer + begin[rank]).to(wire), pointer_starts))
            arrays.append(SharedArray.like(side.neighbors, begin))
            if has_eids:
                all_eids = side.eids_at(torch.arange(side.neighbors.numel()))
                arrays.append(SharedArray.like(all_eids, begin))
        shared = iter(self._share(arrays))
        for key, has_eids, begin in zip(keys, have_eids.tolist(), starts, strict=True):
            indptr, neighbors = next(shared), next(shared)
            eids = next(shared) if has_eids else None
            most = self._edges.side(*key).max_degree
            self._sides[key] = Side(indptr, neighbors, eids, 0, most)
            own = slice(begin[rank], begin[rank + 1])
            self._edges.keep(*key, neighbors[own], None if eids is None else eids[own])

    def _share_labor_ids(self, keys: Sequence[_Key], options: DrawOptions) -> None:
        arrays = []
        for etype, edge_dir in keys:
            far = etype[0] if edge_dir == "in" else etype[2]
            neighbors = self._edges.side(etype, edge_dir).neighbors
            ids = self._original_ids[far].index_select(0, neighbors)
            arrays.append(SharedArray.like(ids, self._edge_starts((etype, edge_dir))))
        for key, array, ids in zip(keys, arrays, self._share(arrays), strict=True):
            self._labor_ids[key] = ids
            self._edges.keep_labor_ids(key[0], options, ids[_own(array, self._state)])

    def _share_weights(self, keys: Sequence[_Key], options: DrawOptions) -> None:
        arrays = []
        for key in keys:
            weights = self._edges.weights(key[0], options)
            assert weights is not None
            arrays.append(SharedArray.like(weights, self._edge_starts(key)))
        for key, array, weights in zip(keys, arrays, self._share(arrays), strict=True):
            self._weights[_weight_key(key, options)] = weights
            self._edges.keep_weights(key[0], options, weights[_own(array, self._state)])


def _own(array: SharedArray, state: GroupState) -> slice:
    return slice(array.starts[state.rank], array.starts[state.rank + 1])


def _weight_key(key: _Key, options: DrawOptions) -> tuple[_Key, str, bool]:
    return key, options.weights or "", options.weights_are_mask
