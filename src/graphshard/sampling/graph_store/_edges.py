# SPDX-License-Identifier: Apache-2.0
"""Edges ready to be drawn from: EdgeLists of any nodes, OwnEdges of the nodes that a rank owns.

Within a row edges come by ascending original id, as in the graph before it was partitioned:
draws speak of the i-th edge of a row. See [Note: keyed draws].
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...comm.collectives import all_reduce_, all_to_all
from ...comm.group import GroupState, group_state
from ...comm.transport import exchange_rows
from ...fullbatch import GraphShardManager
from ...graph import Frame
from ...graph.message_passing import frames_of
from ...ops import Adjacency, draw_neighbors
from .._ownership import Ownership
from ..feature_store import CollectiveFeatureStore, FeatureRequest
from ._graph_store import DrawOptions, EdgeDir, NeighborRequest, SampledNeighbors

ListKey: TypeAlias = tuple[CanonicalEType, EdgeDir]
DrawnEdges: TypeAlias = tuple[Tensor, list[Tensor]]
"""Number of edges by node; and by edge the neighbours, and the edge ids if they are wanted."""

LACKS_OUT_EDGES, LACKS_LABOR_IDS, LACKS_WEIGHTS = 1, 2, 4


def ends(etype: CanonicalEType, edge_dir: EdgeDir) -> tuple[str, str]:
    """Types of the nodes that draw, and of their neighbours."""
    return (etype[2], etype[0]) if edge_dir == "in" else (etype[0], etype[2])


@dataclass(frozen=True, eq=False)
class EdgeLists:
    """The edges at one end of some nodes, under one relation, as compressed rows.

    Args:
        indptr: ``[num_rows + 1]``.
        neighbors: ``[num_edges]``, id of the node at the far end.
        eids: ``[num_edges]``, edge ids; None where they ascend by 1 from ``first_eid``.
        first_eid: See ``eids``.
        max_degree: Most edges of any row, on any rank, where that is needed.
    """

    indptr: Tensor
    neighbors: Tensor
    eids: Tensor | None
    first_eid: int = 0
    max_degree: int = 0

    def draw(
        self,
        request: NeighborRequest,
        rows: Tensor,
        original_ids: Tensor,
        options: DrawOptions,
        *,
        weights: Tensor | None,
        labor_ids: Tensor | None,
        excluded: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw for some rows; arguments by position, and what is returned, as `draw_neighbors`.

        ``excluded`` are ids of edges that are treated as absent; others than those here are legal.
        """
        return draw_neighbors(
            self.indptr,
            rows,
            request.fanout,
            request.key,
            original_ids,
            indices=self.neighbors,
            replace=options.replace,
            prob=weights,
            labor_ids=labor_ids,
            excluded=None if excluded is None else self._positions_of(excluded),
        )

    def eids_at(self, positions: Tensor) -> Tensor:
        """Ids of the edges at some positions."""
        if self.eids is None:
            return positions.to(self.neighbors.dtype) + self.first_eid
        return self.eids.index_select(0, positions)

    def by_position(self, values: Tensor) -> Tensor:
        """Values of all edges of a whole graph, in the order of positions and not of ids."""
        return values if self.eids is None else values.index_select(0, self.eids)

    def positions_of(self, eids: Tensor) -> Tensor:
        """Position of each of some edges, all of which are here."""
        if self.eids is None:
            return eids.to(torch.int64) - self.first_eid
        ascending, position = self._sorted_eids
        return position[torch.searchsorted(ascending, eids.to(ascending.dtype))]

    def _positions_of(self, eids: Tensor) -> Tensor:
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
class WeightFeature:
    """An edge feature that serves as weights, and the state that it had when it was checked.

    Args:
        values: The feature.
        version: torch's count of its changes.
        checked: ``[num_edges]`` by edge, as `draw_neighbors` takes weights.
        placed: By direction, the same by position in the `EdgeLists` that are drawn from; filled
            in when first needed.
    """

    values: Tensor
    version: int
    checked: Tensor
    placed: dict[EdgeDir, Tensor] = field(default_factory=dict)


class CheckedWeights:
    """Weights of a graph's edges, checked when they are first used, and again once they change."""

    def __init__(self) -> None:
        self._known: dict[Any, WeightFeature] = {}

    def copy(self) -> CheckedWeights:
        """The same, for another thread."""
        new = CheckedWeights()
        new._known = {k: replace(f, placed=dict(f.placed)) for k, f in self._known.items()}
        return new

    def find(
        self, data: Mapping[str, Any], etype: CanonicalEType, options: DrawOptions
    ) -> WeightFeature:
        """The weights of a relation; the same object until the feature is set or changed.

        Args:
            data: Features of the relation's edges.
            etype: The relation.
            options: Which feature.

        Raises:
            ValueError: There is no such feature, or it holds no weights.
        """
        name = options.weights
        assert name is not None
        if name not in data:
            raise ValueError(
                f"sampling by {name!r} needs an edge feature of that name on relation {etype} (it "
                f"has {sorted(data)}); set g.edges[etype].data[{name!r}] to one number per edge"
            )
        values: Tensor = data[name]
        known = self.known(etype, options)
        if known is None or known.values is not values or known.version != values._version:
            checked = checked_weights(values.detach(), options, etype)
            known = WeightFeature(values, values._version, checked)
            self._known[etype, name, options.weights_are_mask] = known
        return known

    def known(self, etype: CanonicalEType, options: DrawOptions) -> WeightFeature | None:
        """What `find` gave last; None where draws are not weighted."""
        return self._known.get((etype, options.weights, options.weights_are_mask))

    def placed(self) -> list[Tensor]:
        """All weights by position."""
        return [placed for known in self._known.values() for placed in known.placed.values()]

    def dtype(self, etype: CanonicalEType, options: DrawOptions) -> torch.dtype | None:
        """Of the weights; None where draws are not weighted."""
        known = self.known(etype, options)
        return None if known is None else known.checked.dtype


def checked_weights(
    values: Tensor, options: DrawOptions, etype: CanonicalEType, eids: Tensor | None = None
) -> Tensor:
    """Weights as `draw_neighbors` takes them: float32 or float64 ``[num_edges]``, none negative.

    Args:
        values: Of some edges.
        options: Whether they are a mask, and what the feature is called.
        etype: The relation.
        eids: Ids of the edges, for the error; None where they are all, in order.

    Raises:
        ValueError: Another shape or type, a negative weight, or one that is not finite.
    """
    name = options.weights
    if values.dim() == 2 and values.shape[1] == 1:
        values = values.view(-1)
    if values.dim() != 1:
        raise ValueError(
            f"edge feature {name!r} of {etype} must have one number per edge to sample by (got "
            f"shape {tuple(values.shape)})"
        )
    if options.weights_are_mask:
        if values.dtype not in (torch.bool, torch.uint8):
            raise ValueError(
                f"edge feature {name!r} of {etype} must be bool to serve as a mask (got "
                f"{values.dtype}); pass it as prob to sample in proportion to it"
            )
        return values.to(torch.float32)
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    bad = ~(values >= 0) | torch.isinf(values)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"edge feature {name!r} of {etype} must hold finite weights of 0 or more to sample by "
            f"(got {float(values[first])} at edge {first if eids is None else int(eids[first])})"
        )
    return values.contiguous()


@dataclass(frozen=True, eq=False)
class _OutEdgeRoute:
    """How values of in-edges reach the owners of the sources, in the order of the out-edges."""

    order: Tensor  # own in-edges grouped by the owner of the source
    send_splits: list[int]
    recv_splits: list[int]
    arrangement: Tensor  # what arrived, in the order of the out-edges

    def carry(self, state: GroupState, values: Tensor) -> Tensor:
        sent = values.index_select(0, self.order)
        arrived = exchange_rows(
            state, [sent], [self.send_splits], [self.recv_splits], "values of out-edges"
        )[0]
        return arrived.index_select(0, self.arrangement)


class OwnEdges:
    """Edges of the nodes that this rank owns; collective to make.

    In-edges are stored with their destination already. What only several ranks together can say
    (which out-edges a node has, how edges of other ranks are weighted, what a remote source was
    called before partitioning) is exchanged once, when first used.

    Args:
        manager: This rank's part of a full graph.

    Attributes:
        original_ids: Node type to what rows of ``lists`` were called before partitioning.
        lists: The edges that are here, by relation and direction; ids are global.
        labor_ids: int64 ``[num_edges]``, the original id of each neighbour, where it is known.
        weights: Of the edges that are here.
    """

    def __init__(self, manager: GraphShardManager) -> None:
        self.ownership, self.state = Ownership.of(manager), group_state(manager.group)
        self.original_ids = {t: ids.cpu() for t, ids in manager.original_ids.items()}
        self.weights = CheckedWeights()
        self.labor_ids: dict[ListKey, Tensor] = {}
        self.lists: dict[ListKey, EdgeLists] = {}
        self._original_edge_ids = manager.original_edge_ids
        self._frames: dict[CanonicalEType, Frame] = dict(
            zip(manager.canonical_etypes, frames_of(manager)[2], strict=True)
        )
        self._edges = {t: manager._structure.edges[t] for t in manager.canonical_etypes}
        self._routes: dict[CanonicalEType, _OutEdgeRoute] = {}
        in_edges = {etype: self._in_csc(etype) for etype in self._edges}
        degrees = [_largest(csc[0].diff()) for csc in in_edges.values()]
        most_anywhere = torch.tensor(degrees, dtype=torch.int64)
        all_reduce_(self.state, most_anywhere, dist.ReduceOp.MAX)
        for (etype, csc), most in zip(in_edges.items(), most_anywhere.tolist(), strict=True):
            first = self.ownership.first(etype)
            eids = None if csc[2] is None else csc[2] + first
            self.lists[etype, "in"] = EdgeLists(csc[0], csc[1], eids, first, most)

    def on(self, state: GroupState) -> OwnEdges:
        """The same edges, exchanging what it still lacks over another group."""
        new = copy.copy(self)
        new.state, new.weights, new._routes = state, self.weights.copy(), dict(self._routes)
        new.lists, new.labor_ids = dict(self.lists), dict(self.labor_ids)
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

    def draw(
        self, request: NeighborRequest, rows: Tensor, options: DrawOptions, excluded: Tensor | None
    ) -> DrawnEdges:
        """Draw for some rows of ``lists``; see `EdgeLists.draw`. Nothing may be lacking."""
        key = request.etype, options.edge_dir
        lists, known = self.lists[key], self.weights.known(request.etype, options)
        counts, positions, picked = lists.draw(
            request,
            rows,
            self.original_ids[ends(*key)[0]].index_select(0, rows),
            options,
            weights=None if known is None else known.placed[options.edge_dir],
            labor_ids=self.labor_ids[key] if options.labor else None,
            excluded=excluded,
        )
        return counts, [picked, lists.eids_at(positions)] if options.with_eids else [picked]

    def lacking(
        self, etypes: Sequence[CanonicalEType], options: DrawOptions
    ) -> tuple[int, ValueError | None]:
        """Bits that say what must be exchanged before draws of a kind.

        Returns:
            The bits; and what is wrong with this rank's weights, if anything is.
        """
        bits = 0
        try:
            for etype in etypes:
                key = (etype, options.edge_dir)
                if key not in self.lists:
                    bits |= LACKS_OUT_EDGES
                if options.labor and key not in self.labor_ids:
                    bits |= LACKS_LABOR_IDS
                if options.weights is not None:
                    feature = self.weights.find(self._frames[etype], etype, options)
                    if options.edge_dir not in feature.placed:
                        bits |= LACKS_WEIGHTS
        except ValueError as error:
            return LACKS_WEIGHTS, error
        return bits, None

    def prepare(self, etypes: Sequence[CanonicalEType], options: DrawOptions, lacking: int) -> None:
        """Make what some rank lacks; where that takes an exchange, every rank must call.

        Args:
            etypes: Relations that are drawn from; the same on all ranks.
            options: How, the same on all ranks.
            lacking: Bits that any rank has set.
        """
        for etype in etypes:
            key = (etype, options.edge_dir)
            if lacking & LACKS_OUT_EDGES:
                self._make_out_lists(etype)
            if lacking & LACKS_LABOR_IDS:
                self.labor_ids[key] = self._original_neighbors(key)
            if lacking & LACKS_WEIGHTS:
                placed = self.placed_weights(etype, options, self.lists[key].eids)
                self.keep_weights(etype, options, placed)

    def placed_weights(
        self, etype: CanonicalEType, options: DrawOptions, eids: Tensor | None
    ) -> Tensor:
        """Weights of this rank's edges by position; along out-edges, every rank must call.

        ``eids`` are their ids by position; None where they ascend by 1.
        """
        known = self.weights.known(etype, options)
        assert known is not None
        checked = known.checked.cpu()
        if options.edge_dir == "out":
            return self._routes[etype].carry(self.state, checked)
        return checked if eids is None else checked[eids.long() - self.ownership.first(etype)]

    def keep_weights(self, etype: CanonicalEType, options: DrawOptions, placed: Tensor) -> None:
        """Draw by these weights, ``[num_edges]`` by position in ``lists``."""
        known = self.weights.known(etype, options)
        assert known is not None
        known.placed[options.edge_dir] = placed

    def _make_out_lists(self, etype: CanonicalEType) -> None:
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
        self._routes[etype] = _OutEdgeRoute(order, send_splits, recv_splits, arrangement)
        num_rows = self.ownership.num_owned(etype[0])
        degrees = torch.bincount(row, minlength=num_rows)
        indptr = torch.zeros(num_rows + 1, dtype=dtype)
        torch.cumsum(degrees, 0, dtype=dtype, out=indptr[1:])
        most = all_reduce_(self.state, torch.tensor([_largest(degrees)]), dist.ReduceOp.MAX)
        self.lists[etype, "out"] = EdgeLists(
            indptr, neighbor[arrangement], eid[arrangement], 0, int(most)
        )

    def _original_neighbors(self, key: ListKey) -> Tensor:
        far = ends(*key)[1]
        wanted, at = torch.unique(self.lists[key].neighbors, return_inverse=True)
        store = CollectiveFeatureStore(
            self.ownership, {(far, "original"): self.original_ids[far]}, self.state
        )
        request = FeatureRequest(far, ("original",), wanted.to(torch.int64), distinct=True)
        return store.fetch([request])[0]["original"][at]


def sampled(drawn: DrawnEdges, idtype: torch.dtype) -> SampledNeighbors:
    """What a store answers."""
    counts, columns = drawn
    neighbors, *eids = (column.to(idtype) for column in columns)
    return SampledNeighbors(counts, neighbors, eids[0] if eids else None)


def _largest(numbers: Tensor) -> int:
    return int(numbers.max()) if numbers.numel() else 0
