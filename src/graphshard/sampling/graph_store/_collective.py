# SPDX-License-Identifier: Apache-2.0
"""CollectiveGraphStore: every rank draws for the nodes that it owns, for the rank that asks.

::

    sizes      of what follows                           4 (2 + 2 R) bytes to each other rank
    requests   nodes, and edges that must not be drawn   w bytes each
    counts     edges drawn for each node                 1, 2, 4 or 8 bytes each
    answers    neighbours, and edge ids if asked for     w bytes each

One round for a whole layer, whatever the number of relations R; w is 4 unless some type or relation
has 2^31 ids or more. Nodes that a rank owns itself do not leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm.group import group_state
from ...comm.wire import exchange_rows
from ...fullbatch import GraphShardManager
from ...ops import ungroup
from .._ownership import Ownership, exchange_sizes, same_ranks
from ._edges import OwnEdges
from ._graph_store import DrawOptions, NeighborRequest, SampledNeighbors


class ShardedGraphStore:
    """What stores of a graph have in common of which each rank owns a part.

    Args:
        edges: Edges of this rank's nodes.
        idtype: Type of the ids that it takes and gives.
    """

    device = torch.device("cpu")  # wherever features are

    def __init__(self, edges: OwnEdges, idtype: torch.dtype) -> None:
        self._edges, self._state = edges, edges.state
        self.ownership, self.idtype = edges.ownership, idtype
        kinds = list(edges.ownership.ranges)
        self.ntypes = [kind for kind in kinds if isinstance(kind, str)]
        self.canonical_etypes = [kind for kind in kinds if not isinstance(kind, str)]

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._state.group

    def num_nodes(self, ntype: str) -> int:
        return self.ownership.ranges[ntype].num_ids

    def num_edges(self, etype: CanonicalEType) -> int:
        return self.ownership.ranges[etype].num_ids


class CollectiveGraphStore(ShardedGraphStore):
    """A graph whose nodes draw where they are owned; made by `of`.

    `sample_neighbors` sends, from a rank to all others together, with P ranks and R relations,
    ``4 (2 + 2 R) (P - 1) + w (nodes asked of others + edge ids excluded elsewhere) +
    c (nodes that others asked of it) + w (1 or, with edge ids, 2) (edges drawn for others)`` bytes.
    Here w is 4 (8 if a type or relation has 2^31 ids or more), and c the bytes of the smallest
    integer (1, 2, 4) that holds as many edges as can be drawn for a node.
    """

    @classmethod
    def of(
        cls, manager: GraphShardManager, group: dist.ProcessGroup | None = None
    ) -> CollectiveGraphStore:
        """The store of a sharded graph; every rank must call.

        Args:
            manager: This rank's part of a full graph.
            group: Who takes part; by default the ranks that share the graph.

        Raises:
            ValueError: The graph is a message flow graph.
        """
        group = manager.group if group is None else group
        ownership = Ownership.of(manager, group)
        return cls(OwnEdges(manager, ownership, group_state(group)), manager.idtype)

    def on(self, group: dist.ProcessGroup | None) -> CollectiveGraphStore:
        """The same store, answering over another group of the same ranks.

        Raises:
            ValueError: The group has other ranks.
        """
        return CollectiveGraphStore(self._edges.on(same_ranks(self._state, group)), self.idtype)

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        """Draw for each request; every rank must call. See `GraphStore.sample_neighbors`.

        Edges are excluded for the rank that says so, not for the others.

        Raises:
            ValueError: On all ranks: weights that are missing or no weights on some rank, or
                ranks that draw differently.
        """
        if not requests:
            return []
        error = None
        lacking = 0
        etypes = [request.etype for request in requests]
        try:
            lacking = self._edges.lacking(etypes, options)
        except ValueError as caught:
            error = caught
        drawing = _LayerDraw(self._edges, requests, options, excluded or {}, self.idtype)
        asked, lacking = exchange_sizes(
            self._state,
            "what neighbours are drawn",
            self._signature(requests, options, error),
            error,
            drawing.sizes(),
            lacking,
        )
        self._edges.prepare(etypes, options, lacking)
        return drawing.run(asked)

    def _signature(
        self, requests: Sequence[NeighborRequest], options: DrawOptions, error: Exception | None
    ) -> str:
        """What ranks must agree about."""
        drawn = [
            f"{r.etype} fanout {r.fanout} key {r.key:#x} weights "
            f"{None if error else self._edges.weight_dtype(r.etype, options)}"
            for r in requests
        ]
        return f"{options}: {'; '.join(drawn)}"


class _LayerDraw:
    """One round in which ranks ask owners for neighbours, and owners draw and answer.

    Args:
        edges: Edges of this rank's nodes.
        requests: What this rank wants.
        options: How to draw.
        excluded: Edges that this rank does not want.
        idtype: Of the ids in the answers.
    """

    def __init__(
        self,
        edges: OwnEdges,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
        idtype: torch.dtype,
    ) -> None:
        self._edges, self._state = edges, edges.state
        self._requests, self._options, self._idtype = requests, options, idtype
        self._wire = edges.ownership.wire_dtype
        near = 2 if options.edge_dir == "in" else 0
        self._near = [request.etype[near] for request in requests]
        self._rows = [
            # Where nothing is drawn, nothing need be asked.
            edges.ownership.by_owner(r.etype[near], r.nodes if r.fanout else r.nodes[:0])
            for r in requests
        ]
        self._excluded = [self._excluded_by_owner(r, excluded) for r in requests]

    def _excluded_by_owner(
        self, request: NeighborRequest, excluded: Mapping[CanonicalEType, Tensor]
    ) -> _ExcludedEdges:
        eids = excluded.get(request.etype)
        ranks = self._state.world_size
        if eids is None or eids.numel() == 0 or request.fanout == 0:
            return _ExcludedEdges(torch.empty(0, dtype=self._wire), [0] * ranks, None)
        eids = eids.to("cpu", torch.int64)
        if self._options.edge_dir == "out":
            # Who owns the source of an edge is not to be seen from its id.
            splits = [eids.numel()] * ranks
            splits[self._state.rank] = 0
            return _ExcludedEdges(eids.to(self._wire).repeat(ranks - 1), splits, eids)
        by_owner = self._edges.ownership.by_owner(request.etype, eids)
        remote, own = by_owner.places()
        here = eids if own is None else eids.index_select(0, own)
        there = eids[:0] if remote is None else eids.index_select(0, remote)
        return _ExcludedEdges(there.to(self._wire), by_owner.splits, here)

    def sizes(self) -> Tensor:
        """int64 ``[world_size, 2 R]``: per request nodes, then excluded edges, for each rank."""
        splits = [rows.splits for rows in self._rows] + [e.splits for e in self._excluded]
        return torch.tensor(splits, dtype=torch.int64).t()

    def run(self, asked: Tensor) -> list[SampledNeighbors]:
        """Exchange requests and answers.

        Args:
            asked: int64 ``[world_size, 2 R]``, the sizes of what each rank asks of this one.
        """
        own: list[SampledNeighbors] = []
        if self._state.world_size == 1:
            self._draw_own(own)
            return [self._arranged(i, d) for i, d in enumerate(own)]
        num = len(self._requests)
        recv = asked.t().tolist()
        of_others = exchange_rows(
            self._state,
            [rows.remote_rows for rows in self._rows] + [e.remote for e in self._excluded],
            [rows.splits for rows in self._rows] + [e.splits for e in self._excluded],
            recv,
            "rows to draw for",
            meanwhile=lambda: self._draw_own(own),
        )
        drawn = [
            self._draw(number, rows.split(recv[number]), absent.split(recv[num + number]))
            for number, (rows, absent) in enumerate(
                zip(of_others[:num], of_others[num:], strict=True)
            )
        ]
        answers = self._answer(drawn, recv[:num])
        return [
            self._arranged(i, _joined([answer, here], self._options))
            for i, (answer, here) in enumerate(zip(answers, own, strict=True))
        ]

    def _draw_own(self, found: list[SampledNeighbors]) -> None:
        """Add what is drawn for the nodes that this rank has itself, for each request."""
        for number, (rows, excluded) in enumerate(zip(self._rows, self._excluded, strict=True)):
            found.append(self._draw_group(number, rows.own_rows, excluded.own))

    def _draw(
        self, number: int, rows: Sequence[Tensor], absent: Sequence[Tensor]
    ) -> SampledNeighbors:
        """Draw for groups of own rows, each group with its own excluded edges."""
        if all(eids.numel() == 0 for eids in absent):
            return self._draw_group(number, torch.cat(list(rows)), None)
        groups = [self._draw_group(number, r, a) for r, a in zip(rows, absent, strict=True)]
        return _joined(groups, self._options)

    def _draw_group(self, number: int, rows: Tensor, absent: Tensor | None) -> SampledNeighbors:
        request, options = self._requests[number], self._options
        key = (request.etype, options.edge_dir)
        lists = self._edges.lists[key]
        counts, positions, picked = lists.draw(
            request,
            rows,
            self._edges.original_ids[self._near[number]].index_select(0, rows),
            options,
            weights=self._edges.weights(request.etype, options),
            labor_ids=self._edges.labor_ids[key] if options.labor else None,
            excluded=absent,
        )
        return SampledNeighbors(
            counts, picked, lists.eids_at(positions) if options.with_eids else None
        )

    def _answer(
        self, drawn: Sequence[SampledNeighbors], asked: Sequence[Sequence[int]]
    ) -> list[SampledNeighbors]:
        """Send what was drawn for others; what others drew for this rank, by rank.

        Args:
            drawn: For each request, what was drawn for the nodes of each other rank.
            asked: For each request, nodes that each rank asked for.
        """
        counts = exchange_rows(
            self._state,
            [
                d.counts.to(self._count_dtype(request))
                for d, request in zip(drawn, self._requests, strict=True)
            ],
            asked,
            [rows.splits for rows in self._rows],
            "numbers of neighbours",
        )
        send = [_sums(d.counts, splits) for d, splits in zip(drawn, asked, strict=True)]
        recv = [_sums(c, rows.splits) for c, rows in zip(counts, self._rows, strict=True)]
        columns = [d.neighbors for d in drawn]
        if self._options.with_eids:
            columns += _eids(drawn)
            send, recv = send * 2, recv * 2
        arrived = exchange_rows(self._state, columns, send, recv, "neighbours")
        num = len(drawn)
        with_eids = self._options.with_eids
        return [
            SampledNeighbors(
                count.to(torch.int64), neighbors, arrived[num + i] if with_eids else None
            )
            for i, (count, neighbors) in enumerate(zip(counts, arrived[:num], strict=True))
        ]

    def _arranged(self, number: int, drawn: SampledNeighbors) -> SampledNeighbors:
        """What was drawn for nodes grouped by owner, in the order in which they were given."""
        request, order = self._requests[number], self._rows[number].order
        counts, neighbors = drawn.counts, drawn.neighbors
        eids = next(iter(_eids([drawn])), None)
        if request.fanout == 0:
            counts = torch.zeros(request.nodes.numel(), dtype=torch.int64)
        elif order is not None:
            if eids is not None:
                _, eids = ungroup(order, counts, eids, self._idtype)
            counts, neighbors = ungroup(order, counts, neighbors, self._idtype)
        if eids is not None:
            eids = eids.to(self._idtype)
        return SampledNeighbors(counts, neighbors.to(self._idtype), eids)

    def _count_dtype(self, request: NeighborRequest) -> torch.dtype:
        """The smallest integer that holds a count; the same on all ranks."""
        most = self._edges.lists[request.etype, self._options.edge_dir].max_degree
        if self._options.replace:
            most = request.fanout
        elif request.fanout >= 0 and not self._options.labor:
            most = min(most, request.fanout)
        for dtype in (torch.uint8, torch.int16, torch.int32):
            if most <= torch.iinfo(dtype).max:
                return dtype
        return torch.int64


@dataclass(frozen=True)
class _ExcludedEdges:
    """Edges that are not to be drawn under one relation.

    Args:
        remote: Their ids as they travel, by rank.
        splits: Number of them for each rank; 0 in the own slot.
        own: Ids of those that may be this rank's.
    """

    remote: Tensor
    splits: list[int]
    own: Tensor | None


def _eids(groups: Sequence[SampledNeighbors]) -> list[Tensor]:
    return [g.eids for g in groups if isinstance(g.eids, Tensor)]


def _sums(counts: Tensor, splits: Sequence[int]) -> list[int]:
    """Sum of each group of counts."""
    return [int(group.sum(dtype=torch.int64)) for group in counts[: sum(splits)].split(splits)]


def _joined(groups: Sequence[SampledNeighbors], options: DrawOptions) -> SampledNeighbors:
    """What was drawn for several groups of nodes, as if it had been drawn at once."""
    return SampledNeighbors(
        torch.cat([g.counts for g in groups]),
        torch.cat([g.neighbors for g in groups]),
        torch.cat(_eids(groups)) if options.with_eids else None,
    )
