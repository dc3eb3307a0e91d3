# SPDX-License-Identifier: Apache-2.0
"""OwnEdges: the edges of this rank's nodes, ready to be drawn from.

In-edges lie with their destination already. What only several ranks together can say (which
out-edges a node has, how edges of other ranks are weighted, what a remote source was called before
partitioning) is exchanged once, when first used.

Within a row edges come by ascending original id, as in the graph before it was partitioned:
draws speak of the i-th edge of a row. See [Note: keyed draws].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm.collectives import all_reduce_, all_to_all
from ...comm.group import GroupState
from ...comm.wire import exchange_rows
from ...fullbatch import GraphShardManager
from ...graph import Frame
from ...ops import Adjacency
from .._ownership import Ownership
from ..feature_store import CollectiveRows, RowRequest
from ._structure import DrawOptions, EdgeDir, checked_weights, missing_weights

_Key = tuple[CanonicalEType, EdgeDir]
_WeightKey = tuple[CanonicalEType, EdgeDir, str, bool]

LACKS_OUT_EDGES, LACKS_LABOR_IDS, LACKS_WEIGHTS = 1, 2, 4


@dataclass(frozen=True, eq=False)
class Side:
    """The edges at one end of this rank's nodes, under one relation.

    Args:
        indptr: ``[num_owned + 1]``.
        neighbors: ``[num_edges]``, global id of the node at the far end.
        eids: ``[num_edges]``, global edge ids; None where they ascend by 1 from ``first_eid``.
        first_eid: See ``eids``.
        max_degree: Most edges of any node, on any rank.
    """

    indptr: Tensor
    neighbors: Tensor
    eids: Tensor | None
    first_eid: int
    max_degree: int

    def eids_at(self, positions: Tensor) -> Tensor:
        """Global ids of the edges at some positions."""
        if self.eids is None:
            return positions.to(self.neighbors.dtype) + self.first_eid
        return self.eids.index_select(0, positions)

    def positions_of(self, eids: Tensor) -> Tensor:
        """Ascending int64 positions of those of some edges that are here."""
        eids = torch.unique(eids.to(torch.int64))
        if self.eids is None:
            here = (eids >= self.first_eid) & (eids < self.first_eid + self.neighbors.numel())
            return eids[here] - self.first_eid
        if self.eids.numel() == 0:
            return eids[:0]
        ascending, position = self._sorted_eids
        found = torch.searchsorted(ascending, eids.to(ascending.dtype))
        found.clamp_(max=ascending.numel() - 1)
        return position[found[ascending[found] == eids]].sort().values

    @cached_property
    def _sorted_eids(self) -> tuple[Tensor, Tensor]:
        assert self.eids is not None
        ascending, position = torch.sort(self.eids)
        return ascending, position


@dataclass(frozen=True, eq=False)
class _Route:
    """How values of in-edges reach the owners of the sources, in the order of the out-edges."""

    order: Tensor  # own in-edges grouped by the owner of the source
    send_splits: list[int]
    recv_splits: list[int]
    arrangement: Tensor  # what arrived, in the order of the out-side

    def carry(self, state: GroupState, values: Tensor) -> Tensor:
        sent = values.index_select(0, self.order)
        arrived = exchange_rows(
            state, [sent], [self.send_splits], [self.recv_splits], "values of out-edges"
        )[0]
        return arrived.index_select(0, self.arrangement)


class _Source(NamedTuple):
    """The state of a feature that something was made from."""

    values: Tensor
    version: int

    def is_same(self, other: _Source) -> bool:
        return self.values is other.values and self.version == other.version


class OwnEdges:
    """Edges of the nodes that this rank owns; collective to make.

    Args:
        manager: This rank's part of a full graph.
        ownership: Who owns what.
        state: The ranks, for what must be exchanged.
    """

    def __init__(self, manager: GraphShardManager, ownership: Ownership, state: GroupState) -> None:
        self.ownership = ownership
        self.state = state
        self.original_ids = {t: ids.cpu() for t, ids in manager.original_ids.items()}
        self._original_edge_ids = manager.original_edge_ids
        edge_frames = manager._all_frames()[2]
        self._frames: dict[CanonicalEType, Frame] = dict(
            zip(manager.canonical_etypes, edge_frames, strict=True)
        )
        self._edges = {t: manager._structure.edges[t] for t in manager.canonical_etypes}
        self._sides: dict[_Key, Side] = {}
        self._routes: dict[CanonicalEType, _Route] = {}
        self._labor_ids: dict[_Key, Tensor] = {}
        self._checked: dict[_WeightKey, tuple[_Source, Tensor]] = {}
        self._weights: dict[_WeightKey, tuple[_Source, Tensor]] = {}
        in_sides = {etype: self._in_csc(etype) for etype in self._edges}
        degrees = [_largest(csc[0].diff()) for csc in in_sides.values()]
        largest = all_reduce_(state, torch.tensor(degrees, dtype=torch.int64), dist.ReduceOp.MAX)
        for (etype, csc), most in zip(in_sides.items(), largest.tolist(), strict=True):
            first = ownership.first(etype)
            eids = None if csc[2] is None else csc[2] + first
            self._sides[etype, "in"] = Side(csc[0], csc[1], eids, first, most)

    def on(self, state: GroupState) -> OwnEdges:
        """The same edges, exchanging what it still lacks over another group."""
        new = object.__new__(OwnEdges)
        new.__dict__.update(
            {k: dict(v) if isinstance(v, dict) else v for k, v in self.__dict__.items()}
        )
        new.state = state
        return new

    def _in_csc(self, etype: CanonicalEType) -> tuple[Tensor, Tensor, Tensor | None]:
        edges = self._edges[etype]
        dtype = self.ownership.wire_dtype
        ranges = self.ownership.ranges[etype[0]]
        starts = torch.tensor(ranges.starts, dtype=dtype)
        src = edges.src.cpu().to(dtype) + starts[edges.src_part.cpu().long()]
        adjacency = Adjacency(
            src, edges.dst.cpu().to(dtype), ranges.num_ids, edges.num_dst, check=False
        )
        return adjacency.csc()

    # -- what is there, and what is not ---------------------------------------------------------

    def lacking(self, etypes: Iterable[CanonicalEType], options: DrawOptions) -> int:
        """Bits that say what must be exchanged first; the weights must have been checked."""
        bits = 0
        for etype in etypes:
            key = (etype, options.edge_dir)
            if key not in self._sides:
                bits |= LACKS_OUT_EDGES
            if options.labor and key not in self._labor_ids:
                bits |= LACKS_LABOR_IDS
            if options.weights is not None:
                weight_key = _weight_key(etype, options)
                known = self._weights.get(weight_key)
                if known is None or not known[0].is_same(self._checked[weight_key][0]):
                    bits |= LACKS_WEIGHTS
        return bits

    def prepare(self, etypes: Iterable[CanonicalEType], options: DrawOptions, lacking: int) -> None:
        """Make what some rank lacks; where that takes an exchange, every rank must call.

        Args:
            etypes: Relations that are drawn from; the same on all ranks.
            options: How, the same on all ranks.
            lacking: Bits that any rank has set.
        """
        for etype in etypes:
            key = (etype, options.edge_dir)
            if lacking & LACKS_OUT_EDGES and options.edge_dir == "out":
                self._make_out_side(etype)
            if lacking & LACKS_LABOR_IDS and options.labor:
                self._labor_ids[key] = self._original_neighbors(key)
            if lacking & LACKS_WEIGHTS and options.weights is not None:
                self._place_weights(etype, options)

    def side(self, etype: CanonicalEType, edge_dir: EdgeDir) -> Side:
        return self._sides[etype, edge_dir]

    def keep(
        self,
        etype: CanonicalEType,
        edge_dir: EdgeDir,
        neighbors: Tensor,
        eids: Tensor | None,
    ) -> None:
        """Hold arrays that equal those of a side in their place, which lie somewhere else."""
        side = self._sides[etype, edge_dir]
        first = 0 if eids is not None else side.first_eid
        self._sides[etype, edge_dir] = replace(
            side, neighbors=neighbors, eids=eids, first_eid=first
        )

    def keep_labor_ids(self, etype: CanonicalEType, options: DrawOptions, ids: Tensor) -> None:
        """As `keep`, for `labor_ids`."""
        self._labor_ids[etype, options.edge_dir] = ids

    def keep_weights(self, etype: CanonicalEType, options: DrawOptions, weights: Tensor) -> None:
        """As `keep`, for `weights`."""
        key = _weight_key(etype, options)
        self._weights[key] = self._weights[key][0], weights

    def labor_ids(self, etype: CanonicalEType, options: DrawOptions) -> Tensor | None:
        """int64 ``[num_edges]``: original id of each neighbour, where the draw needs it."""
        return self._labor_ids[etype, options.edge_dir] if options.labor else None

    def weights(self, etype: CanonicalEType, options: DrawOptions) -> Tensor | None:
        """``[num_edges]`` by position, where the draw is weighted."""
        if options.weights is None:
            return None
        return self._weights[_weight_key(etype, options)][1]

    # -- weights -------------------------------------------------------------------------------

    def check_weights(self, etypes: Iterable[CanonicalEType], options: DrawOptions) -> None:
        """Look at this rank's weights, where the draw is weighted.

        Raises:
            ValueError: They are missing, or no weights.
        """
        for etype in etypes:
            if options.weights is None:
                return
            data = self._frames[etype]
            if options.weights not in data:
                raise ValueError(missing_weights(options.weights, etype, list(data)))
            values: Tensor = data[options.weights]
            source = _Source(values, values._version)
            key = _weight_key(etype, options)
            known = self._checked.get(key)
            if known is None or not known[0].is_same(source):
                checked = checked_weights(values.detach(), options, etype).cpu()
                self._checked[key] = source, checked

    def weight_dtype(self, etype: CanonicalEType, options: DrawOptions) -> torch.dtype | None:
        """Of weights that have been checked."""
        known = self._checked.get(_weight_key(etype, options))
        return None if known is None or options.weights is None else known[1].dtype

    def _place_weights(self, etype: CanonicalEType, options: DrawOptions) -> None:
        key = _weight_key(etype, options)
        source, checked = self._checked[key]
        if options.edge_dir == "out":
            placed = self._routes[etype].carry(self.state, checked)
        else:
            side = self._sides[etype, "in"]
            first = self.ownership.first(etype)
            placed = checked if side.eids is None else checked[side.eids.long() - first]
        self._weights[key] = source, placed

    # -- what must be exchanged ----------------------------------------------------------------

    def _make_out_side(self, etype: CanonicalEType) -> None:
        edges = self._edges[etype]
        dtype = self.ownership.wire_dtype
        owner = edges.src_part.cpu().long()
        order = torch.argsort(owner, stable=True)
        num_ranks = self.state.world_size
        counts = torch.bincount(owner, minlength=num_ranks)
        ones = [1] * num_ranks
        what = f"out-edges of {etype}"
        recv_splits = all_to_all(self.state, counts, ones, ones, what).tolist()
        send_splits = counts.tolist()
        eids = torch.arange(edges.num_edges, dtype=dtype) + self.ownership.first(etype)
        columns = [
            edges.src.cpu().to(dtype),
            edges.dst.cpu().to(dtype) + self.ownership.first(etype[2]),
            eids,
            self._original_edge_ids[etype].cpu(),
        ]
        row, neighbor, eid, original = exchange_rows(
            self.state,
            [column.index_select(0, order) for column in columns],
            [send_splits] * len(columns),
            [recv_splits] * len(columns),
            what,
        )
        arrangement = torch.argsort(original)
        arrangement = arrangement[torch.argsort(row[arrangement], stable=True)]
        self._routes[etype] = _Route(order, send_splits, recv_splits, arrangement)
        num_rows = self.ownership.num_owned(etype[0])
        degrees = torch.bincount(row, minlength=num_rows)
        indptr = torch.zeros(num_rows + 1, dtype=dtype)
        torch.cumsum(degrees, 0, dtype=dtype, out=indptr[1:])
        most = all_reduce_(self.state, torch.tensor([_largest(degrees)]), dist.ReduceOp.MAX)
        self._sides[etype, "out"] = Side(
            indptr, neighbor[arrangement], eid[arrangement], 0, int(most)
        )

    def _original_neighbors(self, key: _Key) -> Tensor:
        etype, edge_dir = key
        far = etype[0] if edge_dir == "in" else etype[2]
        wanted, at = torch.unique(self._sides[key].neighbors, return_inverse=True)
        rows = CollectiveRows.over(
            self.ownership, {(far, "original"): self.original_ids[far]}, self.state
        )
        found = rows.fetch([RowRequest(far, ("original",), wanted.to(torch.int64), distinct=True)])
        return found[0]["original"][at]


def _weight_key(etype: CanonicalEType, options: DrawOptions) -> _WeightKey:
    return etype, options.edge_dir, options.weights or "", options.weights_are_mask


def _largest(numbers: Tensor) -> int:
    return int(numbers.max()) if numbers.numel() else 0
